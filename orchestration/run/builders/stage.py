"""The worker of a stage that the recipe names under ``[[stages]]``."""

from __future__ import annotations

from orchestration.recipe.flow import flow_of, stages_of
from orchestration.run.builders.job import Job
from stages.flow.adapter import StageAdapter


class StageJob(Job):
    """Runs one instance of the stage's class."""

    async def build(self) -> None:
        stage = next(stage for stage, declared in stages_of(self.recipe) if declared.name == self.kind)
        self.control(StageAdapter(stage, flow_of(self.recipe)[self.kind], self.tokenizer))
