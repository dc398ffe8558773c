"""What the dashboard waits for with many runs: the list, the table, and curves over each other.

    python -m benchmarks.service.many_runs [--runs 2000] [--steps 300] [--compared 200] [--json FILE]

    one run of `mock` ──▶ its events, again and again ──▶ folders with metrics.jsonl of --steps steps
                                                              ├──▶ asyncdock view ──┐
                                                              └──▶ asyncdock serve ─┴◀── GET, one after the other

Of each question the first answer after the server has started, and the median and the longest of
those that follow. Memory: the server's own, proportional (PSS).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from api.client.credentials import find_token
from benchmarks import harness
from orchestration.history.totals import RecordedTotals, RunTotals
from orchestration.recipe.schema import Recipe
from orchestration.state.documents import TOTALS
from orchestration.state.registry import Registry
from pipeline.data.events import StepEvent
from pipeline.index.embedded import EmbeddedIndex

ASYNCDOCK = (sys.executable, "-P", "-m", "api.cli.main")
TEMPLATE_STEPS = 20
SEEDS = 5  # of each setting
AGAIN = 7  # answers after the first
MOST_SECONDS = 1.0
READY = re.compile(r"(http://127\.0\.0\.1:\d+)")


@dataclass(frozen=True)
class Answers:
    """Seconds of the answers to one question: the first one, and those after it; bytes of one."""

    question: str
    first: float
    median: float
    longest: float
    bytes: int


@dataclass(frozen=True)
class Server:
    """Its answers; its memory before the first and after the last, in MiB."""

    name: str
    answers: Sequence[Answers]
    before: float
    after: float


def template(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the recipe and the events of a real run in ``folder``."""
    command = [*ASYNCDOCK, "run", "mock", "--set", f"train.steps={TEMPLATE_STEPS}"]
    subprocess.run([*command, "--out", folder, "--plain"], check=True, capture_output=True)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return json.loads((folder / "recipe.json").read_text()), [json.loads(line) for line in lines]


