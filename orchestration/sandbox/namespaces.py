"""A sandbox of unprivileged namespaces: files, processes, network and shared memory of its own.

    supervisor ─fork─▶ first process (1) ─fork─▶ the sandboxed process (2) ─▶ whatever it starts
      outside            builds the files, gives up     returns from `enter`
      waits: passes      all privileges, waits: ends
      the end on         all when (2) ends, or memory
                         is used up

The kernel kills (1) when the supervisor ends, and everything else with (1). The supervisor is the
process that called, so whoever started it sees it end as the sandboxed one does: with its exit
code, or killed by the same signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from orchestration.sandbox.kernel import (
    LIBC,
    checked,
    close_all_but,
    drop_privileges,
    end_with_parent,
    hide_memory,
    own_user,
)

SCRATCH = "/tmp"  # in the sandbox: the only folder that can be written, beside /dev/shm
DEVICES = ("null", "zero", "full", "random", "urandom")
OLD = "/.old"  # the files of the machine, while the sandbox's are built
LOOK_SECONDS = 0.25  # between two looks at the memory of all processes

_NEW_USER = 0x10000000
_NEW_FILES = 0x00020000
_NEW_PROCESSES = 0x20000000
_NEW_NETWORK = 0x40000000
_NEW_IPC = 0x08000000
_NEW_NAMES = 0x04000000
_SET_FLAGS = 0x8914  # of a network interface
_IS_UP = 1
_NO_SETUID = 2
_NO_DEVICES = 4
_NO_PROGRAMS = 8
_BIND = 4096
_RECURSIVE = 16384
_PRIVATE = 1 << 18
_DETACH = 2
_SET_MOUNT_ATTRIBUTES = 442
_AT_RECURSIVE = 0x8000
_AT_HERE = -100
_READ_ONLY = 1
_ATTRIBUTE_NO_SETUID = 2
_ATTRIBUTE_NO_DEVICES = 4


def enter(
    visible: Sequence[str], *, network: bool, memory: int, scratch: int, keep: Sequence[int]
) -> tuple[str, int]:
    """Return in the sandboxed process alone, with the folder that can be written, and the user for
    :func:`drop_privileges`.

    ``visible``: real paths that are seen, read-only. ``memory``: bytes of all processes together, 0
    for no limit; ``scratch``: bytes of files. ``keep``: descriptors that stay open, beside 0, 1 and
    2. Raises OSError where the kernel refuses the namespaces themselves; a later failure ends this
    process, with a traceback in its output.
    """
    user = _new_user(network)
    if not network:
        _bring_loopback_up()
    ended, report = os.pipe()
    first = os.fork()
    if first:
        _supervise(first, ended)
    os.close(ended)
    _run_or_end(lambda: _begin(report, visible, scratch))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    sandboxed = os.fork()
    if sandboxed:
        _run_or_end(lambda: _watch(sandboxed, report, memory))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    close_all_but(0, 1, 2, *keep)
    return SCRATCH, user


def _run_or_end(step: Callable[[], object]) -> None:
    """Run ``step`` in a forked process, which must not go on with its caller's code when it
    fails."""
    try:
        step()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _new_user(network: bool) -> int:
    """Become the owner of new namespaces, as the same user and group as before.

    Returns a second user of the namespace for the sandboxed process, or 0.
    """
    user = os.geteuid()
    group = os.getegid()
    other = own_user()
    flags = (
        _NEW_USER
        | _NEW_FILES
        | _NEW_PROCESSES
        | _NEW_IPC
        | _NEW_NAMES
        | (0 if network else _NEW_NETWORK)
    )
    users = f"{user} {user} 1\n" + (f"{other} {other} 1\n" if other else "")
    if other:
        with contextlib.suppress(OSError):
            os.setgroups([])
    with _helper() as begin:  # maps a second user, which takes a privilege outside of the namespace
        checked("new namespaces", LIBC.unshare(flags))
        if other:
            begin(users)
    if not other:
        Path("/proc/self/uid_map").write_text(users)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1\n")
    end_with_parent()  # it was forgotten with the old user
    return other


def _bring_loopback_up() -> None:
    """Let the processes of a network of their own reach each other by 127.0.0.1."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", _IS_UP))


@contextlib.contextmanager
def _helper() -> Iterator[Callable[[str], None]]:
    """Keep a child outside of the namespaces of its parent, which gives that its users when it is
    told them."""
    reading, writing = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(writing)
        try:
            users = os.read(reading, 1000).decode()
            if users:
                Path(f"/proc/{parent}/uid_map").write_text(users)
            os._exit(0)
        except BaseException:
            os._exit(1)
    os.close(reading)
    failed = False

    def begin(users: str) -> None:
        nonlocal failed
        os.write(writing, users.encode())
        failed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0

    try:
        yield begin
    finally:
        os.close(writing)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
    if failed:
        raise OSError("the users of the namespace cannot be set")


