"""Bytes that ranks send in a step, counted, against the formula."""

from __future__ import annotations

import pytest

from benchmarks.training import parallel


def test_formulas_give_the_bytes_that_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "PRODUCTS", [p for p in parallel.PRODUCTS if len(p) > 1])
    found = parallel.measure([4], 64)
    assert len(found) >= 8
    for cell in found:
        assert cell["counted"] == pytest.approx(sum(cell["formula"].values()), rel=0.02), cell[
            "product"
        ]
        assert min(cell["formula"].values()) > 1e5
