"""Evaluations of runs whose environments answer: real processes, environments that die."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from orchestration.recipe.problems import RecipeError
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sizes.planner import prompt_limits
from orchestration.run.execution import RunResult
from orchestration.workers.engines import rollout_engine
from stages.engines.protocols import GroupRequest, RolloutEngine, SamplingParams
from stages.environments.dialogue.choice import Dialogues
from stages.environments.dialogue.plain import PlainDialogue
from stages.model.load import tiny_tokenizer
from stages.prompts.sources import load_prompts
from stages.rollout.evaluate import distinct_prompts
from stages.tasks.guess import LARGEST
from tests.orchestration.run.games import Near
from tests.orchestration.run.test_programs import TEMPLATE
from tests.orchestration.run.test_run import assert_each_sample_once, assert_nothing_left
from tests.orchestration.run.test_trajectories import GAMES, GUESS, run_of
from tests.orchestration.runs import MOCK, Watched, complete, recipe

TOKENIZER = tiny_tokenizer()
PROMPTS = {**GUESS["prompts"], "held_out": 0.7}  # of seven rows
EVALUATED = {
    **GUESS,
    "environment": {**GUESS["environment"], "use": f"{GAMES}:Near"},
    "prompts": PROMPTS,
    "evaluate": {"every": 3, "prompts": LARGEST, "samples": LARGEST},
}


def held_out(of: Recipe) -> list[int]:
    """The digits that evaluations ask for, in their order."""
    sides = load_prompts(
        of.prompts,
        TOKENIZER,
        of.seed,
        limits=prompt_limits(of),
        opens=Dialogues({"": PlainDialogue(TOKENIZER, ())}),
    )
    assert sides.held_out is not None
    trained = {sides.train.prompt(number).fields["answer"] for number in range(200)}
    asked = [
        prompt.fields["answer"] for prompt in distinct_prompts(sides.held_out, LARGEST, by_row=True)
    ]
    assert trained.isdisjoint(asked)
    assert len(trained) + len(asked) == LARGEST
    return asked


async def by_hand(answer: int, engine: RolloutEngine) -> tuple[str, float]:
    """The game with greedy turns, each of which is made as the answer to all that was before it.
    Returns its text and its reward."""
    game = Near()
    game.reset(answer)
    ids = TOKENIZER("1-7?", add_special_tokens=False)["input_ids"]
    params = SamplingParams(
        max_tokens=2,
        temperature=0.0,
        stop=tuple("1234567"),
        stop_token_ids=(int(TOKENIZER.eos_token_id or 0),),
    )
    lines = []
    total = 0.0
    for _ in range(3):
        request = GroupRequest(0, (0,), torch.tensor(ids), params, 0)
        [turn] = [done async for done in engine.generate([request])]
        said = str(TOKENIZER.decode(turn.token_ids, skip_special_tokens=True))
        lines.append(f"policy: {said}")
        hint, reward, is_over = game.step(said)
        total += reward
        if is_over or turn.finish_reason == "length":
            break
        lines.append(f"environment: {hint}")
        added = TOKENIZER(hint, add_special_tokens=False)["input_ids"]
        ids = [*ids, *turn.token_ids.tolist(), *added]
    else:
        lines.pop()  # nothing follows the last turn
    return "\n".join(lines), total


async def games_by_hand(of: Recipe, result: RunResult) -> list[tuple[str, float]]:
    """The games of the held-out rows with the weights at the run's end."""
    assert result.checkpoint is not None
    engine = rollout_engine(of, version=of.train.steps, weights=result.checkpoint.model)
    games = [await by_hand(answer, engine) for answer in held_out(of)]
    await engine.close()
    return games


def last_evaluation(watched: Watched) -> dict[str, Any]:
    return dict(watched.of("evaluation")[-1])


@pytest.mark.parametrize("launcher", ["inline", "process"])
@pytest.mark.parametrize("bound", [0, 1])
async def test_held_out_rows_are_played_greedily(launcher: str, bound: int, tmp_path: Path) -> None:
    of = recipe(EVALUATED, pipeline__staleness=bound, launch__launcher=launcher)
    watched, result = await complete(run_of(of, tmp_path / "run"))
    assert result.state == "finished", result.reason
    games = await games_by_hand(of, result)
    event = last_evaluation(watched)
    shown = [(sample["response"], sample["reward"]) for sample in event["samples"]]
    assert (event["version"], event["count"]) == (6, len(games))
    assert shown == games
    assert event["reward_mean"] == pytest.approx(sum(reward for _, reward in games) / len(games))
    assert event["reward_mean"] > 0
    assert_each_sample_once(of, watched)
    assert_nothing_left(watched.run)


