"""Prompts: which text the group with global number ``seq`` is asked.

    options + seed ── load_prompts ──▶ PromptSplit ── train.prompt(seq) ─────▶ Prompt (token ids, text, fields)
                          │                 └──────── held_out.prompt(seq) ──▶ Prompt, never one of ``train``
                          └ longer than PromptLimits: skipped or cut, counted, and listed by TooLong

A prompt is a pure function of ``(options, seed, seq)``: a run that resumes, or makes a lost group again, asks for the
same ``seq`` and gets the same prompt, and no position has to be saved. Tables are shuffled anew each epoch; procedural
sources never end. Held out is a property of the prompt's own text under the seed, so the same text can never be on both
sides, however often a table or a generator repeats it. Which prompts are too long follows from the options and the
tokenizer alone, so skipping them keeps all of this.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import string
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import numpy as np
import structlog
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from stages.json_schema import only_where, schema_of, unit
from stages.prompts.files import PromptError as PromptError
from stages.prompts.files import Row as Row
from stages.prompts.files import kind_of, lines, open_file, parse_line
from stages.prompts.tasks import CONFIGS, TASKS
from stages.user_code import imported, place_of

if TYPE_CHECKING:  # recipes are read, and runs watched over the network, without torch: it takes seconds to import
    import torch

    from stages.models import Tokenizer

Message = dict[str, str]

log = structlog.get_logger()

PROCEDURAL_ATTEMPTS = 10_000  # draws for one seq before a procedural source is said to have no fitting prompt
ATTEMPT_STRIDE = 1 << 20  # the draws for one seq lie this far apart, so they are not those of the next seqs

# A text of more characters than TOKEN_CHARACTERS for each token that it may have is too long without being tokenized, if
# it has more than SHORT_CHARACTERS.
TOKEN_CHARACTERS, SHORT_CHARACTERS = 64, 2**16
WIDEST = 1000  # characters to which a template may pad a column
MOST_GENERATED = 1_000_000  # rows of a procedural task with a size
MOST_LISTED = 10_000  # prompts that are too long, in the file that lists them
LISTED = "too-long.jsonl"  # in the run's folder: that file


@dataclass(frozen=True)
class PromptLimits:
    """How long a prompt may be: ``tokens``, because of ``why``; and ``nbytes`` of what its row holds, as JSON. None: any."""

    tokens: int | None = None
    why: str = "prompts.max_prompt_tokens"
    nbytes: int | None = None

    @property
    def characters(self) -> int:
        """Characters of a text that is worth tokenizing."""
        return max(SHORT_CHARACTERS, TOKEN_CHARACTERS * (SHORT_CHARACTERS if self.tokens is None else self.tokens))


@dataclass(frozen=True)
class Prompt:
    """``ids`` int64 [P] as the model reads them, ``text`` what they spell (chat template included), ``given`` the
    prompt as its row had it (a string, or messages with ``role`` and ``content``), ``fields`` the row's other columns:
    what reward functions are handed."""

    ids: torch.Tensor
    text: str
    given: str | list[Message]
    fields: dict[str, Any]


class PromptSource(Protocol):
    @property
    def size(self) -> int | None:
        """Prompts in one epoch; None when the source never ends."""

    @property
    def too_long(self) -> TooLong:
        """The prompts that were too long so far."""

    def prompt(self, seq: int) -> Prompt:
        """The prompt of the group with global number ``seq`` >= 0: the same for the same seed and ``seq``, always."""


@dataclass(frozen=True)
class PromptSplit:
    """The two sides of one source. ``held_out`` is None when nothing is held out."""

    train: PromptSource
    held_out: PromptSource | None


class PromptOptions(BaseModel):
    """Where prompts come from and how they are put to the model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: Literal["jsonl", "parquet", "datasets", "reasoning_gym", "builtin", "external"] = Field(
        description="Kind of source. `external`: other programs put prompts into the run while it goes on."
    )
    path: str | None = Field(
        default=None,
        description="`jsonl`, `parquet`: the file. `datasets`: a folder written by `save_to_disk`, or `module:function` "
        "that returns a data set (anything with `len` and rows as mappings).",
    )
    task: str | None = Field(default=None, description="`reasoning_gym`: the name of its task. `builtin`: `repeat`.")
    config: Annotated[dict[str, Any], schema_of(CONFIGS["repeat"] | dict[str, Any])] = Field(
        default_factory=dict,
        description="Options of the task. With `size` a reasoning_gym task is a table of that many rows; without it has no "
        "end. Those of `repeat` follow.",
    )
    split: str | None = Field(default=None, description="`datasets`: which split, when there are several.")
    column: str = Field(
        default="prompt",
        description="Column with the prompt: a string, or a list of messages with `role` and `content`. The other columns "
        "go to the reward functions.",
    )
    template: str = Field(
        default="{prompt}", description="What string prompts become: `{prompt}`, and any other column by its name."
    )
    system: str | None = Field(
        default=None,
        description="System message before each conversation that does not begin with one. Needs a chat template.",
    )
    chat: bool | None = Field(
        default=None,
        description="Put string prompts into the tokenizer's chat template as the user's message. Default: when it has one.",
    )
    max_prompt_tokens: Annotated[int, Field(ge=1), unit("tokens")] | None = Field(
        default=None, description="Longest prompt. Default: no limit."
    )
    too_long: Annotated[
        Literal["skip", "cut", "fail"], BeforeValidator(lambda value: "fail" if value == "error" else value)
    ] = Field(
        default="skip",
        description="A prompt longer than `max_prompt_tokens`, or than the model has room for: `skip` it, `cut` its "
        "beginning off, or `fail` the run. Those skipped or cut are counted, and listed in `too-long.jsonl`.",
    )
    held_out: float = Field(
        default=0.0, ge=0.0, lt=1.0, description="Share of distinct prompts that training never sees, for evaluation."
    )

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return only_where({"source": "builtin", "task": "repeat"}, "config", core, handler)

    @model_validator(mode="after")
    def _check_keys(self) -> PromptOptions:
        """Raises one error with all keys that do not fit together."""
        errors = [
            InitErrorDetails(type=PydanticCustomError("fault", message), loc=(key,), input=getattr(self, key))
            for key, message in self._faults()
        ]
        if errors:
            raise ValidationError.from_exception_data("prompts", errors)
        return self

    def _faults(self) -> Iterator[tuple[str, Any]]:
        """Keys that do not fit to the others, with what is wrong and what to do."""
        needed = {"external": None, "reasoning_gym": "task", "builtin": "task"}.get(self.source, "path")
        unused = {"task": ["path"], "path": ["task", "config"], None: ["path", "task", "config", "held_out"]}[needed]
        if needed and not getattr(self, needed):
            yield needed, f"is missing; source = {self.source!r} needs it"
        for key in unused if self.source == "datasets" else [*unused, "split"]:
            if getattr(self, key):
                yield key, f"means nothing for source = {self.source!r}; take it out"
        if self.source == "builtin" and self.task and self.task not in TASKS:
            yield "task", f"is not known; use one of {sorted(TASKS)}"
        if "{prompt}" not in self.template:
            yield "template", "must contain {prompt}; write it where the prompt belongs"
        try:
            parse_template(self.template)
        except ValueError as error:
            yield "template", f"is not a template ({error}); name columns as {{prompt}}, and write a brace twice"
        if self.chat is False and self.system is not None:
            yield "system", "needs a chat template, but prompts.chat = false; drop one of the two"


