"""What a rollout engine relies on: exactly the weights of the version that it asked for, or word
that it cannot have it."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, takewhile
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stages.weights.published import Published, WeightsDamaged
from stages.weights.transport.store import WeightStore

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int8,
    torch.int64,
    torch.bool,
]


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(
        0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, generator=generator
    )
    return raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, NaNs included."""
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    flat = [tensor.contiguous().view(-1) for tensor in (one, other)]
    return not flat[0].numel() or torch.equal(flat[0].view(torch.uint8), flat[1].view(torch.uint8))


shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@settings(max_examples=60, deadline=None)
@example(layout=[(torch.float32, (0,))], bucket=1)
@given(
    layout=st.lists(st.tuples(st.sampled_from(DTYPES), shapes), max_size=8),
    bucket=st.integers(1, 700),
)
def test_weights_come_back_bit_for_bit_wherever_buckets_end(
    tmp_path_factory: pytest.TempPathFactory,
    layout: list[tuple[torch.dtype, tuple[int, ...]]],
    bucket: int,
) -> None:
    directory = tmp_path_factory.mktemp("weights")
    weights = {
        f"layer.{i}": random_tensor(dtype, shape, i) for i, (dtype, shape) in enumerate(layout)
    }
    published = WeightStore(directory, bucket_bytes=bucket).publish(3, weights.items())
    covered = sum(nbytes for _, nbytes, _ in published.buckets)
    assert covered >= sum(value.numel() * value.element_size() for value in weights.values()), (
        "bytes without a checksum"
    )
    read = WeightStore(directory).read(Published.from_record(published.record()))
    assert list(read) == list(weights)
    assert all(same(read[name], value) for name, value in weights.items())


def test_strided_and_trained_parameters_are_published_as_they_read(tmp_path: Path) -> None:
    wide = torch.arange(24.0).view(4, 6)
    parameter = torch.nn.Parameter(wide.clone())
    published = WeightStore(tmp_path).publish(
        1, [("t", wide.t()), ("columns", wide[:, ::2]), ("p", parameter)]
    )
    read = WeightStore(tmp_path).read(published)
    assert torch.equal(read["t"], wide.t())
    assert torch.equal(read["columns"], wide[:, ::2])
    assert torch.equal(read["p"], wide)
    assert not read["p"].requires_grad


