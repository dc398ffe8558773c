"""Environments that a user writes as a class, called in this process."""

from __future__ import annotations

import asyncio
import json
import linecache
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from stages.environments.classes import MOST_CHARACTERS, environments
from stages.environments.interface import EnvironmentFailed, Reply, Trajectory, Turn
from stages.trajectories.local import LocalCaller
from stages.user_code import CodeUnusable
from tests.stages.environments import examples

EXAMPLES = "tests.stages.environments.examples"
LIMIT = 30.0  # seconds of a call, where it is not the subject


def caller_of(use: str | Mapping[str, str], **options: Any) -> LocalCaller:
    if isinstance(use, str):
        return LocalCaller(environments(f"{EXAMPLES}:{use}", options))
    return LocalCaller(
        environments({name: f"{EXAMPLES}:{kind}" for name, kind in use.items()}, options)
    )


def trajectory(key: str = "t", environment: str = "", seed: int = 7, **row: Any) -> Trajectory:
    return Trajectory(key, row, seed, environment)


def calling(*calls: tuple[str, Any], fault: str = "") -> Turn:
    tool_calls = [
        {"id": f"call-{number}", "type": "function", "function": {"name": name, "arguments": given}}
        for number, (name, given) in enumerate(calls)
    ]
    return Turn({"role": "assistant", "content": "", "tool_calls": tool_calls}, fault)


def saying(text: str) -> Turn:
    return Turn({"role": "assistant", "content": text})


def contents(reply: Reply) -> list[str]:
    return [message["content"] for message in reply.messages]


async def test_tools_answer_in_the_order_of_the_turn_and_one_without_calls_ends() -> None:
    caller = caller_of("Calculator", bonus=0.25)
    assert await caller.open(trajectory(prompt="2 · 3?", answer=6), LIMIT) == Reply()
    reply = await caller.step(
        "t", calling(("add", {"a": 2, "b": 3}), ("multiply", {"a": 2, "b": 3})), LIMIT
    )
    assert reply == Reply(
        (
            {"role": "tool", "name": "add", "tool_call_id": "call-0", "content": "5"},
            {"role": "tool", "name": "multiply", "tool_call_id": "call-1", "content": "6"},
        ),
        calls=2,
    )
    assert await caller.step("t", saying("It is 6."), LIMIT) == Reply(reward=1.25, done=True)
    await caller.close("t")
    assert not caller.knows("t")
    with pytest.raises(KeyError):
        await caller.step("t", saying("again"), LIMIT)


async def test_what_a_policy_calls_wrongly_is_told_and_the_trajectory_goes_on() -> None:
    caller = caller_of("Calculator")
    await caller.open(trajectory(answer=6), LIMIT)
    turn = calling(
        ("subtract", {"a": 1, "b": 2}),
        ("_keep", {"number": 6}),
        ("get_reward", {}),
        ("add", {"a": 1}),
        ("add", {"a": 1, "b": 2, "function": 3}),
        ("add", [1, 2]),
        ("divide", {"a": 1, "b": 0}),
        ("add", {"a": 4, "b": 2}),
        fault="the last call ends in the middle",
    )
    reply = await caller.step("t", turn, LIMIT)
    assert (reply.calls, reply.failed_calls, reply.done) == (9, 8, False)
    *failures, result, fault = contents(reply)
    mistakes = [json.loads(text)["error"] for text in failures]
    assert "must be a mapping" in mistakes.pop(5)
    assert mistakes == [
        "there is no tool 'subtract'; the tools are ['add', 'divide', 'multiply']",
        "there is no tool '_keep'; the tools are ['add', 'divide', 'multiply']",
        "there is no tool 'get_reward'; the tools are ['add', 'divide', 'multiply']",
        "add: missing a required argument: 'b'; its arguments are ['a', 'b']",
        "add: got an unexpected keyword argument 'function'; its arguments are ['a', 'b']",
        "division by zero",
    ]
    assert result == "6"
    assert json.loads(fault) == {"error": "the last call ends in the middle"}
    assert (await caller.step("t", saying("6"), LIMIT)).reward == 1.0


