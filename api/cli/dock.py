"""``asyncdock dock``: shows the sample flow of a run.

RUN, alive here ──▶ index.json ──▶ index ──▶ warehouses, stages, leases, ledger          (status)
                                         └──▶ rows of a group, read from the warehouses   (inspect)
RUN, ended, or of a service ──▶ api.client ──▶ the same, of a group what was trained on it
RUN/samples/ ──▶ trajectories that the run has kept, as lines of a file                   (export)
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
from rich.console import Group, RenderableType

from api.cli.common.options import JsonOption
from api.cli.common.output import print_json, refuse, table
from api.cli.folder.foreign import run_folder
from api.cli.service.asking import ServerOption, ask, is_run_folder
from api.cli.service.run_files import folder_of
from api.client.credentials import DEFAULT_SERVER
from api.terminal.samples import segments_view
from api.terminal.screen import safe_console, write

if TYPE_CHECKING:
    from api.client import Client

T = TypeVar("T")

MOST_VALUES = 24  # of a row's column that are shown
SHOWN_AS_SEGMENTS = frozenset(
    {
        *("response_ids", "rollout_logprobs", "versions", "loss_mask"),
        *("turn_starts", "turn_reward", "turn_seconds", "branches", "ending"),
    }
)

dock_app = typer.Typer(
    help="Look into the sample flow of a run; export trajectories.",
    no_args_is_help=True,
)

RunName = Annotated[
    str,
    typer.Argument(
        metavar="[RUN]", callback=run_folder, help="A run's folder, or its id in a service."
    ),
]
UrlOption = Annotated[
    str, typer.Option("--index", metavar="URL", help="The index, instead of RUN.")
]
RunOption = Annotated[str, typer.Option("--run", metavar="ID", help="The run's id in that index.")]


@dock_app.command()
def status(
    name: RunName = "",
    index: UrlOption = "",
    run: RunOption = "",
    as_json: JsonOption = False,
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Warehouses and their bytes, rows at each stage, leases and their ages, and the ledger."""

    async def read(dock: Any) -> dict[str, Any]:
        stats = await dock.index.stats()
        config = await dock.index.config()
        stats["stages"] = {
            stage["name"]: stats["stages"][stage["name"]] for stage in config["stages"]
        }
        now = (await dock.index.waiting()).now / 1000  # leases have a time of their own
        return {
            "run": dock.index.run,
            "now": now,
            "stats": stats,
            "ledger": dataclasses.asdict(await dock.index.ledger_event()),
        }

    address = _address(name, index, run)
    snapshot = (
        _with_dock(*address, read)
        if address
        else ask(server, lambda client: _status_of(client, name), name)
    )
    print_json(snapshot) if as_json else safe_console().print(status_view(snapshot))


