"""Checks the files of a source of prompts (stages.prompts.rows.checked).

jsonl     every line: UTF-8, JSON, an object with a prompt, and the columns that the template names
parquet   the schema, and the same of every row
datasets  the folder's splits and schemas; of ``module:function``, that there is such a function, which is not called
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.compat.extras import extra
from stages.prompts.rows.files import (
    LINE_BYTES,
    PromptError,
    Row,
    begins_list,
    lines,
    open_file,
    parse_line,
)
from stages.prompts.rows.options import SHORT_CHARACTERS
from stages.prompts.rows.prompt_check import PromptCheck
from stages.prompts.rows.splits import choose_split, data_files
from stages.prompts.rows.tables import dataset_function, saved_folder
from stages.prompts.rows.templates import (
    fill_template,
    prompt_in,
    responses_in,
    with_prompt,
)
from stages.prompts.rows.values import plain_row


class FileCheck(PromptCheck):
    """The check of a source with files."""

    def _faults(self) -> Iterator[PromptError]:
        path = str(self.options.path)
        match self.options.source:
            case "jsonl":
                yield from self._check_files(Path(path), ".jsonl", self._check_jsonl)
            case "parquet":
                yield from self._check_files(Path(path), ".parquet", self._check_parquet)
            case "datasets" if ":" in path:
                dataset_function(path)
            case "datasets":
                yield from self._check_saved(saved_folder(path))

    def _check_files(
        self, path: Path, suffix: str, check: Callable[[Sequence[Path]], Iterator[PromptError]]
    ) -> Iterator[PromptError]:
        """Check the files of the split with ``check``."""
        data = data_files(
            path, self.options.split, suffix, lambda rows: self.reading.spend(rows=rows)
        )
        if data is None:  # the budget does not allow to look through the folder
            return
        yield from check(data.files)
        self.about = data.describe(self.rows)
        if self.rows == 0:
            yield PromptError("has no rows", "give a file with prompts")

    def _check_jsonl(self, files: Sequence[Path]) -> Iterator[PromptError]:
        rows = 0
        for path in files:
            for number, line in lines(path):
                if line is None or not self.reading.spend(rows=1, nbytes=len(line)):
                    return  # a line that is too long costs too much to skip here
                place = f"line {number}"
                try:
                    row = parse_line(line, self._where(path, place))
                    rows += row is not None
                    if row is not None:
                        self._check_row(row, path, place)
                except PromptError as error:
                    yield error
                    rows += 1
                    # a list of all rows: no line of it would be right
                    if number == 1 and begins_list(line):
                        return
        self.rows = rows

    def _where(self, path: Path, row: str = "") -> str:
        """Return the location of ``row`` of the file at ``path`` within the source, a file or a
        folder."""
        inside = os.path.relpath(path.expanduser(), Path(str(self.options.path)).expanduser())
        return ", ".join(filter(None, ["" if inside == "." else inside, row]))

    def _check_row(self, row: Any, path: Path, place: str) -> None:
        where = self._where(path, place)
        column = self.options.column
        row = plain_row(row, where, self.options.leave_out, self.changes)
        row = with_prompt(row, column, self.options.responses, where)
        prompt = prompt_in(row, column, where)
        fields: Row = {name: value for name, value in row.items() if name != column}
        self.columns.update(fields)
        self.has_columns = True
        if isinstance(prompt, str):
            fill_template(self._pieces, fields | {"prompt": prompt}, SHORT_CHARACTERS, where)
        else:
            self.conversation = self.conversation or where
        responses = responses_in(fields, self.options.responses, where)
        has_turns = any(
            not isinstance(response, str) and len(response) > 1 for response in responses
        )
        if not self.examples or (has_turns and not self._has_turns):
            self.examples.append((row, f"{path}, {place}"))
            self._has_turns = has_turns

    def _check_parquet(self, files: Sequence[Path]) -> Iterator[PromptError]:
        with extra("data"):
            import pyarrow.parquet as pq

        rows = 0
        for path in files:
            if not self.reading.spend(nbytes=4096):
                return
            with open_file(path) as opened, pq.ParquetFile(opened) as parquet:
                if parquet.num_row_groups:
                    self._check_columns(path, parquet.schema_arrow.names)
                rows += parquet.metadata.num_rows
            # as Hive names folders
            self.columns |= {part.partition("=")[0] for part in path.parts if "=" in part}
        self.rows = rows
        for path in files:
            with open_file(path) as opened, pq.ParquetFile(opened) as parquet:
                yield from self._check_batches(self._parquet_batches(parquet), path)

    def _parquet_batches(self, parquet: Any) -> Iterator[Any]:
        """Yield the rows of a Parquet file, a few at a time, as far as the budget allows."""
        names = [name for name in parquet.schema_arrow.names if name not in self.options.leave_out]
        for number in range(parquet.num_row_groups):
            group = parquet.metadata.row_group(number)
            columns = [group.column(at) for at in range(group.num_columns)]
            read = [each for each in columns if each.path_in_schema.partition(".")[0] in names]
            if not self.reading.spend(nbytes=sum(each.total_uncompressed_size for each in read)):
                return
            yield from parquet.iter_batches(batch_size=8, row_groups=[number], columns=names)

    def _check_batches(self, batches: Iterable[Any], path: Path) -> Iterator[PromptError]:
        """Check the rows of Arrow record batches, as far as the budget allows."""
        number = 0
        for batch in batches:
            for row in batch.to_pylist():
                number += 1
                if not self.reading.spend(rows=1):
                    return
                try:
                    self._check_row(row, path, f"row {number}")
                except PromptError as error:
                    yield error

    def _check_saved(self, folder: Path) -> Iterator[PromptError]:
        """Check a folder that ``save_to_disk`` has written."""
        path = str(self.options.path)
        split = self.options.split
        others = ""
        if (folder / "dataset_dict.json").is_file():
            splits = _json_object(folder / "dataset_dict.json").get("splits") or []
            split = choose_split(path, split, splits)
            others = ", ".join(repr(name) for name in splits if name != split)
            folder = folder / str(split)
        else:
            choose_split(path, split, None)
        if not (folder / "state.json").is_file():
            problem = f"has no {self._where(folder / 'state.json')}"
            raise PromptError(problem, "give a folder that save_to_disk has written")
        columns = _json_object(folder / "dataset_info.json").get("features")
        if isinstance(columns, Mapping):
            self._check_columns(folder, list(columns))
        files = [
            folder / Path(str(data["filename"])).name
            for data in _json_object(folder / "state.json").get("_data_files") or ()
        ]
        yield from self._check_arrow(files)
        rows = "rows" if self.rows is None else f"{self.rows} rows"
        left_out = f"; left out: the splits {others}" if others else ""
        self.about = f"{f'split {split!r}: ' if split else ''}{rows} of {folder.name}{left_out}"

    def _check_arrow(self, files: Sequence[Path]) -> Iterator[PromptError]:
        """Check the rows of Arrow files, of which no more than the rows that are checked is read
        from the disk."""
        with extra("data"):
            import pyarrow

        rows = 0
        for path in files:
            open_file(path).close()
            with pyarrow.memory_map(str(path)) as memory, pyarrow.ipc.open_stream(memory) as stream:
                for batch in stream:
                    if not self.reading.spend(nbytes=64):
                        return
                    rows += batch.num_rows
        self.rows = rows
        for path in files:
            with pyarrow.memory_map(str(path)) as memory, pyarrow.ipc.open_stream(memory) as stream:
                yield from self._check_batches(self._arrow_batches(stream), path.parent)

    def _arrow_batches(self, stream: Any) -> Iterator[Any]:
        for batch in stream:
            selection = batch.select(
                [name for name in batch.schema.names if name not in self.options.leave_out]
            )
            for first in range(0, selection.num_rows, 8):
                rows = selection.slice(first, 8)
                if not self.reading.spend(nbytes=rows.nbytes):
                    return
                yield rows

    def _check_columns(self, path: Path, columns: list[str]) -> None:
        """Check the columns of a schema."""
        column = self.options.column
        responses = self.options.responses
        # perhaps conversations, as their rows show
        is_whole = len(responses) == 1 and responses[0] in columns
        if column not in columns and not is_whole:
            has = f"{self._where(path) or 'it'} has {sorted(columns)}"
            raise PromptError(f"has no column {column!r} ({has})", "set prompts.column")
        self.columns |= set(columns) - {column, *self.options.leave_out}
        self.has_columns = True


def _json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty where it holds something else."""
    with open_file(path) as file:
        value = json.loads(file.read(LINE_BYTES))
    return value if isinstance(value, dict) else {}
