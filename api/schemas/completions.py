"""Requests for responses of a served policy, and its answers, as OpenAI's API has them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from api.schemas.runs import Strict

MOST_CHOICES = 128  # of one request
Ids = Annotated[list[Annotated[int, Field(ge=0, le=2**31)]], Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=200)]
Zero = Annotated[float, Field(ge=0, le=0)]
Versions = Annotated[
    list[tuple[int, int]], Field(description="Run-length encoded: (policy version, tokens that it made).")
]


class StreamOptions(Strict):
    include_usage: bool = False


class Sampling(Strict):
    """What both kinds of requests have. ``mix_versions`` and ``top_k`` are AsyncDock's own."""

    model: str = Field(max_length=200, description="RUN, RUN@VERSION, or the name of a checkpoint that is served.")
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int = Field(0, ge=0, le=2**31, description="0: all tokens.")
    n: int | None = Field(None, ge=1, le=MOST_CHOICES, description="Choices of each prompt.")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="The same seed and version: the same tokens.")
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    mix_versions: bool = Field(False, description="Tokens of an answer may come from versions published meanwhile.")
    user: str | None = None
    presence_penalty: Zero | None = None
    frequency_penalty: Zero | None = None


class CompletionRequest(Sampling):
    """A prompt, or several, as texts or tokens."""

    prompt: str | Ids | Annotated[list[str], Field(min_length=1)] | Annotated[list[Ids], Field(min_length=1)]
    max_tokens: int | None = Field(None, ge=1, le=2**31, description="Default: 16.")
    logprobs: Annotated[int, Field(ge=0, le=0, description="0: those of the sampled tokens.")] | None = None


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    role: str = Field(min_length=1, max_length=64)
    content: str | list[TextPart]
    name: str | None = None


class ChatRequest(Sampling):
    """A conversation, which the policy's chat template makes a prompt of."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, le=2**31, description="Default: rollout.max_tokens of the run.")
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31, description="As max_tokens.")
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None


class Open(BaseModel):
    """Base of answers: fields of null are left out, except where OpenAI's API has them."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class Usage(Open):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TokenLogprobs(Open):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: None = None
    text_offset: list[int]


class CompletionChoice(Open):
    index: int
    text: str
    logprobs: TokenLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    versions: Versions


class CompletionView(Open):
    id: str
    object: Literal["text_completion"]
    created: int = Field(description="Unix seconds")
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TokenLogprob(Open):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[dict[str, Any]] = []


class ChatLogprobs(Open):
    content: list[TokenLogprob]


class ChatAnswer(Open):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChoice(Open):
    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]
    versions: Versions


class ChatView(Open):
    id: str
    object: Literal["chat.completion"]
    created: int = Field(description="Unix seconds")
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ModelView(Open):
    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="Unix seconds")
    owned_by: str


class ModelsView(Open):
    object: Literal["list"] = "list"
    data: list[ModelView]
