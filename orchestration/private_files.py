"""Folders and files that only their owner can access: a service's index, tokens and runs."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import structlog

from orchestration.disk import replacing

log = structlog.get_logger()

# A folder with one of these entries belongs to a service or an agent.
SERVICE_NAMES = {"server.lock", "service.lock", "service.json", "agent.lock", "index", "runs", "cache"}


class NotPrivate(ValueError):
    """A folder cannot be made private; the message has the reason and the fix."""


def private_folder(path: Path) -> None:
    """Create the folder ``path`` with mode 0700, or set this mode. Raises NotPrivate when the folder or a file in it belongs
    to another user, or when the folder is not a service's."""
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
        owners = {entry.name: entry.stat(follow_symlinks=False).st_uid for entry in entries}
    if owners and not owners.keys() & SERVICE_NAMES:
        raise NotPrivate(
            f"data: {path} has mode {mode:03o}, so others can read it, and holds files that are not a service's; give a "
            f"folder of its own, for example --data {path / 'service'}, or run `chmod 700 {path}`"
        )
    if mode & 0o022 and (foreign := sorted(name for name, owner in owners.items() if owner != user)):
        raise NotPrivate(
            f"data: others may write to {path} (mode {mode:03o}), and {foreign[0]!r} in it belongs to user "
            f"{owners[foreign[0]]}; remove what is not yours, and run `chmod 700 {path}`"
        )
    path.chmod(0o700)
    log.warning("others could read the folder; now they cannot", folder=str(path), mode=f"{mode:03o}")


def write_private(path: Path, text: str) -> None:
    """Write ``text`` to the file ``path``, which only its owner can read. The file changes in one step. Raises
    OSError with the room that it needs."""
    data = text.encode()
    with replacing(path, len(data)) as partial, open(partial, "xb", opener=_private) as file:
        file.write(data)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def read_by_others(path: Path) -> str:
    """Return a warning with its fix when other users can read the secret in the file ``path``, otherwise "".

    No warning on a read-only mount: that is how a container gets a secret. Its mode cannot be changed here, and it lets
    the container's user read a file that belongs to somebody else."""
    try:
        if os.statvfs(path).f_flag & os.ST_RDONLY:
            return ""
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return ""
    return f"{path} can be read by others (mode {mode:03o}); run `chmod 600 {path}`" if mode & 0o077 else ""
