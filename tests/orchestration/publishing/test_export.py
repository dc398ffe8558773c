"""A folder that is being written, and kills."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchestration.publishing.export import appearing
from pipeline.locks import Locked
from tests.sources import ROOT

KILLED = """
import os, signal, sys
from pathlib import Path
from orchestration.publishing.export import appearing
with appearing(Path(sys.argv[1])) as folder:
    (folder / "weights").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_export_leaves_no_folder_and_the_next_one_removes_its_rest(tmp_path: Path) -> None:
    target = tmp_path / "below" / "model"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(target)], cwd=ROOT)
    assert killed.returncode == -signal.SIGKILL
    assert not target.exists()
    with appearing(target) as folder:
        assert not any(folder.iterdir())
        (folder / "other").touch()
        with pytest.raises(Locked, match="holds this lock"), appearing(target):
            pass
    assert [path.name for path in target.parent.iterdir()] == ["model"]
    assert [path.name for path in target.iterdir()] == ["other"]


def test_a_failed_export_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError), appearing(tmp_path / "model") as folder:
        folder.write_bytes(b"weights")
    assert not any(tmp_path.iterdir())
