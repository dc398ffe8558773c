"""``asyncdock env try``: one trajectory of an environment, turn by turn, before any run; or the
evaluation of a model in it.

USE, --model, --set ─▶ recipe ─▶ prompt ─▶ advance ─▶ a turn ─▶ advance ─▶ … ─▶ its ending and its reward
                          │                   └──────────┴─▶ a record each ─▶ a line of JSON, or the terminal
                          └─▶ --held-out: its evaluation, one record
"""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from api.cli.common.exit_codes import FAILED
from api.cli.common.options import SetOption
from api.cli.common.output import print_json, refuse
from api.cli.common.recipe_files import complete_recipe, find, stored
from api.terminal.screen import safe_console

if TYPE_CHECKING:
    from orchestration.recipe.schema import Recipe
    from pipeline.data.events import EvaluationEvent
    from stages.model.load import Tokenizer
    from stages.prompts.formatter import Prompt
    from stages.prompts.sources import PromptSplit
    from stages.rollout.evaluate import Evaluator
    from stages.trajectories.trajectory import Trajectories

# of a recipe that is made for an environment without one
DEFAULTS = (
    'reward.functions=[{name="environment"}]',
    "prompts.max_prompt_tokens=256",
    "rollout.max_tokens=64",
)
ENDINGS = {  # by the name of an Ending
    "done": "its environment says that it is over",
    "turns": "environment.max_turns is reached",
    "tokens": "a further turn has no room in environment.max_tokens",
    "truncated": "the turn was cut at rollout.max_tokens",
    "timeout": "environment.trajectory_timeout is over",
}
EVALUATED = ("count", "reward_mean", "functions", "failed", "absent", "reason", "tokens", "seconds")
Record = dict[str, Any]
Show = Callable[[Record], None]

env_app = typer.Typer(help="Try an environment before a run.", no_args_is_help=True)


@env_app.command("try")
def env_try(
    use: Annotated[
        str,
        typer.Argument(
            metavar="USE",
            help="A recipe with an environment; or what environment.use takes, as my_env:Sums.",
            autocompletion=complete_recipe,
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="What model.source takes, as a checkpoint's folder; or the TOML file of a recipe, "
            "for an environment that has none.",
        ),
    ] = "",
    prompt: Annotated[
        int, typer.Option("--prompt", min=0, metavar="N", help="The number of the recipe's prompt.")
    ] = 0,
    row: Annotated[
        str,
        typer.Option(
            "--row",
            metavar="JSON",
            help="""A row in its place, as '{"prompt": "3+4?", "answer": 7}'.""",
        ),
    ] = "",
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Take the likeliest tokens, as evaluations do.")
    ] = False,
    held_out: Annotated[
        int,
        typer.Option(
            "--held-out",
            min=0,
            metavar="N",
            help="Evaluate the model on the first N held-out prompts instead, as a run does.",
        ),
    ] = 0,
    set_: SetOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON for each part of the trajectory.")
    ] = False,
) -> None:
    """Play one trajectory, and print its tokens turn by turn: those that are trained, and pale those
    that are not; or evaluate a model on held-out prompts. A plain environment is called in this
    process, where a debugger works."""
    from pipeline.problems import ProblemError
    from stages.environments.interface import EnvironmentFailed
    from stages.rewards.registry import RewardError

    show = print_json if as_json else _show
    try:
        recipe = _recipe(use, model, row, set_)
        if held_out and not recipe.prompts.held_out:
            refuse("--held-out: the recipe holds nothing out; add --set prompts.held_out=0.1")
        asyncio.run(_play(recipe, prompt, row, greedy, held_out, show))
    except EnvironmentFailed as failed:
        place = f" ({failed.place})" if failed.place else ""
        refuse(f"the environment failed: {failed}{place}", FAILED)
    except (ProblemError, RewardError) as error:
        refuse(error)


def _recipe(use: str, model: str, row: str, set_: list[str] | None) -> Recipe:
    """Return the recipe that ``use`` names, or one for the environment ``use``."""
    from orchestration.recipe.loading.load import SHIPPED, parse_recipe, read_recipe

    overrides = ["evaluate.every=0"]
    if Path(use).is_file() or use in stored():
        path = find(use)
    else:
        overrides.append(f"environment.use={json.dumps(use)}")
        path = Path(model)
        if not path.is_file():
            if not model or not row:
                fix = """give --model, and the row by --row '{"prompt": "…"}'; or the TOML file """
                refuse(f"{use!r} is no recipe, and an environment needs both: {fix}of a recipe")
            path = SHIPPED / "tiny.toml"
            overrides += DEFAULTS
    if model and Path(model) != path:
        overrides.append(f"model.source={json.dumps(model)}")
    tables, problems = read_recipe(path, [*overrides, *(set_ or [])])
    recipe = parse_recipe(tables, where=use, problems=problems)
    if len(recipe.environment.uses) == len(recipe.environment.outside):
        refuse(f"environment.use: {path} has none to be tried; give a class or a program")
    return recipe


