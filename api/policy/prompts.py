"""The tokens of a request's prompts and of the words that it bans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from api.policy.sampling import refused
from api.schemas.completions import ChatRequest, Request
from orchestration.policy.served import ServedPolicy
from orchestration.policy.texts import TextRefused

Words = tuple[tuple[int, ...], ...]


def several(prompt: Any) -> list[Any]:
    """Return the prompts of a request: texts, or lists of tokens."""
    return prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]


async def read_prompts(
    policy: ServedPolicy, request: Request, owner: str, context: int | None, room: int
) -> list[list[int]]:
    """Return the tokens of each prompt. ``context``, ``room``: tokens of the longest sequence, and
    of the longest prompt. Raises HTTPProblem."""
    prompts = await encode_prompts(policy, request, owner, context)
    if (most := request.truncate_prompt_tokens) is not None:
        most = room if most < 0 else most
        from_right = request.truncation_side == "right"
        prompts = [ids[:most] if from_right else ids[max(0, len(ids) - most) :] for ids in prompts]
    if not all(prompts):
        raise refused("A prompt has no tokens.", _field_of(request), "give a text")
    return prompts


async def encode_prompts(
    policy: ServedPolicy, request: Request, owner: str, context: int | None
) -> list[list[int]]:
    """Return the tokens of each prompt as it is, also of an empty one. Raises HTTPProblem."""
    try:
        if isinstance(request, ChatRequest):
            return await _read_chat(policy, request, owner, context)
        prompts: list[Any] = list(several(request.prompt))
        places = [place for place, prompt in enumerate(prompts) if isinstance(prompt, str)]
        texts = [prompts[place] for place in places]
        special = request.add_special_tokens is not False
        ids = await policy.texts.ids(texts, owner, context, special_tokens=special)
        for place, tokens in zip(places, ids, strict=True):
            prompts[place] = tokens
        return prompts
    except TextRefused as error:
        raise refused(str(error), _field_of(request), error.fix, error.value) from None


def _field_of(request: Request) -> str:
    return "messages" if isinstance(request, ChatRequest) else "prompt"


async def _read_chat(
    policy: ServedPolicy, request: ChatRequest, owner: str, context: int | None
) -> list[list[int]]:
    if policy.tokenizer.chat_template is None:
        fix = "use /v1/completions, or set prompts.chat_template in the recipe"
        raise refused("The model has no chat template.", "messages", fix)
    read = request.as_templates_read
    continues = bool(request.continue_final_message)
    begins = request.add_generation_prompt
    options = {
        **(request.chat_template_kwargs or {}),
        "add_generation_prompt": not continues if begins is None else begins,
        "continue_final_message": continues,
    }
    special = bool(request.add_special_tokens)
    return await policy.texts.chat(
        read.messages, owner, context, options, tools=read.tools, special_tokens=special
    )


async def read_words(policy: ServedPolicy, words: Sequence[str], owner: str) -> Words:
    """Return the tokens of each of ``words``, at the beginning of a text and inside of one, where
    that is another token. Raises HTTPProblem."""
    texts = [text for word in words for text in (word.lstrip(), " " + word.lstrip())]
    try:
        ids = await policy.texts.ids(texts, owner, None, special_tokens=False) if texts else []
    except TextRefused as error:
        raise refused(str(error), "bad_words", error.fix) from None
    banned = list[tuple[int, ...]]()
    for first, inside in zip(ids[::2], ids[1::2], strict=True):
        if not first:
            raise refused("A word has no tokens.", "bad_words", "give a text")
        banned.append(tuple(first))
        if inside and inside[0] != first[0] and len(inside) == len(first):
            banned.append(tuple(inside))
    return tuple(banned)
