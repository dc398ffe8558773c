"""The other ranks of an engine whose training is sharded: processes of process.py, with no sampler.

server ─▶ engine, rank 0 ─┬▶ the thread of training ───────────┬▶ the ranks meet in collectives
                          └▶ rank 1 … : the same message ──────┘  ─▶ all answer alike, or all end

A rank gets the operations of training in the order in which the first one makes them. Where one ends,
waits too long or fails otherwise than the others, the engine's process ends, and with it all of them:
the server starts it again.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NoReturn

import structlog
from torch.distributed import Store

from orchestration.calls.engines.channel import BUFFER_BYTES, FAILED, receive, send
from orchestration.processes.environment import take
from orchestration.processes.forkserver import Launch
from orchestration.processes.handles import Process
from orchestration.processes.starter import spawn
from pipeline.node import LOOPBACK
from stages.calls.interface import ServedBase
from stages.training.rendezvous import RanksStore, Rendezvous, join_rendezvous

log = structlog.get_logger()

START_SECONDS = 600.0  # for which ranks wait for one another at the start
SECRET = "ASYNCDOCK_RANKS_SECRET"  # by which ranks prove who they are


class Ranks:
    """Those from 1 to ``world`` - 1. ``timeout``: seconds for which the first one waits for what the
    others answer, when it has answered."""

    def __init__(self, world: int, timeout: float) -> None:
        self.world = world
        self._timeout = timeout
        self._secret = secrets.token_hex(32)
        self._rendezvous = Rendezvous(LOOPBACK, self._secret.encode(), timeout=START_SECONDS)
        self.store = self._rendezvous.store
        self._processes: list[Process] = []
        self._writers: list[asyncio.StreamWriter] = []
        self._reading: list[asyncio.Task[None]] = []
        # by the message's number: the error of each rank's answer, "" for none
        self._answers: dict[int, list[asyncio.Future[str]]] = {}

    async def start(self, entry: str, base: ServedBase, options: Mapping[str, Any]) -> None:
        """Start them. ``entry`` opens their parts with ``options``, ``rank`` and ``port``. They end
        with the thread that calls this."""
        for rank in range(1, self.world):
            of_rank = {"rank": rank, "port": self._rendezvous.address[1]}
            settings = {"base": asdict(base), "entry": entry, "options": {**options, **of_rank}}
            launch = Launch(
                "orchestration.calls.engines.process:main",
                [json.dumps(settings)],
                {**os.environ, SECRET: self._secret},
                os.getcwd(),
                "/dev/stdout",
                f"rank {rank} of {base.name}",
            )
            first_end, rank_end = socket.socketpair()
            with rank_end:
                self._processes.append(spawn(launch, rank_end.fileno()))
            reader, writer = await asyncio.open_connection(sock=first_end, limit=BUFFER_BYTES)
            self._writers.append(writer)
            self._reading.append(asyncio.create_task(self._read(rank, reader)))

    def send(self, head: Mapping[str, Any], blob: bytes) -> None:
        """Have all ranks make the operation of a message."""
        loop = asyncio.get_running_loop()
        self._answers[head["number"]] = [loop.create_future() for _ in self._writers]
        for writer in self._writers:
            send(writer, dict(head), blob)

    async def agree(self, number: int, error: str) -> None:
        """Wait until all ranks have answered the message ``number``. Ends all of them unless their
        ``error`` is this one, and none that leaves them out of step."""
        if error == FAILED:
            self._end("the first rank has failed")
        try:
            async with asyncio.timeout(self._timeout):
                errors = await asyncio.gather(*self._answers[number])
        except TimeoutError:
            self._end(f"a rank has not answered for {self._timeout:g} s")
        del self._answers[number]
        if any(other != error for other in errors):
            self._end(f"ranks have answered {errors}, and the first one {error!r}")

    async def _read(self, rank: int, reader: asyncio.StreamReader) -> None:
        while (message := await receive(reader)) is not None:
            head, _ = message
            error = head.get("error", "")
            if error == FAILED:
                self._end(f"rank {rank}: {head['message']}")
            if head["number"] in self._answers:
                self._answers[head["number"]][rank - 1].set_result(error)
        self._end(f"rank {rank} has ended")

    def _end(self, reason: str) -> NoReturn:
        """End this process, and with it all ranks."""
        log.error("the ranks of an engine end", reason=reason)
        os._exit(1)


def joined_store(port: int) -> RanksStore:
    """Return, in a rank's process, the store of the first one. Raises OSError."""
    return join_rendezvous((LOOPBACK, port), take(SECRET).encode(), timeout=START_SECONDS)


def wait_for_all(store: Store, rank: int, world: int) -> None:
    """Wait until all ranks are here: imports may take some of them longer than a collective call
    may wait."""
    store.set(f"here {rank}", "")
    store.wait([f"here {each}" for each in range(world)])
