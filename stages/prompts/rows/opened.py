"""The rows of a source of prompts: a table, or a function from a number to a row.

jsonl, parquet, datasets ──▶ stages.prompts.tables ──▶ Table       reasoning_gym, builtin ──▶ row(number)
                                                  reasoning_gym with a size ──▶ Table
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.compat.extras import extra
from stages.prompts.rows.files import PromptError, Row, Table
from stages.prompts.rows.options import PromptOptions
from stages.tasks.tasks import task_function

MOST_GENERATED = 1_000_000  # rows of a reasoning_gym task with a size


def open_rows(options: PromptOptions, seed: int) -> Table | Callable[[int], Row]:
    """Open the rows of a source. Raises PromptError."""
    task = str(options.task)
    try:
        match options.source:
            case "external" | None:
                problem = "is no table: its prompts are put while the run goes on"
                raise PromptError(problem, key="prompts.source", value=options.source)
            case "jsonl" | "parquet" | "datasets":
                from stages.prompts.rows.tables import open_table

                return open_table(options)
            case "reasoning_gym":
                return _reasoning_gym(task, options.config, options.column, seed)
            case "builtin":
                return _builtin(task, options.config, options.column, seed)
    except PromptError:
        raise
    except Exception as error:
        # of a library that reads a file, or of a function that returns a dataset
        source = str(options.path or task)
        raise PromptError(
            f"{source} cannot be read ({type(error).__name__}: {error})", "correct it"
        ) from error


def _builtin(task: str, config: Mapping[str, Any], column: str, seed: int) -> Callable[[int], Row]:
    make = task_function(task)
    try:
        make(0, seed, **config)
    except (TypeError, ValueError, MemoryError, OverflowError) as error:
        raise config_error(config, f"does not fit {task}: {error}") from error
    return lambda number: _rename_prompt(make(number, seed, **config), column)


def _reasoning_gym(
    task: str, config: Mapping[str, Any], column: str, seed: int
) -> Table | Callable[[int], Row]:
    with extra("quickstart"):
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        problem = "is not a task of reasoning_gym"
        fix = f"it has {sorted(DATASETS)}"
        raise PromptError(problem, fix, "prompts.task", task)
    check_size(config)
    # Its tasks draw row i from seed + i: neighbouring seeds must not give the same rows, shifted by
    # one.
    spread = int.from_bytes(hashlib.blake2b(f"{seed}".encode(), digest_size=4).digest(), "big") >> 1
    try:
        dataset = reasoning_gym.create_dataset(task, **{"seed": spread, **config})
    except (AssertionError, TypeError, ValueError) as error:
        raise config_error(config, f"does not fit reasoning_gym's {task}: {error}") from error

    def row(number: int) -> Row:
        try:
            entry = dataset[number]
        except IndexError as error:
            raise PromptError(
                f"reasoning_gym's {task} has no row {number} ({error})",
                "it is a table: give its size in config",
            ) from error
        metadata = _with_text_keys(entry["metadata"])  # numbers are keys in some tasks
        return _rename_prompt(entry | {"prompt": entry["question"], "metadata": metadata}, column)

    if "size" in config:
        return Table([row(number) for number in range(len(dataset))], task)
    return row


def check_size(config: Mapping[str, Any]) -> None:
    """Raise PromptError when a reasoning_gym task is to be a table of more than
    :data:`MOST_GENERATED` rows."""
    size = config.get("size")
    if isinstance(size, int) and size > MOST_GENERATED:
        problem = f"is more than {MOST_GENERATED} rows"
        fix = "leave it out: then the task never ends"
        raise PromptError(problem, fix, "prompts.config.size", size)


def config_error(config: Mapping[str, Any], wrong: str) -> PromptError:
    """Return the error of the options of a task."""
    return PromptError(wrong, "correct it", "prompts.config", dict(config))


def _with_text_keys(value: Any) -> Any:
    """Return ``value`` with the keys of its mappings as texts, as JSON has them."""
    if isinstance(value, dict):
        return {str(key): _with_text_keys(item) for key, item in value.items()}
    return [_with_text_keys(item) for item in value] if isinstance(value, list | tuple) else value


def _rename_prompt(row: Row, column: str) -> Row:
    """Return ``row`` with its column "prompt" renamed to ``column``."""
    return {column if key == "prompt" else key: value for key, value in row.items()}
