"""The weights of a run, for external rollouts and an external trainer.

trainer ─▶ publish ─▶ shared memory, and a record in the index ─▶ read_weights ─▶ (a rollout loads them) ─▶ notify
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterable
from typing import Any

import torch

from orchestration.external.accounting import OVER, PREFIX
from orchestration.external.errors import NotBegun, NotExternal, WeightsGone
from orchestration.recipe.schema import Recipe
from orchestration.state.documents import EXTERNAL_TERMS, LOADED, RUN_PATHS
from orchestration.state.paths import RunPaths
from pipeline.data.events import SyncEvent
from pipeline.documents.flow import STATE, VERSION
from pipeline.documents.kinds import Document, T
from pipeline.index.client import Index
from pipeline.warehouse.dock import NoRoom
from stages.rollout.external_checks import (
    Layout,
    Misfit,
    Terms,
    check_layout,
    checked_weights,
    nbytes_of,
)
from stages.weights.published import Published, WeightsDamaged
from stages.weights.records import WeightRecords
from stages.weights.transport.store import WeightStore

# the owner of leases that were claimed on the index's URL; "" owns those of the run's own workers
DIRECT = "index"
WAIT_SECONDS = 10.0  # after which a wait on the server is renewed


class ExternalWeights:
    """The part of a session that reads and publishes the weights of one run, and tells what
    external programs must know of it."""

    def __init__(self, index: Index, recipe: Recipe) -> None:
        self.index = index
        self.records = WeightRecords(index)
        self.recipe = recipe
        self._terms: Terms | None = None
        self._store: WeightStore | None = None

    async def weights(self, after: int = -1, wait: float = 0.0) -> Published | None:
        """Return the published version when it is newer than ``after``; wait up to ``wait`` seconds
        for one."""
        if not self.recipe.external.stages:
            problem = "external.stages is empty: the run's own workers execute all stages"
            raise NotExternal(problem, "open a run with some in it")
        deadline = time.monotonic() + wait
        while True:
            newest = await self.index.published_weights()
            if newest.record and newest.version > after:
                return await self.records.read(newest.record)
            state, _, position = await self.index.state()
            remaining = deadline - time.monotonic()
            if remaining <= 0 or state in OVER:
                return None
            await self.index.wait_any(
                {VERSION: newest.wait, STATE: position}, min(remaining, WAIT_SECONDS)
            )

    async def read_weights(self, version: int) -> dict[str, torch.Tensor]:
        """Return a private, verified copy of one of the two newest versions. Raises WeightsGone."""
        record = await self.index.weights_record(version)
        if not record:
            raise WeightsGone(f"weights of version {version} are not held; ask for the newest")
        try:
            published = await self.records.read(record)
            return await asyncio.to_thread((await self._weight_store()).read, published)
        except WeightsDamaged as damaged:
            raise WeightsGone(f"{damaged}; ask for the newest") from None

    async def notify(
        self,
        worker: str,
        version: int,
        *,
        exposed: float = 0.0,
        hidden: float = 0.0,
        owner: str = DIRECT,
    ) -> None:
        """Record that ``worker`` has loaded ``version``, with which it claims from now on.

        ``exposed`` and ``hidden``: seconds without and beside generation. Raises Misfit for a
        version that is not published.
        """
        await self._refuse_unpublished(version)
        await LOADED.put(self.index, version, owner=owner, worker=worker)
        record = await self.index.weights_record(version)
        await self._emit(
            worker, version, record["nbytes"] if record else 0, exposed=exposed, hidden=hidden
        )

    async def publish(
        self, version: int, weights: Iterable[tuple[str, torch.Tensor]], *, covered: int = 0
    ) -> Published:
        """Publish an external trainer's weights.

        ``version``: the one that :meth:`train` returned, or the one that the run begins with.
        ``covered``: the trainer's own checkpoint has so many steps; of the others at most
        checkpoint.every are kept for :meth:`replay`. Raises NotExternal, Misfit.
        """
        wanted = await self.may_publish(version)
        began = time.monotonic()
        store = await self._weight_store()
        published = await asyncio.to_thread(
            store.publish, version, checked_weights(weights, wanted)
        )
        await self.records.publish(published)
        await self._emit("update", version, published.nbytes, publish=time.monotonic() - began)
        await self.index.release_steps(max(covered, version - self.recipe.checkpoint.every))
        return published

    async def may_publish(self, version: int, layout: Layout | None = None) -> Layout | None:
        """Return the names, dtypes and shapes that the weights of ``version`` must have (None: any,
        the model is not known). Raises NotExternal, NotBegun, Misfit unless ``version`` is the next
        to be published and ``layout``, where it is given, fits, and NoRoom when it does not fit
        into shared memory."""
        self._check_external("update")
        place = await self.place()
        terms = await self.terms()
        newest = await self.index.published_weights()
        trained = (await self.index.status()).trained
        if version != trained or (newest.record and version <= newest.version):
            there = (
                (f"version {newest.version} is published") if newest.record else "none is published"
            )
            raise Misfit(
                "version",
                f"{version} cannot be published: the trainer is at {trained}, and {there}",
                f"publish {trained}",
            )
        wanted = terms.weights
        if wanted is None and newest.record:
            published = await self.records.read(newest.record)
            wanted = {t.name: (t.dtype, t.shape) for t in published.tensors}
        if layout is not None:
            check_layout(layout, wanted)
            if nbytes_of(layout) > (free := shutil.disk_usage(place.shared).free):
                raise NoRoom(
                    f"weights: {nbytes_of(layout)} bytes do not fit into shared memory, "
                    f"where {free} are free"
                )
        return wanted

    async def _emit(self, worker: str, version: int, nbytes: int, **seconds: float) -> None:
        times: Any = {
            f"{kind}_seconds": seconds.get(kind, 0.0) for kind in ("publish", "exposed", "hidden")
        }
        await self.index.emit(
            SyncEvent(worker=f"{PREFIX}{worker}", version=version, bytes=nbytes, **times)
        )

    async def _refuse_unpublished(self, version: int) -> None:
        newest = (await self.index.status()).published
        if not 0 <= version <= newest:
            raise Misfit("version", f"{version} is not published", f"give one of 0 .. {newest}")

    async def terms(self) -> Terms:
        """Return what an external program must know of the run.

        Raises NotBegun before its workers have written it.
        """
        if self._terms is None:
            self._terms = await self._begun(EXTERNAL_TERMS)
        return self._terms

    async def place(self) -> RunPaths:
        """Return where the run's files are. Raises NotBegun."""
        return await self._begun(RUN_PATHS)

    async def _begun(self, document: Document[T]) -> T:
        """Return a document of the index that the run writes when it begins. Raises NotBegun."""
        value = await document.get(self.index)
        if value is None:
            raise NotBegun(
                f"run {self.index.run!r} has not begun; wait until its state is 'running'"
            )
        return value

    def _check_external(self, stage: str) -> None:
        if stage not in self.recipe.external.stages:
            problem = f"the run's own workers execute stage {stage!r}"
            raise NotExternal(problem, f"open a run with external.stages = [{stage!r}]")

    async def _weight_store(self) -> WeightStore:
        if self._store is None:
            self._store = WeightStore((await self.place()).shared)
        return self._store
