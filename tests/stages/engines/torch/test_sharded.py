"""The sharded train engine on real ranks against one process: every parameter's gradient, not only
the loss."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from orchestration.checkpoints.checkpoint import Checkpoint, Writer
from stages.engines.plans import GroupShape, deal
from stages.engines.torch.critic import VALUE_HEAD, TorchCriticEngine
from stages.engines.torch.parallel.tensor import cuts
from stages.engines.torch.train import TorchTrainEngine
from stages.model.load import tiny_tokenizer
from stages.parallel.layout import Layout
from stages.parallel.placement import fused, model_state
from tests.batches import make_batch
from tests.ranks import of_product, on_ranks
from tests.stages.products import name_of
from tests.stages.sharded import (
    ENTROPY,
    OPTIONS,
    algorithm,
    critic_steps,
    gradients_of_step,
    left_alone,
    mixed_steps,
    model_of,
    one_step,
    opened,
    positions,
    resumed,
    saved,
    steps,
    taking_turns,
    value_steps,
    weights_of,
    whole_state,
    written,
)

LAYOUTS = [(2, 1), (1, 2), (2, 2)]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@cache
def alone(kind: str, normalization: str = "token", **options: Any) -> dict[str, Any]:
    """The same step by one process."""
    engine = TorchTrainEngine(model_of(kind), **{**OPTIONS, **options})
    logprobs = [row.tolist() for row in engine.logprobs(make_batch()).unbind()]
    gradients, metrics = gradients_of_step(engine, make_batch(), algorithm(normalization))
    again = dict(engine.train_batch(make_batch(), algorithm(normalization)))
    weights = {name: value.numpy() for name, value in weights_of(engine).items()}
    return {
        "metrics": metrics,
        "again": again,
        "logprobs": logprobs,
        "gradients": gradients,
        "weights": weights,
    }


@cache
def together(dp: int, tp: int, kind: str) -> list[dict[str, Any]]:
    """The step by dp · tp ranks, as each of them saw it."""
    return on_ranks(dp, tp, one_step, kind, "dealt", "token", {"grad_clip": None})


def assert_gradients(got: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        gap = np.linalg.norm(got[name] - gradient.numpy()) / float(gradient.norm())
        assert gap < 1e-5, f"{name}: relative error {gap}"


def assert_step(
    found: list[dict[str, Any]], expected: dict[str, Any], shares: list[list[int]], tp: int
) -> None:
    for rank, result in enumerate(found):
        assert result["metrics"] == found[0]["metrics"], "every rank returns the same"
        for step in ("metrics", "again"):
            got = dict(result[step])
            wanted = dict(expected[step])
            # a split group's prompt is computed again
            assert got.pop("fed_tokens") >= wanted.pop("fed_tokens")
            # A second step repeats rounding many times over:
            # test_what_rounding_does_to_a_second_step. tp adds up halves of products, and its
            # gradients are within 5e-6 of one process's, with torch's own layers too.
            tolerance = 1e-5 if step == "metrics" else 5e-3
            assert got == pytest.approx(wanted, rel=tolerance, abs=1e-7)
        for at, row in zip(shares[rank // tp], result["logprobs"], strict=True):
            assert row == pytest.approx(expected["logprobs"][at], rel=1e-5, abs=1e-5)
        assert result["weights"].keys() == expected["weights"].keys()
        for name, value in result["weights"].items():
            assert value.shape == expected["weights"][name].shape
            np.testing.assert_array_equal(
                value, found[0]["weights"][name], err_msg=f"rank {rank}: {name}"
            )
        for name, copy in result["copies"].items():
            np.testing.assert_array_equal(
                copy, found[rank - rank % tp]["copies"][name], err_msg=name
            )
    assert_gradients(found[0]["gradients"], expected["gradients"])


@pytest.mark.parametrize(("dp", "tp"), LAYOUTS)
@pytest.mark.parametrize("kind", ["llama", "biased", "qwen3", "gathered", "fused"])
def test_loss_and_every_gradient_are_those_of_one_process(kind: str, dp: int, tp: int) -> None:
    found = together(dp, tp, kind)
    assert_step(found, alone(kind, grad_clip=None), positions(dp), tp)


def test_what_rounding_does_to_a_second_step() -> None:
    """Noise of a millionth of each gradient, in one process: AdamW's first step makes signs of
    gradients, tiny ones too."""
    engine = TorchTrainEngine(model_of("biased"), **{**OPTIONS, "grad_clip": None})
    made = torch.Generator().manual_seed(1)

    def add_noise(*_: Any) -> None:
        for parameter in engine.trained.values():
            noise = torch.randn(parameter.shape, generator=made) / parameter.numel() ** 0.5
            parameter.grad += 1e-6 * parameter.grad.norm() * noise

    handle = engine._optimizer.register_step_pre_hook(add_noise)
    expected = alone("biased", grad_clip=None)
    first = engine.train_batch(make_batch(), algorithm())
    handle.remove()
    again = engine.train_batch(make_batch(), algorithm())
    assert first["loss"] == pytest.approx(expected["metrics"]["loss"], rel=1e-6)
    assert 3e-5 < abs(again["loss"] / expected["again"]["loss"] - 1) < 3e-3


@pytest.mark.parametrize(("dp", "tp"), LAYOUTS)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gathered"])
def test_ranks_on_a_cpu_compute_every_norm_in_few_passes(kind: str, dp: int, tp: int) -> None:
    """Also norms of queries and keys, whose gradients the ranks of a replica add up."""
    norms = sum(hasattr(module, "variance_epsilon") for module in model_of(kind).modules())
    for result in together(dp, tp, kind):
        assert result["fast_norms"] == result["passes"] * norms > 0


@pytest.mark.parametrize("chosen", [{"dp": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "cp": 2}], ids=name_of)
def test_ranks_with_far_less_work_keep_step_and_change_nothing(chosen: dict[str, int]) -> None:
    """One replica has a single row, so it makes idle passes; gradients are clipped by the norm over
    all ranks."""
    options: dict[str, Any] = {"grad_clip": 0.5, "activation_checkpointing": True}
    expected = alone("qwen3", "sequence", **options)
    assert expected["metrics"]["grad_norm"] > 1
    found = of_product(chosen, one_step, "qwen3", "lopsided", "sequence", options)
    assert_step(found, expected, positions(2, "lopsided"), len(found) // 2)
    assert {result["passes"] for result in found} == {found[0]["passes"]}
    assert found[0]["passes"] > 1


@pytest.mark.parametrize("chosen", [{"dp": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "cp": 2}], ids=name_of)
@pytest.mark.parametrize(
    "of_ppo",
    [{}, {"critic_warmup_steps": 1, "value_learning_rate": 3e-2}, ENTROPY],
    ids=["", "warm-up", "entropy"],
)
def test_a_value_head_on_ranks_is_that_of_one_process(
    chosen: dict[str, int], of_ppo: dict[str, Any], tmp_path: Path
) -> None:
    """Its gradient, the gradient's norm with it, its moments; and what the ranks save, one process
    resumes. With entropies also those of all tokens before the step, and the weight of a bonus."""
    options: dict[str, Any] = {"grad_clip": 0.5}
    expected = value_steps(None, "", options, of_ppo)
    found = of_product(
        {**chosen, "context_parallel": "ring"}, value_steps, str(tmp_path), options, of_ppo
    )
    for result in found:
        for got, wanted in zip(result["metrics"], expected["metrics"], strict=True):
            shared = got.keys() & wanted.keys() - {"fed_tokens"}
            assert {"value_loss", "grad_norm", "explained_variance"} <= shared
            assert {n: got[n] for n in shared} == pytest.approx(
                {n: wanted[n] for n in shared}, rel=3e-4, abs=1e-6
            )
        for name, value in result["head"].items():
            np.testing.assert_array_equal(value, found[0]["head"][name])
            np.testing.assert_allclose(value, expected["head"][name], rtol=1e-3, atol=1e-6)
    assert np.abs(expected["head"]["value_head.weight"]).max() > 1e-3
    resumed_alone = TorchTrainEngine(model_of("llama", seed=9), **OPTIONS, value_head=True)
    Checkpoint(tmp_path, 2, {}, []).load_into(resumed_alone)
    for name, value in found[0]["head"].items():
        np.testing.assert_array_equal(resumed_alone.value_head[name].detach().numpy(), value)
    control = resumed_alone.state_dict().get("control", {})
    assert bool(control) == ("entropy_target" in of_ppo)
    assert all(control[name] != found[0]["metrics"][0][name] for name in control)
    exported = load_file(tmp_path / "model" / "model.safetensors")
    assert not any("value_head" in name for name in exported)


@pytest.mark.parametrize(
    ("kind", "chosen"),
    [
        ("llama", {"dp": 2}),
        ("biased", {"tp": 2}),
        ("biased", {"dp": 2, "tp": 2}),
        ("llama", {"cp": 2}),
    ],
)
def test_a_critic_on_ranks_has_the_values_and_learns_the_weights_of_one_process(
    kind: str, chosen: dict[str, int], tmp_path: Path
) -> None:
    """With tied output embeddings, and with some of its own, which a critic does not train; values
    of more groups than replicas, and of fewer; and what the ranks save, one process resumes."""
    expected = critic_steps(None, kind, "", {})
    found = of_product(chosen, critic_steps, kind, str(tmp_path), {})
    for result in found:
        assert result["values"] == found[0]["values"], "all ranks have all values"
        for got, wanted in zip(result["metrics"], expected["metrics"], strict=True):
            assert got == pytest.approx(wanted, rel=3e-4)
        for got, wanted in zip(
            result["values"] + result["alone"], expected["values"] + expected["alone"], strict=True
        ):
            assert got == pytest.approx(wanted, rel=1e-3, abs=1e-4)
    assert max(abs(value) for row in expected["alone"] for value in row) > 1e-3
    resumed_alone = TorchCriticEngine(model_of(kind, seed=9), **OPTIONS)
    Checkpoint(tmp_path, 2, {}, []).load_into(resumed_alone)
    rows = resumed_alone.values(make_batch(seed=2)).unbind()
    for row, saved_by in zip(rows, expected["values"][-len(rows) :], strict=True):
        assert row.tolist() == pytest.approx(saved_by, rel=1e-3, abs=1e-4)
    opened_again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    again = TorchCriticEngine(opened_again, head=tmp_path / "model" / VALUE_HEAD, **OPTIONS)
    assert torch.equal(again.values(make_batch(seed=2)).values(), torch.cat(list(rows)))


def test_a_rank_holds_its_share_of_weights_and_moments() -> None:
    found = together(2, 2, "llama")
    whole = sum(value.nbytes for value in alone("llama")["weights"].values())
    for result in found:
        assert result["held"] < 0.27 * whole  # a quarter, the norms inside layers twice
        # FSDP pads
        assert sum(4 * int(np.prod(shape)) for shape in result["shards"].values()) <= result["held"]


def test_a_step_on_ranks_has_the_same_bits_each_time() -> None:
    once, again = (on_ranks(2, 1, steps, "qwen3", 3, {"grad_clip": 0.5})[0] for _ in range(2))
    assert once[:-1] == again[:-1]
    for name, value in once[-1].items():
        np.testing.assert_array_equal(value, again[-1][name], err_msg=name)


def test_a_rank_that_does_not_come_is_not_waited_for_for_ever() -> None:
    """Beside the supervisor, who sees processes end: one that hangs ends the others when the
    group's time is over."""
    [message, _] = on_ranks(2, 1, left_alone, timeout=8.0)
    assert "timeout" in message.lower() or "timed out" in message.lower(), message


