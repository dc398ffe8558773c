"""A clock that a test sets for some processes, as `date -s` sets a machine's: ``shifted_clock.c``,
loaded into them."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path

import psutil

SOURCE = Path(__file__).with_suffix(".c")
COMPILER = shutil.which("cc")
WITHOUT_COMPILER = "it needs a C compiler (Debian: apt install gcc)"


class ShiftedClock:
    """The clock of the processes that are started with the variables ``environment``."""

    def __init__(self, folder: Path) -> None:
        assert COMPILER is not None, WITHOUT_COMPILER
        self._library = folder / "shifted_clock.so"
        self._file = folder / "shift"
        subprocess.run(
            [COMPILER, "-O1", "-shared", "-fPIC", "-o", self._library, SOURCE, "-ldl"], check=True
        )
        self._file.write_bytes(bytes(8))
        self.environment = {"LD_PRELOAD": str(self._library), "SHIFTED_CLOCK": str(self._file)}

    def processes(self) -> list[psutil.Process]:
        """The processes of this machine that have the clock."""
        shifted = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                if str(self._library) in Path(f"/proc/{process.pid}/maps").read_text():
                    shifted.append(process)
        return shifted

    def set(self, seconds: int) -> None:
        """Let the clock be ``seconds`` ahead of the machine's."""
        with self._file.open("r+b") as file:
            file.write(seconds.to_bytes(8, "little", signed=True))
