"""Which fault an engine's logprobs show, where the probe refuses them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stages.weights.published import Probe
from stages.weights.verification.fault import UNDELIVERED, UNTEMPERED, find_fault
from stages.weights.verification.probe import ProbeFailed, ProbeJudge, ProbeRule

RULE = ProbeRule(torch.float32)
LOGITS = torch.randn(5, 11, generator=torch.Generator().manual_seed(0)) * 3
IDS = torch.tensor([4, 1, 0, 9, 10, 3])


def logprobs(temperature: float, change: float = 0.0) -> torch.Tensor:
    logits = LOGITS + change * torch.arange(11) ** 0.5
    return (logits / temperature).log_softmax(-1).gather(1, IDS[1:, None])[:, 0]


PROBE = Probe((tuple(IDS.tolist()),), (tuple(logprobs(1.0).tolist()),))


class Scoring:
    """An engine that scores at ``times`` the temperature, or whatever ``score`` is."""

    def __init__(self, times: float = 1.0, change: float = 0.0, only: float = 0.0) -> None:
        self.times = times
        self.change = change
        self.only = only

    async def score(self, prompt: Any, response: Any, *, temperature: float) -> torch.Tensor | None:
        if self.only and temperature != self.only:
            return None
        return logprobs(self.times * temperature if self.times else 2.0, self.change)


def refused(engine: Scoring, unmoved: bool = False) -> ProbeFailed:
    found = logprobs(engine.times or 2.0, engine.change)
    with pytest.raises(ProbeFailed) as failed:
        ProbeJudge(RULE).judge(PROBE, [found])
    failed.value.unmoved = unmoved
    return failed.value


@pytest.mark.parametrize("times", [0.4, 0.9, 1.005, 1.3, 2.7])
async def test_a_wrong_temperature_is_found_and_named(times: float) -> None:
    engine: Any = Scoring(times)
    look = await find_fault(engine, PROBE, refused(engine), 1.0)
    assert f"asked for {1 / times:.3g} they are the trainer's" in look


@pytest.mark.parametrize(
    ("engine", "unmoved", "expected"),
    [
        (Scoring(change=0.3), False, ""),
        (Scoring(times=1.3, change=0.3), False, ""),
        (Scoring(times=0), False, UNTEMPERED),
        (Scoring(change=0.3), True, UNDELIVERED),
        (Scoring(times=1.3, only=1.0), False, ""),
    ],
)
async def test_other_faults_are_no_temperature(engine: Any, unmoved: bool, expected: str) -> None:
    assert await find_fault(engine, PROBE, refused(engine, unmoved), 1.0) == expected
