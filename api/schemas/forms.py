"""Requests in further forms, and their answers: OpenAI's responses, Anthropic's messages, and the
tokens of texts as vLLM gives them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, field_validator

from api.schemas.completions import (
    Asking,
    ChatMessage,
    Empty,
    Ignored,
    Loose,
    Stop,
    TokenId,
    Tokens,
)
from api.schemas.runs import Strict
from stages.json_schema import fault

Object = dict[str, Any]
Objects = Annotated[list[Object], Field(min_length=1)]
Name = Annotated[str, Field(min_length=1, max_length=128)]


class Tool(Loose):
    """A function that the policy may call."""

    name: Name
    description: str | None = None


class FunctionTool(Tool):
    type: Literal["function"]
    parameters: Object | None = Field(None, description="JSON Schema.")


class NamedChoice(Strict):
    type: Literal["function"]
    name: Name


class TextFormat(Strict):
    type: Literal["text"]


class TextOptions(Strict):
    format: TextFormat | None = None
    verbosity: None = None


class ObfuscationOptions(Strict):
    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(Asking):
    """OpenAI's responses. Nothing is stored: each request has the whole conversation."""

    input: str | Objects = Field(description="A text, or items.")
    instructions: str | None = Field(None, description="The system's message.")
    max_output_tokens: Tokens | None = Field(
        None, description="Default: rollout.max_tokens of the run, or what the context leaves."
    )
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: Any = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    text: TextOptions | None = None
    stream_options: ObfuscationOptions | None = None
    previous_response_id: None = Field(None, description="Nothing is stored.")
    conversation: None = Field(None, description="Nothing is stored.")
    prompt: None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    top_logprobs: Literal[0] | None = None
    max_tool_calls: None = None
    reasoning: None = None


class ClaudeTool(Tool):
    type: Literal["custom"] | None = None
    input_schema: Object = Field(description="JSON Schema.")


class ToolChoice(Strict):
    type: Literal["none", "auto", "any", "tool"]
    name: Name | None = Field(None, description="Of type `tool`.")
    disable_parallel_tool_use: Any = None


class NoThinking(Strict):
    type: Literal["disabled"]


class Messages(Strict):
    """A conversation as Anthropic has it."""

    messages: Objects = Field(description="The last one is not the assistant's.")
    system: str | list[Object] | None = None
    tools: list[ClaudeTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: NoThinking | None = None


class MessagesRequest(Messages, Asking):
    """Anthropic's messages."""

    max_tokens: Tokens
    stop_sequences: Annotated[list[Stop], Field(max_length=64)] | None = None


class OfTokens(Ignored):
    """Base of requests for tokens alone."""

    model: str = Field(max_length=200, description="As of a request for responses.")
    media_type: ClassVar[str] = "application/json"


class CountRequest(Messages, OfTokens):
    """Anthropic's count of the tokens of a conversation."""


class TokenizeRequest(OfTokens):
    """A text, or a conversation."""

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = Field(
        None, validate_default=True
    )
    add_special_tokens: bool | None = Field(
        None, description="Default: true for a prompt, false for messages."
    )
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = Field(None, description="Default: true.")
    continue_final_message: bool | None = None
    chat_template_kwargs: Object | None = None
    tools: Empty | None = None

    @field_validator("messages")
    @classmethod
    def _is_one(cls, messages: list[ChatMessage] | None, request: Any) -> Any:
        if (messages is None) == (request.data.get("prompt") is None):
            raise fault("is to be there, or prompt", "give one of them")
        return messages


class DetokenizeRequest(OfTokens):
    tokens: list[TokenId]


FormRequest = ResponsesRequest | MessagesRequest
TokensRequest = TokenizeRequest | DetokenizeRequest | CountRequest
FORMS: dict[str, type[FormRequest | TokensRequest]] = {
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


class ResponseView(BaseModel):
    """OpenAI's response; the fields of the request are in it, too."""

    id: str
    object: Literal["response"]
    created_at: int = Field(description="Unix seconds")
    status: Literal["completed", "incomplete"]
    incomplete_details: Object | None
    model: str
    output: list[Object] = Field(description="A message, function calls.")
    usage: Object


class MessageView(BaseModel):
    """Anthropic's message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Object] = Field(description="A text, uses of tools.")
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: Object


class CountView(BaseModel):
    input_tokens: int


class TokensView(BaseModel):
    count: int
    max_model_len: int | None = Field(description="Tokens of the engine's context.")
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedView(BaseModel):
    prompt: str
