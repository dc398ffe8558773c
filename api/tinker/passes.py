"""A pass over data, from the bytes of ``forward_backward`` to what the service takes, and its answer.

body ──▶ read_head: model and number ──▶ read_data: sizes of tensors checked ──▶ Datum
                                            └ CallRefused: what the client made wrong, by datum and field
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from api.tinker.messages import MESSAGES, MessageDamaged, parse
from pipeline.problems import Problem
from stages.calls.interface import CallRefused, Datum, LossOptions, PassOutput

MOST_DATA = 4096  # of one request; clients send 1,024
MOST_PARTS = 2**16  # of one datum: chunks, tensors and spans
MOST_VALUES = 2**25  # of all tensors of one request, sparse ones with their zeros
FLOAT32 = 1
_DTYPES: dict[int, np.dtype[Any]] = {FLOAT32: np.dtype("<f4"), 2: np.dtype("<i8")}
MOST_AXES = 2
_INT32 = np.dtype("<i4")
# What losses read; a client's other tensors are left out.
INPUTS = (
    *("target_tokens", "weights", "advantages", "logprobs", "sequence_ratio_mask"),
    *("clip_low_threshold", "clip_high_threshold"),
)


def read_head(body: bytes) -> Any:
    """Return the message of a pass. Its data are not parsed yet. Raises MessageDamaged."""
    return parse("ForwardBackwardRequest", body, most=MOST_DATA + 64)


def loss_options(head: Any) -> LossOptions:
    """Return the options of the loss. SDK 0.25 has the first map alone, later ones send both."""
    options: dict[str, float | str] = {}
    for option in head.loss_fn_config_v2:
        value = option.value
        options[option.key] = value.text if value.HasField("text") else value.number
    return options or {option.key: option.value for option in head.loss_fn_config}


def read_data(head: Any) -> list[Datum]:
    """Return the data of a pass. Raises CallRefused."""
    if len(head.data) > MOST_DATA:
        _refuse("data", len(head.data), f"are more than {MOST_DATA} data", "send fewer at once")
    data = list[Datum]()
    room = MOST_VALUES
    for index, part in enumerate(head.data):
        place = f"data.{index}"
        try:
            datum = _read_datum(place, part, room)
        except MessageDamaged as error:
            _refuse(place, None, str(error), "send the message of the SDK")
        room -= sum(array.size for array in datum.inputs.values())
        data.append(datum)
    return data


def _read_datum(place: str, part: bytes, room: int) -> Datum:
    message = parse("Datum", part, most=MOST_PARTS)
    chunks = [parse("Chunk", chunk, most=8) for chunk in message.model_input]
    tokens = list[np.ndarray]()
    for chunk in chunks:
        if not chunk.HasField("encoded_text"):
            kind = "an image" if chunk.HasField("image") else "no text"
            _refuse(f"{place}.model_input", None, f"has {kind}", "send tokens: models read text")
        tokens.append(_values(f"{place}.model_input", chunk.encoded_text.tokens, _INT32))
    inputs = dict[str, np.ndarray]()
    for entry in message.loss_fn_inputs:
        if entry.key in INPUTS:
            inputs[entry.key] = array = _read_tensor(
                f"{place}.loss_fn_inputs.{entry.key}", entry.value, room
            )
            room -= array.size
    return Datum(
        tokens=np.concatenate(tokens).astype(np.int64) if tokens else np.empty(0, np.int64),
        inputs=inputs,
        sampled=_read_spans(message.loss_fn_input_spans),
    )


def _read_spans(parts: Sequence[bytes]) -> tuple[tuple[str, int, int], ...]:
    spans = [parse("Span", part, most=8) for part in parts]
    return tuple(
        (span.sampled_tokens.sequence_id, span.sampled_tokens.offset, span.sampled_tokens.length)
        for span in spans
        if span.HasField("sampled_tokens")
    )


def _read_tensor(place: str, tensor: Any, room: int) -> np.ndarray:
    """Return the array of ``tensor``, of at most ``room`` values. Raises CallRefused."""
    dtype = _DTYPES.get(tensor.dtype)
    shape = tuple(tensor.shape)
    if dtype is None:
        _refuse(place, tensor.dtype, "is no known dtype", "send float32 (1) or int64 (2)")
    if len(shape) > MOST_AXES or min(shape, default=0) < 0 or math.prod(shape) > room:
        fix = f"send at most {MOST_AXES} axes, and {MOST_VALUES} values in one call"
        _refuse(f"{place}.shape", shape[:8], "is refused", fix)
    if tensor.HasField("sparse_csr"):
        array = _read_sparse(place, tensor.sparse_csr, dtype, shape)
    else:
        array = _values(place, tensor.dense, dtype)
        if shape and math.prod(shape) != array.size:
            _refuse(f"{place}.shape", shape, f"does not fit {array.size} values", "correct it")
        array = array.reshape(shape or -1)
    return array


def _read_sparse(place: str, csr: Any, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    values = _values(place, csr.values, dtype)
    starts = _values(place, csr.crow_indices, _DTYPES[2])
    columns = _values(place, csr.col_indices, _DTYPES[2])
    counts = np.diff(starts)
    is_sound = (
        len(shape) == 2
        and starts.size == shape[0] + 1
        and starts[0] == 0
        and starts[-1] == values.size == columns.size
        and bool((counts >= 0).all())
        and bool(((columns >= 0) & (columns < shape[1])).all())
    )
    if not is_sound:
        _refuse(place, shape, "is no matrix in CSR form", "send its values, rows and columns")
    array = np.zeros(shape, dtype)
    array[np.repeat(np.arange(shape[0]), counts), columns] = values
    return array


def _values(place: str, data: bytes, dtype: np.dtype) -> np.ndarray:
    if len(data) % dtype.itemsize:
        _refuse(place, len(data), "bytes are no whole values", f"send {dtype.itemsize} for each")
    return np.frombuffer(data, dtype).astype(dtype.newbyteorder("="))


def _refuse(key: str, value: object, wrong: str, fix: str) -> NoReturn:
    raise CallRefused(Problem(key, value, wrong, fix))


def write_pass(output: PassOutput) -> bytes:
    """Return the answer to a pass. A record has consecutive data with one trailing shape of tensors."""
    answer = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    for trailing, group in itertools.groupby(output.logprobs, key=lambda array: array.shape[1:]):
        arrays = [np.ascontiguousarray(array, "<f4") for array in group]
        record = answer.loss_fn_outputs.add(num_datums=len(arrays))
        tensor = record.fields.add(key="logprobs").value
        tensor.data = b"".join(array.tobytes() for array in arrays)
        tensor.offsets = np.cumsum([0, *(array.nbytes for array in arrays)]).astype("<i8").tobytes()
        tensor.dtype = FLOAT32
        tensor.trailing_shape.extend(trailing)
    for name, value in output.metrics.items():
        # clients split a name at its colon, and combine requests by what follows
        answer.metrics.add(key=name if ":" in name else f"{name}:sum", value=value)
    return bytes(answer.SerializeToString())
