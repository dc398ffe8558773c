"""What training by Tinker's client costs: the loop of the kind that tinker_cookbook has, beside our
own run of the same job.

    python -m venv client && client/bin/pip install tinker==0.38.0
    python -m benchmarks.service.tinker [--client client/bin/python] [--model smollm2] [--json FILE]
    python -m benchmarks.service.tinker --client client/bin/python --flood-alone
    python -m benchmarks.service.tinker --client client/bin/python --smoke

The server is ``asyncdock tinker`` in a process of its own, and the client is Tinker's SDK, over
loopback (benchmarks/service/tinker_client.py). The run is recipes/lora.toml with the same model, rank,
groups and lengths, without staleness: both sides sample a batch, make one step, and publish it.
Tokens are those of prompts and responses, the prompt once per response. Arms alternate, so that
other work on the machine slows both; the seconds of the processors (of all processes of a side but
the client's) vary less than those of the clock.

    loop      tokens a second of one tenant's loop, of our run, and of all tenants together; with
              --peer, of the same loop on another server
    times     an optimizer step after a pass of one token; a sample of one token
    flood     one tenant's step while another one, another one with many models, or all others have
              passes and samples under way all the time, over its step alone, in turn
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks import harness
from benchmarks.runs.executed import executed
from orchestration.logs import configure
from orchestration.recipe.loading.load import load_recipe
from orchestration.service.own_services import read_authorization
from stages.model.load import load_tokenizer
from stages.prompts.sources import load_prompts

CLIENT = Path(__file__).with_name("tinker_client.py")
RATES = ("rate", "processor_rate")
PROMPTS = 256  # of the run, which the client uses in the same order
SAMPLED_EVERY = 0.1  # seconds between two readings of the processor's time
UNCOUNTED = 2  # first steps
MODELS = 15  # of a tenant that floods with many


@dataclass(frozen=True)
class Job:
    model: str
    rank: int
    groups: int
    group_size: int
    max_tokens: int
    steps: int
    threads: int

    @property
    def recipe(self) -> str:
        return f"recipes/{'tiny' if self.model == 'tiny' else 'lora'}.toml"

    @property
    def changes(self) -> list[str]:
        """Those of the recipe."""
        return [
            f"model.source={self.model}",
            f"model.lora.rank={self.rank}",
            f"algorithm.group_size={self.group_size}",
            f"train.groups_per_step={self.groups}",
            f"train.steps={self.steps + UNCOUNTED}",
            f"train.threads={self.threads}",
            f"rollout.threads={self.threads}",
            f"rollout.max_tokens={self.max_tokens}",
            "pipeline.staleness=0",
            "evaluate.every=0",
            "checkpoint.every=1000",
        ]


@dataclass(frozen=True)
class Arm:
    """Tokens a second of the clock and of the processors."""

    tokens: float
    seconds: float
    processor_seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def processor_rate(self) -> float:
        return self.tokens / self.processor_seconds


class ProcessorTime:
    """The processor seconds of a process with all that it has started, over time."""

    def __init__(self, process: int) -> None:
        self._process = psutil.Process(process)
        self._readings: list[tuple[float, dict[int, float]]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> ProcessorTime:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _read(self) -> None:
        while not self._stop.wait(SAMPLED_EVERY):
            spent = dict[int, float]()
            for process in [self._process, *self._process.children(recursive=True)]:
                try:
                    times = process.cpu_times()
                except psutil.Error:  # it has just ended
                    continue
                spent[process.pid] = times.user + times.system
            self._readings.append((time.time(), spent))

    def between(self, begin: float, end: float) -> float:
        """Return the seconds spent between two times since 1970."""
        first = min(self._readings, key=lambda reading: abs(reading[0] - begin))[1]
        last = min(self._readings, key=lambda reading: abs(reading[0] - end))[1]
        return sum(seconds - first.get(process, 0.0) for process, seconds in last.items())


@contextmanager
def server(job: Job, folder: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Start ``asyncdock tinker``; gives its process and what its clients' environment has."""
    command = [
        *(sys.executable, "-m", "api.cli.main", "tinker", "--model", job.model),
        *("--listen", "127.0.0.1:0", "--data", str(folder), "--device", "cpu"),
        *("--threads", str(job.threads)),
    ]
    with (folder.parent / "server.log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        url = process.stdout.readline().strip().partition("=")[2]
        yield process.pid, variables(url, f"tml-{read_authorization(folder)}")
    finally:
        process.terminate()
        process.wait()


def variables(url: str, key: str) -> dict[str, str]:
    """Return what the environment of a client has."""
    return {
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": key,
        "TINKER_TELEMETRY": "0",
        "NO_PROXY": "127.0.0.1,localhost",
    }


def keys(folder: Path, tenants: int) -> list[str]:
    """Make a key for each tenant."""
    command = [sys.executable, "-m", "api.cli.main", "token", "create"]
    options = ["--scope", "run", "--tinker", "--data", str(folder)]
    return [
        subprocess.run(
            [*command, f"tenant-{number}", *options], capture_output=True, text=True, check=True
        ).stdout.strip()
        for number in range(tenants)
    ]


@contextmanager
def client(
    python: str, environment: dict[str, str], job: Job, mode: str, **fields: Any
) -> Iterator[Iterator[dict[str, Any]]]:
    """Run the client, and give what it tells. It is ended with the context."""
    facts = {
        "mode": mode,
        "base": Path(job.model).name,
        "rank": job.rank,
        "groups": job.groups,
        "group_size": job.group_size,
        "max_tokens": job.max_tokens,
        "steps": job.steps + UNCOUNTED,
        "prompts": prompts(job),
        **fields,
    }
    process = subprocess.Popen(
        [python, "-P", "-W", "ignore", str(CLIENT)],
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(facts))
        process.stdin.close()
        try:
            yield map(json.loads, process.stdout)
        finally:
            process.terminate()


def prompts(job: Job) -> list[list[int]]:
    """Return the tokens of the run's first prompts."""
    recipe = load_recipe(job.recipe, job.changes)
    train = load_prompts(recipe.prompts, load_tokenizer(job.model), recipe.seed).train
    return [train.prompt(number).ids.tolist() for number in range(PROMPTS)]


def run_arm(job: Job, home: Path, number: int) -> Arm:
    """Execute our own run of the job."""
    recipe = load_recipe(job.recipe, job.changes)
    with ProcessorTime(os.getpid()) as processor:
        events = asyncio.run(executed(recipe, home / f"run-{number}"))
    steps = [event for event in events if event.kind == "step"][UNCOUNTED - 1 :]
    lengths = [len(prompt) for prompt in prompts(job)]
    tokens = sum(
        step.data["rows"] * step.data["response_length_mean"]
        + job.group_size * sum(lengths[group % len(lengths)] for group in step.data["groups"])
        for step in steps[1:]
    )
    begin, end = steps[0].time, steps[-1].time
    return Arm(tokens, end - begin, processor.between(begin, end))


def peer_arm(python: str, url: str, base: str, process: str, job: Job) -> Arm:
    """The loop on another server of Tinker's interface, which serves the job's model as ``base``."""
    key = "tml-peer"
    with ProcessorTime(int(process)) as processor:
        of_client = {"base": base, "keys": [key]}
        with client(python, variables(url, key), job, "loop", **of_client) as told:
            return loop_arm([facts for facts in told if "tokens" in facts], processor)


def loop_arm(steps: Sequence[dict[str, Any]], processor: ProcessorTime) -> Arm:
    """``steps`` of all tenants, of which the first ones of each are not counted."""
    counted = steps[UNCOUNTED * len({step["tenant"] for step in steps}) :]
    begin = counted[0]["time"] - counted[0]["seconds"]
    end = counted[-1]["time"]
    tokens = sum(step["tokens"] for step in counted)
    return Arm(tokens, end - begin, processor.between(begin, end))


def quantile(values: Sequence[float], share: float) -> float:
    return statistics.quantiles(values, n=100)[round(100 * share) - 1]


def milliseconds(values: Sequence[float]) -> dict[str, float]:
    return {name: 1e3 * quantile(values, share) for name, share in (("p50", 0.5), ("p99", 0.99))}


def report(
    arms: dict[str, list[Arm]], phases: Sequence[dict[str, Any]], times: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Print what the loop, our run and single calls take, and return it."""
    measured: dict[str, Any] = {
        call: milliseconds([facts[call] for facts in times if call in facts])
        for call in ("optim_step", "sample")
    }
    measured["phases"] = {
        name: statistics.median(step[name] / step["seconds"] for step in phases)
        for name in ("sampling", "training", "saving")
    }
    print("| | tokens/s | tokens a processor second |\n|---|---|---|")
    for name, of_name in arms.items():
        rates = [statistics.median(getattr(arm, rate) for arm in of_name) for rate in RATES]
        measured[name] = dict(zip(RATES, rates, strict=True))
        print(f"| {name} | {rates[0]:,.0f} | {rates[1]:,.0f} |")
    ratios = [
        statistics.median(
            getattr(one, rate) / getattr(other, rate)
            for one, other in zip(arms["tinker"], arms["run"], strict=True)
        )
        for rate in RATES
    ]
    measured["ratio"] = dict(zip(RATES, ratios, strict=True))
    print(f"| tinker over run | {ratios[0]:.2f} | {ratios[1]:.2f} |\n")
    for call in ("optim_step", "sample"):
        print(f"{call}: {measured[call]['p50']:.1f} ms (p50), {measured[call]['p99']:.1f} ms (p99)")
    print("of a step:", {name: round(share, 2) for name, share in measured["phases"].items()})
    return measured


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--client", default=sys.executable, help="python that has tinker")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5, help="of each arm, beside the first two")
    parser.add_argument("--repeats", type=int, default=2, help="turns of the two arms")
    parser.add_argument("--calls", type=int, default=100, help="of which the times are taken")
    parser.add_argument("--tenants", type=int, default=16, help="with 1 nobody floods")
    parser.add_argument("--flood", type=int, default=2, help="passes and samples of each model")
    parser.add_argument("--flood-alone", action="store_true", help="measure nothing else")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--peer",
        nargs=4,
        metavar=("PYTHON", "URL", "MODEL", "PID"),
        help="another server: a client for it, its address, its name of the model, its process",
    )
    parser.add_argument("--smoke", action="store_true", help="a few steps: whether it works")
    options = parser.parse_args(arguments)
    if subprocess.run(
        [options.client, "-c", "import tinker"], stderr=subprocess.DEVNULL
    ).returncode:
        print(
            f"error: {options.client} has no tinker; make an environment that has it (python -m "
            f"venv client; client/bin/pip install tinker) and give --client client/bin/python",
            file=sys.stderr,
        )
        return 2
    configure()
    if options.smoke:
        options.model, options.steps, options.repeats, options.calls = "tiny", 2, 1, 10
        options.tenants, options.max_tokens = 2, 4
    job = Job(
        *(options.model, options.rank, options.groups, options.group_size),
        *(options.max_tokens, options.steps, options.threads),
    )
    measured: dict[str, Any] = {"job": vars(job), "load": os.getloadavg()}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        data = home / "data"
        with server(job, data) as (process, environment), ProcessorTime(process) as processor:
            tenants = keys(data, options.tenants)

            def told(mode: str, keys: Sequence[str], **fields: Any) -> list[dict[str, Any]]:
                with client(options.client, environment, job, mode, keys=keys, **fields) as facts:
                    return list(facts)

            def steps(keys: Sequence[str]) -> list[dict[str, Any]]:
                return [facts for facts in told("loop", keys) if "tokens" in facts]

            def seconds() -> float:
                """Return the median of a step of the first tenant."""
                counted = steps(tenants[:1])[UNCOUNTED:]
                return statistics.median(step["seconds"] for step in counted)

            def flooded(keys: Sequence[str]) -> float:
                """Return how many times as long a step takes in a flood as alone."""
                alone = seconds()
                flood = {"keys": keys, "flood": options.flood}
                with client(options.client, environment, job, "flood", **flood) as facts:
                    next(facts)  # it is ready
                    return seconds() / alone

            if not options.flood_alone:
                arms = {"tinker": list[Arm](), "run": list[Arm]()}
                phases = list[dict[str, Any]]()
                for number in range(options.repeats):
                    made = steps(tenants[:1])
                    phases += made[UNCOUNTED:]
                    arms["tinker"].append(loop_arm(made, processor))
                    arms["run"].append(run_arm(job, home, number))
                    if options.peer:
                        python, url, base, process = options.peer
                        arms.setdefault("peer", []).append(
                            peer_arm(python, url, base, process, job)
                        )
                times = told("times", tenants[:1], calls=options.calls)
                arms["all tenants"] = [loop_arm(steps(tenants), processor)]
                measured |= report(arms, phases, times)
            others = options.tenants - 1
            floods = {
                "another tenant floods": tenants[1:2],
                f"another tenant floods with {MODELS} models": tenants[1:2] * MODELS,
                f"{others} others flood": tenants[1:],
            }
            measured["flooded"] = {}
            for name, keys_of_models in floods.items() if others else ():
                ratios = [flooded(keys_of_models) for _ in range(options.repeats)]
                measured["flooded"][name] = ratios
                print(
                    f"a step while {name}: {statistics.median(ratios):.2f} × as long as alone "
                    f"({min(ratios):.2f} to {max(ratios):.2f}), load {os.getloadavg()[0]:.0f}"
                )
    if options.json:
        options.json.write(measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
