"""The probe of a published version: token sequences with the trainer's logprobs, which an engine
that has loaded the version must compute too, within limits that follow from the arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

from stages.algorithms.token_batch import MOST_LOG_RATIO
from stages.weights.published import PROBE, Ids, Probe

if TYPE_CHECKING:
    from stages.engines.protocols import RolloutEngine, TrainEngine


def probed(engine: TrainEngine, sequences: Sequence[Sequence[int]]) -> Probe:
    """Returns the logprobs of ``sequences`` under the present weights of ``engine``.

    All of its ranks call this together.
    """
    rows = len(sequences)
    zeros = torch.zeros(rows, dtype=torch.int64)
    batch = TensorDict({"group": torch.arange(rows), "place": zeros, PROBE: zeros}, [rows])
    for name, part in (("prompt_ids", slice(1)), ("response_ids", slice(1, None))):
        batch[name] = torch.nested.nested_tensor(
            [torch.tensor(ids[part]) for ids in sequences], layout=torch.jagged
        )
    logprobs = (tuple(row.tolist()) for row in engine.logprobs(batch).unbind())
    return Probe(tuple(map(tuple, sequences)), tuple(logprobs))


async def scored(
    engine: RolloutEngine, probe: Probe, temperature: float
) -> list[torch.Tensor] | None:
    """Returns the logprobs that ``engine`` computes for each sequence of ``probe``; None where it
    cannot."""
    found = []
    for ids in map(torch.tensor, probe.sequences):
        logprobs = await engine.score(ids[:1], ids[1:], temperature=temperature)
        if logprobs is None:
            return None
        found.append(logprobs)
    return found


@dataclass(frozen=True)
class Gap:
    """How far the logprobs of one policy by two engines lie apart, over ``tokens``: the largest,
    the mean and the 95th percentile of the absolute differences, and the k3 estimate of the KL
    divergence (http://joschu.net/blog/kl-approx.html)."""

    max: float
    mean: float
    k3: float
    q95: float
    tokens: int

    def fields(self) -> dict[str, float]:
        """The fields of a ``sync`` event."""
        return {f"gap_{name}": value for name, value in asdict(self).items()}


def gap(one: torch.Tensor, other: torch.Tensor) -> Gap:
    """Compare logprobs [T] with [T], the first those of the policy that is trained.

    Not a number anywhere: infinite.
    """
    difference = one.double() - other.double()
    tokens = len(one)
    if not bool(difference.isfinite().all()):
        return Gap(math.inf, math.inf, math.inf, math.inf, tokens)
    size = difference.abs()
    cut = difference.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
    k3 = (cut.exp() - 1 - cut).mean()
    q95 = size.sort().values[math.ceil(0.95 * tokens) - 1]
    return Gap(float(size.max()), float(size.mean()), float(k3), float(q95), tokens)


@dataclass(frozen=True)
class ProbeLimits:
    """The largest :class:`Gap` that two engines with the same weights may have."""

    mean: float
    q95: float
    max: float = math.inf

    @property
    def k3(self) -> float:
        """k3 is nearly half the mean of the squares.

        Where no difference exceeds ``q95``, this follows from ``mean``; so it bounds the
        differences that may exceed ``q95``.
        """
        return self.q95 * self.mean / 2

    def exceeded(self, gap: Gap) -> str | None:
        """What ``gap`` exceeds, with the key of the limit; None: it is within the limits."""
        judged = (
            (gap.max, self.max, f"the largest of {gap.tokens} tokens", "sync.probe_tolerance"),
            (gap.q95, self.q95, f"95th percentile of {gap.tokens} tokens", "sync.probe_tolerance"),
            (gap.mean, self.mean, f"mean of {gap.tokens} tokens", "sync.probe_tolerance / 5"),
            (gap.k3, self.k3, f"k3 of {gap.tokens} tokens", "sync.probe_tolerance ** 2 / 10"),
        )
        for found, limit, what, key in judged:
            if not found <= limit:
                return f"by {found:.3g} ({what}; {key} is {limit:.3g})"
        return None

    def fields(self) -> dict[str, float]:
        """The fields of a ``sync`` event."""
        return {
            f"gap_{name}_limit": limit
            for name, limit in {**asdict(self), "k3": self.k3}.items()
            if limit < math.inf
        }


@dataclass(frozen=True)
class ProbeRule:
    """What the limits of a probe follow from: the dtype that a model of ``layers`` layers computes
    in, whether tokens are ``routed`` to experts, and the probe itself. ``q95`` replaces the limit
    of this name where it is not 0. docs/measurements/probe.md derives the numbers."""

    dtype: torch.dtype
    layers: int = 1
    routed: bool = False
    q95: float = 0.0
    alarm: bool = True  # a refused probe is an alarm of the guard

    @classmethod
    def of(cls, dtype: torch.dtype, config: Any) -> ProbeRule:
        """From the config of a transformers model."""
        text = config.get_text_config()
        routed = (getattr(text, "num_experts_per_tok", None) or 0) > 0
        return cls(dtype, int(getattr(text, "num_hidden_layers", 32)), routed)

    def limits(self, probe: Probe) -> ProbeLimits:
        """In float32 every token is held to 0.001.

        In a lower dtype a hidden state's error is about one rounding times the root of the number
        of layers, but four where few layers each outweigh what comes into them, and a logprob's is
        that times how far logprobs are spread: 95 of 100 tokens are held to seven and a half times
        this, and three times as much where a rounding may route a token to another expert. The mean
        is held to a fifth of what tokens are held to.
        """
        if self.dtype == torch.float32:
            q95 = self.q95 or 1e-3
            return ProbeLimits(q95 / 5, q95, q95)
        spread = float(
            torch.tensor([value for row in probe.logprobs for value in row]).std(correction=0)
        )
        rounding = torch.finfo(self.dtype).eps / 2
        roundings = max(4.0, math.sqrt(self.layers)) * (3 if self.routed else 1)
        q95 = self.q95 or 7.5 * rounding * roundings * max(1.0, spread)
        return ProbeLimits(q95 / 5, q95)


class ProbeFailed(RuntimeError):
    """The engine's logprobs are not those of the weights that it should have.

    The message says by how much. ``unmoved``: they are those of the weights before. ``alarm``: it
    is an alarm of the guard.
    """

    def __init__(
        self, message: str, *, measured: Gap, limits: ProbeLimits, unmoved: bool, alarm: bool
    ) -> None:
        super().__init__(message)
        self.measured = measured
        self.limits = limits
        self.alarm = alarm
        self.unmoved = unmoved


class ProbeJudge:
    """Judges the logprobs that one engine finds, from version to version.

    Successive probes share sequences. Where an update has not reached the engine, it finds for
    these bit for bit what it found before, while the trainer does not: in a dtype whose roundings
    hide one update this still shows it.
    """

    def __init__(self, rule: ProbeRule) -> None:
        self.rule = rule
        # by sequence: trainer's, engine's
        self._accepted: dict[Ids, tuple[tuple[float, ...], torch.Tensor]] = {}

    def compares(self, probe: Probe) -> bool:
        """Whether ``probe`` shares sequences with the last one."""
        return not self._accepted.keys().isdisjoint(probe.sequences)

    def judge(
        self, probe: Probe, found: Sequence[torch.Tensor], *, same_weights: bool = False
    ) -> dict[str, float]:
        """Compare ``found`` with the trainer's.

        ``same_weights``: they are known to be those of the last version judged. Returns the gap and
        its limits as the fields of a ``sync`` event. Raises ProbeFailed.
        """
        measured = gap(
            torch.tensor([value for row in probe.logprobs for value in row]), torch.cat(list(found))
        )
        limits = self.rule.limits(probe)
        now = dict(zip(probe.sequences, zip(probe.logprobs, found, strict=True), strict=True))
        shared = now.keys() & self._accepted.keys()
        unmoved = bool(shared) and not same_weights
        unmoved = unmoved and all(self._unmoved(now[ids], self._accepted[ids]) for ids in shared)
        about: dict[str, Any] = {
            "measured": measured,
            "limits": limits,
            "unmoved": unmoved,
            "alarm": self.rule.alarm,
        }
        if exceeded := limits.exceeded(measured):
            raise ProbeFailed(
                f"the engine's logprobs differ from the trainer's {exceeded}", **about
            )
        if unmoved:
            tokens = sum(len(ids) - 1 for ids in shared)
            raise ProbeFailed(
                f"the engine's logprobs of {tokens} tokens are bit for bit those of the weights "
                f"before, and the trainer's "
                "are not; the update has not reached what the engine computes with",
                **about,
            )
        self._accepted = now
        return measured.fields() | limits.fields()

    @staticmethod
    def _unmoved(
        now: tuple[Ids | tuple[float, ...], torch.Tensor], before: tuple[Any, torch.Tensor]
    ) -> bool:
        """Whether the engine's logprobs of a sequence are the same as before, and most of the
        trainer's are others."""
        moved = sum(one != other for one, other in zip(now[0], before[0], strict=True))
        return torch.equal(now[1], before[1]) and 2 * moved > len(now[0])
