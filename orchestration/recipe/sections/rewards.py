"""The section of a recipe that says how responses are scored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from orchestration.units import Count, CountOrZero, Seconds, Section, SizeOrZero
from stages.json_schema import IsCode, IsPath, key
from stages.tasks.tasks import ASKING, HARMLESS

NETWORK = key(False, "In a sandbox: it uses the network, as for a judge behind a URL.")
READ = key(
    [],
    "In a sandbox: files and folders that it reads, beside Python's and the modules on the import "
    "path.",
    max_length=64,
    examples=[["words.txt"]],
)


class RewardFunction(Section):
    """One reward function and its weight."""

    name: Annotated[str, IsCode("reward", "spelling")] = key(
        ...,
        "A reward of the package (`arithmetic`, `environment`, `exact_number`, `judge`, `payout`, "
        "`python_tests`, `reasoning_gym`, `reward_model`, `spelling`), one that an installed "
        "package registers, or `module:function`.",
        min_length=1,
        examples=["arithmetic", "my_rewards:brevity"],
    )
    options: dict[str, Any] = key(
        {},
        "Arguments of the function beside the rows' columns: each has its value for every row "
        "whose own column of the same name is absent or null.",
    )
    weight: float = key(1.0, "Factor of its score in the sample's reward, which is the sum.")
    batch: bool = key(
        False,
        "Call an async function with up to 64 responses, as a plain one. Default: with one "
        "response in each call.",
    )
    sandbox: bool | None = key(
        None,
        "Call it in a sandbox ([rewards.md](rewards.md#the-sandbox)): no network, files read-only "
        "and only those needed, a scratch folder. Default: true for installed functions, which are "
        "scored with what a model wrote, but for `judge` and `reward_model`; false for a "
        "`module:function` of your own. In a service: true.",
    )
    network: bool = NETWORK
    read: Annotated[list[str], IsPath()] = READ

    @property
    def is_sandboxed(self) -> bool:
        """Whether it is called in a sandbox."""
        if self.name in HARMLESS:
            return False
        if self.sandbox is None:
            return ":" not in self.name and self.name not in ASKING
        return self.sandbox


class RewardSection(Section):
    """Scoring of responses."""

    functions: list[RewardFunction] = key(
        [],
        "Reward functions; their weighted scores add up. Needed where responses are scored: where "
        "they are generated, and in evaluations.",
        max_length=64,
    )
    special_tokens: Literal["skip", "keep"] = key(
        "skip",
        "Of the texts that functions get. `keep`: such as `<think>`, but not the token "
        "that ends a response.",
    )
    workers: Count = key(1, "Reward controllers that score at the same time.")
    timeout: Seconds = key(
        60.0,
        "Longest time of one call of a function: a plain one gets up to 64 responses, an "
        "async one gets one.",
    )
    retries: CountOrZero = key(
        2,
        "Further calls of a function with one response alone, after it raised, returned no score, "
        "took too long or died.",
    )
    on_error: Literal["fail", "zero", "drop"] = key(
        "drop",
        "What a response costs on which a function fails each time. `drop`: its group leaves the "
        "run, and another one is generated. `zero`: the function's score is 0. `fail`: the run "
        "fails.",
    )
    concurrency: Count = key(
        64,
        "Calls of async functions at the same time, of each worker that scores; those after a "
        "failure are among them.",
    )
    processes: CountOrZero = key(
        4,
        "Processes that call functions (`arithmetic`, `exact_number`, `payout`, `spelling` need "
        "none), started as they are needed; async ones run in one more, at the same time "
        "(`concurrency`). 0: in the worker, for debugging: one that hangs or crashes "
        "harms the run.",
    )
    memory: SizeOrZero = key(
        4 * 2**30,
        "Memory of one such process; one that needs more is replaced. 0: no limit. The process of "
        "a stage in a sandbox has the same limit.",
    )
    environment: list[str] | None = key(
        None,
        "Variables of the environment that functions and stages see, beside harmless ones such as "
        "`PATH`. Default: all of yours; in a service none. Passwords and tokens of AsyncDock are "
        "never among them.",
        max_length=64,
        examples=[["MY_JUDGE_KEY"]],
    )
    max_error_share: Annotated[float, Field(ge=0, le=1)] = key(
        0.25,
        "The run fails when a function fails on more than this share of its last 256 responses.",
    )

    @property
    def weights(self) -> tuple[float, ...]:
        """Of the functions, in their order."""
        return tuple(function.weight for function in self.functions) or (1.0,)
