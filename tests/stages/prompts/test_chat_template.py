"""A recipe's own chat template, its options, and the example that a check shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from api.cli.main import app
from api.server.access.submission_policy import accept
from api.server.service import Settings
from orchestration.recipe.checks.examples import example_prompts
from orchestration.recipe.problems import RecipeError
from orchestration.run.engines import tokenizer_of
from stages.models import tiny_tokenizer
from stages.prompts.options import PromptOptions
from stages.prompts.sources import load_prompts
from tests.orchestration.runs import TINY, recipe

THINKING = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}model:{% endif %}{% if not enable_thinking | default(true) %} -{% endif %}"
)


@pytest.fixture
def template(tmp_path: Path) -> str:
    (tmp_path / "chat.jinja").write_text(THINKING)
    return str(tmp_path / "chat.jinja")


def of_template(template: str, **more: Any) -> dict[str, Any]:
    return {"source": "builtin", "task": "repeat", "max_prompt_tokens": 64, "chat_template": template, **more}


@pytest.mark.parametrize(("options", "end"), [({}, "model:"), ({"enable_thinking": False}, "model: -")])
def test_prompts_go_into_the_template_with_its_options(template: str, options: dict[str, Any], end: str) -> None:
    tokenizer = tiny_tokenizer()
    given = PromptOptions(**of_template(template, chat_template_options=options, system="be short"))
    prompt = load_prompts(given, tokenizer, seed=0).train.prompt(0)
    assert prompt.text == f"system: be short\nuser: {prompt.given}\n{end}"
    assert prompt.ids.tolist() == tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
    assert tokenizer.chat_template is None, "the tokenizer that was given is not changed"


def test_it_replaces_the_tokenizers_own(template: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    assert load_prompts(PromptOptions(**of_template(template)), tokenizer, 0).train.prompt(0).text.endswith("model:")
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
        ({"text": "{% for m in messages %}"}, "prompts.chat_template", "refused by the chat template"),
        ({"text": "{% if %}{{"}, "prompts.chat_template", "chat template"),
        ({"text": "{{ messages[0].no.such }}"}, "prompts.chat_template", "refused by the chat template"),
        ({"chat_template_options": {"thinking": 1}}, "prompts.chat_template_options.thinking", "is not read by"),
        ({"chat_template_options": {"messages": []}}, "prompts.chat_template_options.messages", "is set for each"),
        ({"chat_template": None, "chat_template_options": {"a": 1}}, "prompts.chat_template_options", "no effect"),
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
    with pytest.raises(RecipeError, match=r"prompts\.chat_template .* outside of what this server reads"):
        accept(Settings(data=tmp_path), data, {})
    assert accept(Settings(data=tmp_path, roots=[tmp_path]), data, {}).prompts.chat_template == template


def test_check_shows_the_first_prompt_as_the_model_reads_it(template: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "ab", "answer": "a"}\n' * 3)
    prompts = {"source": "jsonl", "path": str(tmp_path / "rows.jsonl"), "chat_template": template}
    data = {**TINY, "prompts": {**prompts, "max_prompt_tokens": 64}}
    data = {**data, "evaluate": {"every": 0}}
    (tmp_path / "own.json").write_text(json.dumps(data))
    as_text = CliRunner().invoke(app, ["check", str(tmp_path / "own.json")])
    assert as_text.exit_code == 0, as_text.output
    assert "line 1, 15 tokens\n  user: ab\n  model:" in as_text.stdout
    as_json = json.loads(CliRunner().invoke(app, ["check", str(tmp_path / "own.json"), "--json"]).stdout)
    assert as_json["examples"] == [
        {"where": f"{tmp_path / 'rows.jsonl'}, line 1", "text": "user: ab\nmodel:", "tokens": 15}
    ]


def test_a_first_prompt_that_is_skipped_is_no_example(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "%s", "answer": "a"}\n{"prompt": "a", "answer": "a"}\n' % ("a" * 99)
    )
    prompts = {"source": "jsonl", "path": str(tmp_path / "rows.jsonl"), "max_prompt_tokens": 9}
    assert example_prompts(recipe({**TINY, "prompts": prompts})) == []
