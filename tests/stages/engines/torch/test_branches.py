"""Trajectories with branches: they are trained as plain rows would be, a row for each branch, that
train each generated token once; and cost what they have of tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from stages.algorithms import build_algorithm
from stages.algorithms.batch import TrainBatch
from stages.branches import branches_of
from stages.engines.plans import Piece
from stages.engines.torch.critic import TorchCriticEngine
from stages.engines.torch.model import packing
from stages.engines.torch.model.packing import Rows
from stages.engines.torch.parallel.sharded import Sharded
from stages.engines.torch.train import TorchTrainEngine
from stages.flow.catalogue import BRANCHES, MASK
from stages.parallel.layout import RankCoordinates
from tests.batches import VOCABULARY, stack
from tests.ranks import of_product
from tests.stages.engines.torch.test_train import gradients_of_step
from tests.stages.sharded import OPTIONS, model_of

ROWS = 6
RAGGED = ("rollout_logprobs", "ref_logprobs", "values")
Row = dict[str, torch.Tensor]


def drawn_branches(length: int, rng: random.Random) -> list[int]:
    """A column for a row of ``length`` tokens: forks at the prompt, within branches and at their
    ends; some branches are one token."""
    begins = sorted(rng.sample(range(1, length), rng.randint(0, min(5, length - 1))))
    forks = [rng.choice([0, begin, rng.randint(0, begin)]) for begin in begins]
    return [number for pair in zip(begins, forks, strict=True) for number in pair]


def trees(seed: int) -> list[Row]:
    """Trajectories of two groups, some of them without branches; each branch ends with a token that
    is trained."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rows = []
    for number in range(ROWS):
        length = rng.randint(2, 24)
        branches = drawn_branches(length, rng) if number else []
        mask = torch.rand(length) < 0.6
        mask[[branch.end - 1 for branch in branches_of(branches, length)]] = True
        group = number // (ROWS // 2)
        row = {
            "group": torch.tensor(group),
            "place": torch.tensor(number % (ROWS // 2)),
            "prompt_ids": torch.arange(3 + 4 * group) + group,
            "response_ids": torch.randint(VOCABULARY, (length,)),
            BRANCHES: torch.tensor(branches, dtype=torch.int64),
            MASK: mask,
            "reward": torch.randn(()),
            "advantage": torch.randn(()),
            "preference": torch.tensor(1.0 - number % (ROWS // 2)),
            "row_weight": torch.tensor(1.0),
        }
        row |= {name: torch.randn(length) * 0.3 - 4.5 for name in RAGGED}
        rows.append(row)
    return rows


def plain_rows(rows: list[Row]) -> list[Row]:
    """Each branch as a row of its own, with its path, of which its own tokens alone are trained.
    The rows of a trajectory weigh by their tokens, all together as much as it."""
    plain = []
    for row in rows:
        length = len(row["response_ids"])
        for branch in branches_of(row[BRANCHES].tolist(), length):
            path = branch.path()
            values = {name: row[name][path] for name in ("response_ids", *RAGGED)}
            mask = row[MASK][path].clone()
            mask[: branch.depth] = False
            weight = mask.sum() / row[MASK].sum()
            plain.append({**row, **values, MASK: mask, "row_weight": weight})
    for row in plain:
        row["row_weight"] = row["row_weight"] * len(plain) / len(rows)
        del row[BRANCHES]
    places: dict[int, int] = {}
    for row in plain:
        group = int(row["group"])
        row["place"] = torch.tensor(places.get(group, 0))
        places[group] = places.get(group, 0) + 1
    return plain


def engine_of(algorithm: Any) -> TorchTrainEngine:
    has_values = "value head" in algorithm.scores.values()
    options = {**OPTIONS, "grad_clip": None, "kernels": "plain", "token_budget": 60}
    model = model_of("llama", dtype=torch.float64)
    engine = TorchTrainEngine(model, value_head=has_values, **options)
    for parameter in engine.value_head.values():
        torch.nn.init.normal_(parameter.data, std=0.3, generator=torch.Generator().manual_seed(1))
    return engine


def assert_close(result: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    scale = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    assert scale > 1e-3
    for name, gradient in expected.items():
        assert (result[name] - gradient).norm() < 1e-5 * scale, name


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("grpo", {"kl_coef": 0.1, "correction": "none"}),
        ("grpo", {"proximal": "recomputed", "correction": "truncate", "correction_level": "token"}),
        ("gspo", {"clip_low": 0.2, "clip_high": 0.2}),
        ("ppo", {"epochs": 1, "kl_reward": 0.1, "gamma": 0.9}),
        ("reinforce_pp", {}),
    ],
)
def test_a_step_on_branches_is_that_on_a_plain_row_for_each(
    name: str, options: dict[str, Any], seed: int
) -> None:
    algorithm = build_algorithm(name, options)
    rows = trees(seed)
    plain = plain_rows(rows)
    if name != "gspo":  # the mean over tokens has no need of weights
        for row in (*rows, *plain):
            del row["row_weight"]
    steps = [
        gradients_of_step(engine_of(algorithm), stack(each), algorithm) for each in (rows, plain)
    ]
    (gradients, metrics), (expected, alone) = steps
    assert_close(gradients, expected)
    assert metrics["loss"] == pytest.approx(alone["loss"], rel=1e-5, abs=1e-6)
    for key in ("entropy", "gap_mean", "gap_max", "ess"):
        assert metrics[key] == pytest.approx(alone[key], rel=1e-5), key
    assert metrics["fed_tokens"] < alone["fed_tokens"]


def test_the_likelihood_of_a_pair_is_that_of_all_branches() -> None:
    algorithm = build_algorithm("dpo", {})
    rows = trees(5)
    for row in rows:
        del row["row_weight"]
    gradients, _ = gradients_of_step(engine_of(algorithm), stack(rows), algorithm)
    engine = engine_of(algorithm)
    batch = TrainBatch(stack(rows), algorithm)
    logprobs = torch.cat([plain_logprobs(engine, row) for row in rows])
    groups = [int(row["group"]) for row in rows]
    sizes = {"total_tokens": len(logprobs), "total_rows": ROWS, "total_groups": 2}
    algorithm.loss(batch.tokens(range(ROWS), groups, logprobs, **sizes)).loss.backward()
    parameters = engine.model.named_parameters()
    assert_close(gradients, {name: p.grad for name, p in parameters if p.grad is not None})


def plain_logprobs(engine: Any, row: Row) -> torch.Tensor:
    """The logprobs [T] of a row's tokens by the model's plain forward, a path at a time."""
    out = [torch.empty(0, dtype=torch.float64)]
    engine.model.set_attn_implementation("eager")
    for branch in branches_of(row[BRANCHES].tolist(), len(row["response_ids"])):
        ids = torch.cat([row["prompt_ids"], row["response_ids"][branch.path()]])
        logits = engine.packed_model.plain_logits(ids[None])[0].double()
        first = len(row["prompt_ids"]) + branch.depth
        known = logits.log_softmax(-1)[first - 1 : -1]
        out.append(known.gather(1, ids[first:, None])[:, 0])
    return torch.cat(out)


@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("few_keys", [128, 0])
@pytest.mark.parametrize("kind", ["llama", "sinks"])
def test_each_token_is_predicted_by_its_path(
    kind: str, few_keys: int, expanded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "FEW_KEYS", few_keys)
    engine = TorchTrainEngine(model_of(kind), **OPTIONS)
    plain: Any = TorchTrainEngine(model_of(kind), **OPTIONS)
    for seed in range(6):
        rows = trees(seed)
        of_batch = Rows.of(stack(rows), engine.device, expanded=expanded)
        monkeypatch.setattr(engine._training, "_rows", lambda _, of_batch=of_batch: of_batch)
        with torch.no_grad():
            logprobs = engine._training.logprobs(stack(rows)).rows()
            for got, row in zip(logprobs, rows, strict=True):
                assert got.double().sub(plain_logprobs(plain, row)).abs().max() < 1e-5


def step_of(ranks: RankCoordinates | None) -> dict[str, Any]:
    """The logprobs of this rank's rows, and a step on them."""
    torch.set_num_threads(1)
    parallel = None if ranks is None else Sharded(ranks)
    engine = TorchTrainEngine(model_of("grouped"), parallel=parallel, **OPTIONS)
    rows = trees(4)
    if ranks is not None and ranks.layout.replicas > 1:
        rows = [row for row in rows if int(row["group"]) == ranks.replica]
    batch = stack(rows)
    logprobs = [of_row.tolist() for of_row in engine.logprobs(batch).unbind()]
    metrics = engine.train_batch(batch, build_algorithm("gspo", {"clip_low": 0.2}))
    engine.close()
    numbers = {name: metrics[name] for name in ("loss", "grad_norm", "entropy", "gap_mean")}
    return {"logprobs": logprobs, **numbers}


@pytest.mark.parametrize(
    "strategy",
    [
        {"cp": 2, "context_parallel": "ring"},
        {"cp": 2, "context_parallel": "ulysses"},
        {"pp": 2},
        {"tp": 2},
        {"dp": 2},
    ],
    ids=str,
)
def test_strategies_train_branches_as_one_rank_does(strategy: dict[str, Any]) -> None:
    expected = step_of(None)
    results = of_product(strategy, step_of)
    of_rows = [row for result in results for row in result["logprobs"]]
    for row, known in zip(of_rows, expected["logprobs"], strict=False):
        assert row == pytest.approx(known, abs=1e-4)
    for result in results:
        for name in ("loss", "grad_norm", "entropy", "gap_mean"):
            assert result[name] == pytest.approx(expected[name], rel=1e-4), name


def test_a_critic_gives_the_values_of_paths() -> None:
    engine = TorchCriticEngine(model_of("llama"), **OPTIONS)
    torch.nn.init.normal_(next(iter(engine.value_head.values())).data)
    rows = trees(2)
    values = engine.values(stack(rows)).unbind()
    for of_row, row in zip(values, rows, strict=True):
        plain = plain_rows([row])
        expected = [
            value[-int(branch.end - branch.begin) :]
            for value, branch in zip(
                engine.values(stack(plain)).unbind(),
                branches_of(row[BRANCHES].tolist(), len(row["response_ids"])),
                strict=True,
            )
        ]
        assert (of_row - torch.cat(expected)).abs().max() < 1e-5


def test_a_tree_costs_its_tokens() -> None:
    """16 branches of 8 tokens behind 64: the plain rows have 16 × 72."""
    length = 64 + 16 * 8
    branches = [number for at in range(1, 16) for number in (64 + 8 * at, 64)]
    row = trees(0)[0] | {
        "response_ids": torch.arange(length) % VOCABULARY,
        BRANCHES: torch.tensor(branches),
    }
    packed = Rows.of(stack([row]), torch.device("cpu"))
    assert packed.groups[0].shape.tokens([0]) == len(row["prompt_ids"]) + length - 16
    expanded = Rows.of(stack([row]), torch.device("cpu"), expanded=True)
    assert expanded.groups[0].shape.tokens([0]) == len(row["prompt_ids"]) + 16 * (64 + 8 - 1)
    for rows in (packed, expanded):
        micro_batch = rows.pack([Piece(0, (0,))])
        assert micro_batch.ids.shape[1] == rows.groups[0].shape.tokens([0])
        assert torch.equal(micro_batch.targets, row["response_ids"])
