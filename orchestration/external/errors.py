"""Refusals of the interface to external stages."""

from pipeline.problems import Problem, ProblemError


class NotExternal(ProblemError, LookupError):
    """The run's own workers execute this stage."""

    def __init__(self, wrong: str, fix: str = "") -> None:
        super().__init__(
            Problem("stage", None, wrong, fix), message=f"{wrong}; {fix}" if fix else wrong
        )


class NotBegun(RuntimeError):
    """The run has no workers yet."""


class WeightsTooOld(RuntimeError):
    """A rollout must load a newer version: with the one that it has, it may make no token of the
    groups that wait."""


class WeightsGone(LookupError):
    """The weights of a version are no longer held, or not yet."""
