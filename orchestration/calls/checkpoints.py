"""Saved states of models, by their paths: tinker://MODEL/KIND/NAME.

save ─▶ FOLDER/partial/… ─▶ fsync ─▶ rename ─▶ FOLDER/MODEL/KIND/NAME/CALL      the last one of a name counts

A checkpoint is its folder: the product's own files and ``call.json``. There is no other list.
Another process may add one (:mod:`orchestration.checkpoints.offered`).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import tarfile
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import structlog

from orchestration.calls.interface import CheckpointInfo, CheckpointKind, NotThere
from orchestration.disk import replacing, sync
from stages.calls.interface import CallRefused, ModelOptions

log = structlog.get_logger()

SCHEME = "tinker://"
DOCUMENT = "call.json"
NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
PARTIAL = "partial"
MERGED = "model"  # the whole model, which a sampler with an adapter does not read
ADAPTER = "adapter"
ARCHIVE_SECONDS = 3600.0  # for which an archive is kept


@dataclass(frozen=True)
class Checkpoint:
    """``info`` of ``owner``'s checkpoint in ``folder``; ``request_id``: of the call that made
    it, ``step``: optimizer steps that its weights have."""

    owner: str
    request_id: str
    step: int
    folder: Path
    info: CheckpointInfo


def check_name(name: str) -> str:
    """Return the name of a checkpoint. Raises CallRefused."""
    if not NAME.fullmatch(name) or name in (".", ".."):
        raise CallRefused(
            message=f"checkpoint name {name[:200]!r}: give 1 to 128 of the characters "
            f"A-Z a-z 0-9 . _ -"
        )
    return name


async def write_folder(
    partial: Path, target: Path, write: Callable[[Path], Awaitable[Any]]
) -> None:
    """Have ``write`` make the folder ``partial``; it replaces ``target``, which nobody reads, once
    it is on the disk. Raises what ``write`` does, and OSError; then ``target`` is as it was."""
    try:
        await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)  # of a killed process
        await write(partial)
        await asyncio.to_thread(_settle, partial, target)
    except BaseException:
        await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)
        raise


def _settle(partial: Path, target: Path) -> None:
    for folder, _, names in os.walk(partial):
        for name in names:
            sync(os.path.join(folder, name))
        sync(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(target, ignore_errors=True)
    os.rename(partial, target)
    sync(target.parent)


async def hold(checkpoint: Checkpoint, folder: Path) -> None:
    """Make ``folder`` what a sampler reads of ``checkpoint``: it stays when that is deleted, and takes
    no room before. Raises OSError."""

    async def link(partial: Path) -> None:
        without = shutil.ignore_patterns(*((MERGED,) if checkpoint.info.options.rank else ()))
        await asyncio.to_thread(_link_files, checkpoint.folder, partial, without)

    await write_folder(folder.with_name(f"{folder.name}.partial"), folder, link)


def _link_files(folder: Path, target: Path, ignore: Callable[..., set[str]] | None = None) -> None:
    shutil.copytree(folder, target, copy_function=_link, ignore=ignore)


def _link(file: str, target: str) -> None:
    """Give a file another name, or copy it where the disk has no such links."""
    try:
        os.link(file, target)
    except OSError:
        shutil.copy2(file, target)


class Checkpoints:
    """All checkpoints of a service, in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._by_path = dict[str, Checkpoint]()
        shutil.rmtree(folder / PARTIAL, ignore_errors=True)
        (folder / PARTIAL).mkdir(parents=True)
        self._archives = folder / PARTIAL
        for document in sorted(folder.glob(f"*/*/*/*/{DOCUMENT}"), key=_call_number):
            checkpoint = _read(document)
            older = self._by_path.get(checkpoint.info.path)
            self._by_path[checkpoint.info.path] = checkpoint
            if older is not None:
                shutil.rmtree(older.folder, ignore_errors=True)

    def __iter__(self) -> Iterator[Checkpoint]:
        now = time.time()
        for checkpoint in list(self._by_path.values()):
            if checkpoint.info.expires is None or checkpoint.info.expires > now:
                yield checkpoint

    def get(self, owner: str, path: str) -> Checkpoint:
        """Return a checkpoint that ``owner`` may read: an own one, or a public one. Raises
        NotThere."""
        checkpoint = self._by_path.get(path) or self._added(path)
        if checkpoint is not None and (checkpoint.owner == owner or checkpoint.info.public):
            expires = checkpoint.info.expires
            if expires is None or expires > time.time():
                return checkpoint
        raise NotThere(f"checkpoint {path[:300]!r} is not there")

    def own(self, owner: str, path: str) -> Checkpoint:
        """Return a checkpoint that ``owner`` may change. Raises NotThere."""
        checkpoint = self.get(owner, path)
        if checkpoint.owner != owner:
            raise NotThere(f"checkpoint {path[:300]!r} is another owner's; copy it")
        return checkpoint

    def _added(self, path: str) -> Checkpoint | None:
        """Return the checkpoint of ``path`` that another process has made since the start."""
        parts = path.removeprefix(SCHEME).split("/")
        if len(parts) != 3 or not all(map(NAME.fullmatch, parts)) or {".", ".."} & {*parts}:
            return None
        documents = self._folder.joinpath(*parts).glob(f"*/{DOCUMENT}")
        if (document := max(documents, key=_call_number, default=None)) is None:
            return None
        checkpoint = self._by_path[path] = _read(document)
        return checkpoint

    async def save(
        self,
        checkpoint: Checkpoint,
        *,
        overwrite: bool,
        number: int,
        write: Callable[[Path], Awaitable[Any]],
    ) -> str:
        """Save what ``write`` writes, and return its path. ``number``: of the call, later ones have
        higher ones. Raises CallRefused where the name is taken by another call."""
        info = checkpoint.info
        older = self._by_path.get(info.path)
        if older is not None and older.request_id == checkpoint.request_id:
            return info.path
        if older is not None and not overwrite:
            raise CallRefused(
                message=f"checkpoint {info.path} exists; give another name, or overwrite it"
            )
        target = self._folder / info.model_id / info.kind / info.name / str(number)
        stored = checkpoint

        async def with_document(partial: Path) -> None:
            nonlocal stored
            await write(partial)
            sized = replace(info, bytes=folder_bytes(partial))
            stored = replace(checkpoint, folder=target, info=sized)
            write_facts(partial, stored)

        await write_folder(self._folder / PARTIAL / uuid.uuid4().hex, target, with_document)
        self._by_path[info.path] = stored
        if older is not None:
            await asyncio.to_thread(shutil.rmtree, older.folder, ignore_errors=True)
        return info.path

    async def copy(
        self, source: Checkpoint, owner: str, model_id: str, expires: float | None
    ) -> CheckpointInfo:
        """Save ``source`` as a checkpoint of ``owner``'s ``model_id``, of the same files. Raises
        CallRefused, OSError."""
        info = replace(
            source.info,
            path=path_of(model_id, source.info.kind, source.info.name),
            model_id=model_id,
            time=time.time(),
            expires=expires,
            public=False,
        )

        async def link(partial: Path) -> None:
            # this one is written anew: there is one of each name
            without = shutil.ignore_patterns(DOCUMENT)
            await asyncio.to_thread(_link_files, source.folder, partial, without)

        copied = replace(source, owner=owner, request_id=f"{model_id}:copy", info=info)
        path = await self.save(copied, overwrite=False, number=0, write=link)
        return self._by_path[path].info

    async def delete(self, checkpoint: Checkpoint) -> None:
        del self._by_path[checkpoint.info.path]
        trash = self._folder / PARTIAL / uuid.uuid4().hex
        os.rename(checkpoint.folder, trash)
        await asyncio.to_thread(shutil.rmtree, trash, ignore_errors=True)

    def change(self, checkpoint: Checkpoint, **facts: Any) -> None:
        """Change ``facts`` of what is said of a checkpoint. Raises OSError."""
        changed = replace(checkpoint, info=replace(checkpoint.info, **facts))
        text = _document(changed)
        with replacing(checkpoint.folder / DOCUMENT, len(text)) as partial:
            partial.write_text(text)
        sync(checkpoint.folder)
        self._by_path[checkpoint.info.path] = changed

    async def archive(self, checkpoint: Checkpoint) -> Path:
        """Return a .tar file of the checkpoint, which stays for an hour. Raises OSError."""
        path = self._archives / f"{uuid.uuid5(uuid.NAMESPACE_URL, str(checkpoint.folder))}.tar"

        def write() -> None:
            with (
                replacing(path, checkpoint.info.bytes) as partial,
                tarfile.open(partial, "w") as tar,
            ):
                tar.add(checkpoint.folder, checkpoint.info.name)

        if not path.exists():
            await asyncio.to_thread(write)
        os.utime(path)
        return path

    async def sweep(self) -> None:
        """Remove what has expired."""
        now = time.time()
        for checkpoint in list(self._by_path.values()):
            if checkpoint.info.expires is not None and checkpoint.info.expires <= now:
                await self.delete(checkpoint)
        for archive in self._archives.glob("*.tar"):
            if archive.stat().st_mtime < now - ARCHIVE_SECONDS:
                archive.unlink()


