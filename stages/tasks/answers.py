"""Numbers in texts: the one that a response answers with. Importing this needs no torch.

text ─▶ answer_part: the last \\boxed{…}, or <answer>…</answer>, or what follows the last ####; else all of it
      ─▶ plain: one spelling of digits, signs, separators, fractions, LaTeX ─▶ the last number
                 └ an expression that is left over (a root, a sum in a box) ─▶ math-verify, where it is installed
Values are exact fractions, so that 0.5, 1/2 and 2/4 are equal.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import math
import re
import threading
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from pipeline.compat.extras import ExtraMissing, extra

# of a number that is read; longer ones equal nothing
MOST_DIGITS = 1000
MOST_EXPONENT = 400
MOST_CHARACTERS = 300  # of an expression that math-verify reads
SECONDS = 5.0  # that it may take
MOST_POWER = 1000  # exponents in such an expression, multiplied
NEAR = 1e-9  # relative: two numbers of which one is a float, or a root, are equal

_MINUS = "\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d"
_CHARACTERS = {ord(minus): "-" for minus in _MINUS} | {
    **dict.fromkeys(map(ord, "\u2044\u2215\uff0f"), "/"),
    **dict.fromkeys(map(ord, "\u00d7\u22c5\u00b7"), "*"),
    **dict.fromkeys(map(ord, "\u00a0\u2007\u2009\u202f"), "\u2009"),  # thin: may separate thousands
    **dict.fromkeys(map(ord, "\u2018\u2019"), "'"),
    ord("\u2026"): " ",
    ord("\u066a"): "%",
    ord("\u066b"): ".",
    ord("\u066c"): ",",
    ord("\uff0c"): ",",
    ord("\uff0e"): ".",
    ord("\uff0b"): "+",
    ord("\uff05"): "%",
}
_POWERS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_CURRENCY = "$€£¥₹₽₩₺"
_GROUP = r"(?:\d{1,3}(?:,\d{3})+|\d{1,2}(?:,\d{2})+,\d{3}|\d{1,3}(?:[\u2009'_]\d{3})+)"
_DIGITS = (
    rf"(?:{_GROUP}(?:\.\d+)?|\d{{1,3}}(?:\.\d{{3}}){{2,}}(?:,\d+)?"
    r"|\d{1,3}\.\d{3},\d{1,2}|\d+(?:\.\d+)?|\.\d+)"
)
_SIGN = r"(?:(?<![\w.)\]}%])[-+]|(?<!\d[ ])\b(?:minus|negative)[ ])"
NUMBER = re.compile(
    rf"""(?P<sign>{_SIGN})?(?<![\w.])(?:(?P<whole>\d+)[ ](?=\d+/\d))?(?P<digits>{_DIGITS})(?![\d])
    (?:[eE](?P<exponent>[-+]?\d+)|[ ]?[*x][ ]?10(?:\^|\*\*)(?P<power>[-+]?\d+)
      |(?:\^|\*\*)(?P<raised>[-+]?\d+))?
    (?:[ ]?/[ ]?(?P<below>[-+]?{_DIGITS})(?![\d/]))?(?P<percent>[ ]?%|[ ]percent\b)?""",
    re.VERBOSE | re.IGNORECASE,
)
_SLASHES = re.compile(r"(?<!\d)\d+(?:/\d+){2,}")  # a date, not a fraction
_COMMAND = re.compile(r"\\[a-zA-Z]+|√|π")


@dataclass(frozen=True)
class Number:
    """A number in a text. ``value`` is None where it cannot be held. ``text``: its characters,
    without separators. ``is_near``: the value is rounded."""

    value: Fraction | None
    text: str = ""
    is_percent: bool = False
    is_near: bool = False

    def equals(self, other: Number) -> bool:
        """Return whether both say the same.

        A percentage is its number of hundredths as well as its value: 50 % is 50 and 0.5.
        """
        near = self.is_near or other.is_near
        if self.is_percent == other.is_percent:
            return _equal(self.value, other.value, near)
        percent, plain = (self, other) if self.is_percent else (other, self)
        hundredth = None if percent.value is None else percent.value / 100
        return _equal(percent.value, plain.value, near) or _equal(hundredth, plain.value, near)


def number_of(answer: Any) -> list[Number]:
    """Return the numbers that a row's answer, a JSON value, allows: one number, or each number of a
    list.

    Raises TypeError for another type.
    """
    if isinstance(answer, list):
        return [number for item in answer for number in number_of(item)]
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise TypeError(
            f"answer: {answer!r:.100} is a {type(answer).__name__}; a number, a text or a list of "
            f"them is wanted"
        )
    if isinstance(answer, str):
        number = read_number(answer)
        return [] if number is None else [number]
    if isinstance(answer, float):
        value = Fraction(repr(answer)) if math.isfinite(answer) else None
        return [Number(value, str(answer), is_near=True)]
    return [Number(Fraction(answer), str(answer) if abs(answer) < 10**MOST_DIGITS else "")]


def is_computed(text: str) -> bool:
    """Return whether ``text`` answers with an expression, which :func:`read_number` has math-verify
    compute where it is installed (:func:`computes`)."""
    part, is_marked = answer_part(text)
    return _is_expression(plain_text(part), is_marked)


def computes() -> bool:
    """Return whether math-verify is installed, which computes expressions. Does not import it."""
    return importlib.util.find_spec("math_verify") is not None


def read_number(text: str) -> Number | None:
    """Return the number that ``text`` answers with; None where there is none."""
    part, is_marked = answer_part(text)
    plain = plain_text(part)
    if _is_expression(plain, is_marked):
        evaluated = _evaluated(part)
        if evaluated is not None:
            return evaluated
    number = last_number(plain)
    if number is None and is_marked:  # nothing in it: "#### see above"
        return last_number(plain_text(text))
    return number


def last_number(plain: str) -> Number | None:
    """Return the last number of a ``plain`` text."""
    if re.fullmatch(r"[-+]?\d{1,3}( \d{3})+([.,]\d+)?", plain):
        plain = plain.replace(" ", "").replace(",", ".")
    if re.fullmatch(r"\D*\d+,\d{1,2}\D*", plain):  # the only number, with a decimal comma
        plain = plain.replace(",", ".")
    without_roots = re.sub(r"(\\sqrt|√) ?(\[[^]]*\])?(\{[^{}]*\}|\([^()]*\)|\d+)?", "?", plain)
    dates = [match.span() for match in _SLASHES.finditer(without_roots)]
    number = None
    for match in NUMBER.finditer(without_roots):
        inside = next((end for begin, end in dates if begin <= match.start("digits") < end), None)
        if inside is None:
            number = _number(match)
        else:
            last = without_roots[:inside].rpartition("/")[2]
            number = Number(Fraction(last) if len(last) <= MOST_DIGITS else None, last)
    return number


def answer_part(text: str) -> tuple[str, bool]:
    """Return the marked answer in ``text``, and whether there is one: the last box, tag, or line
    after ####; else all of it."""
    for mark in (r"\boxed", r"\fbox"):
        begin = text.rfind(mark)
        content = _braced(text, begin + len(mark)) if begin >= 0 else None
        if content is not None:
            return content, True
    tagged = in_tags(text)
    if tagged is not None:
        return tagged, True
    _, mark, after = text.rpartition("####")
    if mark and after.strip():
        return after.strip().splitlines()[0], True
    return text, False


