"""What an environment does not go with."""

from __future__ import annotations

from orchestration.recipe.loading.load import SHIPPED
from tests.orchestration.recipe.minimal import problems

PROGRAM = 'environment.use="tests.orchestration.run.games:chat"'


def test_programs_may_branch_which_trainers_of_others_do_not_know() -> None:
    game = SHIPPED / "guess.toml"
    engine = 'train.engine="tests.orchestration.dying:dying"'
    for override in (engine, 'external.stages=["update"]'):
        keys = {problem.key: str(problem) for problem in problems(game, PROGRAM, override)}
        key = override.partition("=")[0]
        assert "does not know the branches of programs" in keys[key]
        of_class = {
            problem.key: str(problem) for problem in problems(game, override, "train.steps=0")
        }
        assert "branches" not in of_class.get(key, "")
