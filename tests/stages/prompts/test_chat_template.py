"""A recipe's own chat template, its options, and the example that a check shows."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from api.cli.main import app
from api.server.access.settings import Settings
from api.server.access.submission_policy import accept
from orchestration.recipe.checks.examples import example_prompts
from orchestration.recipe.checks.registry import MACHINE_CHECKS, machine_checks
from orchestration.recipe.models import tokenizer_of
from orchestration.recipe.problems import RecipeError
from stages.model.load import tiny_model, tiny_tokenizer
from stages.prompts.rows.options import PromptOptions
from stages.prompts.sources import load_prompts
from tests.orchestration.runs import TINY, recipe

THINKING = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if "
    "add_generation_prompt %}model:{% endif %}{% if not enable_thinking | default(true) %} -{% "
    "endif %}"
)


@pytest.fixture
def template(tmp_path: Path) -> str:
    (tmp_path / "chat.jinja").write_text(THINKING)
    return str(tmp_path / "chat.jinja")


def of_template(template: str, **more: Any) -> dict[str, Any]:
    return {
        "source": "builtin",
        "task": "repeat",
        "max_prompt_tokens": 64,
        "chat_template": template,
        **more,
    }


@pytest.mark.parametrize(
    ("options", "end"), [({}, "model:"), ({"enable_thinking": False}, "model: -")]
)
def test_prompts_go_into_the_template_with_its_options(
    template: str, options: dict[str, Any], end: str
) -> None:
    tokenizer = tiny_tokenizer()
    given = PromptOptions(**of_template(template, chat_template_options=options, system="be short"))
    prompt = load_prompts(given, tokenizer, seed=0).train.prompt(0)
    assert prompt.text == f"system: be short\nuser: {prompt.given}\n{end}"
    assert prompt.ids.tolist() == tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
    assert tokenizer.chat_template is None, "the tokenizer that was given is not changed"


def test_it_replaces_the_tokenizers_own(template: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    assert (
        load_prompts(PromptOptions(**of_template(template)), tokenizer, 0)
        .train.prompt(0)
        .text.endswith("model:")
    )
    own = PromptOptions(source="builtin", task="repeat", chat_template_options={"anything": 1})
    assert load_prompts(own, tokenizer, 0).train.prompt(0).text.endswith("=]")


def test_checkpoints_keep_it_and_a_run_finds_it_from_any_folder(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    of = recipe({**TINY, "prompts": of_template("chat.jinja", held_out=0.1)}).with_absolute_paths()
    monkeypatch.chdir("/")
    assert of.prompts.chat_template == template
    tokenizer_of(of).save_pretrained(tmp_path / "model")
    assert (tmp_path / "model" / "chat_template.jinja").read_text() == THINKING


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        ({"chat_template": "/no/such.jinja"}, "prompts.chat_template", "cannot be read"),
        ({"chat_template": "/dev/null"}, "prompts.chat_template", "is a device"),
        (
            {"text": "{% for m in messages %}"},
            "prompts.chat_template",
            "refused by the chat template",
        ),
        ({"text": "{% if %}{{"}, "prompts.chat_template", "chat template"),
        (
            {"text": "{{ messages[0].no.such }}"},
            "prompts.chat_template",
            "refused by the chat template",
        ),
        (
            {"chat_template_options": {"thinking": 1}},
            "prompts.chat_template_options.thinking",
            "is not read by",
        ),
        (
            {"chat_template_options": {"messages": []}},
            "prompts.chat_template_options.messages",
            "is set for each",
        ),
        (
            {"chat_template": None, "chat_template_options": {"a": 1}},
            "prompts.chat_template_options",
            "no effect",
        ),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_by_its_key(
    changes: dict[str, Any], key: str, message: str, template: str
) -> None:
    if text := changes.pop("text", ""):
        Path(template).write_text(text)
    with pytest.raises(RecipeError) as refused:
        recipe({**TINY, "prompts": of_template(template) | changes})
    found = {problem.key: problem.wrong for problem in refused.value.problems}
    assert list(found) == [key]
    assert message in found[key]


def test_a_request_reads_no_template_outside_of_the_roots(template: str, tmp_path: Path) -> None:
    data = {**TINY, "prompts": of_template(template)}
    with pytest.raises(
        RecipeError,
        match=r"prompts\.chat_template .* outside of what this server "
        r"reads",
    ):
        accept(Settings(data=tmp_path), data, {})
    assert (
        accept(Settings(data=tmp_path, roots=[tmp_path]), data, {}).prompts.chat_template
        == template
    )


def test_check_shows_the_first_prompt_as_the_model_reads_it(template: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "ab", "answer": "a"}\n' * 3)
    prompts = {"source": "jsonl", "path": str(tmp_path / "rows.jsonl"), "chat_template": template}
    data = {**TINY, "prompts": {**prompts, "max_prompt_tokens": 64}}
    data = {**data, "evaluate": {"every": 0}}
    (tmp_path / "own.json").write_text(json.dumps(data))
    as_text = CliRunner().invoke(app, ["check", str(tmp_path / "own.json")])
    assert as_text.exit_code == 0, as_text.output
    assert "line 1, 15 tokens\n  user: ab\n  model:" in as_text.stdout
    as_json = json.loads(
        CliRunner().invoke(app, ["check", str(tmp_path / "own.json"), "--json"]).stdout
    )
    assert as_json["examples"] == [
        {"where": f"{tmp_path / 'rows.jsonl'}, line 1", "text": "user: ab\nmodel:", "tokens": 15}
    ]


def test_a_first_prompt_that_is_skipped_is_no_example(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "%s", "answer": "a"}\n{"prompt": "a", "answer": "a"}\n' % ("a" * 99)
    )
    prompts = {"source": "jsonl", "path": str(tmp_path / "rows.jsonl"), "max_prompt_tokens": 9}
    assert example_prompts(recipe({**TINY, "prompts": prompts})) == []


NEEDS_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ raise_exception('a system message is needed') }}{% "
    "endif %}" + THINKING
)
CONVERSATION = [{"role": "system", "content": "b"}, {"role": "user", "content": "a"}]


def conversations() -> list[dict[str, Any]]:
    return [{"prompt": CONVERSATION, "answer": "a"}] * 3


def problems_of(prompts: dict[str, Any], **changes: Any) -> dict[str, str]:
    try:
        recipe(
            {**TINY, "prompts": {"max_prompt_tokens": 64, **prompts}, "evaluate": {"every": 0}},
            **changes,
        )
    except RecipeError as error:
        return {problem.key: problem.wrong for problem in error.problems}
    return {}


def rows_file(tmp_path: Path, *rows: dict[str, Any]) -> str:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "rows.jsonl")


def test_a_template_is_judged_on_the_rows_that_it_gets(template: str, tmp_path: Path) -> None:
    """Recipes were refused because an invented row, without a system message or a response, did not
    fit."""
    Path(template).write_text(NEEDS_SYSTEM)
    system = {
        "source": "jsonl",
        "path": rows_file(tmp_path, *conversations()),
        "chat_template": template,
    }
    assert problems_of(system) == {}
    given = {**system, "responses": ["answer"]}
    assert problems_of(given, algorithm__name="sft", algorithm__group_size=1) == {}
    texts = {**system, "path": rows_file(tmp_path, {"prompt": "a", "answer": "a"})}
    found = problems_of(texts)
    assert list(found) == ["prompts.chat_template"]
    assert (
        f"{tmp_path / 'rows.jsonl'}, line 1 is refused by the chat template (a system message"
        in found["prompts.chat_template"]
    )
    assert problems_of({**texts, "system": "be short"}) == {}


def test_a_template_is_judged_on_the_rows_of_a_saved_dataset_and_of_a_task(
    template: str, tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    Path(template).write_text(NEEDS_SYSTEM)
    datasets.Dataset.from_list(conversations()).save_to_disk(str(tmp_path / "saved"))
    assert (
        problems_of(
            {"source": "datasets", "path": str(tmp_path / "saved"), "chat_template": template}
        )
        == {}
    )
    of_task = {"source": "builtin", "task": "repeat", "chat_template": template}
    assert "row 1 of repeat is refused" in problems_of(of_task)["prompts.chat_template"]
    assert problems_of({**of_task, "system": "be short"}) == {}


@pytest.mark.parametrize(
    "source",
    [{"source": "external"}, {"source": "datasets", "path": f"{__name__}:conversations"}],
    ids=["external", "function"],
)
def test_a_template_need_take_one_of_several_conversations_where_no_row_can_be_read(
    source: dict[str, Any], template: str
) -> None:
    Path(template).write_text(NEEDS_SYSTEM)
    assert problems_of({**source, "chat_template": template}) == {}
    Path(template).write_text("{{ messages[0].no.such }}")
    assert list(problems_of({**source, "chat_template": template})) == ["prompts.chat_template"]


def texts() -> list[dict[str, str]]:
    return [{"prompt": "a", "answer": "b"}]


def test_responses_that_a_function_makes_need_no_template() -> None:
    source = {"source": "datasets", "path": f"{__name__}:texts", "responses": ["answer"]}
    assert problems_of(source, algorithm__name="sft", algorithm__group_size=1) == {}


def test_checks_run_after_those_whose_findings_they_read() -> None:
    order = [check.__name__ for check in machine_checks()]
    readers = [
        check.__name__
        for check in MACHINE_CHECKS
        if "environment.prompts" in inspect.getsource(check)
    ]
    assert set(readers) >= {
        "prompts_can_be_read",
        "prompts_are_rendered",
        "rewards_get_their_columns",
        "chat_template_exists",
    }
    assert (
        min(map(order.index, readers))
        == order.index("prompts_can_be_read")
        > order.index("model_can_be_loaded")
    )


def test_given_responses_are_rendered_by_the_check(tmp_path: Path, template: str) -> None:
    turns = [
        {"role": role, "content": text}
        for role, text in (("assistant", "a"), ("user", "b"), ("assistant", "c"))
    ]
    rows = rows_file(tmp_path, {"prompt": "a", "answer": "a"}, {"prompt": "a", "answer": turns})
    given = {"source": "jsonl", "path": rows, "responses": ["answer"]}
    sft = {"algorithm__name": "sft", "algorithm__group_size": 1}
    assert (
        "line 2 has a response of several turns, which needs a chat template"
        in problems_of(given, **sft)["prompts.responses"]
    )
    assert problems_of({**given, "chat_template": template}, **sft) == {}
    Path(template).write_text(
        THINKING.replace("m['content']", "(m['content'] if loop.last or m.role == 'user' else '')")
    )
    found = problems_of({**given, "chat_template": template}, **sft)
    assert (
        "line 2 has a response of several turns, and the chat template renders message"
        in found["prompts.chat_template"]
    )


def model_of(folder: Path, **changes: Any) -> str:
    tokenizer = tiny_tokenizer()
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    tiny_model(0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_tokenizer_without_an_end_is_refused_where_responses_are_given(tmp_path: Path) -> None:
    path = rows_file(tmp_path, {"prompt": "a", "answer": "a"})
    given = {"source": "jsonl", "path": path, "responses": ["answer"]}
    changes = {"model__source": model_of(tmp_path / "model", eos_token=None)}
    found = problems_of(given, algorithm__name="sft", algorithm__group_size=1, **changes)
    assert list(found) == ["prompts.responses"]
    assert (
        "line 1 has a response, and the tokenizer has no end-of-sequence token"
        in found["prompts.responses"]
    )
    assert problems_of({"source": "jsonl", "path": path}, **changes) == {}, (
        "what is sampled ends at rollout.max_tokens"
    )


def test_a_template_is_chosen_by_its_name_and_kept_in_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = model_of(
        tmp_path / "model",
        chat_template={"default": THINKING, "short": "{{ messages[0].content }}."},
    )
    prompts = {"source": "builtin", "task": "repeat", "chat_template": "short"}
    of = recipe(
        {**TINY, "prompts": {**prompts, "held_out": 0.1}}, model__source=source
    ).with_absolute_paths()
    assert of.prompts.chat_template == "short"
    assert tokenizer_of(of).chat_template == "{{ messages[0].content }}."
    assert (
        "it has ['default', 'short']"
        in problems_of({**prompts, "chat_template": "long"}, model__source=source)[
            "prompts.chat_template"
        ]
    )
    assert "(it has none)" in problems_of(prompts)["prompts.chat_template"]
    (tmp_path / "server").mkdir()
    monkeypatch.chdir(tmp_path / "server")
    data = {**TINY, "prompts": {**prompts, "held_out": 0.1}, "model": {"source": source}}
    assert (
        accept(Settings(data=tmp_path, roots=[tmp_path / "model"]), data, {}).prompts.chat_template
        == "short"
    )
