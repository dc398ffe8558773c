"""AdamW, its learning rate, master weights, and the way back to the state before a train batch."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from stages import device as devices

Schedule = Literal["constant", "linear", "cosine"]
NORM = re.compile(r"norm|^ln(_|$)")  # in the name of a module
ALIGN = 512  # bytes, of a tensor in host memory: what copy engines and caches like


def learning_rate_at(
    step: int,
    *,
    peak: float,
    total_steps: int,
    warmup_steps: int,
    schedule: Schedule,
    floor: float = 0.0,
) -> float:
    """Return the learning rate of train batch ``step`` (from 0; skipped ones count): it rises over
    ``warmup_steps`` to ``peak`` at batch ``warmup_steps - 1``, then is constant, or falls to
    ``floor`` × ``peak`` at batch ``total_steps``.

    >>> [learning_rate_at(s, peak=1.0, total_steps=6, warmup_steps=2, schedule="linear") for s in range(7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    share = 1 - progress if schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (floor + (1 - floor) * share if floor else share)


def is_decayed(name: str, parameter: torch.Tensor) -> bool:
    """Return whether weight decay reaches ``parameter``: the matrices of linear layers, embeddings,
    routers, adapters and stacked experts. Biases and the scales of norms are none of them, whatever
    their shape is: the biases of stacked experts are [experts, features], and norms of queries and
    keys may be [heads, features]."""
    *owners, leaf = name.lower().split(".")
    of_norm = bool(owners) and NORM.search(owners[-1]) is not None
    return parameter.ndim >= 2 and not leaf.endswith("bias") and not of_norm


def learning_rates_at(
    version: int, schedule: Mapping[str, Any], peaks: tuple[float, float], policy_begins: int
) -> tuple[float, float]:
    """Return the learning rates of the policy and of its value head for the train batch
    ``version``.

    ``schedule``: arguments of :func:`learning_rate_at`. The value head's rate goes by it from the
    first train batch on; the policy's from ``policy_begins`` on, and is 0 before. ``peaks``: of the
    policy and of the value head."""
    of_policy = {
        **schedule,
        "peak": peaks[0],
        "total_steps": schedule["total_steps"] - policy_begins,
    }
    policy_rate = (
        learning_rate_at(version - policy_begins, **of_policy) if version >= policy_begins else 0.0
    )
    return policy_rate, learning_rate_at(version, **{**schedule, "peak": peaks[1]})


def adamw(
    parameters: Mapping[str, nn.Parameter],
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> torch.optim.AdamW:
    """Make the optimizer of ``parameters``, by name; see :func:`is_decayed`."""
    decayed = [p for name, p in parameters.items() if is_decayed(name, p)]
    others = [p for name, p in parameters.items() if not is_decayed(name, p)]
    options = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    try:
        return torch.optim.AdamW(options, lr=learning_rate, betas=betas, fused=True)
    except RuntimeError:  # this device has no fused kernel
        return torch.optim.AdamW(options, lr=learning_rate, betas=betas)


def add_value_head(
    optimizer: torch.optim.AdamW, head: Mapping[str, nn.Parameter], weight_decay: float
) -> None:
    """Add the ``head`` of values, by name, whose learning rate may be another one
    (:func:`set_rates`)."""
    for name, parameter in head.items():
        decay = weight_decay if is_decayed(name, parameter) else 0.0
        optimizer.add_param_group({"params": [parameter], "weight_decay": decay, "values": True})


def set_rates(optimizer: torch.optim.AdamW, of_policy: float, of_values: float) -> dict[str, float]:
    """Set the learning rates of the policy and of its value head.

    Return them as metrics; without a head the first one.
    """
    rates = {"learning_rate": of_policy}
    for options in optimizer.param_groups:
        options["lr"] = of_values if options.get("values") else of_policy
        if options.get("values"):
            rates["value_learning_rate"] = of_values
    return rates


def set_adam(
    optimizer: torch.optim.AdamW,
    *,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Set the options of the next steps of ``optimizer``, which :func:`adamw` has made."""
    for options in optimizer.param_groups:
        options.update(lr=learning_rate, betas=betas, eps=eps)
    optimizer.param_groups[0]["weight_decay"] = weight_decay


def moments_of(optimizer: torch.optim.AdamW, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    """Return the optimizer's state of ``parameter``, created as AdamW creates it before its first
    step."""
    state = optimizer.state[parameter]
    if not state:
        fused = bool(optimizer.param_groups[0]["fused"])
        state["step"] = torch.zeros(
            (), dtype=torch.float32, device=parameter.device if fused else None
        )
        state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return state  # type: ignore[no-any-return]


def zero_gradients(parameters: Collection[nn.Parameter]) -> None:
    """Set the gradients of ``parameters`` to zero.

    With a learning rate of 0, AdamW then changes neither weights nor moments of zero, but counts
    the step as it does for all others.
    """
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.zero_()


def changed_by_step(optimizer: torch.optim.AdamW, parameter: nn.Parameter) -> list[torch.Tensor]:
    """Return all that an optimizer step changes of ``parameter``: itself, its moments, and their
    count of steps."""
    return [parameter.detach(), *moments_of(optimizer, parameter).values()]


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
