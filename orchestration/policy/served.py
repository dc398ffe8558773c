"""A policy that is served: the newest one of a run, a version of it, or a checkpoint.

source ──▶ recipe, tokenizer ──▶ PolicyEngines
run: published in memory ──▶ verified copy ──▶ swap        ended, or nothing is published here: its newest checkpoint
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog

from orchestration.policy.engines import PolicyEngines
from orchestration.policy.source import PoliciesBusy, PolicySource, PolicyUnknown, parse_model
from orchestration.recipe.schema import Recipe
from orchestration.run.checkpoint import Checkpoint, latest, open_checkpoint, whole
from orchestration.run.engines import rollout_engine, sampling_of, tokenizer_of, weight_reader
from orchestration.run.paths import RunPaths
from pipeline.events import ENDED
from pipeline.index.client import Index
from stages.engines.protocols import SamplingParams, WeightMismatch
from stages.models import Tokenizer
from stages.threads import run_in_thread
from stages.weights.store import Published, Reader, WeightsDamaged, WeightsUnreachable

log = structlog.get_logger()

WAIT_SECONDS = 10.0  # for a new version, until checkpoints are looked at again
MOST_PINNED = 2  # versions that are served beside the newest one
AGAIN_SECONDS = 0.5  # until weights that were not read are tried again


@dataclass(frozen=True)
class ServedPolicy:
    """``ends``: the tokens that end a response; ``most``: tokens of a response, unless a request says otherwise."""

    source: PolicySource
    recipe: Recipe
    tokenizer: Tokenizer
    sampling: SamplingParams
    engines: PolicyEngines


class Policies:
    """The policies of ``source``: the newest, and at most ``MOST_PINNED`` versions, each opened when it is asked for."""

    def __init__(self, source: PolicySource) -> None:
        self.source = source
        self._open: dict[int | None, tuple[contextlib.AsyncExitStack, ServedPolicy]] = {}  # the one used last is last
        self._requests = Counter[int | None]()
        self._opening = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def use(self, model: str) -> AsyncIterator[ServedPolicy]:
        """The policy of ``model``, for one request. Raises PolicyUnknown and PoliciesBusy."""
        name, version = parse_model(model)
        if name != self.source.name or (version is not None and not self.source.run):
            raise PolicyUnknown(f"{model!r} is not served here; {self.source.name!r} is")
        self._requests[version] += 1
        try:
            if version not in self._open:  # a request that is given up does not end the opening
                await asyncio.shield(asyncio.ensure_future(self._ensure(version)))
            self._open[version] = self._open.pop(version)
            yield self._open[version][1]
        finally:
            self._requests[version] -= 1

    async def _ensure(self, version: int | None) -> None:
        async with self._opening:
            if version in self._open:
                return
            await self._make_room(version)
            async with contextlib.AsyncExitStack() as stack:
                policy = await stack.enter_async_context(served(replace(self.source, version=version)))
                self._open[version] = (stack.pop_all(), policy)

    async def _make_room(self, version: int | None) -> None:
        pinned = [known for known in self._open if known is not None]
        if version is None or len(pinned) < MOST_PINNED:
            return
        idle = next((known for known in pinned if not self._requests[known]), None)
        if idle is None:
            raise PoliciesBusy(
                f"of {self.source.name!r} the versions {pinned} are in use, and at most {MOST_PINNED} may"
            )
        await self._open.pop(idle)[0].aclose()

    async def close(self) -> None:
        while self._open:
            await self._open.popitem()[1][0].aclose()


@contextlib.asynccontextmanager
async def served(source: PolicySource) -> AsyncIterator[ServedPolicy]:
    """Open the policy of ``source`` and keep it at the version that is wanted. Raises PolicyUnknown."""
    async with contextlib.AsyncExitStack() as stack:
        index, paths, secret = None, None, b""
        if source.run:
            index = Index(source.index, source.run)
            stack.push_async_callback(index.close)
            recipe, paths = await _place(index, source)
            secret = (await index.get("secret") or "").encode()
        else:
            recipe = _recipe_of(source.folder)
        recipe = _for_requests(recipe)
        tokenizer = await asyncio.to_thread(tokenizer_of, recipe)
        engines = PolicyEngines(
            lambda version, model: rollout_engine(recipe, version=version, weights=model, secret=secret)
        )
        stack.push_async_callback(engines.close)
        policy = ServedPolicy(source, recipe, tokenizer, sampling_of(recipe, tokenizer), engines)
        if index is None or paths is None:
            await engines.open(0, None)
        else:
            follower = _Follower(index, paths, weight_reader(recipe, paths.shared, secret), policy)
            await follower.begin()
            tasks = [asyncio.create_task(follower.run())] if source.version is None else []
            if source.beside:
                tasks.append(asyncio.create_task(engines.keep_share(follower.share)))
            stack.push_async_callback(_end, tasks)
        yield policy


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _place(index: Index, source: PolicySource) -> tuple[Recipe, RunPaths]:
    recipe, paths = await index.get("recipe"), await index.get("place")
    if recipe is None or paths is None:
        raise PolicyUnknown(f"run {source.run!r} has not begun; it has a policy when it has")
    return Recipe.from_json(recipe), RunPaths.from_json(paths)


def _for_requests(recipe: Recipe) -> Recipe:
    """Returns ``recipe`` with an engine that has a device for itself, and the filters that a request may ask for."""
    launch = recipe.launch.model_copy(update={"placement": "separate"})
    rollout = recipe.rollout.model_copy(update={"top_p": min(recipe.rollout.top_p, 0.99)})
    return recipe.model_copy(update={"launch": launch, "rollout": rollout})


def _recipe_of(folder: str) -> Recipe:
    """Returns a recipe whose model is the checkpoint in ``folder``."""
    unused: dict[str, Any] = {"prompts": {"source": "builtin", "task": "repeat"}, "train": {"steps": 1}}
    unused["reward"] = {"functions": [{"name": "spelling"}]}
    return Recipe.model_validate({"name": "checkpoint", "model": {"source": folder}, **unused})


class _Follower:
    """Loads the versions of a run into the engines of its policy."""

    def __init__(self, index: Index, paths: RunPaths, reader: Reader, policy: ServedPolicy) -> None:
        self._index, self._paths, self._reader, self._policy = index, paths, reader, policy
        self._trains = True

    def share(self) -> float:
        return self._policy.recipe.serve.share if self._trains else 1.0

    async def begin(self) -> None:
        """Open the newest checkpoint, and the newest version after it; or the one version that is wanted. Raises
        PolicyUnknown."""
        engines, version = self._policy.engines, self._policy.source.version
        await self._look()
        checkpoint = await asyncio.to_thread(_checkpoint, self._paths.checkpoints, version)
        if version is None or version == 0 or checkpoint is not None:
            await engines.open(checkpoint.version if checkpoint else 0, checkpoint.model if checkpoint else None)
            if version is None:
                await self._take()
            return
        if (record := await self._index.weights_record(version)) is not None:
            await engines.open(0, None)
            with contextlib.suppress(WeightsDamaged, WeightsUnreachable):
                return await self._load(Published.from_record(record))
        have = [open_checkpoint(path).version for path in whole(self._paths.checkpoints)]
        raise PolicyUnknown(f"run {self._index.run!r} has no version {version} any more; it has {have} as checkpoints")

    async def run(self) -> None:
        while True:
            try:
                status = await self._index.published_weights()
                if not await self._take():
                    await self._index.wait("version", status.wait, WAIT_SECONDS)
                await self._look()
            except Exception as error:
                log.error("new versions are not followed", kept=self._policy.engines.version, exc_info=error)
                await asyncio.sleep(WAIT_SECONDS)

    async def _look(self) -> None:
        self._trains = (await self._index.state())[0] not in ENDED

    async def _take(self) -> bool:
        """Load a newer version than that of the engines. Returns whether there was one."""
        engines = self._policy.engines
        await engines.free()
        newest = await self._index.published_weights()
        if newest.version > engines.version and newest.record:
            try:
                await self._load(Published.from_record(newest.record))
                return True
            except (WeightsDamaged, WeightsUnreachable, WeightMismatch) as refused:
                if self._trains:
                    log.warning("weights not taken", kept=engines.version, reason=str(refused))
                    await asyncio.sleep(AGAIN_SECONDS)
        checkpoint = await asyncio.to_thread(latest, self._paths.checkpoints)
        if checkpoint is None or checkpoint.version <= engines.version:
            return False
        await engines.open(checkpoint.version, checkpoint.model)
        return True

    async def _load(self, published: Published) -> None:
        weights = await run_in_thread(lambda: self._reader.read(published), "weights-read")
        await self._policy.engines.swap(published.version, weights)


def _checkpoint(folder: Path, version: int | None) -> Checkpoint | None:
    """Returns the newest checkpoint below ``folder``, or that of ``version``; None when it is not there."""
    if version is None:
        return latest(folder)
    return next((found for path in whole(folder) if (found := open_checkpoint(path)).version == version), None)
