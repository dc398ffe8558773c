"""Hosts on the nodes of a Ray cluster, one a node, and the workers' places on them.

host_of(worker) ─▶ no living host has it ─▶ ask the driver for nodes ─▶ place all such workers ─▶ start a host a node
                                              └ no room: wait for nodes, and report what is lacking
driver: a host has ended, or it has ended itself with all hosts ─▶ lost: their workers' lives end, and are placed again
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import structlog

from orchestration.cluster.placement import Node, bundles, describe_lack, needs, place
from orchestration.launch.launchers import Unplaceable
from orchestration.processes.environment import importable
from orchestration.recipe.devices import Worker
from orchestration.recipe.schema import Recipe
from orchestration.recipe.worker_kinds import remote_workers
from orchestration.state.documents import HOSTS
from pipeline.index.client import Index
from pipeline.index.embedded import die_with_parent
from pipeline.node import LOOPBACK, is_loopback, is_own
from stages.device_names import RESOURCES

log = structlog.get_logger()

ASK_SECONDS = 2.0  # between two looks for nodes with room
CONNECT_SECONDS = 60.0
# in which a cluster that has just been started gets all of its nodes, with their resources
JOIN_SECONDS = 10.0
END_SECONDS = 15.0  # for the driver to end the hosts


class RayHosts:
    """The places of the workers of one run; see :class:`orchestration.launch.launchers.Hosts`.

    Connect, then :meth:`begin`.
    """

    def __init__(self, recipe: Recipe, out: Path) -> None:
        self._recipe = recipe
        self._out = out
        self._join = ""
        self._first: dict[str, Any] | None = None  # the driver's answer, until it is used
        self._driver: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._placed: dict[Worker, str] = {}
        # each that was started → why it has ended, "" while it has not
        self._hosts: dict[str, str] = {}
        self._placing = asyncio.Lock()
        self._lack = ""
        self._address: str | None = None
        # once it is found, where it is: another driver goes to the same one
        self._cluster = recipe.launch.address
        self._index: Index
        self._began: float  # in monotonic seconds

    async def connect(self) -> str:
        """Connect to the cluster.

        Returns the address by which its nodes reach this machine; loopback where there is no
        cluster, which :meth:`host_of` reports.
        """
        if self._address is None:
            self._first = await self._answer()
            self._address = str(self._first.get("address", LOOPBACK))
        return self._address

    def begin(self, index: Index, join: str) -> None:
        """Take workers from now on. ``join``: the index's URL for the nodes."""
        self._index = index
        self._join = join
        self._began = time.monotonic()

    async def host_of(self, worker: Worker) -> str:
        """Wait until a host has a place for ``worker``, and return its name.

        Raises Unplaceable when no cluster answers, or it could not hold the run if all of it were
        free, also a while after the beginning: only before the first host is started.
        """
        while True:
            async with self._placing:
                if not self._has_place(worker):
                    await self._place()
                if self._has_place(worker):
                    return self._placed[worker]
            await asyncio.sleep(ASK_SECONDS)  # Ray does not announce nodes that join

    def rescale(self, recipe: Recipe) -> None:
        """Place the workers of ``recipe`` from now on: other rollout workers than before."""
        self._recipe = recipe

    def lost(self, host: str) -> str:
        return self._hosts.get(host, "")

    def _has_place(self, worker: Worker) -> bool:
        return worker in self._placed and not self._hosts[self._placed[worker]]

    async def close(self) -> None:
        """End all hosts."""
        if self._driver is None:
            return
        assert self._driver.stdin is not None
        self._driver.stdin.close()
        try:
            await asyncio.wait_for(self._driver.wait(), END_SECONDS)
        except TimeoutError:
            self._driver.kill()
            await self._driver.wait()
        if self._reading is not None:
            await self._reading

    async def _place(self) -> None:
        """Start hosts for all workers that have no place on a living one, as far as there is
        room."""
        recipe = self._recipe
        node_records = await self._ask()
        nodes = [Node(name, node["free"]) for name, node in node_records.items()]
        devices = [
            kind
            for kind, name in RESOURCES.items()
            if any(node["total"].get(name) for node in node_records.values())
        ]
        missing = sorted(worker for worker in remote_workers(recipe) if not self._has_place(worker))
        placed = place(recipe, missing, nodes, devices)
        if lacking := [worker for worker in missing if worker not in placed]:
            lack = describe_lack(recipe, lacking, nodes, devices)
            empty = [Node(name, node["total"]) for name, node in node_records.items()]
            is_too_small = not self._hosts and len(place(recipe, missing, empty, devices)) < len(
                missing
            )
            if is_too_small and time.monotonic() - self._began >= JOIN_SECONDS:
                raise Unplaceable(
                    f"launch.address = {recipe.launch.address!r}: {lack}; add nodes, "
                    f"or ask for less"
                )
            if is_too_small:
                return
            if lack != self._lack:
                log.warning("waiting for nodes", reason=lack)
            self._lack = lack
        if not placed:
            return
        hosts = {node: f"host-{uuid.uuid4().hex[:6]}" for node in placed.values()}
        folder = Path(tempfile.gettempdir()) / f"asyncdock-host-{self._index.run}"
        run = {
            "url": self._join,
            "run": self._index.run,
            "folder": str(folder),
            "begun_in": os.getcwd(),
        }
        reserved = bundles(recipe, placed, devices)
        start = [
            {"name": name, "node": node, "bundle": reserved[node], "run": {**run, "name": name}}
            for node, name in hosts.items()
        ]
        self._hosts |= dict.fromkeys(hosts.values(), "")
        self._placed |= {worker: hosts[node] for worker, node in placed.items()}
        await self._send({"do": "start", "hosts": start})

    async def _ask(self) -> dict[str, Any]:
        """Return the nodes of the cluster, from a driver that is started where there is none; none
        while it cannot be reached. Raises Unplaceable before the first host, where there is no
        cluster, or its nodes cannot reach the index."""
        answer = self._first or await self._answer()
        self._first = None
        nodes: dict[str, Any] = answer.get("nodes", {})
        if self._hosts:
            return nodes
        if "failed" in answer:
            named = "launch.address" in answer["failed"]
            where = "" if named else f"launch.address = {self._recipe.launch.address!r}: "
            raise Unplaceable(f"{where}{answer['failed']}")
        host = urlsplit(self._join).hostname or ""
        elsewhere = [node["address"] for node in nodes.values() if not is_own(node["address"])]
        if elsewhere and is_loopback(host):
            key = "pipeline.serve" if self._recipe.index_address else "pipeline.index"
            problem = (
                f"is reached from this machine alone, and the cluster has nodes at "
                f"{', '.join(elsewhere)}"
            )
            raise Unplaceable(
                f"{key} = {host!r}: {problem}; leave it out, or give an address that they reach"
            )
        return nodes

    async def _answer(self) -> dict[str, Any]:
        """Return the driver's answer about its nodes: what it says, or "failed" with a reason."""
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                if self._driver is None:
                    await self._start_driver()
                await self._send({"do": "nodes"})
                answer = await self._answers.get()
                self._cluster = answer.get("cluster", self._cluster)
                return answer
        except TimeoutError:
            log_file = self._out / "logs" / "ray.log"
            return {"failed": f"Ray does not answer within {CONNECT_SECONDS:.0f} s; see {log_file}"}

    async def _start_driver(self) -> None:
        self._answers = asyncio.Queue()
        cpus = sum(
            needs(self._recipe, worker, ())["CPU"] for worker in remote_workers(self._recipe)
        )
        logs = self._out / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        with (logs / "ray.log").open("ab") as file:
            self._driver = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "orchestration.cluster.ray_cluster"),
                *(self._cluster, str(cpus)),
                env=importable(os.environ),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=file,
                limit=1 << 24,
                start_new_session=True,  # it does not get Ctrl-C
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        self._reading = asyncio.create_task(self._read(self._driver))

    async def _send(self, request: dict[str, Any]) -> None:
        if self._driver is not None and self._driver.stdin is not None:
            with contextlib.suppress(ConnectionError):  # it has ended, which is read next
                self._driver.stdin.write(json.dumps(request).encode() + b"\n")
                await self._driver.stdin.drain()

    async def _read(self, driver: asyncio.subprocess.Process) -> None:
        assert driver.stdout is not None
        async for line in driver.stdout:
            message = json.loads(line)
            if "ended" in message:
                await self._lose([message["ended"]], message["reason"])
            else:
                self._answers.put_nowait(message)
        await driver.wait()
        self._driver = None
        self._answers.put_nowait(
            {"failed": f"its driver has ended; see {self._out / 'logs' / 'ray.log'}"}
        )
        if self._hosts:
            await self._lose(self._hosts, "the run's Ray driver has ended")

    async def _lose(self, hosts: Iterable[str], reason: str) -> None:
        for host in [name for name in hosts if not self._hosts[name]]:
            if reason:
                log.warning("host has ended", host=host, reason=reason)
            self._hosts[host] = reason or "it has ended"
        await self._index.wake(HOSTS)
