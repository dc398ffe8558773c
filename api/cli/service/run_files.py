"""The folder of a run that a command names.

a path ─▶ itself      an id ─▶ GET /v1/runs/ID ─▶ the folder there, where it is on this machine
"""

from __future__ import annotations

from pathlib import Path

from api.cli.common.exit_codes import FAILED
from api.cli.common.output import refuse
from api.cli.folder.foreign import run_folder
from api.cli.service.asking import ask, is_run_folder, refuse_no_folder


def folder_of(run: str, server: str, *, is_any: bool = False) -> Path:
    """Return the folder of ``run``, itself a path or the id of a run of ``server``. Any failure
    ends the command. ``is_any``: the path may be of something else than a run."""
    if not is_any:
        refuse_no_folder(run)
    if Path(run).exists():
        return run_folder(Path(run).resolve())
    view = ask(server, lambda client: client.run(run), run)
    if not view.folder:
        refuse(f"run: {run} is {view.state} and has no files yet; wait until it runs", FAILED)
    if not is_run_folder(view.folder):
        url = view.recipe.get("checkpoint", {}).get("url")
        weights = f"without checkpoints/, as {url} has them" if url else "with its checkpoints"
        refuse(
            f"run: the files of {run} are in {view.folder} on another machine; give the command "
            f"that folder there, or copy it here, {weights}, and give the copy",
            FAILED,
        )
    return run_folder(Path(view.folder))
