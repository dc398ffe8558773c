"""``asyncdock serve``: the REST server as an aiohttp application, from its start to its end.

    listen ──▶ problems ──▶ admission (Host, Origin, rate) ──▶ operation: token, validation, handler ──▶ registry, index
    stop ──▶ new connections are refused ──▶ streams send a last message and end ──▶ connections close; runs go on

One server for one data folder: the process holds a lock on the folder as long as it lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import gc
import importlib.metadata
import os
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import structlog
from aiohttp import web

from api.server.access.connections import Connections, admit_connection, raise_descriptor_limit
from api.server.access.limits import admission, secure
from api.server.access.settings import Settings
from api.server.access.tokens import Token, Tokens
from api.server.http.problems import problems
from api.server.routes import (
    comparison,
    dashboard,
    external,
    logins,
    metrics,
    policies,
    recipes,
    runs,
    samples,
    sessions,
)
from api.server.routes import service as service_routes
from api.server.routes.metrics import watch
from api.server.service.openapi import openapi_document
from api.server.service.operations import build_routes
from api.server.service.recipe_checks import Checks
from api.server.service.service import DOCUMENT, INDEX_SECONDS, SERVICE, Service
from orchestration.logs import limit_repeats
from orchestration.private_files import private_folder, read_by_others
from orchestration.service.agent import Agent, AgentError
from orchestration.service.index_server import ServiceIndex
from orchestration.service.own_services import AUTHORIZATION, announced
from orchestration.state.registry import Registry
from pipeline.first_of import cancel_all, first_of
from pipeline.locks import Locked, locked

log = structlog.get_logger()

# In the order of the document.
ROUTES = (
    *(runs, comparison, recipes, samples, policies, external, sessions),
    *(metrics, logins, service_routes, dashboard),
)
GC_THRESHOLD = (5_000, 2, 20)  # objects; collections of the youngest generation; of the middle one
CLOSING_SECONDS = 5.0  # for open requests when the server closes
LOCK = "server.lock"


class ServeError(RuntimeError):
    """The server cannot start; the message has the reason and the fix."""


def build_app(
    settings: Settings, registry: Registry, checks: Checks | None = None
) -> web.Application:
    """Return the application over the index of ``registry``.

    The caller closes ``registry`` and ``checks``.
    """
    app = web.Application(middlewares=[problems, admit_connection, admission(settings)])
    app[SERVICE] = Service(settings, registry, checks)
    watch(app)
    comparison.prepare(app)
    version = importlib.metadata.version("asyncdock")
    document: Callable[[], dict[str, Any]] = functools.cache(
        functools.partial(openapi_document, ROUTES, version=version, tokens=settings.tokens_needed)
    )
    app[DOCUMENT] = document
    build_routes(app, ROUTES)
    app.on_response_prepare.append(secure)
    app.on_shutdown.append(_announce_closing)
    app.cleanup_ctx.append(_background_tasks)
    return app


async def _announce_closing(app: web.Application) -> None:
    app[SERVICE].closing.set()


async def _background_tasks(app: web.Application) -> AsyncIterator[None]:
    watching = asyncio.create_task(app[SERVICE].sessions.watch())
    giving_up = asyncio.create_task(app[SERVICE].give_up_events())
    yield
    await cancel_all(watching, giving_up)
    await app[SERVICE].close()


async def listen(app: web.Application, settings: Settings) -> tuple[web.AppRunner, str]:
    """Open the port.

    Returns the runner, which the caller cleans up, and the URL. Raises ServeError.
    """
    tls = _tls(settings)
    runner = web.AppRunner(app, shutdown_timeout=CLOSING_SECONDS)
    await runner.setup()
    address = f"{settings.host}:{settings.port}"
    try:
        site = Connections(runner, settings, tls)
        app[SERVICE].most_held = min(app[SERVICE].most_held, site.most * 3 // 4)
        await site.start()
    except (ValueError, OSError) as error:
        await runner.cleanup()
        if not isinstance(error, OSError):
            raise ServeError(str(error)) from None
        is_taken = error.errno == errno.EADDRINUSE
        reason = (
            ("is taken by another program")
            if is_taken
            else f"cannot be used ({error.strerror or error})"
        )
        raise ServeError(f"listen: {address} {reason}; give another one with --listen") from None
    host, port = site.sockets[0].getsockname()[:2]
    name = f"[{host}]" if ":" in host else host
    return runner, f"{'https' if tls else 'http'}://{name}:{port}"


def _tls(settings: Settings) -> ssl.SSLContext | None:
    if settings.tls_certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.tls_certificate, settings.tls_key)
    except OSError as error:
        reason = f"tls: {settings.tls_certificate} cannot be used ({error})"
        raise ServeError(f"{reason}; give a PEM file and its key") from None
    return context


@contextlib.contextmanager
def only_server(data: Path) -> Iterator[None]:
    """Hold the lock of the data folder; the kernel frees it when the process ends.

    Raises ServeError.
    """
    with contextlib.ExitStack() as stack:
        try:
            private_folder(data)
            stack.enter_context(locked(data / LOCK))
        except Locked as held:
            raise ServeError(
                f"data: {data} is served by another server (process {held.process}); stop it, or "
                f"give another --data"
            ) from None
        except OSError as error:
            raise ServeError(
                f"data: {data} cannot be used ({error}); give a folder that can be written, by "
                f"--data"
            ) from None
        except ValueError as error:
            raise ServeError(str(error)) from None
        yield


async def serve(
    settings: Settings,
    stop: asyncio.Event,
    ready: Callable[[str, str], None],
    extend: Callable[[web.Application, str], None] | None = None,
    registry_of: Callable[[str], Registry] | None = None,
) -> None:
    """Serve until ``stop`` is set, with an agent for ``settings.runs`` concurrent runs.

    Calls ``ready`` with the URL and the code of a login link ("": none). ``extend`` adds to the
    application, before it starts; it is given the URL of the index, too. ``registry_of`` an index
    has the runs; None: those of the service. Raises ServeError.
    """
    limit_repeats()
    raise_descriptor_limit()
    with only_server(settings.data):
        index = None if settings.index else ServiceIndex(settings.data)
        registry = await _connect(settings, index, registry_of)
        try:
            app = build_app(settings, registry)
            if extend is not None:
                extend(app, registry.link.url)
            own_token = await _own_token(settings, app[SERVICE].tokens)
            runner, url = await listen(app, settings)
            try:
                with announced(url, settings.data) if own_token else contextlib.nullcontext():
                    _warn(settings)
                    if settings.runs_of == "service":
                        app[SERVICE].checks.prepare()
                    if settings.runs_of != "folders":  # a view may be a part of another program
                        reduce_collections()
                    ready(
                        url,
                        app[SERVICE].logins.link(own_token, os.geteuid()) if own_token else "",
                    )
                    if settings.runs:
                        services = [
                            Agent(registry.link.url, settings.data, settings.runs, index=index).run(
                                stop
                            )
                        ]
                    else:
                        services = [] if index is None else [index.keep()]
                    await first_of(stop.wait(), *services)
            except AgentError as error:
                raise ServeError(str(error)) from None
            finally:
                await runner.cleanup()
        finally:
            if index is not None and not await registry.active():
                try:
                    await asyncio.to_thread(index.stop)
                except Locked as held:
                    log.warning("the index is left as it is", reason=str(held))
            await registry.close()


def reduce_collections() -> None:
    """Exclude what exists at the start from garbage collection, and collect old objects rarely.

    With hundreds of readers, full collections, which block every answer, determined the 99th
    percentile of request times (benchmarks/service/api.py).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLD)


