"""The REST contract as other programs see it: the OpenAPI document, and a client generated from it
alone."""

from __future__ import annotations

import asyncio
import importlib
import io
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import httpx
import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from api.client import Client as PythonClient
from api.client import WrongInput
from api.schemas.events import MESSAGES, MODELS
from api.server.app import ROUTES
from api.server.service.openapi import openapi_document
from api.server.service.operations import operations_of
from orchestration.recipe.loading.load import parse_recipe
from orchestration.state.registry import Registry
from pipeline.data.events import EVENTS, Kind
from pipeline.index.client import Index
from tests.any_event import AnyEvent
from tests.api.served import Served
from tests.api.serving import Client, bearer, problem, serving
from tests.orchestration.runs import MOCK
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 90.0
TOKEN = f"adock_{'0' * 12}_{'A' * 43}"  # of the form of one, and known to no server
METHODS = ("get", "put", "post", "delete", "patch")


def document(*, tokens: bool = True) -> dict[str, Any]:
    return openapi_document(ROUTES, version="1", tokens=tokens)


def operations(of: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """(method, path, operation) of a document."""
    return [
        (method, path, item[method])
        for path, item in of["paths"].items()
        for method in METHODS
        if method in item
    ]


def fits(payload: object, schema: dict[str, Any], of: dict[str, Any]) -> None:
    """Raises ValidationError unless ``payload`` fits ``schema`` of the document ``of``."""
    jsonschema.Draft202012Validator({**schema, "components": of["components"]}).validate(payload)


# --- the document
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [True, False])
def test_the_document_is_openapi_3_1(tokens: bool) -> None:
    errors = list(OpenAPIV31SpecValidator(document(tokens=tokens)).iter_errors())
    assert [f"{list(error.absolute_path)}: {error.message[:200]}" for error in errors] == []


def test_a_token_is_asked_for_where_the_server_asks_for_one() -> None:
    with_tokens = document(tokens=True)
    without = document(tokens=False)
    scoped = {path for _, path, operation in operations(with_tokens) if operation["security"]}
    assert "/v1/runs" in scoped
    assert not scoped & {"/healthz", "/readyz", "/openapi.json"}
    assert [operation for _, _, operation in operations(without) if operation["security"]] == []


@pytest.mark.parametrize(
    ("settings", "asked"),
    [({"no_token": False}, True), ({"no_token": True}, False), ({"hosts": ("dock",)}, True)],
)
async def test_the_server_says_in_its_document_whether_it_asks_for_tokens(
    index_url: str, tmp_path: Path, settings: dict[str, Any], asked: bool
) -> None:
    async with serving(index_url, tmp_path, **settings) as client:
        answer = await (await client.get("/openapi.json")).json()
        assert bool(answer["paths"]["/v1/runs"]["get"]["security"]) is asked
        assert (await client.get("/v1/runs")).status == (401 if asked else 200)


async def _statuses(client: Client, headers: dict[str, str]) -> dict[tuple[str, str], int]:
    """What each operation of the document answers; those that make no error of their own end in one
    of the request's."""
    received = await (await client.get("/openapi.json")).json()

    async def ask(method: str, path: str) -> tuple[tuple[str, str], int]:
        url = re.sub(r"{(version|token)}", "1", re.sub(r"{(run|name|model)}", "unknown", path))
        async with client.request(method, url, headers=headers) as answer:
            return (method, path), answer.status

    return dict(
        await asyncio.gather(*(ask(method, path) for method, path, _ in operations(received)))
    )


def _declared(status: str) -> set[tuple[str, str]]:
    return {
        (method, path)
        for method, path, operation in operations(document())
        if status in operation["responses"]
    }


async def test_401_is_declared_where_a_request_without_a_token_gets_it(
    index_url: str, tmp_path: Path
) -> None:
    async with serving(index_url, tmp_path, no_token=False) as client:
        found = await _statuses(client, {})
    assert {one for one, status in found.items() if status == 401} == _declared("401")


async def test_503_is_declared_where_an_index_that_does_not_answer_makes_it(tmp_path: Path) -> None:
    nowhere = f"redis://127.0.0.1:{free_port()}"
    async with serving(nowhere, tmp_path, no_token=False) as client:
        found = await _statuses(client, bearer(TOKEN))
    assert {one for one, status in found.items() if status == 503} == _declared("503")
    assert {one: status for one, status in found.items() if status not in (200, 503)} == {
        ("post", "/v1/login"): 415
    }