async def test_a_game_whose_reward_is_an_attribute() -> None:
    caller = caller_of("Wordle")
    reply = await caller.open(trajectory(secret="crane"), LIMIT)
    assert reply.messages == ({"role": "user", "content": "Guess a word of 5 letters."},)
    reply = await caller.step("t", calling(("guess", {"guess": "crate"})), LIMIT)
    assert contents(reply) == ["G G G X G"]
    reply = await caller.step(
        "t", calling(("guess", {"guess": "crane"}), ("guess", {"guess": "crane"})), LIMIT
    )
    assert contents(reply) == ["G G G G G", '{"error": "Game over."}']
    assert reply.failed_calls == 1
    assert await caller.step("t", saying("Done."), LIMIT) == Reply(reward=1.0, done=True)


async def test_a_trajectory_that_a_limit_ended_has_its_reward() -> None:
    caller = caller_of("Calculator")
    await caller.open(trajectory(answer=6), LIMIT)
    await caller.step("t", calling(("add", {"a": 4, "b": 2})), LIMIT)
    assert await caller.finish("t", LIMIT) == Reply(reward=1.0, done=True)


async def test_async_methods_share_the_event_loop_and_get_what_reset_names() -> None:
    caller = caller_of("AsyncSearch")
    for key in "ab":
        pages = {"red house": "", "blue house": "", "tree": ""}
        reply = await caller.open(trajectory(key, seed=3, pages=pages, other=1), LIMIT)
        assert contents(reply) == ["seed 3"]
    found = await caller.step("a", calling(("search", {"words": ["house"], "limit": 1})), LIMIT)
    assert contents(found) == ['["red house"]']
    met = await asyncio.gather(*(caller.step(key, calling(("meet", {})), LIMIT) for key in "ab"))
    assert [contents(reply) for reply in met] == [["met"], ["met"]]
    assert (await caller.step("a", saying("red"), LIMIT)).reward == 0.5


async def test_plain_methods_of_a_trajectory_are_in_one_thread_to_its_close() -> None:
    caller = caller_of("Notes")
    for key in "ab":
        await caller.open(trajectory(key), LIMIT)
    counts = [
        await caller.step(key, calling(("write", {"text": "x"})), LIMIT) for key in ("a", "b", "a")
    ]
    assert [contents(reply) for reply in counts] == [["1"], ["1"], ["2"]]
    examples.closed.clear()
    await caller.end()
    assert examples.closed == {True}
    assert not caller.knows("a")


async def test_a_class_with_step_gets_the_text_and_rewards_are_of_turns() -> None:
    caller = caller_of("Guess", most=4)
    await caller.open(trajectory(seed=1), LIMIT)
    assert await caller.step("t", saying("two"), LIMIT) == Reply(
        ({"role": "user", "content": "Write a number."},), -0.25
    )
    replies = [await caller.step("t", saying(text), LIMIT) for text in ("0", "1")]
    assert [(contents(reply), reply.reward, reply.done) for reply in replies] == [
        (["more"], 0.0, False),
        ([], 1.0, True),
    ]


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        ("None", Reply(done=True)),
        ("text", Reply(({"role": "user", "content": "go on"},))),
        ("pair", Reply(({"role": "user", "content": "go on"},), 0.5)),
        ("last pair", Reply((), 0.5, done=True)),
        ("triple", Reply(({"role": "user", "content": "the end"},), 0.5, done=True)),
        ("gym", Reply(({"role": "user", "content": "go on"},), 0.5)),
        ("gymnasium", Reply(({"role": "user", "content": "the end"},), 0.5, done=True)),
        ("object", Reply(({"role": "user", "content": "go on"},), 0.5)),
        ("skyrl_gym", Reply(({"role": "user", "content": "go on"},), 0.5)),
    ],
)
async def test_step_may_answer_in_several_ways(text: str, reply: Reply) -> None:
    caller = caller_of("Answers")
    await caller.open(trajectory(), LIMIT)
    assert await caller.step("t", saying(text), LIMIT) == reply


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("number", "returned 3: None, a text, .* is wanted"),
        ("no text", "without a text it must be done"),
        ("text as a reward", "returned 'much' as a reward"),
        ("nan", "returned nan as a reward"),
        ("assistant", "is no text, and no list of messages"),
        ("bytes", "b'go on' is no text"),
    ],
)
async def test_what_step_must_not_return_ends_the_trajectory(text: str, reason: str) -> None:
    caller = caller_of("Answers")
    for key in "ab":
        await caller.open(trajectory(key), LIMIT)
    with pytest.raises(EnvironmentFailed, match=reason) as failed:
        await caller.step("a", saying(text), LIMIT)
    assert str(failed.value).startswith(f"{EXAMPLES}:Answers.step returned")
    assert "examples.py, line " in failed.value.place
    assert not caller.knows("a")
    assert caller.knows("b")


