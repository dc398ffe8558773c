"""The two protocols that every engine adapter implements, and the plain values that cross them.

    rollout stage ── GroupRequest ──▶ RolloutEngine ── Completion, one by one as each ends ──▶ rollout stage
    update stage  ── TensorDict of whole groups ──▶ TrainEngine ── metrics ──▶ update stage
    TrainEngine ── weights() ──▶ host memory ──▶ load_weights() ──▶ RolloutEngine (swaps at its next token boundary)

Everything about a library or a device stays behind these two.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
from tensordict import TensorDictBase

if TYPE_CHECKING:
    from stages.weights.store import Published

FinishReason = Literal["stop", "length", "cut"]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. Filters apply in the order temperature, top-k, top-p; logprobs are those of the distribution
    after temperature and before top-k and top-p (what the trainer recomputes).

    ``temperature == 0`` is greedy; then logprobs are those at temperature 1. ``top_k == 0`` and ``top_p == 1.0`` are off.
    ``stop`` strings end a response when its decoded text contains one (tokens are kept as generated);
    ``stop_token_ids`` end it with that token included. ``max_tokens`` counts all tokens of a response; ``budget`` those of
    one visit to an engine, after which it is cut, to be continued by another request (0: no such limit).
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    budget: int = 0


@dataclass(frozen=True)
class Begun:
    """What a response has from earlier visits, to this engine or to another one: as a completion of it was."""

    token_ids: torch.Tensor  # int64 [T], T >= 1
    logprobs: torch.Tensor  # float32 [T]
    versions: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class GroupRequest:
    """One prompt and the places of its group that are still to be generated. ``begun`` gives, by place, what some of them
    have already; they go on from there.

    ``group`` and ``places`` come back unchanged on each completion. The tokens of a response depend only on the weights,
    the prompt, ``params`` and ``(seed, place)``, up to the rounding of the batch it ran in: not on where it was cut.
    """

    group: int
    places: tuple[int, ...]
    prompt_ids: torch.Tensor  # int64 [P], P >= 1
    params: SamplingParams
    seed: int
    begun: Mapping[int, Begun] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for place, begun in self.begun.items():
            tokens, told = len(begun.token_ids), sum(count for _, count in begun.versions)
            if place not in self.places or not 0 < tokens < self.params.max_tokens:
                raise ValueError(
                    f"group {self.group}: place {place} is begun with {tokens} tokens; give begun only places of "
                    f"{self.places} with 1 to {self.params.max_tokens - 1} tokens, as max_tokens counts all of a response"
                )
            if len(begun.logprobs) != tokens or told != tokens:
                raise ValueError(
                    f"group {self.group}: place {place} is begun with {tokens} tokens, {len(begun.logprobs)} logprobs and "
                    f"versions of {told} tokens; give as many of each"
                )


@dataclass(frozen=True)
class Completion:
    """One response as it left the engine: ended, or ``cut`` and to be continued. It holds all tokens so far, those it was
    begun with included. ``versions`` is the run-length encoding ``((version, tokens), ...)`` of the policy versions that
    made its tokens; the counts add up to T."""

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

    async def load_weights(
        self, version: int, weights: Mapping[str, torch.Tensor], *, hold: bool = False, cut: bool = False
    ) -> SwapTimes:
        """Take ``weights`` (full tensors by parameter name, valid until this returns) and use them from the next token
        boundary on, requests in flight included. With ``hold`` the engine is paused from that boundary on, before any
        token is made with them. With ``cut`` every response that has got a token in this visit ends as "cut" at that
        boundary, so that no token of the new weights rests on a KV cache of the old ones. Raises ``WeightMismatch`` and
        keeps the old version when names, shapes or dtypes differ."""

    async def score(
        self, prompt_ids: torch.Tensor, response_ids: torch.Tensor, *, temperature: float = 1.0
    ) -> torch.Tensor | None:
        """Logprobs float32 [T] of the tokens ``response_ids`` int64 [T] after ``prompt_ids`` int64 [P] under the loaded
        weights, by the definition of :class:`SamplingParams`; also while paused (one that can compute nothing then may let
        the others go on for as long as this takes). None: it cannot tell at this temperature. What a swap is verified
        with."""

    async def pause(self) -> None:
        """Stop before the next token; returns when no compute is running. Requests stay where they are."""

    async def resume(self) -> None: ...

    async def close(self) -> None:
        """Abort everything and release memory and threads. Harmless when repeated."""


@runtime_checkable
class ReceivingEngine(Protocol):
    """A rollout engine whose own processes receive published weights from the trainer."""

    async def receive(self, published: Published) -> Mapping[str, torch.Tensor]:
        """Have the bytes near the engine's devices, verified, while it goes on generating. What is returned goes to
        ``load_weights``, and may have names, shapes and dtypes alone. Raises ``WeightsDamaged``, ``WeightsUnreachable``."""


class ColocatedEngine(RolloutEngine, Protocol):
    """A rollout engine that takes turns with training on its device. Whoever has the device fills :attr:`tensors` while the
    engine sleeps, and takes their memory for the other turn."""

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """All weights that it computes with, no copies, each with a storage of its own that can be resized."""

    @property
    def fused(self) -> bool:
        """Whether q, k and v, and gate and up, are one tensor each in :attr:`tensors`, named as vLLM names them."""

    def cache_bytes(self) -> int:
        """Bytes of keys and values on the device; 0 while it sleeps."""

    async def sleep(self) -> None:
        """From the next token boundary on compute nothing and hold nothing on the device but :attr:`tensors`. Every response
        that has got a token in this visit ends as "cut"; the others wait, and requests are still taken."""

    async def wake(self, version: int, *, hold: bool = False) -> None:
        """Go on, with what :attr:`tensors` hold now as the weights of ``version``; with ``hold`` paused at first."""


@dataclass(frozen=True)
class SwapTimes:
    """Seconds that a weight update took: ``exposed`` while no token could be made, ``hidden`` beside generation."""

    exposed: float
    hidden: float


class EngineMissing(ImportError):
    """The library of the engine that was asked for cannot be imported; the message says what to install."""


class EngineFailed(RuntimeError):
    """The engine's compute failed (the cause is attached). Every iterator gets it; no more tokens are made."""


class EngineClosed(RuntimeError):
    """The engine was closed: nothing more can be asked of it, and what was in flight is lost."""


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
        :class:`stages.algorithms.Algorithm`. Returns at least ``loss``, ``grad_norm``, ``learning_rate``, the gap to
        the rollout engine's logprobs (``gap_max``, ``gap_mean``, ``gap_k3``) and the metrics of the algorithm's loss, as
        Python floats.
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
