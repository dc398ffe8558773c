"""``asyncdock plan``: what a run of a recipe will do, before it runs.

RECIPE ─┬─ costs: a run's, or the mock engines' options ─▶ simulation ─▶ throughput, shares, staleness, time
        └─ --search --devices N ─▶ each split and staleness that fits ─▶ ranked
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from api.cli.common.options import JsonOption, PlainOption, SetOption
from api.cli.common.output import print_json, refuse, table
from api.cli.common.recipe_files import RecipeArgument, find, load
from api.cli.local_run import create_and_show, fork_server, original_folder
from api.cli.service.asking import ServerOption
from api.cli.service.run_files import folder_of
from api.client.credentials import DEFAULT_SERVER
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
        str,
        typer.Option("--costs", metavar="RUN", help="Use the costs measured in this run."),
    ] = "",
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
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Predict what a run of RECIPE does: throughput, the share of each stage, staleness, and the
    time to its end.

    With --costs RUN --set KEY=VALUE it answers what that run would do with other keys."""
    if (devices or device_memory) and not search:
        refuse("--devices and --device-memory: are for --search; add it")
    loaded = load(find(recipe), set_, files=False)
    costs_of, lengths = _costs(loaded, folder_of(costs, server) if costs else None)
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
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's folder or id; it may be running.")
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Another key, as pipeline.staleness=2; the command names those that are "
            "simulated. Repeatable.",
        ),
    ] = None,
    as_json: JsonOption = False,
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Predict what RUN would do with other keys, by its own costs."""
    from orchestration.recipe.problems import RecipeError
    from orchestration.simulation.recorded import NotMeasured
    from orchestration.simulation.search import what_if

    try:
        now, changed = what_if(folder_of(run, server), set_ or [])
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
