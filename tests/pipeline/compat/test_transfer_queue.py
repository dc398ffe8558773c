"""The calls that TransferQueue's users know give what TransferQueue gives, and refuse where it errs
in silence."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from pipeline.compat import transfer_queue as tq
from pipeline.compat.transfer_queue.discovery import _node
from pipeline.compat.transfer_queue.queue import Queue
from pipeline.data.arena import StaleHandle
from pipeline.data.columns import ColumnError
from pipeline.index.client import Index, IndexRefused, NeverFits
from pipeline.warehouse.dock import Dock, NoRoom
from tests.pipeline.compat import transfer_queue_calls as calls

RECORDED = json.loads(calls.RECORD.read_text())

# Where ours refuses what TransferQueue lets pass, or the other way round: what ours gives, and why.
STRICTER = {
    "a_key_twice_in_one_put": ({"error": "ValueError"}, "before anything is stored, not after"),
    "some_keys_are_missing": (
        {"error": "ValueError"},
        "rows would no longer be those of the keys asked for",
    ),
    "some_fields_are_missing": (
        {"error": "ValueError"},
        "a field asked for would be missing without a word",
    ),
    "only_missing_fields": (
        {"error": "ValueError"},
        "an empty result would be taken for an empty batch",
    ),
    "another_dtype": (
        {
            "batch": [2],
            "fields": {"x": {"jagged": "torch.float32", "rows": [[1.5, 2.5], [1.0, 2.0]]}},
        },
        "jagged, as rows always are; values that would change are refused",
    ),
    "a_scalar_where_rows_were": (
        {"error": "ColumnError"},
        "the field would come back as a list of objects",
    ),
    "a_parser_that_gives_nothing_back": (
        {"error": "ValueError"},
        "an argument is wrong, the storage is not",
    ),
    "a_tuple": ({"error": "TypeError"}, "it would need a pickle"),
}


@pytest.fixture
def queue(index_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.delenv(tq.INDEX, raising=False)
    conf = {
        "url": index_url,
        "run": uuid.uuid4().hex[:8],
        "arena": 1 << 22,
        "directory": str(tmp_path),
    }
    tq.init(conf | {"room_timeout": 0.2})
    yield tq
    erase(index_url, conf["run"])
    tq.close()


def erase(url: str, run: str) -> None:
    async def work() -> None:
        index = Index(url, run)
        await index.erase()
        await index.close()

    asyncio.run(work())


def used() -> int:
    queue = tq._connected()
    stats = queue.call(queue.index.stats())
    return stats["warehouses"]["local"]["used"]


@pytest.mark.parametrize("case", calls.CASES, ids=lambda case: case.__name__)
def test_ours_gives_what_transferqueue_gave(queue: Any, case: Any) -> None:
    found = json.loads(json.dumps(calls.outcome(case, queue)))
    if case.__name__ not in STRICTER:
        assert found == RECORDED[case.__name__]
        return
    wanted, _ = STRICTER[case.__name__]
    assert found == wanted
    if case.__name__ != "a_key_twice_in_one_put":
        assert RECORDED[case.__name__] != wanted, "no longer a difference: take it off the list"


@pytest.mark.skipif(
    importlib.util.find_spec("transfer_queue") is None or importlib.util.find_spec("ray") is None,
    reason="TransferQueue 0.1.11 and Ray are not installed here; what it gives was recorded",
)
def test_transferqueue_still_gives_what_was_recorded() -> None:
    real = calls.start()
    try:
        found = {case.__name__: calls.outcome(case, real) for case in calls.CASES}
    finally:
        calls.stop(real)
    assert json.loads(json.dumps(found)) == RECORDED


def test_every_call_takes_the_arguments_that_transferqueue_takes() -> None:
    import inspect

    wanted = {
        "kv_put": "key partition_id fields tag data_parser",
        "kv_batch_put": "keys partition_id fields tags data_parser",
        "kv_batch_get": "keys partition_id select_fields",
        "kv_batch_get_by_meta": "meta select_fields",
        "kv_list": "partition_id",
        "kv_clear": "keys partition_id",
        "init": "conf",
        "close": "",
    }
    for name, arguments in wanted.items():
        for call in (name, f"async_{name}") if name.startswith("kv") else (name,):
            assert " ".join(inspect.signature(getattr(tq, call)).parameters) == arguments
    assert all(
        asyncio.iscoroutinefunction(getattr(tq, f"async_{name}"))
        for name in wanted
        if name.startswith("kv")
    )


# ── what ours adds ──


def test_a_put_is_seen_whole_or_not_at_all(queue: Any) -> None:
    queue.kv_batch_put(
        ["a", "b"], "p", TensorDict({"x": torch.zeros(2, 512), "y": torch.zeros(2)}, batch_size=[2])
    )
    done = threading.Event()

    def replace() -> None:
        for n in range(1, 60):
            fields = {"x": torch.full((2, 512 + n % 3), float(n)), "y": torch.full((2,), float(n))}
            queue.kv_batch_put(["a", "b"], "p", TensorDict(fields, batch_size=[2]))
        done.set()

    thread = threading.Thread(target=replace)
    thread.start()
    seen = set()
    while not done.is_set():
        got = queue.kv_batch_get(["a", "b"], "p")
        values = {float(v) for v in got["y"]} | {float(v) for v in got["x"].values()}
        assert len(values) == 1, "fields of different puts, or bytes of another put"
        seen |= values
    thread.join()
    assert len(seen) > 1
    assert float(queue.kv_batch_get("a", "p")["y"]) == 59


def test_bytes_are_free_once_their_keys_are_cleared_or_replaced(queue: Any) -> None:
    # 640 kB of 4 MiB
    fields = TensorDict({"x": torch.zeros(8, 20_000), "y": torch.zeros(8)}, batch_size=[8])
    keys = [f"k{i}" for i in range(8)]
    for _ in range(20):
        queue.kv_batch_put(keys, "p", fields)
    assert used() < 1_500_000
    for i in range(20):
        queue.kv_batch_put(keys, f"p{i}", fields)
        queue.kv_clear(keys, f"p{i}")
    queue.kv_clear(keys, "p")
    assert used() == 0


def test_memory_is_bounded_and_a_full_queue_raises(queue: Any) -> None:
    with pytest.raises(NeverFits, match="can never fit"):
        queue.kv_put("a", "p", {"x": torch.zeros(2_000_000)})
    for key in "abc":
        queue.kv_put(key, "p", {"x": torch.zeros(300_000)})
    with pytest.raises(NoRoom, match="stayed full"):
        queue.kv_put("d", "p", {"x": torch.zeros(300_000)})
    assert set(queue.kv_list("p")["p"]) == {"a", "b", "c"}
    queue.kv_clear("b", "p")
    queue.kv_put("d", "p", {"x": torch.zeros(300_000)})


def test_what_was_got_stays_as_it_is(queue: Any) -> None:
    queue.kv_put("a", "p", {"x": torch.tensor([1, 2, 3]), "s": torch.tensor(4.0)})
    got = queue.kv_batch_get("a", "p")
    queue.kv_clear("a", "p")
    queue.kv_put("b", "p", {"x": torch.tensor([7, 7, 7]), "s": torch.tensor(7.0)})
    assert got["x"].values().tolist() == [1, 2, 3]
    assert got["s"].tolist() == [4.0]


def test_a_lost_warehouse_is_an_error_not_another_rows_data(queue: Any) -> None:
    queue.kv_put("a", "p", {"x": torch.tensor([1, 2, 3])})
    inner = tq._connected()
    inner.call(inner.index.lose_warehouse(inner.dock.home))
    with pytest.raises(StaleHandle, match="put them again"):
        queue.kv_batch_get("a", "p")


def test_thousands_of_keys_at_once(queue: Any) -> None:
    keys = [f"key-{i}" for i in range(9000)]
    queue.kv_batch_put(
        keys,
        "p",
        TensorDict({"x": torch.arange(9000)}, batch_size=[9000]),
        [{"i": i} for i in range(9000)],
    )
    assert torch.equal(queue.kv_batch_get(keys[::-1], "p")["x"], torch.arange(8999, -1, -1))
    listed = queue.kv_list("p")["p"]
    assert list(listed) == keys, "in the order in which they came"
    assert listed["key-17"] == {"i": 17}
    queue.kv_clear(keys, "p")
    assert queue.kv_list("p") == {"p": {}}


def test_refusals_name_the_field_and_the_fix(queue: Any) -> None:
    queue.kv_put("a", "p", {"x": torch.tensor([1.5])})
    with pytest.raises(
        ColumnError,
        match=r"field 'x': takes float32 \*, got int64 \*; convert it first.* "
        r"16777217 would",
    ):
        queue.kv_put("b", "p", {"x": torch.tensor([1, 16777217])})
    with pytest.raises(ColumnError, match=r"field 'x': takes float32 \*, got float32 \*,2"):
        queue.kv_put("b", "p", {"x": torch.ones(2, 2)})
    with pytest.raises(TypeError, match=r"field 'pair': \(1, 2\) would come back as \[1, 2\]"):
        queue.kv_put("b", "p", {"pair": (1, 2)})
    with pytest.raises(TypeError, match="tag 'when'"):
        queue.kv_put("b", "p", tag={"when": object()})
    with pytest.raises(ValueError, match="has no keys \\['b'\\]"):
        queue.kv_batch_get(["a", "b"], "p")
    with pytest.raises(ValueError, match="\\['y'\\] is not there for each"):
        queue.kv_batch_get("a", "p", ["x", "y"])
    ragged = torch.nested.as_nested_tensor(
        [torch.ones(1, 2), torch.ones(1, 3)], layout=torch.strided
    )
    with pytest.raises(ColumnError, match="differ beyond their first dimension"):
        queue.kv_batch_put(["b", "c"], "p", TensorDict({"r": ragged}, batch_size=[2]))
    assert queue.kv_list("p") == {"p": {"a": {}}}, "nothing of what was refused is there"
    with pytest.raises(ValueError, match="is not known"):
        queue.init({"arnea": 1})
    with pytest.raises(TypeError, match="fields: takes a TensorDict, got dict; give TensorDict"):
        queue.kv_batch_put(["b"], "p", {"x": torch.ones(1, 2)})
    for call in (
        lambda: queue.kv_put("b", 5, tag={}),
        lambda: queue.kv_list(5),
        lambda: queue.kv_clear("b", 5),
    ):
        with pytest.raises(TypeError, match="partition_id: takes a string, got 5"):
            call()
    for tags in ([{1: "x"}], {"step": 1}):
        with pytest.raises(TypeError, match="not a dict with string keys"):
            queue.kv_batch_put(["b"], "p", tags=tags)
    meta = queue.kv_put("a", "p", tag={})
    with pytest.raises(ValueError, match=r"select_fields: \['z'\] not found"):
        queue.kv_batch_get_by_meta(meta, ["x", "z"])


def test_the_steps_of_transferqueues_second_tutorial(queue: Any) -> None:
    """One sample with a mask of float32, then four whose masks are int64, in the same partition,
    read together."""
    ids = torch.tensor([[1, 2, 3]])
    first = TensorDict({"input_ids": ids, "attention_mask": torch.ones(ids.size())}, batch_size=1)
    queue.kv_put("0_0", "Train", first, {"status": "running"})
    ids = torch.arange(4, 16).view(4, 3)
    keys = ["1_0", "1_1", "1_2", "2_0"]
    batch = TensorDict({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, batch_size=4)
    queue.kv_batch_put(keys, "Train", batch, [{"status": "running"} for _ in keys])
    response = TensorDict({"response": torch.tensor([[4, 5, 6], [7, 8, 9]])}, batch_size=2)
    queue.kv_batch_put(["1_1", "2_0"], "Train", response, [{"status": "finish"}] * 2)
    queue.kv_put("0_0", "Train", None, {"status": "finish"})
    listed = queue.kv_list()["Train"]
    assert {key: tag["status"] for key, tag in listed.items()} == {
        **{"0_0": "finish", "1_0": "running", "1_1": "finish", "1_2": "running", "2_0": "finish"}
    }
    assert list(queue.kv_batch_get(list(listed), "Train", "input_ids").keys()) == ["input_ids"]
    everything = queue.kv_batch_get(list(listed), "Train")
    assert list(everything.keys()) == ["input_ids", "attention_mask"]
    assert everything["attention_mask"].values().tolist() == [1.0] * 15
    assert everything["input_ids"].values().tolist() == [1, 2, 3, *range(4, 16)]
    queue.kv_clear(["0_0", "1_0"], "Train")
    assert list(queue.kv_list("Train")["Train"]) == ["1_1", "1_2", "2_0"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.tensor([1.5]), torch.tensor([1, 16777217])),
        (torch.tensor([1]), torch.tensor([0.5])),
        (torch.tensor([1]), torch.tensor([float("nan")])),
        (torch.tensor([1], dtype=torch.int32), torch.tensor([2**31])),
        (torch.tensor([1.0]).bfloat16(), torch.tensor([0.1])),
        (torch.tensor([1.0]), torch.tensor([1 + 0j])),
        (torch.tensor([1.0]), torch.tensor(1.0)),
        (torch.tensor([1.0]), [1.0]),
    ],
)
def test_values_that_would_change_are_refused(queue: Any, first: torch.Tensor, second: Any) -> None:
    queue.kv_put("a", "p", {"x": first})
    with pytest.raises(ColumnError, match="field 'x': takes"):
        queue.kv_put("b", "p", {"x": second})
    assert list(queue.kv_list("p")["p"]) == ["a"]
    assert used() <= 1 << 17, "what was refused holds no room beyond the writer's slab"
    queue.kv_put("b", "other partition", {"x": second})
    queue.kv_clear("a", "p")
    queue.kv_put("b", "p", {"x": second})  # its fields went with the partition's last key
    (got,) = (
        queue.kv_batch_get("b", "p")["x"].tolist()
        if isinstance(second, list)
        else queue.kv_batch_get("b", "p")["x"]
    )
    assert (
        got == second
        if isinstance(second, list)
        else torch.equal(got, second) or bool(second.isnan().all())
    )


def test_values_of_another_dtype_that_stay_what_they_are_come_in_the_fields(queue: Any) -> None:
    queue.kv_put("a", "p", {"x": torch.tensor([1.5, float("nan")])})
    for key, row in {"b": [True, False], "c": [3, -7], "d": [0.5, float("inf")], "e": []}.items():
        queue.kv_put(
            key, "p", {"x": torch.tensor(row, dtype=torch.float64 if key == "d" else None)}
        )
    queue.kv_batch_put(
        ["f", "g"], "p", TensorDict({"x": calls.jagged(1, 2, dtype=torch.int8)}, batch_size=[2])
    )
    got = queue.kv_batch_get(list("bcdefg"), "p")["x"]
    assert got.dtype == torch.float32
    rows = [[1.0, 0.0], [3.0, -7.0], [0.5, float("inf")], [], [0.0], [10.0, 11.0]]
    assert [row.tolist() for row in got.unbind()] == rows


def test_sixty_three_fields_and_a_refused_put_takes_none(queue: Any) -> None:
    many = {f"f{i}": torch.tensor([i, i + 1]) for i in range(64)}
    for _ in range(3):
        with pytest.raises(
            IndexRefused, match="field f63 is one too many: a partition has at most 63"
        ):
            queue.kv_put("a", "p", many)
    assert queue.kv_list() == {}
    del many["f63"]
    assert queue.kv_put("a", "p", many).fields == sorted(many)
    with pytest.raises(IndexRefused, match="field g is one too many"):
        queue.kv_put("a", "p", {"g": torch.tensor([1])})
    queue.kv_put("b", "p", {f"f{i}": torch.tensor([-i]) for i in (0, 30, 31, 32, 33, 62)})
    queue.kv_put("a", "p", {f"f{i}": torch.tensor([100 + i]) for i in (31, 32, 62)})
    got = queue.kv_batch_get("a", "p")
    assert list(got.keys()) == list(many)
    for i in range(63):
        assert got[f"f{i}"].values().tolist() == ([100 + i] if i in (31, 32, 62) else [i, i + 1])
    both = queue.kv_batch_get(["b", "a"], "p")
    assert list(both.keys()) == ["f0", "f30", "f31", "f32", "f33", "f62"]
    assert [row.tolist() for row in both["f62"].unbind()] == [[-62], [162]]
    queue.kv_clear(["a", "b"], "p")
    tq._connected().call(tq._connected().dock.writer.flush())
    assert used() == 0
    queue.kv_put("a", "p", {f"g{i}": torch.tensor(i) for i in range(63)})


def test_numpy_arrays_are_tensors(queue: Any) -> None:
    frozen = np.arange(3)
    frozen.flags.writeable = False
    row = {
        **{
            "x": np.array([1, 2, 3]),
            "s": np.float32(0.5),
            "n": np.array(7),
            "flags": np.array([True, False]),
        },
        **{
            "frozen": frozen,
            "back": np.arange(4)[::-2],
            "big": np.array([1, 2], dtype=">i4"),
            "m": np.ones((2, 3)),
        },
    }
    queue.kv_put(
        "a", "p", row, {"score": np.float64(0.25), "count": np.int64(3), "ok": np.bool_(True)}
    )
    got = queue.kv_batch_get("a", "p")
    for name, value in row.items():
        (tensor,) = got[name].unbind()
        assert tensor.tolist() == value.tolist()
        assert tensor.numpy().dtype == value.dtype.newbyteorder("=")
    assert queue.kv_list("p") == {"p": {"a": {"score": 0.25, "count": 3, "ok": True}}}
    arrays = NonTensorStack(np.array([1, 2]), np.array([3]))
    fields = TensorDict({"x": np.arange(6).reshape(2, 3), "r": arrays}, batch_size=[2])
    queue.kv_batch_put(
        ["b", "c"], "p", fields, data_parser=lambda fields: fields | {"x": fields["x"].numpy() * 2}
    )
    got = queue.kv_batch_get(["c", "b"], "p")
    assert [row.tolist() for row in got["x"].unbind()] == [[6, 8, 10], [0, 2, 4]]
    assert [row.tolist() for row in got["r"].unbind()] == [[3], [1, 2]]
    with pytest.raises(
        TypeError,
        match=r"field 't': an array of <U2 cannot be stored; give "
        r"value.tolist\(\)",
    ):
        queue.kv_put("d", "p", {"t": np.array(["u", "vv"])})


def test_fields_come_in_the_order_asked(queue: Any) -> None:
    meta = queue.kv_batch_put(calls.KEYS, "p", calls.rows())
    for names in (
        ["reward", "prompt", "ids", "response"],
        ["response", "ids"],
        ["ids", "response", "reward"],
    ):
        assert list(queue.kv_batch_get(calls.KEYS, "p", names).keys()) == names
        assert list(queue.kv_batch_get_by_meta(meta, names).keys()) == names
    assert list(queue.kv_batch_get(calls.KEYS, "p").keys()) == [
        "ids",
        "reward",
        "response",
        "prompt",
    ]


def test_a_name_without_letters_is_a_partition_too(queue: Any) -> None:
    queue.kv_put("a", "", {"x": torch.tensor([1])})
    queue.kv_put("a", "p", {"x": torch.tensor([2])})
    assert queue.kv_list("") == {"": {"a": {}}}
    assert set(queue.kv_list()) == {"", "p"}


def test_fields_that_others_change_meanwhile(queue: Any) -> None:
    """Two processes that know a partition's fields, one of which clears it and fills it with other
    ones."""
    one = tq._connected()
    two = Queue(one.conf)

    def put(at: Queue, key: str, **row: torch.Tensor) -> Any:
        return at.call(at.put([key], "p", {n: v[None] for n, v in row.items()}, None))

    get = lambda at, key: at.call(at.get([key], "p", None))  # noqa: E731
    try:
        put(one, "a", x=torch.tensor([1.0]), y=torch.tensor([2.0]))
        put(two, "b", z=torch.tensor([3]), y=torch.tensor([4.0]))
        put(one, "c", w=torch.tensor([5]), z=torch.tensor([6]))
        assert list(get(two, "c").keys()) == ["z", "w"]
        one.call(one.clear(["a", "b", "c"], "p"))
        put(two, "d", y=torch.tensor([7]), x=torch.tensor(8))  # other kinds, in another order
        put(one, "e", x=torch.tensor(9))
        with pytest.raises(ColumnError, match=r"takes int64 \*, got float32 \*"):
            put(one, "e", y=torch.tensor([0.5]))
        assert {name: value.tolist() for name, value in get(one, "d").items() if name == "x"} == {
            "x": [8]
        }
        assert get(two, "e")["x"].tolist() == [9]
        two.call(two.clear(["d", "e"], "p"))
        put(one, "f", y=torch.tensor([0.5]))
        assert get(two, "f")["y"].values().tolist() == [0.5]
    finally:
        two.close()


def test_processes_that_bring_their_own_fields_to_new_partitions(queue: Any) -> None:
    queues = [tq._connected(), *(Queue(tq._connected().conf) for _ in range(2))]

    def work(number: int) -> None:
        at = queues[number]
        for p in range(40):
            fields = {f"own{number}": torch.tensor([number, p]), "common": torch.tensor([p])}
            at.call(
                at.put(
                    [f"k{number}"], f"p{p}", {n: v.unsqueeze(0) for n, v in fields.items()}, None
                )
            )
            if p % 3 == number:
                at.call(at.clear([f"k{number}"], f"p{p}"))
                at.call(
                    at.put(
                        [f"k{number}"],
                        f"p{p}",
                        {n: v.unsqueeze(0) for n, v in fields.items()},
                        None,
                    )
                )

    try:
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(work, range(3)))
        for p in range(40):
            for number in range(3):
                got = queue.kv_batch_get(f"k{number}", f"p{p}")
                assert {name: value.values().tolist() for name, value in got.items()} == {
                    f"own{number}": [number, p],
                    "common": [p],
                }
    finally:
        for at in queues[1:]:
            at.close()


def test_a_parser_that_changes_the_number_of_rows_is_refused(queue: Any) -> None:
    fields = TensorDict({"text": NonTensorStack("a", "b")}, batch_size=[2])
    with pytest.raises(ValueError, match="data_parser"):
        queue.kv_batch_put(
            ["a", "b"], "p", fields, data_parser=lambda fields: {"text": [*fields["text"], "c"]}
        )


# The least of Ray that a queue needs: whether this process is in a cluster, as a worker or not, and
# the cluster's store.
RAY = """
import os
from pathlib import Path
from types import SimpleNamespace
SCRIPT_MODE, WORKER_MODE = 0, 1
STORE = Path(__file__).parent / "stored"
def is_initialized(): return True
def get_runtime_context(): return SimpleNamespace(worker=SimpleNamespace(mode=int(os.environ.get("FAKE_RAY_MODE", 0))))
"""
RAY_STORE = """
import ray
def _internal_kv_get(key, *, namespace): return ray.STORE.read_bytes() if ray.STORE.exists() else None
def _internal_kv_put(key, value, overwrite=True, *, namespace):
    there = ray.STORE.exists()
    if overwrite or not there: ray.STORE.write_bytes(value)
    return there