def in_tags(text: str) -> str | None:
    """Return the text in the last ``<answer>…</answer>`` of ``text``; None where there is none."""
    end = text.rfind("</answer>")
    begin = text.rfind("<answer>", 0, max(0, end))
    return text[begin + len("<answer>") : end] if begin >= 0 else None


def plain_text(text: str) -> str:
    """Return ``text`` with one spelling of what numbers are written with."""
    text = _superscripts(text.translate(_CHARACTERS))
    text = "".join(_digit(character) for character in text)
    text = re.sub(r"\.{2,}", " ", text)
    text = re.sub(r"\{,\}", ",", text)
    text = re.sub(r"(?<=\d)\\[,;:! ](?=\d{3})", "\u2009", text)
    text = re.sub(r"\\[,;:! ]|~", " ", text)
    text = re.sub(r"\\([$%#&])", r"\1", text)
    text = re.sub(r"\\(?:left|right|displaystyle|limits)\b|\\[()\[\]]", " ", text)
    text = re.sub(r"\\(?:text|mathrm|mathbf|textbf|mbox|operatorname)\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\\(?:times|cdot)\b ?", "*", text)
    text = re.sub(r"(?<=\d)\s*(?=\\[dtc]?frac)", " ", text)  # a mixed number
    text = re.sub(r"\\[dtc]?frac ?(\d)(\d)", r"\1/\2", text)
    text = re.sub(r"\\[dtc]?frac ?\{ ?([-+]?[\d.,]+) ?\} ?\{ ?([-+]?[\d.,]+) ?\}", r"\1/\2", text)
    text = re.sub(r"\\[dtc]?frac ?(\d)\{ ?(\d+) ?\}", r"\1/\2", text)
    text = re.sub(r"\\[dtc]?frac ?\{ ?(\d+) ?\} ?(\d)", r"\1/\2", text)
    text = re.sub(r"\^ ?\{ ?([-+]?\d+) ?\}", r"^\1", text)
    text = re.sub(rf"([-+]) ?[{_CURRENCY}] ?(?=[\d.])", r"\1", text)
    text = re.sub(rf"[{_CURRENCY}]|\*\*(?!\d)|(?<![\d*])\*\*|__|`", " ", text)
    text = re.sub(r"(?<!\S)([-+])\((?=\d)|(?<=[=:(])\s?([-+])\((?=\d)", r"\1\2", text)  # -(5)
    return text.strip()


