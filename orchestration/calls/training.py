"""A model in training: its calls in their order, and how it comes back after any death.

train, optim_step, … ─▶ recorded ─▶ in the order of their numbers ─▶ a turn at the engine ─▶ answer
                                                    └ the engine has lost the model ─▶ its last state, and
                                                      the calls since, which give the same answers again
                     a state is saved every so many steps ─▶ the calls before it are removed

``cursor``: the number up to which the model in the engine has had its calls; ``served``: up to
which calls have an outcome. Between the two the calls are made again, and must give what they gave.

A call that failed, or never came, may have been a part of the gradients: the next optimizer step
fails, and drops them.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
import zlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog

from orchestration.calls.checkpoints import Checkpoint, Checkpoints, path_of, write_folder
from orchestration.calls.engines.encoding import pack_output
from orchestration.calls.engines.engine import EngineDied, EngineDown, EngineFailed, NotFinite
from orchestration.calls.engines.served import Served
from orchestration.calls.interface import CallOptions, CheckpointInfo, CheckpointKind, Failed
from orchestration.calls.journal import Journal, Record
from orchestration.calls.ledger import Ledger, Versions, staleness
from orchestration.calls.requests import Account, Request, Requests
from stages.calls.interface import CallRefused, ModelOptions

log = structlog.get_logger()

JOURNAL = "journal"
DOWN_SECONDS = 1.0  # until an engine that is down is tried again


@dataclass(frozen=True)
class Facts:
    """What a model is, for good."""

    model_id: str
    owner: str
    base: str
    options: ModelOptions
    metadata: Mapping[str, Any]

    @classmethod
    def of(cls, packed: Mapping[str, Any]) -> Facts:
        return cls(**{**packed, "options": ModelOptions(**packed["options"])})


@dataclass(frozen=True)
class State:
    """A saved state, in which calls up to ``seq`` are. ``name``: of its folder; "": the model as it
    was created."""

    seq: int = -1
    step: int = 0
    name: str = ""


@dataclass(frozen=True)
class Surroundings:
    """What a model uses of its service. ``versions_of``: model and versions of an owner's sampled
    sequence; ``snapshot``: makes the sampler that a call asks for, and returns its id."""

    options: CallOptions
    served: Served
    checkpoints: Checkpoints
    account: Account
    versions_of: Callable[[str, str], tuple[str, Versions] | None]
    snapshot: Callable[[TrainedModel, Request], Coroutine[Any, Any, str]]


class TrainedModel:
    """The model of ``facts`` in ``folder``, with the ``records`` of its ``journal``."""

    def __init__(
        self,
        facts: Facts,
        folder: Path,
        journal: Journal,
        records: Sequence[Record],
        surroundings: Surroundings,
    ) -> None:
        self.facts = facts
        self.step = 0
        """Optimizer steps that its weights have, as far as calls have an outcome."""
        self.failed = ""
        """Why it could not be created."""
        self.last_request = time.time()
        self.requests = Requests(journal, surroundings.account, self._arrived)
        self._folder = folder
        self._journal = journal
        self._around = surroundings
        self._ledger = Ledger()
        self._state = State()
        self._state_record: Record | None = None
        self._by_seq = dict[int, Request]()
        self._unserved = set[int]()
        self._cursor = -1
        self._served = -1
        self._loaded = 0  # the engine's process that has the model; 0: none has
        self._bytes = 0
        self._doubt = ""  # why the gradients are not what the client means
        self._accumulates = False
        self._steps_since_state = 0
        self._bytes_since_state = 0
        self._changed = asyncio.Event()
        self._lock = asyncio.Lock()  # held while it is at the engine
        for record in records:
            self._take(record)
        self._remove_states()
        self._running = asyncio.create_task(self._run())

    @property
    def ledger(self) -> dict[str, Any]:
        return self._ledger.counts

    def _take(self, record: Record) -> None:
        head = record.head
        if "model" in head:
            self._state_record = record
            self._ledger = Ledger(head["ledger"])
            self._state = State(**head["state"])
            self._served = max(self._served, self._state.seq)
            self.step = self._state.step
            return
        request = self.requests.load(record)
        seq = request.head["seq"]
        self._by_seq[seq] = request
        if "answer" not in head:
            self._unserved.add(seq)
            return
        self._unserved.discard(seq)
        self._served = max(self._served, seq)
        self._ledger.count(request.head, head)
        self._count_since_state(request)
        self.step = head.get("step", self.step)
        if "state" in head:
            self._state = State(**head["state"])
        if seq == 0 and "failed" in head:
            self.failed = head["failed"][0]

    def _count_since_state(self, request: Request) -> None:
        self._bytes_since_state += request.size
        if request.kind == "optim_step":
            self._steps_since_state += 1

    def _remove_states(self) -> None:
        for folder in self._folder.glob("state*"):
            if folder.name != self._state.name:
                shutil.rmtree(folder, ignore_errors=True)

    # --- calls come in

    async def call(self, kind: str, seq: int, blob: bytes, **head: Any) -> str:
        """Record a call, and return its request's id. Raises Busy, CallRefused."""
        self.last_request = time.time()
        request_id = f"{self.facts.model_id}:{seq}"
        if seq <= self._served and seq not in self._by_seq:
            return request_id  # its answer is gone
        must = seq == self._served + 1  # others wait for it
        packed = {"call": request_id, "kind": kind, "seq": seq, **head}
        await self.requests.add(packed, blob, must=must)
        return request_id

    def _arrived(self, request: Request) -> None:
        seq = request.head["seq"]
        self._by_seq[seq] = request
        if seq <= self._served:
            late = "it came after later calls had been served; send it again under a new number"
            self.requests.answer(request, Failed(late, by_client=True))
            return
        self._unserved.add(seq)
        self._changed.set()

    # --- calls are served

    async def _run(self) -> None:
        while True:
            await self._wait_for_a_call()
            try:
                async with self._lock:
                    await self._serve_one()
            except EngineDown:
                await asyncio.sleep(DOWN_SECONDS)
            except EngineDied:
                pass
            except Exception:
                log.exception("a model's calls wait", model=self.facts.model_id)
                await asyncio.sleep(DOWN_SECONDS)

    async def _wait_for_a_call(self) -> None:
        """Wait until a call is the next one, or the missing ones before it are given up."""
        while True:
            timeout = None
            if self._unserved:
                first = min(self._unserved)
                arrived = min(self._by_seq[seq].arrived for seq in self._unserved)
                timeout = arrived + self._around.options.gap_seconds - time.monotonic()
                if timeout <= 0:
                    self._served = max(self._served, first - 1)
                if first <= self._served + 1:
                    return
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._changed.wait()

    async def _serve_one(self) -> None:
        """Have the engine make the calls up to the first one without an outcome, and that one."""
        await self._load()
        while True:
            seq = self._cursor + 1
            if seq not in self._by_seq:
                seq = min(later for later in self._by_seq if later > self._cursor)
                self._doubt = self._doubt or f"call {self._cursor + 1} has not come"
            request = self._by_seq[seq]
            if request.outcome is not None:
                if not self.failed:
                    await self._repeat(request)
                self._cursor = seq
                continue
            facts: dict[str, Any] = {}
            try:
                outcome: bytes | Failed = await self._serve(request, facts)
            except CallRefused as error:
                outcome = Failed(str(error), by_client=True)
            except NotFinite as error:
                outcome = Failed(str(error), by_client=True)
            except (EngineFailed, OSError) as error:
                log.error("a call has failed", request=request.request_id, reason=str(error))
                outcome = Failed(str(error), by_client=False)
                if request.kind in ("forward_backward", "optim_step", "load_weights"):
                    self._loaded = 0
            except EngineDied as error:
                self._loaded = 0
                request.attempts += 1
                if request.attempts < self._around.options.attempts:
                    raise
                outcome = Failed(
                    f"the engine has ended {request.attempts} times during this call ({error})",
                    by_client=False,
                )
            await self._after(request, outcome, facts)
            return

    async def _after(
        self, request: Request, outcome: bytes | Failed, facts: dict[str, Any]
    ) -> None:
        seq = request.head["seq"]
        failed = isinstance(outcome, Failed)
        if "step" in facts:
            self.step = facts["step"]
        if "state" in facts:
            self._state = State(**facts["state"])
        if seq == 0 and isinstance(outcome, Failed):
            self.failed = self.failed or outcome.message
        if request.kind == "forward_backward" and failed:
            self._doubt = self._doubt or f"call {seq}, forward_backward, has failed"
        if request.kind == "optim_step" and failed and self._loaded:
            await self._forget()
        self.requests.answer(request, outcome, **facts)
        assert request.outcome is not None
        self._ledger.count(request.head, request.outcome.head)
        self._unserved.discard(seq)
        self._cursor = seq
        self._served = max(self._served, seq)
        self._count_since_state(request)
        if request.kind == "optim_step":
            options = self._around.options
            if (
                self._steps_since_state >= options.state_steps
                or self._bytes_since_state >= options.state_bytes
            ):
                await self._save_state()

    async def _repeat(self, request: Request) -> None:
        """Have the engine make a call that it has answered before."""
        if request.kind not in ("forward_backward", "optim_step"):
            return
        if request.succeeded:
            assert request.outcome is not None
            try:
                blob = await self._at_engine("run", self._blob(request), kind=request.kind)
            except (CallRefused, NotFinite) as error:
                self.failed = f"{request.request_id} cannot be made again: {error}"
                log.error("ALARM: a model cannot be rebuilt", reason=self.failed)
                return
            if zlib.crc32(blob) != request.outcome.head["result"]:
                log.error(
                    "ALARM: a call that was made again gave another answer than before",
                    request=request.request_id,
                )
            self._moved(request)
        elif request.kind == "optim_step":
            await self._forget()
        else:
            self._doubt = self._doubt or f"call {request.head['seq']} has failed"

    def _moved(self, request: Request) -> None:
        self._accumulates = request.kind == "forward_backward"
        if request.kind == "optim_step":
            self._doubt = ""

    async def _forget(self) -> None:
        await self._at_engine("forget")
        self._doubt = ""
        self._accumulates = False

    def _blob(self, request: Request) -> bytes:
        assert request.call is not None
        return self._journal.read(request.call)

    async def _at_engine(self, operation: str, blob: bytes = b"", **fields: Any) -> bytes:
        return (await self._reply(operation, blob, **fields))[1]

    async def _reply(
        self, operation: str, blob: bytes = b"", **fields: Any
    ) -> tuple[dict[str, Any], bytes]:
        served = self._around.served
        model_id = self.facts.model_id
        try:
            async with served.training.turn(self.facts.owner, model_id):
                return await served.engine.call(operation, blob, model=model_id, **fields)
        except EngineDied:
            self._loaded = 0
            raise

    # --- kinds of calls

    async def _serve(self, request: Request, facts: dict[str, Any]) -> bytes:
        """Return the result; ``facts`` gets what is recorded beside it."""
        if self.failed:
            raise CallRefused(message=f"the model cannot be used: {self.failed}")
        head = request.head
        result: dict[str, Any] = {"model_id": self.facts.model_id}
        match request.kind:
            case "forward" | "forward_backward":
                return await self._pass(request, facts)
            case "optim_step":
                return await self._optim_step(request, facts)
            case "load_weights":
                await self._load_weights(request, facts)
                result["path"] = head["path"]
            case "save_weights":
                result = {"path": await self._save_checkpoint(request, "weights")}
            case "save_sampler" if head["number"] is None:
                result = {"path": await self._save_checkpoint(request, "sampler_weights")}
            case "save_sampler":
                sampler_id = await self._around.snapshot(self, request)
                result = {"sampling_session_id": sampler_id}
        return pack_output(result)

    async def _pass(self, request: Request, facts: dict[str, Any]) -> bytes:
        blob = self._blob(request)
        reply, result = await self._reply("run", blob, kind=request.kind)
        if request.kind == "forward_backward":
            self._moved(request)
        values = staleness(
            request.head.get("sampled", ()),
            self.facts.model_id,
            reply["step"],
            lambda sequence_id: self._around.versions_of(self.facts.owner, sequence_id),
        )
        if values:
            facts["staleness"] = values
            facts["metrics"] = {
                "staleness:mean": sum(values) / len(values),
                "staleness:max": float(max(values)),
            }
        return result

    async def _optim_step(self, request: Request, facts: dict[str, Any]) -> bytes:
        if self._doubt:
            raise CallRefused(
                message=f"{self._doubt}, so the gradients are not those of all data that was sent; "
                f"they are dropped, and the weights are as before: send the data again, and then "
                f"optim_step"
            )
        blob = self._blob(request)
        reply, result = await self._reply("run", blob, kind=request.kind)
        self._moved(request)
        facts["step"] = reply["step"]
        return result

    async def _load_weights(self, request: Request, facts: dict[str, Any]) -> None:
        head = request.head
        try:
            checkpoint = self._around.checkpoints.get(self.facts.owner, head["path"])
        except LookupError as error:
            raise CallRefused(message=str(error)) from None
        folder = str(checkpoint.folder)
        reply, _ = await self._reply("load", folder=folder, optimizer=head["optimizer"])
        self._accumulates = False
        self._doubt = ""
        state = State(head["seq"], reply["step"], f"state-{head['seq']}")
        await self.save_to(self._folder / state.name, optimizer=True)
        facts["step"] = state.step
        facts["state"] = asdict(state)

    async def _save_checkpoint(self, request: Request, kind: CheckpointKind) -> str:
        head = request.head
        info = CheckpointInfo(
            path=path_of(self.facts.model_id, kind, head["name"]),
            model_id=self.facts.model_id,
            kind=kind,
            name=head["name"],
            time=time.time(),
            bytes=0,
            options=self.facts.options,
            base=self.facts.base,
            expires=None if head["ttl"] is None else time.time() + head["ttl"],
            metadata=head["metadata"],
        )
        checkpoint = Checkpoint(self.facts.owner, request.request_id, self.step, self._folder, info)
        optimizer = kind == "weights"

        async def write(folder: Path) -> None:
            await self._at_engine("save", folder=str(folder), optimizer=optimizer)

        return await self._around.checkpoints.save(
            checkpoint, overwrite=head["overwrite"], number=head["seq"], write=write
        )

    async def save_to(self, folder: Path, *, optimizer: bool) -> None:
        """Save the model in training to ``folder``, in one step."""

        async def write(partial: Path) -> None:
            await self._at_engine("save", folder=str(partial), optimizer=optimizer)

        await write_folder(folder.with_name(f"{folder.name}.partial"), folder, write)

    # --- the model in the engine

    async def _load(self) -> None:
        """Have the engine have the model, as it was at its last state or later."""
        served = self._around.served
        if self.failed:
            return
        await served.places.take(self, self._bytes)
        if self._loaded and self._loaded == served.engine.generation:
            return
        folder = str(self._folder / self._state.name) if self._state.name else ""
        try:
            reply, _ = await self._reply("open", options=asdict(self.facts.options), folder=folder)
        except (CallRefused, EngineFailed) as error:
            if self._served >= 0 and isinstance(error, EngineFailed):
                raise
            self.failed = str(error)
            return
        self._loaded = served.engine.generation
        self._cursor = self._state.seq
        self._doubt = ""
        self._accumulates = False
        self._bytes = reply["bytes"]
        await served.places.take(self, self._bytes)

    async def leave(self) -> None:
        """Unload it from the engine; its next call loads it again."""
        async with self._lock:
            if self._loaded and self._loaded == self._around.served.engine.generation:
                with contextlib.suppress(EngineDied, EngineDown, EngineFailed, OSError):
                    clean = not self._accumulates and not self._doubt
                    if self._steps_since_state and clean and self._cursor >= self._served:
                        await self._save_state()
                    await self._at_engine("close")
            self._loaded = 0
            self._around.served.places.release(self)

    async def _save_state(self) -> None:
        """Save a state, and remove the calls before it. Does nothing when the disk is full."""
        state = State(self._cursor, self.step, f"state-{self._cursor}")
        try:
            await self.save_to(self._folder / state.name, optimizer=True)
            await self._shorten(state)
        except (EngineFailed, OSError) as error:
            log.error("a state could not be saved", model=self.facts.model_id, reason=str(error))
        self._steps_since_state = 0
        self._bytes_since_state = 0

    async def _shorten(self, state: State) -> None:
        """Make ``state`` the model's, and remove what nobody needs from its journal. Raises
        OSError."""
        record = self._journal.append(
            {"model": asdict(self.facts), "ledger": self.ledger, "state": asdict(state)}
        )
        assert record.written is not None
        await record.written
        self._state = state
        self._state_record = record
        forgotten = [
            request
            for request in self.requests.forgettable(self._around.options)
            if request.head["seq"] <= state.seq
        ]
        self.requests.forget(forgotten)
        for request in forgotten:
            del self._by_seq[request.head["seq"]]
        for request in self.requests:
            if request.answered.is_set() and request.head["seq"] <= state.seq:
                request.call = None
        await self._journal.rewrite(self._live)
        await asyncio.to_thread(self._remove_states)

    def _live(self) -> list[Record]:
        records = [self._state_record]
        for request in self.requests:
            records += [request.call, request.outcome]
        live = [record for record in records if record is not None]
        return sorted(live, key=lambda record: record.offset)

    async def sweep(self) -> None:
        """Forget answers that were read, once no call needs them."""
        async with self._lock:
            if any(
                request.head["seq"] <= self._state.seq
                for request in self.requests.forgettable(self._around.options)
            ):
                with contextlib.suppress(OSError):
                    await self._shorten(self._state)

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.wait([self._running])
        await self._journal.close()


def first_record(facts: Facts) -> dict[str, Any]:
    """Return the head of the first record of a model's journal."""
    return {"model": asdict(facts), "ledger": Ledger().counts, "state": asdict(State())}
