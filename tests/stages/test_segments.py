"""What a person sees of a trajectory is the trajectory: all of its tokens, each once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stages.flow.catalogue import OBSERVED
from stages.samples.segments import described
from stages.trajectories.progress import Progress, parked_columns
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
