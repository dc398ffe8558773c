"""The two protocols that every engine adapter implements, and the values that they exchange with
stages.

    rollout stage ── GroupRequest ──▶ RolloutEngine ── Completion, as each response ends ──▶ rollout stage
    update stage  ── TensorDict of whole groups ──▶ TrainEngine ── metrics ──▶ update stage
    TrainEngine ── weights() ──▶ host memory ──▶ load_weights() ──▶ RolloutEngine (swaps at its next token boundary)

Code that depends on a library or a device stays behind these two protocols.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, runtime_checkable

import torch
from tensordict import TensorDictBase

from pipeline.compat.extras import ExtraMissing
from pipeline.problems import Problem, ProblemError
from stages.engines.structure import Structure
from stages.flow.catalogue import OBSERVED

if TYPE_CHECKING:
    from stages.weights.published import Published

CHANGES = (
    *("allowed_token_ids", "bad_words", "min_tokens", "logit_bias"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty", "min_p"),
)
FinishReason = Literal["stop", "length", "cut"]
# in the state of a train engine: the numbers of an algorithm's control, where it has some
CONTROL = "control"
T = TypeVar("T")


@dataclass(frozen=True)
class SamplingParams:
    """The parameters with which tokens are sampled.

    What changes logits applies in vLLM's order: ``allowed_token_ids``, ``bad_words`` (tokens of
    each), ``min_tokens`` (before which none of ``stop_token_ids`` is made), ``logit_bias``, the
    penalties; then temperature, top-k, top-p, min-p. Logprobs are those of the policy itself: after
    temperature and before all else, which the trainer recomputes. With a ``structure`` the policy
    is the one whose tokens that may not follow have no probability.

    ``temperature == 0`` is greedy; logprobs are then those at temperature 1, and with
    ``raw_logprobs`` at every temperature. ``top_k == 0`` and
    ``top_p == 1.0`` disable the filters. A response ends when its decoded text contains one of the
    ``stop`` strings (its tokens are kept), or with one of ``stop_token_ids`` (included).
    Stop strings end it after ``min_tokens`` alone. ``max_tokens`` limits the tokens of a response,
    of one with several turns those of a turn. ``logprob_token_ids``: of which tokens a stream has
    the logprobs, in place of the likeliest ones.
    ``budget`` limits those of one request, after which the response is cut, to be continued by
    another request (0: no limit).
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    budget: int = 0
    min_p: float = 0.0
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprob_token_ids: tuple[int, ...] = ()
    structure: Structure | None = None
    raw_logprobs: bool = False

    @property
    def changes(self) -> list[str]:
        """The fields of these parameters that change probabilities, beside temperature, top-k and
        top-p."""
        return [name for name in CHANGES if getattr(self, name) != getattr(SamplingParams, name)]

    def greedy(self) -> SamplingParams:
        """Return these parameters with the policy's likeliest tokens."""
        defaults: dict[str, Any] = {name: getattr(SamplingParams, name) for name in self.changes}
        return replace(self, temperature=0.0, top_k=0, top_p=1.0, **defaults)


@dataclass(frozen=True)
class Begun:
    """The part of a response that earlier requests made, with this engine or another one.

    Of a response with several turns it also has what an environment has added between them: tokens
    of version OBSERVED, with a logprob of 0. The first ``turn_start`` tokens are those before the
    turn to be continued: ``max_tokens`` does not count them, and no stop string is looked for there.
    ``aside``: tokens that the response has in other branches, which its random numbers count.
    """

    token_ids: torch.Tensor  # int64 [T], T >= 1
    logprobs: torch.Tensor  # float32 [T]
    versions: tuple[tuple[int, int], ...]
    # uint8 or int16 [P + T - 1, layers * top-k], where the run has the column
    routed_experts: torch.Tensor | None = None
    turn_start: int = 0
    aside: int = 0


