"""Checks of a run's folder that another user may have written, before a command reads it.

another user's folder ─▶ refused where its recipe cannot be read, which may hold passwords
                     └─▶ resume: refused, as a resumed run executes what its recipe names
a pipe or a device in it ─▶ refused by its name: reading it would wait, or never end
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import TypeVar

from api.cli.common.output import refuse

Named = TypeVar("Named", Path, str, Path | None)

SPECIAL = {stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def run_folder(run: Named) -> Named:
    """Return ``run``. End the command if it is a folder that holds a pipe or a device, or whose
    recipe only another user can read. A callback of arguments that name the folder of a run."""
    if run is None:
        return run
    refuse_unreadable(Path(run))
    if not os.path.isdir(run):
        return run
    for folder, _, names in os.walk(run):
        for name in names:
            path = os.path.join(folder, name)
            try:
                kind = stat.S_IFMT(os.stat(path).st_mode)
            except OSError:
                continue  # a link to nothing, or removed by a run that goes on
            if kind in SPECIAL:
                refuse(
                    f"run: {path} is {SPECIAL[kind]}, which no run has; remove it, after a look "
                    f"at who put it there"
                )
    return run


def refuse_unreadable(run: Path) -> None:
    """End the command where the recipe in the folder ``run`` may not be read by this user."""
    recipe = run / "recipe.json"
    owner = "its owner"
    try:
        os.close(os.open(recipe, os.O_NONBLOCK))  # a pipe would be waited for
    except PermissionError:
        with contextlib.suppress(KeyError, OSError):
            owner = f"user {run.owner()}"
        refuse(
            f"run: {recipe} can be read by {owner} alone, as a recipe may hold passwords; "
            f"give the command as that user. launch.readers opens a run's samples, metrics, logs "
            f"and checkpoints to others, not its recipe and its index"
        )
    except OSError:
        return  # is reported where it is read


def refuse_anothers(run_dir: Path, trusted: bool) -> None:
    """End the command unless the run in ``run_dir`` is this user's, root's, or ``trusted``."""
    from orchestration.run.folder import BEGUN_IN
    from orchestration.state.paths import RECIPE

    for path in (run_dir, run_dir / RECIPE, run_dir / BEGUN_IN):
        try:
            owner = path.stat().st_uid
        except OSError:
            continue  # is reported where it is read
        if owner not in (0, os.geteuid()) and not trusted:
            refuse(
                f"run: {path} belongs to user {owner}, and a resumed run executes, as user "
                f"{os.geteuid()}, what its recipe names; look at {run_dir / RECIPE}, and give "
                f"--trust to go on"
            )
