"""The token that a client sends to a server, and the order of the places where it is looked for.

    the caller's ─▶ ASYNCDOCK_TOKEN ─▶ what `asyncdock login` has kept ─▶ that of a service of this user here ─▶ none
                                       tokens.json, mode 600              orchestration.service.own_services

The client looks up the last one again at each request. It stops sending the token when that service
has ended.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from urllib.parse import urlsplit

from orchestration.service.own_services import OwnService, find_service

DEFAULT_SERVER = "http://127.0.0.1:8765"  # the default address of `asyncdock serve`
SERVER_VARIABLE = "ASYNCDOCK_SERVER"
TOKEN_VARIABLE = "ASYNCDOCK_TOKEN"
PORTS = {"http": 80, "https": 443}


class ServiceGone(ConnectionError):
    """The service has ended. Its token is not sent, as another server may have taken its port."""


class KeyringError(RuntimeError):
    """The file of tokens cannot be used; the message says why and what to do.

    It never holds a token.
    """


def keyring_file() -> Path:
    """Return the path ``$XDG_CONFIG_HOME/asyncdock/tokens.json``, by default below
    ``~/.config``."""
    return (
        Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        / "asyncdock"
        / "tokens.json"
    )


def server_key(server: str) -> str:
    """Return the key of a server in the file: different spellings of one address are one key.

    >>> server_key("HTTP://Example.org:80/"), server_key("https://host:8443/dock/")
    ('http://example.org:80', 'https://host:8443/dock')
    """
    parts = urlsplit(server)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return (
        f"{parts.scheme}://{host}:{parts.port or PORTS.get(parts.scheme)}{parts.path.rstrip('/')}"
    )


class Credential:
    """The token for ``server``: ``token``, else the one that is found.

    Raises :class:`KeyringError`.
    """

    def __init__(self, server: str, token: str | None = None) -> None:
        self.server = server
        self._token = token
        self._is_fixed = token is not None  # by the caller, the environment or the file
        self._service: OwnService | None = None

    def find(self) -> tuple[str, str | None]:
        """Return the address to ask, and the token to send there, if there is one.

        Of a service of this user the address has a number. Raises ServiceGone when there was such a
        service, and it does not listen now.
        """
        if not self._is_fixed:
            self._token = os.environ.get(TOKEN_VARIABLE) or _read(keyring_file()).get(
                server_key(self.server)
            )
            self._is_fixed = True
        if self._token is not None:
            return self.server, self._token
        if self._service is not None and self._service.listens:
            return self._service.url, self._service.token
        before = self._service
        self._service = find_service(self.server)
        if self._service is not None:
            if before is not None:
                before.close()
            return self._service.url, self._service.token
        self._service = before
        if before is not None:
            raise ServiceGone(f"the service of this user that was at {before.url} does not listen")
        return self.server, None

    def close(self) -> None:
        if self._service is not None:
            self._service.close()


def find_token(server: str) -> str | None:
    """Return the token for ``server``: from the environment, else what `asyncdock login` has kept,
    else that of a service of this user on this machine, else None. Raises :class:`KeyringError`."""
    credential = Credential(server)
    try:
        return credential.find()[1]
    finally:
        credential.close()


def token_source(server: str) -> str:
    """Return in words where the token for ``server`` comes from; "" when there is none.

    Raises :class:`KeyringError`.
    """
    if os.environ.get(TOKEN_VARIABLE):
        return f"the token in {TOKEN_VARIABLE}"
    if server_key(server) in _read(keyring_file()):
        return "the token that `asyncdock login` kept"
    return "the token of your service there" if find_token(server) else ""


def remember(server: str, token: str) -> Path:
    """Store ``token`` for ``server``, and return the file. Raises :class:`KeyringError`."""
    file = keyring_file()
    _write(file, _read(file) | {server_key(server): token})
    return file


def forget(server: str) -> bool:
    """Remove the token of ``server``. Returns False when there was none.

    Raises :class:`KeyringError`.
    """
    file = keyring_file()
    tokens = _read(file)
    if tokens.pop(server_key(server), None) is None:
        return False
    _write(file, tokens)
    return True


def _read(file: Path) -> dict[str, str]:
    try:
        with file.open(encoding="utf-8") as opened:
            # of the open file, which cannot be replaced between check and read
            mode = os.fstat(opened.fileno())
            if stat.S_IMODE(mode.st_mode) & 0o077 or mode.st_uid != os.geteuid():
                raise KeyringError(
                    f"{file} has mode {stat.S_IMODE(mode.st_mode):03o} and belongs to user "
                    f"{mode.st_uid}, so others may read the tokens in it; run `chmod 600 {file}` "
                    f"as its owner, and revoke tokens that others have seen"
                )
            tokens = json.load(opened)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        # a JSON error may quote the text
        reason = type(error).__name__ if isinstance(error, ValueError) else str(error)
        raise KeyringError(
            f"{file} cannot be read ({reason}); repair it, or remove it and run `asyncdock login`"
        ) from None
    if not isinstance(tokens, dict) or not all(isinstance(token, str) for token in tokens.values()):
        raise KeyringError(
            f"{file} is no table of tokens by server; remove it and run `asyncdock login`"
        )
    return tokens


def _write(file: Path, tokens: dict[str, str]) -> None:
    from orchestration.private_files import write_private

    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(file, json.dumps(tokens, indent=1))
    except OSError as error:
        raise KeyringError(f"{file} cannot be written ({error})") from None
