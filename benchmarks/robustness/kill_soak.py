"""Kills a random process of real runs at random moments, from 0 s on, and checks that nothing is
lost, doubled or left.

asyncdock run ─▶ index, fork server, workers (and the supervisor, with --supervisor: then `asyncdock resume` goes on)
     kill -9 of one of them, at a random moment ─┘   until the run has had its share; it must finish all the same
at the end ─▶ every step and every group once, in order · the ledger adds up · no traceback · no process, no memory left
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import os
import random
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from orchestration.history.events_file import METRICS, read_metrics
from pipeline.data.arena import SHARED_VARIABLE, shared_memory_directory

MARK = "ASYNCDOCK_SOAK"  # in the environment of all processes of a run
STEPS = 12
STEPS_A_KILL = 1.5  # of a run that has all kills, so that it outlasts them
GROUPS = 4
SIZE = 4
RECIPE = f"""
name = "soak"
[model]
source = "mock"
[prompts]
source = "builtin"
task = "repeat"
max_prompt_tokens = 16
[rollout]
engine = "mock"
max_tokens = 16
mock = {{ time_scale = 0.05 }}
[reward]
functions = [{{ name = "spelling" }}]
[algorithm]
group_size = {SIZE}
[train]
engine = "mock"
steps = {STEPS}
groups_per_step = {GROUPS}
mock = {{ time_scale = 0.05 }}
[checkpoint]
every = 4
[launch]
max_restarts = 1000
"""


AGENTS = (
    RECIPE.replace('"repeat"', '"guess"')
    .replace('"spelling"', '"environment"')
    .replace("max_tokens = 16\nmock = {", "max_tokens = 16\nmock = { median_tokens = 4,")
    + """
