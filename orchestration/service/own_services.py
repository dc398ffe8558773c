"""The services that this user runs on this machine: by their address, with the token that opens
them.

    serve ──▶ DATA/authorization: a header with the token        (mode 600, in a folder of mode 700)
          ──▶ announced: STATE/services/HOST:PORT names DATA     (mode 600, locked for as long as the server listens)
    client ──▶ find_service ──▶ is its file locked? ─yes─▶ the token of DATA
                                                    └no──▶ None: who listens there now may be somebody else

The kernel frees the lock when the server ends, however it ends, and its port with it. A user who
takes the port afterwards is sent no token. Each file says for which address it is, and in which
network: it opens no other one when it is renamed, or read on another machine or in a container that
shares the home.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast
from urllib.parse import SplitResult, urlsplit

import structlog

from orchestration.private_files import NotPrivate, open_private, read_private, write_private

log = structlog.get_logger()

AUTHORIZATION = "authorization"  # in a service's folder; `curl -H @FILE` sends it
LOCALHOST = ("127.0.0.1", "::1")
ANY = {4: "0.0.0.0", 6: "::"}  # noqa: S104  (looked up, nothing listens) a service that listens there has every loopback address of its kind
_HEADER = "Authorization: Bearer "


class OwnService:
    """A service of this user that listens at ``url``. ``token`` opens it."""

    def __init__(self, url: str, token: str, file: BinaryIO) -> None:
        self.url = url
        self.token = token
        self._file = file

    def __repr__(self) -> str:
        return f"OwnService({self.url!r})"

    @property
    def listens(self) -> bool:
        """Return whether its server still listens. False for ever once it has ended."""
        return _is_locked(self._file)

    def close(self) -> None:
        self._file.close()


def write_authorization(data: Path, token: str) -> None:
    """Keep ``token`` in the folder ``data`` of a service. Raises OSError."""
    write_private(data / AUTHORIZATION, f"{_HEADER}{token}\n")


def read_authorization(data: Path) -> str:
    """Return the token that is kept in the folder ``data`` of a service.

    Raises OSError, NotPrivate, ValueError.
    """
    text = read_private(data / AUTHORIZATION).strip()
    if not text.startswith(_HEADER):
        raise ValueError(
            f"{data / AUTHORIZATION} holds no token; remove it, and start the service again"
        )
    return text.removeprefix(_HEADER)


@contextlib.contextmanager
def announced(url: str, data: Path) -> Iterator[None]:
    """Let commands and clients of this user find the token of the service in ``data`` by its
    address ``url``, at which this process listens. A home that cannot be written, or that others
    can write to, is logged and changes nothing else."""
    path = services_folder() / _name(urlsplit(url))
    try:
        file = _announce(path, {"url": url, "data": str(data.resolve()), "network": _network()})
    except (OSError, ValueError) as error:
        log.warning(
            "commands of this user do not find the token of this service by its address",
            reason=str(error),
        )
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                path.unlink()
        file.close()


def find_service(server: str) -> OwnService | None:
    """Return the service of this user that listens at the address ``server``; None when there is
    none. Of ``localhost`` the answer has the number: another user may listen at the other number of
    that name."""
    parts = urlsplit(server)
    if parts.path.strip("/") or parts.hostname is None:
        return None
    hosts = LOCALHOST if parts.hostname == "localhost" else (parts.hostname,)
    for host in hosts:
        version = 6 if ":" in host else 4
        listened = (
            [host, ANY[version]]
            if host == "::1" or re.fullmatch(r"127(\.\d{1,3}){3}", host)
            else [host]
        )
        for address in listened:
            if service := _read(parts.scheme, address, parts.port):
                named = f"[{host}]" if version == 6 else host
                # A name is what a certificate is for; it proves who listens.
                service.url = (
                    server
                    if parts.scheme == "https"
                    else f"{parts.scheme}://{named}:{parts.port or 80}"
                )
                return service
    return None


def services_folder() -> Path:
    """Return ``$XDG_STATE_HOME/asyncdock/services``, by default below ``~/.local/state``."""
    return (
        Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        / "asyncdock"
        / "services"
    )


def _announce(path: Path, content: dict[str, str]) -> BinaryIO:
    """Write the file, locked before it has its name. Returns it; closing it frees the lock."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder_stat = path.parent.lstat()
    if not stat.S_ISDIR(folder_stat.st_mode) or folder_stat.st_uid != os.geteuid():
        raise NotPrivate(
            f"{path.parent} is no folder of user {os.geteuid()}; remove it, or set XDG_STATE_HOME"
        )
    path.parent.chmod(0o700)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    file = open(descriptor, "r+b", buffering=0)  # noqa: SIM115
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.write(json.dumps(content).encode())
        os.replace(partial, path)
    except BaseException:
        file.close()
        partial.unlink(missing_ok=True)
        raise
    return cast(BinaryIO, file)


def _read(scheme: str, host: str, port: int | None) -> OwnService | None:
    """Return the service that listens at this very address."""
    named = f"[{host}]" if ":" in host else host
    url = f"{scheme}://{named}:{port or {'http': 80, 'https': 443}.get(scheme)}"
    try:
        file = open_private(services_folder() / _name(urlsplit(url)))
    except (OSError, NotPrivate):
        return None
    try:
        content = json.loads(file.read())
        if content["url"] == url and content["network"] == _network() and _is_locked(file):
            return OwnService(url, read_authorization(Path(content["data"])), file)
    except (OSError, ValueError, KeyError, TypeError):
        pass  # its server removes the token, or the file was damaged: as if there were none
    file.close()
    return None


def _is_locked(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file.fileno(), fcntl.LOCK_UN)
    return False


def _name(parts: SplitResult) -> str:
    return f"{parts.hostname}:{parts.port}".replace("/", "_")


def _network() -> str:
    """Return what tells this network from those of other machines and containers, "" where the
    system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""