async def _play(
    recipe: Recipe, number: int, row: str, greedy: bool, held_out: int, show: Show
) -> None:
    from orchestration.environments.trajectories import make_caller, make_trajectories
    from orchestration.recipe.flow import trajectory_reads
    from orchestration.recipe.models import tokenizer_of
    from orchestration.rewards.functions import reward_set
    from orchestration.workers.engines import rollout_engine, sampling_of
    from stages.environments.interface import Declarations
    from stages.rollout.evaluate import Evaluator
    from stages.trajectories.evaluate import PlayingEvaluator

    tokenizer = tokenizer_of(recipe)
    async with AsyncExitStack() as resources:
        folder = resources.enter_context(tempfile.TemporaryDirectory(prefix="asyncdock-try-"))
        log = Path(folder) / "environments.log"
        places = recipe.rollout.max_rows if held_out else 1
        caller = make_caller(recipe, places, log, inline=not recipe.environment.sandbox)
        resources.push_async_callback(caller.end)
        declared = Declarations(await caller.declare())
        trajectories = make_trajectories(recipe, tokenizer, caller, declared)
        params = trajectories.sampling(sampling_of(recipe, tokenizer))
        rewards = reward_set(recipe, end_tokens=params.stop_token_ids)
        engine = rollout_engine(recipe, version=0)
        resources.push_async_callback(engine.close)
        reads = trajectory_reads(recipe)
        if held_out:
            evaluator = PlayingEvaluator(
                engine,
                params,
                rewards,
                tokenizer,
                _held_out_prompts(recipe, tokenizer, trajectories, held_out),
                recipe.evaluate.samples,
                rows=places,
                reads=reads,
                is_sampled=recipe.evaluate.sampling == "rollout" and not greedy,
                trajectories=trajectories,
            )
            show(_evaluation(await evaluator.run(engine.version), recipe.model.source))
            return
        if greedy:
            params = params.greedy()
        prompt = _prompt(recipe, tokenizer, trajectories, number, row)
        player = Evaluator(engine, params, rewards, tokenizer, [prompt], 1, reads=reads)
        async for record in _records(player, trajectories, number):
            show(record)


def _prompt(
    recipe: Recipe, tokenizer: Tokenizer, trajectories: Trajectories, number: int, row: str
) -> Prompt:
    """Return the prompt of ``row``, JSON, or else the recipe's prompt ``number``."""
    from orchestration.recipe.sizes.planner import prompt_limits
    from stages.prompts.formatter import PromptFormatter

    if not row:
        return _prompts(recipe, tokenizer, trajectories).train.prompt(number)
    try:
        columns = dict(json.loads(row))
    except (TypeError, ValueError) as error:
        refuse(f"--row: {row!r} is no JSON object ({error})")
    part = next(iter(recipe.prompts.parts().values()))
    formatter = PromptFormatter(part, tokenizer, prompt_limits(recipe), trajectories.dialogues)
    return formatter.prompt(columns, "--row")


def _prompts(recipe: Recipe, tokenizer: Tokenizer, trajectories: Trajectories) -> PromptSplit:
    from orchestration.recipe.sizes.planner import prompt_limits
    from stages.prompts.sources import load_prompts

    limits = prompt_limits(recipe)
    opens = trajectories.dialogues
    return load_prompts(recipe.prompts, tokenizer, recipe.seed, limits=limits, opens=opens)


def _held_out_prompts(
    recipe: Recipe, tokenizer: Tokenizer, trajectories: Trajectories, count: int
) -> list[Prompt]:
    """Return the first ``count`` that the run's evaluations answer."""
    from stages.rollout.evaluate import distinct_prompts

    source = _prompts(recipe, tokenizer, trajectories).held_out
    assert source is not None, "prompts.held_out is above 0"
    return distinct_prompts(source, count, by_row=True)


def _evaluation(event: EvaluationEvent, model: str) -> Record:
    """Return the facts of ``event`` that do not depend on a run."""
    facts = {name: fact for name in EVALUATED if (fact := getattr(event, name)) not in ("", {})}
    samples = [asdict(answer) for answer in event.samples]
    return {"kind": "evaluation", "model": model, **facts, "samples": samples}


