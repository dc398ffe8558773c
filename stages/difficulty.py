"""Sampling by difficulty: prompts that teach come often, solved and hopeless ones rarely.

    source ──▶ candidates in its own order ──▶ taken with the probability `share`, else passed over ──▶ prompt of a group
                                                     ▲
    rewards of a group ──▶ outcome ──▶ pass rate of its prompt, in the index, when the group leaves (trained or dropped)

A choice depends on the seed, on the position in the source, and on the pass rates of that moment. Positions and pass rates
are in the index and in checkpoints, so a run that is killed or resumed goes on with them, and a lost group gets its prompt
again. With η = 0 every group of earlier steps has left when a step's prompts are chosen: a replayed run chooses the same.

The learned share of a prompt is soon out of date, because the policy learns: none is below :data:`LEAST_SHARE`.
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

LEAST_SHARE = 1 / 16  # of the times that a prompt is a candidate
LEAST_TAUGHT = 1 / 4  # the same, of a prompt whose responses last had different rewards
MOST_PASSED = 64  # candidates passed over for one group; the next one is taken
MOST_PROMPTS = 65536  # with a pass rate, as in the index: those that changed least recently are forgotten


@dataclass(frozen=True)
class PassRate:
    """How the last group of a prompt did: mean reward, ``contrast`` (:func:`outcome`), and ``streak``, the number of groups
    in a row without contrast."""

    reward: float
    contrast: float
    streak: int


def outcome(rewards: Sequence[float]) -> tuple[float, float]:
    """Mean and contrast of a group's rewards. The contrast is ``4 q (1 - q)``, where q is where the mean lies between the
    lowest and the highest reward: 1 for a pass rate of one half, 0 when all rewards are equal.

    >>> outcome([0.0, 1.0, 0.0, 0.0]), outcome([0.0, 2.0]), outcome([1.0, 1.0])
    ((0.25, 0.75), (1.0, 1.0), (1.0, 0.0))
    """
    mean, low, high = sum(rewards) / len(rewards), min(rewards), max(rewards)
    if low == high:
        return low, 0.0
    q = (mean - low) / (high - low)
    return mean, 4 * q * (1 - q)


def share(rate: PassRate | None) -> float:
    """The probability that a candidate is taken: 1 of a new one; by contrast, of one that taught something; of others a
    quarter for each group in a row that did not."""
    if rate is None:
        return 1.0
    if rate.contrast:
        return max(LEAST_TAUGHT, rate.contrast)
    return max(LEAST_SHARE, 0.25**rate.streak)


def prompt_key(prompt: Prompt) -> str:
    """A prompt's name in the index: of its text and its row's other columns."""
    text = json.dumps([prompt.given, prompt.fields], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class Difficulty:
    """Chooses prompts of ``source`` by the pass rates that it knows."""

    def __init__(self, source: PromptSource, seed: int) -> None:
        self.source, self._seed = source, seed
        self.rates: dict[str, PassRate] = {}  # the least recently changed first

    def choose(self, position: int) -> tuple[int, Prompt, str]:
        """The first candidate from ``position`` on that is taken: its position, the prompt, its key."""
        for candidate in range(position, position + MOST_PASSED):
            prompt = self.source.prompt(candidate)
            key = prompt_key(prompt)
            digest = hashlib.blake2b(f"{self._seed}:{candidate}".encode(), digest_size=8, person=b"difficulty").digest()
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
        """A group of the prompt ``key`` leaves: what the index does, for a loop without one."""
        reward, contrast = outcome(rewards)
        before = self.rates.get(key)
        streak = 0 if contrast else (before.streak if before else 0) + 1
        self.put([(key, PassRate(reward, contrast, streak))])


class IndexedDifficulty:
    """The choices of a run: ``difficulty`` with pass rates and positions that are kept in the ``index``."""

    def __init__(self, index: Index, difficulty: Difficulty) -> None:
        self._index, self._difficulty = index, difficulty
        self._changes = 0

    async def prompts(self, groups: Sequence[int], admitted: int) -> Mapping[int, tuple[int, Prompt]]:
        """Position and prompt of each of ``groups``, in their order. Those that have one keep it. ``admitted``: the first
        group that never had a prompt; lost ones before it, of a run that sampled uniformly, had that of their number."""
        known, difficulty = await self._index.pass_rates(groups, self._changes), self._difficulty
        difficulty.put((key, PassRate(*rate)) for key, rate in known.rates)
        self._changes = known.changes
        position = admitted if known.next is None else known.next
        found: dict[int, tuple[int, Prompt]] = {}
        fresh: dict[int, tuple[int, str]] = {}
        for group in groups:
            if group in known.chosen or group < admitted:
                place = known.chosen.get(group, group)
                found[group] = place, difficulty.source.prompt(place)
                continue
            place, prompt, key = difficulty.choose(position)
            found[group], fresh[group] = (place, prompt), (place, key)
            position = place + 1
        if fresh:
            await self._index.choose_prompts(fresh, position)
        return found
