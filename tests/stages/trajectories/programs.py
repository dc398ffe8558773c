"""Programs that ask the policy, as users write them."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import httpx
import openai

from tests.stages.environments.conversations import ADD, byte_level

TOKENIZER = byte_level()
seen = list[Any]()  # what programs got


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


async def talk(row: dict[str, Any], client: openai.AsyncOpenAI, session: Any) -> float:
    """Says "more" to each answer."""
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    for _ in range(row.get("turns", 2)):
        answer = await client.chat.completions.create(model=session.model, messages=messages)
        seen.append(answer)
        messages.append(answer.choices[0].message)
        messages.append({"role": "user", "content": "more"})
    return float(len(messages))


talk.replayable = True  # type: ignore[attr-defined]


def plain(row: dict[str, Any], client: openai.OpenAI, session: Any) -> None:
    """The same in a thread, streamed; its reward is set."""
    messages: list[Any] = [{"role": "system", "content": "Be short."}]
    messages.append({"role": "user", "content": row["prompt"]})
    for _ in range(2):
        with client.chat.completions.create(model="any", messages=messages, stream=True) as stream:
            parts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
        messages.append({"role": "assistant", "content": "".join(parts)})
        messages.append({"role": "user", "content": "more"})
        session.reward = len(messages)


async def rewrites(row: dict[str, Any], client: openai.AsyncOpenAI) -> float:
    """Goes back behind its second turn, and then behind all."""
    first = {"role": "user", "content": row["prompt"]}
    more = {"role": "user", "content": "more"}

    async def ask(*messages: Any) -> Any:
        answer = await client.chat.completions.create(model="any", messages=messages)
        seen.append(answer.choices[0].message.content)
        return answer.choices[0].message

    one = await ask(first)
    two = await ask(first, one, more)
    await ask(first, one, {"role": "user", "content": f"not {two.content}"})
    await ask({"role": "user", "content": "summary"})
    return 1.0


rewrites.replayable = True  # type: ignore[attr-defined]


async def samples(row: dict[str, Any], client: openai.AsyncOpenAI) -> float:
    """Asks the same three times, and goes on with the first two answers."""
    first = {"role": "user", "content": row["prompt"]}
    more = {"role": "user", "content": "more"}

    async def ask(*messages: Any) -> Any:
        answer = await client.chat.completions.create(model="any", messages=messages)
        seen.append(answer)
        return answer.choices[0].message

    one, two = await ask(first), await ask(first)
    await ask(first, one, more)
    await ask(first, two, more)
    await ask(first)
    return 1.0


async def starts_anew(client: openai.AsyncOpenAI) -> float:
    """Another conversation each time, for ever."""
    number = 0
    while True:
        message: Any = {"role": "user", "content": f"{number} {'x' * 9}"}
        await client.chat.completions.create(model="any", messages=[message])
        number += 1


async def calls(row: dict[str, Any], client: openai.AsyncOpenAI) -> float:
    """Adds as long as the policy calls."""
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    while True:
        answer = await client.chat.completions.create(
            model="any",
            messages=messages,
            tools=[ADD],  # type: ignore[list-item]
            logprobs=True,
            extra_body={"return_token_ids": True},
        )
        seen.append(answer.model_dump())
        message = answer.choices[0].message
        if not message.tool_calls:
            return 1.0
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            numbers = json.loads(call.function.arguments)  # type: ignore[union-attr]
            content = str(sum(numbers.values()))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


async def forms(row: dict[str, Any], session: Any) -> float:
    """One conversation in the three forms of requests, with nothing but HTTP."""
    key = session.environment["ANTHROPIC_API_KEY"]
    async with httpx.AsyncClient(headers={"x-api-key": key}, timeout=None) as http:

        async def ask(path: str, body: dict[str, Any]) -> Any:
            answer = await http.post(f"{session.base_url}/{path}", json={**body, "model": "any"})
            seen.append(answer.json())
            return answer.json()

        messages = [{"role": "user", "content": [{"type": "text", "text": row["prompt"]}]}]
        tool = {"name": "add", "input_schema": ADD["function"]["parameters"]}
        anthropic = await ask(
            "messages", {"system": "Add.", "messages": messages, "tools": [tool], "max_tokens": 9}
        )
        text, use = anthropic["content"]
        function = {"name": "add", "parameters": ADD["function"]["parameters"]}
        items = [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": text["text"]},
            {"type": "function_call", "call_id": "a", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "a", "output": "3"},
        ]
        await ask(
            "responses",
            {"instructions": "Add.", "input": items, "tools": [{"type": "function", **function}]},
        )
        assert use["input"] == {"a": 1}
        for body in (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            {"messages": [{"role": "assistant", "content": "I begin"}]},
            {"messages": [{"role": "user", "content": "?"}], "n": 2},
        ):
            await ask("chat/completions", body)
    return 1.0


async def begins_anew(row: dict[str, Any], client: openai.AsyncOpenAI, session: Any) -> None:
    """Begins another conversation after its turn, for which there is no room."""
    session.reward = 0.5
    for content in (row["prompt"], "anew " * 500):
        await client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": content}]
        )


async def tokens(row: dict[str, Any], session: Any) -> float:
    """Writes the conversation itself, as token ids; where it ``drifts``, with its turn tokenized
    again."""
    ids = ids_of(f"<|im_start|>user\n{row['prompt']}<|im_end|>\n<|im_start|>assistant\n")
    more = ids_of("\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")
    url = session.base_url.removesuffix("/v1")
    headers = {"Authorization": f"Bearer {session.api_key}"}
    async with httpx.AsyncClient(headers=headers, timeout=None) as http:

        async def ask(body: dict[str, Any]) -> Any:
            answer = await http.post(f"{url}/inference/v1/generate", json=body)
            seen.append(answer.json())
            return answer.json()

        for wrong in ({}, {"token_ids": [-1]}, {"token_ids": ids, "stream": True}):
            await ask(wrong)
        first = (await ask({"token_ids": ids, "request_id": "a"}))["choices"][0]["token_ids"]
        if row.get("drifts"):
            first = ids_of(str(TOKENIZER.decode(first)))
        await ask({"token_ids": [*ids, *first, *more]})
    return 1.0


async def train_client(row: dict[str, Any], client: openai.AsyncOpenAI) -> float:
    """Asks as the train client of verifiers, with the library that this one takes."""
    from renderers import config_from_name, create_renderer
    from renderers.client import generate

    config = type(config_from_name("qwen3"))(thinking_retention="all")
    renderer = create_renderer(TOKENIZER, config)
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    more = [{"role": "user", "content": "more"}]
    prompt_ids = None
    for _ in range(2):
        turn = await generate(
            client=client,
            renderer=renderer,
            messages=messages,
            model="any",
            prompt_ids=prompt_ids,
        )
        seen.append(turn["content"])
        bridged = renderer.bridge_to_next_turn(turn["prompt_ids"], turn["completion_ids"], more)
        prompt_ids = bridged.token_ids
    return 1.0


async def asks_once(row: dict[str, Any], session: Any) -> float:
    """Asks with the row's tokens; the sum of the token that it gets and its version is the reward."""
    url = session.base_url.removesuffix("/v1")
    headers = {"Authorization": f"Bearer {session.api_key}"}
    async with httpx.AsyncClient(headers=headers, timeout=None) as http:
        body = {"token_ids": row["token_ids"]}
        answer = await http.post(f"{url}/inference/v1/generate", json=body)
        [choice] = answer.json()["choices"]
        return float(choice["token_ids"][0] + choice["weight_versions"][0])


