"""The handler of requests to served policies, wherever it is hosted.

request ──▶ prompts ──▶ its turn at an engine ──▶ tokens ──▶ choices ──▶ what is new of one: an event of a stream
            (texts.py)   (rows.py)                               └──▶ at the end, all of all of them: one answer
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

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
    Request,
    TokenLogprob,
    Usage,
)
from api.server.http.problems import HTTPProblem, problem_of
from orchestration.policy.rows import Item, shared
from orchestration.policy.served import Policies, ServedPolicy
from orchestration.policy.texts import TextRefused
from orchestration.processes.confined import TurnsFull
from stages.engines.protocols import (
    BoundedEngine,
    Completion,
    EngineClosed,
    EngineFailed,
    GroupRequest,
    RequestRefused,
    ResponseFailed,
    RolloutEngine,
    SamplingParams,
    StreamingEngine,
    Token,
)
from stages.model.load import TokenizerFailed

log = structlog.get_logger()

DEFAULT_TOKENS = 16  # of a completion, as OpenAI has it
UNLIKELY = -9999.0
# of all choices of one request: an answer is kept until its client has read it
MOST_TOKENS = 1 << 20
# of all tokens of one request, with those of the likeliest ones: about a kilobyte each
MOST_LOGPROBS = 1 << 17
AT_ONCE = 64  # tokens that are decoded before other requests get their turn
LONG = 2000  # tokens and likeliest ones of an answer that is written in a thread


async def respond(
    policies: Policies, request: Request, owner: str = ""
) -> AsyncGenerator[bytes, None]:
    """Yield the body of the answer to ``request``: JSON, or server-sent events where it asks for a
    stream. ``owner``: the id of its token, which has a share of the engine. Raises HTTPProblem;
    after the first event an error is an event, too."""
    begun = False
    try:
        async with (
            policies.use(request.model) as policy,
            aclosing(_Responder(policy, request, owner).parts()) as parts,
        ):
            async for part in parts:
                yield b"data: " + part + b"\n\n" if request.stream else part
                begun = True
    except Exception as error:
        problem = _failure(error)
        if not begun:
            raise problem from error
        yield b'data: {"error": ' + problem_of(problem).body() + b"}\n\n"
    if request.stream:
        yield b"data: [DONE]\n\n"


def _failure(error: Exception) -> Exception:
    """Return ``error``, or of an engine's the problem that it is for the client."""
    match error:
        case TokenizerFailed():
            log.error("a tokenizer failed", exc_info=error)
            fix = "give another text, or ask for another model"
            return HTTPProblem(422, f"{error.problems[0].wrong}.", kind="generation", fix=fix)
        case TurnsFull():
            return problem_of(error)
        case ResponseFailed():
            log.error("a response failed", exc_info=error)
            detail = (
                f"The response failed in the engine, which goes on with others: "
                f"{error.__cause__!r}."
            )
            return HTTPProblem(500, detail, kind="response", fix="change the request, or try again")
        case EngineFailed() | EngineClosed():
            log.error("an engine failed", exc_info=error)
            detail = "The engine of this policy failed; the next request opens another one."
            return HTTPProblem(
                503, detail, kind="policy", fix="try again", headers={"Retry-After": "1"}
            )
    return error


