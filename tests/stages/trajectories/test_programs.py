"""Programs behind a URL: what they get, and the tokens that their trajectories have; the policy's
turns are written by the tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeline.warehouse.dock import Dock
from stages.branches import branches_of
from stages.environments.classes import environments
from stages.environments.dialogue.chat import ChatDialogue
from stages.environments.dialogue.choice import Dialogues
from stages.environments.dialogue.interface import WRITTEN_ROLES
from stages.environments.dialogue.program import ProgramDialogue
from stages.environments.interface import Declarations
from stages.flow.catalogue import ENVIRONMENT
from stages.trajectories.local import LocalCaller
from stages.trajectories.progress import Ending, parked_progress
from stages.trajectories.stage import Environments
from stages.trajectories.trajectory import Limits, Trajectories
from tests.stages.environments.conversations import CHATML, QWEN_APPENDS, byte_level
from tests.stages.trajectories import programs, test_environments
from tests.stages.trajectories.test_environments import answer, ended
from tests.stages.trajectories.turns import admit, claimed, flow

PROGRAMS = "tests.stages.trajectories.programs"
TOKENIZER = byte_level()
BEGIN = "<|im_start|>"  # is the prompt
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
say = partial(test_environments.say, tokenizer=TOKENIZER)


@pytest.fixture
async def dock(index_url: str, tmp_path: Path) -> AsyncIterator[Dock]:
    programs.seen.clear()
    async with flow(index_url, tmp_path) as dock:
        yield dock


async def stage_of(
    dock: Dock, use: str, *, template: str = CHATML, limits: Mapping[str, Any] | None = None
) -> Environments:
    caller = LocalCaller(environments(use if ":" in use else f"{PROGRAMS}:{use}", {}))
    declared = Declarations(await caller.declare())
    dialogue = ProgramDialogue(
        TOKENIZER, lambda tools: ChatDialogue(TOKENIZER, template, {}, tools, roles=WRITTEN_ROLES)
    )
    numbers = {"max_turns": 8, "max_tokens": 900, "turn_tokens": 1, "step_seconds": 30.0}
    return Environments(
        dock,
        Trajectories(
            caller,
            declared.by_name,
            Dialogues({"": dialogue}),
            Limits(**{**numbers, "trajectory_seconds": 3600.0, **(limits or {})}),
            seed=3,
        ),
        group_size=1,
        concurrency=64,
        end_token=1,
    )


def conversation(*contents: str, roles: tuple[str, ...] = ("user", "assistant")) -> str:
    """The text of messages as CHATML writes them, with a turn's beginning where one follows."""
    texts = [
        f"<|im_start|>{roles[place % len(roles)]}\n{content}<|im_end|>\n"
        for place, content in enumerate(contents)
    ]
    return "".join(texts).removesuffix("\n")


def shown(row: Mapping[str, Any]) -> tuple[str, str]:
    """The text of a row with its prompt, and of what the policy has generated of it."""
    generated = [
        token for token, made in zip(row["response_ids"], row["loss_mask"], strict=True) if made
    ]
    ids = TOKENIZER(BEGIN, add_special_tokens=False)["input_ids"] + row["response_ids"]
    return str(TOKENIZER.decode(ids)), str(TOKENIZER.decode(generated))


async def test_a_programs_conversation_is_one_row_with_the_tokens_as_generated(dock: Dock) -> None:
    stage = await stage_of(dock, "talk")
    await admit(dock, {"prompt": "Hi"})
    await answer(dock, stage)
    await say(dock, "one<|im_end|>")
    await answer(dock, stage)
    await say(dock, "t wo", split=True)  # cut into letters, as no tokenizer would
    await answer(dock, stage)
    [row] = await ended(dock)
    expected = conversation("Hi", "one", "more", "t wo").removesuffix("<|im_end|>")
    assert shown(row) == (expected, "one<|im_end|>t wo")
    assert [TOKENIZER.decode([token]) for token in row["response_ids"][-4:]] == [*"t wo"]
    assert (row["environment_reward"], row["ending"]) == (5.0, Ending.DONE)
    assert len(row["turn_starts"]) == 2
    first, second = programs.seen
    assert (first.choices[0].message.content, first.choices[0].finish_reason) == ("one", "stop")
    before = len(row["response_ids"]) - 4
    assert (second.usage.prompt_tokens, second.usage.completion_tokens) == (1 + before, 4)
    await stage.trajectories.caller.end()