def _internal_kv_del(key, *, namespace): ray.STORE.unlink()
"""
WORKER = """
import sys, ray, torch
from pipeline.compat import transfer_queue as tq
from pipeline.compat.transfer_queue.queue import Queue
if "init" in sys.argv: tq.init()
print(tq.kv_batch_get("a", "p")["x"].tolist())
tq.kv_put(sys.argv[1], "p", {"x": torch.tensor(2)})
tq.close()
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This process is a driver of Ray; yields a folder in which `import ray` is the same
    cluster."""
    (tmp_path / "ray" / "experimental").mkdir(parents=True)
    (tmp_path / "ray" / "__init__.py").write_text(RAY)
    (tmp_path / "ray" / "experimental" / "__init__.py").touch()
    (tmp_path / "ray" / "experimental" / "internal_kv.py").write_text(RAY_STORE)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delenv(tq.INDEX, raising=False)
    importlib.import_module("ray")
    yield tmp_path
    tq.close()
    for name in [name for name in sys.modules if name.split(".")[0] == "ray"]:
        del sys.modules[name]


def ray_worker(cluster: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A worker of Ray: the environment of a raylet that was started before any queue."""
    env = {name: value for name, value in os.environ.items() if name not in (tq.INDEX, tq.RUN)}
    env |= {"FAKE_RAY_MODE": "1", "PYTHONPATH": f"{cluster}:{Path(tq.__file__).parents[3]}"}
    command = [sys.executable, "-c", WORKER, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)


