"""Models of requests and answers; the OpenAPI document is made from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, RootModel, Tag

from orchestration.recipe.checks.examples import ExamplePrompt
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sizes.planner import Plan
from orchestration.supervise.waiting import Wait
from pipeline.data.events import AlarmEvent, Doc, RunState, StageEvent
from stages.json_schema import schema_of

RUN_ID = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
Seconds = Annotated[float, Field(description="Unix seconds")]
FormerSeconds = Annotated[
    float, Field(description="Seconds that it ran before `started`, where it was resumed.")
]


class Strict(BaseModel):
    """Base of requests: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, populate_by_name=False)


class RunPath(Strict):
    run: str = Field(pattern=RUN_ID, max_length=200, description="The run's id.")


class RunView(BaseModel):
    """A run as the list has it, and how far it is.

    ``created`` waits in the queue: ``position`` 1 is next.
    """

    id: str
    name: str
    state: RunState
    reason: str = Field(description="Why it failed or stopped.")
    position: int | None = Field(description="In the queue; null once it is out of it.")
    owner: str = Field(description="The name of the token that submitted it.")
    created: Seconds
    started: Seconds | None = Field(description="When it began, or was resumed last.")
    ended: Seconds | None
    former_seconds: FormerSeconds = 0.0
    agent: str = Field(description="The agent that runs it.")
    attempts: int = Field(description="How often a runner was started for it.")
    folder: str = Field(description="Where its files lie, on the machine that runs it.")
    steps: int = Field(description="Optimizer steps that the recipe asks for.")
    steps_done: int
    reward: float | None = Field(description="Mean reward of the newest step.")
    tags: list[str] = Field([], description="Words that people gave to it.")
    notes: str = Field("", description="What people wrote about it.")
    devices: int = Field(1, description="On which its engines compute, if each has its own.")
    recipe: dict[str, Any] = Field(description="As /v1/recipes/schema says, with every default.")


class ScaledRun(RunView):
    """A run that was asked for another number of rollout workers."""

    rollouts_before: int | None = Field(None, description="For which it was asked before.")


class RunPage(BaseModel):
    """Runs, newest first.

    ``next`` is the cursor of the next page (`after`), empty at the end: a page looks at 5,000 runs
    at most, so it may hold fewer than asked for, or none, and not be the last.
    """

    runs: list[RunView]
    next: str


class RunsQuery(Strict):
    state: Literal[
        "", "created", "starting", "running", "paused", "stopping", "stopped", "finished", "failed"
    ] = Field("", description="Only runs in this state.")
    name: str = Field("", max_length=200, description="Only runs with this in their name.")
    owner: str = Field(
        "", max_length=200, description="Only runs that this token's name submitted."
    )
    after: str = Field(
        "", pattern=r"^[0-9]*$", max_length=15, description="`next` of the page before."
    )
    limit: int = Field(50, ge=1, le=200)


class SubmitHeaders(Strict):
    key: str = Field(
        "",
        alias="Idempotency-Key",
        pattern=r"^[\x21-\x7e]*$",
        max_length=200,
        description="Any text of the client's own choice: a repeat under the same key is answered "
        "with the run that the first one made.",
    )


# A plain table in requests: the recipe's own checks give better errors than a schema.
RecipeTable = Annotated[dict[str, Any], schema_of(Recipe)]
Overrides = Annotated[
    dict[str, Any],
    Field(
        description='Dotted keys and their values, as {"train.steps": 5}, which change single keys.'
    ),
]


class WholeRecipe(Strict):
    """A whole recipe."""

    recipe: RecipeTable = Field(
        description="As a recipe's TOML file, in JSON; `extends` may name a stored recipe."
    )
    overrides: Overrides = {}


class NamedRecipe(Strict):
    """A stored recipe."""

    recipe_name: str = Field(max_length=200, description="One of GET /v1/recipes.")
    overrides: Overrides = {}


class TomlRecipe(Strict):
    """A recipe as the text of its file."""

    toml: str = Field(max_length=200_000, description="TOML; `extends` may name a stored recipe.")
    overrides: Overrides = {}


