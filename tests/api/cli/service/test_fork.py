"""``asyncdock runs fork``: new runs that begin with a checkpoint of another one, here and of a
service."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from api.cli import main as cli
from api.cli.common.exit_codes import BAD_INPUT, FINISHED
from tests.api.cli.service.test_view import asyncdock, executing, going_on, until_saved
from tests.api.faulty import RUN, Service, served

TINY = {
    "train.steps": 2,
    "checkpoint.every": 1,
    "checkpoint.keep": 2,
    "evaluate.every": 0,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints."""
    folder = tmp_path_factory.mktemp("forks") / "parent"
    sets = [f"--set={key}={value}" for key, value in TINY.items()]
    asyncdock("run", "tiny", *sets, "--set=name=parent", "--out", folder, "--plain")
    return folder


def weights(model: Path) -> bytes:
    return (model / "model.safetensors").read_bytes()


def test_a_fork_of_a_folder_is_trained_here_from_the_checkpoint(run: Path, tmp_path: Path) -> None:
    saved = [run / "checkpoints" / f"step-0000000{step}" / "model" for step in (1, 2)]
    assert weights(saved[0]) != weights(saved[1])
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for name, model in ((f"{run}@1", saved[0]), (str(run), saved[1])):
        out = tmp_path / model.parent.name
        sets = ("--set=train.steps=1", "--set=train.learning_rate=1e-4")
        lines = asyncdock("runs", "fork", name, *sets, "--out", out, "--json").splitlines()
        steps = [json.loads(line) for line in lines if '"kind": "step"' in line]
        assert [step["data"]["step"] for step in steps] == [1]
        recipe = json.loads((out / "recipe.json").read_text())
        assert (recipe["name"], recipe["train"]["learning_rate"]) == ("parent-fork", 1e-4)
        assert recipe["model"]["source"] == str(out / "base" / "model")
        assert weights(out / "base" / "model") == weights(model)
        assert json.loads((out / "summary.json").read_text())["state"] == "finished"
    assert {path: path.read_bytes() for path in before} == before


def test_a_live_run_is_forked_as_it_began(tmp_path: Path) -> None:
    with executing(tmp_path / "live"):
        said = asyncdock(
            "runs", "fork", tmp_path / "live", "--out", tmp_path / "no", code=BAD_INPUT
        )
        assert "has no checkpoint yet; wait for one (checkpoint.every), ask for one with" in said
        sets = ("--set=train.steps=2", "--set=rollout.mock.time_scale=0.01")
        out = tmp_path / "fork"
        asyncdock("runs", "fork", f"{tmp_path / 'live'}@0", *sets, "--out", out, "--plain")
    assert json.loads((out / "summary.json").read_text())["steps"] == 2
    assert not (tmp_path / "no").exists()


def test_a_checkpoint_that_a_live_run_is_about_to_remove_is_forked_exported_and_offered(
    tmp_path: Path,
) -> None:
    """It saves one at each step and has two of them."""
    live = tmp_path / "live"
    sets = ("--set=train.steps=2000", "--set=checkpoint.every=1", "--set=checkpoint.keep=2")
    with going_on("tiny", live, *sets):
        until_saved(live, 4)
        out = tmp_path / "fork"
        asyncdock("runs", "fork", live, "--set=train.steps=1", "--out", out, "--plain")
        assert weights(out / "base" / "model")
        said = asyncdock("runs", "fork", f"{live}@1", "--out", tmp_path / "no", code=BAD_INPUT)
        assert "has no checkpoint of it; it has: " in said
        asyncdock("export", live, "--to", tmp_path / "exported")
        assert weights(tmp_path / "exported")
        data = tmp_path / "data"
        asyncdock("token", "create", "ann", "--scope=run", "--data", data)
        words = ("checkpoint", "offer", live, "--base=tiny", "--token=ann", "--data", data)
        assert "tinker://live/weights/step-" in asyncdock(*words)
        assert ": whole (" in asyncdock("checkpoint", "verify", live)


def test_what_cannot_be_forked_says_why_and_leaves_nothing(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def refused(*words: str) -> str:
        said = asyncdock("runs", "fork", *words, "--out", out, code=BAD_INPUT)
        assert not out.exists()
        return said

    assert "has no checkpoint of it; it has: 1, 2" in refused(f"{run}@7")
    assert "did you mean 'steps'?" in refused(str(run), "--set=train.stepz=1")
    assert "is not key=value" in refused(str(run), "--set=train.steps")
    absent = run.with_name("parentt")
    assert f"run: {absent} does not exist; " in refused(str(absent))
    damaged = tmp_path / "damaged"
    shutil.copytree(run, damaged)
    model = damaged / "checkpoints" / "step-00000002" / "model" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"x")
    assert "or fork an older one, as" in refused(str(damaged))


def test_a_service_is_asked_for_the_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(Service()) as service:
        monkeypatch.setenv("ASYNCDOCK_SERVER", service.url)

        def fork(*words: str) -> tuple[int, str, str]:
            result = CliRunner().invoke(cli.app, ["runs", "fork", *words])
            return result.exit_code, result.stdout, result.stderr

        code, out, err = fork(f"{RUN}@2", "--set", "train.steps=5")
        assert (code, out) == (FINISHED, "scripted-0\n")
        assert "asyncdock runs watch scripted-0" in err
        assert json.loads(fork(RUN, "--json")[1])["id"] == "scripted-1"
        assert service.bodies == [
            {"run": RUN, "version": 2, "overrides": {"train.steps": 5}},
            {"run": RUN, "version": None, "overrides": {}},
        ]
        assert fork(RUN, "--out", "x")[2].startswith("error: --out: is for runs in folders")
