"""Costs that a simulated run is made of, each with where it comes from.

a mock recipe ──▶ the options of its latency model (mock_costs.py) ───┬─▶ Costs ──▶ simulator
a run's events ──▶ rates, lengths and times measured (recorded.py) ───┘

Importing this needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

ASSUMED = {"restart_seconds": "a restart takes 30 s, as assumed"}  # where none is measured
PROFILE = "engine.json"  # of a run's folder
LengthsOf = Callable[[int], Sequence[int]]
"""Group number -> tokens of each of its responses."""


@dataclass(frozen=True)
class Costs:
    """Seconds and rates (tokens/s) of one worker of each stage.

    A replica decodes ``row_rate`` tokens/s for each response while at most ``saturation_rows``
    decode; more of them share what these had. Each decoding response adds ``row_seconds`` to a
    token of all (its keys and values are read). Nothing decodes for ``prefill_seconds`` of each
    prefill and ``prefill_token_seconds`` of each of its tokens (``prefill_rate``: that of one
    response alone, beside which others decode), and for ``response_seconds`` of each response that
    ends. An optimizer step takes ``step_seconds`` and ``token_seconds`` for each token: responses,
    and the prompt of each group once.
    ``between_steps``: claim, commit and publishing, in which nothing is trained. ``swap_seconds``
    of a swap nothing decodes, ``copy_seconds`` are beside decoding. ``restart_seconds``: until a
    replica that has failed decodes again. ``dropped``: share of the groups that leave untrained, as
    their rewards are equal or a reward failed. ``cores``: of the one machine on which replicas and
    trainer compute, 0: they compute on accelerators, or each on a machine of its own;
    ``other_threads`` compute there besides, on average. ``sources``: for each field, where its
    value comes from."""

    row_rate: float
    step_seconds: float
    token_seconds: float
    saturation_rows: float = 64.0
    row_seconds: float = 0.0
    prefill_rate: float = 5000.0
    prefill_seconds: float = 0.0
    prefill_token_seconds: float = 0.0
    response_seconds: float = 0.0
    prompt_tokens: float = 0.0
    swap_seconds: float = 0.0
    copy_seconds: float = 0.0
    reference_token_seconds: float = 0.0
    between_steps: float = 0.0
    restart_seconds: float = 30.0
    dropped: float = 0.0
    cores: int = 0
    other_threads: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict)

    def rate(self, rows: int) -> float:
        """Tokens/s of each of so many responses that decode together."""
        return 1 / (max(1.0, rows / self.saturation_rows) / self.row_rate + rows * self.row_seconds)


@dataclass(frozen=True)
class EngineProfile:
    """Seconds of one rollout engine.

    ``token_seconds``: of a token of all responses that decode together; ``row_seconds``: more of it
    for each of them. ``prefill_seconds``: of one prefill, beside ``prefill_token_seconds`` for each
    of its tokens. ``prompt_tokens``: mean length of the prompts that were prefilled.
    """

    token_seconds: float
    row_seconds: float
    prefill_seconds: float
    prefill_token_seconds: float
    prompt_tokens: float

    def write(self, folder: Path) -> None:
        (folder / PROFILE).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> EngineProfile | None:
        """The profile in ``folder``; None where there is none."""
        path = folder / PROFILE
        return cls(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


class DrawnLengths:
    """Lengths of responses, ``longest`` tokens at most, drawn with replacement from the groups
    ``measured`` (responses of a group have similar lengths); the same for the same seed."""

    CHUNK = 4096  # groups that are drawn at once

    def __init__(
        self,
        group_size: int,
        longest: int,
        measured: Sequence[Sequence[int]],
        *,
        seed: int = 0,
    ) -> None:
        self.group_size = group_size
        self.longest = longest
        self.seed = seed
        self._measured = np.array([np.resize(group, group_size) for group in measured])
        self._chunks: dict[int, list[list[int]]] = {}

    def __call__(self, group: int) -> Sequence[int]:
        chunk, at = divmod(group, self.CHUNK)
        if chunk not in self._chunks:
            self._chunks[chunk] = self._draw(chunk)
        return self._chunks[chunk][at]

    def of_groups(self, group_size: int) -> DrawnLengths:
        """The same lengths in groups of another size."""
        return DrawnLengths(group_size, self.longest, self._measured.tolist(), seed=self.seed)

    def _draw(self, chunk: int) -> list[list[int]]:
        random = np.random.default_rng([self.seed, chunk])
        groups = self._measured[random.integers(len(self._measured), size=self.CHUNK)]
        lengths: list[list[int]] = np.clip(groups, 1, self.longest).tolist()
        return lengths
