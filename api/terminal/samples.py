"""Samples in a terminal: a line of facts, then prompt and response in its width.

    sample ──▶ figures, texts; a response of several turns ──▶ segments_view: turns by policy version, observations pale

Texts come from models: each is escaped before it is laid out, as an escape is longer than what it stands for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from api.terminal.numbers import counted, number, short_seconds
from orchestration.escapes import escaped

if TYPE_CHECKING:
    from api.schemas.samples import SampleView

# of tokens by their policy version, one after the other
COLOURS = ("cyan", "magenta", "green", "blue", "yellow", "red")
PALE = "dim"


def sample_view(sample: SampleView, columns: Sequence[str] = ()) -> RenderableType:
    """Return a sample with what was computed of it, and the further ``columns`` that are asked
    for."""
    title = f"step {sample.step}  group {sample.group}  place {sample.place}"
    prompt = Text(escaped(sample.prompt), style=PALE)
    return Group(
        Rule(Text(title, style="bold"), style=PALE, align="left"),
        _figures(sample, columns),
        Text("prompt", style="italic"),
        _below(prompt),
        Text("response", style="italic"),
        *_response(sample),
    )


def _figures(sample: SampleView, columns: Sequence[str]) -> Text:
    """Return reward, credit, age and columns, wrapped between figures."""
    row = sample.row()
    names = ["reward", *sample.rewards, "advantage", "age", *sample.columns, *columns]
    figures = {name: _plain(row.get(name)) for name in names}
    figures["made by"] = _versions(sample.versions)
    is_better = (sample.advantage or 0.0) > 0  # than its group
    styles = {"reward": "bold green" if is_better else "bold"}
    text = Text()
    for name, value in figures.items():
        text.append(escaped(f"{name} "), style=PALE)
        text.append(escaped(f"{value}  "), style=styles.get(name))
    marks = [f"{name} failed" for name in sample.failed]
    marks += ["cut at the limit"] * sample.truncated
    marks += [f"ended: {sample.ending}"] * bool(sample.ending)
    return text.append(escaped(", ".join(marks)), style="red")


def _versions(versions: Iterable[tuple[int, int]]) -> str:
    return " ".join(
        f"v{version}×{tokens}" if version >= 0 else f"observed×{tokens}"
        for version, tokens in versions
    )


def _plain(value: object) -> str:
    """Return the value of a column on one line."""
    if value is None or isinstance(value, float):
        return number(value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return " ".join(text.split())


def _response(sample: SampleView) -> list[RenderableType]:
    if sample.segments:
        return [segments_view([segment.model_dump() for segment in sample.segments])]
    if not sample.masked:
        return [_below(Text(escaped(sample.response)))]
    text = Text()
    for is_trained, _, piece in sample.masked:
        text.append(escaped(piece), style="" if is_trained else PALE)
    untrained = sum(tokens for is_trained, tokens, _ in sample.masked if not is_trained)
    return [
        _below(text),
        _below(Text(f"{counted(untrained, 'token')} (pale) not trained", style="italic")),
    ]


def segments_view(segments: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return of each turn and observation a line of facts, and its text below: a turn's coloured by
    policy version, an observation's pale."""
    parts: list[RenderableType] = []
    turns = 0
    for segment in segments:
        if segment.get("shares") is not None and segment["branch"]:
            shared = f"goes on behind {counted(segment['shares'], 'token')} of the response"
            parts.append(Text(f"branch {segment['branch']}: {shared}", style="italic"))
        tokens = counted(segment["tokens"], "token")
        text = Text()
        if segment["generated"]:
            turns += 1
            parts.append(Text(f"turn {turns}: {tokens}{_facts(segment)}"))
            for version, _, piece in segment["pieces"]:
                text.append(escaped(piece), style=COLOURS[version % len(COLOURS)])
        else:
            parts.append(Text(f"observed: {tokens}"))
            text.append(escaped(segment["text"]), style=PALE)
        parts.append(_below(text))
        for call in segment.get("calls", ()):
            arguments = json.dumps(call["arguments"], ensure_ascii=False)
            described = escaped(f"call {call['name']}({arguments})")
            parts.append(_below(Text(described, style="italic")))
    return Group(*parts)


def _facts(turn: Mapping[str, Any]) -> str:
    """Return by which versions a turn was made, its reward and its seconds."""
    versions = " ".join(f"v{version}" for version, _, _ in turn["pieces"])
    times = [f"{name} {short_seconds(seconds)}" for name, seconds in turn["seconds"].items()]
    facts = [f" by {versions}", f"reward {number(turn['reward'], 'g')}", *times]
    return ", ".join(facts)


def _below(text: Text) -> Padding:
    return Padding(text, (0, 0, 0, 4))
