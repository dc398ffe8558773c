"""Programs outside of a run that take part in it over HTTP, or by its index, and know nothing else
of it."""

from __future__ import annotations

import ast
import asyncio
import hashlib
import json
import os
import re
import signal
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save

from api.client import ApiProblem, ExternalStage
from api.external.codec import Unreadable, from_body, to_body
from api.server.access.tokens import Tokens
from orchestration.external.errors import NotExternal, WeightsTooOld
from orchestration.recipe.schema import Recipe
from orchestration.run.execution import Execution, RunResult
from orchestration.run.folder import RunFolder
from orchestration.state.registry import Registry
from orchestration.workers.engines import train_engine
from pipeline.data.columns import Packed
from pipeline.index.client import LeaseLost
from stages.model.load import tiny_tokenizer
from stages.rollout.external_checks import Misfit
from tests.api.serving import Client, bearer, problem, serving
from tests.custom_engines.direct import respond
from tests.orchestration.external.test_session import responses
from tests.orchestration.run.test_run import assert_each_sample_once
from tests.orchestration.runs import MOCK, TINY, Watched, executing, recipe

ROOT = Path(__file__).parents[3]
OUTSIDE = ROOT / "tests" / "custom_engines"
BINARY = "application/octet-stream"
UNKNOWN = "0" * 32  # a lease's token that was never given out
EXTERNAL: dict[str, Any] = {**MOCK, "external": {"stages": ["rollout"]}}


@dataclass
class Going:
    """A run in a service's index while it goes on, and a client of a server that knows it."""

    client: Client
    watched: Watched
    work: asyncio.Task[RunResult]
    url: str  # of the index
    id: str

    @property
    def at(self) -> str:
        return f"/v1/runs/{self.id}"

    @property
    def server(self) -> str:
        return str(self.client.make_url("")).rstrip("/")

    async def ask(self, method: str, path: str, **options: Any) -> Any:
        """The JSON of a good answer; of a safetensors body its metadata, with the tensors as
        ``columns``."""
        response = await self.client.request(method, f"{self.at}/{path}", **options)
        assert response.status in (200, 204), await response.text()
        return await self.content(response) if response.status == 200 else None

    @staticmethod
    async def content(response: Any) -> Any:
        if response.content_type != BINARY:
            return await response.json()
        body = await response.read()
        control, columns = from_body(body)
        return {**json.loads(control), "columns": columns}

    async def refused(self, status: int, method: str, path: str, **options: Any) -> dict[str, Any]:
        return await problem(
            await self.client.request(method, f"{self.at}/{path}", **options), status
        )

    async def claim(self, **more: Any) -> dict[str, Any]:
        got = await self.ask("POST", "experience/get", json={**GET, **more})
        assert got["token"] is not None
        return got


def put_body(
    token: str,
    rows: Sequence[int] = (),
    columns: Mapping[str, Any] | None = None,
    **control: Any,
) -> dict[str, Any]:
    """Options of a request that puts ``columns``, given as lists, in the dtypes of what they
    hold."""
    dtypes = {bool: torch.bool, int: torch.int64, float: torch.float32}
    tensors: dict[str, Any] = {}
    for name, values in (columns or {}).items():
        if values and isinstance(values[0], list) and name != "scores":
            flat = [value for row in values for value in row]
            kind = (
                float
                if name == "rollout_logprobs"
                else max(map(type, flat), key=list(dtypes).index)
            )
            offsets = torch.tensor(np.cumsum([0, *map(len, values)]))
            tensors[name] = Packed(torch.tensor(flat, dtype=dtypes[kind]), offsets)
        else:
            tensors[name] = torch.tensor(values)
    body = to_body(json.dumps({"token": token, "rows": list(rows), **control}), tensors)
    return {"data": body, "headers": {"Content-Type": BINARY}}


OWNER = "external"  # of the runs here
GET = {"stage": "rollout", "worker": "test", "count": 1, "version": 0, "wait": 30}


