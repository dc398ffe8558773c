"""Threads: the process does not wait for one that never returns, and a temporary one leaves no
OpenMP helper."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from stages.threads import CallThread, run_in_temporary_thread, run_in_thread

HELPERS = """
import os, time, torch
from stages.threads import CallThread, run_in_temporary_thread

torch.set_num_threads(2)

def tasks():
    return len(os.listdir("/proc/self/task"))

def settled(count):
    end = time.monotonic() + 30  # the end of a thread sends no signal
    while tasks() != count and time.monotonic() < end:
        time.sleep(0.01)
    return tasks()

def compute():
    return float(torch.ones(2**22).sum())

before = tasks()
assert run_in_temporary_thread(compute) == 2**22
after_apart = settled(before)
compute()
print(after_apart - before, tasks() - before)
"""


async def test_what_the_work_returns_or_raises_comes_out() -> None:
    assert await run_in_thread(lambda: 3, "three") == 3
    assert run_in_temporary_thread(lambda: 4) == 4
    with pytest.raises(ZeroDivisionError):
        await run_in_thread(lambda: 1 // 0, "wrong")
    with pytest.raises(ZeroDivisionError):
        run_in_temporary_thread(lambda: 1 // 0)


async def test_the_loop_does_not_wait_for_work_that_was_given_up() -> None:
    goes_on = threading.Event()
    stuck = run_in_thread(goes_on.wait, "stuck")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stuck, 0.05)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "stuck")
    assert thread.daemon
    goes_on.set()
    thread.join(10)


@pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="counts the system's threads, as Linux lists them"
)
def test_the_helpers_of_a_computation_end_with_it() -> None:
    """A computation in the thread that stays leaves one for its second core; one that is done apart
    leaves none."""
    helpers = subprocess.run(
        [sys.executable, "-c", HELPERS], capture_output=True, text=True, check=True, timeout=120
    )
    assert helpers.stdout.split() == ["0", "1"]


async def test_an_ended_thread_takes_no_call_that_nothing_would_answer() -> None:
    thread = CallThread("ended")
    assert await thread.run(lambda: 1) == 1
    thread.end()
    with pytest.raises(RuntimeError, match="was ended"):
        thread.run(lambda: 2)
