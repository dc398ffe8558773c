"""The wire format of passes and samples: what is sent is read, and bytes that lie are refused by
datum and field before anything is allocated for them."""

from __future__ import annotations

import math
import random
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from api.tinker.messages import MESSAGES, MessageDamaged
from api.tinker.passes import MOST_DATA, loss_options, read_data, read_head, write_pass
from api.tinker.samples import NO_LOGPROB, Targets, write_sample
from api.tinker.tensors import FLOAT32
from stages.calls.interface import (
    CallRefused,
    Datum,
    PassOutput,
    SampledSequence,
    SampleOutput,
)

INT64 = 2


def tensor(array: Any, dtype: int = FLOAT32, shape: tuple[int, ...] | None = None) -> Any:
    values = np.asarray(array, "<f4" if dtype == FLOAT32 else "<i8")
    return MESSAGES["Tensor"](
        dense=values.tobytes(), dtype=dtype, shape=values.shape if shape is None else shape
    )


def sparse(rows: int, columns: int, starts: list[int], places: list[int], values: list[int]) -> Any:
    csr = MESSAGES["SparseCsr"](
        values=np.array(values, "<i8").tobytes(),
        crow_indices=np.array(starts, "<i8").tobytes(),
        col_indices=np.array(places, "<i8").tobytes(),
    )
    return MESSAGES["Tensor"](sparse_csr=csr, dtype=INT64, shape=(rows, columns))


def text(*tokens: int) -> bytes:
    data = np.array(tokens, "<i4").tobytes()
    return bytes(MESSAGES["Chunk"](encoded_text={"tokens": data}).SerializeToString())


def datum(chunks: list[bytes], spans: list[bytes] | None = None, **inputs: Any) -> bytes:
    message = MESSAGES["Datum"](model_input=chunks, loss_fn_input_spans=spans or [])
    for name, value in inputs.items():
        message.loss_fn_inputs.add(key=name, value=value)
    return bytes(message.SerializeToString())


def body(*data: bytes, **fields: Any) -> bytes:
    message = MESSAGES["ForwardBackwardRequest"](
        model_id="s:train:0", seq_id=3, data=data, loss_fn="cross_entropy", **fields
    )
    return bytes(message.SerializeToString())


def read(*data: bytes) -> list[Datum]:
    return read_data(read_head(body(*data)))


def test_chunks_tensors_and_spans_are_read_as_they_were_sent() -> None:
    span = MESSAGES["Span"](sampled_tokens={"sequence_id": "q", "offset": 1, "length": 2})
    prompt = MESSAGES["Span"](prompt_tokens=b"")
    first, second = read(
        datum(
            [text(1, 2), text(3)],
            [prompt.SerializeToString(), span.SerializeToString()],
            target_tokens=tensor([2, 3, 4], INT64),
            weights=tensor([0.5, -1.0, 0.0], shape=()),
            mask=tensor([math.nan]),
        ),
        datum(
            [text(7, 8)],
            target_tokens=sparse(2, 3, [0, 1, 3], [2, 0, 1], [9, 5, 6]),
        ),
    )
    assert first.tokens.dtype == np.int64
    assert first.tokens.tolist() == [1, 2, 3]
    assert first.inputs.keys() == {"target_tokens", "weights"}, "mask is read by no loss"
    assert first.inputs["weights"].dtype == np.float32
    assert first.inputs["weights"].tolist() == [0.5, -1.0, 0.0]
    assert first.sampled == (("q", 1, 2),)
    assert second.inputs["target_tokens"].tolist() == [[0, 0, 9], [5, 6, 0]]


def test_options_of_old_and_new_clients_are_the_same() -> None:
    old = MESSAGES["Number"](key="beta", value=0.5)
    number = MESSAGES["Option"](key="beta", value={"number": 0.5})
    word = MESSAGES["Option"](key="loss_id", value={"text": ""})
    assert loss_options(read_head(body(loss_fn_config=[old]))) == {"beta": 0.5}
    new = body(loss_fn_config=[old], loss_fn_config_v2=[number, word])
    assert loss_options(read_head(new)) == {"beta": 0.5, "loss_id": ""}


