"""The commands ``tinker …`` of the newest SDK, in a program of its environment: what docs/tinker.md
says of each. FOLDER gets what ``checkpoint download`` writes."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import tinker
from click.testing import CliRunner
from tinker.cli.__main__ import main_cli
from tinker.cli.exceptions import TinkerCliError


def run(*words: str) -> Any:
    result = CliRunner().invoke(main_cli, ["--format", "json", *words], catch_exceptions=False)
    assert result.exit_code == 0, (words, result.output)
    try:
        return json.loads(result.stdout)
    except ValueError:
        return result.output


def refusal(*words: str) -> str:
    result = CliRunner().invoke(main_cli, [*words])
    error = result.exception
    assert isinstance(error, TinkerCliError | RuntimeError), (words, error, result.output)
    return f"{error} {getattr(error, 'details', '')}"


def main(folder: Path) -> None:
    service = tinker.ServiceClient()
    trainer = service.create_lora_training_client(base_model="tiny", rank=4).result()
    path = trainer.save_state("kept").result().path
    model = path.removeprefix("tinker://").partition("/")[0]
    assert "tiny" in str(run("model", "list"))
    assert model in str(run("run", "list"))
    assert model in str(run("run", "info", model))
    assert path in str(run("checkpoint", "list", "--run-id", model))
    assert path in str(run("checkpoint", "info", path))
    for command, is_public in (("publish", True), ("unpublish", False)):
        run("checkpoint", command, path)
        (listed,) = tinker.RestClient().list_checkpoints(model).result().checkpoints
        assert listed.public is is_public
    run("checkpoint", "set-ttl", path, "--ttl", "3600")
    run("checkpoint", "download", path, "--output", str(folder / "parent"))
    (downloaded,) = (folder / "parent").iterdir()
    shutil.copytree(downloaded, folder, dirs_exist_ok=True)
    run("checkpoint", "delete", path, "--yes")
    assert tinker.RestClient().list_checkpoints(model).result().checkpoints == []
    assert "yes" in run("auth", "status")
    assert tinker.__version__ in str(run("version"))
    for words in (
        ("auth", "whoami"),
        ("billing", "usage", "2026-01-01", "2026-01-02"),
        ("billing", "checkpoint-storage"),
        ("session", "export-trace", model.partition(":")[0]),
    ):
        assert "500" not in refusal(*words), words
    print("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
