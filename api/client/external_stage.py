"""A stage of a run, done by your program: one face, and two ways to the run behind it.

    connect("http://…", run, …)               ─▶ asyncdock serve ─┐
    connect("unix://… or redis://…", run, …)  ─────────────────────┴▶ index, and warehouses that are mapped on their node

Over HTTP columns travel as safetensors bodies. What holds is the same both ways, and so are the errors.
"""

from __future__ import annotations

import abc
import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import torch
from safetensors.torch import load, save

from api.external.codec import CONTROL, from_body, rows_of, to_body
from api.external.schemas import ExperienceRow, ExperienceView
from api.server.operations import BINARY
from orchestration.external.session import Answer, External, NotBegun, NotExternal, WeightsGone, WeightsTooOld
from pipeline.columns import Packed
from pipeline.index.client import IndexUnreachable, LeaseLost
from pipeline.warehouse.arena import StaleHandle
from stages.prompts.external import ExternalPromptsFull

AGAIN_SECONDS = 60.0  # for which a server that does not answer is asked again
LONGEST_WAIT = 60.0
Columns = Mapping[str, Packed | torch.Tensor]


class Refused(RuntimeError):
    """The service refused a call: ``problem`` is what it said (RFC 9457)."""

    def __init__(self, problem: Mapping[str, Any]) -> None:
        self.problem = dict(problem)
        super().__init__(f"{problem.get('field') or 'request'}: {problem.get('detail', problem.get('title'))}")


_KINDS: dict[str, type[Exception]] = {
    "lease-lost": LeaseLost,
    "weights-too-old": WeightsTooOld,
    "weights-gone": WeightsGone,
    "not-external": NotExternal,
    "not-begun": NotBegun,
    "no-room": ExternalPromptsFull,
    "released": StaleHandle,
}


@dataclass(frozen=True)
class Experience:
    """Rows under a lease. ``columns`` as :class:`pipeline.columns.Packed`; on the run's own node they are views of shared
    memory, valid while the lease is held. ``begun``: ids of rows that were parked, and what they have so far. ``token`` is
    None when nothing came, and ``over`` then says whether anything will."""

    token: str | None
    over: bool
    published: int
    trained: int
    rows: Sequence[ExperienceRow] = ()
    columns: Mapping[str, Packed] = field(default_factory=dict)
    begun: tuple[Sequence[int], Mapping[str, Packed]] = ((), {})
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.token is not None

    @property
    def ids(self) -> list[int]:
        return [row.id for row in self.rows]


class ExternalStage(abc.ABC):
    """``stage`` of a run as one worker does it. Make it with :meth:`connect`."""

    def __init__(self, stage: str, worker: str) -> None:
        self.stage, self.worker = stage, worker

    @staticmethod
    @asynccontextmanager
    async def connect(
        where: str, run: str, stage: str, *, worker: str, token: str = ""
    ) -> AsyncIterator[ExternalStage]:
        """``where``: a service's URL (http, https) with its bearer ``token``, or the URL of the run's index. ``worker``: a
        name of this worker's own. By the index, what a former life of that name held is given back at once."""
        if where.startswith(("http://", "https://")):
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=LONGEST_WAIT + 30)
            async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
                yield _OverHttp(session, f"{where.rstrip('/')}/v1/runs/{run}", stage, worker)
            return
        external = await External.open(where, run, worker=f"external-{worker}")
        try:
            yield _Direct(external, stage, worker)
        finally:
            await external.close()

    @abc.abstractmethod
    async def put_prompts(
        self, prompts: Sequence[Mapping[str, Any]], *, first: int | None = None, last: bool = False, wait: float = 30.0
    ) -> int:
        """Put prompts at position ``first`` and on; returns the next free position. ``last``: no more will come."""

    @abc.abstractmethod
    async def get_experience(
        self,
        count: int = 1,
        *,
        columns: Sequence[str] = (),
        version: int | None = None,
        wait: float = 30.0,
        lease: float | None = None,
    ) -> Experience:
        """Lease up to ``count`` rows (groups, a batch), waiting up to ``wait`` seconds for some. ``version``: what a rollout
        has loaded, by default what :meth:`weight_sync_notify` said last. Raises WeightsTooOld."""

    @abc.abstractmethod
    async def put_experience(
        self, experience: Experience, columns: Columns, *, rows: Sequence[int] | None = None, park: bool = False
    ) -> int:
        """Commit, or ``park``, what was made of ``rows`` (ids; by default all). Returns how many are left under the lease.
        Raises LeaseLost: somebody else has them, or an earlier try of this call went through though its answer was lost."""

    @abc.abstractmethod
    async def put_step(self, experience: Experience, metrics: Mapping[str, float]) -> int:
        """A trainer has made its next step of the batch. Returns the version to :meth:`publish`."""

    @abc.abstractmethod
    async def renew(self, experience: Experience, lease: float | None = None) -> None:
        """Hold the lease for longer. Raises LeaseLost."""

    @abc.abstractmethod
    async def release(self, experience: Experience) -> None:
        """Give back what is left under the lease."""

    @abc.abstractmethod
    async def weights(self, after: int = -1, *, wait: float = 0.0) -> tuple[int, dict[str, torch.Tensor]] | None:
        """The published version and its tensors, a verified copy, when it is newer than ``after``."""

    @abc.abstractmethod
    async def weight_sync_notify(self, version: int, *, exposed: float = 0.0, hidden: float = 0.0) -> None:
        """This worker has loaded ``version``, which took so many seconds with and without tokens being made beside."""

    @abc.abstractmethod
    async def publish(self, version: int, weights: Iterable[tuple[str, torch.Tensor]], *, covered: int = 0) -> None:
        """A trainer's weights. ``covered``: its own checkpoint covers the steps below."""


