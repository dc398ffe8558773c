"""The header of a safetensors file, read before its payload: what weights are about to be sent, and how many bytes they are.

length u64 │ JSON: {"NAME": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, …, "__metadata__": {…}} │ payload
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

UNKNOWN_HEADER = 256 * 2**10  # bytes of the header of a model that is not known
ENTRY_BYTES = 256  # of a tensor's entry beside its name, at most
LENGTH_BYTES = 8
DTYPES = {"F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2)}


class HeaderUnreadable(ValueError):
    """Bytes that no safetensors file of floating-point tensors begins with. The message says why."""


@dataclass(frozen=True)
class WeightHeader:
    """``layout``: dtype and shape by tensor name. ``nbytes``: of the whole file, header and payload."""

    layout: dict[str, tuple[str, list[int]]]
    nbytes: int


def longest_header(names: Iterable[str] | None) -> int:
    """Bytes that the header of a model with parameters ``names`` may have; None: they are not known."""
    return UNKNOWN_HEADER if names is None else 4096 + sum(ENTRY_BYTES + len(json.dumps(name)) for name in names)


def header_bytes(beginning: bytes | bytearray, most: int = UNKNOWN_HEADER) -> int:
    """Bytes up to the end of the header, from a file's first :data:`LENGTH_BYTES`; ``most`` without these. Raises
    HeaderUnreadable."""
    length = int.from_bytes(beginning[:LENGTH_BYTES], "little")
    if not 2 <= length <= most:
        raise HeaderUnreadable(f"its header would have {length} bytes, at most {most} are read")
    return LENGTH_BYTES + length


def parse_header(beginning: bytes | bytearray) -> WeightHeader:
    """The header of a file that begins with ``beginning``: :func:`header_bytes` of it at least. Raises HeaderUnreadable.

    >>> text = b'{"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}'
    >>> parse_header(len(text).to_bytes(8, "little") + text)
    WeightHeader(layout={'w': ('float32', [2, 3])}, nbytes=97)
    """
    end = LENGTH_BYTES + int.from_bytes(beginning[:LENGTH_BYTES], "little")
    try:
        entries = json.loads(bytes(beginning[LENGTH_BYTES:end]))
    except (ValueError, RecursionError) as error:
        raise HeaderUnreadable(f"its header is no JSON ({type(error).__name__})") from None
    if not isinstance(entries, dict):
        raise HeaderUnreadable("its header is no JSON object")
    layout, payload = dict[str, tuple[str, list[int]]](), 0
    for name, entry in entries.items():
        if name != "__metadata__":
            dtype, shape, size = _tensor(name, entry)
            layout[name] = (dtype, shape)
            payload += size
    return WeightHeader(layout, end + payload)


def _tensor(name: str, entry: Any) -> tuple[str, list[int], int]:
    kind, shape = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (None, None)
    if not isinstance(kind, str) or kind not in DTYPES:
        raise HeaderUnreadable(f"tensor {name[:200]!r} is {str(kind)[:40]}; one of {', '.join(DTYPES)} is taken")
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 2**53 for n in shape) or len(shape) > 16:
        raise HeaderUnreadable(f"tensor {name[:200]!r} has no shape of at most 16 sizes")
    dtype, width = DTYPES[kind]
    return dtype, shape, width * math.prod(shape)
