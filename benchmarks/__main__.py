"""List the benchmarks, or compare their results with others.

python -m benchmarks                                # all of them by room, a line each
python -m benchmarks score [--quick] [--only NAME…] [--json FILE]
python -m benchmarks pair REF NAME [--rounds N] [--there NAME] [--json FILE] [-- OPTIONS of the benchmark]
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.compare import pair, scoreboard

HERE = Path(__file__).parent


def description_of(path: Path) -> str:
    """The first paragraph of the docstring of a module, on one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split())


def programs() -> dict[str, list[str]]:
    """The benchmarks of each room, as ``python -m benchmarks.ROOM.NAME`` has them."""
    names: dict[str, list[str]] = {}
    for path in sorted(HERE.glob("*/*.py")):
        is_program = path.stem != "__main__"
        if is_program and 'if __name__ == "__main__"' in path.read_text(encoding="utf-8"):
            names.setdefault(path.parent.name, []).append(path.stem)
    return names


def listed() -> Table:
    """Each room, and the first sentence of each of its programs."""
    shown = Table(box=None, show_header=False)
    for room, names in programs().items():
        shown.add_row(f"[bold]{room}[/]", description_of(HERE / room / "__init__.py"))
        for name in names:
            shown.add_row(f"  {room}.{name}", description_of(HERE / room / f"{name}.py"))
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command")
    scored = commands.add_parser("score", help="one table of what has a peer, a floor or a goal")
    scoreboard.add_options(scored)
    paired = commands.add_parser(
        "pair",
        help="one benchmark at another commit and here, in turns",
        usage="python -m benchmarks pair REF NAME [--rounds N] [--there NAME] [--json FILE] "
        "[-- OPTIONS of the benchmark]",
    )
    pair.add_options(paired)
    given = list(sys.argv[1:] if arguments is None else arguments)
    end = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:end])
    if options.command == "pair":
        return pair.pair(options, given[end + 1 :])
    if options.command == "score":
        scoreboard.score(options)
    else:
        Console().print(listed())
    return 0


if __name__ == "__main__":
    sys.exit(main())
