"""Every call that can execute what it reads, in the packages and in the libraries that score
responses.

A new one fails here, until the table has it, with the reason why what it reads is trusted or cannot
do harm.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.tasks.gym_answers import EVALUATES, EXECUTES
from tests.sources import PACKAGES, ROOT

# Dotted names, as a file imports them; all names of a module where it is given alone.
DANGEROUS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "pickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "joblib",
    "runpy",
    "code",
    "pty",
    "subprocess",
    "asyncio.create_subprocess_exec",
    "asyncio.create_subprocess_shell",
    "importlib.import_module",
    "os.system",
    "os.popen",
    "os.posix_spawn",
    "torch.load",
    "torch.distributed.checkpoint.FileSystemReader",
    "numpy.load",
    "pandas.read_pickle",
    "pandas.eval",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "multiprocessing.connection",
    "sympy.sympify",
    "sympy.parse_expr",
    "sympy.lambdify",
    "sympy.core.sympify.sympify",
    "sympy.parsing.parse_expr",
    "sympy.parsing.sympy_parser.parse_expr",
}
BUILT_IN = {"eval", "exec", "compile", "__import__"}
STARTS = ("os.exec", "os.spawn")  # and what follows


def imported_names(tree: ast.AST) -> dict[str, str]:
    """Return the dotted name that each name imported by ``tree`` stands for."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def dotted(node: ast.expr, names: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        before = dotted(node.value, names)
        return f"{before}.{node.attr}" if before else ""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id if node.id in BUILT_IN else "")
    return ""


def is_dangerous(name: str) -> bool:
    parts = name.split(".")
    return name.startswith(STARTS) or any(
        ".".join(parts[:count]) in DANGEROUS for count in range(1, len(parts) + 1)
    )


def dangerous_calls(source: str) -> Iterator[str]:
    """The dotted names of what is called, or subclassed, in ``source``; ``shell=True`` is one of
    its own."""
    tree = ast.parse(source)
    names = imported_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if is_dangerous(name := dotted(node.func, names)):
                yield name
            if any(each.arg == "shell" and not _is_false(each.value) for each in node.keywords):
                yield "shell=True"
        elif isinstance(node, ast.ClassDef):
            bases = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
            yield from (name for base in bases if is_dangerous(name := dotted(base, names)))


def _is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


@functools.cache
def calls_below(folder: Path, root: Path) -> Counter[tuple[str, str]]:
    """Return how often each file, by its path from ``root``, calls each name."""
    return Counter(
        (path.relative_to(root).as_posix(), name)
        for path in folder.rglob("*.py")
        for name in dangerous_calls(path.read_text(encoding="utf-8"))
    )


OWN_NAME = "the module is named in the source, not by input"
OWN_COMMAND = "Python, with a module of ours and values that are passed as they are; no shell"

