"""A reward whose import does not end, as code can have it that holds the interpreter."""

import os
import re
from pathlib import Path

if began := os.environ.get("ASYNCDOCK_TEST_BEGAN"):
    Path(began).touch()
    re.fullmatch(r"(a|aa)+b", "a" * 200)


def reward(completions: list[str], **_: object) -> list[float]:
    return [0.0 for _ in completions]
