"""The route by which programs outside of a run play its trajectories (docs/agents.md).

POST sessions ──▶ base_url, api_key, row ──▶ POST chat/completions … ──▶ POST reward, POST end
                   └──────────── the run's own server of sessions ────────────┘
"""

from __future__ import annotations

from typing import Any, cast

import aiohttp
from aiohttp import web
from pydantic import BaseModel, Field

from api.schemas.runs import RunPath
from api.server.http.problems import HTTPProblem
from api.server.service.operations import Strict, operation
from api.server.service.service import Service
from orchestration.state.documents import SESSIONS
from pipeline.data.events import LIVE, RunState

WAITING_SECONDS = 90.0  # for a request that may wait 60 seconds


class NextSession(Strict):
    wait: float = Field(30.0, ge=0, le=60, description="Seconds to wait for a trajectory.")


class SessionView(BaseModel):
    base_url: str = Field(description="Of the policy, as OpenAI's API has it, up to `/v1`.")
    api_key: str = Field(description="Good for this session alone.")
    seed: int = Field(description="Of random numbers: the same when the trajectory begins again.")
    row: dict[str, Any] = Field(description="The columns of the prompt's row.")


class NextSessionView(BaseModel):
    session: SessionView | None = Field(description="Null: no trajectory came in time.")
    state: RunState = Field(description="The run's: once it has ended, none come.")


@operation(
    "POST",
    "/v1/runs/{run}/sessions",
    scope="run",
    owned=True,
    tag="external stages",
    summary="The next trajectory for a program",
    errors=(404, 409),
    seconds=WAITING_SECONDS,
    body_optional=True,
)
async def next_session(
    service: Service, request: web.Request, path: RunPath, body: NextSession
) -> NextSessionView:
    """Take a trajectory of a run with `"sessions"` in `environment.use`: the program asks the policy
    at `base_url`, sets its reward by `POST {base_url}/reward` with `{"reward": 1.0}`, and ends it
    by `POST {base_url}/end`. A session that is silent for `environment.timeout` fails."""
    record = await service.registry.get(path.run)
    index = service.index(record.id)
    address = await SESSIONS.get(index)
    if address is None:
        raise HTTPProblem(
            409,
            f"The run has no sessions, or has not begun: its state is {record.state!r}.",
            kind="state",
            fix='start it with environment.use = "sessions", and ask again once it is running',
        )
    state = cast("RunState", (await index.state())[0])
    with service.held(request) as room:
        wait = body.wait if room else 0.0
        session = await _taken(address, wait) if state in LIVE else None
    return NextSessionView(session=session, state=state)


async def _taken(address: dict[str, str], wait: float) -> SessionView | None:
    """Ask the run's server for the next trajectory. None where it does not answer: the worker is
    being replaced."""
    headers = {"Authorization": f"Bearer {address['key']}"}
    timeout = aiohttp.ClientTimeout(total=wait + 10.0)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as client,
            client.post(address["url"], json={"wait": wait}, headers=headers) as answer,
        ):
            taken = (await answer.json())["session"] if answer.status == 200 else None
    except (aiohttp.ClientError, TimeoutError):
        return None
    return None if taken is None else SessionView.model_validate(taken)