# --- what is refused
# --------------------------------------------------------------------------------------------------


@pytest.fixture
async def client(index_url: str, tmp_path: Path) -> AsyncGenerator[Client, None]:
    async with serving(index_url, tmp_path) as made:
        yield made


STEP = {"step": 0, "version": 1, "rows": 8, "groups": [0], "loss": 0.5, "entropy": 1.0}
STAGE = {"stage": "reward", "worker": "reward-0", "rows": 8, "busy": 0.1, "wall": 0.2}


@pytest.fixture
async def run(index_url: str) -> AsyncGenerator[Index, None]:
    """A run with one step and one worker and no workers."""
    registry = Registry(index_url)
    record, _ = await registry.submit(parse_recipe({**MOCK, "name": "contract"}))
    index = Index(index_url, record.id)
    await index.transition(["", "created"], "running")
    await index.emit(AnyEvent(kind="step", data=STEP))
    await index.emit(AnyEvent(kind="stage", data=STAGE))
    yield index
    await index.transition(["running"], "stopped")
    await index.close()
    await registry.close()


@pytest.mark.parametrize(
    ("body", "field", "fix"),
    [
        ({}, "body", "one of recipe, recipe_name, toml and run"),
        (
            {"recipe": MOCK, "recipe_name": "mock"},
            "body",
            "one of recipe, recipe_name, toml and run",
        ),
        (
            {"recipe_name": "mock", "recipe": None},
            "body",
            "one of recipe, recipe_name, toml and run",
        ),
        ({"recipe_name": 3}, "recipe_name", "a valid string"),
        ({"recipe": []}, "recipe", "an object"),
        ({"recipe": MOCK, "overides": {}}, "overides", "remove it"),
        ({"recipe_name": "mock", "overrides": []}, "overrides", "an object"),
        (
            {"recipe_name": "mock", "overrides": {"rollout.device": "cpu;rm"}},
            "rollout.device",
            "use one of: auto, cpu",
        ),
    ],
)
async def test_a_submission_is_a_whole_recipe_or_a_name(
    client: Client, body: Any, field: str, fix: str
) -> None:
    for path in ("/v1/runs", "/v1/recipes/check"):
        details = await problem(await client.post(path, json=body), 422)
        assert details["field"] == field
        assert fix in details["fix"]


async def test_unknown_kinds_are_named_with_those_there_are(client: Client, run: Index) -> None:
    details = await problem(
        await client.get(f"/v1/runs/{run.run}/metrics/stream?kinds=step,stpe"), 400
    )
    assert (details["field"], details["value"]) == ("query.kinds.1", "stpe")
    assert all(f"'{kind}'" in details["fix"] for kind in EVENTS)


@pytest.mark.parametrize(
    ("query", "status", "value", "allowed"),
    [
        ("names=stpe", 400, "stpe", "step, evaluation, ledger"),
        ("names=step&names=ledger.generatd", 400, "ledger.generatd", "step, evaluation, ledger"),
        ("names=worker", 400, "worker", "step, evaluation, ledger"),
        ("names=step.los", 422, "step.los", "did you mean 'step.loss'?"),
        ("names=stage/reward-9", 422, "stage/reward-9", "stage/reward-0"),
        (
            "names=step.loss,stage/reward-0.colour",
            422,
            "stage/reward-0.colour",
            "stage/reward-0.other",
        ),
    ],
)
async def test_unknown_names_of_metrics_are_named_with_those_there_are(
    client: Client, run: Index, query: str, status: int, value: str, allowed: str
) -> None:
    details = await problem(await client.get(f"/v1/runs/{run.run}/metrics?{query}"), status)
    assert (details["field"].partition(".names")[0], details["value"]) == ("query", value)
    assert allowed in details["fix"]


@pytest.mark.parametrize(
    ("query", "series"),
    [
        ("names=step.loss,step.entropy", {"step"}),
        ("names=step.loss&names=stage", {"step", "stage/reward-0"}),
        ("names=stage/reward-0.rows,ledger.generated,sync", {"stage/reward-0"}),
        # nothing of it in the range, but it is a number of the run
        ("names=step.entropy&to=1", set()),
        ("names=", {"step", "stage/reward-0"}),
    ],
)
async def test_known_names_of_metrics_are_answered(
    client: Client, run: Index, query: str, series: set[str]
) -> None:
    query = query if "to=" not in query else f"{query}&from=0"
    answer = await client.get(f"/v1/runs/{run.run}/metrics?{query}&every=0")
    assert answer.status == 200, await answer.text()
    assert set((await answer.json())["series"]) == series


