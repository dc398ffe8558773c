"""Costs derived from a model's sizes, against the operations that torch counts and bytes counted by
hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.planning.assumed import Hardware, analytic_costs
from orchestration.recipe.schema import Recipe
from stages.model.load import tiny_tokenizer
from tests.orchestration.runs import TINY, recipe

LAYERS = 3
WIDTH = 64
HEADS = 8
KV_HEADS = 2
HEAD = 16
MLP = 160
VOCABULARY = 64
ONE = Hardware(flops=1.0, bandwidth=1.0)  # seconds are operations, or bytes


def config(*, tied: bool) -> LlamaConfig:
    return LlamaConfig(
        num_hidden_layers=LAYERS,
        hidden_size=WIDTH,
        intermediate_size=MLP,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD,
        vocab_size=VOCABULARY,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )


def counted(of: LlamaConfig, tokens: int, checkpointing: bool) -> float:
    """Operations a token of forward and backward of one row.

    Each token attends to all of them, whatever the mask says.
    """
    model = LlamaForCausalLM(of)
    if checkpointing:
        model.gradient_checkpointing_enable()
    with FlopCounterMode(display=False) as counter:
        model.train()(torch.arange(tokens)[None] % VOCABULARY).logits.sum().backward()
    return counter.get_total_flops() / tokens


def of_model(folder: Path, *, tied: bool = True, **changes: Any) -> Recipe:
    LlamaForCausalLM(config(tied=tied)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return recipe(TINY, model__source=str(folder), **changes)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_operations_of_training_are_those_that_torch_counts(
    tmp_path: Path, tied: bool, checkpointing: bool
) -> None:
    """Of the weights, and of attention, which grows with the row: with a causal mask half of what
    torch computes here."""
    of = of_model(tmp_path, tied=tied, train__activation_checkpointing=checkpointing)
    costs = {tokens: analytic_costs(of, ONE, tokens) for tokens in (100.0, 300.0)}
    rows = [int(costs[tokens].prompt_tokens + tokens) for tokens in (100.0, 300.0)]
    short, long = (costs[tokens].token_seconds for tokens in (100.0, 300.0))
    counts = [counted(config(tied=tied), row, checkpointing) for row in rows]
    attention = (counts[1] - counts[0]) / (rows[1] - rows[0]) / 2
    assert (long - short) / 200 == pytest.approx(attention, rel=1e-3)
    weights = counts[0] - 2 * attention * rows[0]
    # torch computes again neither the output head nor the last product of a layer; a bound counts
    # all
    if checkpointing:
        weights += 2 * (VOCABULARY * WIDTH + LAYERS * MLP * WIDTH)
    assert short - attention * rows[0] == pytest.approx(weights, rel=0.005)


def test_a_decoded_token_reads_the_weights_once_and_keys_and_values_of_its_row(
    tmp_path: Path,
) -> None:
    of = of_model(tmp_path)
    response = 100.0
    costs = analytic_costs(of, ONE, response)
    parameters = sum(
        parameter.numel() for parameter in LlamaForCausalLM(config(tied=True)).parameters()
    )
    assert costs.row_rate == pytest.approx(1 / (4 * parameters))  # float32
    # of the row so far, on average
    keys = LAYERS * KV_HEADS * HEAD * 4 * (costs.prompt_tokens + response / 2)
    assert costs.row_seconds == pytest.approx(2 * keys)
    assert costs.swap_seconds == pytest.approx(4 * parameters)


def test_ranks_that_share_a_micro_batch_wait_for_what_they_send(tmp_path: Path) -> None:
    alone = analytic_costs(of_model(tmp_path), ONE, 100.0)
    split = analytic_costs(of_model(tmp_path, train__tp=2, launch__launcher="process"), ONE, 100.0)
    assert alone.step_seconds == 0.0
    assert split.step_seconds > 0.0
