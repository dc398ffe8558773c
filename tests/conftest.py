"""What the tests share: a real embedded index, and runs of their own on it."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from pipeline.embedded import EmbeddedIndex
from pipeline.index import Index

# A run of the suite says something about the code alone: the same examples each time. New ones are looked for with
# `pytest --hypothesis-profile=explore`.
settings.register_profile("fixed", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile("fixed")


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
