"""math-verify, unchanged, as docs/rewards.md uses it."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from orchestration.recipe.load import parse_recipe
from orchestration.rewards.pool import reward_pool, reward_set
from stages.rewards.calls import CallFailed, LocalCaller
from tests.orchestration.runs import TINY

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "rewards.md").read_text(encoding="utf-8")
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


async def test_the_example_of_the_page_scores_and_its_own_timeouts_work(module: str, tmp_path: Path) -> None:
    recipe = parse_recipe({**TINY, **tomllib.loads(PAGE.partition("```toml\n")[2].partition("```")[0])})
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


async def test_it_cannot_be_called_from_a_thread(module: str) -> None:
    """Why it takes a process."""
    caller = LocalCaller([module])
    with pytest.raises(CallFailed, match=r"raised ValueError.*signal\.alarm"):
        await caller.call(module, {"completions": ["$1$"], "answer": ["$1$"]}, 20.0)