def _number(match: re.Match[str]) -> Number:
    digits = match["digits"]
    text = (
        "-" if (match["sign"] or "")[:1].lower() in ("-", "m", "n") and match["sign"] else ""
    ) + _joined(digits)
    try:
        value = _fraction(digits)
        if match["below"]:
            value /= _fraction(match["below"])
        if match["whole"]:
            value += int(match["whole"])
        exponent = int(match["exponent"] or match["power"] or 0)
        if abs(exponent) > MOST_EXPONENT:
            raise ValueError("too large")
        value *= Fraction(10) ** exponent
        if match["raised"]:
            raised = int(match["raised"])
            if abs(raised) > MOST_EXPONENT or len(digits) > 20:
                raise ValueError("too large")
            value **= raised
    except (ValueError, ZeroDivisionError):
        return Number(None, text)
    rest = match.group()[match.end("digits") - match.start() :]
    before = f"{match['whole']} " if match["whole"] else ""
    sign = text[: len(text) - len(_joined(digits))]
    return Number(
        -value if sign else value, f"{sign}{before}{_joined(digits)}{rest}", bool(match["percent"])
    )


def _fraction(digits: str) -> Fraction:
    if len(digits) > MOST_DIGITS:
        raise ValueError("too long")
    return Fraction(_joined(digits))


def _joined(digits: str) -> str:
    """Return ``digits`` without separators of thousands, and with a decimal point."""
    digits = re.sub(r"[\u2009'_]", "", digits)
    if "," in digits and digits.rfind(",") > digits.rfind(".") >= 0:  # 1.234,5
        return digits.replace(".", "").replace(",", ".")
    if digits.count(".") > 1:  # 1.234.567
        return digits.replace(".", "")
    return digits.replace(",", "")


def _equal(one: Fraction | None, other: Fraction | None, near: bool) -> bool:
    if one is None or other is None:
        return False
    return one == other or (near and abs(one - other) <= Fraction(NEAR) * max(abs(one), abs(other)))


def _digit(character: str) -> str:
    if character < "\x80":
        return character
    digit = unicodedata.decimal(character, None)
    if digit is not None:
        return str(digit)
    parts = unicodedata.normalize("NFKD", character).partition("\u2044")
    if parts[1] and parts[0].isdecimal() and parts[2].isdecimal():  # ½
        return f" {parts[0]}/{parts[2]}"
    return character


def _superscripts(text: str) -> str:
    return re.sub(
        r"(?<=[\d)])[⁻⁺]?[⁰¹²³⁴-⁹]+", lambda match: "^" + match.group().translate(_POWERS), text
    )


