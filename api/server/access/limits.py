"""Middleware that refuses requests from other sites and more requests than a client may send.

    Host, Origin ──▶ rate of its client ──▶ the handler ──▶ security headers of the answer

On loopback no token is required, and a web page in a local browser can send requests there: with a
host name that resolves to 127.0.0.1 (DNS rebinding), or without reading the answer (cross-site
request forgery). The first kind of request has a foreign Host, the second a foreign Origin; both
are refused.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from api.server.access.addresses import client_of as client_of
from api.server.access.settings import LOOPBACK, Settings
from api.server.http.problems import BEGAN, HTTPProblem

CLIENTS = 10_000  # with stored rates; for a further one, the client inactive for longest is dropped

SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; object-src 'none'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Rates:
    """Token buckets: each client may send ``burst`` requests at once, and ``rate`` a second from
    then on.

    The library `limits` is not used: a hit takes 2.1 to 7.6 µs there (1.0 µs here), and its clients
    are not bounded.

    >>> rates = Rates(rate=2.0, burst=1)
    >>> rates.wait("client", now=0.0), rates.wait("client", now=0.1), rates.wait("client", now=0.5)
    (0.0, 0.4, 0.0)
    """

    def __init__(self, rate: float, burst: int) -> None:
        self.rate = rate
        self.burst = burst
        # client → tokens left, and at what time
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait(self, client: str, now: float) -> float:
        """Take one token. Returns 0.0 when there was one, otherwise the seconds until there is
        one."""
        tokens, since = self._buckets.pop(client, (float(self.burst), now))
        tokens = min(float(self.burst), tokens + max(0.0, now - since) * self.rate)
        allowed = tokens >= 1.0
        self._buckets[client] = (tokens - 1.0 if allowed else tokens), now
        while len(self._buckets) > CLIENTS:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1.0 - tokens) / self.rate


def known_host(host: str, settings: Settings) -> bool:
    """Return whether a Host header names this server.

    A server that other machines reach accepts any name: it requires a token, which a foreign page
    does not have.

    >>> [known_host(host, Settings(data=".")) for host in ("localhost:8765", "[::1]:8765", "rebound.example:8765", "")]
    [True, True, False, False]
    """
    if not settings.loopback:
        return True
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return name in LOOPBACK or name == settings.host or name in settings.hosts


def own_origin(request: web.Request) -> bool:
    """Return whether a request comes from a page of this server or from no page.

    Links from other sites may be followed.
    """
    origin = request.headers.get("Origin")
    if origin is not None:
        return origin.partition("://")[2].lower() == request.host.lower() != ""
    site = request.headers.get("Sec-Fetch-Site", "none")
    followed = request.method == "GET" and request.headers.get("Sec-Fetch-Mode") == "navigate"
    return site in ("none", "same-origin") or followed


def admission(settings: Settings) -> Any:
    """Return the middleware."""
    rates = Rates(settings.rate, settings.burst)

    @web.middleware
    async def admit(request: web.Request, handler: Any) -> web.StreamResponse:
        if not known_host(request.host, settings):
            fix = (
                "ask for 127.0.0.1 or localhost, or let the server know its other names with "
                "--host-name"
            )
            raise HTTPProblem(
                403,
                "This server is not known by that name.",
                kind="host",
                field="header.Host",
                fix=fix,
            )
        if not own_origin(request):
            fix = "other sites are refused; there is no CORS"
            raise HTTPProblem(
                403, "This comes from another site.", kind="origin", field="header.Origin", fix=fix
            )
        wait = rates.wait(client_of(request.remote or ""), time.monotonic())
        if wait > 0:
            seconds = math.ceil(wait)
            fix = f"wait {seconds} s; at most {settings.rate:g} requests a second"
            headers = {"Retry-After": str(seconds)}
            raise HTTPProblem(429, "Too many requests.", kind="rate", fix=fix, headers=headers)
        return await handler(request)

    return admit


async def secure(request: web.Request, response: web.StreamResponse) -> None:
    """Add the security headers before an answer's headers are sent."""
    request[BEGAN] = True
    for name, value in SECURITY_HEADERS.items():
        response.headers.setdefault(name, value)
    response.headers.popall("Server", None)
