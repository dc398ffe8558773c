"""A trajectory as tokens: what observations and turns add up to, and that a parked one comes back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from pipeline.data.columns import Packed
from pipeline.worker.outputs import Parked, Written
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.flow.catalogue import ENVIRONMENT, MASK, OBSERVED
from stages.flow.declarations import Drop
from stages.training.advantage import credits
from stages.trajectories.progress import (
    Ending,
    Progress,
    ended_columns,
    parked_columns,
    parked_progress,
)
from tests.stages.trajectories.turns import admit, claimed, flow

TOKENS = st.lists(st.integers(0, 2**40), max_size=4)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@dataclass(frozen=True)
class Spoken:
    """A turn, in pieces by the versions that made them, and the observation before it."""

    observation: list[int]
    pieces: list[tuple[int, list[tuple[int, float]]]]
    reward: float


PIECES = st.lists(
    st.tuples(
        st.integers(0, 2**20),
        st.lists(st.tuples(st.integers(0, 2**40), FLOATS), min_size=1, max_size=3),
    ),
    max_size=3,
)
SPOKEN = st.lists(st.builds(Spoken, TOKENS, PIECES, FLOATS), max_size=4)


def progress_of(spoken: list[Spoken], last: list[int], truncated: bool = False) -> Progress:
    """Play ``spoken``, then observe ``last``, as the stages do it."""
    progress = Progress()
    for turn in spoken:
        progress.observe(turn.observation)
        progress.begin_turn()
        for version, tokens in turn.pieces:
            progress.token_ids += [token for token, _ in tokens]
            progress.logprobs += [logprob for _, logprob in tokens]
            progress.versions.append((version, len(tokens)))
        progress.turn_reward.append(turn.reward)
        progress.time_turn(2.0, 0.5)
    progress.observe(last)
    progress.truncated = truncated
    return progress


@given(SPOKEN, TOKENS)
def test_the_policys_tokens_are_those_of_its_turns_and_all_others_are_masked(
    spoken: list[Spoken], last: list[int]
) -> None:
    progress = progress_of(spoken, last)
    turns = [[token for _, tokens in turn.pieces for token, _ in tokens] for turn in spoken]
    assert progress.turns == turns
    mask = progress.mask()
    assert len(mask) == len(progress.token_ids) == len(progress.logprobs)
    generated = [token for token, made in zip(progress.token_ids, mask, strict=True) if made]
    assert generated == [token for turn in turns for token in turn]
    assert all(
        logprob == 0 for logprob, made in zip(progress.logprobs, mask, strict=True) if not made
    )
    observed = [token for token, made in zip(progress.token_ids, mask, strict=True) if not made]
    assert observed == [token for turn in spoken for token in turn.observation] + last


@given(SPOKEN, TOKENS)
def test_its_age_is_that_of_its_oldest_generated_token(
    spoken: list[Spoken], last: list[int]
) -> None:
    versions = [version for turn in spoken for version, _ in turn.pieces]
    oldest, tokens = progress_of(spoken, last).generated
    assert oldest == min(versions, default=OBSERVED), "observations do not age"
    assert tokens == sum(len(turn) for turn in progress_of(spoken, last).turns)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.lists(st.tuples(SPOKEN, TOKENS, st.booleans()), min_size=1, max_size=3))
async def test_a_parked_trajectory_comes_back_as_it_was(
    index_url: str, tmp_path: Path, played: list[tuple[list[Spoken], list[int], bool]]
) -> None:
    trajectories = [progress_of(*each) for each in played]
    generated = [each.generated for each in trajectories]
    positions = list(range(len(trajectories)))
    endings = [Ending(position) for position in positions]
    async with flow(index_url, tmp_path) as dock:
        await admit(dock, {}, samples=len(trajectories))
        claim = await claimed(dock, ENVIRONMENT)
        assert await parked_progress(dock, claim) == {}
        rows = parked_columns(trajectories)
        await Parked(positions, rows=rows, generated=generated, to="rollout").commit(dock, claim)
        turn = await claimed(dock, "rollout", version=2**20)
        back = await parked_progress(dock, turn)
        assert [back[position] for position in positions] == trajectories
        for position, progress in enumerate(trajectories):
            assert back[position].turn_seconds == [0, 2, 0.5] * len(progress.turn_starts)
        rewards = [sum(each.turn_reward) % 1 for each in trajectories]
        columns = ended_columns([back[position] for position in positions], rewards, endings)
        ended = [(oldest if tokens else 0, tokens) for oldest, tokens in generated]
        await Written(positions, rows=columns, generated=ended).commit(dock, turn)
        scoring = await claimed(dock, "reward")
        ended_rows = await dock.fetch(
            scoring, [MASK, "response_ids", "ending", "environment_reward"]
        )
        for position, progress in enumerate(trajectories):
            assert Packed.of(ended_rows[MASK]).rows()[position].tolist() == progress.mask()
            tokens = Packed.of(ended_rows["response_ids"]).rows()[position].tolist()
            assert tokens == progress.token_ids
        assert ended_rows["ending"].tolist() == endings
        assert torch.equal(ended_rows["environment_reward"], torch.tensor(rewards))


def test_a_group_with_a_trajectory_that_is_dropped_is_dropped() -> None:
    algorithm = GRPO(drop_equal=False)
    rows = TensorDict({"reward": torch.tensor([0.0, 1.0, 0.0, 1.0])}, batch_size=[4])
    rows["ending"] = torch.tensor(
        [Ending.DONE, Ending.DROPPED, Ending.FAILED, Ending.TURNS], dtype=torch.uint8
    )
    members, results = credits(algorithm, rows, [0, 0, 1, 1])
    assert members == [[0, 1], [2, 3]]
    assert results[0] == Drop("the environment failed")
    assert not isinstance(results[1], Drop)