class ForkedRun(Strict):
    """Another run, as a new one that begins with the weights of one of its checkpoints.

    Its optimizer, its prompts and its count of steps begin anew. It has files of its own: the other
    run may go on, or be deleted.
    """

    run: str = Field(pattern=RUN_ID, max_length=200, description="The other run's id.")
    version: int | None = Field(
        None,
        ge=0,
        description="Of its checkpoint (0: as it began itself). Default: the newest that it has.",
    )
    overrides: Overrides = {}


class Resumption(Strict):
    """How a run goes on."""

    overrides: Overrides = {}
    start_version: int | None = Field(
        None,
        ge=0,
        description="Of an ended run: go on from its checkpoint of this version (0: from the "
        "beginning), and set newer ones aside. Default: from the newest.",
    )


class WhatIf(Strict):
    """Keys of the run's recipe with other values."""

    overrides: Overrides = {}


class ForecastView(BaseModel):
    """What a simulation of a run says.

    Shares are of the time between its first and last steps; staleness in versions.
    """

    model_config = ConfigDict(from_attributes=True)

    tokens_per_second: float = Field(description="Response tokens trained.")
    step_seconds: float
    generation: float = Field(
        description="Share in which the rollouts' decoding capacity is in use."
    )
    training: float = Field(description="Share in which the trainer trains.")
    waiting: float = Field(description="Share in which the trainer waits for samples.")
    staleness_mean: float
    staleness_p95: int
    staleness_max: int
    between: float = Field(description="Share between two steps: claims, commits, publishing.")
    busiest: str = Field(
        description="What limits the throughput: generation, training, or between steps."
    )


class WhatIfView(BaseModel):
    """Both by the costs that the run has measured."""

    now: ForecastView = Field(description="The run as it is.")
    changed: ForecastView = Field(description="The run with the keys that were given.")


class Scaling(Strict):
    """How many workers a run is to have."""

    rollout: int = Field(ge=1, le=10_000, description="Rollout workers.")


def _which(body: Any) -> str | None:
    keys = {"recipe", "recipe_name", "toml", "run"} & set(
        body if isinstance(body, dict) else getattr(type(body), "model_fields", ())
    )
    return keys.pop() if len(keys) == 1 else None


class RecipeSubmission(
    RootModel[
        Annotated[
            Annotated[WholeRecipe, Tag("recipe")]
            | Annotated[NamedRecipe, Tag("recipe_name")]
            | Annotated[TomlRecipe, Tag("toml")]
            | Annotated[ForkedRun, Tag("run")],
            Discriminator(
                _which,
                custom_error_type="recipe_or_name",
                custom_error_message=(
                    "Input should be an object with one of recipe, recipe_name, toml and run"
                ),
            ),
        ]
    ]
):
    """One of a whole `recipe`, the `recipe_name` of a stored one, the `toml` of one, and a `run` to
    fork."""


class StageWorker(StageEvent, kind="stage"):
    """A worker's share in a stage since its process began.

    Seconds; the four shares add up to ``wall``.
    """

    time: Annotated[float, Doc("Unix seconds of this report, its newest one.")]
    recent: Annotated[
        Mapping[str, float],
        Doc(
            "What these seconds, `rows` and `tokens` have grown by within the last 10 s of them, "
            "whichever process of the worker reported them."
        ),
    ]
    process: Annotated[str, Doc("The worker process that it runs in; empty for an external one.")]
    state: Annotated[
        str, Doc("Last change of that process: started, ready, died, restarted, stopped.")
    ]
    pid: int
    node: Annotated[str, Doc("Name of the machine of that process, once it was ready.")] = ""
    host: Annotated[
        str, Doc("Name of the host that started it; empty on the machine that executes the run.")
    ] = ""


class Stage(BaseModel):
    name: str
    takes: Literal["rows", "groups", "batch"]
    ready: int = Field(description="Rows, or groups, that wait for it.")
    leased: int = Field(description="Rows that its workers hold.")
    workers: list[StageWorker]


class Warehouse(BaseModel):
    name: str
    node: str
    used: int = Field(description="Bytes.")
    capacity: int = Field(description="Bytes.")
    leaving: bool