def load_prompts(
    options: PromptOptions,
    tokenizer: Tokenizer,
    seed: int,
    *,
    limits: PromptLimits | None = None,
    listed: Path | None = None,
) -> PromptSplit:
    """Open the source and divide it. ``limits``: how long a prompt may be (default: ``max_prompt_tokens``); those that are
    longer are listed in the file ``listed``. Raises :class:`PromptError` for whatever is wrong with it; tables are read
    through once here, so a bad row is an error at the start and not in the middle of a run."""
    form, too_long = PromptForm(options, tokenizer, limits), TooLong(options, listed)
    rows = open_rows(options, seed)
    if callable(rows):
        too_long.resume()
        procedural = [ProceduralPrompts(rows, form, seed, too_long, held_out=side) for side in (False, True)]
        return PromptSplit(procedural[0], procedural[1] if options.held_out else None)
    sides: tuple[list[int], list[int]] = ([], [])
    for i in form.fitting(rows, too_long):
        sides[is_held_out(form.given(rows[i], rows.where(i)), seed, options.held_out)].append(i)
    for name, side in zip(("train", "held-out"), sides, strict=True):
        if not side and (name == "train" or options.held_out):
            raise PromptError(_none_left(options, form.limits, len(rows), too_long.skipped, name))
    tables = [TablePrompts(rows, np.asarray(side, dtype=np.int64), form, seed, too_long) for side in sides]
    return PromptSplit(tables[0], tables[1] if options.held_out else None)


