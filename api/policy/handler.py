"""The handler of requests to served policies, wherever it is hosted.

request ──▶ prompts ──▶ an engine ──▶ tokens ──▶ choices ──▶ what is new of one: an event of a stream
                                                     └──▶ at the end, all of all of them: one answer
"""

from __future__ import annotations

import itertools
import math
import re
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

import structlog
import torch

from api.policy.pieces import ChoiceText, Pieces, Placed
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
from stages.engines.protocols import (
    BoundedEngine,
    Completion,
    EngineClosed,
    EngineFailed,
    GroupRequest,
    ResponseFailed,
    RolloutEngine,
    SamplingParams,
    StreamingEngine,
    Token,
)

log = structlog.get_logger()

DEFAULT_TOKENS = 16  # of a completion, as OpenAI has it
UNLIKELY = -9999.0


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
        problem = _failure(error)
        if not begun:
            raise problem from error
        yield b'data: {"error": ' + problem_of(problem).body() + b"}\n\n"
    if request.stream:
        yield b"data: [DONE]\n\n"


def _failure(error: Exception) -> Exception:
    """Returns ``error``, or of an engine's the problem that it is for the client."""
    match error:
        case ResponseFailed():
            log.error("a response failed", exc_info=error)
            detail = f"The response failed in the engine, which goes on with others: {error.__cause__!r}."
            return HTTPProblem(500, detail, kind="response", fix="change the request, or try again")
        case EngineFailed() | EngineClosed():
            log.error("an engine failed", exc_info=error)
            detail = "The engine of this policy failed; the next request opens another one."
            return HTTPProblem(503, detail, kind="policy", fix="try again", headers={"Retry-After": "1"})
    return error


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
        self._each = request.n or 1  # choices of a prompt
        if not all(self._prompts):
            raise _refused("A prompt has no tokens.", "messages" if self._chat else "prompt", "give a text")
        if (choices := len(self._prompts) * self._each) > MOST_CHOICES:
            raise _refused(f"These are {choices} choices.", "n", f"ask for at most {MOST_CHOICES} in one request")
        self._params, self._pieces = self._sampling(), Pieces(self._tokenizer)
        pieces = self._pieces if self._has_logprobs else None
        self._choices = [ChoiceText(number, self._tokenizer, pieces, self._params.stop) for number in range(choices)]
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        self._head: dict[str, Any] = {"object": kind if self._chat else "text_completion", "model": request.model}
        self._head |= {"id": f"cmpl-{secrets.token_hex(12)}", "created": int(time.time())}

    async def parts(self) -> AsyncGenerator[AnswerView, None]:
        """Yield the whole answer, or its parts as tokens are made."""
        made, options = 0, self._request.stream_options
        async with self._policy.engines.engine(mixed=bool(self._request.mix_versions)) as engine:
            pinned = None if self._request.mix_versions else engine.version
            async with aclosing(self._items(engine)) as items:
                async for item in items:
                    choice = self._choices[item.group * self._each + item.place]
                    if choice.reason:
                        continue  # the engine ends at a stop string a little later than the text
                    new = choice.add(item)
                    made += len(new)
                    if any(pinned not in (None, token.version) for token in new):
                        raise RuntimeError(f"an answer of version {pinned} has tokens of another one: {new}")
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
        groups = self._groups(engine)
        try:
            if isinstance(engine, StreamingEngine):
                return cast("Any", engine.stream(groups, alternatives=self._alternatives))
            if self._alternatives:
                raise _refused("The engine has no logprobs of other tokens.", "logprobs", "ask for 0 of them")
            return cast("Any", engine.generate(groups))
        except ValueError as refused:
            raise _refused(str(refused), self._refused_field(str(refused)), "change it, or see /docs") from None

    def _groups(self, engine: RolloutEngine) -> list[GroupRequest]:
        seed = secrets.randbits(63) if self._request.seed is None else self._request.seed
        places, groups = tuple(range(self._each)), list[GroupRequest]()
        for number, ids in enumerate(self._prompts):
            params = self._params
            if self._asked_tokens is None and isinstance(engine, BoundedEngine):  # a default is shortened
                params = replace(params, max_tokens=max(1, min(params.max_tokens, engine.context - len(ids))))
            groups.append(GroupRequest(number, places, torch.tensor(ids), params, seed + number))
        return groups

    def _refused_field(self, refused: str) -> str:
        """Returns the field of a request that an engine has ``refused``."""
        field = re.match(r"group \d+: (\w+) is ", refused)
        if field and field[1] in type(self._request).model_fields:
            return field[1]
        if "max_tokens" in refused and self._asked_tokens is not None:
            return "max_tokens"
        return "messages" if self._chat else "prompt"

    @property
    def _asked_tokens(self) -> int | None:
        """The ``max_tokens`` of the request."""
        if isinstance(self._request, ChatRequest):
            return self._request.max_completion_tokens or self._request.max_tokens
        return self._request.max_tokens

    def _sampling(self) -> SamplingParams:
        asked = self._request
        default = self._policy.recipe.rollout.max_tokens if self._chat else DEFAULT_TOKENS
        return replace(
            self._policy.sampling,
            max_tokens=self._asked_tokens or default,
            temperature=1.0 if asked.temperature is None else asked.temperature,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            top_k=asked.top_k or 0,
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

    def _part(self, choices: Sequence[ChoiceText], **more: Any) -> AnswerView:
        """Returns what is new of ``choices``."""
        return AnswerView(choices=[self._view(choice) for choice in choices], **self._head, **more)

    def _view(self, choice: ChoiceText) -> Choice:
        begins = choice.offset is None
        new, tokens = choice.take()
        made_by = itertools.groupby(placed.token.version for placed in tokens)
        versions = [(version, len(list(run))) for version, run in made_by]
        text: dict[str, Any] = {"text": new}
        if self._chat:
            role: dict[str, Any] = {"role": "assistant"} if begins else {}
            text = {"delta" if self._request.stream else "message": ChatText(content=new, **role)}
        logprobs = self._logprobs(tokens) if self._has_logprobs else None
        return Choice(index=choice.number, finish_reason=choice.reason, versions=versions, logprobs=logprobs, **text)

    def _logprobs(self, tokens: Sequence[Placed]) -> ChatLogprobs | CompletionLogprobs:
        if self._chat:
            return ChatLogprobs(content=[self._named(placed) for placed in tokens])
        return CompletionLogprobs(
            tokens=[self._name(placed) for placed in tokens],
            token_logprobs=[_finite(placed.token.logprob) for placed in tokens],
            top_logprobs=[self._likeliest(placed) for placed in tokens] if self._alternatives else None,
            text_offset=[placed.offset for placed in tokens],
        )

    def _candidates(self, placed: Placed) -> list[Placed]:
        """The likeliest tokens in the place of ``placed``, with it where it is among them."""
        token = placed.token
        return [
            placed if name == token.token_id else self._candidate(token, name, logprob)
            for name, logprob in token.alternatives
            if math.isfinite(logprob)
        ]

    def _candidate(self, sampled: Token, token_id: int, logprob: float) -> Placed:
        other = replace(sampled, token_id=token_id, logprob=logprob, alternatives=())
        return Placed(other, self._pieces.bytes_of(token_id), 0)

    def _named(self, placed: Placed) -> TokenLogprob:
        """``placed`` as chats have it."""
        views = [
            TokenLogprob(
                token=self._pieces.name(one.token.token_id, one.own),
                logprob=_finite(one.token.logprob),
                bytes=list(one.own),
            )
            for one in (placed, *self._candidates(placed))
        ]
        return views[0].model_copy(update={"top_logprobs": views[1:]})

    def _name(self, placed: Placed) -> str:
        """The name of a token as completions have it."""
        return self._pieces.name(placed.token.token_id, placed.own, prefix="bytes:")

    def _likeliest(self, placed: Placed) -> dict[str, float]:
        """The logprobs of the likeliest tokens, and of ``placed``, by names of which each is there once."""
        candidates = self._candidates(placed)
        if placed not in candidates:
            candidates.append(placed)
        named: dict[str, float] = {}
        for one in candidates:
            name = self._name(one)
            if one is not placed and (name in named or name == self._name(placed)):
                name = f"token_id:{one.token.token_id}"
            named[name] = _finite(one.token.logprob)
        return named


def _finite(logprob: float) -> float:
    """``logprob``, or OpenAI's number for a token that is very unlikely."""
    return logprob if math.isfinite(logprob) else UNLIKELY


def _refused(detail: str, field_name: str, fix: str) -> HTTPProblem:
    return HTTPProblem(422, detail, kind="generation", field=field_name, fix=fix)
