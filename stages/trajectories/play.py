"""Trajectories in a plain loop: an engine and environments, without dock, index or workers.

advance all ─▶ a turn of each that goes on ─▶ advance these ─▶ … until all have ended
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace

import torch

from stages.engines.protocols import Begun, GroupRequest, RolloutEngine
from stages.rollout.branches import along_path, joined
from stages.trajectories.progress import Progress
from stages.trajectories.trajectory import Episode

Episodes = Mapping[tuple[int, int], Episode]  # by group and place


async def play(engine: RolloutEngine, requests: Sequence[GroupRequest], episodes: Episodes) -> None:
    """Play the ``episodes`` of ``requests`` to their ends, turn by turn, all of them together.
    Raises EnvironmentFailed, with all closed."""
    going_on = dict(episodes)
    try:
        while True:
            for episode in going_on.values():
                await episode.advance()
            going_on = {key: each for key, each in going_on.items() if each.ending is None}
            if not going_on:
                return
            await make_turns(engine, requests, going_on)
    finally:
        for episode in going_on.values():
            await episode.close()


async def make_turns(
    engine: RolloutEngine, requests: Sequence[GroupRequest], episodes: Episodes
) -> None:
    """Have ``engine`` make the next turn of those ``episodes``, all of which go on."""
    turns = [_next_turn(request, episodes) for request in requests]
    turns = [request for request in turns if request.places]
    async with aclosing(engine.generate(turns)) as completions:  # type: ignore[type-var]
        async for completion in completions:
            progress = episodes[completion.group, completion.place].progress
            if progress.branches:
                row = _row(progress)
                completion = joined(completion, row, along_path(row, progress.branches).aside)
            progress.token_ids = completion.token_ids.tolist()
            progress.logprobs = completion.logprobs.tolist()
            progress.versions = [*completion.versions]
            progress.truncated = completion.finish_reason == "length"


def _next_turn(request: GroupRequest, episodes: Episodes) -> GroupRequest:
    """Return the request of the next turns of those trajectories of ``request`` that go on."""
    group = request.group
    places = tuple(place for place in request.places if (group, place) in episodes)
    trajectories = {place: episodes[group, place].progress for place in places}
    begun = {place: _row(progress) for place, progress in trajectories.items()}
    begun |= {
        place: along_path(begun[place], progress.branches)
        for place, progress in trajectories.items()
        if progress.branches
    }
    begun = {place: row for place, row in begun.items() if len(row.token_ids)}
    return replace(request, places=places, begun=begun)


def _row(progress: Progress) -> Begun:
    """Return all tokens of a trajectory that is at a turn."""
    return Begun(
        torch.tensor(progress.token_ids, dtype=torch.int64),
        torch.tensor(progress.logprobs),
        tuple(progress.versions),
        turn_start=progress.turn_starts[-1],
    )
