"""Requests for responses of a served policy, and its answers, as OpenAI's API has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from api.schemas.runs import Strict
from stages.engines.bounds import LEAST, MOST_TEMPERATURE, temperature_fix, top_p_fix
from stages.environments.interface import Message
from stages.environments.interface import Request as Conversation
from stages.environments.programs.messages import call_of, dropped_tools, read_tools, text_of
from stages.json_schema import fault, faults

MOST_CHOICES = 128  # of one request
MOST_LIKELIEST = 20  # tokens beside each one
TokenId = Annotated[int, Field(ge=0, le=2**31)]
Ids = Annotated[list[TokenId], Field(min_length=1)]
SomeIds = Annotated[list[TokenId], Field(max_length=1024)]
Stop = Annotated[str, Field(min_length=1, max_length=200)]
Tokens = Annotated[int, Field(ge=1, le=2**31)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Biases = dict[
    Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]
]
Likeliest = Annotated[int, Field(ge=0, le=MOST_LIKELIEST)]
Empty = Annotated[list[Any], Field(max_length=0)]


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


class Loose(BaseModel):
    """Base of those parts of a request in which unknown fields are ignored."""


class JsonSchema(Strict):
    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: Any = Field(None, description="It is followed in any case.")


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = Field(None, validate_default=True)

    @field_validator("json_schema")
    @classmethod
    def _is_of_type(cls, schema: JsonSchema | None, form: ValidationInfo) -> JsonSchema | None:
        if (schema is None) is (form.data.get("type") == "json_schema"):
            raise fault("goes with the type json_schema", "give both, or neither")
        return schema


class StructuredOutputs(Strict):
    """vLLM's: the form of the response, by one of the fields."""

    choice: Annotated[list[str], Field(min_length=1)] | None = None
    regex: str | None = None
    json_: dict[str, Any] | str | None = Field(None, alias="json", description="A JSON schema.")
    json_object: Literal[True] | None = None
    grammar: str | None = Field(None, description="In Lark or GBNF.")

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        names = [name for name, value in self if value is not None] or ["choice", "choice"]
        faults(self, ((name, "is not the only form", "give one") for name in names[1:]))
        return self


class ToolFunction(BaseModel):
    model_config = ConfigDict(extra="allow")  # templates read them

    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    parameters: dict[str, Any] = Field({"type": "object"}, description="A JSON schema.")


class Tool(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: ToolFunction


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(
        None, description="With `include_usage`: each part has the usage so far."
    )
    include_obfuscation: Literal[False] | None = None


class Ignored(Strict):
    """Fields of OpenAI's and vLLM's requests that change no token here."""

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    moderation: Any = None
    request_id: Any = None
    session_id: Any = None
    priority: Any = None
    cache_salt: Any = None
    stream_interval: Any = None


class Asking(Ignored):
    """What every request for responses has.

    ``mix_versions`` is AsyncDock's own; what OpenAI's API does not have is vLLM's.
    """

    model: str = Field(
        max_length=200, description="RUN, RUN@VERSION, or the name of a checkpoint that is served."
    )
    temperature: Temperature | None = Field(None, description="0: the likeliest token.")
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = Field(
        None, description="0 or -1: all tokens."
    )
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="The least probability, as a part of the likeliest token's."
    )
    seed: int | None = Field(
        None, ge=-(2**63), le=2**63 - 1, description="The same seed and version: the same tokens."
    )
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[Biases, Field(max_length=1024)] | None = Field(
        None, description="Of tokens, by their numbers."
    )
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    bad_words: Annotated[list[Stop], Field(max_length=100)] | None = Field(
        None,
        description="Texts that a response may not contain: the last token of each is banned after "
        "its others.",
    )
    min_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = Field(
        None, description="Of a response before it may end, but by max_tokens."
    )
    ignore_eos: bool | None = Field(None, description="A response does not end by itself.")
    stop: Stop | Annotated[list[Stop], Field(max_length=64)] | None = None
    stop_token_ids: SomeIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = Field(None, description="Default: true.")
    spaces_between_special_tokens: Any = None
    add_special_tokens: bool | None = Field(
        None, description="To a prompt. Default: true for a prompt, false for messages."
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31)] | None = Field(
        None, description="Tokens that are kept of a longer prompt; -1: those that have room."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Which is cut off. Default: left."
    )
    stream: bool | None = None
    mix_versions: bool | None = Field(
        None, description="Tokens of an answer may come from versions published meanwhile."
    )

    @property
    def media_type(self) -> str:
        """Of the answer."""
        return "text/event-stream; charset=utf-8" if self.stream else "application/json"


