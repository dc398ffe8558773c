"""Models of samples: what a request filters by, and what it is answered.

SampleFilter ──▶ REST, the Python client, `asyncdock samples`, the page        one definition of all filters
"""

from __future__ import annotations

import operator
import re
from functools import cached_property
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from api.schemas.runs import Strict
from api.schemas.text import Text
from stages.samples.row import columns

MOST_RANKED = 100  # samples at each end
OPERATORS = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}
# fields of the filter as the column and the operator of a condition
COMPARED = {
    **{name: (name, "=") for name in ("step", "group", "prompt_id", "failed", "truncated")},
    "reward_min": ("reward", ">="),
    "reward_max": ("reward", "<="),
    "staleness_min": ("staleness", ">="),
}
TEXTUAL = ("=", "!=")  # those that compare texts, too
_COLUMN = r"\s*([^<>=!,\s][^<>=!,]*?)\s*"
_CONDITION = re.compile(
    rf"{_COLUMN}(?:(<=|>=|<|>)\s*([-+]?[0-9]*\.?[0-9]+(?:e[-+]?[0-9]+)?)|(!?=){_COLUMN})\s*"
)
CONDITIONS = rf"^({_CONDITION.pattern}(,{_CONDITION.pattern})*)?$"


class Condition(NamedTuple):
    """What a column must be: a number compared with ``value``; or the same text as it or another
    one, in any case of letters."""

    column: str
    operator: str
    value: str

    def holds(self, actual: Any) -> bool:
        """Return whether ``actual`` is so; None, which a sample without the column has, never."""
        compare = OPERATORS[self.operator]
        try:
            return actual is not None and compare(float(actual), float(self.value))
        except (TypeError, ValueError):
            texts = (str(actual).casefold(), self.value.casefold())
            return self.operator in TEXTUAL and compare(*texts)


def conditions_of(where: str) -> list[Condition]:
    """Return the conditions of a text, which has commas between them. Raises ValueError."""
    conditions = []
    for text in filter(str.strip, where.split(",")):
        if (match := _CONDITION.fullmatch(text)) is None:
            raise ValueError(
                f"{text!r} is no condition; write a column, then <, <=, > or >= and a number, or "
                f"= or != and a value, as length>400"
            )
        column, comparison, bound, equality, value = match.groups()
        conditions.append(Condition(column, comparison or equality, bound or value))
    return conditions


def _checked(where: str) -> str:
    conditions_of(where)
    return where


class SampleFilter(Strict):
    """What a sample must be: all that is given."""

    step: int | None = Field(None, ge=1, le=2**31, description="Only of this optimizer step.")
    group: int | None = Field(None, ge=0, le=2**53, description="Only of this group.")
    prompt_id: str | None = Field(
        None, max_length=12, description="Only of this prompt, in any step."
    )
    reward_min: float | None = Field(None, description="Only with at least this reward.")
    reward_max: float | None = Field(None, description="Only with at most this reward.")
    staleness_min: int | None = Field(
        None, ge=0, le=2**31, description="Only at least so many versions old."
    )
    failed: bool | None = Field(
        None, description="Only those on which a reward function failed, or on which none did."
    )
    truncated: bool | None = Field(None, description="Only those that were cut, or were not.")
    grep: str = Field(
        "", max_length=500, description="Only with this text in the prompt or the response."
    )
    case: bool = Field(False, description="Capital and small letters differ in the text.")
    where: Annotated[str, AfterValidator(_checked)] = Field(
        "",
        max_length=500,
        json_schema_extra={"pattern": CONDITIONS},
        description="Only where these conditions on columns hold: `length>400,exact<0.5`.",
    )

    @cached_property
    def conditions(self) -> list[Condition]:
        """Those that the fields say, and those of ``where``."""
        values = [(name, getattr(self, name)) for name in COMPARED]
        fields = [
            Condition(*COMPARED[name], str(value)) for name, value in values if value is not None
        ]
        return [*fields, *conditions_of(self.where)]

    def wants(self, sample: dict[str, Any], row: dict[str, Any]) -> bool:
        """Return whether ``sample`` is one of these; ``row``: its columns."""
        held = (condition.holds(row.get(condition.column)) for condition in self.conditions)
        return all(held) and (not self.grep or self._has_text(sample))

    def _has_text(self, sample: dict[str, Any]) -> bool:
        texts = [self.grep, sample["prompt"], sample["response"]]
        wanted, prompt, response = texts if self.case else map(str.casefold, texts)
        return wanted in prompt or wanted in response


