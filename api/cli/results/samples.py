"""``asyncdock samples``: what a run was trained on.

RUN, filters ──▶ pages of the service, or of the run's folder ──▶ a terminal: texts and figures        a pipe: JSON Lines
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from api.cli.common.output import print_json, refuse
from api.cli.service.asking import ServerOption, ask
from api.cli.service.runs import RunArgument
from api.client.credentials import DEFAULT_SERVER
from api.terminal.screen import complain, safe_console

if TYPE_CHECKING:
    from api.client import Client
    from api.schemas.samples import SamplePage, SampleView


def samples_command(
    run: RunArgument,
    step: Annotated[int | None, typer.Option(min=0, help="Only of this step.")] = None,
    group: Annotated[int | None, typer.Option(min=0, help="Only of this group.")] = None,
    best: Annotated[int, typer.Option(min=0, max=100, help="So many with the highest reward.")] = 0,
    worst: Annotated[int, typer.Option(min=0, max=100, help="So many with the lowest reward.")] = 0,
    failed: Annotated[
        bool | None,
        typer.Option(help="Only those on which a reward function failed, or none did."),
    ] = None,
    truncated: Annotated[
        bool | None, typer.Option(help="Only those that were cut at their longest, or were not.")
    ] = None,
    grep: Annotated[
        str,
        typer.Option(metavar="TEXT", help="Only with this text in the prompt or the response."),
    ] = "",
    case: Annotated[
        bool, typer.Option("--case", help="TEXT has its capital and small letters.")
    ] = False,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN<VALUE",
            help="Only where this holds, as length>400 or source=algebra: any column, of reward "
            "functions too, with < <= > >= = !=. Repeatable.",
        ),
    ] = None,
    prompt: Annotated[
        str, typer.Option(metavar="ID", help="Only of the prompt with this prompt_id, in any step.")
    ] = "",
    reward_min: Annotated[
        float | None, typer.Option(help="Only with at least this reward.")
    ] = None,
    reward_max: Annotated[float | None, typer.Option(help="Only with at most this reward.")] = None,
    staleness_min: Annotated[
        int | None, typer.Option(min=0, help="Only at least so many versions old.")
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Show this one too: length, tokens, ending, prompt_id, or a field of the "
            "prompt's row. Repeatable.",
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, the newest.")] = 10,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON Lines on a terminal too.")
    ] = False,
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Print what a run was trained on: prompts, responses, rewards and what was computed of them.

    On a terminal as text, in a pipe as JSON Lines.
    """
    filters = {
        **{"step": step, "group": group, "failed": failed, "truncated": truncated},
        **{"grep": grep, "case": case, "where": ",".join(where or ()), "prompt_id": prompt},
        **{"reward_min": reward_min, "reward_max": reward_max, "staleness_min": staleness_min},
        **{"best": best, "worst": worst},
    }

    async def read(client: Client) -> list[SamplePage]:
        return [page async for page in client.sample_pages(run, limit=limit, **filters)]

    pages = ask(server, read, run)
    samples = [sample for page in pages for sample in page.samples]
    columns = column or []
    _refuse_unknown(columns, samples)
    console = safe_console()
    if as_json or not console.is_terminal:
        for sample in samples:
            row = sample.row() if columns else {}
            facts = sample.model_dump(mode="json") | {name: row.get(name) for name in columns}
            print_json(json.dumps(facts, ensure_ascii=False))
    else:
        from api.terminal.samples import sample_view

        for sample in samples:
            console.print(sample_view(sample, columns))
    complain(_looked(pages, len(samples), is_ranked=best + worst > 0))


def _refuse_unknown(columns: Sequence[str], samples: Sequence[SampleView]) -> None:
    """End the command where no sample has one of ``columns``."""
    names = {name for sample in samples for name in sample.row()} if columns else set()
    unknown = [name for name in columns if name not in names]
    if unknown and samples:
        close = difflib.get_close_matches(unknown[0], names, n=1)
        closest = f"did you mean {close[0]}? " if close else ""
        known = ", ".join(sorted(names - {"prompt", "response"}))
        refuse(f"--column = {unknown[0]!r}: no sample has it; {closest}There are {known}")


def _looked(pages: Sequence[SamplePage], count: int, *, is_ranked: bool) -> str:
    """Return how many samples are printed, of how many, and what was not looked at."""
    looked = sum(page.looked for page in pages)
    steps = [step for page in pages if page.steps for step in page.steps]
    if not steps:
        return (
            "No samples: the run has trained no step yet, keeps none (pipeline.keep_samples), or "
            "no longer has those of this step."
        )
    first, last = min(steps), max(steps)
    scope = f"{count} of {looked} samples of "
    scope += f"step {last}" if first == last else f"steps {first} to {last}"
    if not pages[-1].next:
        return f"{scope}."
    if is_ranked:
        return f"{scope}; older ones were not looked at: name their --step."
    return f"{scope}; older ones were not looked at: raise --limit."