@dataclass(frozen=True)
class GroupRequest:
    """One prompt and the places of its group to generate.

    ``begun`` has, by place, responses that are to be continued. ``is_continued``: later requests
    will probably go on with the responses, so that an engine may keep their keys and values.
    ``is_repeated``: other requests have the same prompt, so that an engine may compute it once.
    ``adapters``: the name of a set that a :class:`MultiAdapterEngine` has, whose versions the
    tokens then have; "": the engine's own weights.

    ``group`` and ``places`` are returned unchanged on each completion. The tokens of a response
    depend only on the weights, the prompt, ``params`` and ``(seed, place)``, up to rounding that
    depends on the batch. They do not depend on where the response was cut.
    """

    group: int
    places: tuple[int, ...]
    prompt_ids: torch.Tensor  # int64 [P], P >= 1
    params: SamplingParams
    seed: int
    begun: Mapping[int, Begun] = field(default_factory=dict)
    is_continued: bool = False
    is_repeated: bool = False
    adapters: str = ""

    def __post_init__(self) -> None:
        for place, begun in self.begun.items():
            tokens = len(begun.token_ids)
            counted = sum(count for _, count in begun.versions)
            longest = self.limit(place) - 1
            if place not in self.places or not max(1, begun.turn_start) <= tokens <= longest:
                raise ValueError(
                    f"group {self.group}: place {place} is begun with {tokens} tokens; give begun "
                    f"only places of {self.places} with {max(1, begun.turn_start)} to {longest} "
                    f"tokens, as max_tokens counts all of a turn, which begins after "
                    f"{begun.turn_start}"
                )
            if len(begun.logprobs) != tokens or counted != tokens:
                raise ValueError(
                    f"group {self.group}: place {place} is begun with {tokens} tokens, "
                    f"{len(begun.logprobs)} logprobs and versions of {counted} tokens; give as "
                    f"many of each"
                )
            routed = begun.routed_experts
            fed = len(self.prompt_ids) + tokens - 1
            if routed is not None and len(routed) != fed:
                raise ValueError(
                    f"group {self.group}: place {place} is begun with experts of {len(routed)} "
                    f"tokens, {fed} were fed"
                )

    def turn_start(self, place: int) -> int:
        """Return how many tokens the response at ``place`` had before its present turn."""
        return self.begun[place].turn_start if place in self.begun else 0

    def aside(self, place: int) -> int:
        """Return how many tokens the response at ``place`` has in other branches."""
        return self.begun[place].aside if place in self.begun else 0

    def limit(self, place: int) -> int:
        """Return how many tokens the response at ``place`` may have at the end of its turn."""
        return self.turn_start(place) + self.params.max_tokens


