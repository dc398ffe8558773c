"""Master weights, bounds of gradients, and the way back to the state before a train batch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn

from stages import device as devices

ALIGN = 512  # bytes, of a tensor in host memory: what copy engines and caches like


def zero_gradients(parameters: Collection[nn.Parameter]) -> None:
    """Set the gradients of ``parameters`` to zero.

    With a learning rate of 0, an optimizer then changes neither weights nor moments of zero, but
    counts the step as it does for all others.
    """
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.zero_()


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether no value is infinite or no number."""
    ends = [
        end.float() for tensor in tensors if tensor.numel() for end in tensor.detach().aminmax()
    ]
    return not ends or bool(torch.stack(ends).isfinite().all())


class Undo:
    """Tensors as they were before a train batch, in host memory that is reused for the next one.

    On an accelerator they are copied beside the first forward and backward pass.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = devices.stream(device)
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def is_kept(self) -> bool:
        """Return whether there is something to put back."""
        return bool(self._copies)

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin to copy ``tensors``, which may change after :meth:`wait`."""
        sizes = [-(-tensor.nbytes // ALIGN) * ALIGN for tensor in tensors]
        if sum(sizes) > self._memory.numel():
            # the old one first, so that both are never there
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = devices.host_empty(sum(sizes), self._device)
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        offset = 0
        copies = []
        with self._stream or nullcontext():
            for tensor, size in zip(tensors, sizes, strict=True):
                copy = (
                    self._memory[offset : offset + tensor.nbytes]
                    .view(tensor.dtype)
                    .view(tensor.shape)
                )
                copies.append((tensor, copy.copy_(tensor, non_blocking=True)))
                offset += size
        self._copies = copies

    def wait(self) -> None:
        """Let what is computed from now on wait for the copies."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._stream)

    def put_back(self) -> None:
        """Give the tensors the values that they had, and forget these."""
        self.wait()
        with torch.no_grad():
            for tensor, copy in self._copies:
                tensor.copy_(copy, non_blocking=True)
        self.forget()

    def forget(self) -> None:
        self._copies = []

    def close(self) -> None:
        """Release the memory. May be called again."""
        self.forget()
        self._memory = torch.empty(0, dtype=torch.uint8)


def bound_gradients(
    parameters: Collection[nn.Parameter], limit: float | None, norm: torch.Tensor | None = None
) -> float:
    """Scale gradients of this 2-norm (default: their own) down to ``limit``; those within it cost
    no pass over memory. Returns the norm before."""
    if norm is None:
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if limit is not None and limit / (float(norm) + 1e-6) < 1:
        nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return float(norm)


def master_weights(
    model: nn.Module, trained: Mapping[str, nn.Parameter], compute: torch.dtype
) -> dict[str, nn.Parameter]:
    """Make the parameters of ``model`` copies in ``compute``; buffers keep their dtype.

    Returns the master weights, by the names of ``trained``: what these parameters were. They get
    the gradients of their copies, added up in their own dtype.
    """
    masters = {name: nn.Parameter(copy.detach()) for name, copy in trained.items()}
    for parameter in model.parameters():
        parameter.data = parameter.detach().to(compute)
    for name, copy in trained.items():
        copy.register_post_accumulate_grad_hook(partial(_pass_gradient_on, masters[name]))
    return masters


def _pass_gradient_on(master: nn.Parameter, copy: torch.Tensor) -> None:
    assert copy.grad is not None
    if master.grad is None:
        master.grad = copy.grad.to(master.dtype)
    else:
        master.grad += copy.grad
    copy.grad = None


@torch.no_grad()
def renew(copies: Mapping[str, nn.Parameter], masters: Mapping[str, nn.Parameter]) -> None:
    """Make ``copies`` those of the present ``masters``."""
    for name, copy in copies.items():
        copy.copy_(masters[name])
