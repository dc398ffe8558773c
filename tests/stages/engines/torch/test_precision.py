"""bfloat16: float32 logits in both engines, and a probe that separates roundings from wrong
weights."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from pipeline.documents.flow import VERSION
from pipeline.index.client import Index, RunConfig
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.engines.protocols import GroupRequest, SamplingParams, SwapTimes
from stages.engines.torch.decoding.decoder import TorchDecoder
from stages.engines.torch.decoding.llama_forward import can_pack_in
from stages.engines.torch.model.logits import PIECE, float32_logits
from stages.engines.torch.rollout import TorchRolloutEngine
from stages.engines.torch.train import TorchTrainEngine
from stages.rollout.swapper import SwapPolicy
from stages.training.update import PROBE_ROWS, probe_rows
from stages.weights.published import Probe
from stages.weights.records import WeightRecords
from stages.weights.transport.store import WeightStore
from stages.weights.verification.probe import (
    Gap,
    ProbeFailed,
    ProbeJudge,
    ProbeLimits,
    ProbeRule,
    gap,
    probed,
)
from tests.stages.rollout.test_weight_follower import events, follower

SHAPE: dict[str, Any] = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.1,
)
Weights = Mapping[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made(kind: str, seed: int = 0) -> PreTrainedModel:
    """A model whose logits are as large as a real one's, in bfloat16."""
    torch.manual_seed(seed)
    model: PreTrainedModel
    if kind == "experts":
        experts = dict(
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            head_dim=8,
            decoder_sparse_step=1,
        )
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **experts))
    elif kind == "biased":
        model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=False))
        model.lm_head = nn.Linear(32, 97)
    else:
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=kind == "tied"))
    nn.init.constant_(model.model.norm.weight, 6.0)
    for parameter in model.parameters():  # not the buffers
        parameter.data = parameter.data.bfloat16()
    return model.eval()


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


# ── float32 logits ──


