"""Relative paths in recipes, and the name of a recipe that says none."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestration.recipe.loading.load import read_recipe
from orchestration.recipe.problems import RecipeError

JSONL = 'extends = "mock"\n[prompts]\nsource = "jsonl"\npath = "{path}"\n'


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a recipe in a folder of its own."""
    (tmp_path / "recipes").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(file: Path, path: str) -> Path:
    file.write_text(JSONL.format(path=path))
    return file


def rows(file: Path) -> Path:
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    return file


def path_in(file: Path, *overrides: str) -> str:
    tables, problems = read_recipe(file, overrides)
    assert not problems
    return str(tables["prompts"]["path"])


@pytest.mark.parametrize("path", ["rows.jsonl", "./rows.jsonl", "../recipes/rows.jsonl"])
def test_a_path_is_relative_to_the_recipe_that_has_it(home: Path, path: str) -> None:
    expected = rows(home / "recipes" / "rows.jsonl")
    rows(home / "rows.jsonl")
    assert path_in(write(home / "recipes" / "a.toml", path)) == str(expected)


def test_a_path_of_an_extended_recipe_is_relative_to_that_one(home: Path) -> None:
    expected = rows(home / "recipes" / "rows.jsonl")
    write(home / "recipes" / "base.toml", "rows.jsonl")
    (home / "a.toml").write_text('extends = "recipes/base.toml"\n')
    assert path_in(home / "a.toml") == str(expected)


def test_a_file_of_the_working_directory_alone_is_refused_with_its_path(home: Path) -> None:
    rows(home / "rows.jsonl")
    file = write(home / "recipes" / "a.toml", "rows.jsonl")
    with pytest.raises(RecipeError) as error:
        path_in(file)
    message = str(error.value)
    assert 'prompts.path = "rows.jsonl": is in the working directory, and not beside' in message
    assert "../rows.jsonl" in message


def test_an_option_is_relative_to_the_working_directory(home: Path) -> None:
    rows(home / "recipes" / "rows.jsonl")
    rows(home / "other.jsonl")
    file = write(home / "recipes" / "a.toml", "rows.jsonl")
    assert path_in(file, "prompts.path=other.jsonl") == "other.jsonl"


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("mein Rezept.toml", "mein-Rezept"),
        ("Grün & gut.toml", "Grun-gut"),
        ("_a.toml", "a"),
        ("数学.toml", "recipe"),
        ("v1.2_x.toml", "v1.2_x"),
    ],
)
def test_a_run_has_a_name_by_its_file(home: Path, file: str, name: str) -> None:
    (home / file).write_text('extends = "mock"\n')
    assert read_recipe(home / file)[0]["name"] == name
