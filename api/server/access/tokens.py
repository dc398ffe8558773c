"""Bearer tokens: who may do what. The index keeps a hash of each; the token itself is shown once and kept nowhere.

    create ──▶ adock_ID_SECRET (shown once)        index: ID ──▶ {name, scope, sha256(SECRET), created, expires}
    find(token) ──▶ by ID, then the hashes compared in constant time ──▶ Token, or None
    revoke ──▶ the entry goes, its ID stays among the revoked ones: it is never let in again
    changed ──▶ each of these wakes all waiters

A secret has 256 random bits, so that a plain hash of it cannot be turned back and needs no slow function.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from redis.exceptions import RedisError

from pipeline.index.client import Index, IndexUnreachable, Link, redacted

Scope = Literal["read", "run", "admin"]
SCOPES: tuple[Scope, ...] = ("read", "run", "admin")  # each may do what those before it may
SERVICE = "service"  # under this name in place of a run's lie the keys below
KEY = "asyncdock:{service}:tokens"
REVOKED = "asyncdock:{service}:tokens:revoked"  # a set of IDs
CHANGES = "asyncdock:{service}:wake:tokens"  # a stream of one entry, made by each change
_FORM = re.compile(r"adock_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
_SECONDS = 5.0

# Each in one step, so that a token which is revoked while somebody adopts it is revoked.
_KEEP = """
if redis.call('SISMEMBER', KEYS[2], ARGV[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('XADD', KEYS[3], 'MAXLEN', 1, '*', 'id', ARGV[1])
return 1"""
_REVOKE = """
if redis.call('HDEL', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('SADD', KEYS[2], ARGV[1])
redis.call('XADD', KEYS[3], 'MAXLEN', 1, '*', 'id', ARGV[1])
return 1"""


class TokenRevoked(Exception):
    """A token that was revoked opens nothing again; the message says what to do instead."""


@dataclass(frozen=True)
class Token:
    """What is known of a token. ``created`` and ``expires`` in Unix seconds; None: it does not expire."""

    id: str
    name: str
    scope: Scope
    created: float
    expires: float | None

    def may(self, scope: Scope) -> bool:
        return SCOPES.index(self.scope) >= SCOPES.index(scope)

    @property
    def expired(self) -> bool:
        return self.expires is not None and time.time() >= self.expires


class Tokens:
    """The tokens of the service whose index is at ``where``: a URL, or a link to share. Raises IndexUnreachable when it does
    not answer."""

    def __init__(self, where: str | Link) -> None:
        self._link = where if isinstance(where, Link) else Link(where, timeout=_SECONDS)
        self._own, self._redis = self._link is not where, self._link.redis
        self._index = Index(self._link, SERVICE)

    async def close(self) -> None:
        await self._index.close()
        if self._own:
            await self._link.close()

    async def ping(self) -> None:
        """Whether the index answers."""
        await self._ask(self._redis.ping())

    async def create(self, name: str, scope: Scope, *, seconds: float | None = None) -> tuple[Token, str]:
        """A new token called ``name``, valid for ``seconds`` (None: until it is revoked), and the text to present."""
        now, identity, secret = time.time(), secrets.token_hex(6), secrets.token_urlsafe(32)
        token = _token(identity, name, scope, now, seconds)
        await self._keep(token, secret)
        return token, f"adock_{identity}_{secret}"

    async def adopt(self, text: str, name: str, scope: Scope) -> Token:
        """Let ``text``, a token that was made elsewhere, open what ``scope`` says: a deployment has it in a file before
        the service begins. Harmless when repeated. Raises ValueError for a text that is no token, TokenRevoked."""
        match = _FORM.fullmatch(text)
        if match is None:
            raise ValueError("token: what was given is not one; it is adock_, 12 of 0-9a-f, _ and 43 of A-Za-z0-9_-")
        token = _token(match[1], name, scope, time.time(), None)
        await self._keep(token, match[2])
        return token

    async def _keep(self, token: Token, secret: str) -> None:
        kept = json.dumps({**asdict(token), "sha256": _hash(secret)})
        if not await self._ask(self._redis.eval(_KEEP, 3, KEY, REVOKED, CHANGES, token.id, kept)):
            raise TokenRevoked(f"token: {token.id} was revoked and stays so; make another one")

    async def find(self, presented: str) -> Token | None:
        """The token that ``presented`` is, if it is one, and is neither revoked nor expired."""
        match = _FORM.fullmatch(presented)
        kept = await self._link.retry(lambda again: self._redis.hget(KEY, match[1])) if match else None
        if match is None or kept is None:
            return None
        token, known = _unpacked(kept)
        return token if hmac.compare_digest(known, _hash(match[2])) and not token.expired else None

    async def of(self, ids: Iterable[str]) -> Mapping[str, Token]:
        """The tokens with these ids that are neither revoked nor expired."""
        asked = list(ids)
        kept = await self._link.retry(lambda again: self._redis.hmget(KEY, asked))
        found = [_unpacked(text)[0] for text in kept if text is not None]
        return {token.id: token for token in found if not token.expired}

    async def changed(self, after: str, timeout: float) -> str:
        """Block until a token was made or revoked since the marker ``after`` ("": the beginning), for at most ``timeout``
        seconds. Returns the new marker."""
        return await self._index.woken("tokens", after, timeout)

    async def list(self) -> list[Token]:
        """All that were not revoked, expired ones too, oldest first."""
        kept = await self._ask(self._redis.hgetall(KEY))
        return sorted((_unpacked(text)[0] for text in kept.values()), key=lambda token: token.created)

    async def revoke(self, token: str) -> bool:
        """Forget the token with this id, at once and for ever; False when there is none."""
        return bool(await self._ask(self._redis.eval(_REVOKE, 3, KEY, REVOKED, CHANGES, token)))

    async def _ask(self, answer: Any) -> Any:
        try:
            async with asyncio.timeout(_SECONDS):
                return await answer
        except (RedisError, OSError) as error:
            kind = type(error).__name__
            raise IndexUnreachable(f"index {redacted(self._link.url)}: no answer ({kind}); is the server up?") from None


def _token(identity: str, name: str, scope: Scope, now: float, seconds: float | None) -> Token:
    if scope not in SCOPES:
        raise ValueError(f"scope: {scope!r} is not known; use one of {', '.join(SCOPES)}")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.@ -]{0,63}", name):
        raise ValueError(f"name: {name!r} is refused; use at most 64 letters, digits, spaces and '_.@-'")
    if seconds is not None and not seconds > 0:
        raise ValueError(f"expires: {seconds} is refused; give more than 0 seconds")
    return Token(identity, name, scope, now, None if seconds is None else now + seconds)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _unpacked(kept: bytes) -> tuple[Token, str]:
    data = json.loads(kept)
    known = data.pop("sha256")
    return Token(**data), known
