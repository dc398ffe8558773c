"""Algorithms: one short file each. An algorithm is its advantage, its loss, and what the loss needs to be fed."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from stages.user_code import imported, place_of

if TYPE_CHECKING:  # a recipe's algorithm and its options are checked without torch
    import torch

ENTRY_POINTS = "asyncdock.algorithms"


@dataclass(frozen=True)
class TokenBatch:
    """The response tokens of one micro-batch, packed: T tokens of R rows, and the sizes of the whole train batch.

    Sums over micro-batches divided by the ``total_*`` of the train batch equal the loss of the batch done at once, so
    gradient accumulation is exact however rows are packed.
    """

    logprobs: torch.Tensor  # float32 [T], under the weights being trained, with gradient
    rollout_logprobs: torch.Tensor  # float32 [T], recorded by the rollout engine (the behaviour policy)
    ref_logprobs: torch.Tensor | None  # float32 [T], or None when the algorithm needs no reference
    advantage: torch.Tensor  # float32 [T], the row's advantage at each of its tokens
    row: torch.Tensor  # int64 [T], which of the R rows a token belongs to
    row_tokens: torch.Tensor  # int64 [R], tokens of each row
    total_tokens: int  # of the whole train batch
    total_rows: int  # of the whole train batch

    def behaviour_gap(self) -> dict[str, torch.Tensor]:
        """How far the trainer's logprobs lie from those that the rollout engine recorded, as metrics of the train batch: the
        mean and the largest difference, and the k3 estimate of the KL divergence
        (http://joschu.net/blog/kl-approx.html). Of tokens made by the weights that are trained now it is what two engines
        make of one policy; of older ones, how far the policy has moved as well."""
        difference = (self.logprobs - self.rollout_logprobs).detach()
        size = difference.abs()
        return {
            "gap_mean": size.sum() / self.total_tokens,
            "gap_k3": (difference.exp() - 1 - difference).sum() / self.total_tokens,
            "max_gap": size.max(),
        }


def split_gap(metrics: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """:meth:`TokenBatch.behaviour_gap` out of the ``metrics`` of a train batch, as it is told, and the rest."""
    told = {"gap_max": metrics["max_gap"], "gap_mean": metrics["gap_mean"], "gap_k3": metrics["gap_k3"]}
    return told, {name: value for name, value in metrics.items() if name not in (*told, "max_gap")}


@dataclass(frozen=True)
class LossOutput:
    """``loss`` is this micro-batch's share of the train batch's loss: the shares add up. ``metrics`` are detached
    scalars; those of all micro-batches are added (``mean`` of the batch: divide by a ``total_*`` inside), except names
    that begin with ``max_``, of which the largest is kept."""

    loss: torch.Tensor
    metrics: Mapping[str, torch.Tensor]


class Algorithm(Protocol):
    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads ``ref_logprobs``."""

    def advantages(self, rewards: torch.Tensor) -> torch.Tensor:
        """Advantages float32 [N] of one group from its rewards float32 [N]."""

    def loss(self, tokens: TokenBatch) -> LossOutput: ...

    def finish(self, metrics: dict[str, float]) -> dict[str, float]:
        """What is reported of a train batch, from its summed metrics: the place for quotients of sums."""


class AlgorithmError(RuntimeError):
    """An algorithm raised, or returned what is none of what its method promises; the message names it, the method and the
    line."""


class NamedAlgorithm:
    """``algorithm``, whose errors name it as the recipe does. Raises :class:`AlgorithmError`."""

    def __init__(self, name: str, algorithm: Algorithm) -> None:
        self.name, self.algorithm = name, algorithm

    @property
    def needs_reference(self) -> bool:
        return self.algorithm.needs_reference

    def advantages(self, rewards: torch.Tensor) -> torch.Tensor:
        import torch

        out: Any = self._call("advantages", rewards)
        if not isinstance(out, torch.Tensor) or not out.is_floating_point() or out.shape != rewards.shape:
            raise self._wrong("advantages", out, f"a float tensor of shape {list(rewards.shape)}, one for each reward")
        if not bool(out.isfinite().all()):
            raise self._wrong("advantages", out.tolist(), f"finite numbers, for the rewards {rewards.tolist()}")
        return out

    def loss(self, tokens: TokenBatch) -> LossOutput:
        import torch

        out: Any = self._call("loss", tokens)
        if not isinstance(out, LossOutput):
            raise self._wrong("loss", out, "a stages.algorithms.LossOutput")
        if not isinstance(out.loss, torch.Tensor) or out.loss.numel() != 1:
            raise self._wrong("loss", out.loss, "a tensor of one number in LossOutput.loss")
        if tokens.logprobs.requires_grad and not out.loss.requires_grad:
            raise self._wrong("loss", out.loss, "a loss with gradient: it must depend on tokens.logprobs")
        return out

    def finish(self, metrics: dict[str, float]) -> dict[str, float]:
        out: Any = self._call("finish", metrics)
        if not isinstance(out, dict) or not all(isinstance(value, int | float) for value in out.values()):
            raise self._wrong("finish", out, "a dict of numbers")
        return out

    def _call(self, method: str, *arguments: Any) -> Any:
        function = getattr(self.algorithm, method)
        try:
            return function(*arguments)
        except MemoryError:
            raise
        except Exception as error:
            if type(error).__name__ in (
                "OutOfMemoryError",
                "AcceleratorError",
            ):  # the device's failure, not the algorithm's
                raise
            place = place_of(error, function)
            raise AlgorithmError(f"algorithm {self.name!r} raised {error!r} in {method} ({place})") from error

    def _wrong(self, method: str, out: Any, wanted: str) -> AlgorithmError:
        place = place_of(AlgorithmError(), getattr(self.algorithm, method))
        return AlgorithmError(
            f"algorithm {self.name!r} returned {out!r:.200} from {method} ({place}); wanted is {wanted}"
        )


def build_algorithm(name: str, options: Mapping[str, Any]) -> Algorithm:
    """The algorithm called ``name``; ``options`` are the fields of its class.

    Raises ValueError when the name is not known, or an option is unknown or out of range (all of them at once).
    """
    return algorithm_class(name)(**options)


def algorithm_class(name: str) -> Any:
    """The class behind ``name``: built in, ``module:Class``, or an entry point of the group ``asyncdock.algorithms``."""
    if ":" in name:
        return _imported(name, name)
    from stages.algorithms.grpo import GRPO

    known = {"grpo": GRPO}
    if name in known:
        return known[name]
    entries = importlib.metadata.entry_points(group=ENTRY_POINTS)
    if name not in entries.names:
        names = sorted({*known, *entries.names})
        raise ValueError(f"algorithm: {name!r} is not known; use 'module:Class' or one of {names}")
    return _imported(name, f"{entries[name].module}:{entries[name].attr}")


def _imported(name: str, place: str) -> Any:
    try:
        return imported(place)
    except ImportError as error:
        raise ValueError(f"algorithm: {name!r} {error}") from error
