"""``asyncdock samples``: a run's samples by any filter, on terminals of any width and in pipes."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

from api.cli.common.exit_codes import BAD_INPUT, FINISHED
from api.cli.main import app
from api.schemas.samples import SampleView
from api.terminal.samples import sample_view
from benchmarks.runs.executed import executed
from orchestration.escapes import escaped
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from tests.orchestration.rewards import counted
from tests.orchestration.runs import MOCK, TINY, complete, recipe

STEPS = 4
ROWS = 16  # of a step
LONGEST = 12  # tokens of a response: all are cut there
HOSTILE = "good\x1b[2J\x9b31m\u202elive\r\u2066[red]bad\tend\n日本語"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has ended, with a stage of its own."""
    folder = tmp_path_factory.mktemp("runs") / "judged"
    judge = [{"use": "tests.api.cli.results.judge:Judge"}]
    made = recipe(MOCK | {"stages": judge}, train__steps=STEPS, rollout__max_tokens=LONGEST)
    _, result = asyncio.run(complete(Execution(RunFolder.create(made, folder))))
    assert result.state == "finished"
    return folder


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The folder of a run with a judge that fails, and the number of responses without a score."""
    folder = tmp_path_factory.mktemp("failing")
    functions = [{"name": f"{counted.__name__}:judge"}]
    changes = {"reward__functions": functions, "reward__retries": 0}
    made = recipe(TINY, train__steps=STEPS, reward__max_error_share=1.0, **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(counted.FILE, str(folder / "calls"))
        events = asyncio.run(executed(made, folder / "run"))
    steps = [event.data["rewards"] for event in events if event.kind == "step"]
    assert len(steps) == STEPS
    calls = [line.split() for line in (folder / "calls").read_text().splitlines()]
    failed = sum(result == "failed" for _, result, _ in calls)
    # those of calls after the last step are in no event
    lost = sum(int(step[functions[0]["name"]]["lost"]) for step in steps)
    assert 0 < lost <= failed
    return folder / "run", lost


def samples(*words: str | Path) -> tuple[list[dict[str, Any]], str]:
    """What is printed into a pipe, and what is said of it."""
    done = CliRunner().invoke(app, ["samples", *map(str, words)])
    assert done.exit_code == FINISHED, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def refused(*words: str | Path) -> str:
    done = CliRunner().invoke(app, ["samples", *map(str, words)])
    assert done.exit_code == BAD_INPUT, (done.stdout, done.stderr)
    return done.stderr


def test_a_folder_says_all_of_a_sample(run: Path) -> None:
    rows, said = samples(run, "--limit", "3", "--column", "length", "--column", "answer")
    assert len(rows) == 3
    assert "; older ones were not looked at: raise --limit.\n" in said
    for row in rows:
        assert row["versions"][0][0] <= row["step"]
        assert row["length"] == row["tokens"] == sum(tokens for _, tokens in row["versions"])
        assert row["rewards"].keys() == {"spelling"}
        assert row["answer"] == row["fields"]["answer"]
        odd = row["length"] % 2 == 1
        assert row["columns"] == {"row_weight": 1.0 + odd, "verdict": "odd" if odd else "even"}
        assert [(is_trained, tokens) for is_trained, tokens, _ in row["masked"]] == [
            (False, 1),
            *([(True, row["length"] - 1)] if row["length"] > 1 else []),
        ]
        assert "".join(text for _, _, text in row["masked"]) == row["response"]


def test_responses_that_were_dropped_as_they_failed_are_counted(failing: tuple[Path, int]) -> None:
    folder, lost = failing
    rows, said = samples(folder, "--failed")
    assert rows == []
    assert said.splitlines()[1:] == [
        f"Dropped with their groups: {lost} responses that {counted.__name__}:judge could not "
        "score; logs/flow-0.log has why."
    ]
    rows, said = samples(folder, "--no-failed")
    assert rows
    assert "dropped" not in said
    assert "dropped" not in samples(folder)[1]


def test_filters_are_those_of_all_samples(run: Path) -> None:
    every, said = samples(run, "--limit", "1000")
    steps = sorted({row["step"] for row in every})
    assert len(every) == STEPS * ROWS == len({(row["group"], row["place"]) for row in every})
    assert said == f"{len(every)} of {len(every)} samples of steps {steps[0]} to {steps[-1]}.\n"

    def fit(holds: Any) -> list[dict[str, Any]]:
        return [row for row in every if holds(row)]

    assert samples(run, "--step", steps[1])[0] == fit(lambda row: row["step"] == steps[1])[:10]
    group = every[20]["group"]
    assert samples(run, "--group", group)[0] == fit(lambda row: row["group"] == group)
    of_prompt = every[5]["prompt_id"]
    same = fit(lambda row: row["prompt"] == every[5]["prompt"])
    assert samples(run, "--prompt-id", of_prompt, "--limit", "1000")[0] == same
    text = every[7]["response"][2:6].upper()
    assert every[7] in samples(run, "--grep", text, "--limit", "1000")[0]
    cut = fit(lambda row: row["truncated"])
    assert samples(run, "--truncated", "--limit", "1000")[0] == cut
    assert len(samples(run, "--no-truncated", "--limit", "1000")[0]) == len(every) - len(cut)
    assert samples(run, "--failed")[0] == []
    odd = fit(lambda row: row["columns"]["verdict"] == "odd" and row["rewards"]["spelling"] < 0.5)
    where = ("--where", "verdict=ODD, spelling<0.5")
    assert samples(run, *where, "--limit", "1000")[0] == odd
    rewards = sorted((row["reward"] for row in every), reverse=True)
    ranked, said = samples(run, "--best", "3", "--worst", "2")
    assert [row["reward"] for row in ranked] == [*rewards[:3], *rewards[-2:]]
    assert said.startswith(f"5 of {len(every)} samples")
    said = samples(run, "--step", "900")[1]
    assert said == f"No samples of this step: there are those of steps {steps[0]} to {steps[-1]}.\n"
    said = samples(run, "--step", steps[-1], "--limit", "1")[1]
    assert said.startswith(f"1 of 1 sample of step {steps[-1]}; older")


def test_what_a_run_does_not_have_is_refused_with_what_it_has(run: Path) -> None:
    said = refused(run, "--column", "lenght")
    assert "No sample has a column 'lenght'; did you mean 'length'?" in said
    said = refused(run, "--where", "verdicts=odd")
    assert "No sample has a column 'verdicts'; did you mean 'verdict'?" in said
    said = refused(run, "--where", "zzz=odd")
    assert "'spelling'" in said
    assert "'verdict'" in said
    assert "is no condition" in refused(run, "--where", "length")


def test_a_terminal_gets_texts_and_a_program_that_asks_for_json_lines_these(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    done = CliRunner().invoke(app, ["samples", str(run), "--limit", "2", "--column", "length"])
    assert done.exit_code == FINISHED
    for text in ("group", "reward", "advantage", "made by", "verdict", "length", "\x1b["):
        assert text in done.stdout
    rows, _ = samples(run, "--limit", "2", "--json")
    assert len(rows) == 2


def sample(text: str, **more: Any) -> SampleView:
    numbers: dict[str, Any] = {"group": 1, "place": 0, "step": 2, "reward": 0.5, "advantage": -1.0}
    numbers |= {"tokens": 4, "versions": [(1, 4)], "staleness": 0, "truncated": True}
    return SampleView.model_validate(
        {**numbers, "rewards": {text: 0.5, "b": None}, "prompt": text, "response": text, **more}
    )


@given(
    text=st.text(max_size=80).map(lambda text: HOSTILE + text),
    width=st.integers(20, 200),
)
def test_nothing_is_wider_than_the_terminal_or_acts_on_it(text: str, width: int) -> None:
    turn = {"generated": True, "tokens": 9, "text": text, "reward": 0.5, "pieces": [(3, 9, text)]}
    turn |= {"calls": [{"name": text, "arguments": {text: 1}}], "seconds": {"engine": 1.0}}
    observed = {"generated": False, "tokens": 1, "text": text, "reward": None}
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    for view in (
        sample(text, failed=[text], columns={text: text}, fields={"a": {text: text}}),
        sample(text, segments=[turn, observed], ending=text),
        sample(text, masked=[(True, 2, text), (False, 2, text)]),
    ):
        console.print(sample_view(view, ["length", "a", "absent"]))
    assert isinstance(console.file, io.StringIO)
    for line in console.file.getvalue().splitlines():
        assert cell_len(line) <= width
        assert escaped(line) == line
