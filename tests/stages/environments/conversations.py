"""Chat templates as models have them, and a tokenizer that knows their tokens."""

from __future__ import annotations

import string
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as RawTokenizer
from transformers import PreTrainedTokenizerFast

from stages.environments.interface import Message, Tool
from stages.model.load import Tokenizer

ADD: Tool = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# With tools and thinking, as Qwen 3's. THINKS: which messages keep what was thought.
_QWEN = """\
{%- set last = namespace(user=0) %}
{%- for m in messages if m.role == 'user' %}{% set last.user = last.user + 1 %}{% endfor %}
{%- set seen = namespace(users=0) %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{% endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- set seen.users = seen.users + 1 %}
        {{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if m.reasoning_content and THINKS %}
            {{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- m.content }}
        {%- for call in m.tool_calls or [] %}
            {%- if m.content or not loop.first %}{{- '\\n' }}{% endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
QWEN_REWRITES = _QWEN.replace("THINKS", "seen.users == last.user")
QWEN_APPENDS = _QWEN.replace("THINKS", "true")
LLAMA = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim }}"
    "{{ '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + '</s>' }}{% endif %}{% endfor %}"
)
SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "</s>",
    "<|endoftext|>",
    "|im_end|>",  # within another one
]
ADDED = [
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]


def byte_level() -> Tokenizer:
    """A byte-level BPE with the special tokens of all templates, and added ones, as Qwen's."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    raw.train_from_iterator(["What is 3+4?\n\nIt is  7.\n assistant user system"] * 20, trainer)
    raw.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>")


def with_spaces() -> Tokenizer:
    """A token for each character, or its bytes; a space before each text, as of SentencePiece."""
    texts = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *string.ascii_letters]
    vocabulary = {text: number for number, text in enumerate(texts)}
    raw = RawTokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    raw.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>", unk_token="<unk>")


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def result(text: str) -> Message:
    return {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": text}


def rendered(tokenizer: Tokenizer, template: str, messages: list[Message], **how: Any) -> str:
    """What the template writes for a whole conversation, to the beginning of the next turn."""
    return str(
        tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True, **how
        )
    )
