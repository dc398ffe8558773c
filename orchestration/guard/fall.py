"""The judgement of the mean reward: whether what had been gained is being lost.

    StepEvent.reward_mean ──▶ mean of the last 5 and 10 steps ──▶ beside the highest of 10, by noise and gain ──▶ a judgement

Noise is taken from the changes from step to step, which a trend hardly moves. A sudden fall is
clear in a mean of 5 steps first. Where the rewards of steps differ much, as with few prompts a
step, it is clear in a mean of 10 alone.

The longer a run is, the higher is its highest mean by chance alone, and the lower its lowest: of n
independent ones the highest is above their level by √(2 ln n) standard errors. This is taken off
the highest mean, and a fall has to exceed chance in as many comparisons as were made.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque

from orchestration.guard.rules import COMPARED_STEPS, REWARD_FALL, WARM_UP, Judgement, Rule

HIGHEST = 10  # steps of the means of which the highest is kept
AVERAGED = (5, 10)  # steps of the means that are compared with it
NOISE_STEPS = 4 * COMPARED_STEPS  # the noise is estimated from the newest steps
ERRORS = 0.3  # standard errors, for each deviation of the sensitivity
GAINED = 1.5  # times as clear as a fall a gain has to be
LOST = 1 / 3  # of the gain, that is a fall; an alarm lasts until half of it is made up for
FALL = Rule(
    REWARD_FALL,
    "The policy loses what it had learned. Look at entropy, grad_norm and the gap by staleness of "
    'the steps before; if samples are old: correction = "truncate" with proximal = '
    '"interpolated", or a lower pipeline.staleness. Else lower train.learning_rate, add '
    "algorithm.options.kl_coef, and go back: `asyncdock resume RUN --from STEP`.",
)


class FallJudge:
    """The judge of a run's mean rewards, in the order of its steps."""

    def __init__(self, sensitivity: float) -> None:
        self._errors = ERRORS * sensitivity
        self._rewards = deque[float](maxlen=NOISE_STEPS)
        self._steps = 0
        self._first: float | None = None
        self._highest = -math.inf
        self._fell = False

    def of_reward(self, step: int, reward: float) -> Judgement | None:
        """Judge the ``reward`` of ``step``; None: too little is known."""
        self._rewards.append(reward)
        self._steps += 1
        if self._steps < max(HIGHEST, WARM_UP + 1):
            return None
        mean = self._mean(HIGHEST)
        first = self._first = mean if self._first is None else self._first
        self._highest = max(self._highest, mean)
        noise = self._noise()
        chance = math.sqrt(2 * math.log(self._steps / HIGHEST) / HIGHEST)
        highest = self._highest - noise * chance
        gain = highest - first
        fallen = [n for n in AVERAGED if self._is_fallen(n, highest, gain, noise)]
        self._fell = bool(fallen)
        steps = fallen[0] if fallen else HIGHEST
        mean = self._mean(steps)
        reason = (
            f"the mean of {steps} steps is {mean:.3g}, where it was {highest:.3g}, which is "
            f"{(highest - mean) / gain:.0%} of what had been gained"
            if fallen
            else ""
        )
        return self._fell, FALL, step, mean, highest, None, reason

    def _is_fallen(self, steps: int, highest: float, gain: float, noise: float) -> bool:
        """Return whether the mean of the last ``steps`` steps has lost a part of ``gain``, by more
        than chance; a fall that lasts needs no second proof."""
        fall = highest - self._mean(steps)
        if self._fell:
            return gain > 0 and fall > LOST / 2 * gain
        clear_gain = GAINED * self._errors * noise * math.sqrt(2 / HIGHEST)
        # chance has as many attempts as there are means that share no step
        errors = math.sqrt(self._errors**2 + 2 * math.log(self._steps / steps))
        clear_fall = errors * noise * math.sqrt(1 / HIGHEST + 1 / steps)
        return gain > clear_gain and fall > max(clear_fall, LOST * gain)

    def _mean(self, steps: int) -> float:
        return statistics.fmean(itertools.islice(reversed(self._rewards), steps))

    def _noise(self) -> float:
        """Return the standard deviation of the reward of a step around its trend."""
        changes = [after - before for before, after in itertools.pairwise(self._rewards)]
        return math.sqrt(statistics.fmean(change**2 for change in changes) / 2)