@asynccontextmanager
async def going(url: str, tmp_path: Path, of: Recipe) -> AsyncGenerator[Going, None]:
    registry = Registry(url)
    record, _ = await registry.submit(of, owner=OWNER)
    run = Execution(
        RunFolder.create(
            of.model_copy(update={"pipeline": of.pipeline.model_copy(update={"index": url})}),
            tmp_path / "run",
        )
    )
    run.folder.run_id = record.id
    async with serving(url, tmp_path) as client, executing(run) as (watched, work):
        await watched.until(
            lambda: any(state["state"] == "running" for state in watched.of("state"))
        )
        yield Going(client, watched, work, url, record.id)
        watched.stop.set()
        await work  # until its shared memory is gone, too: leaving cancels it
    # it still waits for an agent there, before the runs of later tests
    await registry.ask(record.id, "stop")
    await registry.close()


@asynccontextmanager
async def program(
    *command: str, ours: bool = False, **variables: str
) -> AsyncGenerator[asyncio.subprocess.Process, None]:
    """A Python program in a process of its own, with ``variables`` in its environment.

    Unless it is ``ours``, nothing of this repository is on its path.
    """
    one = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    path = {"PYTHONPATH": str(ROOT)} if ours else {}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *(() if ours else ("-I",)), *command),
        env={"PATH": os.environ["PATH"], **one, **path, **variables},
        cwd=OUTSIDE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def ended(process: asyncio.subprocess.Process) -> None:
    """It has ended by itself, and well."""
    async with asyncio.timeout(60):
        _, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()


async def killed_in_the_middle(run: Going, *command: str, ours: bool = False) -> RunResult:
    """The result of a run whose external worker is killed, and started again."""
    async with program(*command, ours=ours) as first:
        await run.watched.until(lambda: len(run.watched.of("step")) >= 2)
        first.send_signal(signal.SIGKILL)
        await first.wait()
    async with program(*command, ours=ours) as second:
        result = await run.work
        await ended(second)
    return result


async def test_a_whole_grpo_run_whose_rollout_is_another_program(
    index_url: str, tmp_path: Path
) -> None:
    """The program computes the tiny model by itself: that its logprobs are the trainer's shows that
    weights, tokens and versions arrive as they are."""
    base = {**TINY, "external": {"stages": ["rollout"]}}
    of = recipe(base, train__steps=6, pipeline__staleness=0, pipeline__lease_seconds=1.0)
    async with going(index_url, tmp_path, of) as run:
        result = await killed_in_the_middle(run, "llama.py", run.server, run.id, "llama")
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, run.watched)
    assert max(step["gap_max"] for step in run.watched.of("step")) < 1e-4
    swaps = [
        sync["version"] for sync in run.watched.of("sync") if sync["worker"] == "external-llama"
    ]
    assert len(swaps) >= 6, "not all of the versions that it loaded were reported"


def test_that_program_imports_nothing_of_ours() -> None:
    tree = ast.parse((OUTSIDE / "llama.py").read_text())
    names = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    known = {"itertools", "json", "sys", "time", "urllib.error", "urllib.request"}
    assert names - known == {"numpy", "safetensors.numpy"}


async def test_a_whole_run_whose_rollout_joins_its_index_and_warehouses(
    index_url: str, tmp_path: Path
) -> None:
    """Its columns are mapped, not sent.

    What it held when it was killed is given back as soon as it is there again, long before its
    lease would end.
    """
    of = recipe(EXTERNAL, train__steps=8, rollout__max_tokens=8, pipeline__lease_seconds=300.0)
    async with going(index_url, tmp_path, of) as run:
        result = await killed_in_the_middle(
            run, "direct.py", index_url, run.id, "direct", ours=True
        )
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, run.watched)


async def test_the_program_of_the_documentation(index_url: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "external.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n# uniform.py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    lines = [
        line for line in code.splitlines() if line.strip() and not re.match(r"(from|import) ", line)
    ]
    assert len(lines) <= 42
    (tmp_path / "rollout.py").write_text(code, encoding="utf-8")
    of = recipe(EXTERNAL, train__steps=4)
    tokens = Tokens(index_url)
    _, token = await tokens.create(OWNER, "run")
    await tokens.close()
    async with (
        going(index_url, tmp_path, of) as run,
        program(str(tmp_path / "rollout.py"), run.server, run.id, "x", ASYNCDOCK_TOKEN=token) as it,
    ):
        result = await run.work
        await ended(it)
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, run.watched)


