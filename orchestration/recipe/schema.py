"""The recipe of a run: its sections, and what is read off them at once.

:mod:`orchestration.recipe.load` makes it; :mod:`orchestration.recipe.planner` derives memory and groups in flight from it.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from orchestration.recipe.model_files import KNOWN_MODELS
from orchestration.recipe.sections import (
    TLS_FILES,
    AlgorithmSection,
    CheckpointSection,
    EvaluateSection,
    ExternalSection,
    ExternalStage,
    LaunchSection,
    ModelSection,
    PipelineSection,
    RewardSection,
    RolloutSection,
    Section,
    SyncSection,
    TrainSection,
)
from orchestration.recipe.values import CountOrNone
from pipeline.staleness import StalenessPlan
from stages.prompts.sources import PromptOptions


class Recipe(Section):
    """One run's settings. Made by :func:`load_recipe`; frozen; travels as JSON through the index to the workers."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="Name of the run. Default: the recipe file's name."
    )
    description: str = Field(default="", description="One line for people.")
    seed: CountOrNone = Field(default=0, description="Seed of prompts, draws and initial weights.")
    model: ModelSection
    prompts: PromptOptions
    rollout: RolloutSection = RolloutSection()
    reward: RewardSection
    algorithm: AlgorithmSection = AlgorithmSection()
    train: TrainSection
    pipeline: PipelineSection = PipelineSection()
    sync: SyncSection = SyncSection()
    evaluate: EvaluateSection = EvaluateSection()
    checkpoint: CheckpointSection = CheckpointSection()
    launch: LaunchSection = LaunchSection()
    external: ExternalSection = ExternalSection()

    def ours(self, stage: ExternalStage) -> bool:
        """Whether the run's own workers do a stage, and no other program."""
        return stage not in self.external.stages

    @property
    def staleness_plan(self) -> StalenessPlan:
        return StalenessPlan(self.pipeline.staleness, self.train.groups_per_step, self.pipeline.window)

    @property
    def colocated(self) -> bool:
        """Whether training and generation take turns on the same devices."""
        return self.launch.placement == "colocated"

    @property
    def replicas(self) -> int:
        """Rollout engines."""
        return self.train.ranks if self.colocated else self.rollout.workers

    @property
    def needs_reference(self) -> bool:
        """Whether the algorithm needs logprobs under the frozen reference policy (for example with ``kl_coef`` > 0)."""
        from stages.algorithms import build_algorithm

        return build_algorithm(self.algorithm.name, self.algorithm.options).needs_reference

    def located(self) -> Recipe:
        """The same recipe with the paths in it resolved, so that it means the same in any folder."""
        paths = {"model": ("source",), "prompts": ("path",), "pipeline": TLS_FILES}
        changes = {}
        for section, keys in paths.items():
            found = {key: _resolved(getattr(getattr(self, section), key)) for key in keys}
            changes[section] = getattr(self, section).model_copy(update=found)
        return self.model_copy(update=changes)

    def to_json(self) -> str:
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str | bytes) -> Recipe:
        """The recipe that :meth:`to_json` wrote. Relations and paths were checked when the run was made."""
        return cls.model_validate_json(text)


def _resolved(value: str | None) -> str | None:
    """``value`` as an absolute path when there is a file or a folder of this name; a name stays what it is."""
    if not value or value in KNOWN_MODELS or not Path(value).expanduser().exists():
        return value
    return str(Path(value).expanduser().resolve())