@pytest.mark.parametrize(
    ("inputs", "place"),
    [
        ({"weights": tensor([1.0], dtype=7)}, "data.1.loss_fn_inputs.weights"),
        ({"weights": tensor([1.0, 2.0], shape=(3,))}, "data.1.loss_fn_inputs.weights.shape"),
        ({"weights": tensor([1.0], shape=(-1,))}, "data.1.loss_fn_inputs.weights.shape"),
        ({"weights": tensor([1.0], shape=(1, 1, 1))}, "data.1.loss_fn_inputs.weights.shape"),
        ({"weights": tensor([], shape=(2**40, 2**40))}, "data.1.loss_fn_inputs.weights.shape"),
        (
            {"target_tokens": sparse(2, 2**40, [0, 0, 0], [], [])},
            "data.1.loss_fn_inputs.target_tokens.shape",
        ),
        ({"weights": tensor([], shape=(0, 2**62))}, "data.1.loss_fn_inputs.weights.shape"),
        (
            {"target_tokens": sparse(0, 2**62, [0], [], [])},
            "data.1.loss_fn_inputs.target_tokens.shape",
        ),
        (
            {"target_tokens": sparse(3, 2**23, [0, 1, 2, 3], [0, 1, 0], [6, 7, 8])},
            "data.1.loss_fn_inputs.target_tokens.shape",
        ),
        ({"target_tokens": sparse(2, 2, [0, 1], [0], [1])}, "data.1.loss_fn_inputs.target_tokens"),
        (
            {"target_tokens": sparse(2, 2, [0, 2, 1], [0], [1])},
            "data.1.loss_fn_inputs.target_tokens",
        ),
        (
            {"target_tokens": sparse(2, 2, [0, 1, 1], [2], [1])},
            "data.1.loss_fn_inputs.target_tokens",
        ),
        (
            {"target_tokens": sparse(2, 2, [0, 1, 1], [-1], [1])},
            "data.1.loss_fn_inputs.target_tokens",
        ),
        (
            {"target_tokens": sparse(2, 2, [0, 9, 9], [0], [1])},
            "data.1.loss_fn_inputs.target_tokens",
        ),
        (
            {"weights": MESSAGES["Tensor"](dense=b"abc", dtype=FLOAT32)},
            "data.1.loss_fn_inputs.weights",
        ),
    ],
)
def test_a_tensor_that_lies_is_refused_by_its_place(inputs: dict[str, Any], place: str) -> None:
    with pytest.raises(CallRefused) as raised:
        read(datum([text(1)]), datum([text(1)], **inputs))
    assert raised.value.problems[0].key == place
    assert raised.value.problems[0].fix


def test_what_is_no_text_and_no_datum_is_refused_by_its_place() -> None:
    image = MESSAGES["Chunk"](image=b"").SerializeToString()
    ragged = MESSAGES["Chunk"](encoded_text={"tokens": b"abc"}).SerializeToString()
    for part, place in (
        (datum([bytes(image)]), "data.0.model_input"),
        (datum([bytes(ragged)]), "data.0.model_input"),
        (b"\x0a\xff", "data.0"),
    ):
        with pytest.raises(CallRefused) as raised:
            read(part)
        assert raised.value.problems[0].key == place
    with pytest.raises(CallRefused, match="4097"):
        read(*[b""] * (MOST_DATA + 1))


def test_texts_that_are_not_utf8_are_refused() -> None:
    sampled = {"sequence_id": "name", "offset": 0, "length": 1}
    span = bytes(MESSAGES["Span"](sampled_tokens=sampled).SerializeToString())
    with pytest.raises(CallRefused) as raised:
        read(datum([text(1)], [span.replace(b"name", b"\xff\xfe00")]))
    assert raised.value.problems[0].key == "data.0"
    with pytest.raises(MessageDamaged):
        read_head(body().replace(b"cross_entropy", b"cross\xffentropy"))


def test_a_sparse_tensor_has_room_for_the_zeros_of_long_prompts() -> None:
    rows = 2000
    starts = [0] * rows + [1]
    (row,) = read(datum([text(*[1] * rows)], target_tokens=sparse(rows, 512, starts, [3], [9])))
    targets = row.inputs["target_tokens"]
    assert targets.shape == (rows, 512)
    assert targets.sum() == targets[-1, 3] == 9


def test_many_empty_parts_are_refused_before_they_take_memory() -> None:
    """Two bytes each on the wire, and many times that as messages."""
    for bomb in (b"\x1a\x00" * 2**20, body(b"\x0a\x00" * 2**20)):
        tracemalloc.start()
        with pytest.raises((MessageDamaged, CallRefused), match="more than"):
            read_data(read_head(bomb))
        assert tracemalloc.get_traced_memory()[1] < 2 * len(bomb)
        tracemalloc.stop()


def test_any_bytes_are_read_or_refused_in_words() -> None:
    generator = random.Random(1)
    sound = body(
        datum([text(1, 2)], target_tokens=tensor([2, 3], INT64), weights=tensor([1.0, 1.0])),
        datum([text(4)], target_tokens=sparse(1, 2, [0, 1], [1], [5])),
    )
    refused = 0
    for _ in range(20_000):
        changed = bytearray(sound)
        for _ in range(generator.randint(1, 4)):
            changed[generator.randrange(len(changed))] = generator.randrange(256)
        del changed[generator.choice([len(changed), generator.randrange(len(changed))]) :]
        try:
            head = read_head(bytes(changed))
            loss_options(head)
            read_data(head)
        except (MessageDamaged, CallRefused) as error:
            refused += bool(str(error))
    assert refused > 1000


