"""A sandbox: bounds of what this process may see and use, kept by the kernel.

It knows nothing of what runs in it.

    a freshly forked process with one thread ─▶ enter(Sandbox(…), keep=[socket]) ─▶ untrusted imports and calls
                                                  namespaces, or Landlock, and seccomp; limits; no privileges; no descriptors

Which of the two a machine gives is found by a trial (:func:`available`). Importing this takes the
standard library alone.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestration.sandbox import landlock, namespaces
from orchestration.sandbox.kernel import (
    SandboxRefused,
    close_all_but,
    drop_privileges,
    kernel_release,
    own_user,
    processes_of_user,
)
from orchestration.sandbox.seccomp import Rule, install

NAMESPACES = "namespaces"
LANDLOCK = "landlock"
TRIAL_SECONDS = 30.0
WAY_OUT = (
    "let the kernel give unprivileged user namespaces (sysctl user.max_user_namespaces), or "
    "Landlock, to this user"
)
OF_THE_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt/lib")
SETTINGS = (
    *(
        "/etc/alternatives",
        "/etc/fonts",
        "/etc/group",
        "/etc/ld.so.cache",
        "/etc/ld.so.conf",
        "/etc/ld.so.conf.d",
        "/etc/localtime",
    ),
    *(
        "/etc/mime.types",
        "/etc/nsswitch.conf",
        "/etc/passwd",
        "/etc/protocols",
        "/etc/services",
        "/etc/timezone",
    ),
    *(  # HTTP clients read them when they are made
        "/etc/ssl/certs",
        "/etc/ssl/openssl.cnf",
        "/etc/pki/tls/certs",
        "/etc/pki/ca-trust/extracted",
        "/etc/ca-certificates",
    ),
)
OF_THE_NETWORK = ("/etc/hosts", "/etc/resolv.conf", "/etc/gai.conf", "/etc/host.conf")
_NEW_NAMESPACES = 0x7E020000  # all flags of clone that make one


@dataclass(frozen=True)
class Sandbox:
    """Limits of what a process may see and use. Sizes in bytes.

    ``read``: files and folders that it sees, as they are, beside Python's, the system's programs
    and libraries, and what can be imported from ``modules``, a path of imports: of a folder
    there that is no installation, modules and packages, but no other file. ``network``: it has
    the machine's; otherwise none, not even loopback. ``memory``: data of one process, 0 for no
    limit; of all of them together a quarter more. ``scratch``: of all files that it writes.
    ``processes``, ``files``: as many are there, and open, at the same time. With Landlock it
    writes no file and starts no process (threads it does). ``mechanism``: NAMESPACES or
    LANDLOCK, "" for the first that works (:func:`available`)."""

    read: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    network: bool = False
    memory: int = 0
    scratch: int = 256 << 20
    processes: int = 64
    files: int = 512
    mechanism: str = ""


@dataclass(frozen=True)
class Available:
    """The mechanisms that this machine gives: for each why it cannot be had, "" where it can.

    ``landlock`` is tried only where namespaces cannot be had.
    """

    namespaces: str
    landlock: str

    @property
    def mechanism(self) -> str:
        """The strongest one that can be had; "" for none."""
        return (
            LANDLOCK
            if self.namespaces and not self.landlock
            else ""
            if self.namespaces
            else NAMESPACES
        )

    @property
    def shortfall(self) -> str:
        """Things that this machine does not give, and why; "" where it gives all."""
        if not self.namespaces:
            return ""
        if self.landlock:
            return (
                f"no sandbox: namespaces are refused ({self.namespaces}), and so is Landlock "
                f"({self.landlock})"
            )
        weaker = "names of files can be seen, no file can be written, no process started"
        return f"Landlock's sandbox alone ({weaker}): namespaces are refused ({self.namespaces})"


def available() -> Available:
    """Return what this machine gives. Takes about 0.1 s the first time in a process: others try
    it."""
    reason = refusal(NAMESPACES)
    return Available(reason, refusal(LANDLOCK) if reason else "")


@functools.cache
def refusal(mechanism: str) -> str:
    """Return why this machine does not give ``mechanism``, by a trial; "" where it does."""
    if sys.platform != "linux":
        return f"it needs Linux, and this is {sys.platform}"
    return _tried(mechanism)


def enter(sandbox: Sandbox, keep: Sequence[int] = ()) -> None:
    """Put this process, freshly forked and with one thread, into ``sandbox``, for good; with
    namespaces a child of it goes on in its place. Its environment must hold no secret already, nor
    the one that it was started with. ``keep``: descriptors that stay open, beside 0, 1 and 2. Its
    working folder, HOME and TMPDIR are the scratch folder. Raises SandboxRefused, OSError."""
    mechanism = sandbox.mechanism or available().mechanism
    paths = [*visible(sandbox)]
    user = 0
    scratch = "/nonexistent"
    rules = [*_REFUSED]
    if mechanism == NAMESPACES:
        scratch, user = namespaces.enter(
            paths,
            network=sandbox.network,
            memory=sandbox.memory + sandbox.memory // 4,
            scratch=sandbox.scratch,
            keep=keep,
        )
        _limit(sandbox, others=0 if kernel_release() >= (5, 14) or user else processes_of_user())
        drop_privileges(own_user=user)
        # the machine's local sockets go with its network
        families = (2, 10, 16) if sandbox.network else (1, 2, 10, 16)
        rules.append(Rule("socket", argument=0, allowed=families))
    elif mechanism == LANDLOCK:
        close_all_but(0, 1, 2, *keep)
        user = own_user()
        _limit(sandbox, others=0 if user else processes_of_user())
        drop_privileges(own_user=user)
        rules = [*landlock.restrict(paths, sandbox.modules, network=sandbox.network), *rules]
    else:
        raise SandboxRefused(available().shortfall)
    os.environ.update(HOME=scratch, TMPDIR=scratch, PWD=scratch)
    # matplotlib, which many libraries import, wants a folder that seems to be writable
    if mechanism == LANDLOCK:
        os.environ["MPLCONFIGDIR"] = "/tmp"
    os.chdir(scratch if mechanism == NAMESPACES else "/")
    # nobody else sees the folder, and the process may have another real user than its files have
    os.umask(0)
    install(rules)


def visible(sandbox: Sandbox) -> Iterator[str]:
    """Yield the paths that ``sandbox`` sees, those above others first.

    Raises SandboxRefused for one of ``read`` that is not there.
    """
    paths: dict[str, None] = {}

    def add(path: str) -> None:
        """Add ``path``, and where its links lead."""
        paths.setdefault(os.path.abspath(path))
        paths.setdefault(os.path.realpath(path))

    for path in sandbox.read:
        if not os.path.exists(path):
            raise SandboxRefused(f"{path!r} is to be read, and is not there")
        add(path)
    network = OF_THE_NETWORK if sandbox.network else ()
    installations = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix} - {"/"}
    for path in (*OF_THE_SYSTEM, *SETTINGS, *network, *installations):
        if os.path.exists(path):
            add(path)
    prefixes = [os.path.realpath(path) for path in ("/usr", *installations)]
    for folder in sandbox.modules:
        if any(_is_below(os.path.realpath(folder), prefix) for prefix in prefixes):
            continue
        for entry in _importable(folder):
            add(entry)
    below: list[str] = []
    for path in sorted(paths):
        if path != "/" and not (
            any(_is_below(path, above) for above in below) and not os.path.islink(path)
        ):
            below.append(path)
            yield path


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _importable(folder: str) -> Iterator[str]:
    """Yield what can be imported from ``folder`` of a path of imports.

    Other files there are not shown: the folder may be a home, or that of a service.
    """
    if os.path.isfile(folder):
        yield folder  # a zip file
        return
    with_suffix = (".py", ".so", ".pyc", ".pth")
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    if os.path.basename(os.path.normpath(folder)) in ("site-packages", "dist-packages"):
        yield folder
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        is_module = entry.name.endswith(with_suffix) and entry.is_file()
        is_installed = entry.name.endswith((".dist-info", ".egg-info")) and entry.is_dir()
        if is_module or is_installed or (entry.is_dir() and _is_package(entry)):
            yield entry.path


def _is_package(folder: os.DirEntry[str]) -> bool:
    if not folder.name.isidentifier():
        return False
    try:
        return any(name.endswith((".py", ".so")) for name in os.listdir(folder.path))
    except OSError:
        return False


def _limit(sandbox: Sandbox, others: int) -> None:
    """Set the limits of this process and of its children.

    ``others``: processes that the kernel counts as well.
    """
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: sandbox.files,
        resource.RLIMIT_FSIZE: sandbox.scratch,
        resource.RLIMIT_NPROC: others + sandbox.processes,
        resource.RLIMIT_MEMLOCK: 8 << 20,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if sandbox.memory:
        limits[resource.RLIMIT_DATA] = sandbox.memory
    for kind, value in limits.items():
        _, most = resource.getrlimit(kind)
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(kind, (value, value))


# What no untrusted process needs: ways to other processes, to other files, to the kernel, and to
# memory without a limit.
_REFUSED = (
    Rule("clone3", error=38),  # its flags cannot be looked at; libraries then use clone
    Rule("clone", argument=0, any_bit=_NEW_NAMESPACES),
    *(
        Rule(call)
        for call in (
            *(
                "ptrace",
                "process_vm_readv",
                "process_vm_writev",
                "process_madvise",
                "process_mrelease",
                "kcmp",
            ),
            *(
                "pidfd_getfd",
                "mount",
                "umount2",
                "pivot_root",
                "chroot",
                "move_mount",
                "open_tree",
                "open_tree_attr",
            ),
            *(
                "fsopen",
                "fsconfig",
                "fsmount",
                "fspick",
                "mount_setattr",
                "unshare",
                "setns",
                "bpf",
                "userfaultfd",
            ),
            *(
                "perf_event_open",
                "io_uring_setup",
                "io_uring_enter",
                "io_uring_register",
                "keyctl",
                "add_key",
            ),
            *(
                "request_key",
                "kexec_load",
                "kexec_file_load",
                "init_module",
                "finit_module",
                "delete_module",
            ),
            *(
                "reboot",
                "swapon",
                "swapoff",
                "acct",
                "quotactl",
                "quotactl_fd",
                "settimeofday",
                "clock_settime",
            ),
            *(
                "clock_adjtime",
                "adjtimex",
                "sethostname",
                "setdomainname",
                "syslog",
                "open_by_handle_at",
            ),
            *(
                "name_to_handle_at",
                "fanotify_init",
                "iopl",
                "ioperm",
                "personality",
                "vhangup",
                "memfd_create",
            ),
            *(
                "memfd_secret",
                "shmget",
                "msgget",
                "semget",
                "mq_open",
                "setuid",
                "setgid",
                "setreuid",
                "setregid",
            ),
            *("setresuid", "setresgid", "setfsuid", "setfsgid", "setgroups"),
        )
    ),
)


# --------------------------------------------------------------------------------------------------
# The trial


def _tried(mechanism: str) -> str:
    """Return why ``mechanism`` cannot be entered; "" where it can."""
    root = str(Path(__file__).resolve().parents[2])
    code = (
        f"import sys; sys.path.insert(0, {root!r}); from {__name__} import trial; "
        f"trial(sys.argv[1], int(sys.argv[2]))"
    )
    environment = {"PATH": os.defpath}
    try:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = str(listening.getsockname()[1])
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", code, mechanism, port],
                env=environment,
                capture_output=True,
                text=True,
                timeout=TRIAL_SECONDS,
                check=False,
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the trial failed: {error}"
    if done.returncode == 0 and _is_confined(done.stdout):
        return ""
    lines = done.stderr.strip().splitlines()
    return (lines[-1] if lines else f"exit code {done.returncode}").removeprefix("OSError: ")


def _is_confined(text: str) -> bool:
    try:
        seen: Mapping[str, bool] = json.loads(text)
    except ValueError:
        return False
    return not any(seen.values())


def trial(mechanism: str, port: int) -> None:
    """Enter a sandbox, and print what is possible there that must not be. ``port``: of loopback, on
    which this process's parent listens."""
    parent = os.getppid()
    enter(
        Sandbox(
            modules=(str(Path(__file__).resolve().parents[2]),), mechanism=mechanism, memory=1 << 30
        )
    )
    from orchestration.sandbox.trial import possible

    print(json.dumps(possible(parent, port)))
