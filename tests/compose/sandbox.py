"""Programs in a root file system of their own, made by bubblewrap: what a container is, without a
container engine.

    bwrap (root file system, mounts, no privileges, own processes) ──▶ setpriv (user, group) ──▶ program

Needs root and Debian's bubblewrap. The program ends with the process that started it, however that
ends.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def missing(*programs: str) -> str:
    """Why nothing can be sandboxed here, or "" when it can.

    ``programs`` are needed beside the sandbox itself.
    """
    if os.getuid() != 0:
        return "users, groups and mounts of containers are only for root"
    lacking = [
        name
        for name in ("bwrap", "nsenter", "setpriv", "unshare", "ip", *programs)
        if not shutil.which(name)
    ]
    packages = {
        "bwrap": "bubblewrap",
        "promtool": "prometheus",
        "ip": "iproute2",
        "nsenter": "util-linux",
    }
    needed = " ".join(dict.fromkeys(packages.get(name, name) for name in lacking))
    return f"{', '.join(lacking)} not installed (Debian: apt install {needed})" if lacking else ""


def as_user(user: str, groups: Sequence[str] = ()) -> list[str]:
    """What runs the rest of a command line as ``uid:gid``, without any capability and without a way
    to get one."""
    uid, gid = user.split(":")
    extra = ["--groups", ",".join(groups)] if groups else ["--clear-groups"]
    dropped = ["--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"]
    return ["setpriv", f"--reuid={uid}", f"--regid={gid}", *extra, *dropped]
