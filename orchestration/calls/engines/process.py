"""The process of an engine: ``python -m orchestration.calls.engines.process SETTINGS``.

standard input, a socket ─▶ message ─┬▶ the thread of training ─▶ CalledModel
                                     └▶ asyncio ───────────────▶ Sampler      ─▶ the answer, by its number

It knows neither clients nor journals, and ends when its socket does. Where training is sharded it is
the first rank, and the others make its operations too (ranks.py).
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast

import structlog

from orchestration import logs
from orchestration.calls.engines.channel import BUFFER_BYTES, FAILED, Message, receive, send
from orchestration.calls.engines.encoding import (
    pack,
    unpack_adam,
    unpack_pass,
    unpack_request,
)
from orchestration.calls.engines.parts import Opening, Parts
from orchestration.streams import open_outputs
from pipeline.problems import Fatal, Passing
from stages.calls.interface import (
    CalledModel,
    CallRefused,
    ModelOptions,
    Sampler,
    SamplerFailed,
    ServedBase,
)

log = structlog.get_logger()
T = TypeVar("T")

COPIES = 4  # of the weights of a model in training: with gradients and two moments


class Absent(LookupError):
    """This process does not have the model: it has been started again since."""


class _Engine:
    """Each operation of a message is a method; those that are not coroutines run in the thread of
    training, one after the other."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._sampler = cast(Sampler, parts.sampler)  # ranks without one get no samples
        self._models: dict[str, CalledModel] = {}
        self._names = {""}  # that the sampler has weights of, and the base model's
        self._thread = ThreadPoolExecutor(1, "training")

    async def answer(self, head: dict[str, Any], blob: bytes) -> Message:
        """Return the answer to a message: what it asks for, or the error."""
        operation = getattr(self, f"do_{head['operation']}")
        answer: dict[str, Any]
        answer_blob = b""
        try:
            if inspect.iscoroutinefunction(operation):
                answer, answer_blob = await operation(head, blob)
            else:
                in_thread = partial(operation, head, blob)
                answer, answer_blob = await self._in_thread(in_thread, head, blob)
        except SamplerFailed:
            log.exception("the sampler has failed: the process ends, to be started again")
            os._exit(1)
        except Exception as error:
            answer = {"error": _kind_of(error), "message": str(error)}
            if answer["error"] == FAILED:
                log.exception("an operation has failed", operation=head["operation"])
                answer["message"] = f"{type(error).__name__}: {error}"
        return {"number": head["number"], **answer}, answer_blob

    async def _in_thread(
        self, function: Callable[[], T], head: dict[str, Any], blob: bytes = b""
    ) -> T:
        """Call ``function`` in the thread of training, while other ranks make the operation of the
        message."""
        running = asyncio.get_running_loop().run_in_executor(self._thread, function)
        ranks = self._parts.ranks
        if ranks is None:
            return await running
        ranks.send(head, blob)
        error = ""
        try:
            return await running
        except Exception as raised:
            # files are written by this rank alone: it is in step with others that have saved
            error = "" if head["operation"] == "save" else _kind_of(raised)
            if error == FAILED:
                log.exception("an operation has failed", operation=head["operation"])
            raise
        finally:
            await ranks.agree(head["number"], error)

    def _model(self, head: dict[str, Any]) -> CalledModel:
        try:
            return self._models[head["model"]]
        except KeyError:
            raise Absent from None

    def do_open(self, head: dict[str, Any], _: bytes) -> Message:
        self.do_close(head, b"")
        model = self._parts.new_model(ModelOptions(**head["options"]))
        try:
            if head["folder"]:
                model.load(Path(head["folder"]), optimizer=True)
            weights = model.adapter()
        except BaseException:
            model.close()
            raise
        self._models[head["model"]] = model
        return {
            "step": model.step,
            "bytes": COPIES * sum(each.nbytes for each in weights.values()),
        }, b""

    def do_run(self, head: dict[str, Any], blob: bytes) -> Message:
        model = self._model(head)
        step = model.step
        if head["kind"] == "optim_step":
            metrics = model.optimizer_step(unpack_adam(blob))
            step = model.step
            return {"step": step, "metrics": metrics}, pack({"metrics": metrics})
        data, loss, options = unpack_pass(blob)
        is_forward = head["kind"] == "forward"
        operation = model.forward if is_forward else model.forward_backward
        output = operation(data, loss, options)
        return {"step": step, "metrics": dict(output.metrics)}, pack(output)

    def do_forget(self, head: dict[str, Any], _: bytes) -> Message:
        self._model(head).forget_gradients()
        return {}, b""

    def do_load(self, head: dict[str, Any], _: bytes) -> Message:
        model = self._model(head)
        model.load(Path(head["folder"]), optimizer=head["optimizer"])
        return {"step": model.step}, b""

    def do_save(self, head: dict[str, Any], _: bytes) -> Message:
        model = self._model(head)
        model.save(Path(head["folder"]), optimizer=head["optimizer"], merged=head["merged"])
        return {"step": model.step}, b""

    def do_close(self, head: dict[str, Any], _: bytes) -> Message:
        model = self._models.pop(head["model"], None)
        if model is not None:
            model.close()
        return {}, b""

    async def do_put(self, head: dict[str, Any], _: bytes) -> Message:
        options = ModelOptions(**head["options"])
        weights = await self._in_thread(
            lambda: self._weights(head, options), {**head, "operation": "weights"}
        )
        await self._sampler.put(head["name"], options, weights, head["step"])
        self._names.add(head["name"])
        return {}, b""

    def do_weights(self, head: dict[str, Any], _: bytes) -> Message:
        """Have a part in what the first rank puts."""
        self._weights(head, ModelOptions(**head["options"]))
        return {}, b""

    def _weights(self, head: dict[str, Any], options: ModelOptions) -> Mapping[str, Any]:
        """Return the weights of a model in training, or of one that was saved."""
        if not head["folder"]:
            return self._model(head).adapter()
        model = self._parts.new_model(options)
        try:
            model.load(Path(head["folder"]), optimizer=False)
            return model.adapter()
        finally:
            model.close()

    async def do_remove(self, head: dict[str, Any], _: bytes) -> Message:
        if head["name"] in self._names:
            self._names.remove(head["name"])
            await self._sampler.remove(head["name"])
        return {}, b""

    async def do_pause(self, head: dict[str, Any], _: bytes) -> Message:
        await self._sampler.pause()
        return {}, b""

    async def do_resume(self, head: dict[str, Any], _: bytes) -> Message:
        await self._sampler.resume()
        return {}, b""

    async def do_sample(self, head: dict[str, Any], blob: bytes) -> Message:
        if head["name"] not in self._names:
            raise Absent
        output = await self._sampler.sample(head["name"], unpack_request(blob), head["seed"])
        versions = [each.versions for each in output.sequences]
        return {"versions": versions}, pack(output)