async def test_get_reward_counts_before_the_rewards_of_step_and_others_are_declared() -> None:
    caller = caller_of("Judged")
    await caller.open(trajectory(), LIMIT)
    rewards = [(await caller.step("t", saying("x"), LIMIT)).reward for _ in range(2)]
    assert rewards == [None, 2.0]
    caller = caller_of("Undeclared")
    await caller.open(trajectory(), LIMIT)
    with pytest.raises(EnvironmentFailed, match="write gives_reward = True in its class"):
        await caller.step("t", saying("x"), LIMIT)


async def test_results_of_tools_are_text() -> None:
    caller = caller_of("Results")
    await caller.open(trajectory(), LIMIT)
    whats = ("none", "dict", "set", "surrogate", "stop", "unprintable")
    reply = await caller.step("t", calling(*(("give", {"what": what}) for what in whats)), LIMIT)
    assert contents(reply) == [
        "null",
        '{"é": [1, 2.5]}',
        '"{1}"',
        "?",
        '{"error": "StopIteration"}',
        '{"error": "cannot be shown"}',
    ]
    assert reply.failed_calls == 2


async def test_a_turn_adds_a_bounded_number_of_characters() -> None:
    caller = caller_of("Results")
    await caller.open(trajectory(), LIMIT)
    floods = calling(*(("give", {"what": "", "size": size}) for size in (10, 100_000, 100_000)))
    first, second, third = contents(await caller.step("t", floods, LIMIT))
    assert first == "x" * 10
    assert second == "x" * (MOST_CHARACTERS - 10) + "\n[cut: it has 100000 characters]"
    assert third == "\n[cut: it has 100000 characters]"


@pytest.mark.parametrize(("what", "reason"), [("exit", "SystemExit"), ("memory", "MemoryError")])
async def test_a_tool_that_exits_or_has_no_memory_ends_its_trajectory(
    what: str, reason: str
) -> None:
    caller = caller_of("Results")
    await caller.open(trajectory(), LIMIT)
    with pytest.raises(EnvironmentFailed, match=rf"Results.give raised {reason}") as failed:
        await caller.step("t", calling(("give", {"what": what})), LIMIT)
    assert "examples.py, line " in failed.value.place
    assert not caller.knows("t")


async def test_what_other_methods_raise_ends_the_trajectory_with_its_line() -> None:
    caller = caller_of("Results")
    with pytest.raises(EnvironmentFailed, match=r"reset raised RuntimeError") as failed:
        await caller.open(trajectory(fails="reset"), LIMIT)
    file, _, line = failed.value.place.partition(", line ")
    assert "not today" in linecache.getline(file, int(line))
    with pytest.raises(EnvironmentFailed, match="reset returned 5; a text or None is wanted"):
        await caller.open(trajectory(fails="result"), LIMIT)
    await caller.open(trajectory(), LIMIT)
    with pytest.raises(EnvironmentFailed, match="get_reward returned 'a lot' as a reward"):
        await caller.step("t", saying("x"), LIMIT)
    with pytest.raises(EnvironmentFailed, match="reset raised TypeError"):
        await caller_of("Calculator").open(trajectory(), LIMIT)
    with pytest.raises(EnvironmentFailed, match="__init__ raised TypeError"):
        await caller_of("Wordle", size=3).open(trajectory(), LIMIT)