def test_a_worker_of_ray_finds_the_queue_or_fails(cluster: Path) -> None:
    tq.init()
    tq.kv_put("a", "p", {"x": torch.tensor(1)})
    for arguments in (("b", "init"), ("c",)):  # a call without init connects, as in a child
        worker = ray_worker(cluster, *arguments)
        assert worker.stdout == "[1]\n", worker.stderr
    assert list(tq.kv_list("p")["p"]) == ["a", "b", "c"], "one queue"
    tq.close()
    worker = ray_worker(cluster, "d", "init")
    assert worker.returncode == 1
    assert (
        "RuntimeError: this Ray cluster has no queue; call init() in the driver, after ray.init()"
        in worker.stderr
    )


def test_a_queue_of_ray_that_has_ended_or_lies_elsewhere(
    cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = cluster / "ray" / "stored"
    dead = {"url": f"unix://{cluster}/none.sock", "run": "r", "node": _node()}
    stored.write_text(json.dumps(dead))
    monkeypatch.setenv("FAKE_RAY_MODE", "1")
    with pytest.raises(RuntimeError, match="the queue of this Ray cluster has ended; call init"):
        tq.init()
    stored.write_text(json.dumps(dead | {"node": "elsewhere"}))
    for call in (tq.init, tq.kv_list):
        with pytest.raises(
            RuntimeError, match="listens on node 'elsewhere' alone; open it with init"
        ):
            call()
    monkeypatch.setenv("FAKE_RAY_MODE", "0")
    stored.write_text(json.dumps(dead))
    conf = tq.init()  # a driver takes the place of one that was killed
    assert json.loads(stored.read_text()) == {
        "url": conf["url"],
        "run": conf["run"],
        "node": _node(),
    }
    tq.close()
    assert not stored.exists()


def test_a_queue_from_before_ray_init_is_noted_later_and_two_are_an_error(cluster: Path) -> None:
    stored = cluster / "ray" / "stored"
    ray = sys.modules.pop("ray")
    tq.init()
    tq.kv_put("a", "p", {"x": torch.tensor(1)})
    sys.modules["ray"] = ray
    assert not stored.exists()
    tq.init()
    assert ray_worker(cluster, "b", "init").stdout == "[1]\n"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(f"{cluster}/o.sock")
        other.listen()
        stored.write_text(
            json.dumps({"url": f"unix://{cluster}/o.sock", "run": "r", "node": _node()})
        )
        tq._connected().announced = False
        with pytest.raises(
            RuntimeError,
            match="this Ray cluster has a queue, run 'r', and this process another one",
        ):
            tq.init()
    assert list(tq.kv_list("p")["p"]) == ["a", "b"], "what this process has stays"


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_a_worker_of_a_real_ray_finds_the_queue_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.delenv(tq.INDEX, raising=False)
    path = str(Path(tq.__file__).parents[3])
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )

    def work() -> Any:
        from pipeline.compat import transfer_queue as tq

        try:
            tq.init()
        except RuntimeError as error:
            return str(error)
        found = tq.kv_batch_get("a", "p")["x"].tolist()
        tq.kv_put("b", "p", {"x": found[0] + np.array(1)})
        tq.close()
        return found

    remote = ray.remote(work)
    try:
        assert ray.get(remote.remote(), timeout=120).startswith("this Ray cluster has no queue")
        tq.init()
        tq.kv_put("a", "p", {"x": torch.tensor(1)})
        assert ray.get(remote.remote(), timeout=120) == [1]
        assert tq.kv_batch_get(["a", "b"], "p")["x"].tolist() == [1, 2]
    finally:
        tq.close()
        ray.shutdown()