class SamplesQuery(SampleFilter):
    """A filter, and how many of the samples that pass it."""

    best: int = Field(
        0, ge=0, le=MOST_RANKED, description="So many with the highest reward, of the newest steps."
    )
    worst: int = Field(
        0, ge=0, le=MOST_RANKED, description="So many with the lowest reward, of the newest steps."
    )
    columns: str = Field(
        "", max_length=500, description="Names of columns; one that no sample has is refused."
    )
    limit: int = Field(50, ge=1, le=200, description="Without `best` and `worst`.")
    after: str = Field("", max_length=60, description="`next` of the page before.")


class SampleSegment(BaseModel):
    """A turn of the policy, or what an environment answered."""

    generated: bool = Field(description="By the policy, and trained; else observed.")
    tokens: int
    text: Text
    reward: float | None = Field(description="Of a turn. Null where there is none.")
    pieces: list[tuple[int, int, Text]] = Field(
        [], description="Of a turn: policy version, tokens and their text, in order."
    )
    calls: list[dict[str, Any]] = Field(
        [], description="Of a turn: calls of tools that are JSON between `<tool_call>` and its end."
    )
    seconds: dict[str, float | None] = Field(
        {}, description="Of a turn: in the `engine`, `waiting`, in the `environment`."
    )
    branch: int = Field(0, description="Of a trajectory: its program begins one as it goes back.")
    shares: int | None = Field(
        None, description="Of a branch's first part: tokens of others that it goes on from."
    )


class SampleView(BaseModel):
    """A sample that was trained."""

    model_config = ConfigDict(ser_json_inf_nan="null")

    group: int
    place: int = Field(description="In its group.")
    step: int = Field(description="That trained it.")
    prompt: Text
    prompt_id: str = Field("", description="The same for the same text, in any step.")
    response: Text
    reward: float | None = Field(
        description="Null where no reward function applies, or there is none."
    )
    rewards: dict[str, float | None] = Field(
        description="Of each function; null where it failed or does not apply."
    )
    failed: list[str] = Field(
        [], description="Reward functions that failed on it, and counted as 0."
    )
    advantage: float | None
    tokens: int = Field(description="Of the response that the policy has generated.")
    versions: list[tuple[int, int]] = Field(
        description="Policy version and tokens, in the response's order; version -1: observed."
    )
    segments: list[SampleSegment] = Field(
        [], description="Of a response with turns: these and the observations, in order."
    )
    masked: list[tuple[bool, int, Text]] = Field(
        [], description="Of a response of which not all is trained: trained or not, tokens, text."
    )
    staleness: int
    truncated: bool
    ending: str = Field("", description="Of a trajectory: why it has ended.")
    columns: dict[str, Any] = Field(
        {}, description="Numbers and texts of stages that the recipe names."
    )
    fields: dict[str, Any] = Field({}, description="Of the prompt's row.")

    def row(self) -> dict[str, Any]:
        """Return the sample as one row, a value a column: as the filter's conditions read it."""
        return columns(self.model_dump())


class SamplePage(BaseModel):
    """Newest step first; or the highest reward first, where the best or worst are asked for.

    ``next`` is the cursor of the next page (`after`), empty at the end: a page may hold fewer
    samples than asked for, or none, and not be the last.
    """

    samples: list[SampleView]
    next: str
    looked: int = Field(0, description="Samples that were looked at for this page.")
    steps: tuple[int, int] | None = Field(None, description="Oldest and newest step of these.")
    kept_steps: tuple[int, int] | None = Field(
        None,
        description="Where the run has none of the `step`: the oldest and the newest step of which "
        "it has samples.",
    )
    dropped: dict[str, int] = Field(
        {},
        description="With `failed`: responses that no step has trained, as a reward function, by "
        "its name, could not score them, and their groups were dropped.",
    )