def test_an_answer_has_the_data_of_a_pass_in_their_order() -> None:
    logprobs = [np.array(row, np.float32) for row in ([-1.0, -2.0], [-3.0], [[-4.0, -5.0]])]
    answer = MESSAGES["ForwardBackwardOutput"].FromString(
        write_pass(PassOutput(logprobs, {"loss": 2.5, "rows:mean": 1.0}))
    )
    assert {each.key: each.value for each in answer.metrics} == {"loss:sum": 2.5, "rows:mean": 1.0}
    flat, wide = (record.fields[0].value for record in answer.loss_fn_outputs)
    assert [record.num_datums for record in answer.loss_fn_outputs] == [2, 1]
    assert np.frombuffer(flat.data, "<f4").tolist() == [-1.0, -2.0, -3.0]
    assert np.frombuffer(flat.offsets, "<i8").tolist() == [0, 8, 12]
    assert (list(flat.trailing_shape), list(wide.trailing_shape)) == ([], [2])


def test_a_sample_has_its_tokens_versions_and_likeliest_tokens() -> None:
    sequence = SampledSequence(
        tokens=np.array([5, 6, 7], np.int32),
        logprobs=np.array([-1.0, -2.0, -3.0], np.float32),
        stopped=False,
        versions=((3, 1), (4, 2)),
        top=(((5, -1.0), (9, -1.5)), ((6, -2.0),), ()),
    )
    prompt = np.array([math.nan, -0.5], np.float32)
    written = write_sample(SampleOutput([sequence], prompt, cached_tokens=1))
    answer = MESSAGES["SampleResponse"].FromString(written)
    (sampled,) = answer.sequences
    assert sampled.stop_reason == 1
    assert list(sampled.versions) == [3, 1, 4, 2]
    assert np.frombuffer(sampled.tokens, "<i4").tolist() == [5, 6, 7]
    top = sampled.topk_sampled_logprobs
    assert (top.length, top.k) == (3, 2)
    assert np.frombuffer(top.token_ids, "<i4").tolist() == [5, 9, 6, 0, 0, 0]
    assert np.frombuffer(top.logprobs, "<f4")[3:].tolist() == [NO_LOGPROB] * 3
    scores = np.frombuffer(answer.prompt_logprobs, "<f4")
    assert math.isnan(scores[0])
    assert scores[1] == -0.5


def test_targets_come_back_in_the_form_in_which_they_were_sent() -> None:
    whole = Targets(data=[1, -1, 2, 3], dtype="int64", shape=[2, 2]).matrix()
    assert whole.rows.tolist() == [0, 0, 1, 1]
    sparse = Targets(
        data=[7, 8, 9], shape=[3, 5], sparse_crow_indices=[0, 2, 2, 3], sparse_col_indices=[0, 4, 1]
    ).matrix()
    assert sparse.rows.tolist() == [0, 0, 2]
    drawn = np.array([[5, 6]]), np.array([[-1.0, -2.0]], np.float32)
    for targets, values in ((whole, [-1.0, 0.0, -2.0, -3.0]), (sparse, [-1.0, -2.0, -3.0])):
        scored = replace(targets, values=np.array(values, np.float32))
        written = write_sample(SampleOutput([], target_logprobs=scored, drawn=drawn))
        answer = MESSAGES["SampleResponse"].FromString(written)
        tensor = answer.target_prompt_logprobs
        assert (tensor.dtype, list(tensor.shape)) == (FLOAT32, list(targets.shape))
        csr = tensor.sparse_csr
        assert np.frombuffer(tensor.dense or csr.values, "<f4").tolist() == values
        for name, part in (("crow_indices", targets.starts), ("col_indices", targets.columns)):
            expected = [] if part is None else part.tolist()
            assert np.frombuffer(getattr(csr, name), "<i8").tolist() == expected
        tokens, logprobs = answer.prompt_alt_tokens.tokens, answer.prompt_alt_tokens.logprobs
        assert (tokens.dtype, list(tokens.shape)) == (INT64, [1, 2])
        assert np.frombuffer(tokens.dense, "<i8").tolist() == [5, 6]
        assert np.frombuffer(logprobs.dense, "<f4").tolist() == [-1.0, -2.0]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"shape": [2, 3]}, r"has 4 values, and the shape \[2, 3\]"),
        ({"shape": [-2, -2]}, "has 4 values"),
        ({"data": [2**40, 1, 1, 1]}, "has a number out of range"),
        ({"sparse_crow_indices": [0, 4]}, "is no matrix in CSR form"),
        ({"sparse_crow_indices": [0, 1, 4], "sparse_col_indices": [0, 1, 2, 0]}, "CSR form"),
        ({"sparse_crow_indices": [0, 5, 4], "sparse_col_indices": [0, 1, 0, 0]}, "CSR form"),
        ({"sparse_crow_indices": [], "sparse_col_indices": []}, "CSR form"),
    ],
)
def test_targets_that_are_no_matrix_are_refused(changed: dict[str, Any], message: str) -> None:
    fields = {"data": [1, 2, 3, 4], "shape": [2, 2], **changed}
    with pytest.raises(CallRefused, match=f"target_prompt_logprobs: .*{message}"):
        Targets(**fields).matrix()
