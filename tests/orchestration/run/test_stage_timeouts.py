"""Stages of a user whose calls do not end, and mistakes that are named: class, file and line."""

from __future__ import annotations

import asyncio
import inspect
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from orchestration.recipe.problems import RecipeError
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.flow import UserStage
from tests.orchestration.run.test_run import assert_nothing_left
from tests.orchestration.runs import MOCK, complete, recipe

HERE = "tests.orchestration.run.test_stage_timeouts"
MARKED: dict[str, Any] = {"reward__functions": [{"name": f"{HERE}:marked"}], "reward__processes": 0}
MANY: dict[str, Any] = {"launch__launcher": "process", "launch__max_restarts": 6}


class Marker(UserStage):
    """Makes the reward's column; each call leaves a line in ``calls``."""

    calls: str

    needs: ClassVar = ("response_ids",)
    makes: ClassVar = {"mark": "float32"}

    def made(self, rows: Any) -> dict[str, Any]:
        return {"mark": torch.zeros(len(rows["response_ids"]))}

    def begin(self) -> int:
        with open(self.calls, "a") as file:
            file.write("called\n")
        with open(self.calls) as file:
            return len(file.readlines())


class Blocks(Marker):
    def process(self, rows: Any) -> Any:
        self.begin()
        threading.Event().wait()


class AsyncWaits(Marker):
    async def process(self, rows: Any) -> Any:
        self.begin()
        await asyncio.Event().wait()


class AsyncBlocks(Marker):
    async def process(self, rows: Any) -> Any:
        self.begin()
        threading.Event().wait()


class BlocksOnce(Marker):
    def process(self, rows: Any) -> Any:
        if self.begin() == 1:
            threading.Event().wait()
        return self.made(rows)


class OwnTimeout(Marker):
    timeout: float = 1.0

    def process(self, rows: Any) -> Any:
        return self.made(rows)


def marked(completions: list[str], mark: list[float], **columns: Any) -> list[float]:
    return [value + len(text) for value, text in zip(mark, completions, strict=True)]


def with_stage(stage: type[Marker], calls: Path, timeout: float = 0.5, **changes: Any) -> Any:
    table = {"use": f"{HERE}:{stage.__name__}", "timeout": timeout, "calls": str(calls)}
    return recipe({**MOCK, "stages": [table]}, **MARKED, **changes)


@pytest.mark.parametrize("stage", [Blocks, AsyncWaits, AsyncBlocks])
async def test_a_call_that_never_ends_is_tried_twice_and_ends_the_run(
    stage: type[Marker], tmp_path: Path
) -> None:
    of = with_stage(stage, tmp_path / "calls", **MANY)
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "failed"
    lines, first = inspect.getsourcelines(stage.process)
    assert "took more than stages.0.timeout = 0.5 s" in result.reason
    assert f"{__file__}, line {first + len(lines) - 1}" in result.reason
    assert "and so did the call before it; correct it, or raise stages.0.timeout" in result.reason
    assert len((tmp_path / "calls").read_text().splitlines()) >= 2, (
        "claims may be worked on at the same time"
    )
    changes = [event["change"] for event in watched.of("worker") if event["stage"] != "index"]
    assert (changes.count("died"), changes.count("restarted")) == (2, 1)
    assert_nothing_left(watched.run)


async def test_a_call_that_ends_the_second_time_costs_a_restart(tmp_path: Path) -> None:
    watched, result = await complete(
        Execution(
            RunFolder.create(
                with_stage(BlocksOnce, tmp_path / "calls", 2.0, **MANY), tmp_path / "run"
            )
        )
    )
    assert result.state == "finished", result.reason
    restarted = [event for event in watched.of("worker") if event["change"] == "restarted"]
    assert len(restarted) == 1
    assert "it is called again" in restarted[0]["reason"]


def test_a_class_with_an_option_of_that_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError,
        match=r"stages\.0\.use .*has the option 'timeout', which is a "
        r"key of every stage",
    ):
        with_stage(OwnTimeout, tmp_path / "calls")


# ── mistakes in a credit and in a stage ──


class Credit(GRPO):
    kind: str = "short"

    def credit(self, group: Any) -> Any:
        return CREDITS[self.kind](group)  # the line


CREDITS: dict[str, Callable[[Any], Any]] = {
    "short": lambda group: {"advantage": group["reward"][:-1]},
    "matrix": lambda group: {"advantage": group["reward"][:, None].expand(-1, 2)},
    "number": lambda group: {"advantage": 1.0},
    "scalar": lambda group: {"advantage": group["reward"].sum()},
    "double": lambda group: {"advantage": group["reward"].double()},
    "list": lambda group: {"advantage": group["reward"].tolist()},
    "other": lambda group: {"advantages": group["reward"]},
    "missing": lambda group: {"advantage": group["rewards"]},
}
CREDIT_SAYS = {
    "short": "returned a tensor of float32 [3] from credit",
    "matrix": "takes shape [4], got a tensor of float32 [4, 2]",
    "number": "returned 1.0 from credit",
    "scalar": "returned a tensor of float32 [] from credit",
    "double": "convert with .to(torch.float32)",
    "list": "wanted is a tensor of 4 values (a list of 4 tensors where it is ragged) in "
    "'advantage'",
    "other": "wanted is a dict with the columns ['advantage'], or a Drop",
    "missing": "raised KeyError('rewards') in credit",
}


@pytest.mark.parametrize("kind", CREDITS)
async def test_a_credit_that_is_wrong_names_class_file_and_line(kind: str, tmp_path: Path) -> None:
    of = recipe(MOCK, algorithm__name=f"{HERE}:Credit", algorithm__options={"kind": kind})
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "failed"
    assert CREDIT_SAYS[kind] in result.reason
    assert f"algorithm '{HERE}:Credit' " in result.reason
    assert re.search(rf"\({re.escape(__file__)}, line \d+\)", result.reason)
    assert "tensor([" not in result.reason
    assert (kind == "missing") == ("; its columns are ['reward']" in result.reason)
    assert [
        event["change"]
        for event in watched.of("worker")
        if event["change"] in ("died", "restarted")
    ] == ["died"]


class Mistaken(UserStage):
    kind: str = "length"

    needs: ClassVar = ("response_ids",)
    makes: ClassVar = {"mark": "float32"}

    def process(self, rows: Any) -> Any:
        return MADE[self.kind](rows)


MADE: dict[str, Callable[[Any], Any]] = {
    "length": lambda rows: {"mark": torch.zeros(len(rows["response_ids"]) + 1)},
    "dtype": lambda rows: {"mark": torch.zeros(len(rows["response_ids"]), dtype=torch.float64)},
    "shape": lambda rows: {"mark": torch.zeros(len(rows["response_ids"]), 3)},
    "missing": lambda rows: {"mark": rows["reward"]},
}
STAGE_SAYS = {
    "length": "values in 'mark', one for each row",
    "dtype": "convert with .to(torch.float32)",
    "shape": "reshape it first",
    "missing": "'reward' is not a column that the stage needs; its columns are ['response_ids']",
}


@pytest.mark.parametrize("kind", MADE)
async def test_a_stage_that_is_wrong_names_file_and_line(kind: str, tmp_path: Path) -> None:
    table = {"use": f"{HERE}:Mistaken", "kind": kind}
    of = recipe({**MOCK, "stages": [table]}, **MARKED)
    _, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "failed"
    assert STAGE_SAYS[kind] in result.reason
    assert "stage 'mistaken' " in result.reason
    assert re.search(rf"\({re.escape(__file__)}, line \d+\)", result.reason)
    assert "tensor([" not in result.reason
