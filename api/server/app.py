"""``asyncdock serve``: the REST service.

    listen ──▶ problems ──▶ admission (Host, Origin, rate) ──▶ operation: token, validation, handler ──▶ registry, index
    stop ──▶ new connections are refused ──▶ streams say that it closes, and end ──▶ connections are closed; runs go on

One server for one data directory: a lock on it is held for as long as the process lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import gc
import importlib.metadata
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import structlog
from aiohttp import web

from api.server.access.connections import Connections, admit_connection, raise_descriptor_limit
from api.server.access.limits import admission, secure
from api.server.access.tokens import Tokens
from api.server.operations import build_routes
from api.server.problems import problems
from api.server.recipe_checks import Checks
from api.server.routes import dashboard, external, metrics, recipes, runs, samples
from api.server.routes import service as service_routes
from api.server.routes.metrics import watch
from api.server.service import DOCUMENT, INDEX_SECONDS, SERVICE, Service, Settings
from orchestration.logs import limit_repeats
from orchestration.private_files import private_folder, read_by_others
from orchestration.service.agent import Agent, AgentError
from orchestration.service.index_server import ServiceIndex
from orchestration.service.registry import Registry
from pipeline.locks import Locked, locked

log = structlog.get_logger()

# Every module with operations, in the order in which they are told.
ROUTES = (
    runs,
    recipes,
    samples,
    external,
    metrics,
    service_routes,
    dashboard,
)
GC_THRESHOLD = (5_000, 2, 20)  # objects; searches of the youngest; searches of the younger ones
CLOSING_SECONDS = 5.0  # for requests that are under way when the server goes down
LOCK = "server.lock"


class ServeError(RuntimeError):
    """The server cannot start; the message says why and what to do."""


def build_app(settings: Settings, url: str, registry: Registry, checks: Checks | None = None) -> web.Application:
    """The application over the index at ``url``. It closes what it opens, and neither ``registry`` nor ``checks``."""
    app = web.Application(middlewares=[problems, admit_connection, admission(settings)])
    service = Service(settings, url, registry, Tokens(registry.link), checks)
    app[SERVICE] = service
    watch(app)
    document: Callable[[], dict[str, Any]] = functools.cache(functools.partial(_document, settings.tokens_needed))
    app[DOCUMENT] = document
    build_routes(app, ROUTES)
    app.on_response_prepare.append(secure)
    app.on_shutdown.append(_closing)
    app.cleanup_ctx.append(_service)
    return app


def _document(tokens: bool) -> dict[str, Any]:
    from api.server.openapi import (
        openapi_document,  # what it imports would be a fifth of a server's start, and few ask for it
    )

    return openapi_document(ROUTES, version=importlib.metadata.version("asyncdock"), tokens=tokens)


async def _closing(app: web.Application) -> None:
    app[SERVICE].closing.set()


async def _service(app: web.Application) -> AsyncIterator[None]:
    service = app[SERVICE]
    beside = [asyncio.create_task(service.close_idle()), asyncio.create_task(service.sessions.watch())]
    yield
    for task in beside:
        task.cancel()
    await asyncio.gather(*beside, return_exceptions=True)
    await service.close()


async def listen(app: web.Application, settings: Settings) -> tuple[web.AppRunner, str]:
    """Open the port. Returns what to clean up at the end, and the URL. Raises ServeError when the port is taken."""
    tls = _tls(settings)
    runner = web.AppRunner(app, shutdown_timeout=CLOSING_SECONDS)
    await runner.setup()
    try:
        site = Connections(runner, settings, tls)
        await site.start()
    except ValueError as error:
        await runner.cleanup()
        raise ServeError(str(error)) from None
    except OSError as error:
        await runner.cleanup()
        where = f"{settings.host}:{settings.port}"
        if error.errno == errno.EADDRINUSE:
            raise ServeError(f"listen: {where} is taken by another program; give another one with --listen") from None
        raise ServeError(f"listen: {where} cannot be used ({error.strerror or error}); give another one") from None
    host, port = site.sockets[0].getsockname()[:2]
    name = f"[{host}]" if ":" in host else host
    return runner, f"{'https' if settings.tls_certificate else 'http'}://{name}:{port}"


def _tls(settings: Settings) -> ssl.SSLContext | None:
    if settings.tls_certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.tls_certificate, settings.tls_key)
    except OSError as error:
        raise ServeError(
            f"tls: {settings.tls_certificate} cannot be used ({error}); give a PEM file and its key"
        ) from None
    return context


@contextlib.contextmanager
def only_server(data: Path) -> Iterator[None]:
    """Be the only server on ``data``; the lock goes with the process, however that ends. Raises ServeError."""
    with contextlib.ExitStack() as stack:
        try:
            private_folder(data)
            stack.enter_context(locked(data / LOCK))
        except Locked as held:
            raise ServeError(
                f"data: {data} is served by another server (process {held.process}); stop it, or give another --data"
            ) from None
        except (OSError, ValueError) as error:
            raise ServeError(str(error)) from None
        yield


async def serve(settings: Settings, stop: asyncio.Event, ready: Callable[[str], None]) -> None:
    """Serve until ``stop`` is set, with an agent for ``settings.runs`` runs at once; ``ready`` is told the URL. Raises
    ServeError."""
    limit_repeats()
    raise_descriptor_limit()
    with only_server(settings.data):
        index = None if settings.index else ServiceIndex(settings.data)
        url = await _reach(settings, index)
        registry = Registry(url, timeout=INDEX_SECONDS)
        beside: list[asyncio.Task[None]] = []
        try:
            app = build_app(settings, url, registry)
            runner, where = await listen(app, settings)
            try:
                if settings.runs:
                    agent = Agent(url, settings.data, settings.runs, index=index)
                    beside.append(asyncio.create_task(agent.run(stop)))
                elif index is not None:
                    beside.append(asyncio.create_task(index.keep()))
                await _warn(settings, url)
                app[SERVICE].checks.prepare()
                settle()
                ready(where)
                stopped = asyncio.create_task(stop.wait())
                done, _ = await asyncio.wait([stopped, *beside], return_when=asyncio.FIRST_COMPLETED)
                stopped.cancel()
                for task in done & set(beside):
                    task.result()
            except AgentError as error:
                raise ServeError(str(error)) from None
            finally:
                await runner.cleanup()
                for task in beside:
                    task.cancel()
                await asyncio.gather(*beside, return_exceptions=True)
        finally:
            if index is not None and not await registry.active():
                try:
                    await asyncio.to_thread(index.stop)  # nothing uses it until the next start
                except Locked as held:
                    log.warning("the index is left as it is", reason=str(held))
            await registry.close()


def settle() -> None:
    """In a process that is there to serve, once it can. What was imported and built is not searched for garbage any more,
    and what has lasted is searched seldom: with hundreds of readers, full searches, in which nobody is answered, made up
    the REST times' 99th percentile (benchmarks/api.py). What requests leave behind is young, and found as soon as before."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLD)


async def _reach(settings: Settings, index: ServiceIndex | None) -> str:
    """The URL of an index that answers."""
    try:
        url = settings.index or await asyncio.to_thread(index.start)  # type: ignore[union-attr]
        tokens = Tokens(url)
        try:
            await tokens.ping()
        finally:
            await tokens.close()
    except (OSError, RuntimeError, ValueError) as error:
        raise ServeError(f"index: {error}") from None
    return url


async def _warn(settings: Settings, url: str) -> None:
    """Say what an operator would want to know before others find it out."""
    if not settings.loopback and settings.tls_certificate is None:
        log.warning(
            "tokens travel in the clear; give --tls-certificate and --tls-key, or put a TLS proxy in front of it"
        )
    if settings.tls_key is not None and (open_to_all := read_by_others(settings.tls_key)):
        log.warning(f"tls_key: {open_to_all}")
    if settings.tokens_needed:
        tokens = Tokens(url)
        if not await tokens.list():
            log.warning("nobody can use it yet; make a token with `asyncdock token create NAME --scope admin`")
        await tokens.close()
