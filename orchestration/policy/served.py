"""Policies that are served: the newest one of a run, a version of it, or a checkpoint.

model ──▶ Policies ──▶ recipe, tokenizer, PolicyEngines
run: published in memory ──▶ verified copy ──▶ swap        ended, or nothing is published here: its newest checkpoint
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from orchestration.checkpoints.checkpoint import usable
from orchestration.policy.engines import PolicyEngines, keep_share
from orchestration.policy.rows import spare_of
from orchestration.policy.source import PoliciesBusy, PolicyUnknown, parse_model
from orchestration.policy.texts import PolicyTexts, Texts
from orchestration.processes.forkserver import ForkServer
from orchestration.recipe.model_files import PLAIN_MODELS
from orchestration.recipe.models import tokenizer_of
from orchestration.recipe.schema import Recipe
from orchestration.state.documents import RUN_PATHS, RUN_RECIPE
from orchestration.state.paths import RunPaths
from orchestration.workers.engines import rollout_engine, sampling_of, weight_reader
from pipeline.data.events import ENDED
from pipeline.documents.flow import SECRET, VERSION
from pipeline.index.client import Index
from stages import device as devices
from stages.engines.protocols import (
    BoundedEngine,
    EngineClosed,
    EngineFailed,
    SamplingParams,
    WeightMismatch,
)
from stages.model.load import Tokenizer
from stages.threads import run_in_thread
from stages.weights.published import WeightsDamaged, WeightsUnreachable
from stages.weights.records import WeightRecords
from stages.weights.transport.roles import Reader

log = structlog.get_logger()

WAIT_SECONDS = 10.0  # for a new version, until checkpoints are looked at again
AGAIN_SECONDS = 0.5  # until weights that were not read are tried again


@dataclass
class ServedPolicy:
    """A policy that answers requests. ``trains``: whether its run does."""

    recipe: Recipe
    tokenizer: Tokenizer
    texts: PolicyTexts
    sampling: SamplingParams
    engines: PolicyEngines
    trains: bool = False

    @property
    def context(self) -> int | None:
        """Tokens of the engine's context; None where it does not say."""
        engine = self.engines.all()[-1]
        return engine.context if isinstance(engine, BoundedEngine) else None


