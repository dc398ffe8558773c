"""Forks of a run: new ones that begin with the weights of its checkpoints, and have files of their
own. And recipes as text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.site import Site, site

TINY = {
    "train.steps": 2,
    "train.groups_per_step": 2,
    "algorithm.group_size": 2,
    "checkpoint.every": 1,
    "evaluate.every": 0,
    "model.lora.rank": 2,
}
TOML = 'extends = "mock"\nname = "typed"\n\n[train]\nsteps = 3\n'


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("service")) as started:
        yield started


@pytest.fixture(scope="module")
def parent(served: Site) -> str:
    return served.finished({**TINY, "name": "parent"}, recipe="tiny")


def model_of(run: dict[str, object]) -> Path:
    recipe = run["recipe"]
    assert isinstance(recipe, dict)
    return Path(recipe["model"]["source"])


def test_a_fork_begins_with_a_checkpoint_and_outlives_the_run_that_it_is_of(
    served: Site, tmp_path: Path
) -> None:
    parent = served.finished({**TINY, "name": "parent"}, recipe="tiny")
    checkpoints = served.data / "runs" / parent / "checkpoints"
    body = {"run": parent, "version": 1, "overrides": {"train.learning_rate": 1e-4}}
    checked = served.ask_for("POST", "v1/recipes/check", body)
    assert checked.status == 200, checked
    assert checked.body["recipe"]["name"] == "parent-fork"
    answer = served.ask_for("POST", "v1/runs", body)
    assert answer.status == 201, answer
    fork = answer.body["id"]
    assert answer.body["recipe"]["train"]["learning_rate"] == 1e-4
    model = model_of(answer.body)
    assert model == served.data / "runs" / fork / "base" / "model"
    weights = (checkpoints / "step-00000001" / "model" / "model.safetensors").read_bytes()
    assert served.ask_for("DELETE", f"v1/runs/{parent}").status == 204
    served.until(lambda: not checkpoints.exists(), "the folder of the deleted run is gone")
    served.until(lambda: served.run(fork)["state"] == "finished", "the fork has finished")
    assert (model / "model.safetensors").read_bytes() == weights

    more = {"overrides": {"train.steps": 3}}
    assert served.ask_for("POST", f"v1/runs/{fork}/resume", more).status == 202
    served.until(lambda: served.run(fork)["steps_done"] == 3, "the fork goes on")
    served.until(lambda: served.run(fork)["state"] == "finished", "the fork has finished again")
    # A fork of the fork from its beginning has the same weights, and is named as one.
    again = served.ask_for("POST", "v1/runs", {"run": fork, "version": 0}).body
    assert again["name"] == "parent-fork"
    assert (model_of(again) / "model.safetensors").read_bytes() == weights
    assert model_of(again) != model
    served.ask(again["id"], "stop")
    served.until(lambda: served.run(again["id"])["ended"], "the third run has ended")
    for run in (fork, again["id"]):
        assert served.ask_for("DELETE", f"v1/runs/{run}").status == 204
        folder = served.data / "runs" / run
        served.until(lambda folder=folder: not folder.exists(), f"the folder of {run} is gone")


def test_a_checkpoint_that_a_live_run_is_about_to_remove_is_forked(served: Site) -> None:
    """It saves one at each step and has one of them."""
    changes = {**TINY, "train.steps": 2000, "checkpoint.keep": 1}
    with served.running(changes, recipe="tiny") as run:
        folder = served.data / "runs" / run / "checkpoints"
        served.until(lambda: [*folder.glob("step-*/run.json")], "it has a checkpoint")
        answer = served.ask_for("POST", "v1/runs", {"run": run})
        assert answer.status == 201, answer
        assert (model_of(answer.body) / "model.safetensors").is_file()
        served.until(lambda: not (folder / "step-00000001").exists(), "the first one is gone")
        gone = served.ask_for("POST", "v1/runs", {"run": run, "version": 1})
        assert (gone.status, gone.body["field"]) == (409, "version")
        assert "has no checkpoint of it; it has: " in gone.body["detail"]
        served.ask(answer.body["id"], "stop")


def test_what_cannot_be_forked_says_why_and_leaves_nothing(served: Site, parent: str) -> None:
    before = sorted((served.data / "runs").iterdir())
    fork = {"run": parent}
    for body, status, field in (
        ({"run": "none-such"}, 404, None),
        ({**fork, "version": 7}, 409, "version"),
        ({**fork, "overrides": {"train.stepz": 1}}, 422, "train.stepz"),
        ({**fork, "overrides": {"model.source": "/etc"}}, 422, "model.source"),
        (
            {**fork, "overrides": {"model.reference": str(served.data / "runs" / parent)}},
            422,
            "model.reference",
        ),
    ):
        answer = served.ask_for("POST", "v1/runs", body)
        assert answer.status == status, answer
        assert field is None or answer.body["field"] == field, answer
    assert sorted((served.data / "runs").iterdir()) == before


def test_a_run_without_a_checkpoint_is_forked_from_its_beginning(served: Site) -> None:
    mock = served.finished({"name": "unsaved", "train.steps": 1})
    for folder in (served.data / "runs" / mock / "checkpoints").glob("step-*"):
        folder.rename(folder.with_name("aside"))
    fork = served.ask_for("POST", "v1/runs", {"run": mock}).body
    assert fork["recipe"]["model"] == served.run(mock)["recipe"]["model"]
    served.until(lambda: served.run(fork["id"])["state"] == "finished", "the fork has finished")


def test_weights_that_are_on_another_machine_are_not_taken_for_none(
    served: Site, parent: str
) -> None:
    folder = served.data / "runs" / parent
    folder.rename(folder.with_name("elsewhere"))
    try:
        refused = served.ask_for("POST", "v1/runs", {"run": parent})
        assert (refused.status, refused.body["field"]) == (409, "version")
        assert f"are in {folder} on another machine" in refused.body["detail"]
        assert "or give version 0" in refused.body["fix"]
    finally:
        folder.with_name("elsewhere").rename(folder)


def test_a_recipe_as_text_is_checked_with_the_line_of_what_is_wrong(served: Site) -> None:
    checked = served.ask_for("POST", "v1/recipes/check", {"toml": TOML})
    assert checked.body["recipe"]["train"]["steps"] == 3
    named = {"toml": TOML, "overrides": {"name": "other"}}
    assert served.ask_for("POST", "v1/recipes/check", named).body["recipe"]["name"] == "other"
    broken = served.ask_for("POST", "v1/recipes/check", {"toml": f"{TOML}steps = =\n"})
    assert (broken.status, broken.body["field"]) == (422, "toml")
    assert "at line 6" in broken.body["detail"], broken.body
    wrong = served.ask_for("POST", "v1/recipes/check", {"toml": f"{TOML}stepz = 1\n"})
    assert (wrong.status, wrong.body["field"]) == (422, "train.stepz")
    run = served.ask_for("POST", "v1/runs", {"toml": TOML}).body
    served.until(lambda: served.run(run["id"])["state"] == "finished", "the run has finished")
