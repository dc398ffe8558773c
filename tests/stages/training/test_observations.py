"""Rows with an environment's observations on the training side, in a real warehouse: what is counted,
dealt, aged, compared, probed and recorded is what the policy has generated."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from pipeline.data.columns import Packed
from pipeline.data.events import StepEvent
from pipeline.index.client import Claim, Index
from pipeline.schedule.staleness import StalenessPlan
from pipeline.warehouse.dock import Dock
from pipeline.worker.outputs import Trained
from stages.algorithms.batch import TrainBatch, trained_columns
from stages.algorithms.named import NamedAlgorithm
from stages.algorithms.policy_gradient.dapo import DAPO
from stages.algorithms.token_batch import AGES
from stages.engines.mock.engines import MockTrainEngine
from stages.engines.mock.options import MockTrainOptions
from stages.flow.catalogue import (
    AGE,
    BRANCHES,
    CREDIT,
    MASK,
    OBSERVED,
    ROW_MASK,
    TRAJECTORY,
    catalogue,
)
from stages.flow.declarations import StageDeclaration
from stages.flow.resolver import resolve
from stages.model.load import load_tokenizer
from stages.parallel.layout import Layout
from stages.samples.sample_log import Recorder, SampleLog
from stages.training.advantage import Advantage
from stages.training.ranks import RankGroup, train_batch
from stages.training.token_versions import staleness_of
from stages.training.update import Update, probe_rows, variety

Turn = tuple[str, int]  # what was generated, and by which version; version -1: observed


def trajectory_stages() -> list[StageDeclaration]:
    """The catalogue of a run whose responses have turns."""
    return [
        replace(stage, makes={**stage.makes, **TRAJECTORY}) if stage.name == "rollout" else stage
        for stage in catalogue()
    ]


ALGORITHM = DAPO(longest_response=6, overlong_tokens=4, drop_equal=False)
FLOW = resolve(ALGORITHM, trajectory_stages(), "mask")
TOKENIZER = load_tokenizer("tiny")
# By group and place. The first response has few generated tokens and many observed ones; of the
# second group the second response was cut.
ROWS: list[list[Turn]] = [
    [("ab", 3), ("c" * 90, OBSERVED), ("d", 5)],
    [("a", 2), ("c" * 2, OBSERVED), ("bc", 2), ("d", OBSERVED)],
    [("a" * 6, 3)],
    [("b" * 20, 3)],
    [("a" * 4, 5), ("b" * 6, OBSERVED), ("c" * 16, 6)],
    [("d" * 20, 6)],
    [("ba" * 10, 5)],
    [("bd" * 10, 5)],
]
TRAINED = 6  # steps
TRUNCATED = [False, False, False, True, False, False, False, False]
REWARDS = [1.0, 0.0] * 4


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text), "a token a letter"
    return ids


def columns_of(row: Sequence[Turn], reward: float = 0.5) -> dict[str, torch.Tensor]:
    """The columns of a response with these turns; its observations have the logprob 0."""
    ids: list[int] = []
    starts = []
    for text, version in row:
        if version != OBSERVED:
            starts.append(len(ids))
        ids += ids_of(text)
    mask = [version != OBSERVED for text, version in row for _ in text]
    return {
        "response_ids": torch.tensor(ids),
        "rollout_logprobs": torch.tensor([-1.0 * is_generated for is_generated in mask]),
        "versions": torch.tensor([n for text, v in row for n in (v, len(text))]),
        MASK: torch.tensor(mask),
        "turn_starts": torch.tensor(starts),
        "turn_reward": torch.tensor([reward] * len(starts)),
        "turn_seconds": torch.tensor([0.5, 0.25, 1.0] * len(starts)),
        BRANCHES: torch.tensor([], dtype=torch.int64),
    }


@pytest.fixture
async def dock(index: Index, tmp_path: Path) -> AsyncIterator[Dock]:
    plan = StalenessPlan(8, len(ROWS) // 2, 1)
    await index.init(FLOW.config(plan), {"published": TRAINED, "trained": TRAINED, "admitted": 0})
    dock = Dock(
        index, FLOW.schema, worker="test", directory=tmp_path, lease=30.0, slab=2**16, secret=b"x"
    )
    await dock.join(2**22)
    yield dock
    await dock.close()


async def claim_of(dock: Dock, stage: str, **options: Any) -> Claim:
    claim = await dock.claim(stage, 100, timeout=5, **options)
    assert claim is not None
    return claim


def rows_of(claim: Claim) -> list[int]:
    """The number in ROWS of each row."""
    return (claim.group * 2 + claim.place).astype(int).tolist()


async def filled(dock: Dock) -> Claim:
    """A claim of the update stage, of rows of which the credit stage made the rest."""
    groups = len(ROWS) // 2
    given = [json.dumps("a prompt")] * groups
    await dock.admit(
        [(group, 2) for group in range(groups)],
        {"prompt_ids": [torch.tensor([1, 2])] * groups, "given": given, "fields": ["{}"] * groups},
    )
    claim = await claim_of(dock, "rollout", version=0)
    made = [columns_of(ROWS[at]) for at in rows_of(claim)]
    columns: dict[str, Any] = {name: [row[name] for row in made] for name in made[0]}
    columns["truncated"] = torch.tensor([TRUNCATED[at] for at in rows_of(claim)])
    generated = [
        (
            min(version for _, version in ROWS[at] if version != OBSERVED),
            sum(len(text) for text, version in ROWS[at] if version != OBSERVED),
        )
        for at in rows_of(claim)
    ]
    await dock.commit(claim, range(len(claim)), columns, generated=generated)
    claim = await claim_of(dock, "reward")
    rewards = torch.tensor([REWARDS[at] for at in rows_of(claim)])
    scored = {"reward": rewards, "scores": rewards[:, None]}
    await dock.commit(claim, range(len(claim)), scored)
    credit = Advantage(ALGORITHM, FLOW[CREDIT], "mask")
    claim = await claim_of(dock, CREDIT)
    async for output in credit.process(claim, await dock.fetch(claim, credit.fetches)):
        await output.commit(dock, claim)
    return await claim_of(dock, "update")


def test_truncated_rows_of_a_run_with_masks_are_left_out_by_a_mask_of_rows() -> None:
    assert FLOW[CREDIT].makes.keys() == {"advantage", ROW_MASK}
    assert MASK in FLOW[CREDIT].needs, "the length penalty counts generated tokens"
    assert {MASK, ROW_MASK} <= FLOW["update"].needs.keys()
    plain = resolve(ALGORITHM, catalogue(), "mask")
    assert plain[CREDIT].makes.keys() == {"advantage", MASK}


async def test_credit_and_training_count_generated_tokens(dock: Dock) -> None:
    claim = await filled(dock)
    rows = await dock.fetch(claim, trained_columns(ALGORITHM, dock.schema))
    batch = TrainBatch(train_batch(claim, rows, 8), ALGORITHM)
    generated = [sum(len(t) for t, v in ROWS[at] if v != OBSERVED) for at in rows_of(claim)]
    assert claim.tokens.tolist() == generated
    expected = [
        0 if TRUNCATED[at] else count for at, count in zip(rows_of(claim), generated, strict=True)
    ]
    assert batch.trained.tolist() == expected
    # the penalty of the second row, of 3 generated tokens, is (3 - 6) / 4 + 1
    penalized = torch.tensor([1.0 - 0.25, 0.0 - 0.25])
    credit = ALGORITHM.advantage(penalized)
    by_row = dict(zip(rows_of(claim), batch["advantage"].tolist(), strict=True))
    assert [by_row[0], by_row[1]] == pytest.approx(credit.tolist())


async def test_observations_do_not_age(dock: Dock) -> None:
    claim = await filled(dock)
    rows = await dock.fetch(claim, ["versions", "response_ids"])
    batch = train_batch(claim, rows, 6)
    of_row = dict(zip(rows_of(claim), range(len(claim)), strict=True))
    assert [batch["staleness"][of_row[at]].item() for at in range(8)] == [3, 4, 3, 3, 1, 0, 1, 1]
    ages = batch["age"].unbind()[of_row[4]].tolist()
    resumed = AGES.index("resumed")
    assert ages == [1] * 4 + [OBSERVED] * 6 + [resumed] * 16
    stale = batch["token_staleness"].unbind()[of_row[4]].tolist()
    assert stale == [1] * 4 + [0] * 22


@given(
    runs=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=6),
    seed=st.integers(0, 2**16),
)
def test_ages_of_generated_tokens_do_not_depend_on_observations(
    runs: list[tuple[int, int]], seed: int
) -> None:
    rng = random.Random(seed)
    mixed = []
    for run in runs:
        mixed += [(OBSERVED, rng.randint(1, 3))] * rng.randint(0, 1) + [run]
    mixed += [(OBSERVED, 2)] * rng.randint(0, 1)

    def of(pairs: list[tuple[int, int]]) -> list[list[int]]:
        column = torch.tensor([n for pair in pairs for n in pair])
        packed = Packed(column, torch.tensor([0, len(column)]))
        return [part.values.tolist() for part in staleness_of(packed, 9)]

    is_generated = [version != OBSERVED for version, tokens in mixed for _ in range(tokens)]
    for with_others, alone in zip(of(mixed), of(runs), strict=True):
        assert [n for n, keep in zip(with_others, is_generated, strict=True) if keep] == alone
        rest = {n for n, keep in zip(with_others, is_generated, strict=True) if not keep}
        assert rest <= {0, OBSERVED}


async def test_rows_are_dealt_by_what_is_fed(dock: Dock) -> None:
    """The first response has 3 generated tokens, and nearly as much to feed as all others."""
    claim = await filled(dock)
    rank_group = RankGroup(dock.index, Layout.for_training(dp=2).coordinates(0), "life")
    shares = await rank_group.deal(dock, claim, ALGORITHM)
    lengths = [sum(len(text) for text, _ in ROWS[at]) for at in rows_of(claim)]
    fed = [sum(lengths[at] for at in share) for share in shares]
    assert max(fed) < 1.1 * sum(lengths) / 2


async def test_a_step_reports_generated_tokens(dock: Dock) -> None:
    claim = await filled(dock)

    async def after(version: int) -> None:
        assert version == TRAINED + 1

    update = Update(
        dock,
        MockTrainEngine(MockTrainOptions(step_seconds=0)),
        NamedAlgorithm("dapo", ALGORITHM),
        None,
        steps=TRAINED + 1,
        staleness=8,
        version=TRAINED,
        after_step=after,
        after_last=lambda: None,
    )
    rows = await dock.fetch(claim, update.fetches)
    async for output in update.process(claim, rows):
        await output.commit(dock, claim)
        assert isinstance(output, Trained)
        assert isinstance(output.event, StepEvent)
        event = output.event
    generated = [sum(len(t) for t, v in row if v != OBSERVED) for row in ROWS]
    assert event.response_length_mean == sum(generated) / 8
    assert event.tokens_trained == sum(generated)
    assert (event.staleness_max, event.staleness_mean) == (4, 2.0)
    assert event.metrics["gap_mean"] == 0.0, "of logprobs that the mock engine takes over"
    assert event.metrics["distinct_responses"] == 1.0
    assert (await dock.index.ledger())["trained_tokens"] == sum(generated)


def test_responses_that_differ_in_their_observations_alone_are_one() -> None:
    """What a clock or a random tool says does not make a policy vary."""
    rows = [
        columns_of(row) for row in ([("ab", 3), ("c", OBSERVED)], [("ab", 3), ("dd", OBSERVED)])
    ]
    rows += [columns_of([("ab", 3), ("c", OBSERVED), ("a", 3)])]
    columns = {
        name: torch.nested.nested_tensor([row[name] for row in rows], layout=torch.jagged)
        for name in ("response_ids", "versions")
    }

    class Claimed:
        def __len__(self) -> int:
            return 3

    claim: Any = Claimed()
    assert variety(claim, TensorDict(columns, [3])) == {
        "distinct_responses": 2 / 3,
        "observed_tokens": 4,
    }


async def test_a_probe_has_generated_tokens(dock: Dock) -> None:
    claim = await filled(dock)
    rows = await dock.fetch(claim, ["prompt_ids", "response_ids", "versions"])
    sequences = probe_rows([], train_batch(claim, rows, 6), 1000)
    texts = {TOKENIZER.decode(ids[2:]) for ids in sequences}
    generated = ["".join(text for text, v in row if v != OBSERVED)[:16] for row in ROWS]
    assert len(sequences) == 4, "the first row of each group"
    assert texts <= {*generated}


def test_a_probe_leaves_out_what_was_not_generated() -> None:
    """A program's prompt is one token, and a trajectory that failed may have no other one."""
    columns = {
        "prompt_ids": [[5], [5]],
        "response_ids": [[7], [8, 9]],
        AGE: [[OBSERVED], [0, OBSERVED]],
    }
    batch = TensorDict(
        {
            name: torch.nested.nested_tensor(list(map(torch.tensor, rows)), layout=torch.jagged)
            for name, rows in columns.items()
        },
        [2],
    )
    batch["group"] = torch.tensor([0, 1])
    assert probe_rows([], batch, 1000) == [[5, 8]]