class Policies:
    """The policies of the runs in the index at the URL ``index``, or of ``run`` alone, and the
    Hugging Face checkpoints in the folders ``checkpoints``, by name. Each is opened when it is
    asked for. At most ``most`` are open; the one that was not used for longest is closed for
    another one. ``forks``: makes the processes that read texts (None: one of its own)."""

    def __init__(
        self,
        index: str,
        *,
        run: str = "",
        checkpoints: Mapping[str, str],
        most: int = 3,
        forks: ForkServer | None = None,
    ) -> None:
        self._texts = Texts(forks)
        self._index = index
        self._run = run
        self._checkpoints = checkpoints
        self._most = most
        # the one used last is last
        self._open: dict[str, tuple[ServedPolicy, contextlib.AsyncExitStack]] = {}
        self._requests: list[str] = []  # the models of those under way
        self._asked = asyncio.Event()  # there are some
        self._opening = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def use(self, model: str) -> AsyncIterator[ServedPolicy]:
        """The policy of ``model``, for one request; it is closed after its engine has failed.

        Raises PolicyUnknown and PoliciesBusy.
        """
        name, _ = parse_model(model)
        if self._run not in ("", name):
            raise PolicyUnknown(f"{model!r} is not served here; {self._run!r} is")
        self._requests.append(model)
        self._asked.set()
        try:
            while model not in self._open:  # a request that is given up does not end the opening
                await asyncio.shield(asyncio.ensure_future(self._ensure(model)))
            self._open[model] = opened = self._open.pop(model)
            try:
                yield opened[0]
            except (EngineClosed, EngineFailed):
                if self._open.get(model) is opened:
                    await self._close(model)
                raise
        finally:
            self._requests.remove(model)
            if not self._requests:
                self._asked.clear()

    async def _ensure(self, model: str) -> None:
        async with self._opening:
            if model in self._open:
                return
            if len(self._open) >= self._most:
                idle = next((known for known in self._open if known not in self._requests), None)
                if idle is None:
                    raise PoliciesBusy(
                        f"as many policies as may be ({self._most}) are in use: "
                        f"{', '.join(self._open)}"
                    )
                await self._close(idle)
            async with contextlib.AsyncExitStack() as stack:
                policy = await self._opened(model, stack)
                self._open[model] = (policy, stack.pop_all())

    async def _opened(self, model: str, stack: contextlib.AsyncExitStack) -> ServedPolicy:
        """Open the policy of ``model`` until ``stack`` is closed, and keep it at the version that
        is wanted."""
        name, version = parse_model(model)
        if name in self._checkpoints:
            policy = await self._policy(
                _recipe_of(self._checkpoints[name]), b"", stack, trusted=True
            )
            await policy.engines.open(0, None)
            return policy
        index = Index(self._index, name)
        stack.push_async_callback(index.close)
        recipe = await RUN_RECIPE.get(index)
        paths = await RUN_PATHS.get(index)
        if recipe is None or paths is None:
            raise PolicyUnknown(f"run {name!r} has not begun; it has a policy when it has")
        secret = await SECRET.get(index) or b""
        trusted = recipe.model.source in PLAIN_MODELS and not recipe.prompts.chat_template
        policy = await self._policy(recipe, secret, stack, trusted=trusted)
        follower = _Follower(
            index, paths, weight_reader(policy.recipe, paths.shared, secret), policy
        )
        await follower.begin(version)
        following = asyncio.create_task(follower.run(swaps=version is None))
        stack.push_async_callback(asyncio.wait, [following])
        stack.callback(following.cancel)
        return policy

    async def keep_share(self) -> None:
        """Let all engines together compute for at most ``serve.share`` of the time, while there are
        requests and a run of an open policy trains on this machine."""

        def opened() -> list[ServedPolicy]:
            return [policy for policy, _ in self._open.values()]

        await keep_share(
            self._asked,
            lambda: [engine for policy in opened() for engine in policy.engines.all()],
            lambda: min(
                (policy.recipe.serve.share for policy in opened() if policy.trains), default=1.0
            ),
        )

    async def _close(self, model: str) -> None:
        """Close a policy, and return its memory to the system: without that, each one opened later
        took as much again."""
        await self._open.pop(model)[1].aclose()
        devices.release_cached(devices.select())
        devices.trim()

    async def close(self) -> None:
        for model in list(self._open):
            await self._close(model)
        await self._texts.close()

    async def _policy(
        self, recipe: Recipe, secret: bytes, stack: contextlib.AsyncExitStack, *, trusted: bool
    ) -> ServedPolicy:
        """Return the policy of ``recipe``, whose engines ``stack`` closes.

        ``secret``: of the run; ``trusted``: its tokenizer is one of the service's owner.
        """
        served = _served_recipe(recipe)
        max_rows = recipe.rollout.max_rows
        engines = PolicyEngines(
            lambda version, model: rollout_engine(
                served, version=version, weights=model, secret=secret
            ),
            max_rows,
        )
        stack.push_async_callback(engines.close)
        tokenizer = await asyncio.to_thread(tokenizer_of, served)
        texts = await asyncio.to_thread(
            PolicyTexts.of, self._texts, served, tokenizer, trusted=trusted
        )
        return ServedPolicy(served, tokenizer, texts, sampling_of(served, tokenizer), engines)


