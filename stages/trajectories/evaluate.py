"""Evaluation with environments: each held-out prompt is answered by a trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import structlog

from pipeline.first_of import cancel_all
from stages.environments.interface import EnvironmentFailed
from stages.rewards.stage import segments
from stages.rollout.evaluate import Attempt, Evaluator, check_version
from stages.trajectories.play import play
from stages.trajectories.progress import Ending, ended_columns
from stages.trajectories.trajectory import EnvironmentUnusable, Episode, Trajectories

log = structlog.get_logger()
SPEAKERS = {"assistant": "policy", "tool": "environment"}


@dataclass(frozen=True, kw_only=True)
class PlayingEvaluator(Evaluator):
    """An evaluator whose answers are ``trajectories``, at most ``rows`` at the same time.

    One whose environment fails is not scored, and counts as failed; with ``fails_run`` it ends the
    run.
    """

    trajectories: Trajectories
    fails_run: bool = False

    async def answer(
        self, numbers: Sequence[int], version: int
    ) -> AsyncGenerator[tuple[int, Attempt], None]:
        free = asyncio.Semaphore(self.rows)
        tasks = [asyncio.create_task(self._attempt(number, version, free)) for number in numbers]
        try:
            for ended in asyncio.as_completed(tasks):
                yield await ended
        finally:
            await cancel_all(*tasks)

    async def _attempt(
        self, number: int, version: int, free: asyncio.Semaphore
    ) -> tuple[int, Attempt]:
        request = self.request(number)
        columns = self.prompts[number].row
        episode = Episode(self.trajectories, number, request.group, 0, columns)
        failure = ""
        async with free:
            try:
                await play(self.engine, [request], {(request.group, 0): episode})
            except EnvironmentFailed as failed:
                place = f" ({failed.place})" if failed.place else ""
                failure = f"environment of held-out prompt {number}: {failed}{place}"
                log.warning("environment failed in an evaluation", reason=failure)
                if self.fails_run:
                    raise EnvironmentUnusable(failure) from failed
        check_version(episode.progress.versions, version)
        return number, attempt_of(self, number, episode, failure)


def attempt_of(evaluator: Evaluator, number: int, episode: Episode, failure: str = "") -> Attempt:
    """Return what the policy has made of the prompt ``number`` in ``episode``, which has ended, or
    failed."""
    progress = episode.progress
    ending = Ending.FAILED if episode.ending is None else episode.ending
    row = ended_columns([progress], [episode.reward], [ending])
    text = "\n".join(
        f"{SPEAKERS[role]}: {evaluator.decode(tokens)}"
        for role, tokens in segments(progress.token_ids, progress.mask(), progress.branches)
    )
    columns = {name: column[0] for name, column in row.items()}
    return Attempt(evaluator.prompts[number], columns, text, progress.generated[1], failure)
