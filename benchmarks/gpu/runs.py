"""Parts that are whole runs: GRPO in turns on one device, and the recipe `tiny`, apart and in
turns."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from benchmarks.gpu.work import Figure, Setting
from benchmarks.runs import colocated
from benchmarks.runs.executed import executed
from orchestration.recipe.loading.load import load_recipe
from stages.model.load import tiny_tokenizer

RECIPES = Path(__file__).parents[2] / "recipes"
ENDS = 5  # number of steps at each end; their mean rewards are compared


async def colocated_runs(setting: Setting) -> AsyncIterator[list[Figure]]:
    """Colocated GRPO runs of the large model, with weights read from a folder."""
    device = setting.device.type
    small = setting.small
    with tempfile.TemporaryDirectory(prefix="asyncdock-gpu-check-") as folder:
        setting.model().save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        changes: colocated.Changes = {
            "model": {"dtype": str(setting.dtype).removeprefix("torch.")},
            "rollout": {"device": device, "max_rows": 64, "max_tokens": 4 if small else 256},
            "train": {
                "device": device,
                "groups_per_step": 2 if small else 8,
                "token_budget": 16384,
            },
            "pipeline": {"arena": "128MiB"},
        }
        for arm in ("colocated", "colocated, prefetch"):
            launcher, steps = ("inline", 3) if small else ("process", 8)
            measured = await colocated.measure(
                arm, colocated.recipe_of(arm, folder, steps, launcher, changes)
            )
            yield [
                Figure(f"{arm}: step", measured.step_seconds, "s"),
                Figure(f"{arm}: exposed", measured.exposed, "s"),
                Figure(f"{arm}: hidden", measured.hidden, "s"),
                Figure(f"{arm}: training", measured.training / 1e6, "MB", timed=False),
                Figure(f"{arm}: generating", measured.generating / 1e6, "MB", timed=False),
                Figure(f"{arm}: released", measured.released / 1e6, "MB", timed=False),
            ]


def tiny_run(placement: str) -> Callable[[Setting], AsyncIterator[list[Figure]]]:
    """Return the part that runs the recipe `tiny` with both stages on the device, by
    ``launch.placement``."""

    async def run(setting: Setting) -> AsyncIterator[list[Figure]]:
        device = setting.device.type
        steps = 2 * ENDS if setting.small else 80
        changes = [
            f"launch.placement={placement}",
            f"rollout.device={device}",
            f"train.device={device}",
            f"train.steps={steps}",
            f"checkpoint.every={steps}",
            *(["launch.launcher=inline"] if setting.small else []),
        ]
        with tempfile.TemporaryDirectory(prefix="asyncdock-gpu-check-") as home:
            recipe = load_recipe(RECIPES / "tiny.toml", changes)
            events = await executed(recipe, Path(home) / "run")
        of_steps = [event for event in events if event.kind == "step"]
        rewards = [event.data["reward_mean"] for event in of_steps]
        first, last = (statistics.fmean(ends) for ends in (rewards[:ENDS], rewards[-ENDS:]))
        seconds = of_steps[-1].time - of_steps[0].time
        tokens = of_steps[-1].data["tokens_generated"] - of_steps[0].data["tokens_generated"]
        name = f"tiny, {placement}"
        yield [
            Figure(f"{name}: speed", tokens / seconds, "tokens/s"),
            Figure(f"{name}: reward, first steps", first, "mean", timed=False),
            Figure(f"{name}: reward, last steps", last, "mean", timed=False),
            Figure(
                f"{name}: reward lost",
                max(0.0, first - last),
                "mean",
                limit=None if setting.small else 0.0,
                timed=False,
            ),
        ]

    return run