async def _connect(
    settings: Settings, index: ServiceIndex | None, registry_of: Callable[[str], Registry] | None
) -> Registry:
    """Return the registry of an index that answers. Raises ServeError."""
    try:
        url = settings.index or await asyncio.to_thread(index.start)  # type: ignore[union-attr]
        registry = (registry_of or functools.partial(Registry, timeout=INDEX_SECONDS))(url)
        await Tokens(registry.link).ping()
    except (OSError, RuntimeError, ValueError) as error:
        raise ServeError(f"index: {error}") from None
    return registry


async def _own_token(settings: Settings, tokens: Tokens) -> Token | None:
    """Return the token of the user who runs the server, which is kept in the folder of
    ``settings``; None where none is needed, and where a deployment has made tokens for a server
    that others reach. Raises ServeError."""
    try:
        is_kept = (settings.data / AUTHORIZATION).exists()
        if settings.no_token or (not settings.loopback and not is_kept and await tokens.list()):
            return None
        return (await tokens.own(settings.data))[0]
    except OSError as error:
        raise ServeError(f"data: the token cannot be kept in {settings.data} ({error})") from None


def _warn(settings: Settings) -> None:
    """Log what is insecure in the settings."""
    if settings.no_token:
        log.warning(
            "no token is asked for: every user of this machine may read, start, change and delete "
            "the runs, and so runs code as this user; without --no-token only those may who have a "
            "token"
        )
    if not settings.loopback and settings.tls_certificate is None:
        log.warning(
            "tokens travel in the clear; give --tls-certificate and --tls-key, or put a TLS proxy "
            "in front of it"
        )
    if settings.tls_key is not None and (open_to_all := read_by_others(settings.tls_key)):
        log.warning(f"tls_key: {open_to_all}")
