"""``asyncdock why``: what a run waits for at this moment; of an ended one, how it has ended.

RUN_DIR of a run that is executed here ─▶ its index ─┐
RUN of a service ─▶ GET /v1/runs/{run}/waiting ──────┴▶ the chain of waiting, or its last link: the index does not answer
                                                       of an ended run: its end, what its rewards show, and alarms
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from api.cli.common.options import JsonOption
from api.cli.common.output import local_time, print_json, write
from api.cli.service.asking import ServerOption, ask, ask_here
from api.cli.service.runs import LiveArgument
from api.client.credentials import DEFAULT_SERVER

if TYPE_CHECKING:
    from orchestration.supervise.waiting import Wait
    from pipeline.index.client import Index


def why_command(
    run: LiveArgument, server: ServerOption = DEFAULT_SERVER, as_json: JsonOption = False
) -> None:
    """Print who waits for whom in a run at this moment, for how long, and which bound ends it. Of a
    run that has ended: how, and what its rewards show."""
    from api.schemas.runs import WaitingView

    async def waiting(index: Index) -> list[Wait]:
        from orchestration.supervise.waiting import waiting_chain

        return await waiting_chain(index)

    unreachable = "all processes of the run wait for its index, as this command does: "
    answer = ask_here(run, waiting, unreachable, ended=True)
    view = (
        WaitingView(chain=answer[1])
        if answer
        else ask(server, lambda client: client.waiting(run), run)
    )
    if as_json:
        return print_json({"run": run, **view.model_dump()})
    for depth, wait in enumerate(view.chain):
        write(f"{'   ' * depth}{'└─ ' if depth else ''}{wait.text}")
    if not view.chain:
        write("nothing: the run has ended")
    if view.reason and view.ended:
        write(f"{view.state} at {local_time(view.ended)}: {view.reason}")
    for finding in view.findings:
        write(finding)
