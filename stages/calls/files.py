"""The checkpoints of called models, which recipes begin with too.

    FOLDER/   adapter/    of an adapter: for peft, in float32
              model/      a Hugging Face model, merged with the adapter: [model] source = "FOLDER/model"
              train/      weights as they are trained, and the optimizer's moments, bit for bit
              run.json    the optimizer steps, and the options of the model
              digests.json

A folder has its name when all of it is on the disk. What is read beside these: an adapter of peft,
the checkpoint of a run, for rank 0 a Hugging Face model.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from stages.adapters.export import load_adapter, save_adapter, write_merged
from stages.adapters.names import peft_config, up_of
from stages.adapters.options import ADAPTER
from stages.calls.base import TorchBase, adapter_options
from stages.calls.interface import ALPHA, CallRefused, ModelOptions
from stages.engines.torch.train import TorchTrainEngine
from stages.model import manifest
from stages.model.load import load_model
from stages.model.manifest import STATE, FilesDamaged
from stages.resharding.tensors import whole

MODEL = "model"
TRAIN = "train"
WEIGHTS = "weights.safetensors"
MOMENTS = "optimizer.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
PARTS = ("exp_avg", "exp_avg_sq")


def save(
    folder: Path,
    engine: TorchTrainEngine,
    base: TorchBase,
    options: ModelOptions,
    *,
    optimizer: bool,
    merged: bool,
) -> None:
    """Write the model of ``engine`` as ``folder``, in place of what it has. ``merged``: with the
    Hugging Face model, which takes as much room as the base. All ranks call this, and the first one
    writes, when all others have done their part."""
    state = _whole_state(engine, optimizer=optimizer)
    if engine.parallel.coordinates.rank:
        return
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / TRAIN).mkdir(parents=True)
    save_file(state["model"], partial / TRAIN / WEIGHTS)
    if optimizer:
        moments = {f"{part}.{name}": value for part in PARTS for name, value in state[part].items()}
        save_file(moments, partial / TRAIN / MOMENTS)
    adapters = adapter_options(base.model, options)
    if adapters is not None:
        save_adapter(partial / ADAPTER, peft_config(base.model, adapters), state["model"])
    if merged:
        if adapters is None:
            engine.save_pretrained(partial / MODEL, state)
        else:
            matrices = {name: value.to(base.dtype) for name, value in state["model"].items()}
            write_merged(
                partial / MODEL,
                engine.model,
                matrices,
                adapters.scale,
                base=base.weights,
                kind=engine.packed_model.kind,
            )
        base.tokenizer.save_pretrained(partial / MODEL)
    document = {"version": engine.step, "counters": {}, "remake": [], "options": asdict(options)}
    (partial / STATE).write_text(json.dumps(document, indent=1))
    manifest.write(partial)
    for path in (*partial.rglob("*"), partial):
        _sync(path)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)
    _sync(folder.parent)


def load(folder: Path, engine: TorchTrainEngine, options: ModelOptions, *, optimizer: bool) -> None:
    """Load ``folder`` into ``engine``, whose model has ``options``; gradients are forgotten. Raises
    CallRefused, on all ranks, and changes nothing then."""
    refusal: CallRefused | None = None
    state: dict[str, Any] = {}
    try:
        state = _read(folder, engine, options, optimizer=optimizer)
    except CallRefused as error:
        refusal = error
    if not engine.parallel.all_true(refusal is None):
        raise refusal or _refused(folder, "cannot be read by another rank", "load another one")
    engine.load_state_dict(state)
    engine.forget_gradients()


def _read(
    folder: Path, engine: TorchTrainEngine, options: ModelOptions, *, optimizer: bool
) -> dict[str, Any]:
    """Return what ``engine`` loads of ``folder``. Raises CallRefused."""
    current = engine.state_dict()
    zeros = {name: torch.zeros_like(value) for name, value in current[PARTS[0]].items()}
    state: dict[str, Any] = {**current, **dict.fromkeys(PARTS, zeros), "step": 0}
    try:
        manifest.verify_part(folder)
        loaded = _weights(folder, options)
        _refuse_others(folder, current["model"], loaded)
        _refuse_untied(folder, engine, loaded)
        state["model"] = {name: loaded[name] for name in current["model"]}
        if optimizer:
            if not (folder / TRAIN / MOMENTS).is_file():
                fix = "save it with the optimizer, or load the weights alone"
                raise _refused(folder, "has no state of the optimizer", fix)
            moments = load_file(folder / TRAIN / MOMENTS)
            for part in PARTS:
                state[part] = {name: moments[f"{part}.{name}"] for name in current[part]}
            state["step"] = int(json.loads((folder / STATE).read_bytes())["version"])
    except (FilesDamaged, SafetensorError, OSError, LookupError, ValueError) as error:
        if isinstance(error, CallRefused):
            raise
        raise _refused(folder, f"cannot be read ({error})", "load another checkpoint") from error
    return state


def _weights(folder: Path, options: ModelOptions) -> dict[str, torch.Tensor]:
    """Return the weights in ``folder`` by name."""
    if (folder / TRAIN / WEIGHTS).is_file():
        return load_file(folder / TRAIN / WEIGHTS)
    places = (folder / ADAPTER, folder)
    adapter = next((place for place in places if (place / ADAPTER_CONFIG).is_file()), None)
    if options.rank and adapter is not None:
        return _adapter_weights(adapter, options)
    if options.rank or adapter == folder:
        fix = "give the folder of an adapter, or create the model with rank 0"
        raise _refused(folder, f"has no adapter of rank {options.rank}", fix)
    model = folder / MODEL if (folder / MODEL).is_dir() else folder
    return dict(load_model(str(model), dtype=torch.float32, seed=0)[0].state_dict())


def _adapter_weights(folder: Path, options: ModelOptions) -> dict[str, torch.Tensor]:
    """Return peft's matrices in ``folder``, scaled as if their alpha were :data:`ALPHA`."""
    config: Mapping[str, Any] = json.loads((folder / ADAPTER_CONFIG).read_bytes())
    if config.get("peft_type") != "LORA" or config.get("use_dora") or config.get("bias") != "none":
        raise _refused(folder, "is no plain LoRA without biases", "give one")
    rank = int(config["r"])
    if rank != options.rank:
        fix = f"create the model with rank {rank}"
        raise _refused(folder, f"has rank {rank}, and the model {options.rank}", fix)
    factor = float(config["lora_alpha"]) / ALPHA
    if config.get("use_rslora"):
        factor *= math.sqrt(rank)
    tensors = load_adapter(folder, torch.float32)
    return {
        name: value * factor if name.endswith(up_of("")) else value
        for name, value in tensors.items()
    }