def _none_left(options: PromptOptions, limits: PromptLimits, rows: int, skipped: int, side: str) -> str:
    source = options.path or options.task
    if not rows:
        return f"prompts: {source} has no rows; give a file with prompts"
    if skipped == rows:
        return (
            f"prompts: all {rows} prompts of {source} are too long: none has at most {limits.tokens} tokens, {limits.why}; "
            "raise the limit, shorten them, or set prompts.too_long = 'cut'"
        )
    short = f"{rows} rows, of which {rows - skipped} are short enough"
    return f"prompts: {source} has no {side} rows: {short}, with held_out = {options.held_out}; change prompts.held_out"


class TooLong:
    """The prompts of a source that were too long, each once: all are counted, and the first :data:`MOST_LISTED` are listed
    in ``path``, a JSON object a line. One that cannot be written is a warning."""

    def __init__(self, options: PromptOptions, path: Path | None) -> None:
        self.path, self.done = path, "cut" if options.too_long == "cut" else "skipped"
        self.skipped = self.cut = 0
        self._known: set[str] = set()
        self._began = False

    def resume(self) -> None:
        """Go on with the list that is there: of a source without an end, which is never read through."""
        self._began = True
        if self.path is None or not self.path.is_file():
            return
        for line in self.path.read_bytes().splitlines():
            try:
                found = json.loads(line)
                self._count(found["where"], found["done"])
            except (ValueError, LookupError, TypeError):  # a kill cut it short
                continue

    def add(self, where: str, length: str, *, done: str = "") -> None:
        """Count the prompt at ``where``, of which ``length`` says how long it is, and what was ``done`` with it."""
        done = done or self.done
        if not self._count(where, done) or self.path is None or self.skipped + self.cut > MOST_LISTED:
            return
        try:
            with self.path.open("a" if self._began else "w", encoding="utf-8") as file:
                file.write(json.dumps({"where": where, "length": length, "done": done}) + "\n")
            self._began = True
        except OSError as error:
            log.warning("prompts that are too long cannot be listed", path=str(self.path), reason=str(error))
            self.path = None

    def _count(self, where: str, done: str) -> bool:
        if where in self._known:
            return False
        if len(self._known) < MOST_LISTED:
            self._known.add(where)
        self.skipped += done == "skipped"
        self.cut += done == "cut"
        return True


