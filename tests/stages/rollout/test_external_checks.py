"""Versions that external programs send of the tokens of their responses."""

from __future__ import annotations

import pytest
import torch

from pipeline.data.columns import Packed, offsets_of
from stages.rollout.external_checks import Misfit, Terms, check_responses

TERMS = Terms(vocabulary=40, sampling={"max_tokens": 8}, seed=0, rewards=1)


def ragged(rows: list[list[float]], dtype: torch.dtype) -> Packed:
    values = torch.tensor([value for row in rows for value in row], dtype=dtype)
    return Packed(values, offsets_of([len(row) for row in rows]))


def test_a_program_may_not_send_tokens_that_no_policy_has_generated() -> None:
    """An observation has version -1; a program that has no environment of the run has none."""
    columns = {
        "response_ids": ragged([[1, 2, 3], [4, 5]], torch.int64),
        "rollout_logprobs": ragged([[-1.0, 0.0, -1.0], [-1.0, -1.0]], torch.float32),
        "versions": ragged([[3, 1, 2, 2], [3, 2]], torch.int64),
        "truncated": torch.zeros(2, dtype=torch.bool),
    }
    assert check_responses(columns, TERMS, 3) == [(2, 3), (3, 2)]
    columns["versions"] = ragged([[3, 1, -1, 1, 3, 1], [3, 2]], torch.int64)
    for parked in (False, True):
        with pytest.raises(Misfit, match=r"versions.*row 0 names versions -1 to 3.*0 \.\. 3"):
            check_responses(columns, TERMS, 3, parked=parked)