def _served_recipe(recipe: Recipe) -> Recipe:
    """Return ``recipe`` with an engine that has a device for itself, spare rows, and the filters
    that a request may ask for. Tokens that pad the embedding are not sampled, unless the recipe
    says that they are. Drafts are off, unless the recipe has them on: with them the logprobs of
    equal requests differ by rounding."""
    launch = recipe.launch.model_copy(update={"placement": "separate"})
    if recipe.model.vocabulary == "auto":
        recipe = recipe.model_copy(
            update={"model": recipe.model.model_copy(update={"vocabulary": "tokenizer"})}
        )
    max_rows = recipe.rollout.max_rows
    rollout = recipe.rollout.model_copy(
        update={
            "top_p": min(recipe.rollout.top_p, 0.99),
            "max_rows": max_rows + spare_of(max_rows),
            "speculate": "on" if recipe.rollout.speculate == "on" else "off",
        }
    )
    return recipe.model_copy(update={"launch": launch, "rollout": rollout})


def _recipe_of(folder: str) -> Recipe:
    """Return a recipe whose model is the checkpoint in ``folder``."""
    unused: dict[str, Any] = {
        "prompts": {"source": "builtin", "task": "repeat"},
        "train": {"steps": 1},
    }
    unused["reward"] = {"functions": [{"name": "spelling"}]}
    return Recipe.model_validate({"name": "checkpoint", "model": {"source": folder}, **unused})


class _Follower:
    """The task that loads the versions of a run into the engines of its policy."""

    def __init__(self, index: Index, paths: RunPaths, reader: Reader, policy: ServedPolicy) -> None:
        self._index = index
        self._records = WeightRecords(index)
        self._checkpoints = paths.checkpoints
        self._reader = reader
        self._policy = policy
        self._engines = policy.engines

    async def begin(self, version: int | None) -> None:
        """Open ``version``; None: the newest checkpoint, and the newest version after it.

        Raises PolicyUnknown.
        """
        await self._look()
        while True:
            models = {
                checkpoint.version: checkpoint.model
                for checkpoint in await asyncio.to_thread(usable, self._checkpoints)
            }
            wanted = max(models, default=0) if version is None else version
            if wanted not in models and wanted != 0:
                break
            try:
                await self._engines.open(wanted, models.get(wanted))
            except Exception:
                if wanted not in models or models[wanted].exists():
                    raise
                continue  # it was removed meanwhile, for a newer one
            if version is None:
                await self._take()
            return
        if (record := await self._index.weights_record(wanted)) is not None:
            await self._engines.open(0, None)
            with contextlib.suppress(WeightsDamaged, WeightsUnreachable):
                return await self._load(record)
        have = f"it has {[*models]} as checkpoints"
        raise PolicyUnknown(f"run {self._index.run!r} has no version {wanted} any more; {have}")

    async def run(self, *, swaps: bool) -> None:
        """Follow the run's state, and its versions where the policy ``swaps`` them."""
        while True:
            try:
                wait = (await self._index.published_weights()).wait
                if not (swaps and await self._take()):
                    await self._index.wait(VERSION, wait, WAIT_SECONDS)
                await self._look()
            except Exception as error:
                log.error(
                    "new versions are not followed", kept=self._engines.version, exc_info=error
                )
                await asyncio.sleep(WAIT_SECONDS)

    async def _look(self) -> None:
        self._policy.trains = (await self._index.state())[0] not in ENDED

    async def _take(self) -> bool:
        """Load a newer version than that of the engines. Returns whether there was one."""
        await self._engines.free()
        newest = await self._index.published_weights()
        current_version = self._engines.version
        if newest.version > current_version and newest.record:
            try:
                await self._load(newest.record)
                return True
            except (WeightsDamaged, WeightsUnreachable, WeightMismatch) as refused:
                if self._policy.trains:
                    log.warning("weights not taken", kept=current_version, reason=str(refused))
                    await asyncio.sleep(AGAIN_SECONDS)
        checkpoints = await asyncio.to_thread(usable, self._checkpoints)
        if not checkpoints or checkpoints[-1].version <= current_version:
            return False
        await self._engines.open(checkpoints[-1].version, checkpoints[-1].model)
        return True

    async def _load(self, record: Mapping[str, Any]) -> None:
        published = await self._records.read(record)
        weights = await run_in_thread(lambda: self._reader.read(published), "weights-read")
        await self._engines.swap(published.version, weights)