def _refuse_others(
    folder: Path, mine: Mapping[str, torch.Tensor], loaded: Mapping[str, torch.Tensor]
) -> None:
    """Raise CallRefused unless ``loaded`` has all tensors of ``mine``, in their shapes."""
    for name, value in mine.items():
        if name not in loaded or loaded[name].shape != value.shape:
            there = [*loaded[name].shape] if name in loaded else "missing"
            wrong = f"is of another model: {name} is {there}, not {[*value.shape]}"
            raise _refused(
                folder, wrong, "create the model with the options that it was saved with"
            )
        if not bool(loaded[name].isfinite().all()):
            raise _refused(folder, f"has values of {name} that are not finite", "load another one")
    if len(extra := loaded.keys() - mine.keys()) and any("lora_" in name for name in extra):
        wrong = f"has adapters on layers that the model has none on, {sorted(extra)[0]}"
        raise _refused(folder, wrong, "create the model with the options that it was saved with")


def _refuse_untied(
    folder: Path, engine: TorchTrainEngine, loaded: Mapping[str, torch.Tensor]
) -> None:
    """Raise CallRefused where ``loaded`` has several values of one parameter of the model."""
    names = {parameter: name for name, parameter in engine.model.named_parameters()}
    for name, parameter in engine.model.named_parameters(remove_duplicate=False):
        first = names[parameter]
        if name in loaded and first in loaded and not torch.equal(loaded[name], loaded[first]):
            wrong = f"has a {name} of its own, and the model's is {first}"
            raise _refused(folder, wrong, "load an adapter, or serve this model as a base")


def _whole_state(engine: TorchTrainEngine, *, optimizer: bool) -> dict[str, Any]:
    """Return the engine's state, whole and on the CPU, on the first rank."""
    state = engine.state_dict()
    whole_state: dict[str, Any] = {}
    for part in ("model", *(PARTS if optimizer else ())):
        whole_state[part] = {}
        for name, sharded in state[part].items():
            value = whole(sharded.detach())
            if engine.parallel.coordinates.rank == 0:
                whole_state[part][name] = value.cpu().contiguous()
    return whole_state


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refused(folder: Path, wrong: str, fix: str) -> CallRefused:
    return CallRefused.of("path", folder.name, wrong, fix)
