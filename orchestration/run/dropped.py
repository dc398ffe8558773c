"""A run that loses too many groups: why it ends, in words, with what to change for each reason."""

from __future__ import annotations

from pipeline.events import by_count
from pipeline.index.errors import TooManyDropped
from stages.prompts.given_responses import EMPTY
from stages.training.advantage import ABSENT, DROPPED

FAILED = "reward "  # how the reason of a group begins on which a reward function failed
FIXES = {
    DROPPED: "raise rollout.max_tokens, or set rollout.truncated = 'mask' or 'train'",
    ABSENT: "let a reward function return a number for these responses",
    EMPTY: "look at prompts.responses: no token of them is trained",
}
FIX_FAILED = "correct the function (logs/ have each failure), or set reward.on_error = 'zero'"
FIX_OTHER = "correct what drops them: a stage of the recipe, or the algorithm's credit"


def explained(error: TooManyDropped) -> str:
    """``error`` with the recipe's key that bounds it, and a fix of the most frequent reason."""
    reason = by_count(error.reasons)[0][0] if error.reasons else ""
    fix = FIXES.get(reason) or (FIX_FAILED if reason.startswith(FAILED) else FIX_OTHER)
    return f"{error} (algorithm.max_dropped); {fix}"
