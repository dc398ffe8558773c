"""Links that sign a browser in: a code that works once and soon, for a session.

    link ──▶ CODE in the fragment of a URL ──▶ redeem ──▶ the session's text, which the page keeps ──▶ find, at each request
             no server is sent a fragment      once, within ten minutes, by a browser of the user who asked for the link

Codes and sessions are in the memory of this process, as hashes, and end with it. A page that stays
open after the server has ended may send its session to another server on the same port. That
session is not valid any more.

A session is no cookie: a browser sends the cookies of 127.0.0.1 to all of its ports, those of other
users among them.
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import structlog

from api.server.access.tokens import Token, Tokens
from api.server.http.problems import HTTPProblem

log = structlog.get_logger()

CODE_SECONDS = 600.0
SESSION_SECONDS = 7 * 86400.0
MOST = 1000  # codes, and sessions; the oldest is dropped for another one
PREFIX = "adock-session_"  # of a session's text
ROOT = 0


@dataclass(frozen=True)
class _Grant:
    """The token of a code or a session. ``user``: who may redeem the code (None: any)."""

    token: Token
    until: float  # of time.monotonic
    user: int | None = None


class Logins:
    """The codes and sessions of one server."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._codes: OrderedDict[str, _Grant] = OrderedDict()
        self._sessions: OrderedDict[str, _Grant] = OrderedDict()

    def link(self, token: Token, user: int | None) -> str:
        """Return a code for a session of ``token``.

        ``user``: the user id whose processes may redeem it, beside root's. None: anybody with the
        code may redeem it.
        """
        return _add(self._codes, _Grant(token, time.monotonic() + CODE_SECONDS, user))

    def redeem(self, code: str, user: int | None) -> tuple[str, Token]:
        """Return the text of a new session and its token.

        ``user``: who asks; None: not known. Raises HTTPProblem (403, 410).
        """
        fix = "`asyncdock link` prints another one, where the service runs"
        grant = _find(self._codes, code)
        if grant is not None and user not in (None, ROOT, grant.user) and grant.user is not None:
            log.warning(
                "a process of another user has the code of a login link",
                user=user,
                made_for=grant.user,
            )
            detail = f"This link was made for a browser of user {grant.user}, and user {user} asks."
            raise HTTPProblem(403, detail, kind="login-link", fix=fix)
        self._codes.pop(_hash(code), None)
        if grant is None:
            minutes = f"{CODE_SECONDS / 60:.0f} minutes"
            detail = (
                f"This link was used already, is older than {minutes}, or is of a server that has "
                f"ended."
            )
            raise HTTPProblem(410, detail, kind="login-link", fix=fix)
        session = _Grant(grant.token, time.monotonic() + SESSION_SECONDS)
        return PREFIX + _add(self._sessions, session), grant.token

    async def find(self, presented: str) -> Token | None:
        """Return the token of the session ``presented``; None when the session or its token is not
        valid. Raises IndexUnreachable."""
        grant = _find(self._sessions, presented.removeprefix(PREFIX))
        return (
            None if grant is None else (await self._tokens.of([grant.token.id])).get(grant.token.id)
        )

    def forget(self, presented: str) -> None:
        """End the session ``presented``. Harmless when there is none."""
        self._sessions.pop(_hash(presented.removeprefix(PREFIX)), None)


def _add(grants: OrderedDict[str, _Grant], grant: _Grant) -> str:
    """Return the secret under which ``grants`` has ``grant`` from now on."""
    secret = secrets.token_urlsafe(32)
    grants[_hash(secret)] = grant
    while len(grants) > MOST:
        grants.popitem(last=False)
    return secret


def _find(grants: OrderedDict[str, _Grant], secret: str) -> _Grant | None:
    grant = grants.get(_hash(secret))
    return grant if grant is not None and time.monotonic() < grant.until else None


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


# --- whose browser it is


def user_of(client: tuple[str, int] | None, server: tuple[str, int] | None) -> int | None:
    """Return the user id of the client process of a connection.

    ``client``, ``server``: address and port of its two ends. None: the client is on another
    machine, or the system does not say.
    """
    if client is None or server is None or not ipaddress.ip_address(client[0]).is_loopback:
        return None
    ends = _end(*client), _end(*server)
    for local, remote, user in _connections():
        if local.endswith(ends[0]) and remote.endswith(ends[1]):
            return user
    return None


def _connections() -> Iterator[tuple[str, str, int]]:
    """Yield each TCP connection of this network as the kernel writes it: its own end, the other
    one, and its user."""
    for name in ("tcp", "tcp6"):  # an IPv4 connection may be made by a socket of IPv6
        try:
            lines = Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            yield fields[1], fields[2], int(fields[7])


def _end(address: str, port: int) -> str:
    """Return an end of a connection as the kernel writes it: words of 32 bits in the order of this
    processor's bytes.

    >>> _end("127.0.0.1", 8765) in ("0100007F:223D", "7F000001:223D")
    True
    """
    packed = ipaddress.ip_address(address.partition("%")[0]).packed
    words = [int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4)]
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"
