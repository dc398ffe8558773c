"""Calls for prompts: external ones, which wait in the index until the run stores them in its own
file, and pass rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.index.calls import Calls


@dataclass(frozen=True)
class PromptsPut:
    """The reply to a put of prompts. ``next`` is the position after the last prompt.

    ``wait`` is None, or the position of the topic `feed` when there was no room and nothing was
    put.
    """

    next: int
    wait: str | None


@dataclass(frozen=True)
class PromptsWaiting:
    """Waiting prompts in order. ``ended``: no more will come; ``wait`` is the position of the topic
    `fed`."""

    prompts: Sequence[str]
    ended: bool
    wait: str


class ExternalPromptCalls(Calls):
    """Calls that put, read and remove waiting prompts."""

    async def put_prompts(
        self,
        prompts: Sequence[str],
        *,
        first: int | None = None,
        last: bool = False,
        most_bytes: int,
    ) -> PromptsPut:
        """Put ``prompts`` at positions ``first``, first + 1, … (None: the next ones); positions
        that are taken already are left as they are. ``last``: no more will come. At most
        ``most_bytes`` may wait together (else NeverFits)."""
        reply = await self.call(
            "put_prompts",
            prompts=list(prompts),
            first=False if first is None else first,
            last=last,
            most=most_bytes,
        )
        return PromptsPut(reply["next"], reply.get("wait"))

    async def read_prompts(self, start: int, most: int) -> PromptsWaiting:
        """Return at most ``most`` prompts from position ``start`` on."""
        reply = await self.call("read_prompts", **{"from": start}, most=most)
        return PromptsWaiting(reply["prompts"] or (), reply["ended"], reply["wait"])

    async def remove_prompts(self, below: int) -> None:
        """Remove the prompts at positions below ``below``, which the run has stored, and let
        writers continue."""
        await self.call("remove_prompts", below=below)


@dataclass(frozen=True)
class PassRates:
    """Pass rates, by which prompts are chosen.

    ``next``: position in the source of the next candidate, None before the first choice;
    ``chosen``: positions of groups that have one. ``rates``: (prompt, [mean reward, taught,
    streak]) of those that changed since, the oldest change first; ``changes`` counts all changes so
    far.
    """

    next: int | None
    chosen: Mapping[int, int]
    rates: Sequence[tuple[str, tuple[float, int, int]]]
    changes: int


class PassRateCalls(Calls):
    """Calls about the prompt of each open group, and how the responses to a prompt did.
    :mod:`stages.prompts.difficulty` says what for."""

    async def pass_rates(self, groups: Sequence[int], since: int) -> PassRates:
        """Return the choices of ``groups``, and the pass rates that changed after change number
        ``since``."""
        reply = await self.call("pass_rates", groups=list(groups), since=since)
        known = zip(groups, reply["chosen"] or (), strict=True)
        chosen = {group: position for group, position in known if position is not False}
        upcoming = None if reply["next"] is False else reply["next"]
        return PassRates(upcoming, chosen, reply["rates"] or (), reply["changes"])

    async def choose_prompts(self, chosen: Mapping[int, tuple[int, str]], following: int) -> None:
        """Record position and prompt of groups that are about to be admitted.

        The next candidate is at ``following``.
        """
        entries = [[group, *choice] for group, choice in chosen.items()]
        await self.call("choose_prompts", groups=entries, next=following)

    async def put_outcomes(self, outcomes: Mapping[int, tuple[float, bool]]) -> None:
        """Record the mean reward of groups, and whether they taught something; it counts when the
        group leaves the run. Can be repeated."""
        await self.call(
            "put_outcomes",
            groups=[[group, reward, int(taught)] for group, (reward, taught) in outcomes.items()],
        )
