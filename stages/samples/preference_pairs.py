"""Preference pairs of the samples that a run has kept: the best response of each group against the
worst.

RUN/samples/ ─▶ groups, oldest step first ─▶ best and worst by reward ─▶ {prompt, chosen, rejected, …} ─▶ JSON Lines, Parquet
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pipeline.compat.extras import ExtraMissing, extra
from stages.samples.reading import groups
from stages.samples.sample_log import FOLDER, Sample

SUFFIXES = (".jsonl", ".parquet")
ROW_GROUP = 4096  # rows of a Parquet file that are in memory at once

Pair = dict[str, Any]


class PairsError(ValueError):
    """No pairs can be made, or not in this form. The message says what to change."""


def pair_of(group: Iterable[Sample], margin: float = 0.0, *, cut: bool = True) -> Pair | None:
    """Return the pair of one ``group``: the prompt, the texts with the highest and the lowest
    reward, the rewards, and the other columns of the prompt's row, and which of the two was cut.
    ``cut``: with responses that :func:`is_cut`. None where the rewards differ by less than
    ``margin``, or not at all; and where a response is :func:`observing`."""
    members = list(group)
    if any(map(observing, members)):
        return None
    scored = [sample for sample in members if _has_reward(sample) and (cut or not is_cut(sample))]
    if not scored:
        return None
    best, worst = (pick(scored, key=lambda sample: float(sample["reward"])) for pick in (max, min))
    difference = best["reward"] - worst["reward"]
    if difference <= 0 or difference < margin or best["response"] == worst["response"]:
        return None
    row: Sample = next((sample for sample in members if "given" in sample), {})
    return {
        **row.get("fields", {}),
        "prompt": row.get("given", best["prompt"]),
        "chosen": best["response"],
        "rejected": worst["response"],
        "score_chosen": best["reward"],
        "score_rejected": worst["reward"],
        **{
            f"{side}_truncated": is_cut(sample)
            for side, sample in (("chosen", best), ("rejected", worst))
        },
    }


def _has_reward(sample: Sample) -> bool:
    reward = sample["reward"]
    return reward is not None and math.isfinite(reward) and not sample.get("failed")


def is_cut(sample: Sample) -> bool:
    """Return whether the policy has not sampled the end of the response: it was cut at its longest,
    or at a text of ``rollout.stop``. Training must not add an end."""
    return bool(sample.get("truncated")) or not sample.get("ended", True)


def observing(sample: Sample) -> bool:
    """Return whether the response has observations. In a text they would be trained as the
    policy's own."""
    return any(not segment["generated"] for segment in sample.get("segments", ()))


def export_pairs(run: Path, out: Path, margin: float = 0.0, *, cut: bool = True) -> tuple[int, int]:
    """Write the pairs of the run in the folder ``run`` to ``out``, a file of JSON Lines or Parquet
    by its name, which is there when all of it is. ``cut``: with responses that :func:`is_cut`.
    Returns the number of pairs and that of groups. Raises PairsError, OSError."""
    if out.suffix not in SUFFIXES:
        raise PairsError(
            f"out: {str(out)!r} is no name of a file of pairs; give one that ends in "
            f".jsonl or .parquet"
        )
    recipe = _recipe(run)
    count = 0
    observing_groups = 0

    def pairs() -> Iterator[Pair]:
        nonlocal count, observing_groups
        for group in groups(run / FOLDER):
            count += 1
            observing_groups += any(map(observing, group))
            if (pair := pair_of(group, margin, cut=cut)) is not None:
                yield pair

    pair_stream = pairs()
    if (first := next(pair_stream, None)) is None:
        if observing_groups:
            raise PairsError(
                f"run: {observing_groups} of {count} groups in {run} have responses with an "
                f"environment's observations, which a pair of texts would train as the policy's; "
                f"give a run without an environment"
            )
        raise PairsError(_why_none(run, recipe, count, margin, cut))
    partial = out.with_name(f".{out.name}.partial")
    try:
        write = _write_parquet if out.suffix == ".parquet" else _write_lines
        written = write(itertools.chain([first], pair_stream), partial)
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)
    return written, count


def _recipe(run: Path) -> dict[str, Any]:
    try:
        recipe: dict[str, Any] = json.loads((run / "recipe.json").read_text())
    except FileNotFoundError:
        raise PairsError(
            f"run: {run} is not the folder of a run; give one, as runs/tiny-…"
        ) from None
    return recipe


def _why_none(run: Path, recipe: dict[str, Any], count: int, margin: float, cut: bool) -> str:
    if not count and not recipe["pipeline"]["keep_samples"]:
        fix = "start one with pipeline.keep_samples = '64MiB'"
        return f"pipeline.keep_samples = 0: the run in {run} has kept no samples; {fix}"
    if not count:
        return (
            f"run: {run} has no samples: it has trained no step yet; wait for one, or give "
            f"another run"
        )
    if recipe["algorithm"]["group_size"] < 2:
        return (
            "algorithm.group_size = 1: the run has one response to each prompt, and a pair "
            "needs two; raise it"
        )
    least = f" by {margin:g}" if margin else ""
    fix = "lower --margin, or give an earlier run" + ("" if cut else ", or leave --whole out")
    return (
        f"margin: in none of {count} groups do rewards of different responses differ{least}; {fix}"
    )


def _write_lines(pairs: Iterable[Pair], path: Path) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for count, pair in enumerate(pairs, 1):  # noqa: B007
            file.write(json.dumps(pair, ensure_ascii=False) + "\n")
    return count


def _write_parquet(pairs: Iterable[Pair], path: Path) -> int:
    """Write ``pairs`` to a Parquet file, and return their number.

    Raises PairsError where a column has values of several types.
    """
    try:
        with extra("data"):
            import pyarrow
            import pyarrow.parquet
    except ExtraMissing as error:
        raise PairsError(f"out: {error}; or write .jsonl") from None
    count = 0
    rows = iter(pairs)
    writer = None
    try:
        while part := list(itertools.islice(rows, ROW_GROUP)):
            table = pyarrow.Table.from_pylist(part, None if writer is None else writer.schema)
            if writer is None:
                writer = pyarrow.parquet.ParquetWriter(path, table.schema)
            writer.write_table(table)
            count += len(part)
    except pyarrow.ArrowException as error:
        raise PairsError(
            f"out: a column has values of several types ({error}); write .jsonl"
        ) from error
    finally:
        if writer is not None:
            writer.close()
    return count
