"""Router replay of a model with experts: the gap between the engines with and without it, what it
costs, and what is learnt.

    engines   one process, equal weights: rows are generated, and their logprobs computed by the trainer with its own choices
              of experts and with the rollout's; seconds of both engines with and without the column, in turns; its bytes
    runs      real runs for each router, bound and seed: held-out score before and after, gap, agreement, seconds of a step

    python -m benchmarks.engines.moe [--recipe moe] [--engine torch] [--dtypes float32 bfloat16] [--tokens 48] [--repeats 5]
                                     [--routers own replay] [--staleness 0 2] [--seeds 0 1 2] [--set KEY=VALUE] [--json FILE]

``--engine vllm`` generates with vLLM, which returns no experts: there is a gap without replay
alone. Ratios are medians of those of neighbouring turns. Gaps of runs are means over the steps, of
all tokens and of those that the weights trained made.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks import harness
from benchmarks.runs.synchronous import _batch
from orchestration.logs import configure
from orchestration.recipe.flow import algorithm_of, flow_of
from orchestration.recipe.loading.load import load_recipe
from orchestration.recipe.models import tokenizer_of
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sizes.planner import prompt_limits
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from orchestration.workers.engines import rollout_engine, sampling_of, train_engine
from pipeline.data.blocks import pack
from stages.engines.protocols import Completion, GroupRequest, RolloutEngine
from stages.flow.catalogue import ROUTED
from stages.prompts.sources import load_prompts
from stages.rollout.stage import group_seed, responses

ONE_PROCESS = ["launch.launcher=inline", "train.dp=1", "train.ep=1"]


def requests(recipe: Recipe) -> list[GroupRequest]:
    """Those of a train step."""
    tokenizer = tokenizer_of(recipe)
    size = recipe.algorithm.group_size
    prompts = load_prompts(
        recipe.prompts, tokenizer, recipe.seed, limits=prompt_limits(recipe)
    ).train
    params = sampling_of(recipe, tokenizer)
    return [
        GroupRequest(
            group,
            tuple(range(size)),
            prompts.prompt(group).ids,
            params,
            group_seed(recipe.seed, group),
        )
        for group in range(recipe.train.groups_per_step)
    ]


async def generated(
    engine: RolloutEngine, asked: Sequence[GroupRequest]
) -> tuple[list[Completion], float]:
    """The responses, and the seconds that they took."""
    began = time.perf_counter()
    found = []
    async for done in engine.generate(asked):
        found.append(done)
    return sorted(found, key=lambda one: (one.group, one.place)), time.perf_counter() - began


def rows_of(asked: Sequence[GroupRequest], done: Sequence[Completion]) -> TensorDict:
    batch = _batch(list(done))
    prompts = {request.group: request.prompt_ids for request in asked}
    batch["prompt_ids"] = torch.nested.nested_tensor(
        [prompts[one.group] for one in done], layout=torch.jagged
    )
    batch["advantage"] = torch.randn(len(done), generator=torch.Generator().manual_seed(0))
    return batch


def gap_of(batch: TensorDict, logprobs: torch.Tensor) -> dict[str, float]:
    difference = torch.cat(list(logprobs.unbind())) - torch.cat(
        list(batch["rollout_logprobs"].unbind())
    )
    k3 = difference.exp() - 1 - difference
    return {
        "mean": float(difference.abs().mean()),
        "max": float(difference.abs().max()),
        "k3": float(k3.mean()),
    }


def bytes_of(recipe: Recipe, done: Sequence[Completion]) -> dict[str, float]:
    """Mean bytes of a sample's columns, as they are stored."""
    schema = flow_of(recipe).schema
    output = responses(range(len(done)), done)
    return {
        name: pack(schema, {name: rows}).nbytes / len(done) for name, rows in output.rows.items()
    }


