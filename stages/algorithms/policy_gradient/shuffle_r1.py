"""Shuffle-R1 (arXiv 2508.05612): pairs of responses with a large contrast, the more often trained on
the larger their advantages are.

rewards of a group ─▶ advantages ─▶ highest with lowest, second highest with second lowest, … ─▶ the first pairs stay
pairs of a train batch ─▶ each round draws some by |advantage| + |advantage| ─▶ rounds in a row ─▶ mini-batches
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from stages.algorithms.interface import FOLLOWS
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.flow.catalogue import OPTIONAL, ROW_MASK
from stages.flow.declarations import Columns, Drop

Pair = tuple[int, ...]  # places in a group; of an odd number of rows the middle one is alone


class ShuffleR1(GRPO):
    """GRPO on a part of the responses, which are generated in large groups.

    Pairwise trajectory sampling: rows with an advantage near 0 are not trained on. Batch shuffle:
    rounds draw pairs of the whole train batch without replacement, so a pair may be in several
    rounds, and the mini-batches have as many rows as without.
    """

    name: ClassVar[str] = "shuffle_r1"
    use_for: ClassVar[str] = "Large groups, of which most responses are alike in reward."
    citation: ClassVar[str] = """
    @misc{zhu2025shuffle,
      title = {{Shuffle-R1}: Efficient {RL} Framework for Multimodal Large Language Models
        via Data-centric Dynamic Shuffle},
      author = {Zhu, Linghao and Guan, Yiran and Liang, Dingkang and Ju, Jianzhong and others},
      year = {2025},
      eprint = {2508.05612},
      archivePrefix = {arXiv},
    }
    """

    pairs_kept: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Share of a group's pairs that is trained on: those of the largest contrast.",
    )
    shuffle_rounds: int = Field(
        default=4,
        ge=1,
        description="Rounds that a train batch is drawn in, each with its part of the rows. 1: "
        "each pair is trained on once.",
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        description="Of the draws, with the number of the train batch. Default: the recipe's.",
        json_schema_extra={FOLLOWS: "seed"},
    )

    @property
    def credit_makes(self) -> Columns:
        return {**super().credit_makes, ROW_MASK: OPTIONAL[ROW_MASK]}

    def credit(self, group: Mapping[str, Any]) -> Mapping[str, Any] | Drop:
        """Return GRPO's credit, and the rows of the pairs that stay: one pair at least."""
        credit = super().credit(group)
        columns = credit.instead if isinstance(credit, Drop) else credit
        assert columns is not None
        pairs = pairs_of(dict(enumerate(columns["advantage"].tolist())))
        count = max(1, math.floor(self.pairs_kept * (len(columns["advantage"]) // 2) + 1e-9))
        stays = columns["advantage"].new_zeros(len(columns["advantage"])).bool()
        stays[[place for pair in pairs[:count] for place in pair]] = True
        columns = {**columns, ROW_MASK: stays}
        return Drop(credit.reason, instead=columns) if isinstance(credit, Drop) else columns

    @property
    def drawn_by(self) -> str:
        return "advantage" if self.shuffle_rounds > 1 else ""

    def draw(
        self, rows: Mapping[int, Mapping[int, float]], version: int
    ) -> list[dict[int, tuple[int, ...]]]:
        """Draw pairs in rounds, and cut these, one after the other, into mini-batches."""
        weights = {
            (group, pair): sum(abs(advantages[place]) for place in pair)
            for group, advantages in sorted(rows.items())
            for pair in pairs_of(advantages)
        }
        rounds = self.shuffle_rounds
        drawn: list[tuple[int, Pair]] = []
        for number in range(rounds):
            count = len(weights) * (number + 1) // rounds - len(weights) * number // rounds
            drawn += _without_replacement(weights, count, f"{self.seed}:{version}:{number}")
        drawn = drawn or [*weights]  # all advantages are 0
        steps = min(self.mini_batches, len(drawn))
        mini_batches = []
        for step in range(steps):
            places: dict[int, tuple[int, ...]] = {}
            for group, pair in drawn[len(drawn) * step // steps : len(drawn) * (step + 1) // steps]:
                places[group] = tuple(sorted(places.get(group, ()) + pair))
            mini_batches.append(places)
        return mini_batches


def pairs_of(advantages: Mapping[int, float]) -> list[Pair]:
    """Return the places with the highest and the lowest advantage, then those with the second
    highest and the second lowest, and so on.

    >>> pairs_of({0: 0.5, 1: -1.0, 2: 2.0, 3: -1.5, 4: 0.0})
    [(2, 3), (0, 1), (4,)]
    """
    order = sorted(advantages, key=lambda place: (-advantages[place], place))
    half = len(order) // 2
    middle = [(place,) for place in order[half : len(order) - half]]
    return [*zip(order[:half], reversed(order), strict=False), *middle]


def _without_replacement(
    weights: Mapping[tuple[int, Pair], float], count: int, seed: str
) -> list[tuple[int, Pair]]:
    """Draw at most ``count`` keys one after the other, each with a probability in proportion to its
    weight among those that are left (Efraimidis and Spirakis, 2006)."""
    drawn = random.Random(seed)
    keys = {key: drawn.expovariate(weight) for key, weight in weights.items() if weight}
    return sorted(keys, key=lambda key: keys[key])[:count]
