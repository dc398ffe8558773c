"""Samples of a run: texts, rewards and versions of the newest ones that it was trained on."""

from __future__ import annotations

import asyncio

from api.schemas.runs import RunPath
from api.schemas.samples import SamplePage, SamplesQuery, SampleView
from api.server.http.problems import HTTPProblem
from api.server.service.operations import operation
from api.server.service.service import Service
from orchestration.recipe.problems import suggest
from stages.samples.reading import kept_steps
from stages.samples.sample_log import FOLDER
from stages.samples.search import search


@operation(
    "GET",
    "/v1/runs/{run}/samples",
    scope="read",
    summary="What was trained on",
    tag="runs",
    errors=(400, 404),
)
async def samples(service: Service, path: RunPath, query: SamplesQuery) -> SamplePage:
    """Those that `pipeline.keep_samples` has room for.

    A page looks at 8 MiB of them, or with `best` or `worst` at 64 MiB.
    """
    record = await service.registry.get(path.run)
    folder = service.folder(record) / FOLDER
    async with service.searches:
        try:
            page = await asyncio.to_thread(
                search,
                folder,
                query.wants,
                after=query.after,
                limit=query.limit,
                step=query.step,
                best=query.best,
                worst=query.worst,
            )
        except ValueError as error:
            raise HTTPProblem(
                400,
                "This is no cursor.",
                kind="cursor",
                field="query.after",
                value=query.after,
                fix="give `next` of the page before, or nothing",
            ) from error
    names = [condition.column for condition in query.conditions]
    names += filter(None, map(str.strip, query.columns.split(",")))
    unknown = [name for name in names if name not in page.columns]
    if unknown and page.looked and not query.after:
        raise HTTPProblem(
            400,
            f"No sample has a column {unknown[0]!r}.",
            kind="column",
            fix=suggest(unknown[0], page.columns),
        )
    views = [SampleView.model_validate(sample) for sample in page.samples]
    dropped = dict[str, int]()
    if query.failed and record.recipe["reward"]["on_error"] == "drop":
        totals = (await service.run_statuses.of(service.index(record.id))).totals
        counts = {name: int(of.get("lost", 0)) for name, of in totals.reward_calls.items()}
        dropped = {name: lost for name, lost in counts.items() if lost}
    has_none = query.step is not None and not page.looked and not query.after
    return SamplePage(
        samples=views,
        next=page.next,
        looked=page.looked,
        steps=page.steps,
        kept_steps=await asyncio.to_thread(kept_steps, folder) if has_none else None,
        dropped=dropped,
    )