def is_held_out(given: str | list[Message], seed: int, share: float) -> bool:
    """Whether a prompt belongs to the held-out side: by a hash of its text and the seed, uniform on [0, 1)."""
    text = given if isinstance(given, str) else json.dumps(given, sort_keys=True)
    digest = hashlib.blake2b(f"{seed}:{text}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


class TablePrompts:
    """The rows ``chosen`` (int64 [n]) of a table, in an order of its own in each epoch."""

    def __init__(self, rows: Table, chosen: np.ndarray, form: PromptForm, seed: int, too_long: TooLong) -> None:
        self._rows, self._chosen, self._form, self._seed = rows, chosen, form, seed
        self.too_long = too_long
        self._orders: dict[int, np.ndarray] = {}

    @property
    def size(self) -> int:
        return len(self._chosen)

    def prompt(self, seq: int) -> Prompt:
        epoch, place = divmod(seq, len(self._chosen))
        row = int(self._order(epoch)[place])
        return self._form.prompt(self._rows[row], self._rows.where(row))

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            if len(self._orders) == 2:  # groups in flight span two epochs at most, unless an epoch is tiny
                self._orders.pop(min(self._orders))
            self._orders[epoch] = np.random.default_rng([self._seed, epoch]).permutation(self._chosen)
        return self._orders[epoch]


class ProceduralPrompts:
    """Rows made by their number. A ``seq`` whose row lies on the other side of the split, or is too long and may be
    skipped, gets the next of its own draws, so it depends on no other ``seq``."""

    size = None

    def __init__(
        self, row: Callable[[int], Row], form: PromptForm, seed: int, too_long: TooLong, *, held_out: bool
    ) -> None:
        self._row, self._form, self._seed, self._held_out = row, form, seed, held_out
        self.too_long = too_long

    def prompt(self, seq: int) -> Prompt:
        share = self._form.options.held_out
        for attempt in range(PROCEDURAL_ATTEMPTS):
            row = self._row(seq + attempt * ATTEMPT_STRIDE)
            where = f"row {seq + attempt * ATTEMPT_STRIDE} of {self._form.options.task}"
            if is_held_out(self._form.given(row, where), self._seed, share) != self._held_out:
                continue
            if (prompt := self._form.bounded(row, where, self.too_long)) is not None:
                return prompt
        raise PromptError(
            f"prompts: {self._form.options.task} made no {'held-out' if self._held_out else 'training'} prompt for "
            f"group {seq} in {PROCEDURAL_ATTEMPTS} draws; change held_out = {share}, or give the task more different "
            f"prompts, or raise the limit of {self._form.limits.tokens} tokens ({self._form.limits.why})"
        )


class PromptForm:
    """How a row becomes a :class:`Prompt`: template, chat template, token ids, and how long it may be."""

    def __init__(self, options: PromptOptions, tokenizer: Tokenizer, limits: PromptLimits | None = None) -> None:
        self.options, self._tokenizer = options, tokenizer
        self.limits = limits or PromptLimits(options.max_prompt_tokens)
        self._pieces = parse_template(options.template)
        has_template = tokenizer.chat_template is not None
        self._chat = has_template if options.chat is None else options.chat
        if self._chat and not has_template:
            raise PromptError("prompts.chat = true, but the tokenizer has no chat template; set chat = false")
        if options.system is not None and not has_template:
            raise PromptError("prompts.system needs a chat template, and the tokenizer has none; use prompts.template")
        # Without normalization a token spells at least one byte; with it, one character may become up to 18 of them.
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._most_tokens = 2**31 if backend is None else 1 if backend.normalizer is None else 18

    def given(self, row: Row, where: str) -> str | list[Message]:
        """The row's prompt, checked."""
        return given_of(row, self.options.column, where)

    def prompt(self, row: Row, where: str) -> Prompt:
        """The prompt of ``row``, however long; its beginning is cut off if the options say so."""
        given, fields, text = self._read(row, where)
        if text is None:
            raise PromptError(f"prompts: {where} has more than {self.limits.characters} characters; shorten it")
        ids, limit = self._ids(given, text, where), self.limits.tokens
        if self.options.too_long == "cut" and limit is not None and len(ids) > limit:
            ids = ids[-limit:]
            text = str(self._tokenizer.decode(ids))
        import torch

        return Prompt(torch.tensor(ids, dtype=torch.int64), text, given, fields)

    def bounded(self, row: Row, where: str, too_long: TooLong) -> Prompt | None:
        """The prompt of ``row`` if it may be asked. One that is too long is added to ``too_long``; None when it is skipped.
        Raises PromptError when prompts.too_long = "fail"."""
        return self.prompt(row, where) if self._fits(row, where, too_long) else None

    def fitting(self, rows: Table, too_long: TooLong) -> Iterator[int]:
        """The numbers of the ``rows`` that may be asked, as :meth:`bounded` says. Every row is checked."""
        for i in range(len(rows)):
            if rows.unread(i):
                self._refuse(rows.where(i), "more bytes than are read of one line", too_long, cut=False)
            elif self._fits(rows[i], rows.where(i), too_long):
                yield i

    def _fits(self, row: Row, where: str, too_long: TooLong) -> bool:
        """Whether ``row`` makes a prompt. Text that is surely too long is not built, and not tokenized where its bytes
        already show its length."""
        given, fields, text = self._read(row, where)
        limit, most = self.limits.tokens, self.limits.nbytes
        if most is not None and (size := _json_bytes(given, fields, where)) > most:
            wrong = f"{size} bytes, more than the {most} for which pipeline.arena has room"
            return self._refuse(where, wrong, too_long, cut=False)
        if text is None or len(text) > self.limits.characters:
            wrong = f"more than {self.limits.characters} characters"
            return self._refuse(where, wrong, too_long, cut=text is not None)
        if limit is None or (text.strip() and (len(text.encode()) + 16) * self._most_tokens <= limit):
            return True
        length = len(self._ids(given, text, where))
        return length <= limit or self._refuse(where, f"{length} tokens", too_long)

    def _refuse(self, where: str, length: str, too_long: TooLong, *, cut: bool = True) -> bool:
        """Whether the prompt at ``where``, which is too long, stays: with its beginning cut off, where that helps."""
        if self.options.too_long == "fail":
            bound = f"{self.limits.tokens} tokens ({self.limits.why})"
            raise PromptError(
                f"prompts: {where} has {length}, where a prompt may have {bound}; shorten it, raise the limit, or set "
                "prompts.too_long = 'skip' or 'cut'"
            )
        stays = cut and self.options.too_long == "cut"
        too_long.add(where, length, done="cut" if stays else "skipped")
        return stays

    def _read(self, row: Row, where: str) -> tuple[str | list[Message], dict[str, Any], str | None]:
        """What ``row`` has in the prompt's column, its other columns, and the text they make (:meth:`_text`)."""
        given = self.given(row, where)
        fields = {name: value for name, value in row.items() if name != self.options.column}
        return given, fields, self._text(given, fields, where)

    def _ids(self, given: str | list[Message], text: str, where: str) -> list[int]:
        # A chat template spells out its special tokens itself.
        templated = self._chat or not isinstance(given, str)
        ids: list[int] = self._tokenizer(text, add_special_tokens=not templated)["input_ids"]
        if not ids:
            raise PromptError(f"prompts: {where} has no tokens: {text!r:.100}; give a prompt that the model can read")
        return ids

    def _text(self, given: str | list[Message], fields: Row, where: str) -> str | None:
        """What ``given`` becomes: the end of a text that has more characters than the limits, one more than they allow; None
        for such a conversation."""
        most = self.limits.characters + 1
        if isinstance(given, str):
            filled = fill(self._pieces, fields | {"prompt": given}, most, where)
            if not self._chat:
                return filled
            messages = [{"role": "user", "content": filled}]
        else:
            messages = given
        if self._tokenizer.chat_template is None:
            raise PromptError(
                f"prompts: {where} is a conversation, but the tokenizer has no chat template; use one that has, or texts"
            )
        if not isinstance(given, str) and sum(len(message["content"]) + 1 for message in given) >= most:
            return None
        if self.options.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.options.system}, *messages]
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # a template is a program, and may refuse what it is given
            raise PromptError(
                f"prompts: {where} is refused by the tokenizer's chat template ({error}); change the messages"
            ) from error