async def test_a_run_that_waits_in_the_queue_answers_that_nothing_is_there_until_it_begins(
    index_url: str, tmp_path: Path
) -> None:
    of = recipe(EXTERNAL, train__steps=2)
    registry = Registry(index_url)
    record, _ = await registry.submit(of)
    await registry.close()
    at = f"/v1/runs/{record.id}"
    async with serving(index_url, tmp_path) as client:
        early = await Going.content(
            await client.post(f"{at}/experience/get", json={**GET, "wait": 0.7})
        )
        assert (early["token"], early["rows"], early["state"], early["over"]) == (
            None,
            [],
            "created",
            False,
        )
        weights = await (await client.get(f"{at}/weights", params={"wait": "0.1"})).json()
        assert (weights["version"], weights["state"]) == (None, "created")
        await problem(await client.get(f"{at}/weights/0"), 409)
        await problem(await client.post(f"{at}/leases/{UNKNOWN}/renew"), 409)
        assert (await client.post(f"{at}/leases/{UNKNOWN}/release")).status == 204
        assert (await (await client.get(f"{at}/stages")).json())["stages"] == []

        waiting = asyncio.create_task(client.post(f"{at}/experience/get", json={**GET, "wait": 60}))
        run = Execution(
            RunFolder.create(
                of.model_copy(
                    update={"pipeline": of.pipeline.model_copy(update={"index": index_url})}
                ),
                tmp_path / "run",
            )
        )
        run.folder.run_id = record.id
        async with executing(run) as (watched, work):
            first = await Going.content(await waiting)
            assert (first["token"] is not None, first["state"]) == (True, "running")
            name = "external-rollout-test"
            held = len(first["rows"])
            await watched.until(
                lambda: any(
                    (event["worker"], event["in_flight"]) == (name, held)
                    for event in watched.of("stage")
                )
            )
            stages = (await (await client.get(f"{at}/stages")).json())["stages"]
            [worker] = next(stage["workers"] for stage in stages if stage["name"] == "rollout")
            assert (worker["worker"], worker["process"], worker["in_flight"]) == (name, "", held)
            watched.stop.set()
            assert (await work).state == "stopped"


async def test_prompts_experience_and_leases_over_http(index_url: str, tmp_path: Path) -> None:
    of = recipe({**EXTERNAL, "prompts": {"source": "external"}}, train__steps=4)
    async with going(index_url, tmp_path, of) as run:
        prompts = [{"prompt": f"{letter}=", "answer": letter} for letter in "abcd"]
        body = {"prompts": prompts, "first": 0}
        assert (
            await run.ask("POST", "prompts", json=body)
            == await run.ask("POST", "prompts", json=body)
            == {"next": 4}
        )
        details = await run.refused(422, "POST", "prompts", json={"prompts": [{"question": "?"}]})
        assert (details["field"], details["fix"]) == ("prompts", "set prompts.column")
        details = await run.refused(409, "POST", "prompts", json={"prompts": prompts, "first": 9})
        assert "out of order: the next one is 4" in details["detail"]
        got = await run.claim(count=4, columns=["prompt_ids", "given"])
        assert sorted({row["group"] for row in got["rows"]}) == [0, 1, 2, 3]
        assert [json.loads(text) for text in got["columns"]["given"].texts()[::4]] == [
            "a=",
            "b=",
            "c=",
            "d=",
        ]
        assert got["sampling"]["max_tokens"] == 32
        ids = [row["id"] for row in got["rows"]]
        right = {
            "response_ids": [[5, 6]] * 4,
            "rollout_logprobs": [[-1, -0.5]] * 4,
            "versions": [[0, 2]] * 4,
            "truncated": [False] * 4,
        }
        wrong: dict[str, Any] = {
            "columns.response_ids": [[5, 6.5]] * 4,
            "columns.rollout_logprobs": [[-1]] * 4,
            "columns.versions": [[0, 3]] * 4,
            "columns.truncated": [0] * 4,
        }
        for field, values in wrong.items():
            columns = right | {field.partition(".")[2]: values}
            refused = await run.refused(
                422, "POST", "experience", **put_body(got["token"], ids[:4], columns)
            )
            assert (refused["field"], refused["type"]) == (field, "urn:asyncdock:misfit")
            assert refused["fix"]
        put = put_body(got["token"], ids[:4], right)
        assert await run.ask("POST", "experience", **put) == {"left": 12, "version": None}
        details = await run.refused(409, "POST", "experience", **put)
        assert details["type"] == "urn:asyncdock:lease-lost"
        begun = {name: values[:1] for name, values in right.items() if name != "truncated"}
        put = put_body(got["token"], ids[4:5], begun, park=True)
        assert await run.ask("POST", "experience", **put) == {"left": 11, "version": None}
        assert await run.ask("POST", f"leases/{got['token']}/renew?lease=7") == {
            "token": got["token"],
            "lease": 7.0,
        }
        assert await run.ask("POST", f"leases/{got['token']}/release") is None
        again = await run.claim(count=4)
        assert [row["id"] for row in again["rows"]] == ids[4:], (
            "the parked one first, then those that were given back"
        )
        assert again["begun"]["rows"] == ids[4:5]
        assert again["columns"]["begun.response_ids"].values.tolist() == [5, 6]
        assert await run.ask("POST", f"leases/{got['token']}/release") is None, (
            "harmless when it has ended"
        )
        details = await run.refused(409, "POST", f"leases/{got['token']}/renew")
        assert details["type"] == "urn:asyncdock:lease-lost"


