"""Tensors of Tinker's clients: their bytes as arrays, and back.

message ──▶ dtype, shape, sizes checked ──▶ array; sparse ones whole      Matrix ──▶ message, in its own form
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import numpy as np

from stages.calls.interface import CallRefused, Matrix

MOST_VALUES = 2**25  # of all tensors of one request, sparse ones with their zeros
SPARSE_VALUES = 2**16  # of a sparse tensor with its zeros; beyond, for each byte of it:
VALUES_OF_BYTE = 64  # a row has at least 8 bytes, so that 512 columns always fit
MOST_AXES = 2
FLOAT32 = 1
INT64 = 2
_DTYPES: dict[int, np.dtype[Any]] = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8")}


def read_tensor(place: str, tensor: Any, room: int) -> np.ndarray:
    """Return the array of ``tensor``, of at most ``room`` values. Raises CallRefused."""
    dtype = _DTYPES.get(tensor.dtype)
    shape = tuple(tensor.shape)
    if dtype is None:
        refuse(place, tensor.dtype, "is no known dtype", "send float32 (1) or int64 (2)")
    sizes = (0, *shape, math.prod(shape))
    if len(shape) > MOST_AXES or min(sizes) < 0 or max(sizes) > room:
        fix = f"send at most {MOST_AXES} axes, and {MOST_VALUES} values in one call"
        refuse(f"{place}.shape", shape[:8], "is refused", fix)
    if tensor.HasField("sparse_csr"):
        most = SPARSE_VALUES + VALUES_OF_BYTE * tensor.ByteSize()
        if math.prod(shape) > most:
            fix = f"send at most {most} values with the zeros, or the tensor as it is"
            refuse(f"{place}.shape", shape, "is too large for what is in it", fix)
        array = _read_sparse(place, tensor.sparse_csr, dtype, shape)
    else:
        array = tensor_values(place, tensor.dense, dtype)
        if shape and math.prod(shape) != array.size:
            refuse(f"{place}.shape", shape, f"does not fit {array.size} values", "correct it")
        array = array.reshape(shape or -1)
    return array


def _read_sparse(place: str, csr: Any, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    values = tensor_values(place, csr.values, dtype)
    starts = tensor_values(place, csr.crow_indices, _DTYPES[INT64])
    columns = tensor_values(place, csr.col_indices, _DTYPES[INT64])
    if not is_sparse_matrix(shape, values.size, starts, columns):
        refuse(place, shape, "is no matrix in CSR form", "send its values, rows and columns")
    array = np.zeros(shape, dtype)
    array[np.repeat(np.arange(shape[0]), np.diff(starts)), columns] = values
    return array


def tensor_values(place: str, data: bytes, dtype: np.dtype) -> np.ndarray:
    if len(data) % dtype.itemsize:
        refuse(place, len(data), "bytes are no whole values", f"send {dtype.itemsize} for each")
    return np.frombuffer(data, dtype).astype(dtype.newbyteorder("="))


def is_sparse_matrix(
    shape: tuple[int, ...], size: int, starts: np.ndarray, columns: np.ndarray
) -> bool:
    """Return whether ``size`` values are a matrix of ``shape`` in CSR form."""
    return (
        len(shape) == 2
        and starts.size == shape[0] + 1
        and starts[0] == 0
        and starts[-1] == size == columns.size
        and bool((np.diff(starts) >= 0).all())
        and bool(((columns >= 0) & (columns < shape[1])).all())
    )


def write_tensor(message: Any, matrix: Matrix) -> None:
    """Write ``matrix``, float32 or int64, into a message Tensor."""
    number = FLOAT32 if matrix.values.dtype.kind == "f" else INT64
    message.dtype = number
    message.shape.extend(matrix.shape)
    values = matrix.values.astype(_DTYPES[number]).tobytes()
    if matrix.starts is None or matrix.columns is None:
        message.dense = values
        return
    message.sparse_csr.values = values
    message.sparse_csr.crow_indices = matrix.starts.astype(_DTYPES[INT64]).tobytes()
    message.sparse_csr.col_indices = matrix.columns.astype(_DTYPES[INT64]).tobytes()


def refuse(key: str, value: object, wrong: str, fix: str) -> NoReturn:
    """Raise CallRefused."""
    raise CallRefused.of(key, value, wrong, fix)
