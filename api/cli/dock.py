"""``asyncdock dock``: looks into the sample flow of a run that is alive.

RUN_DIR ──▶ index.json ──▶ index ──▶ warehouses, stages, leases, ledger      (status)
                                └──▶ rows of a group, from where they lie     (inspect)
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Group, RenderableType
from rich.table import Table

from api.cli.exit_codes import BAD_INPUT
from api.terminal.screen import complain, safe_console

T = TypeVar("T")

LONGEST = 24  # values of a row that are shown

dock_app = typer.Typer(help="Look into the sample flow of a run that is alive.", no_args_is_help=True)

RunDir = Annotated[Path | None, typer.Argument(metavar="[RUN_DIR]", help="The folder of a run that is alive.")]
IndexOption = Annotated[str | None, typer.Option("--index", metavar="URL", help="The index, instead of RUN_DIR.")]
RunOption = Annotated[str | None, typer.Option("--run", metavar="ID", help="The run's id in that index.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dock_app.command()
def status(
    run_dir: RunDir = None, index: IndexOption = None, run: RunOption = None, as_json: JsonOption = False
) -> None:
    """Warehouses and their bytes, rows at each stage, leases and their ages, and the ledger."""

    async def look(dock: Any) -> dict[str, Any]:
        stats, config = await dock.index.stats(), await dock.index.config()
        stats["stages"] = {stage["name"]: stats["stages"][stage["name"]] for stage in config["stages"]}
        return {"run": dock.index.run, "stats": stats, "ledger": await dock.index.ledger()}

    told = _look(run_dir, index, run, look)
    print(json.dumps(told)) if as_json else safe_console().print(status_view(told, time.time()))


@dock_app.command()
def inspect(
    group: Annotated[int, typer.Argument(help="The group's number, in the order of admission.")],
    run_dir: RunDir = None,
    index: IndexOption = None,
    run: RunOption = None,
    as_json: JsonOption = False,
) -> None:
    """The rows of one group: their states, and the columns that they have so far."""

    async def look(dock: Any) -> list[dict[str, Any]]:
        return await dock.inspect(group)

    rows = _look(run_dir, index, run, look)
    if not rows:
        _refuse(f"group: {group} is not there; it is not admitted yet, or released after its training")
    print(json.dumps(rows)) if as_json else safe_console().print(group_view(group, rows))


def status_view(told: Mapping[str, Any], now: float) -> RenderableType:
    """What ``status`` prints at Unix time ``now``."""
    stats, ledger = told["stats"], told["ledger"]
    warehouses = _table("warehouse", "node", "used", "of", "")
    for name, w in sorted((stats["warehouses"] or {}).items()):
        share = w["used"] / w["capacity"]
        state = "leaving" if w["leaving"] else f"{share:.0%}"
        warehouses.add_row(name, w["node"], _bytes(w["used"]), _bytes(w["capacity"]), state)
    stages = _table("stage", "takes", "ready", "leased")
    for name, stage in stats["stages"].items():
        unit = "rows" if stage["takes"] == "rows" else "groups"
        stages.add_row(name, stage["takes"], f"{stage['ready']} {unit}", f"{stage['leased']} rows")
    leases = _table("lease", "stage", "worker", "rows", "age", "expires in")
    for lease in stats["leases"] or ():
        age, left = now - lease["since"], lease["due"] - now
        leases.add_row(
            lease["lease"], lease["stage"], lease["worker"], str(lease["rows"]), f"{age:.1f} s", f"{left:.1f} s"
        )
    books = _table("ledger", "samples", "tokens")
    for name in ("generated", "trained", "filtered", "remade", "in_flight"):
        books.add_row(name.replace("_", " "), str(ledger[name]), str(ledger[f"{name}_tokens"]))
    head = (
        f"{told['run']}: version {stats['published']} published, {stats['trained']} trained; "
        f"{stats['admitted']} groups admitted of {stats['gate']} that the gate allows, {stats['open']} not yet trained; "
        f"{ledger['redelivered']} rows delivered again"
    )
    return Group(head, "", warehouses, "", stages, "", leases if leases.row_count else "no leases", "", books)


def group_view(group: int, rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """What ``inspect`` prints."""
    parts: list[RenderableType] = [f"group {group}: {rows[0]['samples']} samples"]
    for row in rows:
        version = f"oldest version {row['oldest_version']}, " if row["oldest_version"] >= 0 else ""
        done = ", ".join(row["done"]) or "none"
        table = _table(f"row {row['row']}", f"{row['state']}, {version}{row['tokens']} tokens; done: {done}")
        for name, value in row["columns"].items():
            table.add_row(name, _short(value))
        parts += ["", table]
    return Group(*parts)


def _look(run_dir: Path | None, index: str | None, run: str | None, look: Callable[[Any], Awaitable[T]]) -> T:
    if run_dir is not None:
        from orchestration.service.lifecycle import WHERE

        try:
            where = json.loads((run_dir / WHERE).read_text())
        except OSError:
            _refuse(f"run: {run_dir} is not the folder of a run that is alive; or give --index and --run")
        index, run = where["index"], where["run"]
    if not index or not run:
        _refuse("run: give the folder of a run that is alive, or both --index URL and --run ID")

    async def looking(url: str, run: str) -> T:
        from pipeline.warehouse.dock import Dock

        dock = await Dock.attach(url, run)
        try:
            return await look(dock)
        finally:
            await dock.close()
            await dock.index.close()

    try:
        return asyncio.run(looking(index, run))
    except (LookupError, ConnectionError, ValueError) as error:
        _refuse(str(error))


def _refuse(text: str) -> NoReturn:
    complain(f"error: {text}")
    raise typer.Exit(BAD_INPUT)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, no_wrap=i == 0)
    return table


def _bytes(count: float) -> str:
    if count < 1024:
        return f"{count:.0f} B"
    power = min(int(math.log(count, 1024)), 3)
    return f"{count / 1024**power:.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"


def _short(value: Any) -> str:
    if isinstance(value, list) and len(value) > LONGEST:
        return f"{json.dumps(value[:LONGEST])[:-1]}, … {len(value)} in all]"
    return value if isinstance(value, str) else json.dumps(value)
