"""A pass over data, from the bytes of ``forward_backward`` to what the service takes, and its answer.

body ──▶ read_head: model and number ──▶ read_data: sizes of tensors checked ──▶ Datum
                                            └ CallRefused: what the client made wrong, by datum and field
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from api.tinker.messages import MESSAGES, MessageDamaged, parse
from api.tinker.tensors import FLOAT32, MOST_VALUES, read_tensor, refuse, tensor_values
from stages.calls.interface import Datum, LossOptions, PassOutput

MOST_DATA = 4096  # of one request; clients send 1,024
MOST_PARTS = 2**16  # of one datum: chunks, tensors and spans
_INT32 = np.dtype("<i4")
# What the losses of the server read; a client's other tensors are left out.
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


def read_data(head: Any, names: Collection[str] = ()) -> list[Datum]:
    """Return the data of a pass, with what losses read and the inputs ``names``. Raises
    CallRefused."""
    if len(head.data) > MOST_DATA:
        refuse("data", len(head.data), f"are more than {MOST_DATA} data", "send fewer at once")
    data = list[Datum]()
    room = MOST_VALUES
    for index, part in enumerate(head.data):
        place = f"data.{index}"
        try:
            datum = _read_datum(place, part, room, {*INPUTS, *names})
        except MessageDamaged as error:
            refuse(place, None, str(error), "send the message of the SDK")
        room -= sum(array.size for array in datum.inputs.values())
        data.append(datum)
    return data


def _read_datum(place: str, part: bytes, room: int, names: Collection[str]) -> Datum:
    message = parse("Datum", part, most=MOST_PARTS)
    chunks = [parse("Chunk", chunk, most=8) for chunk in message.model_input]
    tokens = list[np.ndarray]()
    for chunk in chunks:
        if not chunk.HasField("encoded_text"):
            kind = "an image" if chunk.HasField("image") else "no text"
            refuse(f"{place}.model_input", None, f"has {kind}", "send tokens: models read text")
        tokens.append(tensor_values(f"{place}.model_input", chunk.encoded_text.tokens, _INT32))
    inputs = dict[str, np.ndarray]()
    for entry in message.loss_fn_inputs:
        if entry.key in names:
            inputs[entry.key] = array = read_tensor(
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
