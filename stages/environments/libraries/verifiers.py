"""Tasksets of ``verifiers``: ``environment.use = "verifiers:glossary"``.

row ─▶ task ─▶ the taskset's Env ─▶ Chat ─▶ verifiers' interception ─▶ session ─▶ policy
                 │                   └ tools: servers of the taskset, in processes of their own
                 └ its rewards, when the agent has ended ─▶ the reward of the trajectory
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from pipeline.compat.extras import extra
from stages.environments.programs.session import Session

with extra("verifiers"):
    import verifiers.v1 as vf

    from stages.environments.libraries.verifiers_chat import HARNESS

CHATS = ("bash", "null")  # harnesses of verifiers: a chat in a process of its own
LOCAL = {"type": "subprocess"}
NO_KEY = "ASYNCDOCK_NO_KEY"  # a variable that nobody sets
COLUMN = "task"  # of a row: which task of the taskset, by its place


class VerifiersTaskset:
    """The taskset ``name``. ``env``: what verifiers reads as ``[env]``. Raises LookupError for one
    that cannot be trained."""

    def __init__(self, name: str, env: Mapping[str, Any] | None = None) -> None:
        options = dict(env or {})
        options["taskset"] = {**options.get("taskset", {}), "id": name}
        fields = vf.env_config_type(name, options.get("id", "")).model_fields
        for seat, field in fields.items():
            if isinstance(field.default, vf.AgentConfig):
                harness = field.default.harness or vf.default_agent_harness(name)
                chat = {"harness": {"id": HARNESS}} if harness.id in CHATS else {}
                options[seat] = {"runtime": LOCAL, **chat, **options.get(seat, {})}
        self._config = vf.resolve_env_config(options)
        agents = {seat: each for seat, each in self._config if isinstance(each, vf.AgentConfig)}
        seats = [seat for seat, agent in agents.items() if agent.client is None]
        if len(seats) != 1:
            raise LookupError(
                f"the taskset {name!r} has the agents {seats}, and one is trained: give the others "
                "a client in environment.options.env"
            )
        [self._seat] = seats
        if vf.task_type(name).NEEDS_CONTAINER and agents[self._seat].runtime.type == "subprocess":
            raise LookupError(
                f"the tasks of {name!r} need a container: name a runtime in environment.options.env"
            )
        self._tasks = iter(vf.load_environment(self._config).taskset)
        self._loaded = list[vf.Task]()

    async def solve(self, row: dict[str, Any], session: Session) -> float:
        """Play the task of ``row``. Raises RuntimeError where verifiers reports an error."""
        key = {"x-api-key": session.api_key}
        client = vf.EvalClientConfig(base_url=session.base_url, api_key_var=NO_KEY, headers=key)
        env = vf.load_environment(self._config)
        async with env.serving():
            context = vf.ModelContext(session.model, client)
            episode = await env.run_episode(self._task(row), context)
        traces = [trace for trace in episode.traces if trace.agent.name == self._seat]
        errors = [*episode.errors, *itertools.chain(*(trace.errors for trace in traces))]
        if errors or len(traces) != 1:
            reasons = [f"{error.type}: {error.message}" for error in errors]
            raise RuntimeError("; ".join(reasons) or f"{self._seat!r} played {len(traces)} times")
        return float(traces[0].reward)

    def _task(self, row: Mapping[str, Any]) -> vf.Task:
        place = row.get(COLUMN)
        if not isinstance(place, int) or place < 0:
            raise LookupError(f"the row has {COLUMN} = {place!r}; give a task's place, from 0")
        missing = place + 1 - len(self._loaded)
        self._loaded += itertools.islice(self._tasks, max(0, missing))
        if place >= len(self._loaded):
            raise LookupError(f"the taskset has {len(self._loaded)} tasks, and no {place}")
        return self._loaded[place]
