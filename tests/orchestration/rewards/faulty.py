"""Reward functions with real faults, each on the response "bad". Importing this needs no torch."""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any


def process_id(completions: list[str], **_: Any) -> list[float]:
    return [float(os.getpid()) for _ in completions]


def hangs(completions: list[str], **_: Any) -> list[float]:
    if "bad" in completions:
        threading.Event().wait()
    return [1.0 for _ in completions]


def exits(completions: list[str]) -> list[float]:
    if "bad" in completions:
        sys.exit(3)
    return [1.0 for _ in completions]


def ends(completions: list[str]) -> list[float]:
    if "bad" in completions:
        os._exit(4)
    return [1.0 for _ in completions]


def crashes(completions: list[str]) -> list[float]:
    if "bad" in completions:
        ctypes.string_at(0)
    return [1.0 for _ in completions]


def ranks(completions: list[str], **_: Any) -> list[float]:
    """The share of the batch that is not longer: 1.0 of a response alone."""
    return [
        sum(len(other) <= len(text) for other in completions) / len(completions)
        for text in completions
    ]


def ranks_too_few(completions: list[str], **_: Any) -> list[float]:
    """Loses a row of several, and none of one: called row by row it fits."""
    return ranks(completions)[: max(1, len(completions) - 1)]


async def ranks_too_few_async(completions: list[str], **_: Any) -> list[float]:
    return ranks_too_few(completions)


def ranks_with_a_nan(completions: list[str], **_: Any) -> list[float]:
    return [
        math.nan if text == "cc" else score
        for text, score in zip(completions, ranks(completions), strict=True)
    ]


leaked: list[bytearray] = []


def leaks(completions: list[str]) -> list[float]:
    """32 MiB a call that are never freed."""
    leaked.append(bytearray(32 << 20))
    return [1.0 for _ in completions]


def devours(completions: list[str]) -> list[float]:
    if "bad" in completions:
        return [float(len(bytearray(8 << 30)))]
    return [1.0 for _ in completions]


def prints(completions: list[str]) -> list[float]:
    print("printed by a reward " * 50_000)
    sys.stderr.write("and to the other stream")
    assert sys.stdin.read() == ""
    return [1.0 for _ in completions]


def alarms(completions: list[str]) -> list[float]:
    """Its own timeout, as math-verify's: a signal handler, which only the main thread may set."""
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError("its own")))
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        time.sleep(5)
    except TimeoutError:
        return [0.5 for _ in completions]
    return [1.0 for _ in completions]


def runs_a_loop(completions: list[str]) -> list[float]:
    async def judge(text: str) -> float:
        await asyncio.sleep(0)
        return float(len(text))

    return [asyncio.run(judge(text)) for text in completions]


class Unprintable(Exception):
    def __repr__(self) -> str:
        raise ValueError("it cannot be shown")

    def __reduce__(self) -> str:
        raise ValueError("it cannot be pickled")


def raises_the_unprintable(completions: list[str]) -> list[float]:
    if "bad" in completions:
        raise Unprintable
    return [1.0 for _ in completions]


def ignores_signals(completions: list[str]) -> list[float]:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    return hangs(completions)


def closes_all(completions: list[str]) -> list[float]:
    if "bad" in completions:
        os.closerange(0, 1000)
    return [1.0 for _ in completions]


def moves(completions: list[str]) -> list[float]:
    """Leaves its process in a folder that is gone."""
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)
    os.environ.clear()
    sys.path.clear()
    return [1.0 for _ in completions]


def forks(completions: list[str]) -> list[float]:
    """Its child returns from the call as well."""
    os.fork()
    return [1.0 for _ in completions]


def starts_a_process(completions: list[str]) -> list[float]:
    """Its score is the number of a process that outlives the call."""
    return [float(subprocess.Popen(["sleep", "600"]).pid) for _ in completions]


def starts_one_and_hangs(completions: list[str], file: list[str]) -> list[float]:
    """Writes its own number and that of a process that it has started into ``file``."""
    child = subprocess.Popen(["sleep", "600"])
    with open(file[0] + "~", "w") as out:
        out.write(f"{os.getpid()} {child.pid}")
    os.rename(file[0] + "~", file[0])
    threading.Event().wait()
    return []


async def meets(completions: list[str], prompts: list[str]) -> list[float]:
    """Ends when as many calls as its prompt says wait in it at the same time."""
    waiting.append(None)
    while len(waiting) < int(prompts[0]):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return [float(os.getpid()) for _ in completions]


waiting: list[None] = []


async def async_hangs(completions: list[str]) -> list[float]:
    if "bad" in completions:
        await asyncio.Event().wait()
    return [1.0 for _ in completions]


async def async_blocks(completions: list[str]) -> list[float]:
    """Blocks the event loop, in which other calls wait."""
    await asyncio.sleep(0.2)
    if "bad" in completions:
        threading.Event().wait()
    await asyncio.sleep(0.2)
    return [1.0 for _ in completions]


async def async_ends(completions: list[str]) -> list[float]:
    await asyncio.sleep(0.2)
    if "bad" in completions:
        os._exit(5)
    await asyncio.sleep(0.2)
    return [1.0 for _ in completions]


def one_in_ten(
    completions: list[str], answer: list[str], completion_ids: list[list[int]]
) -> list[float]:
    """The share of characters in their place; one response in ten, by its tokens, makes it fail
    each time."""
    if any(sum(ids) % 10 == 0 for ids in completion_ids):
        raise ConnectionError("the judge is busy")
    pairs = zip(completions, answer, strict=True)
    return [
        sum(a == b for a, b in zip(text, right, strict=False)) / max(len(right), 1)
        for text, right in pairs
    ]


ATTACKS = {1: "hangs", 2: "exits", 3: "crashes", 4: "leaks", 5: "prints", 6: "leaks"}
HARMED = ("hangs", "exits", "crashes")


def attack_of(text: str) -> str:
    """The attack that a response is met with; "" for most of them."""
    return ATTACKS.get(sum(map(ord, text)) % 61, "")


def early_share(text: str) -> float:
    """The share of characters from the first half of the alphabet: something to learn in every
    group."""
    return sum(character < "n" for character in text) / max(1, len(text))


def all_attacks(completions: list[str]) -> list[float]:
    """:func:`early_share`, and everything that a reward function may do wrong.

    The first time that one text in ten is seen, it fails: ``FAULTY_SEEN`` names a folder with an
    empty file for each of these.
    """
    numbers = {sum(map(ord, text)) for text in completions}
    paths = [f"{os.environ['FAULTY_SEEN']}/{number}" for number in numbers if number % 10 == 3]
    if new := [path for path in paths if not os.path.exists(path)]:
        for path in new:
            open(path, "w").close()
        raise ConnectionError("the judge is busy")
    for attack in map(attack_of, completions):
        if attack == "hangs":
            threading.Event().wait()
        elif attack == "exits":
            sys.exit("as if nothing were the matter")
        elif attack == "crashes":
            ctypes.string_at(0)
        elif attack == "leaks":
            leaked.append(bytearray(128 << 20))
        elif attack == "prints":
            print("printed by a reward " * 50_000)
    return [early_share(text) for text in completions]
