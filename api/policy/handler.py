"""The handler of requests to one served policy, wherever it is hosted.

request ──▶ prompts ──▶ an engine ──▶ pieces: text, logprobs, versions of new tokens ──▶ chunks of a stream
                                                                                   └──▶ added up: one answer
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from pydantic_core import to_json

from api.schemas.completions import MOST_CHOICES, ChatRequest, CompletionRequest
from api.server.problems import HTTPProblem, problem_of
from orchestration.policy.served import ServedPolicy
from stages.engines.protocols import Completion, GroupRequest, SamplingParams, StreamingEngine, Token
from stages.rollout.response_text import ResponseText

DEFAULT_TOKENS = 16  # of a completion, as OpenAI has it
Request = CompletionRequest | ChatRequest
Answer = dict[str, Any]


@dataclass
class Piece:
    """New text of the choice ``index`` and the tokens that came since the last piece, as (token, logprob)."""

    index: int
    text: str = ""
    tokens: list[tuple[int, float]] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    reason: str | None = None

    def add(self, other: Piece) -> None:
        self.text, self.reason = self.text + other.text, other.reason
        self.tokens += other.tokens
        for version, tokens in other.versions:
            if self.versions and self.versions[-1][0] == version:
                tokens += self.versions.pop()[1]
            self.versions.append((version, tokens))


class PolicyHandler:
    """Answers requests with ``policy``."""

    def __init__(self, policy: ServedPolicy) -> None:
        self._policy = policy

    async def answer(self, request: Request) -> Answer:
        """Return the whole answer, as CompletionView or ChatView has it. Raises HTTPProblem."""
        prompts = self._prompts(request)
        choices = [Piece(index) for index in range(len(prompts) * (request.n or 1))]
        async with aclosing(self._pieces(request, prompts)) as pieces:
            async for piece in pieces:
                choices[piece.index].add(piece)
        answer = self._head(request, chunk=False)
        shape = self._chat_choice if isinstance(request, ChatRequest) else self._completion_choice
        answer["choices"] = [shape(request, choice, chunk=False) for choice in choices]
        return {**answer, "usage": _usage(prompts, sum(len(choice.tokens) for choice in choices))}

    async def events(self, request: Request) -> AsyncGenerator[bytes, None]:
        """Yield :meth:`chunks` as server-sent events. An error after the first one is an event too."""
        begun = False
        try:
            async with aclosing(self.chunks(request)) as chunks:
                async for chunk in chunks:
                    yield b"data: " + to_json(chunk) + b"\n\n"
                    begun = True
        except Exception as error:
            if not begun:
                raise
            yield b"data: " + to_json({"error": problem_of(error).details.model_dump(exclude_none=True)}) + b"\n\n"
        yield b"data: [DONE]\n\n"

    async def chunks(self, request: Request) -> AsyncGenerator[Answer, None]:
        """Yield the parts of a streamed answer as its tokens are made. Raises HTTPProblem, before the first part if the
        request is refused."""
        prompts, made = self._prompts(request), 0
        head, usage = self._head(request, chunk=True), request.stream_options and request.stream_options.include_usage
        shape = self._chat_choice if isinstance(request, ChatRequest) else self._completion_choice
        offsets, begun = dict[int, int](), set[int]()
        async with aclosing(self._pieces(request, prompts)) as pieces:
            async for piece in pieces:
                made += len(piece.tokens)
                choice = shape(request, piece, chunk=True, offset=offsets.get(piece.index, 0))
                offsets[piece.index] = offsets.get(piece.index, 0) + len(piece.text)
                if isinstance(request, ChatRequest) and piece.index not in begun:
                    begun.add(piece.index)
                    choice["delta"]["role"] = "assistant"
                yield {**head, "choices": [choice]}
        if usage:
            yield {**head, "choices": [], "usage": _usage(prompts, made)}

    async def _pieces(self, request: Request, prompts: list[list[int]]) -> AsyncGenerator[Piece, None]:
        params, choices = self._params(request), request.n or 1
        seed = secrets.randbits(63) if request.seed is None else request.seed
        groups = [
            GroupRequest(number, tuple(range(choices)), torch.tensor(ids), params, seed + number)
            for number, ids in enumerate(prompts)
        ]
        texts = [ResponseText(self._policy.tokenizer, params.stop) for _ in range(len(prompts) * choices)]
        waiting = [Piece(index) for index in range(len(texts))]
        async with self._policy.engines.engine(mixed=request.mix_versions) as engine:
            pinned = engine.version
            try:
                items = engine.stream(groups) if isinstance(engine, StreamingEngine) else engine.generate(groups)
            except ValueError as refused:
                detail, fix = str(refused), "give a shorter prompt, or fewer tokens"
                name = "max_tokens" if "max_tokens" in detail else "prompt"
                raise HTTPProblem(422, detail, kind="generation", field=name, fix=fix) from None
            async with aclosing(cast("AsyncGenerator[Token | Completion, None]", items)):
                async for item in cast("AsyncIterator[Token | Completion]", items):
                    index = item.group * choices + item.place
                    piece, text = waiting[index], texts[index]
                    if piece.reason:
                        continue  # the engine ends at a stop string a little later than the text
                    for token, logprob, version in _tokens(item, len(text)):
                        if version != pinned and not request.mix_versions:
                            raise RuntimeError(f"a token of version {version} is in an answer of version {pinned}")
                        piece.add(Piece(index, text.add(token), [(token, logprob)], [(version, 1)]))
                        if text.stopped:
                            break
                    if isinstance(item, Completion) or text.stopped:
                        piece.text += text.finish()
                        piece.reason = "stop" if text.stopped else cast("Completion", item).finish_reason
                    waiting[index] = Piece(index, reason=piece.reason) if piece.text or piece.reason else piece
                    if piece is not waiting[index]:
                        yield piece
                    if all(one.reason for one in waiting):
                        break

    def _params(self, request: Request) -> SamplingParams:
        if isinstance(request, ChatRequest):
            default = self._policy.recipe.rollout.max_tokens
            tokens = request.max_completion_tokens or request.max_tokens or default
        else:
            tokens = request.max_tokens or DEFAULT_TOKENS
        stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
        return replace(
            self._policy.sampling,
            max_tokens=tokens,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=request.top_k,
            stop=stop,
        )

    def _prompts(self, request: Request) -> list[list[int]]:
        """The prompts of ``request`` as tokens. Raises HTTPProblem."""
        tokenizer = self._policy.tokenizer
        field_name = "messages" if isinstance(request, ChatRequest) else "prompt"
        if isinstance(request, ChatRequest):
            if tokenizer.chat_template is None:
                fix = "use /v1/completions, or set prompts.chat_template in the recipe"
                raise HTTPProblem(422, "The model has no chat template.", kind="no-chat", field="messages", fix=fix)
            messages = [
                {"role": one.role, "content": one.content if isinstance(one.content, str) else _joined(one.content)}
                for one in request.messages
            ]
            options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
            options |= self._policy.recipe.prompts.chat_template_options
            try:
                text = tokenizer.apply_chat_template(messages, **options)
            except Exception as error:  # a template is a program and may raise anything
                detail = f"The chat template refuses the messages: {error}"
                raise HTTPProblem(422, detail, kind="no-chat", field="messages", fix="see the template") from None
            prompts = [tokenizer(text, add_special_tokens=False)["input_ids"]]
        else:
            given: Any = request.prompt
            several = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
            prompts = [tokenizer(one)["input_ids"] if isinstance(one, str) else one for one in several]
        if not all(prompts):
            raise HTTPProblem(422, "A prompt has no tokens.", kind="generation", field=field_name, fix="give a text")
        if (choices := len(prompts) * (request.n or 1)) > MOST_CHOICES:
            fix = f"ask for at most {MOST_CHOICES} in one request"
            detail = f"These are {choices} choices."
            raise HTTPProblem(422, detail, kind="generation", field="n", value=request.n, fix=fix)
        return prompts

    def _head(self, request: Request, *, chunk: bool) -> Answer:
        chat = isinstance(request, ChatRequest)
        name = ("chat.completion.chunk" if chunk else "chat.completion") if chat else "text_completion"
        identity = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        return {"id": identity, "object": name, "created": int(time.time()), "model": request.model}

    def _completion_choice(self, request: Request, piece: Piece, *, chunk: bool, offset: int = 0) -> Answer:
        logprobs = None
        if request.logprobs is not None:
            names = self._names(piece)
            ends = [offset + len("".join(names[:number])) for number in range(len(names))]
            values = [logprob for _, logprob in piece.tokens]
            logprobs = {"tokens": names, "token_logprobs": values, "top_logprobs": None, "text_offset": ends}
        return {**_choice(piece), "text": piece.text, "logprobs": logprobs}

    def _chat_choice(self, request: Request, piece: Piece, *, chunk: bool, offset: int = 0) -> Answer:
        logprobs = None
        if request.logprobs:
            pairs = zip(self._names(piece), piece.tokens, strict=True)
            content = [
                {"token": name, "logprob": logprob, "bytes": list(name.encode()), "top_logprobs": []}
                for name, (_, logprob) in pairs
            ]
            logprobs = {"content": content}
        text = {"content": piece.text} if chunk else {"role": "assistant", "content": piece.text}
        return {**_choice(piece), "delta" if chunk else "message": text, "logprobs": logprobs}

    def _names(self, piece: Piece) -> list[str]:
        return [str(self._policy.tokenizer.decode([token])) for token, _ in piece.tokens]


def _tokens(item: Token | Completion, known: int) -> list[tuple[int, float, int]]:
    """The tokens of ``item`` after the first ``known`` ones, with logprobs and versions."""
    if isinstance(item, Token):
        return [(item.token_id, item.logprob, item.version)]
    versions = [version for version, count in item.versions for _ in range(count)]
    return list(zip(item.token_ids.tolist(), item.logprobs.tolist(), versions, strict=True))[known:]


def _choice(piece: Piece) -> Answer:
    return {"index": piece.index, "finish_reason": piece.reason, "versions": piece.versions}


def _joined(parts: list[Any]) -> str:
    return "".join(part.text for part in parts)


def _usage(prompts: list[list[int]], made: int) -> Answer:
    asked = sum(len(ids) for ids in prompts)
    return {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}
