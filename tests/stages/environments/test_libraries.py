"""Environments of other libraries, as their authors publish them."""

from __future__ import annotations

from typing import Any

import pytest
import reasoning_gym

from stages.environments.classes import environments
from stages.environments.interface import Reply, Trajectory, Turn
from stages.trajectories.local import LocalCaller
from stages.user_code import CodeUnusable


async def played(use: str, row: dict[str, Any], *texts: str) -> list[Reply]:
    caller = LocalCaller(environments(use, {}))
    [declared] = (await caller.declare()).values()
    assert (declared.gives_reward, declared.roles, declared.tools) == (True, ("user",), ())
    replies = [await caller.open(Trajectory("a", row, seed=3), 60)]
    for text in texts:
        turn = Turn({"role": "assistant", "content": text})
        replies.append(await caller.step("a", turn, 60))
    await caller.end()
    return replies


async def test_a_game_of_textarena_says_what_is_new_and_gives_its_reward() -> None:
    use = "textarena:GuessTheNumber-v0"
    row = {"prompt": "Play."}
    numbers = [f"[{number}]" for number in range(1, 8)]
    rules, *hints, end = await played(use, row, *numbers, "[8]")
    assert "guess the number between 1 and 20" in rules.messages[0]["content"]
    assert {hint.messages[0]["content"] for hint in hints} == {"The target number is higher."}
    assert (end.reward, end.done, list(end.messages)) == (1.0, True, [])
    assert [hint.reward for hint in hints] == [0.0] * 7
    again = await played(use, row, *numbers, "[8]")
    assert again == [rules, *hints, end], "it can be replayed"


async def test_an_environment_of_skyrl_gym_gets_its_row() -> None:
    row = {
        "prompt": "What is 2 + 3?",
        "reward_spec": {"ground_truth": "5"},
        "extra_info": {"max_turns": 3},
    }
    opened, first, last = await played("skyrl_gym:gsm8k_multi_turn", row, "#### 4", "#### 5")
    assert list(opened.messages) == []
    assert first.messages[0]["role"] == "user"
    assert first.reward == pytest.approx(0.2 / 3), "well formed"
    assert (last.reward, last.done) == (1.0, True)


async def test_a_task_of_reasoning_gym_asks_the_question_of_its_row_and_scores_one_turn() -> None:
    use = "reasoning_gym:number_sorting"
    row = {"prompt": "Answer in <answer> tags.", "task": 7}
    opened, _ = await played(use, row, "")
    question = opened.messages[0]["content"]
    entry = reasoning_gym.create_dataset("number_sorting", seed=0)[7]
    assert question == entry["question"]
    again, right = await played(use, row, f"I sort. <answer>{entry['answer']}</answer>")
    assert again == opened, "a row is one question, for each trajectory of its group"
    assert (right.reward, right.done, list(right.messages)) == (1.0, True, [])
    *_, code = await played(use, row, "<answer>__import__('os').abort()</answer>")
    assert (code.reward, code.done) == (0.0, True), "it is not evaluated"
    other, _ = await played(use, row | {"task": 8}, "")
    assert other.messages[0]["content"] != question


@pytest.mark.parametrize("use", ["textarena:Guess", "skyrl_gym:gsm8", "reasoning_gym:chainsum"])
async def test_a_name_that_is_none_lists_those_that_are(use: str) -> None:
    caller = LocalCaller(environments(use, {}))
    with pytest.raises(CodeUnusable, match=r"GuessTheNumber-v0|gsm8k|chain_sum"):
        await caller.declare()
