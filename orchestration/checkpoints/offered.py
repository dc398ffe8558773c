"""A checkpoint of a run, for the clients of a server of training calls.

RUN/checkpoints/step-20/adapter, or model ─▶ DATA/calls/checkpoints/RUN/weights/step-20/0 ─▶ tinker://RUN/weights/step-20
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

from safetensors import safe_open

from orchestration.calls.checkpoints import (
    PARTIAL,
    Checkpoint,
    check_name,
    folder_bytes,
    path_of,
    write_facts,
    write_folder,
)
from orchestration.calls.interface import CheckpointInfo
from orchestration.checkpoints.checkpoint import MODEL, open_checkpoint, whole
from orchestration.checkpoints.held import held
from orchestration.recipe.loading.paths import name_of
from pipeline.problems import Problem
from stages.adapters.export import PREFIX, WEIGHTS
from stages.adapters.options import ADAPTER
from stages.calls.base import is_attention
from stages.calls.interface import CallRefused, ModelOptions
from stages.model.manifest import MANIFEST, STATE

CHECKPOINTS = "checkpoints"


async def offer_checkpoint(source: Path, folder: Path, owner: str, base: str) -> str:
    """Copy the weights of the checkpoint in ``source``, or of the newest one of the run there, for
    ``owner``, and return their path for clients.

    ``folder``: of the calls of a server, which may be running; ``base``: the name that the trained
    base model has there. Raises CallRefused, CheckpointUnusable and OSError.
    """
    with held(lambda: open_checkpoint(_newest(source))) as start:
        assert start is not None, "it was opened"
        checkpoint = start.path
        version = start.version
        run = check_name(name_of(checkpoint.parent.parent.name))
        name = check_name(checkpoint.name)
        part = ADAPTER if (checkpoint / ADAPTER).is_dir() else MODEL
        options = _options(checkpoint / ADAPTER) if part == ADAPTER else ModelOptions(rank=0)
        path = path_of(run, "weights", name)
        target = folder / CHECKPOINTS / run / "weights" / name / "0"
        info = CheckpointInfo(path, run, "weights", name, time.time(), 0, options, base)

        async def copy(partial: Path) -> None:
            shutil.copytree(checkpoint / part, partial / part)
            for file in (STATE, MANIFEST):
                if (checkpoint / file).is_file():
                    shutil.copy2(checkpoint / file, partial)
            sized = replace(info, bytes=folder_bytes(partial))
            write_facts(partial, Checkpoint(owner, "", version, target, sized))

        partials = folder / CHECKPOINTS / PARTIAL
        partials.mkdir(parents=True, exist_ok=True)
        await write_folder(partials / f"{run}-{name}", target, copy)
        return path


def _newest(source: Path) -> Path:
    """Return the folder of the checkpoint ``source``, or of the newest one of the run. Raises
    CallRefused."""
    source = source.resolve()
    if (source / STATE).is_file():
        return source
    checkpoints = whole(source / CHECKPOINTS)
    if not checkpoints:
        wrong = "has no checkpoint"
        fix = "give the folder of a run, or of one of its checkpoints"
        raise CallRefused(Problem("run", str(source), wrong, fix))
    return checkpoints[-1]


def _options(adapter: Path) -> ModelOptions:
    """Return the options of a model that loads ``adapter``."""
    rank = int(json.loads((adapter / "adapter_config.json").read_bytes())["r"])
    with safe_open(adapter / WEIGHTS, "pt") as file:
        layers = {name.rpartition(".lora_")[0] for name in file.keys()}  # noqa: SIM118
    head = {layer for layer in layers if "." not in layer.removeprefix(PREFIX)}
    attention = {layer for layer in layers if is_attention(layer)}
    return ModelOptions(
        rank,
        attention=bool(attention),
        mlp=bool(layers - attention - head),
        head=bool(head),
    )
