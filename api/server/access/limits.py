"""What a request must be before anything looks into it: from a place that may ask, and not one of too many.

    Host, Origin ──▶ rate of its client ──▶ the handler ──▶ headers that keep browsers strict

On loopback anybody who reaches the port may ask, and a web page that somebody has open reaches it too: by a name of its own
that it points at 127.0.0.1 (DNS rebinding), or with requests that need no answer (cross-site request forgery). The first
comes with a foreign Host, the second with a foreign Origin, and both are refused.
"""

from __future__ import annotations

import ipaddress
import math
import time
from collections import OrderedDict
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from api.server.problems import BEGAN, Problem
from api.server.service import LOOPBACK, Settings

CLIENTS = 10_000  # whose rates are kept; beyond that the one not heard of for longest is forgotten

# Scripts, styles, images and connections of its own alone; no frame around it; nothing that guesses media types.
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def client_of(address: str) -> str:
    """The client that an address stands for: of IPv6, the network of one customer, which holds 2**64 addresses.

    >>> client_of("10.0.0.7"), client_of("2001:db8::1:2"), client_of("::ffff:10.0.0.7"), client_of("fe80::1%eth0")
    ('10.0.0.7', '2001:db8::/64', '10.0.0.7', 'fe80::/64')
    """
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:  # no address: a Unix socket, or a client that has gone
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    return str(found.ipv4_mapped or ipaddress.ip_network((found, 64), strict=False))


class Rates:
    """A bucket for each client: ``burst`` requests at once, and ``rate`` a second from then on.

    >>> rates = Rates(rate=2.0, burst=1)
    >>> rates.wait("somebody", now=0.0), rates.wait("somebody", now=0.1), rates.wait("somebody", now=0.5)
    (0.0, 0.4, 0.0)
    """

    def __init__(self, rate: float, burst: int) -> None:
        self.rate, self.burst = rate, burst
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # client → what is left, and when it was

    def wait(self, client: str, now: float) -> float:
        """Take one request out of the client's bucket. 0.0: go on; else the seconds until there is one again."""
        left, since = self._buckets.pop(client, (float(self.burst), now))
        left = min(float(self.burst), left + max(0.0, now - since) * self.rate)
        allowed = left >= 1.0
        self._buckets[client] = (left - 1.0 if allowed else left), now
        while len(self._buckets) > CLIENTS:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1.0 - left) / self.rate


def known_host(host: str, settings: Settings) -> bool:
    """Whether a Host header is a name of this server. One that is open to other machines goes by any name: there a token is
    needed, which no page of somebody else's has.

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
    """Whether a request comes from no page at all, or from one of this server's own. A link to a page here may be followed
    from anywhere."""
    origin = request.headers.get("Origin")
    if origin is not None:
        return origin.partition("://")[2].lower() == request.host.lower() != ""
    site = request.headers.get("Sec-Fetch-Site", "none")
    followed = request.method == "GET" and request.headers.get("Sec-Fetch-Mode") == "navigate"
    return site in ("none", "same-origin") or followed


def admission(settings: Settings) -> Any:
    """The middleware that refuses what is from elsewhere, and what is too much."""
    rates = Rates(settings.rate, settings.burst)

    @web.middleware
    async def admit(request: web.Request, handler: Any) -> web.StreamResponse:
        if not known_host(request.host, settings):
            fix = "ask for 127.0.0.1 or localhost, or let the server know its other names with --host-name"
            raise Problem(403, "This server is not known by that name.", kind="host", field="header.Host", fix=fix)
        if not own_origin(request):
            fix = "other sites are refused; there is no CORS"
            raise Problem(403, "This comes from another site.", kind="origin", field="header.Origin", fix=fix)
        wait = rates.wait(client_of(request.remote or ""), time.monotonic())
        if wait > 0:
            seconds = math.ceil(wait)
            fix = f"wait {seconds} s; at most {settings.rate:g} requests a second"
            headers = {"Retry-After": str(seconds)}
            raise Problem(429, "Too many requests.", kind="rate", fix=fix, headers=headers)
        return await handler(request)

    return admit


async def secure(request: web.Request, response: web.StreamResponse) -> None:
    """Before each answer's headers go out, those of a stream too."""
    request[BEGAN] = True
    for name, value in SECURITY_HEADERS.items():
        response.headers.setdefault(name, value)
    response.headers.popall("Server", None)
