"""The driver's files of the emulated devices, which a check of a machine counts in /dev."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

_glob = Path.glob


def glob(folder: Path, pattern: str, **options: Any) -> Iterator[Path]:
    if folder == Path("/dev") and pattern.startswith("davinci"):
        return iter([folder / "davinci0", folder / "davinci1"])
    return _glob(folder, pattern, **options)


Path.glob = glob  # type: ignore[assignment, method-assign]
