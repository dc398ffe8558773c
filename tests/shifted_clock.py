"""A clock that a test sets for some processes, as `date -s` sets a machine's: ``shifted_clock.c``, loaded into them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
COMPILER = shutil.which("cc")
WITHOUT_COMPILER = "it needs a C compiler (Debian: apt install gcc)"


class ShiftedClock:
    """The clock of the processes that are started with the variables ``environment``."""

    def __init__(self, folder: Path) -> None:
        assert COMPILER is not None, WITHOUT_COMPILER
        library, self._file = folder / "shifted_clock.so", folder / "shift"
        subprocess.run([COMPILER, "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"], check=True)
        self._file.write_bytes(bytes(8))
        self.environment = {"LD_PRELOAD": str(library), "SHIFTED_CLOCK": str(self._file)}

    def set(self, seconds: int) -> None:
        """Let the clock be ``seconds`` ahead of the machine's."""
        with self._file.open("r+b") as file:
            file.write(seconds.to_bytes(8, "little", signed=True))