async def test_a_sample_shows_its_turns_and_what_was_observed(dock: Dock, tmp_path: Path) -> None:
    claim = await filled(dock)
    recorder = Recorder(dock, TOKENIZER, ["exact"], SampleLog(tmp_path / "samples", 2**20))
    samples = await recorder.read(6, claim, [0] * len(claim))
    second = samples[1]
    assert second["tokens"] == 3
    assert second["versions"] == [[2, 1], [-1, 2], [2, 2], [-1, 1]]
    assert second["response"] == "accbcd"
    turn = {
        "generated": True,
        "reward": 0.5,
        "calls": [],
        "seconds": {"engine": 0.5, "waiting": 0.25, "environment": 1.0},
    }
    observed = {"generated": False, "reward": None}
    assert second["segments"] == [
        {**turn, "tokens": 1, "text": "a", "pieces": [(2, 1, "a")]},
        {**observed, "tokens": 2, "text": "cc"},
        {**turn, "tokens": 2, "text": "bc", "pieces": [(2, 2, "bc")]},
        {**observed, "tokens": 1, "text": "d"},
    ]
    assert second["response_ids"] == ids_of("accbcd")
    assert second["logprobs"] == [-1, 0, 0, -1, -1, 0]
    assert [sample.get("prompt_ids") for sample in samples[:2]] == [[1, 2], None]
    assert [len(sample["segments"]) for sample in samples] == [3, 4, 1, 1, 3, 1, 1, 1]
