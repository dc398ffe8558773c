"""The launcher of a head that follows a killed one: what hosts still do for the former head ends,
and orders go on."""

from __future__ import annotations

import asyncio
from pathlib import Path

from orchestration.launch.launchers import InlineLauncher, RemoteLauncher
from orchestration.state.documents import END, HEAD, HOSTS, ORDERS, PROCESS, TAKEN_BY
from pipeline.index.client import Index
from pipeline.index.embedded import EmbeddedIndex

WORKER = ("rollout", 1)


async def test_a_new_head_ends_what_the_former_one_has_ordered_and_orders_after_it(
    tmp_path: Path,
) -> None:
    with EmbeddedIndex(tmp_path) as server:
        async with Index(server.url, "run") as index:
            await index.load()
            former = RemoteLauncher(index, InlineLauncher(), [WORKER])
            await former.begin()
            # its worker was started twice; a host has taken the first order alone
            for name in ("taken", "open"):
                await former.order(WORKER, name)
            await TAKEN_BY.put_once(index, "host-1", name="taken")
            await PROCESS.put(index, "open", worker="rollout-1")
            former.close()  # killed
            assert await ORDERS.end(index) == 2
            after = await index.woken(HOSTS, "", 0.01)
            head = RemoteLauncher(index, InlineLauncher(), [WORKER])
            await head.begin()
            assert await TAKEN_BY.put_once(index, "host-1", name="open") == HEAD, (
                "no host takes the order any more"
            )
            assert await END.get(index, name="open"), "and one that had taken it ends the worker"
            assert await index.woken(HOSTS, after, 5.0) != after, "hosts are woken to read that"
            await head.order(WORKER, "new")
            entry = await ORDERS.read(index, 2, 5.0)
            assert entry is not None
            assert entry.name == "new"
            head.close()
            local = RemoteLauncher(index, InlineLauncher(), [])
            await local.begin()
            assert await END.get(index, name="new") is None, (
                "a run without hosts has nothing to end"
            )
            await asyncio.sleep(0)
