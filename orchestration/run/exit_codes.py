"""Exit codes of worker processes, which the supervisor reads."""

from __future__ import annotations

EXIT_FAILED = 1  # the supervisor restarts the worker
EXIT_FATAL = 3  # by an error that a restart would not mend
EXIT_NOT_STARTED = 4  # before it was ready or a step was trained, by an error that may pass
EXIT_REWIND = 5  # steps since the checkpoint cannot be replayed: the run goes on from there
