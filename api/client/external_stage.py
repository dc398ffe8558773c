"""One stage of a run, executed by your program: the same calls over HTTP and on the run's index.

    connect("http://…", run, …)               ─▶ HttpRun  ─▶ asyncdock serve ─▶ External ─┐
    connect("unix://… or redis://…", run, …)  ─▶ External ───────────────────────────────┴▶ index and warehouses

Over HTTP columns travel as safetensors bodies; on the run's own node the index's way maps them from
shared memory. Guarantees and exceptions are the same both ways, but for values that the run
refuses: Misfit and ColumnError on the index are ApiProblem over HTTP.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save

from api.client.errors import ApiProblem
from api.client.transport import Answer, Transport
from api.external.codec import CONTROL, decode_experience, to_body
from api.external.schemas import PutView, WeightsView
from api.server.http.bodies import BINARY
from orchestration.external.errors import NotBegun, NotExternal, WeightsGone, WeightsTooOld
from orchestration.external.experience import Experience
from orchestration.external.session import External
from pipeline.data.arena import StaleHandle
from pipeline.data.columns import Packed
from pipeline.index.client import IndexUnreachable, LeaseLost
from stages.prompts.external import ExternalPromptsFull, sendable
from stages.rollout.external_checks import fingerprint

PATIENCE = 60.0  # seconds for which a server that does not answer is asked again
LONGEST_WAIT = 60.0
SILENCE = LONGEST_WAIT + 30.0  # seconds without a byte after which an attempt is given up
Columns = Mapping[str, Packed | torch.Tensor]
Weights = Iterable[tuple[str, torch.Tensor]]

_EXCEPTIONS: dict[str, type[Exception]] = {  # by the last part of a problem's type
    "lease-lost": LeaseLost,
    "weights-too-old": WeightsTooOld,
    "weights-gone": WeightsGone,
    "not-external": NotExternal,
    "not-begun": NotBegun,
    "no-room": ExternalPromptsFull,
    "released": StaleHandle,
    "index-unreachable": IndexUnreachable,
}


class ExternalStage:
    """``stage`` of a run for one ``worker``. Made by :meth:`connect`."""

    def __init__(
        self, run: External | HttpRun, stage: str, worker: str, tokenizer: str | None = None
    ) -> None:
        self.stage = stage
        self.worker = worker
        self._run = run
        self._tokenizer = tokenizer

    @staticmethod
    @asynccontextmanager
    async def connect(
        where: str,
        run: str,
        stage: str,
        *,
        worker: str,
        token: str = "",
        vocabulary: Mapping[str, int] | None = None,
    ) -> AsyncIterator[ExternalStage]:
        """Join ``run`` as a worker of ``stage``.

        ``where``: a service's URL (http, https) with its bearer ``token``, or the URL of the run's
        index. ``worker``: a name that no other worker of the stage has. On the index, leases that
        an earlier process of that name held end at once. ``vocabulary``: the ``get_vocab()`` of
        this program's tokenizer; one that is not the run's is refused at the first
        :meth:`get_experience`.
        """
        tokenizer = None if vocabulary is None else fingerprint(vocabulary)
        if where.startswith(("http://", "https://")):
            async with Transport(where, token or None, patience=PATIENCE) as http:
                yield ExternalStage(HttpRun(http, run), stage, worker, tokenizer)
            return
        external = await External.open(where, run, worker=f"external-{worker}")
        try:
            yield ExternalStage(external, stage, worker, tokenizer)
        finally:
            await external.close()

    async def put_prompts(
        self,
        prompts: Sequence[Mapping[str, Any]],
        *,
        first: int | None = None,
        last: bool = False,
        wait: float = 30.0,
    ) -> int:
        """Put prompts from position ``first`` on, and return the next free position.

        ``last``: no more will come.
        """
        return await self._run.put_prompts(prompts, first=first, last=last, timeout=wait)

    async def get_experience(
        self,
        count: int = 1,
        *,
        columns: Sequence[str] = (),
        version: int | None = None,
        wait: float = 30.0,
        lease: float | None = None,
    ) -> Experience:
        """Lease up to ``count`` rows (groups for rollout and reference, one batch for a trainer),
        waiting up to ``wait`` seconds for some. ``version``: the version that a rollout has loaded;
        default: that of the last :meth:`weight_sync_notify`. Raises WeightsTooOld."""
        query: dict[str, Any] = {
            "columns": list(columns),
            "version": version,
            "wait": wait,
            "lease": lease,
        }
        return await self._run.get_experience(
            self.stage, self.worker, count, **query, tokenizer=self._tokenizer
        )

    async def put_experience(
        self,
        experience: Experience,
        columns: Columns,
        *,
        rows: Sequence[int] | None = None,
        park: bool = False,
    ) -> int:
        """Commit ``columns`` of ``rows`` (ids; default: all), or park them (``park``) to be
        continued by any worker. Returns the number of rows that the lease still holds. Raises
        LeaseLost when another worker has the rows, or an earlier attempt of this call succeeded and
        its answer was lost."""
        ids = experience.ids if rows is None else rows
        return await self._run.put_experience(_token(experience), ids, columns, park=park)

    async def put_step(self, experience: Experience, metrics: Mapping[str, float]) -> int:
        """End a trainer's batch: its optimizer step was made.

        Returns the version to :meth:`publish`.
        """
        return await self._run.train(_token(experience), experience.trained + 1, metrics)

    async def renew(self, experience: Experience, lease: float | None = None) -> None:
        """Hold the lease for ``lease`` seconds from now. Raises LeaseLost."""
        await self._run.renew(_token(experience), lease)

    async def release(self, experience: Experience) -> None:
        """Give back the rows that the lease still holds."""
        await self._run.release(_token(experience))

    async def weights(
        self, after: int = -1, *, wait: float = 0.0
    ) -> tuple[int, dict[str, torch.Tensor]] | None:
        """Return the published version and a verified copy of its tensors, or None when it is not
        newer than ``after``."""
        while published := await self._run.weights(after, wait):
            try:
                return published.version, await self._run.read_weights(published.version)
            except WeightsGone:
                continue  # a newer version is published
        return None

    async def weight_sync_notify(
        self, version: int, *, exposed: float = 0.0, hidden: float = 0.0
    ) -> None:
        """Report that this worker has loaded ``version``, in ``exposed`` seconds without and
        ``hidden`` seconds beside generation."""
        await self._run.notify(self.worker, version, exposed=exposed, hidden=hidden)

    async def publish(self, version: int, weights: Weights, *, covered: int = 0) -> None:
        """Publish a trainer's weights. ``covered``: its own checkpoint has so many steps."""
        await self._run.publish(version, weights, covered=covered)


