"""Logs: what is written of an exception."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog

from orchestration import logs


@pytest.mark.parametrize("terminal", [True, False])
def test_a_traceback_shows_no_variables(
    terminal: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def connect(password: str) -> None:
        raise RuntimeError("no answer")

    errors = tmp_path / "errors.log"
    logs.configure(terminal=terminal, errors=errors if terminal else None)
    try:
        connect("hunter" + "2")
    except RuntimeError:
        structlog.get_logger().exception("failed")
    line = capsys.readouterr().err
    written = errors.read_text() if terminal else line
    assert "no answer" in line
    assert "test_logs.py" in written
    assert (str(errors) in line) == terminal
    assert "hunter2" not in line + written
