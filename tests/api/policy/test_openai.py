"""The unmodified `openai` client at a server of policies: a run whose trainer is the test, and a
checkpoint."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import openai
import psutil
import pytest
import torch

from orchestration.recipe.schema import Recipe
from orchestration.service.index_server import FILE
from orchestration.state.documents import RUN_PATHS, RUN_RECIPE
from orchestration.state.paths import RunPaths
from orchestration.state.registry import Registry
from pipeline.documents.flow import VERSION
from pipeline.index.client import Index, RunConfig
from stages.engines.protocols import GroupRequest, SamplingParams
from stages.engines.torch.rollout import TorchRolloutEngine
from stages.model.load import Tokenizer, tiny_model, tiny_tokenizer
from stages.weights.records import WeightRecords
from stages.weights.transport.store import WeightStore
from tests.api.served import Served
from tests.orchestration.runs import TINY, recipe

SECONDS = 120.0
CHAT = (
    "{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt "
    "%}={% endif %}"
)
PROMPT = "ab="


@dataclass
class Trainer:
    """A run that trains nothing: it publishes weights as the test asks."""

    index: Index
    paths: RunPaths
    recipe: Recipe
    version: int = 0
    tokenizer: Tokenizer = field(default_factory=tiny_tokenizer)

    @property
    def run(self) -> str:
        return self.index.run

    def model(self, version: int) -> Any:
        """The tiny model with the weights of ``version``."""
        model = tiny_model(self.recipe.seed)
        random = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in model.parameters() if version else ():
                parameter += 0.05 * torch.randn(parameter.shape, generator=random)
        return model

    async def publish(self) -> int:
        self.version += 1
        published = WeightStore(self.paths.shared).publish(
            self.version, self.model(self.version).named_parameters()
        )
        # steps are not the matter here
        await self.index._redis.hset(f"{self.index.prefix}n", "trained", self.version)
        await WeightRecords(self.index).publish(published)
        await self.index.wake(VERSION)
        return self.version

    def checkpoint(self, version: int) -> Path:
        folder = self.paths.checkpoints / f"step-{version:08d}"
        self.model(version).save_pretrained(folder / "model")
        self.tokenizer.save_pretrained(folder / "model")
        (folder / "run.json").write_text(
            json.dumps({"version": version, "counters": {}, "remake": []})
        )
        return folder / "model"

    async def expected(self, version: int, prompt: str, tokens: int) -> str:
        """The greedy text of ``version``, as an engine of the test makes it."""
        engine = TorchRolloutEngine(self.model(version), self.tokenizer, max_rows=1, threads=1)
        params = SamplingParams(
            tokens, temperature=0.0, stop_token_ids=(int(self.tokenizer.eos_token_id),)
        )
        ids = torch.tensor(self.tokenizer(prompt)["input_ids"])
        try:
            (made,) = [
                one async for one in engine.generate([GroupRequest(0, (0,), ids, params, 0)])
            ]
        finally:
            await engine.close()
        return str(self.tokenizer.decode(made.token_ids.tolist(), skip_special_tokens=True))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    model = folder / "named"
    tiny_model(7).save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    made = Served(folder / "data", "--runs", "0", "--checkpoint", f"named={model}")
    made.start()
    yield made
    made.end()


@pytest.fixture(scope="module")
def begun(
    served: Served, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, str, RunPaths, Recipe, list[int]]:
    """One run for all tests, as its process takes seconds to start: its index, id, paths, recipe
    and newest version."""
    folder = tmp_path_factory.mktemp("run")
    url = json.loads((served.data / FILE).read_text())["index"]
    (folder / "chat.jinja").write_text(CHAT)
    made = recipe(TINY, prompts__chat_template=str(folder / "chat.jinja"))
    paths = RunPaths(folder, folder / "shm", None)

    async def begin() -> str:
        registry = Registry(url)
        record, _ = await registry.submit(made)
        index = Index(registry.link, record.id)
        await index.init(RunConfig(()), {})
        await RUN_RECIPE.put(index, made)
        await RUN_PATHS.put(index, paths)
        await index.transition(["", "created"], "running")
        await registry.close()
        return record.id

    return url, asyncio.run(begin()), paths, made, [0]


@pytest.fixture
async def trainer(begun: tuple[str, str, RunPaths, Recipe, list[int]]) -> AsyncIterator[Trainer]:
    url, run, paths, made, newest = begun
    trainer = Trainer(Index(url, run), paths, made, newest[0])
    yield trainer
    newest[0] = trainer.version
    await trainer.index.close()


@pytest.fixture
async def client(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key=served.token, timeout=SECONDS, max_retries=0
    ) as made:
        yield made


async def at(client: openai.AsyncOpenAI, run: str, version: int) -> None:
    """Wait until requests are answered by ``version``."""
    async with asyncio.timeout(SECONDS):
        while True:
            answer = await client.completions.create(model=run, prompt=PROMPT, max_tokens=1)
            if answer.choices[0].versions[0][0] >= version:
                return


async def test_completions(client: openai.AsyncOpenAI, trainer: Trainer) -> None:
    version = await trainer.publish()
    await at(client, trainer.run, version)
    asked: dict[str, Any] = {
        "model": trainer.run,
        "prompt": [PROMPT, "cd="],
        "max_tokens": 12,
        "n": 2,
        "seed": 5,
    }
    whole = await client.completions.create(**asked, logprobs=0)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in whole.choices}) == 4, "each has random numbers of its own"
    for choice in whole.choices:
        assert choice.logprobs is not None
        tokens = choice.logprobs.tokens
        logprobs = choice.logprobs.token_logprobs
        assert tokens is not None
        assert logprobs is not None
        assert choice.versions == [[version, len(tokens)]]
        assert (
            len(logprobs)
            == len(tokens)
            == (12 if choice.finish_reason == "length" else len(tokens))
        )
        assert all(value <= 0 for value in logprobs)
    assert whole.usage is not None
    made = sum(len(choice.logprobs.tokens or ()) for choice in whole.choices if choice.logprobs)
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (6, made)

    texts = Counter[int]()
    reasons = dict[int, str]()
    chunks = 0
    versions = set[int]()
    pieces = dict.fromkeys(range(4), "")
    async for chunk in await client.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ):
        chunks += 1
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
            texts[choice.index] += 1
            versions |= {number for number, _ in choice.versions}
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert pieces == {choice.index: choice.text for choice in whole.choices}, (
        "the seed makes the same tokens"
    )
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert versions == {version}
    assert chunk.usage == whole.usage
    assert min(texts.values()) > 3, "pieces come as tokens are made"

    asked = {
        "model": trainer.run,
        "prompt": PROMPT,
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": 2,
    }
    greedy = await client.completions.create(**asked)
    assert greedy.choices[0].text == await trainer.expected(version, PROMPT, 12)
    logprobs = greedy.choices[0].logprobs
    assert logprobs is not None
    offsets = list[int]()
    parts = list[dict[str, float]]()
    async for chunk in await client.completions.create(**asked, stream=True):
        found = chunk.choices[0].logprobs
        assert found is not None
        offsets = offsets + (found.text_offset or [])
        parts = parts + (found.top_logprobs or [])
    assert (offsets, offsets) == (logprobs.text_offset, list(range(len(logprobs.tokens or ())))), (
        "a character a token"
    )
    assert parts == logprobs.top_logprobs, "a stream has the same"
    for token, logprob, likeliest in zip(
        logprobs.tokens or (), logprobs.token_logprobs or (), parts, strict=True
    ):
        assert (len(likeliest), likeliest[token], max(likeliest.values())) == (2, logprob, logprob)
    ids = trainer.tokenizer(PROMPT)["input_ids"]
    same = await client.completions.create(
        model=trainer.run, prompt=ids, max_tokens=12, temperature=0
    )
    assert same.choices[0].text == greedy.choices[0].text


async def test_a_response_ends_before_its_stop_string(
    client: openai.AsyncOpenAI, trainer: Trainer
) -> None:
    asked: dict[str, Any] = {
        "model": trainer.run,
        "prompt": PROMPT,
        "max_tokens": 40,
        "temperature": 1,
        "seed": 1,
    }
    (free,) = (await client.completions.create(**asked)).choices
    stop = free.text[6:9]
    (choice,) = (await client.completions.create(**asked, stop=[stop, "never"])).choices
    assert (choice.text, choice.finish_reason) == (free.text[: free.text.index(stop)], "stop")
    streamed = [
        chunk async for chunk in await client.completions.create(**asked, stop=stop, stream=True)
    ]
    assert "".join(chunk.choices[0].text for chunk in streamed) == choice.text
    assert streamed[-1].choices[0].finish_reason == "stop"


async def test_chat(client: openai.AsyncOpenAI, trainer: Trainer) -> None:
    version = await trainer.publish()
    await at(client, trainer.run, version)
    messages: Any = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
    ]
    asked: dict[str, Any] = {
        "model": trainer.run,
        "messages": messages,
        "temperature": 0,
        "max_completion_tokens": 8,
    }
    whole = await client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    (choice,) = whole.choices
    assert choice.message.content == await trainer.expected(version, PROMPT, 8), (
        "the template of the recipe"
    )
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [(version, len(choice.logprobs.content))] == [tuple(run) for run in choice.versions]
    for token in choice.logprobs.content:
        assert [other.logprob for other in token.top_logprobs] == sorted(
            {o.logprob for o in token.top_logprobs}
        )[::-1]
        assert (len(token.top_logprobs), token.top_logprobs[0].token) == (3, token.token), "greedy"
    text = ""
    roles = []
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        text += chunk.choices[0].delta.content or ""
        roles += [chunk.choices[0].delta.role] if chunk.choices[0].delta.role else []
    assert (text, roles) == (choice.message.content, ["assistant"])
    default = await client.chat.completions.create(model=trainer.run, messages=messages)
    assert default.usage is not None
    assert default.usage.completion_tokens <= trainer.recipe.rollout.max_tokens


async def test_versions_are_pinned(client: openai.AsyncOpenAI, trainer: Trainer) -> None:
    old = trainer.version + 3
    trainer.checkpoint(old)
    trainer.version += 6
    for _ in range(2):
        await trainer.publish()
    # a checkpoint, and what is published in memory
    for version in (old, trainer.version - 1, trainer.version):
        asked: dict[str, Any] = {
            "model": f"{trainer.run}@{version}",
            "prompt": PROMPT,
            "temperature": 0,
        }
        answer = await client.completions.create(**asked, max_tokens=8)
        assert answer.choices[0].versions == [[version, 8]]
        assert answer.choices[0].text == await trainer.expected(version, PROMPT, 8)
    with pytest.raises(
        openai.NotFoundError,
        match=rf"no version {old + 1} any more; it has "
        rf"\[{old}\] as checkpoints",
    ):
        await client.completions.create(model=f"{trainer.run}@{old + 1}", prompt=PROMPT)


async def test_a_damaged_checkpoint_hides_no_other_model(
    client: openai.AsyncOpenAI, trainer: Trainer
) -> None:
    trainer.version += 2
    found = trainer.version - 1
    damaged = trainer.version
    trainer.checkpoint(found)
    (trainer.checkpoint(damaged).parent / "run.json").write_text('{"version": ')
    names = [model.id async for model in client.models.list()]
    assert "named" in names
    answer = await client.completions.create(
        model=f"{trainer.run}@{found}",
        prompt=PROMPT,
        max_tokens=2,
        extra_body={"ignore_eos": True},  # it is sampled, and may end after one token
    )
    assert answer.choices[0].versions == [[found, 2]]
    with pytest.raises(openai.NotFoundError, match=f"no version {damaged} any more"):
        await client.completions.create(model=f"{trainer.run}@{damaged}", prompt=PROMPT)


async def test_a_checkpoint_is_served_by_its_name(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="named", prompt=PROMPT, max_tokens=4, temperature=0
    )
    assert answer.choices[0].versions == [[0, 4]]
    assert (await client.models.retrieve("named")).owned_by == "checkpoint"
    assert "named" in [model.id async for model in client.models.list()]


async def test_what_is_wrong_is_a_problem(client: openai.AsyncOpenAI, trainer: Trainer) -> None:
    for model in ("nobody", f"{trainer.run}@x", "../etc", "@3"):
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model=model, prompt=PROMPT)
        error: Any = missing.value.body
        assert (error["type"], error["code"], error["param"]) == ("NotFoundError", 404, "model")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 600}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [77]}, "prompt"),
        ({"n": 3, "prompt": [PROMPT] * 50}, "n"),
        ({"extra_body": {"best_of": 2}}, "best_of"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
        ({"temperature": 1e-300}, "temperature"),
        ({"top_p": 1e-300}, "top_p"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"extra_body": {"allowed_token_ids": [99]}}, "allowed_token_ids"),
    ]
    for change, field_name in wrong:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.completions.create(
                    **{"model": trainer.run, "prompt": PROMPT, "stream": stream, **change}
                )
            error = refused.value.body
            assert (error["type"], error["code"]) == ("BadRequestError", 400)
            assert error["param"].startswith(field_name), change
    with pytest.raises(openai.BadRequestError, match="less_than"):
        await client.completions.create(model=trainer.run, prompt=PROMPT, seed=2**63)
    nobody = client.with_options(api_key="none")
    with pytest.raises(openai.AuthenticationError) as unknown:
        await nobody.models.list()
    assert unknown.value.body["type"] == "AuthenticationError"  # type: ignore[index]


async def test_prometheus_has_the_latencies(client: openai.AsyncOpenAI, served: Served) -> None:
    await client.completions.create(model="named", prompt=PROMPT, max_tokens=4)
    async with aiohttp.ClientSession(headers=served.headers) as session:
        text = await (await session.get(f"{served.url}/metrics")).text()
    assert 'vllm:time_to_first_token_seconds_count{model_name="named"}' in text


@pytest.mark.timeout(600)
async def test_weights_are_swapped_below_requests(
    client: openai.AsyncOpenAI, trainer: Trainer
) -> None:
    """200 requests, of which half stream, are under way over 20 swaps; each is answered by one
    version."""
    first = await trainer.publish()
    await at(client, trainer.run, first)
    asked: dict[str, Any] = {
        "model": trainer.run,
        "prompt": PROMPT,
        "max_tokens": 16,
        "temperature": 0,
    }
    answers: list[tuple[str, list[list[int]]]] = []
    answered = asyncio.Condition()
    numbers = itertools.count()
    swapped = asyncio.Event()

    async def ask() -> None:
        while (number := next(numbers)) < 200 or not swapped.is_set():
            text = ""
            versions = list[list[int]]()
            if number % 2:
                (choice,) = (await client.completions.create(**asked)).choices
                text = choice.text
                versions = choice.versions
            else:
                async for chunk in await client.completions.create(**asked, stream=True):
                    text += chunk.choices[0].text
                    versions += chunk.choices[0].versions
            answers.append((text, versions))
            async with answered:
                answered.notify_all()

    async def publish() -> None:
        for _ in range(20):
            version = await trainer.publish()
            async with answered:
                await answered.wait_for(
                    lambda version=version: any(one[-1][0] >= version for _, one in answers)
                )
        swapped.set()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(publish())
        for _ in range(16):
            tasks.create_task(ask())
    assert len(answers) >= 200
    made_by = [{version for version, _ in versions} for _, versions in answers]
    assert [len(versions) for versions in made_by] == [1] * len(answers)
    assert {version for versions in made_by for version in versions} >= set(
        range(first + 1, first + 21)
    )
    expected = {
        version: await trainer.expected(version, PROMPT, 16) for version in {*set.union(*made_by)}
    }
    assert [text for text, _ in answers] == [expected[min(versions)] for versions in made_by]


def policies_process(served: Served) -> psutil.Process:
    assert served.process is not None
    children = psutil.Process(served.process.pid).children()
    (process,) = [child for child in children if "api.policy.worker" in child.cmdline()]
    return process


async def test_serving_takes_its_share_beside_training(
    client: openai.AsyncOpenAI, trainer: Trainer, served: Served
) -> None:
    """The CPU time of the policies' process while requests to two policies are under way.

    A busy machine makes it less.
    """
    await at(client, trainer.run, await trainer.publish())
    process = policies_process(served)
    pinned = f"{trainer.run}@{trainer.version}"
    await at(client, pinned, trainer.version)

    async def cpu_share() -> float:
        began = time.monotonic()
        before = sum(process.cpu_times()[:2])
        asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 400, "n": 4, "temperature": 0}
        both = (client.completions.create(model=model, **asked) for model in (trainer.run, pinned))
        await asyncio.gather(*both)
        return (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - began)

    # One thread of each policy computes in its share of the time, beside them what takes requests
    # and streams tokens.
    assert 0 < await cpu_share() < 3 * trainer.recipe.serve.share < 1


async def test_versions_mix_where_they_may(client: openai.AsyncOpenAI, trainer: Trainer) -> None:
    first = await trainer.publish()
    await at(client, trainer.run, first)
    asked: dict[str, Any] = {
        "model": trainer.run,
        "prompt": PROMPT,
        "max_tokens": 480,
        "temperature": 0,
    }
    versions = list[int]()
    async with await client.completions.create(
        **asked, stream=True, extra_body={"mix_versions": True}
    ) as stream:
        async for chunk in stream:
            versions += [version for version, _ in chunk.choices[0].versions]
            if len(versions) == 1:
                await trainer.publish()
            if versions[-1] > first:
                break
    assert (versions[0], versions[-1]) == (first, first + 1)


async def test_a_process_that_was_killed_is_started_again(
    client: openai.AsyncOpenAI, trainer: Trainer, served: Served
) -> None:
    asked: dict[str, Any] = {
        "model": trainer.run,
        "prompt": PROMPT,
        "max_tokens": 480,
        "temperature": 0,
    }
    async with await client.completions.create(**asked, n=8, stream=True) as stream:
        refused = asyncio.create_task(client.completions.create(**asked, n=8))
        await at(client, trainer.run, trainer.version)
        policies_process(served).kill()
        with pytest.raises(openai.InternalServerError) as ended:
            await refused
        assert (ended.value.status_code, ended.value.response.headers["Retry-After"]) == (503, "1")
        with pytest.raises(openai.APIConnectionError):
            async for _ in stream:
                pass
    await at(client.with_options(max_retries=2), trainer.run, trainer.version)
