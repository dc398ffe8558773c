"""What differs between two versions of the same bytes, in an exact form that is short where little
differs.

Bytes are compared as numbers of two bytes. In bfloat16 a step changes 0.2 to 12 in a hundred of
them, by learning rate, most to a neighbour. A changed number takes its distance from the one before
(4 bytes) and its difference (2 bytes, modulo 2**16). The first bytes of all distances lie together,
then the second ones, and so on: most of these are zero, and zlib leaves one to two and a half bytes
of the six.
"""

from __future__ import annotations

import zlib

import numpy as np

# one number in so many; with more, the work takes longer than a link of 5 Gbit/s needs for all
# bytes
MOST_CHANGED = 8
# bytes
_DISTANCE = 4
_CHANGE = 6


def changes(new: np.ndarray, old: np.ndarray) -> bytes | None:
    """Returns what :func:`apply_changes` makes ``new`` of ``old`` with, both uint8 [n]; None where
    n is odd, or too much has changed."""
    if len(new) % 2:
        return None
    numbers = new.view("<u2")
    before = old.view("<u2")
    at = np.flatnonzero(numbers != before)
    if len(at) * MOST_CHANGED > len(numbers):
        return None
    distances = np.diff(at, prepend=0).astype("<u4")
    differences = numbers[at] - before[at]
    packing = zlib.compressobj(1, strategy=zlib.Z_RLE)
    packed = [
        packing.compress(one.view(np.uint8).reshape(-1, one.itemsize).T.tobytes())
        for one in (distances, differences)
    ]
    return b"".join((*packed, packing.flush()))


def apply_changes(memory: np.ndarray, old: np.ndarray, packed: bytes | bytearray) -> None:
    """Fill ``memory`` with ``old``, both uint8 [n], and ``packed``.

    Raises ValueError for what fits neither.
    """
    try:
        found = zlib.decompressobj().decompress(packed, _CHANGE * len(memory) // 2 + 1)
        planes = np.frombuffer(found, np.uint8).reshape(_CHANGE, len(found) // _CHANGE)
        distances, differences = (
            part.T.tobytes() for part in (planes[:_DISTANCE], planes[_DISTANCE:])
        )
        memory[:] = old
        memory.view("<u2")[np.cumsum(np.frombuffer(distances, "<u4"))] += np.frombuffer(
            differences, "<u2"
        )
    except (zlib.error, IndexError) as error:
        raise ValueError(f"changes of weights that cannot be read ({error})") from None
