"""Whole runs with each optimizer beside the default one."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestration.recipe.problems import RecipeError
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from pipeline.compat.extras import is_installed
from tests.orchestration.run.test_run import assert_equal, trained
from tests.orchestration.runs import TINY, complete, recipe

EIGHT_BITS = pytest.mark.skipif(not is_installed("torchao"), reason="needs the extra optimizers")


@pytest.mark.parametrize("name", ["muon", pytest.param("adamw8bit", marks=EIGHT_BITS)])
async def test_a_run_resumes_to_the_weights_of_one_that_never_stopped(
    tmp_path: Path, name: str
) -> None:
    options = {"pipeline__staleness": 0, "train__optimizer": name}
    whole = recipe(TINY, **options, train__steps=5)
    _, at_once = await complete(Execution(RunFolder.create(whole, tmp_path / "whole")))
    assert at_once.state == "finished", at_once.reason
    await complete(
        Execution(RunFolder.create(recipe(TINY, **options, train__steps=3), tmp_path / "run"))
    )
    with pytest.raises(RecipeError, match=r"train.optimizer = \"adamw\": cannot change in a resu"):
        Execution(RunFolder.resume(tmp_path / "run", ["train.optimizer=adamw"]))
    _, result = await complete(Execution(RunFolder.resume(tmp_path / "run", ["train.steps=5"])))
    assert result.state == "finished", result.reason
    assert_equal(trained(whole, result), trained(whole, at_once))
