"""Exit codes of the command ``asyncdock``; docs/cli.md has the table."""

FINISHED = 0  # done; of a run: it finished
FAILED = 1  # the run failed, or the request is impossible in the present state
BAD_INPUT = 2  # wrong usage, a wrong recipe, a name that does not exist
NO_SERVICE = 3  # the service cannot be reached, does not allow it, or could not do it
INTERRUPTED = 130  # the run was stopped before its end, or Ctrl-C ended the command
NO_READER = 141  # nobody reads the view of a run that goes on elsewhere; as of a process that SIGPIPE ends

OF_STATE = {"finished": FINISHED, "failed": FAILED, "stopped": INTERRUPTED}
