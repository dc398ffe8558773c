"""The benchmark of drafts: both arms make the same tokens, and drafts need fewer forwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.engines.drafts import main


def test_the_smoke_run_compares_both_arms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--smoke", "--json", str(tmp_path / "drafts.json")])
    new, again = json.loads((tmp_path / "drafts.json").read_text())["rows"]
    assert (new["prompts"], again["prompts"]) == ("new", "again")
    assert new["a_forward"] >= 1.0
    assert again["a_forward"] > 1.5
    assert new["with"] > 0 < again["without"]
    assert "responses differ" not in capsys.readouterr().out
