"""The command ``asyncdock``: checks that its packages are the ones that Python finds, then runs
``api.cli.main``.

    a module of the user's, or of another distribution, hides one of PACKAGES ──▶ error: both files, and the way out
    another distribution overwrote a file of theirs, or took it along         ──▶ error: which one, and the way out
    another distribution has files in their folders                           ──▶ warning: which one

The checks import none of PACKAGES: it might be the wrong one. They cost a few milliseconds, as they
compare names and sizes of our own files; what other distributions have installed is read only after
something is wrong.
"""

from __future__ import annotations

import os
import sys
from glob import escape, glob
from importlib.util import find_spec

PACKAGES = ("pipeline", "stages", "orchestration", "api")
HERE = os.path.dirname(os.path.realpath(__file__))
REINSTALL = "pip install --force-reinstall --no-deps asyncdock"


def names_taken(name: str) -> str:
    """Return in words that ``name`` is one of PACKAGES."""
    others = ", ".join(other for other in PACKAGES if other != name)
    return f"{name!r} is a package of asyncdock, as are {others}"


def way_out(name: str, place: str) -> str:
    """Return what to do with ``place``, a file or folder of the user's by the name of one of
    PACKAGES."""
    other = f"my_project/{os.path.basename(place)}"
    return f"{names_taken(name)}. Rename {place}, or move it into a package of yours ({other})"


def hidden() -> str | None:
    """Return what is wrong when Python finds another module by the name of one of PACKAGES."""
    for name in PACKAGES:
        spec = find_spec(name)
        found = spec.origin if spec else None
        if not found or os.path.realpath(found) == os.path.join(HERE, name, "__init__.py"):
            continue
        place = os.path.dirname(found) if os.path.basename(found) == "__init__.py" else found
        if brought_by := owners(f"{name}/", f"{name}.py"):
            return (
                f"{found} of {brought_by} hides asyncdock's: {names_taken(name)}. "
                f"{separate(brought_by)}"
            )
        return (
            f"{place} hides asyncdock's: {way_out(name, place)}; or take {os.path.dirname(place)} "
            f"off PYTHONPATH: "
            "the modules of a recipe are found in the current folder without it"
        )
    return None


def damaged(sizes: dict[str, int]) -> str | None:
    """Return what is wrong when a file of ours is missing, or is another distribution's.

    ``sizes``: bytes, by path.
    """
    for path, size in sizes.items():
        try:
            if os.stat(os.path.join(HERE, path)).st_size == size:
                continue
            if brought_by := owners(path):
                name = path.partition("/")[0]
                return (
                    f"{brought_by} has overwritten {path} of asyncdock; {names_taken(name)}. "
                    f"{separate(brought_by)}"
                )
        except FileNotFoundError:
            return (
                f"{os.path.join(HERE, path)} of asyncdock is missing, as after another "
                f"distribution with a file of this name was uninstalled; {REINSTALL}"
            )
    return None


def shared(sizes: dict[str, int]) -> str | None:
    """Return a warning when another distribution has files in the folders of PACKAGES."""
    own = {tuple(path.split("/")[:2]) for path in sizes}
    for name in PACKAGES if sizes else ():
        folder = os.path.join(HERE, name)
        others = {(name, entry) for entry in os.listdir(folder)} - own - {(name, "__pycache__")}
        if others and (brought_by := owners(f"{name}/")):
            return (
                f"{brought_by} has files in {folder}; {names_taken(name)}. {separate(brought_by)}"
            )
    return None


def recorded() -> dict[str, int]:
    """The bytes of each file of PACKAGES, as pip recorded them. Empty in a checkout."""
    sizes = {}
    for record in glob(os.path.join(escape(HERE), "asyncdock-*.dist-info", "RECORD")):
        with open(record, encoding="utf-8") as lines:
            for line in lines:
                path, _, rest = line.partition(",")
                size = rest.rpartition(",")[2].strip()
                if size and path.startswith(tuple(f"{name}/" for name in PACKAGES)):
                    sizes[path] = int(size)
    return sizes


def owners(*beginnings: str) -> str:
    """Return the other distributions with a file that begins with one of ``beginnings``, as
    "api-tools 1.0"."""
    from importlib.metadata import distributions  # reads one file of each distribution

    found = set()
    for distribution in distributions():
        record = f"\n{distribution.read_text('RECORD') or ''}"
        if any(f"\n{beginning}" in record for beginning in beginnings):
            found.add(f"{distribution.metadata['Name']} {distribution.version}")
    return ", ".join(sorted(name for name in found if not name.startswith("asyncdock ")))


def separate(brought_by: str) -> str:
    """Return the way out for two distributions of the same files."""
    names = " ".join(part.split()[0] for part in brought_by.split(", "))
    return f"They cannot share an environment: pip uninstall {names}, then {REINSTALL}"


def main() -> None:
    """Check the installation, then run the command."""
    sizes = recorded()
    if wrong := damaged(sizes) or hidden():
        print(f"error: {wrong}", file=sys.stderr)
        sys.exit(1)
    if remark := shared(sizes):
        print(f"warning: {remark}", file=sys.stderr)
    from api.cli.main import main as command

    command()


if __name__ == "__main__":
    main()
