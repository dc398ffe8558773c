"""Example prompts of a recipe, as its model reads them, and checks of its tokenizer and its chat
template."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestration.recipe.checks.machine import prompts_can_be_read
from orchestration.recipe.checks.registry import Environment, machine_check, problem
from orchestration.recipe.model_files import KNOWN_MODELS, tokens_of
from orchestration.recipe.problems import RecipeError, value_or_none
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sections import FILTERS
from orchestration.recipe.sizes.planner import prompt_limits, vocabulary_of
from pipeline.problems import Problem
from stages.prompts.conversations import chosen_template, is_template_name
from stages.prompts.rows.checked import prompt_check
from stages.prompts.rows.files import PromptError, Reading, Row
from stages.prompts.rows.opened import open_rows
from stages.prompts.rows.options import PromptOptions
from stages.prompts.rows.prompt_check import PromptCheck
from stages.prompts.rows.templates import check_chat_options, read_chat_template
from stages.prompts.rows.values import describe
from stages.prompts.too_long import LongPrompts

if TYPE_CHECKING:
    from stages.environments.dialogue.choice import Dialogues
    from stages.model.load import Tokenizer


FEW_ROWS = 20  # read of a file for an example
# any tokenizer reads them
TEXTS = ("What is 3 + 4?\n", *(character * 60 + "!" for character in "a1 \n_-é字"))
# Conversations, of which a template takes one at least.
QUESTION = {"role": "user", "content": "What is 3 + 4?"}
INVENTED = (
    [QUESTION],
    [{"role": "system", "content": "Answer."}, QUESTION],
    [QUESTION, {"role": "assistant", "content": "3"}],
)


@dataclass(frozen=True)
class ExamplePrompt:
    """The prompt of one row: ``where`` it is, the ``text`` that the model reads, and how many
    ``tokens`` that has."""

    where: str
    text: str
    tokens: int


def example_prompts(recipe: Recipe) -> list[ExamplePrompt]:
    """Render the first prompt of each source as a run would.

    Leaves out sources whose rows other programs or functions make, and a prompt that is too long;
    returns none while the tokenizer of "smollm2" is not converted. Raises RecipeError for a row
    that makes no prompt.
    """
    tokenizer = tokenizer_at_hand(recipe)
    if tokenizer is None:
        return []
    from stages.prompts.formatter import PromptFormatter

    found = []
    try:
        opens = dialogues_at_hand(recipe, tokenizer)
        for part in recipe.prompts.parts().values():
            rows = _first_rows(part, recipe.seed)
            form = PromptFormatter(part, tokenizer, prompt_limits(recipe), opens)
            if rows and (prompt := form.bounded(*rows[0], LongPrompts(None))) is not None:
                found.append(ExamplePrompt(rows[0][1], prompt.text, len(prompt.ids)))
    except PromptError as error:
        raise RecipeError(recipe.name, error.problems) from error
    return found


def dialogues_at_hand(recipe: Recipe, tokenizer: Tokenizer) -> Dialogues | None:
    """Return what writes the conversations of a run with environments; None for another run.

    Imports the environments' classes. Raises CodeUnusable, and PromptError for a template that
    cannot write their turns.
    """
    section = recipe.environment
    if section.use is None:
        return None
    from orchestration.recipe.dialogue import dialogues_of
    from stages.environments.classes import environments
    from stages.environments.interface import Declarations

    factories = environments(section.use, section.options)
    declared = Declarations({name: each.declare() for name, each in factories.items()})
    return dialogues_of(recipe, tokenizer, declared)


def prompt_sources(recipe: Recipe) -> list[str]:
    """Say which files, splits and rows the prompts of a sound ``recipe`` are of, and which columns'
    values are converted. As far as a check reads; nothing is said of sources whose rows other
    programs or functions make."""
    found = []
    for key, part in recipe.prompts.parts().items():
        check = prompt_check(part, Reading())
        for _ in check.faults():
            pass
        texts = [check.about] if check.about else []
        found += [f"{key}: {text}" for text in [*texts, *describe(check.changes)]]
    return found


def tokenizer_at_hand(recipe: Recipe) -> Tokenizer | None:
    """The recipe's tokenizer; None where it cannot be loaded, or not at once."""
    from stages.model.load import is_ready, load_tokenizer

    source = "tiny" if recipe.model.source == "mock" else recipe.model.source
    return value_or_none(lambda: load_tokenizer(source) if is_ready(source) else None)


def _first_rows(options: PromptOptions, seed: int) -> list[tuple[Row, str]]:
    """The first row of a source and where it is, and perhaps one more; none where they cannot be
    had without running code of the user."""
    match options.source:
        case "jsonl" | "parquet":
            check = prompt_check(options, Reading(rows=FEW_ROWS))
            for _ in check.faults():
                pass
            return check.examples
        case "external":
            return []
        case "datasets" if ":" in str(options.path):
            return []
    # A task without a size makes its rows one by one.
    config = {name: value for name, value in options.config.items() if name != "size"}
    rows = open_rows(options.model_copy(update={"config": config}), seed)
    where = f"row 1 of {options.task or options.path}"
    return [(rows(0) if callable(rows) else rows[0], where)]


