"""What training calls are about: data, the options of a model, and what a call gives.

client ─▶ Datum, loss, options ─▶ CalledModel.forward_backward ─▶ PassOutput      gradients add up
          AdamOptions          ─▶ CalledModel.optimizer_step  ─▶ metrics          and are forgotten

Importing this needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pipeline.problems import Problem, ProblemError

LossOptions = Mapping[str, float | str]
ALPHA = 32.0  # B·A of an adapter is multiplied by this number / its rank, as in Tinker


@dataclass(frozen=True)
class Datum:
    """One sequence that is trained on.

    ``tokens`` int64 [N] are fed to the model. ``inputs``: float32 or int64 arrays by name:
    ``target_tokens`` [N] or [N, K], whose logprobs at each place the loss is of, and what else the
    loss reads, as long as ``tokens``. ``sampled``: (sequence id, offset, length) of those tokens
    that a sampler of the service has made, where the client says so.
    """

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]
    sampled: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True)
class PassOutput:
    """What a forward pass gives: ``logprobs`` float32 of the target tokens of each datum, as they
    are in ``target_tokens``; ``metrics`` by name, the sums over all data."""

    logprobs: Sequence[np.ndarray]
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class AdamOptions:
    """Of one optimizer step: torch's AdamW; ``grad_clip_norm`` 0: the gradient is not clipped."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True)
class ModelOptions:
    """What a client trains of the base model: an adapter of ``rank``, or with rank 0 all of its
    weights. ``attention``, ``mlp``, ``head``: where the adapter is. ``seed`` gives it its first
    values."""

    rank: int = 32
    seed: int = 0
    attention: bool = True
    mlp: bool = True
    head: bool = False


class CallRefused(ProblemError, ValueError):
    """A call that cannot be served as the client has made it; nothing was changed."""

    @classmethod
    def of(cls, key: str, value: object, wrong: str, fix: str = "") -> CallRefused:
        return cls(Problem(key, value, wrong, fix))


class SamplerFailed(RuntimeError):
    """The sampler cannot go on: the process that has it is to be started again."""


class CalledModel(Protocol):
    """A model in training, of one client. Calls block and come from one thread at a time.

    On one device results are the same bit for bit, whatever other models on the same base do
    between the calls.
    """

    @property
    def step(self) -> int:
        """Optimizer steps that its weights have."""

    def forward(self, data: Sequence[Datum], loss: str, options: LossOptions) -> PassOutput:
        """Compute the loss, without gradients. Raises CallRefused."""

    def forward_backward(
        self, data: Sequence[Datum], loss: str, options: LossOptions
    ) -> PassOutput:
        """Add the gradients of the loss, a sum over all tokens, to those that there are. Raises
        CallRefused, and FloatingPointError for a loss that is not finite; then gradients are as
        before."""

    def optimizer_step(self, options: AdamOptions) -> dict[str, float]:
        """Make one step with the gradients, and forget them. Returns metrics, all finite. Raises
        CallRefused where there are none, FloatingPointError where they are not finite; the weights
        are as before then, and the gradients forgotten."""

    def forget_gradients(self) -> None:
        """Forget the gradients that there are."""

    def adapter(self) -> dict[str, Any]:
        """Return copies of the weights that a sampler needs, tensors by name: an adapter's, or all
        of a model of rank 0."""

    def save(self, folder: Path, *, optimizer: bool, merged: bool = True) -> None:
        """Write the product's own checkpoint: what :meth:`load` reads, bit for bit, an adapter that
        peft opens, and with ``merged``, which takes the room and time of all the base's weights, a
        Hugging Face model."""

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Take over the weights of ``folder``, and with ``optimizer`` the moments and the step; without,
        the optimizer begins anew. Gradients are forgotten. Raises CallRefused."""

    def close(self) -> None:
        """Release its memory. May be called again."""


@dataclass(frozen=True)
class SamplingOptions:
    """As the sampler's client gives them. ``max_tokens`` None: up to the end of the context.
    ``stop`` None: the model's own end tokens; empty: none at all; else these strings or tokens."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] | tuple[int, ...] | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True)
