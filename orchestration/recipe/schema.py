"""The recipe of a run: its sections, and what is read off them at once.

:mod:`orchestration.recipe.loading.load` makes it; :mod:`orchestration.recipe.sizes.planner` derives memory and
groups in flight from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PrivateAttr

from orchestration.recipe.model_files import KNOWN_MODELS, MODEL_KEYS
from orchestration.recipe.problems import value_or_none
from orchestration.recipe.sections import (
    AlgorithmSection,
    CheckpointSection,
    CriticSection,
    EvaluateSection,
    ExternalSection,
    ExternalStage,
    GuardSection,
    LaunchSection,
    ModelSection,
    PipelineSection,
    RewardSection,
    RolloutSection,
    Section,
    ServeSection,
    StageSection,
    SyncSection,
    TeacherSection,
    TrainSection,
)
from orchestration.recipe.sections.environment import EnvironmentSection
from orchestration.recipe.sections.retired import migrated
from orchestration.units import CountOrZero
from pipeline.index.address import host_of
from pipeline.node import AUTO, LOOPBACK, is_unspecified
from pipeline.schedule.staleness import StalenessPlan
from stages.adapters.options import AdapterOptions
from stages.algorithms import Algorithm, algorithm_class, build_algorithm
from stages.algorithms.interface import FOLLOWS
from stages.flow.declarations import Declared
from stages.json_schema import FixedOnResume, IsPath, marked
from stages.prompts.rows.options import PromptOptions


class Recipe(Section):
    """One run's settings.

    Made by :func:`load_recipe`; frozen; travels as JSON through the index to the workers.
    """

    name: Annotated[str, FixedOnResume("the run has this name in its logs and its trackers")] = (
        Field(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$",
            description="Name of the run. Default: the recipe file's name.",
        )
    )
    description: str = Field(default="", description="One line for people.")
    seed: Annotated[
        CountOrZero,
        FixedOnResume("it decides which prompt each group gets, and which prompts are held out"),
    ] = Field(default=0, description="Seed of prompts, draws and initial weights.")
    model: Annotated[
        ModelSection,
        FixedOnResume("the checkpoint has the weights of this model in this number format"),
    ]
    prompts: PromptOptions
    rollout: RolloutSection = RolloutSection()
    environment: EnvironmentSection = EnvironmentSection()
    reward: RewardSection = RewardSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    train: TrainSection
    critic: CriticSection = CriticSection()
    teacher: TeacherSection = TeacherSection()
    pipeline: PipelineSection = PipelineSection()
    sync: SyncSection = SyncSection()
    serve: ServeSection = ServeSection()
    evaluate: EvaluateSection = EvaluateSection()
    checkpoint: CheckpointSection = CheckpointSection()
    guard: GuardSection = GuardSection()
    launch: LaunchSection = LaunchSection()
    external: Annotated[
        ExternalSection,
        FixedOnResume(
            "it decides whether the weights are those of a checkpoint or of another program"
        ),
    ] = ExternalSection()
    stages: list[StageSection] = Field(
        default=[], max_length=8, description="Stages of your own, in any order."
    )
    _declared: Declared | None = PrivateAttr(default=None)

    @property
    def declared(self) -> Declared | None:
        """What its own stages declare, where that is known without an import of their modules, as
        in workers."""
        return self._declared

    def with_declared(self, declared: Declared) -> Recipe:
        """The same recipe, which knows what its own stages declare."""
        recipe = self.model_copy()
        recipe._declared = declared
        return recipe

    def runs_stage(self, stage: ExternalStage) -> bool:
        """Whether the run starts workers for ``stage``, instead of leaving it to another program.

        Where the prompts bring responses, rollout workers are started for evaluations alone.
        """
        needs_engine = stage != "rollout" or not self.prompts.responses or self.evaluate.every > 0
        return stage not in self.external.stages and needs_engine

    @property
    def has_environment(self) -> bool:
        """Whether an environment answers the policy's turns."""
        return self.environment.use is not None

    @property
    def moves_together(self) -> bool:
        """Whether all trajectories of a step take their turns together: with η = 0, so that what is
        decoded together, and so each bit, does not depend on time."""
        return self.has_environment and self.staleness_plan.slack == 0

    @property
    def longest_response(self) -> int:
        """Tokens of the longest response: of a trajectory, all its turns and observations."""
        longest_turn = self.rollout.max_tokens
        if not self.has_environment:
            return longest_turn
        return self.environment.max_tokens or 4 * longest_turn

    @property
    def longest_response_key(self) -> str:
        """The key that decides on :attr:`longest_response`."""
        return "environment.max_tokens" if self.has_environment else "rollout.max_tokens"

    @property
    def staleness_plan(self) -> StalenessPlan:
        return StalenessPlan(
            self.pipeline.staleness, self.train.groups_per_step, self.pipeline.window
        )

    @property
    def first_slack(self) -> int:
        """The slack that the run begins with: that of the smallest bound, where the run decides."""
        least = self.pipeline.staleness_min or self.pipeline.staleness
        return replace(self.staleness_plan, bound=least).slack

    @property
    def is_paced(self) -> bool:
        """Whether groups enter as late as keeps the trainer fed.

        With one step ahead none can be trained any fresher.
        """
        return (
            self.pipeline.admission == "paced"
            and not self.colocated
            and self.staleness_plan.slack > 1
        )

    @property
    def mixed_precision(self) -> bool:
        """Whether training computes in ``model.dtype`` and keeps float32 master weights."""
        return self.train.precision != "model" and self.model.dtype != "float32"

    @property
    def trained_dtype(self) -> str:
        """Dtype of the trained weights, their gradients and the optimizer's state."""
        return "float32" if self.mixed_precision else self.model.dtype

    @property
    def adapters(self) -> AdapterOptions | None:
        """The adapters that are trained in place of the model's weights; None where all weights
        are."""
        lora = self.model.lora
        if not lora.rank:
            return None
        return AdapterOptions(
            lora.rank, lora.alpha, tuple(lora.targets), self.seed, self.trained_dtype
        )

    @property
    def colocated(self) -> bool:
        """Whether training and generation take turns on the same devices."""
        return self.launch.placement == "colocated"

    @property
    def rows_per_step(self) -> int:
        """Samples of one optimizer step."""
        return self.train.groups_per_step * self.algorithm.group_size

    @property
    def trained_rows_per_step(self) -> int:
        """Samples that an optimizer step trains, those of earlier steps included."""
        return self.rows_per_step + self.train.replay_groups * self.algorithm.group_size

    @property
    def replay_versions(self) -> int:
        """For how many further steps a trained group may be trained again."""
        return self.train.replay_versions if self.train.replay_groups else 0

    @property
    def oldest_trained(self) -> int:
        """Versions by which a trained token may be behind: the staleness bound, and replay."""
        return self.pipeline.staleness + self.replay_versions

    @property
    def replicas(self) -> int:
        """Number of rollout engines."""
        return self.train.ranks if self.colocated else self.rollout.workers

    @property
    def logprob_temperature(self) -> float:
        """What logits are divided by for logprobs: the sampling temperature; 1 where the prompts
        bring the responses."""
        return 1.0 if self.prompts.responses else self.rollout.temperature

    @property
    def has_model_folders(self) -> bool:
        """Whether a key names a folder with a base model."""
        sources = (attrgetter(key)(self) for key in MODEL_KEYS)
        return any(source and source not in KNOWN_MODELS for source in sources)

    @property
    def masks_padding(self) -> bool:
        """Whether tokens that pad the embedding have no probability, in sampling and in training:
        by default where the torch engines do both. On given responses nothing is sampled, and
        losses are those of other libraries."""
        own = self.rollout.engine == self.train.engine == "torch" and not self.prompts.responses
        both = own and self.runs_stage("rollout") and self.runs_stage("update")
        return self.model.vocabulary == "tokenizer" or (self.model.vocabulary == "auto" and both)

    @property
    def spans_machines(self) -> bool:
        """Whether other machines start workers: the nodes of a cluster, or hosts.

        What `auto` stands for follows from it.
        """
        return self.launch.on_cluster or self.launch.remote_rollouts > 0

    @property
    def weight_transport(self) -> str:
        """``sync.transport``, shared_memory or network."""
        if self.sync.transport != AUTO:
            return self.sync.transport
        return "network" if self.spans_machines else "shared_memory"

    @property
    def warehouse_address(self) -> str:
        """The host of ``pipeline.serve``: an address, `auto` for the one by which other nodes reach
        this one, or "" for none."""
        if self.pipeline.serve == AUTO:
            return AUTO if self.spans_machines else ""
        return host_of(self.pipeline.serve)

    @property
    def sync_address(self) -> str:
        """Where the trainer serves weights: an address, or `auto` for the one by which other nodes
        reach the trainer's, which is the cluster's choice."""
        address = self.warehouse_address
        if self.launch.on_cluster and not is_unspecified(address):
            return AUTO
        return address or LOOPBACK

    @property
    def index_address(self) -> str:
        """Where an embedded index is served, with its port: an address, `auto` for that of this
        machine on its network, or "" for none."""
        if self.pipeline.index != "embedded":
            return ""
        if is_unspecified(self.warehouse_address):
            return AUTO if self.spans_machines else ""
        return self.pipeline.serve if self.pipeline.serve != AUTO else self.warehouse_address

    @property
    def swaps_at_once(self) -> int:
        """How many replicas may swap weights at the same time, 0 for all: ``sync.at_once``, or a
        quarter of them. So a version needs about four swaps' time with any number of replicas, and
        three quarters always generate."""
        at_once = self.sync.at_once or max(1, self.replicas // 4)
        return at_once if at_once < self.replicas else 0

    @cached_property
    def typed_algorithm(self) -> Algorithm:
        """The algorithm with its options, which are parsed once; those that are not set and follow
        another key have its value. Raises ValueError for a name or an option that is not known."""
        options = dict(self.algorithm.options)
        for name, field in algorithm_class(self.algorithm.name).model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, dict) and FOLLOWS in extra and options.get(name) is None:
                options[name] = attrgetter(str(extra[FOLLOWS]))(self)
        return build_algorithm(self.algorithm.name, options)

    @property
    def trains_critic(self) -> bool:
        """Whether the run has a critic with an engine and a worker of its own."""
        return value_or_none(lambda: self.typed_algorithm.critic_algorithm()) is not None

    @property
    def keeps_undo(self) -> bool:
        """Whether trainers keep a copy of their state before each train batch: it has several
        optimizer steps, or a critic of its own may skip it."""
        algorithm = value_or_none(lambda: self.typed_algorithm)
        several = algorithm is not None and algorithm.epochs * algorithm.mini_batches > 1
        return several or self.trains_critic

    def with_absolute_paths(self) -> Recipe:
        """Return the same recipe with absolute paths, so that it can be used from any folder."""
        data = self.model_dump()
        for key, _ in marked(Recipe, data, IsPath):
            table, name = _table_of(data, key)
            value = table[name]
            table[name] = [*map(_absolute, value)] if isinstance(value, list) else _absolute(value)
        if (url := self.checkpoint.url) and "://" not in url:
            # a folder that the run makes
            data["checkpoint"]["url"] = str(Path(url).expanduser().resolve())
        return Recipe.model_validate(data)

    def to_json(self) -> str:
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str | bytes) -> Recipe:
        """Return the recipe that :meth:`to_json` wrote: see :meth:`recorded`."""
        return cls.recorded(json.loads(text))

    @classmethod
    def recorded(cls, tables: Mapping[str, Any]) -> Recipe:
        """Return the recipe that a run has recorded, also one of an earlier version. Relations and
        files are not checked again. Raises ValidationError."""
        return cls.model_validate(migrated(tables))


def _table_of(data: Any, key: str) -> tuple[dict[str, Any], str]:
    """The table of ``data`` that has the dotted ``key``, and the key's name in it."""
    *sections, name = key.split(".")
    for section in sections:
        data = data[int(section)] if isinstance(data, list) else data[section]
    return data, name


def _absolute(value: str | None) -> str | None:
    """Return ``value`` as an absolute path if it names an existing file or folder, and otherwise
    unchanged."""
    if not value or value in KNOWN_MODELS or not Path(value).expanduser().exists():
        return value
    return str(Path(value).expanduser().resolve())
