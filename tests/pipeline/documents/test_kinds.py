"""What a writer puts into a document or a log is what its reader gets, or an error that names
it."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path

import pytest
import torch

from orchestration.history.totals import RecordedTotals, RunTotals
from orchestration.state.documents import (
    BEAT,
    CHECKPOINT_REPORTED,
    DECLARED,
    END,
    ENDING,
    EXTERNAL_TERMS,
    HEAD,
    HEADS_INDEX,
    LEAVE,
    LOADED,
    ORDERS,
    OVER,
    RUN_FLOW,
    RUN_PATHS,
    RUN_RECIPE,
    SCALE,
    STEPPED,
    TAKEN_BY,
    TOTALS,
    Ending,
    Order,
)
from orchestration.state.paths import RunPaths
from pipeline.data.columns import Column, Schema
from pipeline.data.events import ForecastEvent
from pipeline.documents.flow import BATCHES, HEAD_ADDRESS, SCHEMA, SECRET, HeadAddress
from pipeline.documents.kinds import Document, DocumentDamaged, Log
from pipeline.index.client import Index
from pipeline.index.errors import IndexRefused
from stages.flow.declarations import Declared, StageDeclaration
from stages.rollout.external_checks import Terms
from stages.weights.documents import ENGINES, EVALUATED, FORECAST, TIMED_OUT
from tests.orchestration.runs import TINY, recipe

STAGE = StageDeclaration("own", "rows", {"response": "text"}, {"length": "float32"}, workers=2)
FORECASTED = ForecastEvent(
    step=3,
    version=2,
    step_seconds=1.5,
    tokens_per_second=20.0,
    generation=0.5,
    training=None,
    staleness_mean=0.25,
    bound=2,
    before=1,
)


@pytest.fixture(autouse=True)
async def _loaded(index: Index) -> None:
    await index.load()


@pytest.mark.parametrize(
    ("document", "value", "of"),
    [
        (RUN_RECIPE, recipe(TINY), {}),
        (
            RUN_PATHS,
            RunPaths(Path("/out"), Path("/dev/shm/x"), Path("/out/checkpoints/step-4"), "s3://a"),
            {},
        ),
        (RUN_FLOW, {"stages": [{"name": "rollout"}], "edges": []}, {}),
        (DECLARED, Declared((STAGE,), {"length": "float32"}), {}),
        (EXTERNAL_TERMS, Terms(64, {"temperature": 1.0}, 7, 2, None, "abc"), {}),
        (SCHEMA, Schema([Column.ragged("prompt_ids", torch.int64)]), {}),
        (SECRET, b"00ff", {}),
        (HEAD_ADDRESS, HeadAddress("space", ""), {}),
        (HEADS_INDEX, True, {}),
        (LEAVE, True, {"name": "rollout-0-1-a"}),
        (ENDING, Ending(-9), {"name": "rollout-0-1-a"}),
        (
            ENDING,
            Ending(0, "KeyError: 'a'", fault=("KeyError", "a.py:3")),
            {"name": "rollout-0-1-a"},
        ),
        (BEAT, OVER, {"host": "host-1"}),
        (BEAT, 0, {"host": HEAD}),
        (EVALUATED, 0, {}),
        (STEPPED, 1764165000.1234567, {}),
        (LOADED, 0, {"owner": "{a}", "worker": "b:c"}),
        (ENGINES, [], {}),
        (ENGINES, ["rollout-0", "rollout-1"], {}),
        (TIMED_OUT, [1, 2], {"stage": "own"}),
        (FORECAST, FORECASTED, {}),
    ],
)
async def test_a_reader_gets_what_was_written(
    index: Index, document: Document, value: object, of: dict
) -> None:
    assert await document.get(index, **of) is None
    await document.put(index, value, **of)
    read = await document.get(index, **of)
    assert type(read) is type(value)
    if isinstance(value, Schema):
        read = read.columns
        value = value.columns
    assert read == value


async def test_recorded_totals_are_read_as_they_were_written(index: Index) -> None:
    await TOTALS.put(index, RecordedTotals(RunTotals(), "17-1", "17-0"))
    recorded = await TOTALS.get(index)
    assert recorded is not None
    assert (recorded.after, recorded.file, recorded.totals.wire()) == (
        "17-1",
        "17-0",
        RunTotals().wire(),
    )


@pytest.mark.parametrize(
    ("document", "of", "text", "value"),
    [
        (SCALE, {}, "", None),  # how it was removed
        (CHECKPOINT_REPORTED, {}, "12", 12),
        (EVALUATED, {}, "-1", -1),
        (HEADS_INDEX, {}, "1", True),
        (LEAVE, {"name": "a"}, "1", True),
        (ENGINES, {}, '["rollout-0"]', ["rollout-0"]),
        (STEPPED, {}, "1764165000.5", 1764165000.5),
        (HEAD_ADDRESS, {}, "space 10.0.0.1", HeadAddress("space", "10.0.0.1")),
        (
            RUN_PATHS,
            {},
            '{"out": "/o", "shared": "/s", "start": ""}',
            RunPaths(Path("/o"), Path("/s"), None),
        ),
        (DECLARED, {}, '{"stages": [], "reads": {}}', Declared((), {})),
    ],
)
async def test_what_earlier_versions_wrote_is_read(
    index: Index, document: Document, of: dict, text: str, value: object
) -> None:
    """A service keeps the documents of a run that has ended, and a later version resumes it."""
    await index.write_document(document.name(**of), text)
    assert await document.get(index, **of) == value


@pytest.mark.parametrize(
    ("document", "text"),
    [
        (CHECKPOINT_REPORTED, "twelve"),
        (TOTALS, "{"),
        (RUN_PATHS, "{}"),
        (ENGINES, "rollout-0"),
        (HEAD_ADDRESS, "space"),
    ],
)
async def test_a_text_of_no_writer_is_an_error_that_names_the_document(
    index: Index, document: Document, text: str
) -> None:
    await index.write_document(document.key, text)
    with pytest.raises(
        DocumentDamaged,
        match=rf"document '{document.key}' of run '{index.run}' "
        rf"cannot be read",
    ):
        await document.get(index)


async def test_a_field_that_is_left_out_is_refused(index: Index) -> None:
    with pytest.raises(KeyError, match="owner"):
        await LOADED.get(index, worker="a")


async def test_the_first_of_two_writers_decides(index: Index) -> None:
    assert await TAKEN_BY.put_once(index, "host-1", name="a") == "host-1"
    assert await TAKEN_BY.put_once(index, HEAD, name="a") == "host-1"
    assert await TAKEN_BY.put_once(index, HEAD, name="b") == HEAD
    await TAKEN_BY.remove(index, name="a")
    assert await TAKEN_BY.get(index, name="a") is None


async def test_who_waits_is_woken_by_the_document_of_its_own_name_alone(index: Index) -> None:
    waiting = asyncio.create_task(END.wait(index, 60.0, name="a"))
    await END.put(index, True, name="b")
    await asyncio.wait([waiting], timeout=0.1)
    assert not waiting.done()
    await END.put(index, True, name="a")
    async with asyncio.timeout(20):
        assert await waiting is True
        assert await ENDING.put(index, Ending(0), name="a") is None
        assert await ENDING.wait(index, 60.0, name="a") == Ending(0)


async def test_entries_of_a_log_keep_their_numbers_and_type(index: Index) -> None:
    orders = [Order("rollout", number, f"rollout-{number}-1-a", "") for number in range(3)]
    for number, order in enumerate(orders):
        await ORDERS.append(index, number, order)
    with pytest.raises(IndexRefused, match="has an entry 1 already"):
        await ORDERS.append(index, 1, orders[0])
    assert await ORDERS.end(index) == 3
    assert [await ORDERS.next(index, number) for number in range(3)] == orders
    assert await ORDERS.read(index, 3, 0.01) is None


async def test_an_entry_goes_when_all_have_signed_it(index: Index) -> None:
    log: Log = BATCHES.at(stage="{s}", session="a", iteration=0, share="all", reader=0)
    log = pickle.loads(pickle.dumps(log))  # batches take it along to other processes
    await log.append(index, 0, {"claim": None})
    assert [await log.sign(index, 0, owner) for owner in ("0/0", "1/0", "0/0")] == [1, 2, 2]
    assert await log.read(index, 0, 0.01) == {"claim": None}
    await log.trim(index, 0)
    assert [key async for key in index._redis.scan_iter(match="*done*")] == []