@dataclass(frozen=True)
class Completion:
    """One response as the engine returns it: ended, or ``cut`` and to be continued.

    It has all tokens so far, with those of ``begun``. ``versions`` is the run-length encoding
    ``((version, tokens), ...)`` of the policy versions that made its tokens; the counts add up to
    T.
    """

    group: int
    place: int
    token_ids: torch.Tensor  # int64 [T], T >= 1
    logprobs: torch.Tensor  # float32 [T], of the sampled tokens
    versions: tuple[tuple[int, int], ...]
    finish_reason: FinishReason
    cached_tokens: int = 0
    """Of the prompt and of earlier requests, whose keys and values had been computed."""
    drafted_tokens: int = 0
    """Tokens that the engine looked up for this request and computed ahead
    (:mod:`stages.engines.drafts`)."""
    held_tokens: int = 0
    """Of these, those that were then drawn: each has saved a forward."""
    routed_experts: torch.Tensor | None = None
    """uint8 or int16 [P + T - 1, layers * top-k], where the engine records them: the experts of all
    fed tokens, as they were chosen when the token after them was made. The part that another
    request has made keeps the choices it had."""

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that made one of its tokens."""
        return min(version for version, _ in self.versions if version != OBSERVED)

    @property
    def generated_tokens(self) -> int:
        """How many of its tokens a policy has made."""
        return sum(count for version, count in self.versions if version != OBSERVED)

    def tokens(self) -> list[Token]:
        versions = [version for version, count in self.versions for _ in range(count)]
        token_fields = zip(self.token_ids.tolist(), self.logprobs.tolist(), versions, strict=True)
        return [Token(self.group, self.place, *token) for token in token_fields]


@dataclass(frozen=True)
class Token:
    """The newest token of the response at ``place`` of ``group``, made by weights of ``version``.

    ``alternatives``: the likeliest tokens at its position with their logprobs, the likeliest one
    first; the token itself may be among them.
    """

    group: int
    place: int
    token_id: int
    logprob: float
    version: int
    alternatives: tuple[tuple[int, float], ...] = ()


class RolloutEngine(Protocol):
    """Generates responses.

    An engine belongs to one asyncio loop; it computes in a thread, in other processes or on a
    device.
    """

    @property
    def version(self) -> int:
        """Policy version of the weights that make the next token."""

    def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[Completion]:
        """Add all of ``requests`` to the running batch, and yield each response as it ends. Where
        some have to wait, those with ``begun`` should start first, the lowest group first, and the
        others in this order.

        Several calls may be in flight together. Closing the iterator (``aclose``) or cancelling its
        consumer aborts the responses that were not yielded. An error inside the engine is raised by
        every iterator; one of a single response by its own iterator alone, as ResponseFailed.
        """

    async def load_weights(
        self,
        version: int,
        weights: Mapping[str, torch.Tensor],
        *,
        hold: bool = False,
        cut: bool = False,
    ) -> SwapTimes:
        """Use ``weights`` (full tensors by parameter name, valid until this returns) from the next
        token boundary on, for requests in flight too. ``hold``: the engine is paused from that
        boundary on, before it makes a token with them. ``cut``: every response with a token of its
        present request ends as "cut" at that boundary, so that no token of the new weights uses a
        KV cache of the old ones. Raises ``WeightMismatch`` and keeps the old version when names,
        shapes or dtypes differ."""

    async def score(
        self, prompt_ids: torch.Tensor, response_ids: torch.Tensor, *, temperature: float = 1.0
    ) -> torch.Tensor | None:
        """Return the logprobs float32 [T] of the tokens ``response_ids`` int64 [T] after
        ``prompt_ids`` int64 [P] under the loaded weights, as :class:`SamplingParams` defines them;
        None when the engine has none at this temperature. Works while paused; an engine that cannot
        compute then may resume generation for as long as this takes. Verifies swaps."""

    async def pause(self) -> None:
        """Stop before the next token.

        Returns when nothing is being computed. Requests stay in flight.
        """

    async def resume(self) -> None: ...

    async def close(self) -> None:
        """Abort everything and release memory and threads. May be called again."""


@runtime_checkable
class ReceivingEngine(Protocol):
    """A rollout engine with processes of its own that receive published weights from the
    trainer."""

    async def receive(self, published: Published) -> Mapping[str, torch.Tensor]:
        """Receive and verify the bytes near the engine's devices while it generates.

        The result is for ``load_weights``; its tensors may have names, shapes and dtypes without
        values. Raises ``WeightsDamaged``, ``WeightsUnreachable``.
        """


@runtime_checkable
class CuttingEngine(Protocol):
    """A rollout engine that can end what is in flight, to be continued by another one."""

    async def cut(self) -> None:
        """End every response with a token of its present request as "cut" at the next token
        boundary; the others wait."""


@runtime_checkable
class StreamingEngine(Protocol):
    """A rollout engine that returns each token as it is made."""

    def stream(
        self, requests: Sequence[GroupRequest], *, alternatives: int = 0
    ) -> AsyncIterator[Token | Completion]:
        """Generate as :meth:`RolloutEngine.generate` does; before a response's completion come its
        new tokens, in order, each with as many ``alternatives``."""


@runtime_checkable
class PromptScoringEngine(Protocol):
    """A rollout engine that has logprobs of prompts."""

    async def score_prompt(
        self, request: GroupRequest, *, alternatives: int
    ) -> list[tuple[Token, int]]:
        """Return the tokens after the first one of the prompt of ``request``, with their logprobs
        at temperature 1 and as many ``alternatives``, and of each its rank (1: the likeliest).
        Raises ``ValueError`` for a request that cannot be served."""


@runtime_checkable
class PromptReadingEngine(Protocol):
    """A rollout engine whose logits of prompts a caller may read, in the engine's own process."""

    async def read_prompt(
        self, request: GroupRequest, first: int, read: Callable[[int, torch.Tensor], T]
    ) -> list[T]:
        """Return what ``read(place, logits)`` gives for consecutive parts of the prompt of
        ``request``: logits float32 [T, V], on the engine's device and not to be changed, predict the
        tokens at ``place``, ``place + 1``, …; the first part begins at ``first`` >= 1. ``read`` runs
        between two tokens of other requests. Raises ``ValueError`` for a request that cannot be
        served."""


