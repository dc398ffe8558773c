"""Sample log: the newest samples that a run was trained on, as text files in the run's folder.

    update ── while the step is trained ──▶ Recorder.read: columns, texts ── once it is ──▶ SampleLog.add
    FOLDER/samples/  00000001.jsonl … 00000008.jsonl  00000009.jsonl ◀── written to    newest first ──▶ reading.py
                      └ the oldest goes when all together are larger than `pipeline.keep_samples`, or the disk is nearly full

A sample is one line. Samples of a step stand last first, so that reading backwards gives steps
newest first, and each step's samples in the order of their groups. The first sample of a group has
the prompt's row, too: ``given``, ``fields``. Numbers and texts that stages of the recipe make are its
``columns``. One of which not all tokens are trained has its ``masked``: pieces in order, each trained
or not, with its tokens and its text. One with turns has its ``segments`` instead: the turns, and what
was observed between them, in order; its tokens and their logprobs; and why it has ended. The first
one of a group then has the tokens of the prompt.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from pipeline.index.client import Claim
from stages.flow.catalogue import (
    BRANCHES,
    ENDING,
    GIVEN,
    MASK,
    TURN_REWARD,
    TURN_SECONDS,
    TURN_STARTS,
)
from stages.flow.resolver import passed_column
from stages.samples.segments import Segment, described, segments

if TYPE_CHECKING:  # samples are read by the service without torch
    from tensordict import TensorDict

    from pipeline.warehouse.dock import Dock
    from stages.model.load import Tokenizer

FOLDER = "samples"  # in the run's folder
FILES = 8  # that share the room, at least
LARGEST_FILE = 16 * 2**20  # bytes; a reader takes in a whole file
# of the disk stays free: so many bytes, or this share of it if that is less
RESERVED = 2**30
RESERVED_SHARE = 1 / 20
COLUMNS = (
    "given",
    "fields",
    "response_ids",
    "versions",
    "truncated",
    "reward",
    "scores",
    "advantage",
)
# of a trajectory; with its tokens, as an export has them
TRAJECTORY_COLUMNS = (
    *("prompt_ids", "rollout_logprobs"),
    *(TURN_STARTS, TURN_REWARD, TURN_SECONDS, BRANCHES, ENDING),
)

log = structlog.get_logger()

Sample = dict[str, Any]


class SampleLog:
    """Samples on disk below ``folder``, ``most`` bytes of them, and fewer when the disk has no
    room. One process writes, others read."""

    def __init__(self, folder: Path, most: int) -> None:
        self.folder = folder
        self.most = most
        self._sizes: dict[int, int] | None = None  # bytes of the files, by their numbers

    def add(self, samples: Sequence[Sample]) -> bool:
        """Add the samples of a step; returns False when the disk has no room for them.

        Raises OSError.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        sizes = self._sizes
        if sizes is None:
            sizes = self._sizes = {
                number: path_of(self.folder, number).stat().st_size for number in files(self.folder)
            }
        lines = [
            json.dumps(s, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
            for s in reversed(samples)
        ]
        added = sum(map(len, lines))
        room = self._room(sum(sizes.values()))
        if room < self.most:  # the disk is nearly full: remove files before writing
            self._remove_oldest(sizes, room - added)
            if added > self._room(sum(sizes.values())):
                return False
        number = max(sizes, default=1)
        at = 0
        while at < len(lines):
            with path_of(self.folder, number).open("ab+") as file:
                size = file.seek(0, os.SEEK_END)
                # a kill cut the last line short
                if size and file.seek(size - 1) >= 0 and file.read(1) != b"\n":
                    size += file.write(b"\n")
                while at < len(lines) and size < min(LARGEST_FILE, room / FILES):
                    size += file.write(lines[at])
                    at += 1
            sizes[number] = size
            number += 1
        self._remove_oldest(sizes, room)
        return True

    def rewind(self, version: int) -> None:
        """Remove the samples of steps after ``version``, which a run that goes on from there makes
        again."""
        self._sizes = None
        for number in reversed(files(self.folder)):
            path = path_of(self.folder, number)
            lines = path.read_bytes().splitlines(keepends=True)
            remaining = [line for line in lines if (parsed(line) or {"step": 0})["step"] <= version]
            if len(remaining) == len(lines):
                return
            partial = path.with_suffix(".partial")
            partial.write_bytes(b"".join(remaining))
            os.replace(partial, path)

    def _room(self, taken: int) -> int:
        """Return the number of bytes for all samples, ``taken`` of which are in use."""
        disk = shutil.disk_usage(self.folder)
        return min(
            self.most, max(0, taken + disk.free - min(RESERVED, int(disk.total * RESERVED_SHARE)))
        )

    def _remove_oldest(self, sizes: dict[int, int], room: int) -> None:
        """Remove the oldest files until the others fit in ``room``; the newest one stays."""
        total = sum(sizes.values())
        for number in sorted(sizes)[:-1]:
            if total <= room:
                return
            path_of(self.folder, number).unlink(missing_ok=True)
            total -= sizes.pop(number)


def parsed(line: bytes) -> Sample | None:
    """Return the sample of a line; None where a kill cut it short."""
    try:
        sample: Sample = json.loads(line)
    except ValueError:
        return None
    oldest = min((version for version, _ in sample.get("versions", ()) if version >= 0), default=-1)
    if oldest >= 0 and sample["step"] == oldest + sample["staleness"]:
        sample["step"] += 1  # of a version before 0.2, which counted from 0
    return sample


def files(folder: Path) -> list[int]:
    """Return the numbers of the files below ``folder``, the oldest first."""
    return sorted(int(path.stem) for path in folder.glob("*.jsonl") if path.stem.isdigit())


def path_of(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.jsonl"


class Recorder:
    """Writes the samples of steps into ``book``.

    ``rewards`` are the names of the reward functions. A failing disk does not end the run: it is
    logged, and recording stops.
    """

    def __init__(
        self, dock: Dock, tokenizer: Tokenizer, rewards: Sequence[str], book: SampleLog
    ) -> None:
        self.dock = dock
        self.tokenizer = tokenizer
        self.rewards = tuple(rewards)
        self.book = book
        self.stopped = self._full = False

    async def read(self, step: int, claim: Claim, stale: Sequence[int]) -> list[Sample]:
        """Return copies of the claim's samples, in order of group and place."""
        if self.stopped:
            return []
        schema = self.dock.schema
        names = [
            name
            for name in (*COLUMNS, *(TRAJECTORY_COLUMNS if TURN_STARTS in schema else ()))
            if name in schema and (name != "advantage" or schema[name].shape == ())
        ]
        if MASK in schema and TURN_STARTS not in schema:
            names.append(MASK)
        rows = await self.dock.fetch(claim, [*names, *self._own_columns()])
        return await asyncio.to_thread(self._samples, step, claim, stale, rows)

    def _own_columns(self) -> list[str]:
        """Return the columns of numbers and texts beside those that every run has."""
        known = {*COLUMNS, GIVEN, ENDING}
        return [
            column.name
            for column in self.dock.schema.columns
            if (column.shape == () or column.dtype == "utf8")
            and column.name not in known
            and not column.name.startswith(passed_column(""))
        ]

    async def write(self, samples: Sequence[Sample]) -> None:
        if samples and not self.stopped:
            try:
                has_room = await asyncio.to_thread(self.book.add, samples)
                if not has_room and not self._full:
                    log.warning(
                        "the disk is nearly full: samples are not kept",
                        folder=str(self.book.folder),
                    )
                self._full = not has_room
            except OSError as refused:
                self.stopped = True
                log.warning(
                    "samples are not recorded any more",
                    folder=str(self.book.folder),
                    reason=str(refused),
                )

    def _samples(
        self, step: int, claim: Claim, stale: Sequence[int], rows: TensorDict
    ) -> list[Sample]:
        from pipeline.data.columns import plain_values

        ids = plain_values(rows["response_ids"])
        versions = plain_values(rows["versions"])
        prompts = [json.loads(text) for text in rows["given"]]
        fields = (
            [json.loads(text) for text in rows["fields"]] if "fields" in rows else [{}] * len(ids)
        )
        columns = {
            name: rows[name].tolist() if name in rows else [None] * len(claim)
            for name in ("truncated", "reward", "scores", "advantage")
        }
        failures: list[list[str]] = [[] for _ in ids]
        if self.rewards and "scores" in rows:
            from stages.rewards.scores import has_failed

            failed = has_failed(rows["scores"])
            columns["scores"] = rows["scores"].masked_fill(failed, math.nan).tolist()
            for at in rows["scores"].isnan().all(dim=1).nonzero()[:, 0].tolist():
                columns["reward"][at] = None
            for at, column in failed.nonzero().tolist():
                failures[at].append(self.rewards[column])
        own = {name: plain_values(rows[name]) for name in self._own_columns()}
        masks = plain_values(rows[MASK]) if MASK in rows else [()] * len(ids)
        has_turns = TURN_STARTS in rows
        trajectories = {
            name: plain_values(rows[name])
            for name in (*TRAJECTORY_COLUMNS, "response_ids", "versions")
            if has_turns and name in rows
        }
        turn_starts = trajectories.get(TURN_STARTS, [[]] * len(ids))
        prompt_ids = [{"prompt_ids": of_row} for of_row in trajectories.pop("prompt_ids", ())] or [
            {}
        ] * len(ids)
        pairs = [list(zip(of_row[::2], of_row[1::2], strict=True)) for of_row in versions]
        parts = [
            segments(of_row, starts) for of_row, starts in zip(pairs, turn_starts, strict=True)
        ]
        ends = {self.tokenizer.eos_token_id, *self.tokenizer.all_special_ids}
        handles = claim.rows
        order = sorted(range(len(handles)), key=lambda at: (handles[at].group, handles[at].place))
        first = {handles[at].group: at for at in reversed(order)}
        return [
            {
                "step": step,
                "group": handles[at].group,
                "place": handles[at].place,
                "prompt": shown(prompts[at]),
                "response": str(self.tokenizer.decode(ids[at], skip_special_tokens=True)),
                "reward": columns["reward"][at],
                "rewards": {
                    name: _known(score)
                    for name, score in zip(self.rewards, columns["scores"][at] or (), strict=False)
                },
                **({"failed": failures[at]} if failures[at] else {}),
                **(
                    {"columns": {name: _known(column[at]) for name, column in own.items()}}
                    if own
                    else {}
                ),
                **({"masked": pieces} if (pieces := self._masked(ids[at], masks[at])) else {}),
                "advantage": columns["advantage"][at],
                "tokens": handles[at].tokens,
                "versions": [list(pair) for pair in pairs[at]],
                "staleness": int(stale[at]),
                "truncated": columns["truncated"][at],
                "ended": _last_generated(ids[at], parts[at]) in ends,
                **self._trajectory({name: column[at] for name, column in trajectories.items()}),
                **(
                    {"given": prompts[at], "fields": fields[at], **prompt_ids[at]}
                    if first[handles[at].group] == at
                    else {}
                ),
            }
            for at in order
        ]

    def _masked(self, ids: Sequence[int], mask: Sequence[bool]) -> list[tuple[bool, int, str]]:
        """Return the pieces of a response, trained or not, with their tokens and texts; none where
        all of it is trained."""
        if all(mask):
            return []
        pieces = []
        for is_trained, group in itertools.groupby(
            zip(mask, ids, strict=True), lambda pair: pair[0]
        ):
            piece = [token for _, token in group]
            text = str(self.tokenizer.decode(piece, skip_special_tokens=True))
            pieces.append((is_trained, len(piece), text))
        return pieces

    def _trajectory(self, columns: dict[str, Any]) -> dict[str, Any]:
        """Return what is recorded of a row with these ``columns`` as a trajectory; {}: it is none."""
        if not columns:
            return {}
        from stages.trajectories.progress import Ending

        segments = described(columns, self.tokenizer)
        return {
            **({"segments": segments} if columns[TURN_STARTS] else {}),
            **({"ending": Ending(columns[ENDING]).name.lower()} if ENDING in columns else {}),
            **({"branches": pairs} if (pairs := columns.get(BRANCHES)) else {}),
            "response_ids": columns["response_ids"],
            # as many digits as tell numbers of 32 bits apart
            "logprobs": [float(f"{logprob:.9g}") for logprob in columns["rollout_logprobs"]],
        }


def _known(value: Any) -> Any:
    """Return ``value``, and None for a number that is not finite, which JSON has not."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _last_generated(ids: Sequence[int], parts: Sequence[Segment]) -> int | None:
    """Return the last token of the last turn."""
    ends = [end for _, end, is_generated in parts if is_generated]
    return ids[ends[-1] - 1] if ends else None


def shown(given: str | Sequence[dict[str, str]]) -> str:
    """Return a prompt as one text; a conversation of several messages is shown with the roles."""
    if isinstance(given, str):
        return given
    if len(given) == 1:
        return given[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in given)
