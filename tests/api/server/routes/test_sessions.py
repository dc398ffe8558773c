"""Trajectories for programs outside, by REST: the run's own server of sessions is real."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from orchestration.state.documents import SESSIONS
from pipeline.index.client import Index
from stages.environments.programs.endpoint import Endpoint
from stages.environments.programs.exchange import Exchange
from stages.environments.programs.session import Session
from tests.api.serving import problem, serving


async def test_a_program_takes_a_trajectory_sets_its_reward_and_ends_it(
    index_url: str, tmp_path: Path
) -> None:
    async with serving(index_url, tmp_path) as client:
        run = (await (await client.post("/v1/runs", json={"recipe_name": "mock"})).json())["id"]
        path = f"/v1/runs/{run}/sessions"
        details = await problem(await client.post(path, json={"wait": 0}), 409)
        assert "environment.use" in details["fix"]
        await problem(await client.post("/v1/runs/none/sessions", json={}), 404)
        await problem(await client.post(path, json={"wait": 61}), 422)
        endpoint = Endpoint(key="a-key")
        url = await endpoint.begin()
        index = Index(index_url, run)
        await SESSIONS.put(index, {"url": f"{url}/sessions", "key": "a-key"})
        await index.transition(["", "created"], "starting")
        assert (await (await client.post(path, json={"wait": 0})).json())["session"] is None
        exchange = Exchange()
        session = Session(await endpoint.open(exchange), exchange.key, 7)
        offered = asyncio.create_task(endpoint.offers.offer({"prompt": "Hi", "n": 3}, session))
        answer = await (await client.post(path, json={"wait": 5})).json()
        assert answer["state"] == "starting"
        assert answer["session"] == {
            "base_url": url,
            "api_key": exchange.key,
            "seed": 7,
            "row": {"prompt": "Hi", "n": 3},
        }
        async with aiohttp.ClientSession() as program:

            async def post(path: str, body: object, key: str = exchange.key) -> int:
                headers = {"Authorization": f"Bearer {key}"}
                async with program.post(f"{url}/{path}", json=body, headers=headers) as done:
                    return done.status

            assert await post("sessions", {}, "another") == 401
            assert await post("reward", {"reward": 1}, "another") == 401
            for wrong in ({"reward": "much"}, {"reward": None}, {}, [], {"reward": True}):
                assert await post("reward", wrong) == 400
            assert await post("reward", {"reward": 0.5}) == 200
            assert await post("end", {}) == 200
            await offered
            assert await post("end", {}) == 401
        assert session.reward == 0.5
        await endpoint.end()
        assert (await (await client.post(path, json={"wait": 0})).json())["session"] is None
        await index.transition(["starting"], "failed", "a test")
        await index.close()


async def test_a_trajectory_whose_opening_was_given_up_is_offered_no_more() -> None:
    endpoint = Endpoint(key="a-key")
    waiting = [
        asyncio.create_task(endpoint.offers.offer({"n": n}, Session("", f"key {n}", n)))
        for n in range(3)
    ]
    await asyncio.sleep(0)
    waiting[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]
    taken = [await endpoint.offers.take(0.05) for _ in range(3)]
    assert [offer and offer.row["n"] for offer in taken] == [1, 2, None]
    for task in waiting[1:]:
        task.cancel()


async def test_a_program_that_takes_a_trajectory_and_asks_nothing_loses_it() -> None:
    endpoint = Endpoint(key="a-key", patience=0.05)
    exchange = Exchange()
    session = Session(await endpoint.open(exchange), exchange.key, 0)
    offered = asyncio.create_task(endpoint.offers.offer({}, session))
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer a-key"}) as client:
        async with client.post(f"{session.base_url}/sessions", json={"wait": 5}) as answer:
            assert (await answer.json())["session"]["api_key"] == exchange.key
        with pytest.raises(TimeoutError, match=r"asked nothing for 0\.05 s"):
            await offered
    await endpoint.end()
