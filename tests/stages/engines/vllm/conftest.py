"""These tests need vLLM, and are collected only where it is: in the environment that `make test-vllm` builds."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
