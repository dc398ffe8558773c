"""The service from Python: :class:`Client` for asyncio, :class:`SyncClient` for everything else,
notebooks included.

    Client.submit ──▶ Transport.send ──▶ one answer ──▶ a model of api.schemas.runs
    Client.events ──▶ stream after Last-Event-ID ──▶ complete events, each once ──▶ the caller
                        ▲   ├─▶ "end" ──▶ return
                        └───┴─▶ connection lost, silent, or "dropped" ──▶ wait as between attempts

A submission carries an Idempotency-Key: when its answer is lost, it can be repeated and still
starts one run. An event's id is its position in the run's stream. The client asks for the events
after the last one that it yielded, and skips those before it, so that none is lost and none comes
twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import threading
import time
import uuid
import weakref
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, Concatenate, ParamSpec, Self, TypeVar
from urllib.parse import quote

from anyio.from_thread import start_blocking_portal
from pydantic import BaseModel, ValidationError

from api.client.credentials import DEFAULT_SERVER
from api.client.errors import NotFound, ServiceError, Unreachable
from api.client.transport import Answer, Message, OnRetry, Retries, Transport
from api.schemas.login import LinkView
from api.schemas.runs import (
    CheckedRecipe,
    CheckpointsView,
    CheckpointView,
    MetricsView,
    RecipeSummary,
    RecipesView,
    RunPage,
    RunView,
    ScaledRun,
    StagesView,
    StoredRecipe,
    WaitingView,
    WhatIfView,
)
from api.schemas.samples import SamplePage, SampleView
from pipeline.data.events import ENDED, Event, order

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
PageT = TypeVar("PageT", RunPage, SamplePage)
P = ParamSpec("P")

HEALTHY = 10.0  # seconds that a stream must last for its loss to count as a first failure
CANCEL_SECONDS = 5.0  # in which a call that is interrupted ends
PAGE = 100  # entries per request where a method reads pages


class RunEvent(Event):
    """One entry of a run's event stream; ``events(after=id)`` continues behind it."""