async def test_refusals_say_what_to_do(index_url: str, tmp_path: Path) -> None:
    async with going(index_url, tmp_path, recipe(EXTERNAL)) as run:
        details = await run.refused(409, "POST", "experience/get", json={**GET, "stage": "reward"})
        assert (details["type"], details["fix"]) == (
            "urn:asyncdock:not-external",
            "open a run with external.stages = ['reward']",
        )
        details = await run.refused(409, "POST", "prompts", json={"prompts": [{"prompt": "a"}]})
        assert "prompts.source = 'external'" in details["fix"]
        details = await run.refused(422, "POST", "experience/get", json={**GET, "version": 7})
        assert (details["field"], details["fix"]) == ("version", "give one of 0 .. 0")
        details = await run.refused(422, "POST", "experience/get", json={**GET, "version": None})
        assert "weight_sync_notify" in details["fix"]
        details = await run.refused(
            422, "POST", "experience/get", json={**GET, "columns": ["nothing"]}
        )
        assert details["field"] == "columns.nothing"
        details = await run.refused(
            422, "POST", "experience/get", json={**GET, "worker": "../x", "wait": 1e9}
        )
        assert [error["field"] for error in details["errors"]] == ["worker", "wait"]
        details = await run.refused(
            409, "PUT", "weights/0", data=b"", headers={"Content-Type": BINARY}
        )
        assert details["type"] == "urn:asyncdock:not-external"
        details = await run.refused(409, "GET", "weights/5")
        assert details["type"] == "urn:asyncdock:weights-gone"
        for body in (b"", b"\xff" * 64, save({"x": np.zeros(1)}), b"\x02" + b"\0" * 7 + b"[]"):
            headers = {"Content-Type": BINARY}
            details = await run.refused(400, "POST", "experience", data=body, headers=headers)
            assert details["field"] == "body"
        await run.refused(
            415, "POST", "experience", data=b"{}", headers={"Content-Type": "text/plain"}
        )
        response = await run.client.post("/v1/runs/no-such-run/experience/get", json=GET)
        assert (await problem(response, 404))["type"] == "urn:asyncdock:unknown-run"