def _json_bytes(given: str | list[Message], fields: Row, where: str) -> int:
    try:
        return len(json.dumps(given)) + len(json.dumps(fields, default=str))
    except (TypeError, ValueError, RecursionError) as error:
        raise PromptError(
            f"prompts: {where} has columns that are no JSON ({error}); use texts, numbers and lists"
        ) from None


Piece = tuple[
    str, str | None, str | None, str | None
]  # literal text, and the column behind it: name, format, conversion


def parse_template(template: str) -> list[Piece]:
    """The pieces of a :meth:`str.format` template. Raises ValueError."""
    pieces = list(string.Formatter().parse(template))
    for _, name, spec, conversion in pieces:
        if conversion not in (None, "s", "r", "a"):
            raise ValueError(f"{{{name}!{conversion}}} converts to nothing that is known")
        if name is not None and (name == "" or name[0].isdigit()):
            raise ValueError(f"{{{name}}} names no column")
        if spec and ("{" in spec or any(int(number) > WIDEST for number in re.findall(r"\d+", spec))):
            raise ValueError(f"{{{name}:{spec}}} pads to more than {WIDEST} characters")
    return pieces


def fill(pieces: Sequence[Piece], fields: Row, most: int, where: str) -> str:
    """What ``str.format`` makes of a template and ``fields``, or its last ``most`` characters: a longer text is not built.
    Raises PromptError."""
    form, parts, most_kept = string.Formatter(), list[str](), most
    try:
        for literal, name, spec, conversion in reversed(pieces):
            if name is not None:
                value = form.convert_field(form.get_field(name, (), fields)[0], conversion)
                parts.append(form.format_field(value, spec or ""))
                most -= len(parts[-1])
            parts.append(literal)
            most -= len(literal)
            if most <= 0:
                break
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise PromptError(
            f"prompts: prompts.template does not fit {where}: {error!r}; it may name 'prompt' and "
            f"{sorted(map(str, fields))}, and a brace of its own is written twice"
        ) from error
    return encodable("".join(reversed(parts))[-most_kept:], where, "a column that prompts.template names")


