"""A teacher behind a server: logprobs, errors in words, and a run that is distilled from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from orchestration.recipe.problems import RecipeError
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from pipeline.data.columns import Packed
from stages.engines.torch.train import TorchTrainEngine
from stages.flow.catalogue import BRANCHES
from stages.inference.teacher import (
    TeacherOptions,
    TeacherRefused,
    TeacherServer,
    TeacherUnreachable,
)
from stages.model.load import load_model, tiny_tokenizer
from tests.batches import tiny_rows
from tests.orchestration.run.test_run import assert_nothing_left
from tests.orchestration.runs import TINY, complete, recipe
from tests.teachers import TinyTeacher, serving

DISTILLED: dict[str, Any] = {
    "algorithm__name": "distillation",
    "train__steps": 4,
    "reward__functions": [{"name": "spelling"}],
}


async def logprobs_of(
    teacher: TinyTeacher,
    rows: list[tuple[list[int], list[int]]],
    branches: list[list[int]] | None = None,
    **options: Any,
) -> list[torch.Tensor]:
    server = TeacherServer(
        TeacherOptions(teacher.url, **{"wait": 0.01, **options}), tiny_tokenizer()
    )
    try:
        await server.open()
        return await server.logprobs(rows, branches or [])
    finally:
        await server.close()


@pytest.mark.parametrize("way", ["prompt_logprobs", "echo"])
async def test_logprobs_are_those_of_the_reference_stage(way: str) -> None:
    """Also while the server is busy at first, and of rows with branches."""
    batch, rows = tiny_rows()
    model, _ = load_model("tiny", dtype=torch.float32, seed=0)
    engine = TorchTrainEngine(model, learning_rate=1e-3, total_steps=1, device="cpu", threads=1)
    branches = [
        [begin for begin in (n // 2, n // 2 - 1) if n > 3] for n in (len(r) for _, r in rows)
    ]
    for columns in ([], branches):
        if columns:
            batch[BRANCHES] = torch.nested.nested_tensor(
                [torch.tensor(column, dtype=torch.int64) for column in columns],
                layout=torch.jagged,
            )
        with serving(TinyTeacher(way=way, busy=2)) as teacher:
            found = await logprobs_of(teacher, rows, columns)
        for got, expected in zip(found, engine.logprobs(batch).unbind(), strict=True):
            assert got.dtype == torch.float32
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


async def test_the_most_probable_tokens_are_those_of_the_reference_stage() -> None:
    batch, rows = tiny_rows()
    model, _ = load_model("tiny", dtype=torch.float32, seed=0)
    engine = TorchTrainEngine(model, learning_rate=1e-3, total_steps=1, device="cpu", threads=1)
    expected = [Packed.of(each).rows() for each in engine.top_logprobs(batch, 5)]
    with serving(TinyTeacher()) as teacher:
        server = TeacherServer(TeacherOptions(teacher.url), tiny_tokenizer(), 5)
        await server.open()
        found = await server.top_logprobs(rows)
        await server.close()
    for got, wanted in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    for got, wanted in zip(found[1], expected[1], strict=True):
        assert torch.equal(got, wanted)


async def test_a_server_that_gives_too_few_tokens_is_refused() -> None:
    with serving(TinyTeacher(most=3)) as teacher:
        server = TeacherServer(TeacherOptions(teacher.url), tiny_tokenizer(), 5)
        with pytest.raises(TeacherRefused, match=r"top_k is 5.*--max-logprobs"):
            await server.open()
        await server.close()


async def test_what_a_server_cannot_do_is_said_in_words(caplog: pytest.LogCaptureFixture) -> None:
    row = [([5, 6], [7])]
    for unfit, message in (
        (
            TinyTeacher(way="none"),
            r"gives no logprobs of a prompt .* use one that has "
            r"`prompt_logprobs`",
        ),
        (
            TinyTeacher(shift=1),
            r"splits 'What is .* use a teacher with the tokenizer of "
            r"model\.source",
        ),
        (TinyTeacher(way="echo", shift=1), r"reads the token"),
    ):
        with serving(unfit), pytest.raises(TeacherRefused, match=message):
            await logprobs_of(unfit, row)
    with serving(TinyTeacher(key="secret-1234")) as teacher:
        assert len(await logprobs_of(teacher, row, key="secret-1234")) == 1
        with pytest.raises(
            TeacherRefused,
            match=r"401: it wants another key; "
            r"teacher\.api_key_variable",
        ) as denied:
            await logprobs_of(teacher, row, key="wrong-key-9")
        assert (
            "wrong-key-9"
            not in f"{denied.value}{caplog.text}{TeacherOptions('u', key='wrong-key-9')}"
        )
    with serving(TinyTeacher(busy=99)) as teacher:
        with pytest.raises(TeacherUnreachable, match="answers 503 'try again'"):
            await logprobs_of(teacher, row, retries=2)
        assert teacher.busy == 96
    slow = TinyTeacher(delay=1.0)
    with serving(slow), pytest.raises(TeacherUnreachable, match=r"no answer within 0\.2 s"):
        await logprobs_of(slow, row, retries=0, timeout=0.2)
    with pytest.raises(TeacherUnreachable, match="cannot be reached"):
        await logprobs_of(teacher, row, retries=1)


async def test_a_run_is_distilled_from_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER_KEY", "secret-1234")
    with serving(TinyTeacher(key="secret-1234", delay=0.05)) as teacher:
        section = {
            "teacher__url": teacher.url,
            "teacher__api_key_variable": "TEACHER_KEY",
            "teacher__in_flight": 3,
        }
        of = recipe(TINY, **DISTILLED, **section)
        watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    # The teacher is the model that the student begins with: at first they agree.
    assert abs(watched.of("step")[0]["reverse_kl"]) < 1e-4
    assert abs(watched.of("step")[-1]["reverse_kl"]) < 1.0, "estimated from few tokens"
    assert set(teacher.asked[-16:]) == {4}, "one request for each group"
    assert 1 < teacher.most_at_once <= 3
    kept = [
        path
        for path in (tmp_path / "run").rglob("*")
        if path.is_file() and b"secret-1234" in path.read_bytes()
    ]
    assert not kept
    assert_nothing_left(watched.run)


async def test_a_run_learns_from_distributions_of_a_server(tmp_path: Path) -> None:
    changes = {**DISTILLED, "algorithm__name": "gkd", "algorithm__options": {"top_k": 8}}
    with serving(TinyTeacher()) as teacher:
        of = recipe(TINY, **changes, teacher__url=teacher.url)
        watched, result = await complete(Execution(RunFolder.create(of, tmp_path / "run")))
    assert result.state == "finished", result.reason
    assert abs(watched.of("step")[0]["divergence"]) < 1e-4
    assert 8 / 49 < watched.of("step")[0]["teacher_mass"] < 1


def test_a_check_asks_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(message: str, **changes: Any) -> None:
        with pytest.raises(RecipeError, match=message):
            recipe(TINY, **{**DISTILLED, **changes})

    with serving(TinyTeacher()) as teacher:
        recipe(TINY, **DISTILLED, teacher__url=teacher.url)
        refused(
            r"not 1, but the server teacher\.url "
            r"gives",
            teacher__url=teacher.url,
            rollout__temperature=0.7,
        )
        refused("is asked by no stage: grpo", teacher__url=teacher.url, algorithm__name="grpo")
        refused("take one of the two out", teacher__url=teacher.url, model__reference="tiny")
        refused(
            "UNSET_KEY.*is not set in the environment",
            teacher__url=teacher.url,
            teacher__api_key_variable="UNSET_KEY",
        )
    refused(r"belongs to a teacher without teacher\.url", teacher__model="x")
    with serving(TinyTeacher(way="none")) as teacher:
        refused(r"teacher.url = .* gives no logprobs of a prompt", teacher__url=teacher.url)
