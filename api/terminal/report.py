"""Report of a run in its folder: all events, a summary, a plot, and samples before and after.

    events ──live──▶ metrics.jsonl ──at the end──▶ summary.json  reward.png  samples.md

The report is made from ``metrics.jsonl``, so a resumed run is reported as one.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from api.telemetry.progress import Progress, StepPoint
from api.terminal.numbers import counted, duration, lost_text, number, unscored
from api.terminal.screen import pairs_table
from orchestration.disk import replacing
from orchestration.history.events_file import METRICS, read_metrics
from orchestration.history.lines import finite
from orchestration.history.totals import shares
from orchestration.recipe.flow import device_count
from orchestration.recipe.schema import Recipe
from pipeline.compat.extras import ExtraMissing, extra
from pipeline.data.events import EvaluationEvent, Event
from stages.prompts.too_long import TOO_LONG_FILE

SUMMARY = "summary.json"
PLOT = "reward.png"
SAMPLES = "samples.md"
MOST_ALARMS = 5  # newest ones that the table shows
SAMPLES_COUNTED = ("generated", "trained", "filtered", "remade", "in_flight")  # of the ledger
ENDS = 5  # steps at each end of a run that the summary compares
# Okabe and Ito's colours, which the colour-blind can distinguish.
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
RED = "#D55E00"
GREY = "#7F7F7F"


@dataclass(frozen=True)
class Report:
    """The files written and the summary.

    ``missing``: files that could not be made, and why; ``notes``: remarks for the user.
    """

    summary: dict[str, Any]
    files: list[Path]
    missing: list[str]
    notes: list[str]


def write_report(
    out_dir: Path, recipe: Recipe, *, checkpoint: Path | None, saved: int = 0
) -> Report:
    """Make the summary, the plot and the samples of the run in ``out_dir`` from its metrics.

    ``checkpoint`` is the model that it made, ``saved`` the steps that its newest checkpoint holds.
    """
    progress = progress_of(recipe, read_metrics(out_dir / METRICS))
    summary = summarize(progress, checkpoint=checkpoint)
    summary["resume_after_step"] = None if progress.state == "finished" else saved
    files = list[Path]()
    missing = list[str]()

    def written(name: str, write: Callable[[Path], object]) -> None:
        path = out_dir / name
        try:
            with replacing(path, 0) as partial:
                write(partial)
            files.append(path)
        except (ExtraMissing, OSError) as error:
            missing.append(f"{name}: {error.strerror if isinstance(error, OSError) else error}")

    written(
        SUMMARY,
        lambda path: path.write_text(
            json.dumps(finite(summary), indent=2) + "\n", encoding="utf-8"
        ),
    )
    if progress.evaluations:
        written(SAMPLES, lambda path: path.write_text(samples_markdown(progress), encoding="utf-8"))
    if progress.last:
        written(PLOT, lambda path: write_plot(path, progress))
    return Report(summary, [*files, out_dir / METRICS], missing, notes_of(progress, summary))


def progress_of(recipe: Recipe, events: Iterable[Event]) -> Progress:
    """Return how far a run of ``recipe`` is after ``events``."""
    progress = Progress(
        recipe.name, recipe.train.steps, recipe.pipeline.staleness, device_count(recipe)
    )
    for event in events:
        progress.apply(event)
    return progress


def notes_of(progress: Progress, summary: Mapping[str, Any]) -> list[str]:
    """Return remarks on several reward functions, and one when all rewards were equal: every
    advantage was 0 then, and the steps have trained nothing."""
    history = progress.history
    rewards = {reward for point in history for reward in (point.reward_low, point.reward_high)}
    are_equal = all(point.equal_rewards and point.rewarded == point.steps for point in history)
    if len(rewards) != 1 or not are_equal:
        if not functions_text(summary["rewards"]):
            return []
        from api.terminal.reward_notes import reward_notes

        return reward_notes(summary["rewards"], summary["steps_compared"])
    scaled = ""
    if summary["last_step"].get("learning_rate") == 0:
        scaled = ", and the learning rate was 0 (algorithm.options.scale_learning_rate)"
    return [
        f"Every reward was {number(rewards.pop(), '.4g')}, in all {progress.steps_done} steps: "
        f"there was nothing to learn from{scaled}. See what the reward function returns, and "
        f"whether the responses can earn more (rollout.max_tokens, prompts.template)."
    ]


def log_of(out_dir: Path, worker: str) -> Path | None:
    """Return the log of ``worker``, or the folder of all logs; None where there is none, as with
    the launcher ``inline``."""
    logs = out_dir / "logs"
    if (log := logs / f"{worker}.log").is_file():
        return log
    return logs if logs.is_dir() else None


# --------------------------------------------------------------------------------------------------
# The summary


def summarize(progress: Progress, *, checkpoint: Path | None) -> dict[str, Any]:
    """Return the run in numbers, as ``summary.json`` keeps them."""
    history = progress.history
    rewards = progress.rewards()
    last = progress.last
    steps = sum(point.steps for point in history)
    compared = min(ENDS, -(-steps // 2))  # a short run's two ends must not be the same steps
    first = _mean(rewards[:compared])
    ending = history[len(history) - compared :]
    final = _mean([point.reward_mean for point in ending])
    evaluations = progress.evaluated.points
    stepping = progress.stepping_seconds
    stale = math.fsum(point.staleness_sum for point in history)
    generated = last.tokens_generated - history[0].tokens_generated if last else 0
    speed = generated / stepping if stepping > 0 and generated > 0 else progress.tokens_per_second
    stage, share = progress.busiest(recent=False) or (None, None)
    return {
        "name": progress.name,
        "state": progress.state,
        "reason": progress.reason,
        "steps": progress.steps_done,
        "steps_planned": progress.steps,
        "seconds": progress.elapsed,
        "started": progress.began,
        "ended": progress.now,
        "seconds_per_step": progress.median_step_seconds,
        "reward_first_steps": first,
        "reward_last_steps": final,
        "reward_gain": None if first is None or final is None else final - first,
        "rewards": {
            name: {
                "first_steps": _mean_of(history[:compared], name, "mean"),
                "last_steps": _mean_of(ending, name, "mean"),
                **{stat: _mean_of(ending, name, stat) for stat in ("std", "share", "correlation")},
                **calls,
            }
            for name, calls in progress.reward_calls.items()
        },
        "reward_failed": sum(step.reward_failed for step in history),
        "reward_absent": sum(step.reward_absent for step in history),
        "steps_compared": compared,
        "last_step": {} if last is None else dict(last.metrics),
        "held_out_first": evaluations[0].event.reward_mean if evaluations else None,
        "held_out_last": evaluations[-1].event.reward_mean if evaluations else None,
        "evaluation": {
            "count": sum(point.count for point in evaluations),
            "missed": sum(point.missed for point in evaluations),
            "rows": sum(point.answers for point in evaluations),
            "failed": sum(point.failed for point in evaluations),
            "absent": sum(point.absent for point in evaluations),
            "tokens": sum(point.tokens for point in evaluations),
            "seconds": sum(point.seconds for point in evaluations),
            "engine_seconds": sum(point.engine_seconds for point in evaluations),
        },
        "samples": {name: getattr(progress.ledger, name, 0) for name in SAMPLES_COUNTED},
        **{f"tokens_{name}": tokens for name, tokens in progress.tokens.items()},
        "tokens_per_second": speed,
        "devices": progress.devices,
        "tokens_per_second_per_device": None if speed is None else speed / progress.devices,
        "busiest_stage": stage,
        "busiest_share": share,
        "trajectories": _trajectories(progress),
        "drafts": progress.drafts,
        "staleness_mean": stale / steps if steps else None,
        "staleness_max": progress.staleness_max(),
        "staleness_bound": progress.bound,
        "restarts": progress.restarts,
        "alarms": [
            {"step": alarm.step, "metric": alarm.metric, "reason": alarm.reason, "look": alarm.look}
            for _, alarm in progress.alarms
        ],
        "prompts_skipped": progress.prompts_skipped,
        "prompts_cut": progress.prompts_cut,
        "epochs": progress.epochs,
        "dropped": {
            reason: {"groups": totals[0], "tokens": totals[1]}
            for reason, totals in progress.dropped.items()
        },
        "skipped_steps": progress.ledger.skipped_steps if progress.ledger else 0,
        "stages": {
            name: {
                **shares(worker.totals),
                "rows": worker.totals["rows"],
                "tokens": worker.totals["tokens"],
            }
            for name, worker in progress.workers.items()
        },
        "checkpoint": None if checkpoint is None else str(checkpoint),
    }


def summary_table(summary: Mapping[str, Any]) -> Table:
    """Return the summary as a table."""
    compared = summary["steps_compared"]
    ends = "mean of the first and last " + ("step" if compared == 1 else f"{compared} steps")
    gain = summary["reward_gain"]
    first = number(summary["reward_first_steps"], ".3f")
    last = number(summary["reward_last_steps"], ".3f")
    before = number(summary["held_out_first"], ".3f")
    after = number(summary["held_out_last"], ".3f")
    mean = number(summary["staleness_mean"], ".2f")
    highest = number(summary["staleness_max"], ".0f")
    tokens = f"{summary['tokens_generated']:,} generated, {summary['tokens_trained']:,} trained"
    if summary["tokens_filtered"]:
        tokens += f", {summary['tokens_filtered']:,} filtered"
    too_long = " and ".join(
        f"{summary[f'prompts_{treatment}']} {treatment}"
        for treatment in ("skipped", "cut")
        if summary[f"prompts_{treatment}"]
    )
    saved = summary.get("resume_after_step")
    skipped = summary["skipped_steps"]
    dropped = dropped_text(
        {
            reason: (totals["groups"], totals["tokens"])
            for reason, totals in summary["dropped"].items()
        }
    )
    return pairs_table(
        (
            "steps",
            f"{summary['steps']} of {summary['steps_planned']} in {duration(summary['seconds'])}",
        ),
        (
            "reward",
            f"{first} → {last}  ({number(gain, '+.3f')}, {ends})"
            + unscored(summary["reward_failed"], summary["reward_absent"]),
        ),
        ("functions", functions_text(summary["rewards"])),
        ("held out", "" if summary["held_out_first"] is None else f"{before} → {after}  (greedy)"),
        ("evaluation", evaluation_text(summary["evaluation"])),
        ("speed", speed_text(summary)),
        ("staleness", f"{mean} mean, {highest} max, bound {summary['staleness_bound']}"),
        ("samples", samples_text(summary["samples"])),
        ("trajectories", _trajectories_text(summary["trajectories"])),
        ("drafts", _drafts_text(summary["drafts"])),
        ("tokens", tokens),
        ("prompts", too_long and f"{too_long} as too long, listed in {TOO_LONG_FILE}"),
        ("epoch", ", ".join(f"{epoch} of {key}" for key, epoch in summary["epochs"].items())),
        ("dropped", dropped),
        (
            "skipped",
            skipped
            and f"{counted(skipped, 'step')}, as a loss or gradient was not finite; their "
            f"rows are in skipped/",
        ),
        (
            "alarms",
            "; ".join(
                f"step {alarm['step']}: {alarm['reason']}"
                for alarm in summary["alarms"][-MOST_ALARMS:]
            ),
        ),
        ("restarts", str(summary["restarts"] or "")),
        ("reason", summary["reason"]),
        (
            "resume",
            "" if saved is None else resume_text(saved, summary["steps_planned"], summary["steps"]),
        ),
        title=f"{summary['name']}: {summary['state']}",
        title_justify="left",
    )


def functions_text(rewards: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the mean scores at both ends of a run, and the responses that it could not score, of
    each of several reward functions, or of one that failed."""
    return "; ".join(
        f"{name} {number(figures['first_steps'], '.3f')} → {number(figures['last_steps'], '.3f')}"
        + (f"  ({lost})" if (lost := lost_text(figures)) else "")
        for name, figures in rewards.items()
        if len(rewards) > 1 or figures["lost"]
    )


