"""Runs that lose every group: one bound ends them, whatever the groups are lost for."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from api.terminal.report import write_report
from orchestration.history.events_file import METRICS
from orchestration.history.lines import event_json
from orchestration.recipe.problems import RecipeError
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from orchestration.supervise.waiting import waiting_chain
from stages.flow import Drop, UserStage
from tests.orchestration.run.test_run import assert_nothing_left
from tests.orchestration.runs import MOCK, complete, executing, recipe

HERE = "tests.orchestration.run.test_lost_groups"
P = 2
N = 4
MOST = 3
SMALL: dict[str, Any] = {**MOCK, "train": {**MOCK["train"], "groups_per_step": P}}
BOUND: dict[str, Any] = {
    "algorithm__max_dropped": MOST,
    "algorithm__max_refill": 1,
    "pipeline__staleness": 0,
}


def fails(completions: list[str], **columns: Any) -> list[float]:
    raise ValueError("no judge today")


class Refuses(UserStage):
    """Drops every group."""

    takes: ClassVar = "groups"
    needs: ClassVar = ("response_ids",)

    def process(self, rows: Any) -> Any:
        return Drop("not to my taste")


class Third(UserStage):
    """Keeps one group of three."""

    takes: ClassVar = "groups"
    needs: ClassVar = ("response_ids", "fields")
    calls: ClassVar[list[int]] = []

    async def process(self, rows: Any) -> Any:
        self.calls.append(1)
        return {} if len(self.calls) % 3 == 0 else Drop("two of three")


LOSSES: dict[str, tuple[dict[str, Any], str, str]] = {
    "truncated": (
        {"rollout__truncated": "drop", "rollout__max_tokens": 1},
        "truncated",
        "raise rollout.max_tokens, or set rollout.truncated = 'mask' or 'train'",
    ),
    "rewards": (
        {
            "reward__functions": [{"name": f"{HERE}:fails"}],
            "reward__max_error_share": 1.0,
            "reward__retries": 0,
            "reward__processes": 0,
        },
        f"reward {HERE}:fails failed",
        "set reward.on_error = 'zero'",
    ),
    "stage": ({}, "not to my taste", "correct what drops them"),
}


@pytest.mark.parametrize("loss", LOSSES)
async def test_a_run_that_loses_every_group_ends_at_once_and_says_why(
    loss: str, tmp_path: Path
) -> None:
    changes, reason, fix = LOSSES[loss]
    base = {**SMALL, "stages": [{"use": f"{HERE}:Refuses"}]} if loss == "stage" else SMALL
    of = recipe(base, **BOUND, **changes)
    out = tmp_path / "run"
    watched, result = await complete(Execution(RunFolder.create(of, out)))
    assert result.state == "failed"
    assert f"at most {P * MOST} may; dropped so far, by reason: " in result.reason
    assert "algorithm.max_dropped" in result.reason
    assert fix in result.reason
    died = [event for event in watched.of("worker") if event["change"] in ("died", "restarted")]
    assert [event["change"] for event in died] == ["died"], "no restart would mend it"
    assert not watched.of("step")
    ledger = watched.of("ledger")[-1]
    dropped = ledger["dropped"][reason]
    assert P * MOST < dropped <= P * (MOST + 1), "a step's groups leave together"
    assert ledger["filtered"] == N * dropped
    assert_nothing_left(watched.run)

    (out / METRICS).write_text("".join(event_json(event) + "\n" for event in watched.events))
    summary = write_report(out, of, checkpoint=None).summary
    assert summary["samples"]["generated"] == ledger["generated"] >= N * dropped
    assert summary["tokens_generated"] == ledger["generated_tokens"] > 0
    assert summary["dropped"][reason] == {"groups": dropped, "tokens": ledger["filtered_tokens"]}


async def test_a_filter_that_keeps_some_is_not_bounded_by_those_that_it_drops_in_all(
    tmp_path: Path,
) -> None:
    """Two of three groups are lost in each step: in all far more than a step may lose."""
    Third.calls.clear()
    of = recipe(
        {**SMALL, "stages": [{"use": f"{HERE}:Third"}]}, **BOUND | {"algorithm__max_dropped": 8}
    )
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    assert watched.of("ledger")[-1]["dropped"]["two of three"] > 8 * P


async def test_why_counts_what_was_dropped(tmp_path: Path) -> None:
    of = recipe(SMALL, rollout__truncated="drop", rollout__max_tokens=1)
    async with executing(Execution(RunFolder.create(of, tmp_path / "run"))) as (watched, work):
        await watched.until(lambda: bool(watched.of("alarm")))
        assert watched.run.supervisor is not None
        first = (await waiting_chain(watched.run.supervisor.index))[0]
        assert " groups were dropped since the last step (in all: " in first.why
        assert "'truncated'); algorithm.max_dropped bounds them" in first.why
        assert watched.of("ledger")[-1]["dropped"]["truncated"] > 0, "no step has reported it"
        watched.stop.set()
        await work


def test_the_bound_lies_above_the_refill() -> None:
    with pytest.raises(
        RecipeError,
        match=r"algorithm\.max_dropped = 3: .*algorithm\.max_refill = "
        r"4.*use a value >= 4",
    ):
        recipe(SMALL, algorithm__max_dropped=3)
