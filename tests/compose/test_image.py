"""The Dockerfile's steps run in order and leave what the image promises.

Here each distribution that the image installs is a stand-in, with the real one's metadata and next
to none of its code, so that no network is needed and it takes seconds; ``make compose-check``
builds the image with the real ones.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip(
    "dockerfile_parse", reason="dockerfile-parse is not installed; pip install -e '.[dev]'"
)

from tests.compose.image import Builder, Stage, StepFailed
from tests.compose.sandbox import ROOT, missing

MISSING = missing("groupadd", "useradd")
if not MISSING and sys.version_info[:2] != (3, 11):
    MISSING = "the image has Python 3.11, and this is another one"
REAL = {"packaging", "setuptools"}  # which build ours
MOUNTED = [
    name
    for name in ("usr/bin", "usr/sbin", "usr/lib", "usr/lib64", "usr/share")
    if Path("/", name).exists()
]
SITE_PACKAGES = "opt/asyncdock/lib/python3.11/site-packages"

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


def wheel(folder: Path, name: str, version: str) -> None:
    """A wheel called ``name-version``.

    It requires what the installed distribution requires, if that is the same version.
    """
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    try:
        found = importlib.metadata.distribution(name)
        if found.version == version:
            metadata += "".join(
                f"Requires-Dist: {requirement}\n" for requirement in found.requires or []
            )
    except importlib.metadata.PackageNotFoundError:
        assert name not in REAL
    if name in REAL:
        kept = [
            path for path in found.files or [] if path.suffix != ".pyc" and ".." not in path.parts
        ]
        content = {str(path): Path(str(path.locate())).read_bytes() for path in kept}
        commands = found.read_text("entry_points.txt") or ""
        content = {
            path: data
            for path, data in content.items()
            if not path.split("/")[0].endswith(".dist-info")
        }
        content[f"{info}/entry_points.txt"] = commands.encode()
    else:
        content = {
            f"{name}/{path}": b"" for path in ("__init__.py", "include/a.h", "tests/test_a.py")
        }
    content[f"{info}/METADATA"] = metadata.encode()
    content[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    lines = []
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as archive:
        for path, data in content.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{path},sha256={digest},{len(data)}\n")
            archive.writestr(path, data)
        archive.writestr(f"{info}/RECORD", "".join(lines) + f"{info}/RECORD,,\n")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    for line in (ROOT / "compose" / "requirements.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            wheel(folder, name, version)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In place of the Python image: this machine's programs are mounted over it, and this Python
    where nothing else is."""
    root = tmp_path_factory.mktemp("base") / "root"
    for name in ("etc", "opt", "tmp", "interpreter", *MOUNTED):
        (root / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    for name in ("passwd", "group", "login.defs"):
        shutil.copy(f"/etc/{name}", root / "etc" / name)
    local = root / "usr" / "local"
    interpreter = Path("/interpreter/bin") / Path(sys.executable).resolve().name
    subprocess.run([sys.executable, "-m", "venv", str(local)], check=True)
    settings = local / "pyvenv.cfg"
    settings.write_text(
        re.sub(
            r"^home = .*$", f"home = {interpreter.parent}", settings.read_text(), flags=re.MULTILINE
        )
    )
    (local / "bin" / "python").unlink()
    (local / "bin" / "python").symlink_to(interpreter)
    return root


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory, base: Path, wheels: Path) -> Builder:
    around = [part for name in MOUNTED for part in ("--ro-bind", f"/{name}", f"/{name}")]
    around += ["--ro-bind", sys.base_prefix, "/interpreter", "--ro-bind", str(wheels), "/wheels"]
    variables = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": "/wheels",
        "LD_LIBRARY_PATH": "/interpreter/lib",
    }
    (base / "wheels").mkdir()
    folder = tmp_path_factory.mktemp("image")
    return Builder(folder, base, arguments={}, around=around, variables=variables)


@pytest.fixture(scope="module")
def image(builder: Builder) -> Path:
    return builder.build("asyncdock")


def test_the_image_has_what_is_written_down_and_ours_and_nothing_else(image: Path) -> None:
    lines = (ROOT / "compose" / "requirements.txt").read_text().splitlines()
    written = {line.replace("-", "_") for line in lines if line and not line.startswith("#")}
    packages = image / SITE_PACKAGES
    found = {
        path.name.removesuffix(".dist-info").replace("-", "==", 1)
        for path in packages.glob("*.dist-info")
    }
    # so pip is gone too
    assert {name for name in found if not name.startswith("asyncdock")} == written
    listed = ["git", "ls-files", "pipeline", "stages", "orchestration", "api", "recipes"]
    tracked = subprocess.run(
        listed, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert tracked
    assert not [path for path in tracked if not (packages / path).is_file()]
    assert (image / "opt/asyncdock/bin/asyncdock").is_file()


def test_what_only_compiles_or_tests_is_left_out(image: Path) -> None:
    packages = image / SITE_PACKAGES
    assert not (packages / "torch/include").exists()
    assert not [
        name for name in ("numpy", "sympy", "networkx") if (packages / name / "tests").exists()
    ]
    assert (packages / "transformers/tests").exists()  # only theirs are ever looked for
    assert not (image / "src").exists()  # the sources stay behind in the stage that built them


def test_the_image_runs_without_privileges_and_writes_where_its_volumes_go(
    image: Path, builder: Builder
) -> None:
    output = builder.run(
        "asyncdock", ["sh", "-c", "id -u; id -g; pwd; command -v python; command -v asyncdock"]
    )
    assert output.split() == [
        "10001",
        "10001",
        "/data",
        "/opt/asyncdock/bin/python",
        "/opt/asyncdock/bin/asyncdock",
    ]
    owned = {name: (image / name).stat() for name in ("data", "models")}
    assert {(found.st_uid, found.st_gid, found.st_mode & 0o777) for found in owned.values()} == {
        (10001, 10001, 0o750)
    }
    writing = (
        "for d in / /opt/asyncdock /usr/local/bin /etc; do touch $d/x 2>/dev/null && echo "
        "wrote $d; done; true"
    )
    assert builder.run("asyncdock", ["sh", "-c", writing]) == ""
    assert os.access(image / "usr/local/bin/asyncdock-entrypoint", os.X_OK)


def test_a_missing_requirement_ends_the_build(builder: Builder, tmp_path: Path) -> None:
    """No step goes on without it, and torch is the one a person can do something about."""
    poor = Builder(
        tmp_path, builder.base, arguments={}, around=builder.around, variables={"PIP_NO_INDEX": "1"}
    )
    poor.variables |= {"LD_LIBRARY_PATH": "/interpreter/lib"}
    with pytest.raises(StepFailed, match="TORCH_INDEX"):
        poor.build("libraries")


def test_what_is_not_let_through_cannot_be_copied(builder: Builder, tmp_path: Path) -> None:
    other = Builder(tmp_path, builder.base, arguments={})
    other.stages = {"bad": Stage("bad", "python", [("COPY", "compose/setup /setup")])}
    with pytest.raises(FileNotFoundError, match="dockerignore"):
        other.build("bad")
