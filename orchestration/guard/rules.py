"""Rules of the guard: one row for each metric, with what to look at when it alarms.

Importing this needs no torch.

A rule compares a value with the median of the steps before, in deviations: 1.4826 times their
median absolute deviation, which of normal numbers is the standard deviation. ``floor`` is the least
deviation: of a metric that hardly moved, it says how much is a change at all. Numbers whose size is
what matters are compared by their logarithms: a floor of 0.25 and a sensitivity of 8 are a factor
of 7.4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Alarms of workers.
PROBE = "probe"
TOKENIZER = "tokenizer"
DROPPED = "dropped_groups"
SCORES = "reward_scores"
# Of single reward functions, as rewards/NAME/mean: orchestration/guard/functions.py.
REWARDS = "rewards"
REWARD_FALL = "reward_mean"  # orchestration/guard/fall.py
# whether it is an alarm, the rule, step, value, what is usual, the limit, the reason
Judgement = tuple[bool, "Rule", int, float, float | None, float | None, str]

COMPARED_STEPS = 32  # past steps that a metric is compared with
WARM_UP = 8  # values before a trend is judged
RECENT = 8  # steps that the chance of equal groups, and a share of failures, is taken from
NORMAL = 1.4826  # median absolute deviations in a standard deviation


@dataclass(frozen=True)
class Rule:
    """The rule by which one metric is judged.

    ``way``: the direction that is bad. ``log``: compare logarithms. ``beyond``: values that are not
    past it are never alarms. ``limit``: past it a value always is one. ``steps``: the median of so
    many values is judged, where single ones far off are usual, as in shares of a few hundred
    tokens.
    """

    metric: str
    look: str
    way: Literal["up", "down", "both"] = "up"
    floor: float = 0.0
    log: bool = False
    beyond: float | None = None
    limit: float | None = None
    steps: int = 1


_SAMPLING = (
    "The trainer computes other logprobs of the responses than the engine recorded. Compare "
    "rollout.temperature and the engine's logprobs setting (they must be those after temperature, "
    "before top-k and top-p), its dtype, and whether its token ids are the trainer's tokenizer's."
)
_STALE = (
    "The policy has moved more than usual since these responses were made, or the engine computes "
    "something else "
    "since. Look at the probe's gap in the sync events first; if that is small: "
    "train.learning_rate, grad_norm, "
    "pipeline.staleness."
)
EQUAL_WEIGHTS = Rule(
    "gap_mean_0",
    f"{_SAMPLING} The weights are the same: where the probe accepts them, they were delivered.",
)
RESUMED = Rule(
    "gap_mean_resumed",
    "Tokens made after a swap, in responses begun before it, have other logprobs than the weights "
    "give: the KV cache of the old weights was kept where the recipe has it rebuilt. Look at "
    "rollout.on_update, rollout.vllm.kv_cache, and whether the engine's load_weights acts on "
    "`cut`.",
)
CONSTANT = Rule(
    "equal_groups",
    "All responses to a prompt earn the same, for every prompt of the step: nothing can be "
    "learned. Look at what the reward functions return for the newest samples (a changed format of "
    "the answer, a parser or a service that fails and gives a default), then whether the responses "
    "are all the same.",
)
COLLAPSED = Rule(
    "distinct_responses",
    "Different prompts are answered by one and the same text. Look at the newest samples; if they "
    "are real, the policy has collapsed: go back to a checkpoint, lower train.learning_rate, add "
    "algorithm.options.kl_coef. If the engine repeats itself: its seeds, and its prompts.",
)
FAILING = Rule(
    "failed_environments",
    "The environment fails in nearly all trajectories: nothing is learned of what it was made for. "
    "logs/environment-0.log has the error of each and its line; `asyncdock check` calls the "
    "environment once.",
    limit=0.9,
)
BRANCHING = Rule(
    "branches",
    "The program changes or leaves out earlier messages in nearly every request, so each turn "
    "begins a branch: it is trained, but costs its whole context again. Have the program append to "
    "its messages; look at what its framework summarizes, trims or formats anew, and, with token "
    "ids, at turns tokenized again.",
    limit=0.9,
)
TRENDS = (
    *(
        Rule(f"gap_mean_{age}", _STALE, floor=0.25, log=True, beyond=0.05, steps=3)
        for age in (1, 2, 3, 4)
    ),
    Rule(
        "entropy",
        "The policy's distribution over the next token has changed at once. Falling: collapse; "
        "look at the newest samples, train.learning_rate, the reward. Rising: the policy unlearns; "
        "look at grad_norm, the gap, the last checkpoint.",
        way="both",
        floor=0.15,
        steps=5,
    ),
    Rule(
        "ess",
        "Few tokens carry the whole step: the importance weights of the others are tiny. Look at "
        "the gap by staleness, pipeline.staleness, algorithm.options.max_ratio and correction.",
        way="down",
        floor=0.06,
        limit=0.02,
        steps=10,
    ),
    Rule(
        "clip_fraction",
        "The clip stops an unusual share of the tokens: the policy is far from the one that "
        "sampled them. Look at the gap by staleness, train.learning_rate, clip_low and clip_high.",
        floor=0.05,
        steps=5,
    ),
    Rule(
        "mask_fraction",
        "The correction leaves out an unusual share of the tokens. Look at the gap by staleness, "
        "weight_low, weight_high.",
        floor=0.05,
        limit=0.9,
        steps=10,
    ),
    Rule(
        "kl_reference",
        "The policy has moved away from the reference at once. Look at the newest samples, "
        "algorithm.options.kl_coef, train.learning_rate.",
        floor=0.25,
        log=True,
        beyond=0.1,
    ),
    Rule(
        "response_length_mean",
        "Responses are much longer or shorter than usual. Look at the newest samples, at "
        "`truncated`, at the end tokens (rollout.stop_token_ids), and whether the reward pays for "
        "length.",
        way="both",
        floor=0.1,
        log=True,
        steps=3,
    ),
    Rule(
        "grad_norm",
        "The gradient is far larger than usual, and was clipped. Look at the batch of this step "
        "(rewards, advantages, the longest responses), train.learning_rate, and what the alarms "
        "beside this one say.",
        floor=0.3,
        log=True,
        steps=5,
    ),
    Rule(
        "probe_share",
        "The engine's logprobs of the probe have moved towards their limit after a swap. Look at "
        "the engine's dtype and at the layers that compute in it; a resume may raise "
        "sync.probe_tolerance where roundings are the cause.",
        floor=0.1,
        beyond=0.5,
    ),
)
RULES = (EQUAL_WEIGHTS, RESUMED, CONSTANT, COLLAPSED, FAILING, BRANCHING, *TRENDS)
METRICS = (
    PROBE,
    TOKENIZER,
    DROPPED,
    SCORES,
    REWARDS,
    REWARD_FALL,
    *(rule.metric for rule in RULES),
)
