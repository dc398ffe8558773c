"""The plain view of a run: a line for each event that is worth one."""

from __future__ import annotations

from rich.console import Console

from api.telemetry.progress import Progress
from api.terminal.numbers import duration, number, percent, unscored
from pipeline.data.events import (
    AlarmEvent,
    EvaluationEvent,
    Event,
    StateEvent,
    StepEvent,
    WorkerEvent,
)


class PlainView:
    """A line for each step, evaluation, change of state, death and restart."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self.progress = progress
        self.console = console
        # a line that is not printed yet, and its reason: the run may fail with the same one
        self._death = ("", "")

    def event(self, event: Event) -> None:
        """Apply ``event`` to ``progress`` and print its line."""
        data = self.progress.apply(event)
        line, (death, reason) = plain_line(self.progress, event), self._death
        if not line:
            return
        self._death = ("", "")
        if death and not (isinstance(data, StateEvent) and reason and reason in data.reason):
            self._print(death)
        if isinstance(data, WorkerEvent) and data.change == "died":
            self._death = (line, data.reason)
        else:
            self._print(line)

    def _print(self, line: str) -> None:
        self.console.print(line, soft_wrap=True, highlight=False, markup=False)


def of_functions(step: StepEvent) -> str:
    """Return the mean score of each of several reward functions, as a text; "" of one."""
    means = (f"{name} {number(each.get('mean'), '.3f')}" for name, each in step.rewards.items())
    return f" ({', '.join(means)})" if len(step.rewards) > 1 else ""


def plain_line(progress: Progress, event: Event) -> str:
    """Return ``event`` in one line, after ``progress`` has applied it; empty when it is not worth
    one."""
    match data := event.decoded():
        case StateEvent():
            return (f"run {progress.name}: {data.state}") + (
                f" ({data.reason})" if data.reason else ""
            )
        case StepEvent(metrics=metrics):
            return (
                f"step {data.step}/{progress.steps}  reward "
                f"{number(data.reward_mean, '.3f')}"
                f"{unscored(data.reward_failed, data.reward_absent)}{of_functions(data)}  loss "
                f"{number(data.loss, '.4f')}  kl {number(metrics.get('kl_behaviour'), '.2g')}  "
                f"clipped {percent(metrics.get('clip_fraction'))}  entropy "
                f"{number(metrics.get('entropy'), '.3f')}  staleness "
                f"{number(data.staleness_mean, '.2f')} mean {number(data.staleness_max, '.0f')} "
                f"max (bound {progress.bound})  {number(progress.tokens_per_second, ',.0f')} "
                f"tokens/s  {number(data.seconds, '.2f')} s  {duration(progress.seconds_left)} left"
            )
        case EvaluationEvent():
            reward = number(data.reward_mean, ".3f")
            reason = f": {data.reason}" if data.reason else ""
            without = unscored(data.failed, data.absent)
            return (
                f"evaluation v{data.version}  reward {reward} of {data.count} held-out "
                f"prompts{without}{reason}"
            )
        case AlarmEvent():
            return f"alarm at step {data.step}: {data.reason}. {data.look}"
        case WorkerEvent(change="died" | "restarted"):
            reason = f": {data.reason}" if data.change == "died" and data.reason else ""
            return f"worker {data.worker} {data.change}{reason}"
    return ""
