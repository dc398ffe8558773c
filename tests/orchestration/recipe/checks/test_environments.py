"""What an environment does not go with."""

from __future__ import annotations

from pathlib import Path

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


def test_rows_choose_one_of_several_environments(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1-7?", "answer": 3}')
    overrides = (
        'environment.use={game="guess", sums="calculator"}',
        *(f"prompts.{key}={value}" for key, value in (("source", '"jsonl"'), ("task", '""'))),
        f'prompts.path="{rows}"',
    )
    found = {problem.key: str(problem) for problem in problems(SHIPPED / "guess.toml", *overrides)}
    assert "column 'environment', with which a row chooses" in found["prompts.path"]
    assert "['game', 'sums']" in found["prompts.path"]
