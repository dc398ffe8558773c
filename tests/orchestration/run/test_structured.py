"""A whole run whose responses have a structure."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestration.recipe.problems import RecipeError
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from tests.orchestration.runs import TINY, complete, recipe


@pytest.mark.parametrize("ranks", [{}, {"dp": 2}, {"tp": 2}, {"pp": 2}])
async def test_a_structured_run_is_on_policy_in_its_first_step(
    tmp_path: Path, ranks: dict[str, int]
) -> None:
    of = recipe(
        TINY,
        rollout__structure={"regex": "(ab|ca)[0-9]{1,2}"},
        rollout__max_tokens=8,
        rollout__budget=3,
        pipeline__staleness=2,
        algorithm__options={"kl_coef": 0.01},
        evaluate__every=3,
        train__steps=3,
        **{f"train__{name}": count for name, count in ranks.items()},
        **({"launch__launcher": "process"} if ranks else {}),
    )
    watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    steps = watched.of("step")
    assert len(steps) == 3
    for step in steps:
        assert step["gap_max"] < 1e-4 or step["staleness_max"] > 0
    assert steps[0]["gap_max"] < 1e-4
    assert steps[0]["entropy"] < 3
    swaps = [event for event in watched.of("sync") if event.get("gap_max") is not None]
    assert swaps
    assert all(swap["gap_max"] < 1e-3 for swap in swaps), "probes have no structure"
    with pytest.raises(RecipeError, match=r"rollout.structure.* cannot change in a resumed run"):
        Execution(RunFolder.resume(tmp_path / "run", ['rollout.structure.regex="a"']))
