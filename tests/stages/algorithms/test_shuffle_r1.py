"""Shuffle-R1: which pairs of a group stay, how often pairs are drawn, and that a step on drawn rows is
one on a batch that has them as often."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestration.recipe.flow import algorithm_of
from stages.algorithms import AlgorithmError, Drop, NamedAlgorithm
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.algorithms.policy_gradient.shuffle_r1 import ShuffleR1, pairs_of
from stages.engines.torch.train import TorchTrainEngine
from tests.batches import make_batch, stack, unstack
from tests.orchestration.runs import TINY, recipe
from tests.ranks import of_product
from tests.stages.products import name_of
from tests.stages.sharded import OPTIONS, drawn_steps, model_of, weights_of


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**16), rows=st.integers(2, 9), kept=st.sampled_from([0.3, 0.5, 1.0]))
def test_the_pairs_of_the_largest_contrast_stay(seed: int, rows: int, kept: float) -> None:
    """Two pointers from the ends of the sorted advantages, as the paper pairs them."""
    drawn = random.Random(seed)
    rewards = torch.tensor([drawn.choice([0.0, 1.0, drawn.random()]) for _ in range(rows)])
    credit = ShuffleR1(pairs_kept=kept).credit({"reward": rewards})
    plain = GRPO().credit({"reward": rewards})
    assert not isinstance(credit, Drop)
    assert not isinstance(plain, Drop)
    assert torch.equal(credit["advantage"], plain["advantage"])
    ordered = sorted(plain["advantage"].tolist(), reverse=True)
    count = max(1, int(kept * (rows // 2) + 1e-9))
    expected = sorted([*ordered[:count], *ordered[rows - count :]])
    assert sorted(credit["advantage"][credit["row_mask"]].tolist()) == expected


def test_a_group_with_equal_rewards_may_be_dropped() -> None:
    dropped = ShuffleR1(drop_equal=True).credit({"reward": torch.ones(4)})
    assert isinstance(dropped, Drop)
    assert dropped.instead is not None
    assert dropped.instead["row_mask"].sum() == 2


ROWS = {4: {0: 3.0, 1: -1.0, 2: 0.0, 3: 0.0}, 7: {1: 0.5, 2: -0.5}, 9: {0: 0.25, 3: -0.75}}


def test_rounds_draw_in_proportion_to_the_advantages_of_a_pair() -> None:
    """Four pairs, of the weights 4, 0, 1 and 1, in as many rounds: one in each round."""
    algorithm = ShuffleR1(shuffle_rounds=4, seed=3)
    times = Counter[tuple[int, tuple[int, ...]]]()
    versions = 3000
    for version in range(versions):
        (mini_batch,) = algorithm.draw(ROWS, version)
        assert sum(map(len, mini_batch.values())) == 8, "as many rows as there are"
        for group, places in mini_batch.items():
            repeated = Counter(places)
            assert len({*repeated.values()}) == 1
            times[group, tuple(repeated)] += repeated[places[0]]
    shares = {pair: count / (4 * versions) for pair, count in times.items()}
    assert shares == pytest.approx(
        {(4, (0, 1)): 4 / 6, (7, (1, 2)): 1 / 6, (9, (0, 3)): 1 / 6}, abs=0.01
    )


def test_a_round_draws_a_pair_once_at_most() -> None:
    rows = {group: {0: 1.0 + group, 1: -1.0} for group in range(8)}
    for version in range(20):
        first, second = ShuffleR1(shuffle_rounds=2, mini_batches=2, seed=0).draw(rows, version)
        for mini_batch in (first, second):
            assert sorted(mini_batch) == sorted({*mini_batch})
            assert [*mini_batch.values()] == [(0, 1)] * 4


def test_draws_go_by_seed_and_train_batch() -> None:
    def draws(seed: int, version: int) -> Any:
        return ShuffleR1(shuffle_rounds=2, mini_batches=2, seed=seed).draw(ROWS, version)

    assert draws(1, 5) == draws(1, 5)
    assert len({str(draws(1, version)) for version in range(20)}) > 5
    assert len({str(draws(seed, 5)) for seed in range(20)}) > 5
    chosen = recipe(TINY, algorithm__name="shuffle_r1").model_copy(update={"seed": 11})
    assert algorithm_of(chosen).algorithm.seed == 11  # type: ignore[attr-defined]


def test_rows_that_teach_nothing_are_all_trained_on_once() -> None:
    rows = {1: {0: 0.0, 2: 0.0}, 2: {0: 0.0}}
    mini_batches = ShuffleR1(mini_batches=2).draw(rows, 0)
    assert mini_batches == [{1: (0, 2)}, {2: (0,)}]
    assert pairs_of({}) == []


def with_pairs(seed: int) -> Any:
    """A batch whose rows 1, 4 and 5 are not trained on."""
    batch = make_batch(seed=seed)
    mask = torch.ones(len(batch), dtype=torch.bool)
    mask[[1, 4, 5]] = False
    batch["row_mask"] = mask
    return batch


def test_a_step_on_drawn_rows_is_one_on_a_batch_that_has_them_as_often() -> None:
    options: dict[str, Any] = {"loss_normalization": "sequence", "scale_learning_rate": False}
    algorithm = ShuffleR1(shuffle_rounds=4, mini_batches=2, seed=1, **options)
    drawing, repeating = (
        TorchTrainEngine(model_of("llama"), **{**OPTIONS, "grad_clip": None}) for _ in range(2)
    )
    repeated_rows = 0
    for version in range(2):
        batch = with_pairs(version)
        rows = {
            (int(row["group"]), int(row["place"])): row
            for row in unstack(batch)
            if bool(row["row_mask"])
        }
        advantages: dict[int, dict[int, float]] = {}
        for (group, place), row in rows.items():
            advantages.setdefault(group, {})[place] = float(row["advantage"])
        metrics = drawing.train_batch(batch, algorithm)
        losses = []
        times = Counter[tuple[int, int]]()
        for mini_batch in algorithm.draw(advantages, version):
            keys = [(group, place) for group, places in mini_batch.items() for place in places]
            times.update(keys)
            same = [{**rows[key], "place": torch.tensor(number)} for number, key in enumerate(keys)]
            losses.append(repeating.train_batch(stack(same), GRPO(**options))["loss"])
        repeated_rows += times.total() - len(times)
        assert metrics["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert repeated_rows > 3
    expected = weights_of(repeating)
    for name, value in weights_of(drawing).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("chosen", [{"dp": 2}, {"dp": 2, "pp": 2}], ids=name_of)
def test_ranks_draw_and_learn_what_one_process_does(chosen: dict[str, int]) -> None:
    expected = drawn_steps(None)
    for result in of_product(chosen, drawn_steps):
        for got, wanted in zip(result["metrics"], expected["metrics"], strict=True):
            assert {**got, "fed_tokens": 0} == pytest.approx(
                {**wanted, "fed_tokens": 0}, rel=3e-4, abs=1e-6
            )
        for name, value in expected["weights"].items():
            gap = np.linalg.norm(result["weights"][name] - value)
            assert gap < 1e-3 * np.linalg.norm(value), name


def test_places_that_are_not_there_are_an_error_that_names_the_algorithm() -> None:
    class Wrong(ShuffleR1):
        def draw(self, rows: Any, version: int) -> Any:
            return [{4: (0, 9)}]

    with pytest.raises(AlgorithmError, match=r"'wrong' returned \[\{4: \(0, 9\)\}\] from draw"):
        NamedAlgorithm("wrong", Wrong()).draw(ROWS, 0)