CHILD = """
import json, torch
from pipeline.compat import transfer_queue as tq
from pipeline.compat.transfer_queue.queue import Queue
got = tq.kv_batch_get(["a", "b"], "p")  # without init: the parent's queue
tq.kv_put("c", "p", {"x": torch.tensor([9])}, {"from": "child"})
print(json.dumps([row.tolist() for row in got["x"].unbind()]))
"""


def test_children_find_the_queue_that_their_parent_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tq.INDEX, raising=False)
    conf = tq.init()
    try:
        tq.kv_batch_put(
            ["a", "b"], "p", TensorDict({"x": torch.tensor([[1, 2], [3, 4]])}, batch_size=[2])
        )
        child = subprocess.run(
            [sys.executable, "-c", CHILD], stdout=subprocess.PIPE, timeout=120, check=True
        )
        assert json.loads(child.stdout) == [[1, 2], [3, 4]]
        # inherits a connection that it must not use
        with multiprocessing.get_context("fork").Pool(1) as pool:
            assert pool.apply(tq.kv_list, ("p",)) == {
                "p": {"a": {}, "b": {}, "c": {"from": "child"}}
            }
        assert tq.kv_batch_get("c", "p")["x"].values().tolist() == [9]
        directory = tq._connected().directory
    finally:
        tq.close()
    assert conf["url"].startswith("unix://")
    assert not directory.exists()
    with pytest.raises(RuntimeError, match="call init"):
        tq.kv_list()