def in_turns(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    return {
        "own": statistics.median(own for own, _ in pairs),
        "replay": statistics.median(replay for _, replay in pairs),
        "ratio": statistics.median(replay / own for own, replay in pairs),
    }


async def engines(options: argparse.Namespace, dtype: str) -> dict[str, Any]:
    routers = ["own"] if options.engine == "vllm" else ["own", "replay"]
    size = [
        f"rollout.max_tokens={options.tokens}",
        f"model.dtype={dtype}",
        f"rollout.engine={options.engine}",
    ]
    recipes = [
        load_recipe(options.path, [*options.set, *size, *ONE_PROCESS, f"train.router={r}"])
        for r in routers
    ]
    asked = requests(recipes[0])
    algorithm = algorithm_of(recipes[0])
    rollouts = [rollout_engine(recipe, version=0) for recipe in recipes]
    trainers = [train_engine(recipe) for recipe in recipes]
    batches: list[TensorDict] = []
    generating = []
    training = []
    try:
        done = [(await generated(rollout, asked))[0] for rollout in rollouts]
        batches = [rows_of(asked, some) for some in done]
        last = batches[-1]
        found: dict[str, Any] = {
            "dtype": dtype,
            "rows": len(last),
            "tokens": sum(map(len, last["response_ids"].unbind())),
        }
        found["gap own"] = gap_of(last, trainers[0].logprobs(last.exclude(ROUTED)))
        if len(routers) == 2:
            found["gap replay"] = gap_of(last, trainers[1].logprobs(last))
            found["bytes"] = bytes_of(recipes[1], done[1])
            found["agreement"] = trainers[1].train_batch(last, algorithm)["routing_agreement"]
            trainers[0].train_batch(batches[0], algorithm)
            for _ in range(options.repeats):
                generating.append([(await generated(rollout, asked))[1] for rollout in rollouts])
                training.append(
                    [seconds_of_step(*of, algorithm) for of in zip(trainers, batches, strict=True)]
                )
            found |= {"generate": in_turns(generating), "train": in_turns(training)}
        return found
    finally:
        for rollout in rollouts:
            await rollout.close()
        for trainer in trainers:
            trainer.close()


def seconds_of_step(trainer: Any, batch: TensorDict, algorithm: Any) -> float:
    began = time.perf_counter()
    trainer.train_batch(batch, algorithm)
    return time.perf_counter() - began


async def one_run(
    options: argparse.Namespace, router: str, staleness: int, seed: int
) -> dict[str, Any]:
    given = [f"pipeline.staleness={staleness}", f"seed={seed}", f"train.router={router}"]
    recipe = load_recipe(options.path, [*options.set, *given, f"rollout.engine={options.engine}"])
    steps = []
    held_out = dict[int, float]()
    with tempfile.TemporaryDirectory() as folder:
        run = Execution(RunFolder.create(recipe, Path(folder) / "run"))

        async def follow() -> None:
            async for event in run.events():
                if event.kind == "step":
                    steps.append(event.data)
                elif event.kind == "evaluation":
                    held_out[event.data["version"]] = event.data["reward_mean"]

        following = asyncio.create_task(follow())
        result = await run.execute()
        await following
    if result.state != "finished":
        raise RuntimeError(
            f"{router}, staleness {staleness}, seed {seed}: {result.state}: {result.reason}"
        )
    means = {
        name: statistics.fmean(values)
        for name in (
            "gap_mean",
            "gap_mean_0",
            "gap_k3",
            "routing_agreement",
            "max_expert_load",
            "train_seconds",
        )
        if (values := [step[name] for step in steps if name in step])
    }
    return {
        "router": router,
        "staleness": staleness,
        "seed": seed,
        "before": held_out[min(held_out)],
        "after": held_out[max(held_out)],
        "gap_max": max(step["gap_max"] for step in steps),
        "step_seconds": statistics.median(step["seconds"] for step in steps),
        **means,
    }


def show_engines(found: dict[str, Any]) -> None:
    print(
        f"\n{found['dtype']}: {found['rows']} rows, {found['tokens']} response tokens, equal "
        f"weights"
    )
    for router in ("own", "replay"):
        if gap := found.get(f"gap {router}"):
            print(
                f"| gap, {router} | mean {gap['mean']:.2e} | max {gap['max']:.2e} | k3 "
                f"{gap['k3']:.2e} |"
            )
    if "agreement" not in found:
        return
    print(f"| routing agreement | {found['agreement']:.4f} |")
    for what in ("generate", "train"):
        of = found[what]
        print(
            f"| {what} | own {of['own']:.3f} s | replay {of['replay']:.3f} s | ratio "
            f"{of['ratio']:.2f} |"
        )
    total = sum(found["bytes"].values())
    print(
        f"| bytes of a sample's response | {total:.0f} | of them {ROUTED} "
        f"{found['bytes'][ROUTED]:.0f} |"
    )


RUN = (
    "before",
    "after",
    "gap_mean",
    "gap_mean_0",
    "gap_max",
    "routing_agreement",
    "max_expert_load",
    "step_seconds",
)


def show_runs(runs: Sequence[dict[str, Any]]) -> None:
    print(f"\n| router | η | seed | {' | '.join(RUN)} | train_seconds |")
    for run in runs:
        cells = [f"{run[name]:.3g}" if name in run else "–" for name in (*RUN, "train_seconds")]
        print(f"| {run['router']} | {run['staleness']} | {run['seed']} | {' | '.join(cells)} |")


async def measure(options: argparse.Namespace) -> None:
    found: dict[str, Any] = {"engines": [], "runs": []}
    for dtype in options.dtypes:
        found["engines"].append(await engines(options, dtype))
        show_engines(found["engines"][-1])
    for staleness, router, seed in itertools.product(
        options.staleness, options.routers, options.seeds
    ):
        found["runs"].append(await one_run(options, router, staleness, seed))
        show_runs(found["runs"][-1:])
    if len(found["runs"]) > 1:
        show_runs(found["runs"])
    if options.json:
        options.json.write(found)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--recipe", default="moe", help="its name in recipes/")
    parser.add_argument("--engine", choices=("torch", "vllm"), default="torch")
    parser.add_argument(
        "--dtypes",
        nargs="*",
        default=["float32", "bfloat16"],
        help="of the first part; none: leave it out",
    )
    parser.add_argument(
        "--tokens", type=int, default=48, help="of a response in the first part, at most"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--routers", nargs="+", default=["own", "replay"])
    parser.add_argument(
        "--staleness", type=int, nargs="*", default=[0, 2], help="none: leave the runs out"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    options.path = Path("recipes") / f"{options.recipe}.toml"
    configure()
    asyncio.run(measure(options))


if __name__ == "__main__":
    main()
