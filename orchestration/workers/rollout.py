"""The worker of one rollout engine: the rollout stage, evaluation (on number 0), and new weights as
they are published."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from orchestration.checkpoints.checkpoint import MODEL
from orchestration.guard.rules import TOKENIZER
from orchestration.recipe.flow import trajectory_reads
from orchestration.recipe.sizes.planner import prompt_limits
from orchestration.workers.engines import probe_rule, rollout_engine, sampling_of, weight_reader
from orchestration.workers.job import Job, Work
from pipeline.data.events import AlarmEvent
from pipeline.first_of import cancel_all
from stages.adapters.options import ADAPTER
from stages.engines.protocols import CuttingEngine, RolloutEngine, TokenizingEngine
from stages.flow.catalogue import ENVIRONMENT
from stages.prompts.formatter import Prompt
from stages.prompts.sources import load_prompts
from stages.rollout.evaluate import Evaluator, distinct_prompts
from stages.rollout.stage import Rollout
from stages.rollout.swapper import Swapper, SwapPolicy
from stages.rollout.weight_follower import WeightFollower
from stages.threads import run_in_temporary_thread

if TYPE_CHECKING:
    from stages.trajectories.trajectory import Trajectories

# of the engine's rows, for an evaluation that is not complete when the next version comes
EVALUATION_SHARE = 0.25
SLOTS_PER_WAITING_ROW = 8  # of the engine of a worker that claims single rows


class RolloutJob(Job):
    """The job that generates responses with an engine of its own, at the newest published weights;
    where the prompts bring responses, for evaluations alone."""

    async def build(self) -> None:
        recipe = self.recipe
        worker = f"rollout-{self.number}"
        # The checkpoint that the run resumed from may have been removed for newer ones; any of them
        # will do to begin with.
        parts = (MODEL, ADAPTER) if recipe.adapters else (MODEL,)
        start = await self.newest_checkpoint(*parts) if self.paths.start else None
        make = functools.partial(
            rollout_engine,
            recipe,
            version=start.version if start else 0,
            weights=start.model if start else None,
            shared=self.paths.shared / worker,
            secret=self.secret,
        )
        # Prompts are read while the engine loads. Loading a model starts threads that generating
        # does not need: they end with the temporary one.
        held_out = asyncio.create_task(self._held_out())
        try:
            engine = await asyncio.to_thread(run_in_temporary_thread, make)
            self.resources.push_async_callback(engine.close)
            trajectories, prompts = await held_out
        finally:
            await cancel_all(held_out)
        self.version = lambda: engine.version
        if isinstance(engine, TokenizingEngine) and TOKENIZER not in recipe.guard.off:
            await refuse_other_tokenizer(self, engine)
        stage, evaluator = make_rollout(self, engine, prompts, trajectories)
        self._stage = stage
        overlap = recipe.staleness_plan.slack > 0
        reader = weight_reader(recipe, self.paths.shared, self.secret)
        self.resources.callback(reader.close)
        swapper = Swapper(
            self.index,
            reader,
            engine,
            SwapPolicy(
                probe=probe_rule(recipe),
                timeout=recipe.sync.timeout,
                at_once=recipe.swaps_at_once if overlap else 0,
            ),
            worker=worker,
            temperature=stage.params.temperature,
            cut=recipe.rollout.on_update == "cut",
        )
        self._follower = WeightFollower(
            self.index,
            swapper,
            stage,
            self.control(stage),
            evaluator,
            worker=worker,
            every=recipe.evaluate.every,
            steps=recipe.train.steps,
            overlap=overlap,
        )
        await self._follower.begin()

    async def _held_out(self) -> tuple[Trajectories | None, list[Prompt]]:
        """Return what evaluations play, where the run has environments, and their prompts."""
        trajectories = None
        if self.recipe.has_environment:
            from orchestration.environments.declared import declarations
            from orchestration.environments.trajectories import make_caller, make_trajectories

            declared = await declarations(self.index)
            log = self.paths.out / "logs" / f"{self.kind}-{self.number}.environments.log"
            caller = make_caller(self.recipe, self.recipe.rollout.max_rows, log)
            self.resources.push_async_callback(caller.end)
            trajectories = make_trajectories(self.recipe, self.tokenizer, caller, declared)
        return trajectories, await asyncio.to_thread(held_out_prompts, self, trajectories)

    async def leave(self) -> None:
        """Cut and park what is in flight, and hand back what has no token.

        An engine that cannot cut ends it first.
        """
        self._stage.leaving = True
        await self.stop()
        await asyncio.gather(*self._until_stop, return_exceptions=True)  # a swap under way ends
        if isinstance(self._stage.engine, CuttingEngine):
            await self._stage.engine.cut()
            await self._stage.engine.close()

    def until_stop(self) -> Sequence[Work]:
        return (self._follower.run(),)


async def refuse_other_tokenizer(job: Job, engine: TokenizingEngine) -> None:
    """Raise ValueError, after an alarm, when the engine's vocabulary is not the run's."""
    run_vocabulary = job.tokenizer.get_vocab()
    engine_vocabulary = engine.tokenizer.get_vocab()
    differing = sorted(
        token
        for token in run_vocabulary.keys() | engine_vocabulary.keys()
        if run_vocabulary.get(token) != engine_vocabulary.get(token)
    )
    if not differing:
        return
    example = (
        f"{differing[0]!r} is {run_vocabulary.get(differing[0], 'none')} in the run and "
        f"{engine_vocabulary.get(differing[0], 'none')} in the engine"
    )
    reason = (
        f"{TOKENIZER}: the rollout engine has another vocabulary: {len(differing):,} tokens "
        f"differ; {example}"
    )
    look = "Look at which tokenizer the engine loads: the run's is that of model.source."
    worker = f"{job.kind}-{job.number}"
    count = float(len(differing))
    alarm = AlarmEvent(
        metric=TOKENIZER,
        step=0,
        version=0,
        value=count,
        limit=0.0,
        reason=reason,
        look=look,
        worker=worker,
    )
    await job.index.emit(alarm)
    raise ValueError(f"{reason}. {look}")


def held_out_prompts(job: Job, trajectories: Trajectories | None = None) -> list[Prompt]:
    """Return what evaluations answer: on worker 0, where the recipe asks for evaluation, else
    nothing. ``trajectories``: of a run with environments."""
    recipe = job.recipe
    if not recipe.evaluate.every or job.number:
        return []
    opens = trajectories.dialogues if trajectories else None
    held_out = load_prompts(
        recipe.prompts, job.tokenizer, recipe.seed, limits=prompt_limits(recipe), opens=opens
    ).held_out
    assert held_out is not None, "checked with the recipe"
    return distinct_prompts(held_out, recipe.evaluate.prompts, by_row=recipe.has_environment)


def make_rollout(
    job: Job,
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    trajectories: Trajectories | None = None,
) -> tuple[Rollout, Evaluator | None]:
    """Return the rollout stage of ``engine``, and the evaluator that answers ``prompts``, if there
    are any. ``trajectories``: that evaluations play, of a run with environments."""
    recipe = job.recipe
    sampling = sampling_of(job.recipe, job.tokenizer)
    if trajectories is not None:
        sampling = trajectories.sampling(sampling)
    size = job.recipe.algorithm.group_size
    # A single worker takes a whole step's groups at once, so that the batch that it decodes does
    # not depend on how fast the rest of the run is; several workers, also those that join later,
    # share the groups by the room that each has.
    is_alone = recipe.replicas == 1 and not job.number and not recipe.launch.autoscale.max
    step_rows = recipe.rows_per_step if is_alone else 0
    claims_rows = recipe.has_environment and not recipe.moves_together and not is_alone
    most_rows = max(recipe.rollout.max_rows, step_rows)
    if claims_rows:  # some more wait in the engine, so that a slot has its next turn at once
        most_rows += -(-most_rows // SLOTS_PER_WAITING_ROW)
    stage = Rollout(
        job.dock,
        engine,
        replace(sampling, budget=recipe.rollout.budget),
        seed=recipe.seed,
        group_size=size,
        most_rows=0 if recipe.prompts.responses else most_rows,
        parks_stragglers=recipe.rollout.straggler == "park",
        environment=ENVIRONMENT if recipe.has_environment else "",
        together=recipe.moves_together,
        claims_rows=claims_rows,
        first_rows=-(-recipe.train.groups_per_step // recipe.replicas) * size,
    )
    if not prompts:
        return stage, None
    make: Callable[..., Evaluator] = Evaluator
    if trajectories is not None:
        from stages.trajectories.evaluate import PlayingEvaluator

        fails_run = recipe.environment.on_error == "fail"
        make = functools.partial(PlayingEvaluator, trajectories=trajectories, fails_run=fails_run)
    return stage, make(
        engine,
        sampling,
        job.rewards(),
        job.tokenizer,
        prompts,
        recipe.evaluate.samples,
        rows=recipe.rollout.max_rows,
        share=EVALUATION_SHARE,
        reads=trajectory_reads(recipe),
        is_sampled=recipe.evaluate.sampling == "rollout",
    )