def test_values_move_along_when_their_warehouse_leaves(
    queue: Any, index_url: str, tmp_path: Path
) -> None:
    queue.kv_batch_put(calls.KEYS, "p", calls.rows())
    before = calls.plain(queue.kv_batch_get(calls.KEYS, "p"))
    inner = tq._connected()

    async def leave() -> int:
        index = Index(index_url, inner.index.run)
        other = Dock(
            index, inner.dock.schema, worker="other", directory=tmp_path, warehouse="other"
        )
        await other.join(1 << 20)
        moved = await inner.dock.drain()
        await other.close()
        await index.close()
        return moved

    assert inner.call(leave()) > 0
    assert calls.plain(queue.kv_batch_get(calls.KEYS, "p")) == before
    queue.kv_put("d", "p", {"ids": torch.tensor([1])})
    assert queue.kv_batch_get("d", "p")["ids"].values().tolist() == [1]


def test_another_node_gets_what_lies_here(queue: Any, index_url: str, tmp_path: Path) -> None:
    conf = dict(tq._connected().conf) | {
        "serve": "127.0.0.1",
        "secret": b"a secret of the run, sixteen or more",
    }
    conf |= {"run": uuid.uuid4().hex[:8]}
    here, there = (
        Queue(conf | {"node": node, "directory": str(tmp_path / node)})
        for node in ("here", "there")
    )
    put = lambda at, keys, fields: at.call(at.put(keys, "p", fields, None))  # noqa: E731
    put(here, ["a", "b"], calls.rows(2))
    put(there, ["c"], {"ids": torch.tensor([[7, 8]]), "reward": torch.tensor([0.5])})
    many = {f"f{i}": torch.tensor([[i]]) for i in range(58)}  # more than a run has columns
    here.call(here.put(["m"], "p", many, None))
    got = there.call(there.get(["m"], "p", None))
    assert {name: value.values().tolist() for name, value in got.items()} == {
        f"f{i}": [i] for i in range(58)
    }
    got = there.call(there.get(["c", "b", "a"], "p", ["reward", "ids"]))
    assert got["reward"].tolist() == [0.5, 0.25, 0.0]
    assert [row.tolist() for row in got["ids"].unbind()] == [[7, 8], [4, 5, 6, 7], [0, 1, 2, 3]]
    erase(index_url, conf["run"])
    for each in (there, here):
        each.close()
