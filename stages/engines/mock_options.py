"""What the mock engines are told: how long things take. Recipes are checked against it without loading the engines."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MockRolloutOptions:
    """Seconds are the model's own; ``time_scale`` real seconds pass for each."""

    max_rows: int = 256  # rows that decode at the same time; the others wait in order
    row_rate: float = 50.0  # tokens a second of one row, alone
    saturation_rows: int = 64  # up to here every row keeps its rate; beyond, all share what these had
    prefill_rate: float = 5000.0  # prompt tokens a second, once for the rows of a group that come together
    median_tokens: float = 200.0  # of the log-normal response length
    sigma: float = 0.8  # of its logarithm; 0 makes all responses equally long
    swap_seconds: float = 0.1  # a weight update, while nothing decodes
    copy_seconds: float = 0.0  # a weight update, beside decoding
    vocabulary: int = 1000
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("max_rows", "row_rate", "saturation_rows", "prefill_rate", "median_tokens", "time_scale"):
            if not getattr(self, name) > 0:
                raise ValueError(f"mock rollout: {name} = {getattr(self, name)} must be above 0")
        for name in ("sigma", "swap_seconds", "copy_seconds"):
            if getattr(self, name) < 0:
                raise ValueError(f"mock rollout: {name} = {getattr(self, name)} must not be negative")
        if self.vocabulary < 2:
            raise ValueError(f"mock rollout: vocabulary = {self.vocabulary} must be at least 2")


@dataclass(frozen=True)
class MockTrainOptions:
    """Seconds are the model's own; ``time_scale`` real seconds pass for each."""

    step_seconds: float = 0.2  # of one optimizer step, whatever its size
    token_seconds: float = 1e-4  # more for each token trained: responses, and each group's prompt once
    logprob_token_seconds: float = 3e-5  # of ``logprobs``, for each token
    parameters: int = 4096  # float32 values of the policy
    learning_rate: float = 1e-3
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("step_seconds", "token_seconds", "logprob_token_seconds"):
            if getattr(self, name) < 0:
                raise ValueError(f"mock train: {name} = {getattr(self, name)} must not be negative")
        for name in ("parameters", "time_scale"):
            if not getattr(self, name) > 0:
                raise ValueError(f"mock train: {name} = {getattr(self, name)} must be above 0")
