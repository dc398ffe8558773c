"""The table of runs, their notes and tags, and curves over each other, over REST."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from orchestration.comparison.compare import compare
from orchestration.comparison.results import read_run
from orchestration.comparison.view import as_curves, as_tables
from orchestration.service.folder_runs import FolderRuns
from orchestration.state.labels import Labels
from orchestration.state.registry import ReadOnly
from tests.api.serving import Client, problem, serving
from tests.orchestration.compared import STEPS, compared_runs


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return compared_runs(tmp_path_factory.mktemp("compared"))


@pytest.fixture
async def client(index_url: str, tmp_path: Path) -> AsyncGenerator[Client, None]:
    async with serving(index_url, tmp_path) as made:
        yield made


@pytest.fixture
async def runs(client: Client, folders: list[Path], tmp_path: Path) -> dict[str, Path]:
    """The runs in a service, by their ids there."""
    by_id = {}
    for folder in folders:
        recipe = json.loads((folder / "recipe.json").read_text())
        response = await client.post("/v1/runs", json={"recipe": recipe})
        run = (await response.json())["id"]
        by_id[run] = tmp_path / "runs" / run
        shutil.copytree(folder, by_id[run])
    return by_id


async def get(client: Client, path: str, **query: Any) -> Any:
    response = await client.get(path, params=query)
    assert response.status == 200, await response.text()
    return await response.json()


async def test_the_table_has_the_columns_that_are_asked_for(
    client: Client, runs: dict[str, Path]
) -> None:
    columns = ("train.learning_rate", "loss", "evaluation.reward_mean", "reward.functions.0.name")
    table = await get(client, "/v1/table", columns=",".join((*columns, "train.nothing")))
    rows = {row["id"]: row for row in table["rows"] if row["id"] in runs}
    for run, folder in runs.items():
        result = read_run(folder)
        assert rows[run]["values"] == [
            result.recipe["train.learning_rate"],
            result.steps["loss"][-1],
            result.evaluations["reward_mean"][-1],
            "spelling",
            None,
        ]
        assert (rows[run]["steps"], rows[run]["steps_done"]) == (STEPS, STEPS)
    assert {"seed", "train.learning_rate"} <= {*table["keys"]}
    assert {"loss", "evaluation.reward_mean"} <= {*table["metrics"]}
    details = await problem(await client.get("/v1/table?columns=a%20b"), 400)
    assert details["errors"][0]["field"].startswith("query.columns")


async def test_curves_are_those_of_the_folders(client: Client, runs: dict[str, Path]) -> None:
    comparison = compare([read_run(folder) for folder in runs.values()], ["loss"])
    for by in ("step", "tokens", "hours"):
        for fold in (False, True):
            query = {"metric": "loss", "by": by, "points": 5, "fold": str(fold).lower()}
            answer = await get(client, "/v1/compare", runs=",".join(runs), **query)
            assert answer["curves"] == as_curves(comparison, "loss", by, 5, fold=fold)
            tables = as_tables(comparison)
            assert answer["keys"] == tables["keys"]
            assert [one["results"] for one in answer["settings"]] == [
                one["results"] for one in tables["settings"]
            ]


async def test_a_curve_follows_its_run(client: Client, runs: dict[str, Path]) -> None:
    """Also where it was in memory already."""
    run, folder = next(iter(runs.items()))
    before = await get(client, "/v1/compare", runs=run)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines if '"kind":"step"' in line]
    last = steps[-1]
    last["data"] |= {"version": STEPS + 1, "step": STEPS + 1, "reward_mean": 0.75}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(last) + "\n")
    after = await get(client, "/v1/compare", runs=run)
    assert after["curves"][0]["y"] == [*before["curves"][0]["y"], 0.75]


async def test_what_cannot_be_compared_is_told(client: Client, runs: dict[str, Path]) -> None:
    run = next(iter(runs))
    await problem(await client.get("/v1/compare?runs=nobody"), 404)
    details = await problem(await client.get(f"/v1/compare?runs={run}&metric=rewad"), 422)
    assert (details["field"], details["value"]) == ("query.metric", "rewad")
    for query in (
        "",
        "runs=",
        f"runs={run}&points=1",
        f"runs={run}&points=2001",
        f"runs={'a,' * 301}",
    ):
        await problem(await client.get(f"/v1/compare?{query}"), 400)


async def test_notes_and_tags_stay_with_a_run(client: Client, runs: dict[str, Path]) -> None:
    run = next(iter(runs))
    body = {"tags": ["slow", "good", "good"], "notes": "the one to keep"}
    response = await client.patch(f"/v1/runs/{run}", json=body)
    assert response.status == 200
    response = await client.patch(f"/v1/runs/{run}", json={"notes": "not that one"})
    view = await response.json()
    assert (view["tags"], view["notes"]) == (["good", "slow"], "not that one")
    rows = (await get(client, "/v1/table"))["rows"]
    assert [row["tags"] for row in rows if row["id"] == run] == [["good", "slow"]]
    (compared,) = (await get(client, "/v1/compare", runs=run))["runs"]
    assert (compared["tags"], compared["notes"]) == (["good", "slow"], "not that one")
    await problem(await client.patch("/v1/runs/nobody", json={}), 404)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tags": ["two words"]}, "tags"),
        ({"tags": ["-good"]}, "tags"),
        ({"tags": ["a" * 41]}, "tags"),
        ({"tags": [f"tag{at}" for at in range(21)]}, "tags"),
        ({"notes": "a" * 4001}, "notes"),
    ],
)
async def test_labels_have_limits(
    client: Client, runs: dict[str, Path], body: dict[str, Any], field: str
) -> None:
    details = await problem(await client.patch(f"/v1/runs/{next(iter(runs))}", json=body), 422)
    errors = details.get("errors") or [details]
    assert errors[0]["field"] == field


async def test_a_view_finds_runs_that_come_and_go(
    index_url: str, folders: list[Path], tmp_path: Path
) -> None:
    """And changes none."""
    shutil.copytree(folders[0], tmp_path / "all" / "first")
    view = FolderRuns(index_url, [tmp_path / "all"], tmp_path / "copies")

    async def listed() -> list[str]:
        view.look_again()
        return sorted(record.id for record in await view.everything())

    assert await listed() == ["first"]
    shutil.copytree(folders[1], tmp_path / "all" / "deeper" / "second")
    assert await listed() == ["first", "second"]
    shutil.copytree(folders[2], tmp_path / "all" / "deeper" / "third")
    shutil.rmtree(tmp_path / "all" / "first")
    assert await listed() == ["second", "third"]
    with pytest.raises(ReadOnly):
        await view.label("second", Labels(("good",)))
    await view.close()