def encodable(text: str, where: str, at: str) -> str:
    """``text``, if it can be written as UTF-8. Raises PromptError: JSON can spell half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"\\u{ord(text[error.start]):04x} at character {error.start + 1}"
        raise PromptError(
            f"prompts: {where} has half of a surrogate pair in {at} ({found}), which is no text; take it out"
        ) from None
    return text


def given_of(row: Mapping[str, Any], column: str, where: str) -> str | list[Message]:
    """What ``row`` has in ``column``, when it is a prompt. Raises :class:`PromptError`."""
    if not isinstance(row, Mapping):
        raise PromptError(f"prompts: {where} is a {type(row).__name__}; a row is a mapping of columns")
    if column not in row:
        has = f"it has {sorted(map(str, row))}"
        raise PromptError(f"prompts: {where} has no column {column!r} ({has:.200}); set prompts.column")
    given = row[column]
    if isinstance(given, str) and given:
        return encodable(given, where, f"column {column!r}")
    if isinstance(given, Sequence) and given and all(_is_message(message) for message in given):
        for message in given:
            encodable(message["role"] + message["content"], where, f"a message of column {column!r}")
        return [dict(message) for message in given]
    raise PromptError(
        f"prompts: {where} has {given!r:.200} in column {column!r}; a prompt is a string that is not empty, or a list of "
        "messages {'role': ..., 'content': ...}"
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


# --- sources: a table (a sequence of rows), or a function from a number to a row ----------------------------------


class Table(Protocol):
    """Rows by their numbers. ``where`` names one for people: its file and line, counted from 1. ``unread``: whether it was
    too large to be read."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> Row: ...
    def where(self, number: int) -> str: ...
    def unread(self, number: int) -> bool: ...


def open_rows(options: PromptOptions, seed: int) -> Table | Callable[[int], Row]:
    """The source's rows. Raises PromptError, whatever is wrong with it."""
    path, task = str(options.path), str(options.task)
    try:
        match options.source:
            case "external":
                raise PromptError("prompts.source = 'external' is no table: its prompts are put while the run goes on")
            case "jsonl":
                return JsonRows(Path(path))
            case "parquet":
                return ParquetRows(Path(path))
            case "datasets":
                return NumberedRows(_dataset(path, options.split), path)
            case "reasoning_gym":
                return _reasoning_gym(task, options.config, options.column, seed)
            case "builtin":
                return _builtin(task, options.config, options.column, seed)
    except PromptError:
        raise
    except Exception as error:  # of a library that reads a file, or of a function that gives a dataset
        raise PromptError(
            f"prompts: {path if options.path else task} cannot be read ({type(error).__name__}: {error}); correct it"
        ) from error


class JsonRows:
    """The rows of a file of JSON Lines."""

    def __init__(self, path: Path) -> None:
        self._name, self._rows, self._lines = str(path), list[Row | None](), array("q")
        for number, line in lines(path):
            row = None if line is None else parse_line(line, f"{path}, line {number}")
            if row is not None or line is None:
                self._rows.append(row)
                self._lines.append(number)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Row:
        return self._rows[number] or {}

    def where(self, number: int) -> str:
        return f"{self._name}, line {self._lines[number]}"

    def unread(self, number: int) -> bool:
        return self._rows[number] is None


class NumberedRows:
    """``rows`` (anything with ``len`` that gives mappings by their numbers), named by their numbers from 1."""

    def __init__(self, rows: Any, name: str) -> None:
        self._rows, self._name = rows, name

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Row:
        try:
            row: Row = self._rows[number]
        except PromptError:
            raise
        except Exception as error:
            raise PromptError(f"prompts: {self.where(number)} cannot be read ({error!r}); correct it") from error
        return row

    def where(self, number: int) -> str:
        return f"{self._name}, row {number + 1}"

    def unread(self, number: int) -> bool:
        return False


class ParquetRows(NumberedRows):
    """Rows of a Parquet file, or of a folder of them, kept as Arrow columns and made into Python values one at a time."""

    def __init__(self, path: Path) -> None:
        _require("pyarrow", "Parquet files", "data")
        import pyarrow.parquet

        if kind_of(existing(path)) != "a folder":
            open_file(path).close()
        super().__init__(pyarrow.parquet.read_table(existing(path)).combine_chunks(), str(path))

    def __len__(self) -> int:
        return int(self._rows.num_rows)

    def __getitem__(self, number: int) -> Row:
        row: Row = self._rows.slice(number, 1).to_pylist()[0]
        return row


