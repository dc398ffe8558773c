"""What a new run takes over of a checkpoint of another one, whose weights it begins with.

runs/A/checkpoints/step-00000020/   model/  critic/model/  digests.json
              │ links: the files stay when A's checkpoint is removed, and take no room until then
              ▼
runs/B/base/                        the same names: model.source and critic.source of B
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from orchestration.checkpoints.checkpoint import CRITIC, MODEL
from orchestration.recipe.loading.load import override
from orchestration.recipe.model_files import CONFIG
from stages.model.manifest import MANIFEST, STATE

BASE = "base"  # in the folder of a run that began with weights of another one
LONGEST_NAME = 64  # characters of a run's name in a service
_PARTS = {"model.source": Path(MODEL), "critic.source": Path(CRITIC, MODEL)}


def sources(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the keys of a recipe that name a model, and its path in ``folder``: a checkpoint, or
    the :data:`BASE` of a run."""
    return ((key, str(folder / part)) for key, part in _PARTS.items())


def forked_recipe(recipe: Mapping[str, Any], start: Path | None) -> dict[str, Any]:
    """Return the tables of a run that begins with the weights in ``start``, a checkpoint of the run
    of ``recipe``, or without one as that run began. Its name says what it is."""
    tables = copy.deepcopy(dict(recipe))
    tables["name"] = f"{tables['name'].removesuffix('-fork')[: LONGEST_NAME - 5]}-fork"
    for key, path in sources(start) if start else ():
        if Path(path, CONFIG).is_file():  # the mock's weights are of no model
            override(tables, key, path)
    return tables


def take_over(recipe: Mapping[str, Any], folder: Path, start: Path) -> dict[str, Any]:
    """Link the models of ``recipe`` that lie in ``start`` into ``folder``, that of its run.

    Returns the recipe with their paths there. Files are copied where ``folder`` is on another disk.
    Raises FileNotFoundError when the checkpoint is gone.
    """
    tables = copy.deepcopy(dict(recipe))
    base = folder / BASE
    for (key, path), (_, target) in zip(sources(start), sources(base), strict=True):
        section, name = key.split(".")
        if tables[section][name] == path:
            shutil.copytree(path, target, copy_function=_link)
            tables[section][name] = target
    if base.is_dir():
        for name in (MANIFEST, STATE):  # by which the files are verified
            if (start / name).is_file():
                _link(str(start / name), str(base / name))
    return tables


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(source, target)
