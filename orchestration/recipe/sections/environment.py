"""The section of a recipe that says what answers the policy's turns."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from orchestration.recipe.sections.rewards import NETWORK, READ
from orchestration.units import Count, Seconds, Section, SizeOrZero, Tokens
from stages.json_schema import IsCode, IsPath, key

OUTSIDE = "sessions"
Name = Annotated[str, Field(min_length=1)]


class EnvironmentSection(Section):
    """What answers the policy's turns: without it a response is one turn."""

    use: Annotated[Name | dict[str, Name] | None, IsCode("stage", "guess")] = key(
        None,
        "A class or a program, an async function, as `module:name`, or one that an installed "
        "package registers; or several by the names that rows have in their column "
        "`environment`. `sessions`: programs outside, which ask the service for trajectories.",
        examples=[
            "my_env:Calculator",
            "textarena:2048-v0",
            {"sums": "my_env:Calculator", "games": "my_env:Guess"},
        ],
    )
    options: dict[str, Any] = key(
        {}, "Keyword arguments of the class; of several classes, by their names."
    )
    tools: Literal["template", "text"] = key(
        "template",
        "How tools are written: `template` as the model's chat template does; `text` by a text "
        "protocol, for models whose template has no tools.",
    )
    renderer: str | None = key(
        None,
        "What writes conversations as tokens: a renderer of the library `renderers` by its name, "
        "or `none` for the model's chat template. Default: the renderer of a model that the "
        "library knows, where it is installed and writes what the template does.",
        min_length=1,
        examples=["qwen3"],
    )
    max_turns: Count = key(8, "Turns of a trajectory. After the last one it ends.")
    max_tokens: Tokens | None = key(
        None,
        "Tokens of a trajectory: turns, each of `rollout.max_tokens` at most, and observations. It "
        "ends when no whole turn has room any more. Default: four times `rollout.max_tokens`.",
    )
    timeout: Seconds = key(60.0, "Longest time of one answer of an environment.")
    trajectory_timeout: Seconds = key(
        3600.0, "Longest time of a trajectory, with what the policy needs for its turns."
    )
    on_error: Literal["drop", "zero", "fail"] = key(
        "drop",
        "What a trajectory costs whose environment fails. `drop`: its group leaves the run, and "
        "another one is generated. `zero`: its reward is 0. `fail`: the run fails.",
    )
    processes: Count = key(1, "Processes in which environments live, with several trajectories.")
    concurrency: Annotated[int, Field(ge=1)] = key(
        256, "Trajectories that are opened or answered at the same time."
    )
    memory: SizeOrZero = key(
        4 * 2**30, "Memory of one such process; one that needs more is replaced. 0: no limit."
    )
    sandbox: bool = key(
        False,
        "Have the environments live in a sandbox ([rewards.md](rewards.md#the-sandbox)): no "
        "network, files read-only and only those needed, a scratch folder. In a service they "
        "always do.",
    )
    network: bool = NETWORK
    read: Annotated[list[str], IsPath()] = READ

    @property
    def uses(self) -> dict[str, str]:
        """The environments by name ("": the only one)."""
        return dict(self.use) if isinstance(self.use, dict) else {"": self.use} if self.use else {}

    @property
    def outside(self) -> list[str]:
        """The names of those that are programs outside of the run."""
        return [name for name, use in self.uses.items() if use == OUTSIDE]
