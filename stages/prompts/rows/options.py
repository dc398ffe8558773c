"""The recipe's section [prompts], and how long a prompt may be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    model_validator,
)

from stages.json_schema import (
    FixedOnResume,
    IsCode,
    IsPath,
    faults,
    key,
    only_where,
    schema_of,
    unit,
)
from stages.prompts.rows.templates import parse_template
from stages.tasks.tasks import TASKS, task_config

# A text of more characters than TOKEN_CHARACTERS for each token that it may have is too long
# without being tokenized, if it has more than SHORT_CHARACTERS.
TOKEN_CHARACTERS = 64
SHORT_CHARACTERS = 2**16
Kind = Literal["jsonl", "parquet", "datasets", "reasoning_gym", "builtin", "external"]


@dataclass(frozen=True)
class PromptLimits:
    """The limits of a prompt's length: ``tokens``, for the reason ``why``, and ``nbytes`` of its
    row as JSON. ``response``: tokens of a given response that are kept at most. None: no limit."""

    tokens: int | None = None
    why: str = "prompts.max_prompt_tokens"
    nbytes: int | None = None
    response: int | None = None

    @property
    def characters(self) -> int:
        """A text of more characters is too long without being tokenized."""
        return max(
            SHORT_CHARACTERS,
            TOKEN_CHARACTERS * (SHORT_CHARACTERS if self.tokens is None else self.tokens),
        )


class RowOptions(BaseModel):
    """Rows of one source, and the prompt in a row."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: Annotated[
        Kind | None,
        FixedOnResume(
            "what other programs put is kept by the numbers of groups, which other sources do not "
            "keep"
        ),
    ] = key(
        None,
        "Kind of source, required where there are no `prompts.sources`. `external`: other programs "
        "put prompts into the run while it goes on.",
    )
    path: Annotated[str | None, IsPath(), IsCode("dataset", "refused")] = key(
        None,
        "`jsonl`, `parquet`: the file, or a folder of such files. `datasets`: a folder written by "
        "`save_to_disk`, or "
        "`module:function` that returns a data set: anything with `len` and rows as mappings, or a "
        "table of pandas or "
        "pyarrow.",
    )
    task: str | None = key(
        None,
        "`reasoning_gym`: the name of its task. `builtin`: "
        f"{', '.join(f'`{name}`' for name in TASKS)}.",
    )
    config: Annotated[dict[str, Any], schema_of(task_config("repeat") | dict[str, Any])] = key(
        {},
        "Options of the task. With `size` a reasoning_gym task is a table of that many rows; "
        "without, it has no end. Those of `repeat` follow; those of the other tasks of `builtin` "
        "are in the table of tasks.",
    )
    split: str | None = key(
        None,
        "Name of the split, where there are several. Of a folder of files they are found by name, "
        "as the library `datasets` does: `train-00000-of-00002.parquet`, `data/test.jsonl`, "
        "`validation/…`. Default: `train`.",
    )
    column: str = key(
        "prompt",
        "Column with the prompt: a string, or a list of messages with `role` and `content`. The "
        "other columns go to the reward functions.",
    )
    template: str = key(
        "{prompt}", "Template of string prompts: `{prompt}`, and any other column by its name."
    )
    leave_out: list[str] = key(
        [],
        "Columns that are not read, such as images: a column with values that are no numbers, "
        "texts, dates or lists of them is an error.",
    )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: Any, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return only_where({"source": "builtin", "task": "repeat"}, "config", core, handler)

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        """Raise one ValidationError with all keys that do not fit together."""
        faults(self, self._faults())
        return self

    def _faults(self) -> Iterator[tuple[str, str, str]]:
        """Yield keys that do not fit the others, each with what is wrong and what to do."""
        if self.source is None:
            yield "source", "is missing", f"write one of {', '.join(get_args(Kind))}"
            return
        needed = {"external": None, "reasoning_gym": "task", "builtin": "task"}.get(
            self.source, "path"
        )
        unused = {"task": ["path"], "path": ["task", "config"], None: ["path", "task", "config"]}[
            needed
        ]
        if needed and not getattr(self, needed):
            yield needed, "is missing", f"source = {self.source!r} needs it"
        for name in unused if needed == "path" else [*unused, "split"]:
            if value := getattr(self, name):
                fix = "take it out; over a recipe that has it, "
                is_text = isinstance(value, str)
                fix += f'write {name} = ""' if is_text else f"give --set prompts.{name}={{}}"
                yield name, f"means nothing for source = {self.source!r}", fix
        if self.source == "builtin" and self.task and self.task not in TASKS:
            yield "task", "is not known", f"use one of {sorted(TASKS)}"
        if self.column in self.leave_out:
            yield "leave_out", f"has the column of the prompt, {self.column!r}", "take it out"
        if "{prompt}" not in self.template:
            yield "template", "must contain {prompt}", "write it where the prompt belongs"
        try:
            parse_template(self.template)
        except ValueError as error:
            fix = "name columns as {prompt}, and write a brace twice"
            yield "template", f"is not a template ({error})", fix