def _braced(text: str, begin: int) -> str | None:
    """Return the text in braces from ``begin`` on; None where they are not closed, or there are
    none."""
    opened = re.match(r"\s*\{", text[begin:])
    if opened is None:
        return None
    depth = 0
    start = begin + opened.end()
    for at in range(start - 1, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return text[start:at]
    return None


# --------------------------------------------------------------------------------------------------
# Expressions


def _is_expression(plain: str, is_marked: bool) -> bool:
    """Return whether more than a number is to be computed: LaTeX is left over, or a marked answer
    has an operation. What is too long is not."""
    if len(plain) > MOST_CHARACTERS:
        return False
    if _COMMAND.search(plain):
        return True
    rest = NUMBER.sub("#", plain.rpartition("=")[2])
    return is_marked and bool(re.search(r"#\s*[-+*/^]\s*\(?#|\)\s*[-+*/^]", rest))


def _evaluated(expression: str) -> Number | None:
    """Return the value of ``expression`` by math-verify, to about 15 digits; None without the
    package, or for what has none."""
    math_verify = _math_verify()
    if math_verify is None:
        return None
    spans = re.findall(r"\$+([^$]+)\$+|\\\((.+?)\\\)|\\\[(.+?)\\\]", expression, flags=re.DOTALL)
    latex = "".join(spans[-1]) if spans else expression
    latex = latex.translate(_CHARACTERS).strip().replace("√", r"\sqrt ").replace("π", r"\pi ")
    if not _is_small(latex):
        return None
    try:
        with time_limit(SECONDS):
            results = math_verify.parse(f"${latex}$", parsing_timeout=None)
            for result in results:
                right = getattr(result, "rhs", result)  # of an equation
                if getattr(right, "is_number", False) and right.is_real:
                    value = right.evalf(20)
                    return Number(
                        _rational(right, value), expression.strip(), is_near=not right.is_Integer
                    )
    except (
        TimeLimit,
        ArithmeticError,
        ValueError,
        TypeError,
        AttributeError,
        RecursionError,
        MemoryError,
    ):
        pass
    return None


_COUNTS = re.compile(r"!|binom|\\choose|\\prod|\\sum|\\exp|\\Gamma")
# Factorials and binomials of plain numbers with up to three digits; 999! has 2,565.
_SMALL_COUNTS = re.compile(
    r"(?<![\d.)\]}!])\d{1,3}\s*!(?!\s*!)|binom\s*(\{\s*\d{1,3}\s*\}\s*){2}(?!\s*!)"
)


def _is_small(latex: str) -> bool:
    """Return whether the integers that ``latex`` is computed with stay small.

    A power of large ones is a single operation, which no time limit ends, and during which no other
    thread of the process runs.
    """
    product = 1
    for power in re.finditer(r"\^|\*\*", latex):
        exponent = _exponent(latex, power.end())
        if "^" in exponent or "**" in exponent or _COUNTS.search(exponent):
            return False
        for number in re.findall(r"\d+", exponent):
            product *= max(1, min(int(number[:6]), MOST_POWER + 1))
    counted = _SMALL_COUNTS.sub(" ", latex)
    return product <= MOST_POWER and not _COUNTS.search(counted)


def _exponent(latex: str, begin: int) -> str:
    """Return the exponent that begins at ``begin``: all to the end of its brackets, or one token,
    with a power of it."""
    depth = 0
    for at in range(begin, len(latex)):
        depth += (latex[at] in "{([") - (latex[at] in "})]")
        if depth < 0 or (depth == 0 and latex[at] in "})]"):
            rest = latex[at + 1 :].lstrip() if depth == 0 else ""
            return latex[begin : at + 1] + ("^" if rest.startswith(("^", "**")) else "")
        if depth == 0 and latex[at] in "+-*/= " and latex[begin:at].strip(" -+"):
            break
    token = re.match(r"[\s+-]*[\w.\\]*\s*(\^|\*\*)?", latex[begin:])
    return token.group() if token else ""


def _rational(exact: Any, value: Any) -> Fraction:
    return Fraction(int(exact.p), int(exact.q)) if exact.is_Rational else Fraction(str(value))


@functools.cache
def _math_verify() -> Any:
    try:
        with extra("math"):
            import math_verify
    except ExtraMissing:
        return None
    import logging

    # it warns that its own alarms are off
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    return math_verify


class TimeLimit(BaseException):
    """Raised in a thread whose time has run out. No code that catches Exception holds it up."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise :class:`TimeLimit` in this thread after ``seconds``.

    Unlike an alarm it works in any thread; like one it comes between two instructions of Python,
    not inside a long one.
    """
    thread = ctypes.c_ulong(threading.get_ident())
    lock = threading.Lock()
    has_ended = False

    def end() -> None:
        with lock:
            if not has_ended:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(TimeLimit))

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with lock:
            has_ended = True
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, None)  # one that has not come yet
