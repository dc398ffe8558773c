"""Checkpoints at a URL that all machines of a run reach: any scheme of fsspec, such as
s3://bucket/runs.

    trainer: checkpoints/step-00000020/ on its disk ─▶ push: each file ─▶ URL/step-00000020/files.json, the last one
    others:  files.json ─▶ pull: the parts that they read ─▶ checkpoints/step-00000020/ on their disk

Ranks of the trainer on other nodes stage their shards there first: a shard ─▶ URL/.step-00000020.partial/train/ ─▶ rank 0's
disk, as its checkpoints are whole; in the push it is moved on the server.

A checkpoint exists at the URL while its files.json does, which lists the files with their sizes.
Copied files are verified by the checkpoint's digests. Credentials come from the environment, as the
library of the scheme reads them. fsspec is imported when a store is opened.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

import stamina

from orchestration.disk import sync
from orchestration.state.lock import RunError
from orchestration.state.paths import STEP
from pipeline.locks import locked
from stages.model.manifest import (
    MANIFEST,
    STATE,
    FileDigest,
    FilesDamaged,
    damages,
    hashed,
    parse,
    refuse_names,
)
from stages.model.manifest import read as read_manifest

FILES = "files.json"
PUSH_SECONDS = 300.0  # for which a store that refuses is tried again, beside training
# for which another process of this machine may be reading the same checkpoint
PULL_SECONDS = 3600.0
# no such bucket, no right to write, no library
LASTING = (FileNotFoundError, PermissionError, ImportError)


class StoreRefused(RuntimeError):
    """The URL of checkpoints takes none, and has not for :data:`PUSH_SECONDS`."""


class CheckpointStore:
    """The checkpoints of one run below ``url``.

    Its methods block. Other errors than the named ones are those of the scheme's library.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self.url = url
        # Other processes write and remove: no listing is remembered.
        self._files, self._root = url_to_fs(url, use_listings_cache=False)
        self._is_local = bool(getattr(self._files, "local_file", False))

    def probe(self) -> None:
        """Write and remove a file. Raises RunError with what to do."""
        path = f"{self._root}/.writable"
        try:
            self._make_folder(self._root)
            self._files.pipe_file(path, b"")
            self._files.rm_file(path)
        except Exception as error:
            raise RunError(
                f"checkpoint.url: {self.url} cannot be written ({type(error).__name__}: {error}); "
                f"check that its folder or "
                "bucket exists, and this machine's rights and credentials"
            ) from error

    def _make_folder(self, path: str) -> None:
        """Make a folder in one that exists: neither a bucket, nor what should have been mounted."""
        with contextlib.suppress(FileExistsError):
            self._files.mkdir(path, create_parents=False)

    def names(self) -> list[str]:
        """Return the folders of the complete checkpoints, oldest first."""
        paths = self._files.glob(f"{self._root}/step-*/{FILES}")
        names = [PurePosixPath(path).parent.name for path in paths]
        return sorted(name for name in names if STEP.fullmatch(name))

    def push(self, checkpoint: Path, keep: int) -> None:
        """Copy the folder ``checkpoint`` to the URL, in the place of one of this name, and remove
        all but the newest ``keep`` there. Tried again while the store refuses; raises StoreRefused
        when it goes on."""

        def passing(error: Exception) -> bool:
            return not isinstance(error, LASTING)

        try:
            for attempt in stamina.retry_context(
                passing, attempts=None, timeout=PUSH_SECONDS, wait_max=10.0
            ):
                with attempt:
                    self._push(checkpoint)
                    for old in self.names()[:-keep]:
                        self._remove(old)
        except Exception as error:
            raise StoreRefused(
                f"checkpoint: {checkpoint.name} cannot be copied to checkpoint.url = {self.url} "
                f"({type(error).__name__}: {error}); `asyncdock resume` copies it when that is "
                f"mended"
            ) from error

    def stage(self, folder: Path, part: str) -> None:
        """Copy what is below ``part`` of a checkpoint that is being written in ``folder`` to where
        rank 0 fetches it."""
        self._put(
            {path.relative_to(folder).as_posix(): path for path in _files_below(folder / part)},
            folder.name,
        )

    def fetch_staged(self, folder: Path) -> None:
        """Copy what other nodes have staged of a checkpoint to ``folder``, where it is not there
        yet."""
        for name in self._staged(folder.name):
            if not (folder / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(f"{self._root}/{folder.name}/{name}", str(folder / name))

    def _staged(self, name: str) -> list[str]:
        root = f"{self._root}/{name}"
        names = [str(PurePosixPath(path).relative_to(root)) for path in self._files.find(root)]
        refuse_names(names, [], f"{self.url}/{name}")
        return names

    def _put(self, files: Mapping[str, Path], name: str) -> None:
        """Copy ``files`` to their names below the folder ``name``."""
        for folder in sorted(
            {str(parent) for file in files for parent in PurePosixPath(file).parents}
        ):
            self._make_folder(f"{self._root}/{name}/{folder}".removesuffix("/."))
        self._files.put(
            [str(path) for path in files.values()],
            [f"{self._root}/{name}/{file}" for file in files],
        )

    def _has(self, checkpoint: Path) -> bool:
        """Return whether the URL has this checkpoint, by its digests: a copy is not removed to make
        another one."""
        path = checkpoint / MANIFEST
        if checkpoint.name not in self.names() or not path.is_file():
            return False
        there = f"{self._root}/{checkpoint.name}/{MANIFEST}"
        return bool(self._files.exists(there) and self._files.cat_file(there) == path.read_bytes())

    def _push(self, checkpoint: Path) -> None:
        if self._has(checkpoint):
            return
        files = {path.relative_to(checkpoint).as_posix(): path for path in _files_below(checkpoint)}
        root = f"{self._root}/{checkpoint.name}"
        partial_name = f".{checkpoint.name}.partial"
        self._remove(checkpoint.name)
        staged = [name for name in self._staged(partial_name) if name in files]
        self._put(
            {name: path for name, path in files.items() if name not in staged}, checkpoint.name
        )
        for name in staged:
            self._files.mv(f"{self._root}/{partial_name}/{name}", f"{root}/{name}")
        self._remove(partial_name)
        targets = [f"{root}/{name}" for name in files]
        sizes = {name: path.stat().st_size for name, path in files.items()}
        # an object appears whole
        partial = f"{root}/.{FILES}" if self._is_local else f"{root}/{FILES}"
        self._files.pipe_file(partial, json.dumps(sizes).encode())
        if self._is_local:
            for path in (*targets, partial, root):
                sync(path)
            self._files.mv(partial, f"{root}/{FILES}")
            sync(root)

    def _sizes(self, name: str) -> dict[str, int]:
        """Return the files of the checkpoint ``name`` with their bytes.

        Raises FilesDamaged, and FileNotFoundError.
        """
        where = f"{self.url}/{name}/{FILES}"
        content = self._files.cat_file(f"{self._root}/{name}/{FILES}")
        try:
            sizes = dict(json.loads(content))
        except (ValueError, TypeError, RecursionError) as error:
            raise FilesDamaged(
                f"{where} is damaged: it is no list of files ({error!r:.200})"
            ) from None
        refuse_names(sizes, sizes.values(), where)
        return sizes

    def _verify(self, name: str, partial: Path, target: Path, files: Iterable[str]) -> None:
        """Compare ``files`` of the checkpoint ``name``, copied to ``partial``, with its digests:
        there, or in ``target``. Raises FilesDamaged."""
        digests = read_manifest(partial) or read_manifest(target) or {}
        for damage in damages(partial, digests, [file for file in files if file in digests]):
            raise FilesDamaged(f"{self.url}/{name} is damaged, or was copied wrongly: {damage}")

    def verify(self, name: str) -> tuple[dict[str, FileDigest] | None, list[str]]:
        """Read all files of the checkpoint ``name``.

        Returns its digests, None where it has none, and a sentence for each file that differs.
        Raises FilesDamaged for damaged digests.
        """
        root = f"{self._root}/{name}"
        if not self._files.exists(f"{root}/{MANIFEST}"):
            return None, []
        digests = parse(self._files.cat_file(f"{root}/{MANIFEST}"), f"{self.url}/{name}/{MANIFEST}")
        damages = []
        for file, digest in digests.items():
            where = f"{self.url}/{name}/{file}"
            try:
                with self._files.open(f"{root}/{file}", "rb") as content:
                    actual_digest = hashed(content)
            except FileNotFoundError:
                damages.append(f"{where} is missing")
                continue
            if actual_digest != digest:
                damages.append(
                    f"{where} is damaged: {actual_digest} was read, and {digest} was written"
                )
        return digests, damages

    def set_aside(self, name: str, to: str) -> None:
        """Rename the checkpoint ``name``, if it is there, so that no run goes on from it.

        Nothing of it is removed.
        """
        if name in self.names():
            self._files.mv(f"{self._root}/{name}", f"{self._root}/{to}", recursive=True)

    def _remove(self, name: str) -> None:
        """Remove a checkpoint, which stops to exist at once."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(f"{self._root}/{name}/{FILES}")
        with contextlib.suppress(FileNotFoundError):
            self._files.rm(f"{self._root}/{name}", recursive=True)

    def pull(self, name: str, directory: Path, parts: Sequence[str] = ()) -> Path:
        """Copy ``parts`` (default: all) of the checkpoint ``name`` to its folder below
        ``directory``, unless they are there, and return that folder. A part has its name once it is
        whole. Raises FileNotFoundError when the checkpoint is not, or no longer, at the URL."""
        target = directory / name
        directory.mkdir(parents=True, exist_ok=True)
        with locked(directory / ".pull.lock", wait=PULL_SECONDS):
            for leftover in directory.glob(".pull-*"):  # of a killed process
                shutil.rmtree(leftover)
            sizes = self._sizes(name)
            partial = directory / f".pull-{uuid.uuid4().hex}"
            stored_parts = {file.partition("/")[0] for file in sizes} - {STATE}
            requested_parts = stored_parts & {*(parts or stored_parts), MANIFEST}
            lacking = [
                part for part in (*sorted(requested_parts), STATE) if not (target / part).exists()
            ]
            wanted = {
                file: size for file, size in sizes.items() if file.partition("/")[0] in lacking
            }
            for file, size in wanted.items():
                if (there := self._files.info(f"{self._root}/{name}/{file}")["size"]) != size:
                    raise OSError(
                        f"checkpoint: {self.url}/{name}/{file} has {there} bytes of "
                        f"{size}; copy it again"
                    )
                (partial / file).parent.mkdir(parents=True, exist_ok=True)
            self._files.get(
                [f"{self._root}/{name}/{file}" for file in wanted],
                [str(partial / file) for file in wanted],
            )
            for file, size in wanted.items():
                if (got := (partial / file).stat().st_size) != size:
                    raise OSError(
                        f"checkpoint: {self.url}/{name}/{file} has {got} bytes of "
                        f"{size}; copy it again"
                    )
            self._verify(name, partial, target, wanted)
            for path in partial.rglob("*"):
                sync(path)
            target.mkdir(exist_ok=True)
            for part in lacking:  # run.json comes last: a checkpoint is listed by it
                os.replace(partial / part, target / part)
                sync(target)
            sync(directory)
            shutil.rmtree(partial, ignore_errors=True)
        return target


def _files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
