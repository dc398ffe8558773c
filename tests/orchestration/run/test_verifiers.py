"""A whole run on a taskset of verifiers, with rows as the documentation makes them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.compat.extras import is_installed
from tests.orchestration.run.test_programs import chat
from tests.orchestration.run.test_run import assert_each_sample_once, assert_nothing_left
from tests.orchestration.run.test_trajectories import environments_of, run_of
from tests.orchestration.runs import complete
from tests.pages.page import ROOT, blocks
from tests.stages.environments import tasksets

TASKSETS = Path(tasksets.__file__).parent


pytestmark = pytest.mark.skipif(
    not is_installed("verifiers"), reason="verifiers is not installed: it wants an older openai"
)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """The rows of a taskset, as the page makes them."""
    page = ROOT / "docs" / "moving.md"
    [program] = [block.text for block in blocks(page) if block.file == "rows.py"]
    path = tmp_path / "tasks.jsonl"
    with path.open("w") as file:
        python = [sys.executable, "-c", program, "twice"]
        subprocess.run(python, stdout=file, check=True, cwd=TASKSETS)
    assert path.read_text() == '{"prompt": "Yes or no?", "task": 0}\n'
    return path


async def test_a_run_is_trained_on_a_taskset(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(TASKSETS))
    prompts = {"source": "jsonl", "path": str(rows), "task": None, "max_prompt_tokens": 16}
    of = chat(
        tmp_path,
        **{f"prompts__{name}": value for name, value in prompts.items()},
        environment__use="verifiers:twice",
        environment__on_error="zero",
        environment__max_tokens=64,
        train__steps=2,
    )
    watched, result = await complete(run_of(of, tmp_path / "run"))
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, watched)
    counts = environments_of(watched)
    assert counts["branches"] == 0
    assert counts["ended_done"] > 0
    assert_nothing_left(watched.run)