@pytest.mark.parametrize("shape", [(5, 12), (2, 3, 12), (1, 12)])
@pytest.mark.parametrize("biased", [False, True])
def test_in_float32_the_logits_are_those_of_a_linear_layer(
    shape: tuple[int, ...], biased: bool
) -> None:
    layer = nn.Linear(12, 97, bias=biased)
    hidden = torch.randn(shape)
    found = float32_logits(hidden, layer.weight, layer.bias)
    torch.testing.assert_close(found, layer(hidden), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("vocabulary", [97, PIECE // 64, PIECE // 64 + 1, 3 * PIECE // 64 - 5])
def test_a_bfloat16_head_gives_float32_logits_and_not_those_of_its_own_grid(
    vocabulary: int,
) -> None:
    layer = nn.Linear(64, vocabulary).bfloat16()
    hidden = 60 * torch.randn(3, 2, 64).bfloat16()
    exact = nn.functional.linear(hidden.double(), layer.weight.double(), layer.bias.double())
    found = float32_logits(hidden, layer.weight, layer.bias)
    assert (found.dtype, found.shape) == (torch.float32, (3, 2, vocabulary))
    assert float((found - exact).detach().abs().max()) < 1e-4
    assert float((layer(hidden).float() - exact).detach().abs().max()) > 0.05, "what this is for"


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", ["tied", "untied", "biased", "experts"])
def test_the_decoder_has_float32_logits_also_after_a_swap(kind: str, packed: bool) -> None:
    if packed and not can_pack_in(torch.bfloat16):
        pytest.skip("oneDNN packs no bfloat16 on this CPU")
    prompt = torch.arange(3, 9)
    response = torch.arange(9, 20)
    decoder = TorchDecoder(made(kind), torch.device("cpu"), packed=packed)
    with torch.inference_mode():
        before = decoder.score(prompt, response).clone()
    assert float((before.bfloat16().float() == before).float().mean()) < 0.05, (
        "not of bfloat16's grid"
    )
    other = made(kind, seed=1)
    weights = parameters(other)
    decoder.weights.check(weights)
    decoder.weights.install(decoder.weights.prepare(weights))
    with torch.inference_mode():
        swapped = decoder.score(prompt, response).clone()
        built = TorchDecoder(other, torch.device("cpu"), packed=packed).score(prompt, response)
    assert not torch.equal(swapped, before)
    assert torch.equal(swapped, built), "all weights are the new ones, the head's too"


OLD_CPU = """
import torch
from stages.engines.torch.decoding.decoder import TorchDecoder
from tests.stages.engines.torch.test_precision import made

for dtype in (torch.bfloat16, torch.float32):
    model = made("untied").to(dtype)
    ids = torch.arange(3, 20)
    expected = model(ids[None]).logits[0, 5:-1].float().log_softmax(-1)
    decoder = TorchDecoder(model, torch.device("cpu"))
    with torch.inference_mode():
        found = decoder.score(ids[:6], ids[6:]).log_softmax(-1)
    print(decoder.weights.packed, float((found - expected).abs().mean()) < 0.05)
"""


def test_a_cpu_whose_onednn_packs_no_bfloat16_decodes_in_it() -> None:
    """As one without AVX-512: oneDNN is told so."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    made = subprocess.run(
        [sys.executable, "-c", OLD_CPU],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert made.stdout.split() == ["False", "True", "True", "True"], made.stderr


def test_the_trainers_logprobs_rest_on_float32_logits() -> None:
    engine = TorchTrainEngine(made("untied"), learning_rate=1e-4, total_steps=1, threads=1)
    head = engine.model.get_output_embeddings()
    ids = torch.arange(3, 30)
    kept: list[torch.Tensor] = []
    engine.model.base_model.register_forward_hook(
        lambda *call: kept.append(call[-1].last_hidden_state[0])
    )
    (found,) = probed(engine, [ids.tolist()]).logprobs
    (hidden,) = kept
    logits = hidden.double() @ head.weight.double().t()  # type: ignore[union-attr, operator]
    exact = logits.log_softmax(-1)[: len(ids) - 1].gather(1, ids[1:, None])[:, 0]
    assert float((torch.tensor(found) - exact).detach().abs().max()) < 1e-4
    engine.close()


# ── limits ──


def spread(size: float) -> Probe:
    """Logprobs with the standard deviation ``size``."""
    return Probe(((1, 2, 3),), ((-9.0 - size, -9.0 + size),))


def test_limits_follow_from_dtype_layers_and_spread_and_a_recipe_may_replace_them() -> None:
    for probe in (spread(0.1), spread(4)):
        assert ProbeRule(torch.float32, 30).limits(probe) == ProbeLimits(0.0002, 0.001, 0.001)
        assert ProbeRule(torch.float32, 30, q95=0.1).limits(probe) == ProbeLimits(0.02, 0.1, 0.1)
        assert ProbeRule(torch.bfloat16, 4, q95=0.6).limits(probe) == ProbeLimits(0.12, 0.6)
    few, many, routed = (ProbeRule(torch.bfloat16, *of) for of in ((4,), (64,), (16, True)))
    assert few.limits(spread(0.1)) == few.limits(spread(1)) == ProbeLimits(6 / 256, 30 / 256)
    assert ProbeRule(torch.bfloat16, 16).limits(spread(1)) == few.limits(spread(1))
    assert many.limits(spread(1)).q95 == 2 * few.limits(spread(1)).q95
    assert routed.limits(spread(1)).q95 == 3 * few.limits(spread(1)).q95
    assert many.limits(spread(3)).mean == pytest.approx(3 * many.limits(spread(1)).mean)
    assert few.limits(spread(3)).max == math.inf


def of(*differences: float) -> Gap:
    return gap(torch.zeros(len(differences)), torch.tensor(differences))


def test_one_token_may_round_far_off_in_bfloat16_and_none_in_float32() -> None:
    exact, low = (
        ProbeRule(dtype, 30).limits(spread(3.3)) for dtype in (torch.float32, torch.bfloat16)
    )
    one_off = of(*[0.0] * 99, 0.5)
    assert low.exceeded(one_off) is None
    assert exact.exceeded(one_off) == (
        "by 0.5 (the largest of 100 tokens; sync.probe_tolerance is 0.001)"
    )
    six_off = of(*[0.0] * 94, *[0.6] * 6)
    all_a_little = of(*[0.11] * 100)
    two_far_off = of(*[0.0] * 98, 2.5, 2.5)
    assert low.exceeded(six_off) == (
        "by 0.6 (95th percentile of 100 tokens; sync.probe_tolerance is 0.53)"
    )
    assert low.exceeded(two_far_off) == (
        "by 0.0316 (k3 of 100 tokens; sync.probe_tolerance ** 2 / 10 is 0.028)"
    )
    assert low.exceeded(all_a_little) == (
        "by 0.11 (mean of 100 tokens; sync.probe_tolerance / 5 is 0.106)"
    )
    for broken in (math.nan, math.inf):
        assert low.exceeded(of(*[0.0] * 99, broken)) is not None


def test_of_few_tokens_the_largest_counts() -> None:
    assert of(*[0.0] * 9, 0.7).q95 == pytest.approx(0.7)
    assert of(*[0.0] * 99, 0.7).q95 == 0


# ── what is probed ──


def batch(*rows: tuple[int, int, int]) -> TensorDict:
    """Of (group, prompt tokens, response tokens)."""
    found = TensorDict({"group": torch.tensor([group for group, _, _ in rows])}, [len(rows)])
    for at, name in ((1, "prompt_ids"), (2, "response_ids")):
        ids = [torch.arange(row[at]) + 1000 * number for number, row in enumerate(rows)]
        found[name] = torch.nested.nested_tensor(ids, layout=torch.jagged)
    return found


def tokens(rows: list[list[int]]) -> int:
    return sum(len(row) - 1 for row in rows)


def test_a_probe_takes_rows_of_different_groups_until_it_has_enough_tokens() -> None:
    rows = probe_rows([], batch((7, 40, 9), (7, 40, 9), (8, 40, 9), (9, 40, 9), (10, 40, 9)), 128)
    assert [row[0] for row in rows] == [0, 2000, 3000], "of each group the first row"
    assert tokens(rows) == 3 * 48
    (one,) = probe_rows([], batch((7, 40, 9), (8, 40, 9)), 1)
    assert len(one) == 49
    (cut,) = probe_rows([], batch((7, 500, 900)), 1)
    assert len(cut) == 64 + 16


def test_probes_of_successive_versions_share_rows_and_stay_small() -> None:
    rows: list[list[int]] = []
    for step in range(12):
        before = rows
        ids = batch(*((group, 40, 9) for group in range(4)))
        for name in ("prompt_ids", "response_ids"):
            ids[name] = torch.nested.nested_tensor(
                [x + 10_000 * step for x in ids[name].unbind()], layout=torch.jagged
            )
        rows = probe_rows(before, ids, 128)
        assert tokens(rows) < 2 * 128
        assert rows != before, "renewed"
        assert not before or [row for row in rows if row in before], "and not all at once"
        assert len({tuple(row) for row in probe_rows(rows, ids, 128)}) == len(
            probe_rows(rows, ids, 128)
        ), "none twice"
    short: list[list[int]] = []
    for step in range(3):
        before = short
        ids = batch(*((group, 3, 2) for group in range(32)))
        ids["prompt_ids"] = torch.nested.nested_tensor(
            [x + step for x in ids["prompt_ids"].unbind()], layout=torch.jagged
        )
        short = probe_rows(before, ids, 128)
        assert len(short) <= PROBE_ROWS
        assert not before or [row for row in short if row in before]


# ── the verdict, with the real engines ──


class Wrong(TorchRolloutEngine):
    """Loads ``fault`` of the next weights that it is given, without an error."""

    fault: Callable[[Weights], Weights] | None = None

    async def load_weights(
        self, version: int, weights: Weights, *, hold: bool = False, cut: bool = False
    ) -> SwapTimes:
        fault = self.fault
        self.fault = None
        weights = fault(weights) if fault else weights
        return await super().load_weights(version, weights, hold=hold, cut=cut)


class Trainer:
    """Trains in mixed precision on what ``rollout`` generates, and publishes, as an update stage
    does."""

    def __init__(
        self, index: Index, store: WeightStore, rollout: TorchRolloutEngine, **options: Any
    ) -> None:
        self.rollout = rollout
        options = {"learning_rate": 1e-3, "total_steps": 9, "threads": 1, **options}
        self.index = index
        self.store = store
        self.version = 0
        self.engine = TorchTrainEngine(made("untied").float(), compute=torch.bfloat16, **options)
        self.rows: list[list[int]] = []

    async def step(self) -> None:
        random = torch.Generator().manual_seed(self.version)
        asked = [
            GroupRequest(
                group,
                (0, 1),
                torch.randint(97, (4,), generator=random),
                SamplingParams(max_tokens=16),
                0,
            )
            for group in range(8)
        ]
        made = sorted(
            [one async for one in self.rollout.generate(asked)],
            key=lambda one: (one.group, one.place),
        )
        columns = {
            "prompt_ids": [asked[one.group].prompt_ids for one in made],
            "response_ids": [one.token_ids for one in made],
            "rollout_logprobs": [one.logprobs for one in made],
        }
        rows = TensorDict({"group": torch.arange(16) // 2, "place": torch.arange(16) % 2}, [16])
        for name, values in columns.items():
            rows[name] = torch.nested.nested_tensor(values, layout=torch.jagged)
        rows["advantage"] = torch.randn(16, generator=random)
        self.engine.train_batch(rows, GRPO())
        self.version += 1
        self.rows = probe_rows(self.rows, rows, 128)
        published = self.store.publish(
            self.version, self.engine.weights(), probed(self.engine, self.rows)
        )
        await self.index.wake(VERSION)
        await self.index._redis.hset(f"{self.index.prefix}n", "trained", self.version)
        await WeightRecords(self.index).publish(published)


@pytest.fixture
async def engine() -> Any:
    engine = Wrong(made("untied"), max_rows=4, threads=1)
    yield engine
    await engine.close()


RULE = ProbeRule(torch.bfloat16, SHAPE["num_hidden_layers"])


async def test_bfloat16_engines_pass_the_probe_version_after_version(
    index: Index, tmp_path: Path, engine: Wrong
) -> None:
    await index.init(RunConfig(()), {})
    trainer = Trainer(index, WeightStore(tmp_path), engine)
    following = follower(index, WeightStore(tmp_path), engine, SwapPolicy(probe=RULE))
    for _ in range(4):
        await trainer.step()
        assert await following._take()
    syncs = await events(index, "sync")
    assert [sync["version"] for sync in syncs] == [1, 2, 3, 4]
    for sync in syncs:
        assert 0 < sync["gap_mean"] <= sync["gap_q95"] <= sync["gap_max"]
        assert sync["gap_mean"] < sync["gap_mean_limit"] / 1.5, "no close thing"
        assert sync["gap_q95"] < sync["gap_q95_limit"] / 1.5
        assert sync["gap_tokens"] >= 128
        assert "gap_max_limit" not in sync, "no limit, and JSON has no infinity"


def zero(name: str) -> Callable[[Weights], Weights]:
    return lambda weights: {**weights, name: torch.zeros_like(weights[name])}


def one_bit(name: str) -> Callable[[Weights], Weights]:
    def flip(weights: Weights) -> Weights:
        weight = weights[name].clone()
        weight.view(torch.int16)[3, 3] ^= 1 << 14  # of the exponent
        return {**weights, name: weight}

    return flip


def exchanged(one: int, other: int) -> Callable[[Weights], Weights]:
    def layer(name: str, number: int) -> str:
        return name.replace(
            f"layers.{one}." if f"layers.{one}." in name else f"layers.{other}.",
            f"layers.{number}.",
        )

    def exchange(weights: Weights) -> Weights:
        return {
            name: weights[layer(name, other if f"layers.{one}." in name else one)]
            if f"layers.{one}." in name or f"layers.{other}." in name
            else value
            for name, value in weights.items()
        }

    return exchange


def rows_moved(name: str) -> Callable[[Weights], Weights]:
    return lambda weights: {**weights, name: weights[name].roll(1, 0)}


FAULTS = {
    "a tensor is zero": zero("model.layers.2.mlp.up_proj.weight"),
    "a tensor's rows are moved": rows_moved("model.layers.4.self_attn.v_proj.weight"),
    "a bit of an exponent": one_bit("model.layers.3.mlp.down_proj.weight"),
    "two layers are exchanged": exchanged(2, 3),
    "the head's rows are moved": rows_moved("lm_head.weight"),
    "old weights": lambda weights: parameters(made("untied")),
}


async def test_really_wrong_weights_are_refused_in_bfloat16_at_once(
    index: Index, tmp_path: Path, engine: Wrong
) -> None:
    await index.init(RunConfig(()), {})
    trainer = Trainer(index, WeightStore(tmp_path), engine)
    following = follower(index, WeightStore(tmp_path), engine, SwapPolicy(probe=RULE))
    await trainer.step()
    assert await following._take()
    for version, (name, fault) in enumerate(FAULTS.items(), 1):
        await trainer.step()
        engine.fault = fault
        assert not await following._take(), name
        assert engine.version == version
        reason = (await events(index, "worker"))[-1]["reason"]
        assert "sync.probe" in reason or "bit for bit" in reason
        assert await following._take(), "sound weights are taken"


@pytest.mark.parametrize("learning_rate", [1e-5, 1e-3])
async def test_an_undelivered_update_is_refused_also_where_roundings_hide_it(
    index: Index, tmp_path: Path, engine: Wrong, learning_rate: float
) -> None:
    await index.init(RunConfig(()), {})
    trainer = Trainer(index, WeightStore(tmp_path), engine, learning_rate=learning_rate)
    following = follower(index, WeightStore(tmp_path), engine, SwapPolicy(probe=RULE))
    await trainer.step()
    assert await following._take()
    before = {name: value.clone() for name, value in trainer.engine.weights()}
    await trainer.step()
    engine.fault = lambda weights: before
    assert not await following._take()
    assert engine.version == 1
    assert await following._take()


async def test_a_wrong_temperature_is_refused(index: Index, tmp_path: Path, engine: Wrong) -> None:
    await index.init(RunConfig(()), {})
    trainer = Trainer(index, WeightStore(tmp_path), engine, temperature=0.8)
    following = follower(index, WeightStore(tmp_path), engine, SwapPolicy(probe=RULE))
    await trainer.step()
    with pytest.raises(RuntimeError, match=r"differ from the trainer's by .* sync.probe_"):
        await following._take()


def test_weights_that_did_not_change_are_not_taken_for_an_undelivered_update() -> None:
    judge = ProbeJudge(RULE)
    found = [torch.tensor([-1.0, -2.0, -3.0])]
    first = Probe(((5, 6, 7, 8),), ((-1.0, -2.0, -3.0),))
    other = Probe(first.sequences, ((-1.01, -2.01, -3.01),))
    judge.judge(first, found)
    judge.judge(first, found)  # no step has moved anything: a version published once more
    judge.judge(other, found, same_weights=True)  # a trainer that never computes twice alike
    judge = ProbeJudge(RULE)
    judge.judge(first, found)
    with pytest.raises(ProbeFailed, match="of 3 tokens are bit for bit"):
        judge.judge(other, found)
    # another sequence: nothing to compare with
    judge.judge(Probe(((5, 6, 7, 9),), other.logprobs), found)