async def test_a_token_of_scope_read_takes_no_part(index_url: str, tmp_path: Path) -> None:
    tokens = Tokens(index_url)
    _, reader = await tokens.create("reader", "read")
    await tokens.close()
    async with serving(index_url, tmp_path, no_token=False) as client:
        for method, path in (
            *(
                ("POST", path)
                for path in (
                    "prompts",
                    "experience/get",
                    "experience",
                    "weights/notify",
                    f"leases/{UNKNOWN}/renew",
                )
            ),
            *(("GET", "weights"), ("GET", "weights/0"), ("PUT", "weights/0")),
        ):
            response = await client.request(
                method, f"/v1/runs/any/{path}", json={}, headers=bearer(reader)
            )
            assert (await problem(response, 403))["type"] == "urn:asyncdock:scope"


async def test_a_lease_outlives_the_server(index_url: str, tmp_path: Path) -> None:
    async with going(index_url, tmp_path, recipe(EXTERNAL)) as run:
        got = await run.claim()
        async with serving(index_url, tmp_path) as another:
            columns = {**load(to_body("", responses(4, 0)))}
            control = {"token": got["token"], "rows": [row["id"] for row in got["rows"]]}
            body = save(columns, {"asyncdock": json.dumps(control)})
            response = await another.post(
                f"{run.at}/experience", data=body, headers={"Content-Type": BINARY}
            )
            assert await response.json() == {"left": 0, "version": None}


async def test_an_external_trainer_publishes_and_readers_get_whole_versions(
    index_url: str, tmp_path: Path
) -> None:
    """Two programs at two stages.

    Whatever version a reader gets while the trainer goes on, it is that version, all of it: tensors
    of version v are all v.
    """
    of = recipe(
        {**MOCK, "external": {"stages": ["rollout", "update"]}},
        train__steps=8,
        rollout__max_tokens=4,
    )
    tensors = [(f"layer.{i}", torch.zeros(100_000)) for i in range(4)]

    async def train(run: Going) -> None:
        async with ExternalStage.connect(run.server, run.id, "update", worker="trainer") as stage:
            await stage.publish(0, tensors)
            while not (got := await stage.get_experience(wait=5)).over:
                if got:
                    assert set(got.columns) == {
                        "prompt_ids",
                        "response_ids",
                        "rollout_logprobs",
                        "advantage",
                    }
                    await stage.renew(got)
                    version = await stage.put_step(got, {"loss": 0.5})
                    await stage.publish(
                        version, [(name, value + version) for name, value in tensors]
                    )

    async def roll_out(run: Going) -> None:
        version = -1
        async with ExternalStage.connect(run.server, run.id, "rollout", worker="engine") as stage:
            while True:
                if newer := await stage.weights(version, wait=0 if version >= 0 else 30):
                    version, weights = newer
                    assert all(bool((value == version).all()) for value in weights.values())
                try:
                    got = await stage.get_experience(4, version=version, wait=5)
                except WeightsTooOld:
                    continue
                if got.over:
                    return
                if got:
                    assert (
                        await stage.put_experience(got, respond(len(got.rows), version, 49, 4)) == 0
                    )

    async def read(run: Going) -> None:
        while not run.work.done():
            newest = (await run.ask("GET", "weights?after=-1"))["version"]
            if newest is None:
                await asyncio.sleep(0.05)
                continue
            response = await run.client.get(f"{run.at}/weights/{newest}")
            if response.status == 200:
                body = await response.read()
                assert response.headers["ETag"] == f'"{hashlib.sha256(body).hexdigest()}"'
                assert all((value == newest).all() for value in load(body).values())
            else:
                assert (await problem(response, 409))["type"] == "urn:asyncdock:weights-gone"

    async with going(index_url, tmp_path, of) as run:
        async with asyncio.TaskGroup() as tasks:
            for work in (train, roll_out, read, read):
                tasks.create_task(work(run))
        result = await run.work
    assert result.state == "finished", result.reason
    assert_each_sample_once(of, run.watched)
    assert [step["loss"] for step in run.watched.of("step")] == [0.5] * 8


