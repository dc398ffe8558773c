"""Calls for external prompts: they wait in the index, in order and bounded, until the run stores them in its own file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.index.calls import Calls


@dataclass(frozen=True)
class PromptsPut:
    """``next`` is the position after the last prompt. ``wait`` is None, or the position of the topic `feed` when there was
    no room and nothing was put."""

    next: int
    wait: str | None


@dataclass(frozen=True)
class PromptsWaiting:
    """Prompts in order. ``ended``: no more will come; ``wait`` is the position of the topic `fed`."""

    prompts: Sequence[str]
    ended: bool
    wait: str


class ExternalPromptCalls(Calls):
    """Put, read and remove waiting prompts."""

    async def put_prompts(
        self, prompts: Sequence[str], *, first: int | None = None, last: bool = False, most_bytes: int
    ) -> PromptsPut:
        """Put ``prompts`` at positions ``first``, first + 1, … (None: the next ones); positions that are taken already are
        left as they are. ``last``: no more will come. At most ``most_bytes`` may wait together (else NeverFits)."""
        reply = await self.call(
            "put_prompts", prompts=list(prompts), first=False if first is None else first, last=last, most=most_bytes
        )
        return PromptsPut(reply["next"], reply.get("wait"))

    async def read_prompts(self, start: int, most: int) -> PromptsWaiting:
        """At most ``most`` prompts from position ``start`` on."""
        reply = await self.call("read_prompts", **{"from": start}, most=most)
        return PromptsWaiting(reply["prompts"] or (), reply["ended"], reply["wait"])

    async def remove_prompts(self, below: int) -> None:
        """Remove the prompts at positions below ``below``, which the run has stored, and let writers continue."""
        await self.call("remove_prompts", below=below)
