"""The recipe's `[[stages]]`: stages of the user's own in the flow."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field

from orchestration.recipe.sections import Section
from orchestration.recipe.values import Count


class StageSection(Section):
    """A stage of your own (docs/flow.md). Further keys are the options of its class."""

    model_config = ConfigDict(extra="allow")

    use: str = Field(
        min_length=1,
        description="A stage that an installed package registers, or `module:Class`.",
        examples=["my_stages:Judge"],
    )
    workers: Count = Field(default=1, description="Processes that run it.")

    @property
    def options(self) -> dict[str, Any]:
        """The keys beside `use` and `workers`."""
        return dict(self.model_extra or {})
