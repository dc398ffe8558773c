"""Calls of the kernel that Python has no function for, and what each process of a sandbox does with
its privileges."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct

LIBC = ctypes.CDLL(None, use_errno=True)

_SET_DEATH_SIGNAL = 1
_SET_DUMPABLE = 4
_DROP_BOUND = 24
_SET_SECURE_BITS = 28
_NO_NEW_PRIVILEGES = 38
_AMBIENT = 47
_NO_ROOT_LOCKED = 0x3
_NO_FIXUP_LOCKED = 0xC
_KEEP_CAPABILITIES_LOCKED = 0x20
_NO_AMBIENT_LOCKED = 0xC0
_CAPABILITY_VERSION = 0x20080522
FIRST_OWN_USER = 0x70000000  # numbers of users that no system gives to anyone


class SandboxRefused(RuntimeError):
    """This machine cannot give the sandbox that is asked for. The message says why."""


def checked(what: str, result: int) -> int:
    """Return ``result`` of a C function. Raises OSError, which names ``what``, for a negative
    one."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    checked("prctl", LIBC.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0))


def close_all_but(*files: int) -> None:
    """Close every descriptor of this process except ``files``."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    first = 0
    for file in sorted({*files}):
        if first < file:  # an empty range at 0 would be all of them
            os.closerange(first, file)
        first = file + 1
    os.closerange(first, max(first, min(most, 1 << 20)))


def drop_privileges(*, own_user: int = 0) -> None:
    """Give up all capabilities of this process, and every way to new ones.

    ``own_user``: becomes its real user, by which the kernel counts processes; it needs CAP_SETUID.
    Files are accessed as before.
    """
    if own_user:
        os.setresuid(own_user, -1, -1)
    checked("no_new_privs", LIBC.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    LIBC.prctl(_AMBIENT, 4, 0, 0, 0)  # clear all; older kernels have none
    for capability in range(64):
        # refused for numbers that do not exist, and without CAP_SETPCAP
        LIBC.prctl(_DROP_BOUND, capability, 0, 0, 0)
    bits = _NO_ROOT_LOCKED | _NO_FIXUP_LOCKED | _KEEP_CAPABILITIES_LOCKED | _NO_AMBIENT_LOCKED
    LIBC.prctl(_SET_SECURE_BITS, bits, 0, 0, 0)  # likewise
    header = ctypes.create_string_buffer(struct.pack("II", _CAPABILITY_VERSION, 0))
    checked("capset", LIBC.capset(header, ctypes.create_string_buffer(24)))


def hide_memory() -> None:
    """Let no other process read this one's memory, environment or descriptors."""
    checked("prctl", LIBC.prctl(_SET_DUMPABLE, 0, 0, 0, 0))


def own_user() -> int:
    """Return a number of a user for this process alone, or 0.

    The kernel bounds the processes of no process of root, the real one; another user's it does. 0
    where this is not root, or may not become another user.
    """
    if os.geteuid() != 0:
        return 0
    wanted = FIRST_OWN_USER + os.getpid()
    try:
        with open("/proc/self/uid_map") as ranges, open("/proc/self/status") as status:
            mapped = any(
                int(first) <= wanted < int(first) + int(count)
                for first, _, count in map(str.split, ranges)
            )
            capabilities = next(
                int(line.split()[1], 16) for line in status if line.startswith("CapEff")
            )
    except (OSError, StopIteration):
        return 0
    return wanted if mapped and capabilities & (1 << 7) else 0  # CAP_SETUID


def processes_of_user() -> int:
    """Return the threads of all processes of this process's real user, which RLIMIT_NPROC
    counts."""
    count = 0
    user = os.getuid()
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                if os.stat(f"/proc/{name}").st_uid == user:
                    count += len(os.listdir(f"/proc/{name}/task"))
            except OSError:
                continue  # it has ended
    return count


def kernel_release() -> tuple[int, int]:
    """Return the first two numbers of the kernel's release."""
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int("".join(digit for digit in minor if digit.isdecimal()) or 0)
