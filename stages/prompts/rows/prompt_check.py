"""The check of a source of prompts, here of a task: its options, and the columns of a row."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.compat.extras import extra
from stages.prompts.rows.files import PromptError, Reading, Row
from stages.prompts.rows.opened import check_size, config_error, open_rows
from stages.prompts.rows.options import PromptOptions
from stages.prompts.rows.templates import parse_template
from stages.prompts.rows.values import Changes

MOST_FAULTS = 10  # of the rows of one source


class PromptCheck:
    """Reads the rows that ``options`` name. :meth:`faults` sets

    ``conversation``  the first row that is a conversation; "": there is none
    ``columns``       of the rows that were read, without the prompt's; ``changes``: of their values
    ``examples``      the first sound row and where it is, and the first with a response of several messages
    ``rows``          number of the source's rows; None: it is not known
    ``has_columns``   whether a row was read, or a schema
    ``about``         which files and rows they are, for people
    ``has_faults``    whether anything is wrong"""

    def __init__(self, options: PromptOptions, reading: Reading) -> None:
        self.options = options
        self.reading = reading
        self.conversation = ""
        self.columns: set[str] = set()
        self.changes: Changes = {}
        self.examples: list[tuple[Row, str]] = []
        self.rows: int | None = None
        self.has_columns = False
        self.about = ""
        self.has_faults = self._has_turns = False  # turns of an example
        self._pieces = parse_template(options.template)

    def faults(self) -> Iterator[PromptError]:
        """Yield what is wrong: at most :data:`MOST_FAULTS`, and then one that says that there are
        more. Those without a key of their own are about the source's path or task."""
        try:
            for count, fault in enumerate(self._faults(), 1):
                if count > MOST_FAULTS:
                    yield self._keyed(PromptError("has more such rows", "correct these first"))
                    return
                self.has_faults = True
                yield self._keyed(fault)
        except PromptError as error:
            self.has_faults = True
            yield self._keyed(error)
        except Exception as error:  # of a library that reads a file
            self.has_faults = True
            problem = f"cannot be read ({type(error).__name__}: {error})"
            yield self._keyed(PromptError(problem, "correct it"))

    def _keyed(self, fault: PromptError) -> PromptError:
        (problem,) = fault.problems
        if problem.key != "prompts":
            return fault
        name = "path" if self.options.path is not None else "task"
        value = getattr(self.options, name)
        return PromptError(problem.wrong, problem.fix, f"prompts.{name}", value)

    def _faults(self) -> Iterator[PromptError]:
        options = self.options
        match options.source:
            case "reasoning_gym":
                self._check_task(str(options.task))
                self.columns |= {"question", "answer", "metadata"} - {*options.leave_out}
                self.has_columns = True
            case "builtin":
                rows = open_rows(options, 0)
                self.columns |= set(rows(0) if callable(rows) else ()) - {
                    options.column,
                    *options.leave_out,
                }
                self.has_columns = True
        yield from ()

    def _check_task(self, task: str) -> None:
        with extra("quickstart"):
            from reasoning_gym.factory import DATASETS

        config = self.options.config
        check_size(config)
        make_config = DATASETS[task][1]
        try:
            make_config(**config).validate()
        except Exception as error:  # assertions, and errors of types that it does not check
            raise config_error(config, f"does not fit reasoning_gym's {task}: {error}") from None
