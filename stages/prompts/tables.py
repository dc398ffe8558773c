"""The rows of a source of prompts: a table, or a function from a number to a row.

jsonl, parquet, datasets, reasoning_gym with a size ──▶ Table          reasoning_gym, builtin ──▶ row(number)
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.compat.extras import extra
from stages.prompts.options import PromptOptions
from stages.prompts.rows.files import (
    PromptError,
    Row,
    existing,
    kind_of,
    lines,
    open_file,
    parse_line,
    path_error,
)
from stages.prompts.rows.splits import DataFiles, choose_split, data_files
from stages.tasks.tasks import TASKS
from stages.user_code import CodeUnusable, imported, place_of

MOST_GENERATED = 1_000_000  # rows of a reasoning_gym task with a size


class Table:
    """A table of rows by their numbers. ``rows``: anything with ``len`` that returns mappings by
    number. ``about`` says for people which files they are of."""

    about = ""

    def __init__(self, rows: Any, name: str) -> None:
        self._rows = rows
        self._name = name

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Row:
        try:
            row: Row = self._rows[number]
        except PromptError:
            raise
        except Exception as error:
            raise PromptError(
                f"{self.where(number)} cannot be read ({error!r})", "correct it"
            ) from error
        return row

    def where(self, number: int) -> str:
        """Return a name of the row for people, counted from 1."""
        return f"{self._name}, row {number + 1}"

    def is_unread(self, number: int) -> bool:
        """Return whether the row was too large to be read."""
        return False


def open_rows(options: PromptOptions, seed: int) -> Table | Callable[[int], Row]:
    """Open the rows of a source. Raises PromptError."""
    path = str(options.path)
    task = str(options.task)
    try:
        match options.source:
            case "external" | None:
                problem = "is no table: its prompts are put while the run goes on"
                raise PromptError(problem, key="prompts.source", value=options.source)
            case "jsonl":
                return JsonRows(_files(path, options.split, ".jsonl"))
            case "parquet":
                return ParquetRows(
                    Path(path), _files(path, options.split, ".parquet"), options.leave_out
                )
            case "datasets":
                return Table(_dataset(path, options.split, options.leave_out), path)
            case "reasoning_gym":
                return _reasoning_gym(task, options.config, options.column, seed)
            case "builtin":
                return _builtin(task, options.config, options.column, seed)
    except PromptError:
        raise
    except Exception as error:
        # of a library that reads a file, or of a function that returns a dataset
        source = path if options.path else task
        raise PromptError(
            f"{source} cannot be read ({type(error).__name__}: {error})", "correct it"
        ) from error


class JsonRows(Table):
    """The rows of files of JSON Lines, named by their lines."""

    def __init__(self, of: DataFiles) -> None:
        super().__init__(list[Row | None](), "")
        self._files = of.files
        self._lines = array("q")
        self._ends = list[int]()
        for path in of.files:
            for number, line in lines(path):
                row = None if line is None else parse_line(line, f"{path}, line {number}")
                if row is not None or line is None:
                    self._rows.append(row)
                    self._lines.append(number)
            self._ends.append(len(self._rows))
        self.about = of.describe(len(self))

    def __getitem__(self, number: int) -> Row:
        return self._rows[number] or {}

    def where(self, number: int) -> str:
        return f"{self._files[bisect_right(self._ends, number)]}, line {self._lines[number]}"

    def is_unread(self, number: int) -> bool:
        return self._rows[number] is None


class ParquetRows(Table):
    """Rows of Parquet files: Arrow columns, of which one row at a time becomes Python values.

    Files may differ in columns, and folders below ``path`` named ``name=value`` are a column.
    Columns in ``leave_out`` are not read.
    """

    def __init__(self, path: Path, of: DataFiles, leave_out: Sequence[str]) -> None:
        with extra("data"):
            import pyarrow.dataset
            import pyarrow.parquet

        self._files = of.files
        self._ends = list[int]()
        schemas = []
        for file in of.files:
            with open_file(file) as opened, pyarrow.parquet.ParquetFile(opened) as parquet:
                schemas.append(parquet.schema_arrow.remove_metadata())
                self._ends.append((self._ends[-1] if self._ends else 0) + parquet.metadata.num_rows)
        base = existing(path)
        options = {"format": "parquet", "partitioning": "hive", "partition_base_dir": str(base)}
        names = [str(file.expanduser()) for file in of.files]
        dataset = pyarrow.dataset.dataset(names, **options)
        schema = pyarrow.unify_schemas(
            [*schemas, dataset.schema.remove_metadata()], promote_options="permissive"
        )
        columns = [name for name in schema.names if name not in leave_out]
        rows = pyarrow.dataset.dataset(names, schema=schema, **options).to_table(columns=columns)
        super().__init__(rows.combine_chunks(), str(path))
        self.about = of.describe(len(self))

    def __getitem__(self, number: int) -> Row:
        row: Row = self._rows.slice(number, 1).to_pylist()[0]
        return row

    def where(self, number: int) -> str:
        file = bisect_right(self._ends, number)
        return f"{self._files[file]}, row {number + 1 - (self._ends[file - 1] if file else 0)}"


def _files(path: str, split: str | None, suffix: str) -> DataFiles:
    data = data_files(Path(path), split, suffix)
    assert data is not None
    return data


def _dataset(path: str, split: str | None, leave_out: Sequence[str]) -> Any:
    if ":" in path:
        make = dataset_function(path)
        try:
            dataset = make()
        except Exception as error:
            problem = f"raised {error!r} ({place_of(error, make)})"
            raise PromptError(problem, key="prompts.path", value=path) from error
    else:
        with extra("data"):
            from datasets import load_from_disk
        folder = saved_folder(path)
        dataset = load_from_disk(str(folder))
    if isinstance(dataset, Mapping):  # a DatasetDict
        dataset = dataset[choose_split(path, split, dataset)]
    else:
        choose_split(path, split, None)
    library = type(dataset).__module__.partition(".")[0]
    if library == "pandas" and hasattr(dataset, "to_dict"):
        dataset = dataset.drop(columns=[name for name in leave_out if name in dataset]).to_dict(
            "records"
        )
    elif library == "pyarrow" and hasattr(dataset, "to_pylist"):
        dataset = dataset.select(
            [name for name in dataset.schema.names if name not in leave_out]
        ).to_pylist()
    if hasattr(dataset, "remove_columns"):
        dataset = dataset.remove_columns(
            [name for name in leave_out if name in dataset.column_names]
        )
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise PromptError(
            f"{path} gave a {type(dataset).__name__}", "rows must be reachable by number"
        )
    return dataset


def saved_folder(path: str) -> Path:
    """Return the folder ``path``. Raises PromptError when there is none."""
    folder = existing(Path(path))
    if kind_of(folder) != "a folder":
        raise path_error(Path(path), "is no folder", "give one that save_to_disk has written")
    return folder


def dataset_function(path: str) -> Callable[[], Any]:
    """Return the function that ``module:function`` names. Raises PromptError."""
    try:
        function = imported(path, "prompts.path", path)
    except CodeUnusable as error:
        [problem] = error.problems
        raise PromptError(problem.wrong, problem.fix, problem.key, path) from error
    if not callable(function):
        reason = f"is a {type(function).__name__}"
        fix = "name a function that returns a dataset"
        raise PromptError(reason, fix, "prompts.path", path)
    return function  # type: ignore[no-any-return]


def _builtin(task: str, config: Mapping[str, Any], column: str, seed: int) -> Callable[[int], Row]:
    make = TASKS[task]
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
