"""What readers of a run's event stream rely on from the index: pages of the past, and to know where
the stream begins."""

from __future__ import annotations

import asyncio

from pipeline.index.client import Index
from stages.weights.documents import EVALUATED
from tests.any_event import AnyEvent


async def test_the_past_comes_in_pages_and_has_two_ends(index: Index) -> None:
    assert await index.event_ends() == ("0", "0")
    assert await index.past_events() == []
    for number in range(7):
        await index.emit(
            AnyEvent(kind="step", data={"number": number, "nested": {"of": [1.5, None]}})
        )
    first = await index.past_events(count=3)
    rest = await index.past_events(first[-1].id)
    assert [event.data["number"] for event in [*first, *rest]] == list(range(7))
    assert first[0].data["nested"] == {"of": [1.5, None]}
    assert [*first, *rest] == await index.events(), "waiting for them brings others"
    assert await index.event_ends() == (first[0].id, rest[-1].id)
    assert await index.past_events(rest[-1].id) == []
    await index._redis.xtrim(f"{index.prefix}events", maxlen=2, approximate=False)
    assert await index.event_ends() == (rest[-2].id, rest[-1].id)
    assert await index.past_events(first[0].id) == rest[-2:], (
        "what is there begins behind what was asked for"
    )


async def test_who_reads_an_event_finds_the_documents_that_were_written_with_it(
    index: Index,
) -> None:
    """A process that is killed has written both or neither."""
    reader = Index(index.url, index.run)
    last = "0"
    for number in range(100):
        emitting = asyncio.create_task(
            index.emit(AnyEvent(kind="step", data={"number": number}), EVALUATED.entry(number))
        )
        (event,) = await reader.events(last, timeout=30)
        assert await EVALUATED.get(reader) == event.data["number"] == number
        last = event.id
        await emitting
    await reader.close()
