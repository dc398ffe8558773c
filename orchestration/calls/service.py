"""The service of training calls, on one machine: sessions in a folder, engines in processes.

open_service ─▶ sessions and models of FOLDER, with their journals ─▶ engines ─▶ Service

    FOLDER/sessions/SESSION/journal             what it is, its samplers, their requests
                           /samplers/N          weights of a sampler's own
                           /train.N/journal     calls of a model, and their answers
                           /train.N/state-SEQ   its last state
          /checkpoints/MODEL/KIND/NAME/SEQ
          /engine-N.log

All that it knows is in these files, so that it goes on from them after any death. There is no index
server: what is recorded of a session is one file, written in one order with the calls.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from orchestration.calls.checkpoints import Checkpoints, check_name
from orchestration.calls.engines.encoding import pack_adam, pack_output, pack_pass
from orchestration.calls.engines.engine import Engine
from orchestration.calls.engines.served import Served
from orchestration.calls.engines.turns import Places
from orchestration.calls.interface import (
    Acknowledged,
    Busy,
    CallOptions,
    CheckpointInfo,
    Done,
    Failed,
    ModelInfo,
    NotThere,
    SamplerInfo,
    SessionInfo,
)
from orchestration.calls.journal import Journal
from orchestration.calls.ledger import Versions
from orchestration.calls.requests import Account
from orchestration.calls.sampling import Sampler, Session, SessionFacts
from orchestration.calls.training import Facts, Surroundings, TrainedModel, first_record
from pipeline.locks import take
from stages.calls.interface import (
    AdamOptions,
    CallRefused,
    Datum,
    LossOptions,
    ModelOptions,
    SampleRequest,
    ServedBase,
)

log = structlog.get_logger()

TORCH_ENTRY = "stages.calls.parts:open_parts"
SESSION = r"[0-9a-f-]{36}"
MODEL_ID = re.compile(rf"({SESSION}):train:(0|[1-9]\d{{0,8}})")
SAMPLER_ID = re.compile(rf"({SESSION}):sample:(0|[1-9]\d{{0,8}})")
REQUEST_ID = re.compile(rf"({SESSION}:(?:train|sample):\d{{1,9}}):(\d{{1,19}}|unload)")
SWEEP_SECONDS = 15.0


@asynccontextmanager
async def open_service(
    folder: Path,
    bases: Sequence[ServedBase],
    options: CallOptions = CallOptions(),  # noqa: B008
    *,
    entry: str = TORCH_ENTRY,
    engine_options: Mapping[str, Any] | None = None,
) -> AsyncIterator[Service]:
    """Yield the service of ``folder``, with an engine for each of ``bases``.

    ``entry`` opens the parts of an engine with ``engine_options``, see
    :data:`orchestration.calls.engines.process.Opening`. Raises Locked where another process serves
    the folder, JournalDamaged, OSError, ValueError.
    """
    folder = folder.absolute()
    (folder / "sessions").mkdir(parents=True, exist_ok=True)
    with take(folder / "service.lock"):
        served = dict[str, Served]()
        for number, base in enumerate(bases):
            log_file = folder / f"engine-{number}.log"
            engine = Engine(base, entry, engine_options or {}, log_file, options.restarts)
            places = Places(options.loaded_models, options.loaded_bytes)
            served[base.name] = Served(
                engine,
                places,
                slots=options.sampling_requests,
                adapters=options.loaded_adapters,
            )
        service = Service(folder, served, options)
        try:
            await service.load()
            yield service
        finally:
            await service.close()


class Service:
    """Implements :class:`orchestration.calls.interface.CallService`. Open it with
    :func:`open_service`."""

    def __init__(self, folder: Path, served: Mapping[str, Served], options: CallOptions) -> None:
        self._folder = folder
        self._served = served
        self._options = options
        self._sessions = dict[str, Session]()
        self._accounts = dict[str, Account]()
        self._checkpoints = Checkpoints(folder / "checkpoints")
        self._tasks = {asyncio.create_task(self._sweep())}

    @property
    def bases(self) -> Sequence[ServedBase]:
        return [served.engine.base for served in self._served.values()]

    # --- sessions

    async def load(self) -> None:
        """Take what the folder has. Raises JournalDamaged, OSError."""
        for folder in sorted((self._folder / "sessions").iterdir()):
            journal, records = await asyncio.to_thread(Journal.open, folder / "journal")
            if not records:  # it was never acknowledged
                await journal.close()
                shutil.rmtree(folder)
                continue
            facts = SessionFacts(**records[0].head["session"])
            session = self._new_session(facts, folder, journal, records)
            for model_folder in sorted(folder.glob("train.*")):
                await self._load_model(session, model_folder)

    def _new_session(
        self, facts: SessionFacts, folder: Path, journal: Journal, records: Sequence[Any]
    ) -> Session:
        session = Session(
            facts,
            self._folder,
            folder,
            journal,
            records,
            self._served,
            self._account(facts.owner),
            self._options,
        )
        self._sessions[facts.session_id] = session
        return session

    async def _load_model(self, session: Session, folder: Path) -> None:
        journal, records = await asyncio.to_thread(Journal.open, folder / "journal")
        packed = next((each.head["model"] for each in records if "model" in each.head), None)
        facts = None if packed is None else Facts.of(packed)
        if facts is None or facts.base not in self._served:
            log.warning("a model is not served", folder=str(folder))
            await journal.close()
            return
        self._new_model(session, facts, folder, journal, records)

    def _new_model(
        self,
        session: Session,
        facts: Facts,
        folder: Path,
        journal: Journal,
        records: Sequence[Any],
    ) -> TrainedModel:
        surroundings = Surroundings(
            self._options,
            self._served[facts.base],
            self._checkpoints,
            self._account(facts.owner),
            self._versions_of,
            session.snapshot,
        )
        model = TrainedModel(facts, folder, journal, records, surroundings)
        session.models[int(folder.name.rpartition(".")[2])] = model
        return model

    def _account(self, owner: str) -> Account:
        return self._accounts.setdefault(owner, Account(self._options))

    def _session(self, owner: str, session_id: str, *, for_calls: bool = False) -> Session:
        session = self._sessions.get(session_id)
        if session is None or session.owner != owner:
            raise NotThere(f"session {session_id[:100]!r} is not there")
        if for_calls:
            if session.finished:
                raise NotThere(f"session {session_id} is finished; open another one")
            session.asleep = False
        return session

    def _model(self, owner: str, model_id: str, *, for_calls: bool = False) -> TrainedModel:
        match = MODEL_ID.fullmatch(model_id)
        if match is not None:
            session = self._session(owner, match[1], for_calls=for_calls)
            model = session.models.get(int(match[2]))
            if model is not None:
                return model
        raise NotThere(f"model {model_id[:100]!r} is not there")

    def _sampler(
        self, owner: str, sampler_id: str, *, for_calls: bool = False
    ) -> tuple[Session, Sampler]:
        match = SAMPLER_ID.fullmatch(sampler_id)
        if match is not None:
            session = self._session(owner, match[1], for_calls=for_calls)
            sampler = session.samplers.get(int(match[2]))
            if sampler is not None:
                return session, sampler
        raise NotThere(f"sampler {sampler_id[:100]!r} is not there")

    def _sessions_of(self, owner: str) -> Iterator[Session]:
        return (session for session in self._sessions.values() if session.owner == owner)

    async def open_session(
        self,
        owner: str,
        *,
        tags: Sequence[str],
        metadata: Mapping[str, Any],
        display_name: str = "",
    ) -> str:
        now = time.monotonic()
        live = sum(
            not session.finished and now - session.heard < self._options.silent_seconds
            for session in self._sessions_of(owner)
        )
        if live >= self._options.owner_sessions:
            raise Busy(f"{live} sessions are open, at most {self._options.owner_sessions} may be")
        session_id = str(uuid.uuid4())
        facts = SessionFacts(session_id, owner, tags, metadata, display_name, time.time())
        folder = self._folder / "sessions" / session_id
        folder.mkdir()
        with _disk():
            journal, _ = await asyncio.to_thread(Journal.open, folder / "journal")
            session = self._new_session(facts, folder, journal, [])
            try:
                await session.record(session=asdict(facts))
            except BaseException:
                del self._sessions[session_id]
                raise
        return session_id

    async def heartbeat(self, owner: str, session_id: str) -> None:
        session = self._session(owner, session_id, for_calls=True)
        session.heard = time.monotonic()

    async def finish_session(self, owner: str, session_id: str, reason: str) -> None:
        with _disk():
            await self._session(owner, session_id).finish(reason)

    async def session(self, owner: str, session_id: str) -> SessionInfo:
        session = self._session(owner, session_id)
        return SessionInfo(
            session_id,
            [model.facts.model_id for model in session.models.values()],
            [session.sampler_id(number) for number in session.samplers],
            session.facts.metadata,
            session.facts.display_name,
        )

    async def sessions(self, owner: str) -> Sequence[str]:
        return [session.facts.session_id for session in self._sessions_of(owner)]

    # --- models

    async def create_model(
        self,
        owner: str,
        session_id: str,
        number: int,
        base: str,
        options: ModelOptions,
        metadata: Mapping[str, Any],
    ) -> Acknowledged:
        if base not in self._served:
            raise CallRefused(
                message=f"base_model {base[:200]!r} is not served; there are "
                f"{', '.join(self._served)}"
            )
        blob = pack_output({"base": base, "options": asdict(options)})
        create = partial(self._create, owner, session_id, number, base, options, metadata)
        return await create("create_model", blob)

    async def create_model_from(
        self,
        owner: str,
        session_id: str,
        number: int,
        path: str,
        *,
        optimizer: bool,
        metadata: Mapping[str, Any],
    ) -> Acknowledged:
        info = self._checkpoints.get(owner, path).info
        if info.base not in self._served:
            raise CallRefused(message=f"base_model {info.base!r} of {path} is not served")
        blob = pack_output({"path": path, "optimizer": optimizer})
        create = partial(self._create, owner, session_id, number, info.base, info.options, metadata)
        return await create("load_weights", blob, path=path, optimizer=optimizer)

    async def _create(
        self,
        owner: str,
        session_id: str,
        number: int,
        base: str,
        options: ModelOptions,
        metadata: Mapping[str, Any],
        kind: str,
        blob: bytes,
        **head: Any,
    ) -> Acknowledged:
        session = self._session(owner, session_id, for_calls=True)
        model_id = f"{session_id}:train:{_number('model_seq_id', number)}"
        async with session.creating:
            model = session.models.get(number)
            if model is None:
                limit = self._options.owner_models
                models = sum(
                    len(each.models) for each in self._sessions_of(owner) if not each.finished
                )
                if models >= limit:
                    raise Busy(f"{models} models are there, at most {limit} may be", 60.0)
                facts = Facts(model_id, owner, base, options, metadata)
                folder = session.folder / f"train.{number}"
                with _disk():
                    folder.mkdir(exist_ok=True)
                    journal, records = await asyncio.to_thread(Journal.open, folder / "journal")
                    first = journal.append(first_record(facts))
                    assert first.written is not None
                    await asyncio.shield(first.written)
                model = self._new_model(session, facts, folder, journal, [*records, first])
        return Acknowledged(await model.call(kind, 0, blob, **head), model_id)

    async def model(self, owner: str, model_id: str) -> ModelInfo:
        model = self._model(owner, model_id)
        facts = model.facts
        return ModelInfo(
            model_id,
            facts.base,
            facts.options,
            "",
            self._served[facts.base].engine.base.tokenizer,
            facts.metadata,
            model.last_request,
            bool(model.failed),
        )

    async def models(self, owner: str) -> Sequence[ModelInfo]:
        return [
            await self.model(owner, model.facts.model_id)
            for session in self._sessions_of(owner)
            for model in session.models.values()
        ]

    async def _call(
        self, owner: str, model_id: str, seq_id: int, kind: str, blob: bytes, **head: Any
    ) -> Acknowledged:
        model = self._model(owner, model_id, for_calls=True)
        if len(blob) > self._options.call_bytes:
            raise CallRefused(
                message=f"the call has {len(blob)} bytes, at most {self._options.call_bytes} are "
                f"taken; send its data in several calls"
            )
        if not 0 < seq_id < 2**31:
            raise CallRefused(message=f"seq_id {seq_id}: give 1, 2, … to a model's calls")
        return Acknowledged(await model.call(kind, seq_id, blob, **head), model_id)

    async def train(
        self,
        owner: str,
        model_id: str,
        seq_id: int,
        data: Sequence[Datum],
        loss: str,
        options: LossOptions,
        *,
        backward: bool,
    ) -> Acknowledged:
        try:
            blob = pack_pass(data, loss, options)
        except (TypeError, ValueError, OverflowError) as error:
            raise CallRefused(message=f"data: {error}") from None
        kind = "forward_backward" if backward else "forward"
        head: dict[str, Any] = {
            "data": len(data),
            "tokens": sum(int(datum.tokens.size) for datum in data),
        }
        if any(datum.sampled for datum in data):
            head["sampled"] = [datum.sampled for datum in data]
        return await self._call(owner, model_id, seq_id, kind, blob, **head)

    async def optim_step(
        self, owner: str, model_id: str, seq_id: int, options: AdamOptions
    ) -> Acknowledged:
        return await self._call(owner, model_id, seq_id, "optim_step", pack_adam(options))

    async def save_weights(
        self,
        owner: str,
        model_id: str,
        seq_id: int,
        name: str,
        *,
        ttl: float | None,
        overwrite: bool,
        metadata: Mapping[str, str],
    ) -> Acknowledged:
        head = {
            "name": check_name(name),
            "ttl": ttl,
            "overwrite": overwrite,
            "metadata": dict(metadata),
        }
        blob = pack_output(head)
        return await self._call(owner, model_id, seq_id, "save_weights", blob, **head)

    async def save_sampler(
        self,
        owner: str,
        model_id: str,
        seq_id: int,
        *,
        name: str | None,
        number: int | None,
        inflight: bool,
        ttl: float | None,
        metadata: Mapping[str, str],
    ) -> Acknowledged:
        if (name is None) == (number is None):
            raise CallRefused(message="give either path or sampling_session_seq_id")
        head = {
            "name": None if name is None else check_name(name),
            "number": None if number is None else _number("sampling_session_seq_id", number),
            "inflight": inflight,
            "ttl": ttl,
            "overwrite": False,
            "metadata": dict(metadata),
        }
        blob = pack_output(head)
        return await self._call(owner, model_id, seq_id, "save_sampler", blob, **head)

    async def load_weights(
        self, owner: str, model_id: str, seq_id: int, path: str, *, optimizer: bool
    ) -> Acknowledged:
        head = {"path": path, "optimizer": optimizer}
        blob = pack_output(head)
        return await self._call(owner, model_id, seq_id, "load_weights", blob, **head)

    async def unload_model(self, owner: str, model_id: str) -> Acknowledged:
        task = asyncio.create_task(self._model(owner, model_id).leave())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return Acknowledged(f"{model_id}:unload", model_id)

    # --- sampling

    async def open_sampler(
        self, owner: str, session_id: str, number: int, *, base: str | None, path: str | None
    ) -> SamplerInfo:
        session = self._session(owner, session_id, for_calls=True)
        _number("sampling_session_seq_id", number)
        checkpoint = None if path is None else self._checkpoints.get(owner, path)
        name = base if checkpoint is None else checkpoint.info.base
        if name is None or name not in self._served:
            raise CallRefused(
                message=f"base_model {name!r} is not served; there are {', '.join(self._served)}"
            )
        with _disk():
            await session.open_sampler(number, name, checkpoint)
        return await self.sampler(owner, session.sampler_id(number))

    async def sampler(self, owner: str, sampler_id: str) -> SamplerInfo:
        _, sampler = self._sampler(owner, sampler_id)
        return SamplerInfo(sampler_id, sampler.base, sampler.path)

    async def sample(
        self, owner: str, sampler_id: str, seq_id: int, request: SampleRequest
    ) -> Acknowledged:
        session, sampler = self._sampler(owner, sampler_id, for_calls=True)
        if not 0 <= seq_id < 2**63:
            raise CallRefused(message=f"seq_id {seq_id}: give a number from 0 to 2^63 − 1")
        request_id = await session.sample(sampler.number, seq_id, request)
        sequence_ids = tuple(f"{request_id}:{number}" for number in range(request.count))
        return Acknowledged(request_id, sequence_ids=sequence_ids)

    def _versions_of(self, owner: str, sequence_id: str) -> tuple[str, Versions] | None:
        session = self._sessions.get(sequence_id.partition(":")[0])
        if session is None or session.owner != owner:
            return None
        return session.versions(sequence_id)

    async def result(self, owner: str, request_id: str, seconds: float) -> Done | Failed | None:
        match = REQUEST_ID.fullmatch(request_id)
        if match is None:
            raise NotThere(f"request {request_id[:200]!r} is not there")
        if MODEL_ID.fullmatch(match[1]):
            model = self._model(owner, match[1])
            if match[2] == "unload":
                return Done("unload_model", {"model_id": match[1]})
            return await model.requests.result(request_id, seconds)
        session, _ = self._sampler(owner, match[1])
        return await session.requests.result(request_id, seconds)

    # --- checkpoints

    async def checkpoint(self, owner: str, path: str) -> CheckpointInfo:
        return self._checkpoints.get(owner, path).info

    async def checkpoints(
        self, owner: str, model_id: str | None = None
    ) -> Sequence[CheckpointInfo]:
        return [
            checkpoint.info
            for checkpoint in self._checkpoints
            if checkpoint.owner == owner and model_id in (None, checkpoint.info.model_id)
        ]

    async def delete_checkpoint(self, owner: str, path: str) -> None:
        await self._checkpoints.delete(self._checkpoints.get(owner, path))

    async def expire_checkpoint(self, owner: str, path: str, ttl: float | None) -> None:
        with _disk():
            expires = None if ttl is None else time.time() + ttl
            self._checkpoints.expire(self._checkpoints.get(owner, path), expires)

    async def archive(self, owner: str, path: str) -> str:
        with _disk():
            return str(await self._checkpoints.archive(self._checkpoints.get(owner, path)))

    async def ledger(self, owner: str, model_id: str) -> Mapping[str, Any]:
        model = self._model(owner, model_id)
        session = self._sessions[model_id.partition(":")[0]]
        return {
            "model_id": model_id,
            "steps": model.step,
            "waiting": sum(request.outcome is None for request in model.requests),
            **model.ledger,
            "sampled": session.sampled(model_id),
        }

    # --- its life

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            for session in list(self._sessions.values()):
                try:
                    await session.sweep()
                except Exception:
                    log.exception("a session was not swept", session=session.facts.session_id)
            await self._checkpoints.sweep()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for session in self._sessions.values():
            await session.close()
        for served in self._served.values():
            await served.engine.close()


@contextmanager
def _disk() -> Iterator[None]:
    """Raise Busy for what the disk refuses."""
    try:
        yield
    except OSError as error:
        raise Busy(str(error), 5.0) from error


def _number(name: str, number: int) -> int:
    if not 0 <= number < 10**9:
        raise CallRefused(message=f"{name} {number}: give 0, 1, 2, …")
    return number
