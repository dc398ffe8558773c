"""``asyncdock tinker`` under messages that no client should send, beside a client that must not
notice.

    attackers: two tenants, each with several connections ─▶ benchmarks/service/tinker_messages.py ─┐
    a tenant that trains, samples and saves ─────────────────────────────────────────────────┴▶ server ─▶ engine
                                 └ its answers: equal to those of a server that has no other client

    python -m benchmarks.service.tinker_fuzz --messages 100000 [--seed 1] [--json FILE]

A fault is: a 5xx, a failure that is the server's, a refusal that names no field and no thing, an
answer that has what another tenant has written, an id of another tenant that is taken, an answer of
the working tenant that differs, a traceback in a log, a file outside of the server's folder, an
engine that was started again, memory that grows without end, and a server that does not start from
the folder that is there at the end, or has another model there. Run it from the repository.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from api.tinker.messages import MESSAGES
from benchmarks import harness
from benchmarks.robustness.api_fuzz import ROOT
from benchmarks.service.tinker import keys
from benchmarks.service.tinker_messages import (
    BASE,
    FINISH,
    JSON,
    Message,
    Messages,
    Things,
    models,
)
from benchmarks.service.tinker_tenant import Tenant, Work
from pipeline.first_of import cancel_all

TENANTS = 3  # the first one works
RENEWED = 150  # messages after which an attacker begins with another model
SHOWN = 20  # faults
GROWTH = 2**30  # bytes that a process may have more than when a tenth of the messages was sent
RETRIEVED = 64  # answers that a tenant waits for at once
ENGINE = "orchestration.calls.engines.process"
TRACES = ("Traceback (most recent call last)", '"level": "error"', '"level": "critical"')
# of a refusal's text: a field of a message, or the kind of thing that is not there
FIELDS = {"body", "path", "query", "session", "model", "sampler", "request", "checkpoint", "rank"}
FIELDS |= {"sequence", "archive", "call", "optim_step"}
FIELDS |= {name for kind in MESSAGES.values() for name in kind.DESCRIPTOR.fields_by_name}
FIELDS |= {name for model in models() for name in model.model_fields}
FIELDS -= {"after", "fields", "k", "key", "length", "name", "number", "text", "type", "value"}
EXPLAINED = (401, 403, 405, 408, 429)  # by what is wrong, of no field
NAMED = re.compile(r"\b(" + "|".join(sorted(FIELDS)) + r")\b")


@dataclass
class Outcome:
    """What a fuzzed server has done. ``faults``: by kind; ``shown``: the first ones."""

    messages: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    changes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    shown: list[str] = field(default_factory=list)
    memory: dict[str, list[int]] = field(default_factory=dict)

    def fault(self, kind: str, *facts: object) -> None:
        self.faults[kind] += 1
        if self.faults[kind] <= 3 and len(self.shown) < SHOWN:
            self.shown.append(f"{kind}: {' | '.join(str(fact)[:700] for fact in facts)}")
            print(self.shown[-1], flush=True)


class Server:
    """``asyncdock tinker`` of ``folder``/service; all that it writes is to be below that."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "service"
        self.log = folder / "server.log"
        for name in ("working", "user", "temporary"):
            (folder / name).mkdir(exist_ok=True)

    @contextmanager
    def started(self) -> Iterator[str]:
        """Yield its URL, while it runs."""
        command = [
            *(sys.executable, "-P", "-m", "api.cli.main", "tinker", "--model", BASE),
            *("--listen", "127.0.0.1:0", "--data", str(self.data), "--device", "cpu"),
            *("--threads", "1", "--adapters-alone"),
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HOME": str(self.folder / "user"),
            "TMPDIR": str(self.folder / "temporary"),
        }
        with self.log.open("a") as log:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=self.folder / "working",
                env=environment,
            )
        assert process.stdout is not None
        try:
            process.stdout.readline()
            url = process.stdout.readline().strip().partition("=")[2]
            if not url:
                raise RuntimeError(f"the server did not start: {self.log.read_text()}")
            self.process = psutil.Process(process.pid)
            yield url
        finally:
            process.terminate()
            process.wait(60)
            process.stdout.close()

    def processes(self) -> dict[str, psutil.Process]:
        """Return the server's process, and those of its engines."""
        processes = {"server": self.process}
        for child in self.process.children(recursive=True):
            if ENGINE in " ".join(child.cmdline()):
                processes[f"engine {child.pid}"] = child
        return processes

    def files_outside(self) -> set[str]:
        own = (self.data, self.log)
        return {
            str(path)
            for path in self.folder.rglob("*")
            if not path.is_relative_to(own[0]) and path != own[1]
        }

    def traces(self) -> list[str]:
        """Return lines of its logs that no message may cause."""
        logs = [self.log, *self.data.glob("calls/*.log")]
        lines = [line for log in logs for line in log.read_text().splitlines()]
        return [line for line in lines if any(trace in line for trace in TRACES)]