def test_what_was_read_is_the_readers_own(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    read = store.read(store.publish(1, [("w", torch.ones(100))]))
    store.publish(3, [("w", torch.zeros(100))])  # the same slot
    assert torch.equal(read["w"], torch.ones(100))


def test_as_many_versions_as_slots_can_be_read(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, slots=2)
    reader = WeightStore(tmp_path, slots=2)
    versions = {v: store.publish(v, [("w", torch.full((50,), float(v)))]) for v in range(4)}
    for version in (2, 3):
        assert reader.read(versions[version])["w"].unique().tolist() == [version]
    for version in (0, 1):
        with pytest.raises(
            WeightsDamaged,
            match=f"version {version}: bucket 0 .* a later version has overwritten it",
        ):
            reader.read(versions[version])


def test_a_model_may_grow(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, slots=1)
    reader = WeightStore(tmp_path, slots=1)
    assert reader.read(store.publish(0, [("w", torch.ones(10))]))["w"].sum() == 10
    assert reader.read(store.publish(1, [("w", torch.ones(100_000))]))["w"].sum() == 100_000
    assert reader.read(store.publish(2, [("w", torch.ones(10))]))["w"].sum() == 10


@pytest.mark.parametrize("at", [0, 1000, 3999])
def test_one_flipped_bit_is_found(tmp_path: Path, at: int) -> None:
    published = WeightStore(tmp_path, bucket_bytes=512).publish(4, [("w", torch.zeros(1000))])
    with (tmp_path / "weights-0").open("r+b") as file:
        file.seek(at)
        file.write(b"\x01")
    with pytest.raises(WeightsDamaged, match=rf"version 4: bucket {at // 512} "):
        WeightStore(tmp_path).read(published)


@pytest.mark.parametrize(
    "mapped", [False, True], ids=["a new reader", "a reader that has it mapped"]
)
def test_a_truncated_or_missing_file_is_damage_and_not_a_crash(
    tmp_path: Path, mapped: bool
) -> None:
    published = WeightStore(tmp_path).publish(1, [("w", torch.ones(10_000))])
    reader = WeightStore(tmp_path)
    path = tmp_path / "weights-1"
    if mapped:
        reader.read(published)
    os.truncate(path, 20_000)
    with pytest.raises(
        WeightsDamaged,
        match=r"version 1: .* 20000 bytes where 40000 were "
        r"published",
    ):
        reader.read(published)
    assert path.stat().st_size == 20_000, "a reader writes nothing"
    path.unlink()
    with pytest.raises(WeightsDamaged, match=r"version 1: .* is not there"):
        WeightStore(tmp_path).read(published)
    assert not path.exists()


def test_a_read_torn_by_a_publisher_is_always_caught(tmp_path: Path) -> None:
    """Each version is one value throughout: whatever a read returns is whole, and of the version
    asked for."""
    outcomes = {"whole": 0, "damaged": 0}
    met = threading.Event()
    newest: list[Published] = [
        WeightStore(tmp_path).publish(0, [("w", torch.zeros(60_000)), ("b", torch.zeros(7))])
    ]

    def publish() -> None:
        store = WeightStore(tmp_path, bucket_bytes=1 << 14)
        for version in takewhile(lambda _: not met.is_set(), count(1)):
            value = float(version)
            newest.append(
                store.publish(
                    version, [("w", torch.full((60_000,), value)), ("b", torch.full((7,), value))]
                )
            )

    publisher = threading.Thread(target=publish)
    publisher.start()
    reader = WeightStore(tmp_path)
    deadline = time.monotonic() + 120
    try:
        while time.monotonic() < deadline and not (outcomes["damaged"] and outcomes["whole"] >= 20):
            # the slot that is about to be, or is being, overwritten
            asked = newest[max(0, len(newest) - 2)]
            try:
                read = reader.read(asked)
            except WeightsDamaged:
                outcomes["damaged"] += 1
                continue
            outcomes["whole"] += 1
            assert {*read["w"].unique().tolist(), *read["b"].unique().tolist()} == {
                float(asked.version)
            }
    finally:
        met.set()
        publisher.join()
    assert reader.read(newest[-1])["w"].unique().tolist() == [newest[-1].version]
    assert outcomes["damaged"], f"no read met the publisher: {outcomes}"


def test_publishing_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    """A sharded engine gathers them one by one; together they may not fit."""
    alive: list[weakref.ref[torch.Tensor]] = []

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(6):
            weight = torch.full((1000 + number,), float(number))
            alive.append(weakref.ref(weight))
            yield f"layer.{number}", weight
            del weight
            assert sum(ref() is not None for ref in alive) <= 1

    store = WeightStore(tmp_path, bucket_bytes=3000)
    for version in (1, 2, 3):
        read = store.read(store.publish(version, gathered()))
        assert {name: weight.unique().tolist() for name, weight in read.items()} == {
            f"layer.{number}": [number] for number in range(6)
        }


@pytest.mark.parametrize("lacking", [0, 1, -1])
def test_bytes_that_no_checksum_covers_are_not_read(tmp_path: Path, lacking: int) -> None:
    """A rank's buckets that did not come in: whatever lies in their place would be taken for
    weights."""
    published = WeightStore(tmp_path, bucket_bytes=512).publish(
        4, [("w", torch.ones(1000)), ("b", torch.ones(3))]
    )
    assert len(published.buckets) > 3
    buckets = list(published.buckets)
    del buckets[lacking]
    with pytest.raises(
        WeightsDamaged,
        match=r"version 4: bytes \d+\.\.\d+ are in no bucket.* "
        r"publish again",
    ):
        WeightStore(tmp_path).read(replace(published, buckets=tuple(buckets)))