@runtime_checkable
class MultiAdapterEngine(Protocol):
    """A rollout engine that generates with several sets of adapters in one batch."""

    async def put_adapters(
        self, name: str, version: int, weights: Mapping[str, torch.Tensor], *, scale: float
    ) -> None:
        """Use ``weights``, matrices A and B by their names of :mod:`stages.adapters.names`, as the
        set ``name`` from the next token boundary on, for requests in flight too; B·A is multiplied
        by ``scale``. They are valid until this returns. Other sets do not change. Raises
        ``WeightMismatch`` where the model has no such layers, or the set has others."""

    async def remove_adapters(self, name: str) -> None:
        """Forget the set ``name``; calls in flight with requests of it raise AdaptersRemoved.
        Raises KeyError."""


@runtime_checkable
class BoundedEngine(Protocol):
    """A rollout engine that says how long a sequence may be."""

    @property
    def context(self) -> int:
        """Tokens of the longest prompt and response together."""


@runtime_checkable
class TokenizingEngine(Protocol):
    """A rollout engine that has loaded a tokenizer itself.

    Its vocabulary, ``tokenizer.get_vocab()``, is compared with the run's before anything is
    generated.
    """

    @property
    def tokenizer(self) -> Any: ...


class ColocatedEngine(RolloutEngine, Protocol):
    """A rollout engine that takes turns with training on its device.

    While it sleeps, its owner frees the memory of :attr:`tensors`, and fills them before it wakes.
    """

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """All weights that the engine computes with, not copies, each with a storage of its own
        that can be resized."""

    @property
    def fused(self) -> bool:
        """Return whether q, k and v are one tensor in :attr:`tensors`, and gate and up another,
        named as vLLM names them."""

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Return the model's own weights by their names of Hugging Face, without adapters: views of
        :attr:`tensors`."""

    def fill(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy ``weights``, as :meth:`load_weights` takes them, while the engine sleeps and its
        tensors have memory."""

    def cache_bytes(self) -> int:
        """Return the number of bytes of keys and values on the device; 0 while it sleeps."""

    async def sleep(self) -> None:
        """Stop computing at the next token boundary, and free all device memory but
        :attr:`tensors`. Every response with a token of its present request ends as "cut"; the
        others wait, and new requests are accepted."""

    async def wake(self, version: int, *, hold: bool = False) -> None:
        """Continue with the values that :attr:`tensors` have now, as the weights of ``version``;
        ``hold``: paused."""


@dataclass(frozen=True)
class SwapTimes:
    """Seconds of a weight update: ``exposed`` while no token could be made, ``hidden`` beside
    generation."""

    exposed: float
    hidden: float


class EngineMissing(ExtraMissing):
    """The library of the requested engine cannot be imported.

    The message has the command that installs it.
    """


class RequestRefused(ProblemError, ValueError):
    """A request that the engine cannot serve, for its ``field``."""

    def __init__(self, group: int, field: str, wrong: str, fix: str) -> None:
        super().__init__(Problem(field, None, wrong, fix), message=f"group {group}: {wrong}; {fix}")


