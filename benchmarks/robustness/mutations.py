"""One-line changes of the core that no test notices.

    PYTHONPATH=$PWD python -m benchmarks.robustness.mutations [MODULE ...] [--sample 12] [--seed 0]
                                                              [--seconds N] [--json FILE]

A mutation replaces an operator, a comparison, a condition or a number of one line, or removes a
call. ``--sample`` of each module are drawn by ``--seed``, made one by one in a copy of the tree,
and the tests of TESTS are run until one fails. A mutation that passes them all survives. No tool
for Python changes Lua, and none forks its tests from a process that has imported torch, without
which most of the time would go into imports.

With ``--json FILE`` results are kept, and a later call with the same file goes on; ``--seconds``
ends a call early, and ``--sample 0`` prints what the file has.
"""

from __future__ import annotations

import ast
import importlib
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from benchmarks import harness  # which imports nothing that is mutated

ROOT = Path(__file__).resolve().parents[2]
PRELOAD = (
    "torch.distributed.checkpoint",
    "torch.nested",
    "tensordict",
    "transformers",
    "pytest",
    "hypothesis",
)
PRELOAD += (
    "redis.asyncio",
    "aiohttp.test_utils",
    "pydantic",
    "structlog",
    "typer.testing",
    "transformers.models.llama",
)
# a mutation that takes so many times as long as the tests without one hangs
LEAST_SECONDS = 30.0
SLOWER = 6

INDEX = (
    "index/test_training_calls.py",
    "index/test_index_calls.py",
    "index/test_leases.py",
    "index/test_park.py",
)
INDEX += ("index/test_pass_rates.py", "warehouse/test_dock.py", "index/test_stateful.py")
INDEX = tuple(f"pipeline/{name}" for name in INDEX)
ALGORITHMS = ("credit", "masks", "kl", "grpo", "policy_gradient", "interface")
ALGORITHMS = tuple(f"stages/algorithms/test_{name}.py" for name in ALGORITHMS)
PPO = ("stages/algorithms/test_ppo.py", "stages/algorithms/test_value_rates.py")
TRAIN = (
    "stages/engines/torch/test_train.py",
    "stages/training/test_masked_rows.py",
    "orchestration/recipe/test_memory.py",
)
WIRE = tuple(
    f"pipeline/wire/test_{name}.py"
    for name in ("refusals", "handshake", "reads", "failures", "fuzz")
)
ACCESS = tuple(f"api/server/access/test_{name}.py" for name in ("access", "submission_policy"))
TESTS: dict[str, tuple[str, ...]] = {
    "pipeline/schedule/staleness.py": (
        "pipeline/test_staleness.py",
        "orchestration/recipe/test_bounds.py",
    ),
    "pipeline/schedule/pacing.py": ("pipeline/test_pacing.py",),
    "stages/prompts/gate.py": ("stages/test_gate.py", "pipeline/test_pacing.py"),
    **{
        f"pipeline/index/lua/{name}.lua": INDEX
        for name in ("claims", "training", "groups", "runs", "ranges", "arrays", "blocks")
    },
    "pipeline/index/lua/warehouses.lua": (*INDEX[:2], "pipeline/warehouse/test_nodes.py"),
    "pipeline/index/lua/prompts.lua": (
        "pipeline/index/test_pass_rates.py",
        "stages/prompts/test_external.py",
    ),
    "pipeline/index/claims.py": INDEX[:-1],
    "pipeline/index/client.py": (*INDEX[:-1], "pipeline/warehouse/test_nodes.py"),
    "pipeline/index/training.py": INDEX[:-1],
    "pipeline/index/address.py": ("pipeline/index/test_embedded_address.py",),
    "pipeline/warehouse/requests.py": WIRE,
    "pipeline/wire/stream.py": WIRE,
    "stages/algorithms/batch.py": (*ALGORITHMS, *PPO, "stages/training/test_masked_rows.py"),
    "stages/algorithms/interface.py": (*ALGORITHMS, "stages/training/test_step_metrics.py"),
    "stages/algorithms/named.py": (*ALGORITHMS, "stages/training/test_step_metrics.py"),
    "stages/algorithms/policy_gradient/base.py": (
        *ALGORITHMS,
        "stages/training/test_masked_rows.py",
    ),
    "stages/algorithms/policy_gradient/grpo.py": ALGORITHMS,
    "stages/algorithms/policy_gradient/ppo.py": (*PPO, *ALGORITHMS),
    "stages/algorithms/policy_gradient/reinforce_pp.py": ALGORITHMS,
    "stages/algorithms/policy_gradient/distillation.py": (
        *ALGORITHMS,
        "orchestration/run/test_distillation.py",
    ),
    "stages/algorithms/supervised/dpo.py": ("stages/algorithms/test_supervised.py",),
    "stages/algorithms/supervised/sft.py": ("stages/algorithms/test_supervised.py",),
    "stages/engines/torch/model/packing.py": ("stages/engines/torch/test_attention.py", *TRAIN),
    "stages/engines/plans.py": (
        "stages/engines/test_plans.py",
        "stages/engines/test_dealing.py",
        *TRAIN,
    ),
    "stages/resharding/plan.py": ("stages/resharding/test_plan.py",),
    "stages/parallel/placement.py": (
        "stages/parallel/test_placement.py",
        "stages/resharding/test_plan.py",
    ),
    "orchestration/checkpoints/checkpoint.py": (
        *(
            f"orchestration/run/test_{name}.py"
            for name in ("power_loss", "checkpoints", "checkpoint_store")
        ),
    ),
    "api/server/access/limits.py": ACCESS,
    "api/server/access/tokens.py": ACCESS,
    "api/server/access/sessions.py": (
        "api/server/access/test_connections.py",
        *ACCESS,
        "api/test_values.py",
    ),
    "api/server/access/submission_policy.py": ACCESS[::-1],
}

