"""Latency of ordinary REST requests while a client sends requests that are made to cost much.

    python -m benchmarks.robustness.attacks [--seconds 5] [--attacks letters,names] [--json FILE]

    asyncdock serve (its own process) ◀── attacker: one process, as many connections as the attack has
                                      ◀── this process: three connections, GET /readyz, /v1/runs, /v1/recipes in turn

Each attack lasts for ``--seconds``; the first row is without one. The goal: a 99th percentile of at
most 250 ms under each. The server may have 192 connections, as with 256 file descriptors. Run it
from the repository.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from multiprocessing.synchronize import Event
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from benchmarks import harness
from benchmarks.robustness.api_fuzz import Served

GOAL_SECONDS = 0.25
PATHS = ("/readyz", "/v1/runs", "/v1/recipes")
SERVER = ("--rate", "1000000", "--max-connections", "192", "--max-connections-per-address", "192")
RECIPE = {
    "name": "attack",
    "model": {"source": "mock"},
    "prompts": {"source": "builtin", "task": "repeat"},
    "rollout": {"engine": "mock"},
    "reward": {"functions": [{"name": "spelling"}]},
    "train": {"engine": "mock", "steps": 1},
}
Act = Callable[[aiohttp.ClientSession, str], Awaitable[None]]


async def letters(session: aiohttp.ClientSession, url: str) -> None:
    async with session.get(f"{url}/dashboard/{'a' * 8000}") as answer:
        await answer.read()


async def check(session: aiohttp.ClientSession, url: str, recipe: dict[str, Any]) -> None:
    async with session.post(f"{url}/v1/recipes/check", json={"recipe": recipe}) as answer:
        await answer.read()


async def long_name(session: aiohttp.ClientSession, url: str) -> None:
    await check(session, url, {**RECIPE, "name": "n" * 900_000})


async def names(session: aiohttp.ClientSession, url: str) -> None:
    await check(
        session,
        url,
        {**RECIPE, "reward": {"functions": [{"name": f"unknown{at}"} for at in range(8000)]}},
    )


async def unknown_names(session: aiohttp.ClientSession, url: str) -> None:
    await check(
        session,
        url,
        {**RECIPE, "reward": {"functions": [{"name": f"unknown{at}"} for at in range(64)]}},
    )


async def keys(session: aiohttp.ClientSession, url: str) -> None:
    await check(session, url, {**RECIPE, "rollout": {f"key{at}": at for at in range(9000)}})


async def half_open(session: aiohttp.ClientSession, url: str) -> None:
    parts = urlsplit(url)
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(b"GET /v1/runs HTTP/1.1\r\nHost: localhost\r\n")
        await reader.read()  # until the server closes it
        writer.close()


async def runs(session: aiohttp.ClientSession, url: str) -> None:
    async with session.get(f"{url}/v1/runs") as answer:
        await answer.read()
    await asyncio.sleep(1.0)  # all of them at once, once a second


# Each with its connections, and what a row of the table says.
ATTACKS: dict[str, tuple[Act, int, str]] = {
    "letters": (letters, 8, "8,000 letters in a path, 8 connections"),
    "long-name": (long_name, 8, "a name of 900 kB in a check, 8 connections"),
    "names": (names, 6, "8,000 reward names in a check, 6 connections"),
    "unknown-names": (unknown_names, 6, "64 unknown reward names in a check, 6 connections"),
    "keys": (keys, 6, "9,000 unknown keys in a check, 6 connections"),
    "half-open": (half_open, 300, "300 half-open requests, opened again when they are closed"),
    "at-once": (runs, 150, "150 lists of runs at once, every second"),
}


def attack(name: str, url: str, token: str, over: Event) -> None:
    """Run one attack until ``over`` is set. The target of a process."""
    act, connections, _ = ATTACKS[name]

    async def work() -> None:
        timeout = aiohttp.ClientTimeout(total=60)
        connector = aiohttp.TCPConnector(limit=0, force_close=False)
        async with aiohttp.ClientSession(
            headers=bearer(token), timeout=timeout, connector=connector
        ) as session:

            async def repeat() -> None:
                while not over.is_set():
                    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                        await act(session, url)

            tasks = [asyncio.create_task(repeat()) for _ in range(connections)]
            await asyncio.to_thread(over.wait)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(work())


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def latencies(url: str, token: str, seconds: float) -> list[float]:
    """Seconds of each ordinary request that was made within ``seconds``.

    Raises RuntimeError for one that is not answered with 200.
    """
    found: list[float] = []
    until = time.monotonic() + seconds
    async with aiohttp.ClientSession(headers=bearer(token)) as session:

        async def ask(path: str) -> None:
            while time.monotonic() < until:
                began = time.monotonic()
                async with session.get(url + path) as answer:
                    await answer.read()
                    if answer.status != 200:
                        raise RuntimeError(f"{path} was answered with {answer.status}")
                found.append(time.monotonic() - began)
                await asyncio.sleep(0.005)

        await asyncio.gather(*map(ask, PATHS))
    return found


def measure(name: str, url: str, token: str, seconds: float) -> dict[str, Any]:
    """The row of one attack; "" is none."""
    context = multiprocessing.get_context("spawn")
    over = context.Event()
    attacker = context.Process(target=attack, args=(name, url, token, over)) if name else None
    if attacker is not None:
        attacker.start()
        time.sleep(2.0)  # for its imports: nothing announces the first request
    try:
        found = sorted(asyncio.run(latencies(url, token, seconds)))
    finally:
        over.set()
        if attacker is not None:
            attacker.join(30)
            attacker.kill()
    quantiles = {
        "p50": statistics.median(found),
        "p99": found[int(0.99 * len(found))],
        "max": found[-1],
    }
    return {"attack": ATTACKS[name][2] if name else "none", "requests": len(found), **quantiles}


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each attack")
    parser.add_argument(
        "--attacks", default=",".join(ATTACKS), help="with commas between: %(default)s"
    )
    options = parser.parse_args()
    rows = []
    print(f"{'attack':58} {'requests':>8} {'p50 ms':>8} {'p99 ms':>8} {'max ms':>8}")
    with Served(*SERVER) as (url, token):
        for name in ["", *filter(None, options.attacks.split(","))]:
            row = measure(name, url, token, options.seconds)
            rows.append(row)
            figures = " ".join(f"{1000 * row[key]:8.1f}" for key in ("p50", "p99", "max"))
            print(f"{row['attack']:58} {row['requests']:8} {figures}", flush=True)
    if options.json:
        options.json.write({"goal_seconds": GOAL_SECONDS, "rows": rows})
    missed = [row["attack"] for row in rows if row["p99"] > GOAL_SECONDS]
    print(
        f"goal (p99 <= {1000 * GOAL_SECONDS:.0f} "
        f"ms): " + (f"missed under {', '.join(missed)}" if missed else "met")
    )
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
