"""Tensors as one rank holds them, and the storages that they lie in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate


class HasState(Protocol):
    """What of an optimizer has its tensors."""

    param_groups: list[dict[str, Any]]
    state: Any


def local_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of ``model`` by name as this rank holds them, tied ones once: local
    tensors of DTensors, or all."""
    return {name: local_part(parameter.detach()) for name, parameter in model.named_parameters()}


def training_state(optimizer: HasState) -> Iterator[torch.Tensor]:
    """Yield this rank's gradients and optimizer state, as local tensors."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield local_part(parameter.grad)
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, torch.Tensor):
                    yield from (part for _, part in plain_parts(value))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def plain_parts(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that ``tensor`` of this rank is made of, by name: of a quantised one its
    codes and scales, of a plain one itself, named ""."""
    local = local_part(tensor)
    if not hasattr(local, "__tensor_flatten__"):
        yield "", local
        return
    names, _ = local.__tensor_flatten__()
    for name in names:
        yield name, getattr(local, name)


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """Return the full tensor, which all ranks gather together: over dp first, as torch warns about a
    gather over both dimensions, which it does in this order too."""
    if not isinstance(parameter, DTensor):
        return parameter
    placements = parameter.placements
    for dim in range(1, len(placements)):
        parameter = parameter.redistribute(placements=[*[Replicate()] * dim, *placements[dim:]])
    return parameter.full_tensor()


def live_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the number of bytes of the storages of ``tensors``, shared ones once.

    A storage that was resized to 0 has none.
    """
    return sum(storage.nbytes() for storage in storages_of(tensors))


def separate(parameters: Iterable[nn.Parameter]) -> None:
    """Give each of ``parameters`` a storage of its own that can be resized: a model read from files
    may have mapped them."""
    for parameter in parameters:
        storage = parameter.untyped_storage()
        if not storage.resizable() or storage.nbytes() != parameter.nbytes:
            parameter.data = parameter.data.clone()


def empty(tensors: Iterable[torch.Tensor]) -> None:
    """Free the memory of ``tensors``. They keep their shapes and lose their values."""
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)


def storages_of(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages.setdefault(storage._cdata, storage)
    return list(storages.values())


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return all of ``storage`` as uint8 [n]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