async def test_the_weights_that_are_served_are_the_trainers(index_url: str, tmp_path: Path) -> None:
    of = recipe({**TINY, "external": {"stages": ["rollout"]}})
    expected = {name: value.clone() for name, value in train_engine(of).weights()}
    async with going(index_url, tmp_path, of) as run:
        answer = await run.ask("GET", "weights?wait=30")
        assert (answer["version"], answer["state"]) == (0, "running")
        served = load(await (await run.client.get(f"{run.at}/weights/0")).read())
        assert {tensor["name"] for tensor in answer["tensors"]} == set(served) == set(expected)
        for name, value in expected.items():
            assert np.array_equal(served[name], value.numpy())
        # as a program on the same machine may read them
        at = np.memmap(answer["local"]["path"], np.uint8, "r")
        for tensor in answer["tensors"]:
            mapped = at[tensor["offset"] :][: 4 * int(np.prod(tensor["shape"]))].view(np.float32)
            assert np.array_equal(mapped, expected[tensor["name"]].numpy().reshape(-1))


@pytest.mark.parametrize("way", ["index", "http"])
async def test_both_ways_refuse_alike(way: str, index_url: str, tmp_path: Path) -> None:
    async with going(index_url, tmp_path, recipe(EXTERNAL)) as run:
        where = index_url if way == "index" else run.server
        async with ExternalStage.connect(where, run.id, "rollout", worker="one") as stage:
            newest = await stage.weights(wait=30)
            assert newest is not None
            assert newest[0] == 0
            await stage.weight_sync_notify(0)
            got = await stage.get_experience(1)
            assert len(got.ids) == 4
            with pytest.raises((Misfit, ApiProblem), match="versions"):
                await stage.put_experience(got, respond(4, 3, 49, 4))
            progress = {
                name: value for name, value in respond(4, 0, 49, 4).items() if name != "truncated"
            }
            assert await stage.put_experience(got, progress, park=True) == 0
            with pytest.raises(LeaseLost):
                await stage.put_experience(got, respond(4, 0, 49, 4))
            more = await stage.get_experience(1)
            assert more.begun[0] == got.ids
            assert (
                more.begun[1]["response_ids"].values.tolist()
                == progress["response_ids"].values.tolist()
            )
            await stage.release(more)
            with pytest.raises(LeaseLost):
                await stage.renew(more)
            with pytest.raises(NotExternal):
                await stage.put_prompts([{"prompt": "a"}])
            nothing = await stage.get_experience(8, wait=0)
            assert nothing, "what was given back is ready"
            assert not await stage.get_experience(8, wait=0)
        async with ExternalStage.connect(where, run.id, "reward", worker="one") as stage:
            with pytest.raises(NotExternal):
                await stage.get_experience(1)
        vocabulary = tiny_tokenizer().get_vocab()
        async with ExternalStage.connect(
            where, run.id, "rollout", worker="two", vocabulary=vocabulary
        ) as stage:
            await stage.get_experience(8, version=0, wait=0)
        first, second, *_ = vocabulary
        other = vocabulary | {first: vocabulary[second], second: vocabulary[first]}
        async with ExternalStage.connect(
            where, run.id, "rollout", worker="two", vocabulary=other
        ) as stage:
            with pytest.raises(
                (Misfit, ApiProblem),
                match=r"tokenizer.*is not the fingerprint of the run's "
                r"vocabulary",
            ):
                await stage.get_experience(1, version=0)


ROWS = st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4), min_size=1, max_size=5)


@given(ROWS, st.integers(1, 3))
def test_columns_come_back_as_they_went(rows: list[list[int]], width: int) -> None:
    ids = Packed(
        torch.tensor([x for row in rows for x in row]).long(),
        torch.tensor(np.cumsum([0, *map(len, rows)])),
    )
    columns = {
        "ids": ids,
        "good": torch.ones(len(rows)).bool(),
        "scores": torch.randn(len(rows), width),
    }
    control, back = from_body(to_body("{}", columns))
    assert control == "{}"
    assert torch.equal(back["ids"].values, ids.values)
    assert torch.equal(back["ids"].offsets, ids.offsets)
    assert all(torch.equal(back[name], columns[name]) for name in ("good", "scores"))


@given(
    st.binary(max_size=200)
    | st.builds(lambda n, b: n.to_bytes(8, "little") + b, st.integers(0, 99), st.binary())
)
def test_a_body_that_is_none_is_refused(body: bytes) -> None:
    with pytest.raises(Unreadable):
        from_body(body)
