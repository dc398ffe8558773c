"""What is wrong with a source of prompts, found without a tokenizer, without torch, and within a :class:`Reading`.

jsonl     every line: UTF-8, JSON, an object with a prompt, and the columns that the template names
parquet   the schema, and as many rows
datasets  the folder's splits and schemas; of ``module:function``, that there is such a function, which is not called
task      its options
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stages.prompts.files import (
    LINE_BYTES,
    PromptError,
    Reading,
    Row,
    begins_list,
    kind_of,
    lines,
    open_file,
    parse_line,
)
from stages.prompts.sources import (
    SHORT_CHARACTERS,
    PromptOptions,
    check_size,
    dataset_function,
    existing,
    fill,
    given_of,
    open_rows,
    parse_template,
)

MOST_FAULTS = 10  # of the rows of one source


class PromptCheck:
    """Reads the rows that ``options`` name. After :meth:`faults`, ``conversation`` is where the first conversation stands
    ("": none was seen), and ``columns`` are those of the rows that were seen, without the prompt's (empty: none was)."""

    def __init__(self, options: PromptOptions, reading: Reading) -> None:
        self.options, self.reading = options, reading
        self.conversation = ""
        self.columns: set[str] = set()
        self._pieces = parse_template(options.template)

    def faults(self) -> Iterator[PromptError]:
        """What is wrong, at most :data:`MOST_FAULTS` of the rows, and whether there are more."""
        found = 0
        try:
            for fault in self._faults():
                found += 1
                if found > MOST_FAULTS:
                    yield PromptError(f"prompts: {self.options.path} has more such rows; correct these first")
                    return
                yield fault
        except PromptError as error:
            yield error
        except Exception as error:  # of a library that reads a file
            path = self.options.path or self.options.task
            yield PromptError(f"prompts: {path} cannot be read ({type(error).__name__}: {error}); correct it")

    def _faults(self) -> Iterator[PromptError]:
        match self.options.source:
            case "jsonl":
                yield from self._jsonl(Path(str(self.options.path)))
            case "parquet":
                yield from self._parquet(Path(str(self.options.path)))
            case "datasets" if ":" in str(self.options.path):
                dataset_function(str(self.options.path))
            case "datasets":
                self._saved(existing(Path(str(self.options.path))))
            case "reasoning_gym":
                self._task()
                self.columns |= {"question", "answer", "metadata"}
            case "builtin":
                rows = open_rows(self.options, 0)
                self.columns |= set(rows(0) if callable(rows) else ()) - {self.options.column}

    def _jsonl(self, path: Path) -> Iterator[PromptError]:
        rows = 0
        for number, line in lines(path):
            if line is None or not self.reading.spend(rows=1, nbytes=len(line)):
                return  # a line that is too long to be read is not passed over here
            where = f"{path}, line {number}"
            try:
                row = parse_line(line, where)
                if row is not None:
                    rows += 1
                    self._row(row, where)
            except PromptError as error:
                rows += 1
                yield error
                if number == 1 and begins_list(line):  # of all rows: no line of it would be right
                    return
        if not rows:
            yield PromptError(f"prompts: {path} has no rows; give a file with prompts")

    def _row(self, row: Any, where: str) -> None:
        column = self.options.column
        given = given_of(row, column, where)
        fields: Row = {name: value for name, value in row.items() if name != column}
        self.columns.update(fields)
        if isinstance(given, str):
            fill(self._pieces, fields | {"prompt": given}, SHORT_CHARACTERS, where)
        else:
            self.conversation = self.conversation or where

    def _parquet(self, path: Path) -> Iterator[PromptError]:
        import pyarrow.parquet as pq

        folder = kind_of(existing(path)) == "a folder"
        files = self._parquet_files(existing(path)) if folder else [path]
        if files is None:  # the folder holds more than may be looked through
            return
        if not files:
            raise PromptError(f"prompts: prompts.path = {str(path)!r} is a folder without *.parquet; give a file")
        rows = 0
        for file in files:
            if not self.reading.spend(nbytes=4096):
                return
            with open_file(file) as opened, pq.ParquetFile(opened) as parquet:
                if parquet.num_row_groups and self.options.column not in parquet.schema_arrow.names:
                    self._lacks_column(str(file), parquet.schema_arrow.names)
                first, rows = rows, rows + parquet.metadata.num_rows
                yield from self._parquet_rows(parquet, path if not folder else file, 0 if folder else first)
        if not rows:
            yield PromptError(f"prompts: {path} has no rows; give a file with prompts")

    def _parquet_files(self, folder: Path) -> list[Path] | None:
        """The Parquet files below ``folder``; None when it is too large to be looked through."""
        found = []
        for parent, _, names in os.walk(folder):
            if not self.reading.spend(rows=1 + len(names) // 100):
                return None
            found += [Path(parent, name) for name in names if name.endswith(".parquet")]
        return sorted(found)

    def _parquet_rows(self, parquet: Any, path: Path, first: int) -> Iterator[PromptError]:
        for group in range(parquet.num_row_groups):
            about = parquet.metadata.row_group(group)
            nbytes = sum(about.column(at).total_uncompressed_size for at in range(about.num_columns))
            if not self.reading.spend(nbytes=max(nbytes, about.total_byte_size)):
                return
            for batch in parquet.iter_batches(batch_size=8, row_groups=[group]):
                for row in batch.to_pylist():
                    first += 1
                    if not self.reading.spend(rows=1):
                        return
                    try:
                        self._row(row, f"{path}, row {first}")
                    except PromptError as error:
                        yield error

    def _saved(self, folder: Path) -> None:
        """A folder that ``save_to_disk`` has written."""
        path, split = self.options.path, self.options.split
        if kind_of(folder) != "a folder":
            raise PromptError(f"prompts: prompts.path = {path!r} is no folder; give one that save_to_disk has written")
        if (folder / "dataset_dict.json").is_file():
            splits = self._object(folder / "dataset_dict.json").get("splits") or []
            if split not in splits:
                raise PromptError(f"prompts.split = {split!r} is not in {path}; use one of {splits}")
            folder = folder / str(split)
        elif split is not None:
            raise PromptError(f"prompts.split = {split!r}, but {path} has no splits; drop it")
        if not (folder / "state.json").is_file():
            raise PromptError(f"prompts: {folder} has no state.json; give a folder that save_to_disk has written")
        columns = self._object(folder / "dataset_info.json").get("features")
        if isinstance(columns, Mapping) and self.options.column not in columns:
            self._lacks_column(str(folder), list(columns))
        if isinstance(columns, Mapping):
            self.columns |= set(columns) - {self.options.column}
        for data in self._object(folder / "state.json").get("_data_files") or ():
            open_file(folder / Path(str(data["filename"])).name).close()

    def _object(self, path: Path) -> dict[str, Any]:
        with open_file(path) as file:
            found = json.loads(file.read(LINE_BYTES))
        return found if isinstance(found, dict) else {}

    def _lacks_column(self, where: str, has: list[str]) -> None:
        raise PromptError(
            f"prompts: {where} has no column {self.options.column!r} (it has {sorted(has)}); set prompts.column"
        )

    def _task(self) -> None:
        from reasoning_gym.factory import DATASETS

        task, config = str(self.options.task), self.options.config
        check_size(config)
        made = DATASETS[task][1]
        try:
            made(**config).validate()
        except Exception as error:  # it asserts, or stumbles over a type
            raise PromptError(
                f"prompts.config = {config} does not fit reasoning_gym's {task}: {error}; correct it"
            ) from None
