"""The command at its edges: interrupted at any moment, started twice, and broken where nothing
should break."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoConfig, Gemma2Config, GPTNeoConfig, LlamaConfig, T5Config
from typer.testing import CliRunner

from api.cli import local_run
from api.cli import main as cli
from api.cli.common.error_log import errors_in_words
from api.terminal.report import resume_text
from orchestration import logs
from orchestration.checkpoints import checkpoint
from orchestration.history.events_file import METRICS, read_metrics
from orchestration.recipe.loading.load import parse_recipe
from orchestration.recipe.problems import RecipeError
from orchestration.state.lock import lock_run
from tests import forked
from tests.orchestration.runs import MOCK, TINY, recipe

ROOT = Path(__file__).resolve().parents[3]
SLOW = [
    "--set=train.steps=500",
    "--set=checkpoint.every=400",
    "--set=rollout.mock={median_tokens=8,time_scale=0.5}",
]
SLOW += ["--set=pipeline.arena=1GiB"]


PLAINLY = (sys.executable, "-P", "-m", "api.cli.main")


def asyncdock(
    *arguments: str, cwd: Path, command: Sequence[str] = PLAINLY, **env: str
) -> subprocess.Popen[str]:
    """The command in a process and a session of its own, its two outputs in one."""
    return subprocess.Popen(
        [*command, *arguments],
        cwd=cwd,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "XDG_STATE_HOME": str(cwd / "state"),
            **env,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def until(
    condition: Callable[[], Any], process: subprocess.Popen[str], seconds: float = 90.0
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stdout and process.stdout.read()
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


# ── interrupts ──


def test_ctrl_c_during_the_start_ends_the_command_without_a_traceback(tmp_path: Path) -> None:
    """Twice, and the second one acts within a second (and what a busy machine needs); more of them
    change nothing."""
    process = asyncdock("run", "mock", "--plain", "--out", "run", *SLOW, cwd=tmp_path)
    try:
        family = psutil.Process(process.pid)
        until(
            lambda: any("valkey" in child.name() for child in family.children(recursive=True)),
            process,
        )
        children = family.children(recursive=True)
        for _ in range(3):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.05)  # two signals at once are one
        began = time.monotonic()
        output, _ = process.communicate(timeout=60)
        assert time.monotonic() - began < 30, "half of what a clean stop may take"
        assert process.returncode == 130, output
        assert "Traceback" not in output
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not alive
    finally:
        end(process)


def test_a_paused_run_goes_on_from_another_terminal(tmp_path: Path) -> None:
    """As its view says: by its folder, without a service. It may be stopped there, too."""

    def asked(what: str) -> str:
        result = CliRunner().invoke(cli.app, ["runs", what, str(tmp_path / "run")])
        return f"{result.exit_code} {result.output}"

    process = asyncdock("run", "mock", "--plain", "--out", "run", *SLOW, cwd=tmp_path)
    try:
        assert process.stdout is not None
        output = []
        for line in process.stdout:
            output.append(line)
            if line.startswith("step 2/"):
                assert asked("pause").endswith(": paused\n")
            elif line.startswith("Paused. Go on"):
                assert (
                    "is executed by process"
                    in CliRunner().invoke(cli.app, ["resume", str(tmp_path / "run")]).output
                )
                made = len(output)
                said = asked("checkpoint")
                assert re.search(
                    rf": paused; step \d+ is done, .* {tmp_path}/run/checkpoints\n$", said
                )
                assert asked("resume").endswith(": running\n")
            elif (
                line.startswith("step ")
                and ("Paused. Go on") in "".join(output[:-1])
                and len(output) > made + 2
            ):
                break
        assert "asyncdock runs resume" in "".join(output)
        assert asked("stop").endswith(": stopping\n")
        output.append(process.communicate(timeout=90)[0])
    finally:
        end(process)
    text = "".join(output)
    assert process.returncode == 130, text
    assert checkpoint.latest(tmp_path / "run" / "checkpoints") is not None, text
    refused = asked("resume")
    assert refused.startswith("1 "), "it is not alive"
    assert f"`asyncdock resume {tmp_path}/run` goes on with it" in refused


def test_a_command_that_is_killed_before_its_last_events_were_written_is_resumed_to_its_end(
    tmp_path: Path,
) -> None:
    """It is stopped while its workers make the last steps and save them, and killed then."""
    out = tmp_path / "run"
    steps = ["--set=train.steps=6", "--set=checkpoint.every=6"]
    process = asyncdock("run", "mock", "--plain", "--out", str(out), *SLOW, *steps, cwd=tmp_path)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 2/"):
                break
        process.send_signal(signal.SIGSTOP)
        until(lambda: (out / "checkpoints" / "step-00000006" / "run.json").exists(), process)
    finally:
        end(process)

    def written(kind: str) -> list[dict[str, Any]]:
        return [event.data for event in read_metrics(out / METRICS) if event.kind == kind]

    assert len(written("step")) < 6
    resumed = asyncdock("resume", str(out), "--plain", cwd=tmp_path)
    try:
        text = resumed.communicate(timeout=90)[0]
    finally:
        end(resumed)
    assert resumed.returncode == 0, text
    assert [step["step"] for step in written("step")] == list(range(1, 7)), text
    rows = sum(step["rows"] for step in written("step"))
    assert written("ledger")[-1]["trained"] == rows > 0
    assert json.loads((out / "summary.json").read_text())["state"] == "finished"
    again = asyncdock("resume", str(out), cwd=tmp_path)
    assert "there is nothing to resume" in again.communicate(timeout=60)[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_every_way_to_stop_writes_a_checkpoint_and_says_where_a_resume_begins(
    number: signal.Signals, tmp_path: Path
) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip(
            "what started these tests ignores the signal, as nohup does, and so does a "
            "command started by them"
        )
    process = asyncdock(
        "run", "mock", "--plain", "--out", "run", *SLOW, cwd=tmp_path, command=forked.asyncdock()
    )
    try:
        assert process.stdout is not None
        output = []
        for line in process.stdout:
            output.append(line)
            if line.startswith("step 2/"):
                break
        os.kill(process.pid, number)
        output.append(process.communicate(timeout=90)[0])
    finally:
        end(process)
    text = "".join(output)
    assert process.returncode == 130, text
    saved = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert saved is not None
    steps = [
        event.data["step"]
        for event in read_metrics(tmp_path / "run" / METRICS)
        if event.kind == "step"
    ]
    assert steps == list(range(1, saved.version + 1))
    assert f"after step {saved.version} of 500" in text
    assert "made again" not in text
    assert (
        json.loads((tmp_path / "run" / "summary.json").read_text())["resume_after_step"]
        == saved.version
    )


@pytest.mark.parametrize(
    ("saved", "done", "expected"),
    [
        (0, 0, "from the beginning"),
        (0, 1, "from the beginning; step 1 is made again"),
        (4, 4, "after step 4 of 9"),
        (4, 7, "after step 4 of 9; steps 5 to 7 are made again"),
    ],
)
def test_the_begin_of_a_resume_is_reported(saved: int, done: int, expected: str) -> None:
    assert resume_text(saved, 9, done) == expected


# ── a folder has one run ──


def test_a_folder_that_is_being_executed_is_refused_by_both_commands(tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text(parse_recipe(TINY).to_json())
    lock = lock_run(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    for command in (["resume", str(tmp_path)], ["run", "mock", "--out", str(tmp_path)]):
        result = CliRunner().invoke(cli.app, command)
        assert result.exit_code == 1
        assert f"is executed by process {os.getpid()} (" in result.stderr
        assert ") since " in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    lock.close()


def test_two_runs_with_default_names_in_one_second_both_have_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "strftime", lambda form: "20260101-000000")
    folders = [local_run.new_folder(tmp_path / "runs", recipe(MOCK)) for _ in range(3)]
    assert [folder.name for folder in folders] == [
        f"mock-test-20260101-000000{end}" for end in ("", "-2", "-3")
    ]
    (tmp_path / "file").write_text("a file")
    with pytest.raises(OSError, match="file"):
        local_run.new_folder(tmp_path / "file", recipe(MOCK))


# ── unexpected errors ──


BROKEN = """
import api.cli.main as command, api.cli.recipes as recipes
def broken(): raise KeyError('inside out')
recipes.stored = broken
command.main()
"""


@pytest.mark.parametrize("trace", [False, True])
def test_an_unexpected_error_is_a_sentence_and_a_file_unless_its_traceback_is_asked_for(
    trace: bool, tmp_path: Path
) -> None:
    """Of any command, and with the option behind it."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", BROKEN, "recipes", *(["--trace"] if trace else [])],
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    file = tmp_path / "asyncdock" / "errors.log"
    assert done.returncode == 1
    assert ("Traceback" in done.stderr) == trace
    assert file.exists() != trace
    if not trace:
        assert done.stderr.startswith("error: KeyError: 'inside out'\n")
        assert str(file) in done.stderr
        assert "Traceback" in file.read_text()
        assert file.stat().st_mode & 0o777 == 0o600


