"""Messages to a server of Tinker's interface that no client should send: sound ones, changed.

    an operation of the server, with the sender's ids ─▶ sound body ─▶ one change ─▶ Message
        JSON: a value, a key, nesting, bytes       protobuf: tensors, shapes, lengths that lie, zstd
        ids and paths of another tenant            names that lead out of a folder

Some are not changed, so that there is work which could be lost.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from urllib.parse import quote

import numpy as np
import pydantic
from backports import zstd

from api.server.service.operations import Operation, operations_of
from api.tinker.messages import MESSAGES
from api.tinker.models import PROTOBUF
from api.tinker.routes import ROUTES
from api.tinker.schemas import SaveBody, SaveExternalBody, SaveSamplerBody, StepBody, Tolerant
from api.tinker.tensors import FLOAT32, INT64

JSON = "application/json"
BASE = "tiny"
HUGE = "9" * 400
# as JSON has them, where Python's values would not show what is sent
VALUES = (
    *("null", "true", "-1", "0", "1.5", "1e400", "NaN", HUGE, f"-{HUGE}", '""', '"x"', "[]", "{}"),
    *('"\\ud800"', '"\\u0000"', '"../.."', '"tinker://a/weights/b"', f'"{"x" * 5000}"'),
    *("[[]]", "[null]", '{"chunks": [{"tokens": [-1]}]}', '{"type": "dimuon"}', '{"rank": 1e9}'),
)
FURTHER = (
    *("-Infinity", "1e308", "2147483648", "9223372036854775808"),
    *("1e-320", "4e9", '"\\u202e\\u0301"', '{"a": 1, "a": 2}', "[" * 5000 + "]" * 5000),
    *('{"a":' * 5000 + "1" + "}" * 5000, "[" + "0," * 5000 + "0]", "truE", '"\\x"', "01"),
)
# what a handler reads of a body beside the call's number
CONTENTS: dict[str, type[pydantic.BaseModel]] = {
    "/api/v1/optim_step": StepBody,
    "/api/v1/save_weights": SaveBody,
    "/api/v1/save_weights_external": SaveExternalBody,
    "/api/v1/save_weights_for_sampler": SaveSamplerBody,
}
OPERATIONS = operations_of(ROUTES)
FORWARD = "/api/v1/forward_backward"
FINISH = "/api/v1/sessions/{session}/finish"
# of the operations in ``OPERATIONS``; others have 1
WEIGHTS = {
    **{FORWARD: 24.0, "/api/v1/asample": 5.0, "/api/v1/optim_step": 4.0},
    **{"/api/v1/load_weights": 2.0, "/api/v1/create_session": 0.5, FINISH: 0.1},
    **{"/api/v1/unload_model": 0.1, "/api/v1/save_weights_for_sampler": 0.5},
}
SHARE_SOUND = 0.12
# take whatever they are sent, or have an empty answer
OPEN = ("/api/v1/telemetry", "/api/v1/cancel_future", "/api/v1/training_runs/{model}/checkpoints")
BOMB = zstd.compress(bytes(2**27))
LOSS_NODES = [
    {"op": "placeholder", "name": "p", "target": "logprobs"},
    {"op": "call_method", "name": "s", "target": "sum", "args": [{"ref": "p"}]},
    {
        "op": "output",
        "name": "o",
        "target": "output",
        "args": [{"tuple": [{"ref": "s"}, {"dict": {}}]}],
    },
]
NUMBERS = (-1, 0, 2**31 - 1, 2**31, 2**40, 2**63 - 1, -(2**63))
FLOATS = (float("nan"), float("inf"), float("-inf"), 3.4e38, -1e30, 1e-45)


@dataclass(frozen=True)
class Things:
    """What a tenant has: ids, the ``path`` of a checkpoint and its ``name``."""

    session: str = "x"
    model: str = "x"
    sampler: str = "x"
    request: str = "x"
    sequence: str = "x"
    path: str = "tinker://x/weights/x"
    name: str = "x"

    @property
    def by_field(self) -> dict[str, str]:
        return {
            "session_id": self.session,
            "model_id": self.model,
            "sampling_session_id": self.sampler,
            "request_id": self.request,
            "tinker_path": self.path,
            "model_path": self.path,
            "path": self.path,
        }


@dataclass(frozen=True)
class Message:
    """A request. ``change``: what is wrong with it; ``is_stolen``: it names another tenant's thing
    and is sound otherwise."""

    operation: Operation
    path: str
    headers: dict[str, str]
    body: bytes | None
    change: str
    is_stolen: bool = False


class Messages:
    """Makes messages. ``outside``: a path that nothing may be written to."""

    def __init__(self, generator: random.Random, others: Sequence[Things], outside: str) -> None:
        self._random = generator
        self._others = others
        self._weights = [WEIGHTS.get(operation.path, 1.0) for operation in OPERATIONS]
        self._names = (
            *("../../../../outside", outside, f"..{outside}", "a\0b", "a\nb", "x" * 10_000, ".."),
            *(".", "", "é\u202e\u0301", "a/b", "%2e%2e%2foutside", "x\\..\\y", "état"),
        )

    def message(self, own: Things, turn: int) -> Message:
        """Return the next message of a tenant with ``own`` things, whose model's next call has the
        number ``turn``."""
        operation = self._random.choices(OPERATIONS, self._weights)[0]
        if operation.path.endswith("/publish"):
            own = replace(own, name="unknown")  # what is public is no other tenant's secret
        if self._random.random() < SHARE_SOUND:
            return self._sent(operation, own, turn, "none")
        changes: list[Callable[[Operation, Things, int], Message]] = [
            self._stolen,
            self._odd_headers,
        ]
        if operation.path == FORWARD:
            changes += [self._odd_pass] * 8
        elif "body" in operation.parts:
            changes += [self._odd_json] * 6
        if "{" in operation.path or "query" in operation.parts:
            changes += [self._odd_path] * 3
        return self._random.choice(changes)(operation, own, turn)

    # --- sound ones

    def _sent(
        self, operation: Operation, own: Things, turn: int, change: str, **rest: Any
    ) -> Message:
        body: bytes | None = None
        headers = {}
        if operation.path == FORWARD:
            body = self._pass(own, turn)
            headers = {"Content-Type": PROTOBUF}
        elif "body" in operation.parts:
            body = json.dumps(self._fields(operation, own, turn)).encode()
            headers = {"Content-Type": JSON}
        path = operation.path.format(**self._parts(own))
        return Message(operation, path, headers, body, change, **rest)

    def _parts(self, own: Things) -> dict[str, str]:
        things = {"model": own.model, "session": own.session, "sampler": own.sampler}
        return {
            **things,
            "sequence": own.sequence,
            "kind": "weights",
            "name": own.name,
            "ticket": "t" * 43,
        }

    def _fields(self, operation: Operation, own: Things, turn: int) -> dict[str, Any]:
        sound = {
            **own.by_field,
            "seq_id": turn,
            "model_seq_id": 0,
            "base_model": BASE,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
            "sampling_params": {
                **{"max_tokens": 2, "seed": 1, "stop": [9], "temperature": 1.0},
                **{"top_k": -1, "top_p": 1.0},
            },
            "num_samples": 1,
            "prompt_logprobs": True,
            "topk_prompt_logprobs": 2,
            "adam_params": {"learning_rate": 1e-4, "beta1": 0.9, "eps": 1e-8},
            "lora_config": {"rank": 2, "seed": 1, "train_mlp": True},
            "user_metadata": {"a": "b"},
            "tags": ["t"],
            "display_name": "n",
            "ttl_seconds": 600.0,
            "overwrite": True,
            "optimizer": True,
            "kind": "snapshot",
            "reason": {"type": "success"},
            "custom_loss_seq_id": 0,
            "inputs": [{"name": "logprobs", "rank": 1}],
            "graph": {"format": 1, "nodes": LOSS_NODES},
        }
        if operation.path.startswith("/api/v1/save"):
            sound["path"] = self._random.choice(("s0", "s1", "s2"))
        if operation.path.endswith("create_sampling_session"):
            del sound["model_path"]
        if operation.path.endswith("load_weights"):
            del sound["session_id"]
        return {name: sound[name] for name in fields_of(operation) if name in sound}

    # --- changed ones

    def _stolen(self, operation: Operation, own: Things, turn: int) -> Message:
        """Name another tenant's thing in one place, or in all."""
        other = self._random.choice(self._others)
        fields = self._fields(operation, own, turn)
        names = [name for name in fields if fields[name] in own.by_field.values()]
        if operation.path == FORWARD:
            message = self._sent(operation, other, turn, "an id of another", is_stolen=True)
        elif names:
            message = self._sent(operation, own, turn, "")
            chosen = self._random.sample(names, self._random.randint(1, len(names)))
            fields |= {name: other.by_field[name] for name in chosen}
            is_stolen = operation.path not in OPEN
            path = operation.path.format(**self._parts(self._random.choice((own, other))))
            message = Message(
                *(operation, path, message.headers, json.dumps(fields).encode()),
                *("an id of another", is_stolen),
            )
        else:
            named = "{" in operation.path and "{ticket}" not in operation.path
            named = named and operation.path not in OPEN
            message = self._sent(operation, other, turn, "an id of another", is_stolen=named)
        return message

    def _odd_headers(self, operation: Operation, own: Things, turn: int) -> Message:
        message = self._sent(operation, own, turn, "headers")
        odd = self._random.choice(
            (
                {"Content-Type": "text/plain"},
                {"Content-Type": "application/json; charset=utf-16"},
                {"Content-Type": PROTOBUF if message.headers.get("Content-Type") == JSON else JSON},
                *({"Content-Encoding": name} for name in ("zstd", "gzip", "deflate", "br", "x")),
                {"Origin": "https://example.org"},
                {"X-API-Key": "tml-adk_" + "x" * 40},
                {"X-API-Key": ""},
                {"X-API-Key": "é" * 100},
                {"Idempotency-Key": "x" * 5000},
            )
        )
        return Message(
            *(operation, message.path, {**message.headers, **odd}, message.body),
            f"header {next(iter(odd))}",
        )

    def _odd_path(self, operation: Operation, own: Things, turn: int) -> Message:
        message = self._sent(operation, own, turn, "name in the path")
        value = quote(self._random.choice(self._names)[:3000], safe="")
        value = self._random.choice((value, value, "%ed%a0%80", "%", "%zz", own.model))
        parts = self._parts(own)
        path = message.path
        names = [name for name in parts if f"{{{name}}}" in operation.path]
        if names:
            parts[self._random.choice(names)] = value
            path = operation.path.format(**parts)
        if "query" in operation.parts:
            name = self._random.choice([*operation.parts["query"].model_fields])
            number = quote(self._random.choice(VALUES)[:3000])
            path += f"?{name}={number}&{name}={number}"[: self._random.choice((-1, 3000))]
        return Message(operation, path, message.headers, message.body, message.change)

    def _odd_json(self, operation: Operation, own: Things, turn: int) -> Message:
        sound = self._sent(operation, own, turn, "")
        fields = self._fields(operation, own, turn)
        value = self._random.choice(
            (*VALUES, *FURTHER, *(json.dumps(name) for name in self._names))
        )
        change = self._random.choice(("value", "value", "value", "key", "twice", "lacks", "bytes"))
        text = json.dumps(fields)
        places = [*_places(fields)]
        match change:
            case "value":
                others = [(fields, name) for name in fields_of(operation)]
                container, key = self._random.choice([*places, *others] or [({}, "x")])
                container[key] = "\x01"
                text = json.dumps(fields).replace(json.dumps("\x01"), value)
            case "key":
                text = json.dumps({**fields, "\x01": 0}).replace(json.dumps("\x01"), value)
            case "twice":
                text = f'{{"{self._random.choice([*fields] or ["x"])}": {value}, {text[1:]}'
            case "lacks" if places:
                container, key = self._random.choice(places)
                del container[key]
                text = json.dumps(fields)
        body = text.encode()
        if change == "bytes":
            body = self._damaged(body)
        return Message(operation, sound.path, sound.headers, body, f"JSON {change}")

    def _damaged(self, data: bytes) -> bytes:
        """Return ``data`` with a few bytes changed, cut, twice, or others altogether."""
        changed = bytearray(data)
        match self._random.randrange(6):
            case 0:
                del changed[self._random.randrange(len(changed) + 1) :]
            case 1:
                changed = changed * 2
            case 2:
                changed = bytearray(data.decode(errors="replace").encode("utf-16"))
            case 3:
                changed = bytearray(self._random.randbytes(self._random.randrange(200)))
            case _:
                for _ in range(self._random.randint(1, 4)):
                    place = self._random.randrange(len(changed) + 1)
                    changed[place : place + self._random.randrange(3)] = self._random.randbytes(1)
        return bytes(changed)

    # --- passes

    def _odd_pass(self, operation: Operation, own: Things, turn: int) -> Message:
        headers = {"Content-Type": PROTOBUF}
        change = self._random.choice(
            ("tensor",) * 6 + ("head", "head", "lengths", "lengths", "bytes", "nesting", "zstd")
        )
        match change:
            case "tensor":
                body = self._pass(own, turn, self._datum(self._odd_inputs(), own))
            case "head":
                body = self._pass(own, turn, **self._odd_head())
            case "lengths":
                body = self._lying(own, turn)
            case "bytes":
                body = self._damaged(self._pass(own, turn))
            case "nesting":
                body = self._nested(own, turn)
            case _:
                headers["Content-Encoding"] = "zstd"
                body = self._packed(self._pass(own, turn))
        return Message(operation, operation.path, headers, body, f"pass: {change}")

    def _pass(self, own: Things, turn: int, *data: bytes, **fields: Any) -> bytes:
        head = {
            "model_id": own.model,
            "seq_id": turn,
            "loss_fn": "importance_sampling",
            "data": data or [self._datum(sound_inputs(), own)],
        }
        return bytes(MESSAGES["ForwardBackwardRequest"](**head | fields).SerializeToString())

    def _datum(self, inputs: dict[str, Any], own: Things) -> bytes:
        message = MESSAGES["Datum"]()
        tokens = [5, 6, self._random.choice((7, 7, 7, 7, -1, 2**31 - 1))]
        message.model_input.append(text_chunk(np.array(tokens, "<i4").tobytes()))
        if self._random.random() < 0.2:
            chunk = MESSAGES["Chunk"](**{self._random.choice(("image", "dmel")): b"x"})
            message.model_input.append(
                self._random.choice((text_chunk(b"abc"), bytes(chunk.SerializeToString())))
            )
        for name, value in inputs.items():
            message.loss_fn_inputs.add(key=name, value=value)
        if self._random.random() < 0.3:
            sequence = self._random.choice((own, *self._others)).sequence
            place, length = self._random.choices((0, 1, 2, *NUMBERS[:1], 2**63 - 1), k=2)
            span = {"sequence_id": sequence, "offset": place, "length": length}
            part = MESSAGES["Span"](sampled_tokens=span).SerializeToString()
            message.loss_fn_input_spans.append(bytes(part))
        return bytes(message.SerializeToString())

    def _odd_inputs(self) -> dict[str, Any]:
        inputs = sound_inputs()
        name = self._random.choice([*inputs])
        dtype = INT64 if name == "target_tokens" else FLOAT32
        odd = self._random.choice(
            (
                lambda: tensor([6, self._random.choice(NUMBERS), 8], INT64),
                lambda: tensor([0.0, self._random.choice(FLOATS), 0.0], FLOAT32),
                lambda: tensor([6, 7, 8], self._random.choice((0, 1, 7, -1, 2**31 - 1))),
                lambda: tensor([6, 7, 8], dtype, self._shape()),
                lambda: tensor([], dtype, self._shape()),
                lambda: tensor([[6, 7], [7, 8], [8, 9]], dtype),
                lambda: MESSAGES["Tensor"](dense=b"abcde", dtype=dtype, shape=[1]),
                self._sparse,
                self._sparse,
                MESSAGES["Tensor"],
            )
        )
        inputs[name] = odd()
        if self._random.random() < 0.1:
            del inputs[self._random.choice([*inputs])]
        return inputs

    def _shape(self) -> list[int]:
        sizes = (0, 1, 3, -1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63))
        return self._random.choices(sizes, k=self._random.randrange(5))

    def _sparse(self) -> Any:
        rows = self._random.choice((3, 3, 0, 1, 4, -1))
        columns = self._random.choice((2, 2, 0, -1, 2**12, 2**23, 2**62))
        starts = self._random.choice(([0, 1, 2, 3], [0, 3, 1, 3], [0, 9, 9, 9], [1, 1, 2, 3], []))
        places = self._random.choice(([0, 1, 0], [0, 1], [-1, 0, 1], [2**40, 0, 1], [5, 5, 5]))
        csr = MESSAGES["SparseCsr"](
            values=np.array([6, 7, 8], "<i8").tobytes()[: self._random.choice((24, 24, 7))],
            crow_indices=np.array(starts, "<i8").tobytes(),
            col_indices=np.array(places, "<i8").tobytes(),
        )
        return MESSAGES["Tensor"](sparse_csr=csr, dtype=INT64, shape=(rows, columns))

    def _odd_head(self) -> dict[str, Any]:
        name = self._random.choice(("beta", "clip_low_threshold", "\0", "x" * 3000, ""))
        number = self._random.choice((*FLOATS, -1.0, 1e308))
        option = MESSAGES["Option"](key=name, value={"number": number})
        text = MESSAGES["Option"](key=name, value={"text": self._random.choice(self._names)})
        return self._random.choice(
            (
                {"model_id": self._random.choice(self._names)},
                {"seq_id": self._random.choice((-1, 0, -(2**31), 2**31 - 1, 1))},
                {"loss_fn": self._random.choice((*self._names, "cross_entropy", "ppo"))},
                {"loss_fn": "ppo", "loss_fn_config_v2": [option]},
                {"loss_fn_config_v2": [text]},
                {"loss_fn_config": [MESSAGES["Number"](key=name, value=number)]},
                {"data": []},
                {"data": [b""] * self._random.choice((1, 3, 4097))},
                {"forward_only": True},
            )
        )

    def _lying(self, own: Things, turn: int) -> bytes:
        """Return a pass in which a length is not that of what follows: of a datum, or in one."""
        chunk = text_chunk(np.array([5, 6, 7], "<i4").tobytes())
        lies = (0, 1, len(chunk) - 1, len(chunk) + 1, 2**31 - 1, 2**32, 2**63 - 1, 2**64 - 1, 2**70)
        lie = varint(self._random.choice(lies))
        datum = self._datum(sound_inputs(), own)
        if self._random.random() < 0.5:
            return self._pass(own, turn, b"\x0a" + lie + chunk + datum)
        return self._pass(own, turn, datum) + b"\x1a" + lie + datum

    def _nested(self, own: Things, turn: int) -> bytes:
        depth = self._random.choice((10, 200, 3000))
        inner = b""
        for _ in range(depth):
            inner = b"\x0a" + varint(len(inner)) + inner
        groups = b"\x0b" * depth
        return self._random.choice(
            (
                self._pass(own, turn, inner),
                self._pass(own, turn, groups),
                self._pass(own, turn) + b"\x3a" + varint(len(inner)) + inner,
                self._pass(own, turn) + groups,
                self._pass(own, turn, b"\x12\x00" * depth * 30),
                self._pass(own, turn) + b"\x18" + b"\xff" * 12 + b"\x01",
            )
        )

    def _packed(self, body: bytes) -> bytes:
        """Return a compressed body that is sound, damaged, or much larger than it looks."""
        frame = zstd.compress(body)
        match self._random.randrange(7):
            case 0:
                return frame
            case 1:
                return frame + frame
            case 2:
                return frame[:-2]
            case 3:
                return body
            case 4:
                return BOMB if self._random.random() < 0.1 else frame + b"x"
            case 5:
                return zstd.compress(frame)
            case _:
                return self._damaged(frame)


