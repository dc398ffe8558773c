"""The names of the four packages, taken by a user's module or by another distribution: what the
command says.

Real commands, in a plain environment (tests.plain) and an empty folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncdock_command import PACKAGES
from stages.user_code import place_of
from tests.plain import ROOT, make_plain_environment

REWARD = "def brevity(completions, **columns):\n    return [1.0 for text in completions]\n"
MEANT = {  # modules that mean the user's own `api` or `pipeline`
    "submodule": "from api.helpers import x\n",
    "whole_module": "import api.helpers\n",
    "name_of_a_module_that_we_have": "from api.client import helper\n",
    "attribute": "import pipeline\nprint(pipeline.x)\n",
}
WAY_OUT = "Rename {0}, or move it into a package of yours (my_project/{1})"


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_plain_environment(tmp_path_factory.mktemp("collisions") / "environment")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder with a package ``api``, a module ``pipeline`` and a reward."""
    (tmp_path / "api").mkdir()
    (tmp_path / "api" / "__init__.py").touch()
    (tmp_path / "api" / "helpers.py").write_text("x = 1\n")
    (tmp_path / "pipeline.py").write_text("x = 1\n")
    return tmp_path


def asyncdock(
    commands: Path, folder: Path, *arguments: str, **variables: str
) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the command."""
    passed = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "XDG_", "VIRTUAL_"))
    }
    done = subprocess.run(
        [commands / "asyncdock", *arguments],
        cwd=folder,
        env=passed | {"HOME": str(folder), "COLUMNS": "400"} | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


def check_reward(commands: Path, folder: Path, name: str) -> tuple[int, str]:
    arguments = ("check", "tiny", f'--set=reward.functions=[{{name="{name}"}}]')
    code, _, errors = asyncdock(commands, folder, *arguments)
    return code, errors


def pip(commands: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(commands / "python"), *arguments]
    subprocess.run(
        [*command, "--quiet", "--disable-pip-version-check"], check=True, capture_output=True
    )


def wheel(folder: Path, name: str, *files: str) -> Path:
    """A distribution of another author with these files."""
    path = folder / f"{name.replace('-', '_')}-2.1-py3-none-any.whl"
    info = f"{name.replace('-', '_')}-2.1.dist-info"
    texts = {file: "theirs = True\n" for file in files}
    texts[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.1\n"
    texts[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    texts[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*texts, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in texts.items():
            archive.writestr(file, text)
    return path


# --- a module of the user's
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("is_folder", [True, False])
def test_a_module_on_the_path_is_named_with_the_way_out(
    name: str, is_folder: bool, commands: Path, tmp_path: Path
) -> None:
    place = tmp_path / (name if is_folder else f"{name}.py")
    file = place / "__init__.py" if is_folder else place
    file.parent.mkdir(exist_ok=True)
    file.write_text("raise SystemExit('it was imported')\n")

    code, output, errors = asyncdock(commands, tmp_path, "recipes", PYTHONPATH=".")
    assert (code, output) == (1, "")
    assert errors.startswith(
        f"error: {place} hides asyncdock's: {name!r} is a package of asyncdock, as are "
    )
    assert WAY_OUT.format(place, place.name) in errors
    assert f"take {tmp_path} off PYTHONPATH" in errors
    assert errors.count("\n") == 1

    assert asyncdock(commands, tmp_path, "recipes")[0] == 0  # the way out


def test_a_folder_without_a_module_is_no_collision(commands: Path, tmp_path: Path) -> None:
    for name in PACKAGES:
        (tmp_path / name).mkdir()
    code, _, errors = asyncdock(commands, tmp_path, "recipes", PYTHONPATH=".")
    assert (code, errors) == (0, "")


@pytest.mark.parametrize("meant", MEANT)
def test_a_reward_that_means_a_module_of_the_user(meant: str, commands: Path, folder: Path) -> None:
    (folder / "my_rewards.py").write_text(MEANT[meant] + REWARD)
    code, errors = check_reward(commands, folder, "my_rewards:brevity")
    place = folder / ("pipeline.py" if meant == "attribute" else "api")
    assert code == 2
    assert f"; {place} is hidden by asyncdock's: " in errors
    assert WAY_OUT.format(place, place.name) in errors
    assert "correct my_rewards" not in errors


@pytest.mark.parametrize("name", ["api.helpers:brevity", "pipeline:brevity"])
def test_a_reward_in_a_module_of_a_taken_name(name: str, commands: Path, folder: Path) -> None:
    code, errors = check_reward(commands, folder, name)
    place = folder / ("api" if name.startswith("api") else "pipeline.py")
    assert code == 2
    assert WAY_OUT.format(place, place.name) in errors
    assert "on PYTHONPATH" not in errors


def test_the_way_out_leads_out(commands: Path, folder: Path) -> None:
    (folder / "my_project").mkdir()
    shutil.move(folder / "api", folder / "my_project" / "api")
    (folder / "my_rewards.py").write_text(f"from my_project.api.helpers import x\n{REWARD}")
    assert check_reward(commands, folder, "my_rewards:brevity") == (0, "")


def test_a_mistake_in_a_name_of_ours_stays_what_it_is(commands: Path, tmp_path: Path) -> None:
    """No module of the user's is there to be meant."""
    (tmp_path / "my_rewards.py").write_text(f"from stages.algorithms import Algoritm\n{REWARD}")
    code, errors = check_reward(commands, tmp_path, "my_rewards:brevity")
    assert code == 2
    assert "correct my_rewards, or install what it needs" in errors
    assert "is hidden" not in errors


