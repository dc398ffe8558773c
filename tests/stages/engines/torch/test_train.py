"""The torch train engine against a plain Hugging Face forward, one padded row at a time."""

from __future__ import annotations

import copy
import io
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from stages.algorithms import Algorithm, LossOutput, TokenBatch
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.engines.plans import GroupShape, plan_micro_batches
from stages.engines.torch.model import token_logprobs
from stages.engines.torch.optimizers.rates import learning_rate_at
from stages.engines.torch.train import TorchTrainEngine
from tests.batches import RAGGED, VOCABULARY, make_batch, stack, unstack


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def tiny_llama(*, tied: bool = True, seed: int = 0, **options: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            initializer_range=0.2,  # large enough that every gradient is far above the rounding
            tie_word_embeddings=tied,
            **options,
        )
    ).eval()


def plain_logprobs(
    model: LlamaForCausalLM, batch: TensorDict, temperature: float = 1.0
) -> list[torch.Tensor]:
    """Row by row, right-padded, with an attention mask: what any user of transformers would
    write."""
    rows = unstack(batch)
    longest = max(len(row["prompt_ids"]) + len(row["response_ids"]) for row in rows)
    result = []
    for row in rows:
        ids = torch.cat([row["prompt_ids"], row["response_ids"]])
        mask = torch.zeros(1, longest, dtype=torch.int64)
        mask[0, : len(ids)] = 1
        padded = torch.nn.functional.pad(ids, (0, longest - len(ids)))[None]
        logits = model(input_ids=padded, attention_mask=mask).logits[
            0, len(row["prompt_ids"]) - 1 : len(ids) - 1
        ]
        logprobs = (logits / temperature).log_softmax(-1)
        result.append(logprobs.gather(-1, row["response_ids"][:, None])[:, 0])
    return result


def plain_tokens(
    model: LlamaForCausalLM, batch: TensorDict, temperature: float = 1.0
) -> TokenBatch:
    rows = unstack(batch)
    logprobs = plain_logprobs(model, batch, temperature)
    lengths = torch.tensor([len(p) for p in logprobs])
    row = torch.arange(len(rows)).repeat_interleave(lengths)
    return TokenBatch(
        logprobs=torch.cat(logprobs),
        columns={
            "rollout_logprobs": torch.cat([r["rollout_logprobs"] for r in rows]),
            "ref_logprobs": torch.cat([r["ref_logprobs"] for r in rows]),
            "advantage": batch["advantage"][row],
        },
        row=row,
        row_tokens=lengths,
        total_tokens=int(lengths.sum()),
        total_rows=len(rows),
    )


def engine_of(model: LlamaForCausalLM, **options: Any) -> TorchTrainEngine:
    return TorchTrainEngine(
        model,
        **{"learning_rate": 1e-2, "total_steps": 10, "grad_clip": None, "device": "cpu", **options},
    )


def gradients_of_step(
    engine: TorchTrainEngine, batch: TensorDict, algorithm: Any
) -> tuple[dict[str, Any], Any]:
    """What reaches the optimizer in one train step, by parameter name."""
    seen: dict[str, torch.Tensor] = {}

    def record(*_: Any) -> None:
        seen.update(
            {
                name: p.grad.clone()
                for name, p in engine.model.named_parameters()
                if p.grad is not None
            }
        )

    handle = engine._optimizer.register_step_pre_hook(record)
    metrics = engine.train_batch(batch, algorithm)
    handle.remove()
    return seen, metrics