async def test_names_of_a_run_without_steps_may_turn_out_to_be_some(
    client: Client, index_url: str
) -> None:
    registry = Registry(index_url)
    record, _ = await registry.submit(parse_recipe({**MOCK, "name": "waiting"}))
    answer = await client.get(f"/v1/runs/{record.id}/metrics?names=step.entropy,stage/rollout-0")
    assert (answer.status, (await answer.json())["series"]) == (200, {})
    await registry.close()


# --- events
# --------------------------------------------------------------------------------------------------


def test_every_kind_of_event_has_a_class_and_a_model() -> None:
    assert set(EVENTS) == set(MODELS) == set(get_args(Kind))
    assert all(MODELS[kind].__name__ == event.__name__ for kind, event in EVENTS.items())


def test_the_stream_has_a_schema_for_each_of_its_messages() -> None:
    answer = document()["paths"]["/v1/runs/{run}/metrics/stream"]["get"]["responses"]["200"]
    messages = answer["content"]["text/event-stream"]["schema"]["contentSchema"]["items"]["oneOf"]
    payloads = {
        message["properties"]["event"]["const"]: message["properties"]["data"]
        for message in messages
    }
    assert set(payloads) == set(MESSAGES) == {*MODELS, "end", "dropped"}
    assert all(
        payload["contentSchema"]["$ref"].startswith("#/components/schemas/")
        for payload in payloads.values()
    )


# --- a client that was generated
# ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("served") / "data")
    made.start()
    yield made
    made.end()


async def test_the_python_client_says_which_kind_there_is_not(served: Served) -> None:
    async with PythonClient(served.url) as client:
        with pytest.raises(WrongInput, match="stpe") as raised:
            await anext(client.events("unknown", kinds=("step", "stpe")))
        assert "'step'" in str(raised.value)
        with pytest.raises(WrongInput, match=r"ledger\.generatd"):
            await client.metrics("unknown", names=["ledger.generatd"])


