"""Rows as bytes between a worker and the process of a stage: they come back as they were, and no
bytes do any harm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.flow.packed_rows import BadRows, packed_rows, unpacked_rows
from stages.flow.stage_calls import schema_of

ROWS = 3
SCHEMA = schema_of(
    {
        "ids": "int64 ragged",
        "mask": "bool ragged",
        "score": "float32",
        "pair": "bfloat16 [2]",
        "passed": "bool",
        "answer": "text",
    }
)


def columns() -> dict[str, Any]:
    return {
        "ids": [torch.tensor([1, 2, 3]), torch.tensor([], dtype=torch.int64), torch.tensor([4])],
        "mask": [
            torch.tensor([True, False, True]),
            torch.tensor([], dtype=torch.bool),
            torch.tensor([False]),
        ],
        "score": torch.tensor([0.5, float("nan"), -1.0]),
        "pair": torch.arange(6, dtype=torch.bfloat16).view(3, 2),
        "passed": torch.tensor([True, False, True]),
        "answer": ["a", "", "ß\0"],
    }


def assert_of_its_types(rows: dict[str, Any]) -> None:
    for column in SCHEMA.columns:
        values = rows[column.name]
        assert len(values) == ROWS
        if column.dtype == "utf8":
            assert all(isinstance(text, str) for text in values)
        elif column.shape is None:
            assert all(row.dtype == column.dtype and row.dim() == 1 for row in values)
        else:
            assert values.dtype == column.dtype
            assert tuple(values.shape) == (ROWS, *column.shape)


def test_rows_come_back_as_they_were() -> None:
    rows = unpacked_rows(SCHEMA, packed_rows(SCHEMA, columns()), ROWS)
    expected = columns()
    assert_of_its_types(rows)
    assert rows["answer"] == expected["answer"]
    for name in ("ids", "mask", "score", "pair", "passed"):
        for row, value in zip(rows[name], expected[name], strict=True):
            torch.testing.assert_close(row, value, rtol=0, atol=0, equal_nan=True)


@given(
    st.lists(
        st.tuples(st.integers(0, 1 << 20), st.binary(min_size=1, max_size=8)),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=300, deadline=None)
def test_other_bytes_are_refused_or_are_rows_of_these_types(
    changes: list[tuple[int, bytes]],
) -> None:
    data = packed_rows(SCHEMA, columns())
    for at, piece in changes:
        at %= len(data)
        data[at : at + len(piece)] = piece[: len(data) - at]
    try:
        rows = unpacked_rows(SCHEMA, data, ROWS)
    except BadRows:
        return
    assert_of_its_types(rows)


@given(st.binary(max_size=400))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(BadRows):
        unpacked_rows(SCHEMA, bytearray(data), ROWS)


@pytest.mark.parametrize("rows", [1, ROWS - 1, ROWS + 1])
def test_another_number_of_rows_is_refused(rows: int) -> None:
    with pytest.raises(BadRows, match=f"3 rows came for {rows}"):
        unpacked_rows(SCHEMA, packed_rows(SCHEMA, columns()), rows)


def test_a_column_that_is_missing_is_named() -> None:
    less = schema_of({"ids": "int64 ragged", "score": "float32"})
    data = packed_rows(less, {name: columns()[name] for name in ("ids", "score")})
    with pytest.raises(BadRows):
        unpacked_rows(SCHEMA, data, ROWS)


def test_a_bool_is_one_of_two() -> None:
    schema = schema_of({"passed": "bool"})
    data = packed_rows(schema, {"passed": torch.tensor([True])})
    data[data.rindex(1)] = 7
    with pytest.raises(BadRows, match="'passed' has bytes that are neither true nor false"):
        unpacked_rows(schema, data, 1)