# --- checkpoints
# --------------------------------------------------------------------------------------------------


def test_what_any_layout_has_saved_any_other_resumes_bit_for_bit(tmp_path: Path) -> None:
    """dp2 saves beside a step; tp2, dp2 · tp2 and one process without torch.distributed resume
    it."""
    options: dict[str, Any] = {"grad_clip": 0.5, "weight_decay": 0.1}
    first = tmp_path / "first"
    state = on_ranks(2, 1, saved, "qwen3", str(first), options)[0]
    assert any(
        np.abs(value).max() > 0 for name, value in state.items() if name.startswith("exp_avg/")
    )
    alone = TorchTrainEngine(model_of("qwen3", seed=9), **{**OPTIONS, **options})
    Checkpoint(first, 1, {}, []).load_into(alone)
    model = load_file(first / "model" / "model.safetensors")
    assert_same_state(
        {f"model/{name}": value.numpy() for name, value in model.items()},
        {name: value for name, value in state.items() if name.startswith("model/")},
    )
    assert_same_state(whole_state(alone), state)
    alone.train_batch(make_batch(seed=1), algorithm())
    expected = whole_state(alone)
    for dp, tp in ((1, 2), (2, 2)):
        before, after = on_ranks(dp, tp, resumed, "qwen3", str(first), options)[0]
        assert_same_state(before, state)
        assert after["step"] == expected["step"] == 2
        for name in expected.keys() - {"step"}:
            gap = np.linalg.norm(after[name] - expected[name]) / np.linalg.norm(expected[name])
            assert gap < 1e-4, f"{name}: {gap}"


