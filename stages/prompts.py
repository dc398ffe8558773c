"""Prompts: which text the group with global number ``seq`` is asked.

    options + seed ── load_prompts ──▶ PromptSplit ── train.prompt(seq) ─────▶ Prompt (token ids, text, fields)
                                            └──────── held_out.prompt(seq) ──▶ Prompt, never one of ``train``

A prompt is a pure function of ``(options, seed, seq)``: a run that resumes, or makes a lost group again, asks for the
same ``seq`` and gets the same prompt, and no position has to be saved. Tables are shuffled anew each epoch; procedural
sources never end. Held out is a property of the prompt's own text under the seed, so the same text can never be on both
sides, however often a table or a generator repeats it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from stages.tasks import TASKS
from stages.user_code import imported, place_of

if TYPE_CHECKING:  # recipes are read, and runs watched over the network, without torch: it takes seconds to import
    import torch

    from stages.models import Tokenizer

Message = dict[str, str]
Row = dict[str, Any]

PROCEDURAL_ATTEMPTS = 10_000  # draws for one seq before a procedural source is said to have no fitting prompt
ATTEMPT_STRIDE = 1 << 20  # the draws for one seq lie this far apart, so they are not those of the next seqs


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

    def prompt(self, seq: int) -> Prompt:
        """The prompt of the group with global number ``seq`` >= 0: the same for the same seed and ``seq``, always."""


@dataclass(frozen=True)
class PromptSplit:
    """The two sides of one source. ``held_out`` is None when nothing is held out."""

    train: PromptSource
    held_out: PromptSource | None


class PromptError(ValueError):
    """A prompt source or one of its rows cannot be used: the message names it and the fix."""


class PromptOptions(BaseModel):
    """Where prompts come from and how they are put to the model (the recipe's ``[prompts]``)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: Literal["jsonl", "parquet", "datasets", "reasoning_gym", "builtin", "external"]
    """external: other programs put prompts into the run while it goes on (:mod:`stages.feed`)."""
    path: str | None = None
    """jsonl and parquet: the file. datasets: a folder written by ``save_to_disk``, or ``module:function`` that returns
    a dataset (anything with ``len`` and rows as mappings)."""
    task: str | None = None
    """reasoning_gym: the name of its task. builtin: a name of :data:`stages.tasks.TASKS`."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Options of the task. With ``size`` a reasoning_gym task is a table of that many rows, without it has no end."""
    split: str | None = None
    """datasets: which split, when there are several."""
    column: str = "prompt"
    """The column that holds the prompt: a string, or a list of messages with ``role`` and ``content``."""
    template: str = "{prompt}"
    """What string prompts become: ``{prompt}``, and any other column by its name."""
    system: str | None = None
    """A system message before each conversation that does not begin with one. Needs a chat template."""
    chat: bool | None = None
    """Put string prompts into the tokenizer's chat template as the user's message: by default when it has one."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    too_long: Literal["error", "skip"] = "error"
    held_out: float = Field(default=0.0, ge=0.0, lt=1.0)
    """The share of distinct prompts that training never sees."""

    @model_validator(mode="after")
    def _fits_source(self) -> PromptOptions:
        if self.source == "external":
            return self._fits_feed()
        needs, other = ("task", "path") if self.source in ("reasoning_gym", "builtin") else ("path", "task")
        if not getattr(self, needs):
            raise ValueError(f"prompts.{needs} is missing: source = {self.source!r} needs it")
        if getattr(self, other):
            raise ValueError(f"prompts.{other} = {getattr(self, other)!r} means nothing for source = {self.source!r}")
        if self.config and needs != "task":
            raise ValueError(f"prompts.config = {self.config!r} means nothing for source = {self.source!r}")
        if self.split and self.source != "datasets":
            raise ValueError(f"prompts.split = {self.split!r} means nothing for source = {self.source!r}")
        if self.source == "builtin" and self.task not in TASKS:
            raise ValueError(f"prompts.task = {self.task!r} is not known; use one of {sorted(TASKS)}")
        return self._fits_form()

    def _fits_feed(self) -> PromptOptions:
        for name in ("path", "task", "config", "split", "held_out"):
            if value := getattr(self, name):
                raise ValueError(f"prompts.{name} = {value!r} means nothing for source = 'external'; take it out")
        return self._fits_form()

    def _fits_form(self) -> PromptOptions:
        if "{prompt}" not in self.template:
            raise ValueError(f"prompts.template = {self.template!r} must contain {{prompt}}")
        if self.chat is False and self.system is not None:
            raise ValueError("prompts.system needs a chat template, but prompts.chat = false; drop one of the two")
        return self


def load_prompts(options: PromptOptions, tokenizer: Tokenizer, seed: int) -> PromptSplit:
    """Open the source and divide it. Raises :class:`PromptError` for whatever is wrong with it; tables are read through
    once here, so a bad row is an error at the start and not in the middle of a run."""
    form = PromptForm(options, tokenizer)
    rows = _open(options, seed)
    if callable(rows):
        procedural = [ProceduralPrompts(rows, form, seed, held_out=side) for side in (False, True)]
        return PromptSplit(procedural[0], procedural[1] if options.held_out else None)
    sides: tuple[list[int], list[int]] = ([], [])
    for i in range(len(rows)):
        if form.fits(rows[i], f"row {i}"):
            sides[is_held_out(form.given(rows[i], f"row {i}"), seed, options.held_out)].append(i)
    for name, side in zip(("train", "held-out"), sides, strict=True):
        if not side and (name == "train" or options.held_out):
            raise PromptError(
                f"prompts: {options.path or options.task} has no {name} rows: {len(rows)} rows, of which "
                f"{len(sides[0]) + len(sides[1])} are short enough, with held_out = {options.held_out}"
            )
    tables = [TablePrompts(rows, np.asarray(side, dtype=np.int64), form, seed) for side in sides]
    return PromptSplit(tables[0], tables[1] if options.held_out else None)


def is_held_out(given: str | list[Message], seed: int, share: float) -> bool:
    """Whether a prompt belongs to the held-out side: by a hash of its text and the seed, uniform on [0, 1)."""
    text = given if isinstance(given, str) else json.dumps(given, sort_keys=True)
    digest = hashlib.blake2b(f"{seed}:{text}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


class TablePrompts:
    """The rows ``chosen`` (int64 [n]) of a table, in an order of its own in each epoch."""

    def __init__(self, rows: Sequence[Row], chosen: np.ndarray, form: PromptForm, seed: int) -> None:
        self._rows, self._chosen, self._form, self._seed = rows, chosen, form, seed
        self._orders: dict[int, np.ndarray] = {}

    @property
    def size(self) -> int:
        return len(self._chosen)

    def prompt(self, seq: int) -> Prompt:
        epoch, place = divmod(seq, len(self._chosen))
        row = int(self._order(epoch)[place])
        return self._form.prompt(self._rows[row], f"row {row}")

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

    def __init__(self, row: Callable[[int], Row], form: PromptForm, seed: int, *, held_out: bool) -> None:
        self._row, self._form, self._seed, self._held_out = row, form, seed, held_out

    def prompt(self, seq: int) -> Prompt:
        share = self._form.options.held_out
        for attempt in range(PROCEDURAL_ATTEMPTS):
            row = self._row(seq + attempt * ATTEMPT_STRIDE)
            where = f"row {seq + attempt * ATTEMPT_STRIDE} of {self._form.options.task}"
            if is_held_out(self._form.given(row, where), self._seed, share) != self._held_out:
                continue
            prompt = self._form.prompt(row, where)
            if not self._form.too_long(prompt, where):
                return prompt
        raise PromptError(
            f"prompts: {self._form.options.task} made no {'held-out' if self._held_out else 'training'} prompt for "
            f"group {seq} in {PROCEDURAL_ATTEMPTS} draws; change held_out = {share}, or give the task more different "
            "prompts, or raise max_prompt_tokens"
        )


class PromptForm:
    """How a row becomes a :class:`Prompt`: template, chat template, token ids, and the length limit."""

    def __init__(self, options: PromptOptions, tokenizer: Tokenizer) -> None:
        self.options, self._tokenizer = options, tokenizer
        has_template = tokenizer.chat_template is not None
        self._chat = has_template if options.chat is None else options.chat
        if self._chat and not has_template:
            raise PromptError("prompts.chat = true, but the tokenizer has no chat template; set chat = false")
        if options.system is not None and not has_template:
            raise PromptError("prompts.system needs a chat template, and the tokenizer has none; use prompts.template")

    def given(self, row: Row, where: str) -> str | list[Message]:
        """The row's prompt, checked."""
        return given_of(row, self.options.column, where)

    def prompt(self, row: Row, where: str) -> Prompt:
        given = self.given(row, where)
        fields = {name: value for name, value in row.items() if name != self.options.column}
        text = self._text(given, fields, where)
        # A chat template spells out its special tokens itself.
        templated = self._chat or not isinstance(given, str)
        ids = self._tokenizer(text, add_special_tokens=not templated)["input_ids"]
        if not ids:
            raise PromptError(f"prompts: {where} has no tokens: {text!r}")
        import torch

        return Prompt(torch.tensor(ids, dtype=torch.int64), text, given, fields)

    def fits(self, row: Row, where: str) -> bool:
        return self.options.max_prompt_tokens is None or not self.too_long(self.prompt(row, where), where)

    def too_long(self, prompt: Prompt, where: str) -> bool:
        limit, length = self.options.max_prompt_tokens, len(prompt.ids)
        if limit is None or length <= limit:
            return False
        if self.options.too_long == "error":
            raise PromptError(
                f"prompts: {where} has {length} tokens, more than max_prompt_tokens = {limit}: "
                f"{prompt.text!r:.100}; raise the limit or set too_long = 'skip'"
            )
        return True

    def _text(self, given: str | list[Message], fields: Row, where: str) -> str:
        if isinstance(given, str):
            try:
                filled = self.options.template.format(**fields | {"prompt": given})
            except (KeyError, IndexError, ValueError) as error:
                raise PromptError(
                    f"prompts.template = {self.options.template!r} does not fit {where}: {error!r}; it may name "
                    f"'prompt' and {sorted(fields)}, and a brace of its own is written twice"
                ) from error
            if not self._chat:
                return filled
            messages = [{"role": "user", "content": filled}]
        else:
            messages = given
        if self.options.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.options.system}, *messages]
        if self._tokenizer.chat_template is None:
            raise PromptError(f"prompts: {where} is a conversation, but the tokenizer has no chat template")
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def given_of(row: Mapping[str, Any], column: str, where: str) -> str | list[Message]:
    """What ``row`` has in ``column``, when it is a prompt. Raises :class:`PromptError`."""
    if column not in row:
        raise PromptError(f"prompts: {where} has no column {column!r} (it has {sorted(row)}); set prompts.column")
    given = row[column]
    if isinstance(given, str) and given:
        return given
    if isinstance(given, Sequence) and given and all(_is_message(message) for message in given):
        return [dict(message) for message in given]
    raise PromptError(
        f"prompts: {where} has {given!r:.200} in column {column!r}; a prompt is a string that is not empty, or a list of "
        "messages {'role': ..., 'content': ...}"
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


# --- sources: a table (a sequence of rows), or a function from a number to a row ----------------------------------


def _open(options: PromptOptions, seed: int) -> Sequence[Row] | Callable[[int], Row]:
    match options.source:
        case "external":
            raise PromptError("prompts.source = 'external' is no table: its prompts are put while the run goes on")
        case "jsonl":
            return _jsonl(Path(str(options.path)))
        case "parquet":
            return ParquetRows(Path(str(options.path)))
        case "datasets":
            return _dataset(str(options.path), options.split)
        case "reasoning_gym":
            return _reasoning_gym(str(options.task), options.config, options.column, seed)
        case "builtin":
            task = TASKS[str(options.task)]
            try:
                task(0, seed, **options.config)
            except (TypeError, ValueError) as error:
                raise PromptError(f"prompts.config = {options.config} does not fit {options.task}: {error}") from error
            return lambda number: _renamed(task(number, seed, **options.config), "prompt", options.column)


def _jsonl(path: Path) -> list[Row]:
    rows = []
    with _existing(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise PromptError(f"prompts: {path}, line {number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise PromptError(f"prompts: {path}, line {number} is {row!r:.100}; each line must be an object")
            rows.append(row)
    return rows


class ParquetRows(Sequence[Row]):
    """Rows of a Parquet file, kept as Arrow columns and made into Python values one at a time."""

    def __init__(self, path: Path) -> None:
        _require("pyarrow", "Parquet files", "data")
        import pyarrow.parquet

        self._table = pyarrow.parquet.read_table(_existing(path)).combine_chunks()

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, index: Any) -> Any:
        return self._table.slice(index, 1).to_pylist()[0]


def _dataset(path: str, split: str | None) -> Sequence[Row]:
    if ":" in path:
        try:
            make = imported(path)
        except ImportError as error:
            raise PromptError(f"prompts.path = {path!r} {error}") from error
        try:
            dataset = make()
        except Exception as error:
            raise PromptError(f"prompts.path = {path!r} raised {error!r} ({place_of(error, make)})") from error
    else:
        _require("datasets", "folders written by save_to_disk", "data")
        from datasets import load_from_disk

        dataset = load_from_disk(str(_existing(Path(path))))
    if isinstance(dataset, Mapping):  # a DatasetDict
        if split not in dataset:
            raise PromptError(f"prompts.split = {split!r} is not in {path}; use one of {sorted(dataset)}")
        dataset = dataset[split]
    elif split is not None:
        raise PromptError(f"prompts.split = {split!r}, but {path} has no splits; drop it")
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise PromptError(f"prompts: {path} gave a {type(dataset).__name__}; rows must be reachable by number")
    return dataset


def _reasoning_gym(
    task: str, config: Mapping[str, Any], column: str, seed: int
) -> Sequence[Row] | Callable[[int], Row]:
    _require("reasoning_gym", "reasoning_gym tasks", "quickstart")
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise PromptError(f"prompts.task = {task!r} is not a task of reasoning_gym; it has {sorted(DATASETS)}")
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
        return [row(number) for number in range(len(dataset))]
    return row


def _renamed(row: Row, name: str, to: str) -> Row:
    return {to if key == name else key: value for key, value in row.items()}


def _existing(path: Path) -> Path:
    if not path.expanduser().exists():
        raise PromptError(f"prompts.path = {str(path)!r} does not exist (seen from {Path.cwd()})")
    return path.expanduser()


def _require(module: str, what: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise PromptError(f"prompts: {what} need the package {module}: pip install 'asyncdock[{extra}]'")
