"""A worker: one process (or one task of the inline launcher) with the controllers of its stages.

    index: recipe, where files lie ──▶ build stages ──▶ `ready` ──▶ controllers until the run's work is done
    beside them: the run's state is watched (pause, resume, stop); a rollout worker follows the published weights

A worker needs the run's id and the index's URL, and nothing else. Which stages share a worker:

    flow      gate, reward, advantage      (light; one)
    rollout   rollout, evaluation          (one engine each)
    update    update                       (one rank of the train engine each: the first has the stage's controller)
    colocated rollout, update, evaluation  (both of the two before, on one device; then there are none of those)
    reward    reward                       (further ones, when the recipe asks for more than one)
    reference reference                    (when the algorithm needs it)
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import sys
import traceback
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import structlog

from orchestration.logs import Current, configure
from orchestration.recipe.planner import flow_of, prompt_limits, reshard_plan, slab_bytes
from orchestration.recipe.recipe import Recipe
from orchestration.run import checkpoint
from orchestration.run.engines import (
    colocated_engine,
    probe_rule,
    probe_tokens,
    reference_engine,
    rollout_engine,
    sampling_of,
    terms_of,
    tokenizer_of,
    train_engine,
    weight_publisher,
    weight_reader,
)
from orchestration.run.launchers import EXIT_FAILED, EXIT_FATAL, EXIT_NOT_STARTED
from orchestration.run.paths import RunPaths
from orchestration.service.registry import CHECKPOINT_ASKED, CHECKPOINT_WRITTEN
from pipeline.columns import ColumnError
from pipeline.controller import Controller, Stage
from pipeline.index.client import INDEX_VARIABLE, BoundBroken, GateClosed, Index, NeverFits, WrittenTwice
from pipeline.spans import Spans
from pipeline.warehouse.arena import StaleHandle
from pipeline.warehouse.dock import Dock
from stages.algorithms import AlgorithmError, NamedAlgorithm, build_algorithm
from stages.device import DeviceMissing
from stages.engines.plans import Ranks
from stages.engines.protocols import EngineMissing, RolloutEngine
from stages.engines.registry import EngineUnknown
from stages.external_checks import TERMS
from stages.gate import Gate
from stages.inference.reference import Reference
from stages.models import ModelNotFound, Tokenizer
from stages.prompts.external import ExternalPrompts
from stages.prompts.sources import LISTED, PromptError, PromptForm, PromptSource, load_prompts
from stages.resharding.swap import empty
from stages.rewards.registry import RewardError
from stages.rewards.stage import Reward, RewardSet
from stages.rollout.evaluate import Evaluator, distinct_prompts
from stages.rollout.stage import Rollout
from stages.rollout.weight_follower import SwapPolicy, WeightFollower
from stages.sample_log import FOLDER, Recorder, SampleLog
from stages.threads import run_in_temporary_thread
from stages.training.advantage import Advantage
from stages.training.colocated import ColocatedRankWorker, ColocatedUpdate, SharedDevice, Turn
from stages.training.ranks import RankGroup, RankWorker
from stages.training.update import Update

if TYPE_CHECKING:
    from stages.engines.torch.rollout import TorchRolloutEngine
    from stages.engines.torch.train import TorchTrainEngine

log = structlog.get_logger()


class CannotStart(RuntimeError):
    """What the worker is made of cannot be used, and another attempt would find the same; the message is the cause's."""


class NotStarted(RuntimeError):
    """The worker could not be made, for a cause that may pass; the message is the cause's."""


# What reading a model, a config, a file or options raises: the same at each attempt.
LASTING = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    NotImplementedError,
    ImportError,
    AssertionError,
    ArithmeticError,
    MemoryError,
    OSError,
)
# Of these, what another process has caused, which is about to come back.
PASSING = (ConnectionError, TimeoutError, BlockingIOError, InterruptedError, StaleHandle)
# Nothing that a restart could mend. Training is replayed with the same rows and weights.
FATAL = (
    CannotStart,
    FloatingPointError,
    NotImplementedError,
    BoundBroken,
    WrittenTwice,
    GateClosed,
    NeverFits,
    AlgorithmError,
    ColumnError,
    DeviceMissing,
    EngineMissing,
    EngineUnknown,
    FloatingPointError,  # training is deterministic: the same batch gives the same loss
    ModelNotFound,
    PromptError,
    RewardError,
)
STATE_SECONDS = 10.0
CHECKPOINT_TOLD = "checkpoint:told"  # a document of the run: the newest version whose `checkpoint` event was emitted
FED = "prompts.jsonl"  # in the run's folder: the prompts that other programs have put