class Attacker:
    """One connection of a tenant, with a session of its own."""

    def __init__(
        self, tenant: Tenant, foreign: Sequence[str], outcome: Outcome, room: asyncio.Semaphore
    ) -> None:
        self.things = Things()
        self._tenant = tenant
        self._foreign = foreign
        self._outcome = outcome
        self._room = room
        self._models = 0
        self._turn = 3
        self._reading = set[asyncio.Task[None]]()

    async def open(self) -> None:
        self.things = await self._tenant.open()
        self._models = 1
        self._turn = 3

    async def send(self, messages: Messages, number: int) -> None:
        """Send the next message, and judge the answer. ``number``: of this attacker's messages."""
        if number % RENEWED == RENEWED - 1:
            await self._renew()
        message = messages.message(self.things, self._turn)
        outcome = self._outcome
        outcome.messages += 1
        outcome.changes[message.change] += 1
        try:
            answer = await self._tenant.send(
                message.operation.method, message.path, message.headers, message.body
            )
        except (aiohttp.ClientError, ValueError) as error:
            outcome.fault("no answer", error, message)
            return
        outcome.statuses[str(answer[0])] += 1
        judge(outcome, message, *answer, self._foreign)
        if answer[0] == 200 and b'"request_id"' in answer[2]:
            await self._follow(json.loads(answer[2]), is_stolen=message.is_stolen)
        if answer[0] == 200 and b'"create_session"' in answer[2]:
            session = json.loads(answer[2])["session_id"]
            await self._tenant.post(f"sessions/{session}/finish")
        if answer[0] == 200 and message.operation.path == FINISH:
            await self.open()

    async def _renew(self) -> None:
        """Go on with another model; the last one's calls may be in disorder. Its answers come first:
        the engine has room for one model of each attacker."""
        await self.close()
        if self._models % 20 == 0:
            await self._tenant.post(f"sessions/{self.things.session}/finish")
            await self.open()
        else:
            await self._tenant.post("unload_model", model_id=self.things.model)
            self.things = await self._tenant.model(self.things, self._models)
            self._models += 1
            self._turn = 3

    async def _follow(self, call: Mapping[str, Any], *, is_stolen: bool) -> None:
        request_id = call["request_id"]
        if request_id == f"{self.things.model}:{self._turn}":
            self._turn += 1
        await self._room.acquire()
        task = asyncio.create_task(self._read(request_id, is_stolen))
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)

    async def _read(self, request_id: str, is_stolen: bool) -> None:
        try:
            answer = await self._tenant.retrieve(request_id)
        finally:
            self._room.release()
        self._outcome.statuses[f"future {answer[0]}"] += 1
        judge_result(self._outcome, request_id, *answer, self._foreign, is_stolen=is_stolen)

    async def close(self) -> None:
        while self._reading:
            await asyncio.wait([*self._reading])


