"""The table of tensors goes through the index once a run; a version's record has what changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch

from pipeline.index.client import Index, RunConfig
from stages.weights.documents import WEIGHT_TENSORS
from stages.weights.published import Published, WeightsDamaged
from stages.weights.records import WeightRecords
from stages.weights.transport.store import WeightStore


async def published(index: Index, store: WeightStore, version: int, names: int = 300) -> Published:
    """Publish ``names`` tensors as ``version`` into ``store``, of a trainer that is as far."""
    await index._redis.hset(f"{index.prefix}n", "trained", version)
    tensors = [
        (f"model.layers.{n}.mlp.up.weight", torch.full((4,), float(version))) for n in range(names)
    ]
    return store.publish(version, tensors)


async def record_of(index: Index, version: int) -> dict[str, Any]:
    record = await index.weights_record(version)
    assert record is not None
    return record


async def test_the_table_of_tensors_is_written_once(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await index.init(RunConfig(()), {})
    puts = []
    write = index.write_document

    async def counted(name: str, text: str, **options: Any) -> None:
        puts.append(name)
        await write(name, text, **options)

    monkeypatch.setattr(index, "write_document", counted)
    store = WeightStore(tmp_path)
    trainer = WeightRecords(index)
    engine = WeightRecords(index)
    for version in (1, 2, 3):
        wanted = await published(index, store, version)
        await trainer.publish(wanted)
        record = await record_of(index, version)
        assert "tensors" not in record
        assert len(msgpack.packb(record)) < 300
        assert await engine.read(record) == wanted
    assert puts == [WEIGHT_TENSORS.key]
    # a trainer that was started again, and an engine that joins
    wanted = await published(index, store, 4)
    await WeightRecords(index).publish(wanted)
    assert await WeightRecords(index).read(await record_of(index, 4)) == wanted


async def test_the_record_of_a_run_that_began_before_there_was_a_table_is_read(
    index: Index, tmp_path: Path
) -> None:
    """The trainer of a resumed run publishes no version again that engines can still read."""
    await index.init(RunConfig(()), {})
    wanted = await published(index, WeightStore(tmp_path), 3, names=2)
    await index.publish_weights(3, wanted.record())
    assert await WeightRecords(index).read(await record_of(index, 3)) == wanted


async def test_tables_that_change_with_each_version_are_not_kept_for_ever(
    index: Index, tmp_path: Path
) -> None:
    """An external trainer may order its tensors as it likes."""
    await index.init(RunConfig(()), {})
    store = WeightStore(tmp_path)
    records = WeightRecords(index)
    first: dict[str, Any] = {}
    for version in range(1, 6):
        await records.publish(await published(index, store, version, names=version))
        first = first or await record_of(index, version)
    assert len(await WEIGHT_TENSORS.get(index) or ()) == 2
    for version in (4, 5):  # the two that the index has records of
        found = await WeightRecords(index).read(await record_of(index, version))
        assert (found.version, len(found.tensors)) == (version, version)
    with pytest.raises(WeightsDamaged, match="version 1: their table of tensors is held no more"):
        await WeightRecords(index).read(first)
