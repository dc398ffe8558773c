"""Requests for responses of a served policy, and its answers, as OpenAI's API has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationInfo, field_validator

from api.schemas.runs import Strict
from stages.engines.bounds import LEAST, MOST_TEMPERATURE, temperature_fix, top_p_fix
from stages.json_schema import fault

MOST_CHOICES = 128  # of one request
Ids = Annotated[list[Annotated[int, Field(ge=0, le=2**31)]], Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=200)]
Tokens = Annotated[int, Field(ge=1, le=2**31)]
Zero = Annotated[float, Field(ge=0, le=0)]
Empty = Annotated[list[Any], Field(max_length=0)]
NoBias = Annotated[dict[str, float], Field(max_length=0)]
NoMetadata = Annotated[dict[str, str], Field(max_length=0)]


def _bounded(fix_of: Callable[[float], str]) -> AfterValidator:
    """Refuse a value for which there is a fix."""

    def check(value: float) -> float:
        if fix := fix_of(value):
            raise fault("is not right", fix)
        return value

    return AfterValidator(check)


Temperature = Annotated[
    float,
    _bounded(temperature_fix),
    Field(json_schema_extra={"minimum": 0, "maximum": MOST_TEMPERATURE}),
]
TopP = Annotated[
    float, _bounded(top_p_fix), Field(json_schema_extra={"minimum": LEAST, "maximum": 1})
]


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Sampling(Strict):
    """What both kinds of requests have.

    ``mix_versions`` and ``top_k`` are AsyncDock's own. What of OpenAI's is not served is taken with
    the value that it has by default, as some clients send it.
    """

    model: str = Field(
        max_length=200, description="RUN, RUN@VERSION, or the name of a checkpoint that is served."
    )
    temperature: Temperature | None = Field(None, description="0: the likeliest token.")
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31)] | None = Field(None, description="0: all tokens.")
    n: int | None = Field(None, ge=1, le=MOST_CHOICES, description="Choices of each prompt.")
    seed: int | None = Field(
        None, ge=-(2**63), lt=2**63, description="The same seed and version: the same tokens."
    )
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    mix_versions: bool | None = Field(
        None, description="Tokens of an answer may come from versions published meanwhile."
    )
    user: str | None = None
    presence_penalty: Zero | None = None
    frequency_penalty: Zero | None = None
    logit_bias: NoBias | None = Field(None, description="Not served.")

    @property
    def media_type(self) -> str:
        """Of the answer."""
        return "text/event-stream; charset=utf-8" if self.stream else "application/json"


class CompletionRequest(Sampling):
    """A prompt, or several, as texts or tokens."""

    prompt: (
        str
        | Ids
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[Ids], Field(min_length=1)]
    )
    max_tokens: Tokens | None = Field(None, description="Default: 16, or what the context leaves.")
    logprobs: int | None = Field(
        None, ge=0, le=20, description="Those of the sampled and of this many likeliest tokens."
    )
    echo: Literal[False] | None = Field(None, description="The prompt is not repeated.")
    best_of: int | None = Field(None, ge=1, description="As many as `n`: none is left out.")
    suffix: Literal[""] | None = Field(None, description="Not served.")

    @field_validator("best_of")
    @classmethod
    def _returns_all(cls, best_of: int | None, request: ValidationInfo) -> int | None:
        choices = request.data.get("n") or 1
        if best_of not in (None, choices):
            raise fault("would leave choices out", f"give n, which is {choices}")
        return best_of


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    role: str = Field(min_length=1, max_length=64)
    content: str | list[TextPart] | None = Field(None, validate_default=True)
    name: str | None = None
    refusal: None = None
    audio: None = None
    annotations: Empty | None = None
    tool_calls: Empty | None = None
    function_call: None = None

    @field_validator("content")
    @classmethod
    def _has_content(
        cls, content: str | list[TextPart] | None, message: ValidationInfo
    ) -> str | list[TextPart] | None:
        if content is None and message.data.get("role") != "assistant":
            raise fault("is missing", "give a text: only an assistant's may be null")
        return content

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class ResponseFormat(Strict):
    type: Literal["text"]


class ChatRequest(Sampling):
    """A conversation, which the policy's chat template makes a prompt of."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: Tokens | None = Field(
        None, description="Default: rollout.max_tokens of the run, or what the context leaves."
    )
    max_completion_tokens: Tokens | None = Field(None, description="As max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="With `logprobs`: also this many likeliest tokens."
    )
    response_format: ResponseFormat | None = None
    tools: Empty | None = Field(None, description="Not served, as `functions`.")
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    functions: Empty | None = None
    function_call: Literal["none", "auto"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    audio: None = None
    prediction: None = None
    reasoning_effort: None = None
    verbosity: None = None
    web_search_options: None = None
    store: Literal[False] | None = Field(None, description="Nothing is stored.")
    metadata: NoMetadata | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


Request = CompletionRequest | ChatRequest
REQUESTS: dict[str, type[Request]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
}


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TokenLogprob(BaseModel):
    token: str = Field(description=r"Its text; of a part of a character its bytes, as `\xf0\x9f`.")
    logprob: float
    bytes: list[int] = Field(
        description="Those of the text that it makes; empty where it makes none."
    )
    top_logprobs: list[TokenLogprob] = Field(default=[], description="Of a sampled token.")


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]


class CompletionLogprobs(BaseModel):
    tokens: list[str] = Field(
        description=r"The text of each; of a part of a character "
        r"`bytes:\xf0\x9f`."
    )
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None = Field(
        description="By token, likeliest first; a second one with the same text is `token_id:N`."
    )
    text_offset: list[int] = Field(
        description="In characters of the text, where each token begins."
    )


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
    finish_reason: Literal["stop", "length"] | None = Field(
        description="Null until it ends, in a stream."
    )
    versions: list[tuple[int, int]] = Field(
        description="Run-length encoded: (policy version, tokens that it made)."
    )


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
