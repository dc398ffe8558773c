"""Runs beside each other: the table of all, curves of several over each other.

files of the runs ──a thread──▶ RunTable, ResultCache ──▶ JSON, made there too
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web
from pydantic_core import to_json

from api.schemas.comparison import CompareQuery, ComparisonView, TableQuery, TableView
from api.server.http.bodies import JSON
from api.server.http.problems import HTTPProblem
from api.server.service.operations import operation
from api.server.service.service import SERVICE, Service
from orchestration.recipe.problems import suggest
from orchestration.service.run_table import RunTable
from orchestration.state.registry import RunRecord

if TYPE_CHECKING:
    from orchestration.service.result_cache import ResultCache


class Beside:
    """State that the operations here share."""

    def __init__(self, service: Service) -> None:
        self.table = RunTable(service.registry, service.folder)
        self.comparing = asyncio.Lock()  # one at a time: its results are in memory

    @cached_property
    def results(self) -> ResultCache:
        from orchestration.service.result_cache import ResultCache  # numpy

        return ResultCache()


BESIDE = web.AppKey("beside", Beside)


def prepare(app: web.Application) -> None:
    """Prepare ``app``, which has its service, for the operations here."""
    app[BESIDE] = Beside(app[SERVICE])


@operation("GET", "/v1/table", scope="read", summary="All runs, with chosen columns", tag="runs")
async def table(service: Service, query: TableQuery, request: web.Request) -> TableView:
    rows = await request.app[BESIDE].table.rows(query.columns)
    body = await asyncio.to_thread(to_json, rows, inf_nan_mode="null")
    return web.Response(body=body, content_type=JSON)  # type: ignore[return-value]


@operation(
    "GET",
    "/v1/compare",
    scope="read",
    summary="Curves and results of runs",
    tag="runs",
    errors=(404, 422),
)
async def compare_runs(
    service: Service, query: CompareQuery, request: web.Request
) -> ComparisonView:
    """Settings are runs that differ by their seed alone."""
    records = {record.id: record for record in await service.registry.everything()}
    for run in query.runs:
        if run not in records:  # older than those
            records[run] = await service.registry.get(run)
    state = request.app[BESIDE]
    chosen = [(records[run], service.folder(records[run])) for run in dict.fromkeys(query.runs)]
    async with state.comparing:
        body = await asyncio.to_thread(_compared, state, chosen, query)
    return web.Response(body=body, content_type=JSON)  # type: ignore[return-value]


def _compared(
    state: Beside, chosen: Sequence[tuple[RunRecord, Path]], query: CompareQuery
) -> bytes:
    from orchestration.comparison.compare import compare
    from orchestration.comparison.view import as_curves, as_tables

    metric = query.metric
    results = [state.results.read(record, folder, metric) for record, folder in chosen]
    try:
        comparison = compare(results, [metric])
    except ValueError:
        raise HTTPProblem(
            422,
            f"No run has {metric!r}.",
            kind="unknown-metric",
            field="query.metric",
            value=metric,
            fix=suggest(metric, state.table.metrics_of([record for record, _ in chosen])),
        ) from None
    curves = as_curves(comparison, metric, query.by, query.points, fold=query.fold)
    answer: dict[str, Any] = as_tables(comparison) | {"curves": curves}
    return to_json(answer, inf_nan_mode="null")
