"""Which node this is: identities, and the address by which other nodes reach it.

Two machines, or two containers of one machine, never share an identity, unlike host names, paths and process numbers. Each
is a hash of what the kernel says: its boot (another one on each machine and after each restart), and the number of the file
system, folder or process namespace within it.
"""

from __future__ import annotations

import functools
import hashlib
import ipaddress
import os
import platform
import socket
import uuid
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_PROCESSES = Path("/proc/self/ns/pid")


def folder_id(folder: Path) -> str:
    """Returns a digest of ``folder`` that no other folder has, also not the one at the same path in another container or on
    another machine. Raises FileNotFoundError."""
    found = folder.stat()
    return _digest(_boot(), found.st_dev, found.st_ino, folder.resolve())


def node_id(folder: Path) -> str:
    """Returns the name of the node that has ``folder``: the host name, for people, and :func:`folder_id`."""
    return f"{platform.node()}-{folder_id(folder)}"


def is_here(node: str, folder: Path) -> bool:
    """Whether ``node`` is the name that :func:`node_id` gives to ``folder`` here, so that files in it are the same ones."""
    try:
        return node == node_id(folder)
    except OSError:
        return False


def announced(host: str, route: str) -> str:
    """Returns the address by which other nodes reach a server that listens on ``host``: ``host`` itself, or ``route`` where
    that stands for all addresses. ``route``: the own address on the way to the index, "" where it is a Unix socket. Raises
    ValueError where other nodes cannot reach ``host``, or no address is known by which they do."""
    found = [ipaddress.ip_address(info[4][0]) for info in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)]
    towards = ipaddress.ip_address(route.partition("%")[0]) if route else None
    local = towards is None or towards.is_loopback
    if all(address.is_unspecified for address in found):
        if local:
            raise ValueError(
                f"serve = {host!r}: stands for all addresses of this machine, and the index, which is on it too, does not "
                "show by which of them other nodes reach it; give that one"
            )
        return route
    if all(address.is_loopback for address in found) and not local:
        raise ValueError(
            f"serve = {host!r}: is reached from this machine alone, and the index is on another one; give the address by "
            f"which other nodes reach this one, such as {route}"
        )
    return host


def process_space() -> str:
    """Returns a digest of where numbers of processes mean the same processes: this boot and this PID namespace."""
    try:
        namespace = os.readlink(_PROCESSES)
    except OSError:
        namespace = ""
    return _digest(_boot(), namespace)


def owned_prefix(pid: int) -> str:
    """Returns how the names of the temporary folders of process ``pid`` begin. Containers may share them, and number their
    processes alike."""
    return f"asyncdock-{pid}-{process_space()[:6]}-"


@functools.cache
def _boot() -> str:
    """Returns what tells this boot of this machine from all others; where the kernel gives no such number, its name and
    network address."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return f"{platform.node()} {uuid.getnode()}"


def _digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode(errors="surrogateescape")).hexdigest()[:12]
