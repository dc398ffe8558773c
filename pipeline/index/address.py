"""Addresses of indexes.

It imports only the standard library, as commands check recipes without loading a client.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import secrets
import socket
from dataclasses import dataclass, field
from urllib.parse import quote, unquote, urlsplit

USER = "run"  # of the embedded index; the server's `default` is what has not authenticated


@dataclass(frozen=True)
class Address:
    """An address of this machine at which other machines reach an embedded index.

    ``authority``: path of the PEM file with which they check the server of a URL inside TLS; ""
    without TLS.
    """

    host: str
    port: int
    authority: str = ""
    password: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)

    @classmethod
    def parse(cls, text: str, authority: str = "") -> Address:
        """Return the address in ``text``, HOST or HOST:PORT, with a free port where none is given.

        Raises ValueError where it is none, and OSError where it cannot be listened on.
        """
        host, port = cls.split(text)
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        with socket.create_server((host, port), family=family) as free:
            return cls(host, free.getsockname()[1], authority)

    @staticmethod
    def split(text: str) -> tuple[str, int]:
        """Return host and port of HOST, HOST:PORT or [HOST]:PORT; 0 for no port.

        Raises ValueError where it is none.

        >>> Address.split("[fd00::1]:6379"), Address.split("fd00::1")
        (('fd00::1', 6379), ('fd00::1', 0))
        """
        with contextlib.suppress(ValueError):
            return str(ipaddress.IPv6Address(text)), 0
        parts = urlsplit(f"//{text}")
        if not parts.hostname or parts.netloc != text or parts.username is not None:
            raise ValueError(f"{text!r} is no HOST or HOST:PORT")
        return parts.hostname, parts.port or 0

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        query = f"?ssl_ca_certs={self.authority}"
        scheme = "rediss" if self.authority else "redis"
        return (
            f"{scheme}://{USER}:{self.password}@{host}:{self.port}{query if self.authority else ''}"
        )


def host_of(text: str) -> str:
    """Return the host of HOST or HOST:PORT; ``text`` itself where it is neither.

    >>> host_of("10.0.0.1:6379"), host_of("")
    ('10.0.0.1', '')
    """
    try:
        return Address.split(text)[0]
    except ValueError:
        return text


def redacted(url: str) -> str:
    """Return ``url`` without its password, which may lie before the server's name or in the
    query."""
    scheme, separator, rest = url.partition("://")
    rest = re.sub(r"([?&]password=)[^&#]*", r"\1***", rest)
    return f"{scheme}{separator}{'***@' + rest.rpartition('@')[2] if '@' in rest else rest}"


def split_password(url: str) -> tuple[str, str]:
    """Return ``url`` without its password, and the password; "" where it has none."""
    parts = urlsplit(url)
    user, at, server = parts.netloc.rpartition("@")
    name, _, password = user.partition(":")
    return parts._replace(netloc=f"{name}{at if name else ''}{server}").geturl(), unquote(password)


def with_password(url: str, password: str) -> str:
    """Return ``url`` with ``password``; "" for its own.

    Raises ValueError where it has another one already.
    """
    bare, url_password = split_password(url)
    if url_password and password:
        raise ValueError(
            f"join: {redacted(url)} has a password, and there is a token too; leave out one of them"
        )
    parts = urlsplit(bare)
    user, _, server = parts.netloc.rpartition("@")
    secret = quote(url_password or password, safe="")
    return parts._replace(netloc=f"{user}:{secret}@{server}").geturl() if secret else url