async def test_a_plain_function_is_called_in_a_thread_and_may_stream(dock: Dock) -> None:
    stage = await stage_of(dock, "plain")
    await admit(dock, {"prompt": "Hi"})
    for turn in ("one<|im_end|>", "two<|im_end|>"):
        await answer(dock, stage)
        await say(dock, turn)
    await answer(dock, stage)
    [row] = await ended(dock)
    roles = ("system", "user", "assistant", "user", "assistant")
    expected = conversation("Be short.", "Hi", "one", "more", "two", roles=roles)
    assert shown(row)[0] == expected
    assert row["environment_reward"] == 6.0


def paths(row: Mapping[str, Any]) -> list[str]:
    """The text that each branch of a row ends with, from its beginning."""
    tree = branches_of(row["branches"], len(row["response_ids"]))
    return [
        BEGIN + str(TOKENIZER.decode([row["response_ids"][at] for at in branch.path()]))
        for branch in tree
    ]


async def test_a_program_that_goes_back_begins_a_branch_there(dock: Dock) -> None:
    stage = await stage_of(dock, "rewrites")
    await admit(dock, {"prompt": "Hi"})
    rows = []
    for turn in ("one<|im_end|>", "two<|im_end|>", "three<|im_end|>", "four<|im_end|>"):
        await answer(dock, stage)
        rows.append(stage.trajectories.seen.branches)
        await say(dock, turn)
    await answer(dock, stage)
    [row] = await ended(dock)
    assert programs.seen == ["one", "two", "three", "four"]
    assert rows == [0, 0, 1, 2]
    assert shown(row)[1] == "".join(f"{turn}<|im_end|>" for turn in programs.seen)
    assert paths(row) == [
        conversation("Hi", "one", "more", "two"),
        conversation("Hi", "one", "not two", "three"),
        conversation("summary", "four"),
    ]
    assert row["loss_mask"].count(True) == sum(len(stage_turn(row, n)) for n in range(4))
    shared = [branch.depth for branch in branches_of(row["branches"], len(row["response_ids"]))]
    assert BEGIN + str(TOKENIZER.decode(row["response_ids"][: shared[2]])) == "<|im_start|>user\n"


async def test_what_stays_of_a_conversation_stays_as_it_was_generated(dock: Dock) -> None:
    stage = await stage_of(dock, "rewrites")
    await admit(dock, {"prompt": "Hi"})
    await answer(dock, stage)
    await say(dock, "o ne<|im_end|>", split=True, version=0)
    await answer(dock, stage)
    await say(dock, "two<|im_end|>", version=1)
    await answer(dock, stage)
    claim = await claimed(dock, "rollout", version=1)
    progress = (await parked_progress(dock, claim))[0]
    assert [TOKENIZER.decode([token]) for token in progress.turns[0]] == [*"o ne", "<|im_end|>"]
    context = [progress.token_ids[at] for at in progress.context(2)]
    expected = f"{conversation('Hi', 'o ne', 'not two')}\n<|im_start|>assistant\n"
    assert BEGIN + str(TOKENIZER.decode(context)) == expected
    end = progress.turn_starts[0] + len(progress.turns[0])
    assert context[:end] == progress.token_ids[:end]
    assert len(progress.turn_starts) == 3
    await stage.trajectories.caller.end()


