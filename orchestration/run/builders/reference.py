"""The worker of the reference stage, for algorithms that need logprobs under a frozen model: here, or behind a server."""

from __future__ import annotations

import asyncio

from orchestration.run.builders.job import Job
from orchestration.run.engines import reference_engine, teacher_options
from stages.inference.reference import Reference
from stages.inference.teacher import TeacherReference, TeacherServer


class ReferenceJob(Job):
    """Gives logprobs under the model that the run began with, ``model.reference``, or the model of ``teacher.url``."""

    async def build(self) -> None:
        recipe = self.recipe
        if recipe.teacher.url:
            server = TeacherServer(teacher_options(recipe), self.tokenizer)
            self.resources.push_async_callback(server.close)
            await server.open()
            size = recipe.algorithm.group_size
            self.control(TeacherReference(server, in_flight=recipe.teacher.in_flight, group_size=size))
            return
        engine = await asyncio.to_thread(reference_engine, recipe)
        self.resources.callback(engine.close)
        self.control(Reference(engine))
