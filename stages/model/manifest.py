"""The manifest of a checkpoint: its files with their sizes and xxHash digests, in ``digests.json``
beside ``run.json``.

    all files written ─▶ write: digests.json, the last one ─▶ the checkpoint gets its name
    a reader          ─▶ verify: the files that it reads, sizes first ─▶ FilesDamaged names one that is not as it was written

Files are hashed in several threads; reading a file takes longer than hashing it. A folder without
``digests.json`` is not verified: checkpoints of older versions, and a ``model`` folder that was
copied out of its checkpoint.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from stat import S_ISREG
from typing import IO

import structlog
import xxhash

from pipeline.problems import Fatal

MANIFEST = "digests.json"
STATE = "run.json"  # of a checkpoint
CHUNK_BYTES = 1 << 20
MOST_THREADS = 8

log = structlog.get_logger()


class FilesDamaged(Fatal, RuntimeError):
    """A file is not as it was written. The message names it."""


@dataclass(frozen=True)
class FileDigest:
    """The size of a file in bytes, and its XXH3 digest of 64 bits as hexadecimal digits."""

    bytes: int
    xxh3: str

    def __str__(self) -> str:
        return f"xxh3 {self.xxh3} of {self.bytes} bytes"


def digest_of(path: Path) -> FileDigest:
    """Read and hash the file ``path``."""
    with path.open("rb", buffering=0) as file:
        return hashed(file)


def hashed(file: IO[bytes]) -> FileDigest:
    """Read and hash ``file`` to its end."""
    digest = xxhash.xxh3_64()
    size = 0
    chunk = memoryview(bytearray(CHUNK_BYTES))
    while count := file.readinto(chunk):  # type: ignore[attr-defined]
        digest.update(chunk[:count])
        size += count
    return FileDigest(size, digest.hexdigest())


def files_below(folder: Path) -> list[str]:
    """Returns the names of the files below ``folder``, relative to it."""
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )


def digests_of(folder: Path, names: Sequence[str]) -> dict[str, FileDigest]:
    """Read and hash the files ``names`` below ``folder``."""
    with _threads() as threads:
        return dict(
            zip(names, threads.map(lambda name: digest_of(folder / name), names), strict=True)
        )


def write(folder: Path) -> None:
    """Write the manifest of the checkpoint in ``folder``, which has all of its files."""
    names = [name for name in files_below(folder) if name != MANIFEST]
    files = {name: asdict(digest) for name, digest in digests_of(folder, names).items()}
    (folder / MANIFEST).write_text(json.dumps({"files": files}, indent=1))


def read(folder: Path) -> dict[str, FileDigest] | None:
    """Returns the manifest of the checkpoint in ``folder``; None where it has none.

    Raises FilesDamaged.
    """
    path = folder / MANIFEST
    try:
        return parse(path.read_bytes(), path)
    except FileNotFoundError:
        return None


def parse(text: bytes, where: object) -> dict[str, FileDigest]:
    """Returns the manifest ``text``, the file ``where``. Raises FilesDamaged."""
    try:
        files = {name: FileDigest(**digest) for name, digest in json.loads(text)["files"].items()}
        sizes = [digest.bytes for digest in files.values()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FilesDamaged(
            f"{where} is damaged: it is no list of digests ({error!r:.200})"
        ) from None
    refuse_names(files, sizes, where)
    return files


def refuse_names(names: Iterable[str], sizes: Iterable[object], where: object) -> None:
    """Raises FilesDamaged when the list of files ``where`` has a name that may lie outside of its
    folder, or a size that is none."""
    for name in names:
        if (
            PurePosixPath(name).as_posix() != name
            or name.startswith("/")
            or {"..", "."} & {*name.split("/")}
        ):
            raise FilesDamaged(f"{where} names {name!r:.200}, which is no file below its folder")
        if not name.isprintable():
            raise FilesDamaged(f"{where} names {name!r:.200}, which no checkpoint has")
    for size in sizes:
        if type(size) is not int or size < 0:
            raise FilesDamaged(f"{where} has {size!r:.100} as the size of a file")


def damages(
    folder: Path, manifest: Mapping[str, FileDigest], names: Sequence[str]
) -> Iterator[str]:
    """Compare the files ``names`` below ``folder`` with ``manifest``.

    Yield a sentence for each that differs.
    """
    whole = []
    for name in names:
        if wrong := _wrong_size(folder / name, manifest[name].bytes):
            yield wrong
        else:
            whole.append(name)
    for name, found in digests_of(folder, whole).items():
        if found != manifest[name]:
            written = manifest[name].xxh3
            yield (
                f"{folder / name} is damaged: its xxh3 digest is {found.xxh3}, and was {written} "
                f"when it was written"
            )


def verify(folder: Path, names: Sequence[str]) -> None:
    """Verify the files ``names`` below the checkpoint ``folder``; one that its manifest does not
    name is not. Does nothing where there is no manifest. Raises FilesDamaged."""
    manifest = read(folder)
    if manifest is None:
        return _say_unverified(folder)
    for wrong in damages(folder, manifest, [name for name in names if name in manifest]):
        raise FilesDamaged(wrong)


def verify_part(part: Path) -> None:
    """Verify what is in ``part``, a folder of a checkpoint such as its ``model``, or the checkpoint
    itself. Does nothing for a folder of no checkpoint. Raises FilesDamaged."""
    part = part.absolute()
    folder = next((each for each in (part, *part.parents[:2]) if (each / STATE).is_file()), None)
    if folder is None:
        return
    manifest = read(folder)
    if manifest is None:
        return _say_unverified(folder)
    prefix = "" if part == folder else f"{part.relative_to(folder).as_posix()}/"
    # A checkpoint that was copied from its URL has the parts that are read here.
    names = [
        name
        for name in manifest
        if name.startswith(prefix) and (folder / Path(name).parts[0]).exists()
    ]
    for wrong in damages(folder, manifest, names):
        raise FilesDamaged(wrong)


def _wrong_size(path: Path, size: int) -> str:
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return f"{path} is missing; it had {size} bytes when it was written"
    if not S_ISREG(status.st_mode):
        return f"{path} is damaged: it is no file, and had {size} bytes when it was written"
    found = status.st_size
    return (
        (f"{path} is damaged: it has {found} bytes, and had {size} when it was written")
        if found != size
        else ""
    )


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), "digests")


@functools.cache
def _say_unverified(folder: Path) -> None:
    """Log once in this process that ``folder`` cannot be verified."""
    log.warning(
        "the checkpoint has no digests, of an older version; its files are not verified",
        folder=str(folder),
    )