async def test_conversations_of_one_program_share_what_they_begin_with(dock: Dock) -> None:
    """Two answers to one request, each of which is gone on with; then a third one."""
    stage = await stage_of(dock, "samples")
    await admit(dock, {"prompt": "Hi"})
    for turn in ("one", "two", "three", "four", "five"):
        await answer(dock, stage)
        await say(dock, f"{turn}<|im_end|>")
    await answer(dock, stage)
    [row] = await ended(dock)
    begin = conversation("Hi") + "\n<|im_start|>assistant\n"
    assert paths(row) == [
        begin + "one<|im_end|>",
        begin + "two<|im_end|>",
        conversation("Hi", "one", "more", "three"),
        conversation("Hi", "two", "more", "four"),
        begin + "five<|im_end|>",
    ]
    texts = [stage_text(row, number) for number in range(5)]
    assert texts == [f"{n}<|im_end|>" for n in ("one", "two", "three", "four", "five")]
    observed = row["loss_mask"].count(False)
    more = TOKENIZER("\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    assert observed == len(TOKENIZER(begin)["input_ids"]) - 1 + 2 * len(more)
    first, *others = programs.seen
    assert all(each.usage.prompt_tokens == first.usage.prompt_tokens for each in others[:1])


def stage_text(row: Mapping[str, Any], number: int) -> str:
    return str(TOKENIZER.decode(stage_turn(row, number)))


async def test_a_replayable_program_that_went_back_goes_on_at_the_same_token(dock: Dock) -> None:
    stage = await stage_of(dock, "rewrites")
    await admit(dock, {"prompt": "Hi"})
    for turn in ("one<|im_end|>", "two<|im_end|>", "three<|im_end|>"):
        await answer(dock, stage)
        await say(dock, turn)
    await stage.trajectories.caller.end()
    other = await stage_of(dock, "rewrites")
    await answer(dock, other)
    assert (other.trajectories.seen.replayed, other.trajectories.seen.remade) == (1, 0)
    await say(dock, "four<|im_end|>")
    await answer(dock, other)
    [row] = await ended(dock)
    assert paths(row)[1:] == [
        conversation("Hi", "one", "not two", "three"),
        conversation("summary", "four"),
    ]


@pytest.mark.parametrize(
    ("limits", "turns", "ending"),
    [({"max_turns": 5}, 5, Ending.TURNS), ({"max_tokens": 80}, 3, Ending.TOKENS)],
)
async def test_a_program_that_goes_back_for_ever_is_ended_by_the_limits_of_its_tree(
    dock: Dock, limits: dict[str, Any], turns: int, ending: Ending
) -> None:
    stage = await stage_of(dock, "starts_anew", limits=limits)
    await admit(dock, {"prompt": "Hi"})
    for _ in range(turns):
        await answer(dock, stage)
        await say(dock, "one<|im_end|>")
    await answer(dock, stage)
    [row] = await ended(dock)
    assert (row["ending"], len(row["turn_starts"])) == (ending, turns)
    assert len(paths(row)) == turns, "what it would have gone on with is taken away"
    assert len(row["response_ids"]) <= limits.get("max_tokens", 900)
    assert row["loss_mask"][-1]


async def test_tools_are_those_of_the_request_and_calls_come_back(dock: Dock) -> None:
    stage = await stage_of(dock, "calls", template=QWEN_APPENDS)
    await admit(dock, {"prompt": "1+?"})
    for turn in (f"I add.\n{CALL}<|im_end|>", "<tool_call>{nonsense<|im_end|>"):
        await answer(dock, stage)
        await say(dock, turn)
    await answer(dock, stage)
    [row] = await ended(dock)
    text, generated = shown(row)
    assert generated == f"I add.\n{CALL}<|im_end|><tool_call>{{nonsense<|im_end|>"
    assert '"name": "add"' in text.partition("<|im_end|>")[0]
    assert "<tool_response>\n1\n</tool_response>" in text
    first, second = programs.seen
    [choice] = first["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "I add.")
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    starts = row["turn_starts"]
    assert choice["token_ids"] == row["response_ids"][starts[0] :][: len(choice["token_ids"])]
    assert second["prompt_token_ids"][1:] == row["response_ids"][: starts[1]]
    assert {each["logprob"] for each in choice["logprobs"]["content"]} == {-0.5}
    unreadable = second["choices"][0]["message"]
    assert (unreadable["content"], unreadable["tool_calls"]) == ("<tool_call>{nonsense", None)


async def test_a_program_that_goes_back_behind_all_turns_and_finds_no_room_has_ended(
    dock: Dock,
) -> None:
    stage = await stage_of(dock, "begins_anew")
    await admit(dock, {"prompt": "Hi"})
    await answer(dock, stage)
    await say(dock, "one<|im_end|>")
    await answer(dock, stage)
    [row] = await ended(dock)
    assert (row["ending"], row["environment_reward"]) == (Ending.TOKENS, 0.5)
    assert shown(row)[1] == "one<|im_end|>"
    assert (len(row["turn_starts"]), row["turn_reward"]) == (1, [0.5])


async def test_a_program_that_writes_tokens_gets_tokens_and_these_are_the_row(dock: Dock) -> None:
    stage = await stage_of(dock, "tokens")
    await admit(dock, {"prompt": "Hi"})
    await answer(dock, stage)
    await say(dock, "o ne<|im_end|>", split=True, version=0)  # as no tokenizer would
    await answer(dock, stage)
    await say(dock, "two<|im_end|>", version=1)
    await answer(dock, stage)
    [row] = await ended(dock)
    assert shown(row)[0] == conversation("Hi", "o ne", "more", "two")
    *refused, first, second = programs.seen
    assert [each["error"]["message"].partition(":")[0] for each in refused] == [
        *("token_ids", "token_ids", "stream")
    ]
    assert first["request_id"] == "a"
    [choice] = second["choices"]
    assert choice["token_ids"] == stage_turn(row, 1)
    assert choice["weight_versions"] == [1] * len(choice["token_ids"])
    assert [each["logprob"] for each in choice["logprobs"]["content"]] == row["rollout_logprobs"][
        -len(choice["token_ids"]) :
    ]
    assert (choice["finish_reason"], stage.trajectories.seen.branches) == ("stop", 0)


async def test_a_turn_that_a_program_tokenizes_again_is_left_behind_by_a_branch(
    dock: Dock,
) -> None:
    stage = await stage_of(dock, "tokens")
    await admit(dock, {"prompt": "Hi", "drifts": True})
    await answer(dock, stage)
    await say(dock, "What is<|im_end|>", split=True)
    await answer(dock, stage)
    await say(dock, "two<|im_end|>")
    await answer(dock, stage)
    [row] = await ended(dock)
    assert shown(row)[1] == "What is<|im_end|>two<|im_end|>"
    assert paths(row)[-1] == conversation("Hi", "What is", "more", "two")
    assert stage.trajectories.seen.branches == 1


@pytest.mark.parametrize(
    ("token_ids", "reason"), [([1, 2], "must begin with"), ([0, 1 << 20], "must be below the")]
)
async def test_tokens_that_are_no_conversation_of_the_model_cost_the_trajectory(
    dock: Dock, token_ids: list[int], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = await stage_of(dock, "asks_once")
    await admit(dock, {"prompt": "Hi", "token_ids": token_ids})
    await answer(dock, stage)
    [row] = await ended(dock)
    assert row["ending"] == Ending.DROPPED
    assert reason in capsys.readouterr().out


async def test_the_three_forms_of_requests_continue_one_conversation(dock: Dock) -> None:
    stage = await stage_of(dock, "forms", template=QWEN_APPENDS)
    await admit(dock, {"prompt": "1+?"})
    await answer(dock, stage)
    await say(dock, f"I add.\n{CALL}<|im_end|>")
    await answer(dock, stage)
    await say(dock, "It is 1.<|im_end|>")
    await answer(dock, stage)
    [row] = await ended(dock)
    assert row["environment_reward"] == 1.0
    assert stage.trajectories.seen.branches == 0
    assert len(row["turn_starts"]) == 2
    anthropic, responses, image, assistant, several = programs.seen
    assert [block["type"] for block in anthropic["content"]] == ["text", "tool_use"]
    assert (anthropic["stop_reason"], anthropic["usage"]["output_tokens"]) == (
        "tool_use",
        len(stage_turn(row, 0)),
    )
    assert responses["output"][0]["content"][0]["text"] == "It is 1."
    messages = [each["error"]["message"] for each in (image, assistant, several)]
    assert messages == [
        "messages[0].content: a part of type 'image_url' is no text",
        "messages: the last one is the assistant's; end with another one",
        "n: a session has one answer to each request; give 1",
    ]


def stage_turn(row: Mapping[str, Any], number: int) -> list[int]:
    """The tokens of a turn."""
    bounds = [*row["turn_starts"], len(row["response_ids"])]
    mask = row["loss_mask"][bounds[number] : bounds[number + 1]]
    tokens = row["response_ids"][bounds[number] : bounds[number + 1]]
    return [token for token, made in zip(tokens, mask, strict=True) if made]


@pytest.mark.parametrize(
    ("limits", "ending"),
    [
        ({"max_turns": 2}, Ending.TURNS),
        ({"max_tokens": 40}, Ending.TOKENS),
        ({"trajectory_seconds": 0.0}, Ending.TIMEOUT),
    ],
)
async def test_a_limit_ends_the_session_and_the_program_keeps_its_reward(
    dock: Dock, limits: dict[str, Any], ending: Ending
) -> None:
    stage = await stage_of(dock, "never_ends", limits=limits)
    await admit(dock, {"prompt": "Hi"})
    for _ in range(2):
        await answer(dock, stage)
        if not stage.trajectories.seen.endings:
            await say(dock, "one<|im_end|>")
    if not stage.trajectories.seen.endings:
        await answer(dock, stage)
    [row] = await ended(dock)
    assert (row["ending"], row["environment_reward"]) == (ending, 0.5)
    status, message = programs.seen[-1]
    assert (status, "the trajectory has ended" in message) == (410, True)


@pytest.mark.parametrize(
    ("use", "reason"), [("fails", "fails raised RuntimeError('not today')"), ("hangs", "0.2 s")]
)
async def test_a_program_that_fails_costs_its_trajectory(
    dock: Dock, use: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = await stage_of(dock, use)
    await admit(dock, {"prompt": "Hi"})
    await answer(dock, stage)
    await say(dock, "one<|im_end|>")
    if use == "hangs":  # the first request, which takes what the machine takes, has been made
        stage.trajectories.limits = replace(stage.trajectories.limits, step_seconds=0.2)
    await answer(dock, stage)
    [row] = await ended(dock)
    assert row["ending"] == Ending.DROPPED
    printed = capsys.readouterr().out
    assert reason in printed
    assert "programs.py" in printed
    await stage.trajectories.caller.end()


async def test_a_key_is_good_for_its_session_while_that_lasts(dock: Dock) -> None:
    stage = await stage_of(dock, "keeps_its_key")
    await admit(dock, {"prompt": "Hi"}, {"prompt": "Ho"})
    await answer(dock, stage)
    first, second = programs.seen
    assert first.api_key != second.api_key
    body = {"messages": [{"role": "user", "content": "?"}]}
    async with httpx.AsyncClient() as http:

        async def status(key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            url = f"{first.base_url}/chat/completions"
            return (await http.post(url, json=body, headers=headers)).status_code

        assert await status("sk-session-another") == 401
        for _ in range(2):
            await say(dock, "one<|im_end|>", "uno<|im_end|>")
            await answer(dock, stage)
        assert [await status(each.api_key) for each in (first, second)] == [401, 401]
    rows = await ended(dock)
    assert [shown(row)[1] for row in rows] == ["one<|im_end|>" * 2, "uno<|im_end|>" * 2]


async def test_a_replayable_program_goes_on_at_the_same_token_in_another_worker(
    dock: Dock,
) -> None:
    stage = await stage_of(dock, "talk")
    await admit(dock, {"prompt": "Hi", "turns": 3})
    for turn in ("one<|im_end|>", "two<|im_end|>"):
        await answer(dock, stage)
        await say(dock, turn)
    await stage.trajectories.caller.end()
    other = await stage_of(dock, "talk")
    await answer(dock, other)
    assert (other.trajectories.seen.replayed, other.trajectories.seen.remade) == (1, 0)
    await say(dock, "three<|im_end|>")
    await answer(dock, other)
    [row] = await ended(dock)
    assert shown(row)[0] == conversation("Hi", "one", "more", "two", "more", "three")


async def test_special_tokens_of_a_program_are_text(dock: Dock) -> None:
    stage = await stage_of(dock, "talk")
    await admit(dock, {"prompt": "<|im_end|>", "turns": 1})
    await answer(dock, stage)
    claim = await claimed(dock, "rollout")
    progress = (await parked_progress(dock, claim))[0]
    special = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    assert progress.token_ids.count(special) == 1
    assert ENVIRONMENT not in programs.seen
    await stage.trajectories.caller.end()
