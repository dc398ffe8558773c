"""The check of a source of prompts, by its kind: files are read, tasks are asked."""

from __future__ import annotations

from stages.prompts.rows.checked import PromptCheck
from stages.prompts.rows.files import Reading
from stages.prompts.rows.options import PromptOptions


def prompt_check(options: PromptOptions, reading: Reading) -> PromptCheck:
    """Return the check of the source that ``options`` name."""
    if options.source in ("jsonl", "parquet", "datasets"):
        from stages.prompts.rows.file_checks import FileCheck

        return FileCheck(options, reading)
    return PromptCheck(options, reading)