def assert_same_gradients(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        gap = (got[name] - gradient).norm() / gradient.norm()
        assert gap < 1e-5, f"{name}: relative error {gap}"


# --- the computation
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("normalization", ["token", "sequence"])
def test_loss_and_every_gradient_are_those_of_the_plain_forward(
    tied: bool, temperature: float, normalization: Any
) -> None:
    batch = make_batch()
    algorithm = GRPO(kl_coef=0.1, loss_normalization=normalization)
    plain = tiny_llama(tied=tied)
    engine = engine_of(copy.deepcopy(plain), temperature=temperature)
    expected = algorithm.loss(plain_tokens(plain, batch, temperature))
    expected.loss.backward()
    got, metrics = gradients_of_step(engine, batch, algorithm)

    assert metrics["loss"] == pytest.approx(expected.loss.item(), rel=1e-5)
    assert metrics["kl_reference"] == pytest.approx(
        expected.metrics["kl_reference"].item(), rel=1e-5
    )
    assert 0 < metrics["ess"] <= 1
    expected_gradients = {name: p.grad for name, p in plain.named_parameters()}
    assert_same_gradients(got, expected_gradients)  # type: ignore[arg-type]
    norm = math.sqrt(sum(float(g.square().sum()) for g in got.values()))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert metrics["fed_tokens"] == sum(p + sum(lengths) - len(lengths) for p, lengths in RAGGED)


def test_logprobs_are_those_of_the_plain_forward_in_the_order_of_the_rows() -> None:
    rows = unstack(make_batch())
    random.Random(1).shuffle(rows)
    batch = stack(rows)
    plain = tiny_llama()
    engine = engine_of(copy.deepcopy(plain), temperature=0.7)
    got = engine.logprobs(batch)
    assert got.dtype == torch.float32
    for own, expected in zip(got.unbind(), plain_logprobs(plain, batch, 0.7), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("budget", [1, 8, 16, 25, 60, 10_000])
def test_a_token_budget_changes_only_the_rounding(budget: int) -> None:
    batch = make_batch()
    algorithm = GRPO()
    whole, metrics = gradients_of_step(engine_of(tiny_llama()), batch, algorithm)
    split, split_metrics = gradients_of_step(
        engine_of(tiny_llama(), token_budget=budget), batch, algorithm
    )
    assert_same_gradients(split, whole)
    metrics = dict(metrics)
    split_metrics = dict(split_metrics)
    # a split group's prompt is computed again
    assert split_metrics.pop("fed_tokens") >= metrics.pop("fed_tokens")
    assert split_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-7)


def test_activation_checkpointing_changes_no_gradient() -> None:
    batch = make_batch()
    algorithm = GRPO()
    plain, _ = gradients_of_step(engine_of(tiny_llama()), batch, algorithm)
    engine = engine_of(tiny_llama(), activation_checkpointing=True)
    calls = []
    engine.model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    checkpointed, _ = gradients_of_step(engine, batch, algorithm)
    assert_same_gradients(checkpointed, plain)
    assert len(calls) == 2  # the layer really was computed again in the backward


@pytest.mark.parametrize("rows_at_once", [1, 7])
def test_logits_in_bounded_chunks_change_nothing(
    rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch()
    algorithm = GRPO()
    whole, metrics = gradients_of_step(engine_of(tiny_llama()), batch, algorithm)
    sizes: list[int] = []
    logits = token_logprobs.scaled_logits

    def watch(hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes.append(len(hidden))
        return logits(hidden, *rest)

    engine = engine_of(tiny_llama())
    monkeypatch.setattr(token_logprobs, "LOGITS_BYTES", 4 * VOCABULARY * rows_at_once)
    monkeypatch.setattr(token_logprobs, "scaled_logits", watch)
    chunked, chunked_metrics = gradients_of_step(engine, batch, algorithm)
    assert_same_gradients(chunked, whole)
    assert chunked_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-7)
    assert max(sizes) == rows_at_once


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral", "gemma", "olmo2"])
def test_other_decoder_families_are_computed_as_by_transformers(family: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        family,
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config).eval()
    batch = make_batch(RAGGED[:3])
    algorithm = GRPO()
    engine = engine_of(copy.deepcopy(plain))
    expected = algorithm.loss(plain_tokens(plain, batch))
    expected.loss.backward()
    got, _ = gradients_of_step(engine, batch, algorithm)
    assert_same_gradients(got, {name: p.grad for name, p in plain.named_parameters()})


def test_a_model_that_cannot_be_packed_is_refused_by_name() -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "gpt_neo",
        vocab_size=97,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global"], 2]],
        max_position_embeddings=64,
    )
    with pytest.raises(ValueError, match="GPTNeoForCausalLM"):
        engine_of(AutoModelForCausalLM.from_config(config))  # type: ignore[arg-type]


# --- exactness
# --------------------------------------------------------------------------------------------------


def weights_of(engine: TorchTrainEngine) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in engine.weights()}


def assert_same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def test_a_step_has_the_same_bits_whatever_the_order_of_the_rows() -> None:
    rows = unstack(make_batch())
    ends = []
    for order in range(3):
        random.Random(order).shuffle(rows)
        engine = engine_of(tiny_llama(), token_budget=40)
        metrics = [dict(engine.train_batch(stack(rows), GRPO())) for _ in range(2)]
        ends.append((weights_of(engine), metrics))
    for weights, metrics in ends[1:]:
        assert_same_bits(weights, ends[0][0])
        assert metrics == ends[0][1]


