"""The tokens of texts and conversations, and the text of tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from api.policy.handler import opened
from api.policy.prompts import encode_prompts
from api.policy.sampling import refused
from api.schemas.completions import ChatRequest, CompletionRequest, ReadChat, Request
from api.schemas.forms import (
    CountRequest,
    CountView,
    DetokenizedView,
    DetokenizeRequest,
    TokenizeRequest,
    TokensRequest,
    TokensView,
)
from orchestration.policy.served import Policies
from stages.environments.programs import anthropic
from stages.environments.programs.messages import RequestRefused


async def encode(
    policies: Policies, request: TokensRequest, owner: str
) -> AsyncGenerator[bytes, None]:
    """Yield the body of the answer to ``request``, for the token with the id ``owner``. Raises
    HTTPProblem."""
    prompt = None if isinstance(request, DetokenizeRequest) else _prompt(request)
    async with opened(policies, request.model) as policy:
        view: CountView | TokensView | DetokenizedView
        if prompt is None:
            assert isinstance(request, DetokenizeRequest)
            text = await asyncio.to_thread(policy.tokenizer.decode, request.tokens)
            view = DetokenizedView(prompt=str(text))
        else:
            (ids,) = await encode_prompts(policy, prompt, owner, None)
            if isinstance(request, CountRequest):
                view = CountView(input_tokens=len(ids))
            else:
                names = None
                if isinstance(request, TokenizeRequest) and request.return_token_strs:
                    names = list(policy.tokenizer.convert_ids_to_tokens(ids))
                view = TokensView(
                    count=len(ids), max_model_len=policy.context, tokens=ids, token_strs=names
                )
        yield view.model_dump_json().encode()


def _prompt(request: TokenizeRequest | CountRequest) -> Request:
    """Return the request of a response to the same prompt. Raises HTTPProblem."""
    if isinstance(request, CountRequest):
        try:
            conversation = anthropic.read(request.model_dump(exclude_unset=True))
        except RequestRefused as error:
            raise refused(f"{error}.", error.field, "see /docs for what it takes") from None
        return ReadChat.model_construct(model=request.model, conversation=conversation)
    names = ["model", "prompt", "add_special_tokens"]
    if request.messages is not None:
        names = [*names, "messages", "add_generation_prompt", "continue_final_message"]
        names.append("chat_template_kwargs")
    fields = {name: getattr(request, name) for name in names}
    model = CompletionRequest if request.messages is None else ChatRequest
    return model.model_construct(**fields)
