"""Answers of reasoning_gym's tasks, read without evaluating them. Importing this needs no torch.

Some of its scorers pass the answer, which a policy has written, or a text of the row to ``eval``,
or to sympy's ``parse_expr``, which evaluates too. Here their modules get other functions under
these names. They know literals, integers with operators, and expressions of numbers, symbols and
known functions; what is refused scores as a wrong answer.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import keyword
import operator
import re
from collections.abc import Callable
from functools import cache
from typing import Any

from pipeline.compat.extras import extra
from stages.tasks.answers import in_tags
from stages.tasks.tasks import Completions, json_text, text

MOST_CHARACTERS = 4000  # of a text that is evaluated
KNOWN = re.compile(
    "a?(sin|cos|tan|cot|sec|csc)h?|exp|log|ln|sqrt|cbrt|root|[Aa]bs|sign|erf[ci]?|gamma"
    "|factorial|Rational|Integer|Float|pi|oo|Integral|S[hi]i?|C[hi]i?|[EL]i|fresnel[cs]|expint"
    "|uppergamma|lowergamma"
)
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d[\d_]*\.?\d*|\.\d+)|(?P<name>[A-Za-z_]\w*)|\*\*|//|[-+*/^%(),!])", re.ASCII
)
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
}
MOST_SHIFT = 4096  # bits


class NotPlain(ValueError):
    """A text that is to be evaluated holds something else than its kind of values."""


def literal(text: str) -> Any:
    """Return the value of a literal of Python: numbers, strings, lists and such.

    In place of ``eval``. Raises ValueError, and SyntaxError.
    """
    return ast.literal_eval(_short(text).strip())


def integer(text: str) -> int:
    """Return the value of integers with operators.

    In place of ``eval``. Raises ValueError, and SyntaxError.
    """
    return _integer(ast.parse(_short(text).strip(), mode="eval").body)


def _integer(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _OPERATORS:
            return int(_OPERATORS[type(sign)](_integer(operand)))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            first = _integer(left)
            second = _integer(right)
            if isinstance(sign, ast.LShift) and second > MOST_SHIFT:
                raise NotPlain(f"a shift by {second} bits is too far")
            return int(_OPERATORS[type(sign)](first, second))
    raise NotPlain(f"{ast.unparse(node):.50} is no integer")


def plain_expression(text: str) -> str:
    """Return ``text``, if it is an expression of numbers, operators, symbols and the functions
    :data:`KNOWN`. Raises NotPlain."""
    import sympy

    at = 0
    end = len(_short(text).rstrip())
    while at < end:
        token = _TOKEN.match(text, at)
        if token is None:
            raise NotPlain(f"{text[at : at + 20]!r} is no part of an expression")
        at = token.end()
        name = token["name"]
        if name and len(name) > 1 and not KNOWN.fullmatch(name):
            means_code = hasattr(sympy, name) or hasattr(builtins, name) or keyword.iskeyword(name)
            if means_code or "_" in name:
                raise NotPlain(f"{name!r} is no symbol")
    return text


def _short(text: str) -> str:
    if not isinstance(text, str) or len(text) > MOST_CHARACTERS:
        raise NotPlain(f"is no text of at most {MOST_CHARACTERS} characters")
    return text


def parse_plain(text: str, *arguments: Any, **options: Any) -> Any:
    """Return sympy's ``parse_expr`` of a :func:`plain_expression`."""
    from sympy.parsing.sympy_parser import parse_expr

    return parse_expr(plain_expression(text), *arguments, **options)


class PlainSympy:
    """Replaces the module sympy in a scorer.

    Its ``parse_expr`` is :func:`parse_plain`; all else is sympy's.
    """

    parse_expr = staticmethod(parse_plain)

    def __getattr__(self, name: str) -> Any:
        import sympy

        return getattr(sympy, name)


# runs code of reasoning_gym's own data to make a row; its scorer compares texts
EXECUTES = frozenset({"codeio"})
# Tasks whose scorers evaluate answers. Of each: its module, the name that is replaced in it, the
# replacement.
EVALUATES: dict[str, tuple[str, str, Any]] = {
    "binary_matrix": ("algorithmic.binary_matrix", "eval", literal),
    "number_sorting": ("algorithmic.number_sorting", "eval", literal),
    "spiral_matrix": ("algorithmic.spiral_matrix", "eval", literal),
    "string_insertion": ("algorithmic.string_insertion", "eval", literal),
    "n_queens": ("games.n_queens", "eval", literal),
    "bitwise_arithmetic": ("arithmetic.bitwise_arithmetic", "eval", integer),
    "countdown": ("games.countdown", "parse_expr", parse_plain),
    "puzzle24": ("games.puzzle24", "parse_expr", parse_plain),
    "simple_integration": ("algebra.simple_integration", "sympy", PlainSympy()),
    "intermediate_integration": ("algebra.intermediate_integration", "sympy", PlainSympy()),
    "polynomial_multiplication": ("algebra.polynomial_multiplication", "sp", PlainSympy()),
}


def evaluate_nothing(task: str) -> None:
    """Let the scorer of ``task`` read texts by the functions of this module."""
    if task in EVALUATES:
        module, name, replacement = EVALUATES[task]
        setattr(importlib.import_module(f"reasoning_gym.{module}"), name, replacement)


def reasoning_gym(
    completions: Completions, question: list[Any], answer: list[Any], metadata: list[Any], **_: Any
) -> list[float]:
    """Return the score that the reasoning_gym task of the question gives to the text inside
    ``<answer>`` tags, or to the whole response when it has none."""
    columns = zip(completions, question, answer, metadata, strict=True)
    return [_reasoning_gym(tagged(text(completion)), *row) for completion, *row in columns]


def _reasoning_gym(response: str, question: Any, answer: Any, metadata: Any) -> float:
    about = json.loads(metadata) if isinstance(metadata, str) else metadata
    if not isinstance(about, dict) or "source_dataset" not in about:
        raise TypeError(
            f"metadata: {metadata!r:.100} does not name a task; give the row that "
            f"reasoning_gym made"
        )
    entry = {
        "question": question,
        "answer": None if answer is None else json_text(answer),
        "metadata": about,
    }
    return float(_scorer(about["source_dataset"])(response, entry))


def tagged(response: str) -> str:
    """Return the last ``<answer>…</answer>`` in ``response``, or all of it."""
    part = in_tags(response)
    return (response if part is None else part).strip()


@cache
def _scorer(task: str) -> Callable[..., float]:
    with extra("quickstart"):
        from reasoning_gym import get_score_answer_fn

    evaluate_nothing(task)
    return get_score_answer_fn(task)
