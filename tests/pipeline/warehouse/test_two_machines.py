"""Warehouses of two machines that have the same host name and the same paths, in network
namespaces."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
import torch

from pipeline.data.arena import shared_memory_directory
from pipeline.data.columns import Column, Schema
from pipeline.index.client import Index, StageSpec
from pipeline.node import announced, node_id
from pipeline.warehouse.dock import Dock
from tests.machines import two_machines

SCHEMA = Schema([Column.ragged("ids", torch.int32)])
RUN = "two-machines"
SECRET = b"of one test on two machines"


async def machine(url: str, warehouse: str) -> None:
    """Join, serve on all addresses, put a group when a number comes in, and print what lies where
    at the end."""
    folder = shared_memory_directory() / RUN
    options = {
        "worker": warehouse,
        "warehouse": warehouse,
        "secret": SECRET,
        "directory": folder,
        "arena": 1 << 20,
    }
    stages = [StageSpec("read", "rows", SCHEMA.mask(["ids"]), 0)]
    async with Dock.open(url, RUN, SCHEMA, stages, **options) as dock:
        print(json.dumps([*await dock.serve("0.0.0.0"), node_id(folder)]), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            await dock.put({"ids": [torch.arange(int(line), dtype=torch.int32)]})
            print(line, end="", flush=True)


def test_two_machines_with_one_name_read_each_others_samples_at_the_address_that_leads_to_the_index(
    tmp_path: Path,
) -> None:
    with two_machines(tmp_path) as machines:
        first, second = (machines.start(i, __name__, machines.url, f"house-{i}") for i in range(2))
        announcements = []
        for number, process in enumerate((first, second)):
            assert process.stdin is not None
            assert process.stdout is not None
            announcements.append(json.loads(process.stdout.readline()))
            print(3 + number, file=process.stdin, flush=True)
            assert process.stdout.readline() == f"{3 + number}\n"
        hosts, _, nodes = zip(*announcements, strict=True)
        assert hosts == (machines.address(0), machines.address(1))
        assert [node.rpartition("-")[0] for node in nodes] == ["node", "node"], "the host names"
        assert nodes[0] != nodes[1]
        reader = machines.start(1, __name__, machines.url, "read")
        out, _ = reader.communicate(timeout=60)
        assert json.loads(out) == [[0, 1, 2], [0, 1, 2, 3]]


async def read(url: str) -> None:
    """Print the rows of both machines, as a third process of the second one reads them: both over
    the wire, as this process has shared memory of its own."""
    index = Index(url, RUN)
    dock = Dock(
        index, SCHEMA, worker="reader", directory=Path(), warehouse="house-1", secret=SECRET
    )
    claim = await dock.claim("read", 2, timeout=10)
    assert claim is not None
    rows = (await dock.fetch(claim, ["ids"]))["ids"].unbind()
    print(json.dumps(sorted(row.tolist() for row in rows)))
    await dock.close()
    await index.close()


@pytest.mark.parametrize(
    ("host", "route", "expected"),
    [
        ("127.0.0.1", "", "127.0.0.1"),
        ("192.0.2.7", "192.0.2.8", "192.0.2.7"),
        ("0.0.0.0", "192.0.2.8", "192.0.2.8"),
        ("::", "2001:db8::1", "2001:db8::1"),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
    ],
)
def test_what_is_announced(host: str, route: str, expected: str) -> None:
    assert announced(host, route) == expected


@pytest.mark.parametrize(
    ("host", "route", "others", "expected"),
    [
        ("auto", "192.0.2.8", "", "192.0.2.8"),
        # the way to the index is known to lead here
        ("auto", "192.0.2.8", "10.0.0.1", "192.0.2.8"),
        ("auto", "", "10.0.0.1", "10.0.0.1"),
        (
            "0.0.0.0",
            "127.0.0.1",
            "10.0.0.1",
            "10.0.0.1",
        ),  # the index is on this machine, and others come by its network
        ("0.0.0.0", "", "127.0.0.1", "127.0.0.1"),  # a machine without a network
        ("127.0.0.1", "127.0.0.1", "10.0.0.1", "127.0.0.1"),
        ("::", "", "fd00::1", "fd00::1"),
    ],
)
def test_an_address_that_is_derived_is_the_one_by_which_others_come(
    host: str, route: str, others: str, expected: str
) -> None:
    assert announced(host, route, others) == expected


@pytest.mark.parametrize(("host", "others"), [("0.0.0.0", "fd00::1"), ("::", "10.0.0.1")])
def test_all_addresses_of_one_version_do_not_answer_at_the_other(host: str, others: str) -> None:
    with pytest.raises(
        ValueError,
        match=rf"stands for addresses of IPv\d alone, and other nodes reach this one "
        rf"at {others}",
    ):
        announced(host, "", others)


@pytest.mark.parametrize(
    ("host", "route", "wrong"),
    [
        (
            "0.0.0.0",
            "",
            "stands for all addresses of this machine, and the index, which is on it too",
        ),
        ("::", "::1", "stands for all addresses of this machine"),
        (
            "localhost",
            "192.0.2.8",
            "is reached from this machine alone, and the index is on another one; .*such as 192",
        ),
    ],
)
def test_an_address_that_others_cannot_reach_is_refused(host: str, route: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=f"serve = '{host}': {wrong}"):
        announced(host, route)


async def test_a_warehouse_is_not_served_on_all_addresses_where_none_of_them_is_known(
    index: Index, tmp_path: Path
) -> None:
    async with Dock.open(
        index.url,
        index.run,
        SCHEMA,
        [],
        worker="w",
        arena=1 << 16,
        directory=tmp_path,
        secret=SECRET,
    ) as dock:
        with pytest.raises(ValueError, match=r"serve = '0\.0\.0\.0': stands for all addresses"):
            await dock.serve("0.0.0.0")
        assert await dock.serve("0.0.0.0", advertise="a.name") == (
            "a.name",
            dock.warehouses.server.address[1],
        )


if __name__ == "__main__":
    url, what = sys.argv[1:]
    asyncio.run(read(url) if what == "read" else machine(url, what))
