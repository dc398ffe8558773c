"""A model in training: its calls in their order, and how it comes back after any death.

train, optim_step, … ─▶ recorded ─▶ in the order of their numbers ─▶ a turn at the engine ─▶ answer
                                                    └ the engine has lost the model ─▶ its last state, and
                                                      the calls since, which give the same answers again
                     a state is saved every so many steps ─▶ the calls before it are removed

``cursor``: the number up to which the model in the engine has had its calls. Those between it and
the last one with an outcome are made again, and must give what they gave.

A call that failed, or never came, may have been a part of the gradients: the next optimizer step
fails, and drops them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import zlib
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from orchestration.calls.checkpoints import (
    Checkpoint,
    Checkpoints,
    check_name,
    path_of,
    write_folder,
)
from orchestration.calls.engines.encoding import pack
from orchestration.calls.engines.engine import EngineDied, EngineDown, EngineFailed, NotFinite
from orchestration.calls.engines.loaded import LoadedModel
from orchestration.calls.engines.served import Served
from orchestration.calls.history import Facts, History, State
from orchestration.calls.interface import CallOptions, CheckpointInfo, CheckpointKind, Failed
from orchestration.calls.ledger import Versions, staleness
from orchestration.calls.requests import Request
from stages.calls.interface import CallRefused

log = structlog.get_logger()

PAUSE_SECONDS = 1.0  # until an engine that has failed is tried again
CHANGING = ("forward_backward", "optim_step", "load_weights")
RECORDED = ("loss:sum", "tokens:sum")  # metrics of a pass, beside its answer


@dataclass(frozen=True)
class Surroundings:
    """What a model uses of its service. ``versions_of``: model and versions of an owner's sampled
    sequence; ``snapshot``: makes the sampler that a call asks for, and returns its id; ``sampled``:
    :meth:`orchestration.calls.sampling.Session.totals`."""

    options: CallOptions
    served: Served
    checkpoints: Checkpoints
    versions_of: Callable[[str, str], tuple[str, Versions] | None]
    snapshot: Callable[[TrainedModel, Request], Coroutine[Any, Any, str]]
    sampled: Callable[[str, int], tuple[int, int, int, int]]


class TrainedModel:
    """The model of ``history``."""

    def __init__(self, folder: Path, history: History, surroundings: Surroundings) -> None:
        self.history = history
        self.failure = history.failure
        """Why no call of it can be served."""
        self.last_request = history.steps.last_answer or time.time()
        self._folder = folder
        self._around = surroundings
        facts = history.facts
        self._loaded = LoadedModel(surroundings.served, facts.owner, facts.model_id)
        self._cursor = -1
        self._doubt = ""  # why the gradients are not what the client means
        self._accumulates = False
        self._lock = asyncio.Lock()  # held while it is at the engine
        self._running = asyncio.create_task(self._run())

    @property
    def facts(self) -> Facts:
        return self.history.facts

    @property
    def owner(self) -> str:
        return self.facts.owner

    async def _run(self) -> None:
        while True:
            await self._wait_for_a_call()
            try:
                async with self._lock:
                    await self._serve_one()
            except EngineDied:
                pass
            except EngineDown as error:
                self._refuse_next(str(error))
            except Exception:
                log.exception("a model's calls wait", model=self.facts.model_id)
                await asyncio.sleep(PAUSE_SECONDS)

    async def _wait_for_a_call(self) -> None:
        """Wait until a call is the next one, or the missing ones before it are given up."""
        history = self.history
        while True:
            timeout = None
            if history.unserved:
                first = min(history.unserved)
                if first <= history.served + 1:
                    return
                timeout = history.waiting_since() + self._around.options.gap_seconds
                timeout -= time.monotonic()
                if timeout <= 0:
                    history.served = first - 1
                    return
            history.changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await history.changed.wait()

    async def _serve_one(self) -> None:
        """Have the engine make the calls up to the first one without an outcome, and that one."""
        if self.failure is None:
            await self._load()
        while True:
            request = self.history.after(self._cursor)
            seq = request.head["seq"]
            if seq > self._cursor + 1:
                self._suspect(f"call {self._cursor + 1} has not come")
            if request.outcome is None:
                break
            if self.failure is None:
                await self._repeat(request)
            self._cursor = seq
        facts: dict[str, Any] = {}
        try:
            outcome: bytes | Failed = await self._serve(request, facts)
        except (CallRefused, NotFinite) as error:
            outcome = Failed(str(error), by_client=True)
        except (EngineFailed, OSError) as error:
            log.error("a call has failed", request=request.request_id, reason=str(error))
            outcome = Failed(str(error), by_client=False)
            if request.kind in CHANGING:
                self._loaded.forget()
        except EngineDied as error:
            request.attempts += 1
            if request.attempts < self._around.options.attempts:
                raise
            ends = f"the engine has ended {request.attempts} times during this call ({error})"
            outcome = Failed(ends, by_client=False)
        except EngineDown:
            raise
        except Exception as error:  # the model's later calls do not wait for ever
            log.exception("a call has failed", request=request.request_id)
            outcome = Failed(f"{type(error).__name__}: {error}", by_client=False)
            self._loaded.forget()
        await self._settle(request, outcome, facts)

    async def _settle(
        self, request: Request, outcome: bytes | Failed, facts: dict[str, Any]
    ) -> None:
        seq = request.head["seq"]
        if isinstance(outcome, Failed):
            if request.kind == "forward_backward":
                self._suspect(f"call {seq}, forward_backward, has failed")
            if request.kind == "optim_step" and self._loaded.present:
                await self._drop_gradients()
        self.history.answer(request, outcome, facts)
        self.failure = self.failure or self.history.failure
        self._cursor = seq
        if request.kind == "optim_step" and self.history.is_long:
            await self._save_state()

    def _refuse_next(self, reason: str) -> None:
        """Let the next call fail, as there is no engine for it."""
        served = self.history.served
        if served + 1 not in self.history.unserved:
            return
        request = self.history.after(served)
        log.error("a call has failed", request=request.request_id, reason=reason)
        self.history.answer(request, Failed(reason, by_client=False), {})
        self.failure = self.failure or self.history.failure

    def _suspect(self, reason: str) -> None:
        """Let the next optimizer step fail, for the first such ``reason``."""
        self._doubt = self._doubt or reason

    async def _repeat(self, request: Request) -> None:
        """Have the engine make a call that it has answered before."""
        if request.kind not in ("forward_backward", "optim_step"):
            return
        if request.kind == "optim_step" and not request.succeeded:
            await self._drop_gradients()
        elif not request.succeeded:
            self._suspect(f"call {request.head['seq']}, forward_backward, has failed")
        else:
            assert request.outcome is not None
            try:
                _, blob = await self._run_call(request)
            except (CallRefused, NotFinite) as error:
                reason = f"{request.request_id} cannot be made again: {error}"
                self.failure = Failed(reason, by_client=False)
                log.error("ALARM: a model cannot be rebuilt", reason=reason)
                return
            if zlib.crc32(blob) != request.outcome.head["result"]:
                log.error(
                    "ALARM: a call that was made again gave another answer than before",
                    request=request.request_id,
                )

    async def _run_call(self, request: Request) -> tuple[dict[str, Any], bytes]:
        blob = self.history.blob(request)
        reply = await self._loaded.call("run", blob, kind=request.kind)
        if request.kind == "forward_backward":
            self._accumulates = True
        elif request.kind == "optim_step":
            self._accumulates = False
        return reply

    async def _drop_gradients(self) -> None:
        await self._loaded.call("forget")
        self._doubt = ""
        self._accumulates = False

    # --- kinds of calls

    async def _serve(self, request: Request, facts: dict[str, Any]) -> bytes:
        """Return the result; ``facts`` gets what is recorded beside it."""
        head = request.head
        if "refused" in head:
            raise CallRefused(message=head["refused"])
        if self.failure is not None:
            wrong = f"the model cannot be used: {self.failure.message}"
            raise CallRefused(message=wrong) if self.failure.by_client else EngineFailed(wrong)
        result: dict[str, Any] = {"model_id": self.facts.model_id}
        match request.kind:
            case "forward" | "forward_backward":
                return await self._pass(request, facts)
            case "optim_step":
                return await self._optim_step(request, facts)
            case "load_weights":
                await self._load_weights(head, facts)
                result["path"] = head["path"]
            case "save_weights":
                result = {"path": await self._save_checkpoint(request, "weights")}
            case "save_external":
                result = {"path": await self._save_checkpoint(request, "external_weights")}
            case "save_sampler" if head["number"] is None:
                result = {"path": await self._save_checkpoint(request, "sampler_weights")}
            case "save_sampler":
                sampler_id = await self._around.snapshot(self, request)
                result = {"sampling_session_id": sampler_id}
        return pack(result)

    async def _pass(self, request: Request, facts: dict[str, Any]) -> bytes:
        reply, result = await self._run_call(request)
        values = staleness(
            request.head.get("sampled", ()),
            self.facts.model_id,
            reply["step"],
            partial(self._around.versions_of, self.facts.owner),
        )
        if values:
            facts["staleness"] = values
        facts["metrics"] = {name: reply["metrics"].get(name, 0.0) for name in RECORDED}
        return result

    async def _optim_step(self, request: Request, facts: dict[str, Any]) -> bytes:
        if self._doubt:
            raise CallRefused(
                message=f"{self._doubt}, so the gradients are not those of all data that was sent; "
                f"they are dropped, and the weights are as before: send the data again, and then "
                f"optim_step"
            )
        history = self.history
        facts["sampled"] = self._around.sampled(self.facts.model_id, history.step)
        facts["waiting"] = len(history.unserved) - 1  # without this one
        reply, result = await self._run_call(request)
        facts["step"] = reply["step"]
        facts["metrics"] = reply["metrics"]
        return result

    async def _load_weights(self, head: dict[str, Any], facts: dict[str, Any]) -> None:
        try:
            checkpoint = self._around.checkpoints.get(self.facts.owner, head["path"])
        except LookupError as error:
            raise CallRefused(message=str(error)) from None
        base = checkpoint.info.base
        if base != self.facts.base:
            raise CallRefused(
                message=f"{head['path']} is of {base!r}, the model of {self.facts.base!r}"
            )
        folder = str(checkpoint.folder)
        reply, _ = await self._loaded.call("load", folder=folder, optimizer=head["optimizer"])
        self._accumulates = False
        self._doubt = ""
        state = State(head["seq"], reply["step"], f"state-{head['seq']}")
        await self.save_to(self._folder / state.name, optimizer=True)
        facts["step"] = state.step
        facts["state"] = asdict(state)

    async def _save_checkpoint(self, request: Request, kind: CheckpointKind) -> str:
        head = request.head
        facts = self.facts
        now = time.time()
        info = CheckpointInfo(
            path_of(facts.model_id, kind, check_name(head["name"])),
            facts.model_id,
            kind,
            head["name"],
            now,
            0,
            facts.options,
            facts.base,
            None if head["ttl"] is None else now + head["ttl"],
            head["metadata"],
        )
        checkpoint = Checkpoint(
            facts.owner, request.request_id, self.history.step, self._folder, info
        )
        is_whole = kind == "external_weights" and not facts.options.rank
        save = partial(
            self._loaded.save,
            optimizer=kind == "weights",
            merged=is_whole or self._around.options.merged_checkpoints,
        )
        return await self._around.checkpoints.save(
            checkpoint, overwrite=head["overwrite"], number=head["seq"], write=save
        )

    async def save_to(self, folder: Path, *, optimizer: bool) -> None:
        """Save the model in training to ``folder``, in one step."""
        save = partial(self._loaded.save, optimizer=optimizer, merged=False)
        await write_folder(folder.with_name(f"{folder.name}.partial"), folder, save)

    # --- the model in the engine

    async def _load(self) -> None:
        """Have the engine have the model, as it was at its last state or later."""
        places = self._around.served.places
        await places.take(self, self._loaded.bytes)
        if self._loaded.present:
            return
        state = self.history.state
        try:
            await self._loaded.open(self.facts.options, self.history.state_folder(state))
        except (CallRefused, EngineFailed) as error:
            if self.history.served >= 0 and isinstance(error, EngineFailed):
                raise
            self.failure = Failed(str(error), by_client=isinstance(error, CallRefused))
            return
        self._cursor = state.seq
        self._doubt = ""
        self._accumulates = False
        await places.take(self, self._loaded.bytes)

    async def leave(self) -> None:
        """Unload it from the engine; its next call loads it again."""
        async with self._lock:
            is_clean = not self._accumulates and not self._doubt
            is_last = self._cursor >= self.history.served
            if self._loaded.present and is_clean and is_last and self.history.has_steps:
                with contextlib.suppress(EngineDied, EngineDown):
                    await self._save_state()
            await self._loaded.close()
            self._around.served.places.release(self)

    async def _save_state(self) -> None:
        """Save a state, and remove the calls before it; not where the disk is full."""
        state = State(self._cursor, self.history.step, f"state-{self._cursor}")
        try:
            await self.save_to(self._folder / state.name, optimizer=True)
            await self.history.shorten(state)
        except (EngineFailed, OSError) as error:
            log.error("a state could not be saved", model=self.facts.model_id, reason=str(error))

    async def sweep(self, *, finished: bool) -> None:
        """Forget answers that were read; ``finished``: and the state, as no calls come any more."""
        async with self._lock:
            with contextlib.suppress(OSError):
                await self.history.sweep(finished=finished)

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.wait([self._running])
        await self.history.close()
