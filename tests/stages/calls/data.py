"""Models and data for the tests of training calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from stages.calls.base import TorchBase
from stages.calls.interface import Datum
from stages.model.load import tiny_model, tiny_tokenizer

VOCABULARY = 40


def tiny_base(seed: int = 3, *, tied: bool = True, **options: Any) -> TorchBase:
    """The model ``tiny``, one thread; not ``tied``: with an output head of its own."""
    dtype = options.pop("dtype", torch.float32)
    options = {"device": "cpu", "threads": 1, **options}
    model: Any = tiny_model(seed, dtype)
    if not tied:
        model.config.tie_word_embeddings = False
        other_words = tiny_model(seed + 1, dtype).get_input_embeddings().weight
        model.lm_head.weight = torch.nn.Parameter(other_words.detach())
    return TorchBase(model, tiny_tokenizer(), **options)


def supervised(seed: int = 0, lengths: Sequence[int] = (9, 4, 17, 1), k: int = 0) -> list[Datum]:
    """Data of cross_entropy, with weights of both signs and ``k`` targets at each token (0: one)."""
    rng = np.random.default_rng(seed)
    data = []
    for length in lengths:
        shape = (length, k) if k else (length,)
        inputs: dict[str, np.ndarray] = {
            "target_tokens": rng.integers(0, VOCABULARY, shape),
            "weights": rng.normal(size=shape).astype(np.float32),
        }
        data.append(Datum(rng.integers(0, VOCABULARY, length), inputs))
    return data


def sampled(
    seed: int = 0, prompts: Sequence[int] = (7, 3), group: int = 3, spread: float = 0.4
) -> list[Datum]:
    """Data of a policy loss: groups of responses to common prompts, zeros at the prompts, interleaved,
    logprobs within ``spread`` of those of a model that has learnt nothing."""
    rng = np.random.default_rng(seed)
    beginnings = [rng.integers(0, VOCABULARY, length) for length in prompts]
    data = []
    for _ in range(group):
        for prompt in beginnings:
            response = rng.integers(0, VOCABULARY, int(rng.integers(2, 9)))
            filled = np.zeros(len(prompt) - 1)
            logprobs = rng.normal(-np.log(50), spread, len(response))
            advantages = rng.normal(size=len(response))
            inputs = {
                "target_tokens": np.concatenate([filled.astype(np.int64), response]),
                "logprobs": np.concatenate([filled, logprobs]).astype(np.float32),
                "advantages": np.concatenate([filled, advantages]).astype(np.float32),
                "sequence_ratio_mask": np.concatenate([filled, np.ones(len(response))]).astype(
                    np.float32
                ),
            }
            data.append(Datum(np.concatenate([prompt, response[:-1]]), inputs))
    return data


def changed(datum: Datum, **inputs: np.ndarray | None) -> Datum:
    """Return ``datum`` with other ``inputs``; None: without."""
    both: Mapping[str, np.ndarray | None] = {**datum.inputs, **inputs}
    return Datum(
        datum.tokens, {name: values for name, values in both.items() if values is not None}
    )


def assert_near(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """To 1e-6 of the gradient of all weights; no tensor's own is off by much more."""
    assert got.keys() == wanted.keys()
    gaps = {name: (got[name] - value).norm() for name, value in wanted.items()}
    norm = torch.stack([value.norm() for value in wanted.values()]).norm()
    assert torch.stack([*gaps.values()]).norm() < 1e-6 * norm
    for name, value in wanted.items():
        assert gaps[name] < 1e-5 * value.norm(), name
