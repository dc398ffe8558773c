"""``asyncdock why``: what a run waits for at this moment.

RUN_DIR of a run that is executed here ─▶ its index ─┐
RUN of a service ─▶ GET /v1/runs/{run}/waiting ──────┴▶ the chain of waiting, or its last link: the index does not answer
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from api.cli.common.options import JsonOption
from api.cli.common.output import print_json, write
from api.cli.service.asking import ServerOption, ask, ask_here
from api.cli.service.runs import LiveArgument
from api.client.credentials import DEFAULT_SERVER

if TYPE_CHECKING:
    from orchestration.supervise.waiting import Wait
    from pipeline.index.client import Index


def why_command(
    run: LiveArgument, server: ServerOption = DEFAULT_SERVER, as_json: JsonOption = False
) -> None:
    """Print who waits for whom in a run at this moment, for how long, and which bound ends it."""

    async def waiting(index: Index) -> list[Wait]:
        from orchestration.supervise.waiting import waiting_chain

        return await waiting_chain(index)

    unreachable = "all processes of the run wait for its index, as this command does: "
    answer = ask_here(run, waiting, unreachable, ended=True)
    chain = answer[1] if answer else ask(server, lambda client: client.waiting(run), run).chain
    if as_json:
        from api.schemas.runs import WaitingView

        return print_json({"run": run, **WaitingView(chain=chain).model_dump()})
    for depth, wait in enumerate(chain):
        write(f"{'   ' * depth}{'└─ ' if depth else ''}{wait.text}")
    if not chain:
        write("nothing: the run has ended")
