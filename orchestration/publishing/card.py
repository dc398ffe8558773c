"""The model card of an export: what was trained on what, how, and how well (card.md).

recipe, events ─▶ data, method, settings, results held out ─▶ card.md ─▶ README.md
the base model's README.md ─▶ its licence
the algorithm's class ─▶ its citation
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from orchestration.recipe.schema import Recipe
from orchestration.run.changes import Change
from pipeline.compat.extras import is_installed
from pipeline.data.events import EvaluationEvent, Event
from stages.adapters.options import LORA_CITATION
from stages.algorithms.registry import algorithm_class
from stages.prompts.rows.options import RowOptions

CARD = "README.md"
HUB_NAMES = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}
LICENCE_KEYS = ("license", "license_name", "license_link")
LIBRARIES = ("torch", "transformers", "tokenizers", "peft", "vllm", "datasets")


@dataclass(frozen=True)
class BaseModel:
    """The model ``source`` that was trained: its ``name`` and ``revision`` on the Hub ("": not
    known), and what its card says of its licence. ``for_peft``: what an adapter's config says of
    it, beside its path."""

    source: str
    name: str
    revision: str
    licence: Mapping[str, Any]
    for_peft: Mapping[str, Any]


@dataclass(frozen=True)
class ExportedModel:
    """Policy ``version``: ``what`` of it, in ``dtype`` ("": as trained)."""

    name: str
    version: int
    what: str
    dtype: str
    base: BaseModel


def base_of(source: str, name: str = "") -> BaseModel:
    """Return what the folder of the model ``source`` says of it. ``name``: on the Hub, where that
    is known otherwise."""
    from huggingface_hub import ModelCard

    path = Path(source).expanduser()
    licence = dict[str, Any]()
    with contextlib.suppress(Exception):  # a README.md may hold any text
        values = ModelCard.load(path / CARD).data
        licence = {key: values[key] for key in LICENCE_KEYS if values.get(key)}
    cached = _cached_name(path)
    revision = path.name if cached else ""
    name = name or cached
    for_peft = {"base_model_name_or_path": name, "revision": revision or None} if name else {}
    return BaseModel(source, name or HUB_NAMES.get(source, ""), revision, licence, for_peft)


def write_card(
    folder: Path,
    model: ExportedModel,
    recipe: Recipe,
    changes: Sequence[Change],
    outside: Sequence[str],
    events: Sequence[Event],
) -> Sequence[str]:
    """Write the card of ``model`` into ``folder``, which has its other files. ``changes``: of the
    recipe on the way; ``outside``: what it names and the folder lacks. Returns remarks on what the card cannot say."""
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    evaluations = [EvaluationEvent.of(event.data) for event in events if event.kind == "evaluation"]
    datasets = list(filter(None, map(_dataset, recipe.prompts.parts().values())))
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=(datasets or [recipe.name])[0],
            dataset_name=recipe.name,
            dataset_split="held out",
            metric_type="mean_reward",
            metric_name=f"mean reward, {recipe.evaluate.sampling}",
            metric_value=evaluation.reward_mean,
        )
        for evaluation in evaluations[-1:]
    ]
    algorithm = recipe.algorithm.name
    # a class of the user is not imported
    citation = "" if ":" in algorithm else inspect.cleandoc(algorithm_class(algorithm).citation)
    data = ModelCardData(
        base_model=model.base.name or None,
        datasets=datasets or None,
        library_name="peft" if model.what == "adapter" else "transformers",
        model_name=model.name,
        pipeline_tag="text-generation",
        tags=["generated_from_trainer", "asyncdock", re.sub(r"\W+", "-", algorithm)],
        eval_results=results or None,
        **model.base.licence,
    )
    card = ModelCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("card.md")),
        model=model,
        recipe=recipe,
        changes=changes,
        files=[path.name for path in folder.iterdir()],
        datasets=datasets,
        outside=outside,
        evaluations=evaluations[:1] + evaluations[1:][-1:],
        paper=_paper(citation),
        citations=[citation] * bool(citation) + [LORA_CITATION] * bool(recipe.adapters),
        versions={name: version(name) for name in LIBRARIES if is_installed(name)},
        asyncdock=version("asyncdock"),
    )
    card.save(folder / CARD)
    lacks = {"base_model (give it by --base)": model.base.name, "license": model.base.licence}
    return [
        f"{CARD} has no {key}, as {model.base.source} does not say it"
        for key, value in lacks.items()
        if not value
    ]


def _dataset(options: RowOptions) -> str:
    """Return the name on the Hub of the data set that ``options`` names; "" where it is not
    known."""
    path = Path(options.path or os.devnull)
    infos = [info.read_text() for info in path.rglob("dataset_info.json")]  # of `save_to_disk`
    names = re.findall(r'"hf://datasets/([^@"]+)@', "".join(infos[:1]))
    return _cached_name(path) or (names or [""])[0]


def _cached_name(path: Path) -> str:
    """Return the name on the Hub of the repository that ``path`` is a snapshot of, or in one; ""
    outside of the Hub's cache."""
    repositories = [part for part in path.parts if part.startswith(("models--", "datasets--"))]
    return "/".join(repositories[-1].split("--")[1:]) if "snapshots" in path.parts else ""


def _paper(citation: str) -> tuple[str, str]:
    """Return the title and the URL of the paper of ``citation``; empty without one."""
    title = re.search(r"title = \{(.+?)\},\n", citation, re.DOTALL)
    eprint = re.search(r"eprint = \{(.+?)\}", citation)
    if title is None or eprint is None:
        return "", ""
    words = re.sub(r"[{}]", "", title[1]).split()
    return " ".join(words), f"https://huggingface.co/papers/{eprint[1]}"
