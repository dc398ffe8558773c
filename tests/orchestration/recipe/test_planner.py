"""The derived numbers of a recipe are those of design and arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from benchmarks.engines.families import write
from orchestration.recipe.flow import algorithm_of
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sizes.planner import (
    HEADS,
    Plan,
    arena_bytes,
    heads_of,
    notices_of,
    parameters_of,
    plan,
    share_of_trained,
)
from orchestration.supervise.watch import options_of
from orchestration.workers.engines import reference_engine, rollout_engine, train_engine
from pipeline.data.blocks import pack
from stages.algorithms import TokenBatch, build_algorithm
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.flow.catalogue import catalogue
from stages.flow.resolver import resolve
from stages.model.load import tiny_model


def recipe(**sections: dict[str, Any]) -> Recipe:
    base: dict[str, dict[str, Any]] = {
        "model": {"source": "tiny"},
        "prompts": {"source": "builtin", "task": "repeat", "max_prompt_tokens": 64},
        "reward": {"functions": [{"name": "spelling"}]},
        "train": {"steps": 100},
    }
    return Recipe.model_validate(
        {"name": "planned"}
        | {name: base.get(name, {}) | sections.get(name, {}) for name in {*base, *sections}}
    )


def of(**sections: dict[str, Any]) -> Plan:
    return plan(recipe(**sections))


def test_the_flow_of_a_step_and_of_a_run() -> None:
    found = of(
        train={"groups_per_step": 3},
        algorithm={"group_size": 5},
        pipeline={"staleness": 4, "window": 2},
        rollout={"workers": 2, "max_rows": 16, "max_tokens": 10},
        checkpoint={"every": 7},
    )
    assert (found.bound, found.slack, found.max_age, found.window) == (4, 3, 4, 2)
    assert (found.groups_in_flight, found.rows_in_flight) == (12, 60)
    assert found.rows_per_step == 15
    assert found.rows_retained == 8 * 15, "a step is made while the checkpoint is written"
    assert found.tokens_per_step == 150
    assert found.decode_rows == 32


def test_a_run_shorter_than_its_checkpoints_keeps_no_more_than_it_makes() -> None:
    assert of(train={"steps": 3}, checkpoint={"every": 50}).rows_retained == 3 * of().rows_per_step


def test_rows_that_may_be_trained_again_are_kept_so_many_steps_longer() -> None:
    plain = of(train={"steps": 100, "replay_versions": 6})
    replaying = of(train={"steps": 100, "replay_versions": 6, "replay_groups": 2})
    assert plain.rows_retained == of().rows_retained
    assert replaying.rows_retained == plain.rows_retained + 6 * plain.rows_per_step
    row = 6 * plain.rows_per_step * 16 * recipe().rollout.max_tokens
    assert replaying.arena_bytes - plain.arena_bytes > row


def test_samples_that_no_checkpoint_covers_leave_room_for_what_is_in_flight() -> None:
    least = arena_bytes(recipe())
    shares = [share_of_trained(recipe(pipeline={"arena": size})) for size in (least, 4 * least)]
    rows = of().rows_retained
    ids = 8 + 4 + 4
    assert shares[0] * least > rows * ids * recipe().rollout.max_tokens, (
        "the planned steps have room"
    )
    assert 0 < min(shares) <= max(shares) < 0.75, "above, no prompt enters"


def test_memory_follows_weights_dtype_and_workers() -> None:
    single = of()
    half = of(model={"dtype": "bfloat16"}, rollout={"workers": 3})
    assert single.parameters is not None
    assert single.train_bytes == 16 * single.parameters
    assert single.slot_bytes == 8 * single.parameters
    assert single.reference_bytes == 0
    assert half.train_bytes == 18 * single.parameters, (
        "float32 master weights, and the copy that computes"
    )
    assert half.rollout_bytes == 3 * 4 * single.parameters
    assert of(algorithm={"options": {"kl_coef": 0.1}}).reference_bytes == 4 * single.parameters


def test_the_vllm_engines_of_a_node_map_one_more_version() -> None:
    torch_engine = of(rollout={"workers": 3})
    vllm = of(rollout={"engine": "vllm", "workers": 3})
    assert torch_engine.parameters is not None
    assert torch_engine.slot_bytes == 2 * 4 * torch_engine.parameters
    assert vllm.slot_bytes == (2 + 1) * 4 * torch_engine.parameters
    straight = of(rollout={"engine": "vllm", "workers": 3}, sync={"transport": "network"})
    assert straight.slot_bytes == vllm.slot_bytes
    assert straight.rollout_bytes == vllm.rollout_bytes == 3 * 4 * torch_engine.parameters
    elsewhere = of(rollout={"engine": "vllm", "workers": 3}, external={"stages": ["rollout"]})
    assert elsewhere.slot_bytes == torch_engine.slot_bytes, "its engines are another program's"


def test_ranks_share_what_training_holds() -> None:
    alone = of()
    four = of(train={"dp": 2, "tp": 2})
    assert alone.parameters is not None
    assert (alone.train_ranks, four.train_ranks) == (1, 4)
    assert four.train_bytes == 4 * alone.parameters
    assert (alone.copy_bytes, four.copy_bytes) == (12 * alone.parameters, 3 * alone.parameters)
    assert of(external={"stages": ["update"]}).copy_bytes == 0
    half = {"dtype": "bfloat16"}
    mixed = of(model={"dtype": "bfloat16"})
    assert mixed.train_bytes == alone.train_bytes + 2 * alone.parameters, (
        "one rank keeps the copy in which it computes"
    )
    assert of(model=half, train={"dp": 2, "tp": 2}).train_bytes == four.train_bytes
    assert of(model=half, train={"precision": "model"}).train_bytes == alone.train_bytes / 2
    assert mixed.rollout_bytes == alone.rollout_bytes / 2


def test_what_is_held_is_the_same_in_the_figures_and_in_the_parts() -> None:
    """Both stages of a pipeline have the tied embedding."""
    staged = of(train={"pp": 2})
    parts = staged.memory["train"]
    assert staged.train_bytes == 4 * parts["weights"] == 2 * parts["optimizer"]
    assert staged.copy_bytes == parts["checkpoint copy"]
    assert staged.train_bytes > of().train_bytes / 2
    adapters = of(model={"lora": {"rank": 2}}, train={"dp": 2})
    parts = adapters.memory["train"]
    trained = parts["optimizer"] // 2
    assert adapters.train_bytes == parts["weights"] + 3 * trained
    colocated = of(launch={"placement": "colocated"}, pipeline={"staleness": 0})
    assert colocated.turns is not None
    assert colocated.turns.caches == colocated.memory["rollout"]["KV cache"]


@pytest.mark.parametrize(("set_to", "expected"), [({}, 37), ({"response_tokens": 9}, 9)])
def test_the_constant_of_a_loss_is_the_longest_response_unless_it_is_set(
    set_to: dict[str, int], expected: int
) -> None:
    changes = {"algorithm": {"name": "dr_grpo", "options": set_to}, "rollout": {"max_tokens": 37}}
    algorithm = algorithm_of(recipe(**changes))
    assert algorithm.response_tokens == expected
    ones = torch.ones(3, dtype=torch.float64)
    columns = {"rollout_logprobs": -ones, "advantage": ones}
    tokens = TokenBatch(-ones, columns, torch.tensor([0, 0, 1]), torch.tensor([2, 1]), 3, 2)
    assert algorithm.loss(tokens).loss.item() == pytest.approx(-3 / (2 * expected)), (
        "tokens / (rows x constant)"
    )


def test_without_a_recipe_the_constant_of_a_loss_is_to_be_given() -> None:
    zero = torch.zeros(1)
    columns = {"rollout_logprobs": zero, "advantage": zero}
    tokens = TokenBatch(zero, columns, torch.tensor([0]), torch.tensor([1]), 1, 1)
    with pytest.raises(ValueError, match="response_tokens: is not set"):
        build_algorithm("dr_grpo", {}).loss(tokens)


@pytest.mark.parametrize(
    ("staleness", "options", "never"),
    [
        (4, {"proximal": "recomputed"}, True),  # there is one optimizer step a batch
        (4, {}, False),  # `auto` picks an interpolated policy
        (2, {}, False),  # clipped around the rollout policy
        (0, {"proximal": "recomputed"}, True),
        (4, {"proximal": "recomputed", "mini_batches": 2}, False),
        (4, {"proximal": "recomputed", "epochs": 2}, False),
        (0, {"proximal": "interpolated"}, True),  # all tokens are of the current policy
        (1, {"proximal": "interpolated"}, False),
        (8, {"correction": "none"}, False),
    ],
)
def test_a_clip_that_never_acts_is_noticed(
    staleness: int, options: dict[str, Any], never: bool
) -> None:
    """arXiv 2610.02911: around the policy before the batch's only step the ratio is 1."""
    changes: dict[str, Any] = {
        "algorithm": {"options": options},
        "pipeline": {"staleness": staleness},
    }
    assert ["clip_fraction is 0 by construction" in notice for notice in of(**changes).notices] == [
        True
    ] * never
    assert set(options_of(recipe(**changes)).constants) == ({"clip_fraction"} if never else set())
    if options.get("proximal") == "interpolated":
        replaying = recipe(**changes, train={"steps": 9, "replay_groups": 1})
        assert not options_of(replaying).constants, "replayed rows are older"
    assert of(**changes, external={"stages": ["update"]}).notices == [], "another program trains"


