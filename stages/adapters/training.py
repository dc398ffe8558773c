"""Adapters in a model that is trained: put there by peft, switched off for the logprobs of the
model without them."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pipeline.compat.extras import extra
from stages.adapters.names import down_of, peft_config, up_of
from stages.adapters.options import AdapterOptions, is_adapted
from stages.model.files import copy_part


def add_adapters(model: Any, options: AdapterOptions) -> dict[str, Any]:
    """Freeze ``model``, and give it adapters with their first values: on the device ``meta`` where
    the model is there, and :func:`fill_adapters` gives them values later. Returns
    :func:`peft_config`. Raises ValueError."""
    with extra("lora"):
        from peft import LoraConfig, inject_adapter_in_model

    config = peft_config(model, options)
    is_empty = model.device.type == "meta"
    with warnings.catch_warnings(), torch.device("meta"):
        # the device is of this thread alone, and no random numbers are drawn
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
        inject_adapter_in_model(LoraConfig(**config), model)
    dtype = getattr(torch, options.dtype)
    for layer in adapted(model).values():
        device = layer.base_layer.weight.device
        for matrix in (layer.lora_A["default"], layer.lora_B["default"]):
            matrix.weight = nn.Parameter(
                torch.empty(matrix.weight.shape, dtype=dtype, device=device)
            )
    if not is_empty:
        fill_adapters(model, options)
    return config


@torch.no_grad()
def fill_adapters(model: nn.Module, options: AdapterOptions) -> None:
    """Give the adapters of ``model`` their first values, which depend on the seed and the names
    alone: of a DTensor, what this rank holds of it. A is uniform as a linear layer's weight is, B
    is 0."""
    tensors = dict(model.named_parameters())
    for name in adapted(model):
        down = tensors[down_of(name)]
        up = tensors[up_of(name)]
        # of a seed, the generator of a CPU reads 32 bits alone
        seed = zlib.crc32(name.encode(), options.seed % 2**32)
        random = torch.Generator().manual_seed(seed)
        bound = 1 / math.sqrt(down.shape[1])
        copy_part(down, torch.empty(down.shape).uniform_(-bound, bound, generator=random))
        copy_part(up, torch.zeros(up.shape))


def adapted(model: nn.Module) -> dict[str, Any]:
    """Return the layers of ``model`` with an adapter, by name."""
    return {name: module for name, module in model.named_modules() if is_adapted(module)}


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Let ``model`` compute without its adapters inside the context. peft's own switch would also
    unfreeze or freeze them."""
    layers = adapted(model).values()
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