class Client(Transport):
    """An AsyncDock service. Arguments as for :class:`Transport`.

    Calls raise :class:`ApiProblem` and its kinds, :class:`Unreachable` and :class:`NotAsyncDock`.
    Close a client, or use it as ``async with Client(...) as client``.
    """

    # --- recipes

    async def recipes(self) -> list[RecipeSummary]:
        """Return the recipes that the service can run by name."""
        return (await self._get(RecipesView, "/v1/recipes")).recipes

    async def recipe(self, name: str) -> StoredRecipe:
        """Return one recipe of the service."""
        return await self._get(StoredRecipe, f"/v1/recipes/{_part('recipe', name)}")

    async def check(
        self, recipe: str | Mapping[str, Any], overrides: Mapping[str, Any] | None = None
    ) -> CheckedRecipe:
        """Return what a run of ``recipe`` (as for :meth:`submit`) would be, or all of its errors.

        Starts nothing.
        """
        return await self._post(CheckedRecipe, "/v1/recipes/check", submission(recipe, overrides))

    async def login_link(self) -> LinkView:
        """Return a code that signs a browser in once, with what this client's token may:
        ``SERVER/#login=CODE``."""
        return await self._post(LinkView, "/v1/login/links")

    # --- runs

    async def submit(
        self,
        recipe: str | Mapping[str, Any],
        overrides: Mapping[str, Any] | None = None,
        *,
        key: str | None = None,
    ) -> RunView:
        """Start a run of ``recipe``: the name of one that the service has, or its tables.

        ``overrides`` by dotted key, as ``{"train.steps": 10}``. Repeating a submission with the
        same ``key`` returns the run that the first one started.
        """
        headers = {"Idempotency-Key": key or uuid.uuid4().hex}
        return await self._post(RunView, "/v1/runs", submission(recipe, overrides), headers)

    async def fork(
        self, run: str, overrides: Mapping[str, Any] | None = None, *, version: int | None = None
    ) -> RunView:
        """Start a new run of the recipe of ``run``, with ``overrides``, that begins with the
        weights of its checkpoint of ``version``: the newest by default, 0 for those that it began
        with."""
        body = {"run": run, "version": version, "overrides": dict(overrides or {})}
        return await self._post(RunView, "/v1/runs", body, {"Idempotency-Key": uuid.uuid4().hex})

    async def runs(
        self, *, state: str = "", name: str = "", owner: str = "", limit: int | None = None
    ) -> AsyncGenerator[RunView]:
        """Yield runs, newest first, at most ``limit``; read a page when it is needed.

        An empty filter matches every run.
        """
        query = {"state": state, "name": name, "owner": owner}
        async for page in self._pages(RunPage, "/v1/runs", query, limit):
            for run in page.runs:
                yield run

    async def run(self, run: str) -> RunView:
        """Return one run, as it is now."""
        return await self._get(RunView, self._run(run))

    async def pause(self, run: str) -> RunView:
        """Ask that no more samples begin; those in flight are completed.

        Does nothing to a paused run.
        """
        return await self._post(RunView, self._run(run, "pause"))

    async def resume(
        self,
        run: str,
        overrides: Mapping[str, Any] | None = None,
        *,
        start_version: int | None = None,
    ) -> RunView:
        """Let a paused run continue, or an ended one from its newest checkpoint, by way of the
        queue. ``overrides``, by dotted key, change the recipe of an ended one for good.
        ``start_version``: of the checkpoint to go on from; newer ones are set aside."""
        body: dict[str, Any] = {"overrides": dict(overrides)} if overrides else {}
        if start_version is not None:
            body["start_version"] = start_version
        return await self._post(RunView, self._run(run, "resume"), body or None)

    async def stop(self, run: str) -> RunView:
        """Ask for a clean end, with a checkpoint.

        A run that still waits in the queue stops at once.
        """
        return await self._post(RunView, self._run(run, "stop"))

    async def checkpoint(self, run: str) -> RunView:
        """Ask for a checkpoint after the next step."""
        return await self._post(RunView, self._run(run, "checkpoint"))

    async def scale(self, run: str, rollout: int) -> ScaledRun:
        """Ask for ``rollout`` rollout workers.

        Returns at once: they start and leave while the run goes on.
        """
        return await self._post(ScaledRun, self._run(run, "scale"), {"rollout": rollout})

    async def what_if(self, run: str, overrides: Mapping[str, object]) -> WhatIfView:
        """Simulate the run with its own measured costs, as it is and with ``overrides`` of its
        recipe (dotted keys)."""
        return await self._post(
            WhatIfView, self._run(run, "what-if"), {"overrides": dict(overrides)}
        )

    async def label(
        self, run: str, *, tags: Sequence[str] | None = None, notes: str | None = None
    ) -> RunView:
        """Give the run all of these ``tags`` and these ``notes``; None: as they are."""
        labels = {"tags": None if tags is None else [*tags], "notes": notes}
        body = {name: value for name, value in labels.items() if value is not None}
        path = self._run(run)
        return self._read(RunView, path, await self.send_json("PATCH", path, body))

    async def delete(self, run: str) -> None:
        """Remove an ended run, its data and its files."""
        # Raises NotFound. Below, NotFound means that an earlier attempt removed the run and its
        # answer was lost.
        await self.run(run)
        with contextlib.suppress(NotFound):
            await self.send("DELETE", self._run(run))

    # --- of one run

    async def stages(self, run: str) -> StagesView:
        """Return queues, workers, leases and the ledger, as they are now."""
        return await self._get(StagesView, self._run(run, "stages"))

    async def waiting(self, run: str) -> WaitingView:
        """Return what the run waits for now: who waits for whom, for how long, and which bound ends
        it."""
        return await self._get(WaitingView, self._run(run, "waiting"))

    async def samples(
        self, run: str, *, limit: int | None = None, **filters: Any
    ) -> AsyncGenerator[SampleView]:
        """Yield trained samples that match the filters, at most ``limit``; read a page when it is
        needed. ``filters``: the fields of SampleFilter in api.schemas.samples, as ``step=3`` or
        ``where="length>400"``; and ``best`` and ``worst``, as for :meth:`sample_pages`."""
        async for page in self.sample_pages(run, limit=limit, **filters):
            for sample in page.samples:
                yield sample

    async def sample_pages(
        self, run: str, *, limit: int | None = None, **filters: Any
    ) -> AsyncGenerator[SamplePage]:
        """Yield pages of samples as :meth:`samples` does, with how far each has looked.

        With ``best`` or ``worst``, numbers of samples by reward, there is one page, of the newest
        steps.
        """
        async for page in self._pages(SamplePage, self._run(run, "samples"), filters, limit):
            yield page
            if filters.get("best") or filters.get("worst"):
                return

    async def checkpoints(self, run: str) -> list[CheckpointView]:
        """Return the checkpoints that the run has written and still has."""
        return (await self._get(CheckpointsView, self._run(run, "checkpoints"))).checkpoints

    async def logs(self, run: str, *, worker: str = "", lines: int = 200) -> str:
        """Return the last ``lines`` lines, of one worker or of all."""
        answer = await self.send("GET", self._run(run, "logs"), {"worker": worker, "lines": lines})
        return answer.body.decode(errors="replace")

    async def metrics(
        self,
        run: str,
        *,
        from_: float | None = None,
        to: float | None = None,
        every: float | None = None,
        names: Sequence[str] = (),
    ) -> MetricsView:
        """Return the history between two times (Unix seconds), one point per ``every`` seconds;
        ``names`` of series and numbers, as ``step.reward_mean``."""
        query = {"from": from_, "to": to, "every": every, "names": ",".join(names)}
        return await self._get(MetricsView, self._run(run, "metrics"), query)

    async def trace(self, run: str) -> dict[str, Any]:
        """Return a Chrome trace of the spans of every stage, for Perfetto or chrome://tracing."""
        answer = await self.send("GET", self._run(run, "trace"))
        try:
            return dict(json.loads(answer.body))
        except ValueError:
            raise self.not_understood(self._run(run, "trace"), "it is not JSON") from None

    async def events(
        self, run: str, *, after: str = "", kinds: Sequence[str] = ()
    ) -> AsyncGenerator[RunEvent]:
        """Yield every event of ``run`` after the id ``after`` (from the beginning by default) as it
        comes, up to the run's last event. No event is lost and none comes twice, also when
        connections are lost. ``kinds`` as ``("step",)``.

        Iterate to the end, or in ``contextlib.aclosing``, which closes the connection when you
        leave the loop."""
        path = self._run(run, "metrics/stream")
        query = {"kinds": ",".join(kinds)}
        retries = Retries(self.patience, self.on_retry)
        while True:
            opened: float | None = None
            try:
                async with contextlib.aclosing(self.stream(path, query, after)) as messages:
                    async for message in messages:
                        opened = opened or time.monotonic()
                        position = self._position(path, message.id)
                        if message.event == "end":
                            return
                        if message.event == "dropped":
                            raise Unreachable(
                                self.server, f"it dropped the stream ({message.data})"
                            )
                        if position <= self._position(path, after):
                            continue
                        after = message.id
                        # without data: a heartbeat, with the position up to which nothing matches
                        if message.data:
                            retries.restart()
                            yield self._event(path, message)
                raise Unreachable(self.server, "the stream ended too early")
            except ServiceError as error:
                failure = error
            if opened is not None and time.monotonic() - opened > HEALTHY:
                retries.restart()
            await retries.wait(failure)

    async def wait_until_ended(self, run: str, timeout: float | None = None) -> RunView:
        """Return the run once it is finished, stopped or failed.

        Raises TimeoutError after ``timeout`` seconds.
        """
        async with asyncio.timeout(timeout):
            after = ""
            while True:
                view = await self.run(run)
                if view.state in ENDED:
                    return view
                async with contextlib.aclosing(
                    self.events(run, after=after, kinds=("state",))
                ) as events:
                    async for event in events:
                        after = event.id

    # --- requests

    def _run(self, run: str, subject: str = "") -> str:
        return f"/v1/runs/{_part('run', run)}" + (f"/{subject}" if subject else "")

    async def _get(self, model: type[M], path: str, query: Mapping[str, Any] | None = None) -> M:
        return self._read(model, path, await self.send("GET", path, query))

    async def _post(
        self, model: type[M], path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> M:
        sending = (
            self.send("POST", path) if body is None else self.send_json("POST", path, body, headers)
        )
        return self._read(model, path, await sending)

    async def _pages(
        self, model: type[PageT], path: str, query: Mapping[str, Any], limit: int | None
    ) -> AsyncGenerator[PageT]:
        """Yield pages of at most ``limit`` entries together.

        Some may have fewer than they were asked for.
        """
        remaining = limit
        after = ""
        while remaining is None or remaining > 0:
            size = PAGE if remaining is None else min(remaining, PAGE)
            page = await self._get(model, path, {**query, "limit": size, "after": after})
            yield page
            if not page.next:
                return
            entries = page.runs if isinstance(page, RunPage) else page.samples
            after = page.next
            remaining = None if remaining is None else remaining - len(entries)

    def _read(self, model: type[M], path: str, answer: Answer) -> M:
        try:
            return model.model_validate_json(answer.body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(str(part) for part in first["loc"])
            raise self.not_understood(
                path, f"{field}: {first['msg']}" if field else first["msg"]
            ) from None

    def _position(self, path: str, event_id: str) -> tuple[int, int]:
        try:
            return order(event_id)
        except ValueError:
            raise self.not_understood(path, f"{event_id!r} is not an event's id") from None

    def _event(self, path: str, message: Message) -> RunEvent:
        try:
            data = json.loads(message.data)
            return RunEvent(message.id, float(data.pop("time")), message.event, data)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise self.not_understood(path, f"not an event: {message!r:.200}") from None


def submission(
    recipe: str | Mapping[str, Any], overrides: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the body of a submission or a check."""
    body: dict[str, Any] = (
        {"recipe_name": recipe} if isinstance(recipe, str) else {"recipe": dict(recipe)}
    )
    return body | ({"overrides": dict(overrides)} if overrides else {})


def _part(name: str, value: str) -> str:
    """Return ``value`` as one part of a path."""
    if not value or value in (".", ".."):
        raise ValueError(f"{name} = {value!r}: names nothing")
    return quote(value, safe="")


# --------------------------------------------------------------------------------------------------
# Without asyncio


def _blocking(
    method: Callable[Concatenate[Client, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncClient, P], T]:
    """Return a plain method that runs ``method`` in the client's thread."""

    @functools.wraps(method)
    def call(self: SyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._call(functools.partial(method, self._client, *args, **kwargs))

    return call


def _iterating(
    method: Callable[Concatenate[Client, P], AsyncGenerator[T]],
) -> Callable[Concatenate[SyncClient, P], Iterator[T]]:
    """Return a plain method that iterates over ``method`` in the client's thread."""

    @functools.wraps(method)
    def iterate(self: SyncClient, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        items = method(self._client, *args, **kwargs)
        end: Any = object()
        try:
            while (item := self._call(functools.partial(anext, items, end))) is not end:
                yield item
        finally:
            if self._close.alive:
                self._call(items.aclose)

    return iterate


class SyncClient:
    """:class:`Client` with plain calls: the same methods, and iterators where it has async ones.

    Its event loop runs in a thread of its own, so it works where another loop runs already, as in a
    notebook, and from several threads at once. Close it, or use it as ``with SyncClient(...) as
    client``.
    """

    def __init__(
        self,
        server: str = DEFAULT_SERVER,
        token: str | None = None,
        *,
        timeout: float = 30.0,
        patience: float = 60.0,
        on_retry: OnRetry | None = None,
    ) -> None:
        self._open(Client(server, token, timeout=timeout, patience=patience, on_retry=on_retry))

    def _open(self, opening: contextlib.AbstractAsyncContextManager[Client]) -> None:
        """Begin the thread, and use the client that ``opening`` gives in it."""
        with contextlib.ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal(name="asyncdock-client"))
            self._client = stack.enter_context(self._portal.wrap_async_context_manager(opening))
            # A client that is not closed is closed with its last reference, or before the
            # interpreter ends.
            self._close = weakref.finalize(self, stack.pop_all().close)

    @property
    def server(self) -> str:
        return self._client.server

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.server!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the thread."""
        self._close()

    recipes = _blocking(Client.recipes)
    recipe = _blocking(Client.recipe)
    check = _blocking(Client.check)
    login_link = _blocking(Client.login_link)
    submit = _blocking(Client.submit)
    fork = _blocking(Client.fork)
    runs = _iterating(Client.runs)
    run = _blocking(Client.run)
    pause = _blocking(Client.pause)
    resume = _blocking(Client.resume)
    stop = _blocking(Client.stop)
    checkpoint = _blocking(Client.checkpoint)
    scale = _blocking(Client.scale)
    what_if = _blocking(Client.what_if)
    label = _blocking(Client.label)
    delete = _blocking(Client.delete)
    stages = _blocking(Client.stages)
    waiting = _blocking(Client.waiting)
    samples = _iterating(Client.samples)
    sample_pages = _iterating(Client.sample_pages)
    checkpoints = _blocking(Client.checkpoints)
    logs = _blocking(Client.logs)
    metrics = _blocking(Client.metrics)
    trace = _blocking(Client.trace)
    events = _iterating(Client.events)
    wait_until_ended = _blocking(Client.wait_until_ended)

    def _call(self, work: Callable[[], Awaitable[T]]) -> T:
        if not self._close.alive:
            raise RuntimeError("this client is closed; make a new one")
        begun = list[Callable[[], object]]()  # what cancels the call
        ended = threading.Event()

        async def working() -> T:
            cancel = asyncio.current_task().cancel  # type: ignore[union-attr]
            begun.append(functools.partial(asyncio.get_running_loop().call_soon_threadsafe, cancel))
            try:
                return await work()
            finally:
                ended.set()

        try:
            return self._portal.start_task_soon(working).result()
        except Exception:
            raise
        except BaseException:  # such as Ctrl-C: the call must not continue unseen
            with contextlib.suppress(RuntimeError):  # the client was closed meanwhile
                self._portal.call(lambda: None)  # then it has begun, if it was being started
            for cancel in begun:
                cancel()
                ended.wait(CANCEL_SECONDS)
            raise