def test_bfloat16_is_trained_in_mixed_precision_unless_a_recipe_says_otherwise() -> None:
    half = {"dtype": "bfloat16"}
    for settings in ({}, {"train": {"precision": "mixed"}}):
        assert (
            recipe(model=half, **settings).mixed_precision,
            of(model=half, **settings).notices,
        ) == (True, [])
    by_name = {"model": half, "train": {"precision": "model"}}
    assert not recipe(**by_name).mixed_precision
    (notice,) = of(**by_name).notices
    assert notice.startswith('train.precision = "model": rounds updates to bfloat16')
    assert of(**by_name, external={"stages": ["update"]}).notices == [], "another program trains"
    exact = recipe(train={"precision": "model"})
    assert (exact.mixed_precision, recipe().mixed_precision, of().notices) == (False, False, [])


def test_what_takes_turns_is_never_held_together() -> None:
    colocated = {"launch": {"placement": "colocated"}}
    alone = of(**colocated)
    assert alone.parameters is not None
    weights = 4 * alone.parameters
    assert alone.turns is not None
    assert (alone.turns.training, alone.turns.generating) == (4 * weights, weights)
    assert alone.turns.between == 2 * weights, "its own weights need no bucket"
    assert (alone.turns.buckets, alone.turns.host) == (0, 3 * weights)
    assert (alone.rollout_bytes, alone.slot_bytes) == (weights, 0), (
        "no second copy, and none in shared memory"
    )
    two = of(train={"dp": 2}, sync={"bucket": 4096}, **colocated)
    assert two.turns is not None
    assert two.decode_rows == 2 * alone.decode_rows
    assert 2 * weights <= two.turns.training < 2.01 * weights
    assert two.turns.generating == weights
    assert 0 < two.turns.buckets <= 2 * 4096
    mixed = of(model={"dtype": "bfloat16"}, train={"precision": "mixed"}, **colocated)
    assert mixed.turns is not None
    assert (mixed.turns.training, mixed.turns.generating) == (4.5 * weights, weights / 2)
    assert (mixed.turns.between, mixed.turns.host) == (1.5 * weights, 3.5 * weights)
    assert of().turns is None


