"""The client of benchmarks/service/tinker.py: a program with Tinker's SDK, and nothing of ours.

    standard input: a job as JSON ─▶ one line of JSON for each step or time on standard output

It runs in the environment that has the SDK, which need not have AsyncDock.
"""

import asyncio
import json
import sys
import time
from typing import Any

import tinker
from tinker import types


def tell(**facts: Any) -> None:
    print(json.dumps({**facts, "time": time.time()}), flush=True)


class Tenant:
    """A client with a model of its own, which makes the steps of tinker_cookbook's loop."""

    def __init__(self, job: dict[str, Any], key: str, name: str) -> None:
        self.job = job
        self.name = name
        self._service = tinker.ServiceClient(api_key=key)

    async def open(self) -> None:
        self.trainer = await self._service.create_lora_training_client_async(
            base_model=self.job["base"], rank=self.job["rank"]
        )
        self._sampler = await self.trainer.save_weights_and_get_sampling_client_async()

    async def sample(self, prompt: list[int], max_tokens: int) -> Any:
        parameters = types.SamplingParams(max_tokens=max_tokens, temperature=1.0)
        answer = await self._sampler.sample_async(
            prompt=types.ModelInput.from_ints(tokens=prompt),
            num_samples=1,
            sampling_params=parameters,
        )
        return answer.sequences[0]

    async def group(self, prompt: list[int]) -> list[types.Datum]:
        """Sample the responses to ``prompt`` one by one, as the cookbook does."""
        asked = [self.sample(prompt, self.job["max_tokens"]) for _ in range(self.job["group_size"])]
        responses = await asyncio.gather(*asked)
        rewards = [float(response.tokens[-1] % 2) for response in responses]
        mean = sum(rewards) / len(rewards)
        return [
            datum(prompt, response.tokens, response.logprobs, reward - mean)
            for response, reward in zip(responses, rewards, strict=True)
        ]

    async def step(self, number: int) -> None:
        began = time.perf_counter()
        groups = self.job["groups"]
        prompts = self.job["prompts"]
        chosen = [prompts[(number * groups + each) % len(prompts)] for each in range(groups)]
        data = [row for group in await asyncio.gather(*map(self.group, chosen)) for row in group]
        sampled = time.perf_counter()
        passed = await self.trainer.forward_backward_async(data, "importance_sampling")
        stepped = await self.trainer.optim_step_async(types.AdamParams(learning_rate=1e-5))
        await passed.result_async()
        await stepped.result_async()
        trained = time.perf_counter()
        self._sampler = await self.trainer.save_weights_and_get_sampling_client_async()
        ended = time.perf_counter()
        tell(
            tenant=self.name,
            tokens=sum(row.model_input.length + 1 for row in data),
            seconds=ended - began,
            sampling=sampled - began,
            training=trained - sampled,
            saving=ended - trained,
        )


def datum(
    prompt: list[int], response: list[int], logprobs: list[float], advantage: float
) -> types.Datum:
    before = len(prompt) - 1
    tokens = [*prompt, *response]
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens=tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [0.0] * before + list(logprobs),
            "advantages": [0.0] * before + [advantage] * len(response),
        },
    )


async def loop(job: dict[str, Any]) -> None:
    """All tenants make their steps at the same time."""
    tenants = [Tenant(job, key, str(number)) for number, key in enumerate(job["keys"])]
    for tenant in tenants:
        await tenant.open()
    tell(ready=True)

    async def steps(tenant: Tenant) -> None:
        for number in range(job["steps"]):
            await tenant.step(number)

    await asyncio.gather(*map(steps, tenants))


async def flood(job: dict[str, Any]) -> None:
    """The models, those of one key a tenant's, have ``flood`` passes and samples each under way
    until the program is ended."""
    tenants = [Tenant(job, key, str(number)) for number, key in enumerate(job["keys"])]
    for tenant in tenants:
        await tenant.open()
    data = await tenants[0].group(job["prompts"][0])

    async def passes(tenant: Tenant) -> None:
        while True:
            passed = await tenant.trainer.forward_backward_async(data, "importance_sampling")
            await passed.result_async()

    async def samples(tenant: Tenant) -> None:
        while True:
            await tenant.sample(job["prompts"][1], job["max_tokens"])

    tell(ready=True)
    await asyncio.gather(
        *(
            work(tenant)
            for tenant in tenants
            for work in (passes, samples)
            for _ in range(job["flood"])
        )
    )


async def times(job: dict[str, Any]) -> None:
    """The seconds of single calls, one after the other."""
    tenant = Tenant(job, job["keys"][0], "0")
    await tenant.open()
    one = datum([1], [2], [-1.0], 1.0)
    for _ in range(job["calls"]):
        await (await tenant.trainer.forward_backward_async([one], "importance_sampling"))
        began = time.perf_counter()
        await (await tenant.trainer.optim_step_async(types.AdamParams(learning_rate=0.0)))
        tell(optim_step=time.perf_counter() - began)
    for _ in range(job["calls"]):
        began = time.perf_counter()
        await tenant.sample(job["prompts"][0][:1], 1)
        tell(sample=time.perf_counter() - began)


job = json.load(sys.stdin)
asyncio.run({"loop": loop, "flood": flood, "times": times}[job["mode"]](job))