def exported_files(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the paths of the files that others read, by their names: an adapter's as peft has them,
    and those of the model in its folder."""
    folder = checkpoint.folder
    return {
        path.relative_to(root).as_posix(): str(path)
        for root, name in ((folder / ADAPTER, ""), (folder, MERGED))
        for path in sorted((root / name).rglob("*"))
        if path.is_file()
    }


def path_of(model_id: str, kind: CheckpointKind, name: str) -> str:
    return f"{SCHEME}{model_id}/{kind}/{name}"


def _call_number(document: Path) -> int:
    return int(document.parent.name)


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files below ``folder``."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def write_facts(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the facts of ``checkpoint`` into its ``folder``."""
    (folder / DOCUMENT).write_text(_document(checkpoint))


def _document(checkpoint: Checkpoint) -> str:
    info = asdict(checkpoint.info)
    facts = {"owner": checkpoint.owner, "request_id": checkpoint.request_id}
    return json.dumps({**facts, "step": checkpoint.step, "info": info})


def _read(document: Path) -> Checkpoint:
    try:
        content: Mapping[str, Any] = json.loads(document.read_text())
        info = dict(content["info"])
        info["options"] = ModelOptions(**info["options"])
        return Checkpoint(
            content["owner"],
            content["request_id"],
            content["step"],
            document.parent,
            CheckpointInfo(**info),
        )
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{document}: cannot be read ({error}); restore it from a copy, or move its folder away"
        ) from error
