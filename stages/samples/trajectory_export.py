"""Export of the trajectories that a run has kept: what was generated, token by token, and the rest.

RUN/samples/ ─▶ groups, oldest step first ─▶ {prompt_ids, completion_ids, logprobs, loss_mask, …} ─▶ a line each
                                                └▶ openenv: a turn each, with all tokens before it
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages.branches import branches_of
from stages.flow.catalogue import OBSERVED
from stages.samples.reading import groups
from stages.samples.sample_log import Sample

OPENENV_VERSION = 1  # of the schema `TrainingTrace` of OpenEnv 0.10
COPIED = (
    *("step", "group", "place", "prompt", "reward", "rewards", "advantage"),
    *("staleness", "ending", "truncated", "versions"),
)

Trajectory = dict[str, Any]


def trajectories(folder: Path) -> Iterator[Trajectory]:
    """Yield the trajectories below the folder of a sample log. ``prompt_ids`` stand before
    ``completion_ids``, to which ``logprobs`` (0 of observations) and ``loss_mask`` belong;
    ``segments`` as :func:`stages.samples.segments.described` has them; ``branches`` as the column.
    Those of a group whose first
    one the log has no room for any more are left out."""
    for group in groups(folder):
        row: Sample = next((sample for sample in group if "prompt_ids" in sample), {})
        for sample in group if row else ():
            mask = [int(v != OBSERVED) for v, tokens in sample["versions"] for _ in range(tokens)]
            yield {
                **{name: sample.get(name) for name in COPIED},
                "given": row["given"],
                "fields": row["fields"],
                "prompt_ids": row["prompt_ids"],
                "completion_ids": sample["response_ids"],
                "logprobs": sample["logprobs"],
                "loss_mask": mask,
                "segments": sample.get("segments", []),
                "branches": sample.get("branches", []),
            }


def openenv_trace(trajectory: Trajectory) -> dict[str, Any]:
    """Return ``trajectory`` as OpenEnv's `TrainingTrace`: the turns, each with the tokens of all that
    was before it (of its branch's path), and what was observed after it."""
    prompt_ids = trajectory["prompt_ids"]
    completion_ids = trajectory["completion_ids"]
    of_all = {name: trajectory[name] for name in ("step", "group", "place", "reward", "ending")}
    turns = list[dict[str, Any]]()
    branches = branches_of(trajectory["branches"], len(completion_ids))
    begin = 0
    for segment in trajectory["segments"]:
        end = begin + segment["tokens"]
        number = segment.get("branch", 0)
        if not segment["generated"]:
            if turns and turns[-1]["metadata"]["branch"] == number:
                turns[-1]["metadata"]["observation"] = segment["text"]
            begin = end
            continue
        path = branches[number].path(begin)
        before = [*prompt_ids, *(completion_ids[place] for place in path)]
        metadata = {
            "turn": len(turns),
            "branch": number,
            "turn_reward": segment["reward"],
            "versions": [[version, tokens] for version, tokens, _ in segment["pieces"]],
            "seconds": segment["seconds"],
            "observation": "",
        }
        message = {"role": "assistant", "content": segment["text"]}
        turns.append(
            {
                "node_id": ".".join(str(of_all[name]) for name in ("step", "group", "place"))
                + f".{len(turns)}",
                "prompt_token_ids": before,
                "completion_token_ids": completion_ids[begin:end],
                "per_token_logps": trajectory["logprobs"][begin:end],
                "loss_mask": [0] * len(before) + [1] * segment["tokens"],
                "response": {"choices": [{"message": message}]},
                "metadata": {**of_all, **metadata},
            }
        )
        begin = end
    return {"schema_version": OPENENV_VERSION, "turns": turns}
