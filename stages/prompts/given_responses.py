"""The rollout stage of a run whose prompts bring their responses: supervised fine-tuning, preference pairs.

whole groups ─▶ the row's response columns, one for each place ─▶ response_ids; of several, reward: 1 for the first … 0
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence

import torch
from tensordict import TensorDict

from pipeline.controller import Output, Stage
from pipeline.index.client import Claim
from pipeline.warehouse.dock import Dock
from stages.flow.adapter import GROUPS_AT_ONCE
from stages.models import Tokenizer
from stages.prompts.templates import responses_in


class GivenResponses(Stage):
    """``columns`` name the responses of a row, the best first, one for each place of its group. Each ends with the
    tokenizer's end-of-sequence token; one of more than ``longest`` tokens is cut, and counts as truncated."""

    name = "rollout"
    fetches: tuple[str, ...] = ("fields",)

    def __init__(self, dock: Dock, tokenizer: Tokenizer, columns: Sequence[str], longest: int) -> None:
        self.dock, self.tokenizer, self.columns, self.longest = dock, tokenizer, columns, longest

    def room(self, held: int) -> int:
        return 0 if held else GROUPS_AT_ONCE

    async def process(self, claim: Claim, rows: TensorDict) -> AsyncGenerator[Output, None]:
        version = (await self.dock.index.status()).published
        places = claim.place.tolist()
        fields = list(rows["fields"])
        ids = [self._ids(json.loads(text), place) for text, place in zip(fields, places, strict=True)]
        kept = [tokens[: self.longest] for tokens in ids]
        made: dict[str, object] = {
            "response_ids": [torch.tensor(tokens) for tokens in kept],
            "versions": [torch.tensor([version, len(tokens)]) for tokens in kept],
            "truncated": torch.tensor([len(tokens) > self.longest for tokens in ids]),
        }
        if (last := len(self.columns) - 1) > 0:
            made["reward"] = torch.tensor([1 - place / last for place in places])
        yield Output(
            range(len(claim)),
            made,
            generated=[(version, len(tokens)) for tokens in kept],
            tokens=sum(map(len, kept)),
        )

    def _ids(self, fields: dict[str, object], place: int) -> list[int]:
        [text] = responses_in(fields, [self.columns[place]], "a row")
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [*ids, self.tokenizer.eos_token_id]
