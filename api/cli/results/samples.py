"""``asyncdock samples``: what a run was trained on.

RUN, filters of the service ──▶ pages, also of a run's folder ──▶ a terminal: texts and figures        a pipe: JSON Lines
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from api.cli.common.output import print_json
from api.cli.service.asking import ServerOption, ask
from api.cli.service.runs import RunArgument
from api.client.credentials import DEFAULT_SERVER
from api.schemas.samples import SamplePage, SamplesQuery
from api.terminal.numbers import counted
from api.terminal.screen import complain, safe_console

if TYPE_CHECKING:
    from api.client import Client

OTHERS = ("columns", "limit", "after")  # fields of a query that filter nothing


def _with_filters(command: Callable[..., None]) -> Callable[..., None]:
    """Return ``command`` with an option for each filter that the service has, in the place of its
    ``filters``."""
    signature = inspect.signature(command, eval_str=True)
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=Annotated[field.annotation, typer.Option(help=field.description)],
        )
        for name, field in SamplesQuery.model_fields.items()
        if name not in OTHERS
    ]
    own = [signature.parameters[name] for name in signature.parameters if name != "filters"]
    command.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return command


@_with_filters
def samples_command(
    run: RunArgument,
    *,
    column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Show this one too: length, tokens, prompt_id, a field of the prompt's row. "
            "Repeatable.",
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, the newest.")] = 10,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON Lines on a terminal too.")
    ] = False,
    server: ServerOption = DEFAULT_SERVER,
    **filters: Any,
) -> None:
    """Print what a run was trained on: prompts, responses, rewards and what was computed of them.

    On a terminal as text, in a pipe as JSON Lines.
    """

    columns = column or []
    filters["columns"] = ",".join(columns)

    async def read(client: Client) -> list[SamplePage]:
        return [page async for page in client.sample_pages(run, limit=limit, **filters)]

    pages = ask(server, read, run)
    samples = [sample for page in pages for sample in page.samples]
    console = safe_console()
    if as_json or not console.is_terminal:
        for sample in samples:
            facts = sample.row() | sample.model_dump(mode="json")
            print_json(json.dumps(facts, ensure_ascii=False))
    else:
        from api.terminal.samples import sample_view

        for sample in samples:
            console.print(sample_view(sample, columns))
    complain(_looked(pages, len(samples), is_ranked=filters["best"] + filters["worst"] > 0))
    for name, lost in pages[0].dropped.items() if pages else ():
        complain(
            f"Dropped with their groups: {counted(lost, 'response')} that {name} could not score; "
            f"logs/flow-0.log has why."
        )


def _looked(pages: Sequence[SamplePage], count: int, *, is_ranked: bool) -> str:
    """Return how many samples are printed, of how many, and what was not looked at."""
    looked = sum(page.looked for page in pages)
    steps = [step for page in pages if page.steps for step in page.steps]
    if not steps and pages and (kept_steps := pages[0].kept_steps):
        return f"No samples of this step: there are those of {_steps_text(*kept_steps)}."
    if not steps:
        return "No samples: the run has trained no step yet, or keeps none (pipeline.keep_samples)."
    fix = "name their --step" if is_ranked else "raise --limit"
    rest = f"; older ones were not looked at: {fix}" if pages[-1].next else ""
    of_steps = _steps_text(min(steps), max(steps))
    return f"{count} of {counted(looked, 'sample')} of {of_steps}{rest}."


def _steps_text(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"