def _mean_of(points: Sequence[StepPoint], function: str, what: str) -> float | None:
    """Return the mean of a number of a reward function over these steps."""
    numbers = (point.rewards.get(function, {}).get(what) for point in points)
    return _mean([value for value in numbers if value is not None])


def speed_text(summary: Mapping[str, Any]) -> str:
    """Return tokens/s, of all and of each device, and the stage that sets the pace."""
    per_device = number(summary["tokens_per_second_per_device"], ",.0f")
    devices = summary["devices"]
    text = (
        f"{number(summary['tokens_per_second'], ',.0f')} tokens/s, {per_device} a device "
        f"({devices})"
    )
    if summary["busiest_stage"] is None:
        return text
    return f"{text}; {summary['busiest_stage']} busy {100 * summary['busiest_share']:.0f}%"


def evaluation_text(cost: Mapping[str, Any]) -> str:
    """Return the time and tokens that the evaluations of a run took, in one line; "" without
    any."""
    if not cost["count"]:
        return ""
    share = cost["engine_seconds"] / cost["seconds"] if cost["seconds"] else 0.0
    text = (
        f"{cost['count']} with {cost['rows']:,} answers, {cost['tokens']:,} tokens; "
        f"{share:.0%} of an engine for {duration(cost['seconds'])} "
        f"(all of one for {cost['engine_seconds']:,.1f} s)"
    )
    text += f"; {cost['missed']} more were due, and left out" if cost["missed"] else ""
    return text + unscored(cost["failed"], cost["absent"])


