"""What the figures of docs/ were measured with: ``python -m benchmarks.ROOM.NAME``, in the
root of a clone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.compat.extras import ExtraMissing, extra


@contextmanager
def needs(name: str) -> Iterator[None]:
    """Import libraries of the extra ``name``.

    Where one is missing the command says what to install: exit code 2.
    """
    try:
        with extra(name):
            yield
    except ExtraMissing as missing:
        print(f"error: {missing}", file=sys.stderr)
        raise SystemExit(2) from missing
