"""Checks a source of prompts without a tokenizer, without torch, and within a :class:`Reading`.

jsonl     every line: UTF-8, JSON, an object with a prompt, and the columns that the template names
parquet   the schema, and the same of every row
datasets  the folder's splits and schemas; of ``module:function``, that there is such a function, which is not called
task      its options
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.compat.extras import extra
from stages.prompts.files import (
    LINE_BYTES,
    PromptError,
    Reading,
    Row,
    begins_list,
    existing,
    kind_of,
    lines,
    open_file,
    parse_line,
)
from stages.prompts.options import SHORT_CHARACTERS, PromptOptions
from stages.prompts.rows.values import Changes, plain_row
from stages.prompts.tables import check_size, check_split, dataset_function, open_rows, saved_folder
from stages.prompts.templates import fill_template, parse_template, prompt_in

MOST_FAULTS = 10  # of the rows of one source


class PromptCheck:
    """Reads the rows that ``options`` name. :meth:`faults` sets ``conversation``, where the first conversation is ("": none
    was found), ``columns``, those of the rows that were read, without the prompt's, and ``example``, the first sound row
    and where it is (None: none was read)."""

    def __init__(self, options: PromptOptions, reading: Reading) -> None:
        self.options, self.reading = options, reading
        self.conversation = ""
        self.columns: set[str] = set()
        self.changes: Changes = {}
        self.example: tuple[Row, str] | None = None
        self._pieces = parse_template(options.template)

    def faults(self) -> Iterator[PromptError]:
        """Yield what is wrong: at most :data:`MOST_FAULTS`, and then one that says that there are more."""
        source = self.options.path or self.options.task
        try:
            for count, fault in enumerate(self._faults(), 1):
                if count > MOST_FAULTS:
                    yield PromptError(f"prompts: {self.options.path} has more such rows; correct these first")
                    return
                yield fault
        except PromptError as error:
            yield error
        except Exception as error:  # of a library that reads a file
            yield PromptError(f"prompts: {source} cannot be read ({type(error).__name__}: {error}); correct it")

    def _faults(self) -> Iterator[PromptError]:
        options, path = self.options, str(self.options.path)
        match options.source:
            case "jsonl":
                yield from self._check_jsonl(Path(path))
            case "parquet":
                yield from self._check_parquet(Path(path))
            case "datasets" if ":" in path:
                dataset_function(path)
            case "datasets":
                self._check_saved(saved_folder(path))
            case "reasoning_gym":
                self._check_task(str(options.task))
                self.columns |= {"question", "answer", "metadata"}
            case "builtin":
                rows = open_rows(options, 0)
                self.columns |= set(rows(0) if callable(rows) else ()) - {options.column}

    def _check_jsonl(self, path: Path) -> Iterator[PromptError]:
        is_empty = True
        for number, line in lines(path):
            if line is None or not self.reading.spend(rows=1, nbytes=len(line)):
                return  # a line that is too long costs too much to skip here
            where = f"{path}, line {number}"
            try:
                row = parse_line(line, where)
                if row is not None:
                    is_empty = False
                    self._check_row(row, where)
            except PromptError as error:
                is_empty = False
                yield error
                if number == 1 and begins_list(line):  # a list of all rows: no line of it would be right
                    return
        if is_empty:
            yield PromptError(f"prompts: {path} has no rows; give a file with prompts")

    def _check_row(self, row: Any, where: str) -> None:
        column = self.options.column
        row = plain_row(row, where, self.options.leave_out, self.changes)
        given = prompt_in(row, column, where)
        fields: Row = {name: value for name, value in row.items() if name != column}
        self.columns.update(fields)
        if isinstance(given, str):
            fill_template(self._pieces, fields | {"prompt": given}, SHORT_CHARACTERS, where)
        else:
            self.conversation = self.conversation or where
        self.example = self.example or (row, where)

    def _check_parquet(self, path: Path) -> Iterator[PromptError]:
        with extra("data"):
            import pyarrow.parquet as pq

        is_folder = kind_of(existing(path)) == "a folder"
        files = self._parquet_files(existing(path)) if is_folder else [path]
        if files is None:  # the budget does not allow to look through the folder
            return
        if not files:
            raise PromptError(f"prompts: prompts.path = {str(path)!r} is a folder without *.parquet; give a file")
        rows = 0
        for file in files:
            if not self.reading.spend(nbytes=4096):
                return
            with open_file(file) as opened, pq.ParquetFile(opened) as parquet:
                if parquet.num_row_groups:
                    self._check_columns(str(file), parquet.schema_arrow.names)
                rows += parquet.metadata.num_rows
                yield from self._check_parquet_rows(parquet, file)
        if not rows:
            yield PromptError(f"prompts: {path} has no rows; give a file with prompts")

    def _parquet_files(self, folder: Path) -> list[Path] | None:
        """The Parquet files below ``folder``; None when the budget ends before all of it is looked through."""
        found = []
        for parent, _, names in os.walk(folder):
            if not self.reading.spend(rows=1 + len(names) // 100):
                return None
            found += [Path(parent, name) for name in names if name.endswith(".parquet")]
        return sorted(found)

    def _check_parquet_rows(self, parquet: Any, path: Path) -> Iterator[PromptError]:
        number = 0
        for group in range(parquet.num_row_groups):
            about = parquet.metadata.row_group(group)
            nbytes = sum(about.column(at).total_uncompressed_size for at in range(about.num_columns))
            if not self.reading.spend(nbytes=max(nbytes, about.total_byte_size)):
                return
            for batch in parquet.iter_batches(batch_size=8, row_groups=[group]):
                for row in batch.to_pylist():
                    number += 1
                    if not self.reading.spend(rows=1):
                        return
                    try:
                        self._check_row(row, f"{path}, row {number}")
                    except PromptError as error:
                        yield error

    def _check_saved(self, folder: Path) -> None:
        """Checks a folder that ``save_to_disk`` has written."""
        path, split = str(self.options.path), self.options.split
        if (folder / "dataset_dict.json").is_file():
            check_split(path, split, _json_object(folder / "dataset_dict.json").get("splits") or [])
            folder = folder / str(split)
        else:
            check_split(path, split, None)
        if not (folder / "state.json").is_file():
            raise PromptError(f"prompts: {folder} has no state.json; give a folder that save_to_disk has written")
        columns = _json_object(folder / "dataset_info.json").get("features")
        if isinstance(columns, Mapping):
            self._check_columns(str(folder), list(columns))
            self.columns |= set(columns) - {self.options.column}
        for data in _json_object(folder / "state.json").get("_data_files") or ():
            open_file(folder / Path(str(data["filename"])).name).close()

    def _check_columns(self, where: str, columns: list[str]) -> None:
        if (column := self.options.column) not in columns:
            has = f"it has {sorted(columns)}"
            raise PromptError(f"prompts: {where} has no column {column!r} ({has}); set prompts.column")

    def _check_task(self, task: str) -> None:
        with extra("quickstart"):
            from reasoning_gym.factory import DATASETS

        config = self.options.config
        check_size(config)
        make_config = DATASETS[task][1]
        try:
            make_config(**config).validate()
        except Exception as error:  # assertions, and errors of types that it does not check
            wrong = f"does not fit reasoning_gym's {task}: {error}"
            raise PromptError(f"prompts.config = {config} {wrong}; correct it") from None


def _json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty where it holds something else."""
    with open_file(path) as file:
        value = json.loads(file.read(LINE_BYTES))
    return value if isinstance(value, dict) else {}
