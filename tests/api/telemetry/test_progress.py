"""Views and reports show what the events of a run contain."""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Iterator
from statistics import fmean, median
from typing import Any

import pytest
from rich.console import Console

from api.telemetry.progress import Progress
from api.telemetry.thinned import MOST
from api.terminal.live import LiveView, sparkline
from api.terminal.plain import plain_line
from api.terminal.report import summarize
from orchestration.history.totals import SHARES, RunTotals, shares
from pipeline.data.events import Event
from tests.api import scripted


def applied(*events: Event) -> Progress:
    progress = Progress("scripted", scripted.STEPS, scripted.BOUND)
    for event in events or scripted.events():
        progress.apply(event)
    return progress


def test_a_whole_run() -> None:
    progress = applied()
    assert progress.ended
    assert progress.steps_done == scripted.STEPS
    assert progress.rewards() == [n / 10 for n in range(scripted.STEPS)]
    assert progress.elapsed == pytest.approx(28)
    assert progress.staleness_max() == scripted.BOUND
    assert progress.restarts == 1
    assert progress.published is not None
    assert progress.swapped is not None
    assert progress.swapped.exposed_seconds == 0.002
    assert list(progress.evaluations) == [0, scripted.STEPS]
    assert any("signal 9" in message.text for message in progress.messages)


def test_rates_and_time_left_leave_out_the_start() -> None:
    slow = scripted.step(0, seconds=1000.0)
    progress = applied(slow, scripted.step(1), scripted.step(2))
    assert progress.seconds_left == pytest.approx(2.0 * (scripted.STEPS - 3))
    assert progress.tokens_per_second == pytest.approx(1000 / 4)
    assert applied(slow).seconds_left is None
    assert applied(slow).tokens_per_second is None


def ledger(time: float, generated: int) -> Event:
    counts = dict.fromkeys(("generated", "trained", "filtered", "remade", "in_flight"), 0)
    tokens = {f"{name}_tokens": 0 for name in counts} | {"generated_tokens": generated}
    return scripted.event(time, "ledger", **counts, **tokens, redelivered=0, skipped_steps=0)


def part(begin: float, generated: int, *steps: Event) -> list[Event]:
    """Events of a run that goes on at ``begin``, with a worker that is ready 3 s later."""
    return [
        scripted.event(begin, "state", state="created", reason=""),
        scripted.event(begin + 1, "state", state="starting", reason=""),
        ledger(begin + 1, generated),
        scripted.event(
            begin + 3, "worker", stage="rollout", worker="rollout-0", change="ready", pid=8
        ),
        scripted.event(begin + 5, "state", state="running", reason=""),
        *steps,
    ]


def at(time: float, step: Event) -> Event:
    return scripted.event(time, "step", **step.data)


def test_the_first_step_of_a_resumed_run_has_the_rate_of_its_own_part() -> None:
    """It made 700 tokens in the 7 s since a worker was ready, 4 s of them after the others were;
    1,600 and 1,000 are of the part before, which a view of the new part alone has not seen."""
    resumed = part(1000, 1600, at(1010, scripted.step(2, tokens_generated=2300)))
    before = [scripted.event(0, "state", state="starting", reason="")]
    before += [scripted.step(0), scripted.step(1)]
    for events in (resumed, [*before, *resumed]):
        assert applied(*events).tokens_per_second == pytest.approx(700 / 7)
    second = at(1012, scripted.step(3, tokens_generated=2500))
    assert applied(*before, *resumed, second).tokens_per_second == pytest.approx(200 / 2)


def test_the_seconds_of_a_resumed_run_are_those_of_all_its_parts() -> None:
    first = [scripted.event(0, "state", state="created", reason="")]
    first += [scripted.event(1, "state", state="starting", reason=""), scripted.step(0)]
    stopped = scripted.event(20, "state", state="stopped", reason="stopped by request")
    for ending, seconds in (([stopped], 19), ([], 9)):  # without an end it was killed
        last = part(1000, 600, at(1010, scripted.step(1)))
        progress = applied(*first, *ending, *last)
        assert progress.elapsed == pytest.approx(seconds + 9), "without its time in the queue"
        assert RunTotals.of(progress.wire()).elapsed == progress.elapsed
        summary = summarize(progress, checkpoint=None)
        assert summary["seconds"] == progress.elapsed
        assert summary["tokens_generated"] == 1100


def test_a_replayed_step_counts_once() -> None:
    progress = applied(scripted.step(0), scripted.step(1), scripted.step(1, reward_mean=0.7))
    assert progress.steps_done == 2
    assert progress.rewards() == [0.0, 0.7]


def test_shares_are_of_the_last_seconds_and_add_up() -> None:
    idle = scripted.stage(0, "rollout-0", 100.0, 0.0, 100.0, 0.0, 0)
    busy = [
        scripted.stage(n, "rollout-0", 100.0 + n, n * 0.9, 100.0, n * 0.1, 10 * n)
        for n in range(1, 31)
    ]
    worker = applied(idle, *busy).workers["rollout-0"]
    parts = shares(worker.recent)
    assert set(parts) == set(SHARES)
    assert sum(parts.values()) == pytest.approx(1.0)
    assert parts["busy"] == pytest.approx(0.9)
    assert worker.rate("rows") == pytest.approx(10.0)
    assert shares(worker.totals)["waiting_input"] == pytest.approx(100 / 130)