@dataclass(frozen=True)
class _Shared:
    """A rank's device in a colocated run, and its claims of rollout work. ``turn`` decides on the first rank."""

    device: SharedDevice
    turn: Turn
    rollout: Controller

    async def until(self, work: Coroutine[Any, Any, None]) -> None:
        """Claim rollout work until ``work`` is done."""
        await work
        self.rollout.stop()


class Worker:
    """The worker ``kind``-``number`` of a run, in one of its lives: ``name``."""

    def __init__(self, run: str, url: str, kind: str, number: int, name: str) -> None:
        self.index = Index(url, run)
        self.kind, self.number, self.name = kind, number, name
        self._controllers: list[Controller] = []
        self._gate: Gate | None = None
        self._version: Callable[[], int | None] = lambda: None  # of the policy that this worker holds, if any
        self._beside: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._work_till_end: list[Callable[[], Coroutine[Any, Any, None]]] = []  # whatever the run's state
        self._farewell: list[Callable[[], Coroutine[Any, Any, None]]] = []  # when the work is done
        self._following: list[asyncio.Task[None]] = []
        self._close: list[Callable[[], Any]] = []

    async def run(self) -> None:
        """Work until the run's work is done or the run stops. Raises what went wrong, after saying it in the index."""
        structlog.contextvars.bind_contextvars(
            run=self.index.run, stage=self.kind, worker=self.name, version=Current(lambda: self._version())
        )
        try:
            recipe, place = await self._documents()
            self.recipe, self.place = recipe, place
            self.secret = (await self.index.get("secret") or "").encode()
            self.dock = Dock(
                self.index,
                flow_of(recipe).schema,
                worker=self.name,
                directory=place.shared,
                lease=recipe.pipeline.lease_seconds,
                slab=slab_bytes(recipe),
                secret=self.secret,
                tls=recipe.pipeline.tls_contexts(),
            )
            self._close.append(self.dock.close)
            await self.dock.join(recipe.pipeline.arena)
            await self._build()
            await self._tell("ready")
            log.info("ready")
            await self._work()
            await self._tell("stopped")
        except BaseException as error:
            first = _first(error)
            if not isinstance(first, asyncio.CancelledError):
                log.error("worker failed", error=repr(first), trace="".join(traceback.format_exception(first)))
                await self.index.put(f"reason:{self.name}", _in_words(first))
                raise first from first.__cause__
            raise
        finally:
            for close in reversed(self._close):
                result = close()
                if asyncio.iscoroutine(result):
                    await result
            await self.index.close()

    async def _build(self) -> None:
        """Raises CannotStart for what no restart mends: at the run's start, when nothing else has changed anything yet."""
        try:
            await getattr(self, f"_build_{self.kind}")()
        except FATAL:
            raise
        except Exception as error:
            first = _first(error)
            shared = str(getattr(first, "filename", "") or "").startswith(str(self.place.shared))
            if isinstance(first, PASSING) or shared:  # in shared memory others come and go
                raise
            starting = (await self.index.state())[0] in ("created", "starting")
            refused = CannotStart if starting and isinstance(first, LASTING) else NotStarted
            raise refused(_in_words(first)) from first

    async def _documents(self) -> tuple[Recipe, RunPaths]:
        recipe, place = await self.index.get("recipe"), await self.index.get("place")
        if recipe is None or place is None:
            raise RuntimeError(f"run {self.index.run!r} is not in this index; give the id and the URL of a run that is")
        return Recipe.from_json(recipe), RunPaths.from_json(place)

    async def _tell(self, change: str, reason: str = "") -> None:
        await self.index.emit(
            "worker", {"stage": self.kind, "worker": f"{self.kind}-{self.number}", "name": self.name, "change": change}
        )

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._watch())
            async with asyncio.TaskGroup() as work:
                for controller in self._controllers:
                    work.create_task(controller.run())
                if self._gate is not None:
                    work.create_task(self._gate.run())
                self._following = [work.create_task(follow()) for follow in self._beside]
                for work_till_end in self._work_till_end:
                    work.create_task(work_till_end())
            for farewell in self._farewell:
                await farewell()
            watching.cancel()

    async def _watch(self) -> None:
        """Follow the run's state."""
        while True:
            state, _, after = await self.index.state()
            for controller in self._controllers:
                controller.pause() if state == "paused" else controller.resume()
            if self._gate is not None:
                self._gate.paused = state == "paused"
                await self.index.wake("version")
            if state in ("stopping", "stopped", "failed", "finished"):
                for controller in self._controllers:
                    controller.stop()
                if self._gate is not None:
                    await self._gate.stop()
                for task in self._following:
                    task.cancel()
                return
            await self.index.wait("state", after, STATE_SECONDS)

    # ── the kinds ──

    def _control(self, stage: Stage, spans: Spans | None = None) -> Controller:
        controller = Controller(self.dock, stage, number=self.number, spans=spans)
        self._controllers.append(controller)
        return controller

    def _algorithm(self) -> NamedAlgorithm:
        name, options = self.recipe.algorithm.name, self.recipe.algorithm.options
        return NamedAlgorithm(name, build_algorithm(name, options))

    def _rewards(self) -> RewardSet:
        return RewardSet([(function.name, function.weight) for function in self.recipe.reward.functions])

    async def _build_flow(self) -> None:
        recipe, tokenizer = self.recipe, tokenizer_of(self.recipe)
        if recipe.pipeline.serve:
            host, port = await self.dock.serve(recipe.pipeline.serve)
            log.info("warehouse served to other nodes", host=host, port=port, tls=bool(recipe.pipeline.tls_certificate))
        if recipe.external.stages:
            await self.index.put(TERMS, terms_of(recipe, tokenizer).to_json())
        self._gate = Gate(
            self.dock,
            await self._prompts(tokenizer),
            group_size=recipe.algorithm.group_size,
            steps=recipe.train.steps,
            groups_per_step=recipe.train.groups_per_step,
        )
        if recipe.ours("reward"):
            self._control(Reward(self._rewards(), tokenizer))
        self._control(Advantage(self._algorithm()))

    async def _prompts(self, tokenizer: Tokenizer) -> PromptSource:
        if self.recipe.prompts.source != "external":
            split = await asyncio.to_thread(
                load_prompts,
                self.recipe.prompts,
                tokenizer,
                self.recipe.seed,
                limits=prompt_limits(self.recipe),
                listed=self.place.out / LISTED,
            )
            return split.train
        form = PromptForm(self.recipe.prompts, tokenizer, prompt_limits(self.recipe))
        feed = ExternalPrompts(self.index, self.place.out / FED, form)
        await feed.begin()
        self._beside.append(feed.run)
        return feed

    async def _build_reward(self) -> None:
        self._control(Reward(self._rewards(), tokenizer_of(self.recipe)))

    async def _build_reference(self) -> None:
        engine = await asyncio.to_thread(reference_engine, self.recipe)
        self._close.append(engine.close)
        self._control(Reference(engine))

    async def _build_rollout(self) -> None:
        recipe = self.recipe
        # The one that the run resumed from may have made room for newer ones; any is a beginning.
        start = checkpoint.latest(self.place.checkpoints) if self.place.start else None
        make = functools.partial(
            rollout_engine,
            recipe,
            version=start.version if start else 0,
            weights=start.model if start else None,
            shared=self.place.shared / f"rollout-{self.number}",
            secret=self.secret,
        )
        engine = await asyncio.to_thread(
            run_in_temporary_thread, make
        )  # loading a model computes in parallel, and generating does later
        self._close.append(engine.close)
        self._version = lambda: engine.version
        stage, evaluator = self._rollout(engine)
        controller = self._control(stage)
        overlap = recipe.staleness_plan.slack > 0
        follower = WeightFollower(
            self.index,
            weight_reader(recipe, self.place.shared, self.secret),
            stage,
            controller,
            evaluator,
            worker=f"rollout-{self.number}",
            every=recipe.evaluate.every,
            steps=recipe.train.steps,
            overlap=overlap,
            policy=SwapPolicy(
                probe=probe_rule(recipe),
                timeout=recipe.sync.timeout,
                rolling=recipe.sync.rolling and overlap and recipe.replicas > 1,
            ),
            cut=recipe.rollout.on_update == "cut",
        )
        await follower.begin()
        self._beside.append(follower.run)

    def _rollout(self, engine: RolloutEngine) -> tuple[Rollout, Evaluator | None]:
        """The stage around ``engine``, and what evaluates with it if this worker does."""
        recipe, tokenizer = self.recipe, tokenizer_of(self.recipe)
        sampling, size = sampling_of(recipe, tokenizer), recipe.algorithm.group_size
        # One worker takes a whole step's groups at once, so that the batch it decodes is the same however fast the rest
        # of the run is; several share them by what each has room for.
        step_rows = recipe.train.groups_per_step * size if recipe.replicas == 1 else 0
        stage = Rollout(
            self.dock,
            engine,
            replace(sampling, budget=recipe.rollout.budget),
            seed=recipe.seed,
            group_size=size,
            most_rows=max(recipe.rollout.max_rows, step_rows),
        )
        evaluator = None
        if recipe.evaluate.every and self.number == 0:
            held_out = load_prompts(recipe.prompts, tokenizer, recipe.seed, limits=prompt_limits(recipe)).held_out
            assert held_out is not None, "checked with the recipe"
            prompts = distinct_prompts(held_out, recipe.evaluate.prompts)
            evaluator = Evaluator(engine, sampling, self._rewards(), tokenizer, prompts, recipe.evaluate.samples)
        return stage, evaluator

    async def _build_colocated(self) -> None:
        ranks = Ranks(self.number, self.recipe.train.dp, self.recipe.train.tp)
        engine = await asyncio.to_thread(colocated_engine, self.recipe, ranks)
        self._close.append(engine.close)
        await engine.sleep()  # training is built in the room that it leaves
        empty(engine.tensors.values())
        await self._build_update(beside=engine)

    async def _share(self, rollout: TorchRolloutEngine, trainer: TorchTrainEngine, rank_group: RankGroup) -> _Shared:
        """One device for ``rollout`` and ``trainer``, which has it now."""
        recipe = self.recipe
        stage, evaluator = self._rollout(rollout)
        controller = self._control(stage)
        plan = await asyncio.to_thread(reshard_plan, recipe, "vllm" if rollout.fused else "hf")
        device = SharedDevice(
            plan,
            self.number,
            trainer,
            rollout,
            stage,
            controller,
            self.index,
            probe=probe_rule(recipe),
            deadline=recipe.launch.collective_timeout,
        )
        turn = Turn(
            device,
            rank_group,
            self.index,
            evaluator,
            steps=recipe.train.steps,
            groups=recipe.train.steps * recipe.train.groups_per_step,
            every=recipe.evaluate.every,
            ahead=recipe.sync.prefetch,
            overlap=recipe.staleness_plan.slack > 0,
        )
        controller.on_nothing = turn.no_rows
        return _Shared(device, turn, controller)

    async def _recorder(self, tokenizer: Tokenizer) -> Recorder | None:
        most, names = self.recipe.pipeline.keep_samples, [function.name for function in self.recipe.reward.functions]
        if not most:
            return None
        book = SampleLog(self.place.out / FOLDER, most)
        await asyncio.to_thread(book.rewind, (await self.index.status()).trained)
        return Recorder(self.dock, tokenizer, names, book)

    async def _build_update(self, beside: TorchRolloutEngine | None = None) -> None:
        """``beside``: the rollout engine that takes turns with this rank on its device."""
        recipe, tokenizer = self.recipe, tokenizer_of(self.recipe)
        ranks = Ranks(self.number, recipe.train.dp, recipe.train.tp)
        rank_group, meeting = RankGroup(self.index, ranks), None
        if ranks.world > 1:
            life = await self.index.get(f"ranks:{self.kind}") or ""  # the supervisor has named it
            rank_group, meeting = RankGroup(self.index, ranks, life), self.place.shared / f"ranks-{life}"
        engine = await asyncio.to_thread(train_engine, recipe, ranks if meeting else None, meeting)
        self._close.append(engine.close)
        algorithm = self._algorithm()
        saved = checkpoint.latest(self.place.checkpoints)
        if saved is not None:
            await asyncio.to_thread(saved.load_into, engine)
        version = saved.version if saved else 0
        shared = None if beside is None else await self._share(beside, cast("TorchTrainEngine", engine), rank_group)
        if ranks.rank:
            make = RankWorker if shared is None else functools.partial(ColocatedRankWorker, shared.device)
            rank_worker = make(self.dock, engine, algorithm, rank_group, version=version, save=checkpoint.write)
            self._version = lambda: rank_worker.trained
            self._work_till_end.append(rank_worker.run if shared is None else lambda: shared.until(rank_worker.run()))
            return
        steps, every, keep = recipe.train.steps, recipe.checkpoint.every, recipe.checkpoint.keep
        spans = Spans()

        async def tell(written: checkpoint.Checkpoint, requested: bool) -> None:
            told = {"version": written.version, "path": str(written.path), "requested": requested}
            await self.index.emit("checkpoint", told)
            await self.index.put(CHECKPOINT_TOLD, str(written.version))

        newest = version  # of the checkpoints

        async def save(done: int, requested: bool = False) -> None:
            nonlocal newest
            state = asdict(await self.index.resume_point())
            with spans.during("checkpoint", version=done):
                partial = checkpoint.begin(self.place.checkpoints, done)
                await rank_group.broadcast("save", folder=str(partial))
                await asyncio.to_thread(checkpoint.write, partial, engine)
                written = await asyncio.to_thread(
                    checkpoint.finish, self.place.checkpoints, tokenizer, done, state, keep
                )
            newest = done
            await tell(written, requested)

        async def after_step(done: int) -> None:
            asked = await self.index.get(CHECKPOINT_ASKED)
            requested = asked is not None and asked != await self.index.get(CHECKPOINT_WRITTEN)
            if done % every and done < steps and not requested:
                return
            await save(done, requested)
            if requested:
                await self.index.put(CHECKPOINT_WRITTEN, asked or "")
            await self.index.release_steps(done)

        async def save_when_stopped() -> None:
            """No step that was made is lost when the run is stopped."""
            if stage.trained > newest and (await self.index.state())[0] == "stopping":
                if shared is not None:
                    await shared.turn.give_to_training()
                await save(stage.trained)

        self._farewell += [save_when_stopped, lambda: rank_group.broadcast("end")]

        if saved is not None and saved.path != self.place.start:
            if saved.version > int(await self.index.get(CHECKPOINT_TOLD) or 0):
                await tell(saved, requested=False)  # whoever wrote it was killed before it could say so
            await self.index.release_steps(saved.version)

        publisher = weight_publisher(recipe, self.place.shared, self.secret)
        self._close.append(publisher.close)
        make_update = Update if shared is None else functools.partial(ColocatedUpdate, shared.turn)
        stage: Update = make_update(
            self.dock,
            engine,
            algorithm,
            publisher,
            steps=steps,
            staleness=recipe.pipeline.staleness,
            version=version,
            after_step=after_step,
            after_last=lambda: controller.stop(),
            rank_group=rank_group,
            probe_tokens=probe_tokens(recipe),
            spans=spans,
            recorder=await self._recorder(tokenizer),
            publish_first=not recipe.ours("rollout"),
        )
        self._version = lambda: stage.trained
        controller: Controller = self._control(stage, spans)
        await stage.catch_up()
        if shared is not None and isinstance(stage, ColocatedUpdate):
            controller.on_nothing, controller.on_end = shared.turn.no_batch, shared.turn.over
            self._work_till_end.append(lambda: shared.until(shared.turn.run(stage)))
        else:
            controller.on_end = stage.over
            replicas = recipe.replicas if recipe.ours("rollout") else 0
            self._beside.append(lambda: stage.answer([f"rollout-{number}" for number in range(replicas)]))


