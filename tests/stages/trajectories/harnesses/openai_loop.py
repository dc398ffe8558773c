"""The tool loop of OpenAI's client: it knows two environment variables, and nothing of us."""

import json
import sys

import openai

NUMBER = {"type": "integer"}
SCHEMA = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
ADD = {"name": "add", "description": "Add two numbers.", "parameters": SCHEMA}

client = openai.OpenAI()
messages = [{"role": "user", "content": sys.argv[1]}]
while True:
    answer = client.chat.completions.create(
        model="gpt-4o", messages=messages, tools=[{"type": "function", "function": ADD}]
    )
    message = answer.choices[0].message
    messages.append(message)
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        total = sum(json.loads(call.function.arguments).values())
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})
print(message.content)
