"""Options of the mock engines: durations.

Recipes are checked against them without importing the engines.

Seconds are those of the model of latency; each takes ``time_scale`` real seconds.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from stages.json_schema import unit

Positive = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(ge=0), unit("seconds")]
Rate = Annotated[float, Field(gt=0), unit("tokens/s")]
Rows = Annotated[int, Field(ge=1), unit("responses")]


class MockOptions(BaseModel):
    """Options of both mock engines."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    time_scale: Positive = Field(
        default=1.0, description="Real seconds that pass for each second here."
    )


class MockRolloutOptions(MockOptions):
    """Latency model of the mock rollout engine."""

    max_rows: Rows = Field(
        default=256,
        description="Responses that decode at the same time; the others wait in order. In a recipe "
        "the default is "
        "`rollout.max_rows`.",
    )
    row_rate: Rate = Field(default=50.0, description="Speed of one response alone.")
    saturation_rows: Rows = Field(
        default=64,
        description="Up to so many responses each keeps its speed; more of them share "
        "what these had.",
    )
    prefill_rate: Rate = Field(
        default=5000.0,
        description="Speed of reading prompts; once for the responses of a group "
        "that come together.",
    )
    median_tokens: Annotated[float, Field(gt=0), unit("tokens")] = Field(
        default=200.0, description="Median of the log-normal response length."
    )
    sigma: Annotated[float, Field(ge=0)] = Field(
        default=0.8,
        description="Deviation of the length's logarithm. 0: all responses are equally long.",
    )
    swap_seconds: Seconds = Field(
        default=0.1, description="Part of a weight update in which nothing decodes."
    )
    copy_seconds: Seconds = Field(
        default=0.0, description="Part of a weight update beside decoding."
    )
    vocabulary: Annotated[int, Field(ge=2), unit("tokens")] = Field(
        default=1000,
        description="Size of the vocabulary. In a recipe the default is the tokenizer's.",
    )


class MockTrainOptions(MockOptions):
    """Latency model of the mock train engine."""

    step_seconds: Seconds = Field(
        default=0.2, description="Time of one optimizer step, whatever its size."
    )
    token_seconds: Seconds = Field(
        default=1e-4,
        description="Time added for each token trained: responses, and each group's prompt once.",
    )
    logprob_token_seconds: Seconds = Field(
        default=3e-5, description="Time of a reference logprob, for each token."
    )
    parameters: Annotated[int, Field(ge=1)] = Field(
        default=4096, description="float32 values of the policy."
    )
    learning_rate: float = Field(
        default=1e-3, description="Size of the change that a step makes to them."
    )
