"""Fixtures that the tests share: a real embedded index, and runs of their own on it."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings

from pipeline.data.arena import SHARED_VARIABLE, shared_memory_directory
from pipeline.index.client import Index
from pipeline.index.embedded import EmbeddedIndex
from tests import attacks, budget, forked, long
from tests.servers import REDIS, WITHOUT_REDIS, RedisServer

# A run of the suite says something about the code alone: the same examples each time, and none of
# earlier runs (a derandomized profile has no database). `make test-all` draws new ones, with
# `pytest --hypothesis-profile=explore`. How long an example takes is the machine's matter.
untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fixed", untimed, derandomize=True)
settings.register_profile("explore", untimed, derandomize=False)
settings.load_profile("fixed")


gc.disable()  # until all is collected: collections of garbage take a quarter of the time of imports


# Folders and files with tests that take long: real runs, services, kills. They come first, so that
# the last minutes of a run of the suite have short files, which all its processes share.
LONG = (
    *(
        "orchestration/cluster/",
        "orchestration/run/",
        "orchestration/service/",
        "api/cli/service/",
        "api/cli/",
        "api/test_",
    ),
    *(
        "api/dashboard/",
        "api/external/",
        "api/client/",
        "accelerator/",
        "compose/",
        "pages/",
        "benchmarks/",
        "stages/engines/torch/",
        "stages/training/",
    ),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--until",
        type=float,
        metavar="TIME",
        help="begin no test after this time, in seconds since the epoch, and say which were not run",
    )


def pytest_configure(config: pytest.Config) -> None:
    if (until := config.getoption("until")) is not None:
        config.pluginmanager.register(budget.Budget(until, must_run=config.getoption("lf")))


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    attacks.mark(items)
    long.mark(items)
    items.sort(key=lambda item: not item.nodeid.removeprefix("tests/").startswith(LONG))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for line in budget.summary(terminalreporter.stats):
        terminalreporter.line(line)
    if config.option.markexpr == "attack":
        terminalreporter.section("SECURITY.md")
        for line in attacks.summary(terminalreporter.stats):
            terminalreporter.line(line)


def pytest_collection_finish() -> None:
    gc.freeze()  # later collections leave out what the imports have made
    gc.enable()


@pytest.fixture(scope="session")
def shared_memory() -> Iterator[dict[str, str]]:
    """Shared memory of this session alone, empty at its end; filled with the module after which
    each entry was there."""
    home = Path(tempfile.mkdtemp(prefix="asyncdock-tests-", dir=shared_memory_directory()))
    home.chmod(0o1777)  # as /dev/shm: tests start processes of other users
    os.environ[SHARED_VARIABLE] = str(home)
    appeared: dict[str, str] = {}
    yield appeared
    deadline = time.monotonic() + 20
    while (names := [path.name for path in home.iterdir()]) and time.monotonic() < deadline:
        time.sleep(0.05)  # a killed process is about to end; nothing announces it
    os.environ.pop(SHARED_VARIABLE)
    shutil.rmtree(home)
    assert not names, (
        f"left in shared memory: "
        f"{ {name: appeared.get(name, 'the last module') for name in names} }"
    )


@pytest.fixture(scope="module", autouse=True)
def shared_memory_of_module(
    shared_memory: dict[str, str], request: pytest.FixtureRequest
) -> Iterator[None]:
    yield
    for path in shared_memory_directory().iterdir():
        shared_memory.setdefault(path.name, request.node.name)


@pytest.fixture(autouse=True, scope="session")
def state_home(shared_memory: dict[str, str]) -> Iterator[None]:
    """Commands that the tests start write their error logs to a temporary folder, not to the home
    of the user."""
    with (
        tempfile.TemporaryDirectory(prefix="asyncdock-state-") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("XDG_STATE_HOME", folder)
        forked.environment.update(os.environ)
        yield


LOGS = structlog.get_config()


@pytest.fixture(autouse=True)
def umask_as_it_was() -> Iterator[None]:
    """A command that a test runs in this process makes later files private for this test alone."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


@pytest.fixture(autouse=True)
def logs_as_they_were() -> Iterator[None]:
    """A command that a test, or a fixture of its file, runs in this process sends logs to what pytest
    captures then alone."""
    structlog.configure(**LOGS)
    asyncio_log = logging.getLogger("asyncio")
    handlers = asyncio_log.handlers
    propagate = asyncio_log.propagate
    yield
    structlog.configure(**LOGS)
    asyncio_log.handlers = handlers
    asyncio_log.propagate = propagate


@pytest.fixture(scope="session", params=["valkey", "redis"])
def index_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """Whatever uses an index is run on both servers: the embedded Valkey, and Redis with a
    password."""
    with tempfile.TemporaryDirectory(prefix="adk-") as home:
        if request.param == "valkey":
            with EmbeddedIndex(Path(home)) as server:
                yield server.url
            return
        if REDIS is None:
            pytest.skip(WITHOUT_REDIS)
        redis = RedisServer(Path(home), password="tests-only")
        redis.start()
        yield redis.url
        redis.stop()


@pytest.fixture
async def index(index_url: str) -> AsyncIterator[Index]:
    index = Index(index_url, uuid.uuid4().hex[:8])
    yield index
    await index.erase()
    await index.close()
