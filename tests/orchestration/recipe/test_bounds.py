"""Files and arguments that no recipe is made of: a sentence for each, and never a traceback."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from api.cli.main import app
from orchestration.bounds import (
    DEEPEST,
    LARGEST,
    LONGEST_LIST,
    MOST_CHARACTERS,
    MOST_VALUES,
    NotToml,
    out_of_bounds,
    read_toml,
)
from orchestration.recipe.loading.load import load_recipe, override, parse_recipe, toml_value
from orchestration.recipe.problems import RecipeError
from orchestration.units import parse_size
from tests.orchestration.runs import MOCK

NESTED = "[" * 5000 + "]" * 5000
TABLES = "{a = " * 5000 + "1" + "}" * 5000
DIGITS = "9" * 5000
PARTS = ".".join("a" * 3000)

FILES = {
    f"a = {NESTED}": "deep",
    f"a = {TABLES}": "deep",
    f"a = {DIGITS}": "digits",
    f"a = -{DIGITS}": "digits",
    f"a = 0x{'f' * 5000}": "beyond",
    f"a = 1e{DIGITS}": "",
    f"{PARTS} = 1": "deep",
    f"[{PARTS}]": "deep",
    f"[[{PARTS}]]\nb = 1": "deep",
    "\n".join(f"k{at} = 1" for at in range(MOST_VALUES + 1)): "values",
    f"a = [{'1,' * (LONGEST_LIST + 1)}]": "entries",
    f"a = '{'x' * (MOST_CHARACTERS + 1)}'": "characters",
    f"{'k' * 300} = 1": "a key of 300 characters",
    "a = '\\u0000'": "",
    'a = "\\u0000"': "zero character",
    "[reward]\nfunctions = [" + "{name = 'x'}," * 65 + "]": "",
    "a = 9999-99-99": "",
    "a = 1979-05-27T07:32:00Z\n[train]\nsteps = 07:32:00": "",
}


@pytest.mark.parametrize("text", FILES, ids=lambda text: text[:20])
@pytest.mark.parametrize("command", ["check", "run"])
def test_a_file_that_is_no_recipe(text: str, command: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    done = CliRunner().invoke(
        app, [command, str(path), *(["--out", str(tmp_path / "out")] if command == "run" else [])]
    )
    assert done.exit_code == 2, done.output
    assert isinstance(done.exception, SystemExit), "a sentence, no traceback"
    assert "Traceback" not in done.output
    assert FILES[text] in done.stderr
    assert len(done.stderr) < 30_000


@pytest.mark.parametrize(
    "given_",
    [
        f"a={NESTED}",
        f"a={TABLES}",
        f"train.steps={DIGITS}",
        f"{PARTS}=1",
        f"reward.functions.{DIGITS}.name=x",
        f"reward.functions.{DIGITS}=x",
        "reward.functions.٣.name=x",
        "reward.functions.²=x",
        f"pipeline.arena='{DIGITS}'",
        f"pipeline.arena={'9' * 400}",
        f"pipeline.keep_samples={'9' * 18}TiB",
        "description=\udcff",
        "\udcff=1",
        "a\0b=1",
        "description='''\0'''",
        "=",
        "=1",
        ".=1",
    ],
    ids=lambda text: ascii(text[:20]),
)
def test_an_argument_that_no_recipe_is_made_with(given_: str) -> None:
    done = CliRunner().invoke(app, ["check", "mock", "--set", given_])
    assert done.exit_code == 2, done.output
    assert isinstance(done.exception, SystemExit)


def test_stored_recipes_that_are_none_are_listed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipes").mkdir()
    for at, text in enumerate(FILES):
        (tmp_path / "recipes" / f"r{at}.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["recipes"])
    assert (done.exit_code, done.exception) == (0, None)


@pytest.mark.parametrize(
    "size",
    ["9" * 400, "9" * 19, "1e5", "٣", "1 " * 1000, " " * 10**6 + "!", "1" + " " * 10**6 + "!"],
)
def test_a_size_that_is_none(size: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_size(size)


def test_problems_of_bounds_name_their_keys() -> None:
    deep: Any = 1
    for _ in range(DEEPEST + 1):
        deep = {"a": deep}
    for data, key in (
        ({"a": {"b": LARGEST + 1}}, "a.b"),
        ({"a": [[0] * (LONGEST_LIST + 1)]}, "a.0"),
        ({"a": "x\udcff"}, "a"),
        ({"a": {"x\0": 1}}, "a"),
        ({"x": deep}, "x" + ".a" * DEEPEST),
    ):
        assert [found.key for found in out_of_bounds(data)] == [key]
    assert [found.key for found in out_of_bounds({"a": {"b": float("nan")}}, finite=True)] == [
        "a.b"
    ]
    assert not list(out_of_bounds({"a": {"b": float("nan")}}))


def test_a_recipe_at_the_bounds_is_taken() -> None:
    recipe = parse_recipe({**MOCK, "description": "x" * 60_000, "seed": LARGEST})
    assert (len(recipe.description), recipe.seed) == (60_000, LARGEST)


def test_problems_beyond_many_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text("\n".join(f"k{at} = 1" for at in range(500)))
    with pytest.raises(RecipeError) as raised:
        load_recipe(path)
    assert len(raised.value.problems) < 150
    assert any("more keys that are wrong" in problem.wrong for problem in raised.value.problems)


@given(st.text(max_size=200))
def test_any_text_is_toml_or_not(text: str) -> None:
    with contextlib.suppress(NotToml):
        assert isinstance(read_toml(text), dict)
    toml_value(text)
    override({"a": [1], "b": {}}, text, 1)


def test_reading_goes_on_after_a_deep_text() -> None:
    before = sys.getrecursionlimit()
    with pytest.raises(NotToml, match="deep"):
        read_toml(f"a = {NESTED}")
    assert (read_toml("a = 1"), sys.getrecursionlimit()) == ({"a": 1}, before)