def test_errors_of_groups_and_a_folder_that_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(logs.TRACE_VARIABLE, raising=False)
    for hook in ("excepthook", "unraisablehook"):
        monkeypatch.setattr(sys, hook, getattr(sys, hook))
    (tmp_path / "file").write_text("")
    # no folder can be made below a file
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(SystemExit) as ended, errors_in_words():
        raise ExceptionGroup(
            "several", [ExceptionGroup("inner", [OSError(28, "No space left on device")])]
        )
    assert ended.value.code == 1
    output = capsys.readouterr().err
    assert output.startswith("error: OSError: [Errno 28] No space left on device\n")
    (spare,) = tmp_path.glob("asyncdock-error-*.log")
    assert str(spare) in output


# ── a model that no engine runs ──


@pytest.mark.parametrize(
    ("config", "engine", "reason"),
    [
        (GPTNeoConfig(), "rollout", "GPTNeoForCausalLM"),
        (T5Config(), "rollout", "is an encoder with a decoder"),
        (Gemma2Config(), "", ""),
        (
            LlamaConfig(
                hidden_size=8192,
                num_hidden_layers=80,
                num_attention_heads=64,
                num_key_value_heads=8,
            ),
            "",
            "",
        ),
    ],
)
def test_check_asks_the_engines_by_the_model_s_config_alone(
    config: Any, engine: str, reason: str, tmp_path: Path
) -> None:
    """There are no weights in the folder. A large model costs no more than a small one."""
    config.save_pretrained(tmp_path)
    data = {**TINY, "model": {"source": str(tmp_path), "dtype": "bfloat16"}}
    before = torch.get_rng_state()
    with pytest.raises(RecipeError) as refused:
        parse_recipe(data)
    found = [
        problem.wrong for problem in refused.value.problems if "cannot be run by" in problem.wrong
    ]
    assert any(
        reason in wrong and f"by {engine}.engine = 'torch'" in wrong for wrong in found
    ) == bool(reason), found
    assert torch.equal(torch.get_rng_state(), before)


def test_check_says_where_a_model_has_no_tensor_parallel_plan_that_ranks_know(
    tmp_path: Path,
) -> None:
    AutoConfig.for_model(
        "granite_swa", num_attention_heads=32, num_key_value_heads=4
    ).save_pretrained(tmp_path)
    data = {
        **TINY,
        "model": {"source": str(tmp_path)},
        "train": {**TINY["train"], "dp": 2, "tp": 2},
    }
    with pytest.raises(RecipeError) as refused:
        parse_recipe(data)
    found = {problem.key: problem for problem in refused.value.problems}
    assert "'local_params'" in found["train.tp"].wrong
    assert found["train.tp"].fix.startswith("set train.tp = 1")
