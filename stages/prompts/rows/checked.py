"""Checks a source of prompts without a tokenizer, without torch, and within a :class:`Reading`.

files  ──▶ stages.prompts.file_checks
tasks  ──▶ stages.prompts.rows.prompt_check
"""

from __future__ import annotations

from stages.prompts.rows.files import Reading
from stages.prompts.rows.options import PromptOptions
from stages.prompts.rows.prompt_check import PromptCheck


def prompt_check(options: PromptOptions, reading: Reading) -> PromptCheck:
    """Return the check of the source that ``options`` name."""
    if options.source in ("jsonl", "parquet", "datasets"):
        from stages.prompts.rows.file_checks import FileCheck

        return FileCheck(options, reading)
    return PromptCheck(options, reading)