def test_logprobs_of_a_group_have_the_same_bits_alone_and_in_company() -> None:
    rows = unstack(make_batch())
    engine = engine_of(tiny_llama(), token_budget=20)
    together = engine.logprobs(stack(rows)).unbind()
    for group in {int(row["group"]) for row in rows}:
        members = [i for i, row in enumerate(rows) if row["group"] == group]
        alone = engine.logprobs(stack([rows[i] for i in members])).unbind()
        assert all(torch.equal(together[i], own) for i, own in zip(members, alone, strict=True))


def test_a_run_resumed_from_its_saved_state_continues_bit_for_bit() -> None:
    options: dict[str, Any] = {
        "schedule": "cosine",
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "grad_clip": 0.5,
    }
    batches = [make_batch(seed=seed) for seed in range(4)]
    straight = engine_of(tiny_llama(), **options)
    saved = io.BytesIO()
    for i, batch in enumerate(batches):
        if i == 2:
            torch.save(straight.state_dict(), saved)
        last = straight.train_batch(batch, GRPO())

    resumed = engine_of(tiny_llama(seed=9), **options)
    resumed.load_state_dict(torch.load(io.BytesIO(saved.getvalue())))
    assert resumed.step == 2
    for batch in batches[2:]:
        resumed_last = resumed.train_batch(batch, GRPO())
    assert resumed_last == last
    assert_same_bits(weights_of(resumed), weights_of(straight))


# --- the optimizer
# --------------------------------------------------------------------------------------------------


def test_clipping_bounds_the_gradient_and_reports_the_norm_before_it() -> None:
    free, metrics = gradients_of_step(engine_of(tiny_llama()), make_batch(), GRPO())
    bound = metrics["grad_norm"] / 3
    clipped, clipped_metrics = gradients_of_step(
        engine_of(tiny_llama(), grad_clip=bound), make_batch(), GRPO()
    )
    assert clipped_metrics["grad_norm"] == metrics["grad_norm"]
    for name, gradient in free.items():
        torch.testing.assert_close(clipped[name], gradient / 3, rtol=1e-4, atol=1e-9)


def test_a_gradient_that_is_not_finite_takes_no_step() -> None:
    engine = engine_of(tiny_llama())
    batch = make_batch()
    before = weights_of(engine)
    poisoned = batch.clone()
    poisoned["advantage"][3] = float("nan")
    with pytest.raises(FloatingPointError, match="step 0"):
        engine.train_batch(poisoned, GRPO())
    assert_same_bits(weights_of(engine), before)
    fresh = engine_of(tiny_llama())
    assert engine.train_batch(batch, GRPO()) == fresh.train_batch(batch, GRPO())


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize("logprob", [0.01, -104.0, -1e4, -1e38])
def test_no_finite_logprob_makes_a_gradient_that_is_not_finite(
    logprob: float, kl_coef: float
) -> None:
    """The importance ratio of a token whose recorded logprob is absurd overflows float32, and the
    derivative of what is clipped away would be 0 · inf: one such value in one row ended a run."""
    engine = engine_of(tiny_llama())
    batch = make_batch()
    for name in ("rollout_logprobs", *(["ref_logprobs"] if kl_coef else [])):
        rows = [row.clone() for row in batch[name].unbind()]
        for row in rows[:2]:
            row[0] = logprob
        batch[name] = torch.nested.nested_tensor(rows, layout=torch.jagged)
    batch["advantage"][:2] = torch.tensor([1.0, -1.0])
    metrics = engine.train_batch(batch, GRPO(kl_coef=kl_coef))
    assert math.isfinite(metrics["loss"])
    assert math.isfinite(metrics["grad_norm"])
    assert all(bool(value.isfinite().all()) for _, value in engine.weights())


@pytest.mark.parametrize("floor", [0.0, 0.2])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_learning_rate_warms_up_and_follows_its_schedule(schedule: Any, floor: float) -> None:
    engine = engine_of(
        tiny_llama(),
        learning_rate=0.5,
        total_steps=6,
        warmup_steps=2,
        schedule=schedule,
        schedule_floor=floor,
    )
    seen = [engine.train_batch(make_batch(RAGGED[:1]), GRPO())["learning_rate"] for _ in range(7)]
    tail = {
        "constant": [0.5] * 5,
        "linear": [0.5, 0.375, 0.25, 0.125, 0.0],
        "cosine": [0.25 * (1 + math.cos(math.pi * i / 4)) for i in range(5)],
    }
    falling = [0.5 * floor + (1 - floor) * rate for rate in tail[schedule]]
    expected = tail[schedule] if schedule == "constant" else falling
    assert seen == pytest.approx([0.25, 0.5, *expected])
    assert learning_rate_at(99, peak=1.0, total_steps=6, warmup_steps=0, schedule="linear") == 0