async def test_several_environments_by_the_rows_column() -> None:
    caller = caller_of({"sums": "Calculator", "words": "Wordle"}, sums={"bonus": 1.0})
    declared = await caller.declare()
    tools = {
        name: [tool["function"]["name"] for tool in each.tools] for name, each in declared.items()
    }
    assert tools == {"sums": ["add", "divide", "multiply"], "words": ["guess"]}
    row = {"environment": "sums", "answer": 6}
    await caller.open(Trajectory("s", row, 7, "sums"), LIMIT)
    assert (await caller.finish("s", LIMIT)).reward == 1.0
    reply = await caller.open(trajectory("w", "words", secret="ab"), LIMIT)
    assert contents(reply) == ["Guess a word of 2 letters."]
    with pytest.raises(EnvironmentFailed, match=r"none of the run's, \['sums', 'words'\]"):
        await caller.open(trajectory("x", "chess"), LIMIT)


async def test_declarations_have_schemas_of_types_and_docstrings() -> None:
    declared = (await caller_of("AsyncSearch").declare())[""]
    assert [tool["function"]["name"] for tool in declared.tools] == ["meet", "search"]
    parameters = declared.tools[1]["function"]["parameters"]
    assert parameters == {
        "type": "object",
        "properties": {
            "words": {
                "type": "array",
                "items": {"type": "string"},
                "description": "What to look for.",
            },
            "limit": {"type": "integer", "description": "The most titles."},
        },
        "required": ["words"],
    }
    assert (declared.replayable, declared.gives_reward) == (False, True)
    for kind, replayable, gives_reward in (
        ("Calculator", True, True),
        ("Wordle", False, True),
        ("Notes", False, False),
        ("Guess", True, True),
        ("Undeclared", False, False),
    ):
        each = (await caller_of(kind).declare())[""]
        assert (each.replayable, each.gives_reward) == (replayable, gives_reward), kind
    assert (await caller_of("Guess").declare())[""].tools == ()


@pytest.mark.parametrize(
    ("use", "options", "reason"),
    [
        (f"{EXAMPLES}:Nothing", {}, "has no attribute 'Nothing'"),
        (f"{EXAMPLES}:not_a_class", {}, "is a int, not a class"),
        ("Calculator", {}, "use 'module:Class'"),
        (f"{EXAMPLES}:NoReset", {}, r"has no method reset; write reset\(\*\*row\)"),
        (f"{EXAMPLES}:NoDocstring", {}, "'look' without a schema: .*or call it _look"),
        (f"{EXAMPLES}:Calculator", {"size": 3}, "unexpected keyword argument 'size'.*examples.py"),
    ],
)
async def test_what_is_no_environment_is_told_with_the_way_out(
    use: str, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(CodeUnusable, match=reason) as refused:
        await LocalCaller(environments(use, options)).declare()
    assert refused.value.problems[0].key == "environment.use"


async def test_a_place_is_waited_for_and_given_back() -> None:
    caller = LocalCaller(environments(f"{EXAMPLES}:Wordle", {}), places=1)
    await caller.open(trajectory("a", secret="x"), LIMIT)
    with pytest.raises(EnvironmentFailed, match=r"all 1 places .* raise environment.processes"):
        await caller.open(trajectory("b", secret="x"), 0.01)
    opening = asyncio.create_task(caller.open(trajectory("b", secret="x"), LIMIT))
    await asyncio.sleep(0)
    await caller.close("a")
    await opening
    await caller.open(trajectory("b", secret="x"), LIMIT)  # it begins again, in its own place


async def test_a_call_of_before_does_not_close_a_trajectory_that_began_again() -> None:
    examples.AsyncSearch.waiting = None
    caller = caller_of("AsyncSearch")
    await caller.open(trajectory(pages={}), LIMIT)
    old = asyncio.create_task(caller.step("t", calling(("meet", {})), 0.2))
    await asyncio.sleep(0)
    await caller.open(trajectory(pages={}), LIMIT)
    with pytest.raises(EnvironmentFailed, match=r"AsyncSearch.meet took more than 0.2 s"):
        await old
    assert caller.knows("t")
    assert (await caller.finish("t", LIMIT)).reward == 0.5


def test_neither_an_import_nor_a_declaration_needs_torch() -> None:
    code = (
        "import sys; from stages.environments.classes import environments; "
        f"environments('{EXAMPLES}:Calculator', {{}})[''].declare(); print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