def _dataset(path: str, split: str | None) -> Any:
    if ":" in path:
        make = dataset_function(path)
        try:
            dataset = make()
        except Exception as error:
            raise PromptError(f"prompts.path = {path!r} raised {error!r} ({place_of(error, make)})") from error
    else:
        _require("datasets", "folders written by save_to_disk", "data")
        if kind_of(existing(Path(path))) != "a folder":
            raise PromptError(f"prompts: prompts.path = {path!r} is no folder; give one that save_to_disk has written")
        from datasets import load_from_disk

        dataset = load_from_disk(str(existing(Path(path))))
    if isinstance(dataset, Mapping):  # a DatasetDict
        if split not in dataset:
            raise PromptError(f"prompts.split = {split!r} is not in {path}; use one of {sorted(dataset)}")
        dataset = dataset[split]
    elif split is not None:
        raise PromptError(f"prompts.split = {split!r}, but {path} has no splits; drop it")
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise PromptError(f"prompts: {path} gave a {type(dataset).__name__}; rows must be reachable by number")
    return dataset


def dataset_function(path: str) -> Callable[[], Any]:
    """The function that ``module:function`` names. Raises PromptError."""
    try:
        function = imported(path)
    except ImportError as error:
        raise PromptError(f"prompts.path = {path!r} {error}") from error
    if not callable(function):
        raise PromptError(
            f"prompts.path = {path!r} is a {type(function).__name__}; name a function that gives a dataset"
        )
    return function  # type: ignore[no-any-return]


def _builtin(task: str, config: Mapping[str, Any], column: str, seed: int) -> Callable[[int], Row]:
    make = TASKS[task]
    try:
        make(0, seed, **config)
    except (TypeError, ValueError, MemoryError, OverflowError) as error:
        raise PromptError(f"prompts.config = {dict(config)} does not fit {task}: {error}; correct it") from error
    return lambda number: _renamed(make(number, seed, **config), "prompt", column)


def _reasoning_gym(task: str, config: Mapping[str, Any], column: str, seed: int) -> Table | Callable[[int], Row]:
    _require("reasoning_gym", "reasoning_gym tasks", "quickstart")
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise PromptError(f"prompts.task = {task!r} is not a task of reasoning_gym; it has {sorted(DATASETS)}")
    check_size(config)
    # Its tasks draw row i from seed + i: neighbouring seeds must not give the same rows, shifted by one.
    spread = int.from_bytes(hashlib.blake2b(f"{seed}".encode(), digest_size=4).digest(), "big") >> 1
    try:
        dataset = reasoning_gym.create_dataset(task, **{"seed": spread, **config})
    except (AssertionError, TypeError, ValueError) as error:
        raise PromptError(f"prompts.config = {dict(config)} does not fit reasoning_gym's {task}: {error}") from error

    def row(number: int) -> Row:
        try:
            entry = dataset[number]
        except IndexError as error:
            raise PromptError(
                f"prompts: reasoning_gym's {task} has no row {number} ({error}); it is a table: give its size in config"
            ) from error
        return _renamed(entry | {"prompt": entry["question"]}, "prompt", column)

    if "size" in config:
        return NumberedRows([row(number) for number in range(len(dataset))], task)
    return row


def check_size(config: Mapping[str, Any]) -> None:
    """Raise PromptError when a procedural task is to be a table of more rows than are kept."""
    size = config.get("size")
    if isinstance(size, int) and size > MOST_GENERATED:
        raise PromptError(
            f"prompts.config.size = {size} is more than {MOST_GENERATED} rows; leave it out: then the task never ends"
        )


def _renamed(row: Row, name: str, to: str) -> Row:
    return {to if key == name else key: value for key, value in row.items()}


def existing(path: Path) -> Path:
    """``path`` with the home directory in it. Raises PromptError when nothing is there."""
    try:
        if path.expanduser().exists():
            return path.expanduser()
    except (OSError, RuntimeError, ValueError) as error:
        raise PromptError(f"prompts.path = {str(path)!r} cannot be read ({error}); give another path") from None
    raise PromptError(f"prompts.path = {str(path)!r} does not exist, seen from {Path.cwd()}; give another path")


def _require(module: str, what: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise PromptError(f"prompts: {what} need the package {module}: pip install 'asyncdock[{extra}]'")