def _first(error: BaseException) -> BaseException:
    """The first real error inside task groups' groups."""
    while isinstance(error, BaseExceptionGroup):
        error = next((e for e in error.exceptions if not isinstance(e, asyncio.CancelledError)), error.exceptions[0])
    return error


def _in_words(error: BaseException) -> str:
    return str(error) if isinstance(error, CannotStart | NotStarted) else f"{type(error).__name__}: {error}"


def exit_code(error: BaseException | None) -> int:
    """Of a worker that ended with ``error``."""
    if error is None:
        return 0
    return (
        EXIT_FATAL if isinstance(error, FATAL) else EXIT_NOT_STARTED if isinstance(error, NotStarted) else EXIT_FAILED
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=f"One worker of a run; started by the run's launcher, with the index's URL in {INDEX_VARIABLE}."
    )
    parser.add_argument("--run", required=True)
    parser.add_argument("--kind", required=True)
    parser.add_argument("--number", type=int, default=0)
    parser.add_argument("--name", required=True)
    options = parser.parse_args(arguments)
    configure(terminal=False)
    # For rewards, algorithms and engines given as module:name; last, so that nothing is shadowed.
    sys.path.append(os.getcwd())
    try:
        asyncio.run(Worker(options.run, os.environ[INDEX_VARIABLE], options.kind, options.number, options.name).run())
    except Exception as error:
        sys.exit(exit_code(error))


if __name__ == "__main__":
    main()
