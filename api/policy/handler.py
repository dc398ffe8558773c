"""The handler of requests to served policies, wherever it is hosted.

request ──▶ prompts ──▶ its turn at an engine ──▶ tokens ──▶ choices ──▶ what is new of one: an event of a stream
          (prompts.py)   (rows.py)                            (pieces.py) └──▶ at the end, all of all of them: one answer
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import structlog
import torch

from api.policy.latency import Latencies
from api.policy.logprobs import LogprobViews
from api.policy.pieces import ChoiceText, Pieces, Placed
from api.policy.prompts import read_prompts, read_words, several
from api.policy.sampling import asked_alternatives, asked_tokens, refused, sampling_of
from api.policy.structure import calling_texts, calls_tool, structure_of, tool_call
from api.schemas.completions import (
    MOST_CHOICES,
    AnswerView,
    ChatRequest,
    ChatText,
    Choice,
    PromptDetails,
    Request,
    ToolCall,
    Usage,
)
from api.server.http.problems import HTTPProblem, problem_of
from orchestration.policy.rows import Item, shared
from orchestration.policy.served import Policies, ServedPolicy
from orchestration.processes.confined import TurnsFull
from stages.engines.protocols import (
    BoundedEngine,
    Completion,
    EngineClosed,
    EngineFailed,
    GroupRequest,
    PromptScoringEngine,
    RequestRefused,
    ResponseFailed,
    RolloutEngine,
    StreamingEngine,
    Token,
)
from stages.flow.catalogue import OBSERVED
from stages.model.load import Tokenizer, TokenizerFailed

log = structlog.get_logger()

# of all choices of one request: an answer is kept until its client has read it
MOST_TOKENS = 1 << 20
# of all tokens of one request, with those of the likeliest ones: about a kilobyte each
MOST_LOGPROBS = 1 << 17
AT_ONCE = 64  # tokens that are decoded before other requests get their turn
LONG = 2000  # tokens and likeliest ones of an answer that is written in a thread


async def respond(
    policies: Policies, request: Request, owner: str = "", latencies: Latencies | None = None
) -> AsyncGenerator[bytes, None]:
    """Yield the body of the answer to ``request``: JSON, or server-sent events where it asks for a
    stream. ``owner``: the id of its token, which has a share of the engine. ``latencies``: where
    its times are counted. Raises HTTPProblem; after the first event an error is an event, too."""
    begun = False
    try:
        async with (
            answering(policies, request, owner, latencies) as responder,
            aclosing(responder.parts()) as parts,
        ):
            async for part in parts:
                yield b"data: " + part + b"\n\n" if request.stream else part
                begun = True
    except Exception as error:
        if not begun:
            raise
        yield b"data: " + json.dumps(problem_of(error).openai()).encode() + b"\n\n"
    if request.stream:
        yield b"data: [DONE]\n\n"


@contextlib.asynccontextmanager
async def answering(
    policies: Policies, request: Request, owner: str, latencies: Latencies | None
) -> AsyncIterator[Responder]:
    """The responder of ``request``; the arguments are those of :func:`respond`. What an engine
    raises is raised as an HTTPProblem."""
    async with opened(policies, request.model) as policy:
        measured = latencies.request(request.model) if latencies else None
        with measured or contextlib.nullcontext(_ignore) as arrived:
            yield Responder(policy, request, owner, arrived)


@contextlib.asynccontextmanager
async def opened(policies: Policies, model: str) -> AsyncIterator[ServedPolicy]:
    """The policy of ``model``. What its engine or its tokenizer raises is raised as an
    HTTPProblem."""
    try:
        async with policies.use(model) as policy:
            yield policy
    except Exception as error:
        problem = _failure(error)
        if problem is error:
            raise
        raise problem from error


def _ignore(choice: int) -> None:
    """Measure nothing."""


def _failure(error: Exception) -> Exception:
    """Return ``error``, or of an engine's the problem that it is for the client."""
    match error:
        case TokenizerFailed():
            log.error("a tokenizer failed", exc_info=error)
            fix = "give another text, or ask for another model"
            return HTTPProblem(400, f"{error.problems[0].wrong}.", kind="generation", fix=fix)
        case TurnsFull():
            return problem_of(error)
        case ResponseFailed(__cause__=RequestRefused() as refusal):
            problem = refusal.problems[0]
            return refused(f"{problem.wrong}.".capitalize(), problem.key, problem.fix)
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


