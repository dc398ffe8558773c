"""Rollout: claims groups, submits them to an engine, and commits each response as soon as it ends.

    claim groups ──▶ one submission to the engine ──▶ response ends ──▶ commit that row   (no waiting for the slowest)
       ▲ as many as the engine has room for,           └▶ response cut ──▶ park that row ──┐
       │ none that its loaded version may not make                                         │
       └── parked rows first, with the tokens they have ◀── any rollout worker ◀───────────┘

Responses that end while a commit is under way go out together with the next one. One is cut when it
has used its budget of tokens for one visit, or (by recipe) at a weight update; the worker that
claims it next continues after its last token. Where an environment answers, what ends is a turn: the
row is parked for the environment, which hands it back with its answer or commits it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from tensordict import TensorDict

from pipeline.first_of import cancel_all
from pipeline.index.client import Claim
from pipeline.warehouse.dock import Dock
from pipeline.worker.controller import Stage
from pipeline.worker.outputs import Output, Parked, Written
from stages.engines.device_lease import DeviceLease
from stages.engines.protocols import (
    Begun,
    Completion,
    EngineFailed,
    GroupRequest,
    RolloutEngine,
    SamplingParams,
)
from stages.flow.catalogue import (
    BRANCHES,
    OBSERVED,
    ROUTED,
    TIMES,
    TURN_REWARD,
    TURN_SECONDS,
    TURN_STARTS,
)

# columns that a cut response is parked with
PROGRESS = ("response_ids", "rollout_logprobs", "versions")
# of a trajectory: where its turns begin, the present one last, the environment's rewards so far,
# the seconds of the turns, and its branches
TURNS = (TURN_STARTS, TURN_REWARD, TURN_SECONDS, BRANCHES)

# times the mean length of so many responses: a straggler is parked after these tokens
STRAGGLER = 4
RECENT = 256


class Rollout(Stage):
    """The rollout stage. ``most_rows``: responses that this worker holds at once, decoding or
    waiting in the engine. ``first_rows``: of its first claim (default: as many), so that the first
    optimizer step does not wait for later ones. ``parks_stragglers``: a visit of a response ends
    after STRAGGLER times the mean length, as with ``params.budget``. The limit depends on other
    responses alone, and what is parked is continued, so it favours no length. ``environment``: the
    stage that answers each turn; "": a response is one turn. ``together``: turns that were claimed
    together are handed on together, so that what is decoded together depends on no time.
    ``claims_rows``: parked rows are claimed also where less than a group has room."""

    name = "rollout"
    fetches: tuple[str, ...] = ()  # the prompts, packed

    def __init__(
        self,
        dock: Dock,
        engine: RolloutEngine,
        params: SamplingParams,
        *,
        seed: int,
        group_size: int,
        most_rows: int,
        first_rows: int | None = None,
        parks_stragglers: bool = False,
        environment: str = "",
        together: bool = False,
        claims_rows: bool = False,
    ) -> None:
        self.dock = dock
        self._environment = environment
        self._together = together
        self._claims_rows = claims_rows
        # where no bit may depend on a restart, each turn computes all of its tokens
        self._continues = bool(environment) and not together
        self._computed_again = 0
        self._drafts = Counter[str]()
        self._lengths = deque[int](maxlen=RECENT if parks_stragglers else 0)
        self.engine = engine
        self.params = params
        self.seed = seed
        self._group_size = group_size
        self._most_rows = most_rows
        self._first_rows = first_rows  # None after the first claim
        # claims nothing while it is set (an evaluation that must not share its batch)
        self.held_back = False
        self.leaving = False  # the engine is closed; rows without a token go back to the index
        self.device = DeviceLease()

    def room(self, held: int) -> float:
        if self.held_back or not self.device.may_generate:
            return 0
        most = (
            self._most_rows if self._first_rows is None else min(self._first_rows, self._most_rows)
        )
        groups = (most - held) / self._group_size
        return groups if self._claims_rows else math.floor(groups)

    def version(self) -> int | None:
        return self.engine.version

    def figures(self) -> Mapping[str, Any]:
        figures: dict[str, Any] = {}
        if self._environment:
            figures["trajectories"] = {"computed_again_tokens": self._computed_again}
        if self._drafts:
            figures["drafts"] = dict(self._drafts)
        return figures

    async def process(self, claim: Claim, rows: TensorDict) -> AsyncGenerator[Output, None]:
        positions = {(row.group, row.place): i for i, row in enumerate(claim.rows)}
        prompts = (await self.dock.fetch_packed(claim, ["prompt_ids"]))["prompt_ids"].rows()
        begun, turns = await self._begun(claim, prompts)
        paths = _paths(begun, turns)
        requests = []
        params = replace(self.params, budget=self._budget())
        for group, members in groupby(claim.rows, key=lambda row: row.group):
            rows_of = [(row.place, positions[group, row.place]) for row in members]
            prompt = prompts[rows_of[0][1]].clone()
            seed = group_seed(self.seed, group)
            progress = {place: paths.get(at, begun[at]) for place, at in rows_of if at in begun}
            progress = {place: path for place, path in progress.items() if len(path.token_ids)}
            wanted = tuple(place for place, _ in rows_of)
            requests.append(
                GroupRequest(group, wanted, prompt, params, seed, progress, self._continues)
            )
        ended: asyncio.Queue[Completion | None] = asyncio.Queue()
        submitted = time.monotonic()
        listening = asyncio.create_task(self._listen(requests, ended))
        try:
            missing = len(positions)
            while missing:
                news = [await ended.get()]
                while not ended.empty() or (
                    self._together and None not in news and len(news) < missing
                ):
                    news.append(await ended.get())
                together = [
                    _whole(completion, positions, begun, paths)
                    for completion in news
                    if completion is not None
                ]
                missing -= len(together)
                for done in together:
                    if done.drafted_tokens:
                        self._drafts["drafted_tokens"] += done.drafted_tokens
                        self._drafts["held_tokens"] += done.held_tokens
                self._lengths.extend(
                    len(done.token_ids) for done in together if done.finish_reason != "cut"
                )
                self._computed_again += sum(
                    computed_again(len(prompts[at]), paths.get(at, begun[at]), done.cached_tokens)
                    for done in together
                    if (at := positions[done.group, done.place]) in begun
                )
                for cut in (False, True):
                    if some := [c for c in together if (c.finish_reason == "cut") == cut]:
                        places = [positions[c.group, c.place] for c in some]
                        before = sum(len(begun[at].token_ids) for at in places if at in begun)
                        seconds = time.monotonic() - submitted
                        for at in turns and places:
                            turns[at][TURN_SECONDS][-len(TIMES)] += seconds
                        yield responses(
                            places,
                            some,
                            before=before,
                            parked=cut or bool(self._environment),
                            turns=[turns[at] for at in places] if turns else (),
                            to="" if cut else self._environment,
                        )
                if missing and None in news and self.leaving:
                    return
                if missing and None in news:
                    await listening  # raises what the engine raised
                    raise RuntimeError(
                        f"the rollout engine ended with {missing} of {len(positions)} "
                        f"responses missing"
                    )
            self._first_rows = None
        finally:
            await cancel_all(listening)

    def _budget(self) -> int:
        """Return the number of tokens of one visit of a response; 0: as many as it takes."""
        straggler = (
            math.ceil(STRAGGLER * sum(self._lengths) / len(self._lengths)) if self._lengths else 0
        )
        return min(filter(None, (self.params.budget, straggler)), default=0)

    async def _begun(
        self, claim: Claim, prompts: Sequence[torch.Tensor]
    ) -> tuple[dict[int, Begun], dict[int, Mapping[str, torch.Tensor]]]:
        """Return the progress that rows of the claim were parked with, by position, and their
        columns TURNS; each has a prompt."""
        read = [*PROGRESS, *(TURNS if self._environment else ())]
        if ROUTED in self.dock.schema:
            read.append(ROUTED)
        positions, rows = await self.dock.begun(claim, read)
        if not positions:
            return {}, {}
        columns = {name: [row.clone() for row in rows[name].rows()] for name in read}
        begun = dict[int, Begun]()
        turns = dict[int, Mapping[str, torch.Tensor]]()
        for number, position in enumerate(positions):
            row = {name: column[number] for name, column in columns.items()}
            if self._environment:
                turns[position] = {name: row[name] for name in TURNS}
            tokens = row["response_ids"]
            if not len(tokens):  # an environment that begins with nothing
                continue
            experts = row.get(ROUTED)
            begun[position] = Begun(
                tokens,
                row["rollout_logprobs"],
                tuple((int(v), int(n)) for v, n in row["versions"].view(-1, 2)),
                turn_start=int(row["turn_starts"][-1]) if self._environment else 0,
                routed_experts=None
                if experts is None
                else experts.view(len(prompts[position]) + len(tokens) - 1, -1),
            )
        return begun, turns

    async def _listen(
        self, requests: Sequence[GroupRequest], ended: asyncio.Queue[Completion | None]
    ) -> None:
        """Put completions into ``ended`` as they come, and None after the last one, or when the
        engine has failed."""
        try:
            async with aclosing(self.engine.generate(requests)) as completions:  # type: ignore[type-var]
                async for completion in completions:
                    ended.put_nowait(completion)
        finally:
            ended.put_nowait(None)


def computed_again(prompt_tokens: int, begun: Begun, cached_tokens: int) -> int:
    """Return how many tokens a visit of a response has computed that an earlier one had: all but
    ``cached_tokens``, the last one, and the observation that follows the earlier visit."""
    if all(version == OBSERVED for version, _ in begun.versions):
        return 0
    version, observed = begun.versions[-1]
    new = 1 + (observed if version == OBSERVED else 0)
    return max(0, prompt_tokens + len(begun.token_ids) - cached_tokens - new)


def _paths(
    begun: Mapping[int, Begun], turns: Mapping[int, Mapping[str, torch.Tensor]]
) -> dict[int, Begun]:
    """Return the tokens that the next turn follows, by position, of rows with branches."""
    branched = {at: row[BRANCHES].tolist() for at, row in turns.items() if len(row[BRANCHES])}
    if not branched:
        return {}
    from stages.rollout.branches import along_path

    return {at: along_path(begun[at], branches) for at, branches in branched.items()}


def _whole(
    completion: Completion,
    positions: Mapping[tuple[int, int], int],
    begun: Mapping[int, Begun],
    paths: Mapping[int, Begun],
) -> Completion:
    """Return ``completion`` with the tokens that its row has in other branches."""
    at = positions[completion.group, completion.place]
    if at not in paths:
        return completion
    from stages.rollout.branches import joined

    return joined(completion, begun[at], paths[at].aside)


def group_seed(seed: int, group: int) -> int:
    """Return the seed of a group's responses: the same for each attempt, on any worker."""
    return (seed * 0x9E3779B1 + group) & 0x7FFF_FFFF_FFFF


