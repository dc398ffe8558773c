"""The launcher of a head that follows a killed one: what hosts still do for the former head ends, and orders go on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgpack

from orchestration.run.launchers import HEAD, ORDERS, InlineLauncher, RemoteLauncher
from pipeline.index.client import Index
from pipeline.index.embedded import EmbeddedIndex

WORKER = ("rollout", 1)


async def test_a_new_head_ends_what_the_former_one_has_ordered_and_orders_after_it(tmp_path: Path) -> None:
    with EmbeddedIndex(tmp_path) as server:
        async with Index(server.url, "run") as index:
            await index.load()
            former = RemoteLauncher(index, InlineLauncher(), [WORKER])
            await former.begin()
            for name in ("taken", "open"):  # its worker was started twice; a host has taken the first order alone
                await former.order(WORKER, name)
            await index.put_once("host:taken", "host-1")
            await index.put("life:rollout-1", "open")
            former.close()  # killed
            assert await index.log_end(ORDERS) == 2
            after = await index.woken("hosts", "", 0.01)
            head = RemoteLauncher(index, InlineLauncher(), [WORKER])
            await head.begin()
            assert await index.put_once("host:open", "host-1") == HEAD, "no host takes the order any more"
            assert await index.get("end:open") == "1", "and one that had taken it ends the worker"
            assert await index.woken("hosts", after, 5.0) != after, "hosts are woken to read that"
            await head.order(WORKER, "new")
            entry = await index.read_log(ORDERS, 2, 5.0)
            assert entry is not None
            assert msgpack.unpackb(entry)["name"] == "new"
            head.close()
            local = RemoteLauncher(index, InlineLauncher(), [])
            await local.begin()
            assert await index.get("end:new") is None, "a run without hosts has nothing to end"
            await asyncio.sleep(0)