@dock_app.command()
def inspect(
    name: RunName = "",
    group: Annotated[
        int | None,
        typer.Option(
            "--group", min=0, help="Its number, in the order of admission. Default: the newest."
        ),
    ] = None,
    index: UrlOption = "",
    run: RunOption = "",
    as_json: JsonOption = False,
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """The rows of one group: their states, and the columns that they have so far; of those with an
    environment the turns and observations. Of a run that has ended, or of a service: what was
    trained."""
    address = _address(name, index, run)
    rows = _with_dock(*address, lambda dock: _rows(dock, group)) if address else []
    if not rows and name:
        rows = ask(server, lambda client: _trained_rows(client, name, group), name)
    if not rows and group is None:
        refuse("group: the run has no samples yet; wait until its first group is admitted")
    if not rows:
        refuse(
            f"group: {group} is not there; it is not admitted yet, was dropped, or is older than "
            f"what pipeline.keep_samples has room for"
        )
    print_json(rows) if as_json else safe_console().print(group_view(rows))


@dock_app.command()
def export(
    name: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's folder, or its id in a service.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="JSON Lines.")],
    form: Annotated[
        Literal["tokens", "openenv"],
        typer.Option("--format", help="tokens: all that is known; openenv: its training traces."),
    ] = "tokens",
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Write the trajectories that a run has kept, with their tokens, one a line."""
    from orchestration.disk import replacing
    from stages.samples.sample_log import FOLDER
    from stages.samples.trajectory_export import openenv_trace, trajectories

    folder = folder_of(name, server)
    exported = trajectories(folder / FOLDER)
    if (first := next(exported, None)) is None:
        refuse(
            f"run: {folder} has no trajectories on this machine; give the folder of a run with "
            f"environment.use that has trained a step, and pipeline.keep_samples above 0"
        )
    lines = 0
    try:
        with replacing(out, 0) as partial, partial.open("w", encoding="utf-8") as file:
            for lines, each in enumerate(chain([first], exported), 1):  # noqa: B007
                line = openenv_trace(each) if form == "openenv" else each
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
    except OSError as error:
        refuse(f"out: {error}")
    write(f"{lines} trajectories are in {out}")


async def _rows(dock: Any, group: int | None) -> list[dict[str, Any]]:
    """Return the rows of a group (None: of the newest one), trajectories with their `segments`."""
    if group is None:
        group = (await dock.index.stats())["admitted"] - 1
    rows: list[dict[str, Any]] = await dock.inspect(group) if group >= 0 else []
    if any("turn_starts" in row["columns"] for row in rows):
        from orchestration.recipe.models import tokenizer_of
        from orchestration.state.documents import RUN_RECIPE
        from stages.samples.segments import described
        from stages.trajectories.progress import Ending

        recipe = await RUN_RECIPE.get(dock.index)
        assert recipe is not None, "a run with rows has a recipe"
        tokenizer = await asyncio.to_thread(tokenizer_of, recipe)
        for row in rows:
            if "turn_starts" in row["columns"]:
                row["segments"] = described(row["columns"], tokenizer)
            if "ending" in row["columns"]:
                row["ended"] = Ending(row["columns"]["ending"]).name.lower()
    return rows


async def _status_of(client: Client, name: str) -> dict[str, Any]:
    """Return what a service tells for ``status``: all but leases, which it does not report."""
    run, view = await asyncio.gather(client.run(name), client.stages(name))
    shown = view.model_dump(mode="json")
    gate = shown["gate"]
    return {
        "run": run.id,
        "now": run.ended or time.time(),
        "stats": {
            **gate,
            "gate": gate["allowed"],
            "published": view.published,
            "trained": view.trained,
            "warehouses": {each["name"]: each for each in shown["warehouses"]},
            "stages": {each.pop("name"): each for each in shown["stages"]},
        },
        "ledger": {**view.ledger, "dropped": view.dropped, "dropped_tokens": view.dropped_tokens},
    }


async def _trained_rows(client: Client, name: str, group: int | None) -> list[dict[str, Any]]:
    """Return the samples of ``group`` (None: of the newest one) as rows of :func:`group_view`."""
    columns = {"prompt", "response", "reward", "rewards", "advantage"}
    if group is None:
        group = next(iter([each.group async for each in client.samples(name, limit=1)]), 0)
    samples = [each async for each in client.samples(name, group=group)]
    return [
        {
            "row": sample.place,
            "group": sample.group,
            "samples": len(samples),
            "state": f"trained in step {sample.step}",
            "oldest_version": min((v for v, _ in sample.versions if v >= 0), default=-1),
            "tokens": sample.tokens,
            "columns": sample.model_dump(mode="json", include=columns),
            "segments": [each.model_dump(mode="json") for each in sample.segments],
            **({"ended": sample.ending} if sample.ending else {}),
        }
        for sample in samples
    ]


def status_view(found: Mapping[str, Any]) -> RenderableType:
    """Return what ``status`` prints."""
    from orchestration.units import format_size

    stats = found["stats"]
    ledger = found["ledger"]
    warehouses = table("warehouse", "node", "used", "of", "")
    for name, w in sorted((stats["warehouses"] or {}).items()):
        state = "leaving" if w["leaving"] else f"{w['used'] / w['capacity']:.0%}"
        warehouses.add_row(
            name, w["node"], format_size(w["used"]), format_size(w["capacity"]), state
        )
    stages = table("stage", "takes", "ready", "leased")
    for name, stage in stats["stages"].items():
        unit = "rows" if stage["takes"] == "rows" else "groups"
        stages.add_row(name, stage["takes"], f"{stage['ready']} {unit}", f"{stage['leased']} rows")
    now = found["now"]
    leases = table("lease", "stage", "worker", "rows", "age", "expires in")
    for lease in stats.get("leases") or ():
        age = f"{now - lease['since']:.1f} s"
        expires_in = f"{lease['due'] - now:.1f} s"
        leases.add_row(
            lease["lease"], lease["stage"], lease["worker"], str(lease["rows"]), age, expires_in
        )
    head = f"{found['run']}: {stats['admitted']} groups admitted, {stats['open']} still there"
    if any(stage["takes"] == "batch" for stage in stats["stages"].values()):
        head = (
            f"{found['run']}: version {stats['published']} published, {stats['trained']} trained; "
            f"{stats['admitted']} groups admitted of {stats['gate']} that the gate allows, "
            f"{stats['open']} not yet trained; {ledger['redelivered']} rows delivered again"
        )
    units = ("", "_tokens", "_turns") if ledger["generated_turns"] else ("", "_tokens")
    counts = table("ledger", *(unit.removeprefix("_") or "samples" for unit in units))
    for name in ("generated", "trained", "filtered", "remade", "in_flight"):
        counts.add_row(name.replace("_", " "), *(str(ledger[name + unit]) for unit in units))
    for reason, groups in ledger["dropped"].items():
        counts.add_row(
            f"dropped: {reason}", f"{groups} groups", str(ledger["dropped_tokens"][reason])
        )
    parts: list[RenderableType] = [warehouses, stages]
    if "leases" in stats:
        parts.append(leases if leases.row_count else "no leases")
    if any(ledger.values()):
        parts.append(counts)
    return Group(head, *chain.from_iterable(("", part) for part in parts))


def group_view(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return what ``inspect`` prints of the ``rows`` of a group."""
    parts: list[RenderableType] = [f"group {rows[0]['group']}: {rows[0]['samples']} samples"]
    for row in rows:
        version = f"oldest version {row['oldest_version']}, " if row["oldest_version"] >= 0 else ""
        done = f"; done: {', '.join(row['done']) or 'none'}" if "done" in row else ""
        row_table = table(
            f"row {row['row']}", f"{row['state']}, {version}{row['tokens']} tokens{done}"
        )
        segments = row.get("segments")
        for name, value in row["columns"].items():
            if segments is None or name not in SHOWN_AS_SEGMENTS:
                row_table.add_row(name, _short(value))
        parts += ["", row_table]
        if "ended" in row:
            row_table.add_row("ended", row["ended"])
        if segments:
            parts.append(segments_view(segments))
    return Group(*parts)


def _address(name: str, index: str, run: str) -> tuple[str, str] | None:
    """Return the index of the run and its id there: as they are given, or those of the live run in
    the folder ``name``; None where a service is to be asked for the run ``name``."""
    if not name:
        if not index or not run:
            refuse("run: give a run's folder or id, or both --index URL and --run ID")
        return index, run
    folder = Path(name)
    if folder.is_dir() and not is_run_folder(name):
        refuse(f"run: {folder} is not the folder of a run; or give --index and --run")
    from orchestration.state.live import live_index

    address = live_index(folder)
    return None if address is None else (address["index"], address["run"])


def _with_dock(index: str, run: str, read: Callable[[Any], Awaitable[T]]) -> T:
    """Return what ``read`` returns with the dock of the run. Any failure ends the command."""

    async def reading() -> T:
        from pipeline.warehouse.dock import Dock

        dock = await Dock.attach(index, run)
        try:
            return await read(dock)
        finally:
            await dock.close()
            await dock.index.close()

    try:
        return asyncio.run(reading())
    except (LookupError, ConnectionError, ValueError) as error:
        refuse(error)


def _short(value: Any) -> str:
    if isinstance(value, list) and len(value) > MOST_VALUES:
        return f"{json.dumps(value[:MOST_VALUES])[:-1]}, … {len(value)} in all]"
    return value if isinstance(value, str) else json.dumps(value)
