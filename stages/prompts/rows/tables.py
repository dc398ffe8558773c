"""Tables of rows in files: JSON Lines, Parquet, and datasets that a library has saved or a function
returns."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.compat.extras import extra
from stages.prompts.rows.files import (
    PromptError,
    Row,
    Table,
    existing,
    kind_of,
    lines,
    open_file,
    parse_line,
    path_error,
)
from stages.prompts.rows.options import PromptOptions
from stages.prompts.rows.splits import DataFiles, choose_split, data_files
from stages.user_code import CodeUnusable, imported, place_of


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


def open_table(options: PromptOptions) -> Table:
    """Open the rows of the files that ``options`` name. Raises PromptError."""
    path = str(options.path)
    match options.source:
        case "jsonl":
            return JsonRows(_files(path, options.split, ".jsonl"))
        case "parquet":
            files = _files(path, options.split, ".parquet")
            return ParquetRows(Path(path), files, options.leave_out)
    return Table(_dataset(path, options.split, options.leave_out), path)


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