AREAS = {
    "gate": (
        "stages/prompts/gate.py",
        "pipeline/schedule/pacing.py",
        "pipeline/schedule/staleness.py",
    ),
    "claims": (
        "pipeline/index/claims.py",
        "pipeline/index/lua/claims.lua",
        "pipeline/index/lua/groups.lua",
    ),
    "ledger": (
        "pipeline/index/client.py",
        "pipeline/index/training.py",
        *(f"pipeline/index/lua/{name}.lua" for name in ("training", "runs", "prompts")),
    ),
    "room": tuple(
        f"pipeline/index/lua/{name}.lua" for name in ("arrays", "blocks", "ranges", "warehouses")
    ),
    "wire": ("pipeline/index/address.py", "pipeline/wire/", "pipeline/warehouse/requests.py"),
    "credit and loss": ("stages/algorithms/",),
    "packing": ("stages/engines/",),
    "resharding": ("stages/resharding/", "stages/parallel/"),
    "checkpoint": ("orchestration/checkpoints/checkpoint.py",),
    "access": ("api/server/access/",),
}

SWAPS = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "+": "-",
    "-": "+",
    "*": "/",
    "/": "*",
}
SWAPS |= {
    "//": "*",
    "%": "*",
    "and": "or",
    "or": "and",
    "is": "is not",
    "is not": "is",
    "in": "not in",
    "not in": "in",
}
SWAPS |= {"|": "&", "&": "|", "min": "max", "max": "min", "True": "False", "False": "True"}


class Mutation(NamedTuple):
    """``text[begin:end]`` of a file is replaced by ``new``."""

    begin: int
    end: int
    new: str


@dataclass(frozen=True)
class Result:
    module: str
    line: int
    before: str
    after: str
    survived: bool
    seconds: float


