"""Logs: what is written of an exception."""

from __future__ import annotations

import pytest
import structlog

from orchestration import logs


@pytest.mark.parametrize("terminal", [True, False])
def test_a_traceback_shows_no_variables(terminal: bool, capsys: pytest.CaptureFixture[str]) -> None:
    def connect(password: str) -> None:
        raise RuntimeError("no answer")

    logs.configure(terminal=terminal)
    try:
        connect("hunter" + "2")
    except RuntimeError:
        structlog.get_logger().exception("failed")
    said = capsys.readouterr().err
    assert "no answer" in said
    assert "test_logs.py" in said
    assert "hunter2" not in said
