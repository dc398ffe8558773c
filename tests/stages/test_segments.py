"""What a person sees of a trajectory is the trajectory: all of its tokens, each once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stages.flow.catalogue import OBSERVED
from stages.samples.segments import described
from stages.samples.trajectory_export import openenv_trace
from stages.trajectories.progress import Progress, parked_columns
from tests.stages.environments.test_turns import of_xml
from tests.stages.prompts.test_conversations import small_bpe

TEXTS = st.text("ab+é😀 ", min_size=1, max_size=6)
TURNS = st.lists(st.tuples(TEXTS, st.lists(st.integers(1, 3), min_size=1, max_size=3)), max_size=4)


@given(TURNS, st.integers(0, 9))
def test_the_parts_are_the_row(turns: list[tuple[str, list[int]]], version: int) -> None:
    tokenizer = small_bpe()
    progress = Progress()
    for text, pieces in turns:
        progress.observe(tokenizer(text, add_special_tokens=False)["input_ids"])
        progress.begin_turn(0.25)
        progress.time_turn(1.0, 0.5)
        progress.turn_reward.append(0.5)
        for tokens in pieces:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"][:tokens]
            progress.token_ids += ids
            progress.versions.append((version, len(ids)))
            version += 1
    columns = {
        name: column[0].tolist()
        for name, column in parked_columns([progress]).items()
        if name != "truncated"
    }
    segments = described(columns, tokenizer)
    shown = [of_version for segment in segments for of_version in segment.get("pieces", ())]
    generated = [pair for pair in progress.versions if pair[0] != OBSERVED]
    assert [(made_by, tokens) for made_by, tokens, _ in shown] == generated
    assert sum(segment["tokens"] for segment in segments) == len(progress.token_ids)
    mask = [segment["generated"] for segment in segments for _ in range(segment["tokens"])]
    assert mask == progress.mask()
    of_turns = [segment for segment in segments if segment["generated"]]
    assert len(of_turns) == len(turns)
    for segment in of_turns:
        assert "".join(text for _, _, text in segment["pieces"]) == segment["text"]
        assert segment["seconds"] == {"engine": 0, "waiting": 1, "environment": 0.75}
        assert segment["reward"] == 0.5


def test_calls_of_tools_stand_beside_the_turn_that_made_them() -> None:
    tokenizer = small_bpe()
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    progress = Progress()
    for text in (call, call.replace("}}", "}"), "no call"):
        progress.begin_turn()
        progress.token_ids += tokenizer(text, add_special_tokens=False)["input_ids"]
        progress.versions.append((0, len(progress.token_ids) - progress.turn_starts[-1]))
    columns = {
        name: column[0].tolist()
        for name, column in parked_columns([progress]).items()
        if name != "truncated"
    }
    segments = described(columns, tokenizer)
    assert [segment["calls"] for segment in segments] == [
        [{"name": "add", "arguments": {"a": 1}}],
        [],
        [],
    ]
    assert all(segment["reward"] is None for segment in segments)


def test_calls_in_the_form_of_the_models_response_template_are_read_by_it() -> None:
    tokenizer = of_xml()
    call = "<tool_call><function=add><parameter=a>7</parameter></function></tool_call>"
    progress = Progress()
    for text in (f"Well.{call}<|im_end|>", call.replace("function", "functio"), "no call"):
        progress.observe(tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False))
        progress.begin_turn()
        ids = tokenizer.encode(text, add_special_tokens=False)
        progress.append(ids, [0.0] * len(ids), 0)
    columns = {
        name: column[0].tolist()
        for name, column in parked_columns([progress]).items()
        if name != "truncated"
    }
    turns = [segment for segment in described(columns, tokenizer) if segment["generated"]]
    called = {"name": "add", "arguments": {"a": "7"}}
    assert [turn["calls"] for turn in turns] == [[called], [], []]


def test_the_parts_of_a_branch_say_what_it_goes_on_from_and_its_turns_have_its_path() -> None:
    tokenizer = small_bpe()
    progress = Progress()
    for after, observation in [(0, [5, 6]), (1, [7]), (1, [7, 8]), (0, [5, 6])]:
        progress.observe(observation, after)
        progress.begin_turn()
        progress.turn_reward.append(0.5)
        progress.append([20 + len(progress.turn_starts)] * 2, [-0.5] * 2, 3)
    assert progress.token_ids == [5, 6, 21, 21, 7, 22, 22, 8, 23, 23, 24, 24]
    assert progress.branches == [7, 5, 10, 2]
    columns = {
        name: column[0].tolist()
        for name, column in parked_columns([progress]).items()
        if name != "truncated"
    }
    segments = described(columns, tokenizer)
    assert [segment["generated"] for segment in segments] == [*[False, True] * 3, True]
    assert [segment["branch"] for segment in segments] == [0, 0, 0, 0, 1, 1, 2]
    assert [segment.get("shares") for segment in segments] == [0, *[None] * 3, 5, None, 2]
    names = ("step", "group", "place", "reward", "ending")
    trajectory = {
        **dict.fromkeys(names, 0),
        "prompt_ids": [1],
        "completion_ids": progress.token_ids,
        "logprobs": progress.logprobs,
        "segments": segments,
        "branches": progress.branches,
    }
    turns = openenv_trace(trajectory)["turns"]
    assert [turn["prompt_token_ids"] for turn in turns] == [
        [1, 5, 6],
        [1, 5, 6, 21, 21, 7],
        [1, 5, 6, 21, 21, 7, 8],
        [1, 5, 6],
    ]
    assert [turn["completion_token_ids"] for turn in turns] == [[n, n] for n in (21, 22, 23, 24)]
    observed = [bool(turn["metadata"]["observation"]) for turn in turns]
    assert observed == [True, False, False, False], "what follows a turn on its own branch"
