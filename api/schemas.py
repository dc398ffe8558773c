"""What requests and answers are made of: pydantic models, from which the OpenAPI document is made too."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from api.operations import Strict

RUN_ID = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
STATES = ("created", "starting", "running", "paused", "stopping", "stopped", "finished", "failed")
State = Literal["created", "starting", "running", "paused", "stopping", "stopped", "finished", "failed"]
Seconds = Annotated[float, Field(description="Unix seconds")]


class RunPath(Strict):
    run: str = Field(pattern=RUN_ID, max_length=200, description="The run's id.")


class RunView(BaseModel):
    """A run as the list has it, and how far it is. ``created`` waits in the queue: ``position`` 1 is next."""

    id: str
    name: str
    state: State
    reason: str = Field(description="Why it failed or stopped.")
    position: int | None = Field(description="In the queue; null once it is out of it.")
    owner: str = Field(description="The name of the token that submitted it.")
    created: Seconds
    started: Seconds | None
    ended: Seconds | None
    agent: str = Field(description="Who runs it.")
    attempts: int = Field(description="How often a runner was started for it.")
    folder: str = Field(description="Where its files lie, on the machine that runs it.")
    steps: int = Field(description="Optimizer steps that the recipe asks for.")
    steps_done: int
    reward: float | None = Field(description="Mean reward of the newest step.")
    recipe: dict[str, Any] = Field(description="As /v1/recipes/schema says, with every default.")


class RunPage(BaseModel):
    """Runs, newest first. ``next`` is the cursor of the next page (`after`), empty at the end."""

    runs: list[RunView]
    next: str


class RunsQuery(Strict):
    state: Literal["", "created", "starting", "running", "paused", "stopping", "stopped", "finished", "failed"] = Field(
        "", description="Only runs in this state."
    )
    name: str = Field("", max_length=200, description="Only runs of recipes with this name.")
    owner: str = Field("", max_length=200, description="Only runs that this token's name submitted.")
    after: str = Field("", max_length=200, description="`next` of the page before.")
    limit: int = Field(50, ge=1, le=200)


class SubmitHeaders(Strict):
    key: str = Field(
        "",
        alias="Idempotency-Key",
        pattern=r"^[\x21-\x7e]*$",
        max_length=200,
        description="Any text of the client's own choice: a repeat under the same key is answered with the run that the "
        "first one made.",
    )


class RecipeSubmission(Strict):
    """Either a whole ``recipe``, or ``recipe_name`` of a stored one; ``overrides`` change single keys of either."""

    recipe: dict[str, Any] | None = Field(None, description="A recipe as /v1/recipes/schema says.")
    recipe_name: str | None = Field(None, description="One of /v1/recipes.")
    overrides: dict[str, Any] = Field({}, description='Dotted keys and their values, as {"train.steps": 5}.')
