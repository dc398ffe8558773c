"""What a stage and a reward of the user see of the environment of a run, in real processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from stages.flow import UserStage
from tests.orchestration.runs import MOCK, complete, recipe

HERE = "tests.orchestration.run.test_user_environment"
SECRETS = {"ASYNCDOCK_TOKEN": "a-token-of-ours", "ASYNCDOCK_HOST_TOKEN": "a-password-of-ours"}
STORE = {"AWS_SECRET_ACCESS_KEY": "a-key-of-the-store"}


def shown() -> bytes:
    return repr(dict(os.environ)).encode() + Path("/proc/self/environ").read_bytes()


class Shows(UserStage):
    """Writes what it sees of the environment to ``file``."""

    file: str

    needs: ClassVar = ("response_ids",)
    makes: ClassVar = {"mark": "float32"}

    def process(self, rows: Any) -> dict[str, Any]:
        with open(self.file, "ab") as file:
            file.write(shown())
        return {"mark": torch.zeros(len(rows["response_ids"]))}


def marked(completions: list[str], mark: list[float], file: str = "", **_: Any) -> list[float]:
    with open(os.environ["SHOWN_BY_REWARDS"], "ab") as out:
        out.write(shown())
    return [value + len(text) for value, text in zip(mark, completions, strict=True)]


@pytest.mark.parametrize("listed", [None, ["SHOWN_BY_REWARDS"]])
async def test_code_of_the_user_sees_no_secret(
    listed: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``listed``: as in a run of a service."""
    for name, value in {**SECRETS, **STORE, "SHOWN_BY_REWARDS": str(tmp_path / "rewards")}.items():
        monkeypatch.setenv(name, value)
    table = {"use": f"{HERE}:Shows", "file": str(tmp_path / "stage")}
    changes = {"launch__launcher": "process", "reward__functions": [{"name": f"{HERE}:marked"}]}
    of = recipe({**MOCK, "stages": [table]}, train__steps=2, reward__environment=listed, **changes)
    _, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    for name in ("stage", "rewards"):
        seen = (tmp_path / name).read_bytes()
        assert b"PATH" in seen
        for variable, value in SECRETS.items():
            assert variable.encode() not in seen
            assert value.encode() not in seen
        assert b"ASYNCDOCK_INDEX" not in seen
        assert (b"a-key-of-the-store" in seen) == (listed is None)
