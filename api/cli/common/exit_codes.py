"""Exit codes of the command ``asyncdock``; docs/runs.md has the table."""

FINISHED = 0  # done; of a run: it finished
FAILED = 1  # the run failed, or the request is impossible in the present state
BAD_INPUT = 2  # wrong usage, a wrong recipe, a name that does not exist
NO_SERVICE = 3  # the service cannot be reached, does not allow it, or could not do it
INTERRUPTED = 130  # the run was stopped before its end, or Ctrl-C ended the command
NO_READER = 141  # the output's reader is gone: 128 + SIGPIPE. The run itself goes on in its service

OF_STATE = {"finished": FINISHED, "failed": FAILED, "stopped": INTERRUPTED}
