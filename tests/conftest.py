"""What the tests share: a real embedded index, and runs of their own on it."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from pipeline.embedded import EmbeddedIndex
from pipeline.index import Index


@pytest.fixture(scope="session")
def index_url() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="adk-") as home, EmbeddedIndex(Path(home)) as server:
        yield server.url


@pytest.fixture
async def index(index_url: str) -> AsyncIterator[Index]:
    index = Index(index_url, uuid.uuid4().hex[:8])
    yield index
    await index.erase()
    await index.close()
