"""Samples of a run: texts, rewards and versions of the newest ones that it was trained on."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import Field

from api.schemas.runs import RunPath, SamplePage, SampleView
from api.server.http.problems import HTTPProblem
from api.server.service.operations import Strict, operation
from api.server.service.service import Service
from stages.samples.sample_log import FOLDER, Sample, read


class SamplesQuery(Strict):
    step: int | None = Field(None, ge=0, le=2**31, description="Only of this optimizer step.")
    reward_min: float | None = Field(None, description="Only with at least this reward.")
    reward_max: float | None = Field(None, description="Only with at most this reward.")
    staleness_min: int | None = Field(
        None, ge=0, le=2**31, description="Only at least so many versions old."
    )
    limit: int = Field(50, ge=1, le=200)
    after: str = Field("", max_length=40, description="`next` of the page before.")

    def wants(self, sample: Sample) -> bool:
        return (
            (self.step is None or sample["step"] == self.step)
            and self._has_reward(sample["reward"])
            and (self.staleness_min is None or sample["staleness"] >= self.staleness_min)
        )

    def _has_reward(self, reward: float | None) -> bool:
        if self.reward_min is None and self.reward_max is None:
            return True
        least = self.reward_min
        most = self.reward_max
        return (
            reward is not None
            and (least is None or reward >= least)
            and (most is None or reward <= most)
        )


@operation(
    "GET",
    "/v1/runs/{run}/samples",
    scope="read",
    summary="What was trained on",
    tag="runs",
    errors=(400, 404),
)
async def samples(service: Service, path: RunPath, query: SamplesQuery) -> SamplePage:
    """Those that `pipeline.keep_samples` has room for."""
    folder = service.folder(await service.registry.get(path.run)) / FOLDER
    options: dict[str, Any] = {
        "after": query.after,
        "limit": query.limit,
        "oldest_step": query.step or 0,
    }
    try:
        page, after = await asyncio.to_thread(read, folder, query.wants, **options)
    except ValueError as error:
        fix = "give `next` of the page before, or nothing"
        raise HTTPProblem(
            400,
            "This is no cursor.",
            kind="cursor",
            field="query.after",
            value=query.after,
            fix=fix,
        ) from error
    return SamplePage(samples=[SampleView.model_validate(sample) for sample in page], next=after)
