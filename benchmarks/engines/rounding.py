"""What bfloat16 does to each family of models: how far the engines and transformers' own forward
are from float32.

    python -m benchmarks.engines.rounding [--family NAME …]

The checkpoints are those of the table of models (benchmarks/engines/models.py). The torch rollout engine
generates three batches, the train engine and transformers score them. Figures are means over
response tokens, the largest of three batches, in units of u · s (u = 2⁻⁸, s: standard deviation of
the logprobs, at least 1), in which the limit of a probe's mean is 6 for up to 16 layers, 18 with
experts. "hidden": error of the hidden states, median over tokens, in u, after the first and the
last layer.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from benchmarks.engines.families import FAMILIES, write
from benchmarks.engines.models import (
    Rows,
    batch_of,
    generated,
    plain_model,
    plain_rows,
    train_engine_options,
    vocabulary_of,
)
from stages.engines.torch.rollout import TorchRolloutEngine
from stages.engines.torch.train import TorchTrainEngine
from stages.weights.published import Probe
from stages.weights.verification.probe import ProbeRule, gap

U = 2.0**-8
PAIRS = ("rollout, float32", "train, float32", "transformers, float32", "rollout, train")


def generate(model: torch.nn.Module, seed: int) -> tuple[Rows, torch.Tensor]:
    """Rows of the torch rollout engine, those of a group next to each other, and its logprobs."""

    async def run() -> tuple[Rows, torch.Tensor]:
        engine = TorchRolloutEngine(model, max_rows=4, device="cpu")
        try:
            return await generated(engine, vocabulary_of(model), seed)
        finally:
            await engine.close()

    rows, logprobs = asyncio.run(run())
    parts = logprobs.split([len(response) for _, response in rows])
    # rows end in any order
    order = sorted(range(len(rows)), key=lambda number: len(rows[number][0]))
    return [rows[number] for number in order], torch.cat([parts[number] for number in order])


@torch.no_grad()
def hidden_errors(lower: torch.nn.Module, exact: torch.nn.Module, rows: Rows) -> list[float]:
    """Relative error of the hidden states after each layer, median over the tokens of ``rows``."""
    errors: list[list[torch.Tensor]] = []
    for prompt, response in rows:
        ids = torch.cat([prompt, response])[None]
        states = [
            m(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states[1:]
            for m in (lower, exact)
        ]
        errors.append(
            [
                (one.float() - two).norm(dim=-1)[0] / two.norm(dim=-1)[0]
                for one, two in zip(*states, strict=True)
            ]
        )
    return [float(torch.cat(layer).median()) for layer in map(list, zip(*errors, strict=True))]


def measure(family: str, folder: Path) -> list[float]:
    """The largest mean gap of each of ``PAIRS`` in u · s, the largest share of a probe's limit,
    errors of hidden states."""
    write(family, folder, torch.bfloat16)
    lower = plain_model(folder, torch.bfloat16)
    exact = plain_model(folder, torch.float32)
    rule = ProbeRule.of(torch.bfloat16, lower.config)
    most = [0.0] * (len(PAIRS) + 1)
    for seed in range(3):
        rows, rollout = generate(plain_model(folder, torch.bfloat16), seed)
        trainer = TorchTrainEngine(
            plain_model(folder, torch.bfloat16), **train_engine_options(torch.bfloat16)
        )
        train = torch.cat(list(trainer.logprobs(batch_of(rows, rollout)).unbind()))
        right = plain_rows(exact, rows)
        plain = plain_rows(lower, rows)
        gaps = [
            gap(*pair)
            for pair in ((right, rollout), (right, train), (right, plain), (train, rollout))
        ]
        limits = rule.limits(Probe((), (tuple(train.tolist()),)))
        spread = max(1.0, float(train.std(correction=0)))
        share = max(gaps[-1].mean / limits.mean, gaps[-1].q95 / limits.q95, gaps[-1].k3 / limits.k3)
        most = [
            max(pair)
            for pair in zip(most, [*(one.mean / U / spread for one in gaps), share], strict=True)
        ]
    errors = hidden_errors(lower, exact, rows)
    return [*most, errors[0] / U, errors[-1] / U]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--family", action="append", choices=list(FAMILIES))
    options = parser.parse_args(arguments)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    print("| | " + " | ".join(PAIRS) + " | share of the limit | hidden, first | last |")
    print("|---" * (len(PAIRS) + 4) + "|")
    for family in options.family or FAMILIES:
        with tempfile.TemporaryDirectory(prefix="adk-rounding-") as folder:
            try:
                figures = [f"{figure:.2f}" for figure in measure(family, Path(folder))]
            except ValueError as error:  # the torch engines refuse it, as the table of models says
                figures = [str(error)]
        print(f"| {family} | " + " | ".join(figures) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
