"""Loaded files hold data alone: no call may run code of a model's folder, or unpickle what others
have written."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stages.engines.vllm.library import engine_arguments
from tests.sources import PACKAGES, ROOT, nodes_of, sources

LOADERS = {"from_pretrained", "from_config"}
# Calls that have no such argument, and what they read.
WITHOUT = {
    ("stages/model/files.py", "kind.from_pretrained"): "a class of transformers, and no folder: "
    "tensors are given",
    ("stages/model/files.py", "GenerationConfig.from_pretrained"): "JSON alone",
}
# Reads of pickles: none but these.
PICKLES = {
    ("orchestration/checkpoints/shards.py", "torch.load"): "with weights_only",
    ("orchestration/checkpoints/shards.py", "pickle.Unpickler"): "makes stand-ins of its own alone",
}
UNPICKLING = (
    "pickle",
    "torch.load",
    "joblib",
    "dill",
    "cloudpickle",
    "shelve",
    "marshal",
    "numpy.load",
    "np.load",
)


@dataclass
class EngineArguments:
    """Stands for vLLM's."""

    trust_remote_code: Any = None
    additional_config: Any = None


@functools.cache
def calls(path: Path) -> tuple[tuple[str, ast.Call | ast.ClassDef], ...]:
    """Dotted names that ``path`` calls or derives classes from, with their nodes."""
    named_nodes = list[tuple[str, ast.Call | ast.ClassDef]]()
    for node in nodes_of(path):
        if isinstance(node, ast.Call):
            named_nodes.append((ast.unparse(node.func), node))
        if isinstance(node, ast.ClassDef):
            named_nodes += [(ast.unparse(base), node) for base in node.bases]
    return tuple(named_nodes)


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_models_are_loaded_without_code_of_their_folders() -> None:
    violations = []
    seen = set()
    for path in sources(*PACKAGES):
        for name, node in calls(path):
            if name.rpartition(".")[2] not in LOADERS or not isinstance(node, ast.Call):
                continue
            seen.add((named(path), name))
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if options.get("trust_remote_code") != "False" and (named(path), name) not in WITHOUT:
                violations.append(
                    f"{named(path)}, line {node.lineno}: {name} without trust_remote_code=False"
                )
    assert not violations, violations
    assert WITHOUT.keys() <= seen, "an exception for nothing"
    with pytest.raises(
        ValueError,
        match=r"rollout\.vllm\.trust_remote_code = True: is set by this "
        r"engine",
    ):
        engine_arguments(
            SimpleNamespace(AsyncEngineArgs=EngineArguments), {}, {"trust_remote_code": True}
        )
    assert (
        engine_arguments(SimpleNamespace(AsyncEngineArgs=EngineArguments), {}, {}).trust_remote_code
        is False
    )


def test_nothing_unpickles_what_a_file_says() -> None:
    violations = []
    seen = set()
    for path in sources(*PACKAGES):
        for name, node in calls(path):
            if not any(name == each or name.startswith(f"{each}.") for each in UNPICKLING):
                continue
            seen.add((named(path), name))
            safe = isinstance(node, ast.ClassDef) or any(
                keyword.arg == "weights_only" and ast.unparse(keyword.value) == "True"
                for keyword in node.keywords
            )
            if not safe or (named(path), name) not in PICKLES:
                violations.append(f"{named(path)}, line {node.lineno}: {name}")
    assert not violations, violations
    assert PICKLES.keys() == seen, "an exception for nothing"


def test_torchs_own_reader_of_checkpoints_is_not_used() -> None:
    """It unpickles .metadata, and its planner what that calls bytes."""
    for path in sources(*PACKAGES):
        if named(path) == "orchestration/checkpoints/shards.py":
            continue
        names = {name for name, _ in calls(path)}
        assert not names & {"dcp.load", "dcp.FileSystemReader", "dcp.DefaultLoadPlanner"}, named(
            path
        )
