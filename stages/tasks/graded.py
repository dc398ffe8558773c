"""Tasks of one turn for the model ``tiny``, with a difficulty and a known optimum. Their answers are
as long as ``rollout.max_tokens``, so that nothing has to be learnt about stopping.

    task         prompt  best response          reward                                      optimum
    copy         db=     db                     share of letters in their place             1
    sort         db=     bd                     share of letters in their place             1
    modular_sum  3+4=    2                      1 for the sum modulo 5                      1
    bandit       c=      the best arm of c, …   1 where that arm pays this time             BEST, on average
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from stages.tasks.tasks import Completions, text

LETTERS = "abcdefgh"
CONTEXTS = "abcd"
MODULUS = 5
BEST = 0.9  # share of the rounds in which a context's best arm pays
# of all arms of a context, which each context has in an order of its own
SHARES = (BEST, 0.6, 0.4, 0.2, 0.1, 0.0)
ARMS = "012345"


def copy(
    number: int,
    seed: int,
    *,
    difficulty: Annotated[int, Field(ge=1, le=26, description="`copy`: letters.")] = 2,
) -> dict[str, str]:
    """Make a row with letters that are to be repeated as they are."""
    letters = _letters(f"copy:{seed}:{number}", difficulty)
    return {"prompt": f"{letters}=", "answer": letters}


def sort(
    number: int,
    seed: int,
    *,
    difficulty: Annotated[int, Field(ge=1, le=26, description="`sort`: letters.")] = 2,
) -> dict[str, str]:
    """Make a row with letters that are to be put in their order."""
    letters = _letters(f"sort:{seed}:{number}", difficulty)
    return {"prompt": f"{letters}=", "answer": "".join(sorted(letters))}


def _letters(name: str, count: int) -> str:
    return "".join(random.Random(name).choices(LETTERS, k=count))


def modular_sum(
    number: int,
    seed: int,
    *,
    difficulty: Annotated[
        int, Field(ge=1, le=8, description="`modular_sum`: digits that are added.")
    ] = 2,
) -> dict[str, str]:
    """Make a row with digits whose sum modulo :data:`MODULUS` is wanted."""
    digits = random.Random(f"modular_sum:{seed}:{number}").choices(range(MODULUS), k=difficulty)
    return {"prompt": f"{'+'.join(map(str, digits))}=", "answer": str(sum(digits) % MODULUS)}


def bandit(
    number: int,
    seed: int,
    *,
    difficulty: Annotated[
        int,
        Field(ge=0, le=64, description="`bandit`: tokens after the choice, which change nothing."),
    ] = 2,
) -> dict[str, str]:
    """Make a row with a context, and whether each arm pays in this round.

    The response's first character chooses the arm. The reward comes at the response's end,
    ``difficulty`` tokens later, of which ``rollout.max_tokens`` has to leave room.
    """
    draw = random.Random(f"bandit:{seed}:{number}")
    context = draw.choice(CONTEXTS)
    payouts = (str(int(draw.random() < share)) for share in shares(seed, context))
    return {"prompt": f"{context}=", "payouts": "".join(payouts)}


def shares(seed: int, context: str) -> Sequence[float]:
    """Return the share of rounds in which each arm of a context pays."""
    return random.Random(f"bandit:{seed}:{context}").sample(SHARES, k=len(SHARES))


def payout(completions: Completions, payouts: Sequence[str], **_: Any) -> list[float]:
    """Return what the arm pays that a response's first character chooses; 0 for no arm."""
    paying = [
        {arm for arm, pays in zip(ARMS, arms, strict=True) if pays == "1"} for arms in payouts
    ]
    return [
        float(text(completion)[:1] in arms)
        for completion, arms in zip(completions, paying, strict=True)
    ]
