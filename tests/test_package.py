"""Contents of a build for the package index: the wheel, the source archive, and the checkout
afterwards."""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest

from tests.plain import ROOT, SOURCES

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCE = PROJECT["urls"]["Source"]
TARGET = re.compile(r"(!?)\[[^\]]*\]\(([^)\s]+)")


def built(hook: str, checkout: Path, folder: Path) -> Path:
    """Return the file that pip's ``hook`` of the build makes of ``checkout``, in a process of its
    own as pip does it."""
    folder.mkdir(exist_ok=True)
    code = f"import sys; from setuptools import build_meta; build_meta.{hook}(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=checkout, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return next(folder.iterdir())


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, with what earlier builds used to leave: a module, and a list of files,
    that are no more."""
    folder = tmp_path_factory.mktemp("checkout")
    without_caches = shutil.ignore_patterns("__pycache__")
    for name in (*SOURCES, "docs", "tests"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=without_caches)
        else:
            shutil.copy(ROOT / name, folder / name)
    stale = folder / "build" / "lib" / "api"
    stale.mkdir(parents=True)
    (stale / "removed.py").touch()
    (folder / "notes.txt").touch()
    (folder / "asyncdock.egg-info").mkdir()
    (folder / "asyncdock.egg-info" / "SOURCES.txt").write_text("notes.txt\ntests/conftest.py\n")
    return folder


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    before = listing(checkout)
    path = built("build_wheel", checkout, tmp_path_factory.mktemp("wheel"))
    assert listing(checkout) == before  # a later build finds nothing of this one
    return path


@pytest.fixture(scope="module")
def archive(checkout: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The files of the source archive, without its own folder."""
    path = built("build_sdist", checkout, tmp_path_factory.mktemp("archive"))
    assert not list(checkout.glob("*.egg-info"))
    with tarfile.open(path) as packed:
        return [name.partition("/")[2] for name in packed.getnames()]


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as packed:
        name = next(name for name in packed.namelist() if name.endswith("/METADATA"))
        return email.message_from_string(packed.read(name).decode())


def test_the_wheel_has_each_file_of_the_packages_and_no_other(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if ".dist-info/" not in name}
    expected = {"asyncdock_command.py"}
    for package in ("pipeline", "stages", "orchestration", "api", "recipes"):
        files = [
            path
            for path in (ROOT / package).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        ]
        expected |= {str(path.relative_to(ROOT)) for path in files}
        assert package == "recipes" or f"{package}/py.typed" in names
    assert names == expected


def test_the_index_knows_what_it_is(metadata: Message) -> None:
    classifiers = metadata.get_all("Classifier", [])
    for minor in (11, 12, 13, 14):
        assert f"Programming Language :: Python :: 3.{minor}" in classifiers
    assert "Typing :: Typed" in classifiers
    assert metadata["Keywords"]
    named = {line.partition(",")[0] for line in metadata.get_all("Project-URL", [])}
    assert {"Source", "Documentation", "Changelog", "Issues"} <= named
    # Whoever moves the repository changes one name.
    assert all(url.startswith(SOURCE) for url in PROJECT["urls"].values())


def test_every_link_and_picture_of_the_index_page_is_absolute(metadata: Message) -> None:
    """Each stands where the README's link points, in the repository."""
    page = str(metadata.get_payload())
    readme = TARGET.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    targets = TARGET.findall(page)
    assert len(targets) == len(readme) > 20
    for (picture, target), (_, relative) in zip(targets, readme, strict=True):
        if relative.startswith(("https:", "#")):
            assert target == relative
        else:
            assert target == f"{SOURCE}/{'raw' if picture else 'blob'}/main/{relative}"
            assert (ROOT / relative).exists()
    assert any(picture for picture, _ in targets)


def test_the_source_archive_has_the_docs_and_no_stray_files(archive: list[str]) -> None:
    assert "docs/architecture.md" in archive
    assert "docs/images/dashboard-light.png" in archive
    assert {"setup.py", "pyproject.toml", "asyncdock_command.py", "README.md", "LICENSE"} <= set(
        archive
    )
    stray = [
        name
        for name in archive
        if name.startswith(("tests", "build", "benchmarks")) or name == "notes.txt"
    ]
    assert stray == []