class _Direct(ExternalStage):
    def __init__(self, external: External, stage: str, worker: str) -> None:
        super().__init__(stage, worker)
        self._external = external

    async def put_prompts(
        self, prompts: Sequence[Mapping[str, Any]], *, first: int | None = None, last: bool = False, wait: float = 30.0
    ) -> int:
        return await self._external.put_prompts(prompts, first=first, last=last, timeout=wait)

    async def get_experience(
        self,
        count: int = 1,
        *,
        columns: Sequence[str] = (),
        version: int | None = None,
        wait: float = 30.0,
        lease: float | None = None,
    ) -> Experience:
        answer = await self._external.get_experience(
            self.stage, self.worker, count, columns=columns, version=version, wait=wait, lease=lease
        )
        sampling = (await self._external.terms()).sampling if answer.experience and self.stage == "rollout" else {}
        return _experience(answer, sampling)

    async def put_experience(
        self, experience: Experience, columns: Columns, *, rows: Sequence[int] | None = None, park: bool = False
    ) -> int:
        return await self._external.put_experience(
            _token(experience), experience.ids if rows is None else rows, columns, park=park
        )

    async def put_step(self, experience: Experience, metrics: Mapping[str, float]) -> int:
        return await self._external.train(_token(experience), experience.trained, metrics)

    async def renew(self, experience: Experience, lease: float | None = None) -> None:
        await self._external.renew(_token(experience), lease)

    async def release(self, experience: Experience) -> None:
        await self._external.release(_token(experience))

    async def weights(self, after: int = -1, *, wait: float = 0.0) -> tuple[int, dict[str, torch.Tensor]] | None:
        while published := await self._external.weights(after, wait):
            try:
                _, tensors = await self._external.read_weights(published.version)
                return published.version, tensors
            except WeightsGone:
                continue  # a newer one is there
        return None

    async def weight_sync_notify(self, version: int, *, exposed: float = 0.0, hidden: float = 0.0) -> None:
        await self._external.notify(self.worker, version, exposed=exposed, hidden=hidden)

    async def publish(self, version: int, weights: Iterable[tuple[str, torch.Tensor]], *, covered: int = 0) -> None:
        await self._external.publish(version, weights, covered=covered)