def test_the_learning_rate_is_multiplied_by_the_share_of_rows_with_a_signal() -> None:
    """AdamW's first step moves every weight by the learning rate, whatever the size of the
    gradient. The scaled one moves it by as much less as there are fewer rows to learn from, and not
    at all without any."""
    batch = make_batch()
    rows = len(batch["advantage"])
    for kept in (rows, 1, 0):
        part = make_batch()
        part["advantage"][kept:] = 0.0
        assert int(part["advantage"].count_nonzero()) == kept
        engine = engine_of(tiny_llama(), learning_rate=1e-3)
        before = weights_of(engine)
        assert engine.train_batch(part, GRPO())["learning_rate"] == pytest.approx(
            1e-3 * kept / rows
        )
        moved = (weights_of(engine)["model.norm.weight"] - before["model.norm.weight"]).abs()
        torch.testing.assert_close(
            moved, torch.full_like(moved, 1e-3 * kept / rows), rtol=2e-2, atol=0
        )
    kept_by_kl = GRPO(kl_coef=0.1).signal
    assert kept_by_kl(None) == 1.0  # type: ignore[arg-type]  # the KL term learns from every row


def test_the_rate_and_decay_really_act_on_the_weights() -> None:
    """AdamW's first step moves every weight with a gradient by the learning rate; decay shrinks
    matrices, not norms."""
    engine = engine_of(tiny_llama(), learning_rate=1e-3)
    before = weights_of(engine)
    engine.train_batch(make_batch(), GRPO())
    moved = (weights_of(engine)["model.norm.weight"] - before["model.norm.weight"]).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 1e-3), rtol=1e-2, atol=0)

    still = make_batch()
    still["advantage"].zero_()
    engine = engine_of(tiny_llama(), learning_rate=1e-3, weight_decay=0.5)
    before = weights_of(engine)
    engine.train_batch(still, GRPO(scale_learning_rate=False))
    after = weights_of(engine)
    name = "model.layers.0.mlp.up_proj.weight"
    torch.testing.assert_close(after[name], before[name] * (1 - 0.5e-3))
    assert torch.equal(after["model.norm.weight"], before["model.norm.weight"])


def test_a_bandit_is_learned() -> None:
    """Reward for emitting token 7: its probability rises from chance to near certainty."""
    engine = engine_of(tiny_llama(), learning_rate=5e-3)
    algorithm = GRPO()
    rng = torch.Generator().manual_seed(0)
    prompt = torch.tensor([3, 1, 4])
    chances = []
    for _ in range(40):
        every = stack(
            [
                {
                    "group": torch.tensor(0),
                    "place": torch.tensor(token),
                    "prompt_ids": prompt,
                    "response_ids": torch.tensor([token]),
                }
                for token in range(VOCABULARY)
            ]
        )
        logprobs = engine.logprobs(every).values()
        chances.append(float(logprobs[7].exp()))
        drawn = torch.multinomial(logprobs.exp(), 64, replacement=True, generator=rng)
        advantage = algorithm.credit({"reward": (drawn == 7).float()})["advantage"]
        batch = stack(
            [
                {
                    "group": torch.tensor(0),
                    "place": torch.tensor(place),
                    "prompt_ids": prompt,
                    "response_ids": token[None],
                    "rollout_logprobs": logprobs[token][None],
                    "advantage": advantage[place],
                }
                for place, token in enumerate(drawn)
            ]
        )
        engine.train_batch(batch, algorithm)
    assert chances[0] < 0.2
    assert chances[-1] > 0.9


# --- what a user hands in and takes out
# ------------------------------------------------------------------------------