def samples_text(samples: Mapping[str, int]) -> str:
    """Return in one line how many samples were generated and what became of them.

    >>> samples_text({"generated": 2048, "trained": 0, "filtered": 2000, "remade": 0, "in_flight": 48})
    '2,048 generated: 0 trained, 2,000 dropped, 48 not used'
    """
    if not samples["generated"]:
        return ""
    words = {"filtered": "dropped", "remade": "made again", "in_flight": "not used"}
    rest = [f"{samples[name]:,} {word}" for name, word in words.items() if samples[name]]
    return (f"{samples['generated']:,} generated: ") + ", ".join(
        [f"{samples['trained']:,} trained", *rest]
    )


def dropped_text(dropped: Mapping[str, tuple[int, int]]) -> str:
    """Return in one line the dropped groups and tokens, by reason.

    >>> dropped_text({"equal rewards": (3, 1200), "reward exact failed": (1, 96)})
    '3 groups (1,200 tokens): equal rewards; 1 group (96 tokens): reward exact failed'
    """
    return "; ".join(
        f"{counted(groups, 'group')} ({counted(tokens, 'token')}): {reason}"
        for reason, (groups, tokens) in dropped.items()
    )


def resume_text(saved: int, steps: int, made: int = 0) -> str:
    """Return where a resumed run of ``steps`` begins, with ``saved`` of its ``made`` steps in the
    newest checkpoint.

    >>> resume_text(40, 200, 42)
    'after step 40 of 200; steps 41 to 42 are made again'
    """
    begins = f"after step {saved} of {steps}" if saved else "from the beginning"
    if made <= saved:
        return begins
    repeated = f"steps {saved + 1} to {made} are" if made > saved + 1 else f"step {made} is"
    return f"{begins}; {repeated} made again"