def test_what_one_process_has_saved_ranks_resume(tmp_path: Path) -> None:
    alone = TorchTrainEngine(model_of("llama"), **OPTIONS)
    alone.train_batch(make_batch(), algorithm())
    writer = Writer(alone)
    writer.copy()
    writer.write(tmp_path)
    before, _ = on_ranks(2, 1, resumed, "llama", str(tmp_path), {})[0]
    assert_same_state(before, whole_state(alone))


def assert_same_state(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


def test_a_state_of_another_model_is_refused() -> None:
    engine = TorchTrainEngine(model_of("llama"), **OPTIONS)
    with pytest.raises(ValueError, match="model differs"):
        engine.load_state_dict(TorchTrainEngine(model_of("qwen3"), **OPTIONS).state_dict())


@pytest.mark.parametrize(
    ("dp", "tp", "kind", "file_bytes", "files"),
    [
        (1, 2, "biased", 2**30, 1),
        (1, 2, "biased", 20_000, None),
        (2, 1, "qwen3", 20_000, None),
        (2, 2, "llama", 2**30, 1),
        (2, 2, "qwen3", 20_000, None),
    ],
)
def test_a_hugging_face_checkpoint_of_any_layout_opens_with_transformers(
    dp: int, tp: int, kind: str, file_bytes: int, files: int | None, tmp_path: Path
) -> None:
    on_ranks(dp, tp, written, kind, str(tmp_path), file_bytes)
    found = sorted(tmp_path.glob("*.safetensors"))
    assert len(found) == files if files else len(found) > 3
    assert files or all(path.stat().st_size < 24_000 for path in found)
    held = [name for path in found for name in load_file(path)]
    assert ("lm_head.weight" in held) == (kind == "biased"), "tied embeddings are written once"
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    model = model_of(kind, dtype=torch.bfloat16)
    assert type(opened) is type(model)
    assert opened.dtype == torch.bfloat16
    expected = dict(model.named_parameters())
    got = dict(opened.named_parameters())
    assert got.keys() == expected.keys() == set(held)
    assert (opened.lm_head.weight is opened.model.embed_tokens.weight) == (kind != "biased")
    for name, weight in expected.items():
        assert torch.equal(got[name], weight), name


def test_ranks_save_what_transformers_saves_of_a_model_with_experts(tmp_path: Path) -> None:
    """By expert, as vLLM and other readers of checkpoints expect them, and with the buffers that
    routing needs."""
    ranks = tmp_path / "ranks"
    one = tmp_path / "one"
    on_ranks(2, 1, written, "moe", str(ranks), 400_000)
    model_of("moe", dtype=torch.bfloat16).save_pretrained(one)
    assert len(list(ranks.glob("*.safetensors"))) > 1
    found, expected = (
        {n: t for path in at.glob("*.safetensors") for n, t in load_file(path).items()}
        for at in (ranks, one)
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in found
    assert found["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32


@pytest.mark.parametrize("kind", ["biased", "qwen3"])
def test_ranks_begin_with_the_weights_of_a_hugging_face_checkpoint_in_several_files(
    kind: str, tmp_path: Path
) -> None:
    model = model_of(kind, seed=5)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    tiny_tokenizer().save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    for found in on_ranks(2, 2, opened, str(tmp_path)):
        assert found.keys() == dict(model.named_parameters()).keys()
        for name, weight in model.named_parameters():
            np.testing.assert_array_equal(found[name], weight.detach().numpy(), err_msg=name)


# --- precision
# --------------------------------------------------------------------------------------------------


@cache
def mixed(dp: int, tp: int) -> list[dict[str, Any]]:
    return on_ranks(dp, tp, mixed_steps, 3)


def test_mixed_precision_computes_in_bfloat16_over_float32_masters() -> None:
    [one] = mixed(1, 1)
    assert (one["computed"], one["kept"], one["published"]) == (
        "torch.bfloat16",
        {"torch.float32"},
        {"torch.bfloat16"},
    )
    half = TorchTrainEngine(model_of("qwen3", dtype=torch.bfloat16), **OPTIONS)
    assert one["logprobs"] == [row.tolist() for row in half.logprobs(make_batch()).unbind()], (
        "the bfloat16 model's own"
    )
    for name, master in one["masters"].items():
        published = torch.from_numpy(master).bfloat16().float().numpy()
        np.testing.assert_array_equal(one["weights"][name], published, err_msg=name)
    for name, master in one["masters"].items():
        rounded = torch.from_numpy(master).bfloat16().float().numpy()
        assert not np.array_equal(master, rounded), f"{name}: no more than bfloat16 holds"


@pytest.mark.parametrize(("dp", "tp"), LAYOUTS)
def test_ranks_in_mixed_precision_are_as_near_to_float32_as_one(dp: int, tp: int) -> None:
    """Ranks that cut matrices round the parts of a sum: they compute other bfloat16 numbers than
    one, and no worse ones."""
    [one], found, exact = mixed(1, 1), mixed(dp, tp), alone("qwen3")["gradients"]
    before = {name: value.detach().numpy() for name, value in model_of("qwen3").named_parameters()}
    for result in found:
        for key in ("computed", "kept", "published"):
            assert result[key] == one[key]
        assert result["loss"] == found[0]["loss"] == pytest.approx(one["loss"], rel=0.02)
        for name, master in one["masters"].items():
            np.testing.assert_array_equal(
                result["masters"][name], found[0]["masters"][name], err_msg=name
            )
            gap, usual = (
                np.linalg.norm(r["gradients"][name] - exact[name].numpy()) for r in (result, one)
            )
            assert gap < 2 * usual < 0.12 * exact[name].norm(), f"{name}: {gap} beside {usual}"
            if tp == 1:  # AdamW makes signs of what is nearly zero
                way = np.linalg.norm(result["masters"][name] - master) / np.linalg.norm(
                    master - before[name]
                )
                assert way < 0.1, f"{name}: {dp} ranks went another way than one ({way})"


# --- shares
# --------------------------------------------------------------------------------------------------


def test_ranks_are_distinguished() -> None:
    assert [Layout.for_training(dp=2, tp=3).coordinates(rank).replica for rank in range(6)] == [
        0,
        0,
        0,
        1,
        1,
        1,
    ]
    with pytest.raises(ValueError, match="4 of 4"):
        Layout.for_training(dp=2, tp=2).coordinates(4)


shapes = st.lists(
    st.builds(
        GroupShape,
        st.integers(1, 60),
        st.lists(st.integers(1, 60), min_size=1, max_size=8).map(tuple),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=200, deadline=None)
@given(groups=shapes, parts=st.integers(1, 8))
def test_shares_cover_each_row_once_and_none_is_empty(groups: list[GroupShape], parts: int) -> None:
    rows = [
        (number, row) for number, group in enumerate(groups) for row in range(len(group.responses))
    ]
    if len(rows) < parts:
        with pytest.raises(ValueError, match=f"{len(rows)} rows cannot be dealt to {parts}"):
            deal(groups, parts)
        return
    shares = deal(groups, parts)
    assert len(shares) == parts
    assert all(shares)
    assert (
        sorted((piece.group, row) for share in shares for piece in share for row in piece.rows)
        == rows
    )
    for share in shares:
        assert len({piece.group for piece in share}) == len(share), (
            "a prompt is computed twice by one rank"
        )


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 60)), min_size=1, max_size=8),
    parts=st.integers(2, 4),
)
def test_shares_are_balanced_by_tokens(sizes: list[tuple[int, int]], parts: int) -> None:
    """With rows and prompts much shorter than a share, the largest is near the fair one."""
    groups = [GroupShape(prompt, (length,) * 64) for prompt, length in sizes]
    tokens = [sum(groups[p.group].tokens(p.rows) for p in share) for share in deal(groups, parts)]
    fair = sum(group.tokens(range(64)) for group in groups) / parts
    assert max(tokens) <= 1.15 * fair + max(prompt + length for prompt, length in sizes)


