"""Identity of this node, and the address by which other nodes reach it.

Two machines, or two containers of one machine, never share an identity, unlike host names, paths
and process numbers. Each is a hash of what the kernel says: its boot (another one on each machine
and after each restart), and the number of the file system, folder or process namespace within it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import ipaddress
import os
import platform
import socket
import struct
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

AUTO = "auto"  # in place of an address to listen on: the one by which other nodes reach this one
LOOPBACK = "127.0.0.1"

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_PROCESSES = Path("/proc/self/ns/pid")


def folder_id(folder: Path) -> str:
    """Return a digest of ``folder`` that no other folder has, also not the one at the same path in
    another container or on another machine. Raises FileNotFoundError."""
    folder_stat = folder.stat()
    return _digest(_boot(), folder_stat.st_dev, folder_stat.st_ino, folder.resolve())


def node_id(folder: Path) -> str:
    """Return the name of the node that has ``folder``: the host name, for people, and
    :func:`folder_id`."""
    return f"{platform.node()}-{folder_id(folder)}"


def is_here(node: str, folder: Path) -> bool:
    """Return whether ``node`` is the name that :func:`node_id` gives to ``folder`` here, so that
    files in it are the same ones."""
    try:
        return node == node_id(folder)
    except OSError:
        return False


def own_address() -> str:
    """Return the address of this machine on its network: by its default route, else of its first
    interface that has one, else loopback."""
    for family, beyond in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError):
            return route_to(beyond, family)
    return next(_interface_addresses(), LOOPBACK)


def route_to(host: str, family: int = socket.AF_UNSPEC) -> str:
    """Return the address of this machine on the way to ``host``; nothing is sent.

    Raises OSError where there is no way.
    """
    family, _, _, _, address = socket.getaddrinfo(host, 9, family, socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def is_own(address: str) -> bool:
    """Return whether ``address``, or all that the name ``address`` stands for, is of this
    machine."""
    try:
        address_infos = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)
        for family, kind, _, _, place in address_infos:
            with socket.socket(family, kind) as probe:
                probe.bind(place)
    except OSError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is reached from this machine alone; no for unspecified addresses, and
    names that are not known."""
    try:
        address_infos = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return all(
        ipaddress.ip_address(str(info[4][0]).partition("%")[0]).is_loopback
        for info in address_infos
    )


def is_unspecified(host: str) -> bool:
    """Return whether ``host`` is `0.0.0.0` or `::`, which stands for all addresses."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def announced(host: str, route: str, others: str = "") -> str:
    """Return the address by which other nodes reach a server that listens on ``host``: ``host``
    itself, or where that is `auto` or stands for all addresses, the one that leads to the index, or
    ``others``.

    ``route``: the own address on the way to the index, "" where it is a Unix socket. ``others``: by
    which other machines reach this one, where ``route`` does not show it. Raises ValueError where
    other nodes cannot reach ``host``, or no address is known by which they do."""
    infos = [] if host == AUTO else socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    addresses = [ipaddress.ip_address(str(info[4][0]).partition("%")[0]) for info in infos]
    local = not route or is_loopback(route)
    if all(address.is_unspecified for address in addresses):
        leading = others if local else route
        if not leading:
            raise ValueError(
                f"serve = {host!r}: stands for all addresses of this machine, and the index, which "
                f"is on it too, does not "
                "show by which of them other nodes reach it; give that one"
            )
        version = ipaddress.ip_address(leading.partition("%")[0]).version
        if addresses and version not in [address.version for address in addresses]:
            raise ValueError(
                f"serve = {host!r}: stands for addresses of IPv{addresses[0].version} alone, and "
                f"other nodes reach this one at {leading}; give that one, or 'auto'"
            )
        return leading
    if all(address.is_loopback for address in addresses) and not local:
        raise ValueError(
            f"serve = {host!r}: is reached from this machine alone, and the index is on another "
            f"one; give the address by which other nodes reach this one, such as {route}"
        )
    return host


def process_space() -> str:
    """Return a digest of where numbers of processes mean the same processes: this boot and this PID
    namespace."""
    try:
        namespace = os.readlink(_PROCESSES)
    except OSError:
        namespace = ""
    return _digest(_boot(), namespace)


def owned_prefix(pid: int) -> str:
    """Return how the names of the temporary folders of process ``pid`` begin.

    Containers may share them, and number their processes alike.
    """
    return f"asyncdock-{pid}-{process_space()[:6]}-"


def _interface_addresses() -> Iterator[str]:
    """Yield the IPv4 addresses of this machine's interfaces but loopback (Linux alone)."""
    if sys.platform != "linux":
        return
    import fcntl

    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                reply = fcntl.ioctl(probe, get_address, struct.pack("256s", name.encode()))
                if not is_loopback(address := socket.inet_ntoa(reply[20:24])):
                    yield address


@functools.cache
def _boot() -> str:
    """Return what tells this boot of this machine from all others; where the kernel gives no such
    number, its name and network address."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return f"{platform.node()} {uuid.getnode()}"


def _digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode(errors="surrogateescape")).hexdigest()[
        :12
    ]
