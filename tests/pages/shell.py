"""A page as a reader works through it: one folder, one shell, a home of its own, the commands of
this environment.

    unshare (network, processes, mounts of its own) ── bash: page.sh, then block after block ──▶ exit code, errors
                                                        └── a shell for each terminal of its own

Nothing that stands on the page is changed. All pages take the default ports, each in its own
network, and what a page leaves behind ends with its processes' namespace, after it has been found.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from tests.pages.page import ROOT, Block, blocks, needs

PRELUDE = Path(__file__).with_name("page.sh")
BIN = Path(sys.executable).parent
APART = [
    "setpriv",
    "--pdeathsig",
    "KILL",
    "unshare",
    "--net",
    "--mount",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
]
# What a command prints when the next terminal can go on.
READY = {
    "asyncdock run": "^step 1/",
    "asyncdock serve": "^AsyncDock serves ",
    "asyncdock tinker": "^export TINKER_API_KEY",
    "asyncdock agent": "agent works",
}


@cache
def missing() -> str:
    """Why no page can be executed here, or ""."""
    apart = [*APART, *(["--map-root-user"] if os.getuid() else [])]
    lacking = [name for name in ("setpriv", "unshare", "ip", "bash") if not shutil.which(name)]
    if lacking:
        return f"{', '.join(lacking)} not installed (Debian: apt install util-linux iproute2)"
    done = subprocess.run([*apart, "true"], capture_output=True, text=True)
    return f"no namespaces for this user: {done.stderr.strip()}" if done.returncode else ""


def clone(folder: Path) -> None:
    """The files of the repository that git has, as a clone has them."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)


def script(page: Path, chosen: list[Block], made: Path) -> str:
    """The commands that execute ``chosen``, whose files are written to ``made``, the reader's
    folder beside it."""
    steps = []
    for number, block in enumerate(chosen):
        path = made / f"{block.line}.sh"
        if block.file:
            (made / block.file).write_text(block.text, encoding="utf-8")
            steps.append(f"cp {made / block.file} .")
            continue
        if block.kind == "python":
            program = made / f"program_{number}.py"
            program.write_text(block.text, encoding="utf-8")
            path.write_text(f"cp {program} . && python {program.name}\n")
        else:  # its errors have the page's lines
            path.write_text("\n" * (block.line - 1) + block.shell, encoding="utf-8")
        if block.in_own_terminal:
            command = block.commands[-1]
            pattern = next(shown for start, shown in READY.items() if command.startswith(start))
            steps.append(f"terminal {block.line} {shlex.quote(pattern)}")
            continue
        if block.output is not None:
            path.with_suffix(".expected").write_text(block.output, encoding="utf-8")
        steps.append(f"block {block.line}")
    return "\n".join([PRELUDE.read_text(encoding="utf-8"), *steps, "end\n"])


def environment(page: Path, made: Path, home: Path, patience: int) -> dict[str, str]:
    """A new user's, with this environment's commands.

    Ray leaves its workers the priority of the tests.
    """
    foreign = ("ASYNCDOCK_", "PYTHON", "RAY_", "VIRTUAL_", "XDG_")
    user = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    shared = {
        name: value for name, value in os.environ.items() if name == "ASYNCDOCK_SHARED_MEMORY"
    }
    own = {"HOME": str(home), "PATH": f"{BIN}:{user['PATH']}", "RAY_worker_niceness": "0"}
    where = {"page": page.name, "blocks": str(made), "patience": str(patience)}
    return {**user, **shared, **own, **where}


def execute(
    page: Path, chosen: list[Block], folder: Path, timeout: float, patience: int = 60
) -> tuple[int, str]:
    """Exit code and errors of the blocks ``chosen`` of ``page``, one after the other, below
    ``folder``. Their processes may take ``patience`` seconds to end."""
    made, home, here = (folder / name for name in ("blocks", "home", "here"))
    for each in (made, home, here):
        each.mkdir()
    if "a clone" in needs(page):
        clone(here)
    whole = made / "page.sh"
    whole.write_text(script(page, chosen, made), encoding="utf-8")
    apart = [*APART, *(["--map-root-user"] if os.getuid() else [])]
    with (folder / "errors").open("w+", encoding="utf-8") as errors:
        done = subprocess.run(
            [*apart, "bash", str(whole)],
            cwd=here,
            env=environment(page, made, home, patience),
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            timeout=timeout,
        )
        errors.seek(0)
        return done.returncode, errors.read()


def runnable(page: Path) -> list[Block]:
    """The blocks of a page that are executed, or saved for one that is."""
    return [block for block in blocks(page) if block.runs or block.file]
