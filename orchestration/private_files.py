"""Folders and files that only their owner can access: a service's index, tokens and runs."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

import structlog

from orchestration.disk import replacing

log = structlog.get_logger()

# A folder with one of these entries belongs to a service or an agent.
SERVICE_NAMES = {
    "server.lock",
    "service.lock",
    "service.json",
    "agent.lock",
    "authorization",
    "index",
    "runs",
    "cache",
}


# The umask of a run's processes, by launch.readers.
MASKS = {"owner": 0o077, "group": 0o027, "all": 0o022}


def keep_from_others(readers: str = "owner") -> None:
    """Have what this process and its children create be read by ``readers`` alone, as
    launch.readers has it."""
    os.umask(MASKS[readers])


class NotPrivate(ValueError):
    """A folder or a file is not private, or cannot be made so; the message has the reason and the
    fix."""


def private_folder(path: Path) -> None:
    """Create the folder ``path`` with mode 0700, or set this mode.

    Raises NotPrivate when the folder or a file in it belongs to another user, or when the folder is
    not a service's. Root may use another user's folder, as a container does with one of its host,
    but not one that this user can have put in root's way, as in /tmp.
    """
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder_stat = path.stat()
    user = os.geteuid()
    mode = stat.S_IMODE(folder_stat.st_mode)
    if path.is_symlink() and (linked_by := path.lstat().st_uid) not in (0, user):
        raise NotPrivate(
            f"data: {path} is a link that user {linked_by} made, and this process runs as user "
            f"{user}; give the folder itself, by --data"
        )
    if folder_stat.st_uid != user and (user != 0 or _is_shared(path)):
        raise NotPrivate(
            f"data: {path} belongs to user {folder_stat.st_uid}, who can read what is put there, "
            f"and this process runs as user {user}; give a folder of its own, for example --data "
            f"{path / 'service'}"
        )
    if not mode & 0o077:
        return
    with os.scandir(path) as entries:
        owners = {entry.name: entry.stat(follow_symlinks=False).st_uid for entry in entries}
    if owners and not owners.keys() & SERVICE_NAMES:
        raise NotPrivate(
            f"data: {path} has mode {mode:03o}, so others can read it, and holds files that are "
            f"not a service's; give a folder of its own, for example --data {path / 'service'}, or "
            f"run `chmod 700 {path}`"
        )
    if mode & 0o022 and (
        foreign := sorted(name for name, owner in owners.items() if owner != user)
    ):
        raise NotPrivate(
            f"data: others may write to {path} (mode {mode:03o}), and {foreign[0]!r} in it belongs "
            f"to user {owners[foreign[0]]}; remove what is not yours, and run `chmod 700 {path}`"
        )
    path.chmod(0o700)
    log.warning(
        "others could read the folder; now they cannot", folder=str(path), mode=f"{mode:03o}"
    )


def write_private(path: Path, text: str) -> None:
    """Write ``text`` to the file ``path``, which only its owner can read.

    The file changes in one step. Raises OSError with the room that it needs.
    """
    data = text.encode()
    with replacing(path, len(data)) as partial, open(partial, "xb", opener=_private) as file:
        file.write(data)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def read_private(path: Path) -> str:
    """Return the text of the file ``path``. Raises OSError, and NotPrivate as
    :func:`open_private`."""
    with open_private(path) as file:
        return file.read().decode()


def open_private(path: Path) -> BinaryIO:
    """Open the file ``path`` to read it, without following a link.

    Raises OSError, and NotPrivate unless it is a plain file with one name that belongs to this user
    and that nobody else can read or write.
    """
    file = open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")  # noqa: SIM115
    # of the open file, which cannot be replaced between check and read
    file_stat = os.fstat(file.fileno())
    mode = stat.S_IMODE(file_stat.st_mode)
    is_plain = stat.S_ISREG(file_stat.st_mode) and file_stat.st_nlink == 1
    if is_plain and file_stat.st_uid == os.geteuid() and not mode & 0o077:
        return file
    file.close()
    raise NotPrivate(
        f"{path} has mode {mode:03o}, belongs to user {file_stat.st_uid} and has "
        f"{file_stat.st_nlink} names; it must be a plain file of user {os.geteuid()} alone; run "
        f"`chmod 600 {path}` as its owner, or remove it"
    )


def _is_shared(path: Path) -> bool:
    """Return whether every user may create entries in a folder that leads to ``path``."""
    return any(stat.S_IMODE(parent.stat().st_mode) & 0o002 for parent in path.resolve().parents)


def read_by_others(path: Path) -> str:
    """Return a warning with its fix when other users can read the secret in the file ``path``,
    otherwise "".

    No warning on a read-only mount: that is how a container gets a secret. Its mode cannot be
    changed here, and it lets the container's user read a file that belongs to somebody else."""
    try:
        if os.statvfs(path).f_flag & os.ST_RDONLY:
            return ""
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return ""
    return (
        (f"{path} can be read by others (mode {mode:03o}); run `chmod 600 {path}`")
        if mode & 0o077
        else ""
    )
