"""Arithmetic of the staleness bound: how many groups may be in flight, and the largest staleness
that follows.

    admit q while q < (v + S + 1)·P ──▶ claimed by an engine that has version >= q // P - S ──▶ complete
                        ▲                                                                         │
                        └── v + 1 published ◀── the step trains P groups ◀── pick q < oldest + W ◀┘

Words: groups are numbered q = 0, 1, 2, ... in admission order; every optimizer step trains P of
them, and step k (from 0) runs at trainer version k and makes version k + 1. The *staleness* of a
group is the trainer version when it is consumed minus the oldest version among its tokens. S, the
*slack*, is how many steps admission runs ahead of the published version.

Why the bound holds
-------------------
*Oldest version.* A rollout engine with version v loaded claims group q only if q < (v + S + 1)·P,
which is v >= q // P - S. Later swaps and redeliveries only raise the version of the tokens still to
come.

*Consumption.* Let q be picked as number n (from 0) of all picks. Each pick p before it was taken
while q was unpicked, so it passed the window anchored at some oldest unpicked group <= q: p < q +
W. Of the q + W numbers below q + W one is q itself, hence n <= q + W - 1, and q is trained in step
n // P <= (q + W - 1) // P.

*Together*, with q = a·P + r and 0 <= r < P:

    staleness <= (q + W - 1) // P - (q // P - S) = S + (r + W - 1) // P <= S + (P + W - 2) // P = (B + W - 2) // P

where B = (S + 1)·P is the number of groups in flight. It is reached whenever S >= 1: let the last
group of a step (r = P - 1) be made with the oldest version allowed, and finish last; step k finds
(k + S + 1)·P - 1 others admitted, no fewer than the (k + 1)·P it needs, until the window closes.
With S = 0 exactly P groups are alive at every step, no group can be passed, and the staleness is 0
whatever the window is.

*No deadlock.* Before step v, v·P groups are consumed and (v + S + 1)·P admitted: (S + 1)·P >= P are
alive, all of them may be claimed by an engine with version v, and once they are complete the pick
takes the oldest P of them.

*Parked responses.* A response may be made in several claims, by several engines. The first claim is
a claim of its group, so its first token has a version >= q // P - S. So has every later token,
because each further claim has the same condition on the engine's version, and an engine's version
never decreases. All tokens stay with the response, and the index refuses progress or a commit whose
oldest version is newer than that of the row's first tokens. So the first step of the derivation
holds for the oldest version. The second step depends only on when a group is consumed: while one of
its responses is parked the group is not complete, the pick cannot pass it by more than W, and the
trainer waits. Parked rows are claimed first, so the rows that the trainer waits for are made next.
No sample is dropped because of its age.

A *filtered* group is not counted: q then means a group's number without the filtered ones before
it. A group that is filtered later only moves the groups after it forward, so the bound holds.

A *replayed* group was consumed before, at a step v' >= v - k, where k is how many versions rows are
kept for replay, and with a staleness <= η. So its oldest version is >= v' - η, and at step v its
staleness is <= η + k. It takes no part in admission or in the pick.
"""

from __future__ import annotations

from dataclasses import dataclass


def passing_steps(window: int, groups_per_step: int) -> int:
    """Return the number of steps that a straggler can lose to groups passing it: ``(P + W - 2) //
    P``, 0 when W = 1."""
    return (groups_per_step + window - 2) // groups_per_step


def max_age(slack: int, groups_per_step: int, window: int) -> int:
    """Return the largest staleness that can occur, in versions: ``((S + 1)·P + W - 2) // P``, and 0
    when S = 0."""
    return slack + passing_steps(window, groups_per_step) if slack else 0


def slack_for(bound: int, groups_per_step: int, window: int) -> int:
    """Return S, the largest slack whose :func:`max_age` is within ``bound``. 0 (the synchronous
    order) always is."""
    return max(0, bound - passing_steps(window, groups_per_step))


@dataclass(frozen=True)
class StalenessPlan:
    """Limits that follow from the bound η, the window W and P groups per step.

    >>> plan = StalenessPlan(bound=2, groups_per_step=4, window=3)
    >>> plan.slack, plan.groups_in_flight, plan.max_age
    (1, 8, 2)
    """

    bound: int
    groups_per_step: int
    window: int = 1

    def __post_init__(self) -> None:
        for name, least in (("bound", 0), ("groups_per_step", 1), ("window", 1)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"{name}: {getattr(self, name)} is too small; use at least {least}"
                )

    @property
    def slack(self) -> int:
        """S, in optimizer steps."""
        return slack_for(self.bound, self.groups_per_step, self.window)

    @property
    def groups_in_flight(self) -> int:
        """B = (S + 1)·P: groups admitted and not yet consumed, at most."""
        return (self.slack + 1) * self.groups_per_step

    @property
    def max_age(self) -> int:
        """Largest staleness that can occur, in versions; never above ``bound``."""
        return max_age(self.slack, self.groups_per_step, self.window)
