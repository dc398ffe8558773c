"""The words ``a.key=value`` and ``--key value`` of a shell script's commands, with the variables
that it assigns.

Nothing is executed: what a command would print, and what a branch decides, stays unknown. Of
several assignments the last one before a word counts.
"""

from __future__ import annotations

import ast
import io
import operator
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping

OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w.]*\.[\w.]+)=(.*)", re.DOTALL)
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
FLAG = re.compile(r"--([A-Za-z][\w-]*)(?:=(.*))?", re.DOTALL)
ENDS = ";&|<>\n"
DECLARATIONS = ("export", "local", "declare", "readonly", "do", "then", "else")
VARIABLE = re.compile(r"\$\{(\w+)(?::?[-=]([^${}]*))?\}|\$([A-Za-z_]\w*)")
UNKNOWN = re.compile(r"\$[A-Za-z_{(]")  # what is left of one, or of a command
ARITHMETIC = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")
OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def overrides(text: str) -> Iterator[tuple[str, str]]:
    """Yield each ``a.key`` of the script ``text`` with the text of its value; ``$name`` stays where
    it is not known. Raises ValueError for a quotation without an end."""
    for word in words(text):
        if match := OVERRIDE.fullmatch(word):
            yield match[1], match[2]


def flags(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each ``--key`` with its words: none for a switch. Raises ValueError as above."""
    name, values = "", list[str]()
    for word in [*words(text), ";"]:
        match = FLAG.fullmatch(word)
        if match or (word and word[0] in ENDS):
            if name:
                yield name, values
            name = match[1].replace("-", "_") if match else ""
            values = [match[2]] if match and match[2] is not None else []
        else:
            values.append(word)


def words(text: str) -> Iterator[str]:
    """Yield the words of the script's commands, and what ends or redirects one."""
    text = text.rstrip("\\ \n").replace("\\\n", " ") + "\n"
    # one word, whatever spaces it has
    text = ARITHMETIC.sub(lambda match: re.sub(r"\s", "", match[0]), text)
    lexer = shlex.shlex(_Lines(text), posix=True, punctuation_chars=ENDS)
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    variables = {"HOME": os.path.expanduser("~")}
    assigns = True  # so far in this command
    for word in lexer:
        assignment = ASSIGNMENT.fullmatch(word) if assigns else None
        if assignment:
            value = expanded(assignment[2], variables)
            if "$" in value:
                variables.pop(assignment[1], None)
            else:
                variables[assignment[1]] = value
        elif word:
            yield expanded(word, variables)
            assigns = word[0] in ENDS or word in DECLARATIONS


class _Lines(io.StringIO):
    """A text of which a comment, which shlex reads as a line, leaves the end of the line."""

    def readline(self, size: int | None = -1, /) -> str:  # type: ignore[override]
        line = super().readline(-1 if size is None else size)
        if line.endswith("\n"):
            self.seek(self.tell() - 1)
        return line


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Return ``text`` with the ``variables`` that are known, none of which holds a ``$``.

    >>> expanded("${root:-/data}/$name $((2*n+1)) $other", {"name": "a", "n": "3"})
    '/data/a 7 $other'
    """

    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        return variables.get(name) or (match[0] if default is None else default)

    def number(match: re.Match[str]) -> str:
        try:
            return str(_integer(ast.parse(match[1], mode="eval").body, variables))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            return match[0]

    before = None
    while text != before:
        before, text = text, ARITHMETIC.sub(number, VARIABLE.sub(value, text))
    return text


def _integer(node: ast.expr, variables: Mapping[str, str]) -> int:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.Name(id=name) if name in variables:
            return int(variables[name])
        case ast.BinOp(left, operation, right) if type(operation) in OPERATIONS:
            compute = OPERATIONS[type(operation)]
            return compute(_integer(left, variables), _integer(right, variables))
    raise ValueError(ast.unparse(node))