[environment]
use = "guess"
max_turns = 3
on_error = "zero"
"""
)


def in_one_run(recipe: str, steps: int) -> str:
    """Return the ``recipe`` with so many ``steps``, which last longer, and two rollout workers."""
    return (
        recipe.replace("[rollout]", "[rollout]\nworkers = 2")
        .replace(f"steps = {STEPS}\n", f"steps = {steps}\n")
        .replace("time_scale = 0.05 }\n[checkpoint]", "step_seconds = 0.75 }\n[checkpoint]")
    )


class Broken(AssertionError):
    """A run did not survive a kill."""


@dataclass
class Soak:
    """Runs of ``recipe`` with ``steps`` below ``home``, killed at moments that ``random`` chooses,
    ``fewest`` to ``most`` kills each. ``only``: kinds of processes that are killed; empty: all."""

    home: Path
    random: random.Random
    supervisor: bool = False
    recipe: str = RECIPE
    steps: int = STEPS
    only: Collection[str] = ()
    fewest: int = 2
    most: int = 8
    gap: float = 1.5  # seconds between kills, on average
    deadline: float = 240.0  # for one command
    kills: collections.Counter[str] = field(default_factory=collections.Counter)

    def run_once(self, number: int) -> None:
        """One run to its end, through its kills. Raises Broken."""
        out = self.home / f"run{number}"
        mark = uuid.uuid4().hex
        recipe = self.home / "soak.toml"
        recipe.write_text(self.recipe)
        sockets = self.home / "t"  # short: sockets lie in it
        memory = Path(tempfile.mkdtemp(prefix="asyncdock-soak-", dir=shared_memory_directory()))
        sockets.mkdir(exist_ok=True)
        env = {
            **os.environ,
            MARK: mark,
            SHARED_VARIABLE: str(memory),
            "TMPDIR": str(sockets),
            "OMP_NUM_THREADS": "1",
        }
        command = ["run", str(recipe), "--plain", "--out", str(out)]
        left = self.random.randint(self.fewest, self.most)
        log = self.home / f"run{number}.log"
        try:
            while True:
                code, killed, whole = self._command(command, env, log, left)
                left -= killed
                if code == 0 or (not whole and has_finished(out)):  # it was killed after its end
                    break
                if not whole:
                    raise Broken(
                        f"run {number}: `asyncdock {command[0]}` ended with {code}\n{tail(log)}"
                    )
                if (out / "recipe.json").exists():
                    command = ["resume", str(out), "--plain"]
            if "Traceback" in log.read_text(errors="replace"):
                raise Broken(f"run {number}: a traceback was shown\n{tail(log)}")
            check_metrics(out, self.steps, 1)
            wait_until_gone(mark)
            for folder in (memory, sockets):
                if found := [path.name for path in folder.glob("asyncdock*")]:
                    raise Broken(f"run {number}: left in {folder}: {found}")
        finally:
            for pid in marked(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            shutil.rmtree(memory, ignore_errors=True)

    def _command(
        self, command: Sequence[str], env: dict[str, str], log: Path, most: int
    ) -> tuple[int, int, bool]:
        """Exit code of one command, how many of its processes were killed, and whether itself
        was."""
        gaps = [self.random.expovariate(1 / self.gap) for _ in range(most)]
        moments = list(itertools.accumulate(gaps))  # from 0 s on
        began = time.monotonic()
        killed = 0
        itself = False
        with log.open("ab") as file:
            process = psutil.Popen(
                [sys.executable, "-P", "-m", "api.cli.main", *command],
                env=env,
                stdout=file,
                stderr=file,
                cwd=self.home,
            )
        while process.poll() is None:
            if time.monotonic() - began > self.deadline:
                raise Broken(
                    f"`asyncdock {command[0]}` has not ended in {self.deadline:.0f} s\n{tail(log)}"
                )
            if (
                moments
                and time.monotonic() - began >= moments[0]
                and (victim := self._victim(process))
            ):
                moments.pop(0)
                with contextlib.suppress(psutil.NoSuchProcess):
                    name = "supervisor" if victim.pid == process.pid else kind(victim)
                    victim.kill()
                    killed = killed + 1
                    itself = itself or victim.pid == process.pid
                    self.kills[name] += 1
            time.sleep(0.002)
        return process.returncode, killed, itself

    def _victim(self, process: psutil.Process) -> psutil.Process | None:
        try:
            family = [
                child
                for child in process.children(recursive=True)
                if child.status() != psutil.STATUS_ZOMBIE
                and (not self.only or kind(child) in self.only)
            ]
        except psutil.NoSuchProcess:
            return None
        family += [process] if self.supervisor else []
        return self.random.choice(family) if family else None


def check_metrics(out: Path, steps: int, bound: int) -> None:
    """Raises Broken where the run in ``out`` did not train each group once within ``bound``, or its
    ledger is wrong."""
    events = list(read_metrics(out / METRICS))
    made = [event.data for event in events if event.kind == "step"]
    if [step["step"] for step in made] != list(range(1, steps + 1)):
        raise Broken(f"{out}: steps {[step['step'] for step in made]}")
    groups = [sorted(step["groups"]) for step in made]
    if groups != [list(range(GROUPS * step, GROUPS * (step + 1))) for step in range(steps)]:
        raise Broken(f"{out}: groups {groups}")
    if max(step["staleness_max"] for step in made) > bound:
        raise Broken(f"{out}: a sample past the bound {bound}")
    ledger = [event.data for event in events if event.kind == "ledger"][-1]
    for unit in ("", "_tokens", "_turns"):
        ways = ("trained", "filtered", "remade", "in_flight")
        # an event leaves out what is 0
        if ledger.get(f"generated{unit}", 0) != sum(ledger.get(f"{way}{unit}", 0) for way in ways):
            raise Broken(f"{out}: the ledger does not add up: {ledger}")
    if ledger["trained"] != steps * GROUPS * SIZE:
        raise Broken(f"{out}: the ledger counts {ledger}")
    if not has_finished(out):
        raise Broken(f"{out}: the summary does not say that it finished")


def has_finished(out: Path) -> bool:
    summary = out / "summary.json"
    return summary.exists() and json.loads(summary.read_text())["state"] == "finished"


def kind(process: psutil.Process) -> str:
    words = " ".join(process.cmdline())
    workers = ("worker flow", "worker rollout", "worker update", "worker environment")
    for name in ("fork server", *workers, "environments", "valkey"):
        if name in words:
            return "index" if name == "valkey" else name
    return "process that starts"


def marked(mark: str) -> list[int]:
    """Living processes of the run that ``mark`` names."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def wait_until_gone(mark: str, timeout: float = 20.0) -> None:
    deadline = time.monotonic() + timeout
    while found := marked(mark):
        if time.monotonic() > deadline:
            raise Broken(f"processes are left: {[psutil.Process(pid).cmdline() for pid in found]}")
        time.sleep(0.05)


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-30:])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument(
        "--supervisor", action="store_true", help="kill the command itself too; it is resumed"
    )
    parser.add_argument(
        "--agents", action="store_true", help="an environment answers; it is killed, too"
    )
    parser.add_argument(
        "--one-run", action="store_true", help="all kills in one run, with two rollout workers"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="KIND", help='such as "worker rollout"'
    )
    parser.add_argument(
        "--seed", type=int, default=None, help="default: another one each time; it is printed"
    )
    options = parser.parse_args(arguments)
    seed = random.randrange(2**32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="adk-") as home:
        recipe = AGENTS if options.agents else RECIPE
        soak = Soak(Path(home), random.Random(seed), options.supervisor, recipe, only=options.only)
        if options.one_run:
            soak.steps = int(STEPS_A_KILL * options.kills)
            soak.recipe = in_one_run(recipe, soak.steps)
            soak.fewest = soak.most = options.kills
            soak.gap = 1.0
            soak.deadline = 60.0 + 10.0 * options.kills
        number = 0
        while soak.kills.total() < options.kills and not (options.one_run and number):
            number += 1
            try:
                soak.run_once(number)
            except Broken as broken:
                print(f"BROKEN after {soak.kills.total()} kills: {broken}", file=sys.stderr)
                return 1
            print(
                f"run {number} finished; {soak.kills.total()} kills: {dict(soak.kills)}", flush=True
            )
            shutil.rmtree(soak.home / f"run{number}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
