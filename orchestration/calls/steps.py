"""What each optimizer step of a model was made of, as its charts show it.

calls with their answers, in their order ─▶ sums since the last step ─▶ optim_step: a row     thinned behind the newest

It is counted where answers are recorded, and packed into the record of the model's state: a call that
is made again, after a death, has its answer already and is not counted twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

FIELDS = (
    *("number", "step", "time", "data", "tokens", "loss", "trained_tokens", "grad_norm"),
    *("learning_rate", "staleness_mean", "staleness_max", "sampled_sequences", "sampled_tokens"),
    *("sampled_newest", "waiting", "waiting_samples"),
)
"""``number``: 1, 2, … of the model's steps, ``step``: optimizer steps of its weights, ``time``:
seconds since 1970. Sums since the last step: ``data``, ``tokens`` (of inputs), ``loss``,
``trained_tokens`` (of the loss), ``sampled_*``; ``sampled_newest``: tokens by the weights before this
step. ``waiting``, ``waiting_samples``: requests at that time. None: not known."""
WHOLE = 1000  # newest steps; half of those before are dropped, again and again
_NOTHING = {"data": 0, "tokens": 0, "loss": 0.0, "trained_tokens": 0.0, "stale": (0, 0, 0)}


class Steps:
    """``packed``: what :meth:`packed` has returned."""

    def __init__(self, packed: Mapping[str, Any] | None = None) -> None:
        packed = packed or {}
        self.last_answer: float | None = packed.get("time")
        """Seconds since 1970."""
        self._rows: list[Sequence[Any]] = list(packed.get("rows", ()))
        self._since: dict[str, Any] = dict(packed.get("since", _NOTHING))
        self._sampled: Sequence[int] = packed.get("sampled", (0, 0))

    def packed(self) -> dict[str, Any]:
        """Return values of msgpack, which later calls do not change."""
        since = dict(self._since)
        rows = list(self._rows)
        return {"rows": rows, "since": since, "sampled": self._sampled, "time": self.last_answer}

    def count(self, call: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        """Count a call by the heads of its records."""
        self.last_answer = answer["time"]
        succeeded = "failed" not in answer
        if call["kind"] == "forward_backward" and succeeded:
            self._add_pass(call, answer)
        elif call["kind"] == "optim_step":
            if succeeded:
                self._add_step(answer)
            self._since = dict(_NOTHING)  # one that has failed drops the gradients
        elif call["kind"] == "load_weights" and succeeded:
            self._since = dict(_NOTHING)

    def _add_pass(self, call: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        since = self._since
        metrics = answer.get("metrics", {})
        since["data"] += call["data"]
        since["tokens"] += call["tokens"]
        since["loss"] += metrics.get("loss:sum", 0.0)
        since["trained_tokens"] += metrics.get("tokens:sum", 0.0)
        count, total, largest = since["stale"]
        values = answer.get("staleness", ())
        since["stale"] = (
            count + len(values),
            total + sum(values),
            max([largest, *values]),
        )

    def _add_step(self, answer: Mapping[str, Any]) -> None:
        since = self._since
        metrics = answer.get("metrics", {})
        sequences, tokens, newest, samples = answer.get("sampled", (0, 0, 0, 0))
        sampled = max(0, tokens - self._sampled[1])
        count, total, largest = since["stale"]
        row = (
            self._rows[-1][0] + 1 if self._rows else 1,
            answer["step"],
            answer["time"],
            since["data"],
            since["tokens"],
            since["loss"],
            since["trained_tokens"],
            metrics.get("grad_norm"),
            metrics.get("learning_rate"),
            total / count if count else None,
            largest if count else None,
            max(0, sequences - self._sampled[0]),
            sampled,
            min(sampled, newest),
            answer.get("waiting", 0),
            samples,
        )
        self._rows.append(row)
        self._sampled = (sequences, tokens)
        if len(self._rows) == 2 * WHOLE:
            self._rows[:WHOLE] = self._rows[:WHOLE:2]

    def after(self, number: int) -> list[dict[str, Any]]:
        """Return the steps whose ``number`` is larger, by the names of FIELDS."""
        return [dict(zip(FIELDS, row, strict=True)) for row in self._rows if row[0] > number]
