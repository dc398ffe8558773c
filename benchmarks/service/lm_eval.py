"""lm-eval against ``asyncdock serve --checkpoint``, and the same scores by transformers in float64.

    questions ─▶ a task's YAML and JSON Lines ─▶ lm_eval ── HTTP ──▶ asyncdock serve   log-likelihoods, texts
         └─────▶ transformers, float64, one forward pass each ─────▶ the same ones ──▶ a table of both

lm-eval runs as it is, from an environment of its own:

    python -m venv /tmp/lm-eval
    /tmp/lm-eval/bin/pip install 'lm_eval[api]' transformers
    python -m benchmarks.service.lm_eval --lm-eval /tmp/lm-eval/bin/lm_eval --json report.json

By default the checkpoint is SmolLM2-135M; ``--model`` takes another folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import harness
from benchmarks.robustness.api_fuzz import Served
from stages.model.load import model_folder

MODEL = "model"
LOSSES = 1e-3  # of a log-likelihood: the engine computes in float32
NEW_TOKENS = 16
TASKS = ("own_choices", "own_texts")
STOPS = ("\n", "Q:", "###", ".")
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
generation_kwargs: {{until: {stops}, max_gen_toks: {tokens}, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


def write_tasks(folder: Path) -> None:
    data = folder / "questions.jsonl"
    rows = [{"question": question, "choices": choices} for question, choices in QUESTIONS]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "choices.yaml").write_text(CHOICES.format(data=data))
    (folder / "texts.yaml").write_text(
        TEXTS.format(data=data, stops=json.dumps(STOPS), tokens=NEW_TOKENS)
    )


def run_lm_eval(
    command: Path,
    kind: str,
    names: Sequence[str],
    arguments: Mapping[str, Any],
    token: str,
    tasks: Path,
) -> list[list[dict[str, Any]]]:
    """Return the samples that lm-eval logs with its model ``kind`` of each task of ``names``, in the
    order of the questions."""
    out = tasks / kind
    model_args = ",".join(f"{name}={value}" for name, value in arguments.items())
    options = [
        "--model",
        kind,
        "--model_args",
        model_args,
        "--tasks",
        ",".join(names),
        "--include_path",
        tasks,
    ]
    options += ["--output_path", out, "--log_samples"]
    options += ["--apply_chat_template"] if "chat" in kind else ["--batch_size", 4]
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
    logs = [next(out.rglob(f"samples_{name}_*.jsonl")) for name in names]
    samples = [[json.loads(line) for line in log.read_text().splitlines()] for log in logs]
    return [sorted(each, key=lambda sample: int(sample["doc_id"])) for each in samples]


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
    def text(self, question: str, *, chat: bool) -> str:
        """Return what is greedily written after ``question``, up to the first stop string."""
        ids = self._tokenizer(question, add_special_tokens=False)["input_ids"]
        if chat:
            message = [{"role": "user", "content": question}]
            rendered: Any = self._tokenizer.apply_chat_template(message, add_generation_prompt=True)
            ids = rendered["input_ids"]
        prompt = torch.tensor([ids])
        written: Any = self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
        text = str(self._tokenizer.decode(written[0, len(ids) :], skip_special_tokens=True))
        return text[: min(text.find(stop) % (len(text) + 1) for stop in STOPS)]


def compare(folder: Path, command: Path) -> dict[str, Any]:
    """Return the scores of both, and the largest difference."""
    with (
        Served("--checkpoint", f"{MODEL}={folder}") as (url, token),
        tempfile.TemporaryDirectory() as tasks,
    ):
        write_tasks(Path(tasks))
        base: dict[str, Any] = {"model": MODEL, "max_length": 256}
        completions = {**base, "base_url": f"{url}/v1/completions", "tokenizer": folder}
        completions |= {"tokenizer_backend": "huggingface", "num_concurrent": 4}
        chats = {**base, "base_url": f"{url}/v1/chat/completions"}
        scored, completed = run_lm_eval(
            command, "local-completions", TASKS, completions, token, Path(tasks)
        )
        (answered,) = run_lm_eval(
            command, "local-chat-completions", TASKS[1:], chats, token, Path(tasks)
        )
    reference = Reference(folder)
    rows = []
    for place, (question, choices) in enumerate(QUESTIONS):
        responses = [response[0][0] for response in scored[place]["resps"]]
        pairs = zip((completed, answered), (False, True), strict=True)
        rows.append(
            {
                "question": question,
                "lm_eval": [float(loglikelihood) for loglikelihood in responses],
                "transformers": [reference.loglikelihood(question, each) for each in choices],
                "texts": [
                    [samples[place]["resps"][0][0], reference.text(question, chat=chat)]
                    for samples, chat in pairs
                ],
            }
        )
    return {"model": str(folder), "rows": rows, "largest_difference": _largest(rows)}


def _largest(rows: Sequence[Mapping[str, Any]]) -> float:
    pairs = [zip(row["lm_eval"], row["transformers"], strict=True) for row in rows]
    return max(abs(ours - right) for pair in pairs for ours, right in pair)


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--lm-eval", type=Path, required=True, help="its command")
    parser.add_argument("--model", type=Path, help="folder of a checkpoint")
    options = parser.parse_args()
    report = compare(options.model or model_folder("smollm2"), options.lm_eval)
    different = 0
    for row in report["rows"]:
        print(row["question"])
        for who in ("lm_eval", "transformers"):
            print(f"  {who:13}", *(f"{loglikelihood:10.5f}" for loglikelihood in row[who]))
        for text, expected in row["texts"]:
            print(f"  {'=' if text == expected else 'differs:'} {text!r}")
            different += text != expected
    print(f"largest difference of a log-likelihood: {report['largest_difference']:.2e}")
    print(f"texts that are not transformers' greedy ones: {different}")
    if options.json:
        options.json.write(report)
    return 0 if report["largest_difference"] < LOSSES and not different else 1


if __name__ == "__main__":
    sys.exit(main())
