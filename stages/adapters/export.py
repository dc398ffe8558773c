"""Adapters as files: those that ``peft.PeftModel.from_pretrained`` opens, and merged into the
model's weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from stages.adapters.names import down_of, up_of
from stages.model.files import WeightFiles, plain_name
from stages.model.load import checkpoint_tensors, write_checkpoint
from stages.model.manifest import verify_part

FILE_BYTES = 2**28  # of one file of the merged model, which is held in memory while it is written
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of peft's names


def save_adapter(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Write ``tensors``, matrices of adapters by name, and ``config``
    (:func:`~stages.adapters.names.peft_config`) in peft's format."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(
        json.dumps({**config, "inference_mode": True}, indent=2)
    )
    named = {
        PREFIX + name.replace(".default.", "."): value.cpu().contiguous()
        for name, value in tensors.items()
    }
    save_file(named, folder / WEIGHTS, metadata={"format": "pt"})


def load_adapter(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the matrices that :func:`save_adapter` has written, by their names in the model.

    Those of a checkpoint are verified. Raises FilesDamaged.
    """
    verify_part(folder)
    tensors = load_file(folder / WEIGHTS)
    return {
        name.removeprefix(PREFIX).removesuffix("weight") + "default.weight": value.to(dtype)
        for name, value in tensors.items()
    }


def base_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the weights and saved buffers of ``model``, which has adapters, by their names without
    them, tied ones once."""
    once = {
        name: value.detach() for name, value in model.named_parameters() if not value.requires_grad
    }
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    fixed = {name: value for name, value in model.state_dict().items() if name not in known}
    return {plain_name(name): value for name, value in (once | fixed).items()}


@torch.no_grad()
def write_merged(
    path: Path,
    model: PreTrainedModel,
    adapters: Mapping[str, torch.Tensor],
    scale: float,
    *,
    base: Mapping[str, torch.Tensor] | WeightFiles | None = None,
    kind: str = "",
) -> None:
    """Write a Hugging Face checkpoint of ``model``, which has adapters, without them: with W +
    ``scale`` · B·A, summed in float32, in place of each W that has one. An output head that has
    one, and is the embedding in ``model``, becomes a matrix of its own. ``base``:
    :func:`base_weights`, or the files that they were read from; default: those in ``model``.
    ``kind``: the class of the model, where its own is another one."""
    dtype = next(iter(adapters.values())).dtype
    ties = getattr(model, "all_tied_weights_keys", {})
    untied = {n: source for n, source in ties.items() if down_of(_layer(n)) in adapters}

    def saved(name: str, value: torch.Tensor) -> torch.Tensor:
        layer = _layer(name)
        if down_of(layer) not in adapters:
            return value
        down, up = (
            adapters[name_of(layer)].to(value.device, torch.float32) for name_of in (down_of, up_of)
        )
        return torch.addmm(value.float(), up, down, alpha=scale)

    values: Iterator[tuple[str, torch.Tensor]]
    if isinstance(base, WeightFiles):
        sizes = {
            key: torch.empty(shape, dtype=dtype, device="meta")
            for key, shape in base.shapes().items()
        }
        keys = {name: key for key, name, _ in base.tensors()}
        heads = {source: name for name, source in untied.items() if name not in keys}
        sizes |= {head: sizes[keys[source]] for source, head in heads.items()}
        values = chain(
            ((key, saved(name, value)) for key, name, value in base.tensors()),
            (
                (heads[source], saved(heads[source], value))
                for _, source, value in base.tensors()
                if source in heads
            ),
        )
    else:
        held = dict(base or base_weights(model))
        held |= {name: held[source] for name, source in untied.items() if name not in held}
        parameters = model.named_parameters(remove_duplicate=False)
        learned = {plain_name(name) for name, _ in parameters}
        empty = {
            n: torch.empty_like(v, device="meta", dtype=dtype if n in learned else None)
            for n, v in held.items()
        }
        sizes = checkpoint_tensors(model, empty)
        values = chain.from_iterable(
            checkpoint_tensors(model, {name: saved(name, value)}).items()
            for name, value in held.items()
        )
    write_checkpoint(
        model,
        path,
        sizes,
        values,
        kind=kind or type(model).__name__,
        dtype=dtype,
        file_bytes=FILE_BYTES,
        untied=bool(untied),
    )


def _layer(weight: str) -> str:
    return weight.removesuffix(".weight")
