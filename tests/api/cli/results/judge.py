"""A stage that says what it thinks of a response, as a number and as a text, and masks its first
token."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from stages.flow import UserStage


class Judge(UserStage):
    needs: ClassVar = ("response_ids",)
    makes: ClassVar = {"row_weight": "float32", "loss_mask": "bool ragged", "verdict": "text"}

    def process(self, rows: Any) -> Any:
        lengths = [len(ids) for ids in rows["response_ids"]]
        return {
            "row_weight": torch.tensor([1.0 + (length % 2) for length in lengths]),
            "loss_mask": [torch.arange(length) > 0 for length in lengths],
            "verdict": ["odd" if length % 2 else "even" for length in lengths],
        }
