"""Sampling by difficulty: prompts that teach come each time, those that never taught anything
rarely.

    source ──▶ candidates in its own order ──▶ taken with the probability `share`, else passed over ──▶ prompt of a group
                                                     ▲
    rewards of a group ──▶ outcome ──▶ pass rate of its prompt, in the index, when the group leaves (trained or dropped)

A choice depends on the seed, on the position in the source, and on the pass rates of that moment.
Positions and pass rates are in the index and in checkpoints, so a run that is killed or resumed
goes on with them, and a lost group gets its prompt again. With η = 0 every group of earlier steps
has left when a step's prompts are chosen: a replayed run chooses the same.

What is known of a prompt is soon out of date, because the policy learns: no share is below
:data:`LEAST_SHARE`. Prompts that teach have one share, whatever their pass rate, and lose it slowly
once they are solved: a policy that is trained on its hardest prompts alone forgets the others
(docs/measurements/waste.md).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.index.client import Index

if TYPE_CHECKING:
    from stages.prompts.formatter import Prompt
    from stages.prompts.sources import PromptSource

LEAST_SHARE = 1 / 32  # of the times that a prompt is a candidate
# what is left of a prompt's share after a group with equal rewards
NEVER_TAUGHT = 0.125
TAUGHT = 0.9
MOST_PASSED = 64  # candidates passed over for one group; the next one is taken
# with a pass rate, as in the index: those that changed least recently are forgotten
MOST_PROMPTS = 65536


@dataclass(frozen=True)
class PassRate:
    """The outcome of a prompt's groups: ``reward``, the mean of the last one; ``taught``, whether
    any had different rewards; ``streak``, the number of groups in a row that had not."""

    reward: float
    taught: bool
    streak: int


def outcome(rewards: Sequence[float]) -> tuple[float, bool]:
    """Return the mean of a group's rewards, and whether they differ, so that the group teaches
    something.

    >>> outcome([0.0, 1.0, 0.0, 0.0]), outcome([1.0, 1.0])
    ((0.25, True), (1.0, False))
    """
    low = min(rewards)
    high = max(rewards)
    return (sum(rewards) / len(rewards), True) if low != high else (low, False)


def share(rate: PassRate | None) -> float:
    """Return the probability that a candidate is taken: 1 of a new one, and of one whose last group
    taught something. Each group in a row that did not leaves nine tenths of it where an earlier one
    did, and an eighth where none ever did."""
    if rate is None:
        return 1.0
    return float(max(LEAST_SHARE, (TAUGHT if rate.taught else NEVER_TAUGHT) ** rate.streak))


def prompt_key(prompt: Prompt) -> str:
    """Return a prompt's name in the index: of its text and its row's other columns."""
    text = json.dumps([prompt.given, prompt.fields], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class Difficulty:
    """Chooses prompts of ``source`` by the pass rates that it knows."""

    def __init__(self, source: PromptSource, seed: int) -> None:
        self.source = source
        self._seed = seed
        self.rates: dict[str, PassRate] = {}  # the least recently changed first

    def choose(self, position: int) -> tuple[int, Prompt, str]:
        """Return the first candidate from ``position`` on that is taken: its position, the prompt,
        its key."""
        for candidate in range(position, position + MOST_PASSED):
            prompt = self.source.prompt(candidate)
            key = prompt_key(prompt)
            digest = hashlib.blake2b(
                f"{self._seed}:{candidate}".encode(), digest_size=8, person=b"difficulty"
            ).digest()
            if int.from_bytes(digest, "big") < share(self.rates.get(key)) * 2**64:
                return candidate, prompt, key
        candidate = position + MOST_PASSED
        prompt = self.source.prompt(candidate)
        return candidate, prompt, prompt_key(prompt)

    def put(self, rates: Iterable[tuple[str, PassRate]]) -> None:
        """Set pass rates of prompts by their keys, the oldest change first."""
        for key, rate in rates:
            self.rates.pop(key, None)
            self.rates[key] = rate
        while len(self.rates) > MOST_PROMPTS:
            del self.rates[next(iter(self.rates))]

    def count(self, key: str, rewards: Sequence[float]) -> None:
        """Count a group of the prompt ``key`` that leaves, as the index does, for a loop without
        one."""
        reward, taught = outcome(rewards)
        before = self.rates.get(key, PassRate(0.0, False, 0))
        self.put(
            [(key, PassRate(reward, taught or before.taught, 0 if taught else before.streak + 1))]
        )


class IndexedDifficulty:
    """The choices of a run: ``difficulty`` with pass rates and positions that are kept in the
    ``index``."""

    def __init__(self, index: Index, difficulty: Difficulty) -> None:
        self._index = index
        self._difficulty = difficulty
        self._changes = 0

    async def prompts(
        self, groups: Sequence[int], admitted: int
    ) -> Mapping[int, tuple[int, Prompt]]:
        """Return the position and prompt of each of ``groups``, in their order.

        Those that have one keep it. ``admitted``: the first group that never had a prompt; lost
        ones before it, of a run that sampled uniformly, had that of their number.
        """
        known = await self._index.pass_rates(groups, self._changes)
        difficulty = self._difficulty
        difficulty.put(
            (key, PassRate(reward, bool(taught), streak))
            for key, (reward, taught, streak) in known.rates
        )
        self._changes = known.changes
        position = admitted if known.next is None else known.next
        prompts: dict[int, tuple[int, Prompt]] = {}
        fresh: dict[int, tuple[int, str]] = {}
        for group in groups:
            if group in known.chosen or group < admitted:
                place = known.chosen.get(group, group)
                prompts[group] = place, difficulty.source.prompt(place)
                continue
            place, prompt, key = difficulty.choose(position)
            prompts[group], fresh[group] = (place, prompt), (place, key)
            position = place + 1
        if fresh:
            await self._index.choose_prompts(fresh, position)
        return prompts
