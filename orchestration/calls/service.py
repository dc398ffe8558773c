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
import json
import time
import uuid
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog

from orchestration.calls.checkpoints import Checkpoints, exported_files
from orchestration.calls.engines.encoding import pack, pack_pass
from orchestration.calls.engines.engine import Engine
from orchestration.calls.engines.parts import MAX_ROWS
from orchestration.calls.engines.served import Served
from orchestration.calls.engines.turns import Places
from orchestration.calls.history import Facts
from orchestration.calls.interface import (
    Acknowledged,
    Busy,
    CallOptions,
    CheckpointInfo,
    Completion,
    Done,
    Failed,
    Kind,
    ModelInfo,
    NotThere,
    SamplerInfo,
    SaveOptions,
    SessionInfo,
)
from orchestration.calls.sampling import Session, check_number
from orchestration.calls.sessions import Sessions, busy_disk
from pipeline.locks import take
from stages.calls.custom import GRAPH
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

TORCH_ENTRY = "orchestration.calls.engines.torch_parts:open_parts"
COPIES = uuid.UUID("2c0a3d56-9d39-5f0c-9a41-6ad1f5a1f0c7")  # of names of copies' sessions
SWEEP_SECONDS = 15.0
FACTS_BYTES = 1 << 16  # of a session's or a call's metadata, names and options
MOST_SPANS = 1 << 16  # of sampled tokens, in the data of one call


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
    :data:`orchestration.calls.engines.parts.Opening`. Raises Locked where another process serves
    the folder, JournalDamaged, OSError, ValueError.
    """
    (folder / "sessions").mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as opened:
        opened.enter_context(take(folder / "service.lock"))
        served = dict[str, Served]()
        for number, base in enumerate(bases):
            of_engine = {"max_rows": MAX_ROWS, **(engine_options or {}), **base.options}
            log_file = folder / f"engine-{number}.log"
            engine = Engine(base, entry, engine_options or {}, log_file, options.restarts)
            opened.push_async_callback(engine.close)
            served[base.name] = Served(
                engine,
                Places(options.loaded_models, options.loaded_bytes),
                rows=int(of_engine["max_rows"]),
                adapters=options.loaded_adapters,
            )
            opened.push_async_callback(served[base.name].close)
        service = Service(folder, served, options)
        opened.push_async_callback(service.close)
        await service.load()
        yield service


class KeptCalls:
    """The operations of :class:`Service` on checkpoints, and on losses of clients."""

    def __init__(
        self, served: Mapping[str, Served], sessions: Sessions, checkpoints: Checkpoints
    ) -> None:
        self._served = served
        self._sessions = sessions
        self._checkpoints = checkpoints

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
        await self._checkpoints.delete(self._checkpoints.own(owner, path))

    async def expire_checkpoint(self, owner: str, path: str, ttl: float | None) -> None:
        with busy_disk():
            expires = None if ttl is None else time.time() + ttl
            self._checkpoints.change(self._checkpoints.own(owner, path), expires=expires)

    async def publish_checkpoint(self, owner: str, path: str, *, public: bool) -> None:
        """Let all owners read a checkpoint, or its own alone."""
        with busy_disk():
            self._checkpoints.change(self._checkpoints.own(owner, path), public=public)

    async def copy_checkpoint(
        self,
        owner: str,
        path: str,
        *,
        session_id: str | None,
        number: int,
        ttl: float | None,
        key: str,
    ) -> CheckpointInfo:
        """Copy a checkpoint to a model that is not trained: ``number`` of the session, or of one of
        its own (None). The same owner and ``key`` give the same copy ("": each call another one)."""
        source = self._checkpoints.get(owner, path)
        self._must_be_served(source.info.base, path)
        with busy_disk():
            if session_id is not None:
                session = self._sessions.session(owner, session_id, for_calls=True)
            else:
                name = str(uuid.uuid5(COPIES, f"{owner} {key}")) if key else ""
                session = await self._sessions.open(owner, (), {}, f"copy of {path}", name)
            model_id = _model_id(session.facts.session_id, number)
            facts = Facts(model_id, owner, source.info.base, source.info.options, {}, True)
            model = await self._sessions.open_model(session, number, facts)
            if not model.facts.is_copy:
                raise CallRefused(
                    message=f"model_seq_id {number} is another model's; give a new one"
                )
            expires = None if ttl is None else time.time() + ttl
            copied = await self._checkpoints.copy(source, owner, model_id, expires)
            if session_id is None:
                await session.finish("copied")
        return copied

    async def exported(self, owner: str, path: str) -> Mapping[str, str]:
        """Return the files of a checkpoint that others read, by their names in it: an adapter as
        peft has it, and a model as Hugging Face has it."""
        return await asyncio.to_thread(exported_files, self._checkpoints.get(owner, path))

    async def archive(self, owner: str, path: str) -> str:
        """Return the path of a .tar file with the checkpoint."""
        with busy_disk():
            return str(await self._checkpoints.archive(self._checkpoints.get(owner, path)))

    async def create_loss(
        self, owner: str, session_id: str, number: int, graph: Mapping[str, Any]
    ) -> Acknowledged:
        """Keep a loss that a client has written."""
        session = self._sessions.session(owner, session_id, for_calls=True)
        check_number("custom_loss_seq_id", number)
        with busy_disk():
            await session.losses.keep(number, graph)
        return Acknowledged(f"{session_id}:loss:{number}")

    def _loss(self, owner: str, loss_id: str) -> str:
        """Return the graph of a client's loss. Raises NotThere."""
        session_id, _, number = loss_id.rpartition(":loss:")
        return self._sessions.session(owner, session_id).losses.get(number)

    def with_loss(self, owner: str, options: LossOptions) -> tuple[LossOptions, Collection[str]]:
        """Return ``options`` with the client's loss that they name, if any, and what it reads, so
        that the call can be made again without it. Raises CallRefused."""
        if "loss_id" not in options:
            return options, ()
        try:
            graph = self._loss(owner, str(options["loss_id"]))
        except NotThere as error:
            raise CallRefused(message=f"loss_fn_config.loss_id: {error}") from None
        return {GRAPH: graph}, [each["name"] for each in json.loads(graph)["inputs"]]

    def _must_be_served(self, base: str, path: str) -> None:
        if base not in self._served:
            raise CallRefused(message=f"base_model {base!r} of {path} is not served")