def test_save_pretrained_opens_and_gives_the_same_logits(tmp_path: Path) -> None:
    model = tiny_llama()
    engine = engine_of(model)
    model.config.quantization_config = {"quant_method": "gguf"}  # what a GGUF file leaves behind
    engine.train_batch(make_batch(), GRPO())
    engine.save_pretrained(tmp_path)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert getattr(opened.config, "quantization_config", None) is None
    got = plain_logprobs(opened, make_batch())
    for own, expected in zip(engine.logprobs(make_batch()).unbind(), got, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_the_parameters_with_tied_ones_once(tied: bool) -> None:
    engine = engine_of(tiny_llama(tied=tied))
    weights = dict(engine.weights())
    assert ("lm_head.weight" in weights) == (not tied)
    assert not any(weight.requires_grad for weight in weights.values())
    other = tiny_llama(tied=tied, seed=5)
    other.load_state_dict(weights, strict=False)
    assert torch.equal(
        other(torch.tensor([[5, 6]])).logits, tiny_llama(tied=tied)(torch.tensor([[5, 6]])).logits
    )


def test_faulty_batches_are_refused_by_column_and_row() -> None:
    engine = engine_of(tiny_llama())
    rows = unstack(make_batch())
    with pytest.raises(ValueError, match="column rollout_logprobs is missing"):
        engine.train_batch(make_batch().exclude("rollout_logprobs"), GRPO())
    with pytest.raises(ValueError, match="column ref_logprobs is missing"):
        engine.train_batch(make_batch().exclude("ref_logprobs"), GRPO(kl_coef=0.1))
    short = [dict(row) for row in rows]
    short[2]["rollout_logprobs"] = short[2]["rollout_logprobs"][:-1]
    with pytest.raises(
        ValueError, match="rollout_logprobs: row 2 has 8 values for a response of 9 tokens"
    ):
        engine.train_batch(stack(short), GRPO())
    mixed = [dict(row) for row in rows]
    mixed[1]["prompt_ids"] = mixed[1]["prompt_ids"] + 1
    with pytest.raises(ValueError, match="rows 0 and 1 of group 40 do not share one prompt"):
        engine.train_batch(stack(mixed), GRPO())
    with pytest.raises(ValueError, match="schedule"):
        engine_of(tiny_llama(), schedule="step")


def test_threads_are_set_at_the_call() -> None:
    engine = engine_of(tiny_llama(), threads=2)
    engine.logprobs(make_batch(RAGGED[:1]))
    assert torch.get_num_threads() == 2


def test_close_can_be_repeated() -> None:
    engine = engine_of(tiny_llama())
    engine.train_batch(make_batch(), GRPO())
    engine.close()
    engine.close()


class SumOfLogprobs(Algorithm):
    """The smallest algorithm: shows that the engine takes any, not only GRPO."""

    def loss(self, tokens: TokenBatch) -> LossOutput:
        return LossOutput(
            -(tokens.logprobs * tokens["advantage"]).sum(), {"max_row": tokens.row_tokens.max()}
        )


def test_an_algorithm_of_ones_own_is_enough() -> None:
    metrics = engine_of(tiny_llama(), token_budget=10).train_batch(make_batch(), SumOfLogprobs())
    assert metrics["max_row"] == 12
    batch = make_batch()
    logprobs = engine_of(tiny_llama()).logprobs(batch).unbind()
    expected = -sum(
        float(a) * float(p.sum()) for a, p in zip(batch["advantage"], logprobs, strict=True)
    )
    assert metrics["loss"] == pytest.approx(expected, rel=1e-4)


# --- plans
# --------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    groups=st.lists(
        st.builds(
            GroupShape,
            st.integers(1, 30),
            st.lists(st.integers(1, 30), min_size=1, max_size=6).map(tuple),
        ),
        min_size=1,
        max_size=6,
    ),
    budget=st.none() | st.integers(1, 120),
)
def test_plans_cover_each_row_once_within_the_budget(
    groups: list[GroupShape], budget: int | None
) -> None:
    plan = plan_micro_batches(groups, budget)
    rows = [
        (piece.group, row) for micro_batch in plan for piece in micro_batch for row in piece.rows
    ]
    assert sorted(rows) == [
        (g, row) for g, group in enumerate(groups) for row in range(len(group.responses))
    ]
    limit = math.inf if budget is None else budget
    for micro_batch in plan:
        tokens = sum(groups[piece.group].tokens(piece.rows) for piece in micro_batch)
        assert tokens <= limit or sum(len(piece.rows) for piece in micro_batch) == 1
    for number, group in enumerate(groups):
        pieces = [piece for micro_batch in plan for piece in micro_batch if piece.group == number]
        if group.tokens(range(len(group.responses))) <= limit:
            assert len(pieces) == 1  # a group that fits computes its prompt once
