"""What a trajectory's environment is asked, and what becomes of the row: real index, dock and
environments; the policy's turns are written by the tests."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from pipeline.data.columns import Packed
from pipeline.index.client import Claim, LeaseLost
from pipeline.warehouse.dock import Dock
from pipeline.worker.outputs import Output, Parked
from stages.environments.classes import environments
from stages.environments.dialogue.choice import Dialogues
from stages.environments.dialogue.plain import PlainDialogue
from stages.environments.interface import Declarations
from stages.flow.catalogue import ENVIRONMENT, OBSERVED, TIMES
from stages.model.load import Tokenizer, tiny_tokenizer
from stages.trajectories.local import LocalCaller
from stages.trajectories.progress import Ending, Progress, parked_columns, parked_progress
from stages.trajectories.stage import Environments
from stages.trajectories.trajectory import EnvironmentUnusable, Limits, Trajectories
from tests.stages.trajectories import games
from tests.stages.trajectories.turns import MADE, admit, claimed, flow

GAMES = "tests.stages.trajectories.games"
TOKENIZER = tiny_tokenizer()
TOKENIZER.add_tokens(list('_<>{}"'))  # that calls of tools are written with
END = 1  # the token of a trajectory that failed before it had one
LIMIT = 30.0  # seconds of a call, where it is not the subject


@pytest.fixture
async def dock(index_url: str, tmp_path: Path) -> AsyncIterator[Dock]:
    games.opened.clear()
    for event in (games.waiting, games.opened_again, games.go_on):
        event.clear()
    async with flow(index_url, tmp_path) as dock:
        yield dock


async def stage_of(
    dock: Dock,
    use: str | Mapping[str, str] = "Replayed",
    *,
    group_size: int = 1,
    limits: Mapping[str, Any] | None = None,
    **options: Any,
) -> Environments:
    """A stage as a worker that has just started has it."""
    names = (
        f"{GAMES}:{use}"
        if isinstance(use, str)
        else {name: f"{GAMES}:{game}" for name, game in use.items()}
    )
    caller = LocalCaller(environments(names, {}))
    declared = Declarations(await caller.declare())
    numbers = {"max_turns": 8, "max_tokens": 64, "turn_tokens": 1, "step_seconds": LIMIT}
    return Environments(
        dock,
        Trajectories(
            caller,
            declared.by_name,
            Dialogues(
                {name: PlainDialogue(TOKENIZER, of.tools) for name, of in declared.by_name.items()}
            ),
            Limits(**{**numbers, "trajectory_seconds": 3600.0, **(limits or {})}),
            seed=3,
        ),
        group_size=group_size,
        concurrency=64,
        end_token=END,
        **options,
    )


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def shown(token_ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(token_ids)))


async def outputs_of(dock: Dock, stage: Environments, claim: Claim) -> AsyncGenerator[Output, None]:
    rows = await dock.fetch(claim, stage.fetches)
    async with aclosing(stage.process(claim, rows)) as outputs:
        async for output in outputs:
            yield output


async def answer(dock: Dock, stage: Environments) -> list[Output]:
    """Have the environments answer all that waits for them."""
    claim = await claimed(dock, ENVIRONMENT)
    outputs = []
    async for output in outputs_of(dock, stage, claim):
        await output.commit(dock, claim)
        outputs.append(output)
    return outputs


async def say(
    dock: Dock,
    *texts: str,
    version: int = 0,
    truncated: bool = False,
    tokenizer: Tokenizer = TOKENIZER,
    split: bool = False,
) -> None:
    """Let the policy make a turn of each row that waits for one. ``split``: of single characters,
    and special tokens."""
    claim = await claimed(dock, "rollout", version=version)
    assert len(claim) == len(texts)
    rows = await parked_progress(dock, claim)
    trajectories = [rows[position] for position in range(len(texts))]
    for progress, text in zip(trajectories, texts, strict=True):
        pieces = re.findall(r"<\|.*?\|>|.", text) if split else [text]
        tokens = [
            token
            for piece in pieces
            for token in tokenizer(piece, add_special_tokens=False)["input_ids"]
        ]
        progress.token_ids += tokens
        progress.logprobs += [-0.5] * len(tokens)
        progress.versions.append((version, len(tokens)))
        progress.truncated = truncated
    generated = [progress.generated for progress in trajectories]
    turns = Parked(
        range(len(texts)), rows=parked_columns(trajectories), generated=generated, to=ENVIRONMENT
    )
    await turns.commit(dock, claim)


async def ended(dock: Dock) -> list[dict[str, Any]]:
    """The columns of the rows that have ended."""
    claim = await claimed(dock, "reward")
    columns = await dock.fetch(claim, list(MADE))
    by_name: dict[str, list[Any]] = {
        name: [row.tolist() for row in Packed.of(column).rows()]
        if column.is_nested
        else column.tolist()
        for name, column in ((name, columns[name]) for name in MADE)
    }
    return [{name: by_name[name][row] for name in MADE} for row in range(len(claim))]


async def present(dock: Dock) -> list[Progress]:
    """The rows that wait for the policy, which goes on waiting."""
    claim = await claimed(dock, "rollout")
    rows = await parked_progress(dock, claim)
    await dock.index.hand_back(claim)
    return [rows[position] for position in range(len(claim))]


async def test_a_trajectory_is_what_the_environment_and_the_policy_say_in_turn(dock: Dock) -> None:
    stage = await stage_of(dock)
    await admit(dock, {"prompt": "play"})
    await answer(dock, stage)
    (begun,) = await present(dock)
    assert shown(begun.token_ids)[-1] == "0"
    assert (begun.turn_starts, begun.generated) == ([2], (OBSERVED, 0))
    await say(dock, "a", version=0)
    await answer(dock, stage)
    await say(dock, "e", version=0)
    await answer(dock, stage)
    (row,) = await ended(dock)
    text = shown(row["response_ids"])
    assert [text[at] for at in (1, 2, 4, 5)] == ["0", "a", "1", "e"]
    assert row["loss_mask"] == [False, False, True, False, False, True]
    assert row["rollout_logprobs"] == [0, 0, -0.5, 0, 0, -0.5]
    assert row["versions"] == [OBSERVED, 2, 0, 1, OBSERVED, 2, 0, 1]
    assert row["turn_starts"] == [2, 5]
    assert (row["turn_reward"], row["environment_reward"]) == ([0.5, 2.0], 2.5)
    assert (row["ending"], row["truncated"]) == (Ending.DONE, False)
    seconds = [sum(row["turn_seconds"][at :: len(TIMES)]) for at in range(len(TIMES))]
    figures = stage.figures()["trajectories"]
    assert [figures.pop(f"{name}_seconds") for name in TIMES] == pytest.approx(seconds)
    assert (seconds[0], seconds[1] > 0, seconds[2] > 0) == (0, True, True)
    assert figures == {
        "open": 0,
        "turns": 2,
        "branches": 0,
        "calls": 0,
        "failed_calls": 0,
        "generated_tokens": 2,
        "observed_tokens": 4,
        "replayed": 0,
        "remade": 0,
        "ended_done": 1,
    }
    ledger = await dock.index.ledger()
    assert (ledger["generated"], ledger["generated_tokens"]) == (1, 2)


@pytest.mark.parametrize(
    ("ending", "limits", "truncated"),
    [
        (Ending.TURNS, {"max_turns": 1}, False),
        (Ending.TOKENS, {"max_tokens": 5}, False),
        (Ending.TRUNCATED, {}, True),
        (Ending.TRUNCATED, {"max_turns": 1}, True),
    ],
)
async def test_a_limit_ends_it_with_the_reward_that_is_due(
    ending: Ending, limits: dict[str, Any], truncated: bool, dock: Dock
) -> None:
    stage = await stage_of(dock, "Judged", limits=limits)
    await admit(dock, {})
    await answer(dock, stage)
    await say(dock, "a", truncated=truncated)
    await answer(dock, stage)
    (row,) = await ended(dock)
    assert (row["ending"], row["truncated"]) == (ending, truncated)
    assert (row["turn_reward"], row["environment_reward"]) == ([1.0], 1.0)
    assert len(row["response_ids"]) == (5 if ending is Ending.TOKENS else 3)
    assert not stage.trajectories.caller.knows("0.0")


async def test_the_last_turn_that_has_room_is_made(dock: Dock) -> None:
    """Two tokens of the first hint, a turn, two of the next one, a turn: six."""
    stage = await stage_of(dock, limits={"max_tokens": 6})
    await admit(dock, {})
    for _ in range(2):
        await answer(dock, stage)
        await say(dock, "a")
    await answer(dock, stage)
    (row,) = await ended(dock)
    assert row["ending"] == Ending.TOKENS
    assert len(row["turn_starts"]) == 2


async def test_a_trajectory_that_takes_too_long_ends_with_the_reward_of_its_turns(
    dock: Dock,
) -> None:
    """The turn that came too late is not answered; its environment is asked for the reward."""
    for limits in ({"trajectory_seconds": 3600.0}, {"trajectory_seconds": 0.0}):
        stage = await stage_of(dock, "Judged", limits=limits)
        await admit(dock, {}, group=int(not limits["trajectory_seconds"]))
        await answer(dock, stage)
        await say(dock, "e")
        await answer(dock, stage)
    rows = await ended(dock)
    assert [row["ending"] for row in rows] == [Ending.DONE, Ending.TIMEOUT]
    assert [row["environment_reward"] for row in rows] == [1.0, 0.0]
    assert stage.trajectories.seen.turns == 0


async def test_a_late_trajectory_keeps_its_environment_as_long_as_its_row_is_there(
    dock: Dock,
) -> None:
    limits = {"trajectory_seconds": 0.0, "step_seconds": LIMIT}
    stage = await stage_of(dock, "Judged", limits=limits, group_size=2)
    await admit(dock, {}, {})
    await answer(dock, stage)
    turns = await claimed(dock, "rollout")
    await dock.index.drop_groups(turns, [0], "not wanted")
    await dock.index.hand_back(turns)
    assert stage.figures()["trajectories"]["open"] == 2
    await say(dock, "a")
    await answer(dock, stage)
    assert stage.figures()["trajectories"]["open"] == 0
    assert not any(stage.trajectories.caller.knows(key) for key in ("0.0", "1.1"))
    assert stage.trajectories.seen.endings == {Ending.TIMEOUT: 1}


@pytest.mark.parametrize(("on_error", "reward"), [("drop", math.nan), ("zero", 0.0)])
@pytest.mark.parametrize("fault", ["x", "h"])
async def test_an_environment_that_fails_costs_its_trajectory(
    fault: str, on_error: Any, reward: float, dock: Dock
) -> None:
    stage = await stage_of(dock, limits={"step_seconds": 0.5}, on_error=on_error, group_size=2)
    await admit(dock, {}, samples=2)
    await answer(dock, stage)
    await say(dock, fault, "e")
    await answer(dock, stage)
    failed, other = await ended(dock)
    if failed["ending"] == Ending.DONE:
        failed, other = other, failed
    assert failed["ending"] == (Ending.DROPPED if on_error == "drop" else Ending.FAILED)
    assert failed["environment_reward"] == pytest.approx(reward, nan_ok=True)
    assert failed["response_ids"][2:] == ids(fault)
    assert (other["ending"], other["environment_reward"]) == (Ending.DONE, 1.0)
    assert not stage.figures()["trajectories"]["open"]


async def test_a_recipe_may_want_the_run_to_end_then(dock: Dock) -> None:
    stage = await stage_of(dock, on_error="fail")
    await admit(dock, {})
    await answer(dock, stage)
    await say(dock, "x")
    with pytest.raises(EnvironmentUnusable, match=r"group 0, place 0: .*RuntimeError\('an x'\)"):
        await answer(dock, stage)


async def test_one_that_fails_before_the_first_token_still_makes_a_row(dock: Dock) -> None:
    """Of a token that no policy has made, and the present version: it is no older than others."""
    stage = await stage_of(dock, on_error="zero")
    await admit(dock, {"fails": True})
    await answer(dock, stage)
    (row,) = await ended(dock)
    assert (row["response_ids"], row["loss_mask"]) == ([END], [False])
    assert row["versions"] == [OBSERVED, 1]
    assert (row["turn_starts"], row["turn_reward"]) == ([], [])
    assert (row["ending"], row["environment_reward"]) == (Ending.FAILED, 0.0)
    scores = await dock.inspect(0)
    assert (scores[0]["oldest_version"], scores[0]["tokens"]) == (0, 0)


async def test_a_first_observation_without_room_for_a_turn_is_a_failure(dock: Dock) -> None:
    stage = await stage_of(dock, limits={"max_tokens": 2}, on_error="fail")
    await admit(dock, {})
    with pytest.raises(EnvironmentUnusable, match=r"first observation has 2 tokens.* = 1 more"):
        await answer(dock, stage)


async def test_an_environment_without_rewards_leaves_them_out(dock: Dock) -> None:
    stage = await stage_of(dock, "Silent")
    await admit(dock, {})
    await answer(dock, stage)
    (begun,) = await present(dock)
    assert (begun.token_ids, begun.turn_starts) == ([], [0])
    await say(dock, "a")
    await answer(dock, stage)
    await say(dock, "e")
    await answer(dock, stage)
    (row,) = await ended(dock)
    assert all(map(math.isnan, [*row["turn_reward"], row["environment_reward"]]))
    assert len(row["turn_reward"]) == 2


async def test_calls_of_tools_are_counted(dock: Dock) -> None:
    stage = await stage_of(dock, "Tools", limits={"max_tokens": 500})
    await admit(dock, {})
    await answer(dock, stage)
    calls = [{"name": "invert", "arguments": {"number": number}} for number in (2, 0)]
    await say(dock, "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls))
    await answer(dock, stage)
    assert (stage.trajectories.seen.calls, stage.trajectories.seen.failed_calls) == (2, 1)
    (going_on,) = await present(dock)
    assert "0.5" in shown(going_on.token_ids)
    await say(dock, "a")
    await answer(dock, stage)
    (row,) = await ended(dock)
    assert (row["ending"], row["environment_reward"]) == (Ending.DONE, 1.0)


async def play(dock: Dock, *stages: Environments) -> dict[str, Any]:
    """Two turns and an end, each answered by the next stage."""
    await admit(dock, {})
    for stage, text in zip(stages, ["a", "b", "e", ""], strict=True):
        await answer(dock, stage)
        if text:
            await say(dock, text)
    (row,) = await ended(dock)
    return row


async def test_a_replayable_environment_goes_on_at_the_same_token_after_its_workers_death(
    index_url: str, tmp_path: Path
) -> None:
    async with flow(index_url, tmp_path) as dock:
        whole = await play(dock, *[await stage_of(dock)] * 4)
    async with flow(index_url, tmp_path) as dock:
        stages = [await stage_of(dock) for _ in range(4)]
        replayed = await play(dock, *stages)
        seconds = replayed.pop("turn_seconds"), whole.pop("turn_seconds")
        assert replayed == whole
        assert [list(map(math.isnan, each[1::3])) for each in seconds] == [[True] * 3, [False] * 3]
    assert whole["environment_reward"] == 0.5 + 0.5 + 3.0
    assert [stage.trajectories.seen.replayed for stage in stages] == [0, 1, 1, 1]
    assert [stage.trajectories.seen.turns for stage in stages] == [0, 1, 1, 1], (
        "those replayed are not counted"
    )
    assert sum(stage.trajectories.seen.remade for stage in stages) == 0


async def test_one_that_cannot_be_replayed_begins_again(dock: Dock) -> None:
    await admit(dock, {})
    stage = await stage_of(dock, "Lost")
    await answer(dock, stage)
    (first,) = await present(dock)
    await say(dock, "a", version=0)
    stage = await stage_of(dock, "Lost")
    await answer(dock, stage)
    assert await present(dock) == [first]
    assert (stage.trajectories.seen.remade, stage.trajectories.seen.replayed) == (1, 0)
    await say(dock, "e")
    await answer(dock, stage)
    (row,) = await ended(dock)
    assert (row["turn_reward"], row["ending"]) == ([1.0], Ending.DONE)
    ledger = await dock.index.ledger()
    assert (ledger["generated"], ledger["generated_tokens"]) == (1, 1)


async def test_one_that_begins_again_may_fail_at_once(dock: Dock) -> None:
    """Its row had a token before, and has none now."""
    await admit(dock, {})
    await answer(dock, await stage_of(dock, "Lost"))
    await say(dock, "a")
    stage = await stage_of(dock, "Lost", limits={"max_tokens": 2}, on_error="zero")
    await answer(dock, stage)
    (row,) = await ended(dock)
    assert (row["ending"], any(row["loss_mask"])) == (Ending.FAILED, False)
    assert (await dock.index.ledger())["generated_tokens"] == 0


@pytest.mark.parametrize("use", ["Replayed", "Lost"])
@pytest.mark.parametrize("turn", ["", "a", "e"])
async def test_an_answer_whose_commit_was_lost_is_not_given_twice(
    use: str, turn: str, dock: Dock
) -> None:
    """``turn``: the one that is answered to nobody; "": the beginning."""
    stage = await stage_of(dock, use)
    await admit(dock, {})
    if turn:
        await answer(dock, stage)
        await say(dock, turn)
    claim = await claimed(dock, ENVIRONMENT)
    async for output in outputs_of(dock, stage, claim):
        await dock.index.hand_back(claim)
        with pytest.raises(LeaseLost):
            await output.commit(dock, claim)
    await answer(dock, stage)
    if use == "Lost" and turn:
        assert stage.trajectories.seen.remade == 1
        await say(dock, turn)
        await answer(dock, stage)
    if turn != "e":
        await say(dock, "e")
        await answer(dock, stage)
    (row,) = await ended(dock)
    assert row["turn_reward"] == ([0.5, 2.0] if turn == "a" else [1.0])
    assert len(games.opened) == 2
    assert not stage.figures()["trajectories"]["open"]


async def test_a_lease_that_is_lost_during_an_answer_gives_it_once(dock: Dock) -> None:
    """The row is claimed again while its environment still answers: that one is given up."""
    stage = await stage_of(dock)
    await admit(dock, {})
    await answer(dock, stage)
    await say(dock, "w")
    lost = await claimed(dock, ENVIRONMENT)
    late = asyncio.ensure_future(anext(outputs_of(dock, stage, lost)))
    await asyncio.to_thread(games.waiting.wait)
    await dock.index.hand_back(lost)
    again = asyncio.ensure_future(answer(dock, stage))
    await asyncio.to_thread(games.opened_again.wait)
    games.go_on.set()
    await again
    with pytest.raises(LeaseLost):
        await late
    (going_on,) = await present(dock)
    assert going_on.turn_reward == [0.5]
    assert shown(going_on.token_ids)[-1] == "1", "the environment has seen one turn"
    await say(dock, "e")
    await answer(dock, stage)
    assert stage.trajectories.seen.replayed == 1, "the lost answer has closed nothing"
    assert not stage.figures()["trajectories"]["open"]


async def test_rows_name_their_environment_where_a_run_has_several(dock: Dock) -> None:
    stage = await stage_of(dock, {"games": "Replayed", "quiet": "Silent"}, group_size=1)
    rows = [{"environment": name} for name in ("games", "quiet", "games")]
    await admit(dock, *rows)
    await answer(dock, stage)
    assert sorted(games.opened) == ["Replayed", "Replayed", "Silent"]
    await say(dock, "e", "e", "e")
    await answer(dock, stage)
    rewards = [row["environment_reward"] for row in await ended(dock)]
    assert [rewards[0], rewards[2]] == [1.0, 1.0]
    assert math.isnan(rewards[1])


@pytest.mark.parametrize("row", [{}, {"environment": "chess"}])
async def test_a_row_that_names_none_fails_with_those_there_are(
    row: dict[str, Any], dock: Dock
) -> None:
    stage = await stage_of(dock, {"games": "Replayed", "quiet": "Silent"}, on_error="fail")
    await admit(dock, row)
    name = row.get("environment")
    with pytest.raises(
        EnvironmentUnusable, match=f"environment = {name!r}; give one of .'games', 'quiet'."
    ):
        await answer(dock, stage)


async def test_rows_that_were_claimed_together_are_handed_on_together(dock: Dock) -> None:
    stage = await stage_of(dock, group_size=4, together=True)
    await admit(dock, {}, samples=4)
    (opened,) = await answer(dock, stage)
    assert list(opened.positions) == [0, 1, 2, 3]
    await say(dock, "a", "e", "b", "e")
    going_on, finished = await answer(dock, stage)
    assert (list(going_on.positions), list(finished.positions)) == ([0, 2], [1, 3])
