"""The command ``asyncdock``: its subcommands, and the entry point.

    run, resume    execute a run here and show it (api.cli.local_run)
    check, plan    what follows from a recipe, without running it
    recipes        the stored recipes, and the keys of a recipe
    serve, agent   a service, and the process that executes its runs (api.cli.service)
    deploy         the policy of a run on Ray Serve (api.cli.service.deploy)
    runs, login    the runs of a service, over REST (api.cli.service.runs)
    link           a link that signs a browser in to a service (api.cli.service.link)
    why            what a run waits for at this moment (api.cli.service.why)
    checkpoint     whether checkpoints are as they were written (api.cli.folder.checkpoint)
    dock, track    the samples of a live run (api.cli.dock); its events in TensorBoard, MLflow or W&B (api.cli.track)
    pairs          preference pairs of a run's samples (api.cli.pairs)

Exit codes are in api.cli.common.exit_codes and docs/runs.md.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import pkgutil
import sys
import threading
from dataclasses import asdict
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from api.cli.common.error_log import errors_in_words
from api.cli.common.exit_codes import FAILED, FINISHED
from api.cli.common.options import EventsOption, FromOption, JsonOption, PlainOption, SetOption
from api.cli.common.output import print_json, refuse
from api.cli.common.recipe_files import RecipeArgument, description, find, load, stored
from api.cli.dock import dock_app
from api.cli.folder.checkpoint import checkpoint_app
from api.cli.folder.foreign import refuse_anothers, run_folder
from api.cli.local_run import create_and_show, fork_server, new_folder, original_folder
from api.cli.pairs import pairs_command
from api.cli.plan import add_plan_commands
from api.cli.service.agent import agent_command, host_command
from api.cli.service.deploy import deploy_command
from api.cli.service.link import link_command
from api.cli.service.runs import login, logout, runs_app
from api.cli.service.serve import serve_command
from api.cli.service.token import token_app
from api.cli.service.why import why_command
from api.cli.track import track_command
from api.terminal.screen import complain, safe_console
from orchestration.logs import TRACE_VARIABLE
from orchestration.streams import open_outputs, output_of

if TYPE_CHECKING:
    from orchestration.recipe.schema import Recipe

LONGEST_EXAMPLE = 2000  # characters of a prompt that `check` prints

app = typer.Typer(
    help="Asynchronous RL post-training of language models.",
    epilog="Exit codes: 0 done or finished, 1 failed, 2 wrong input, 3 no service or not allowed, "
    "130 stopped.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its panels cut long messages
)
plan_app = typer.Typer(
    help="Predict what a run would do, and plan its swaps.", no_args_is_help=True
)


@app.callback(invoke_without_command=True)
def _before_any(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Print the traceback of an error. Any command takes it.")
    ] = False,
) -> None:
    if trace:
        os.environ[TRACE_VARIABLE] = "1"
    if version:
        print(f"asyncdock {importlib.metadata.version('asyncdock')}")
        raise typer.Exit(FINISHED)
    from orchestration import logs

    logs.configure()  # on standard error: standard output is for results


@app.command()
def run(
    recipe: RecipeArgument,
    set_: SetOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="A new folder. Default: runs/NAME-TIME.")
    ] = None,
    as_json: EventsOption = False,
    plain: PlainOption = False,
) -> None:
    """Train as RECIPE says, and show it live. Ctrl-C stops cleanly, a second one at once."""
    path = find(recipe).resolve()
    cwd = Path.cwd()
    with original_folder(path.parent), fork_server() as forks:
        loaded = load(path, set_, cwd / (out or "runs"))
        from orchestration.run.folder import RunFolder

        folder = (lambda: cwd / out) if out else (lambda: new_folder(cwd / "runs", loaded))
        raise typer.Exit(
            create_and_show(
                lambda: RunFolder.create(loaded, folder()), forks, json=as_json, plain=plain
            )
        )


@app.command()
def resume(
    run_dir: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_DIR", callback=run_folder, help="The folder of a run that did not finish."
        ),
    ],
    set_: SetOption = None,
    start_version: FromOption = None,
    trust: Annotated[
        bool,
        typer.Option(
            "--trust", help="Also where the folder is another user's: run what its recipe names."
        ),
    ] = False,
    as_json: EventsOption = False,
    plain: PlainOption = False,
) -> None:
    """Go on from the newest checkpoint of the run in RUN_DIR, with other keys if --set says so."""
    run_dir = run_dir.resolve()
    run_dir = run_dir.parent if run_dir.name == "recipe.json" else run_dir
    refuse_anothers(run_dir, trust)
    with original_folder(run_dir), fork_server() as forks:
        from orchestration.run.folder import RunFolder

        create = partial(RunFolder.resume, run_dir, set_ or [], start_version)
        raise typer.Exit(create_and_show(create, forks, json=as_json, plain=plain))


@app.command()
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
    from api.terminal.report import plan_table
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


@app.command()
def recipes(
    keys: Annotated[
        bool, typer.Option("--keys", help="Print the reference of a recipe's keys instead.")
    ] = False,
    section: Annotated[
        str,
        typer.Argument(
            metavar="[SECTION]", help="With --keys: only of this section, as rollout.vllm."
        ),
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """List the recipes that can be run by name, or with --keys the keys of a recipe."""
    if section and not keys:
        refuse(
            f"recipes: {section!r} is given without --keys; write `asyncdock recipes --keys "
            f"{section}`"
        )
    if keys:
        return _print_keys(section, as_json=as_json)
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


app.command("agent")(agent_command)
app.command("deploy")(deploy_command)
app.command("host")(host_command)
app.command("pairs")(pairs_command)
app.command("track")(track_command)
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(dock_app, name="dock")
app.add_typer(runs_app, name="runs")
app.add_typer(token_app, name="token")
app.command("serve")(serve_command)
add_plan_commands(plan_app)
app.add_typer(plan_app, name="plan")
app.command("why")(why_command)
app.command("link")(link_command)
app.command()(login)
app.command()(logout)


def main() -> None:
    """Run the command.

    Modules in the current folder can be named in recipes, as ``my_reward:exact``.
    """
    open_outputs()
    sys.path.append(os.getcwd())  # last, so that it shadows nothing
    arguments = sys.argv[1:]
    dashes = arguments.index("--") if "--" in arguments else len(arguments)
    if "--trace" in arguments[:dashes]:  # at any place of the command
        os.environ[TRACE_VARIABLE] = "1"
        arguments = [text for text in arguments[:dashes] if text != "--trace"] + arguments[dashes:]
    with errors_in_words():
        try:
            app(args=arguments, prog_name="asyncdock")
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            code = _written(code)
            if any(thread.name == "imports" for thread in threading.enumerate()):
                # Finalizing the interpreter while a thread imports would crash.
                sys.stderr.flush()
                os._exit(code)
            sys.exit(code)


def _written(code: int) -> int:
    """Return the exit code of a command that would end with ``code``: a result that its disk has
    not taken is none. A reader that has gone does not want the rest."""
    sys.stdout.flush()
    output = output_of(sys.stdout)
    if output is None or output.refused is None or output.is_gone:
        return code
    complain(
        f"error: standard output cannot be written ({output.refused}); write it to a disk with room"
    )
    return code or FAILED


if __name__ == "__main__":
    main()
