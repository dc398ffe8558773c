"""Sandboxes in recipes: what has no effect, what a machine does not give, and what is said of a
weaker one."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestration.recipe.loading.load import SHIPPED, load_recipe
from orchestration.recipe.sizes.planner import notices_of
from orchestration.sandbox import sandbox
from orchestration.sandbox.sandbox import Available
from tests.orchestration.recipe.minimal import problems

OWN = "tests.orchestration.scores:early_letters"
GYM = (
    '[model]\nsource = "tiny"\n[prompts]\nsource = "reasoning_gym"\ntask = '
    '"n_queens"\n[train]\nsteps = 10\n'
)
NONE = Available("refused here", "not there")
WEAKER = Available("refused here", "")


def functions(*entries: str) -> str:
    return f"reward.functions=[{', '.join(entries)}]"


@pytest.fixture
def gym(tmp_path: Path) -> Path:
    pytest.importorskip("reasoning_gym")
    path = tmp_path / "gym.toml"
    path.write_text(GYM + '[reward]\nfunctions = [{ name = "reasoning_gym" }]\n')
    return path


@pytest.fixture
def guess() -> Path:
    return SHIPPED / "guess.toml"


def keys(path: Path, *overrides: str) -> dict[str, str]:
    return {problem.key: str(problem) for problem in problems(path, *overrides)}


def test_what_needs_a_sandbox_without_one_is_named(minimal: Path) -> None:
    own = f'{{name="{OWN}", network=true, read=["/etc/hosts"]}}'
    found = keys(minimal, functions(own, '{name="spelling", network=true}'))
    assert found.keys() == {
        f"reward.functions.{key}" for key in ("0.network", "0.read", "1.network")
    }
    assert "set reward.functions.0.sandbox = true" in found["reward.functions.0.network"]
    found = keys(
        minimal,
        functions(f'{{name="{OWN}", sandbox=true, read=["/no/such"]}}'),
        "reward.processes=0",
    )
    assert found.keys() == {"reward.processes", "reward.functions.0.read.0"}


def test_environments_are_in_a_sandbox_only_in_processes_of_their_own(guess: Path) -> None:
    found = keys(guess, "environment.network=true", 'environment.read=["words.txt"]')
    assert found.keys() == {"environment.network", "environment.read"}
    assert "set environment.sandbox = true" in found["environment.network"]
    sandboxed = "environment.sandbox=true"
    found = keys(guess, sandboxed, "launch.launcher=inline", 'environment.read=["/no/such"]')
    assert found.keys() == {"launch.launcher", "environment.read.0"}


def test_a_machine_without_a_sandbox_is_told_at_the_environments(
    guess: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "available", lambda: NONE)
    assert keys(guess, "environment.sandbox=true").keys() == {"environment.sandbox"}


def test_what_a_model_wrote_is_scored_by_installed_code_in_a_sandbox_alone(gym: Path) -> None:
    assert keys(gym, functions('{name="reasoning_gym", sandbox=false}')).keys() == {
        "reward.functions.0.sandbox"
    }
    assert keys(gym, "reward.processes=0").keys() == {"reward.processes"}


def test_a_machine_without_a_sandbox_is_told_at_the_task_and_at_the_function(
    gym: Path, minimal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "available", lambda: NONE)
    found = keys(gym)
    assert found.keys() == {"prompts.task"}
    assert (
        "namespaces are refused (refused here), and so is Landlock (not there)"
        in found["prompts.task"]
    )
    assert "user.max_user_namespaces" in found["prompts.task"]
    assert keys(minimal, functions(f'{{name="{OWN}", sandbox=true}}')).keys() == {
        "reward.functions.0.sandbox"
    }
    assert (
        load_recipe(minimal, [functions(f'{{name="{OWN}"}}')]).reward.functions[0].is_sandboxed
        is False
    )
    recipe = load_recipe(gym, ['prompts.task="chain_sum"'])  # evaluates nothing
    assert "no sandbox: namespaces are refused" in str(notices_of(recipe)[0])


def test_a_weaker_sandbox_is_a_notice(gym: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "available", lambda: WEAKER)
    (notice,) = [
        str(notice) for notice in notices_of(load_recipe(gym)) if "reasoning_gym" in str(notice)
    ]
    assert "Landlock's sandbox alone (names of files can be seen" in notice


def test_a_weaker_sandbox_of_environments_is_a_notice(
    guess: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "available", lambda: WEAKER)
    recipe = load_recipe(guess, ["environment.sandbox=true"])
    (notice,) = [found for found in notices_of(recipe) if found.key == "environment.sandbox"]
    assert "['guess'] get Landlock's sandbox alone" in str(notice)
    recipe = load_recipe(guess)
    assert "environment.sandbox" not in [found.key for found in notices_of(recipe)]


@pytest.mark.parametrize("given", [NONE, WEAKER])
def test_programs_need_a_sandbox_that_starts_processes(
    minimal: Path, given: Available, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = functions('{name="python_tests", options={tests="assert True"}}')
    load_recipe(minimal, [programs])
    monkeypatch.setattr(sandbox, "available", lambda: given)
    found = keys(minimal, programs)
    assert found.keys() == {"reward.functions.0.sandbox"}
    assert "namespaces are refused (refused here)" in found["reward.functions.0.sandbox"]


def test_a_model_that_grades_is_asked_without_a_sandbox(
    minimal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "available", lambda: NONE)
    judge = 'name="judge", options={url="http://127.0.0.1:8000/v1", model="m"}'
    model = 'name="reward_model", sandbox=false, options={model="models/m"}'
    load_recipe(minimal, [functions(f"{{{judge}}}", f"{{{model}}}")])
    assert keys(minimal, functions(f"{{{judge}, network=true}}")).keys() == {
        "reward.functions.0.network"
    }
    assert load_recipe(
        minimal, [functions(f"{{{judge}, sandbox=true, network=true}}")], files=False
    )
