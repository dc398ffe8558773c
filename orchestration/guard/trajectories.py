"""The judgement of trajectories: whether their environment fails, and whether programs go back.

StageEvent.trajectories ──▶ TrajectoryJudge.of_counts ──▶ judgements, of which the guard makes alarms
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from orchestration.guard.rules import BRANCHING, FAILING, Judgement, Rule

TRAJECTORIES = 32  # that have ended, and turns that another one followed, which are judged together


class TrajectoryJudge:
    """The judge of a run's trajectories, by the counts of its environment workers."""

    def __init__(self) -> None:
        # of each worker, its counts at the last judgement
        self._counts = dict[str, Mapping[str, float]]()

    def of_counts(self, step: int, worker: str, counts: Mapping[str, float]) -> Iterator[Judgement]:
        """Judge what has become of the trajectories since the last judgement, where they are
        enough. ``step``: the newest one."""
        before = self._counts.get(worker, {})
        if any(counts.get(name, 0) < before[name] for name in before if name != "open"):
            before = {}  # the worker has begun again
        added = Counter({name: int(n - before.get(name, 0)) for name, n in counts.items()})
        ended = sum(count for name, count in added.items() if name.startswith("ended_"))
        if ended < TRAJECTORIES:
            return
        self._counts[worker] = counts
        failed = added["ended_failed"] + added["ended_dropped"]
        yield _share(FAILING, step, failed, ended, "trajectories: their environment failed")
        followed = added["turns"] - ended
        if followed >= TRAJECTORIES:
            reason = "turns that another one followed: the program went back behind them"
            yield _share(BRANCHING, step, added["branches"], followed, reason)


def _share(rule: Rule, step: int, part: int, whole: int, of_what: str) -> Judgement:
    assert rule.limit is not None
    share = part / whole
    reason = f"{part} of {whole} {of_what}"
    return share >= rule.limit, rule, step, share, None, rule.limit, reason
