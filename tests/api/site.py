"""A whole service of the test's own: ``asyncdock serve`` as a process, with its index and its agent."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS = 90.0  # for which a condition is waited for
ENDED = ("finished", "stopped", "failed")


@dataclass(frozen=True)
class Answer:
    status: int
    body: Any
