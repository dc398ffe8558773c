"""math-verify, unchanged, as docs/rewards.md uses it."""

from __future__ import annotations

import math
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from orchestration.recipe.loading.load import parse_recipe
from orchestration.rewards.functions import reward_pool, reward_set
from stages.rewards.calls import CallFailed, LocalCaller
from stages.tasks import answers
from tests.orchestration.runs import TINY

REWARDS = Path(__file__).resolve().parents[3] / "docs" / "rewards.md"
PAGE = REWARDS.read_text(encoding="utf-8").partition("## math-verify")[2]
HARD = "$10^{10^{10}}+1$"  # math-verify gives up comparing it after 5 s, by an alarm


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("math_verify")
    (tmp_path / "math_rewards.py").write_text(PAGE.partition("```python\n")[2].partition("```")[0])
    rows = PAGE.partition("Rows of `sums.jsonl`:\n\n```json\n")[2].partition("```")[0]
    (tmp_path / "sums.jsonl").write_text(rows, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("math_rewards", None)
    return "math_rewards:correct"


async def test_the_example_of_the_page_scores_and_its_own_timeouts_work(
    module: str, tmp_path: Path
) -> None:
    recipe = parse_recipe(
        {**TINY, **tomllib.loads(PAGE.partition("```toml\n")[2].partition("```")[0])}
    )
    assert [function.name for function in recipe.reward.functions] == [module]
    rewards = reward_set(recipe, reward_pool(recipe, tmp_path / "log"))
    texts = ["it is $0.5$", "so \\boxed{\\frac{2}{4}}", "it is 2", HARD]
    answers = [{"answer": answer} for answer in ("$\\frac{1}{2}$", "$\\frac{1}{2}$", "$3$", "$1$")]
    try:
        scores = await rewards.score(["q"] * 4, texts, [[1]] * 4, answers)
    finally:
        await rewards.close()
    assert scores.total.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert not scores.failed.any()


@pytest.mark.parametrize("name", ["exact_number", "arithmetic"])
async def test_the_worker_has_a_sandbox_compute_what_a_model_or_a_row_wrote(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("math_verify")
    monkeypatch.setattr(answers, "_math_verify", lambda: pytest.fail("computed in this process"))
    recipe = parse_recipe({**TINY, "reward": {"functions": [{"name": name}, {"name": "spelling"}]}})
    log = tmp_path / "logs" / "rewards.log"
    rewards = reward_set(recipe, reward_pool(recipe, log))

    async def score(texts: list[str], wanted: list[Any]) -> list[float]:
        rows = [{"answer": answer} for answer in wanted]
        found = await rewards.score(["q"] * len(texts), texts, [[1]] * len(texts), rows)
        assert not found.failed.any()
        return found.scores[:, 0].tolist()

    try:
        await rewards.open()
        wrong = {"exact_number": 0.0, "arithmetic": 0.1}[name]
        assert await score(["4", "5"], ["4", 4]) == pytest.approx([1.0, wrong])
        assert not log.exists(), "no process is needed for numbers"
        texts = ["4", r"\boxed{\sqrt{16}}", "2", r"\boxed{2+2}", "3"]
        found = await score(texts, ["4", 4, r"\boxed{\sqrt{4}}", ["4", 5], None])
    finally:
        await rewards.close()
    assert [score >= 0.5 for score in found[:4]] == [True] * 4
    assert math.isnan(found[4]), "a row without an answer has no score"


async def test_it_cannot_be_called_from_a_thread(module: str) -> None:
    """Why it takes a process."""
    caller = LocalCaller([module])
    with pytest.raises(CallFailed, match=r"raised ValueError.*signal\.alarm"):
        await caller.call(module, {"completions": ["$1$"], "answer": ["$1$"]}, 20.0)
