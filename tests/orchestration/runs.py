"""Small real runs that the orchestration tests share."""

from __future__ import annotations

import asyncio
import atexit
import functools
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

from api.schemas.events import MODELS
from orchestration.history.lines import finite
from orchestration.processes.forkserver import ForkServer
from orchestration.recipe.loading.load import parse_recipe
from orchestration.recipe.schema import Recipe
from orchestration.run.execution import Execution, RunResult
from pipeline.data.events import Event
from tests.forked import fork_server, listen

TINY: dict[str, Any] = {
    "name": "tiny-test",
    "model": {"source": "tiny"},
    "prompts": {"source": "builtin", "task": "repeat", "max_prompt_tokens": 16, "held_out": 0.1},
    "rollout": {"max_rows": 32, "max_tokens": 4, "threads": 1},
    "reward": {"functions": [{"name": "spelling"}]},
    "algorithm": {"group_size": 4},
    "train": {"steps": 6, "groups_per_step": 4, "learning_rate": 3e-3, "threads": 1},
    "pipeline": {"staleness": 1, "arena": "16MiB"},
    "checkpoint": {"every": 3},
    "launch": {"launcher": "inline", "max_restarts": 6, "startup_timeout": 120.0},
}
MOCK: dict[str, Any] = {
    **TINY,
    "name": "mock-test",
    "model": {"source": "mock"},
    "rollout": {"engine": "mock", "max_rows": 32, "max_tokens": 32, "mock": {"time_scale": 0.02}},
    "train": {"engine": "mock", "steps": 6, "groups_per_step": 4, "mock": {"time_scale": 0.02}},
}


def recipe(base: dict[str, Any], **changes: Any) -> Recipe:
    """``base`` with ``section__key=value`` changes."""
    data = {name: dict(value) if isinstance(value, dict) else value for name, value in base.items()}
    for key, value in changes.items():
        section, _, name = key.partition("__")
        data.setdefault(section, {})[name] = value
    return parse_recipe(data)


class Watched:
    """A run being executed, with all of its events so far."""

    def __init__(self, run: Execution) -> None:
        self.run = run
        self.events = list[Event]()
        self.stop = asyncio.Event()
        self.changed = asyncio.Condition()

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event.data for event in self.events if event.kind == kind]

    async def until(self, condition: Callable[[], bool], timeout: float = 120) -> None:
        """Wait until ``condition`` holds after some event."""
        async with asyncio.timeout(timeout), self.changed:
            await self.changed.wait_for(condition)

    async def move(self, state: str, to: str) -> None:
        """Change the run's state, as a service does on request."""
        assert self.run.supervisor is not None
        await self.run.supervisor.index.transition([state], to)

    async def follow(self) -> None:
        async for event in self.run.events():
            async with self.changed:
                self.events.append(event)
                self.changed.notify_all()


def assert_documented(event: Event) -> None:
    """The event is as the REST contract describes it, with nothing in it that is not named there
    but a step's metrics."""
    model = MODELS[event.kind]
    data = {"time": event.time, **finite(event.data)}
    model.model_validate(data)
    assert event.kind == "step" or set(data) <= set(model.model_fields), (event.kind, data)


@functools.cache
def forks() -> ForkServer | None:
    """One fork server for all runs of this process that do not bring their own."""
    if sys.platform != "linux":
        return None
    listen()
    server = fork_server()
    atexit.register(server.close)
    return server


@asynccontextmanager
async def executing(
    run: Execution,
) -> AsyncGenerator[tuple[Watched, asyncio.Task[RunResult]], None]:
    watched = Watched(run)
    if run.recipe.launch.launcher == "process":
        run.forks = run.forks or forks()
    following = asyncio.create_task(watched.follow())
    work = asyncio.create_task(run.execute(watched.stop))
    try:
        yield watched, work
        await following
        for event in watched.events:
            assert_documented(event)
    finally:
        for task in (work, following):
            task.cancel()
        await asyncio.gather(work, following, return_exceptions=True)


async def complete(run: Execution) -> tuple[Watched, RunResult]:
    """Execute ``run`` to its end."""
    async with executing(run) as (watched, work):
        result = await work
    return watched, result
