"""Uploads of weights: a safetensors file. Its header is checked before its payload is read.

length u64 │ JSON: {"NAME": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, …, "__metadata__": {…}} │ payload
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import IO

import torch
from aiohttp import web
from safetensors import SafetensorError
from safetensors.torch import load_file

from api.server.http.bodies import BINARY, PIECE, check_media_type, transfer_problems
from api.server.http.problems import HTTPProblem

SILENT_SECONDS = 30.0  # for which a body may stop
SLOWEST = 2**17  # bytes a second, at least
SPARE_DISK = 256 * 2**20  # bytes that uploads leave free on the disk
UNKNOWN_HEADER = 256 * 2**10  # bytes of the header of an unknown model
ENTRY_BYTES = 256  # of a tensor's entry without its name, at most
LENGTH_BYTES = 8
DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
}


Layout = dict[str, tuple[str, list[int]]]  # dtype and shape by tensor name
CheckLayout = Callable[[Layout], Awaitable[object]]


def longest_header(names: Iterable[str] | None) -> int:
    """Return the bytes that the header of a model with parameters ``names`` may have; None: the
    names are not known."""
    return (
        UNKNOWN_HEADER
        if names is None
        else 4096 + sum(ENTRY_BYTES + len(json.dumps(name)) for name in names)
    )


def parse_header(text: bytes) -> tuple[Layout, int]:
    """Return the layout, and the bytes of the whole file, by the header ``text`` of a safetensors
    file of floating-point tensors. Raises an HTTPProblem for another one.

    >>> parse_header(b'{"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}')
    ({'w': ('float32', [2, 3])}, 97)
    """
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unreadable(f"its header is not JSON ({type(error).__name__})") from None
    if not isinstance(entries, dict):
        raise _unreadable("its header is not a JSON object")
    entries.pop("__metadata__", None)
    layout = Layout()
    nbytes = LENGTH_BYTES + len(text)
    for name, entry in entries.items():
        kind, shape = (
            (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (None, None)
        )
        if not isinstance(kind, str) or kind not in DTYPES:
            raise _unreadable(
                f"tensor {name[:200]!r} is {str(kind)[:40]}; one of {', '.join(DTYPES)} is allowed"
            )
        if (
            not isinstance(shape, list)
            or not all(type(n) is int and 0 <= n < 2**53 for n in shape)
            or len(shape) > 16
        ):
            raise _unreadable(f"tensor {name[:200]!r} has no shape of at most 16 sizes")
        dtype, width = DTYPES[kind]
        layout[name] = (dtype, shape)
        nbytes += width * math.prod(shape)
    return layout, nbytes


async def receive_weights(
    request: web.Request, folder: Path, longest: int, check: CheckLayout
) -> Iterable[tuple[str, torch.Tensor]]:
    """Return the tensors of the body, a safetensors file.

    They are mapped from a file in ``folder`` that is removed with them. ``check`` may refuse the
    layout before the payload is read. The header has at most ``longest`` bytes. Raises an
    HTTPProblem.
    """
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".safetensors") as file:
        await _receive(request, file, longest, check)
        try:
            return (await asyncio.to_thread(load_file, file.name)).items()
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise _unreadable(type(error).__name__) from None


async def _receive(request: web.Request, file: IO[bytes], longest: int, check: CheckLayout) -> None:
    """Write the body to ``file``.

    Raises an HTTPProblem for another number of bytes than its header declares, and below SLOWEST
    bytes a second.
    """
    check_media_type(request, BINARY)
    content = request.content
    began = time.monotonic()
    slow = (
        f"The body stopped for {SILENT_SECONDS:.0f} s, or came at less than {SLOWEST} bytes a "
        f"second."
    )
    try:
        with transfer_problems(slow):
            async with asyncio.timeout(SILENT_SECONDS):
                beginning = await content.readexactly(LENGTH_BYTES)
                length = int.from_bytes(beginning, "little")
                if not 2 <= length <= longest:
                    raise _unreadable(
                        f"its header would have {length} bytes, at most {longest} are read"
                    )
                text = await content.readexactly(length)
    except asyncio.IncompleteReadError:
        raise _unreadable("it ends before its header does") from None
    layout, nbytes = await asyncio.to_thread(parse_header, text)
    await check(layout)
    if nbytes > (free := shutil.disk_usage(file.name).free - SPARE_DISK):
        detail = f"The file has {nbytes} bytes, and the server's disk has room for {max(0, free)}."
        raise HTTPProblem(
            503,
            detail,
            kind="no-room",
            fix="ask the operator for room",
            headers={"Retry-After": "60"},
        )
    part = beginning + text
    received = 0
    while part:
        received += len(part)
        if received > nbytes or (request.content_length or nbytes) != nbytes:
            raise _unreadable(
                f"its header declares {nbytes} bytes in all, and it has another number"
            )
        await asyncio.to_thread(file.write, part)
        with transfer_problems(slow):
            async with asyncio.timeout(SILENT_SECONDS):
                part = await content.read(PIECE)
            if time.monotonic() - began > SILENT_SECONDS + received / SLOWEST:
                raise TimeoutError
    if received != nbytes:
        raise _unreadable("it is shorter than its header declares")
    file.flush()


def _unreadable(why: str) -> HTTPProblem:
    fix = "send a safetensors file of the model's parameters"
    return HTTPProblem(400, f"The body cannot be read: {why}.", kind="body", field="body", fix=fix)