def judge(
    outcome: Outcome,
    message: Message,
    status: int,
    media_type: str,
    content: bytes,
    foreign: Sequence[str],
) -> None:
    """Count the faults of an answer to ``message``. ``foreign``: secrets of the other tenants."""
    sent = (f"{message.operation.method} {message.path}", message.change, message.body)
    facts = (status, content.decode(errors="replace"), *sent)
    if status >= 500:
        outcome.fault("an error of the server", *facts)
    if any(secret.encode() in content for secret in foreign):
        outcome.fault("what another tenant wrote", *facts)
    if message.is_stolen and status < 400 and b'"request_id"' not in content:
        outcome.fault("another tenant's thing", *facts)
    if b"root:" in content:
        outcome.fault("a file of the machine", *facts)
    if 400 <= status < 500:
        try:
            problem = json.loads(content, parse_constant=_refuse_constant)
            text = f"{problem['detail']} {problem.get('field', '')}"
        except (ValueError, LookupError):
            outcome.fault("no problem", *facts)
            return
        if status not in EXPLAINED and not NAMED.search(text) and "There is nothing" not in text:
            outcome.fault("names no field", *facts)


def judge_result(
    outcome: Outcome,
    request_id: str,
    status: int,
    media_type: str,
    content: bytes,
    foreign: Sequence[str],
    *,
    is_stolen: bool,
) -> None:
    """Count the faults of the answer to a call. ``is_stolen``: it can only fail."""
    facts = (request_id, status, content.decode(errors="replace"))
    if status not in (200, 404, 410):
        outcome.fault("a result without an answer", *facts)
    if any(secret.encode() in content for secret in foreign):
        outcome.fault("what another tenant wrote", *facts)
    if is_stolen and status == 200 and b'"error"' not in content:
        outcome.fault("another tenant's thing", *facts)
    if media_type == JSON and status == 200:
        answer = json.loads(content, parse_constant=_refuse_constant)
        if answer.get("category") == "server":
            outcome.fault("a failure of the server", *facts)
        elif "error" in answer and not NAMED.search(answer["error"]):
            outcome.fault("names no field", *facts)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


@asynccontextmanager
async def clients(url: str, made: Sequence[str]) -> AsyncIterator[list[Tenant]]:
    """Yield a client of the server for each of the keys that were ``made``."""
    timeout = aiohttp.ClientTimeout(total=120)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        yield [Tenant(session, url, key) for key in made]


async def undisturbed(folder: Path, steps: int) -> list[bytes]:
    """Return the answers to the work on a server of its own."""
    server = Server(folder)
    with server.started() as url:
        made = await asyncio.to_thread(keys, server.data, 1)
        async with clients(url, made) as (tenant,):
            work = Work()
            await work.open(tenant)
            for number in range(steps):
                await work.step(number)
            await work.end()
            return work.answers


async def fuzz(folder: Path, messages: int, seed: int, connections: int, steps: int) -> Outcome:
    """Send ``messages`` by ``connections`` of each hostile tenant, while the first tenant makes
    ``steps``. Returns what the server has done."""
    for name in ("alone", "fuzzed"):
        (folder / name).mkdir()
    expected = await undisturbed(folder / "alone", steps)
    server = Server(folder / "fuzzed")
    outcome = Outcome()
    work = Work()
    with server.started() as url:
        made = await asyncio.to_thread(keys, server.data, TENANTS)
        files = server.files_outside()
        engines = server.processes().keys()
        async with clients(url, made) as (tenant, *hostile):
            await work.open(tenant)
            watching = asyncio.create_task(_watch(server, outcome, messages))
            attack = asyncio.create_task(
                _attack(tenant, work.things, hostile, outcome, messages, seed, connections)
            )
            try:
                for number in range(steps):
                    while outcome.messages < messages * number / steps and not attack.done():
                        await asyncio.wait([attack], timeout=0.01)
                    await work.step(number)
                await attack
                await work.end()
            finally:
                await cancel_all(watching, attack)
        if server.processes().keys() != engines:
            outcome.fault("an engine was started again", engines, server.processes().keys())
    if written := server.files_outside() - files:
        outcome.fault("a file outside", sorted(written))
    with server.started() as url:
        async with clients(url, made) as (tenant, *_):
            await work.go_on(tenant)
    _compare(outcome, [*expected, expected[-1]], work.answers)
    for line in server.traces():
        outcome.fault("in a log", line)
    return outcome


