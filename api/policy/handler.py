"""The handler of requests to served policies, wherever it is hosted.

request ──▶ prompts ──▶ an engine ──▶ tokens ──▶ choices ──▶ what is new of one: an event of a stream
                                                     └──▶ at the end, all of all of them: one answer
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Literal, cast

import torch

from api.schemas.completions import (
    MOST_CHOICES,
    AnswerView,
    ChatLogprobs,
    ChatRequest,
    ChatText,
    Choice,
    CompletionLogprobs,
    CompletionRequest,
    Request,
    TokenLogprob,
    Usage,
)
from api.server.problems import HTTPProblem, problem_of
from orchestration.policy.served import Policies, ServedPolicy
from stages.engines.protocols import Completion, GroupRequest, RolloutEngine, SamplingParams, StreamingEngine, Token
from stages.models import Tokenizer
from stages.rollout.response_text import ResponseText

DEFAULT_TOKENS = 16  # of a completion, as OpenAI has it


async def respond(policies: Policies, request: Request) -> AsyncGenerator[bytes, None]:
    """Yield the body of the answer to ``request``: JSON, or server-sent events where it asks for a stream. Raises
    HTTPProblem; after the first event an error is an event, too."""
    begun = False
    try:
        async with policies.use(request.model) as policy, aclosing(_Responder(policy, request).parts()) as parts:
            async for part in parts:
                text = part.model_dump_json(exclude_unset=True)
                yield f"data: {text}\n\n".encode() if request.stream else text.encode()
                begun = True
    except Exception as error:
        if not begun:
            raise
        yield b'data: {"error": ' + problem_of(error).body() + b"}\n\n"
    if request.stream:
        yield b"data: [DONE]\n\n"


class _Choice:
    """One choice of an answer: its new ``text``, and the tokens that came with it. ``reason``: why it has ended."""

    def __init__(self, number: int, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self.number, self._decoded = number, ResponseText(tokenizer, stops)
        self.text, self.tokens = "", list[Token]()
        self.reason: Literal["stop", "length"] | None = None
        self.offset: int | None = None  # characters that were sent; None: nothing was

    def add(self, item: Token | Completion) -> None:
        """Add the tokens of ``item`` that are new, up to a stop string."""
        for token in item.tokens()[len(self._decoded) :] if isinstance(item, Completion) else [item]:
            self.text += self._decoded.add(token.token_id)
            self.tokens.append(token)
            if self._decoded.stopped:
                break
        if isinstance(item, Completion) or self._decoded.stopped:
            self.text += self._decoded.finish()
            self.reason = "stop" if self._decoded.stopped else cast("Any", item).finish_reason

    def clear(self) -> None:
        """Drop what was sent."""
        self.offset, self.text, self.tokens = (self.offset or 0) + len(self.text), "", []


class _Responder:
    """The answer of ``policy`` to one request. Raises HTTPProblem for a request that it cannot serve."""

    def __init__(self, policy: ServedPolicy, request: Request) -> None:
        self._policy, self._request, self._tokenizer = policy, request, policy.tokenizer
        self._chat = isinstance(request, ChatRequest)
        if isinstance(request, ChatRequest):
            self._prompts, self._has_logprobs = self._chat_prompt(request), bool(request.logprobs)
            self._alternatives = request.top_logprobs or 0
        else:
            self._prompts, self._has_logprobs = self._given_prompts(request), request.logprobs is not None
            self._alternatives = request.logprobs or 0
        if self._alternatives and not self._has_logprobs:
            raise _refused("top_logprobs comes with logprobs alone.", "top_logprobs", "set logprobs to true")
        self._each, params = request.n or 1, self._params()  # choices of a prompt
        if not all(self._prompts):
            raise _refused("A prompt has no tokens.", "messages" if self._chat else "prompt", "give a text")
        if (choices := len(self._prompts) * self._each) > MOST_CHOICES:
            raise _refused(f"These are {choices} choices.", "n", f"ask for at most {MOST_CHOICES} in one request")
        self._choices = [_Choice(number, self._tokenizer, params.stop) for number in range(choices)]
        seed = secrets.randbits(63) if request.seed is None else request.seed
        self._groups = [
            GroupRequest(number, tuple(range(self._each)), torch.tensor(ids), params, seed + number)
            for number, ids in enumerate(self._prompts)
        ]
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        self._head: dict[str, Any] = {"object": kind if self._chat else "text_completion", "model": request.model}
        self._head |= {"id": f"cmpl-{secrets.token_hex(12)}", "created": int(time.time())}

    async def parts(self) -> AsyncGenerator[AnswerView, None]:
        """Yield the whole answer, or its parts as tokens are made."""
        made, options = 0, self._request.stream_options
        async with self._policy.engines.engine(mixed=self._request.mix_versions) as engine:
            pinned = None if self._request.mix_versions else engine.version
            async with aclosing(self._items(engine)) as items:
                async for item in items:
                    choice = self._choices[item.group * self._each + item.place]
                    if choice.reason:
                        continue  # the engine ends at a stop string a little later than the text
                    before = len(choice.tokens)
                    choice.add(item)
                    made += len(choice.tokens) - before
                    if any(pinned not in (None, token.version) for token in choice.tokens[before:]):
                        raise RuntimeError(f"an answer of version {pinned} has tokens of another one: {choice.tokens}")
                    if self._request.stream and (choice.text or choice.reason):
                        yield self._part([choice])
                    if all(one.reason for one in self._choices):
                        break
        asked = sum(map(len, self._prompts))
        usage = Usage(prompt_tokens=asked, completion_tokens=made, total_tokens=asked + made)
        if not self._request.stream:
            yield self._part(self._choices, usage=usage)
        elif options and options.include_usage:
            yield self._part([], usage=usage)

    def _items(self, engine: RolloutEngine) -> AsyncGenerator[Token | Completion, None]:
        try:
            if isinstance(engine, StreamingEngine):
                return cast("Any", engine.stream(self._groups, alternatives=self._alternatives))
            if self._alternatives:
                raise _refused("The engine has no logprobs of other tokens.", "logprobs", "ask for 0 of them")
            return cast("Any", engine.generate(self._groups))
        except ValueError as refused:
            name = "max_tokens" if "max_tokens" in str(refused) else "prompt"
            raise _refused(str(refused), name, "give a shorter prompt, or fewer tokens") from None

    def _params(self) -> SamplingParams:
        asked, tokens = self._request, self._request.max_tokens
        if isinstance(asked, ChatRequest):
            tokens = asked.max_completion_tokens or tokens or self._policy.recipe.rollout.max_tokens
        return replace(
            self._policy.sampling,
            max_tokens=tokens or DEFAULT_TOKENS,
            temperature=1.0 if asked.temperature is None else asked.temperature,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            top_k=asked.top_k,
            stop=(asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ()),
        )

    def _given_prompts(self, request: CompletionRequest) -> list[list[int]]:
        given: Any = request.prompt
        several = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
        return [self._tokenizer(one)["input_ids"] if isinstance(one, str) else one for one in several]

    def _chat_prompt(self, request: ChatRequest) -> list[list[int]]:
        if self._tokenizer.chat_template is None:
            fix = "use /v1/completions, or set prompts.chat_template in the recipe"
            raise _refused("The model has no chat template.", "messages", fix)
        messages = [{"role": one.role, "content": one.text} for one in request.messages]
        options = {
            "tokenize": False,
            "add_generation_prompt": True,
            **self._policy.recipe.prompts.chat_template_options,
        }
        try:
            text = self._tokenizer.apply_chat_template(messages, **options)
        except Exception as error:  # a template is a program and may raise anything
            raise _refused(f"The chat template refuses the messages: {error}", "messages", "see the template") from None
        return [self._tokenizer(text, add_special_tokens=False)["input_ids"]]

    def _part(self, choices: Sequence[_Choice], **more: Any) -> AnswerView:
        """Returns what is new of ``choices``."""
        views = [self._view(choice) for choice in choices]
        for choice in choices:
            choice.clear()
        return AnswerView(choices=views, **self._head, **more)

    def _view(self, choice: _Choice) -> Choice:
        made_by = itertools.groupby(token.version for token in choice.tokens)
        versions = [(version, len(list(run))) for version, run in made_by]
        text: dict[str, Any] = {"text": choice.text}
        if self._chat:
            role: dict[str, Any] = {"role": "assistant"} if choice.offset is None else {}
            text = {"delta" if self._request.stream else "message": ChatText(content=choice.text, **role)}
        logprobs = self._logprobs(choice) if self._has_logprobs else None
        return Choice(index=choice.number, finish_reason=choice.reason, versions=versions, logprobs=logprobs, **text)

    def _logprobs(self, choice: _Choice) -> ChatLogprobs | CompletionLogprobs:
        named = [self._named(one.token_id, one.logprob, one.alternatives) for one in choice.tokens]
        if self._chat:
            return ChatLogprobs(content=named)
        likeliest = [{other.token: other.logprob for other in (*one.top_logprobs, one)} for one in named]
        return CompletionLogprobs(
            tokens=[one.token for one in named],
            token_logprobs=[one.logprob for one in named],
            top_logprobs=likeliest if self._alternatives else None,
            text_offset=list(itertools.accumulate((len(one.token) for one in named), initial=choice.offset or 0))[:-1],
        )

    def _named(self, token: int, logprob: float, others: Iterable[tuple[int, float]] = ()) -> TokenLogprob:
        name, likeliest = str(self._tokenizer.decode([token])), [self._named(*other) for other in others]
        return TokenLogprob(token=name, logprob=logprob, bytes=list(name.encode()), top_logprobs=likeliest)


def _refused(detail: str, field_name: str, fix: str) -> HTTPProblem:
    return HTTPProblem(422, detail, kind="generation", field=field_name, fix=fix)
