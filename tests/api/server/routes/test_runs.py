"""Runs and recipes over REST, as far as no run has to go on for it: see test_serve.py for those
that do."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from api.server.access.settings import Settings
from api.server.access.tokens import Scope, Tokens
from orchestration.checkpoints import base_models
from orchestration.recipe.loading.load import fixed_keys
from orchestration.state.documents import CHECKPOINT_REPORTED
from orchestration.state.registry import Registry
from pipeline.index.client import Index
from stages.model.load import load_model
from stages.model.manifest import digests_of
from tests.any_event import AnyEvent
from tests.api.serving import Client, bearer, problem, serving
from tests.orchestration.run.test_checkpoints import written
from tests.orchestration.runs import MOCK, TINY


@pytest.fixture
async def client(index_url: str, tmp_path: Path) -> AsyncGenerator[Client, None]:
    async with serving(index_url, tmp_path) as made:
        yield made


@pytest.fixture
async def registry(index_url: str) -> AsyncGenerator[Registry, None]:
    made = Registry(index_url)
    yield made
    await made.close()


def recipe(name: str = "", **changes: Any) -> dict[str, Any]:
    return {**MOCK, "name": name or f"rest-{uuid.uuid4().hex[:8]}", **changes}


async def submitted(client: Client, **more: Any) -> dict[str, Any]:
    response = await client.post("/v1/runs", json={"recipe": recipe(), **more})
    assert response.status == 201, await response.text()
    return await response.json()


# --- submitting
# --------------------------------------------------------------------------------------------------


async def test_a_submitted_run_waits_and_is_all_there(client: Client) -> None:
    response = await client.post(
        "/v1/runs", json={"recipe": recipe("first"), "overrides": {"train.steps": 3}}
    )
    run = await response.json()
    assert (response.status, response.headers["Location"]) == (201, f"/v1/runs/{run['id']}")
    assert (run["name"], run["state"], run["owner"], run["steps"]) == (
        "first",
        "created",
        "local",
        3,
    )
    assert (run["steps_done"], run["reward"], run["started"], run["ended"]) == (0, None, None, None)
    assert run["position"] >= 1
    assert run["recipe"]["train"]["steps"] == 3
    assert run["recipe"]["sync"]["probe"] is True  # with every default
    assert await (await client.get(response.headers["Location"])).json() == run
    stages = await (await client.get(f"/v1/runs/{run['id']}/stages")).json()
    assert (stages["stages"], stages["gate"]["admitted"]) == ([], 0)
    waiting = await (await client.get(f"/v1/runs/{run['id']}/waiting")).json()
    assert (waiting["chain"], waiting["state"], waiting["findings"]) == ([], "", [])
    assert await (await client.get(f"/v1/runs/{run['id']}/checkpoints")).json() == {
        "checkpoints": []
    }
    assert await (await client.get(f"/v1/runs/{run['id']}/logs")).text() == ""


async def test_a_stored_recipe_is_submitted_by_its_name(client: Client) -> None:
    response = await client.post(
        "/v1/runs", json={"recipe_name": "mock", "overrides": {"train.steps": 7}}
    )
    assert (response.status, (await response.json())["steps"]) == (201, 7)
    details = await problem(await client.post("/v1/runs", json={"recipe_name": "../mock"}), 422)
    assert (details["field"], details["type"]) == ("recipe_name", "urn:asyncdock:unknown-recipe")
    assert "mock" in details["fix"]


async def test_a_repeat_under_one_key_makes_no_second_run(client: Client) -> None:
    headers = {"Idempotency-Key": uuid.uuid4().hex}
    body = {"recipe": recipe()}
    first = await client.post("/v1/runs", json=body, headers=headers)
    again = await client.post("/v1/runs", json=body, headers=headers)
    assert (first.status, again.status) == (201, 200)
    assert (await first.json())["id"] == (await again.json())["id"]
    details = await problem(
        await client.post("/v1/runs", json={"recipe": recipe()}, headers=headers), 422
    )
    assert (details["type"], details["field"]) == (
        "urn:asyncdock:key-reused",
        "header.Idempotency-Key",
    )


async def test_everything_wrong_with_a_recipe_is_told_with_its_fix(client: Client) -> None:
    wrong = {
        "train.stepz": 3,
        "rollout.temperature": 0,
        "pipeline.index": "redis://u:opensesame@host",
    }
    details = await problem(
        await client.post("/v1/runs", json={"recipe": recipe(), "overrides": wrong}), 422
    )
    errors = {error["field"]: error for error in details["errors"]}
    assert set(errors) == {"train.stepz", "rollout.temperature", "pipeline.index"}
    assert errors["train.stepz"]["fix"] == "did you mean 'steps'?"
    assert errors["train.stepz"]["value"] == 3
    assert "opensesame" not in json.dumps(details)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"recipe": {}, "recipe_name": "mock"},
        {"recipe": None},
        {"recipe_name": "mock", "recipe": None},
        {"x": 1},
    ],
)
async def test_either_a_recipe_or_the_name_of_one_is_given(
    client: Client, body: dict[str, Any]
) -> None:
    await problem(await client.post("/v1/runs", json=body), 422)


async def test_a_full_queue_takes_no_more(index_url: str, tmp_path: Path) -> None:
    async with serving(index_url, tmp_path, max_waiting=1) as client:
        first = await client.post("/v1/runs", json={"recipe": recipe()})
        assert first.status in (201, 429)  # other tests' runs wait too
        response = await client.post("/v1/runs", json={"recipe": recipe()})
        assert (await problem(response, 429))["type"] == "urn:asyncdock:queue-full"
        assert int(response.headers["Retry-After"]) > 0


# --- the list
# --------------------------------------------------------------------------------------------------


async def test_the_list_is_filtered_and_paged(client: Client) -> None:
    name = f"paged-{uuid.uuid4().hex[:6]}"
    made = [await submitted(client, recipe=recipe(name)) for _ in range(5)]
    seen = []
    after = ""
    while True:
        page = await (
            await client.get("/v1/runs", params={"name": name, "limit": 2, "after": after})
        ).json()
        seen += [run["id"] for run in page["runs"]]
        after = page["next"]
        if not after:
            break
    assert seen == [run["id"] for run in reversed(made)]
    waiting = await (await client.get("/v1/runs", params={"name": name, "state": "created"})).json()
    assert len(waiting["runs"]) == 5
    assert (await (await client.get("/v1/runs", params={"name": name, "state": "failed"})).json())[
        "runs"
    ] == []
    assert (await (await client.get("/v1/runs", params={"name": name, "owner": "unknown"})).json())[
        "runs"
    ] == []


@pytest.mark.parametrize(
    "query", ["state=lost", "limit=0", "limit=1000", "after=x", "after=" + "9" * 400, "colour=red"]
)
async def test_a_filter_that_means_nothing_is_refused(client: Client, query: str) -> None:
    await problem(await client.get(f"/v1/runs?{query}"), 400)


@pytest.mark.parametrize("what", ["", "/stages", "/checkpoints", "/logs"])
async def test_a_run_that_is_not_there(client: Client, what: str) -> None:
    details = await problem(await client.get(f"/v1/runs/no-such-run{what}"), 404)
    assert (details["type"], details["field"]) == ("urn:asyncdock:unknown-run", "path.run")
    for path in ("..", "%2e%2e", "..%2f..%2fetc", "@runs", "a%00b", "*"):
        assert (await client.get(f"/v1/runs/{path}{what}")).status in (400, 404)


# --- asking
# --------------------------------------------------------------------------------------------------


async def test_what_makes_no_sense_now_is_a_conflict(client: Client) -> None:
    run = (await submitted(client))["id"]
    for what in ("pause", "checkpoint"):
        details = await problem(await client.post(f"/v1/runs/{run}/{what}"), 409)
        assert (details["type"], details["value"]) == ("urn:asyncdock:wrong-state", "created")
    assert (await client.post(f"/v1/runs/{run}/resume")).status == 202, "it will run"
    details = await problem(
        await client.post(f"/v1/runs/{run}/resume", json={"overrides": {"train.steps": 9}}), 409
    )
    assert (details["type"], details["fix"]) == (
        "urn:asyncdock:wrong-state",
        "stop it first; it goes on from its last step",
    )
    await problem(await client.delete(f"/v1/runs/{run}"), 409)


async def test_a_waiting_run_is_stopped_and_deleted(client: Client) -> None:
    run = (await submitted(client))["id"]
    for _ in range(2):
        response = await client.post(f"/v1/runs/{run}/stop")
        assert (response.status, (await response.json())["state"]) == (202, "stopped")
    assert (await client.delete(f"/v1/runs/{run}")).status == 204
    await problem(await client.get(f"/v1/runs/{run}"), 404)
    await problem(await client.delete(f"/v1/runs/{run}"), 404)


async def test_an_ended_run_waits_again_with_the_changes_of_its_recipe(
    client: Client, index_url: str
) -> None:
    run = (await submitted(client))["id"]
    stopped = await (await client.post(f"/v1/runs/{run}/stop")).json()
    body = {
        "overrides": {
            "seed": 5,
            "model.dtype": "bfloat16",
            "train.stepz": 5,
            "algorithm.name": "my:Code",
        }
    }
    details = await problem(await client.post(f"/v1/runs/{run}/resume", json=body), 422)
    found = {error["field"]: error["wrong"] for error in details["errors"]}
    assert found["seed"] == f"cannot change in a resumed run: {fixed_keys()['seed']}"
    assert found["model.dtype"] == f"cannot change in a resumed run: {fixed_keys()['model']}"
    assert "is code that this server does not run" in found["algorithm.name"]
    assert "train.stepz" in found
    assert await (await client.get(f"/v1/runs/{run}")).json() == stopped
    again = {"overrides": {"train.steps": 9, "train.learning_rate": 1e-5}}
    for _ in range(2):  # a client that has lost the answer asks again
        response = await client.post(f"/v1/runs/{run}/resume", json=again)
        view = await response.json()
        assert (response.status, view["state"], view["steps"], view["ended"]) == (
            202,
            "created",
            9,
            None,
        ), view
    assert view["position"] >= 1
    assert view["recipe"]["train"]["learning_rate"] == 1e-5
    states = [
        event.data["state"]
        for event in await Index(index_url, run).past_events()
        if event.kind == "state"
    ]
    assert states == ["created", "stopped", "created"]
    await client.post(f"/v1/runs/{run}/stop")
    for wrong in ({"overrides": 3}, {"set": {}}, []):
        await problem(await client.post(f"/v1/runs/{run}/resume", json=wrong), 422)
    await problem(await client.post(f"/v1/runs/{run}/resume", data=b"{"), 415)
    assert (await client.delete(f"/v1/runs/{run}")).status == 204


async def test_the_base_model_of_an_ended_run_may_move_and_its_bytes_may_not_change(
    index_url: str, tmp_path: Path
) -> None:
    base, moved, outside = (tmp_path / name for name in ("models/base", "models/moved", "outside"))
    for part in load_model("tiny", dtype=torch.float32, seed=0):
        part.save_pretrained(base)
    async with serving(index_url, tmp_path, roots=[tmp_path / "models"]) as client:
        run = (
            await submitted(
                client, recipe={**TINY, "name": "moved", "model": {"source": str(base)}}
            )
        )["id"]
        await client.post(f"/v1/runs/{run}/stop")
        folder = tmp_path / "runs" / run
        folder.mkdir(parents=True, exist_ok=True)
        base_models.write(folder, {str(base): digests_of(base, base_models.model_files(base))})
        shutil.copytree(base, outside)
        base.rename(moved)

        async def resumed(source: Path, status: int) -> dict[str, Any]:
            body = {"overrides": {"model.source": str(source)}}
            response = await client.post(f"/v1/runs/{run}/resume", json=body)
            return await response.json() if status == 202 else await problem(response, status)

        refused = await resumed(outside, 422)
        assert [(each["field"], each["wrong"]) for each in refused["errors"]] == [
            ("model.source", "lies outside of what this server reads")
        ]
        weights = (moved / "model.safetensors").read_bytes()
        (moved / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
        (changed,) = (await resumed(moved, 422))["errors"]
        assert "'model.safetensors' has other bytes" in changed["wrong"]
        (moved / "model.safetensors").write_bytes(weights)
        assert (await resumed(moved, 202))["recipe"]["model"]["source"] == str(moved)
        await client.post(f"/v1/runs/{run}/stop")


async def test_a_run_goes_on_from_an_older_checkpoint_where_the_newest_is_damaged(
    client: Client, index_url: str, tmp_path: Path
) -> None:
    run = (await submitted(client))["id"]
    early = await problem(
        await client.post(f"/v1/runs/{run}/resume", json={"start_version": 1}), 409
    )
    assert (early["field"], early["fix"]) == ("start_version", "stop it first")
    await client.post(f"/v1/runs/{run}/stop")
    folder = tmp_path / "runs" / run / "checkpoints"
    for version in (2, 4):
        written(folder, version)
    (folder / "step-00000004" / "run.json").write_text("")
    listed = await (await client.get(f"/v1/runs/{run}/checkpoints")).json()
    assert [each["version"] for each in listed["checkpoints"]] == [2]
    damaged = await problem(await client.post(f"/v1/runs/{run}/resume"), 409)
    assert str(folder / "step-00000004" / "run.json") in damaged["detail"]
    unknown = await problem(
        await client.post(f"/v1/runs/{run}/resume", json={"start_version": 3}), 409
    )
    assert (unknown["type"], unknown["value"]) == ("urn:asyncdock:no-checkpoint", 3)
    await problem(await client.post(f"/v1/runs/{run}/resume", json={"start_version": -1}), 422)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000002", "step-00000004"]
    response = await client.post(f"/v1/runs/{run}/resume", json={"start_version": 2})
    assert (response.status, (await response.json())["state"]) == (202, "created")
    assert sorted(path.name for path in folder.iterdir()) == [
        "aside-step-00000004",
        "step-00000002",
    ]
    assert await CHECKPOINT_REPORTED.get(Index(index_url, run)) == 2, (
        "the runner does not look for a newer one"
    )
    await client.post(f"/v1/runs/{run}/stop")


async def test_a_run_is_deleted_by_its_owner_or_an_admin_only(
    index_url: str, tmp_path: Path
) -> None:
    tokens = Tokens(index_url)
    people: list[tuple[str, Scope]] = [
        ("ann", "run"),
        ("bob", "run"),
        ("root", "admin"),
        ("eve", "read"),
    ]
    ann, bob, root, eve = [bearer((await tokens.create(*person))[1]) for person in people]
    await tokens.close()
    async with serving(index_url, tmp_path, no_token=False) as client:
        runs = []
        for _ in range(2):
            response = await client.post("/v1/runs", json={"recipe": recipe()}, headers=ann)
            run = await response.json()
            assert run["owner"] == "ann"
            runs.append(f"/v1/runs/{run['id']}")
            assert (await client.post(f"{runs[-1]}/stop", headers=eve)).status == 403
            assert (await client.post(f"{runs[-1]}/stop", headers=ann)).status == 202
        assert (await client.delete(runs[0], headers=eve)).status == 403
        assert (await problem(await client.delete(runs[0], headers=bob), 403))[
            "type"
        ] == "urn:asyncdock:owner"
        assert (await client.delete(runs[0], headers=ann)).status == 204
        assert (await client.delete(runs[1], headers=root)).status == 204
        assert (await client.post("/v1/runs", json={"recipe": recipe()}, headers=eve)).status == 403


# --- files
# --------------------------------------------------------------------------------------------------


@pytest.fixture
async def run_with_files(client: Client, registry: Registry, tmp_path: Path) -> str:
    """A run that has logs and a link among them, and a file that must not be read beside its
    folder."""
    run = (await submitted(client))["id"]
    folder = tmp_path / "runs" / run / "logs"
    folder.mkdir(parents=True)
    for worker, offset in (("flow-0", 0), ("rollout-0", 1)):
        stamps = [f"2026-01-01T00:00:{2 * second + offset:02}Z" for second in range(20)]
        lines = [json.dumps({"timestamp": stamp, "worker": worker}) for stamp in stamps]
        (folder / f"{worker}.log").write_text(
            "\n".join(lines) + "\nTraceback redis://u:opensesame@host\n"
        )
    (tmp_path / "secret.log").write_text("secret\n")
    (folder / "link.log").symlink_to(tmp_path / "secret.log")
    return run


async def test_logs_are_one_workers_or_all_by_time(client: Client, run_with_files: str) -> None:
    logs = f"/v1/runs/{run_with_files}/logs"
    response = await client.get(logs, params={"worker": "flow-0", "lines": 3})
    assert response.content_type == "text/plain"
    text = await response.text()
    assert len(text.splitlines()) == 3
    assert "opensesame" not in text
    both = await (await client.get(logs, params={"lines": 6})).text()
    stamps = [json.loads(line)["timestamp"] for line in both.splitlines() if line.startswith("{")]
    assert stamps == sorted(stamps)
    assert {json.loads(line)["worker"] for line in both.splitlines() if line.startswith("{")} == {
        "flow-0",
        "rollout-0",
    }


@pytest.mark.parametrize(
    "worker",
    [
        "../../../secret",
        "..%2f..%2f..%2fsecret",
        "/etc/passwd",
        "link",
        "secret",
        "flow-0.log",
        "*",
        "%00",
    ],
)
async def test_only_logs_of_workers_are_read(
    client: Client, run_with_files: str, worker: str
) -> None:
    response = await client.get(f"/v1/runs/{run_with_files}/logs?worker={worker}")
    assert "flow-0" in (await problem(response, 404))["fix"]
    assert "secret\n" not in await (await client.get(f"/v1/runs/{run_with_files}/logs")).text()


async def test_the_end_of_a_long_log_is_read_without_the_rest(
    client: Client, run_with_files: str, tmp_path: Path
) -> None:
    path = tmp_path / "runs" / run_with_files / "logs" / "update-0.log"
    path.write_text("".join(f"{number:0200}\n" for number in range(20_000)))
    text = await (
        await client.get(f"/v1/runs/{run_with_files}/logs?worker=update-0&lines=5000")
    ).text()
    assert [int(line) for line in text.splitlines()] == list(range(15_000, 20_000))


async def test_whole_checkpoints_are_listed(
    client: Client, run_with_files: str, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / run_with_files / "checkpoints"
    for version in (3, 6):
        step = folder / f"step-{version:08d}"
        (step / "model").mkdir(parents=True)
        (step / "model" / "weights").write_bytes(b"x" * 100)
        (step / "run.json").write_text(
            json.dumps({"version": version, "counters": {}, "remake": []})
        )
    (folder / "step-00000009").mkdir()  # not whole yet
    answer = await (await client.get(f"/v1/runs/{run_with_files}/checkpoints")).json()
    assert [step["version"] for step in answer["checkpoints"]] == [3, 6]
    assert all(step["bytes"] > 100 for step in answer["checkpoints"])


async def test_the_newest_step_is_told_of_a_run(
    client: Client, registry: Registry, index_url: str, tmp_path: Path
) -> None:
    run = (await submitted(client))["id"]
    while (
        held := await registry.take("test", str(tmp_path), uuid.uuid4().hex, 60.0)
    ) and held.record.id != run:
        await registry.end(held.record.id, held.token, "stopped", "in the way")
    index = Index(index_url, run)
    for step in range(3):
        await index.emit(AnyEvent(kind="step", data={"step": step + 1, "reward_mean": step / 4}))
    for _ in range(5):
        await index.emit(AnyEvent(kind="stage", data={"stage": "update", "worker": "update-0"}))
    answer = await (await client.get(f"/v1/runs/{run}")).json()
    assert (answer["state"], answer["steps_done"], answer["reward"]) == ("starting", 3, 0.5)
    await index.close()


# --- recipes
# --------------------------------------------------------------------------------------------------


async def test_stored_recipes_are_listed_and_shown(client: Client) -> None:
    listed = (await (await client.get("/v1/recipes")).json())["recipes"]
    assert {"mock", "tiny", "quickstart"} <= {entry["name"] for entry in listed}
    assert all(entry["description"] for entry in listed)
    shown = await (await client.get("/v1/recipes/mock")).json()
    assert shown["recipe"]["model"] == {"source": "mock"}
    assert "did you mean 'mock'" in (await problem(await client.get("/v1/recipes/mok"), 404))["fix"]
    for path in ("..%2fmock", "%2fetc%2fpasswd", "..", ".mock"):
        assert (await client.get(f"/v1/recipes/{path}")).status in (400, 404)


async def test_the_schema_of_a_recipe_fits_the_recipes_there_are(client: Client) -> None:
    schema = await (await client.get("/v1/recipes/schema")).json()
    for name in ("mock", "tiny", "quickstart"):
        shown = await (await client.get(f"/v1/recipes/{name}")).json()
        jsonschema.validate(shown["recipe"], schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(recipe(train={"stepz": 1}), schema)


async def test_a_recipe_is_checked_without_being_run(client: Client) -> None:
    before = (await (await client.get("/v1/runs?limit=1")).json())["runs"]
    answer = await (await client.post("/v1/recipes/check", json={"recipe_name": "mock"})).json()
    assert answer["recipe"]["pipeline"]["window"] == 1
    assert answer["plan"]["groups_in_flight"] == 8
    assert [example["where"] for example in answer["examples"]] == ["row 1 of repeat"]
    assert (await (await client.get("/v1/runs?limit=1")).json())["runs"] == before
    await problem(await client.post("/v1/recipes/check", json={"recipe": {"name": "x"}}), 422)


def test_settings_are_checked_when_the_server_starts() -> None:
    with pytest.raises(ValueError, match="port"):
        Settings(data=Path(), port=70_000)
