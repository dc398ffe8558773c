"""The judgement of the mean reward: whether what had been gained is being lost.

    StepEvent.reward_mean ──▶ means of five steps ──▶ the newest beside the highest, by noise and gain ──▶ a judgement

Noise is taken from the changes from step to step, which a trend hardly moves. At first the reward
has nothing to lose: a gain is one that exceeds the noise of a mean by twice what a fall does.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque

from orchestration.guard.rules import COMPARED_STEPS, REWARD_FALL, WARM_UP, Judgement, Rule

AVERAGED = 5  # steps of a mean
ERRORS = 0.55  # standard errors of a mean, for each deviation of the sensitivity
LOST = 1 / 3  # of the gain, that is a fall; an alarm lasts until half of it is made up for
FALL = Rule(
    REWARD_FALL,
    "The policy loses what it had learned. Look at entropy, grad_norm and the gap by staleness of "
    'the steps before; if samples are old: correction = "truncate" with proximal = '
    '"recomputed", or a lower pipeline.staleness. Else lower train.learning_rate, add '
    "algorithm.options.kl_coef, and go back: `asyncdock resume RUN --from STEP`.",
)


class FallJudge:
    """The judge of a run's mean rewards, in the order of its steps."""

    def __init__(self, sensitivity: float) -> None:
        self._errors = ERRORS * sensitivity
        self._rewards = deque[float](maxlen=COMPARED_STEPS)
        self._first: float | None = None
        self._highest: float | None = None
        self._fell = False

    def of_reward(self, step: int, reward: float) -> Judgement | None:
        """Judge the ``reward`` of ``step``; None: too little is known."""
        self._rewards.append(reward)
        if len(self._rewards) < AVERAGED:
            return None
        mean = statistics.fmean(list(self._rewards)[-AVERAGED:])
        first = self._first = mean if self._first is None else self._first
        highest = self._highest = mean if self._highest is None else max(self._highest, mean)
        if len(self._rewards) <= WARM_UP:
            return None
        gain = highest - first
        fall = highest - mean
        least = self._errors * self._error()
        share = LOST / 2 if self._fell else LOST
        is_clear = self._fell or (gain > 2 * least and fall > least)
        self._fell = is_clear and fall > share * gain
        reason = (
            f"the mean of {AVERAGED} steps is {mean:.3g}, where it was {highest:.3g}, which is "
            f"{fall / gain:.0%} of what had been gained"
            if self._fell
            else ""
        )
        return self._fell, FALL, step, mean, highest, None, reason

    def _error(self) -> float:
        """The standard error of the difference of two means."""
        changes = [after - before for before, after in itertools.pairwise(self._rewards)]
        variance = statistics.fmean(change**2 for change in changes) / 2
        return (variance * 2 / AVERAGED) ** 0.5
