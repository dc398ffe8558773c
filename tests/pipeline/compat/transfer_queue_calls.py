"""Calls as TransferQueue's users make them, and what comes of each, in a form that JSON can hold.

    python -m tests.pipeline.compat.transfer_queue_calls

plays them to TransferQueue itself (0.1.11, with Ray) and writes down what it answered, to
transfer_queue_calls.json. The same calls are then played to ours. Nothing here imports this
project, so the script runs wherever TransferQueue does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict

RECORD = Path(__file__).with_suffix(".json")
Queue = Any


def plain(value: Any) -> Any:
    """A result by what a user can see of it."""
    if isinstance(value, torch.Tensor):
        layout = (
            "dense"
            if not value.is_nested
            else "jagged"
            if value.layout == torch.jagged
            else "strided"
        )
        rows = value.unbind() if value.dim() else [value]
        return {layout: str(value.dtype), "rows": [row.tolist() for row in rows]}
    if isinstance(value, TensorDict):
        fields = {name: plain(value.get(name)) for name in sorted(value.keys())}
        return {"batch": list(value.batch_size), "fields": fields}
    if hasattr(value, "partition_id"):
        return {
            name: plain(getattr(value, name))
            for name in ("keys", "tags", "partition_id", "fields", "extra_info")
        }
    if isinstance(value, NonTensorStack):
        return {"values": plain(value.tolist())}
    if isinstance(value, tuple):
        return {"tuple": plain(list(value))}
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return value


def jagged(*lengths: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    rows = [torch.arange(length).to(dtype) + 10 * i for i, length in enumerate(lengths)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def rows(count: int = 3) -> TensorDict:
    return TensorDict(
        {
            "ids": torch.arange(count * 4).view(count, 4),
            "reward": torch.arange(count) / 4,
            "response": jagged(*range(1, count + 1)),
            "prompt": NonTensorStack(*(f"Prompt {i} é" for i in range(count))),
        },
        batch_size=[count],
    )


KEYS = ["a", "b", "c"]


def put_one(tq: Queue, p: str) -> Any:
    meta = tq.kv_put(
        "a",
        p,
        {"ids": torch.tensor([1, 2, 3]), "reward": torch.tensor(0.5), "text": "é"},
        {"score": 0.9},
    )
    return [meta, tq.kv_batch_get("a", p), tq.kv_list(p)]


def put_one_tensordict(tq: Queue, p: str) -> Any:
    return [tq.kv_put("a", p, rows(1)), tq.kv_batch_get("a", p)]


def put_batch(tq: Queue, p: str) -> Any:
    meta = tq.kv_batch_put(KEYS, p, rows(), [{"step": i} for i in range(3)])
    return [meta, tq.kv_batch_get(KEYS, p), tq.kv_list(p)]


def order_is_that_of_the_keys(tq: Queue, p: str) -> Any:
    tq.kv_batch_put(KEYS, p, rows())
    return [tq.kv_batch_get(["c", "a"], p), tq.kv_batch_get(["b"], p), tq.kv_batch_get("c", p)]


def from_several_puts(tq: Queue, p: str) -> Any:
    tq.kv_batch_put(["a", "b"], p, rows(2))
    tq.kv_batch_put(["c", "d", "e"], p, rows(3))
    return tq.kv_batch_get(["e", "a", "c", "b"], p, ["ids", "response", "prompt", "reward"])


def select_fields(tq: Queue, p: str) -> Any:
    tq.kv_batch_put(KEYS, p, rows())
    return [tq.kv_batch_get(KEYS, p, "reward"), tq.kv_batch_get(KEYS, p, ["response", "ids"])]


def columns_appended(tq: Queue, p: str) -> Any:
    tq.kv_batch_put(KEYS, p, rows())
    meta = tq.kv_batch_put(
        KEYS, p, TensorDict({"advantage": torch.tensor([1.0, -1.0, 0.0])}, batch_size=[3])
    )
    return [meta, tq.kv_batch_get(KEYS, p)]


def a_column_that_only_some_have(tq: Queue, p: str) -> Any:
    tq.kv_batch_put(KEYS, p, rows())
    meta = tq.kv_put("b", p, {"advantage": torch.tensor(1.0)})
    return [meta, tq.kv_batch_get(KEYS, p), tq.kv_batch_get("b", p)]


def a_field_is_replaced(tq: Queue, p: str) -> Any:
    tq.kv_batch_put(KEYS, p, rows())
    tq.kv_put("b", p, {"response": torch.tensor([7, 7, 7, 7, 7]), "reward": torch.tensor(9.0)})
    return tq.kv_batch_get(KEYS, p)


def tags_are_joined(tq: Queue, p: str) -> Any:
    first = tq.kv_batch_put(KEYS, p, tags=[{"step": i, "status": "new"} for i in range(3)])
    second = tq.kv_put(
        "b", p, tag={"status": "done", "more": {"list": [1, 2.5, None, "x"], "flag": True}}
    )
    return [first, second, tq.kv_list(p)]


def fields_after_tags(tq: Queue, p: str) -> Any:
    tq.kv_batch_put(KEYS, p, tags=[{"step": i} for i in range(3)])
    return [tq.kv_batch_put(KEYS, p, rows()), tq.kv_batch_get(KEYS, p), tq.kv_list(p)]


def tags_alone_have_no_fields(tq: Queue, p: str) -> Any:
    tq.kv_batch_put(KEYS, p, tags=[{}, {"x": 1}, {}])
    return tq.kv_batch_get(KEYS, p)


def dtypes(tq: Queue, p: str) -> Any:
    names = (
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "bfloat16",
        "float16",
        "float32",
        "float64",
    )
    fields = {name: torch.tensor([[0, 1, 1], [1, 0, 3]]).to(getattr(torch, name)) for name in names}
    tq.kv_batch_put(["a", "b"], p, TensorDict(fields, batch_size=[2]))
    return tq.kv_batch_get(["b", "a"], p)


def rows_of_two_dimensions(tq: Queue, p: str) -> Any:
    patches = torch.nested.as_nested_tensor(
        [torch.ones(2, 3), torch.zeros(1, 3)], layout=torch.jagged
    )
    fields = {"dense": torch.arange(12.0).view(2, 3, 2), "patches": patches}
    tq.kv_batch_put(["a", "b"], p, TensorDict(fields, batch_size=[2]))
    return [tq.kv_batch_get(["a", "b"], p), tq.kv_batch_get("b", p)]


def rows_without_elements(tq: Queue, p: str) -> Any:
    tq.kv_batch_put(KEYS, p, TensorDict({"ids": jagged(2, 0, 1)}, batch_size=[3]))
    return [tq.kv_batch_get(KEYS, p), tq.kv_batch_get("b", p)]


def lengths_may_change(tq: Queue, p: str) -> Any:
    tq.kv_put("a", p, {"ids": torch.tensor([1, 2])})
    tq.kv_put("b", p, {"ids": torch.tensor([3, 4, 5])})
    return tq.kv_batch_get(["b", "a"], p)


def python_values(tq: Queue, p: str) -> Any:
    values = [{"role": "user", "turns": [1, 2]}, {"role": "tool", "turns": []}]
    tq.kv_batch_put(["a", "b"], p, TensorDict({"info": NonTensorStack(*values)}, batch_size=[2]))
    tq.kv_put("a", p, {"count": 3, "rate": 0.25, "none": None})
    return [tq.kv_batch_get(["b", "a"], p), tq.kv_batch_get("a", p)]


def cleared_keys_are_gone(tq: Queue, p: str) -> Any:
    tq.kv_batch_put(KEYS, p, rows(), [{"step": i} for i in range(3)])
    out = [tq.kv_clear("b", p), tq.kv_list(p), tq.kv_batch_get(["c", "a"], p)]
    tq.kv_clear(["nothing", "a", "c"], p)
    return [*out, tq.kv_list(p)]


def a_cleared_key_comes_again_without_its_past(tq: Queue, p: str) -> Any:
    tq.kv_batch_put(KEYS, p, rows(), [{"step": i} for i in range(3)])
    tq.kv_clear("b", p)
    tq.kv_put("b", p, {"reward": torch.tensor(7.0)})
    return [tq.kv_batch_get("b", p), tq.kv_batch_get(KEYS, p), tq.kv_list(p)]


def partitions_are_apart(tq: Queue, p: str) -> Any:
    tq.kv_put("a", p, {"x": torch.tensor([1])}, {"in": "first"})
    tq.kv_put("a", p + "-other", {"x": torch.tensor([2])}, {"in": "second"})
    tq.kv_clear("a", p)
    return [
        tq.kv_batch_get("a", p + "-other"),
        {k: v for k, v in tq.kv_list().items() if k.startswith(p)},
    ]


def by_meta(tq: Queue, p: str) -> Any:
    meta = tq.kv_batch_put(KEYS, p, rows())
    part = meta.select_keys(["c", "b"])
    return [part, tq.kv_batch_get_by_meta(part), tq.kv_batch_get_by_meta(meta, ["ids"])]


def metas(tq: Queue, p: str) -> Any:
    meta = tq.kv_batch_put(KEYS, p, rows(), [{"step": i} for i in range(3)])
    chunks = meta.chunk(2)
    joined = type(meta).concat(chunks)
    joined.reorder([2, 0, 1])
    return [chunks, joined, len(meta), meta.size, str(meta)]


def async_twins(tq: Queue, p: str) -> Any:
    async def all_of_them() -> list[Any]:
        put = await tq.async_kv_batch_put(KEYS, p, rows(), [{"step": i} for i in range(3)])
        one = await tq.async_kv_put("d", p, {"reward": torch.tensor(1.5)}, {"step": 3})
        got = await tq.async_kv_batch_get(["b", "a"], p, "response")
        meta = await tq.async_kv_batch_get_by_meta(put)
        await tq.async_kv_clear(["a"], p)
        return [put, one, got, meta, await tq.async_kv_list(p)]

    return asyncio.run(all_of_them())


def parsed_on_the_way(tq: Queue, p: str) -> Any:
    def parse(fields: dict[str, Any]) -> dict[str, Any]:
        fields["prompt"][:] = [text.upper() for text in fields["prompt"]]
        fields["reward"] = fields["reward"] + 1
        fields["response"] = [row * 2 for row in fields["response"]]
        return fields

    tq.kv_batch_put(KEYS, p, rows(), data_parser=parse)
    return tq.kv_batch_get(KEYS, p)


def a_parser_that_gives_nothing_back(tq: Queue, p: str) -> Any:
    return tq.kv_batch_put(KEYS, p, rows(), data_parser=lambda fields: None)


def nothing_to_put(tq: Queue, p: str) -> Any:
    return tq.kv_put("a", p)


def nothing_to_put_in_a_batch(tq: Queue, p: str) -> Any:
    return tq.kv_batch_put(KEYS, p)


def fewer_rows_than_keys(tq: Queue, p: str) -> Any:
    return tq.kv_batch_put(KEYS, p, rows(2))


def fewer_tags_than_keys(tq: Queue, p: str) -> Any:
    return tq.kv_batch_put(KEYS, p, rows(3), [{}])


def a_key_twice_in_one_put(tq: Queue, p: str) -> Any:
    return tq.kv_batch_put(["a", "a"], p, rows(2))


def a_key_twice_in_one_get(tq: Queue, p: str) -> Any:
    tq.kv_batch_put(KEYS, p, rows())
    return tq.kv_batch_get(["a", "c", "a"], p)


def no_keys(tq: Queue, p: str) -> Any:
    return tq.kv_batch_get([], p)


def keys_that_are_no_strings(tq: Queue, p: str) -> Any:
    return tq.kv_batch_get([1, 2], p)


def keys_of_another_type(tq: Queue, p: str) -> Any:
    return tq.kv_batch_get(("a",), p)


def nested_tensor_for_one_key(tq: Queue, p: str) -> Any:
    return tq.kv_put("a", p, {"ids": jagged(2)})


def fields_of_another_type(tq: Queue, p: str) -> Any:
    return tq.kv_put("a", p, [1])


def no_such_partition(tq: Queue, p: str) -> Any:
    return [tq.kv_list(p), tq.kv_clear("a", p), tq.kv_batch_get("a", p)]


def no_such_key(tq: Queue, p: str) -> Any:
    tq.kv_put("a", p, {"x": torch.tensor([1])})
    return tq.kv_batch_get("b", p)


def fields_of_a_meta_that_it_does_not_have(tq: Queue, p: str) -> Any:
    return tq.kv_batch_get_by_meta(tq.kv_batch_put(KEYS, p, rows()), "advantage")


def some_keys_are_missing(tq: Queue, p: str) -> Any:
    tq.kv_batch_put(KEYS, p, rows())
    return tq.kv_batch_get(["a", "x", "c"], p, "reward")


def some_fields_are_missing(tq: Queue, p: str) -> Any:
    tq.kv_batch_put(KEYS, p, rows())
    return tq.kv_batch_get(KEYS, p, ["reward", "advantage"])


def only_missing_fields(tq: Queue, p: str) -> Any:
    tq.kv_batch_put(KEYS, p, rows())
    return tq.kv_batch_get(KEYS, p, "advantage")


def another_dtype(tq: Queue, p: str) -> Any:
    tq.kv_put("a", p, {"x": torch.tensor([1.5, 2.5])})
    tq.kv_put("b", p, {"x": torch.tensor([1, 2])})
    return tq.kv_batch_get(["a", "b"], p)


def a_scalar_where_rows_were(tq: Queue, p: str) -> Any:
    tq.kv_put("a", p, {"y": torch.tensor([1.5, 2.5])})
    tq.kv_put("b", p, {"y": torch.tensor(1.5)})
    return tq.kv_batch_get(["a", "b"], p)


def a_tuple(tq: Queue, p: str) -> Any:
    tq.kv_put("a", p, {"pair": (1, 2)})
    return tq.kv_batch_get("a", p)


CASES: list[Callable[[Queue, str], Any]] = [
    put_one,
    put_one_tensordict,
    put_batch,
    order_is_that_of_the_keys,
    from_several_puts,
    select_fields,
    columns_appended,
    a_column_that_only_some_have,
    a_field_is_replaced,
    tags_are_joined,
    fields_after_tags,
    tags_alone_have_no_fields,
    dtypes,
    rows_of_two_dimensions,
    rows_without_elements,
    lengths_may_change,
    python_values,
    cleared_keys_are_gone,
    a_cleared_key_comes_again_without_its_past,
    partitions_are_apart,
    by_meta,
    metas,
    async_twins,
    parsed_on_the_way,
    a_parser_that_gives_nothing_back,
    nothing_to_put,
    nothing_to_put_in_a_batch,
    fewer_rows_than_keys,
    fewer_tags_than_keys,
    a_key_twice_in_one_put,
    a_key_twice_in_one_get,
    no_keys,
    keys_that_are_no_strings,
    keys_of_another_type,
    nested_tensor_for_one_key,
    fields_of_another_type,
    no_such_partition,
    no_such_key,
    fields_of_a_meta_that_it_does_not_have,
    some_keys_are_missing,
    some_fields_are_missing,
    only_missing_fields,
    another_dtype,
    a_scalar_where_rows_were,
    a_tuple,
]


def outcome(case: Callable[[Queue, str], Any], tq: Queue) -> Any:
    """What comes of a case: its result, or the error's class."""
    try:
        return plain(case(tq, case.__name__))
    except Exception as error:
        return {"error": type(error).__name__}


def start() -> Queue:
    """TransferQueue itself, on a Ray of its own."""
    import logging

    import ray
    import transfer_queue as tq

    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    tq.init()
    return tq


def stop(tq: Queue) -> None:
    import ray

    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    queue = start()
    found = {case.__name__: outcome(case, queue) for case in CASES}
    stop(queue)
    lines = [
        f"{json.dumps(name)}: {json.dumps(result, ensure_ascii=False)}"
        for name, result in found.items()
    ]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")  # a line for each case
    for name, result in found.items():
        if isinstance(result, dict) and "error" in result:
            print(name, result["error"])
