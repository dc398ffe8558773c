"""Engines that are not of this package: named in the recipe, made by their own factories, run like
the others."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any, cast

import pytest
from torch.distributed import HashStore

from orchestration.recipe.problems import RecipeError
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from orchestration.workers.engines import reference_engine, rollout_engine, train_engine
from pipeline.problems import Fatal
from stages.engines.registry import ENTRY_POINTS, EngineUnknown, Side
from stages.parallel.layout import ALONE, Layout, RankCoordinates
from tests.orchestration.runs import TINY, complete, recipe
from tests.stages.engines.counting import CountingTrainEngine
from tests.stages.engines.echo import EchoRolloutEngine

ECHO = "tests.stages.engines.echo:engine"
COUNTING = "tests.stages.engines.counting:engine"
BOTH: dict[str, Any] = {**TINY, "rollout": {**TINY["rollout"], "engine": ECHO}}
BOTH["train"] = {**TINY["train"], "engine": COUNTING}

made: list[tuple[Any, ...]] = []


def watched(
    recipe: Any, *, ranks: RankCoordinates, meeting: Any, **options: Any
) -> CountingTrainEngine:
    made.append((recipe, ranks, meeting, options))
    return cast("CountingTrainEngine", train_engine(BOTH_RECIPE))


def nothing(recipe: Any, **arguments: Any) -> object:
    return object()


def picky(recipe: Any, *, version: int, weights: Path | None, size: int) -> EchoRolloutEngine:
    return EchoRolloutEngine(vocabulary=size, version=version)


def untold(recipe: Any) -> object:
    return object()


BOTH_RECIPE = recipe(BOTH)
HERE = "tests.orchestration.run.test_custom_engines"


async def test_a_run_of_processes_with_engines_of_others_goes_to_its_end(tmp_path: Path) -> None:
    of = recipe(
        BOTH,
        launch__launcher="process",
        rollout__on_update="cut",
        train__options={"step_seconds": 0.05},
    )
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    steps = watched.of("step")
    assert [step["step"] for step in steps] == list(range(1, of.train.steps + 1))
    assert all(0 <= step["reward_mean"] <= 1 for step in steps)
    assert any(step["reward_mean"] > 0 for step in steps), (
        "an echo of the letter is what is asked for, at times"
    )
    taken = [sync for sync in watched.of("sync") if sync["worker"] == "rollout-0"]
    assert taken[-1]["version"] == of.train.steps
    assert taken[-1]["gap_max"] == 0, "probed"
    assert result.checkpoint is not None
    again = rollout_engine(of, version=6, weights=result.checkpoint.model)
    assert isinstance(again, EchoRolloutEngine)
    assert (again.version, int(again.step)) == (6, 7)


@pytest.mark.parametrize(
    ("changes", "key", "expected"),
    [
        ({"rollout__engine": "nowhere.at.all:engine"}, "rollout.engine", "PYTHONPATH"),
        (
            {"rollout__engine": "tests.stages.engines.echo:motor"},
            "rollout.engine",
            "no attribute 'motor'",
        ),
        ({"rollout__engine": "tests.stages.engines.echo:"}, "rollout.engine", "cannot be imported"),
        ({"train__engine": f"{HERE}:ECHO"}, "train.engine", "is a str; name a function or a class"),
        (
            {"train__engine": "torhc"},
            "train.engine",
            "did you mean 'torch'?; or name a factory as 'module:factory'",
        ),
        ({"train__engine": "vllm"}, "train.engine", "is not known"),
        ({"rollout__engine": ""}, "rollout.engine", "at least 1"),
        ({"rollout__engine": ECHO, "rollout__options": {"vocab": 9}}, "rollout.options", "'vocab'"),
        (
            {"rollout__engine": ECHO, "rollout__options": {"version": 9}},
            "rollout.options",
            "'version'",
        ),
        ({"rollout__engine": f"{HERE}:picky"}, "rollout.engine", "'size'"),
        (
            {"rollout__engine": f"{HERE}:untold"},
            "rollout.engine",
            "it is called with the recipe, version, weights",
        ),
        (
            {"rollout__options": {"vocabulary": 9}},
            "rollout.options",
            "has no effect with engine 'torch'",
        ),
        (
            {"train__engine": COUNTING, "train__mock": {"parameters": 9}},
            "train.mock",
            "has no effect with engine",
        ),
        (
            {"rollout__engine": ECHO, "launch__placement": "colocated"},
            "rollout.engine",
            "set rollout.engine = 'torch'",
        ),
    ],
)
def test_an_engine_that_is_refused_is_reported_by_its_key(
    changes: dict[str, Any], key: str, expected: str
) -> None:
    with pytest.raises(RecipeError) as raised:
        recipe(TINY, **changes)
    [blamed] = [problem for problem in raised.value.problems if problem.key == key]
    assert expected in f"{blamed.wrong}; {blamed.fix}"


def test_installed_engines_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: dict[Side, str] = {"rollout": ECHO, "train": COUNTING}
    found = importlib.metadata.EntryPoints(
        importlib.metadata.EntryPoint("custom", value, ENTRY_POINTS[side])
        for side, value in groups.items()
    )
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: found.select(group=group))
    of = recipe(
        TINY, rollout__engine="custom", rollout__options={"vocabulary": 11}, train__engine="custom"
    )
    assert isinstance(rollout_engine(of, version=2), EchoRolloutEngine)
    assert isinstance(train_engine(of), CountingTrainEngine)
    with pytest.raises(RecipeError, match="did you mean 'custom'"):
        recipe(TINY, rollout__engine="custon")


def test_a_train_factory_is_told_its_rank_and_makes_the_reference_too() -> None:
    made.clear()
    of = recipe(TINY, train__engine=f"{HERE}:watched", train__options={"speed": 2})
    meeting = HashStore()
    train_engine(of, Layout.for_training(dp=2).coordinates(1), meeting)
    reference_engine(of)
    assert made == [
        (of, Layout.for_training(dp=2).coordinates(1), meeting, {"speed": 2}),
        (of, ALONE, None, {"speed": 2}),
    ]


def test_what_is_made_must_be_an_engine() -> None:
    with pytest.raises(
        EngineUnknown,
        match=r"rollout.engine = .*:nothing\": has made a object, which has no "
        r"version and no gen",
    ):
        rollout_engine(recipe(TINY, rollout__engine=f"{HERE}:nothing"), version=0)
    with pytest.raises(EngineUnknown, match="make what has all of TrainEngine"):
        train_engine(recipe(TINY, train__engine=f"{HERE}:nothing"))
    assert issubclass(EngineUnknown, Fatal)  # no worker is started again for it
