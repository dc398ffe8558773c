"""The comparison with libraries measures each of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.flow.libraries import main


def test_each_library_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "")  # put back at the end
    main(["--smoke", "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {row["library"] for row in rows} == {
        "redis-py",
        "stamina",
        "anyio",
        "httpx",
        "multiprocessing",
    }
    assert all(row["ours"] > 0 and row["theirs"] > 0 for row in rows)
    assert all(f"| {row['what']} |" in capsys.readouterr().out for row in rows[:1])