def test_groups_stay_whole_where_that_balances() -> None:
    shares = deal([GroupShape(50, (10,) * 8)] * 4, 2)
    assert [[piece.rows for piece in share] for share in shares] == [[tuple(range(8))] * 2] * 2


# --- what cannot be cut
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tp", "plan", "message"),
    [
        (4, {}, "num_attention_heads = 6, which 4 ranks cannot share evenly"),
        (3, {}, "num_key_value_heads = 2, which 3 ranks cannot share evenly"),
        (2, None, "Qwen3ForCausalLM comes without a tensor-parallel plan; use tp = 1"),
        (
            2,
            {"layers.*.mlp": "mla_kv_a_proj"},
            r"wants layers\.0\.mlp 'mla_kv_a_proj'; this engine "
            r"knows colwise",
        ),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_by_name(
    tp: int, plan: dict[str, str] | None, message: str
) -> None:
    model = model_of("qwen3")
    model.config.base_model_tp_plan = plan if plan != {} else model.config.base_model_tp_plan
    with pytest.raises(ValueError, match=message):
        cuts(model, tp)


def test_embeddings_stay_whole_whatever_the_plan_says() -> None:
    """As transformers 5.16 plans for tied ones."""
    model = model_of("qwen3")
    planned = [id(module) for module, _ in cuts(model, 2)]
    plan = {**model.config.base_model_tp_plan, "embed_tokens": "embedding_rowwise"}
    model.config.base_model_tp_plan = plan
    assert [id(module) for module, _ in cuts(model, 2)] == planned


def test_fused_matrices_are_found() -> None:
    assert (
        fused(model_state(model_of("fused").config)) == "model.layers.0.self_attn.qkv_proj.weight"
    )
    assert fused(model_state(model_of("gathered").config)) == ""


@pytest.mark.parametrize(
    ("chosen", "kind", "compute"),
    [
        ({"dp": 2, "tp": 2}, "qwen3", "float32"),
        ({"tp": 2}, "biased", "float32"),
        ({"tp": 2}, "gathered", "float32"),
        ({"dp": 3}, "llama", "bfloat16"),
        ({"cp": 2}, "llama", "float32"),
    ],
)
def test_a_rollout_engine_on_the_same_devices_gets_the_weights_bit_for_bit(
    chosen: dict[str, int], kind: str, compute: str
) -> None:
    result = of_product(chosen, taking_turns, kind, compute)
    assert result == [result[0]] * len(result)
    assert ("model.layers.0.self_attn.qkv_proj.weight" in result[0]) == (kind != "gathered"), (
        "vLLM's names where fused"
    )
    assert ("model.layers.1.mlp.gate_up_proj.bias" in result[0]) == (kind == "biased")