class NewestVersion(NamedTuple):
    """The published policy version."""

    version: int


class HttpRun:
    """The calls of :class:`orchestration.external.session.External`, over HTTP."""

    def __init__(self, http: Transport, run: str) -> None:
        self._http = http
        self._path = f"/v1/runs/{run}/"

    async def _send(self, method: str, path: str, value: Any = None, **options: Any) -> Answer:
        """Send ``value`` as JSON, or a ``body`` of bytes.

        Raises the exception that External would raise, or ServiceError.
        """
        try:
            if value is not None:
                return await self._http.send_json(method, self._path + path, value, silence=SILENCE)
            kind = {"Content-Type": BINARY}
            return await self._http.send(
                method, self._path + path, headers=kind, silence=SILENCE, **options
            )
        except ApiProblem as problem:
            if error := _EXCEPTIONS.get(problem.type.rpartition(":")[2]):
                raise error(problem.detail) from None
            raise

    async def put_prompts(
        self, rows: Sequence[Mapping[str, Any]], *, first: int | None, last: bool, timeout: float
    ) -> int:
        prompts = sendable(rows)
        wait = min(timeout, LONGEST_WAIT)
        body = {"prompts": prompts, "first": first, "last": last, "wait": wait}
        return int(json.loads((await self._send("POST", "prompts", body)).body)["next"])

    async def get_experience(
        self,
        stage: str,
        worker: str,
        most: int,
        *,
        wait: float,
        tokenizer: str | None,
        **options: Any,
    ) -> Experience:
        asked = {
            "stage": stage,
            "worker": worker,
            "count": most,
            "wait": min(wait, LONGEST_WAIT),
            "tokenizer": tokenizer,
            **options,
        }
        return decode_experience((await self._send("POST", "experience/get", asked)).body)

    async def _put(self, control: Mapping[str, Any], columns: Columns) -> PutView:
        answer = await self._send("POST", "experience", body=to_body(json.dumps(control), columns))
        return PutView.model_validate_json(answer.body)

    async def put_experience(
        self, token: str, rows: Sequence[int], columns: Columns, *, park: bool
    ) -> int:
        return (await self._put({"token": token, "rows": list(rows), "park": park}, columns)).left

    async def train(self, token: str, step: int, metrics: Mapping[str, float]) -> int:
        version = (
            await self._put({"token": token, "step": step, "metrics": dict(metrics)}, {})
        ).version
        assert version is not None
        return version

    async def renew(self, token: str, lease: float | None) -> None:
        await self._send("POST", f"leases/{token}/renew", query={"lease": lease})

    async def release(self, token: str) -> None:
        await self._send("POST", f"leases/{token}/release")

    async def weights(self, after: int, wait: float) -> NewestVersion | None:
        answer = await self._send(
            "GET", "weights", query={"after": after, "wait": min(wait, LONGEST_WAIT)}
        )
        version = WeightsView.model_validate_json(answer.body).version
        return None if version is None else NewestVersion(version)

    async def read_weights(self, version: int) -> dict[str, torch.Tensor]:
        return load((await self._send("GET", f"weights/{version}")).body)

    async def notify(self, worker: str, version: int, *, exposed: float, hidden: float) -> None:
        body = {"worker": worker, "version": version, "exposed": exposed, "hidden": hidden}
        await self._send("POST", "weights/notify", body)

    async def publish(self, version: int, weights: Weights, *, covered: int) -> None:
        body = save(
            {name: tensor.clone() for name, tensor in weights},
            {CONTROL: json.dumps({"version": version})},
        )
        await self._send("PUT", f"weights/{version}", query={"covered": covered}, body=body)


def _token(experience: Experience) -> str:
    if experience.token is None:
        raise ValueError(
            "experience: no rows came with it; check `if experience` before you use it"
        )
    return experience.token