def record(
    folder: Path, recipe: dict[str, Any], events: Sequence[dict[str, Any]], steps: int, at: int
) -> None:
    """Write the run number ``at`` with ``steps`` steps into ``folder``: its learning rate and seed
    are its own."""
    draws = random.Random(at)
    folder.mkdir(parents=True)
    train = recipe["train"] | {"learning_rate": 1e-6 * (1 + at // SEEDS), "steps": steps}
    recipe = recipe | {"seed": at % SEEDS, "name": f"mock-{at:04}", "train": train}
    (folder / "recipe.json").write_text(json.dumps(recipe))
    others = [event for event in events if event["kind"] != "step"]
    step_events = [event for event in events if event["kind"] == "step"]
    begins = 1.79e9 + at
    lines = []
    for step in range(steps):
        source = step_events[step % len(step_events)]
        numbers = {"step": step, "version": step + 1, "tokens_trained": 2000 * (step + 1)}
        numbers |= {"reward_mean": step / steps + draws.gauss(0, 0.1), "seconds": 20.0}
        lines.append(source | {"time": begins + 20 * step, "data": source["data"] | numbers})
        lines += others[step % len(others)], others[(step + 1) % len(others)]
    with (folder / "metrics.jsonl").open("w") as file:
        for number, line in enumerate(lines):
            event = {**line, "id": f"{int(begins * 1000) + 10 * number}-0"}
            file.write(json.dumps(event, separators=(",", ":")) + "\n")
    summary = {"state": "finished", "reason": "", "held_out_last": None}
    (folder / "summary.json").write_text(json.dumps(summary))


async def register(url: str, folders: Sequence[Path], steps: int) -> None:
    """Enter the runs in ``folders`` into the list of a service, as ended ones; they are renamed by
    their ids."""
    registry = Registry(url)
    for at, folder in enumerate(folders):
        recipe = Recipe.from_json((folder / "recipe.json").read_bytes())
        entry, _ = await registry.submit(recipe, owner="benchmark")
        await registry.take("benchmark", str(folder.parent), f"token-{at}", 60.0)
        await registry.end(entry.id, f"token-{at}", "finished", "")
        folder.rename(folder.parent / entry.id)
        totals = RunTotals()
        totals.step = StepEvent.of({"step": steps - 1, "version": steps, "reward_mean": 0.5})
        await TOTALS.put(registry.index(entry.id), RecordedTotals(totals))
    await registry.close()


@contextmanager
def server(*words: str | Path) -> Iterator[tuple[str, str, psutil.Process]]:
    """Yield the URL of a server, once it listens, a token of it, and its process."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen([*ASYNCDOCK, *map(str, words)], stdout=output, stderr=output)
        try:
            while True:
                output.seek(0)
                text = output.read()
                if match := READY.search(text):
                    break
                if process.poll() is not None:
                    raise RuntimeError(f"the server has ended: {text}")
                time.sleep(0.02)
            yield match[1], find_token(match[1]) or "", psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


def ask(url: str, path: str, token: str) -> tuple[float, bytes]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    began = time.perf_counter()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/{path}", headers=headers)) as got:
        body = got.read()
    return time.perf_counter() - began, body


def measure(name: str, url: str, token: str, process: psutil.Process, compared: int) -> Server:
    """Ask the server what the dashboard asks."""
    before = memory(process)
    columns = "train.learning_rate,reward_mean,evaluation.reward_mean"
    table = "table of all"
    answers = [answer(table, f"table?columns={columns}", url, token)]
    rows = json.loads(ask(url, "table", token)[1])["rows"]
    curves = f"compare?runs={','.join(row['id'] for row in rows[:compared])}"
    questions = {
        "the newest 50": "runs?limit=50",
        f"{compared} curves by step": curves,
        f"{compared} curves by hours, folded": f"{curves}&by=hours&fold=true",
        f"{compared} curves of the loss": f"{curves}&metric=loss",
    }
    answers += [answer(question, path, url, token) for question, path in questions.items()]
    return Server(name, answers, before, memory(process))


def answer(question: str, path: str, url: str, token: str) -> Answers:
    first, body = ask(url, path, token)
    later = [ask(url, path, token)[0] for _ in range(AGAIN)]
    return Answers(question, first, statistics.median(later), max(later), len(body))


def memory(process: psutil.Process) -> float:
    """Return the memory of the server alone, in MiB."""
    return float(process.memory_full_info().pss) / 2**20


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--compared", type=int, default=200)
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(prefix="asyncdock-many-") as temporary:
        root = Path(temporary)
        recipe, events = template(root / "template")
        folders = [root / "data" / "runs" / f"run-{at:05}" for at in range(options.runs)]
        for at, folder in enumerate(folders):
            record(folder, recipe, events, options.steps, at)
        size = sum(file.stat().st_size for file in (root / "data").rglob("metrics.jsonl"))
        with server("view", root / "data") as answering:
            results.append(measure("view", *answering, options.compared))
        index = EmbeddedIndex(root / "index")
        index.start()
        try:
            asyncio.run(register(index.url, folders, options.steps))
            (root / "data").chmod(0o700)
            words = ("--no-token", "--listen", "127.0.0.1:0", "--index", index.url)
            with server("serve", "--data", root / "data", *words) as answering:
                results.append(measure("serve", *answering, options.compared))
        finally:
            index.stop()
    print(f"{options.runs} runs of {options.steps} steps, {size / 2**20:.0f} MiB of events")
    show(results)
    if options.json:
        known = {"runs": options.runs, "steps": options.steps, "compared": options.compared}
        known |= {"servers": [asdict(result) for result in results]}
        options.json.write(known)


def show(results: Sequence[Server]) -> None:
    print(f"{'':6}{'question':38}{'first':>9}{'median':>9}{'longest':>9}{'KiB':>7}")
    for server in results:
        for one in server.answers:
            times = (one.first, one.median, one.longest)
            texts = "".join(f"{1000 * seconds:6.0f} ms" for seconds in times)
            print(f"{server.name:6}{one.question:38}{texts}{one.bytes / 1024:7.0f}")
        print(f"{server.name:6}memory: {server.before:.0f} MiB, then {server.after:.0f} MiB")
    loads = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    print(f"load of the machine: {loads}")
    longest = max(max(one.first, one.longest) for server in results for one in server.answers)
    verdict = "met" if longest <= MOST_SECONDS else "NOT met"
    print(f"goal (each answer <= {MOST_SECONDS:g} s): {verdict}")


if __name__ == "__main__":
    main()
