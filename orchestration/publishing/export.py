"""A checkpoint of a run as a folder that others open: weights, tokenizer, recipe, metrics, card.

RUN, STEP ─▶ its checkpoint, here or at checkpoint.url ─▶ digests ─▶ weights, tokenizer ─┐
recipe.json, without what is of this machine ─▶ recipe.toml ─────────────────────────────┤
events up to STEP ─▶ metrics.jsonl, plot ────────────────────────────────────────────────┤
all of them ─▶ README.md ────────────────────────────────────────────────────────────────┴▶ .FOLDER.….partial ─▶ FOLDER
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from orchestration.checkpoints.checkpoint import MODEL, Checkpoint, newest
from orchestration.checkpoints.held import held
from orchestration.checkpoints.recorded import of_version
from orchestration.disk import sync
from orchestration.history.events_file import METRICS, read_metrics
from orchestration.history.facts import made_after
from orchestration.history.lines import line_of
from orchestration.publishing.card import ExportedModel, base_of, write_card
from orchestration.publishing.shared_recipe import write_recipe
from orchestration.recipe.loading.load import recorded_recipe
from orchestration.recipe.schema import Recipe
from orchestration.run.changes import recipe_until
from orchestration.state.lock import RunError
from orchestration.state.paths import RECIPE, store_url
from pipeline.compat.extras import ExtraMissing
from pipeline.data.events import Event
from pipeline.locks import locked
from stages.adapters.options import ADAPTER
from stages.model.manifest import verify_part

What = Literal["merged", "adapter"]
DType = Literal["bfloat16", "float16", "float32"]
Plot = Callable[[Path, Recipe, Sequence[Event]], object]

# of training; others tell of processes, machines and prompts
KINDS = ("state", "step", "evaluation", "alarm", "ledger")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "config.json")
ADAPTER_CONFIG = "adapter_config.json"


class ExportRefused(RunError):
    """An export cannot be made. The message names the argument, its value and what to do."""


def export(
    run: Path,
    to: Path,
    version: int | None = None,
    *,
    what: What = "merged",
    dtype: DType | None = None,
    base: str = "",
    plot: Plot,
) -> tuple[int, Sequence[str]]:
    """Write the model of the run in the folder ``run`` to the folder ``to``, which appears whole.
    Returns its policy version, and remarks on what the folder lacks.

    ``version``: of its checkpoint (default: the newest); ``dtype``: of the weights (default: as
    they are); ``base``: the base model's name on the Hub, where its folder does not say it;
    ``plot`` draws events to a path. Raises RunError, RecipeError, FilesDamaged, CheckpointUnusable,
    Locked and OSError."""
    if to.is_symlink() or (to.exists() and (to.is_file() or any(to.iterdir()))):
        raise ExportRefused(f"--to: {to} is there already; give a new folder, or an empty one")
    recipe = recorded_recipe(run / RECIPE)
    if what == "adapter" and not recipe.adapters:
        raise ExportRefused(
            "--what: 'adapter', and the run has trained all weights (model.lora.rank = 0); "
            "leave it out"
        )
    base_model = base_of(recipe.model.source, base)
    parts = [MODEL, ADAPTER] if what == "adapter" else [MODEL]
    choose = functools.partial(_checkpoint, run, store_url(recipe, run), version, parts)
    with appearing(to) as folder:
        with held(choose) as checkpoint:
            if checkpoint is None:
                raise ExportRefused(
                    f"run: {run} has no checkpoint yet; wait for one (checkpoint.every), or ask a "
                    f"run of a service for one with `asyncdock runs checkpoint`"
                )
            model = ExportedModel(to.name, checkpoint.version, what, dtype or "", base_model)
            for part in parts:
                verify_part(checkpoint.path / part)
            _write_model(checkpoint.path, folder, recipe, model)
        recipe, changes = recipe_until(run, checkpoint.version)
        outside = write_recipe(recipe, folder / "recipe.toml")
        events = list(events_until(run / METRICS, checkpoint.version))
        (folder / METRICS).write_bytes(b"".join(map(line_of, events)))
        notes = [f"recipe.toml names what {to.name} lacks: {line}" for line in outside]
        if changes:
            keys = ", ".join(dict.fromkeys(change.key for change in changes))
            notes.append(
                f"settings were changed on the way ({keys}): recipe.toml has the last ones"
            )
        if what == "adapter" and not base_model.for_peft:
            notes.append(f"{ADAPTER_CONFIG} names the base by its path here, as no --base is given")
        try:
            plot(folder / "reward.png", recipe, events)
        except ExtraMissing as missing:
            notes.append(f"there is no plot: {missing}")
        notes += write_card(folder, model, recipe, changes, outside, events)
    return checkpoint.version, notes


def _checkpoint(
    run: Path, url: str, version: int | None, parts: Sequence[str]
) -> Checkpoint | None:
    """Return the checkpoint of ``version``, or the newest, copied from ``url`` where only that has
    it."""
    folder = run / "checkpoints"
    if version is None:
        return newest(folder, url, parts=parts)
    return of_version(folder, url, version)


@contextlib.contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """Yield a folder to write to, which becomes ``folder`` when the block ends, with all of its
    files on the disk. Raises Locked where another process writes it."""
    partial = folder.with_name(f".{folder.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    with locked(partial / "lock"):
        content = partial / folder.name
        shutil.rmtree(content, ignore_errors=True)  # of a killed process
        try:
            content.mkdir()
            mode = content.stat().st_mode  # copies have that of their source
            yield content
            for path in (*content.rglob("*"), content):
                path.chmod(mode if path.is_dir() else mode & 0o666)
                sync(path)
            content.rename(folder)
            sync(folder.parent)
        finally:
            shutil.rmtree(partial)


def _write_model(checkpoint: Path, folder: Path, recipe: Recipe, model: ExportedModel) -> None:
    """Write the weights of ``checkpoint`` with what is beside them: tokenizer, chat template,
    generation config."""
    is_adapter = model.what == "adapter"
    left_out = WEIGHTS if is_adapter or model.dtype else ()
    shutil.copytree(
        checkpoint / MODEL, folder, ignore=shutil.ignore_patterns(*left_out), dirs_exist_ok=True
    )
    if is_adapter:
        import torch

        from stages.adapters.export import load_adapter, save_adapter

        config = json.loads((checkpoint / ADAPTER / ADAPTER_CONFIG).read_bytes())
        dtype = getattr(torch, model.dtype or recipe.trained_dtype)
        # by the name that peft loads it by
        config |= model.base.for_peft
        save_adapter(folder, config, load_adapter(checkpoint / ADAPTER, dtype))
    elif model.dtype:
        import torch

        from stages.model.load import load_model

        dtype = getattr(torch, model.dtype)
        weights, _ = load_model(str(checkpoint / MODEL), dtype=dtype, seed=0)
        weights.save_pretrained(folder)


def events_until(metrics: Path, version: int) -> Iterator[Event]:
    """Yield the events of training that led to policy ``version``, without texts of samples."""
    is_later = False
    for event in read_metrics(metrics):
        is_late = made_after(version, event)
        is_later = is_later or (event.kind == "step" and is_late)
        if event.kind not in KINDS or is_late or (event.kind == "state" and is_later):
            continue
        if event.kind == "evaluation":
            event = replace(event, data={**event.data, "samples": []})
        yield event
