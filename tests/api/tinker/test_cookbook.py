"""Recipes of tinker_cookbook, unmodified, against ``asyncdock tinker`` over loopback."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestration.calls.bases import TOKENIZERS
from tests import environments
from tests.api.tinker import cookbook
from tests.api.tinker.test_sdks import Server
from tests.ports import free_port

pytest.importorskip("datasets", reason="tinker_cookbook reads its data with datasets")

SECONDS = 300.0
LOG = "log_path=log"  # in the folder of the recipe
MODEL = ("model_name=tiny", "renderer_name=role_colon", "lora_rank=8")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    served = Server(tmp_path_factory.mktemp("cookbook") / "data", free_port())
    served.start()
    yield served
    assert served.end() == 0


@pytest.fixture
def folder(server: Server, tmp_path: Path) -> Path:
    """Where a recipe is started: a model's name is the path of its tokenizer there."""
    (tmp_path / "tiny").symlink_to(server.data / TOKENIZERS / "tiny")
    return tmp_path


def run(recipe: str, server: Server, folder: Path, *options: str) -> list[dict[str, float]]:
    """Return the metrics of the recipe's steps when it has ended without an error."""
    with cookbook.running(recipe, server.url, server.key, folder, LOG, *options) as process:
        printed, _ = process.communicate(timeout=SECONDS)
        assert process.returncode in environments.ENDS, printed
    return metrics(folder)


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "log" / "metrics.jsonl").open()]


def arithmetic(steps: int) -> tuple[str, ...]:
    return (
        *MODEL,
        *("env=arithmetic", "loss_fn=importance_sampling", "learning_rate=1e-3"),
        *("groups_per_batch=4", "group_size=4", f"max_steps={steps}"),
        *("eval_every=0", "save_every=1", "behavior_if_log_dir_exists=resume"),
    )


@pytest.mark.timeout(1800)
def test_reinforcement_learning_goes_on_after_its_client_was_killed(
    server: Server, folder: Path
) -> None:
    many = arithmetic(1000)
    checkpoints = folder / "log" / "checkpoints.jsonl"
    deadline = time.monotonic() + SECONDS
    with cookbook.running("math_rl.train", server.url, server.key, folder, LOG, *many) as process:
        while not checkpoints.exists() or len(checkpoints.read_text().splitlines()) < 2:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.1)
    saved = [json.loads(line) for line in checkpoints.open()]
    begun = saved[-1]["batch"]
    steps = begun + 2
    rows = run("math_rl.train", server, folder, *arithmetic(steps))
    trained = [row for row in rows if "env/all/reward/total" in row]
    batches = [row["progress/batch"] for row in trained]
    # the client logs a batch after its checkpoint, and may have been killed in between
    assert batches in ([*range(steps)], [n for n in range(steps) if n != begun - 1])
    for row in trained:
        # the sampler's logprobs are the trainer's: both have the same weights
        assert abs(row["optim/kl_sample_train_v1"]) < 1e-4


@pytest.mark.timeout(1800)
def test_supervised_learning_of_conversations_in_a_file(server: Server, folder: Path) -> None:
    said = [
        [{"role": "user", "content": letter}, {"role": "assistant", "content": 4 * letter}]
        for letter in "abcdefgh"
    ]
    file = folder / "conversations.jsonl"
    file.write_text("".join(f"{json.dumps({'messages': each})}\n" for each in 16 * said))
    rows = run(
        *("chat_sl.train", server, folder, *MODEL),
        *(f"dataset={file}", "batch_size=16", "learning_rate=0.01", "num_epochs=3", "eval_every=8"),
    )
    losses = [row["train_mean_nll"] for row in rows if "train_mean_nll" in row]
    assert losses[-1] < losses[0] - 1.0, losses