async def _records(
    evaluator: Evaluator, trajectories: Trajectories, number: int
) -> AsyncIterator[Record]:
    """Play a trajectory, and yield its prompt, its turns, what the environment answers, its end.

    The tokens of answers and turns together are the row's ``response_ids``. Where a program has gone
    back, the answer says behind how many of them it goes on (``branch_behind``).
    """
    from stages.engines.protocols import GroupRequest
    from stages.rollout.evaluate import score_attempts
    from stages.rollout.stage import group_seed
    from stages.trajectories.evaluate import attempt_of
    from stages.trajectories.play import make_turns
    from stages.trajectories.trajectory import Episode

    tokenizer = evaluator.tokenizer
    [prompt] = evaluator.prompts

    def part(kind: str, token_ids: list[int], *, trained: bool = False, **facts: Any) -> Record:
        return {
            "kind": kind,
            "tokens": len(token_ids),
            "trained": trained,
            **{name: fact for name, fact in facts.items() if fact or isinstance(fact, float)},
            "token_ids": token_ids,
            "pieces": [str(tokenizer.decode([token])) for token in token_ids],
            "text": str(tokenizer.decode(token_ids)),
        }

    yield part("prompt", prompt.ids.tolist())
    seed = group_seed(trajectories.seed, number)
    request = GroupRequest(number, (0,), prompt.ids, evaluator.params, seed)
    episode = Episode(trajectories, 0, number, 0, prompt.row)
    seen = trajectories.seen
    try:
        while True:
            branches = len(episode.progress.branches)
            observed_before = seen.observed_tokens
            began = time.monotonic()
            await episode.advance()
            seconds = time.monotonic() - began
            progress = episode.progress
            end = len(progress.token_ids)
            observed = seen.observed_tokens - observed_before
            turn = episode.turn
            reward = progress.turn_reward[-1] if progress.turn_reward else math.nan
            yield part(
                "environment",
                progress.token_ids[end - observed :],
                branch_behind=f"{progress.tree()[-1].depth} tokens"
                if len(progress.branches) > branches
                else "",
                calls=[each["function"] for each in turn.message.get("tool_calls") or ()]
                if turn
                else [],
                unreadable=turn.fault if turn else "",
                failed_calls=episode.reply.failed_calls,
                reward=None if math.isnan(reward) else reward,
                seconds=seconds,
            )
            if episode.ending is not None:
                break
            began = time.monotonic()
            await make_turns(evaluator.engine, [request], {(number, 0): episode})
            seconds = time.monotonic() - began
            start = progress.turn_starts[-1]
            logprobs = progress.logprobs[start:]
            turn_ids = progress.token_ids[start:]
            cut = progress.truncated
            yield part(
                "turn", turn_ids, trained=True, truncated=cut, seconds=seconds, logprobs=logprobs
            )
    finally:
        await episode.close()
    scores = await score_attempts(evaluator, [attempt_of(evaluator, 0, episode)])
    yield {
        "kind": "end",
        "ending": episode.ending.name.lower(),
        "turns": len(progress.turn_starts),
        "tokens": len(progress.token_ids),
        "trained_tokens": progress.generated[1],
        "reward": float(scores.total[0]) if bool(scores.counted[0]) else None,
        "functions": scores.means(evaluator.rewards.names),
    }


def _show(record: Record) -> None:
    """Print a record: what it is, and its text, pale where it is not trained."""
    facts = [record["kind"]]
    for name, fact in record.items():
        match name:
            case "kind" | "token_ids" | "pieces" | "logprobs" | "text" | "samples":
                continue
            case "trained":
                facts.append("trained" if fact else "masked")
            case "ending":
                facts.append(f"{fact}: {ENDINGS[fact]}")
            case "calls":
                facts += [
                    f"{each.get('name')}({json.dumps(each.get('arguments'))})" for each in fact
                ]
            case "functions":
                facts += [f"{function} {_number(score)}" for function, score in fact.items()]
            case _:
                facts.append(f"{name.replace('_', ' ')} {_number(fact)}")
    screen = safe_console()
    screen.print(Text(" · ".join(facts), style="bold"))
    if record.get("text"):
        style = "green" if record["trained"] else "dim"
        screen.print(Text(indent(record["text"], "  "), style=style, overflow="fold"))
    for answer in record.get("samples", ()):
        answered = f"{answer['prompt']} · reward {_number(answer['reward'])}"
        screen.print(Text(indent(answered, "  "), style="bold", overflow="fold"))
        screen.print(Text(indent(answer["response"], "    "), style="green", overflow="fold"))


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else "none" if value is None else str(value)
