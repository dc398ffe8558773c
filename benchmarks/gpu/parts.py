"""The parts of the check, each in a process of its own that has a limited time.

a part fails, hangs, or takes the device's context along ──▶ its figures so far, its last lines; the next part
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from benchmarks.gpu.numerics import numbers
from benchmarks.gpu.runs import colocated_runs, tiny_run
from benchmarks.gpu.speed import rollout, turns, update
from benchmarks.gpu.step import SHAPES, step_of
from benchmarks.gpu.work import Figure, Setting

MARK = "figure: "  # before a figure in the output of a part's process
LAST_LINES = 12  # of the output of a part that failed
REHEARSAL = 6  # times as long for a rehearsal: other tests run beside it


@dataclass(frozen=True)
class Part:
    """What is measured, and the seconds that it may take on an accelerator."""

    measure: Callable[[Setting], AsyncIterator[list[Figure]]]
    limit: float


PARTS: dict[str, Part] = {
    "numbers": Part(numbers, 120),
    "rollout": Part(rollout, 90),
    "update": Part(update, 120),
    "turns": Part(turns, 60),
    **{name: Part(step_of(name), 120) for name in SHAPES},
    "colocated": Part(colocated_runs, 120),
    "tiny, separate": Part(tiny_run("separate"), 60),
    "tiny, colocated": Part(tiny_run("colocated"), 60),
}


@dataclass(frozen=True)
class Failed:
    """Why a part has no more figures."""

    reason: str


async def of_process(command: Sequence[str], limit: float) -> AsyncIterator[Figure | Failed]:
    """Yield the figures that ``command`` prints, as they come; at its end a :class:`Failed` where
    it did not exit with 0 within ``limit`` seconds. None of its processes is left."""
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=errors, start_new_session=True
        )
        assert process.stdout is not None
        failed = ""
        ends = time.monotonic() + limit
        try:
            while text := await asyncio.wait_for(
                process.stdout.readline(), ends - time.monotonic()
            ):
                if text.startswith(MARK.encode()):
                    yield Figure(**json.loads(text[len(MARK) :]))
            if code := await asyncio.wait_for(process.wait(), ends - time.monotonic()):
                failed = f"it ended with exit code {code}"
        except TimeoutError:
            failed = f"it took longer than {limit:g} s"
        finally:
            _end_session(process.pid)
            await process.wait()
        if failed:
            errors.seek(0)
            last = errors.read().decode(errors="replace").splitlines()[-LAST_LINES:]
            yield Failed("\n".join([failed, *last]))


def _end_session(leader: int) -> None:
    """End what is left of the processes of ``leader``."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def limit_of(part: str, setting: Setting) -> float:
    """Return the seconds after which ``part`` is ended."""
    return PARTS[part].limit * (REHEARSAL if setting.small else 1)


def command_of(part: str, setting: Setting) -> list[str]:
    """The command that measures ``part`` alone and prints its figures for :func:`of_process`."""
    return [
        *(sys.executable, "-m", "benchmarks.gpu.check", "--part", part, "--marked"),
        *("--device", str(setting.device), "--repeat", str(setting.repeat)),
        *(["--rehearse"] if setting.small else []),
    ]


def marked(figure: Figure) -> str:
    return MARK + json.dumps(asdict(figure))