# (file, what it calls): how often, and why what it reads is trusted.
ALLOWED: dict[tuple[str, str], tuple[int, str]] = {
    ("pipeline/documents/kinds.py", "importlib.import_module"): (1, OWN_NAME),
    ("pipeline/index/embedded.py", "subprocess.Popen"): (
        1,
        "the server that is installed with the package; no shell",
    ),
    ("stages/device.py", "importlib.import_module"): (5, OWN_NAME),
    ("stages/device_names.py", "subprocess.run"): (
        1,
        "Python, with a program that is in the source",
    ),
    ("stages/engines/vllm/library.py", "importlib.import_module"): (3, OWN_NAME),
    ("stages/user_code.py", "importlib.import_module"): (
        1,
        "code that the recipe's owner names; over REST what the operator lists",
    ),
    ("orchestration/cluster/ray_cluster.py", "subprocess.run"): (1, OWN_COMMAND),
    ("orchestration/cluster/ray_hosts.py", "asyncio.create_subprocess_exec"): (1, OWN_COMMAND),
    ("orchestration/processes/forkserver.py", "subprocess.Popen"): (1, OWN_COMMAND),
    ("orchestration/processes/forkserver.py", "importlib.import_module"): (
        2,
        "what its owner, the parent process, tells it",
    ),
    ("orchestration/calls/engines/process.py", "importlib.import_module"): (1, OWN_NAME),
    ("orchestration/recipe/checks/registry.py", "importlib.import_module"): (1, OWN_NAME),
    ("orchestration/processes/handles.py", "subprocess.run"): (
        1,
        "ps with a number, where there is no /proc",
    ),
    ("orchestration/processes/starter.py", "subprocess.Popen"): (1, OWN_COMMAND),
    ("orchestration/processes/confined.py", "subprocess.Popen"): (1, OWN_COMMAND),
    ("orchestration/checkpoints/shards.py", "pickle.Unpickler"): (
        1,
        "it finds stand-ins of its own alone",
    ),
    ("orchestration/checkpoints/shards.py", "torch.load"): (
        1,
        "with weights_only, and no class beside torch's is allowed",
    ),
    ("orchestration/checkpoints/shards.py", "torch.distributed.checkpoint.FileSystemReader"): (
        1,
        "its metadata is read by the unpickler above, and torch reads the shards with weights_only",
    ),
    ("orchestration/sandbox/sandbox.py", "subprocess.run"): (1, OWN_COMMAND),
    ("orchestration/sweep/local.py", "asyncio.create_subprocess_exec"): (1, OWN_COMMAND),
    ("stages/rewards/programs.py", "subprocess.run"): (
        1,
        "Python, with a program that a model wrote: called in a sandbox alone",
    ),
    ("stages/tasks/gym_answers.py", "importlib.import_module"): (1, OWN_NAME),
    ("stages/tasks/gym_answers.py", "sympy.parsing.sympy_parser.parse_expr"): (
        1,
        "of a text whose tokens are numbers, operators, symbols and known functions",
    ),
    ("orchestration/run/execution.py", "importlib.import_module"): (1, OWN_NAME),
    ("api/client/run.py", "subprocess.Popen"): (1, OWN_COMMAND),
    ("api/client/__init__.py", "importlib.import_module"): (1, OWN_NAME),
    ("api/telemetry/trackers.py", "importlib.import_module"): (1, OWN_NAME),
}
LIBRARIES = ("reasoning_gym", "math_verify", "latex2sympy2_extended")  # that score responses


def test_each_call_that_may_execute_what_it_reads_has_its_reason() -> None:
    counts = Counter[tuple[str, str]]()
    for package in PACKAGES:
        counts += calls_below(ROOT / package, ROOT)
    assert counts == {call: count for call, (count, _) in ALLOWED.items()}


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_that_scores_responses_evaluates_and_so_it_runs_in_the_sandbox(
    library: str,
) -> None:
    spec = importlib.util.find_spec(library)
    if spec is None or spec.origin is None:
        pytest.skip(f"{library} is not installed")
    folder = Path(spec.origin).parent
    assert calls_below(folder, folder), "none any more: its rewards may be called in the worker"


# Files of reasoning_gym that evaluate texts of their own data, to make a row. Their scorers compare
# texts.
MAKES_ROWS = {
    "arithmetic/basic_arithmetic.py",
    "arithmetic/gsm_symbolic/generators_00_49.py",
    "arithmetic/gsm_symbolic/generators_50_99.py",
}


def test_no_scorer_of_reasoning_gym_evaluates_that_gets_no_other_function_here() -> None:
    folder = Path(pytest.importorskip("reasoning_gym").__file__).parent
    scorers = {f"{module.replace('.', '/')}.py" for module, _, _ in EVALUATES.values()}
    executing = {f"code/{task}.py" for task in EXECUTES}
    assert {file for file, _ in calls_below(folder, folder)} == scorers | MAKES_ROWS | executing


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("eval('1')", ["eval"]),
        ("from os import system as run\nrun('id')", ["os.system"]),
        ("import torch as t\nt.load('x', weights_only=True)", ["torch.load"]),
        (
            "import torch.distributed.checkpoint as dcp\nclass R(dcp.FileSystemReader): ...",
            ["torch.distributed.checkpoint.FileSystemReader"],
        ),
        ("import subprocess\nsubprocess.run('id', shell=True)", ["subprocess.run", "shell=True"]),
        ("class P(Popen[bytes]): ...\nfrom subprocess import Popen", ["subprocess.Popen"]),
        ("import os\nos.execv('/bin/sh', [])", ["os.execv"]),
        ("model.eval()\nre.compile('a')\njson.loads('1')\nself.load()", []),
    ],
)
def test_what_is_found(source: str, found: list[str]) -> None:
    assert sorted(dangerous_calls(source)) == sorted(found)
