"""Where the time goes from the command `asyncdock run RECIPE` to its first optimizer step, in each
process.

    this ─▶ asyncdock run RECIPE ─▶ fork server ─▶ workers      in each: PHASES are timed
                └──────────────── a line for each phase that has ended ──▶ a file ─▶ table

    python -m benchmarks.runs.first_step [RECIPE] [--set section.key=value …] [--least 0.05]

The run is ended after that step. A phase may contain others. CPU seconds are those of the whole
process meanwhile, all threads together.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.util
import inspect
import json
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FILE = "ASYNCDOCK_FIRST_STEP_FILE"
BEGAN = "ASYNCDOCK_FIRST_STEP_BEGAN"
PHASES = {
    "orchestration.recipe.loading.load": ("load_recipe",),
    "orchestration.run.folder": ("RunFolder.create",),
    "orchestration.run.run_index": ("_start",),
    "orchestration.run.execution": ("Execution._prepare",),
    "orchestration.launch.launchers": ("ProcessLauncher.launch",),
    "orchestration.workers.worker": ("Worker._build",),
    "pipeline.warehouse.dock": ("Dock.join",),
    "orchestration.workers.job": ("tokenizer_of",),
    "orchestration.workers.flow": ("load_prompts",),
    "orchestration.workers.rollout": ("load_prompts",),
    "orchestration.rewards.pool": ("RewardPool.open",),
    "orchestration.workers.engines": ("load_model", "tokenizer_of"),
    "stages.engines.torch.decoding.decoder": (
        "TorchDecoder.__init__",
        "TorchDecoder._take_over",
        "TorchDecoder.prefill",
        "TorchDecoder.decode",
    ),
    "stages.engines.torch.decoding.weights": ("DecoderWeights.lay_out",),
    "stages.engines.torch.decoding.batch": ("ContinuousBatch.step", "draw_next"),
    "stages.engines.torch.train": (
        "TorchTrainEngine.__init__",
        "TorchTrainEngine.train_batch",
        "make",
    ),
    "stages.engines.torch.parallel.interface": ("install_packed_attention",),
}


def record(phase: str, start: float, seconds: float, cpu: float) -> None:
    import setproctitle

    title = setproctitle.getproctitle()
    process = (
        title.partition(" of ")[0].removeprefix("asyncdock ")
        if title.startswith("asyncdock ")
        else "the command"
    )
    line = {"process": process, "phase": phase, "start": start, "seconds": seconds, "cpu": cpu}
    with open(os.environ[FILE], "a") as file:
        file.write(json.dumps(line) + "\n")


@contextmanager
def timed(phase: str) -> Iterator[None]:
    start = time.time()
    began = time.perf_counter()
    cpu = time.process_time()
    try:
        yield
    finally:
        record(phase, start, time.perf_counter() - began, time.process_time() - cpu)


def wrap(module: ModuleType) -> None:
    """Time the functions of ``module`` that PHASES names."""
    for name in PHASES[module.__name__]:
        holder = (
            pkgutil.resolve_name(f"{module.__name__}:{name.rpartition('.')[0]}")
            if "." in name
            else module
        )
        function = inspect.getattr_static(holder, name.rpartition(".")[2])
        inner = function.__func__ if isinstance(function, classmethod) else function
        wrapped = _timed(inner, name)
        setattr(
            holder,
            name.rpartition(".")[2],
            classmethod(wrapped) if inner is not function else wrapped,
        )


def _timed(function: Callable[..., Any], phase: str) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def wrapped(*given: Any, **named: Any) -> Any:
            with timed(phase):
                return await function(*given, **named)

        return wrapped

    @functools.wraps(function)
    def called(*given: Any, **named: Any) -> Any:
        with timed(phase):
            return function(*given, **named)

    return called


class WrapImported(importlib.abc.MetaPathFinder):
    """Wraps the modules in PHASES as they are imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in PHASES:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            wrap(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def run_command() -> None:
    """In the process of the command: as ``asyncdock`` does, with what this file times."""
    now = time.time()
    record(
        "python starts",
        float(os.environ[BEGAN]),
        now - float(os.environ[BEGAN]),
        time.process_time(),
    )
    sys.meta_path.insert(0, WrapImported())
    with timed("imports of the command"):
        from api.cli.main import main
    from orchestration.processes import forkserver

    own = "benchmarks.runs.first_step"  # imported last: the server's imports have ended then
    start = forkserver.ForkServer.start.__func__  # type: ignore[attr-defined]
    start.__defaults__ = ((*forkserver.PRELOAD, own), *start.__defaults__[1:])
    main()


def measure(recipe: str, overrides: list[str]) -> tuple[list[dict[str, Any]], float]:
    """Run the command until its first `step` event, then end it.

    Returns what was timed until then, with the changes of state of the run and its workers, and the
    seconds to the event.
    """
    with tempfile.TemporaryDirectory(prefix="asyncdock-first-step-") as folder:
        file = Path(folder) / "phases.jsonl"
        began = time.time()
        timed_phases = list[dict[str, Any]]()
        given = [part for text in overrides for part in ("--set", text)]
        program = [sys.executable, "-P", "-m", "benchmarks.runs.first_step"]
        command = [*program, "run", recipe, "--out", f"{folder}/run", "--json", *given]
        path = os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
        env = {**os.environ, FILE: str(file), BEGAN: str(began), "PYTHONPATH": path}
        with open(f"{folder}/errors", "w+") as errors:
            process = subprocess.Popen(
                command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True
            )
            assert process.stdout is not None
            for line in process.stdout:
                event = json.loads(line)
                if event["kind"] == "step":
                    break
                if event["kind"] in ("state", "worker"):
                    data = event["data"]
                    what = data.get("state") or f"{data['worker']} {data['change']}"
                    timed_phases.append(
                        {
                            "process": "event",
                            "phase": what,
                            "start": event["time"],
                            "seconds": 0,
                            "cpu": 0,
                        }
                    )
            else:
                errors.seek(0)
                sys.exit(f"no step was made: {errors.read()}")
            for _ in range(2):  # the second interrupt ends it at once
                process.send_signal(signal.SIGINT)
                time.sleep(0.5)  # a second SIGINT that arrives before the first is handled is lost
            process.communicate()
        timed_phases += [json.loads(line) for line in file.read_text().splitlines()]
        before = [
            {**phase, "start": phase["start"] - began}
            for phase in timed_phases
            if phase["start"] < event["time"]
        ]
        return before, event["time"] - began


def main() -> None:
    import argparse

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", nargs="?", default="quickstart")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument(
        "--least", type=float, default=0.05, help="seconds of the shortest phase that is shown"
    )
    options = parser.parse_args()
    phases, seconds = measure(options.recipe, options.set)
    print(
        f"{seconds:.1f} s from the command to the first optimizer step, on {os.cpu_count()} cores"
    )
    print("| process | phase | begins, s | takes, s | CPU s |")
    print("|---|---|---|---|---|")
    together: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for phase in sorted(phases, key=lambda one: one["start"]):
        together.setdefault((phase["process"], phase["phase"]), []).append(phase)
    for (process, name), parts in together.items():
        takes, cpu = (sum(part[key] for part in parts) for key in ("seconds", "cpu"))
        times = f" × {len(parts)}" if len(parts) > 1 else ""
        if process == "event":
            print(f"| | *{name}* | {parts[0]['start']:.2f} | | |")
        elif takes >= options.least:
            print(
                f"| {process} | `{name}`{times} | {parts[0]['start']:.2f} | {takes:.2f} | "
                f"{cpu:.2f} |"
            )


if os.environ.get(FILE) and __name__ != "__main__":  # preloaded by the fork server
    for name in PHASES:
        if name in sys.modules:
            wrap(sys.modules[name])
    ticks = int(
        Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    )  # since boot, when this process began
    started = (
        time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    )
    record("imports of the fork server", started, time.time() - started, time.process_time())
elif __name__ == "__main__" and os.environ.get(FILE):
    run_command()
elif __name__ == "__main__":
    main()
