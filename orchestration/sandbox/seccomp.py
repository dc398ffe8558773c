"""Refuses system calls of this process and its children, for good: a filter in the kernel
(seccomp).

A rule names a call and what of it is refused. Calls without a rule are allowed; of several rules
for a call the first one counts. The kernel remembers which calls a filter always allows, so that
those cost nothing. libseccomp is not used: it is a library of the system, which may not be there.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from orchestration.sandbox.kernel import LIBC, SandboxRefused, checked

# the kernel's number, the column of NUMBERS
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

# Numbers of the calls, on x86-64 and on arm64 (None: it has no such call).
NUMBERS: dict[str, tuple[int, int | None]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "chmod": (90, None),
    "chown": (92, None),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "clone": (56, 220),
    "clone3": (435, 435),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "file_setattr": (469, 469),
    "finit_module": (313, 273),
    "fork": (57, None),
    "fremovexattr": (199, 16),
    "fsconfig": (431, 431),
    "fsetxattr": (190, 7),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "futimesat": (261, None),
    "init_module": (175, 105),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "ioprio_set": (251, 30),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "kill": (62, 129),
    "lchown": (94, None),
    "lremovexattr": (198, 15),
    "lsetxattr": (189, 6),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "migrate_pages": (256, 238),
    "mmap": (9, 222),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pivot_root": (155, 41),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "removexattr": (197, 14),
    "removexattrat": (466, 466),
    "request_key": (249, 218),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "semget": (64, 190),
    "setdomainname": (171, 162),
    "setfsgid": (123, 152),
    "setfsuid": (122, 151),
    "setgid": (106, 144),
    "setgroups": (116, 159),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "setpriority": (141, 140),
    "setregid": (114, 143),
    "setresgid": (119, 149),
    "setresuid": (117, 147),
    "setreuid": (113, 145),
    "settimeofday": (164, 170),
    "setuid": (105, 146),
    "setxattr": (188, 5),
    "setxattrat": (463, 463),
    "shmget": (29, 194),
    "socket": (41, 198),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "tgkill": (234, 131),
    "tkill": (200, 130),
    "truncate": (76, 45),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "utime": (132, None),
    "utimensat": (280, 88),
    "utimes": (235, None),
    "vfork": (58, None),
    "vhangup": (153, 58),
}

_LOAD = 0x20
_JUMP_EQUAL = 0x15
_JUMP_AT_LEAST = 0x35
_AND = 0x54
_RETURN = 0x06
_KILL = 0x80000000
_ERRNO = 0x00050000
_ALLOW = 0x7FFF0000
_X32 = 0x40000000  # numbers of x86-64's other interface begin here
# offsets in what the filter reads; an argument has 8 bytes
_NUMBER = 0
_MACHINE = 4
_ARGUMENTS = 16
_SET_SECCOMP = 22
_FILTER = 2
_NO_NEW_PRIVILEGES = 38

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


@dataclass(frozen=True)
class Rule:
    """A rule that refuses ``call`` with the error number ``error``.

    With ``argument``, its place, only some calls are refused: those where all of ``bits`` are set,
    where one of ``any_bit`` is set, where one of ``needed`` is not, or where the argument is not
    one of ``allowed``. Of the argument the lower 32 bits are compared."""

    call: str
    error: int = errno.EPERM
    argument: int = -1
    bits: int = 0
    any_bit: int = 0
    needed: int = 0
    allowed: tuple[int, ...] = ()

    def instructions(self) -> list[Instruction]:
        refuse = (_RETURN, 0, 0, _ERRNO | self.error)
        if self.argument < 0:
            return [refuse]
        allow = (_RETURN, 0, 0, _ALLOW)
        load = (_LOAD, 0, 0, _ARGUMENTS + 8 * self.argument)
        if self.bits:
            return [load, (_AND, 0, 0, self.bits), (_JUMP_EQUAL, 0, 1, self.bits), refuse, allow]
        if self.any_bit:
            return [load, (_AND, 0, 0, self.any_bit), (_JUMP_EQUAL, 1, 0, 0), refuse, allow]
        if self.needed:
            return [
                load,
                (_AND, 0, 0, self.needed),
                (_JUMP_EQUAL, 1, 0, self.needed),
                refuse,
                allow,
            ]
        compared = [
            (_JUMP_EQUAL, len(self.allowed) - place, 0, value & 0xFFFFFFFF)
            for place, value in enumerate(self.allowed)
        ]
        return [load, *compared, refuse, allow]


def program(rules: Sequence[Rule], machine: str) -> bytes:
    """Return the filter of ``rules`` as the kernel reads it.

    Raises SandboxRefused for an unknown ``machine``.
    """
    if machine not in MACHINES:
        raise SandboxRefused(
            f"system calls of a {machine} are not known; {' and '.join(MACHINES)} are"
        )
    number, column = MACHINES[machine]
    code: list[Instruction] = [
        (_LOAD, 0, 0, _MACHINE),
        (_JUMP_EQUAL, 1, 0, number),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        code += [(_JUMP_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    for rule in rules:
        call = NUMBERS[rule.call][column]
        if call is not None:
            body = rule.instructions()
            code += [(_JUMP_EQUAL, 0, len(body), call), *body]
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def install(rules: Sequence[Rule]) -> None:
    """Refuse what ``rules`` say to this thread and to all that it starts.

    Raises SandboxRefused, OSError.
    """
    code = program(rules, platform.machine())
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    held = ctypes.create_string_buffer(header, len(header))
    checked("no_new_privs", LIBC.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    checked(
        "seccomp", LIBC.prctl(_SET_SECCOMP, _FILTER, ctypes.c_void_p(ctypes.addressof(held)), 0, 0)
    )