class _Responder:
    """The answer of ``policy`` to one request.

    Raises HTTPProblem for a request that it cannot serve.
    """

    def __init__(self, policy: ServedPolicy, request: Request, owner: str) -> None:
        self._policy = policy
        self._request = request
        self._tokenizer = policy.tokenizer
        self._owner = owner
        self._prompts = list[list[int]]()
        self._chat = isinstance(request, ChatRequest)
        self._given = [] if isinstance(request, ChatRequest) else _several(request.prompt)
        if isinstance(request, ChatRequest):
            self._has_logprobs = bool(request.logprobs)
            self._alternatives = request.top_logprobs or 0
        else:
            self._has_logprobs = request.logprobs is not None
            self._alternatives = request.logprobs or 0
        if self._alternatives and not self._has_logprobs:
            raise _refused(
                "top_logprobs comes with logprobs alone.", "top_logprobs", "set logprobs to true"
            )
        self._each = request.n or 1  # choices of a prompt
        if (choices := (len(self._given) or 1) * self._each) > MOST_CHOICES:
            raise _refused(
                f"These are {choices} choices.",
                "n",
                f"ask for at most {MOST_CHOICES} in one request",
            )
        self._params, self._pieces = self._sampling(), Pieces(self._tokenizer)
        self._refuse_many_tokens(choices)
        pieces = self._pieces if self._has_logprobs else None
        self._choices = [
            ChoiceText(number, self._tokenizer, pieces, self._params.stop)
            for number in range(choices)
        ]
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        self._head: dict[str, Any] = {
            "object": kind if self._chat else "text_completion",
            "model": request.model,
        }
        self._head |= {"id": f"cmpl-{secrets.token_hex(12)}", "created": int(time.time())}

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """Yield the whole answer as JSON, or its parts as tokens are made."""
        num_generated = 0
        options = self._request.stream_options
        self._prompts = await self._read_prompts()
        async with self._policy.engines.engine(mixed=bool(self._request.mix_versions)) as engine:
            pinned = None if self._request.mix_versions else engine.version
            async with aclosing(self._items(engine)) as items:
                async for item in items:
                    choice = self._choices[item.group * self._each + item.place]
                    if choice.reason:
                        continue  # the engine ends at a stop string a little later than the text
                    new = await self._added(choice, item)
                    num_generated += len(new)
                    if any(pinned not in (None, token.version) for token in new):
                        raise RuntimeError(
                            f"an answer of version {pinned} has tokens of another one: {new}"
                        )
                    if self._request.stream and (choice.text or choice.reason):
                        yield await self._part([choice])
                    if all(choice.reason for choice in self._choices):
                        break
        num_prompt_tokens = sum(map(len, self._prompts))
        usage = Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_generated,
            total_tokens=num_prompt_tokens + num_generated,
        )
        if not self._request.stream:
            yield await self._part(self._choices, usage=usage)
        elif options and options.include_usage:
            yield await self._part([], usage=usage)

    async def _added(self, choice: ChoiceText, item: Item) -> list[Token]:
        """Add ``item`` to ``choice``.

        A response that comes at once is decoded in pieces, between which other tasks run.
        """
        if not isinstance(item, Completion):
            return choice.add(item)
        added = list[Token]()
        tokens = item.tokens()[choice.tokens :]
        for number, token in enumerate(tokens[:-1]):
            added += choice.add(token)
            if choice.reason:
                return added
            if number % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)
        return added + choice.add(item)

    async def _items(self, engine: RolloutEngine) -> AsyncGenerator[Item, None]:
        groups = self._groups(engine)
        with self._policy.engines.rows_of(engine).claim(self._owner, len(self._choices)) as claim:
            async with aclosing(
                shared(lambda part: self._started(engine, part), claim, groups)
            ) as items:
                async for item in items:
                    yield item

    def _started(self, engine: RolloutEngine, groups: Sequence[GroupRequest]) -> Any:
        """Submit ``groups`` to the engine. Returns the iterator over its items."""
        try:
            if isinstance(engine, StreamingEngine):
                return engine.stream(groups, alternatives=self._alternatives)
            if self._alternatives:
                raise _refused(
                    "The engine has no logprobs of other tokens.", "logprobs", "ask for 0 of them"
                )
            return engine.generate(groups)
        except ValueError as error:
            names = (
                [problem.key for problem in error.problems]
                if isinstance(error, RequestRefused)
                else []
            )
            raise _refused(str(error), self._field_of(names), "change it, or see /docs") from None

    def _groups(self, engine: RolloutEngine) -> list[GroupRequest]:
        seed = secrets.randbits(63) if self._request.seed is None else self._request.seed
        places = tuple(range(self._each))
        groups = list[GroupRequest]()
        for number, ids in enumerate(self._prompts):
            params = self._params
            # a default is shortened
            if self._asked_tokens is None and isinstance(engine, BoundedEngine):
                params = replace(
                    params, max_tokens=max(1, min(params.max_tokens, engine.context - len(ids)))
                )
            groups.append(GroupRequest(number, places, torch.tensor(ids), params, seed + number))
        return groups

    def _field_of(self, names: Sequence[str]) -> str:
        """Return the field of the request for an engine's ``names`` of fields that it refuses."""
        for name in names:
            if name in type(self._request).model_fields and (
                name != "max_tokens" or self._asked_tokens
            ):
                return name
        return "messages" if self._chat else "prompt"

    @property
    def _asked_tokens(self) -> int | None:
        """The ``max_tokens`` of the request."""
        if isinstance(self._request, ChatRequest):
            return self._request.max_completion_tokens or self._request.max_tokens
        return self._request.max_tokens

    def _sampling(self) -> SamplingParams:
        request = self._request
        default = self._policy.recipe.rollout.max_tokens if self._chat else DEFAULT_TOKENS
        return replace(
            self._policy.sampling,
            max_tokens=self._asked_tokens or default,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=request.top_k or 0,
            stop=(request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ()),
        )

    def _refuse_many_tokens(self, choices: int) -> None:
        """Raise an HTTPProblem where the answer may be too large to be kept."""
        context = self._context
        tokens = self._params.max_tokens
        tokens = tokens if context is None else min(tokens, context)
        field_name = "max_tokens"
        limit = MOST_TOKENS
        unit = "tokens"
        if self._has_logprobs:
            tokens = tokens * (1 + self._alternatives)
            limit = MOST_LOGPROBS
            unit = "logprobs"
            field_name = "top_logprobs" if self._chat else "logprobs"
        if choices * tokens > limit:
            detail = (
                f"The answer may have {choices * tokens} {unit}: {choices} choices of {tokens}."
            )
            fix = f"ask for at most {limit} in one request, by max_tokens or n"
            raise _refused(detail, field_name, fix)

    @property
    def _context(self) -> int | None:
        """Tokens of the engine's context; None where it does not say."""
        engine = self._policy.engines.all()[-1]
        return engine.context if isinstance(engine, BoundedEngine) else None

    async def _read_prompts(self) -> list[list[int]]:
        """Return the tokens of each prompt. Raises HTTPProblem."""
        field_name = "messages" if self._chat else "prompt"
        texts = self._policy.texts
        try:
            if isinstance(self._request, ChatRequest):
                prompts = await texts.chat(
                    self._messages(self._request), self._owner, self._context
                )
            else:
                places = [
                    place for place, prompt in enumerate(self._given) if isinstance(prompt, str)
                ]
                ids = await texts.ids(
                    [self._given[place] for place in places], self._owner, self._context
                )
                tokenized = dict(zip(places, ids, strict=True))
                prompts = [tokenized.get(place, prompt) for place, prompt in enumerate(self._given)]
        except TextRefused as error:
            raise _refused(str(error), field_name, error.fix, error.value) from None
        if not all(prompts):
            raise _refused("A prompt has no tokens.", field_name, "give a text")
        return prompts

    def _messages(self, request: ChatRequest) -> list[dict[str, str]]:
        if self._tokenizer.chat_template is None:
            fix = "use /v1/completions, or set prompts.chat_template in the recipe"
            raise _refused("The model has no chat template.", "messages", fix)
        return [{"role": message.role, "content": message.text} for message in request.messages]

    async def _part(self, choices: Sequence[ChoiceText], **more: Any) -> bytes:
        """Return what is new in ``choices``, as JSON."""

        def written() -> bytes:
            views = [self._view(choice) for choice in choices]
            return (
                AnswerView(choices=views, **self._head, **more)
                .model_dump_json(exclude_unset=True)
                .encode()
            )

        tokens = sum(choice.unsent for choice in choices) * (1 + self._alternatives)
        return written() if tokens < LONG else await asyncio.to_thread(written)

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
        return Choice(
            index=choice.number,
            finish_reason=choice.reason,
            versions=versions,
            logprobs=logprobs,
            **text,
        )

    def _logprobs(self, tokens: Sequence[Placed]) -> ChatLogprobs | CompletionLogprobs:
        if self._chat:
            return ChatLogprobs(content=[self._named(placed) for placed in tokens])
        return CompletionLogprobs(
            tokens=[self._name(placed) for placed in tokens],
            token_logprobs=[_finite(placed.token.logprob) for placed in tokens],
            top_logprobs=[self._likeliest(placed) for placed in tokens]
            if self._alternatives
            else None,
            text_offset=[placed.offset for placed in tokens],
        )

    def _candidates(self, placed: Placed) -> list[Placed]:
        """Return the likeliest tokens in the place of ``placed``, with it where it is among
        them."""
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
        """Return the logprob of ``placed`` in the form of chat completions."""
        views = [
            TokenLogprob(
                token=self._pieces.name(candidate.token.token_id, candidate.own),
                logprob=_finite(candidate.token.logprob),
                bytes=list(candidate.own),
            )
            for candidate in (placed, *self._candidates(placed))
        ]
        return views[0].model_copy(update={"top_logprobs": views[1:]})

    def _name(self, placed: Placed) -> str:
        """Return the name of a token as completions have it."""
        return self._pieces.name(placed.token.token_id, placed.own, prefix="bytes:")

    def _likeliest(self, placed: Placed) -> dict[str, float]:
        """Return the logprobs of the likeliest tokens, and of ``placed``, by their names, each of
        which is there once."""
        candidates = self._candidates(placed)
        if placed not in candidates:
            candidates.append(placed)
        logprobs: dict[str, float] = {}
        for candidate in candidates:
            name = self._name(candidate)
            if candidate is not placed and (name in logprobs or name == self._name(placed)):
                name = f"token_id:{candidate.token.token_id}"
            logprobs[name] = _finite(candidate.token.logprob)
        return logprobs


def _finite(logprob: float) -> float:
    """Return ``logprob``, or OpenAI's number for a token that is very unlikely."""
    return logprob if math.isfinite(logprob) else UNLIKELY


def _several(prompt: Any) -> list[Any]:
    """Return the prompts of a request: texts, or lists of tokens."""
    return prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]


def _refused(detail: str, field_name: str, fix: str, value: object = None) -> HTTPProblem:
    return HTTPProblem(422, detail, kind="generation", field=field_name, value=value, fix=fix)