class Sampling(Asking):
    """What completions and chats have.

    What is not served is taken with the value that it has by default, as some clients send it.
    """

    n: int | None = Field(None, ge=1, le=MOST_CHOICES, description="Choices of each prompt.")
    prompt_logprobs: Likeliest | None = Field(
        None, description="Logprobs of the prompt's tokens and of this many likeliest ones."
    )
    logprob_token_ids: Annotated[SomeIds, Field(max_length=128)] | None = Field(
        None, description="With logprobs: those of these tokens in place of the likeliest ones."
    )
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Logprobs name tokens as `token_id:N`."
    )
    stream_options: StreamOptions | None = None
    use_beam_search: Literal[False] | None = Field(None, description="Not served.")
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @field_validator("stream_options")
    @classmethod
    def _streams(cls, options: StreamOptions | None, request: ValidationInfo) -> Any:
        if options is not None and not request.data.get("stream") and options.model_fields_set:
            raise fault("is of a stream", "set stream to true, or leave it out")
        return options


class CompletionRequest(Sampling):
    """A prompt, or several, as texts or tokens."""

    prompt: (
        str
        | Ids
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[Ids], Field(min_length=1)]
    )
    max_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = Field(
        None, description="Default: 16, or what the context leaves. 0: with `echo` alone."
    )
    logprobs: Likeliest | None = Field(
        None, description="Those of the sampled and of this many likeliest tokens."
    )
    echo: bool | None = Field(None, description="The text begins with the prompt.")
    best_of: int | None = Field(None, ge=1, description="As many as `n`: none is left out.")
    suffix: Literal[""] | None = Field(None, description="Not served.")

    @field_validator("best_of")
    @classmethod
    def _returns_all(cls, best_of: int | None, request: ValidationInfo) -> int | None:
        choices = request.data.get("n") or 1
        if best_of not in (None, choices):
            raise fault("would leave choices out", f"give n, which is {choices}")
        return best_of


class TextPart(Loose):
    type: Literal["text", "input_text", "output_text"]
    text: str


class CalledBefore(Loose):
    name: str
    arguments: str | dict[str, Any] | None = None


class CallBefore(Loose):
    """A call of a message of the assistant."""

    id: str | None = None
    function: CalledBefore


class ChatMessage(Loose):
    role: str = Field(min_length=1, max_length=64)
    content: str | list[str | TextPart] | None = Field(None, validate_default=True)
    name: str | None = None
    tool_call_id: str | None = None
    audio: None = None
    tool_calls: list[CallBefore] | None = None
    function_call: None = None

    @field_validator("content")
    @classmethod
    def _has_content(
        cls, content: str | list[str | TextPart] | None, message: ValidationInfo
    ) -> str | list[str | TextPart] | None:
        if content is None and message.data.get("role") != "assistant":
            raise fault("is missing", "give a text: only an assistant's may be null")
        return content

    def as_templates_read(self, names: dict[str, str]) -> Message:
        """Return the message for a chat template. ``names``: of the tools that were called before,
        by the id of the call; those of its calls are added."""
        content = self.model_dump()["content"]
        optional = {"name": self.name, "tool_call_id": self.tool_call_id}
        if self.role == "tool":
            optional["name"] = self.name or names.get(self.tool_call_id or "")
        named = {key: value for key, value in optional.items() if value is not None}
        message: Message = {"role": self.role, "content": text_of(content, "messages"), **named}
        if self.tool_calls:
            called = [(call.id, call.function) for call in self.tool_calls]
            message["tool_calls"] = [call_of(i, each.name, each.arguments) for i, each in called]
            names |= {call["id"]: call["function"]["name"] for call in message["tool_calls"]}
        return message


