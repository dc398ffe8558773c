"""``asyncdock runs tag`` and ``note``: what people write to a run, in its folder or its service."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from api.cli.common.exit_codes import FAILED
from api.cli.common.options import JsonOption
from api.cli.common.output import print_json, refuse
from api.cli.service.asking import ServerOption, ask, is_run_folder
from api.client.credentials import DEFAULT_SERVER
from api.terminal.screen import write
from orchestration.state.labels import Labels, read_labels, write_labels

if TYPE_CHECKING:
    from api.client import Client

RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's id in the service, or its folder.")
]


def tag(
    run: RunArgument,
    tags: Annotated[
        list[str] | None,
        typer.Argument(metavar="[+TAG|-TAG]...", help="Tags to add, and to take away."),
    ] = None,
    as_json: JsonOption = False,
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Add tags to a run (+good) and take others away (-bad); print those that it has then."""
    changes = tags or []
    more = [word.removeprefix("+") for word in changes if not word.startswith("-")]
    fewer = [word[1:] for word in changes if word.startswith("-")]
    labels = _changed(run, server, more, fewer, None)
    print_json({"run": run, **asdict(labels)}) if as_json else write(" ".join(labels.tags))


def note(
    run: RunArgument,
    text: Annotated[str, typer.Argument(metavar="TEXT", help='"" removes it.')],
    as_json: JsonOption = False,
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Write TEXT to a run, in place of what was there."""
    labels = _changed(run, server, (), (), text)
    if as_json:
        print_json({"run": run, **asdict(labels)})


def _changed(
    run: str,
    server: str,
    more: list[str] | tuple[()],
    fewer: list[str] | tuple[()],
    text: str | None,
) -> Labels:
    def changed(labels: Labels) -> Labels:
        return Labels(labels.tagged(more, fewer).tags, labels.notes if text is None else text)

    async def in_service(client: Client) -> Labels:
        view = await client.run(run)
        labels = changed(Labels(tuple(view.tags), view.notes))
        await client.label(run, tags=labels.tags, notes=labels.notes)
        return labels

    if not is_run_folder(run):
        return ask(server, in_service, run)
    try:
        labels = changed(read_labels(Path(run)))
        write_labels(Path(run), labels)
    except ValueError as error:
        refuse(error)
    except OSError as error:
        refuse(f"{run}: its labels cannot be written ({error.strerror or error})", FAILED)
    return labels