class ModelRefused(ProblemError, ValueError):
    """An engine cannot run the model, or not with this parallelism. ``key``: model, tp or pp."""

    def __init__(self, key: str, wrong: str, fix: str = "") -> None:
        super().__init__(Problem(key, None, wrong, fix))


class EngineFailed(RuntimeError):
    """The engine's computation failed (the cause is attached).

    Every iterator raises it, and no more tokens are made.
    """


class ResponseFailed(RuntimeError):
    """A response of this request failed (the cause is attached), and the request with it.

    The engine goes on with others.
    """


class AdaptersRemoved(RuntimeError):
    """The adapters of this request were removed; the engine goes on with others."""


class EngineClosed(RuntimeError):
    """The engine is closed: requests are refused, and those in flight are lost."""


class WeightMismatch(ValueError):
    """The weights do not fit the engine's model.

    The message names the parameter and both shapes or dtypes.
    """


class TrainEngine(Protocol):
    """Trains a policy. Calls block and come from one thread at a time.

    If an engine has several ranks, each in its own process, every rank makes the same calls in the
    same order: ``train_batch`` and ``logprobs`` with the rows of its own share, ``weights``
    iterated to its end.
    """

    def train_batch(self, batch: TensorDictBase, algorithm: Any) -> Mapping[str, float]:
        """Make the optimizer steps of one batch of whole groups: all of them, or none.

        ``batch`` has batch size [B] and the columns ``group`` int64 [B], ``place`` int64 [B],
        ``prompt_ids`` and ``response_ids`` int64 jagged, ``rollout_logprobs`` float32 jagged (as
        long as ``response_ids``), ``advantage`` float32 [B], and ``ref_logprobs`` float32 jagged
        when the algorithm needs it. ``algorithm`` has the protocol of
        :class:`stages.algorithms.Algorithm`. Returns at least ``loss``, ``grad_norm``,
        ``learning_rate``, the gap to the rollout engine's logprobs (``gap_max``, ``gap_mean``,
        ``gap_k3``) and the metrics of the algorithm's loss, as Python floats.

        Raises FloatingPointError, on all ranks, when a loss or gradient of any rank is not finite,
        or no token is left to train on: the batch is skipped. It has changed neither weights nor
        optimizer, and counts in the learning rate's schedule as every other.
        """

    def logprobs(self, batch: TensorDictBase) -> torch.Tensor:
        """Return the logprobs of the response tokens under the current weights: float32 jagged [B,
        T_i], no gradient. Groups are computed one by one, so the result of a row does not depend on
        the other groups."""

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the parameters that a rollout engine needs, by name, detached, tied ones once."""

    def state_dict(self) -> dict[str, Any]:
        """Return the model's weights and the optimizer's state, sufficient for a bit-exact
        continuation: nested dicts of tensors (DTensors with several ranks) and numbers, which
        torch.distributed.checkpoint saves and fills in place. Names and shapes do not depend on the
        layout."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def save_pretrained(self, path: Path, state: Mapping[str, Any] | None = None) -> None:
        """Write a Hugging Face checkpoint that ``AutoModelForCausalLM.from_pretrained`` opens.

        ``state``: what :meth:`state_dict` returned before, with whole tensors in host memory, in
        place of the present one. Rank 0 alone makes this call with ``state``, in a thread beside
        training.
        """

    def close(self) -> None: ...


@runtime_checkable
class TeacherEngine(TrainEngine, Protocol):
    """A train engine whose model teaches by more than the sampled token."""

    def top_logprobs(self, batch: TensorDictBase, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return, for each response token, the ``k`` largest logprobs of the distribution that it
        was drawn from, and their tokens: float32 and int32 jagged [B, T_i · k], one token after the
        other, no gradient. Groups are computed one by one. Raises ValueError where the model has
        fewer tokens."""


class UndoableEngine(TrainEngine, Protocol):
    """A train engine that learns beside another one: a policy and a critic of its own."""

    def undo(self) -> None:
        """Take back the optimizer steps of the last :meth:`train_batch`, as the other engine has
        skipped the batch. All ranks make this call. Does nothing where this engine has skipped it,
        too."""