class Responder:
    """The answer of ``policy`` to one request. ``arrived`` is called for each token, with the
    number of its choice.

    Raises HTTPProblem for a request that it cannot serve.
    """

    def __init__(
        self, policy: ServedPolicy, request: Request, owner: str, arrived: Callable[[int], None]
    ) -> None:
        self._policy = policy
        self._request = request
        self._owner = owner
        self._arrived = arrived
        self._chat = isinstance(request, ChatRequest)
        self._calls_tool = calls_tool(request)
        self._prompts = list[list[int]]()
        self._scored: list[list[tuple[Token, int]] | None] = []  # of each prompt
        self._cached = dict[int, int]()  # tokens of each prompt
        self._num_generated = 0
        self._each = request.n or 1  # choices of a prompt
        num_prompts = 1 if isinstance(request, ChatRequest) else len(several(request.prompt))
        if (choices := num_prompts * self._each) > MOST_CHOICES:
            fix = f"ask for at most {MOST_CHOICES} in one request"
            raise refused(f"These are {choices} choices.", "n", fix)
        alternatives = asked_alternatives(request)
        self._has_logprobs = alternatives is not None
        self._alternatives = alternatives or 0
        max_tokens = policy.recipe.rollout.max_tokens
        self._params = sampling_of(request, policy.sampling, max_tokens, ())
        self._echoes = not isinstance(request, ChatRequest) and bool(request.echo)
        self._generates = asked_tokens(request) != 0
        if not (self._generates or self._echoes):
            raise refused("Nothing is asked for.", "max_tokens", "give 1 at least, or echo")
        self._prompt_logprobs = request.prompt_logprobs
        if self._prompt_logprobs is not None and request.stream:
            raise refused("A stream has none.", "prompt_logprobs", "set stream to false")
        if self._prompt_logprobs is None and self._echoes and self._has_logprobs:
            self._prompt_logprobs = 0 if request.logprob_token_ids else self._alternatives
        special_tokens = request.skip_special_tokens is False
        self._pieces = Pieces(policy.tokenizer, special_tokens=special_tokens)
        self._views = LogprobViews(
            self._pieces,
            as_ids=bool(request.return_tokens_as_token_ids),
            with_itself=bool(request.logprob_token_ids),
        )
        self._refuse_many_tokens(choices)
        self._choices = [
            ChoiceText(
                number,
                policy.tokenizer,
                self._pieces if self._has_logprobs else None,
                self._params.stop,
                ends=self._params.stop_token_ids,
                special_tokens=special_tokens,
                least=self._params.min_tokens,
                include_stop=bool(request.include_stop_str_in_output),
            )
            for number in range(choices)
        ]
        self._calling = calling_texts(request, choices)
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        self._head: dict[str, Any] = {
            "object": kind if self._chat else "text_completion",
            "model": request.model,
        }
        prefix = "chatcmpl" if self._chat else "cmpl"
        self._head |= {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time())}

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """Yield the whole answer as JSON, or its parts as tokens are made."""
        options = self._request.stream_options
        async with aclosing(self.changed()) as changed:
            async for choice in changed:
                if self._request.stream:
                    more = {}
                    if options and options.include_usage and options.continuous_usage_stats:
                        more = {"usage": self.usage()}
                    yield await self._part([choice], **more)
        if not self._request.stream:
            yield await self._part(self._choices, usage=self.usage())
        elif options and options.include_usage:
            yield await self._part([], usage=self.usage())

    async def changed(self) -> AsyncGenerator[ChoiceText, None]:
        """Yield each choice when it has new text, or has ended."""
        request = self._request
        context = self._policy.context
        room = (context or MOST_TOKENS) - max(1, asked_tokens(request) or 1)
        self._prompts = await read_prompts(self._policy, request, self._owner, context, room)
        words = await read_words(self._policy, request.bad_words or (), self._owner)
        self._params = replace(self._params, bad_words=words)
        structured = await structure_of(request)
        async with self._policy.engines.engine(mixed=bool(request.mix_versions)) as engine:
            if structured:
                field, structure = structured
                if not getattr(engine, "has_structures", False):
                    raise refused("The engine has no structured outputs.", field, "leave it out")
                self._params = replace(self._params, structure=structure)
            groups = self._groups(engine)
            await self._begin(engine, groups)
            if self._generates:
                async with aclosing(self._generated(engine, groups)) as changed:
                    async for choice in changed:
                        yield choice
            else:
                for choice in self._choices:
                    choice.finish("length")
                    yield choice

    async def _generated(
        self, engine: RolloutEngine, groups: Sequence[GroupRequest]
    ) -> AsyncGenerator[ChoiceText, None]:
        """Yield each choice that has new text, or has ended."""
        pinned = None if self._request.mix_versions else engine.version
        num_running = len(self._choices)
        async with aclosing(self._items(engine, groups)) as items:
            async for item in items:
                choice = self._choices[item.group * self._each + item.place]
                if isinstance(item, Completion):
                    num_running -= 1
                    cached = self._cached.get(item.group, item.cached_tokens)
                    self._cached[item.group] = min(cached, item.cached_tokens)
                if choice.reason is None:
                    new = await self._added(choice, item)
                    self._num_generated += len(new)
                    if any(pinned not in (None, token.version) for token in new):
                        raise RuntimeError(
                            f"an answer of version {pinned} has tokens of another one: {new}"
                        )
                    if new:
                        self._arrived(choice.number)
                    if choice.reason or (choice.text and not self._calls_tool):
                        yield choice
                # the engine may find no stop string where the text has one
                at_text = any(isinstance(choice.stopped_by, str) for choice in self._choices)
                if all(choice.reason for choice in self._choices) and (at_text or not num_running):
                    return

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

    async def _begin(self, engine: RolloutEngine, groups: Sequence[GroupRequest]) -> None:
        """Score the prompts where that is asked for, and let the choices begin with them."""
        self._scored = [None] * len(groups)
        if (count := self._prompt_logprobs) is not None:
            total = sum(map(len, self._prompts)) * (1 + count)
            if total > MOST_LOGPROBS:
                fix = f"ask for at most {MOST_LOGPROBS} in one request"
                raise refused(f"The prompts have {total} logprobs.", "prompt_logprobs", fix)
            if not isinstance(engine, PromptScoringEngine):
                raise refused("The engine has none of prompts.", "prompt_logprobs", "leave it out")
            for place, group in enumerate(groups):
                with self._refusals():
                    self._scored[place] = await engine.score_prompt(group, alternatives=count)
        for choice in self._choices if self._echoes else ():
            number = choice.number // self._each
            scored = self._scored[number] if self._has_logprobs else None
            prompts = (
                [] if isinstance(self._request, ChatRequest) else several(self._request.prompt)
            )
            is_text = isinstance(prompts[number], str)
            prompt = (self._prompts[number], scored, is_text)
            choice.begin(*await _prompt_text(self._policy.tokenizer, *prompt))

    async def _items(
        self, engine: RolloutEngine, groups: Sequence[GroupRequest]
    ) -> AsyncGenerator[Item, None]:
        with self._policy.engines.rows_of(engine).claim(self._owner, len(self._choices)) as claim:
            async with aclosing(
                shared(lambda part: self._started(engine, part), claim, groups)
            ) as items:
                async for item in items:
                    yield item

    def _started(self, engine: RolloutEngine, groups: Sequence[GroupRequest]) -> Any:
        """Submit ``groups`` to the engine. Returns the iterator over its items."""
        with self._refusals():
            if isinstance(engine, StreamingEngine):
                named = self._params.logprob_token_ids
                return engine.stream(groups, alternatives=0 if named else self._alternatives)
            if self._alternatives:
                raise refused(
                    "The engine has no logprobs of other tokens.", "logprobs", "ask for 0 of them"
                )
            if changes := self._params.changes:
                raise refused("The engine does not have it.", changes[0], "leave it out")
            return engine.generate(groups)

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """Turn what an engine refuses into an HTTPProblem of the request's field."""
        try:
            yield
        except ValueError as error:
            names = (
                [problem.key for problem in error.problems]
                if isinstance(error, RequestRefused)
                else []
            )
            raise refused(str(error), self._field_of(names), "change it, or see /docs") from None

    def _groups(self, engine: RolloutEngine) -> list[GroupRequest]:
        seed = secrets.randbits(63) if self._request.seed is None else self._request.seed
        places = tuple(range(self._each))
        groups = list[GroupRequest]()
        for number, ids in enumerate(self._prompts):
            params = self._params
            # a default is shortened
            if asked_tokens(self._request) is None and isinstance(engine, BoundedEngine):
                room = engine.context - len(ids)
                params = replace(params, max_tokens=max(1, min(params.max_tokens, room)))
            if not self._generates:
                params = replace(params, max_tokens=1)
            for choice in self._choices[number * self._each : (number + 1) * self._each]:
                choice.limit = params.max_tokens
            groups.append(GroupRequest(number, places, torch.tensor(ids), params, seed + number))
        return groups

    def _field_of(self, names: Sequence[str]) -> str:
        """Return the field of the request for an engine's ``names`` of fields that it refuses."""
        for name in names:
            if name in type(self._request).model_fields and (
                name != "max_tokens" or asked_tokens(self._request)
            ):
                return name
        return "messages" if self._chat else "prompt"

    def _refuse_many_tokens(self, choices: int) -> None:
        """Raise an HTTPProblem where the answer may be too large to be kept."""
        context = self._policy.context
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
            raise refused(detail, field_name, fix)

    def usage(self) -> Usage:
        """Return the tokens so far."""
        num_prompt_tokens = sum(map(len, self._prompts))
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=self._num_generated,
            total_tokens=num_prompt_tokens + self._num_generated,
            prompt_tokens_details=PromptDetails(cached_tokens=sum(self._cached.values())),
        )

    async def _part(self, choices: Sequence[ChoiceText], **more: Any) -> bytes:
        """Return what is new in ``choices``, as JSON."""
        if self._chat and choices:
            more |= self._of_prompt(choices[0])

        def written() -> bytes:
            views = [self._view(choice) for choice in choices]
            return (
                AnswerView(choices=views, **self._head, **more)
                .model_dump_json(exclude_unset=True)
                .encode()
            )

        tokens = sum(choice.unsent for choice in choices) * (1 + self._alternatives)
        return written() if tokens < LONG else await asyncio.to_thread(written)

    def _of_prompt(self, choice: ChoiceText) -> dict[str, Any]:
        """Return what the answer says of the prompt of ``choice``, in its first part."""
        number = choice.number // self._each
        fields: dict[str, Any] = {}
        if self._request.return_token_ids and choice.offset is None:
            fields["prompt_token_ids"] = self._prompts[number]
        if not self._request.stream:
            scored = self._scored[number] if self._request.prompt_logprobs is not None else None
            fields.setdefault("prompt_token_ids", None)
            fields["prompt_logprobs"] = None if scored is None else self._views.of_prompt(scored)
        return fields

    def _view(self, choice: ChoiceText) -> Choice:
        begins = choice.offset is None
        fields = {} if self._chat else self._of_prompt(choice)
        text, tokens = choice.take()
        generated = [placed.token for placed in tokens if placed.token.version != OBSERVED]
        made_by = itertools.groupby(token.version for token in generated)
        fields["versions"] = [(version, len(list(run))) for version, run in made_by]
        if self._request.return_token_ids:
            fields["token_ids"] = [token.token_id for token in generated]
        elif not self._request.stream:
            fields["token_ids"] = None
        reason: Any = choice.reason
        if self._chat:
            message: dict[str, Any] = {"role": "assistant"} if begins else {}
            kind = "delta" if self._request.stream else "message"
            calls: list[ToolCall] = []
            if self._calling:
                text, calls = self._calling[choice.number].add(text, ends=bool(reason))
            elif self._calls_tool and (call := tool_call(text, is_streamed=kind == "delta")):
                text, calls = "", [call]
            if calls:
                reason = "tool_calls" if reason == "stop" or self._calls_tool else reason
                message["tool_calls"] = calls
            fields[kind] = ChatText(content=None if calls and not text else text, **message)
        else:
            fields["text"] = text
        views = self._views
        logprobs = None
        if self._has_logprobs:
            logprobs = views.of_chat(tokens) if self._chat else views.of_completion(tokens)
        ended_by = choice.stopped_by
        if isinstance(ended_by, int) and ended_by not in (self._request.stop_token_ids or ()):
            ended_by = None
        return Choice(
            index=choice.number,
            finish_reason=reason,
            stop_reason=ended_by,
            logprobs=logprobs,
            **fields,
        )


async def _prompt_text(
    tokenizer: Tokenizer,
    ids: list[int],
    scored: Sequence[tuple[Token, int]] | None,
    is_text: bool,
) -> tuple[str, list[Placed]]:
    """Return the text of a prompt, and where in it its tokens are, as far as they are
    ``scored``. The first one has the logprob NaN: nothing is before it. Special tokens of one
    that came as a text (``is_text``) were added to it."""
    if scored is None:
        return str(tokenizer.decode(ids, skip_special_tokens=is_text)), []
    pieces = Pieces(tokenizer, special_tokens=not is_text)
    prompt = ChoiceText(0, tokenizer, pieces, special_tokens=not is_text)
    first = Token(0, 0, ids[0], math.nan, OBSERVED)
    for number, token in enumerate([first, *(token for token, _ in scored)]):
        prompt.add(replace(token, version=OBSERVED))
        if number % AT_ONCE == AT_ONCE - 1:
            await asyncio.sleep(0)
    prompt.finish("length")
    return prompt.take()
