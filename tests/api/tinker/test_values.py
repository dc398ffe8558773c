"""Unusual values in every field of every endpoint: each is refused in words or has its literal
meaning, and none is an error of the server, or one that clients would repeat."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from api.server.service.operations import Operation
from api.tinker import sampling
from api.tinker.samples import SampleBody, Sampling, Targets
from api.tinker.schemas import LossGraph
from benchmarks.service.tinker_messages import LOSS_NODES, OPERATIONS, VALUES, fields_of
from tests.api.serving import Client, problem
from tests.api.tinker.test_endpoints import User, client

_ = client  # a fixture
# fields of fields
NESTED = {
    "sampling_params": [*Sampling.model_fields],
    "target_prompt_logprobs": [*Targets.model_fields],
    "graph": [*LossGraph.model_fields],
}
REPEATED = (408, 409, 429)  # which clients send again for minutes
BY_NAME = {f"{operation.method} {operation.path}": operation for operation in OPERATIONS}


def bodies(operation: Operation, sound: dict[str, Any]) -> Iterator[str]:
    """A body with each value in each field, and the others ``sound``."""
    if "body" not in operation.parts:
        return
    names = {*fields_of(operation)}
    yield from VALUES
    for name in sorted(names):
        others = {key: value for key, value in sound.items() if key in names and key != name}
        for value in VALUES:
            yield json.dumps({**others, name: 0})[:-2].rstrip("0 ") + f" {value}}}"
        for part in NESTED.get(name, ()):
            for value in VALUES:
                yield json.dumps(others)[:-1] + f', "{name}": {{"{part}": {value}}}}}'


@pytest.mark.parametrize("name", BY_NAME)
async def test_no_value_is_an_error_of_the_server(
    name: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "WAIT_SECONDS", 0.1)
    operation = BY_NAME[name]
    user = await User.of(client, "ann")
    model = await user.model()
    session = model.partition(":")[0]
    sampler = (await user.post("create_sampling_session", session_id=session, base_model="base"))[
        "sampling_session_id"
    ]
    sound = {
        "session_id": session,
        "model_id": model,
        "base_model": "base",
        "sampling_session_id": sampler,
        "prompt": {"chunks": [{"tokens": [0]}]},
        "sampling_params": {"max_tokens": 1},
        "path": "x",
        "tinker_path": f"tinker://{model}/weights/x",
        "request_id": f"{model}:0",
        "target": {"sampling_session_id": sampler},
        "inputs": [{"name": "logprobs", "rank": 1}],
        "graph": {"nodes": LOSS_NODES},
        "timeout": 0,
    }
    paths = [
        operation.path.format(
            model=value, session=value, sampler=value, sequence=value, kind="weights", name=value,
            ticket=value,
        )
        for value in ("x", model, "%00", "%ed%a0%80", "..%2f..", "a" * 3000)
    ]  # fmt: skip
    as_json = {"Content-Type": "application/json"}
    for path in sorted({*paths}):
        for body in list(bodies(operation, sound)) if path == paths[0] else ["{}"]:
            answer = await user.ask(
                operation.method, path, data=body, headers=as_json, allow_redirects=False
            )
            text = await answer.text()
            assert answer.status < 500, (path, body[:300], text)
            if name != "POST /api/v1/asample":  # its limit is reached
                assert answer.status not in REPEATED, (path, body[:300], text)
            assert text or answer.status in (200, 204, 302), (path, body[:300])


async def test_numbers_that_no_record_can_hold_are_refused_by_their_field(client: Client) -> None:
    user = await User.of(client, "ann")
    session = (await user.post("create_session"))["session_id"]
    metadata = {"user_metadata": {"a": [10**400]}}
    of_model = {"session_id": session, "base_model": "base", "path": "tinker://a/weights/b"}
    sample = {"sampling_session_id": "x", "prompt": {"chunks": [{"tokens": [0]}]}}
    options = {"max_tokens": 2**64, "seed": -(2**64), "stop": [2**64], "top_k": 2**64}
    for name, fields, field in (
        ("create_session", metadata, "user_metadata"),
        ("create_model", {**of_model, **metadata}, "user_metadata"),
        ("load_weights", {**of_model, **metadata}, "user_metadata"),
        *(
            ("asample", {**sample, "sampling_params": {key: value}}, f"sampling_params.{key}")
            for key, value in options.items()
        ),
    ):
        refused = await user.ask("POST", f"/api/v1/{name}", json=fields)
        assert (await problem(refused, 422))["field"].startswith(field), name


def test_a_sample_has_no_field_that_is_dropped_in_silence() -> None:
    """What the SDK sends of a sample and is not read has no effect, and the page says so."""
    known = {
        *("num_samples", "prompt", "sampling_params", "sampling_session_id", "seq_id"),
        *("prompt_logprobs", "topk_prompt_logprobs", "topk_sample_logprobs"),
        *("target_prompt_logprobs", "prompt_alt_tokens_k", "prompt_logprobs_last_n"),
    }
    assert {*SampleBody.model_fields} == known
