"""The interface of an optimizer to the train engine, and what all of them share.

make ─▶ set_rates ─▶ step ─▶ …        tensors of ``state_of`` ─▶ undo, checkpoints
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from stages.engines.optimizers import OPTIMIZERS

NORM = re.compile(r"norm|^ln(_|$)")  # in the name of a module
COUNT = "step"  # of a parameter's state: its optimizer steps, which a checkpoint has once


@dataclass(frozen=True)
class Trained:
    """What an optimizer trains, by name: this rank's parts.

    ``policy``; ``head``: of values, which may have a learning rate of its own. ``hidden``: names of
    the policy's matrices in layers (:func:`hidden_matrices`). ``whole_of``: a tensor of the shape
    of this rank's part of a parameter as a part of the whole
    (:meth:`stages.engines.torch.parallel.interface.Parallel.saved`).
    """

    policy: Mapping[str, nn.Parameter]
    head: Mapping[str, nn.Parameter]
    hidden: Set[str]
    whole_of: Callable[[str, torch.Tensor], torch.Tensor]

    def groups(self, weight_decay: float, without: Set[str] = frozenset()) -> list[dict[str, Any]]:
        """Return torch's parameter groups: the policy's decayed parameters, its others, ``without``
        those of these names, and each of the head."""
        policy = {name: p for name, p in self.policy.items() if name not in without}
        decayed = [p for name, p in policy.items() if is_decayed(name, p)]
        others = [p for name, p in policy.items() if not is_decayed(name, p)]
        groups: list[dict[str, Any]] = [
            {"params": decayed, "weight_decay": weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        for name, parameter in self.head.items():
            decay = weight_decay if is_decayed(name, parameter) else 0.0
            groups.append({"params": [parameter], "weight_decay": decay, "values": True})
        return groups


class EngineOptimizer(Protocol):
    """One of torch's optimizers. Its class is called with what it trains, and the peak learning
    rate, the decay rates of two moments, and the weight decay of matrices."""

    param_groups: list[dict[str, Any]]
    """Their ``lr`` is set before each step; a group with ``values`` has the value head's."""

    state: Any

    def step(self) -> Any: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...

    def state_of(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return the live tensors that a step changes beside ``parameter``, as its class makes them
        before the first step. Names are those of parts of a checkpoint, but for ``COUNT``; those
        of a parameter do not depend on the layout of ranks."""


def make(
    name: str,
    trained: Trained,
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> EngineOptimizer:
    """Return the optimizer ``name``, of ``OPTIMIZERS``. Raises ValueError for another name."""
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer: {name!r} is not known; use one of {', '.join(OPTIMIZERS)}")
    kind = pkgutil.resolve_name(OPTIMIZERS[name].place)
    return kind(trained, learning_rate, betas, weight_decay)  # type: ignore[no-any-return]


def is_decayed(name: str, parameter: torch.Tensor) -> bool:
    """Return whether weight decay reaches ``parameter``: the matrices of linear layers, embeddings,
    routers, adapters and stacked experts. Biases and the scales of norms are none of them, whatever
    their shape is: the biases of stacked experts are [experts, features], and norms of queries and
    keys may be [heads, features]."""
    *owners, leaf = name.lower().split(".")
    of_norm = bool(owners) and NORM.search(owners[-1]) is not None
    return parameter.ndim >= 2 and not leaf.endswith("bias") and not of_norm


def hidden_matrices(model: PreTrainedModel) -> set[str]:
    """Return the names of the matrices in layers of ``model``, and of stacked ones, as of experts:
    not of embeddings, convolutions and the head."""
    others = (nn.Embedding, nn.Conv1d, nn.Conv2d)
    outside = {id(module.weight) for module in model.modules() if isinstance(module, others)}
    if (head := model.get_output_embeddings()) is not None:
        outside.add(id(head.weight))
    return {
        name
        for name, parameter in model.named_parameters()
        if is_decayed(name, parameter) and id(parameter) not in outside
    }


def set_rates(optimizer: EngineOptimizer, of_policy: float, of_values: float) -> dict[str, float]:
    """Set the learning rates of the policy and of its value head.

    Return them as metrics; without a head the first one.
    """
    rates = {"learning_rate": of_policy}
    for options in optimizer.param_groups:
        rate = of_values if options.get("values") else of_policy
        if isinstance(options["lr"], torch.Tensor):
            options["lr"].fill_(rate)
        else:
            options["lr"] = rate
        if options.get("values"):
            rates["value_learning_rate"] = of_values
    return rates


def saved_state(
    optimizer: EngineOptimizer, parameters: Mapping[str, nn.Parameter]
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield (part of a checkpoint, name of the parameter, live tensor)."""
    for name, parameter in parameters.items():
        for part, value in optimizer.state_of(parameter).items():
            if part != COUNT:
                yield part, name, value
