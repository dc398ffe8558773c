"""``asyncdock run`` and ``resume``: execution of a run in this process, shown in the terminal.

Execution ─▶ events ─▶ metrics.jsonl and the view ── at the end ─▶ summary, plot, samples
    ▲
    └ first Ctrl-C: stop with a checkpoint; second one: cancel
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from api.cli.common.exit_codes import FAILED, INTERRUPTED, OF_STATE
from api.cli.common.options import (
    EventsOption,
    FromOption,
    PlainOption,
    SetOption,
    TrustOption,
)
from api.cli.common.output import refuse, refuse_folder
from api.cli.common.recipe_files import RecipeArgument, find, load
from api.cli.folder.foreign import refuse_anothers, run_folder
from api.terminal.screen import safe_console
from api.terminal.view import viewing
from orchestration.logs import ERRORS, RUN_LOG, append_line
from orchestration.recipe.flow import device_count
from orchestration.streams import TIED, keep_errors_in, output_is_gone

if TYPE_CHECKING:
    from rich.console import Console

    from orchestration.processes.forkserver import ForkServer
    from orchestration.recipe.schema import Recipe
    from orchestration.run.execution import Execution, RunResult
    from orchestration.run.folder import RunFolder

LAST_EVENTS_SECONDS = 5.0  # how long the view waits for the last events after the run has ended


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


def resume(
    run_dir: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_DIR", callback=run_folder, help="The folder of a run that did not finish."
        ),
    ],
    set_: SetOption = None,
    start_version: FromOption = None,
    trust: TrustOption = False,
    as_json: EventsOption = False,
    plain: PlainOption = False,
) -> None:
    """Go on from the newest checkpoint of the run in RUN_DIR, with other keys if --set says so."""
    if not run_dir.exists():
        refuse(
            f"run: {run_dir} does not exist; give the folder of a run, or continue a run of a "
            f"service by `asyncdock runs resume ID`"
        )
    run_dir = run_dir.resolve()
    run_dir = run_dir.parent if run_dir.name == "recipe.json" else run_dir
    refuse_anothers(run_dir, trust)
    with original_folder(run_dir), fork_server() as forks:
        from orchestration.run.folder import RunFolder

        create = partial(RunFolder.resume, run_dir, set_ or [], start_version)
        raise typer.Exit(create_and_show(create, forks, json=as_json, plain=plain, option="run"))


def fork_here(
    run: str,
    version: int | None,
    overrides: Mapping[str, Any],
    out: Path | None,
    *,
    trust: bool,
    as_json: bool,
    plain: bool,
) -> NoReturn:
    """Execute a fork of the run in the folder ``run``, and end the command with its exit code."""
    from orchestration.checkpoints.checkpoint import CheckpointUnusable
    from orchestration.recipe.problems import RecipeError
    from orchestration.run.fork import forked
    from orchestration.state.lock import RunError

    run_dir = run_folder(Path(run).resolve())
    refuse_anothers(run_dir, trust)
    runs = Path.cwd() / "runs"
    out = out and Path.cwd() / out
    with original_folder(run_dir), fork_server() as forks, contextlib.ExitStack() as holding:
        try:
            fork = holding.enter_context(forked(run_dir, version, overrides, out or runs))
        except (CheckpointUnusable, RecipeError, RunError) as error:
            refuse(error)

        def create() -> RunFolder:
            with holding:  # until the fork has files of its own
                return fork.create(out or new_folder(runs, fork.recipe))

        raise typer.Exit(create_and_show(create, forks, json=as_json, plain=plain))


def create_and_show(
    create: Callable[[], RunFolder],
    forks: ForkServer | None,
    *,
    json: bool,
    plain: bool,
    option: str = "--out",
) -> int:
    """Execute the run in the folder that ``create`` returns, which ``option`` names.

    Returns the exit code; ends the command when the run cannot be created.
    """
    from orchestration.private_files import keep_from_others
    from orchestration.run.execution import Execution
    from orchestration.state.lock import RunError, RunLocked

    keep_from_others()
    try:
        folder = create()
    except RunLocked as locked:
        refuse(locked, FAILED)
    except OSError as error:
        refuse_folder(option, error)
    except (RunError, ValueError) as error:
        refuse(error)
    keep_from_others(folder.recipe.launch.readers)
    gc.freeze()
    gc.enable()
    return show_run(Execution(folder, forks=forks), json=json, plain=plain)


def new_folder(runs: Path, recipe: Recipe) -> Path:
    """Create the folder of a run below ``runs`` with a unique name: that of ``recipe``, the time,
    and a number where two start in one second. Its mode is that of ``launch.readers``."""
    from orchestration.private_files import MASKS

    name = f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    mode = 0o777 & ~MASKS[recipe.launch.readers]
    if not runs.exists():
        runs.mkdir(parents=True)
        runs.chmod(mode)
    for number in itertools.count(1):
        folder = runs / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
            folder.chmod(mode)
            return folder
        except FileExistsError:
            if not folder.is_dir():  # `runs` itself is a file
                raise
    raise AssertionError("there is always another number")


@contextlib.contextmanager
def original_folder(run_dir: Path) -> Iterator[None]:
    """Change to the folder in which the run in ``run_dir`` was started, so that its modules and
    files are found. Stays in the current folder when there is no such run, or its folder does not
    exist."""
    from orchestration.run.folder import BEGUN_IN

    recorded = run_dir / BEGUN_IN
    folder = Path(recorded.read_text()) if recorded.is_file() else None
    if folder is None or not folder.is_dir():
        yield
        return
    with contextlib.chdir(folder):
        sys.path.append(str(folder))
        yield


@contextlib.contextmanager
def fork_server() -> Iterator[ForkServer | None]:
    """Start the fork server of a run's workers; it imports while this process loads the recipe.

    None where unsupported. Garbage is not collected until :func:`create_and_show`: imports make
    little, and would take a quarter longer.
    """
    from orchestration.processes.forkserver import ForkServer, ForkServerDied

    gc.disable()
    try:
        server = ForkServer.start()
    except ForkServerDied:
        server = None
    with contextlib.closing(server) if server else contextlib.nullcontext() as started:
        try:
            yield started
        finally:
            gc.enable()


def show_run(run: Execution, *, json: bool, plain: bool) -> int:
    """Execute ``run``, show it, print its report. Returns the exit code."""
    screen = safe_console(stderr=json)
    outcome = asyncio.run(watch_run(run, screen, json=json, plain=plain))
    if outcome is None:
        from api.terminal.report import resume_text

        newest = run.folder.newest()
        begins = resume_text(newest.version if newest else 0, run.recipe.train.steps)
        screen.print(
            f"[bold yellow]Ended at once.[/] Go on {begins} with:", markup=True, highlight=False
        )
        screen.print(
            f"  asyncdock resume {run.folder.path}", highlight=False, markup=False, soft_wrap=True
        )
        return INTERRUPTED
    _report(run, outcome, screen)
    return OF_STATE[outcome.state]


async def watch_run(
    run: Execution, console: Console, *, json: bool, plain: bool
) -> RunResult | None:
    """Execute ``run`` while a view follows its events, which are also written to ``metrics.jsonl``.

    Returns None when it was cancelled by a second interrupt.
    """
    from api.telemetry.progress import Progress
    from orchestration import logs
    from orchestration.history.events_file import METRICS, MetricsFile
    from orchestration.state.paths import WHERE
    from pipeline.data.events import Event, next_id

    recipe = run.recipe
    log_file = run.folder.path / "logs" / RUN_LOG
    keep_errors_in(log_file)
    progress = Progress(
        recipe.name, recipe.train.steps, recipe.pipeline.staleness, device_count(recipe)
    )
    with contextlib.ExitStack() as stack:
        show, say = stack.enter_context(viewing(progress, console, json=json, plain=plain))
        # After the view has begun: a live view prints standard error above itself.
        logs.configure(errors=run.folder.path / "logs" / ERRORS)
        metrics = stack.enter_context(MetricsFile(run.folder.path / METRICS))
        if (run.folder.path / WHERE).exists():  # its command was killed
            from orchestration.run.former import former_events

            async for event in former_events(run.folder.path, metrics.after):
                metrics.event(event)
        # also of events that are removed: who has seen them goes on after their ids
        run.last_event = metrics.last
        run.evaluated = metrics.rewind(run.folder.begins)
        reader = Reader(log_file)

        def show_event(event: Event) -> None:
            metrics.event(event)
            show(event)
            reader.look()
            if event.kind == "state" and event.data["state"] == "paused":
                say(
                    f"Paused. Go on, from another terminal: asyncdock runs resume {run.folder.path}"
                )

        async def follow() -> None:
            is_first = True
            async for event in run.events():
                if is_first and run.joining:
                    text = f"Other machines join with:\n  {run.joining}"
                    # a live view stays below it
                    console.print(text, markup=False, highlight=False, soft_wrap=True)
                is_first = False
                show_event(event)

        outcome = await execute(run, follow, say)
        if not progress.ended:  # the index did not record the end
            ended = {"state": "stopped", "reason": "ended at once by a second interrupt"}
            if outcome is not None:
                ended = {"state": outcome.state, "reason": outcome.reason}
            show_event(Event(next_id(metrics.last), time.time(), "state", ended))
        if outcome is not None and (problem := metrics.close()):
            return replace(
                outcome, state="failed", reason=f"the run has {outcome.state}, and {problem}"
            )
        return outcome


class Reader:
    """The reader of this command's output. When it has gone, :meth:`look` notes so once, in
    ``log_file``."""

    def __init__(self, log_file: Path) -> None:
        self._log_file = log_file
        self._is_noted = False

    def look(self) -> None:
        if self._is_noted or not output_is_gone():
            return
        self._is_noted = True
        append_line(
            self._log_file, "nobody reads the output of this command any more; the run goes on"
        )


async def execute(
    run: Execution, follow: Callable[[], Any], say: Callable[[str], None]
) -> RunResult | None:
    """Execute ``run`` while ``follow`` shows it.

    The first interrupt stops it, the second cancels it (returns None).
    """
    stop = asyncio.Event()
    following = asyncio.create_task(follow())
    executing = asyncio.create_task(run.execute(stop))

    def stop_if_events_are_lost(followed: asyncio.Task[None]) -> None:
        if not followed.cancelled() and isinstance(followed.exception(), OSError):
            stop.set()

    following.add_done_callback(stop_if_events_are_lost)

    def interrupt() -> None:
        if not stop.is_set():
            stop.set()
            seconds = run.recipe.launch.stop_timeout
            say(
                f"Stopping cleanly, with a checkpoint, within {seconds:.0f} s; Ctrl-C once more "
                f"ends it at once."
            )
        elif not executing.cancelling():  # a second cancellation would interrupt its cleanup
            executing.cancel()
            say("Ending at once.")

    def stop_at_end() -> None:
        if not os.read(sys.stdin.fileno(), 1024):
            loop.remove_reader(sys.stdin)
            stop.set()

    loop = asyncio.get_running_loop()
    if TIED in os.environ:
        loop.add_reader(sys.stdin, stop_at_end)
    signals = [signal.SIGINT, signal.SIGTERM]
    # ignored when the command was started with nohup
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    for number in signals:
        loop.add_signal_handler(number, interrupt)
    try:
        return await executing
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
        return None
    finally:
        # An error in the view does not end the run; it is reported when the run has ended.
        _, late = await asyncio.wait([following], timeout=LAST_EVENTS_SECONDS)
        for task in late:
            task.cancel()
        for number in signals:
            loop.remove_signal_handler(number)
        failed = (await asyncio.gather(following, return_exceptions=True))[0]
        if isinstance(failed, Exception) and not executing.cancelled():
            say(f"The view of the run failed: {type(failed).__name__}: {failed}")


def _report(run: Execution, outcome: RunResult, console: Console) -> None:
    from api.terminal.report import log_of, summary_table, write_report

    def line(text: str, style: str | None = None) -> None:
        console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    model = outcome.checkpoint.model if outcome.checkpoint else None
    saved_version = outcome.checkpoint.version if outcome.checkpoint else 0
    report = write_report(run.folder.path, run.recipe, checkpoint=model, saved=saved_version)
    # the view on standard output has shown the reason
    shown_before = {} if console.stderr else {"reason": ""}
    console.print()
    console.print(summary_table(report.summary | shown_before), markup=False)
    for note in report.notes:
        line(f"  {note}", "yellow")
    log = log_of(run.folder.path, outcome.worker)
    if outcome.state == "failed" and log is not None:
        line(f"  log: {log}")
    if model is not None:
        line(f"  model: {model}")
    for path in report.files:
        line(f"  {path}")
    for missing in report.missing:
        line(f"  {missing}", "yellow")
    if outcome.state != "finished" and saved_version < run.recipe.train.steps:
        line(f"Go on with: asyncdock resume {run.folder.path}")
