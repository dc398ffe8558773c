"""The protobuf messages of Tinker's clients, by name: :data:`MESSAGES`. The numbers are the wire
contract of its SDKs 0.25 to 0.38.

bytes ──▶ parse ──▶ count the fields, refuse too many ──▶ protobuf ──▶ a message; nested messages are parsed later

The classes are in a descriptor pool of their own: an SDK in the same process has files of the same
name.
"""

from __future__ import annotations

from typing import Any

from pipeline.compat.extras import extra

with extra("tinker"):
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message import DecodeError
    from google.protobuf.message_factory import GetMessageClass

_PACKAGE = "asyncdock.tinker"
# Fields of each message: type, name, number; "*": repeated. What may occur often is bytes, which
# the caller parses one by one. Enumerations are int32, and maps are entries, as on the wire.
_FIELDS = {
    "ForwardBackwardRequest": "string model_id 1, int32 seq_id 2, *bytes data 3, string loss_fn 4, "
    "*Number loss_fn_config 5, bool forward_only 6, *Option loss_fn_config_v2 7",
    "Number": "string key 1, double value 2",
    "Option": "string key 1, OptionValue value 2",
    "OptionValue": "double number 1, string text 2",
    "Datum": "*bytes model_input 1, *TensorEntry loss_fn_inputs 2, *bytes loss_fn_input_spans 4",
    "TensorEntry": "string key 1, Tensor value 2",
    "Tensor": "bytes dense 1, SparseCsr sparse_csr 2, int32 dtype 3, *int64 shape 4",
    "SparseCsr": "bytes values 1, bytes crow_indices 2, bytes col_indices 3",
    "Chunk": "Text encoded_text 1, bytes image 2, bytes dmel 3",
    "Text": "bytes tokens 1",
    "Span": "bytes prompt_tokens 1, Sampled sampled_tokens 2",
    "Sampled": "string sequence_id 1, int64 offset 2, int64 length 3",
    "ForwardBackwardOutput": "string loss_fn_output_type 1, *Record loss_fn_outputs 2, "
    "*Number metrics 3",
    "Record": "*Field fields 2, int64 num_datums 3",
    "Field": "string key 1, BatchedTensor value 2",
    "BatchedTensor": "bytes data 1, bytes offsets 2, int32 dtype 3, *int64 trailing_shape 4",
    "SampleResponse": "*Sequence sequences 1, bytes prompt_logprobs 2, Top topk_prompt_logprobs 3, "
    "int32 prompt_cache_hit_tokens 4, Tensor target_prompt_logprobs 5, Drawn prompt_alt_tokens 6",
    "Drawn": "Tensor tokens 1, Tensor logprobs 2",
    # versions, which clients of Tinker's skip: pairs of optimizer steps and tokens
    "Sequence": "int32 stop_reason 1, bytes tokens 2, bytes logprobs 3, "
    "Top topk_sampled_logprobs 4, *int64 versions 1001",
    "Top": "bytes token_ids 1, bytes logprobs 2, uint32 k 3, uint32 length 4",
}
# bytes that follow a tag, by its wire type; varints and lengths are read
_FIXED = {1: 8, 5: 4}
_VARINT = 0
_LENGTH = 2


class MessageDamaged(ValueError):
    """Bytes are not the message that they should be."""


def _classes() -> dict[str, Any]:
    # this edition refuses texts that are not UTF-8, and tells whether a field is there
    file = FileDescriptorProto(
        name="asyncdock/tinker.proto",
        package=_PACKAGE,
        syntax="editions",
        edition="EDITION_2023",
    )
    for message_name, fields in _FIELDS.items():
        message = file.message_type.add(name=message_name)
        for field in fields.split(", "):
            kind, name, number = field.split()
            label = "REPEATED" if kind.startswith("*") else "OPTIONAL"
            kind = kind.removeprefix("*")
            described = message.field.add(
                name=name,
                number=int(number),
                label=FieldDescriptorProto.Label.Value(f"LABEL_{label}"),
            )
            if kind in _FIELDS:
                described.type = FieldDescriptorProto.TYPE_MESSAGE
                described.type_name = f".{_PACKAGE}.{kind}"
            else:
                described.type = FieldDescriptorProto.Type.Value(f"TYPE_{kind.upper()}")
    pool = DescriptorPool()
    pool.Add(file)
    return {
        name: GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _FIELDS
    }


MESSAGES = _classes()


def parse(name: str, data: bytes, *, most: int) -> Any:
    """Return the message ``name`` in ``data``, of at most ``most`` fields: memory of a message is
    many times that of an empty field. Raises MessageDamaged."""
    try:
        _refuse_many_fields(data, most)
        return MESSAGES[name].FromString(data)
    except (DecodeError, IndexError, UnicodeDecodeError) as error:
        raise MessageDamaged(f"is not a {name} ({error or type(error).__name__})") from None


def _refuse_many_fields(data: bytes, most: int) -> None:
    position = 0
    fields = 0
    while position < len(data):
        fields += 1
        if fields > most:
            raise MessageDamaged(f"has more than {most} parts")
        tag, position = _varint(data, position)
        if tag & 7 == _LENGTH:
            length, position = _varint(data, position)
            position += length
        elif tag & 7 == _VARINT:
            _, position = _varint(data, position)
        elif tag & 7 in _FIXED:
            position += _FIXED[tag & 7]
        else:  # a group, which no message has
            raise MessageDamaged("has a field of an unknown wire type")


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the number at ``position``, and where it ends. Raises IndexError."""
    number = shift = 0
    while True:
        byte = data[position]
        position += 1
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return number, position
        if shift > 63:
            raise MessageDamaged("has a number of more than 64 bits")
