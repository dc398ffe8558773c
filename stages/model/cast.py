"""A model's folder in another number format, written tensor by tensor."""

from __future__ import annotations

from pathlib import Path

import torch

from stages.model.load import load_model, model_skeleton, write_checkpoint

FILE_BYTES = 2**32  # of one file, which is held in memory while it is written


def write_cast(source: Path, target: Path, dtype: torch.dtype) -> None:
    """Write the model in the folder ``source`` with parameters of ``dtype`` to ``target``. Saved
    buffers keep their dtype. Raises FilesDamaged and what transformers raises."""
    if (opened := model_skeleton(str(source), dtype=dtype)) is None:
        model, _ = load_model(str(source), dtype=dtype, seed=0)
        model.save_pretrained(target)
        return
    model, files = opened
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    # parameters that are made of several tensors have no name there
    sizes = {
        key: torch.empty_like(
            tensor, device="meta", dtype=dtype if name in parameters or not name else None
        )
        for key, name, tensor in files.tensors()
    }
    write_checkpoint(
        model,
        target,
        sizes,
        ((key, tensor) for key, _, tensor in files.tensors()),
        kind=type(model).__name__,
        dtype=dtype,
        file_bytes=FILE_BYTES,
    )