def _trajectories(progress: Progress) -> dict[str, Any]:
    """Return the figures of a run with environments; {}: it has none."""
    if not progress.trajectories:
        return {}
    from api.telemetry.trajectories import summarize_trajectories

    return summarize_trajectories(progress.trajectories)


def _trajectories_text(figures: dict[str, Any]) -> str:
    if not figures:
        return ""
    from api.telemetry.trajectories import trajectories_text

    return trajectories_text(figures)


def _drafts_text(counts: Mapping[str, float]) -> str:
    """Return the counts of drafts in one line.

    >>> _drafts_text({"drafted_tokens": 1200, "held_tokens": 810})
    '810 of 1,200 drafted tokens were drawn'
    """
    if not counts:
        return ""
    drafted, held = counts["drafted_tokens"], counts["held_tokens"]
    return f"{held:,.0f} of {drafted:,.0f} drafted tokens were drawn"


def _mean(values: Sequence[float]) -> float | None:
    """Return the mean of those of ``values`` that are finite; None where none is."""
    finite = [value for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else None


# --------------------------------------------------------------------------------------------------
# The plot


def smooth(values: Sequence[float], span: int) -> list[float]:
    """Return the centred moving average over ``span`` values, fewer at the ends, without those that
    are not finite. It is exact to the rounding of the sum of all values."""
    half = span // 2
    is_finite = [math.isfinite(value) for value in values]
    summands = (value if ok else 0.0 for value, ok in zip(values, is_finite, strict=True))
    sums = [0.0, *itertools.accumulate(summands)]
    counts = [0, *itertools.accumulate(is_finite)]
    averages: list[float] = []
    for i in range(len(values)):
        begin = max(0, i - half)
        end = min(len(values), i + half + 1)
        count = counts[end] - counts[begin]
        averages.append((sums[end] - sums[begin]) / count if count else math.nan)
    return averages


def write_plot(path: Path, progress: Progress) -> None:
    """Plot the reward above and the staleness below, over optimizer steps. Of a long run each point
    is of several steps: their mean reward with its range, their largest staleness. Raises
    ExtraMissing without matplotlib."""
    with extra("quickstart"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

    points = progress.curve.even()
    width = progress.curve.width
    steps = [point.middle for point in points]
    rewards = [point.reward_mean for point in points]
    figure = Figure(figsize=(8, 5.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    reward, stale = figure.subplots(2, 1, sharex=True, height_ratios=[2.4, 1])

    if width == 1:
        reward.plot(steps, rewards, color=BLUE, alpha=0.3, linewidth=1, label="each step")
    else:
        low = [point.reward_low if point.rewarded else math.nan for point in points]
        high = [point.reward_high if point.rewarded else math.nan for point in points]
        reward.fill_between(steps, low, high, color=BLUE, alpha=0.3, linewidth=0, label="each step")
    span = max(3, len(steps) // 12)
    of_span = f"mean of {span * width} steps"
    reward.plot(steps, smooth(rewards, span), color=BLUE, linewidth=2, label=of_span)
    if evaluations := progress.evaluations:
        scores = [evaluation.reward_mean for evaluation in evaluations.values()]
        held_out = [math.nan if score is None else score for score in scores]
        style = {"color": ORANGE, "marker": "D", "linewidth": 1, "linestyle": "--", "markersize": 5}
        reward.plot(list(evaluations), held_out, label="held out, greedy", **style)
    reward.set_ylabel("reward")
    reward.set_title(
        f"{progress.name}: {progress.state} after {counted(progress.steps_done, 'step')}",
        loc="left",
        fontsize=11,
    )
    reward.legend(loc="best", frameon=False, fontsize=9)

    largest = [point.staleness_max for point in points]
    stale.step(steps, largest, where="mid", color=GREEN, label="max of a step")
    means = [point.staleness_mean for point in points]
    stale.plot(steps, means, color=GREY, linewidth=1.5, linestyle=":", label="mean")
    stale.axhline(
        progress.bound,
        color=RED,
        linestyle="--",
        linewidth=1.2,
        label=f"bound η = {progress.bound}",
    )
    stale.set_ylim(-0.1, max(progress.bound, progress.staleness_max()) + 0.6)
    stale.yaxis.set_major_locator(MaxNLocator(integer=True))
    stale.xaxis.set_major_locator(MaxNLocator(integer=True))
    stale.set_ylabel("staleness")
    stale.set_xlabel("optimizer step")
    stale.legend(loc="upper center", bbox_to_anchor=(0.5, 1.02), ncols=3, frameon=False, fontsize=9)
    for axes in (reward, stale):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


# --------------------------------------------------------------------------------------------------
# Samples before and after


def samples_markdown(progress: Progress) -> str:
    """Return the same held-out prompts answered by the first and the last evaluated version, side
    by side."""
    evaluations = progress.evaluated.points
    first = evaluations[0].event
    last = evaluations[-1].event
    after = {sample.prompt: sample for sample in last.samples}
    lines = [
        f"# {progress.name}: held-out prompts before and after",
        "",
        f"Greedy answers. Mean reward: {_scored(first)}, {_scored(last)}.",
    ]
    # a prompt asked twice is shown once
    before = {sample.prompt: sample for sample in first.samples}
    for at, (prompt, sample) in enumerate(before.items(), start=1):
        other = after.get(prompt)
        answers = [_cell(sample.response), _cell(other.response) if other else ""]
        rewards = [number(sample.reward, ".2f"), number(other.reward, ".2f") if other else "–"]
        lines += [
            "",
            f"## {at}",
            "",
            *("> " + line for line in prompt.splitlines() or [""]),
            "",
            f"| before (version {first.version}) | after (version {last.version}) |",
            "| --- | --- |",
            f"| {answers[0]} | {answers[1]} |",
            f"| reward {rewards[0]} | reward {rewards[1]} |",
        ]
    return "\n".join(lines) + "\n"


def _scored(evaluation: EvaluationEvent) -> str:
    """Return a score, such as "0.250 of 4 prompts with version 3  (1 failed)"."""
    score = (
        f"{number(evaluation.reward_mean, '.3f')} of {evaluation.count} prompts with version "
        f"{evaluation.version}"
    )
    return score + unscored(evaluation.failed, evaluation.absent)


def _cell(text: str) -> str:
    """Return ``text`` as the content of a cell of a Markdown table, with all markup escaped."""
    text = re.sub(r"[\\|*_`]", r"\\\g<0>", text.replace("&", "&amp;").replace("<", "&lt;"))
    return text.strip().replace("\n", "<br>") or "*(nothing)*"
