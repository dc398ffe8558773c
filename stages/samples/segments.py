"""The segments of a response: turns of the policy, and what was observed between them.

    versions, turn_starts ─▶ segments ─▶ described ─▶ text, tool calls, reward, seconds, pieces by policy version

Importing this needs no torch.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from stages.branches import branches_of
from stages.flow.catalogue import (
    BRANCHES,
    OBSERVED,
    TIMES,
    TURN_REWARD,
    TURN_SECONDS,
    TURN_STARTS,
)

if TYPE_CHECKING:
    from stages.model.load import Tokenizer

Segment = tuple[int, int, bool]
"""A part of a response: its first token, the one after its last, and whether it was generated."""
Pairs = Sequence[tuple[int, int]]
"""Policy versions and how many tokens each has made, in the response's order."""
BEFORE = 64  # tokens before a turn, with the beginning of the assistant's message
Decode = Callable[[Sequence[int]], str]


def segments(versions: Pairs, turn_starts: Sequence[int] = ()) -> list[Segment]:
    """Return the segments of a response whose tokens ``versions`` made: its turns, of which those
    after the first begin at ``turn_starts``, also where one version has made two of them, and the
    observations.

    >>> segments([(3, 2), (4, 1), (-1, 5), (4, 2)], [0, 8])
    [(0, 3, True), (3, 8, False), (8, 10, True)]
    """
    out: list[Segment] = []
    begin = 0
    for version, tokens in versions:
        is_generated = version != OBSERVED
        end = begin + tokens
        starts = [start for start in turn_starts if begin < start < end]
        for first, last in pairwise([begin, *starts, end]):
            goes_on = bool(out) and out[-1][2] == is_generated and first not in turn_starts
            out.append((out.pop()[0] if goes_on else first, last, is_generated))
        begin = end
    return out


def described(columns: Mapping[str, Any], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the segments of the trajectory with these ``columns``, as lists: `generated`, `tokens`,
    `text`, `reward` (None: it has none), and of a turn `pieces` (policy version, tokens, text),
    `calls` of tools (JSON between <tool_call> and </tool_call>, or in the form that the tokenizer's
    response template has, whose arguments are text where it gives no types), and `seconds`, the TIMES
    (None: not known). Where there are several, its `branch`, from 0, and of a branch's first segment
    how many tokens of the others it `shares`."""

    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode([*token_ids], skip_special_tokens=True))

    ids = columns["response_ids"]
    flat = columns["versions"]
    versions = list(zip(flat[::2], flat[1::2], strict=True))
    starts = columns[TURN_STARTS]
    branches = branches_of(columns.get(BRANCHES, ()), len(ids))
    out = []
    for begin, end, is_generated in segments(versions, starts):
        text = decode(ids[begin:end])
        segment = {"generated": is_generated, "tokens": end - begin, "text": text, "reward": None}
        if is_generated:
            turn = bisect_right(starts, begin) - 1
            seconds = columns[TURN_SECONDS][len(TIMES) * turn :][: len(TIMES)]
            segment |= {
                "reward": _known(next(iter(columns[TURN_REWARD][turn:]), math.nan)),
                "pieces": [*_pieces(ids, versions, begin, end, decode)],
                "calls": _calls(text, turn) or _calls_by_template(ids, begin, end, tokenizer),
                "seconds": {
                    name: _known(round(s, 6)) for name, s in zip(TIMES, seconds, strict=False)
                },
            }
        if len(branches) > 1:
            number = bisect_right(branches, begin, key=lambda branch: branch.begin) - 1
            segment["branch"] = number
            if begin == branches[number].begin:
                segment["shares"] = branches[number].depth
        out.append(segment)
    return out


def _pieces(
    ids: Sequence[int], versions: Pairs, begin: int, end: int, decode: Decode
) -> Iterator[tuple[int, int, str]]:
    """Yield the pieces of a turn, each by one policy version. A character whose bytes two versions
    have made is the later one's."""
    first = 0
    shown = 0
    for version, count in versions:
        tokens = min(first + count, end) - max(first, begin)
        first, last = first + count, min(first + count, end)
        if last <= begin:
            continue
        text = decode(ids[begin:last])
        if last < end:
            text = text.rstrip("\ufffd")
        yield version, tokens, text[shown:]
        if last == end:
            return
        shown = len(text)


def _calls(text: str, turn: int) -> list[dict[str, Any]]:
    """Return the tool calls of a turn's text that can be read."""
    from stages.environments.dialogue.turns import read_turn

    message = read_turn(text, False, turn, calls=True).message
    return [call["function"] for call in message.get("tool_calls", ())]


def _calls_by_template(
    ids: Sequence[int], begin: int, end: int, tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """Return the tool calls of the turn ids[begin:end] that the model's own response template
    reads."""
    from stages.environments.dialogue.turns import with_calls

    if getattr(tokenizer, "response_template", None) is None:
        return []
    end -= ids[end - 1] in tokenizer.all_special_ids
    before = tokenizer.decode([*ids[max(0, begin - BEFORE) : begin]])
    text = tokenizer.decode([*ids[begin:end]])
    try:
        calls = tokenizer.parse_response(text, prefix=before).get("tool_calls", [])
    except Exception:  # what a policy writes is anything, and a template is a program
        return []
    message = with_calls({}, calls, False, 0).message
    return [call["function"] for call in message.get("tool_calls", ())]


def _known(number: float) -> float | None:
    return None if math.isnan(number) else number
