"""Every endpoint of Tinker's API over a real service of calls, whose engine is small: answers in the
form that clients read, and clear errors for what no client should send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientResponse, web

from api.server.service.service import SERVICE
from api.tinker import models, sampling
from api.tinker.messages import MESSAGES
from api.tinker.models import PROTOBUF
from api.tinker.routes import add_routes
from benchmarks.service.tinker_messages import LOSS_NODES
from orchestration.calls.interface import CallOptions
from orchestration.calls.service import open_service
from stages.calls.interface import ServedBase
from tests.api.serving import Client, problem, serving
from tests.api.tinker.test_messages import INT64, body, datum, tensor, text

ENTRY = "tests.orchestration.calls.small_engine:open_parts"
BASE = ServedBase("base", "small", 512, "/srv/models/base", "Qwen3ForCausalLM")


@pytest.fixture
async def client(index_url: str, tmp_path: Path) -> AsyncGenerator[Client, None]:
    def extend(app: web.Application) -> None:
        add_routes(
            app,
            lambda: open_service(
                tmp_path / "calls",
                [BASE],
                CallOptions(waiting_requests=8),
                entry=ENTRY,
                engine_options={"folder": str(tmp_path)},
            ),
        )

    async with serving(
        index_url, tmp_path, extend=extend, no_token=False, rate=1e6, burst=10**6
    ) as test_client:
        yield test_client


class User:
    """A client with a token of its own."""

    def __init__(self, client: Client, key: str) -> None:
        self.client = client
        self.headers = {"X-API-Key": key}

    @classmethod
    async def of(cls, client: Client, name: str) -> User:
        service = client.app[SERVICE]
        _, key = await service.tokens.create(name, "run")
        return cls(client, f"tml-{key}")

    async def ask(self, method: str, path: str, **options: Any) -> ClientResponse:
        headers = {**self.headers, **options.pop("headers", {})}
        return await self.client.request(method, path, headers=headers, **options)

    async def post(self, name: str, /, **fields: Any) -> dict[str, Any]:
        response = await self.ask("POST", f"/api/v1/{name}", json=fields)
        assert response.status == 200, await response.text()
        return dict(await response.json())

    async def get(self, path: str) -> dict[str, Any]:
        response = await self.ask("GET", path)
        assert response.status == 200, await response.text()
        return dict(await response.json())

    async def result(self, call: Mapping[str, Any]) -> Any:
        """The answer to a call: JSON, or the bytes of a message."""
        while True:
            response = await self.ask(
                "POST", "/api/v1/retrieve_future", json={"request_id": call["request_id"]}
            )
            if response.status != 408:
                break
        assert response.status == 200, await response.text()
        return await (response.read() if response.content_type == PROTOBUF else response.json())

    async def train(self, data: bytes, **options: Any) -> dict[str, Any]:
        headers = {"Content-Type": PROTOBUF, **options.pop("headers", {})}
        response = await self.ask("POST", "/api/v1/forward_backward", data=data, headers=headers)
        assert response.status == 200, await response.text()
        return dict(await response.json())

    async def model(self, **options: Any) -> str:
        session = (await self.post("create_session", tags=[], sdk_version="0.38.0"))["session_id"]
        call = await self.post(
            "create_model", session_id=session, model_seq_id=0, base_model="base", **options
        )
        answer = await self.result(call)
        assert answer == {"type": "create_model", "model_id": f"{session}:train:0"}
        return str(answer["model_id"])


def data(model: str, seq_id: int, **options: Any) -> bytes:
    rows = [datum([text(1, 2, 3)], target_tokens=tensor([2, 3, 4], INT64))] * 2
    message = MESSAGES["ForwardBackwardRequest"].FromString(body(*rows, **options))
    message.model_id = model
    message.seq_id = seq_id
    return bytes(message.SerializeToString())


async def test_a_model_from_its_session_to_its_archive(client: Client) -> None:
    user = await User.of(client, "ann")
    assert (await user.post("client/config", sdk_version="1"))["parallel_fwdbwd_chunks"] is False
    assert "refresh_interval_sec" in await user.post("client/dynamic_config", sdk_version="1")
    capabilities = await user.get("/api/v1/get_server_capabilities")
    assert capabilities["supported_models"][0]["model_name"] == "base"
    assert await user.post("telemetry", events=[{"a": 1}]) == {"status": "accepted"}
    assert await user.get("/api/v1/healthz") == {"status": "ok"}

    model = await user.model(
        lora_config={"rank": 8, "seed": 1, "train_attn": False}, user_metadata={"kind": "x", "n": 3}
    )
    session = model.partition(":")[0]
    assert await user.post("session_heartbeat", session_id=session) == {"type": "session_heartbeat"}
    info = await user.post("get_info", model_id=model)
    assert (info["model_data"]["model_name"], info["lora_rank"]) == ("base", 8)
    assert info["model_data"]["arch"] == "Qwen3ForCausalLM"

    passed = MESSAGES["ForwardBackwardOutput"].FromString(
        await user.result(await user.train(data(model, 1)))
    )
    assert passed.loss_fn_outputs[0].num_datums == 2
    assert [each.key for each in passed.metrics] == ["loss:sum"]
    step = await user.post("optim_step", model_id=model, seq_id=2, adam_params={"beta1": 0.8})
    assert (await user.result(step))["metrics"]["grad_norm"] > 0
    saved = await user.post("save_weights", model_id=model, seq_id=3, path="first")
    path = (await user.result(saved))["path"]
    assert path == f"tinker://{model}/weights/first"
    weights = await user.post("weights_info", tinker_path=path)
    assert (weights["base_model"], weights["is_lora"], weights["lora_rank"]) == ("base", True, 8)
    assert (weights["train_attn"], weights["train_unembed"]) == (False, True)
    loaded = await user.post(
        "load_weights", model_id=model, seq_id=4, path=path, optimizer=True, type="load_weights"
    )
    assert (await user.result(loaded))["type"] == "load_weights"
    again = await user.post("load_weights", session_id=session, model_seq_id=1, path=path)
    assert (await user.result(again))["model_id"] == f"{session}:train:1"

    run = await user.get(f"/api/v1/training_runs/{model}")
    assert run["user_metadata"] == {"kind": "x", "n": "3"}
    assert run["last_checkpoint"]["checkpoint_id"] == "weights/first"
    for offset, listed in enumerate((f"{session}:train:1", model)):  # the newest first
        runs = await user.get(f"/api/v1/training_runs?limit=1&offset={offset}")
        assert [each["training_run_id"] for each in runs["training_runs"]] == [listed]
        assert runs["cursor"]["total_count"] == 2
    checkpoint = f"/api/v1/training_runs/{model}/checkpoints/weights/first"
    archive = await user.ask("GET", f"{checkpoint}/archive", allow_redirects=False)
    assert archive.status == 302
    async with client.session.get(archive.headers["Location"]) as download:
        assert download.status == 200
        assert await download.read()
    assert (await user.ask("PUT", f"{checkpoint}/ttl", json={"ttl_seconds": 60})).status == 204
    (listed,) = (await user.get("/api/v1/checkpoints"))["checkpoints"]
    assert (listed["tinker_path"], listed["checkpoint_type"]) == (path, "training")
    assert listed["expires_at"]
    for method, is_public in (("POST", True), ("POST", True), ("DELETE", False)):
        assert (await user.ask(method, f"{checkpoint}/publish")).status == 204
        (listed,) = (await user.get("/api/v1/checkpoints"))["checkpoints"]
        assert listed["public"] is is_public
    assert (await user.ask("DELETE", checkpoint)).status == 204
    assert (await user.get(f"/api/v1/training_runs/{model}/checkpoints"))["checkpoints"] == []
    assert model in (await user.get(f"/api/v1/sessions/{session}"))["training_run_ids"]
    assert (await user.get("/api/v1/sessions"))["sessions"] == [session]
    assert await user.get(f"/tinker/models/{model}/ledger")
    unloaded = await user.result(await user.post("unload_model", model_id=model))
    assert unloaded == {"type": "unload_model", "model_id": model}
    await user.post(f"sessions/{session}/finish", reason={"type": "success"}, detail=None)
    await problem(
        await user.ask("POST", "/api/v1/session_heartbeat", json={"session_id": session}), 410
    )
    assert (await user.get(f"/api/v1/training_runs/{model}"))["user_metadata"]["kind"] == "x"
    assert model in (await user.get(f"/api/v1/sessions/{session}"))["training_run_ids"]


async def test_samples_of_each_kind_of_sampler(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "WAIT_SECONDS", 0.2)
    user = await User.of(client, "ann")
    model = await user.model()
    session = model.partition(":")[0]
    named = await user.post("save_weights_for_sampler", model_id=model, seq_id=1, path="named")
    path = (await user.result(named))["path"]
    assert path == f"tinker://{model}/sampler_weights/named"
    follows = await user.post(
        "save_weights_for_sampler",
        model_id=model,
        seq_id=2,
        sampling_session_seq_id=0,
        kind="inflight",
    )
    own = await user.result(follows)
    assert own == {
        "type": "save_weights_for_sampler",
        "sampling_session_id": f"{session}:sample:0",
    }
    opened = await user.post(
        "create_sampling_session", session_id=session, sampling_session_seq_id=1, model_path=path
    )
    sampler = opened["sampling_session_id"]
    described = await user.get(f"/api/v1/samplers/{sampler}")
    assert (described["base_model"], described["model_path"]) == ("base", path)

    request = {
        "sampling_session_id": sampler,
        "seq_id": 10**18,
        "num_samples": 3,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [100]}, {"tokens": [2]}]},
        "sampling_params": {"max_tokens": 2, "stop": ["a"], "top_k": -1},
        "record_stability_info": False,
        "of_a_later_sdk": {},
    }
    call = await user.post("asample", **request)
    assert len(call["sample_sequence_ids"]) == 3
    assert await user.post("asample", **request) == call, "a request sent again is the same one"
    waiting = await user.ask(
        "POST", "/api/v1/retrieve_future", json={"request_id": call["request_id"]}
    )
    assert (waiting.status, (await waiting.json())["queue_state"]) == (408, "active")
    answer = MESSAGES["SampleResponse"].FromString(await user.result(call))
    assert len(answer.sequences) == 3
    assert list(answer.sequences[0].versions) == [0, 2]
    second = call["sample_sequence_ids"][1]
    assert await user.get(f"/tinker/sequences/{second}") == {
        "sequence_id": second,
        "versions": [[0, 2]],
    }
    for unknown in (f"{call['request_id']}:3", f"{call['request_id']}:x", "x"):
        await problem(await user.ask("GET", f"/tinker/sequences/{unknown}"), 404)
    assert len(np.frombuffer(answer.sequences[0].tokens, "<i4")) == 2


async def test_checkpoints_for_other_programs_and_copies(client: Client) -> None:
    user = await User.of(client, "ann")
    model = await user.model()
    fields = {"model_id": model, "seq_id": 1, "path": "out", "ttl_seconds": 3600}
    saved = await user.result(await user.post("save_weights_external", **fields))
    path = f"tinker://{model}/external_weights/out"
    assert saved == {"type": "save_weights_external", "path": path}
    run = f"/api/v1/training_runs/{model}"
    (listed,) = (await user.get(f"{run}/checkpoints"))["checkpoints"]
    assert (listed["checkpoint_type"], listed["tinker_path"]) == ("external", path)
    urls = await user.get(f"{run}/checkpoints/external_weights/out/external_weights_urls")
    assert {*urls} == {"urls", "expires"}
    missing = f"{run}/checkpoints/external_weights/other/external_weights_urls"
    await problem(await user.ask("GET", missing), 404)

    async def copy(key: str, **options: Any) -> str:
        answer = await user.ask(
            "POST",
            "/api/v1/copy_weights",
            json={"source_path": path, **options},
            headers={"X-Idempotency-Key": key},
        )
        assert answer.status == 200, await answer.text()
        return str((await answer.json())["tinker_path"])

    first = await copy("a", destination_project_id="any")
    assert await copy("a", destination_project_id="any") == first
    assert await copy("b", destination_project_id="any") != first
    session = model.partition(":")[0]
    own = await copy("c", session_id=session, model_seq_id=1)
    assert own == f"tinker://{session}:train:1/external_weights/out"
    checkpoints = (await user.get("/api/v1/checkpoints"))["checkpoints"]
    paths = [each["tinker_path"] for each in checkpoints]
    assert (len(paths), paths[0], paths[-1]) == (4, own, path), "the newest is the first"
    step = {"model_id": f"{session}:train:1", "seq_id": 1}
    refused = await user.ask("POST", "/api/v1/optim_step", json=step)
    assert "is not trained" in (await problem(refused, 422))["detail"]


async def test_what_is_refused_fails_in_its_place_and_holds_nothing_up(client: Client) -> None:
    user = await User.of(client, "ann")
    model = await user.model()
    short = datum([text(1)], target_tokens=tensor([2], INT64, shape=(2,)))
    message = MESSAGES["ForwardBackwardRequest"].FromString(body(short))
    message.model_id, message.seq_id = model, 1
    calls = [
        await user.train(message.SerializeToString()),
        await user.post("optim_step", model_id=model, seq_id=2, adam_params={"beta1": "2"}),
        await user.post(
            "optim_step", model_id=model, seq_id=3, optimizer_params={"type": "dimuon"}
        ),
        await user.post("save_weights", model_id=model, seq_id=4, path="../../etc/passwd"),
        await user.post("save_weights", model_id=model, seq_id=5, ttl_seconds=-1),
        await user.post("load_weights", model_id=model, seq_id=6, path="tinker://a/b"),
        await user.post(
            "save_weights_external",
            model_id=model,
            seq_id=7,
            path="x",
            age_encryption_recipients=["age1"],
        ),
    ]
    words = (
        "data.0.loss_fn_inputs.target_tokens.shape",
        "beta1",
        "dimuon",
        "path",
        "ttl_seconds",
        "tinker://a/b",
        "age_encryption_recipients",
    )
    for call, word in zip(calls, words, strict=True):
        failure = await user.result(call)
        assert failure["category"] == "user"
        assert word in failure["error"], failure
    async with asyncio.timeout(10):
        assert isinstance(await user.result(await user.train(data(model, 8))), bytes)


async def test_one_request_waits_for_the_samples_of_a_sampler(client: Client) -> None:
    user = await User.of(client, "ann")
    session = (await user.post("create_session"))["session_id"]
    opened = await user.post("create_sampling_session", session_id=session, base_model="base")
    sampler = opened["sampling_session_id"]
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": 0}
    none = await user.post("retrieve_futures", target=target, prev_cursor=0, timeout=0)
    assert none == {"completions": [], "cursor": 0}
    asked = await user.post(
        "asample",
        sampling_session_id=sampler,
        seq_id=0,
        prompt={"chunks": [{"tokens": [0]}]},
        sampling_params={"max_tokens": 2},
    )
    there = await user.post("retrieve_futures", target=target, prev_cursor=none["cursor"])
    (completion,) = there["completions"]
    assert (completion["state"], completion["request_id"]) == ("finished", asked["request_id"])
    assert completion["response_payload_uncompressed_size"] > 0
    again = {"target": target, "prev_cursor": there["cursor"], "timeout": 0}
    answer = await user.post(
        "retrieve_futures", **again, retrieved_request_ids=[asked["request_id"]]
    )
    assert answer == {"completions": [], "cursor": there["cursor"]}
    stranger = await User.of(client, "bob")
    await problem(await stranger.ask("POST", "/api/v1/retrieve_futures", json=again), 404)


async def test_copies_of_a_sampler_and_losses_of_a_client(client: Client) -> None:
    user = await User.of(client, "ann")
    model = await user.model()
    session = model.partition(":")[0]
    opened = await user.post("create_sampling_session", session_id=session, base_model="base")
    joined = await user.post("join_sampling_session", **opened)
    assert joined == {"client_counter": 1, "type": "join_sampling_session"}
    loss = {
        "session_id": session,
        "custom_loss_seq_id": 3,
        "name": "mine",
        "inputs": [{"name": "logprobs", "rank": 1}],
        "graph": {"format": 1, "nodes": LOSS_NODES},
        "type": "create_custom_loss",
    }
    kept = await user.result(await user.post("create_custom_loss", **loss))
    assert kept == {"type": "create_custom_loss", "loss_id": f"{session}:loss:3"}
    loss["graph"] = {"nodes": [{"op": "call_function", "name": "x", "target": "os.system"}]}
    refused = await user.ask("POST", "/api/v1/create_custom_loss", json=loss)
    assert (await problem(refused, 422))["field"] == "graph.nodes"
    option = MESSAGES["Option"](key="loss_id", value={"text": f"{session}:loss:4"})
    call = await user.train(data(model, 1, loss_fn_config_v2=[option]))
    failure = await user.result(call)
    assert failure["category"] == "user"
    assert "loss_fn_config.loss_id: " in failure["error"]


async def test_what_no_client_sends_is_a_clear_error(client: Client) -> None:
    user = await User.of(client, "ann")
    await problem(await client.post("/api/v1/client/config", json={}), 401)
    await problem(await user.ask("POST", "/api/v1/no_such_thing", json={}), 404)
    await problem(await user.ask("GET", "/api/v1/asample"), 405)
    await problem(await user.ask("POST", "/api/v1/asample", data=b"{"), 415)
    as_json = {"Content-Type": "application/json"}
    await problem(await user.ask("POST", "/api/v1/asample", data=b"{", headers=as_json), 400)
    details = await problem(await user.ask("POST", "/api/v1/asample", json={"prompt": 1}), 422)
    assert {each["field"] for each in details["errors"]} >= {"sampling_session_id", "prompt"}
    image = {"chunks": [{"type": "image", "data": "", "format": "png"}]}
    sample = {"sampling_session_id": "x", "prompt": image, "sampling_params": {}}
    details = await problem(await user.ask("POST", "/api/v1/asample", json=sample), 422)
    assert (details["field"], details["value"]) == ("prompt.chunks[0].type", "image")
    sample["prompt"] = {"chunks": []}
    for name, value in (("prompt_alt_tokens_k", 101), ("prompt_logprobs_last_n", 0)):
        refused = await user.ask("POST", "/api/v1/asample", json={**sample, name: value})
        assert (await problem(refused, 422))["field"] == name
    await problem(await user.ask("POST", "/api/v1/asample", json=sample), 404)
    binary = {"Content-Type": PROTOBUF}
    for damaged in (b"\xff" * 9, b"\x1a\xff\xff\xff\xff\x0f", b"\x1a\x00" * 9000):
        answer = await user.ask("POST", "/api/v1/forward_backward", data=damaged, headers=binary)
        await problem(answer, 400)
    for model_id, seq_id, status in (("", 1, 422), ("x", 0, 422), ("x", -1, 422), ("x", 1, 404)):
        answer = await user.ask(
            "POST", "/api/v1/forward_backward", data=data(model_id, seq_id), headers=binary
        )
        await problem(answer, status)
    for path in ("auth/token", "audit", "sessions/x/project", "of_a_later_sdk"):
        await problem(await user.ask("POST", f"/api/v1/{path}", json={}), 404)
    await problem(await user.ask("POST", "/api/v1/sessions/search", json={}), 405)
    gone = await user.ask("POST", "/api/v1/retrieve_future", json={"request_id": "no"})
    await problem(gone, 410)
    session = (await user.post("create_session"))["session_id"]
    unknown = {"session_id": session, "base_model": "another"}
    details = await problem(await user.ask("POST", "/api/v1/create_model", json=unknown), 422)
    assert "another" in str(details)


async def test_another_token_sees_nothing(client: Client) -> None:
    ann, bob = await User.of(client, "ann"), await User.of(client, "bob")
    model = await ann.model()
    session = model.partition(":")[0]
    saved = await ann.post("save_weights", model_id=model, seq_id=1, path="first")
    path = (await ann.result(saved))["path"]
    sampler = (await ann.post("create_sampling_session", session_id=session, base_model="base"))[
        "sampling_session_id"
    ]
    prompted: dict[str, Any] = {
        "prompt": {"chunks": [{"tokens": [0]}]},
        "sampling_params": {"max_tokens": 1},
    }
    sampled = await ann.post("asample", sampling_session_id=sampler, **prompted)
    await ann.result(sampled)
    checkpoint = f"/api/v1/training_runs/{model}/checkpoints/weights/first"
    prompt: dict[str, Any] = {"prompt": {"chunks": []}, "sampling_params": {}}
    for method, path_of, fields in (
        ("POST", "/api/v1/get_info", {"model_id": model}),
        ("POST", "/api/v1/optim_step", {"model_id": model, "seq_id": 2}),
        ("POST", "/api/v1/optim_step", {"model_id": model, "seq_id": 2, "adam_params": 0}),
        ("POST", "/api/v1/save_weights", {"model_id": model, "seq_id": 2, "path": "x"}),
        ("POST", "/api/v1/save_weights_for_sampler", {"model_id": model, "seq_id": 2}),
        ("POST", "/api/v1/load_weights", {"session_id": session, "path": path}),
        ("POST", "/api/v1/load_weights", {"model_id": model, "path": path}),
        ("POST", "/api/v1/unload_model", {"model_id": model}),
        ("POST", "/api/v1/weights_info", {"tinker_path": path}),
        ("POST", "/api/v1/copy_weights", {"source_path": path}),
        ("POST", "/api/v1/save_weights_external", {"model_id": model, "seq_id": 2, "path": "x"}),
        ("POST", "/api/v1/retrieve_futures", {"target": {"sampling_session_id": sampler}}),
        ("POST", "/api/v1/create_model", {"session_id": session, "base_model": "base"}),
        ("POST", "/api/v1/create_sampling_session", {"session_id": session, "base_model": "base"}),
        ("POST", "/api/v1/asample", {"sampling_session_id": sampler, **prompt}),
        ("POST", "/api/v1/retrieve_future", {"request_id": saved["request_id"]}),
        ("POST", "/api/v1/session_heartbeat", {"session_id": session}),
        ("POST", f"/api/v1/sessions/{session}/finish", {}),
        ("GET", f"/api/v1/sessions/{session}", None),
        ("GET", f"/api/v1/samplers/{sampler}", None),
        ("GET", f"/tinker/sequences/{sampled['sample_sequence_ids'][0]}", None),
        ("GET", f"/api/v1/training_runs/{model}", None),
        ("GET", f"{checkpoint}/archive", None),
        ("PUT", f"{checkpoint}/ttl", {"ttl_seconds": 1}),
        ("POST", f"{checkpoint}/publish", None),
        ("DELETE", f"{checkpoint}/publish", None),
        ("POST", "/api/v1/join_sampling_session", {"sampling_session_id": sampler}),
        (
            "POST",
            "/api/v1/create_custom_loss",
            {"session_id": session, "inputs": [], "graph": {"nodes": []}},
        ),
        ("DELETE", checkpoint, None),
        ("GET", f"/tinker/models/{model}/ledger", None),
        ("GET", f"/tinker/models/{model}/steps", None),
    ):
        answer = await bob.ask(method, path_of, json=fields)
        assert answer.status in (404, 410), (path_of, answer.status, await answer.text())
    stolen = await bob.ask(
        "POST", "/api/v1/forward_backward", data=data(model, 2), headers={"Content-Type": PROTOBUF}
    )
    await problem(stolen, 404)
    for path_of in ("/api/v1/checkpoints", f"/api/v1/training_runs/{model}/checkpoints"):
        assert (await bob.get(path_of))["checkpoints"] == []
    assert (await bob.get("/api/v1/training_runs"))["training_runs"] == []
    assert await bob.get("/tinker/models") == {"models": [], "total": 0}
    assert (await bob.get("/api/v1/sessions"))["sessions"] == []
    own = (await bob.post("create_session"))["session_id"]
    stolen = await bob.ask(
        "POST", "/api/v1/create_sampling_session", json={"session_id": own, "model_path": path}
    )
    await problem(stolen, 404)


async def test_too_many_calls_are_to_be_sent_again(client: Client) -> None:
    user = await User.of(client, "ann")
    session = (await user.post("create_session"))["session_id"]
    sampler = (await user.post("create_sampling_session", session_id=session, base_model="base"))[
        "sampling_session_id"
    ]
    prompt = {"prompt": {"chunks": [{"tokens": [100]}]}, "sampling_params": {"max_tokens": 1}}
    statuses = list[int]()
    for number in range(10):
        answer = await user.ask(
            "POST",
            "/api/v1/asample",
            json={"sampling_session_id": sampler, "seq_id": number, **prompt},
        )
        statuses.append(answer.status)
    assert statuses == [200] * 8 + [429] * 2
    assert int(answer.headers["Retry-After"]) >= 1


async def test_compressed_bodies_are_read_within_the_limit(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    zstd = pytest.importorskip("backports.zstd")
    user = await User.of(client, "ann")
    model = await user.model()
    packed = {"Content-Encoding": "zstd", "Content-Type": PROTOBUF}
    call = await user.train(zstd.compress(data(model, 1)), headers=packed)
    assert isinstance(await user.result(call), bytes)
    monkeypatch.setattr(models, "BODY_BYTES", 2**20)
    bomb = zstd.compress(bytes(2**28))
    answer = await user.ask("POST", "/api/v1/forward_backward", data=bomb, headers=packed)
    await problem(answer, 413)
    answer = await user.ask("POST", "/api/v1/forward_backward", data=b"no zstd", headers=packed)
    await problem(answer, 400)