class WeightedSource(RowOptions):
    """One of several sources of prompts."""

    weight: float = key(1.0, "Its share of the prompts, divided by the sum of all weights.", gt=0)

    def _faults(self) -> Iterator[tuple[str, str, str]]:
        yield from super()._faults()
        if self.source == "external":
            problem = "is put by other programs, and cannot be one of several"
            yield "source", problem, "use prompts.source = 'external'"


class PromptOptions(RowOptions):
    """Where prompts come from and how they are put to the model."""

    sources: list[WeightedSource] = key(
        [],
        "Several sources instead of one, each a table with the keys above and its weight.",
        max_length=64,
    )
    shuffle: bool = key(
        True,
        "Shuffle the rows of a table in each epoch, by the seed. Otherwise: in their own order.",
    )
    sampling: Literal["uniform", "difficulty"] = key(
        "uniform",
        "`uniform`: every prompt of an epoch. `difficulty`: prompts whose responses never had "
        "different rewards (solved from the beginning, or hopeless) are passed over most of the "
        "time, and those that were solved later more and more. An epoch is then one pass over the "
        "source, in which each prompt is used or passed over.",
    )
    system: str | None = key(
        None,
        "System message before each conversation that does not begin with one. Needs a chat "
        "template.",
    )
    chat: bool | None = key(
        None,
        "Put string prompts into the tokenizer's chat template as the user's message. "
        "Default: if it has one.",
    )
    chat_template: Annotated[str | None, IsPath()] = key(
        None,
        "Jinja file with a chat template that replaces the tokenizer's, or the name of one of "
        "several that the tokenizer has. Checkpoints of the model keep it. Default: the "
        "tokenizer's, of several the one named `default`.",
    )
    chat_template_options: dict[str, Any] = key(
        {}, "Variables of the chat template, for example `{ enable_thinking = false }`."
    )
    max_prompt_tokens: Annotated[int, Field(ge=1), unit("tokens")] | None = key(
        None, "Longest prompt. Default: no limit."
    )
    too_long: Literal["skip", "cut", "fail"] = key(
        "skip",
        "A prompt longer than `max_prompt_tokens`, or than the model has room for: `skip` it, "
        "`cut` its beginning off, or `fail` the run. Those skipped or cut are counted, and listed "
        "in `too-long.jsonl`.",
    )
    responses: list[str] = key(
        [],
        "Columns with responses, texts or messages: nothing is generated, and each prompt has "
        "these, the best first. "
        '`["response"]` for `sft`; `["chosen", "rejected"]` for `dpo`. Of several turns those of '
        "the assistant are trained.",
        max_length=64,
    )
    held_out: Annotated[
        float, FixedOnResume("evaluation would ask prompts that training has seen")
    ] = key(
        0.0,
        "Share of distinct prompts, with environments of distinct rows, that training never sees, "
        "for evaluation.",
        ge=0.0,
        lt=1.0,
    )

    def _faults(self) -> Iterator[tuple[str, str, str]]:
        if self.sources:
            for name in RowOptions.model_fields:
                if getattr(self, name) != RowOptions.model_fields[name].default:
                    fix = "write it in each [[prompts.sources]], and extend no recipe that has it"
                    yield name, "means nothing beside prompts.sources", fix
        else:
            yield from super()._faults()
        if self.source == "external" and self.held_out:
            yield "held_out", f"means nothing for source = {self.source!r}", "take it out"
        if self.chat is False and self.system is not None:
            yield "system", "needs a chat template, but prompts.chat = false", "drop one of the two"

    def parts(self) -> dict[str, PromptOptions]:
        """Return the options of each source as if it were the only one, by the key of its table in
        the recipe."""
        if not self.sources:
            return {"prompts": self}
        return {
            f"prompts.sources.{index}": self.model_copy(
                update={
                    "sources": [],
                    **{name: getattr(source, name) for name in RowOptions.model_fields},
                }
            )
            for index, source in enumerate(self.sources)
        }
