"""Models of the operations that set runs beside each other."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from api.schemas.runs import RUN_ID, FormerSeconds, Seconds, Strict
from pipeline.data.events import RunState

MOST_RUNS = 300
MOST_COLUMNS = 40
MOST_POINTS = 2000
COLUMN = r"^[A-Za-z0-9_./@:-]{1,120}$"


def listed(value: object) -> object:
    """Return the values of a key that is given several times, or once with commas."""
    if not isinstance(value, list):
        return value
    return [name for text in value for name in str(text).split(",") if name]


Names = Annotated[
    list[Annotated[str, Field(pattern=COLUMN)]],
    BeforeValidator(listed),
    Field(max_length=MOST_COLUMNS),
]
Metric = Annotated[str, Field(pattern=COLUMN)]


class LabelsBody(Strict):
    """What people write to a run; what is left out stays."""

    tags: list[str] | None = Field(
        None, max_length=50, description="All of its tags: words of up to 40 characters."
    )
    notes: str | None = Field(None, max_length=4000)


class TableQuery(Strict):
    columns: Names = Field(
        [],
        description="Keys of recipes, as train.learning_rate; numbers of the newest step, as "
        "reward_mean, or of the newest evaluation, as evaluation.reward_mean. The key is repeated, "
        "or has them with commas.",
    )


class TableRow(BaseModel):
    id: str
    name: str
    state: RunState
    reason: str
    position: int | None
    owner: str
    created: Seconds
    started: Seconds | None
    ended: Seconds | None
    former_seconds: FormerSeconds = 0.0
    steps: int
    steps_done: int
    tags: list[str]
    notes: str
    values: list[Any] = Field(description="Of the columns; null where the run has none.")


class TableView(BaseModel):
    rows: list[TableRow] = Field(description="The newest 5,000 runs, newest first.")
    keys: list[str] = Field(description="By which their recipes differ.")
    metrics: list[str] = Field(description="Numbers of steps and evaluations that they have.")


class CompareQuery(Strict):
    runs: Annotated[
        list[Annotated[str, Field(pattern=RUN_ID, max_length=200)]], BeforeValidator(listed)
    ] = Field(min_length=1, max_length=MOST_RUNS, description="Ids, with commas.")
    metric: Metric = Field(
        "reward_mean", description="A number of steps, or as evaluation.reward_mean of evaluations."
    )
    by: Literal["step", "tokens", "hours"] = "step"
    points: int = Field(200, ge=2, le=MOST_POINTS, description="Of a curve, at most.")
    fold: bool = Field(
        False, description="One curve for the runs that differ by their seed alone: their mean."
    )


class Estimated(BaseModel):
    """A mean of runs."""

    mean: float
    half: float | None = Field(
        description="The 95 % interval is the mean ± half; null of a single run."
    )
    count: int


class Ends(BaseModel):
    end: Estimated | None = Field(
        description="Of steps the mean of the last tenth, of evaluations the newest."
    )
    best: Estimated | None


class OneOutcome(BaseModel):
    end: float | None
    best: float | None


class ComparedRun(BaseModel):
    id: str
    name: str
    state: RunState
    tags: list[str]
    notes: str
    seed: int | None
    setting: int = Field(description="Its place among the settings.")
    results: dict[str, OneOutcome] = Field(description="By metric.")
    steps: int
    tokens: float | None = Field(description="Trained.")
    hours: float | None = Field(description="Of its steps.")


class ComparedSetting(BaseModel):
    """Runs that differ by their seed alone."""

    recipe: dict[str, Any] = Field(description="Its values of the keys that differ.")
    runs: list[str]
    results: dict[str, Ends] = Field(description="By metric.")
    steps: Estimated | None
    tokens: Estimated | None
    hours: Estimated | None


class CurveView(BaseModel):
    x: list[float]
    y: list[float]
    half: list[float | None] | None = Field(description="Of the 95 % interval of a mean.")


class ComparisonView(BaseModel):
    keys: list[str] = Field(description="Of the recipe, by which the settings differ.")
    metrics: list[str]
    runs: list[ComparedRun]
    settings: list[ComparedSetting]
    curves: list[CurveView] = Field(description="Of the runs, or with fold of the settings.")
