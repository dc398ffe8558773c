"""What every benchmark shares: its options, a result that says how it was measured, libraries of
extras.

parser(__doc__).parse_args()     ─▶ a warning where the machine is not quiet
options.json.write(result)       ─▶ {"measured": {command, commit, date, machine, load}, … the result …}
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HEAD = "measured"
ROWS = "rows"
QUIET = 0.5  # load of a core
WARNED = "ASYNCDOCK_BENCHMARK_WARNED"  # set for processes of this one: it is their load


class ResultFile:
    """The file of ``--json``. It is made when a measurement begins: the commit and the load are
    those of that moment."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._head = {
            "command": command(),
            **commit(ROOT),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "processor": processor(),
            "cores": cores(),
            "python": platform.python_version(),
            **torch_version(),
            "load_at_start": load(),
        }

    def write(self, result: Mapping[str, Any] | Sequence[Any]) -> None:
        """Write ``result`` below how it was measured; a list as ``rows``.

        Raises ValueError where ``result`` has the head's key itself.
        """
        rows = result if isinstance(result, Mapping) else {ROWS: result}
        if HEAD in rows:
            raise ValueError(f"a result has no key {HEAD!r} of its own")
        head = {HEAD: {**self._head, "load_at_end": load()}}
        self.path.write_text(json.dumps({**head, **rows}, indent=1) + "\n", encoding="utf-8")

    def read(self) -> Any:
        """The result in the file, by :func:`read_result`."""
        return read_result(self.path)


def read_result(path: Path) -> Any:
    """The result in a file, without its head, as it was given to :meth:`ResultFile.write`. A file
    from before there were heads is read too. None where there is no file."""
    if not path.exists():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        return content
    result = {key: value for key, value in content.items() if key != HEAD}
    return result[ROWS] if HEAD in content and set(result) == {ROWS} else result


class BenchmarkParser(argparse.ArgumentParser):
    """It warns on standard error where the machine is not quiet when the arguments are parsed."""

    def parse_args(self, *arguments: Any, **named: Any) -> Any:
        options = super().parse_args(*arguments, **named)
        warn_if_busy()
        return options


def parser(doc: str | None, *, json_file: bool = True) -> argparse.ArgumentParser:
    """Return a parser of options for a benchmark. Its help prints the first paragraph of ``doc``,
    the docstring of the module, above the options, and the other paragraphs below them.

    ``json_file``: add the option ``--json``. Its value is a :class:`ResultFile`, or None.
    """
    description, _, rest = (doc or "").partition("\n\n")
    made = BenchmarkParser(
        description=description,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if json_file:
        made.add_argument(
            "--json",
            type=ResultFile,
            metavar="FILE",
            help="write the result to this file, with how it was measured",
        )
    return made


@contextmanager
def needs(name: str) -> Iterator[None]:
    """Import libraries of the extra ``name``.

    Where one is missing the command says what to install: exit code 2.
    """
    from pipeline.compat.extras import ExtraMissing, extra  # mutations.py imports nothing of ours

    try:
        with extra(name):
            yield
    except ExtraMissing as missing:
        print(f"error: {missing}", file=sys.stderr)
        raise SystemExit(2) from missing


def warn_if_busy() -> None:
    """Warn where the machine is not quiet, in the first process of a measurement."""
    if os.environ.setdefault(WARNED, str(os.getpid())) != str(os.getpid()):
        return
    if load() > QUIET * cores():
        print(
            f"warning: this machine is not quiet: load {load():.1f} on {cores()} cores; "
            f"figures are good for ratios at most",
            file=sys.stderr,
        )


def command() -> str:
    """The command line of this process, without the path of its interpreter."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["-m", spec.name.removesuffix(".__main__")] if spec else [Path(sys.argv[0]).name]
    return shlex.join(["python", *program, *sys.argv[1:]])


def commit(root: Path) -> dict[str, Any]:
    """The commit of the clone in ``root``, and whether its files differ from it; empty where
    ``root`` is no clone."""
    answers = list(_git(root, "rev-parse", "--show-toplevel", "HEAD"))
    if len(answers) != 2 or Path(answers[0]).resolve() != root:
        return {}
    return {"commit": answers[1], "changed": any(_git(root, "status", "--porcelain", "-uno"))}


def _git(root: Path, *arguments: str) -> Iterator[str]:
    """The lines of an answer of git; none where it has no answer."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    except OSError:
        return
    if done.returncode == 0:
        yield from done.stdout.splitlines()


def processor() -> str:
    """The name of the processor's model, or of its architecture where Linux does not say it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load() -> float:
    """Processes that ran or waited for a core, on average over the last minute."""
    return round(os.getloadavg()[0], 2)


def torch_version() -> dict[str, str]:
    """The version of torch that is installed, which is not imported for this."""
    try:
        return {"torch": version("torch")}
    except PackageNotFoundError:
        return {}
