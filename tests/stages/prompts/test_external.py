"""External prompts that make the run's chat template fail."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pipeline.documents.flow import VERSION
from pipeline.index.client import Index
from stages.prompts.external import ExternalPrompts, put_prompts


class Alternating:
    """A formatter whose template raises an unexpected error, as chat templates do."""

    options = SimpleNamespace(too_long="skip")

    def bounded(self, row: dict[str, Any], where: str, too_long: Any) -> Any:
        if row["prompt"] == "twice the user":
            raise TypeError("conversation roles must alternate")
        return row["prompt"]


async def test_a_prompt_that_a_template_refuses_is_left_out_and_the_others_are_taken(
    index: Index, tmp_path: Path
) -> None:
    """It ended the flow worker, and after its restarts the run."""
    await index.load()
    feed = ExternalPrompts(index, tmp_path / "prompts.jsonl", Alternating())  # type: ignore[arg-type]
    await feed.begin()
    taking = asyncio.create_task(feed.run())
    try:
        rows = [{"prompt": text} for text in ("one", "twice the user", "three")]
        assert await put_prompts(index, rows, column="prompt", last=True) == 3
        position = "0"
        async with asyncio.timeout(30):
            while not (events := await index.events(position)):
                assert not taking.done()
            while not feed.ended:
                assert not taking.done()
                position = await index.woken(VERSION, "", 1.0)
    finally:
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
    assert [(event.kind, event.data["position"]) for event in events] == [("prompt", 1)]
    assert "TypeError: conversation roles must alternate" in events[0].data["reason"]
    assert len(feed._rows) == 2