def responses(
    positions: Sequence[int],
    completions: Sequence[Completion],
    *,
    before: int = 0,
    parked: bool = False,
    turns: Sequence[Mapping[str, torch.Tensor]] = (),
    to: str = "",
) -> Written | Parked:
    """Return the columns of ended or ``parked`` responses; ``before`` of their tokens were counted
    in earlier visits. ``turns``: of trajectories, the columns TURNS of each; ``to``: the stage that
    they are parked for. Raises EngineFailed for a logprob that is not finite: such a row is not
    committed, so that nothing is trained on it."""
    _check_logprobs(completions)
    rows: dict[str, Any] = {
        "response_ids": [c.token_ids for c in completions],
        "rollout_logprobs": [c.logprobs for c in completions],
        "versions": torch.tensor(
            [n for c in completions for pair in c.versions for n in pair]
        ).split([2 * len(c.versions) for c in completions]),
    }
    if routed := [c.routed_experts.flatten() for c in completions if c.routed_experts is not None]:
        rows[ROUTED] = routed
    if not parked or to:
        rows["truncated"] = torch.tensor([c.finish_reason == "length" for c in completions])
    if turns:
        rows |= {name: [row[name] for row in turns] for name in TURNS}
    generated = [(c.oldest_version, c.generated_tokens) for c in completions]
    tokens = sum(len(c.token_ids) for c in completions) - before
    if parked:
        return Parked(positions, rows=rows, generated=generated, tokens=tokens, to=to)
    return Written(positions, rows=rows, generated=generated, tokens=tokens)


def _check_logprobs(completions: Sequence[Completion]) -> None:
    """Raise EngineFailed for a logprob that is not finite."""
    if not completions or bool(torch.cat([c.logprobs for c in completions]).isfinite().all()):
        return
    for completion in completions:
        for at, logprob in enumerate(completion.logprobs.tolist()):
            if not math.isfinite(logprob):
                raise EngineFailed(
                    f"group {completion.group}, place {completion.place}: the rollout engine "
                    f"returned the logprob {logprob} for token {at} of "
                    f"{len(completion.logprobs)}, made by version {completion.versions[-1][0]}; "
                    f"its weights or its arithmetic are broken, and the response is not used"
                )
