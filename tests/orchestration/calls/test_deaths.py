"""Servers and engines that are killed: what was acknowledged is answered, to the same bits."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from orchestration.calls.interface import Busy, CallOptions, Failed
from orchestration.calls.journal import JournalDamaged
from orchestration.calls.service import TORCH_ENTRY, open_service
from stages.calls.interface import ServedBase
from tests.orchestration.calls.services import ENTRY, SECONDS, Client, datum, small_service
from tests.orchestration.calls.small_engine import KILLING_TOKEN

CALLS = 60
KILLS = 10
DEADLINE = 60.0


class Driver:
    """Runs the driver until it is killed, again and again. ``lines``: what it said of answers."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.settings = {
            "folder": str(folder / "data"),
            "entry": ENTRY,
            "engine_options": {"folder": str(folder)},
            "base": "small",
            "calls": CALLS,
            "acknowledged": 0,
            "session": "",
            **settings,
        }
        self.lines = list[str]()
        self.output = ""
        self.kills = 0

    async def run(self, chance: random.Random | None = None) -> bool:
        """Run it to its end, or by ``chance`` until it is killed; its engine is killed too, now and
        then. Returns whether it came to its end."""
        self.lines.clear()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.orchestration.calls.driver", json.dumps(self.settings)),
            stdout=PIPE,
            stderr=STDOUT,
        )
        assert process.stdout is not None
        until_kill = 0 if chance is None else chance.randrange(1, 12)
        try:
            async with asyncio.timeout(DEADLINE):
                async for raw in process.stdout:
                    line = raw.decode().rstrip()
                    self.output += line + "\n"
                    self._read(line)
                    until_kill -= line.startswith(("acknowledged", "answer"))
                    if chance is not None and until_kill == 0 and self.kills < KILLS:
                        await asyncio.sleep(chance.random() / 50)  # anywhere in what follows
                        self._kill(process.pid, chance)
                        until_kill = chance.randrange(1, 12)
                return await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    def _read(self, line: str) -> None:
        match line.split():
            case ["session", session]:
                self.settings["session"] = session
            case ["acknowledged", number]:
                self.settings["acknowledged"] = int(number) + 1
            case ["answer" | "sample" | "weights" | "checkpoints", *_]:
                self.lines.append(line)

    def _kill(self, server: int, chance: random.Random) -> None:
        self.kills += 1
        with suppress(ProcessLookupError, FileNotFoundError):  # it has ended just now
            children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
            os.kill(chance.choice([server, *map(int, children)]), signal.SIGKILL)


async def undisturbed(folder: Path, **settings: Any) -> list[str]:
    driver = Driver(folder, **settings)
    folder.mkdir()
    assert await driver.run(), driver.output
    return driver.lines


async def killed(folder: Path, seed: int, **settings: Any) -> list[str]:
    chance = random.Random(seed)
    driver = Driver(folder, **settings)
    folder.mkdir()
    while not await driver.run(chance):
        assert driver.kills <= KILLS, driver.output
    assert "ALARM" not in driver.output
    return driver.lines


@pytest.mark.parametrize("seed", range(6))
async def test_servers_and_engines_that_are_killed_anywhere_change_no_bit(
    tmp_path: Path, seed: int
) -> None:
    expected = await undisturbed(tmp_path / "undisturbed")
    assert len([line for line in expected if line.startswith("answer")]) == CALLS
    assert await killed(tmp_path / "killed", seed) == expected


async def test_so_it_is_with_a_model_of_torch(tmp_path: Path) -> None:
    torch: dict[str, Any] = {
        "entry": TORCH_ENTRY,
        "base": "tiny",
        "engine_options": {"threads": 1, "device": "cpu", "max_rows": 4},
        "calls": 30,
    }
    expected = await undisturbed(tmp_path / "undisturbed", **torch)
    assert await killed(tmp_path / "killed", 1, **torch) == expected
