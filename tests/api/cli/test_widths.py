"""Tables in the width of a terminal: what a reader needs most stays whole."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from api.cli.service.runs import runs_table

LONG = "my-long-recipe-name-with-more-20261127-201122-ab12"


def run(name: str, steps_done: int, owner: str) -> Any:
    times = {"created": 1.7e9, "started": 1.7e9, "ended": 1.7e9 + 4000, "former_seconds": 0.0}
    numbers = {"steps": 100_000, "steps_done": steps_done, "reward": 0.1234, "position": None}
    return SimpleNamespace(id=name, state="finished", owner=owner, **times, **numbers)


def shown(width: int, *runs: Any) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    console.print(runs_table(runs, 1.8e9, console))
    return cast("io.StringIO", console.file).getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 60, 80, 140])
def test_the_list_of_runs_keeps_ids_states_and_steps_whole(width: int) -> None:
    lines = shown(width, run("short-1", 20, "ann"), run(LONG, 99_999, "somebody@example.org"))
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for needle in ("short-1", "finished", "20/100000", "99999/100000"):
        assert needle in text
    of_long = next(at for at, line in enumerate(lines) if line.startswith("my-long"))
    assert "".join(line.split()[0] for line in lines[of_long:]) == LONG
    assert lines[0].split()[:3] == ["run", "state", "steps"]


def test_dates_go_first_and_owners_after_them() -> None:
    runs = [run("tiny-20261127-201122-ab12", 20, "ann")]
    names = [shown(width, *runs)[0].split() for width in (140, 80, 60)]
    assert names[0][-2:] == ["created", "owner"]
    assert names[1] == ["run", "state", "steps", "reward", "took", "owner"]
    assert names[2] == ["run", "state", "steps", "reward"]