def _kind_of(error: Exception) -> str:
    match error:
        case Absent():
            return "absent"
        case CallRefused():
            return "refused"
        case FloatingPointError():
            return "not finite"
    return FAILED


def _may_pass(error: Exception) -> bool:
    """Return whether another start may succeed after ``error``: memory, devices and disks come
    back; files, options and code stay as they are."""
    if isinstance(error, Fatal | FileNotFoundError | NotImplementedError):
        return False
    if isinstance(error, OSError):
        return error.errno is not None  # of the system, not of a library that reads a model
    return isinstance(error, Passing | MemoryError | RuntimeError)


async def _serve(settings: Mapping[str, Any]) -> None:
    connection = socket.socket(fileno=os.dup(0))
    reader, writer = await asyncio.open_connection(sock=connection, limit=BUFFER_BYTES)
    module, _, name = settings["entry"].partition(":")
    opening: Opening = getattr(import_module(module), name)
    try:
        parts = await opening(ServedBase(**settings["base"]), settings["options"])
    except Exception as error:
        log.exception("the engine cannot start")
        reason = f"{type(error).__name__}: {error}"
        send(writer, {"number": 0, "failed": reason, "is_lasting": not _may_pass(error)})
        await writer.drain()
        os._exit(1)
    engine = _Engine(parts)
    send(writer, {"number": 0})
    answering = set[asyncio.Task[None]]()

    async def answer(head: dict[str, Any], blob: bytes) -> None:
        send(writer, *await engine.answer(head, blob))
        await writer.drain()

    try:
        while (message := await receive(reader)) is not None:
            task = asyncio.create_task(answer(*message))
            answering.add(task)
            task.add_done_callback(answering.discard)
    finally:
        # what is computed now is nobody's any more
        os._exit(0)


if __name__ == "__main__":
    open_outputs()
    logs.configure()
    asyncio.run(_serve(json.loads(sys.argv[1])))
