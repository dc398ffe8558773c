"""The folders of a run's base models: what was in them when it began, so that the same bytes
elsewhere are accepted.

the run begins  ─▶ beside it: each file is hashed ─▶ base-models.json
resume --set model.source=NEW ─▶ the files of NEW are compared with that ─▶ the same: the recipe has NEW from then on
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog

from orchestration.disk import replacing
from orchestration.recipe.model_files import MODEL_KEYS
from orchestration.recipe.schema import Recipe
from orchestration.state.lock import RunError
from stages.model.manifest import FileDigest, digest_of, digests_of, files_below

FILE = "base-models.json"  # in the run's folder
Files = Mapping[str, FileDigest]

log = structlog.get_logger()


class BaseModelDiffers(RunError):
    """The folder that an override of ``key`` names is not the base model of the run; ``wrong`` says
    why."""

    def __init__(self, key: str, wrong: str, fix: str) -> None:
        super().__init__(f"{key}: {wrong}; {fix}")
        self.key = key
        self.wrong = wrong
        self.fix = fix


def record_beside(recipe: Recipe, out: Path) -> None:
    """Begin to write what is in the folders of the base models of ``recipe``, in a thread, where it
    is not known yet."""
    if wanted := {path for _, path in sources(recipe)} - _recorded(out).keys():
        threading.Thread(
            target=_record, args=(sorted(wanted), out), name="base-models", daemon=True
        ).start()


def _record(wanted: Sequence[str], out: Path) -> None:
    try:
        digests = {source: digests_of(Path(source), model_files(Path(source))) for source in wanted}
        write(out, _recorded(out) | digests)
    except OSError as error:
        log.warning(
            "the files of the base model are not recorded; it cannot be moved", reason=str(error)
        )


def write(out: Path, known: Mapping[str, Files]) -> None:
    """Write ``known``: the files of each folder."""
    data = {
        source: {name: asdict(file) for name, file in files.items()}
        for source, files in known.items()
    }
    text = json.dumps(data, indent=1)
    with replacing(out / FILE, len(text)) as partial:
        partial.write_text(text)


def sources(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield the keys of ``recipe`` that name a folder with a base model, and these folders."""
    for key in MODEL_KEYS:
        section, name = key.split(".")
        source = getattr(getattr(recipe, section), name)
        if source and Path(source).is_absolute():
            yield key, source


def refuse_missing(recipe: Recipe, out: Path, moved: Collection[str]) -> None:
    """Raise RunError when the folder of a base model is not there, and none of the keys ``moved``
    has it elsewhere."""
    for key, source in sources(recipe):
        if key not in moved and not Path(source).is_dir():
            raise RunError(
                f"{key}: {source} is not there; put the folder back, or, where it was moved, say "
                f"where: `asyncdock resume {out} --set {key}=…`: a folder with the same files is "
                f"accepted"
            )


def moved(before: Recipe, overrides: Mapping[str, Any], out: Path) -> set[str]:
    """Return the keys in ``overrides`` that name another folder with the files of the one before,
    and records that. Raises BaseModelDiffers where the files differ, or are not known."""
    known = _recorded(out)
    moved_keys = set[str]()
    for key, old in sources(before):
        new = overrides.get(key)
        if not isinstance(new, str) or not Path(new).expanduser().is_dir():
            continue
        folder = Path(new).expanduser().resolve()
        if str(folder) == old:
            continue
        files = known.get(old) or _present(Path(old), key, folder)
        if problem := difference(folder, files):
            raise BaseModelDiffers(
                key,
                f"{folder} is not {old} elsewhere: {problem}",
                "give the folder that the run began with",
            )
        known[str(folder)] = files
        moved_keys.add(key)
    if moved_keys:
        write(out, known)
    return moved_keys


def _present(old: Path, key: str, new: Path) -> Files:
    if old.is_dir():
        return digests_of(old, model_files(old))
    raise BaseModelDiffers(
        key,
        f"{new} cannot be compared with {old}, which is not there, and whose files the run has not "
        f"recorded",
        f"put the folder back, or link to it: `ln -s {new} {old}`",
    )


def difference(folder: Path, files: Files) -> str:
    """Return in words how ``folder`` differs from ``files``; "" where it does not.

    Sizes are compared first.
    """
    names = set(model_files(folder))
    if lacking := sorted(files.keys() - names):
        return f"it has no {lacking[0]!r}"
    if more := sorted(names - files.keys()):
        return f"it has {more[0]!r}, too"
    for name in sorted(names, key=lambda name: files[name].bytes):
        if (folder / name).stat().st_size != files[name].bytes or digest_of(folder / name) != files[
            name
        ]:
            return f"{name!r} has other bytes"
    return ""


def model_files(folder: Path) -> Sequence[str]:
    """Return the names of the files below ``folder``, without hidden ones: of a download, or of
    Git."""
    return [
        name
        for name in files_below(folder)
        if not any(part.startswith(".") for part in Path(name).parts)
    ]


def _recorded(out: Path) -> dict[str, Files]:
    try:
        data = json.loads((out / FILE).read_text())
        return {
            source: {name: FileDigest(**file) for name, file in files.items()}
            for source, files in data.items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
