"""The rollout stage of a run whose prompts bring their responses: supervised fine-tuning,
preference pairs.

whole groups ─▶ the prompt's responses, one for each place ─▶ response_ids, loss_mask; of several, reward: 1 for the first,
                                                           │  … 0 for the last
                                                           └▶ dropped: what is left of a group teaches nothing
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from tensordict import TensorDict

from pipeline.index.client import Claim
from pipeline.warehouse.dock import Dock
from pipeline.worker.controller import Stage
from pipeline.worker.outputs import Output, Written
from stages.flow.catalogue import EMPTY, GIVEN, MASK, Truncated
from stages.flow.declarations import Drop, Result
from stages.flow.groups import GROUPS_AT_ONCE, groups_of, outputs_of

if TYPE_CHECKING:
    from stages.flow.drop_alarm import DropAlarm


class GivenResponses(Stage):
    """Each prompt has ``count`` responses (:attr:`stages.prompts.formatter.Prompt.responses`), the
    best first, one for each place of its group. The assistant's turns of each are trained. One of
    more than ``longest`` tokens is cut, and counts as truncated: it is trained, or with
    ``truncated`` "mask" or "drop" left out, and with it its group where the loss compares whole
    groups (``unit``). ``alarm`` watches that not all groups are dropped."""

    name = "rollout"
    fetches: tuple[str, ...] = (GIVEN,)

    def __init__(
        self,
        dock: Dock,
        count: int,
        longest: int,
        truncated: Truncated = "train",
        unit: Literal["row", "group"] = "row",
        alarm: DropAlarm | None = None,
    ) -> None:
        self.dock = dock
        self.count = count
        self.longest = longest
        self.truncated = truncated
        self.unit = unit
        self._alarm = alarm

    def room(self, held: int) -> int:
        return 0 if held else GROUPS_AT_ONCE

    async def process(self, claim: Claim, rows: TensorDict) -> AsyncGenerator[Output, None]:
        version = (await self.dock.index.status()).published
        places = claim.place.tolist()
        responses = [
            json.loads(text)[place] for text, place in zip(rows[GIVEN], places, strict=True)
        ]
        members = groups_of(claim.group.tolist())
        tokens = [min(len(each["ids"]), self.longest) for each in responses]
        results = [
            self._group([responses[row] for row in at], [places[row] for row in at], version)
            for at in members
        ]
        if self._alarm is not None:
            await self._alarm.add(results)
        for output in outputs_of(members, results, tokens):
            if isinstance(output, Written):
                generated = [(version, tokens[row]) for row in output.positions]
                output = replace(output, generated=generated)
            yield output

    def _group(
        self, given: Sequence[dict[str, Any]], places: Sequence[int], version: int
    ) -> Result:
        """Return the columns of one group, or the reason for which it is dropped."""
        ids = [torch.tensor(each["ids"][: self.longest]) for each in given]
        truncated = torch.tensor([len(each["ids"]) > self.longest for each in given])
        masks = [_mask(len(row), each["spans"]) for row, each in zip(ids, given, strict=True)]
        if self.truncated != "train":
            masks = [mask & ~cut for mask, cut in zip(masks, truncated, strict=True)]
        trained = [bool(mask.any()) for mask in masks]
        if not any(trained) or (self.unit == "group" and not all(trained)):
            return Drop(
                "truncated" if self.truncated != "train" and bool(truncated.any()) else EMPTY
            )
        columns: dict[str, Any] = {
            "response_ids": ids,
            "versions": [torch.tensor([version, len(row)]) for row in ids],
            "truncated": truncated,
            MASK: masks,
        }
        if (last := self.count - 1) > 0:
            columns["reward"] = torch.tensor([1 - place / last for place in places])
        return columns


def _mask(length: int, spans: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return bool [length]: the tokens in one of ``spans``."""
    mask = torch.zeros(length, dtype=torch.bool)
    for begin, end in spans:
        mask[begin:end] = True
    return mask