class Matrix:
    """A matrix of ``shape`` in the form that its client has given it: all ``values`` [N] row by row,
    or those that there are, with ``starts`` int64 [rows + 1] and ``columns`` int64 [N] (CSR)."""

    shape: tuple[int, int]
    values: np.ndarray
    starts: np.ndarray | None = None
    columns: np.ndarray | None = None

    @property
    def rows(self) -> np.ndarray:
        """The row of each of the values, int64 [N]."""
        counts = self.shape[1] if self.starts is None else np.diff(self.starts)
        return np.repeat(np.arange(self.shape[0]), counts)


@dataclass(frozen=True)
class SampleRequest:
    """``count`` responses to one prompt int64 [P]; ``top_k_…``: how many of the likeliest tokens are
    returned with their logprobs.

    ``targets`` int64 [P - 1, K]: tokens whose logprobs at the place of prompt token 1, 2, … are
    returned; -1: none. ``prompt_draws``: how many tokens are drawn at each of these places, at the
    request's temperature. ``score_last``: logprobs and likeliest tokens are those of so many last
    tokens of the prompt; None: of all.
    """

    prompt: np.ndarray
    options: SamplingOptions
    count: int = 1
    prompt_logprobs: bool = False
    top_k_prompt: int = 0
    top_k_sampled: int = 0
    targets: Matrix | None = None
    prompt_draws: int = 0
    score_last: int | None = None


@dataclass(frozen=True)
class SampledSequence:
    """A response int32 [T], T >= 1, its logprobs float32 [T] at temperature 1, and the versions of
    its tokens, run-length encoded: ((optimizer steps of the weights, tokens), …)."""

    tokens: np.ndarray
    logprobs: np.ndarray
    stopped: bool
    """Whether it was ended by a stop; else by its length."""
    versions: tuple[tuple[int, int], ...]
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    """At each token the likeliest ones, best first."""


@dataclass(frozen=True)
class SampleOutput:
    """What a sample request gives. ``prompt_logprobs`` float32 [P], NaN at the first token and those
    before the last ones that are asked for; ``prompt_top``: () there. ``target_logprobs`` float32 in
    the form of the targets, 0 where there is none. ``drawn``: tokens int64 [P - 1, K] and their
    logprobs float32, at temperature 1."""

    sequences: Sequence[SampledSequence]
    prompt_logprobs: np.ndarray | None = None
    prompt_top: tuple[tuple[tuple[int, float], ...], ...] = ()
    cached_tokens: int = 0
    target_logprobs: Matrix | None = None
    drawn: tuple[np.ndarray, np.ndarray] | None = None


class Sampler(Protocol):
    """An engine that samples with the adapters of several clients in one batch."""

    async def put(
        self, name: str, options: ModelOptions, weights: Mapping[str, Any], step: int
    ) -> None:
        """Make the weights of ``step`` those that ``name`` samples with, from the next token on for
        sequences under way too. ``name`` is new, or has had weights with the same options."""

    async def remove(self, name: str) -> None:
        """Forget ``name``; its sequences under way fail."""

    async def sample(self, name: str, request: SampleRequest, seed: int) -> SampleOutput:
        """Sample with the weights of ``name``; "": the base model's. The same seed, request and
        weights give the same tokens, up to rounding. Raises CallRefused, SamplerFailed."""

    async def pause(self) -> None:
        """Stop all sequences at their next token."""

    async def resume(self) -> None:
        """Go on with them."""

    async def close(self) -> None: ...


@dataclass(frozen=True)
class ServedBase:
    """A base model that is served: its ``name`` for clients, the folder or name that it is loaded
    from, tokens of its ``context``, where clients find its ``tokenizer``, its ``architecture`` as its
    config names it, and options of its engine, as JSON has them."""

    name: str
    source: str
    context: int
    tokenizer: str
    architecture: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
