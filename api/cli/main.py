"""The command ``asyncdock``: its subcommands, and the entry point.

    run, resume    execute a run here and show it (api.cli.local_run)
    check, recipes what follows from a recipe; the stored ones, and the keys (api.cli.recipes)
    plan           what a run of a recipe will do, before it runs (api.cli.plan)
    serve, agent   a service, and the process that executes its runs (api.cli.service)
    view           runs of this machine in the dashboard, without a service (api.cli.view)
    tinker         models for the training loops of Tinker's clients (api.cli.service.tinker)
    deploy         the policy of a run on Ray Serve (api.cli.service.deploy)
    runs, login    the runs of a service, over REST (api.cli.service.runs); forks (api.cli.fork)
    link           a link that signs a browser in to a service (api.cli.service.link)
    why            what a run waits for at this moment (api.cli.why)
    checkpoint     whether checkpoints are as they were written (api.cli.results.checkpoint)
    dock, track    the sample flow of a run (api.cli.dock); its events in TensorBoard, MLflow or W&B (api.cli.track)
    sweep          one recipe with several settings (api.cli.results.sweep)
    env            one trajectory of an environment, before a run (api.cli.env)
    convert        a recipe from the configuration of TRL or verl (api.cli.convert)
    export         a checkpoint as a folder for others, and on the Hub (api.cli.results.export)
    compare        runs beside each other (api.cli.results.compare)
    samples        what a run was trained on (api.cli.results.samples)
    pairs          preference pairs of a run's samples (api.cli.results.pairs)

Exit codes are in api.cli.common.exit_codes and docs/runs.md.
"""

from __future__ import annotations

import importlib.metadata
import os
import pkgutil
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from api.cli.common.error_log import errors_in_words
from api.cli.common.exit_codes import FAILED, FINISHED
from api.terminal.screen import complain
from orchestration.logs import TRACE_VARIABLE
from orchestration.streams import open_outputs, output_of

# name → where its function or Typer is, and the first sentence of its help
COMMANDS = {
    "run": ("api.cli.local_run:run", "Train as RECIPE says, and show it live."),
    "resume": (
        "api.cli.local_run:resume",
        "Go on from the newest checkpoint of the run in RUN_DIR, with other keys if --set says so.",
    ),
    "check": (
        "api.cli.recipes:check",
        "Validate RECIPE without running it, and print what follows from it: sizes, and "
        "the flow of its samples.",
    ),
    "recipes": (
        "api.cli.recipes:recipes",
        "List the recipes that can be run by name, or with --keys the keys of one; or copy one.",
    ),
    "agent": ("api.cli.service.agent:agent_command", "Execute the runs of a service."),
    "compare": (
        "api.cli.results.compare:compare_command",
        "Compare runs: keys that differ, results with seeds folded, curves over each other.",
    ),
    "deploy": (
        "api.cli.service.deploy:deploy_command",
        "Serve the newest policy of RUN, and its versions, on a Ray cluster, with Ray "
        "Serve's autoscaling.",
    ),
    "convert": (
        "api.cli.convert:convert_command",
        "Write a recipe from the configuration of TRL's or verl's trainer, and list what it "
        "could not carry over.",
    ),
    "env": ("api.cli.env:env_app", "Try an environment before a run."),
    "export": (
        "api.cli.results.export:export_command",
        "Write a checkpoint of RUN as a folder that transformers opens, with its recipe, "
        "metrics and model card.",
    ),
    "host": (
        "api.cli.service.agent:host_command",
        "Start workers of a run that another machine executes.",
    ),
    "pairs": (
        "api.cli.results.pairs:pairs_command",
        "Write preference pairs for DPO: of each group that the run was trained on, the "
        "best response against the worst.",
    ),
    "track": (
        "api.cli.track:track_command",
        "Show a run in TensorBoard, MLflow or W&B, while it goes on or afterwards.",
    ),
    "samples": (
        "api.cli.results.samples:samples_command",
        "Print what a run was trained on: prompts, responses, rewards and what was computed of "
        "them.",
    ),
    "serve": (
        "api.cli.service.serve:serve_command",
        "Serve the REST API, the dashboard and the runs in DIR until Ctrl-C.",
    ),
    "view": (
        "api.cli.view:view_command",
        "Show runs of this machine in the dashboard, live and ended ones, without a service.",
    ),
    "sweep": (
        "api.cli.results.sweep:sweep_command",
        "Run RECIPE with each combination of settings, each once, and compare them.",
    ),
    "tinker": (
        "api.cli.service.tinker:tinker_command",
        "Serve models to Tinker's clients: their training loops, on engines of this machine.",
    ),
    "why": (
        "api.cli.why:why_command",
        "Print who waits for whom in a run at this moment, for how long, and which bound ends it.",
    ),
    "link": (
        "api.cli.service.link:link_command",
        "Print a link that signs a browser in to the dashboard: once, within ten minutes, "
        "with what your token may.",
    ),
    "login": (
        "api.cli.service.runs:login",
        "Keep a token for a service, in a file that only you can read.",
    ),
    "logout": (
        "api.cli.service.runs:logout",
        "Forget the token that `asyncdock login` kept for a service.",
    ),
    "checkpoint": (
        "api.cli.results.checkpoint:checkpoint_app",
        "Look at the checkpoints of a run.",
    ),
    "dock": (
        "api.cli.dock:dock_app",
        "Look into the sample flow of a run; export trajectories.",
    ),
    "runs": ("api.cli.fork:runs_app", "Start, stop and watch the runs of a service."),
    "token": (
        "api.cli.service.token:token_app",
        "Bearer tokens: who may use a service, and for what.",
    ),
    "plan": ("api.cli.plan:plan_app", "Predict what a run would do, and plan its swaps."),
}
PLAIN: dict[str, Any] = {
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,  # its panels cut long messages
}


class LazyCommands(Mapping[str, Any]):
    """The commands of COMMANDS. A command's module is imported when the command is read."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = _load(name)
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)

    def __contains__(self, name: object) -> bool:
        return name in COMMANDS


def _load(name: str) -> Any:
    target = pkgutil.resolve_name(COMMANDS[name][0])
    parent = typer.Typer(add_completion=False, **PLAIN)
    if isinstance(target, typer.Typer):
        parent.add_typer(target, name=name)
        group: Any = typer.main.get_command(parent)
        return group.commands[name]
    parent.command(name)(target)
    return typer.main.get_command(parent)


class CommandGroup(TyperGroup):
    """The group of all commands, which imports only the one that is called."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands: Any = LazyCommands()

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the section of the commands as the base class does, from COMMANDS alone."""
        width = formatter.width - 6 - max(map(len, COMMANDS))
        rows = [
            (name, TyperCommand(name, help=text).get_short_help_str(width))
            for name, (_, text) in COMMANDS.items()
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


app = typer.Typer(
    cls=CommandGroup,
    help="Asynchronous RL post-training of language models.",
    epilog="Exit codes: 0 done or finished, 1 failed, 2 wrong input, 3 no service or not allowed, "
    "130 stopped.",
    no_args_is_help=True,
    **PLAIN,
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