class Service(KeptCalls):
    """The service, as those who reach it from outside see it. Open it with :func:`open_service`.

    Everything may be repeated: the same session, numbers and kind give the same answer. Raises
    NotThere, Busy, and CallRefused for what can be said at once. Numbers (``seq_id``) order a
    model's calls; one that never comes holds the later ones up for a limited time.
    """

    def __init__(self, folder: Path, served: Mapping[str, Served], options: CallOptions) -> None:
        checkpoints = Checkpoints(folder / "checkpoints")
        super().__init__(served, Sessions(folder, served, checkpoints, options), checkpoints)
        self._options = options
        self._tasks = {asyncio.create_task(self._sweep())}

    @property
    def bases(self) -> Sequence[ServedBase]:
        """The base models that are served."""
        return [served.engine.base for served in self._served.values()]

    async def load(self) -> None:
        """Take what the folder has. Raises JournalDamaged, OSError."""
        await self._sessions.load()

    # --- sessions

    async def open_session(
        self,
        owner: str,
        *,
        tags: Sequence[str],
        metadata: Mapping[str, Any],
        display_name: str = "",
    ) -> str:
        _check_facts({"tags": tags, "metadata": metadata, "name": display_name})
        with busy_disk():
            session = await self._sessions.open(owner, tags, metadata, display_name)
        return session.facts.session_id

    async def heartbeat(self, owner: str, session_id: str) -> None:
        self._sessions.session(owner, session_id, for_calls=True)

    async def finish_session(self, owner: str, session_id: str, reason: str) -> None:
        with busy_disk():
            await self._sessions.session(owner, session_id).finish(reason)

    async def session(self, owner: str, session_id: str) -> SessionInfo:
        session = self._sessions.session(owner, session_id)
        return SessionInfo(
            session_id,
            [model.facts.model_id for model in session.models.values()],
            [session.sampler_id(number) for number in session.samplers],
            session.facts.metadata,
            session.facts.display_name,
        )

    async def sessions(self, owner: str) -> Sequence[str]:
        return [session.facts.session_id for session in self._sessions.of(owner)]

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
        _check_facts(metadata)
        session = self._sessions.session(owner, session_id, for_calls=True)
        facts = Facts(_model_id(session_id, number), owner, base, options, metadata)
        blob = pack({"base": base, "options": asdict(options)})
        return await self._create(session, number, facts, "create_model", blob)

    async def create_model_from(
        self,
        owner: str,
        session_id: str,
        number: int,
        path: str,
        *,
        base: str | None = None,
        optimizer: bool,
        metadata: Mapping[str, Any],
    ) -> Acknowledged:
        _check_facts(metadata)
        session = self._sessions.session(owner, session_id, for_calls=True)
        model_id = _model_id(session_id, number)
        if number in session.models:
            facts = session.models[number].facts
        else:
            info = self._checkpoints.get(owner, path).info
            facts = Facts(model_id, owner, info.base, info.options, metadata)
        self._must_be_served(facts.base, path)
        if base not in (None, facts.base):
            wrong = f"is not that of {path}, {facts.base!r}"
            raise CallRefused.of("base_model", base, wrong, "leave it out")
        head = {"path": path, "optimizer": optimizer}
        return await self._create(session, number, facts, "load_weights", pack(head), **head)

    async def _create(
        self, session: Session, number: int, facts: Facts, kind: Kind, blob: bytes, **head: Any
    ) -> Acknowledged:
        self._must_start(facts.base)
        with busy_disk():
            model = await self._sessions.open_model(session, number, facts)
        request_id = await model.history.call(kind, 0, blob, **head)
        return Acknowledged(request_id, facts.model_id)

    async def model(self, owner: str, model_id: str) -> ModelInfo:
        model = self._sessions.model(owner, model_id)
        facts = model.facts
        base = self._served[facts.base].engine.base
        return ModelInfo(
            model_id,
            facts.base,
            facts.options,
            base.architecture,
            base.tokenizer,
            facts.metadata,
            model.last_request,
            model.failure is not None,
            model.history.step,
            len(model.history.unserved),
        )

    async def models(self, owner: str) -> Sequence[ModelInfo]:
        return [
            await self.model(owner, model.facts.model_id)
            for session in self._sessions.of(owner)
            for model in session.models.values()
        ]

    async def _call(
        self, owner: str, model_id: str, seq_id: int, kind: Kind, blob: bytes, **head: Any
    ) -> Acknowledged:
        model = self._sessions.model(owner, model_id, for_calls=True)
        self._must_start(model.facts.base)
        if model.facts.is_copy:
            raise CallRefused(
                message=f"{model_id} has the copy of a checkpoint and is not trained; create a "
                f"model from that checkpoint"
            )
        if not 0 < seq_id < 2**31:
            raise CallRefused(message=f"seq_id {seq_id}: give 1, 2, … to a model's calls")
        limit = self._options.call_bytes if "data" in head else FACTS_BYTES
        if len(blob) > limit:
            head = {
                "refused": f"the call has {len(blob)} bytes, at most {limit} are taken; send its "
                f"data in several calls"
            }
            blob = b""
        model.last_request = time.time()
        request_id = await model.history.call(kind, seq_id, blob, **head)
        return Acknowledged(request_id, model_id)

    def _must_start(self, base: str) -> None:
        """Raise CallRefused where nothing will serve a call on ``base``, and Busy where nothing does
        now."""
        down = self._served[base].engine.down
        if down is not None:
            raise CallRefused(message=str(down)) if down.is_lasting else Busy(str(down), 30.0)

    async def refuse(
        self, owner: str, model_id: str, seq_id: int, kind: Kind, message: str
    ) -> Acknowledged:
        """Record a call that has failed before it could be made: so it is no gap."""
        return await self._call(owner, model_id, seq_id, kind, b"", refused=message)

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
        kind: Kind = "forward_backward" if backward else "forward"
        try:
            blob = pack_pass(data, loss, options)
        except (TypeError, ValueError, OverflowError) as error:
            return await self.refuse(owner, model_id, seq_id, kind, f"data: {error}")
        head: dict[str, Any] = {
            "data": len(data),
            "tokens": sum(int(datum.tokens.size) for datum in data),
        }
        spans = sum(len(datum.sampled) for datum in data)
        if spans > MOST_SPANS:
            message = f"data: {spans} spans of sampled tokens, at most {MOST_SPANS} are taken"
            return await self.refuse(owner, model_id, seq_id, kind, message)
        if spans:
            head["sampled"] = [datum.sampled for datum in data]
        return await self._call(owner, model_id, seq_id, kind, blob, **head)

    async def optim_step(
        self, owner: str, model_id: str, seq_id: int, options: AdamOptions
    ) -> Acknowledged:
        return await self._call(owner, model_id, seq_id, "optim_step", pack(options))

    async def save(
        self, owner: str, model_id: str, seq_id: int, kind: Kind, options: SaveOptions
    ) -> Acknowledged:
        """Save weights as ``kind`` says: save_weights, for training; save_sampler, for sampling;
        save_external, for others than this service, see :meth:`exported`."""
        if (options.name is None) == (options.number is None):
            message = "give either path or sampling_session_seq_id"
            return await self.refuse(owner, model_id, seq_id, kind, message)
        head = asdict(options)
        return await self._call(owner, model_id, seq_id, kind, pack(head), **head)

    async def load_weights(
        self, owner: str, model_id: str, seq_id: int, path: str, *, optimizer: bool
    ) -> Acknowledged:
        head = {"path": path, "optimizer": optimizer}
        return await self._call(owner, model_id, seq_id, "load_weights", pack(head), **head)

    async def unload_model(self, owner: str, model_id: str) -> Acknowledged:
        task = asyncio.create_task(self._sessions.model(owner, model_id).leave())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return Acknowledged(f"{model_id}:unload", model_id)

    # --- sampling

    async def open_sampler(
        self, owner: str, session_id: str, number: int, *, base: str | None, path: str | None
    ) -> SamplerInfo:
        session = self._sessions.session(owner, session_id, for_calls=True)
        check_number("sampling_session_seq_id", number)
        checkpoint = None if path is None else self._checkpoints.get(owner, path)
        name = base if checkpoint is None else checkpoint.info.base
        if name is None or name not in self._served:
            raise CallRefused(
                message=f"base_model {name!r} is not served; there are {', '.join(self._served)}"
            )
        with busy_disk():
            await session.open_sampler(number, name, checkpoint)
        return await self.sampler(owner, session.sampler_id(number))

    async def join_sampler(self, owner: str, sampler_id: str) -> int:
        """Return a number for a copy of a client's sampler, which no other copy is given."""
        session, sampler = self._sessions.sampler(owner, sampler_id, for_calls=True)
        with busy_disk():
            return await session.join(sampler.number)

    async def sampler(self, owner: str, sampler_id: str) -> SamplerInfo:
        _, sampler = self._sessions.sampler(owner, sampler_id)
        return SamplerInfo(sampler_id, sampler.base, sampler.path)

    async def sample(
        self, owner: str, sampler_id: str, seq_id: int, request: SampleRequest
    ) -> Acknowledged:
        session, sampler = self._sessions.sampler(owner, sampler_id, for_calls=True)
        if not 0 <= seq_id < 2**63:
            raise CallRefused(message=f"seq_id {seq_id}: give a number from 0 to 2^63 − 1")
        if request.prompt.nbytes > self._options.call_bytes:
            raise CallRefused(message=f"prompt: it has {request.prompt.size} tokens; shorten it")
        request_id = await session.sample(sampler.number, seq_id, request)
        sequence_ids = tuple(f"{request_id}:{number}" for number in range(request.count))
        return Acknowledged(request_id, sequence_ids=sequence_ids)

    async def result(self, owner: str, request_id: str, seconds: float) -> Done | Failed | None:
        """Return the answer to a request, or None when there is none within ``seconds``."""
        asked, _, tail = request_id.rpartition(":")
        if asked.endswith(":loss"):
            self._loss(owner, request_id)
            return Done("create_custom_loss", {"loss_id": request_id})
        if ":train:" not in asked:
            session, _ = self._sessions.sampler(owner, asked)
            requests = session.requests
        else:
            requests = self._sessions.model(owner, asked).history.requests
            if tail == "unload":
                return Done("unload_model", {"model_id": asked})
        if not tail.isdecimal():
            raise NotThere(f"request {request_id[:200]!r} is not there")
        return await requests.result(request_id, seconds)

    async def completions(
        self, owner: str, sampler_id: str, clone: int, cursor: int, seconds: float
    ) -> tuple[Sequence[Completion], int]:
        """Return the samples of a sampler that were answered after ``cursor`` (0: all), or none
        when there is none within ``seconds``, and the cursor after them. ``clone``: those with a
        ``seq_id`` of 10^9 · ``clone`` and more."""
        session, sampler = self._sessions.sampler(owner, sampler_id)
        key = (sampler.number, clone)
        requests, cursor = await session.completions.after(key, cursor, seconds)
        completions = [
            Completion(request.request_id, request.succeeded, request.outcome.size)
            for request in requests
            if request.outcome is not None
        ]
        return completions, cursor

    async def ledger(self, owner: str, model_id: str) -> Mapping[str, Any]:
        """Return what a model has had: calls by kind and state, data, tokens, steps, staleness of
        the rows whose provenance is known, sampled sequences with their versions."""
        model = self._sessions.model(owner, model_id)
        session = self._sessions.session(owner, model_id.partition(":")[0])
        requests = model.history.requests
        return {
            "model_id": model_id,
            "steps": model.history.step,
            "waiting": sum(request.outcome is None for request in requests),
            **model.history.ledger.counts,
            "sampled": session.sampled(model_id),
        }

    async def steps(self, owner: str, model_id: str, after: int) -> Sequence[Mapping[str, Any]]:
        """Return the optimizer steps of a model whose number is larger than ``after``, by the names
        of :data:`orchestration.calls.steps.FIELDS`. Of long runs older ones are thinned."""
        return self._sessions.model(owner, model_id).history.steps.after(after)

    # --- its life

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(SWEEP_SECONDS, self._options.silent_seconds))
            sweeps = (each.sweep for each in self._sessions)
            for sweep in (*sweeps, self._sessions.sweep, self._checkpoints.sweep):
                try:
                    await sweep()
                except Exception:
                    log.exception("what is not needed any more could not be removed")

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._sessions.close()


def _check_facts(facts: Mapping[str, Any]) -> None:
    """Raise CallRefused where what a client says of a session or a model cannot be recorded."""
    try:
        nbytes = len(pack(facts))
    except (OverflowError, TypeError, ValueError) as error:
        wrong = f"cannot be kept ({error})"
        raise CallRefused.of("user_metadata", None, wrong, "send smaller values") from None
    if nbytes > FACTS_BYTES:
        fix = f"user_metadata and tags may have {FACTS_BYTES} together"
        raise CallRefused.of("user_metadata", None, f"has {nbytes} bytes", fix)


def _model_id(session_id: str, number: int) -> str:
    return f"{session_id}:train:{check_number('model_seq_id', number)}"
