"""Bearer tokens and their scopes.

The index keeps a hash of each token; the token itself is shown once and not stored.

    create ──▶ adock_ID_SECRET (shown once)        index: ID ──▶ {name, scope, sha256(SECRET), created, expires}
    find(token) ──▶ entry of its ID ──▶ hashes compared in constant time ──▶ Token, or None
    revoke ──▶ the entry is removed, the ID is kept as revoked: the token stays invalid
    own    ──▶ the token of the user who runs the service, whose text is in a file of that user

A secret has 256 random bits, so a plain hash of it cannot be inverted and no slow hash function is
needed.
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
from pathlib import Path
from typing import Any, Literal

from redis.exceptions import RedisError

from orchestration.service.own_services import read_authorization, write_authorization
from pipeline.documents.kinds import Topic
from pipeline.index.address import redacted
from pipeline.index.client import Index, IndexUnreachable, Link

Scope = Literal["read", "run", "admin"]
SCOPES: tuple[Scope, ...] = ("read", "run", "admin")  # each includes those before it
# name of the token of the user who runs the service, and owner of what is asked for without a token
OWN = "local"
SERVICE = "service"  # in keys, in place of a run's id
KEY = "asyncdock:{service}:tokens"
REVOKED = "asyncdock:{service}:tokens:revoked"  # a set of IDs
CHANGES = "asyncdock:{service}:wake:tokens"  # a stream of one entry, written by each change
_CHANGED = Topic("tokens")  # that stream, as a topic
_FORM = re.compile(r"adock_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
_SECONDS = 5.0

# Atomic, so that a token that is revoked while it is adopted stays revoked.
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
    """The token was revoked and cannot be made valid again; the message has the fix."""


@dataclass(frozen=True)
class Token:
    """A token without its secret.

    ``created`` and ``expires`` in Unix seconds; None: it does not expire.
    """

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
    """The tokens of a service, in its index ``where``: a URL, or a link to share.

    Raises IndexUnreachable when the index does not answer.
    """

    def __init__(self, where: str | Link) -> None:
        self._link = where if isinstance(where, Link) else Link(where, timeout=_SECONDS)
        self._owns_link = self._link is not where
        self._redis = self._link.redis
        self._index = Index(self._link, SERVICE)

    async def close(self) -> None:
        await self._index.close()
        if self._owns_link:
            await self._link.close()

    async def ping(self) -> None:
        """Raise IndexUnreachable unless the index answers."""
        await self._ask(self._redis.ping())

    async def create(
        self, name: str, scope: Scope, *, seconds: float | None = None
    ) -> tuple[Token, str]:
        """Create a token called ``name``, valid for ``seconds`` (None: until revoked).

        Returns the token and its text.
        """
        now = time.time()
        identity = secrets.token_hex(6)
        secret = secrets.token_urlsafe(32)
        token = _token(identity, name, scope, now, seconds)
        await self._keep(token, secret)
        return token, f"adock_{identity}_{secret}"

    async def adopt(self, text: str, name: str, scope: Scope) -> Token:
        """Make ``text`` valid, a token that a deployment generated before the service started.

        Idempotent. Raises ValueError for a text of another form, and TokenRevoked.
        """
        match = _FORM.fullmatch(text)
        if match is None:
            raise ValueError(
                "token: what was given is not one; it is adock_, 12 of 0-9a-f, _ and "
                "43 of A-Za-z0-9_-"
            )
        token = _token(match[1], name, scope, time.time(), None)
        await self._keep(token, match[2])
        return token

    async def own(self, data: Path) -> tuple[Token, str]:
        """Return the token of the user who runs the service in the folder ``data``, and its text:
        the one that is kept there, or a new one when there is none, it was revoked, or others could
        read it. Raises OSError."""
        try:
            text = read_authorization(data)
            return await self.adopt(text, OWN, "admin"), text
        except (OSError, ValueError, TokenRevoked):
            token, text = await self.create(OWN, "admin")
        write_authorization(data, text)
        return token, text

    async def _keep(self, token: Token, secret: str) -> None:
        record = json.dumps({**asdict(token), "sha256": _hash(secret)})
        if not await self._ask(self._redis.eval(_KEEP, 3, KEY, REVOKED, CHANGES, token.id, record)):
            raise TokenRevoked(f"token: {token.id} was revoked and stays so; make another one")

    async def find(self, presented: str) -> Token | None:
        """Return the token with the text ``presented``; None when it is unknown, revoked or
        expired."""
        match = _FORM.fullmatch(presented)
        record = (
            await self._link.retry(lambda again: self._redis.hget(KEY, match[1])) if match else None
        )
        if match is None or record is None:
            return None
        token, digest = _unpack(record)
        return token if hmac.compare_digest(digest, _hash(match[2])) and not token.expired else None

    async def of(self, ids: Iterable[str]) -> Mapping[str, Token]:
        """Return the tokens with these ids that are neither revoked nor expired."""
        fields = list(ids)
        records = await self._link.retry(lambda again: self._redis.hmget(KEY, fields))
        tokens = [_unpack(text)[0] for text in records if text is not None]
        return {token.id: token for token in tokens if not token.expired}

    async def changed(self, after: str, timeout: float) -> str:
        """Wait until a token was created or revoked since the marker ``after`` ("": the beginning),
        at most ``timeout`` seconds. Returns the new marker."""
        return await self._index.woken(_CHANGED, after, timeout)

    async def list(self) -> list[Token]:
        """Return all tokens that were not revoked, also expired ones, oldest first."""
        records = await self._ask(self._redis.hgetall(KEY))
        return sorted(
            (_unpack(text)[0] for text in records.values()), key=lambda token: token.created
        )

    async def revoke(self, token: str) -> bool:
        """Make the token with this id invalid, at once and permanently.

        Returns False when there is none.
        """
        return bool(await self._ask(self._redis.eval(_REVOKE, 3, KEY, REVOKED, CHANGES, token)))

    async def _ask(self, answer: Any) -> Any:
        try:
            async with asyncio.timeout(_SECONDS):
                return await answer
        except (RedisError, OSError) as error:
            kind = type(error).__name__
            raise IndexUnreachable(
                f"index {redacted(self._link.url)}: no answer ({kind}); is the server up?"
            ) from None


def _token(identity: str, name: str, scope: Scope, now: float, seconds: float | None) -> Token:
    if scope not in SCOPES:
        raise ValueError(f"scope: {scope!r} is not known; use one of {', '.join(SCOPES)}")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.@ -]{0,63}", name):
        raise ValueError(
            f"name: {name!r} is refused; use at most 64 letters, digits, spaces and '_.@-'"
        )
    if seconds is not None and not seconds > 0:
        raise ValueError(f"expires: {seconds} is refused; give more than 0 seconds")
    return Token(identity, name, scope, now, None if seconds is None else now + seconds)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _unpack(kept: bytes) -> tuple[Token, str]:
    data = json.loads(kept)
    digest = data.pop("sha256")
    return Token(**data), digest
