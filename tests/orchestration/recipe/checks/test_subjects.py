"""Checks of a subject that few recipes have are imported for these alone, and find what is wrong
there: each recipe is checked in a process that has imported none of them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from orchestration.recipe.checks.registry import SUBJECTS
from orchestration.recipe.schema import Recipe
from tests.api.served import environment

CHECKED = """
import sys
from orchestration.recipe.loading.load import SHIPPED, load_recipe
from orchestration.recipe.problems import RecipeError
try:
    load_recipe(SHIPPED / "tiny.toml", sys.argv[1:], files=False)
except RecipeError as error:
    print(error)
print(*(name for name in sys.modules if name.startswith("orchestration.recipe.checks.")))
"""


def checked(*overrides: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-c", CHECKED, *overrides],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("subject", "override", "problem"),
    [
        ("adapters", "model.lora.alpha=3.0", "has no effect without model.lora.rank"),
        ("addresses", "launch.address='somewhere'", "is of a cluster"),
        ("addresses", "pipeline.tls_key='key.pem'", "or none for no TLS"),
        ("addresses", "launch.remote_rollouts=5", "is more than rollout.workers = 1"),
        ("examples", "prompts.chat_template_options={a=1}", ""),
        ("other_models", "teacher.timeout=3.0", "belongs to a teacher without teacher.url"),
        ("other_models", "model.reference='tiny'", ""),
        ("other_models", "critic.source='tiny'", ""),
        ("other_models", "rollout.draft_model='tiny'", ""),
    ],
)
def test_a_subject_that_a_recipe_has_is_checked(subject: str, override: str, problem: str) -> None:
    out = checked(override)
    assert problem in out
    imported = {name.rpartition(".")[2] for name in out.splitlines()[-1].split()}
    assert imported & {*SUBJECTS} == {subject}


def test_a_recipe_without_these_subjects_imports_none() -> None:
    [modules] = checked().splitlines()
    assert not [name for name in modules.split() if name.rpartition(".")[2] in SUBJECTS]


def test_the_keys_of_a_subject_are_keys_of_a_recipe() -> None:
    for key in {key for keys in SUBJECTS.values() for key in keys}:
        model: Any = Recipe
        for name in key.split("."):
            model = model.model_fields[name].annotation
