"""How rows begin: with their group's prompt, and with tokens of earlier requests.

prompt ── prefill, once for its rows; or that of a row at rest ──┐
tokens of earlier requests ── extend; or from a row at rest ─────┴─▶ logits of the row's next token
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakValueDictionary

import structlog
import torch

from stages.engines.torch.decoding.decoder import TorchDecoder
from stages.engines.torch.decoding.resting import RestingRows
from stages.engines.torch.decoding.rows import PendingGroup, ResponseRow

log = structlog.get_logger()


class Beginnings:
    """The beginnings of the rows of ``decoder``; what ``resting`` has is not computed again."""

    def __init__(self, decoder: TorchDecoder, resting: RestingRows) -> None:
        self._decoder = decoder
        self._resting = resting
        self._repeated = WeakValueDictionary[tuple[str, bytes], PendingGroup]()

    def share_group(self, row: ResponseRow) -> None:
        """Put ``row``, which begins to wait, into the group that has its repeated prompt."""
        if row.request.is_repeated:
            key = (row.request.adapters, row.group.ids.cpu().numpy().tobytes())
            group = self._repeated.setdefault(key, row.group)
            if group is not row.group:
                group.waiting += 1
                row.group = group

    def take_prompt(self, row: ResponseRow) -> bool:
        """Give the group of ``row`` the prompt of the row at rest that it continues, where it has
        none yet. Returns whether the group has all of it that the row needs."""
        group = row.group
        if group.prompt is None and (resting := self._resting.of(row)):
            resting.prompt.holders += 1
            group.prompt = resting.prompt
        return group.prompt is not None and (row.begun > 0 or group.logits is not None)

    def prefill(self, groups: Sequence[PendingGroup]) -> None:
        """Compute the prompts of ``groups``, each with its own adapters."""
        if not groups:
            return
        adapters = [group.request.adapters for group in groups]
        prompts, logits = self._decoder.prefill([group.ids for group in groups], adapters)
        for group, prompt, first in zip(groups, prompts, logits, strict=True):
            older = group.prompt
            group.prompt = prompt
            group.logits = first
            if older is not None:  # that of a row at rest, without logits
                self._decoder.release(older)
        if self._decoder.routing is not None:
            parts = self._decoder.routing.split([len(group.ids) for group in groups])
            for group, chosen in zip(groups, parts, strict=True):
                group.routing = chosen

    def join(self, row: ResponseRow) -> None:
        assert row.group.prompt is not None
        if resting := self._resting.of(row):
            shared = resting.shared(row)
            self._decoder.join(row.group.prompt, resting.copied, shared)
            row.cached_tokens += shared
        else:
            self._decoder.join(row.group.prompt)
        self._resting.drop(row)

    def logits(self, rows: Sequence[ResponseRow], first: int) -> list[torch.Tensor | Exception]:
        """Return what predicts the next token of each of ``rows`` from number ``first`` on,
        after its prompt or the tokens that it has, which are fed; or the error with which that
        fails."""
        begun = [n for n in range(first, len(rows)) if rows[n].begun]
        extended: dict[int, torch.Tensor | Exception] = {}
        lengths = [row.length for row in self._decoder.rows]
        try:
            if begun:
                extended = dict(zip(begun, self._extend(rows, begun), strict=True))
        except Exception as error:
            warn_of_one_by_one(error)
            for decoder_row, length in zip(self._decoder.rows, lengths, strict=True):
                decoder_row.length = length
            for number in begun:
                try:
                    extended[number] = self._extend(rows, [number])[0]
                except Exception as alone:
                    extended[number] = alone
        logits = list[torch.Tensor | Exception]()
        for number, row in enumerate(rows[first:], first):
            if number in extended:
                logits.append(extended[number])
                continue
            assert row.group.logits is not None
            logits.append(row.group.logits)
            if row.group.routing is not None:
                row.take_routing(row.group.routing)
        return logits

    def _extend(self, rows: Sequence[ResponseRow], numbers: Sequence[int]) -> torch.Tensor:
        """Feed the tokens that were not fed yet to those of ``rows`` with these ``numbers``."""
        begun = [rows[number] for number in numbers]
        tokens = [
            torch.tensor(row.tokens[self._decoder.rows[number].length :])
            for number, row in zip(numbers, begun, strict=True)
        ]
        logits = self._decoder.extend(numbers, tokens)
        if self._decoder.routing is not None:
            parts = self._decoder.routing.split([len(ids) for ids in tokens])
            for row, chosen in zip(begun, parts, strict=True):
                assert row.group.routing is not None
                row.take_routing(row.group.routing, chosen)
        return logits

    def leave(self, group: PendingGroup) -> None:
        """Count one row of ``group`` less that waits; without any the group releases its prompt."""
        group.waiting -= 1
        if not group.waiting:
            self.release_prompt(group)

    def release_prompt(self, group: PendingGroup) -> None:
        """Drop the prompt of ``group``, which rows that have started keep."""
        if group.prompt is not None:
            self._decoder.release(group.prompt)
        group.prompt = group.logits = None


def warn_of_one_by_one(error: Exception) -> None:
    log.warning("a step failed; each of its rows is computed alone", error=repr(error))
