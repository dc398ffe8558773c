"""The recipes that a person starts from: a copy of each is whole, and says what to change; options of
reward functions are checked."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from api.cli.main import app
from orchestration.recipe.loading.load import SHIPPED, load_recipe
from stages.rewards.programs import python_tests
from tests.orchestration.recipe.minimal import problems

SOLUTIONS = {
    "add": "lambda a, b: a + b",
    "subtract": "lambda a, b: a - b",
    "multiply": "lambda a, b: a * b",
    "square": "lambda x: x * x",
    "cube": "lambda x: x**3",
    "is_even": "lambda n: n % 2 == 0",
    "is_odd": "lambda n: n % 2 == 1",
    "larger": "max",
    "smaller": "min",
    "absolute": "abs",
    "negate": "lambda x: -x",
    "double": "lambda x: 2 * x",
    "half": "lambda x: x / 2",
    "remainder": "lambda a, b: a % b",
    "reverse": "lambda text: text[::-1]",
    "length": "len",
    "upper": "str.upper",
    "lower": "str.lower",
    "first": "lambda items: items[0]",
    "last": "lambda items: items[-1]",
    "total": "sum",
    "largest": "max",
    "smallest": "min",
    "mean": "lambda numbers: sum(numbers) / len(numbers)",
    "count_a": "lambda text: text.count('a')",
    "sorted_copy": "sorted",
    "is_empty": "lambda items: not items",
    "join_words": "' '.join",
    "split_words": "str.split",
    "factorial": "__import__('math').factorial",
    "to_celsius": "lambda f: (f - 32) * 5 / 9",
    "area": "lambda width, height: width * height",
}
START = ("code", "distill", "judge", "math", "preferences", "tools")


def recipes(folder: Path, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(app, ["recipes", *arguments])
    return done.exit_code, done.output


@pytest.mark.parametrize("name", START)
def test_a_copy_is_the_same_recipe_with_its_own_data(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, output = recipes(tmp_path, "--copy", name, monkeypatch=monkeypatch)
    assert code == 0, output
    copies = output.split()
    assert copies[0] == f"{name}.toml"
    assert len(copies) == 2
    for copy in copies:
        assert (tmp_path / copy).read_bytes() == (SHIPPED / copy).read_bytes()
    of_copy = load_recipe(tmp_path / copies[0], files=False)
    assert of_copy.prompts.path == str(tmp_path / copies[1])
    same = load_recipe(SHIPPED / copies[0], [f"prompts.path={of_copy.prompts.path}"], files=False)
    assert of_copy == same


@pytest.mark.parametrize("name", START)
def test_the_lines_to_change_are_marked(name: str) -> None:
    text = (SHIPPED / f"{name}.toml").read_text()
    marked = re.findall(r"^(\w+) = .*# CHANGE", text, re.MULTILINE)
    assert {"source", "path"} <= {*marked}
    assert len(marked) <= 3
    assert text.startswith("# ")
    assert f"asyncdock recipes --copy {name}" in text
    assert f"asyncdock run {name}.toml" in text


def test_a_copy_overwrites_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    mine = tmp_path / "data" / "math.jsonl"
    mine.write_text("mine")
    code, output = recipes(tmp_path, "--copy", "math", monkeypatch=monkeypatch)
    assert code == 2
    assert "data/math.jsonl exists; move it" in output
    assert mine.read_text() == "mine"
    assert not (tmp_path / "math.toml").exists()
    code, output = recipes(tmp_path, "--copy", "mathh", monkeypatch=monkeypatch)
    assert (code, "did you mean 'math'?" in output) == (2, True)
    mine.unlink()
    for name in ("math", "distill", "math"):  # two that share their data
        assert recipes(tmp_path, "--copy", name, monkeypatch=monkeypatch)[0] == 0
    code, output = recipes(tmp_path, "--copy", "tiny", "--json", monkeypatch=monkeypatch)
    assert json.loads(output) == ["tiny.toml"], "a recipe without data"


def test_the_sums_of_the_example_data_are_right() -> None:
    for row in map(json.loads, (SHIPPED / "data" / "math.jsonl").read_text().splitlines()):
        first, second = map(int, re.findall(r"\d+", row["prompt"]))
        is_difference = "left" in row["prompt"]
        assert int(row["answer"]) == first + (-second if is_difference else second), row
    for row in map(json.loads, (SHIPPED / "data" / "tools.jsonl").read_text().splitlines()):
        question = row["prompt"][-1]["content"]
        assert sum(map(int, re.findall(r"\d+", question))) == row["answer"], row


def test_the_example_programs_can_be_written() -> None:
    rows = [*map(json.loads, (SHIPPED / "data" / "code.jsonl").read_text().splitlines())]
    tests = [test for row in rows for test in row["tests"]]
    program = "\n".join(f"{name} = {code}" for name, code in SOLUTIONS.items())
    assert python_tests([program], [tests], [60.0]) == [1.0]
    assert {row["prompt"].split("(")[0].split()[-1] for row in rows} == {*SOLUTIONS}


@pytest.mark.parametrize(
    ("options", "key", "said"),
    [
        ('url="http://h/v1"', "name", "set reward.functions.0.options.model"),
        ('url="u", model="m", modell="m"', "options.modell", "did you mean 'model'?"),
        ('url="u", model="m", prompts="x"', "options.prompts", "get from the run"),
    ],
)
def test_options_that_a_function_does_not_take_are_named(
    options: str, key: str, said: str, minimal: Path
) -> None:
    functions = f'reward.functions=[{{name="judge", options={{{options}}}}}]'
    [problem] = problems(minimal, functions)
    assert problem.key == f"reward.functions.0.{key}"
    assert said in str(problem)
