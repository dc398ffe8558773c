"""A sandbox without namespaces: Landlock says which files and ports a process reaches, and a filter
of system calls (seccomp) refuses what Landlock does not know.

It is weaker than namespaces: names, sizes and owners of all files can be seen. And it gives less:
nothing can be written, as a folder on the disk would have no limit, and no process started, as all
of them together would have none.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Sequence

from orchestration.sandbox.kernel import LIBC, SandboxRefused, checked
from orchestration.sandbox.seccomp import Rule

_CREATE_RULESET = 444
_ADD_RULE = 445
_RESTRICT_SELF = 446
_VERSION_FLAG = 1
_PATH_BENEATH = 1
_EXECUTE = 1 << 0
_READ_FILE = 1 << 2
_READ_FOLDER = 1 << 3
_WRITE_FILE = 1 << 1
# Rights on files, by the version of Landlock that knows them first; version 2 has 14, version 3 has
# 15, version 5 has 16.
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
# bind and connect; abstract sockets and signals
_TCP_RIGHTS = 0b11
_SCOPES = 0b11
FIRST_WITH_TCP = 4
FIRST_WITH_SCOPES = 6
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
OF_THE_KERNEL = (
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/stat",
    "/proc/sys/kernel",
    "/sys/devices/system/cpu",
)


def version() -> int:
    """Return the version of Landlock that this kernel has. Raises SandboxRefused where it has
    none."""
    abi_version = LIBC.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION_FLAG)
    if abi_version < 1:
        reason = os.strerror(ctypes.get_errno())
        raise SandboxRefused(
            f"the kernel has no Landlock ({reason}); it needs Linux 5.13 with `lsm=landlock,…`"
        )
    return int(abi_version)


def restrict(visible: Sequence[str], listed: Sequence[str], *, network: bool) -> list[Rule]:
    """Restrict this process, which needs ``no_new_privs``, to reading ``visible`` and the names of
    files in ``listed`` (imports look there), and without ``network`` to no port. Returns what is to
    be refused beside it. Raises SandboxRefused, OSError."""
    has = version()
    rights = (1 << _FILE_RIGHTS[min(has, max(_FILE_RIGHTS))]) - 1
    ports = 0 if network or has < FIRST_WITH_TCP else _TCP_RIGHTS
    scopes = _SCOPES if has >= FIRST_WITH_SCOPES else 0
    size = 24 if has >= FIRST_WITH_SCOPES else 16 if has >= FIRST_WITH_TCP else 8
    attributes = ctypes.create_string_buffer(struct.pack("QQQ", rights, ports, scopes), 24)
    ruleset = checked(
        "landlock", LIBC.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(size), 0)
    )
    for path in (*visible, *OF_THE_KERNEL, f"/proc/{os.getpid()}"):
        _allow(ruleset, path, _EXECUTE | _READ_FILE | _READ_FOLDER)
    for path in listed:
        _allow(ruleset, path, _READ_FOLDER if os.path.isdir(path) else _READ_FILE)
    for path in DEVICES:
        _allow(ruleset, path, _READ_FILE | _WRITE_FILE)
    checked("landlock", LIBC.syscall(_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)
    return _refused(has, network)


def _allow(ruleset: int, path: str, rights: int) -> None:
    """Allow ``rights`` at ``path``, and below it. Does nothing where there is no such path."""
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            rights &= ~_READ_FOLDER
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, place), 12)
        checked(f"landlock {path}", LIBC.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0))
    finally:
        os.close(place)


def _refused(has: int, network: bool) -> list[Rule]:
    """Return what Landlock of version ``has`` does not know."""
    rules = [
        # A socket at a path, or of another family, may lead to any program of the machine.
        Rule("socket", argument=0, allowed=(2, 10) if network else ()),
        Rule("mmap", argument=3, bits=0x21),  # shared and anonymous: no limit of memory counts it
        Rule("clone", argument=0, needed=0x10000),  # threads, which are one process
        Rule("fork"),
        Rule("vfork"),
        # not PR_SET_PDEATHSIG: it ends with its parent
        Rule("prctl", argument=0, allowed=tuple(range(2, 80))),
        # Other processes of the same user.
        *(Rule(call, argument=0, allowed=(0,)) for call in _OF_A_PROCESS),
        *(Rule(call) for call in _OF_ANY_PROCESS),
        # Files that cannot be opened could still be given other owners, rights or times.
        *(Rule(call) for call in _OF_ANY_FILE),
    ]
    if has < FIRST_WITH_SCOPES:
        pid = os.getpid()
        rules += [Rule(call, argument=0, allowed=(0, pid)) for call in ("kill", "tkill", "tgkill")]
        rules += [
            Rule(call)
            for call in ("rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal", "pidfd_open")
        ]
    return rules


_OF_A_PROCESS = (
    "migrate_pages",
    "move_pages",
    "prlimit64",
    "sched_setaffinity",
    "sched_setattr",
    "sched_setparam",
    "sched_setscheduler",
)
_OF_ANY_PROCESS = ("ioprio_set", "setpriority")
_OF_ANY_FILE = (
    "chmod",
    "chown",
    "fchmod",
    "fchmodat",
    "fchmodat2",
    "fchown",
    "fchownat",
    "file_setattr",
    "fremovexattr",
    "fsetxattr",
    "futimesat",
    "inotify_init",
    "inotify_init1",
    "lchown",
    "lremovexattr",
    "lsetxattr",
    "removexattr",
    "removexattrat",
    "setxattr",
    "setxattrat",
    "truncate",
    "utime",
    "utimensat",
    "utimes",
)
