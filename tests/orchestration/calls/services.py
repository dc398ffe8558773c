"""Services with the small engine, and a client of one model."""

from __future__ import annotations

import resource
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from orchestration.calls.interface import (
    Acknowledged,
    CallOptions,
    Done,
    Failed,
    Kind,
    SaveOptions,
)
from orchestration.calls.service import Service, open_service
from stages.calls.interface import (
    AdamOptions,
    Datum,
    ModelOptions,
    PassOutput,
    SampleOutput,
    SampleRequest,
    SamplingOptions,
    ServedBase,
)

ENTRY = "tests.orchestration.calls.small_engine:open_parts"
BASE = ServedBase("small", "small", 1000, "small")
SECONDS = 90.0  # for an answer; a test that waits so long has failed


@asynccontextmanager
async def small_service(
    folder: Path,
    *,
    bases: Sequence[ServedBase] = (BASE,),
    drifts: bool = False,
    **options: Any,
) -> AsyncIterator[Service]:
    engine_options = {"folder": str(folder), "drifts": drifts}
    async with open_service(
        folder, bases, CallOptions(**options), entry=ENTRY, engine_options=engine_options
    ) as service:
        yield service


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """The kernel refuses this process what makes a file longer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def datum(*tokens: int, **rest: Any) -> Datum:
    return Datum(np.array(tokens, np.int64), {"weights": np.ones(len(tokens), np.float32)}, **rest)


def prompt(hundredths: int = 0, **options: Any) -> SampleRequest:
    return SampleRequest(np.array([hundredths, 1], np.int64), SamplingOptions(**options))


class Client:
    """The model ``model_id`` of a session; ``seq``: of its last call."""

    def __init__(self, service: Service, session_id: str, number: int, owner: str) -> None:
        self.service = service
        self.session_id = session_id
        self.owner = owner
        self.model_id = f"{session_id}:train:{number}"
        self.seq = 0

    @classmethod
    async def create(
        cls,
        service: Service,
        *,
        owner: str = "ann",
        session_id: str = "",
        number: int = 0,
        base: str = "small",
        **options: Any,
    ) -> Client:
        if not session_id:
            session_id = await service.open_session(owner, tags=[], metadata={})
        client = cls(service, session_id, number, owner)
        created = await service.create_model(
            owner, session_id, number, base, ModelOptions(**options), {}
        )
        assert await client.done(created) == {"model_id": client.model_id}
        return client

    def _next(self, seq: int | None) -> int:
        self.seq = self.seq + 1 if seq is None else max(self.seq, seq)
        return self.seq if seq is None else seq

    async def train(
        self, *data: Datum, seq: int | None = None, loss: str = "cross_entropy"
    ) -> Acknowledged:
        return await self.service.train(
            self.owner, self.model_id, self._next(seq), data, loss, {}, backward=True
        )

    async def step(self, seq: int | None = None, **options: Any) -> Acknowledged:
        return await self.service.optim_step(
            self.owner, self.model_id, self._next(seq), AdamOptions(**options)
        )

    async def save(self, name: str, *, overwrite: bool = False, **more: Any) -> Acknowledged:
        options = SaveOptions(name, overwrite=overwrite, **more)
        return await self._save("save_weights", options)

    async def snapshot(self, number: int, *, inflight: bool = False) -> Acknowledged:
        return await self._save("save_sampler", SaveOptions(None, number, inflight))

    async def _save(self, kind: Kind, options: SaveOptions) -> Acknowledged:
        return await self.service.save(self.owner, self.model_id, self._next(None), kind, options)

    async def load(self, path: str, *, optimizer: bool = True) -> Acknowledged:
        return await self.service.load_weights(
            self.owner, self.model_id, self._next(None), path, optimizer=optimizer
        )

    async def result(self, request: Acknowledged | str) -> Done | Failed:
        request_id = request if isinstance(request, str) else request.request_id
        result = await self.service.result(self.owner, request_id, SECONDS)
        assert result is not None, f"{request_id} has no answer"
        return result

    async def done(self, request: Acknowledged | str) -> Any:
        result = await self.result(request)
        assert isinstance(result, Done), result
        return result.value

    async def failure(self, request: Acknowledged | str) -> str:
        result = await self.result(request)
        assert isinstance(result, Failed), result
        return result.message

    async def logprobs(self) -> list[float]:
        """Return what the model says of some tokens: it says which weights it has."""
        acknowledged = await self.service.train(
            self.owner,
            self.model_id,
            self._next(None),
            [datum(1, 2, 3)],
            "cross_entropy",
            {},
            backward=False,
        )
        output = await self.done(acknowledged)
        assert isinstance(output, PassOutput)
        return [float(value) for value in output.logprobs[0]]

    async def sampled(self, sampler_id: str, seq: int, **options: Any) -> SampleOutput:
        asked = await self.service.sample(self.owner, sampler_id, seq, prompt(**options))
        output = await self.done(asked)
        assert isinstance(output, SampleOutput)
        return output
