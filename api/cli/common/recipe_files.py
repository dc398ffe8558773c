"""Lookup of the recipes that a command names: a TOML file, a run's recipe.json, or a name of a
stored recipe."""

from __future__ import annotations

import difflib
import filecmp
import glob
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from api.cli.common.output import refuse
from orchestration.escapes import escaped

if TYPE_CHECKING:
    from orchestration.recipe.schema import Recipe


def complete_recipe(incomplete: str) -> Iterator[tuple[str, str]]:
    """Yield the recipes that ``incomplete`` may be the beginning of, each with a help text, for
    shell completion."""
    yield from (
        (name, escaped(description(path)))
        for name, path in stored().items()
        if name.startswith(incomplete)
    )
    yield from complete_path(incomplete)


def complete_path(incomplete: str) -> Iterator[tuple[str, str]]:
    for path in sorted(Path().glob(f"{glob.escape(incomplete)}*")):
        if path.is_dir():
            yield f"{path}{os.sep}", "folder"
        elif path.suffix == ".toml":
            yield str(path), "file"


RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A TOML file, the recipe.json of a run, or a name from `asyncdock recipes`.",
        autocompletion=complete_recipe,
    ),
]


def stored() -> dict[str, Path]:
    """Return the recipes that have a name: those in ./recipes, then those of this package."""
    folders = (Path.cwd() / "recipes", Path(__file__).resolve().parents[3] / "recipes")
    recipes: dict[str, Path] = {}
    for path in (path for folder in folders for path in sorted(folder.glob("*.toml"))):
        recipes.setdefault(path.stem, path)
    return recipes


def description(path: Path) -> str:
    """Return the ``description`` of the recipe in the file ``path``, or why it cannot be read."""
    from orchestration.bounds import read_toml

    try:
        return str(read_toml(path.read_text(encoding="utf-8")).get("description", ""))
    except (OSError, ValueError) as error:
        return f"(cannot be read: {error})"


def find(name: str) -> Path:
    """Return the file of the recipe ``name``. Ends the command when there is none."""
    path = Path(name)
    recipes = stored()
    if path.is_file():
        return path
    if (path / "recipe.json").is_file():
        refuse(
            f"recipe: {name!r} is the folder of a run; continue it with `asyncdock resume {name}`, "
            f"or start a run like it with `asyncdock run {path / 'recipe.json'}`"
        )
    if name in recipes:
        return recipes[name]
    close = difflib.get_close_matches(path.stem, recipes, n=1)
    hint = (
        (f"did you mean {close[0]!r}?")
        if close
        else (f"use a path, or one of: {', '.join(recipes) or '(none found)'}")
    )
    refuse(f"recipe: {name!r} is neither a file nor a known name; {hint}")


def copy_recipe(name: str, folder: Path) -> list[Path]:
    """Copy the recipe ``name`` and the files of prompts that lie below its own folder to ``folder``.

    Return the copies. Ends the command where another file has the name of one, or one cannot be written.
    """
    from orchestration.bounds import read_toml

    recipe = find(name)
    prompts = read_toml(recipe.read_text(encoding="utf-8")).get("prompts", {})
    named = [table.get("path") for table in (prompts, *prompts.get("sources", ()))]
    rows = [recipe.parent / path for path in named if path]
    sources = [recipe, *(path for path in rows if path.is_file())]
    copies = {
        folder / path.relative_to(recipe.parent): path
        for path in sources
        if path.resolve().is_relative_to(recipe.parent.resolve())
    }
    existing = [
        str(path)
        for path, source in copies.items()
        if path.exists() and not filecmp.cmp(path, source, shallow=False)
    ]
    if existing:
        refuse(f"recipes: --copy {name}: {existing[0]} exists; move it, or copy in another folder")
    try:
        for target, source in copies.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    except OSError as error:
        refuse(f"recipes: --copy {name}: {error}; copy in a folder that you may write to")
    return [*copies]


def load(
    path: Path, overrides: list[str] | None, folder: Path | None = None, *, files: bool = True
) -> Recipe:
    """Return the recipe in ``path`` for a run in ``folder``.

    Ends the command when it has problems. ``files``: see
    :func:`orchestration.recipe.loading.load.parse_recipe`.
    """
    from orchestration.recipe.loading.load import load_recipe
    from orchestration.recipe.problems import RecipeError

    try:
        return load_recipe(path, overrides or [], folder, files=files)
    except RecipeError as error:
        refuse(error)
