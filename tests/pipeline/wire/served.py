"""What the tests of the wire share: rows, servers, clients, processes, a proxy and certificates."""

from __future__ import annotations

import asyncio
import math
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.data.arena import Arena
from pipeline.data.blocks import PackedRows
from pipeline.data.columns import Column, Packed, Schema
from pipeline.warehouse.client import RemoteWarehouse
from pipeline.warehouse.server import WarehouseServer
from tests.pipeline.block_view import BlockView

SECRET = b"known to every node of the run"
SCHEMA = Schema(
    [
        Column.ragged("ids", torch.int64),
        Column.scalar("reward", torch.float32),
        Column.fixed("scores", torch.bfloat16, [2, 3]),
        Column.text("answer"),
        Column.fixed("wide", torch.uint8, [256]),
    ]
)
ROWS = {
    "ids": [torch.tensor([5, 6]), torch.tensor([], dtype=torch.int64), torch.tensor([7, 8, 9])],
    "reward": torch.tensor([0.5, -1.0, 2.0]),
    "scores": torch.arange(18, dtype=torch.bfloat16).view(3, 2, 3),
    "answer": ["äpfel", "", "z"],
}
COLUMNS = list(ROWS)
EIGHT = memoryview(bytes(8))


def put(arena: Arena, rows: PackedRows, offset: int, block: int) -> BlockView:
    """As a writer on the warehouse's own node does it."""
    rows.write_into(arena.slice(offset, rows.nbytes), block)
    return BlockView(SCHEMA, arena.slice(offset, rows.nbytes), block)


def remote(
    server: WarehouseServer | tuple[str, int], schema: Schema = SCHEMA, **options: Any
) -> RemoteWarehouse:
    host, port = server.address if isinstance(server, WarehouseServer) else server
    return RemoteWarehouse(host, port, schema, **{"secret": SECRET, "timeout": 20.0, **options})


def places(
    block: int, offset: int, slots: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    count = len(slots)
    return (
        np.full(count, block, np.int64),
        np.full(count, offset, np.int64),
        np.array(slots, np.int64),
    )


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - some conditions are another process's
            await asyncio.sleep(0.005)


def bits(tensor: torch.Tensor) -> bytes:
    return (
        tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    )


def random_values(
    dtype: torch.dtype, shape: Sequence[int], rng: np.random.Generator
) -> torch.Tensor:
    """Every bit pattern may occur, NaNs with payloads included."""
    raw = rng.integers(
        0, 2 if dtype == torch.bool else 256, math.prod(shape) * dtype.itemsize, dtype=np.uint8
    )
    return (
        torch.frombuffer(bytearray(raw), dtype=dtype).view(*shape)
        if len(raw)
        else torch.empty(*shape, dtype=dtype)
    )


def assert_rows(
    found: dict[str, Packed],
    schema: Schema,
    columns: Sequence[str],
    rows: Sequence[tuple[BlockView, int]],
) -> None:
    """``found`` holds to the bit what a reader on the rows' own node sees, in the order of
    ``rows``."""
    assert list(found) == list(columns)
    for name in columns:
        column = schema[name]
        packed = found[name]
        assert packed.values.dtype == (torch.uint8 if column.dtype == "utf8" else column.dtype)
        assert packed.values.dim() == 1
        parts = [view.row(name, slot) for view, slot in rows]
        if column.shape is None:
            assert packed.offsets is not None
            assert packed.offsets.dtype == torch.int64
            assert packed.offsets.tolist() == np.cumsum([0, *map(len, parts)]).tolist()
        else:
            assert packed.offsets is None
        assert bits(packed.values) == b"".join(map(bits, parts))


@contextmanager
def certificate(directory: Path) -> Iterator[tuple[ssl.SSLContext, ssl.SSLContext]]:
    """TLS contexts of a server with a new certificate for 127.0.0.1, and of a client that trusts
    it."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("the openssl command makes the certificate, and is not installed")
    key = directory / "key.pem"
    cert = directory / "cert.pem"
    subprocess.run(
        f"{openssl} req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj "
        f"/CN=warehouse -addext subjectAltName=IP:127.0.0.1 -keyout '{key}' -out '{cert}'",
        shell=True,
        check=True,
        capture_output=True,
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert, key)
    yield server, ssl.create_default_context(cafile=str(cert))


PROCESS = """
import asyncio, sys
from pathlib import Path
import torch
from pipeline.data.columns import Column, Schema
from pipeline.warehouse.server import WarehouseServer
from pipeline.data.arena import Arena, StaleHandle

async def main(path, secret, port):
    schema = Schema([
        Column.ragged("ids", torch.int64), Column.scalar("reward", torch.float32),
        Column.fixed("scores", torch.bfloat16, [2, 3]), Column.text("answer"), Column.fixed("wide", torch.uint8, [256]),
    ])
    async with WarehouseServer(Arena(Path(path)), schema, secret=secret.encode(), port=int(port)) as server:
        print(server.address[1], flush=True)
        await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


@contextmanager
def process(arena: Arena, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], tuple[str, int]]]:
    """A server of ``arena`` in a process of its own, and its address."""
    command = [sys.executable, "-c", PROCESS, str(arena.path), SECRET.decode(), str(port)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]
    ) as child:
        try:
            assert child.stdout is not None
            yield child, ("127.0.0.1", int(child.stdout.readline()))
        finally:
            child.kill()


@asynccontextmanager
async def proxy(
    target: tuple[str, int],
    on_request: Callable[[bytes], object] = lambda data: None,
    on_reply: Callable[[bytes], object] = lambda data: None,
) -> AsyncIterator[tuple[str, int]]:
    """Everything on its way, for a look."""

    async def forward(
        source: asyncio.StreamReader, sink: asyncio.StreamWriter, look: Callable[[bytes], object]
    ) -> None:
        try:
            while data := await source.read(1 << 16):
                look(data)
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            pass
        finally:
            sink.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        narrow = socket.socket()
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        narrow.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(narrow, target)
        except ConnectionError:
            narrow.close()
            writer.close()
            return
        there, back = await asyncio.open_connection(sock=narrow)
        await asyncio.gather(forward(reader, back, on_request), forward(there, writer, on_reply))

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()