def test_the_totals_of_a_restarted_worker_go_on() -> None:
    before = scripted.stage(0, "rollout-0", 50.0, 40.0, 10.0, 0.0, 1000)
    after = scripted.stage(1, "rollout-0", 2.0, 1.0, 1.0, 0.0, 6)
    worker = applied(before, after).workers["rollout-0"]
    assert shares(worker.recent)["busy"] == pytest.approx(0.5)
    assert worker.rate("rows") == pytest.approx(3.0)
    assert (worker.totals["wall"], worker.totals["rows"], worker.latest.rows) == (52.0, 1006, 6)


def of_length(steps: int, every: int = 10, **changes: Any) -> Progress:
    progress = Progress("scripted", scripted.STEPS, scripted.BOUND)
    for event in events_of(range(steps), every, **changes):
        progress.apply(event)
    return progress


def events_of(steps: range, every: int = 10, **changes: Any) -> Iterator[Event]:
    """Steps, with an evaluation at ``every`` so many."""
    answer = "a long answer " * 1000
    for number in steps:
        yield scripted.step(number, groups=list(range(64)), **changes)
        if number % every == 0:
            yield scripted.evaluation(10 + 2 * number, number, 0.5, f"{number} {answer}")


def test_a_run_of_weeks_takes_no_more_memory_than_one_of_a_thousand_steps() -> None:
    short = of_length(1000, every=1)
    long = of_length(50_000)
    assert (short.steps_done, long.steps_done) == (1000, 50_000)
    assert len(long.history) <= MOST
    assert len(long.evaluations) <= MOST
    kept = {progress: len(pickle.dumps(vars(progress))) for progress in (short, long)}
    assert kept[long] <= kept[short], kept


class Counting(list[Any]):
    """A list that counts how many of its items are read."""

    read = 0

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            Counting.read += 1
            yield item

    def __reversed__(self) -> Iterator[Any]:
        for item in super().__reversed__():
            Counting.read += 1
            yield item

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        Counting.read += len(found) if isinstance(at, slice) else 1
        return found


def test_a_redraw_reads_as_much_of_a_run_of_weeks_as_of_a_short_one() -> None:
    console = Console(width=120, file=io.StringIO(), force_terminal=True)
    reads = []
    for steps in (1000, 50_000):
        progress = of_length(steps)
        progress.curve.points = Counting(progress.curve.points)
        progress.evaluated.points = Counting(progress.evaluated.points)
        Counting.read = 0
        console.print(LiveView(progress, console).render())
        plain_line(progress, scripted.step(steps - 1))
        reads.append(Counting.read)
    assert 0 < reads[1] <= reads[0] <= 4 * MOST, reads


def test_what_a_long_run_is_reported_as_is_what_it_did() -> None:
    choose = random.Random(3)
    length = 20_000
    rewards = [choose.random() for _ in range(length)]
    stale = [choose.randrange(3) for _ in range(length)]
    # A step with a checkpoint takes longer: a sample of every so many steps may be of these alone.
    seconds = [choose.uniform(1.9, 2.1) + (60.0 if n % 64 == 0 else 0.0) for n in range(length)]
    progress = applied(
        *(
            scripted.step(
                n,
                reward_mean=rewards[n],
                reward_failed=n % 3,
                staleness_mean=stale[n],
                seconds=seconds[n],
            )
            for n in range(length)
        )
    )
    summary = summarize(progress, checkpoint=None)
    assert summary["steps"] == length
    assert summary["reward_first_steps"] == pytest.approx(fmean(rewards[:5]), abs=1e-12)
    assert summary["reward_last_steps"] == pytest.approx(fmean(rewards[-5:]), abs=1e-12)
    assert summary["reward_failed"] == sum(n % 3 for n in range(length))
    assert summary["staleness_mean"] == pytest.approx(fmean(stale))
    assert summary["staleness_max"] == scripted.BOUND
    assert summary["tokens_per_second"] == pytest.approx(500 * (length - 1) / sum(seconds[1:]))
    assert summary["seconds_per_step"] == pytest.approx(median(seconds[1:]), rel=0.02)
    for point in progress.history:
        of_steps = rewards[point.first - 1 : point.last]
        assert point.reward_low == min(of_steps)
        assert point.reward_high == max(of_steps)
        assert point.reward_mean == pytest.approx(fmean(of_steps))


def test_steps_that_are_made_again_from_an_older_checkpoint_stand_once() -> None:
    progress = of_length(5000, reward_mean=0.0, reward_failed=1)
    for event in events_of(range(1000, 2000), reward_mean=1.0, reward_failed=0):
        progress.apply(event)
    summary = summarize(progress, checkpoint=None)
    assert (summary["steps"], summary["reward_failed"]) == (2000, 1000)
    assert summary["reward_last_steps"] == 1.0
    assert list(progress.evaluations)[-1] == 1990
    assert summary["evaluation"]["count"] == 200
    assert progress.seconds_left == 2.0 * (scripted.STEPS - 2000)
    bars = sparkline(progress.rewards(), 24, [point.steps for point in progress.history])
    assert (bars[:11], bars[12:]) == ("▁" * 11, "█" * 12), "one bar has steps of both"