def test_a_checkpoint_is_counted_from_its_headers(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7)}, tmp_path / "model-1.safetensors")
    save_file({"c": torch.zeros(())}, tmp_path / "model-2.safetensors")
    assert parameters_of(recipe(model={"source": str(tmp_path)})) == 15 + 7 + 1


def test_what_is_known_of_the_tiny_model_is_so() -> None:
    model = tiny_model(0)
    assert parameters_of(recipe()) == sum(parameter.numel() for parameter in model.parameters())
    assert heads_of(recipe().model.source) == {name: getattr(model.config, name) for name in HEADS}


def test_the_mock_model_has_no_weights() -> None:
    mock = {"engine": "mock"}
    found = of(model={"source": "mock"}, rollout=mock, train=mock)
    assert found.parameters is None
    assert found.train_bytes == found.rollout_bytes == found.slot_bytes == 0


@given(
    prompt=st.integers(1, 300),
    response=st.integers(1, 300),
    group=st.integers(1, 8),
    groups=st.integers(1, 4),
    staleness=st.integers(0, 3),
    every=st.integers(1, 5),
)
def test_the_arena_holds_every_sample_that_may_be_alive(
    prompt: int, response: int, group: int, groups: int, staleness: int, every: int
) -> None:
    """Packed as the stages write them, each row in blocks of its own, which takes the most room."""
    planned = recipe(
        prompts={"max_prompt_tokens": prompt},
        rollout={"max_tokens": response},
        algorithm={"group_size": group},
        train={"groups_per_step": groups},
        pipeline={"staleness": staleness},
        checkpoint={"every": every},
    )
    schema = resolve(GRPO(kl_coef=0.1), catalogue(rewards=4)).schema
    asked = {
        "prompt_ids": [torch.zeros(prompt, dtype=torch.int64)],
        "given": ["x" * 4 * prompt],
        "fields": ["x" * 4 * prompt],
    }
    answered = {
        "response_ids": [torch.zeros(response, dtype=torch.int64)],
        "rollout_logprobs": [torch.zeros(response)],
        "versions": [torch.zeros(2 * (staleness + 1), dtype=torch.int64)],
        "truncated": torch.zeros(1, dtype=torch.bool),
    }
    judged = {"reward": torch.zeros(1), "scores": torch.zeros(1, 4)}
    referred = {"ref_logprobs": [torch.zeros(response)]}
    row = sum(
        pack(schema, rows).nbytes
        for rows in (answered, judged, referred, {"advantage": torch.zeros(1)})
    )
    found = plan(planned)
    rows = found.rows_in_flight + found.rows_retained
    assert rows * row + rows // group * pack(schema, asked).nbytes <= arena_bytes(planned)


