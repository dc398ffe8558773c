"""Values of training calls as bytes: in journals, and between the server and its engines.

A value is packed once, where a client's call or an engine's answer comes from, and moved as it is.
Arrays are an extension of msgpack: dtype, shape and bytes; nothing else than numbers can be in one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import msgpack
import numpy as np

from stages.calls.interface import (
    AdamOptions,
    Datum,
    LossOptions,
    Matrix,
    PassOutput,
    SampledSequence,
    SampleOutput,
    SampleRequest,
    SamplingOptions,
)

ARRAY = 1  # the extension's number
DTYPES = ("<f4", "<f8", "<i4", "<i8")


def pack(value: Any) -> bytes:
    """Pack JSON's values, arrays, and dataclasses of training calls: options by name, others as
    their fields in order. Raises TypeError, ValueError, OverflowError."""
    packed: bytes = msgpack.packb(value, default=_plain)
    return packed


def pack_pass(data: Sequence[Datum], loss: str, options: LossOptions) -> bytes:
    """The order of names in a datum and in ``options`` does not matter."""
    packed_data = [[each.tokens, sorted(each.inputs.items()), each.sampled] for each in data]
    return pack([packed_data, loss, sorted(options.items())])


def unpack_pass(packed: bytes) -> tuple[list[Datum], str, dict[str, float | str]]:
    data, loss, options = _unpack(packed)
    return (
        [Datum(tokens, dict(inputs), sampled) for tokens, inputs, sampled in data],
        loss,
        dict(options),
    )


def unpack_adam(packed: bytes) -> AdamOptions:
    return AdamOptions(**_unpack(packed))


def unpack_request(packed: bytes) -> SampleRequest:
    prompt, options, *rest = _unpack(packed)
    return SampleRequest(prompt, SamplingOptions(**options), *_with_matrix(rest, 4))


def unpack_output(kind: str, packed: bytes) -> PassOutput | SampleOutput | Mapping[str, Any]:
    value = _unpack(packed)
    if kind in ("forward", "forward_backward"):
        return PassOutput(*value)
    if kind == "sample":
        sequences, *rest = value
        sampled = [SampledSequence(*each) for each in sequences]
        return SampleOutput(sampled, *_with_matrix(rest, 3))
    output: dict[str, Any] = value
    return output


def _with_matrix(values: list[Any], place: int) -> list[Any]:
    """Return ``values`` with the matrix at ``place``; of an earlier version they end before it."""
    if len(values) > place and values[place] is not None:
        values[place] = Matrix(*values[place])
    return values


def _plain(value: Any) -> Any:
    """Return ``value``, which msgpack does not know, as what it knows."""
    if isinstance(value, AdamOptions | SamplingOptions):
        return vars(value)
    return [*vars(value).values()] if is_dataclass(value) else _array(value)


def _array(value: Any) -> msgpack.ExtType:
    array = np.ascontiguousarray(value)
    if array.dtype.str not in DTYPES:
        raise TypeError(f"an array of {array.dtype} is not sent, only of {', '.join(DTYPES)}")
    shape = msgpack.packb([array.dtype.str, array.shape])
    return msgpack.ExtType(ARRAY, shape + array.tobytes())


def _unpack(packed: bytes) -> Any:
    return msgpack.unpackb(packed, ext_hook=_of_array, use_list=False, strict_map_key=False)


def _of_array(number: int, data: bytes) -> np.ndarray:
    unpacker = msgpack.Unpacker(max_buffer_size=0)
    unpacker.feed(data[:256])
    dtype, shape = unpacker.unpack()
    if (
        number != ARRAY
        or dtype not in DTYPES
        or len(data) - unpacker.tell() != (np.dtype(dtype).itemsize * math.prod(shape))
    ):
        raise ValueError(f"an extension {number} with {dtype!r} of shape {shape} is no array")
    return np.frombuffer(data, dtype, offset=unpacker.tell()).reshape(shape)
