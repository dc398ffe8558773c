"""``asyncdock plan``, ``check`` and ``recipes``: what a run of a recipe will do, before it runs.

RECIPE ─┬─ costs: a run's folder, or the mock engines' options ─▶ simulation ─▶ throughput, shares, staleness, time
        └─ --search --devices N ─▶ each split and staleness that fits ─▶ ranked
"""

from __future__ import annotations

import json
import pkgutil
from dataclasses import asdict, replace
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from api.cli.common.options import JsonOption, PlainOption, SetOption
from api.cli.common.output import print_json, refuse, table
from api.cli.common.recipe_files import (
    RecipeArgument,
    complete_recipe,
    copy_recipe,
    description,
    find,
    load,
    stored,
)
from api.cli.folder.foreign import run_folder
from api.cli.local_run import create_and_show, fork_server, original_folder
from api.terminal.numbers import duration
from api.terminal.screen import safe_console
from orchestration.recipe.flow import device_count

if TYPE_CHECKING:
    from orchestration.recipe.schema import Recipe
    from orchestration.simulation.costs import Costs, LengthsOf
    from orchestration.simulation.forecast import Forecast
    from orchestration.simulation.search import Choice, CostsOf

PROFILE_STEPS = 8
WHAT_IF = {  # numbers of a forecast that are compared, and their forms
    **{
        "tokens_per_second": ",.0f",
        "step_seconds": ".3g",
        "generation": ".1%",
        "training": ".1%",
        "waiting": ".1%",
    },
    **{"staleness_mean": ".2f", "staleness_p95": "d", "staleness_max": "d"},
}
MOST_CHOICES = 12  # that are printed

LONGEST_EXAMPLE = 2000  # characters of a prompt that `check` prints

plan_app = typer.Typer(
    help="Predict what a run would do, and plan its swaps.", no_args_is_help=True
)

DevicesOption = Annotated[
    int,
    typer.Option(
        "--devices",
        metavar="N",
        min=0,
        help="Devices to split, with --search. Default: the recipe's.",
    ),
]


