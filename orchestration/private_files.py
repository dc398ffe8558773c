"""Folders and files with access for their owner alone. A service's folder holds its index, its tokens and its runs."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import structlog

log = structlog.get_logger()

# One of these in a folder makes it a service's, or an agent's.
SERVICE_NAMES = {"server.lock", "service.lock", "service.json", "agent.lock", "index", "runs", "cache"}


class NotPrivate(ValueError):
    """A folder cannot be kept from others; the message says why and what to do."""


def private_folder(path: Path) -> None:
    """Make the folder ``path``, or take from others what they may do in it. Raises NotPrivate where that is not ours to do:
    the folder, or what lies in it, belongs to another user, or it holds what is not a service's."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    found, user = path.stat(), os.geteuid()
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != user and user != 0:
        raise NotPrivate(
            f"data: {path} belongs to user {found.st_uid}, who can read what is put there, and this process runs as user "
            f"{user}; give a folder of its own, for example --data {path / 'service'}"
        )
    if not mode & 0o077:
        return
    with os.scandir(path) as entries:
        inside = {entry.name: entry.stat(follow_symlinks=False).st_uid for entry in entries}
    if inside and not inside.keys() & SERVICE_NAMES:
        raise NotPrivate(
            f"data: {path} has mode {mode:03o}, so others can read it, and holds files that are not a service's; give a "
            f"folder of its own, for example --data {path / 'service'}, or run `chmod 700 {path}`"
        )
    if mode & 0o022 and (foreign := sorted(name for name, owner in inside.items() if owner != user)):
        raise NotPrivate(
            f"data: others may write to {path} (mode {mode:03o}), and {foreign[0]!r} in it belongs to user "
            f"{inside[foreign[0]]}; remove what is not yours, and run `chmod 700 {path}`"
        )
    path.chmod(0o700)
    log.warning("others could read the folder; now they cannot", folder=str(path), mode=f"{mode:03o}")


def write_private(path: Path, text: str) -> None:
    """Write ``text`` to the file ``path``, which only its owner can read."""
    with open(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o600)  # it may have been there before
        file.write(text)


def read_by_others(path: Path) -> str:
    """Why the secret in the file ``path`` is none, and what to do; "" when it is one, or there is no such file."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return ""
    return f"{path} can be read by others (mode {mode:03o}); run `chmod 600 {path}`" if mode & 0o077 else ""
