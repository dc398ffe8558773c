"""Tests of the device code on the emulated device of this folder.

A process either has the device or not: torch knows one accelerator. So the tests in ``on_device``
run in a process of their own, which ``test_on_the_device.py`` starts:

    env $(python -m tests.accelerator.build) python -m pytest tests/accelerator/on_device      by hand
"""

from __future__ import annotations

import os

collect_ignore = [] if "EMULATED_NPU_LIBRARY" in os.environ else ["on_device"]
