"""The worker of the reference stage, for algorithms that need logprobs under the frozen reference policy."""

from __future__ import annotations

import asyncio

from orchestration.run.builders.job import Job
from orchestration.run.engines import reference_engine
from stages.inference.reference import Reference


class ReferenceJob(Job):
    """Computes logprobs with the model that the run began with."""

    async def build(self) -> None:
        engine = await asyncio.to_thread(reference_engine, self.recipe)
        self.resources.callback(engine.close)
        self.control(Reference(engine))
