"""The part of the build that pyproject.toml cannot say: the README of the package index, and a
checkout that stays clean.

README.md ──▶ links and pictures of the repository in [project.urls] ──▶ the description on the package index
build/, asyncdock.egg-info ──▶ a temporary folder: a later build would pack what an earlier one left
"""

import atexit
import re
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path

from setuptools import setup

LINK = re.compile(r"(!?)(\[[^\]]*\]\()(?!https?:|mailto:|#)([^)\s]+)")


def absolute(markdown: str, repository: str) -> str:
    """Make the relative links of ``markdown`` absolute: pictures as files, all others as pages of
    ``repository``."""

    def replaced(link: re.Match[str]) -> str:
        picture, text, path = link.groups()
        return f"{picture}{text}{repository}/{'raw' if picture else 'blob'}/main/{path}"

    return LINK.sub(replaced, markdown)


def options() -> dict[str, dict[str, str]]:
    """Options of the build's commands that keep its files out of the checkout."""
    folder = tempfile.mkdtemp(prefix="asyncdock-build-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if "sdist" not in sys.argv:
        return {"build": {"build_base": folder}, "egg_info": {"egg_base": folder}}
    # The archive holds this folder under its path. The list of files that an earlier build left
    # there would be read.
    shutil.rmtree("asyncdock.egg-info", ignore_errors=True)
    atexit.register(shutil.rmtree, "asyncdock.egg-info", ignore_errors=True)
    return {"build": {"build_base": folder}}


if __name__ == "__main__":
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    setup(
        long_description=absolute(
            Path("README.md").read_text(encoding="utf-8"), project["urls"]["Source"]
        ),
        long_description_content_type="text/markdown",
        options=options(),
    )
