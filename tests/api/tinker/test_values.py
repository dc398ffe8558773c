"""Unusual values in every field of every endpoint: each is refused in words or has its literal
meaning, and none is an error of the server, or one that clients would repeat."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pydantic
import pytest

from api.server.service.operations import Operation, operations_of
from api.tinker import sampling
from api.tinker.routes import ROUTES
from api.tinker.samples import SampleBody, Sampling, Targets
from api.tinker.schemas import SaveBody, SaveExternalBody, SaveSamplerBody, StepBody
from tests.api.serving import Client
from tests.api.tinker.test_endpoints import User, client

_ = client  # a fixture
HUGE = "9" * 400
# as JSON has them, where Python's values would not show what is sent
VALUES = (
    *("null", "true", "-1", "0", "1.5", "1e400", "NaN", HUGE, f"-{HUGE}", '""', '"x"', "[]", "{}"),
    *('"\\ud800"', '"\\u0000"', '"../.."', '"tinker://a/weights/b"', f'"{"x" * 5000}"'),
    *("[[]]", "[null]", '{"chunks": [{"tokens": [-1]}]}', '{"type": "dimuon"}', '{"rank": 1e9}'),
)
# what a handler reads of a body beside the call's number
CONTENTS: dict[str, type[pydantic.BaseModel]] = {
    "/api/v1/optim_step": StepBody,
    "/api/v1/save_weights": SaveBody,
    "/api/v1/save_weights_external": SaveExternalBody,
    "/api/v1/save_weights_for_sampler": SaveSamplerBody,
}
# fields of fields
NESTED = {
    "sampling_params": [*Sampling.model_fields],
    "target_prompt_logprobs": [*Targets.model_fields],
}
REPEATED = (408, 409, 429)  # which clients send again for minutes
OPERATIONS = {
    f"{operation.method} {operation.path}": operation for operation in operations_of(ROUTES)
}


def bodies(operation: Operation, sound: dict[str, Any]) -> Iterator[str]:
    """A body with each value in each field, and the others ``sound``."""
    model = operation.parts.get("body")
    if model is None:
        return
    names = {*model.model_fields}
    content = CONTENTS.get(operation.path)
    names |= {*content.model_fields} if content else set()
    yield from VALUES
    for name in sorted(names):
        others = {key: value for key, value in sound.items() if key in names and key != name}
        for value in VALUES:
            yield json.dumps({**others, name: 0})[:-2].rstrip("0 ") + f" {value}}}"
        for part in NESTED.get(name, ()) if name in names else ():
            for value in VALUES:
                yield json.dumps(others)[:-1] + f', "{name}": {{"{part}": {value}}}}}'


@pytest.mark.parametrize("name", OPERATIONS)
async def test_no_value_is_an_error_of_the_server(
    name: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "WAIT_SECONDS", 0.1)
    operation = OPERATIONS[name]
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


def test_a_sample_has_no_field_that_is_dropped_in_silence() -> None:
    """What the SDK sends of a sample and is not read has no effect, and the page says so."""
    known = {
        *("num_samples", "prompt", "sampling_params", "sampling_session_id", "seq_id"),
        *("prompt_logprobs", "topk_prompt_logprobs", "topk_sample_logprobs"),
        *("target_prompt_logprobs", "prompt_alt_tokens_k", "prompt_logprobs_last_n"),
    }
    assert {*SampleBody.model_fields} == known