def test_an_error_while_a_function_runs_names_it_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def brevity() -> None:
        from api.helpers import x  # noqa: F401

    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    with pytest.raises(ModuleNotFoundError) as raised:
        brevity()
    assert WAY_OUT.format(folder / "api", "api") in place_of(raised.value, brevity)


# --- another distribution
# -----------------------------------------------------------------------------------------------


@pytest.fixture
def installed(commands: Path, tmp_path: Path) -> Iterator[Path]:
    """The commands of an environment to which the test may do anything; afterwards it is as it
    was."""
    yield commands
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(commands / "python"),
            "uninstall",
            "--yes",
            "api-tools",
        ],
        capture_output=True,
    )
    reinstall(commands)


def reinstall(commands: Path) -> None:
    options = (
        "--force-reinstall",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "--no-compile",
    )
    pip(commands, "install", *options, str(commands.parent / "source"))


def test_a_distribution_that_overwrites_a_file_is_named_and_the_way_out_works(
    installed: Path, tmp_path: Path
) -> None:
    tools = wheel(tmp_path, "api-tools", "api/__init__.py", "api/routes.py")
    pip(installed, "install", "--no-index", "--no-deps", str(tools))
    code, output, errors = asyncdock(installed, tmp_path, "recipes")
    assert (code, output) == (1, "")
    assert errors.startswith("error: api-tools 2.1 has overwritten api/__init__.py of asyncdock; ")
    assert (
        "pip uninstall api-tools, then pip install --force-reinstall --no-deps asyncdock" in errors
    )

    pip(installed, "uninstall", "--yes", "api-tools")
    code, output, errors = asyncdock(installed, tmp_path, "recipes")
    assert (code, output) == (1, "")
    assert "api/__init__.py of asyncdock is missing" in errors
    assert "pip install --force-reinstall --no-deps asyncdock" in errors

    reinstall(installed)
    code, _, errors = asyncdock(installed, tmp_path, "recipes")
    assert (code, errors) == (0, "")


def test_files_of_a_distribution_beside_ours_are_a_warning(installed: Path, tmp_path: Path) -> None:
    pip(
        installed,
        "install",
        "--no-index",
        "--no-deps",
        str(wheel(tmp_path, "api-tools", "api/routes.py")),
    )
    code, output, errors = asyncdock(installed, tmp_path, "recipes", "--json")
    assert code == 0
    assert output.startswith("[")
    assert errors.startswith("warning: api-tools 2.1 has files in ")
    assert errors.count("\n") == 1


def test_a_distribution_found_before_ours_is_named(installed: Path, tmp_path: Path) -> None:
    target = tmp_path / "packages"
    tools = wheel(tmp_path, "api-tools", "api/__init__.py")
    pip(installed, "install", "--no-index", "--no-deps", "--target", str(target), str(tools))
    code, _, errors = asyncdock(installed, tmp_path, "recipes", PYTHONPATH=str(target))
    assert code == 1
    assert errors.startswith(
        f"error: {target}/api/__init__.py of api-tools 2.1 hides asyncdock's: "
    )


def test_a_file_changed_by_hand_is_the_users_affair(installed: Path, tmp_path: Path) -> None:
    file = next(installed.parent.glob("lib/python*/site-packages/api/__init__.py"))
    file.write_text(file.read_text() + "# looked into\n")
    code, _, errors = asyncdock(installed, tmp_path, "recipes")
    assert (code, errors) == (0, "")


def test_the_names_are_those_that_are_installed() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "setuptools"
    ]
    packages = [pattern.removesuffix("*") for pattern in setuptools["packages"]["find"]["include"]]
    assert sorted(packages) == sorted([*PACKAGES, "recipes"])