class _OverHttp(ExternalStage):
    def __init__(self, session: aiohttp.ClientSession, at: str, stage: str, worker: str) -> None:
        super().__init__(stage, worker)
        self._session, self._at = session, at

    async def _ask(self, method: str, path: str, **options: Any) -> Any:
        """The answer's JSON, or its bytes. A server that is not there is asked again for a while."""
        deadline = time.monotonic() + AGAIN_SECONDS
        while True:
            try:
                async with self._session.request(method, f"{self._at}/{path}", **options) as answer:
                    if answer.status == 204:
                        return None
                    told: Any = await (
                        answer.read() if answer.content_type == BINARY else answer.json(content_type=None)
                    )
                if answer.status < 400:
                    return told
                kind = str(told.get("type", "")).rpartition(":")[2]
                if kind not in ("index-unreachable", "rate"):
                    raise _KINDS[kind](told["detail"]) if kind in _KINDS else Refused(told)
                failed: Exception = IndexUnreachable(told["detail"])
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as lost:
                failed = lost
            if time.monotonic() > deadline:
                raise failed
            await asyncio.sleep(0.2)

    async def put_prompts(
        self, prompts: Sequence[Mapping[str, Any]], *, first: int | None = None, last: bool = False, wait: float = 30.0
    ) -> int:
        body = {
            "prompts": [dict(row) for row in prompts],
            "first": first,
            "last": last,
            "wait": min(wait, LONGEST_WAIT),
        }
        return int((await self._ask("POST", "prompts", json=body))["next"])

    async def get_experience(
        self,
        count: int = 1,
        *,
        columns: Sequence[str] = (),
        version: int | None = None,
        wait: float = 30.0,
        lease: float | None = None,
    ) -> Experience:
        asked = {"stage": self.stage, "worker": self.worker, "count": count, "columns": list(columns)}
        limits = {"version": version, "wait": min(wait, LONGEST_WAIT), "lease": lease}
        body = await self._ask("POST", "experience/get", json=asked | limits, headers={"Accept": BINARY})
        control, found = from_body(body)
        view = ExperienceView.model_validate_json(control)
        begun = {name.removeprefix("begun."): found.pop(name) for name in list(found) if name.startswith("begun.")}
        dense = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
        return Experience(
            view.token,
            view.over,
            view.published,
            view.trained,
            view.rows,
            found | {name: Packed(value.reshape(-1), None) for name, value in dense.items()},
            (view.begun.rows if view.begun else (), begun),
            view.sampling or {},
        )

    async def put_experience(
        self, experience: Experience, columns: Columns, *, rows: Sequence[int] | None = None, park: bool = False
    ) -> int:
        control = {"token": _token(experience), "rows": experience.ids if rows is None else list(rows), "park": park}
        body = to_body(json.dumps(control), columns)
        return int((await self._ask("POST", "experience", data=body, headers={"Content-Type": BINARY}))["left"])

    async def put_step(self, experience: Experience, metrics: Mapping[str, float]) -> int:
        body = {"token": _token(experience), "step": experience.trained, "metrics": dict(metrics)}
        return int((await self._ask("POST", "experience", json=body))["version"])

    async def renew(self, experience: Experience, lease: float | None = None) -> None:
        query = {} if lease is None else {"lease": str(lease)}
        await self._ask("POST", f"leases/{_token(experience)}/renew", params=query)

    async def release(self, experience: Experience) -> None:
        await self._ask("POST", f"leases/{_token(experience)}/release")

    async def weights(self, after: int = -1, *, wait: float = 0.0) -> tuple[int, dict[str, torch.Tensor]] | None:
        query = {"after": str(after), "wait": str(min(wait, LONGEST_WAIT))}
        while (version := (await self._ask("GET", "weights", params=query))["version"]) is not None:
            try:
                return version, load(await self._ask("GET", f"weights/{version}"))
            except WeightsGone:
                continue
        return None

    async def weight_sync_notify(self, version: int, *, exposed: float = 0.0, hidden: float = 0.0) -> None:
        body = {"worker": self.worker, "version": version, "exposed": exposed, "hidden": hidden}
        await self._ask("POST", "weights/notify", json=body)

    async def publish(self, version: int, weights: Iterable[tuple[str, torch.Tensor]], *, covered: int = 0) -> None:
        body = save({name: tensor.clone() for name, tensor in weights}, {CONTROL: json.dumps({"version": version})})
        query, kind = {"covered": str(covered)}, {"Content-Type": BINARY}
        await self._ask("PUT", f"weights/{version}", data=body, params=query, headers=kind)


def _experience(answer: Answer, sampling: Mapping[str, Any]) -> Experience:
    """What the index's way brings, as the other one does."""
    if answer.experience is None:
        return Experience(None, answer.over, answer.published, answer.trained)
    found = answer.experience
    begun = [int(found.claim.row[at]) for at in found.begun[0]]
    return Experience(
        found.claim.token,
        answer.over,
        answer.published,
        answer.trained,
        rows_of(found),
        found.columns,
        (begun, found.begun[1]),
        sampling,
    )


def _token(experience: Experience) -> str:
    if experience.token is None:
        raise ValueError("experience: nothing came with it; look whether it is true before it is used")
    return experience.token
