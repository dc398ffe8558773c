"""One server is enough for what is about HTTP: the sample flow's own tests use an index on both."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.index.embedded import EmbeddedIndex


@pytest.fixture(scope="session")
def index_url() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="adk-") as home, EmbeddedIndex(Path(home)) as server:
        yield server.url