async def _attack(
    working: Tenant,
    things: Things,
    hostile: Sequence[Tenant],
    outcome: Outcome,
    messages: int,
    seed: int,
    connections: int,
) -> None:
    """Send ``messages`` as each of the ``hostile`` tenants, who know the ``things`` of the working
    one and of each other."""
    attackers = dict[str, list[Attacker]]()
    for tenant in hostile:
        foreign = [each.secret for each in (working, *hostile) if each is not tenant]
        room = asyncio.Semaphore(RETRIEVED)
        attackers[tenant.secret] = [
            Attacker(tenant, foreign, outcome, room) for _ in range(connections)
        ]
    everyone = [attacker for each in attackers.values() for attacker in each]
    await asyncio.gather(*(attacker.open() for attacker in everyone))

    async def connection(number: int, tenant: Tenant, attacker: Attacker) -> None:
        foreign = [
            other.things
            for secret, others in attackers.items()
            for other in others
            if secret != tenant.secret
        ]
        generator = random.Random(f"{seed}-{number}")
        made = Messages(generator, [things, *foreign], "/outside-of-everything")
        sent = 0
        while outcome.messages < messages:
            await attacker.send(made, sent)
            sent += 1
        await attacker.close()

    async with asyncio.TaskGroup() as group:
        for number, attacker in enumerate(everyone):
            group.create_task(connection(number, hostile[number // connections], attacker))


async def _watch(server: Server, outcome: Outcome, messages: int) -> None:
    """Read the memory of the server's processes, from a tenth of the messages on."""
    processes = server.processes()
    began = time.monotonic()
    while True:
        await asyncio.sleep(1)
        if outcome.messages >= messages / 10:
            for name, process in processes.items():
                if process.is_running():
                    outcome.memory.setdefault(name, []).append(process.memory_info().rss)
        if round(time.monotonic() - began) % 30 == 0:
            print(f"{outcome.messages} messages, {outcome.faults.total()} faults", flush=True)


def _compare(outcome: Outcome, expected: Sequence[bytes], answers: Sequence[bytes]) -> None:
    if len(expected) != len(answers):
        outcome.fault("the working tenant has other answers", len(expected), len(answers))
    for number, (one, other) in enumerate(zip(expected, answers, strict=False)):
        if one != other:
            outcome.fault("the working tenant has other answers", number, one, other)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--connections", type=int, default=6, help="of each hostile tenant")
    parser.add_argument("--steps", type=int, default=100, help="of the tenant that works")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="adk-") as folder:
        outcome = asyncio.run(
            fuzz(
                *(Path(folder), options.messages, options.seed),
                *(options.connections, options.steps),
            )
        )
    for name, sizes in outcome.memory.items():
        if max(sizes) > sizes[0] + GROWTH:
            outcome.fault("memory", name, sizes[0], max(sizes))
    print(f"{outcome.messages} messages in {time.monotonic() - began:.0f} s")
    print("\n| change | messages |\n|---|---|")
    for name, count in sorted(outcome.changes.items()):
        print(f"| {name} | {count:,} |")
    print("\n| answer | count |\n|---|---|")
    for name, count in sorted(outcome.statuses.items()):
        print(f"| {name} | {count:,} |")
    print("\n| process | MiB after a tenth | most MiB | MiB at the end |\n|---|---|---|---|")
    for name, sizes in outcome.memory.items():
        first, most, last = (size / 2**20 for size in (sizes[0], max(sizes), sizes[-1]))
        print(f"| {name} | {first:,.0f} | {most:,.0f} | {last:,.0f} |")
    print(f"\n{outcome.faults.total()} faults")
    for name, count in outcome.faults.items():
        print(f"  {count} × {name}")
    if options.json:
        options.json.write(vars(outcome))
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
