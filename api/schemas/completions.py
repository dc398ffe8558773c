"""Requests for responses of a served policy, and its answers, as OpenAI's API has them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from api.schemas.runs import Strict

MOST_CHOICES = 128  # of one request
Ids = Annotated[list[Annotated[int, Field(ge=0, le=2**31)]], Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=200)]
Tokens = Annotated[int, Field(ge=1, le=2**31)]
Zero = Annotated[float, Field(ge=0, le=0)]


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

    @property
    def media_type(self) -> str:
        """Of the answer."""
        return "text/event-stream; charset=utf-8" if self.stream else "application/json"


class CompletionRequest(Sampling):
    """A prompt, or several, as texts or tokens."""

    prompt: str | Ids | Annotated[list[str], Field(min_length=1)] | Annotated[list[Ids], Field(min_length=1)]
    max_tokens: Tokens | None = Field(None, description="Default: 16.")
    logprobs: int | None = Field(
        None, ge=0, le=20, description="Those of the sampled and of this many likeliest tokens."
    )


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    role: str = Field(min_length=1, max_length=64)
    content: str | list[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(Sampling):
    """A conversation, which the policy's chat template makes a prompt of."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: Tokens | None = Field(None, description="Default: rollout.max_tokens of the run.")
    max_completion_tokens: Tokens | None = Field(None, description="As max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20, description="With `logprobs`: also this many likeliest tokens.")


Request = CompletionRequest | ChatRequest
REQUESTS: dict[str, type[Request]] = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenLogprob] = Field([], description="Of a sampled token.")


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class ChatText(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str


class Choice(BaseModel):
    """A completion has ``text``; a chat ``message``, or as a part of a stream ``delta``."""

    index: int
    text: str | None = None
    message: ChatText | None = None
    delta: ChatText | None = None
    logprobs: CompletionLogprobs | ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None = Field(description="Null until it ends, in a stream.")
    versions: list[tuple[int, int]] = Field(description="Run-length encoded: (policy version, tokens that it made).")


class AnswerView(BaseModel):
    """A whole answer, or a part of a stream. Fields that it does not have are left out."""

    id: str
    object: Literal["text_completion", "chat.completion", "chat.completion.chunk"]
    created: int = Field(description="Unix seconds")
    model: str
    choices: list[Choice]
    usage: Usage | None = None


class ModelView(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="Unix seconds")
    owned_by: str


class ModelsView(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelView]