async def harness(row: dict[str, Any], session: Any) -> float:
    """Starts the process ``row["command"]`` with the session's variables; the last word that it
    prints is the answer."""
    done = await asyncio.create_subprocess_exec(
        *row["command"],
        row["prompt"],
        *row.get("arguments", ()),
        env={**os.environ, **session.environment},
        stdout=asyncio.subprocess.PIPE,
    )
    printed, _ = await done.communicate()
    seen.append(printed.decode().strip())
    return float(seen[-1].endswith(row["answer"]))


async def fails(row: dict[str, Any], client: openai.AsyncOpenAI) -> float:
    await client.chat.completions.create(
        model="any", messages=[{"role": "user", "content": row["prompt"]}]
    )
    raise RuntimeError("not today")


async def never_ends(row: dict[str, Any], client: openai.AsyncOpenAI, session: Any) -> None:
    """Asks until it is told that the trajectory has ended."""
    session.reward = 0.5
    while True:
        try:
            await talk({**row, "turns": 100}, client, session)
        except openai.APIStatusError as error:
            seen.append((error.status_code, str(error)))
            raise


async def hangs(row: dict[str, Any], client: openai.AsyncOpenAI) -> None:
    await client.chat.completions.create(
        model="any", messages=[{"role": "user", "content": row["prompt"]}]
    )
    await asyncio.sleep(1e6)


async def keeps_its_key(row: dict[str, Any], client: openai.AsyncOpenAI, session: Any) -> float:
    seen.append(session)
    return await talk(row, client, session)
