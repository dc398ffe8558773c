"""A server's process with one client in it: ``python -m tests.orchestration.calls.driver SETTINGS``.

It prints a line for each call that is acknowledged, and at the end one for each answer. Given how
many were acknowledged before, it goes on with the next one.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from orchestration.calls.interface import Acknowledged, CallOptions, Done
from orchestration.calls.service import open_service
from stages.calls.interface import Datum, ModelOptions, ServedBase
from tests.orchestration.calls.services import Client, prompt

SAMPLER = "sampler"
# What of a step depends on its calls alone, and not on the time that they take.
OF_CALLS = ("number", "step", "data", "tokens", "loss", "trained_tokens", "grad_norm")
TOKENS = 40  # their ids are below it, as those of `tiny` are


def tell(*words: object) -> None:
    print(*words, flush=True)


def digest(value: Any) -> str:
    """Return what says whether two answers are the same, bit for bit."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)

    def text(part: Any) -> str:
        if isinstance(part, np.ndarray):
            return part.tobytes().hex()
        if isinstance(part, Mapping):
            return str([(name, text(each)) for name, each in sorted(part.items())])
        if isinstance(part, list | tuple):
            return str([text(each) for each in part])
        return repr(part)

    return hashlib.sha256(text(value).encode()).hexdigest()[:16]


def data(number: int) -> list[Datum]:
    tokens = (np.arange(10) * (number + 3)) % TOKENS
    inputs: dict[str, np.ndarray] = {
        "target_tokens": np.roll(tokens, -1),
        "weights": np.ones(10, np.float32),
    }
    return [Datum(tokens, inputs)] * (1 + number % 3)


async def call(client: Client, number: int) -> Acknowledged:
    """Make call ``number``: passes, steps, and sometimes something else."""
    client.seq = number  # of the call before it
    match number % 10:
        case 2 | 5 | 8:
            return await client.step(learning_rate=1e-2)
        case 6:
            return await client.save(f"after-{number}")
        case 7 if number % 30 == 17:
            return await client.load(f"tinker://{client.model_id}/weights/after-{number - 11}")
        case 9:
            return await client.snapshot(number)
    return await client.train(*data(number))


async def sample(client: Client, number: int) -> str:
    """Sample with the snapshot of call ``number``, and return the request's id."""
    await client.done(f"{client.model_id}:{number + 1}")
    sampler = f"{client.session_id}:sample:{number}"
    asked = await client.service.sample(
        client.owner, sampler, number, prompt(hundredths=1, max_tokens=4, seed=1)
    )
    return asked.request_id


async def main(settings: Mapping[str, Any]) -> None:
    folder = Path(settings["folder"])
    base = ServedBase(settings["base"], settings["base"], 256, "x")
    options = CallOptions(state_steps=5, gap_seconds=30.0, attempts=100)
    engine = {"entry": settings["entry"], "engine_options": settings["engine_options"]}
    async with open_service(folder, [base], options, **engine) as service:
        session_id = settings["session"]
        if not session_id:
            session_id = await service.open_session("ann", tags=[], metadata={})
            tell("session", session_id)
        client = Client(service, session_id, 0, "ann")
        if settings["acknowledged"] == 0:
            await service.create_model("ann", session_id, 0, base.name, ModelOptions(rank=4), {})
        for number in range(settings["acknowledged"], settings["calls"]):
            await call(client, number)
            if number % 10 == 9:
                await sample(client, number)
            tell("acknowledged", number)
        for number in range(settings["calls"]):
            result = await client.result(f"{client.model_id}:{number + 1}")
            value = result.value if isinstance(result, Done) else result
            tell("answer", number, digest(value) if number % 10 not in (6, 7, 9) else type(result))
            if number % 10 == 9:
                sampled = await client.done(f"{session_id}:sample:{number}:{number}")
                tell("sample", number, digest(sampled))
        client.seq = settings["calls"]
        tell("weights", digest(await client.logprobs() if base.name == "small" else 0))
        steps = await service.steps("ann", client.model_id, 0)
        tell("steps", *(digest([step[name] for name in OF_CALLS]) for step in steps))
        names = sorted(info.name for info in await service.checkpoints("ann"))
        tell("checkpoints", *names)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