def of_python(text: str) -> Iterator[Mutation]:
    """The mutations of a Python module.

    Annotations and the module's own statements but classes are left as they are.
    """
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    data = text.encode()

    def at(line: int, column: int) -> int:
        return len(data[: starts[line - 1] + column].decode())

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)

    def between(left: ast.expr, right: ast.expr) -> Iterator[Mutation]:
        begin = span(left)[1]
        end = span(right)[0]
        found = re.search(
            r"is not|not "
            r"in|[a-z]+|[<>=!]=|//|\*\*|<<|>>|[-+*/%<>|&]",
            text[begin:end],
        )
        if found and found[0] in SWAPS:
            yield Mutation(begin + found.start(), begin + found.end(), SWAPS[found[0]])

    functions = (
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    for node in {id(n): n for f in functions for part in f.body for n in ast.walk(part)}.values():
        match node:
            case ast.Compare(left=left, comparators=others):
                for a, b in zip([left, *others], others, strict=False):
                    yield from between(a, b)
            case ast.BinOp(left=left, right=right):
                yield from between(left, right)
            case ast.BoolOp(values=values):
                for a, b in pairwise(values):
                    yield from between(a, b)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield Mutation(span(node)[0], span(operand)[0], "")
            case ast.Constant(value=bool(value)):
                yield Mutation(*span(node), str(not value))
            case ast.Constant(value=int(value) | float(value)):
                yield Mutation(*span(node), str(value + 1))
            case ast.Name(id="min" | "max" as name):
                yield Mutation(*span(node), SWAPS[name])
            case ast.Expr(value=ast.Call() | ast.Await()):
                yield Mutation(*span(node), "pass")
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            yield Mutation(*span(node.test), "False")
            if not isinstance(node, ast.While):
                yield Mutation(*span(node.test), "True")


def of_lua(text: str) -> Iterator[Mutation]:
    """The mutations of a Lua file, outside of comments and texts."""
    hidden = re.sub(r"--[^\n]*|'(?:\\.|[^'\\\n])*'", lambda found: "\0" * len(found[0]), text)
    lua = {**SWAPS, "==": "~=", "~=": "==", "true": "false", "false": "true"}
    operators = r"[<>=~]=|[-+*/%<>](?!-)|\b(?:and|or|min|max|true|false)\b"
    for found in re.finditer(operators, hidden):
        if found[0] in lua and not (
            found[0] == "-" and re.search(r"[(,{=]\s*$", hidden[: found.start()])
        ):
            yield Mutation(*found.span(), lua[found[0]])
    for found in re.finditer(r"(?<![\w.])\d+(?![\w.])", hidden):
        yield Mutation(*found.span(), str(int(found[0]) + 1))
    for found in re.finditer(r"\bnot ", hidden):
        yield Mutation(*found.span(), "")
    for found in re.finditer(r"\b(?:if|elseif|while) (.+?) (?:then|do)\b", hidden):
        yield Mutation(*found.span(1), "false")
        if not found[0].startswith("while"):
            yield Mutation(*found.span(1), "true")
    for found in re.finditer(r"^ +((?:[a-z_]+)\(.*\))$", hidden, re.M):
        if found[1].count("(") == found[1].count(")"):
            yield Mutation(*found.span(1), "")


def drawn(module: str, text: str, sample: int, seed: int) -> list[Mutation]:
    """``sample`` of the mutations of a module."""
    if module.endswith(".lua"):
        made = sorted(set(of_lua(text)))
    else:
        made = [
            mutation
            for mutation in sorted(set(of_python(text)))
            if compiles(changed(text, mutation))
        ]
    return random.Random(f"{seed} {module}").sample(made, min(sample, len(made)))


def changed(text: str, mutation: Mutation) -> str:
    return text[: mutation.begin] + mutation.new + text[mutation.end :]


def compiles(text: str) -> bool:
    try:
        compile(text, "mutation", "exec")
    except SyntaxError:
        return False
    return True


def passes(tree: Path, tests: tuple[str, ...], seconds: float) -> bool:
    """Whether ``tests`` pass in ``tree`` within ``seconds``, in a fork of this process."""
    if not (child := os.fork()):
        os.setsid()
        log = os.open(tree / "tests.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(tree)
        sys.path.insert(0, str(tree))
        import pytest

        there = [f"tests/{name}" for name in tests if (tree / "tests" / name).exists()]
        rest = [
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "-k",
            "not redis and not vllm",
        ]
        os._exit(int(pytest.main([*there, *rest])))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def tried(
    tree: Path,
    module: str,
    sample: int,
    seed: int,
    known: list[Result],
    usual: dict[tuple[str, ...], float],
) -> Iterator[Result]:
    """Make the mutations of ``module`` in ``tree`` that are not ``known``, one by one.

    ``usual``: seconds of tests that have passed without a mutation.
    """
    path = tree / module
    tests = TESTS[module]
    text = path.read_text()
    lines = {
        (result.line, result.before, result.after) for result in known if result.module == module
    }
    for mutation in drawn(module, text, sample, seed):
        number = text.count("\n", 0, mutation.begin)
        mutated = changed(text, mutation)
        before, after = (source.splitlines()[number].strip() for source in (text, mutated))
        if (number + 1, before, after) in lines:
            continue
        began = time.monotonic()
        if tests not in usual:
            if not passes(tree, tests, 600):
                raise SystemExit(
                    f"{module}: its tests fail without a "
                    f"mutation:\n{(tree / 'tests.log').read_text()[-3000:]}"
                )
            usual[tests], began = time.monotonic() - began, time.monotonic()
        path.write_text(mutated)
        survived = passes(tree, tests, max(LEAST_SECONDS, SLOWER * usual[tests]))
        path.write_text(text)
        yield Result(module, number + 1, before, after, survived, time.monotonic() - began)


def shown(results: list[Result]) -> str:
    """Tables by module and by area, and the mutations that survived."""
    lines = [f"{'module':50} tried  survived"]
    modules = sorted({result.module for result in results})
    for name, parts in [
        *((module, (module,)) for module in modules),
        *AREAS.items(),
        ("all", ("",)),
    ]:
        survived = [result.survived for result in results if result.module.startswith(parts)]
        if survived:
            lines.append(f"{name:50} {len(survived):5}  {sum(survived):8}")
    for result in results:
        if result.survived:
            lines.append(
                f"\n{result.module}:{result.line}\n  - {result.before}\n  + {result.after}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="default: all of TESTS")
    parser.add_argument("--sample", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    results = [Result(**row) for row in (options.json and options.json.read()) or ()]
    usual = dict[tuple[str, ...], float]()
    end = time.monotonic() + options.seconds
    os.environ["PYTHONDONTWRITEBYTECODE"], sys.dont_write_bytecode = "1", True
    for name in PRELOAD:
        importlib.import_module(name)
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != ROOT]
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(
            ROOT, tree, ignore=shutil.ignore_patterns(".*", "__pycache__", "node_modules", "runs")
        )
        os.environ["PYTHONPATH"] = str(tree)
        for module in options.modules or TESTS:
            for result in tried(tree, module, options.sample, options.seed, results, usual):
                results.append(result)
                print(
                    "survived" if result.survived else "killed  ",
                    f"{module}:{result.line} {result.after}",
                    flush=True,
                )
                if options.json:
                    options.json.write([asdict(each) for each in results])
                if time.monotonic() > end:
                    break
            if time.monotonic() > end:
                break
    print(shown(results))


if __name__ == "__main__":
    main()
