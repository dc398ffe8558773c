"""Errors declare whether another attempt may succeed and what is wrong, and their readers use these
declarations."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestration.state.documents import EndKind
from orchestration.workers.worker import CannotStart, NotStarted, exit_code
from pipeline.data.columns import ColumnError
from pipeline.problems import Problem, ProblemError
from stages.engines.protocols import ModelRefused, RequestRefused
from stages.parallel.layout import LayoutError
from stages.prompts.rows.files import PromptError
from stages.rollout.external_checks import Misfit
from tests.sources import PACKAGES, ROOT, nodes_of, sources

FILES = sources(*PACKAGES)
KINDS = {
    "Fatal": [
        *("AlgorithmError", "BoundBroken", "CannotStart", "CheckpointUnusable", "ColumnError"),
        *(
            "DeviceMissing",
            "DiskRefused",
            "EmptyFile",
            "EngineMissing",
            "EngineUnknown",
            "EnvironmentUnusable",
            "ExtraMissing",
        ),
        *("FilesDamaged", "GateClosed", "ModelNotFound", "NeedsOwnCode", "NeverFits"),
        *(
            "PromptError",
            "RewardError",
            "RewardUnknown",
            "ShardsRefused",
            "StageError",
            "TeacherDenied",
        ),
        *("TeacherRefused", "TokenizerFailed", "TooManyDropped", "TooManySkipped", "WrittenTwice"),
    ],
    "Passing": ["SamplesGone", "StageProcessEnded", "StaleHandle"],
}
# Of Python's own, and of those that are neither: a worker that ends with one of them is started
# again, for some time.
OTHERS = {
    EndKind.FATAL: [FloatingPointError, NotImplementedError],
    EndKind.NOT_STARTED: [NotStarted],
    EndKind.FAILED: [ValueError, OSError, ConnectionError, TimeoutError, MemoryError, RuntimeError],
}


@functools.cache
def classes() -> list[tuple[Path, ast.ClassDef]]:
    """Each class of the packages, with its file."""
    return [
        (path, node) for path in FILES for node in nodes_of(path) if isinstance(node, ast.ClassDef)
    ]


@functools.cache
def bases(node: ast.ClassDef) -> set[str]:
    return {ast.unparse(base).rpartition(".")[2] for base in node.bases}


def classes_below(*roots: str) -> dict[str, str]:
    """Module of each class of ours that has one of ``roots`` as a base, by its name."""
    modules: dict[str, str] = {}
    known = set(roots)
    while True:
        new = {
            node.name: ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for path, node in classes()
            if node.name not in known and bases(node) & known
        }
        if not new:
            return modules
        modules |= new
        known |= new.keys()


def made(module: str, name: str) -> Exception:
    error = getattr(importlib.import_module(module), name)
    return error.__new__(error)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_of_each_error_decides_how_its_worker_exits(kind: str) -> None:
    """A new error joins the list where its kind is meant: a fatal one ends a run at the first
    attempt."""
    below = classes_below(kind)
    assert sorted(below) == KINDS[kind]
    for name, module in below.items():
        end = EndKind.REWIND if name == "SamplesGone" else EndKind.FAILED
        end = EndKind.FATAL if kind == "Fatal" else end
        assert exit_code(made(module, name)) is end, name


def test_other_errors_are_tried_again_but_for_what_cannot_be_computed() -> None:
    for end, errors in OTHERS.items():
        for error in errors:
            assert exit_code(error("again")) is end, error
    assert issubclass(CannotStart, RuntimeError)


def test_no_list_of_errors_stands_for_what_they_should_declare() -> None:
    python = [name for name, value in vars(builtins).items() if isinstance(value, type)]
    ours = classes_below(*python) | dict.fromkeys(["Fatal", "Passing"], "")
    listed = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for path in FILES
        for statement in nodes_of(path)
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for node in ast.walk(statement)
        if isinstance(node, ast.Tuple | ast.List | ast.Set)
        and len({ast.unparse(each).rpartition(".")[2] for each in node.elts} & ours.keys()) > 1
    ]
    assert not listed


def test_problems_stand_beside_the_message() -> None:
    """So that the field of an answer, and its fix, do not depend on how the sentence is written."""
    path = Problem("prompts.path", "a.jsonl", "does not exist", "give another path")
    cases: list[tuple[ProblemError, str, Problem]] = [
        (
            PromptError(path.wrong, path.fix, path.key, path.value),
            'prompts.path = "a.jsonl": does not exist; give another path',
            path,
        ),
        (
            ColumnError("ids", "takes; int64", "convert: it; now"),
            "column 'ids': takes; int64; convert: it; now",
            Problem("columns.ids", None, "takes; int64", "convert: it; now"),
        ),
        (
            Misfit("weights", "has no tensor", "give all"),
            "column 'weights': has no tensor; give all",
            Problem("weights", None, "has no tensor", "give all"),
        ),
        (
            RequestRefused(3, "stop", "stop is ['']", "give a text"),
            "group 3: stop is ['']; give a text",
            Problem("stop", None, "stop is ['']", "give a text"),
        ),
        (
            LayoutError("pp", "2 stages are more than the 1 layers", "use pp <= 1"),
            "pp: 2 stages are more than the 1 layers; use pp <= 1",
            Problem("pp", None, "2 stages are more than the 1 layers", "use pp <= 1"),
        ),
        (
            ModelRefused("tp", "wants 'a: b'; this engine knows 'c'", "use tp = 1"),
            "tp: wants 'a: b'; this engine knows 'c'; use tp = 1",
            Problem("tp", None, "wants 'a: b'; this engine knows 'c'", "use tp = 1"),
        ),
    ]
    for error, message, problem in cases:
        assert (str(error), error.problems) == (message, (problem,))


# Texts of libraries, which have no other form; and lists of names, which compare no message.
OF_LIBRARIES = {
    # torch's of a pickle, transformers' of code of a model's own
    ("stages/model/files.py", "str(error)"),
    # transformers' of a config: its first line
    ("stages/engines/torch/model_check.py", "str(error)"),
    # vLLM passes on no more of its worker's error than a text
    ("stages/engines/vllm/rollout.py", "str(error)"),
    ("orchestration/publishing/hub.py", "str(error)"),  # hf_xet's, which has no status of an answer
    ("stages/prompts/rows/files.py", "str(error)"),  # Python's of a number with too many digits
    ("orchestration/checkpoints/shards.py", "str(error)"),  # torch's of a pickle
    ("pipeline/index/errors.py", "str(error)"),  # Redis's reply, which begins with a code
    ("pipeline/index/link.py", "str(refused)"),  # likewise
    # a panic of the library tokenizers, a class that cannot be imported
    ("stages/model/load.py", "type(error).__name__"),
    # a device's, whose classes are its plugin's
    ("stages/algorithms/named.py", "type(error).__name__"),
}
PARSING = (
    *("partition", "rpartition", "split", "rsplit", "splitlines", "startswith", "endswith", "find"),
    *(
        "index",
        "removeprefix",
        "removesuffix",
        "replace",
        "match",
        "search",
        "fullmatch",
        "findall",
    ),
)


def errors_in(path: Path) -> set[str]:
    """Names that hold an error: of handlers, and of parameters by their types."""
    handlers = {
        node.name for node in nodes_of(path) if isinstance(node, ast.ExceptHandler) and node.name
    }
    arguments = {
        node.arg
        for node in nodes_of(path)
        if isinstance(node, ast.arg)
        and node.annotation is not None
        and ast.unparse(node.annotation).endswith(("Error", "Exception"))
    }
    return handlers | arguments


def parsed_in(path: Path) -> Iterator[tuple[ast.AST, str]]:
    """Yield the places where the words of an error, or the name of its class, decide something."""
    errors = errors_in(path)
    texts = {f"str({name})" for name in errors} | {f"type({name}).__name__" for name in errors}
    for node in nodes_of(path):
        if isinstance(node, ast.Compare):
            read = [node.left, *node.comparators]
            known = any(isinstance(each, ast.Constant | ast.Tuple) for each in read)
            if not known and not isinstance(node.ops[0], ast.In | ast.NotIn):
                continue  # with an error before, not with words
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in PARSING
        ):
            read = [node.func.value, *node.args] if node.args else []
        else:
            continue
        for each in read:
            while isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute):
                each = each.func.value  # of a chain of calls
            text = ast.unparse(each)
            is_of_problem = isinstance(each, ast.Attribute) and each.attr in ("wrong", "fix")
            if text in texts or is_of_problem:
                yield node, text
        if isinstance(node, ast.Call) and [ast.unparse(each) for each in node.args] == ["'; '"]:
            yield node, "'; '"  # between what is wrong and what to do


def test_no_message_and_no_name_of_an_error_is_parsed() -> None:
    """An error carries its problems. Whoever reports them reads those, so that words may change."""
    parsed = {
        (str(path.relative_to(ROOT)), text): (
            f"{path}:{getattr(node, 'lineno', 0)}: {ast.unparse(node)}"
        )
        for path in FILES
        for node, text in parsed_in(path)
    }
    assert not [parsed[place] for place in parsed.keys() - OF_LIBRARIES]
    assert parsed.keys() >= OF_LIBRARIES, "what is allowed is there"
