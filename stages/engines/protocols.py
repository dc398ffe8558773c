"""The two protocols that every engine adapter implements, and the plain values that cross them.

    rollout stage ── GroupRequest ──▶ RolloutEngine ── Completion, one by one as each ends ──▶ rollout stage
    update stage  ── TensorDict of whole groups ──▶ TrainEngine ── metrics ──▶ update stage
    TrainEngine ── weights() ──▶ host memory ──▶ load_weights() ──▶ RolloutEngine (swaps at its next token boundary)

Everything about a library or a device stays behind these two.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from tensordict import TensorDictBase

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. Filters apply in the order temperature, top-k, top-p; logprobs are those of the distribution
    after temperature and before top-k and top-p (what the trainer recomputes).

    ``temperature == 0`` is greedy; then logprobs are those at temperature 1. ``top_k == 0`` and ``top_p == 1.0`` are off.
    ``stop`` strings end a response when its decoded text contains one (tokens are kept as generated);
    ``stop_token_ids`` end it with that token included.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class GroupRequest:
    """One prompt and the places of its group that are still to be generated.

    ``group`` and ``places`` come back unchanged on each completion. The tokens of a response depend only on the weights,
    the prompt, ``params`` and ``(seed, place)``, up to the rounding of the batch it ran in.
    """

    group: int
    places: tuple[int, ...]
    prompt_ids: torch.Tensor  # int64 [P], P >= 1
    params: SamplingParams
    seed: int


@dataclass(frozen=True)
class Completion:
    """One finished response. ``versions`` is the run-length encoding ``((version, tokens), ...)`` of the policy versions
    that made its tokens; the counts add up to T."""

    group: int
    place: int
    token_ids: torch.Tensor  # int64 [T], T >= 1
    logprobs: torch.Tensor  # float32 [T], of the sampled tokens
    versions: tuple[tuple[int, int], ...]
    finish_reason: FinishReason

    @property
    def oldest_version(self) -> int:
        return min(version for version, _ in self.versions)


class RolloutEngine(Protocol):
    """Generates responses. One engine belongs to one asyncio loop; its compute runs elsewhere (a thread, a device)."""

    @property
    def version(self) -> int:
        """Policy version of the weights that the next token will be made with."""

    def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[Completion]:
        """Join the running batch with all of ``requests`` at once, in this order, and yield each response as it ends.

        Several calls may be in flight together. Closing the iterator (``aclose``) or cancelling its consumer aborts what
        it has not yielded. An error inside the engine is raised to every iterator.
        """

    async def load_weights(self, version: int, weights: Mapping[str, torch.Tensor]) -> SwapTimes:
        """Take ``weights`` (full tensors by parameter name, valid until this returns) and use them from the next token
        boundary on, requests in flight included. Raises ``WeightMismatch`` and keeps the old version when names, shapes
        or dtypes differ."""

    async def pause(self) -> None:
        """Stop before the next token; returns when no compute is running. Requests stay where they are."""

    async def resume(self) -> None: ...

    async def close(self) -> None:
        """Abort everything and release memory and threads. Harmless when repeated."""


@dataclass(frozen=True)
class SwapTimes:
    """Seconds that a weight update took: ``exposed`` while no token could be made, ``hidden`` beside generation."""

    exposed: float
    hidden: float


class WeightMismatch(ValueError):
    """The weights offered do not fit the engine's model: the message names the parameter and both shapes or dtypes."""


class TrainEngine(Protocol):
    """Trains a policy. Calls block and come from one thread at a time.

    Where an engine has several ranks, each in a process of its own, every rank makes the same calls in the same order,
    ``train_batch`` and ``logprobs`` with the rows of its own share; ``weights`` is then exhausted by all of them.
    """

    def train_batch(self, batch: TensorDictBase, algorithm: Any) -> Mapping[str, float]:
        """One optimizer step on whole groups.

        ``batch`` has batch size [B] and the columns ``group`` int64 [B], ``place`` int64 [B], ``prompt_ids`` and
        ``response_ids`` int64 jagged, ``rollout_logprobs`` float32 jagged (as long as ``response_ids``), ``advantage``
        float32 [B], and ``ref_logprobs`` float32 jagged when the algorithm needs it. ``algorithm`` has the protocol of
        :class:`stages.algorithms.Algorithm`. Returns at least ``loss``, ``grad_norm``, ``learning_rate`` and the metrics
        of the algorithm's loss, as Python floats.
        """

    def logprobs(self, batch: TensorDictBase) -> torch.Tensor:
        """Logprobs of the response tokens under the current weights: float32 jagged [B, T_i], no gradient. Group by
        group, so the result of a row does not depend on which other groups came with it."""

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """The parameters that a rollout engine needs, by name, detached, tied ones once."""

    def state_dict(self) -> dict[str, Any]:
        """The model's weights and the optimizer's state: all that a bit-exact continuation needs, as nested dicts of
        tensors (a DTensor where it lies on several ranks) and numbers, which torch.distributed.checkpoint saves, and fills
        in place. Names and shapes do not depend on the layout."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def save_pretrained(self, path: Path) -> None:
        """Write a Hugging Face checkpoint that ``AutoModelForCausalLM.from_pretrained`` opens."""

    def close(self) -> None: ...
