"""The processes of a pool end when the process that made the pool is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from orchestration.processes.pool import spawned_pool

MAKER = """
import time
from orchestration.processes.pool import spawned_pool

if __name__ == "__main__":
    with spawned_pool(2) as pool:
        calls = [pool.submit(time.sleep, seconds) for seconds in (0, 600)]
        calls[0].result()
        print("called", flush=True)
        calls[1].result()
"""


def test_processes_end_with_a_killed_maker_whether_they_work_or_wait(tmp_path: Path) -> None:
    script = tmp_path / "maker.py"
    script.write_text(MAKER)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        assert maker.stdout.readline() == "called\n"
        processes = psutil.Process(maker.pid).children(recursive=True)
        assert len(processes) >= 2
        maker.kill()
        _, alive = psutil.wait_procs(processes, timeout=30)
        assert not alive


def test_a_pool_answers() -> None:
    with spawned_pool(1, calls=1) as pool:
        assert [*pool.map(abs, [-1, 2, -3])] == [1, 2, 3]
