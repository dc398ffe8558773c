"""The first hour of a new user: a checkpoint, prompts and a reward of one's own, by the commands
alone."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from orchestration.history.events_file import METRICS, read_metrics
from tests.api.cli.test_interrupts import asyncdock, end

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content "
    "}}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REWARD = """
calls = 0

def digits(completions, answer):
    global calls
    calls += 1
    if calls % 10 == 0:
        raise TimeoutError("the judge did not answer")
    return [sum(letter.isdigit() for letter in text) / max(1, len(text)) for text in completions]
"""
RECIPE = """
[model]
source = "my-qwen"
dtype = "bfloat16"

[prompts]
source = "jsonl"
path = "sums.jsonl"

[rollout]
max_tokens = 8

[reward]
functions = [{ name = "my_reward:digits" }]

[train]
steps = 10

[launch]
launcher = "process"
"""


def checkpoint(folder: Path) -> None:
    """A Qwen2 with random weights and a byte-level tokenizer with a chat template, as
    `save_pretrained` writes them."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = pre_tokenizers.ByteLevel.alphabet()
    texts = (f"What is {one} + {other}?" for one in range(30) for other in range(30))
    raw.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=letters)
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.timeout(400)
def test_a_checkpoint_and_a_reward_of_ones_own_are_checked_run_interrupted_and_resumed(
    tmp_path: Path,
) -> None:
    """The reward raises one time in ten: it is called again, and its log has each failure."""
    checkpoint(tmp_path / "my-qwen")
    rows = [
        {"prompt": f"What is {one} + {other}?", "answer": str(one + other)}
        for one in range(20)
        for other in range(5)
    ]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my_reward.py").write_text(REWARD)
    (tmp_path / "mine.toml").write_text(RECIPE)

    checked = asyncdock("check", "mine.toml", cwd=tmp_path)
    output = checked.communicate(timeout=120)[0]
    assert checked.returncode == 0, output
    assert "mine: sound" in output
    assert "What is 0 + 0?<|im_end|>" in output, "the prompt as the model gets it"

    first = asyncdock("run", "mine.toml", "--plain", "--out", "run", cwd=tmp_path)
    try:
        assert first.stdout is not None
        seen = []
        for line in first.stdout:
            seen.append(line)
            if line.startswith("step 2/"):
                break
        first.send_signal(signal.SIGINT)
        output = "".join(seen) + first.communicate(timeout=120)[0]
    finally:
        end(first)
    assert first.returncode == 130, output
    assert "Traceback" not in output
    made = len(
        [event for event in read_metrics(tmp_path / "run" / METRICS) if event.kind == "step"]
    )
    assert ("Go on with: asyncdock resume" in output) == (made < 10)

    resumed = asyncdock("resume", "run", "--plain", "--set", "train.steps=14", cwd=tmp_path)
    output = resumed.communicate(timeout=200)[0]
    assert resumed.returncode == 0, output
    events = list(read_metrics(tmp_path / "run" / METRICS))
    assert [event.data["step"] for event in events if event.kind == "step"] == list(range(1, 15))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["state"], summary["steps"]) == ("finished", 14)
    assert summary["tokens_generated"] == summary["tokens_trained"], (
        "no sample was lost to the reward"
    )
    log = (tmp_path / "run" / "logs" / "flow-0.log").read_text()
    assert "TimeoutError('the judge did not answer')" in log
    assert "did not answer" not in output, "what a retry has mended is in the log alone"

    (trained,) = (tmp_path / "run" / "checkpoints").glob("*14/model")
    model = AutoModelForCausalLM.from_pretrained(trained)
    tokenizer = AutoTokenizer.from_pretrained(trained)
    assert model.dtype == torch.bfloat16
    assert tokenizer.chat_template == TEMPLATE