def test_more_in_flight_needs_more_arena() -> None:
    sizes = [of(pipeline={"staleness": bound}).arena_bytes for bound in range(4)]
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize("bound", [0, 1, 5])
def test_in_admission_order_the_oldest_reaches_the_bound(bound: int) -> None:
    found = of(pipeline={"staleness": bound})
    assert (found.slack, found.max_age) == (bound, bound)


def test_longrope_of_all_engines_follows_from_the_longest_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its long factors, with a notice, where the recipe asks for rows above the change; else rows
    stay below it."""
    # changes at 32 tokens, of 256
    folder = write("Phi-3 longrope", tmp_path / "model", torch.float32)
    made: list[Any] = []
    for engine in (
        "stages.engines.vllm.rollout.VllmReceivingEngine",
        "stages.engines.torch.rollout.TorchRolloutEngine",
    ):
        monkeypatch.setattr(engine, lambda *_, **options: made.append(options))
    monkeypatch.setattr(
        "stages.engines.torch.train.TorchTrainEngine", lambda _, **options: made.append(options)
    )
    for prompt, response, vllm, longest in (
        (None, 20, {}, 32),
        (12, 20, {}, 32),
        (13, 20, {}, 33),
        (None, 40, {}, 256),
        (8, 20, {"max_model_len": 64}, 64),
    ):
        changes = {"prompts": {"max_prompt_tokens": prompt}, "rollout": {"max_tokens": response}}
        asked = recipe(model={"source": str(folder), "vocabulary": "model"}, **changes)
        by_vllm = recipe(
            model=asked.model.model_dump(),
            prompts=changes["prompts"],
            rollout={"max_tokens": response, "engine": "vllm", "vllm": vllm},
        )
        rollout_engine(by_vllm, version=0, shared=tmp_path)
        assert made.pop()["max_model_len"] == longest
        train_engine(by_vllm)
        assert made.pop()["context"] == longest
        if not vllm:
            for make in (lambda: rollout_engine(asked, version=0), lambda: reference_engine(asked)):  # noqa: B023
                make()
                assert made.pop()["context"] == longest
        assert [notice.key for notice in notices_of(by_vllm)] == ["rollout.max_tokens"] * (
            longest > 32
        )
    assert notices_of(recipe()) == []