def _supervise(first: int, ended: int) -> NoReturn:
    """End as the sandboxed process does."""
    try:
        close_all_but(ended)
        text = os.read(ended, 32)
        _, status = os.waitpid(first, 0)
        code = int(text) if text else os.waitstatus_to_exitcode(status)
    except BaseException:
        code = 1
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (
            signal.SIGKILL,
            signal.SIGSTOP,
        ) else None
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 1)


# --------------------------------------------------------------------------------------------------
# In the first process


def _begin(report: int, visible: Sequence[str], scratch: int) -> None:
    end_with_parent()
    gone = select.poll()
    gone.register(report, 0)
    if gone.poll(0):  # nobody reads: the supervisor has ended before it was noticed
        os._exit(1)
    _build(visible, scratch)


def _watch(sandboxed: int, report: int, memory: int) -> NoReturn:
    """Wait for the end of the sandboxed process, and end all others with it."""
    hide_memory()
    close_all_but(2, report)
    drop_privileges()
    while True:
        signal.sigtimedwait([signal.SIGCHLD], LOOK_SECONDS if memory else 3600.0)
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == sandboxed:
                os.write(report, str(os.waitstatus_to_exitcode(ended[1])).encode())
                os._exit(0)
        if memory and _memory() > memory:
            os.write(report, str(-signal.SIGKILL).encode())
            os._exit(0)


def _memory() -> int:
    """Return the bytes of memory that all processes hold together, without files that are
    mapped."""
    total = 0
    for name in os.listdir("/proc"):
        if name.isdecimal() and name != "1":
            try:
                lines = Path(f"/proc/{name}/status").read_text().splitlines()
            except OSError:
                continue  # it has ended
            total += sum(
                int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))
            )
    return 1024 * total


def _build(visible: Sequence[str], scratch: int) -> None:
    """Make the files that the sandbox sees, and leave those of the machine."""
    _mount("none", "/", None, _RECURSIVE | _PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", _NO_SETUID | _NO_DEVICES, "mode=0755,size=64m")
    os.mkdir("/tmp" + OLD)
    checked("pivot_root", LIBC.pivot_root(b"/tmp", ("/tmp" + OLD).encode()))
    os.chdir("/")
    for folder in ("/proc", "/dev", SCRATCH):
        os.mkdir(folder)
    _mount("proc", "/proc", "proc", _NO_SETUID | _NO_DEVICES | _NO_PROGRAMS)
    _mount("tmpfs", SCRATCH, "tmpfs", _NO_SETUID | _NO_DEVICES, f"mode=1777,size={scratch}")
    _make_devices(scratch)
    for path in visible:
        _show(path)
    checked("umount", LIBC.umount2(OLD.encode(), _DETACH))
    os.rmdir(OLD)
    _protect("/", recursive=False)


def _make_devices(scratch: int) -> None:
    _mount("tmpfs", "/dev", "tmpfs", _NO_SETUID | _NO_PROGRAMS, "mode=0755,size=64k")
    for name in DEVICES:
        Path(f"/dev/{name}").touch()
        _mount(f"{OLD}/dev/{name}", f"/dev/{name}", None, _BIND)
    os.mkdir("/dev/shm")
    _mount("tmpfs", "/dev/shm", "tmpfs", _NO_SETUID | _NO_DEVICES, f"mode=1777,size={scratch}")
    os.symlink("/proc/self/fd", "/dev/fd")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"/dev/{name}")
    _protect("/dev", recursive=False, devices=True)


def _show(path: str) -> None:
    """Make ``path`` of the machine visible, read-only; a link as it is."""
    source = OLD + path
    if os.path.lexists(path) and os.path.islink(path):
        return
    _make_parents(path)
    if os.path.islink(source):
        with contextlib.suppress(FileExistsError):
            os.symlink(os.readlink(source), path)
        return
    if os.path.isdir(source):
        os.makedirs(path, exist_ok=True)
    elif not os.path.exists(path):
        Path(path).touch()
    _mount(source, path, None, _BIND | _RECURSIVE)
    _protect(path)


def _make_parents(path: str) -> None:
    """Make the folders above ``path``."""
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        os.makedirs(parent, mode=0o755, exist_ok=True)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    of_kind = None if kind is None else kind.encode()
    data = options.encode() if options else None
    checked(
        f"mount {target}",
        LIBC.mount(source.encode(), target.encode(), of_kind, ctypes.c_ulong(flags), data),
    )


def _protect(path: str, *, recursive: bool = True, devices: bool = False) -> None:
    """Make the mount at ``path`` read-only, with all that is mounted below it."""
    wanted = _READ_ONLY | _ATTRIBUTE_NO_SETUID | (0 if devices else _ATTRIBUTE_NO_DEVICES)
    attributes = ctypes.create_string_buffer(struct.pack("QQQQ", wanted, 0, 0, 0), 32)
    flags = _AT_RECURSIVE if recursive else 0
    call = LIBC.syscall(
        _SET_MOUNT_ATTRIBUTES, _AT_HERE, path.encode(), flags, attributes, ctypes.c_size_t(32)
    )
    checked(f"read-only {path}", call)
