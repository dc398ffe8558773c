"""The flow of a run: which stages its samples pass, resolved backwards from the columns that its
algorithm reads."""

from stages.flow.declarations import Drop
from stages.flow.user_stage import UserStage

__all__ = ["Drop", "UserStage"]