@plan_app.command("run")
def plan_run(
    recipe: RecipeArgument,
    set_: SetOption = None,
    costs: Annotated[
        Path | None,
        typer.Option(
            "--costs",
            metavar="RUN_DIR",
            callback=run_folder,
            help="Use the costs measured in this run.",
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option("--steps", min=0, help="Optimizer steps. Default: the recipe's.")
    ] = 0,
    search: Annotated[
        bool, typer.Option("--search", help="Rank the splits of the devices, and the staleness.")
    ] = False,
    devices: DevicesOption = 0,
    device_memory: Annotated[
        str,
        typer.Option(
            "--device-memory",
            metavar="SIZE",
            help="Of a device, as 80GiB: leaves out what does not fit.",
        ),
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Predict what a run of RECIPE does: throughput, the share of each stage, staleness, and the
    time to its end.

    With --costs RUN_DIR --set KEY=VALUE it answers what that run would do with other keys."""
    if (devices or device_memory) and not search:
        refuse("--devices and --device-memory: are for --search; add it")
    loaded = load(find(recipe), set_, files=False)
    costs_of, lengths = _costs(loaded, costs)
    from orchestration.simulation.forecast import forecast, setup_of

    have = device_count(loaded)
    if search:
        return _search(loaded, costs_of, lengths, devices or have, device_memory, as_json=as_json)
    setup = setup_of(loaded, steps=steps)
    run_costs = costs_of(loaded)
    baseline = forecast(setup, run_costs, lengths)
    better = forecast(replace(setup, replicas=setup.replicas + 1), run_costs, lengths)
    later = replace(setup.plan, bound=setup.plan.bound + 1)
    staler = forecast(replace(setup, plan=later), run_costs, lengths)
    if as_json:
        return print_json(
            {
                "forecast": asdict(baseline),
                "busiest": baseline.busiest,
                "devices": have,
                "one_more_replica": asdict(better),
                "one_more_version": asdict(staler),
                "costs": asdict(run_costs),
            }
        )
    safe_console().print(_forecast_view(loaded, baseline, better, staler, run_costs))


@plan_app.command("profile")
def plan_profile(
    recipe: RecipeArgument,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="A new folder, for `plan run --costs DIR`.")
    ],
    set_: SetOption = None,
    plain: PlainOption = False,
) -> None:
    """Measure the costs of RECIPE on this machine: execute a few optimizer steps of it in DIR, then
    its rollout engine alone, then steps of half as many groups."""
    path = find(recipe).resolve()
    cwd = Path.cwd()
    short = [
        f"train.steps={PROFILE_STEPS}",
        f"checkpoint.every={PROFILE_STEPS}",
        "evaluate.every=0",
    ]
    with original_folder(path.parent), fork_server() as forks:
        loaded = load(path, [*short, *(set_ or [])], cwd / out)
        from orchestration.run.folder import RunFolder

        code = create_and_show(
            lambda: RunFolder.create(loaded, cwd / out), forks, json=False, plain=plain
        )
        if code == 0 and loaded.runs_stage("rollout") and not loaded.prompts.responses:
            from orchestration.simulation.engine_profile import profile_engine
            from orchestration.simulation.recorded import SMALLER, with_smaller_steps

            profile_engine(loaded).write(cwd / out)
            if smaller := with_smaller_steps(loaded):
                code = create_and_show(
                    lambda: RunFolder.create(smaller, cwd / out / SMALLER),
                    forks,
                    json=False,
                    plain=plain,
                )
        raise typer.Exit(code)


@plan_app.command("what-if")
def plan_what_if(
    folder: Annotated[
        Path,
        typer.Argument(metavar="RUN_DIR", callback=run_folder, help="A run, finished or running."),
    ],
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Predict what the run in RUN_DIR would do with other keys, by its own costs."""
    from orchestration.recipe.problems import RecipeError
    from orchestration.simulation.recorded import NotMeasured
    from orchestration.simulation.search import what_if

    try:
        now, changed = what_if(folder, set_ or [])
    except (NotMeasured, RecipeError) as error:
        refuse(error)
    if as_json:
        return print_json({"now": asdict(now), "changed": asdict(changed)})
    shown = table("", "as it is", " ".join(set_ or ["unchanged"]), right=("as it is",))
    for name, form in WHAT_IF.items():
        shown.add_row(
            name.replace("_", " "),
            *(format(getattr(prediction, name), form) for prediction in (now, changed)),
        )
    shown.add_row("busiest", now.busiest, changed.busiest)
    safe_console().print(shown)


def _costs(recipe: Recipe, folder: Path | None) -> tuple[CostsOf, LengthsOf]:
    from orchestration.simulation.mock_costs import mock_costs, mock_lengths
    from orchestration.simulation.search import costs_of_run, scaled

    if folder is not None:
        from orchestration.simulation.recorded import NotMeasured

        try:
            costs, lengths = costs_of_run(folder)
        except NotMeasured as lacking:
            refuse(f"--costs: {lacking}")
        return costs, lengths.of_groups(recipe.algorithm.group_size)
    if {recipe.rollout.engine, recipe.train.engine} == {"mock"}:
        return scaled(mock_costs(recipe), recipe.train.ranks), mock_lengths(recipe)
    refuse(
        "--costs: what the engines of this recipe cost is not known; give the folder of a run of "
        "the same model on such devices, or make one with `asyncdock plan profile RECIPE --out "
        "DIR`"
    )


def _search(
    recipe: Recipe,
    costs: CostsOf,
    lengths: LengthsOf,
    devices: int,
    device_memory: str,
    *,
    as_json: bool,
) -> None:
    from orchestration.simulation.search import search
    from orchestration.units import parse_size

    try:
        memory = int(str(parse_size(device_memory))) if device_memory else 0
    except ValueError as error:
        refuse(f"--device-memory: {device_memory!r} {error}")
    try:
        choices = search(
            recipe,
            costs,
            lengths,
            devices=devices,
            device_memory=memory,
        )
    except ValueError as error:
        refuse(error)
    if not choices or choices[0].forecast is None:
        refuse(
            f"--search: no split of {devices} devices can run. "
            f"{choices[0].refused if choices else ''}"
        )
    if as_json:
        return print_json({"choices": [asdict(choice) for choice in choices]})
    safe_console().print(_search_view(choices))


def _forecast_view(
    recipe: Recipe,
    found: Forecast,
    better: Forecast,
    staler: Forecast,
    costs: Costs,
) -> RenderableType:
    more, later = (
        variant.tokens_per_second / found.tokens_per_second - 1 for variant in (better, staler)
    )
    if found.busiest == "training":
        limit = "training: the trainer is busy for the largest share of the time"
    elif found.busiest == "generation":
        limit = "generation: the rollout workers are busy for the largest share of the time"
    else:
        source = costs.sources.get("between_steps", "")
        limit = (
            f"between steps: {costs.between_steps:.2g} s of claims, commits and publishing for "
            f"each step ({source})"
        )
    rows = [
        (
            "throughput",
            f"{found.tokens_per_second:,.0f} tokens/s trained, {found.step_seconds:.3g} s an "
            f"optimizer step",
        ),
        (
            "share of time",
            f"generation {found.generation:.1%}, training {found.training:.1%}, trainer waits "
            f"{found.waiting:.1%}, between steps {found.between:.1%}",
        ),
        ("limit", limit),
        (
            "staleness",
            f"mean {found.staleness_mean:.2f}, 95 % of samples {found.staleness_p95} or less, "
            f"largest {found.staleness_max} (bound {recipe.pipeline.staleness})",
        ),
        ("run", duration(found.seconds)),
        (
            "one more",
            f"rollout worker {more:+.1%} tokens/s, version of pipeline.staleness {later:+.1%}",
        ),
    ]
    shown = table("", "")
    for name, text in rows:
        shown.add_row(name, text)
    sources = sorted(
        {origin for name, origin in costs.sources.items() if name != "restart_seconds"}
    )
    return Group(shown, Text(f"\ncosts: {'; '.join(sources)}"))


def _search_view(choices: list[Choice]) -> RenderableType:
    shown = table(
        "",
        "keys",
        "devices",
        "tokens/s",
        "step",
        "generation",
        "training",
        "staleness",
        right=("devices", "tokens/s"),
    )
    runs = [choice for choice in choices if choice.forecast is not None]
    for choice in runs[:MOST_CHOICES]:
        prediction: Any = choice.forecast
        shown.add_row(
            "*" if choice.pareto else "",
            " ".join(choice.changes),
            str(choice.devices),
            f"{prediction.tokens_per_second:,.0f}",
            f"{prediction.step_seconds:.3g} s",
            f"{prediction.generation:.0%}",
            f"{prediction.training:.0%}",
            f"{prediction.staleness_mean:.2f}",
        )
    notes = [Text("* no other choice has both more tokens/s and a lower mean staleness")]
    infeasible = [choice for choice in choices if choice.forecast is None]
    if infeasible:
        notes.append(
            Text(
                f"{len(infeasible)} choices cannot run; the first: "
                f"{' '.join(infeasible[0].changes)}: {infeasible[0].refused}"
            )
        )
    return Group(shown, *notes)


@plan_app.command("reshard")
def plan_reshard(
    recipe: RecipeArgument,
    train: Annotated[
        str,
        typer.Option(
            metavar="LAYOUT", help="As 'dp=2,tp=2'; dp shards as FSDP2 does. Default: the recipe's."
        ),
    ] = "",
    rollout: Annotated[
        str,
        typer.Option(
            metavar="LAYOUT", help="As 'dp=4,tp=1'; dp are replicas. Default: the recipe's engines."
        ),
    ] = "",
    set_: SetOption = None,
    bucket: Annotated[
        str,
        typer.Option(metavar="SIZE", help="Bytes of one of the two buckets. Default: sync.bucket."),
    ] = "",
    ranks_per_node: Annotated[
        int | None, typer.Option(help="Default: all are on one node.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Plan the allgather-swap of RECIPE's model from its training layout to its rollout layout."""
    # the model's config is enough; its weights are not read
    loaded = load(find(recipe), set_, files=False)
    from api.cli.reshard import PlanRefused, reshard_report, reshard_view

    try:
        report = reshard_report(
            loaded, train, rollout, bucket=bucket, ranks_per_node=ranks_per_node
        )
    except PlanRefused as error:
        refuse(error)
    print_json(report) if as_json else safe_console().print(reshard_view(report))


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
