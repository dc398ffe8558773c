"""``asyncdock serve``: the REST service.

    listen ──▶ problems ──▶ admission (Host, Origin, rate) ──▶ operation: token, validation, handler ──▶ registry, index
    stop ──▶ new connections are refused ──▶ streams say that it closes, and end ──▶ connections are closed; runs go on

One server for one data directory: a lock on it is held for as long as the process lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import functools
import gc
import importlib.metadata
import logging
import os
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from api import (
    routes_dashboard,
    routes_external,
    routes_metrics,
    routes_recipes,
    routes_runs,
    routes_samples,
    routes_service,
)
from api.limits import admission, secure
from api.operations import build_routes
from api.problems import problems
from api.routes_metrics import watch
from api.service import DOCUMENT, INDEX_SECONDS, SERVICE, Service, Settings
from api.tokens import Tokens
from orchestration.agent import Agent, AgentError
from orchestration.registry import Registry
from orchestration.service_index import ServiceIndex

log = structlog.get_logger()

# Every module with operations, in the order in which they are told.
ROUTES = (
    routes_runs,
    routes_recipes,
    routes_samples,
    routes_external,
    routes_metrics,
    routes_service,
    routes_dashboard,
)
GC_THRESHOLD = (5_000, 2, 20)  # objects; searches of the youngest; searches of the younger ones
BACKLOG = 1024  # readers that come back all at once, after a restart; who finds no place asks again after a second
CLOSING_SECONDS = 5.0  # for requests that are under way when the server goes down
LOCK = "server.lock"


class ServeError(RuntimeError):
    """The server cannot start; the message says why and what to do."""


def build_app(settings: Settings, url: str, registry: Registry) -> web.Application:
    """The application over the index at ``url``. It closes what it opens, and not ``registry``."""
    app = web.Application(middlewares=[problems, admission(settings)])
    service = Service(settings, url, registry, Tokens(url))
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
    from api.openapi import openapi_document  # what it imports would be a fifth of a server's start, and few ask for it

    return openapi_document(ROUTES, version=importlib.metadata.version("asyncdock"), tokens=tokens)


async def _closing(app: web.Application) -> None:
    app[SERVICE].closing.set()


async def _service(app: web.Application) -> AsyncIterator[None]:
    service = app[SERVICE]
    tidying = asyncio.create_task(service.close_idle())
    yield
    tidying.cancel()
    await asyncio.gather(tidying, return_exceptions=True)
    await service.close()


async def listen(app: web.Application, settings: Settings) -> tuple[web.AppRunner, str]:
    """Open the port. Returns what to clean up at the end, and the URL. Raises ServeError when the port is taken."""
    runner = web.AppRunner(
        app,
        access_log=None,
        logger=_http_log(),
        keepalive_timeout=settings.idle_seconds,
        shutdown_timeout=CLOSING_SECONDS,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, settings.host, settings.port, ssl_context=_tls(settings), backlog=BACKLOG)
        await site.start()
    except OSError as error:
        await runner.cleanup()
        where = f"{settings.host}:{settings.port}"
        if error.errno == errno.EADDRINUSE:
            raise ServeError(f"listen: {where} is taken by another program; give another one with --listen") from None
        raise ServeError(f"listen: {where} cannot be used ({error.strerror or error}); give another one") from None
    host, port = runner.addresses[0][:2]
    name = f"[{host}]" if ":" in host else host
    return runner, f"{'https' if settings.tls_certificate else 'http'}://{name}:{port}"


def _http_log() -> logging.Logger:
    """aiohttp's own log, without requests that are no HTTP: it would show the header that it stumbled over, whose value may
    be a token."""
    found = logging.getLogger("asyncdock.http")
    found.filters[:] = [lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))]
    return found


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
    data.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(os.open(data / LOCK, os.O_CREAT | os.O_RDWR, 0o600), "r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = lock.read().strip() or "unknown"
            raise ServeError(
                f"data: {data} is served by another server (process {pid}); stop it, or give another --data"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


async def serve(settings: Settings, stop: asyncio.Event, ready: Callable[[str], None]) -> None:
    """Serve until ``stop`` is set, with an agent for ``settings.runs`` runs at once; ``ready`` is told the URL. Raises
    ServeError."""
    with only_server(settings.data):
        index = None if settings.index else ServiceIndex(settings.data)
        url = await _reach(settings, index)
        registry = Registry(url, timeout=INDEX_SECONDS)
        beside: list[asyncio.Task[None]] = []
        try:
            runner, where = await listen(build_app(settings, url, registry), settings)
            try:
                if settings.runs:
                    agent = Agent(url, settings.data, settings.runs, index=index)
                    beside.append(asyncio.create_task(agent.run(stop)))
                elif index is not None:
                    beside.append(asyncio.create_task(index.keep()))
                await _warn(settings, url)
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
                await asyncio.to_thread(index.stop)  # nobody needs it until the next start, which finds all of it
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
    if settings.tokens_needed:
        tokens = Tokens(url)
        if not await tokens.list():
            log.warning("nobody can use it yet; make a token with `asyncdock token create NAME --scope admin`")
        await tokens.close()
