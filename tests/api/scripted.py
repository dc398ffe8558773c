"""A run whose events are written down beforehand, for views and reports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from orchestration.recipe.loading.load import parse_recipe
from orchestration.recipe.schema import Recipe
from orchestration.run.execution import RunResult
from pipeline.data.events import Event

STEPS = 8
BOUND = 2
BEGIN = 1_700_000_000.0


def recipe() -> Recipe:
    return parse_recipe(
        {
            "name": "scripted",
            "model": {"source": "mock"},
            "prompts": {"source": "builtin", "task": "repeat", "max_prompt_tokens": 32},
            "rollout": {"engine": "mock"},
            "train": {"engine": "mock", "steps": STEPS},
            "pipeline": {"staleness": BOUND},
            "reward": {"functions": [{"name": "spelling"}]},
        }
    )


def event(time: float, kind: str, **data: Any) -> Event:
    return Event(id=f"{int(time * 1000)}-0", time=BEGIN + time, kind=kind, data=data)


def step(number: int, **changes: Any) -> Event:
    """The step after ``number`` others takes 2 s, is rewarded number/10, and brings 500 tokens."""
    data = {
        "step": number + 1,
        "version": number + 1,
        "reward_mean": number / 10,
        "reward_std": 0.1,
        "loss": -0.01 * number,
        "kl_behaviour": 0.001,
        "clip_fraction": 0.05,
        "ess": 0.97,
        "grad_norm": 0.5,
        "learning_rate": 1e-5,
        "staleness_mean": min(number, BOUND) / 2,
        "staleness_p95": float(min(number, BOUND)),
        "staleness_max": float(min(number, BOUND)),
        "tokens_generated": 600 + 500 * number,
        "tokens_trained": 500 + 500 * number,
        "tokens_filtered": 0,
        "rows": 32,
        "seconds": 2.0,
        "train_seconds": 1.2,
        "response_length_mean": 15.6,
    }
    return event(10 + 2 * number, "step", **data | changes)


def stage(
    time: float, worker: str, wall: float, busy: float, waiting: float, room: float, rows: int
) -> Event:
    kind = worker.rpartition("-")[0]
    return event(
        time,
        "stage",
        stage=kind,
        worker=worker,
        busy=busy,
        waiting_input=waiting,
        waiting_room=room,
        other=wall - busy - waiting - room,
        wall=wall,
        rows=rows,
        tokens=16 * rows,
        queue_depth=3,
        in_flight=12,
    )


def evaluation(time: float, version: int, reward: float, response: str) -> Event:
    prompt = "What is 2 | 3?\n*carefully*"
    samples = [{"prompt": prompt, "response": response, "reward": reward}]
    return event(
        time,
        "evaluation",
        version=version,
        step=version,
        reward_mean=reward,
        count=16,
        samples=samples,
        tokens=100,
        seconds=2.0,
        share=0.25,
    )


def events(ending: str = "finished", reason: str = "") -> list[Event]:
    """A run with one death, two evaluations, and ``ending``."""
    worker = {"stage": "rollout", "worker": "rollout-0", "pid": 7}
    script = [
        event(0, "state", state="starting", reason=""),
        event(0.1, "worker", **worker, change="started", reason=""),
        event(8, "worker", **worker, change="ready", reason=""),
        event(8, "state", state="running", reason=""),
        evaluation(9, 0, 0.1, "I think <b>6</b> | maybe"),
    ]
    for number in range(STEPS):
        at = 10 + 2 * number
        script += [
            stage(
                at - 0.5,
                "rollout-0",
                at - 8,
                (at - 8) * 0.7,
                (at - 8) * 0.2,
                (at - 8) * 0.05,
                40 * number,
            ),
            stage(at - 0.4, "update-0", at - 8, (at - 8) * 0.5, (at - 8) * 0.5, 0.0, 32 * number),
            step(number),
            event(
                at + 0.1,
                "sync",
                worker="update-0",
                version=number + 1,
                bytes=2**20,
                publish_seconds=0.05,
                exposed_seconds=0.0,
                hidden_seconds=0.0,
            ),
            event(
                at + 0.2,
                "sync",
                worker="rollout-0",
                version=number + 1,
                bytes=2**20,
                publish_seconds=0.0,
                exposed_seconds=0.002,
                hidden_seconds=0.3,
            ),
        ]
    counts = dict.fromkeys(("generated", "trained", "filtered", "remade", "in_flight"), 0)
    dropped = {
        "dropped": {"equal rewards": 3, "reward x failed": 1},
        "dropped_tokens": {"equal rewards": 1200},
    }
    ledger = {
        **counts,
        **{f"{name}_tokens": 0 for name in counts},
        "redelivered": 0,
        "skipped_steps": 2,
        **dropped,
    }
    script += [
        event(25.1, "ledger", **ledger),
        event(
            25.2,
            "prompt",
            change="epoch",
            reason="",
            epochs={"prompts.sources.0": 2, "prompts.sources.1": 5},
        ),
    ]
    died = {"reason": "ended by signal 9"}
    script += [
        event(26, "worker", **worker, change="died", **died),
        event(26.1, "worker", **worker, change="restarted", **died),
        evaluation(27, STEPS, 0.9, ""),
        event(28, "state", state=ending, reason=reason),
    ]
    return script


class ScriptedRun:
    """A run that only emits ``script``.

    With ``endless`` it goes on until it is stopped, and with ``deaf`` it does not even listen to
    that. ``failed``: the worker by which it fails.
    """

    def __init__(
        self,
        out_dir: Path,
        script: Sequence[Event],
        *,
        endless: bool = False,
        deaf: bool = False,
        failed: str = "",
    ) -> None:
        self.recipe = recipe()
        self.folder = SimpleNamespace(path=out_dir, begins=0, newest=lambda: None)
        self.script = script
        self.endless = endless
        self.deaf = deaf
        self.failed = failed
        self.waiting = asyncio.Event()  # execute has begun
        out_dir.mkdir(parents=True, exist_ok=True)

    joining = ""

    async def execute(self, stop: asyncio.Event | None = None) -> RunResult:
        last = self.script[-1].data
        state = last["state"]
        reason = last["reason"]
        self.waiting.set()
        if self.deaf:
            await asyncio.Event().wait()
        if self.endless:
            assert stop is not None
            await stop.wait()
            state = "stopped"
            reason = "stopped by request"
        return RunResult("scripted-1", state, reason, self.folder.path, None, self.failed)

    async def events(self, after: str = "0") -> AsyncIterator[Event]:
        for item in self.script:
            yield item