def fields_of(operation: Operation) -> list[str]:
    """Return the fields that an operation reads of its JSON body."""
    models = [operation.parts.get("body"), CONTENTS.get(operation.path)]
    return [name for model in models if model is not None for name in model.model_fields]


def models() -> Iterator[type[Tolerant]]:
    """Yield the models of all JSON that clients send, with what is in them."""
    waiting = [Tolerant]
    while waiting:
        model = waiting.pop()
        yield model
        waiting += model.__subclasses__()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container in ``value`` with each of its keys."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = [*value.items()]
    elif isinstance(value, list):
        items = [*enumerate(value)]
    for key, inner in items:
        yield value, key
        yield from _places(inner)


def varint(number: int) -> bytes:
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def tensor(values: Any, dtype: int, shape: Sequence[int] | None = None) -> Any:
    array = np.asarray(values, "<i8" if dtype == INT64 else "<f4")
    shape = array.shape if shape is None else shape
    return MESSAGES["Tensor"](dense=array.tobytes(), dtype=dtype, shape=shape)


def text_chunk(tokens: bytes) -> bytes:
    return bytes(MESSAGES["Chunk"](encoded_text={"tokens": tokens}).SerializeToString())


def sound_inputs() -> dict[str, Any]:
    floats = partial(tensor, dtype=FLOAT32)
    return {
        "target_tokens": tensor([6, 7, 8], INT64),
        "logprobs": floats([-1.0, -2.0, -3.0]),
        "advantages": floats([1.0, -1.0, 0.5]),
    }