async def test_with_bound_zero_evaluations_change_no_bit(tmp_path: Path) -> None:
    rewards = []
    for every in (0, 2):
        of = recipe(EVALUATED, pipeline__staleness=0, evaluate__every=every)
        watched, result = await complete(run_of(of, tmp_path / f"run-{every}"))
        assert result.state == "finished", result.reason
        rewards.append([(step["reward_mean"], step["loss"]) for step in watched.of("step")])
    assert rewards[0] == rewards[1]


async def test_functions_get_the_columns_of_trajectories(tmp_path: Path) -> None:
    functions = [{"name": "environment"}, {"name": f"{GAMES}:count_turns", "weight": 0.1}]
    of = recipe(EVALUATED, reward__functions=functions, launch__launcher="inline")
    watched, result = await complete(run_of(of, tmp_path / "run"))
    assert result.state == "finished", result.reason
    games = await games_by_hand(of, result)
    means = last_evaluation(watched)["functions"]
    turns = [text.count("policy:") for text, _ in games]
    assert means[f"{GAMES}:count_turns"] == pytest.approx(sum(turns) / len(turns))
    assert means["environment"] == pytest.approx(sum(reward for _, reward in games) / len(games))


@pytest.mark.parametrize("on_error", ["drop", "zero"])
@pytest.mark.parametrize(
    ("launcher", "how"), [("inline", "raises"), ("process", "raises"), ("process", "dies")]
)
async def test_environments_that_fail_are_counted(
    launcher: str, how: str, on_error: str, tmp_path: Path
) -> None:
    """Those of two rows; of the others one fails with them, if its answer was being made in the
    process that died."""
    broken = held_out(recipe(EVALUATED))[:2]
    options = {"broken": broken, "how": how}
    of = recipe(
        EVALUATED,
        environment__use=f"{GAMES}:Broken",
        environment__options=options,
        environment__on_error=on_error,
        launch__launcher=launcher,
    )
    watched, result = await complete(run_of(of, tmp_path / "run"))
    assert result.state == "finished", result.reason
    asked = len(held_out(of))
    for event in watched.of("evaluation"):
        assert event["count"] + event.get("failed", 0) == asked
        assert (event.get("failed", 0) >= 2) if how == "dies" else (event.get("failed", 0) == 2)
        assert event["reason"].startswith("environment of held-out prompt ")
        assert [sample["reward"] for sample in event["samples"][:2]] == [None, None]
    if how == "raises":
        assert "Broken.step raised ValueError('not this one')" in event["reason"]
        assert "games.py, line" in event["reason"]
    assert_each_sample_once(of, watched)
    assert_nothing_left(watched.run)


async def test_a_failure_ends_the_run_where_the_recipe_says_so(tmp_path: Path) -> None:
    options = {"broken": held_out(recipe(EVALUATED))[:1]}
    of = recipe(
        EVALUATED,
        environment__use=f"{GAMES}:Broken",
        environment__options=options,
        environment__on_error="fail",
    )
    _, result = await complete(run_of(of, tmp_path / "run"))
    assert result.state == "failed"
    assert "environment of held-out prompt 0" in (result.reason or "")


@pytest.mark.parametrize("launcher", ["inline", "process"])
async def test_programs_are_evaluated(launcher: str, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    of = recipe(
        EVALUATED,
        prompts__chat_template=str(template),
        environment__use=f"{GAMES}:chat",
        environment__max_tokens=24,
        environment__sandbox=launcher == "process",
        launch__launcher=launcher,
    )
    watched, result = await complete(run_of(of, tmp_path / "run"))
    assert result.state == "finished", result.reason
    event = last_evaluation(watched)
    assert (event["count"], event.get("failed", 0)) == (len(event["samples"]), 0)
    for sample in event["samples"]:
        first, second = sample["response"].splitlines()[:2]
        assert (first, second.partition(" ")[0]) == ("environment: 1-7?", "policy:")
    assert_nothing_left(watched.run)


async def test_the_mock_engine_plays_too(tmp_path: Path) -> None:
    mock = {**MOCK["rollout"], "max_tokens": 2}
    of = recipe({**EVALUATED, **{name: MOCK[name] for name in ("model", "train")}, "rollout": mock})
    watched, result = await complete(run_of(of, tmp_path / "run"))
    assert result.state == "finished", result.reason
    assert last_evaluation(watched)["count"] == len(held_out(of))


def test_programs_outside_are_not_evaluated() -> None:
    with pytest.raises(RecipeError, match=r"every = 3: asks for .* alone; set evaluate.every = 0"):
        recipe(EVALUATED, environment__use="sessions")