class Host(BaseModel):
    """A process that starts workers of the run on a machine."""

    name: str
    node: str = Field(description="Name of the machine.")
    state: str = Field(description="Its last change: ready, died, stopped.")
    workers: list[str] = Field(description="The worker processes that it has started.")


class Gate(BaseModel):
    """Groups: admitted so far, how many may be by now, and those of them that are not trained."""

    admitted: int
    allowed: int
    open: int


class AlarmView(AlarmEvent, kind="alarm"):
    """An alarm of the guard: a metric that was unusual at a step."""

    time: Seconds


class StagesView(BaseModel):
    """The pipeline at this moment. Empty before the run has begun."""

    stages: list[Stage]
    ledger: dict[str, int] = Field(
        description="Samples, tokens and turns of trajectories: generated = trained + filtered + "
        "remade + in flight."
    )
    warehouses: list[Warehouse]
    hosts: list[Host] = Field([], description="Of runs with workers on other machines.")
    dropped: dict[str, int] = Field(description="Groups that were dropped, by reason.")
    dropped_tokens: dict[str, int] = Field(description="Their tokens, by reason.")
    published: int = Field(description="The newest policy version that rollout may use.")
    trained: int = Field(description="Optimizer steps done.")
    gate: Gate
    alarms: list[AlarmView] = Field(
        description="The newest alarms of the guard, at most 100, the oldest first."
    )
    epochs: dict[str, int] = Field(
        description="The epoch that each source of prompts is in, from 1, by its key."
    )
    trajectories: Mapping[str, float] = Field(
        {},
        description="Of a run with environments: the numbers of its `stage` events, of all "
        "processes of its workers.",
    )
    flow: dict[str, Any] = Field(description="As the plan's: stages, and the columns between them.")


class WaitingView(BaseModel):
    """What a run waits for at this moment: nothing before it has begun, and once it has ended."""

    chain: list[Wait]
    state: str = Field(default="", description="Of a run that has ended; else empty.")
    reason: str = Field(default="", description="Why it has ended, where that is known.")
    ended: Seconds | None = None
    findings: list[str] = Field(
        default=[],
        description="Of a run that has ended: what its rewards show, and its newest alarms.",
    )


class CheckpointView(BaseModel):
    version: int
    path: str = Field(
        description="On the machine that runs it; `model` in it opens with transformers."
    )
    time: Seconds
    bytes: int


class CheckpointsView(BaseModel):
    """Whole checkpoints, oldest first."""

    checkpoints: list[CheckpointView]


class LogsQuery(Strict):
    worker: str = Field(
        "", max_length=100, description="As rollout-0; without one, all workers' lines by time."
    )
    lines: int = Field(200, ge=1, le=5000, description="The last so many.")


class RecipePath(Strict):
    name: str = Field(pattern=RUN_ID, max_length=200, description="The recipe's name.")


class RecipeSummary(BaseModel):
    name: str
    description: str


class RecipesView(BaseModel):
    recipes: list[RecipeSummary]


class StoredRecipe(BaseModel):
    """A stored recipe as it is written; keys that are left out have defaults."""

    name: str
    description: str
    recipe: dict[str, Any]


class CheckedRecipe(BaseModel):
    """A sound recipe with every default, and what follows from it. Sizes in bytes."""

    recipe: dict[str, Any]
    plan: Plan
    prompts: list[str] = Field(
        description="Files, splits and rows that the prompts are read from, and the columns whose "
        "values are converted."
    )
    examples: list[ExamplePrompt] = Field(
        description="The first prompt of each source, as the model reads it."
    )


class Schema(RootModel[dict[str, Any]]):
    """A JSON Schema, draft 2020-12."""


class MetricsView(BaseModel):
    """Series by name (`step`, `stage/rollout-0`), each as columns: `time` and its numbers.

    Times in Unix seconds.
    """

    from_: float = Field(alias="from")
    to: float
    every: float = Field(description="Seconds that one point stands for; 0: each event is a point.")
    series: dict[str, dict[str, list[float | None]]]
