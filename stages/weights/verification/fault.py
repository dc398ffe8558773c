"""What is wrong with a rollout engine whose probe was refused: which fault its logprobs show, in
words, and the alarm of it.

refused ─▶ at another temperature they are the trainer's? ─▶ temperature
    └─ the weights before give the same, bit for bit? ─▶ not delivered        └─ neither ─▶ part of the weights is wrong
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from pipeline.data.events import AlarmEvent
from pipeline.index.client import Index
from stages.engines.protocols import RolloutEngine
from stages.weights.documents import ALARM
from stages.weights.published import Probe
from stages.weights.verification.probe import Gap, ProbeFailed, gap, scored

METRIC = "probe"  # of the alarm
TEMPERATURES = [3 ** (at / 6) for at in range(-6, 7)]  # factors that are tried first
REFINED = 24  # times that the interval around the best is made shorter, by the golden ratio

UNDELIVERED = (
    "The engine computes bit for bit what it computed with the weights before: the update has not "
    "reached what it computes with. Look at the engine's load_weights: tensors or an adapter that "
    "it does not load, packed copies or caches that it does not renew."
)
UNTEMPERED = (
    "The engine gives the same logprobs at any temperature: they are those of before temperature. "
    "Look at its logprobs setting (vLLM: logprobs_mode)."
)
TEMPERATURE = (
    "The weights are right: asked for temperature {asked:.3g} the engine's logprobs differ, asked "
    "for {found:.3g} they are the trainer's. Look at rollout.temperature, and at what the engine "
    "sets or scales beside it."
)
OTHER = (
    "Part of the weights is not the version's: one stale or misplaced tensor is enough. Look at "
    "names that the engine's load_weights skips, at fused and packed copies (qkv, gate and up, "
    "tied embeddings), at casts, at the layout of shards."
)


async def find_fault(
    engine: RolloutEngine, probe: Probe, failed: ProbeFailed, temperature: float
) -> str:
    """What is wrong with ``engine``, which scores ``probe`` at ``temperature``, in words; "":
    nothing that shows while it has these weights."""
    if failed.unmoved:
        return UNDELIVERED
    # as vLLM, at other temperatures than 1
    if await scored(engine, probe, TEMPERATURES[0] * temperature) is None:
        return ""
    wanted = torch.tensor([value for row in probe.logprobs for value in row])

    async def gap_at(factor: float) -> Gap:
        found = await scored(engine, probe, factor * temperature)
        assert found is not None, "it has scored at another one"
        return gap(wanted, torch.cat(found))

    gaps = [await gap_at(factor) for factor in TEMPERATURES]
    if len({one.mean for one in gaps}) == 1:
        return UNTEMPERED
    best = min(range(len(gaps)), key=lambda at: gaps[at].mean)
    low, high = (
        math.log(TEMPERATURES[min(max(at, 0), len(gaps) - 1)]) for at in (best - 1, best + 1)
    )
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(REFINED):
        one = high - golden * (high - low)
        other = low + golden * (high - low)
        if (await gap_at(math.exp(one))).mean < (await gap_at(math.exp(other))).mean:
            high = other
        else:
            low = one
    factor = math.exp((low + high) / 2)
    if failed.limits.exceeded(await gap_at(factor)):
        return ""
    return TEMPERATURE.format(asked=temperature, found=factor * temperature)


def same_logprobs(one: Sequence[torch.Tensor] | None, other: Sequence[torch.Tensor] | None) -> bool:
    """Whether an engine has found the same for a probe, bit for bit, with two versions."""
    return (
        one is not None
        and other is not None
        and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    )


async def raise_alarm(
    index: Index, worker: str, version: int, failed: ProbeFailed, look: str
) -> None:
    """Emit the alarm of a refused probe of ``version``: once, however often ``worker`` tries it,
    also after a restart."""
    fields = {"metric": METRIC, "worker": worker}
    if await ALARM.get(index, **fields) == version:
        return
    alarm = AlarmEvent(
        metric=METRIC,
        step=version,
        version=version,
        value=failed.measured.mean,
        limit=failed.limits.mean,
        reason=f"{METRIC}: {failed}",
        look=look,
        worker=worker,
    )
    await index.emit(alarm, ALARM.entry(version, **fields))
