"""``asyncdock check`` and ``recipes``: what is wrong with a recipe or follows from it, and which
there are.

RECIPE ─▶ loaded and checked ─▶ sizes, flow, example prompts      stored recipes ─▶ a list, keys, a copy
"""

from __future__ import annotations

import json
import pkgutil
from dataclasses import asdict
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from api.cli.common.options import JsonOption, SetOption
from api.cli.common.output import print_json, refuse
from api.cli.common.recipe_files import (
    RecipeArgument,
    complete_recipe,
    copy_recipe,
    description,
    find,
    load,
    stored,
)
from api.terminal.screen import safe_console

if TYPE_CHECKING:
    from orchestration.recipe.schema import Recipe

LONGEST_EXAMPLE = 2000  # characters of a prompt that `check` prints


def check(
    recipe: RecipeArgument,
    set_: SetOption = None,
    graph: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the flow as a picture: FILE.svg, or FILE.mmd (Mermaid)."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Validate RECIPE without running it, and print what follows from it: sizes, and the flow of
    its samples."""
    if graph is not None and graph.suffix not in (".svg", ".mmd"):
        refuse(f"--graph: {str(graph)!r} is no picture; give a name that ends in .svg or .mmd")
    loaded = load(find(recipe), set_)
    from orchestration.recipe.checks.examples import example_prompts, prompt_sources
    from orchestration.recipe.model_files import PLAIN_MODELS
    from orchestration.recipe.problems import RecipeError
    from orchestration.recipe.sizes.planner import plan

    cluster = _cluster_of(loaded)
    follows = plan(loaded)
    # Without a chat template the model reads the prompt as it is. An example would only cost the
    # import of torch.
    plain = loaded.model.source in PLAIN_MODELS and not loaded.prompts.chat_template
    try:
        examples = [] if plain and not as_json else example_prompts(loaded)
    except RecipeError as error:
        refuse(error)
    if as_json:  # the same document as the answer of POST /v1/recipes/check
        shown = [asdict(example) for example in examples]
        answer = {"plan": asdict(follows), "prompts": prompt_sources(loaded), "examples": shown}
        return print_json({"recipe": json.loads(loaded.to_json()), **answer})
    from api.terminal.plan_table import plan_table
    from orchestration.recipe.flow import flow_of
    from stages.flow.graph import to_mermaid, to_svg, to_text

    flow = flow_of(loaded)
    screen = safe_console()
    screen.print(plan_table(loaded, follows))
    if cluster:
        screen.print(f"\n{cluster}", markup=False, highlight=False, soft_wrap=True)
    screen.print(f"\nflow\n{to_text(flow)}", markup=False, highlight=False, soft_wrap=True)
    if sources := prompt_sources(loaded):
        screen.print("\n" + "\n".join(sources), markup=False, highlight=False, soft_wrap=True)
    for example in examples:
        text = example.text[:LONGEST_EXAMPLE] + (
            " …" if len(example.text) > LONGEST_EXAMPLE else ""
        )
        title = f"prompt of {example.where}, {example.tokens} tokens"
        screen.print(
            f"\n{title}\n{indent(text, '  ')}", markup=False, highlight=False, soft_wrap=True
        )
    if graph is not None:
        graph.write_text(
            to_svg(flow) if graph.suffix == ".svg" else to_mermaid(flow), encoding="utf-8"
        )


def _cluster_of(recipe: Recipe) -> str:
    """Return the cluster of ``launch.address`` in words; "": there is nothing to say.

    Ends the command where the cluster refuses this machine.
    """
    cluster = recipe.launch.cluster
    if cluster is None or not cluster.look:
        return ""
    try:
        return str(pkgutil.resolve_name(cluster.look)(recipe.launch.address))
    except ValueError as error:
        refuse(error)


def recipes(
    keys: Annotated[
        bool, typer.Option("--keys", help="Print the reference of a recipe's keys instead.")
    ] = False,
    copy: Annotated[
        str,
        typer.Option(
            "--copy",
            metavar="NAME",
            help="Copy a recipe, and the prompts that come with it, into the working folder.",
            autocompletion=complete_recipe,
        ),
    ] = "",
    section: Annotated[
        str,
        typer.Argument(
            metavar="[SECTION]", help="With --keys: only of this section, as rollout.vllm."
        ),
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """List the recipes that can be run by name, or with --keys the keys of one; or copy one."""
    if section and not keys:
        refuse(
            f"recipes: {section!r} is given without --keys; write `asyncdock recipes --keys "
            f"{section}`"
        )
    if keys:
        return _print_keys(section, as_json=as_json)
    if copy:
        paths = [str(path) for path in copy_recipe(copy, Path())]
        return print_json(paths) if as_json else safe_console().print("\n".join(paths))
    entries = [(name, description(path), path) for name, path in stored().items()]
    if as_json:
        return print_json(
            [{"name": name, "description": text, "path": str(path)} for name, text, path in entries]
        )
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    for name, text, _ in entries:
        table.add_row(name, text)
    safe_console().print(table)


def _print_keys(section: str, *, as_json: bool) -> None:
    from orchestration.recipe.loading.keys import sections
    from orchestration.recipe.problems import suggest

    all_keys = [key for part in sections() for key in part.keys]
    section_keys = [
        key for key in all_keys if f"{key.key}.".startswith(f"{section}." if section else "")
    ]
    if not section_keys:
        refuse(
            f"recipes: {section!r} is no section of a recipe; "
            f"{suggest(section, [s.name for s in sections()][1:])}"
        )
    if as_json:
        return print_json([asdict(key) for key in section_keys])
    screen = safe_console(markup=True, highlight=False, soft_wrap=True)
    for key in section_keys:
        kind = f"{key.type}, in {key.unit}" if key.unit else key.type
        default = f"default {key.default}" if key.default not in ("", "required") else key.default
        screen.print(f"[bold]{key.key}[/]  {escape('; '.join(filter(None, (kind, default))))}")
        screen.print(f"    {escape(key.meaning)}")
