"""The agent that plays tasksets of ``verifiers``: a chat with their tools, in this process.

verifiers finds agents, its harnesses, by the names of modules: this one is HARNESS.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from typing import Any

from pipeline.compat.extras import extra

with extra("verifiers"):
    import verifiers.v1 as vf
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
with extra("agents"):
    import openai

HARNESS = "asyncdock"
sys.modules[f"verifiers.v1.harnesses.{HARNESS}"] = sys.modules[__name__]
__all__ = ["HARNESS", "Chat"]


class Chat(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """Asks and calls tools until the policy calls none, in this process."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: Mapping[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Play one segment."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        places = {name: {"url": url} for name, url in mcp_urls.items()}
        async with contextlib.AsyncExitStack() as stack:
            client = openai.AsyncOpenAI(
                base_url=endpoint, api_key=secret, timeout=None, max_retries=0
            )
            stack.push_async_callback(client.close)
            tools, dispatch, servers = await connect_mcp({"mcpServers": places}, stack)
            while True:
                answer = await client.chat.completions.create(
                    model=ctx.model,
                    messages=messages,  # type: ignore[arg-type]
                    tools=tools or openai.omit,
                )
                message: Any = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message.tool_calls:
                    try:
                        arguments = json.loads(call.function.arguments)
                        content = await call_mcp(servers, dispatch, call.function.name, arguments)
                    except (KeyError, TypeError, ValueError) as error:
                        content = f"error: {error!r}"
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