@machine_check("model.source")
def tokenizer_reads_texts(recipe: Recipe, environment: Environment) -> Iterator[Problem]:
    """Some expressions of a tokenizer.json make its library fail on some texts."""
    if vocabulary_of(recipe) is None or recipe.model.source in KNOWN_MODELS:
        return
    if (tokenizer := tokenizer_at_hand(recipe)) is None:
        return
    from stages.model.load import TokenizerFailed

    try:
        for text in TEXTS:
            tokenizer.decode(tokenizer(text)["input_ids"])
    except TokenizerFailed as error:
        yield from (
            problem(recipe, "model.source", each.wrong, each.fix) for each in error.problems
        )


@machine_check("model.source", "prompts.chat_template")
def embedding_has_all_tokens(recipe: Recipe, environment: Environment) -> Iterator[Problem]:
    """Special tokens beyond the embedding are allowed where neither the end of a text nor the chat
    template needs them: checkpoints of a family share a tokenizer that has tokens for images too.
    """
    rows = vocabulary_of(recipe)
    if (
        rows is None
        or recipe.model.source in KNOWN_MODELS
        or (tokenizer := tokenizer_at_hand(recipe)) is None
    ):
        return
    try:
        template = chosen_template(recipe.prompts.chat_template, tokenizer) or ""
    except PromptError:  # reported for the template
        template = ""
    ends = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    added = tokenizer.added_tokens_decoder
    beyond = {
        number: token
        for token, number in tokenizer.get_vocab().items()
        if number >= rows
        and (
            number in ends or token in template or number not in added or not added[number].special
        )
    }
    if beyond:
        reason = (
            f"has a tokenizer with more tokens than the model: {beyond[min(beyond)]!r:.60} has the "
            f"id {min(beyond)}, and the embedding has {rows} rows"
        )
        fix = (
            "save the model after `model.resize_token_embeddings(len(tokenizer))`, or copy its "
            "own tokenizer there"
        )
        yield problem(recipe, "model.source", reason, fix)


@machine_check("prompts", "model.source", after=(prompts_can_be_read,))
def prompts_are_rendered(recipe: Recipe, environment: Environment) -> Iterator[Problem]:
    """Check the chat template, and responses that rows give, on rows of each source.

    Where none can be read, the template need take one of several conversations.
    """
    prompts = recipe.prompts
    key = "prompts.chat_template" if prompts.chat_template else "prompts.chat_template_options"
    if not (prompts.chat_template or prompts.chat_template_options or prompts.responses):
        return
    try:
        tokenizer = tokenizer_at_hand(recipe)
        if tokenizer is None:
            if prompts.chat_template and not is_template_name(prompts.chat_template):
                check_chat_options(
                    read_chat_template(prompts.chat_template), prompts.chat_template_options
                )
            return
        template = chosen_template(prompts.chat_template, tokenizer)
        if template is None and prompts.chat_template_options:
            fix = "give one with prompts.chat_template, or take them out"
            yield problem(
                recipe, key, f"has no effect: model.source = {recipe.model.source!r} has none", fix
            )
            return
        if template is not None:
            check_chat_options(template, prompts.chat_template_options)
        for name, part in prompts.parts().items():
            if name in environment.prompts:
                yield from _rendering_problems(
                    recipe, key, part, tokenizer, environment.prompts[name]
                )
    except PromptError as error:
        yield _template_problem(recipe, key, error)


def _rendering_problems(
    recipe: Recipe, key: str, part: PromptOptions, tokenizer: Tokenizer, check: PromptCheck
) -> Iterator[Problem]:
    """Problems of the rows that were read, or of a task's first row; of a source whose rows cannot
    be read, one that all invented conversations have."""
    from stages.prompts.formatter import PromptFormatter

    if check.has_faults and not check.examples:
        return
    rows = check.examples or _first_rows(part, recipe.seed)
    if rows or part.source in ("jsonl", "parquet"):
        for row, where in rows:
            PromptFormatter(part, tokenizer).prompt(row, where)
        return
    if chosen_template(part.chat_template, tokenizer) is None:
        return  # the rows may be texts, which need none
    formatter = PromptFormatter(part.model_copy(update={"responses": []}), tokenizer)
    errors = list[PromptError]()
    for messages in INVENTED:
        try:
            formatter.prompt({part.column: messages}, "an example")
            return
        except PromptError as error:
            errors.append(error)
    yield _template_problem(recipe, key, errors[0])


def _template_problem(recipe: Recipe, key: str, error: PromptError) -> Problem:
    """The problem of the option that ``error`` names, or else of ``key``."""
    [found] = error.problems
    if found.key != "prompts":
        return found
    options = recipe.prompts.chat_template or recipe.prompts.chat_template_options
    return problem(recipe, key if options else "prompts.responses", found.wrong, found.fix)


@machine_check(
    *("model.source", "model.vocabulary", "rollout.engine"), *(f"rollout.{key}" for key in FILTERS)
)
def padding_can_be_masked(recipe: Recipe, environment: Environment) -> Iterator[Problem]:
    """The torch engine leaves out tokens that the tokenizer does not have.

    So does vLLM, but not of the logprobs that it gives with filters.
    """
    rollout = recipe.rollout
    can_mask = rollout.engine in ("torch", "mock") or (
        rollout.engine == "vllm" and not rollout.filters
    )
    if recipe.model.vocabulary != "tokenizer" or can_mask:
        return
    tokens = tokens_of(recipe.model.source)
    rows = vocabulary_of(recipe)
    if rows is not None and tokens is not None and tokens < rows:
        reason = (
            f"leaves out {rows - tokens:,} tokens, which rollout.engine = "
            f"{recipe.rollout.engine!r} samples"
        )
        yield problem(
            recipe, "model.vocabulary", reason, "set it to 'auto', or rollout.engine = 'torch'"
        )
