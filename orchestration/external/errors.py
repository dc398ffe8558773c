"""What the interface to external stages refuses."""


class NotExternal(LookupError):
    """The run's own workers execute this stage."""


class NotBegun(RuntimeError):
    """The run has no workers yet."""


class WeightsTooOld(RuntimeError):
    """A rollout must load a newer version: with the one that it has, it may make no token of the groups that wait."""


class WeightsGone(LookupError):
    """The weights of a version are no longer held, or not yet."""
