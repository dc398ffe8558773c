"""Kills random processes, machines and cables of runs on three machines at random moments, and
checks what runs promise.

machine 0: asyncdock run ─▶ flow, rollout-0, update      machines 1, 2: asyncdock host ─▶ rollout-1, rollout-2
     each is a network, a host name, shared memory and process numbers of its own; the index is on a fourth one
kill -9 of a process │ of a machine with all in it │ SIGSTOP of a process │ a cable out, and in again │ of the index
at the end of a run ─▶ each step and each group once, in order · none past the bound · the ledger adds up
                       no response made again from before its last parked token, unless its machine was lost
                       at η = 0, one remote replica: the weights are those of a run that nothing has disturbed

A machine that was killed comes back with a new host; a killed head is resumed. It needs root, ip
and tc.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import hashlib
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.flow.scale import Infeasible, Network, index_server, start_index
from benchmarks.robustness.kill_soak import RECIPE, Broken, check_metrics, has_finished, tail
from orchestration.history.events_file import METRICS, read_metrics
from orchestration.state.paths import WHERE
from orchestration.supervise.waiting import waiting_chain
from pipeline.index.client import Index
from pipeline.index.embedded import EmbeddedIndex
from tests.machines import Machines

STEPS = 80
BUDGET = 4
HOSTS = (1, 2)
LONGEST_CUT = 12.0  # s; a host is lost after 10
LATE = 1.0  # s; a killed process on a busy machine may still write a line
SETTINGS = (
    f"train.steps={STEPS}",
    "train.mock.time_scale=0.4",
    "checkpoint.every=5",
    "rollout.engine=benchmarks.robustness.begun_engine:engine",
    "rollout.mock={}",
    "rollout.options.time_scale=0.2",
    "pipeline.serve=0.0.0.0",
    "sync.transport=network",
    "launch.max_restarts=10000",
    "launch.hang_timeout=5",
    "launch.startup_timeout=60",
)


@dataclass
class ClusterSoak:
    """Runs below ``home`` on ``machines``, with up to ``most`` kills each, ``gap`` seconds apart on
    average."""

    home: Path
    machines: Machines
    network: Network
    server: EmbeddedIndex
    random: random.Random
    most: int
    gap: float
    deadline: float = 1200.0  # s, for a run
    kills: collections.Counter[str] = field(default_factory=collections.Counter)
    # how often a response was continued from tokens that it had been continued from before
    again: int = 0
    _drawn: str = ""
    # when a machine was killed or cut off, in s since 1970
    _losses: list[float] = field(default_factory=list)
    _hosts: dict[int, subprocess.Popen[str]] = field(default_factory=dict)
    _down: dict[int, float] = field(default_factory=dict)  # machine → when its cable is put back

    def run_once(self, number: int, *, exact: bool, kills: int) -> str:
        """One run to its end; returns the hash of its last weights.

        ``exact``: η = 0 with one replica. Raises Broken.
        """
        out = self.home / f"run{number}"
        recipe = self.home / "soak.toml"
        workers, remote, bound = (1, 1, 0) if exact else (3, 2, 2)
        log = self.home / f"run{number}.log"
        begun = self.home / f"run{number}.begun"
        own = (
            *SETTINGS,
            f"pipeline.index={self.machines.url}",
            f"pipeline.staleness={bound}",
            f"rollout.workers={workers}",
            f"rollout.budget={0 if exact else BUDGET}",  # at η = 0 responses are not cut
            f"launch.remote_rollouts={remote}",
            f"rollout.options.log={begun}",
        )
        recipe.write_text(RECIPE)
        command = ["run", str(recipe), "--out", str(out), *(f"--set={setting}" for setting in own)]
        began = time.monotonic()
        self._losses.clear()
        self._drawn = ""
        left = kills
        run = ""
        due = began + self._next()
        while True:
            head = self._start(0, log, *command, "--plain")
            self._losses.append(time.time())  # what it makes is from the newest checkpoint on
            killed = False
            while head.poll() is None:
                now = time.monotonic()
                if now - began > self.deadline:
                    raise Broken(
                        f"run {number} has not ended in {self.deadline:.0f} "
                        f"s\n{tail(log)}\n{self._why(run)}"
                    )
                run = self._keep_hosts(out, run, HOSTS[:remote])
                for machine in [machine for machine, back in self._down.items() if now >= back]:
                    self._plug(machine)
                if left and now >= due and (what := self._kill(head, remote)):
                    left = left - 1
                    due = now + self._next()
                    killed = killed or what == "head"
                time.sleep(0.05)
            # it may have been killed after its end
            if head.returncode == 0 or (killed and has_finished(out)):
                break
            # A process that is stopped before it begins ends the start of a run, which names the
            # bound.
            if not killed and "launch.startup_timeout" not in tail(log):
                raise Broken(
                    f"run {number}: `asyncdock {command[0]}` ended with "
                    f"{head.returncode}\n{tail(log)}"
                )
            self._end_hosts()
            if (out / "recipe.json").exists():
                command = ["resume", str(out)]
        self._end_hosts()
        check_metrics(out, STEPS, bound)
        self._check_begun(begun, out)
        return weights_of(out)

    def _next(self) -> float:
        """Seconds to the next kill."""
        return self.random.expovariate(1 / self.gap)

    def _start(self, machine: int, log: Path, *command: str) -> subprocess.Popen[str]:
        with log.open("a") as file:
            return self.machines.start(machine, "api.cli.main", *command, stdout=file, stderr=file)

    def _keep_hosts(self, out: Path, run: str, machines: Sequence[int]) -> str:
        """Start the hosts of the present run that are not there; returns its id."""
        try:
            now = json.loads((out / WHERE).read_text())["run"]
        except (OSError, ValueError):
            return run
        if now != run:
            self._end_hosts()
        for machine in machines:
            host = self._hosts.get(machine)
            if host is None or host.poll() is not None:
                folder = str(self.home / f"host-{machine}")
                log = self.home / f"host-{machine}.log"
                command = ("host", "--join", self.machines.url, "--run", now, "--data", folder)
                self._hosts[machine] = self._start(machine, log, *command)
        return str(now)

    def _end_hosts(self) -> None:
        for machine in list(self._down):
            self._plug(machine)
        for host in self._hosts.values():
            host.kill()
            host.wait()
        self._hosts.clear()

    def _plug(self, machine: int) -> None:
        self.machines.unplug(machine, again=True)
        del self._down[machine]

    def _kill(self, head: subprocess.Popen[str], remote: int) -> str:
        """One kill of a random kind; returns the kind, or "" where there is nothing of it now."""
        kinds = ("process", "process", "process", "stop", "machine", "head", "cable", "index")
        # A kind stays drawn until it is possible: otherwise most kills would be of what starts
        # first.
        kind = self._drawn = self._drawn or self.random.choice(kinds)
        machine = self.random.choice((0, *HOSTS[:remote]))
        process = head if machine == 0 else self._hosts.get(machine)
        name = kind
        victim = None
        try:
            match kind:
                case "process" | "stop":
                    found = psutil.Process(process.pid).children(recursive=True) if process else []
                    family = found[1:]  # without the command itself
                    if not family:
                        return ""
                    victim = self.random.choice(family)
                    victim.send_signal(signal.SIGKILL if kind == "process" else signal.SIGSTOP)
                    name = f"{kind} on {'head' if machine == 0 else 'host'}"
                case "machine":
                    if not (
                        hosts := [host for host in self._hosts.values() if host.poll() is None]
                    ):
                        return ""
                    self.random.choice(hosts).kill()
                case "head":
                    head.kill()
                case "cable":
                    if machine in self._down:
                        return ""
                    self.machines.unplug(machine)
                    self._down[machine] = time.monotonic() + self.random.uniform(0.5, LONGEST_CUT)
                case "index":
                    assert self.server.process is not None
                    self.server.process.kill()
                    self.server.process.wait()
                    start_index(self.server, self.network)
        except psutil.Error:  # it has just ended
            return ""
        if kind in ("machine", "head", "cable"):
            self._losses.append(time.time())
        self._drawn = ""
        self.kills[name] += 1
        with (self.home / "kills").open("a") as file:
            file.write(f"{time.strftime('%H:%M:%S')} {name} {'' if victim is None else victim}\n")
        return kind

    def _why(self, run: str) -> str:
        """What ``run`` waits for, as `asyncdock why` prints it."""

        async def chain() -> list[str]:
            async with Index(self.server.url, run) as index:
                return [wait.text for wait in await waiting_chain(index)]

        return "\n".join(asyncio.run(chain())) if run else "it has not begun"

    def _check_begun(self, log: Path, out: Path) -> None:
        """Raises Broken where a response was made again from before its last parked token, although
        no machine was lost: a process that ends costs each of its responses at most one budget."""
        rewound = [
            event.time
            for event in read_metrics(out / METRICS)
            if event.data.get("worker") == "runner-0"
        ]
        lost = sorted((*self._losses, *rewound))
        had: dict[str, tuple[float, int]] = {}
        for line in log.read_text().splitlines():
            moment = float(line.split()[0])
            place = " ".join(line.split()[1:3])
            tokens = int(line.split()[3])
            before, parked = had.get(place, (moment, 0))
            if tokens < parked and not any(before - LATE <= loss <= moment for loss in lost):
                raise Broken(
                    f"{out}: group and place {place} had {parked} tokens, and was made "
                    f"again after {tokens}"
                )
            self.again += place in had and tokens == parked
            had[place] = moment, tokens


def weights_of(out: Path) -> str:
    """The hash of the newest checkpoint's weights."""
    newest = max(
        (out / "checkpoints").glob("step-*"), key=lambda path: int(path.name.partition("-")[2])
    )
    digest = hashlib.sha256()
    for file in sorted((newest / "model").rglob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def three_machines(home: Path) -> Iterator[tuple[Machines, Network, EmbeddedIndex]]:
    with Network(3, 1000.0) as network, index_server(network, home) as server:
        machines = Machines(network, server.url)
        try:
            yield machines, network, server
        finally:
            machines.end()


def report(
    kills: collections.Counter[str], again: int, runs: int, exact: int, seconds: float, seed: int
) -> str:
    lines = [
        f"{kills.total()} kills in {runs} runs ({exact} of them at η = 0), {seconds:.0f} s, "
        f"seed {seed}"
    ]
    lines += [
        f"responses made again from their last parked token: {again}, each of at most "
        f"{BUDGET} tokens",
        "",
    ]
    lines += [
        "| kind | kills |",
        "|---|---|",
        *(f"| {kind} | {count} |" for kind, count in sorted(kills.items())),
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--most", type=int, default=20, help="kills in one run")
    parser.add_argument(
        "--gap", type=float, default=3.0, metavar="SECONDS", help="between kills, on average"
    )
    parser.add_argument(
        "--seed", type=int, default=None, help="default: another one each time; it is printed"
    )
    options = parser.parse_args(arguments)
    seed = random.randrange(2**32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    began = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="adk-"))
    with three_machines(folder) as made:
        soak = ClusterSoak(folder, *made, random.Random(seed), options.most, options.gap)
        runs = exact = 0
        try:
            undisturbed = soak.run_once(0, exact=True, kills=0)
            while soak.kills.total() < options.kills:
                runs += 1
                exact += (is_exact := runs % 2 == 0)
                left = min(
                    soak.random.randint(2, max(2, options.most)), options.kills - soak.kills.total()
                )
                weights = soak.run_once(runs, exact=is_exact, kills=left)
                if is_exact and weights != undisturbed:
                    raise Broken(
                        f"run {runs}: at η = 0 its weights are not those of the undisturbed run"
                    )
                print(
                    f"run {runs} finished; {soak.kills.total()} kills: {dict(soak.kills)}",
                    flush=True,
                )
                shutil.rmtree(folder / f"run{runs}")
        except (Broken, Infeasible) as broken:
            print(
                f"BROKEN after {soak.kills.total()} kills: {broken}\nits folder: {folder}",
                file=sys.stderr,
            )
            return 1
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    print(report(soak.kills, soak.again, runs, exact, time.monotonic() - began, seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