class ChatRequest(Sampling):
    """A conversation, which the policy's chat template makes a prompt of."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: Tokens | None = Field(
        None, description="Default: rollout.max_tokens of the run, or what the context leaves."
    )
    max_completion_tokens: Tokens | None = Field(None, description="As max_tokens.")
    logprobs: bool | None = None
    top_logprobs: Likeliest | None = Field(
        None, description="With `logprobs`: also this many likeliest tokens."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables of the chat template, beside those of the recipe."
    )
    add_generation_prompt: bool | None = Field(None, description="Default: true.")
    continue_final_message: bool | None = Field(
        None, description="The response continues the last message. Default: false."
    )
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None,
        description="`auto`, the default: calls are looked for in the text. `required` or one "
        "tool: the response is a call. `none`: the prompt has no tools.",
    )
    parallel_tool_calls: Any = None
    functions: Empty | None = None
    function_call: Literal["none", "auto"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    audio: None = None
    prediction: Any = Field(None, description="It would make an answer faster elsewhere.")
    echo: Literal[False] | None = None
    reasoning_effort: None = None
    verbosity: None = None
    web_search_options: None = None

    @property
    def as_templates_read(self) -> Conversation:
        names: dict[str, str] = {}
        messages = [message.as_templates_read(names) for message in self.messages]
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        return Conversation(
            messages, dropped_tools(self.tool_choice, read_tools(tools, inside="function"))
        )


class ReadChat(ChatRequest):
    """A request in another form, as a chat. ``conversation``: in place of messages and tools."""

    conversation: Conversation

    @property
    def as_templates_read(self) -> Conversation:
        return self.conversation


Request = CompletionRequest | ChatRequest
REQUESTS: dict[str, type[Request]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
}


class PromptDetails(BaseModel):
    cached_tokens: int = Field(description="Of the prompts, that were not computed again.")


class Usage(BaseModel):
    prompt_tokens: int = Field(description="Of each prompt once, however many choices it has.")
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


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
    token_logprobs: list[float | None] = Field(description="Null for a prompt's first token.")
    top_logprobs: list[dict[str, float] | None] = Field(
        description="By token: itself, then the likeliest first; a second one with the same text "
        "is `token_id:N`."
    )
    text_offset: list[int] = Field(
        description="In characters of the text, where each token begins."
    )


class PromptLogprob(BaseModel):
    logprob: float
    rank: int | None = Field(description="1: the likeliest. Null where it is not known.")
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CalledFunction(BaseModel):
    name: str
    arguments: str = Field(description="JSON")


class ToolCall(BaseModel):
    index: int | None = Field(None, description="In a stream.")
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatText(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    tool_calls: list[ToolCall] | None = None


class Choice(BaseModel):
    """A completion has ``text``; a chat ``message``, or as a part of a stream ``delta``."""

    index: int
    text: str | None = None
    message: ChatText | None = None
    delta: ChatText | None = None
    logprobs: CompletionLogprobs | ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None = Field(
        description="Null until it ends, in a stream."
    )
    stop_reason: str | int | None = Field(
        None, description="The stop string, or a token of stop_token_ids, that ended it."
    )
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = Field(None, description="Of a completion.")
    prompt_logprobs: PromptLogprobs | None = Field(None, description="Of a completion.")
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
    prompt_token_ids: list[int] | None = Field(None, description="Of a chat.")
    prompt_logprobs: PromptLogprobs | None = Field(None, description="Of a chat.")


class ModelView(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="Unix seconds")
    owned_by: str


class ModelsView(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelView]
