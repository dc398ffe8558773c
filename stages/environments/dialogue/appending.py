"""The proof that a chat template only appends.

a conversation with all that a run may have, message by message:

rendering so far + beginning of the assistant's turn, or what a stand-in's turn is followed by
    └▶ must be the beginning of the rendering with the next message; else the template is refused by that message
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from pipeline.compat.extras import install
from stages.environments.dialogue.interface import MessagesRefused
from stages.environments.dialogue.template import USER, TemplateText, calling
from stages.environments.interface import Message
from stages.prompts.rows.files import PromptError

KEY = "prompts.chat_template"
THOUGHT = "4d5e6f7a"  # looked for in renderings
SYSTEM: Message = {"role": "system", "content": "A system message."}
ANSWER: Message = {"role": "assistant", "content": "An answer."}
RESULT: Message = {
    "role": "tool",
    "name": "look",
    "tool_call_id": "call00000",
    "content": "A result.",
}
ANOTHER = f"give a template that only appends, or {install('renderers')}, which knows some models"
AS_TEXT = "or set environment.tools = 'text'"


def require_appending(
    chat: TemplateText, template: str, roles: Collection[str], *, thinks: bool
) -> None:
    """Raise PromptError where the chat ``template`` writes messages otherwise once others follow.

    ``roles``: those of an environment's messages. ``thinks``: a turn may begin with thinking.
    """
    before = [USER] if _refuses_system(chat) else [SYSTEM, USER]
    opens_thinking = chat.render(before, opens=True).rstrip().endswith("<think>")
    users = [USER] if "user" in roles else []
    for is_thinking in sorted({opens_thinking, thinks}):
        answer = _thinking(ANSWER, template) if is_thinking else ANSWER
        call = _thinking(calling([RESULT]), template) if is_thinking else calling([RESULT])
        answers = [answer, USER, answer, USER, answer] if users else [answer]
        _require(chat, [*before, *answers], len(before), ANOTHER)
        if "tool" in roles:
            calls = [call, RESULT, call, RESULT, answer, *users]
            _require(
                chat, [*before, *calls, *calls * len(users)], len(before), f"{ANOTHER}, {AS_TEXT}"
            )


def _refuses_system(chat: TemplateText) -> bool:
    try:
        chat.render([SYSTEM, USER])
    except PromptError:
        return True
    return False


def _thinking(message: Message, template: str) -> Message:
    """Return a message of the assistant that thinks before: in the field that the template reads,
    or else in its content."""
    if "reasoning_content" in template or "message.thinking" in template:
        return {**message, "reasoning_content": THOUGHT}
    return {**message, "content": f"<think>\n{THOUGHT}\n</think>\n\n{message['content']}"}


def _require(chat: TemplateText, messages: Sequence[Message], first: int, fix: str) -> None:
    """Raise PromptError, which names the first message that is not appended. Those before the
    number ``first`` are the prompt."""
    for number in range(first, len(messages)):
        role = messages[number]["role"]
        try:
            problems = list(_problems(chat, messages[: number + 1]))
        except (PromptError, MessagesRefused) as error:
            problems = [f"cannot write it ({error})"]
        if problems:
            roles = [message["role"] for message in messages[: number + 1]]
            raise PromptError(
                f"does not only append: at message {number + 1} ({role}) of {roles} it "
                f"{problems[0]}. What was generated would not be what a later turn reads",
                fix,
                KEY,
            )


def _problems(chat: TemplateText, messages: Sequence[Message]) -> Iterator[str]:
    """Yield what is not appended of the last of ``messages``."""
    *before, last = messages
    text = chat.render(messages)
    is_turn = last["role"] == "assistant"
    expected = chat.render(before, opens=is_turn)
    if not text.startswith(expected):
        yield f"rewrites {_difference(expected, text)}"
    if not is_turn:
        turns = [place for place, each in enumerate(before) if each["role"] == "assistant"]
        begin = turns[-1] + 1
        expected = chat.render(messages[:begin]) + chat.added_to_turn(messages[begin:])
        opened = chat.render(messages, opens=True)
        if opened != expected:
            yield f"writes {_difference(expected, opened)}"
        return
    if not text.endswith(chat.end):
        yield f"ends the turn with {text[-40:]!r}, and others with {chat.end!r}"
    if THOUGHT in str(last) and THOUGHT not in text[len(expected) :]:
        yield "leaves out what the assistant has thought"


def _difference(expected: str, text: str) -> str:
    pairs = zip(expected, text, strict=False)
    at = next(
        (place for place, (a, b) in enumerate(pairs) if a != b), min(map(len, (expected, text)))
    )
    return f"{expected[at : at + 40]!r} as {text[at : at + 40]!r}"