@pytest.fixture(scope="module")
def generated(
    served: Served, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of the client that openapi-python-client makes of the server's document,
    without a warning."""
    folder = tmp_path_factory.mktemp("generated")
    (folder / "config.yml").write_text("post_hooks: []\n")
    command = [
        "generate",
        "--url",
        f"{served.url}/openapi.json",
        "--meta",
        "none",
        "--fail-on-warning",
    ]
    command += [
        "--config",
        str(folder / "config.yml"),
        "--output-path",
        str(folder / "asyncdock_generated"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "openapi_python_client", *command],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    sys.path.insert(0, str(folder))
    yield lambda name: importlib.import_module(f"asyncdock_generated.{name}")
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] == "asyncdock_generated"]:
        del sys.modules[name]


def messages(text: str) -> list[tuple[str, str, dict[str, Any]]]:
    """(id, event, data) of a stream's messages that carry data."""
    blocks = [
        dict(line.partition(": ")[::2] for line in block.splitlines())
        for block in text.split("\n\n")
    ]
    return [
        (block.get("id", ""), block["event"], json.loads(block["data"]))
        for block in blocks
        if "data" in block
    ]


def until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end, f"not within {SECONDS:g} s: {what}"
        time.sleep(0.05)


def test_a_generated_client_types_what_a_run_is_made_of(
    generated: Callable[[str], ModuleType],
) -> None:
    models = generated("models")
    recipe = models.Recipe.from_dict(
        {
            **MOCK,
            "name": "typed",
            "algorithm": {"name": "grpo", "group_size": 4, "options": {"kl_coef": 0.5}},
        }
    )
    assert recipe.algorithm.options.kl_coef == 0.5
    assert type(recipe.rollout.mock) is models.MockRolloutOptions
    body = models.WholeRecipe.from_dict({"recipe": MOCK}).to_dict()
    assert body["recipe"] == {**body["recipe"], "model": MOCK["model"], "train": MOCK["train"]}
    assert models.NamedRecipe(recipe_name="mock").to_dict() == {"recipe_name": "mock"}


def test_bytes_stay_bytes_in_a_generated_client(generated: Callable[[str], ModuleType]) -> None:
    raw = bytes(range(256))
    stages = "api.external_stages"
    types = generated("types")
    answer = httpx.Response(200, content=raw)
    read = generated(f"{stages}.get_weights")._parse_response(
        client=generated("client").Client("http://x"), response=answer
    )
    assert read.payload.read() == raw
    sent = generated(f"{stages}.publish_weights")._get_kwargs(
        run="a", version=0, body=types.File(payload=io.BytesIO(raw))
    )
    assert sent["content"].read() == raw
    assert sent["headers"]["Content-Type"] == "application/octet-stream"


def test_every_operation_of_a_generated_client_can_be_imported(
    generated: Callable[[str], ModuleType],
) -> None:
    failed = set()
    for o in operations_of(ROUTES):
        if not o.hidden:
            name = f"api.{o.tag.replace(' ', '_')}.{o.handler.__name__}"
            try:
                assert callable(generated(name).sync_detailed)
            except NameError:
                failed.add(name)
    assert not failed


def test_a_generated_client_drives_a_run(
    served: Served, generated: Callable[[str], ModuleType]
) -> None:
    models = generated("models")
    answer = json.loads(json.dumps(document()))
    client = generated("client").AuthenticatedClient(
        base_url=served.url, token=served.token, timeout=SECONDS, raise_on_unexpected_status=True
    )

    def call(operation: str, *arguments: Any, **named: Any) -> Any:
        return generated(f"api.{operation}").sync(*arguments, client=client, **named)

    changes = models.NamedRecipeOverrides.from_dict(
        {"train.steps": 100_000, "launch.launcher": "inline"}
    )
    submitted = call(
        "runs.submit_run", body=models.NamedRecipe(recipe_name="mock", overrides=changes)
    )
    assert isinstance(submitted, models.RunView)
    run = submitted.id
    read: list[str] = []
    kinds = [models.StreamKindsItem(kind) for kind in ("state", "step", "stage")]
    reading = threading.Thread(
        target=lambda: read.append(call("metrics.stream", run, kinds=kinds)), daemon=True
    )
    reading.start()
    until(lambda: call("runs.get_run", run).steps_done > 1, "two steps are done")
    assert call("runs.pause_run", run).state == models.RunViewState.PAUSED
    assert call("runs.resume_run", run).state == models.RunViewState.RUNNING
    until(lambda: bool(call("runs.samples", run).samples), "there are samples")
    sample = call("runs.samples", run, limit=1).samples[0]
    assert sum(tokens for _, tokens in sample.versions) == sample.tokens
    published = call(
        "external_stages.publish_weights",
        run,
        0,
        body=generated("types").File(payload=io.BytesIO(b"0")),
    )
    assert (type(published), published.type_) == (
        models.ProblemDetails,
        "urn:asyncdock:not-external",
    )
    early = call("runs.delete_run", run)
    assert (type(early), early.type_) == (models.ProblemDetails, "urn:asyncdock:wrong-state")
    call("runs.stop_run", run)
    until(lambda: call("runs.get_run", run).ended is not None, "the run has ended")
    reading.join(SECONDS)
    _check_messages(messages(read[0]), models, answer)
    assert call("metrics.history", run, names=["step.reward_mean"]).series["step"]["reward_mean"]
    unknown = call("metrics.history", run, names=["step.rewardmean"])
    assert (unknown.status, "step.reward_mean" in unknown.fix) == (422, True)
    assert call("runs.delete_run", run) is None
    gone = call("runs.get_run", run)
    assert (type(gone), gone.status) == (models.ProblemDetails, 404)


def _check_messages(
    found: list[tuple[str, str, dict[str, Any]]], models: ModuleType, answer: dict[str, Any]
) -> None:
    """Each message fits the schema that the document has for its event, and the class generated of
    it."""
    assert {event for _, event, _ in found} == {"state", "step", "stage", "end"}
    schemas = answer["paths"]["/v1/runs/{run}/metrics/stream"]["get"]["responses"]["200"][
        "content"
    ]["text/event-stream"]
    for id, event, data in found:
        fits(
            {"event": event, "id": id, "data": json.dumps(data)},
            schemas["schema"]["contentSchema"]["items"],
            answer,
        )
        name = MESSAGES[event].__name__
        fits(data, {"$ref": f"#/components/schemas/{name}"}, answer)
        assert getattr(models, name).from_dict(data).to_dict() == data
    steps = [data["step"] for _, event, data in found if event == "step"]
    assert steps == list(range(1, len(steps) + 1))
    states = [data["state"] for _, event, data in found if event == "state"]
    assert states.index("paused") < len(states) - 1 - states[::-1].index("running")
    assert found[-1][1:] == ("end", {"state": "stopped", "reason": found[-1][2]["reason"]})
