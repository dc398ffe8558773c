"""Sample log: the newest samples that a run was trained on, as text files in the run's folder.

    update ── while the step is trained ──▶ Recorder.read: columns, texts ── once it is ──▶ SampleLog.add
    FOLDER/samples/  00000001.jsonl … 00000008.jsonl  00000009.jsonl ◀── written to         newest first ──▶ read
                      └ the oldest goes when all together are larger than `pipeline.keep_samples`, or the disk is nearly full

A sample is one line. Samples of a step stand last first, so that reading backwards gives steps
newest first, and each step's samples in the order of their groups. The first sample of a group has
the prompt's row, too: ``given``, ``fields``. One with turns has its ``segments``: the turns, and what
was observed between them, in order.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from pipeline.index.client import Claim
from stages.flow.catalogue import OBSERVED, TURN_REWARD, TURN_STARTS

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
MOST_SCANNED = 8 << 20  # bytes that one reading looks through
COLUMNS = (
    "given",
    "fields",
    "response_ids",
    "versions",
    "truncated",
    "reward",
    "scores",
    "advantage",
    TURN_STARTS,
    TURN_REWARD,
)

log = structlog.get_logger()

Sample = dict[str, Any]
Segment = tuple[int, int, bool]
"""A part of a response: its first token, the one after its last, and whether it was generated."""


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
                number: _path(self.folder, number).stat().st_size for number in _files(self.folder)
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
            with _path(self.folder, number).open("ab+") as file:
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

    def rewind(self, step: int) -> None:
        """Remove the samples of ``step`` and of later ones, which a run that goes on from there
        makes again."""
        self._sizes = None
        for number in reversed(_files(self.folder)):
            path = _path(self.folder, number)
            lines = path.read_bytes().splitlines(keepends=True)
            remaining = [line for line in lines if (_parsed(line) or {"step": -1})["step"] < step]
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
            _path(self.folder, number).unlink(missing_ok=True)
            total -= sizes.pop(number)


def read(
    folder: Path,
    wanted: Callable[[Sample], bool],
    *,
    after: str = "",
    limit: int = 50,
    oldest_step: int = 0,
) -> tuple[list[Sample], str]:
    """Return the samples below ``folder`` that are ``wanted``, newest step first, and the cursor of
    the next page ("": no more). ``after``: cursor of an earlier page. Reading ends at a step before
    ``oldest_step``, and pauses after :data:`MOST_SCANNED` bytes, so that a page may hold few
    samples. Raises ValueError for an invalid ``after``."""
    samples: list[Sample] = []
    scanned = 0
    for number, place, line in _backwards(folder, after):
        scanned += len(line)
        sample = _parsed(line)
        if sample is None:
            continue
        if sample["step"] < oldest_step:
            return samples, ""
        if wanted(sample):
            samples.append(sample)
        if len(samples) == limit or scanned >= MOST_SCANNED:
            return samples, f"{number}:{place}"
    return samples, ""


def groups(folder: Path) -> Iterator[list[Sample]]:
    """Yield the samples of each group below ``folder`` by place, oldest step first.

    One group is in memory at a time.
    """
    lines = (line for number in _files(folder) for line in _path(folder, number).open("rb"))
    samples = (sample for line in lines if (sample := _parsed(line)) is not None)
    for _, members in itertools.groupby(
        samples, key=lambda sample: (sample["step"], sample["group"])
    ):
        yield sorted(members, key=lambda sample: int(sample["place"]))


def _parsed(line: bytes) -> Sample | None:
    try:
        sample: Sample = json.loads(line)
    except ValueError:  # a kill cut it short
        return None
    return sample


def _backwards(folder: Path, after: str) -> Iterator[tuple[int, int, bytes]]:
    """Yield the lines from the last to the first, each with its file's number and its offset."""
    last, _, until = after.partition(":")
    if after and not (after.isascii() and last.isdigit() and until.isdigit()):
        raise ValueError(
            f"after: {after!r} is no cursor; give the one that an earlier page ended with, or none"
        )
    for number in reversed(_files(folder)):
        if after and number > int(last):
            continue
        try:
            data = _path(folder, number).read_bytes()
        except FileNotFoundError:  # removed meanwhile, after all older ones
            return
        place = (
            min(len(data), int(until)) if after and number == int(last) else data.rfind(b"\n") + 1
        )
        while place > 0:
            begin = data.rfind(b"\n", 0, place - 1) + 1
            yield number, begin, data[begin : place - 1]
            place = begin


def _files(folder: Path) -> list[int]:
    return sorted(int(path.stem) for path in folder.glob("*.jsonl") if path.stem.isdigit())


def _path(folder: Path, number: int) -> Path:
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
            for name in COLUMNS
            if name in schema and (name != "advantage" or schema[name].shape == ())
        ]
        rows = await self.dock.fetch(claim, names)
        return await asyncio.to_thread(self._samples, step, claim, stale, rows)

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
        turn_starts, turn_rewards = (
            plain_values(rows[name]) if name in rows else [[]] * len(ids)
            for name in (TURN_STARTS, TURN_REWARD)
        )
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
                    name: None if math.isnan(score) else score
                    for name, score in zip(self.rewards, columns["scores"][at] or (), strict=False)
                },
                **({"failed": failures[at]} if failures[at] else {}),
                "advantage": columns["advantage"][at],
                "tokens": handles[at].tokens,
                "versions": [list(pair) for pair in pairs[at]],
                "staleness": int(stale[at]),
                "truncated": columns["truncated"][at],
                "ended": _last_generated(ids[at], parts[at]) in ends,
                **(
                    {"segments": self._described(ids[at], parts[at], turn_rewards[at])}
                    if turn_starts[at]
                    else {}
                ),
                **(
                    {"given": prompts[at], "fields": fields[at]}
                    if first[handles[at].group] == at
                    else {}
                ),
            }
            for at in order
        ]

    def _described(
        self, ids: list[int], parts: Sequence[Segment], rewards: Sequence[float]
    ) -> list[dict[str, Any]]:
        """Return the segments ``parts`` of ``ids`` as the log has them; ``rewards`` of the turns,
        not a number where there is none."""
        of_turns = iter(rewards)
        out = []
        for begin, end, is_generated in parts:
            text = str(self.tokenizer.decode(ids[begin:end], skip_special_tokens=True))
            reward = next(of_turns, math.nan) if is_generated else math.nan
            out.append(
                {
                    "generated": is_generated,
                    "tokens": end - begin,
                    "text": text,
                    "reward": None if math.isnan(reward) else reward,
                }
            )
        return out


def segments(versions: Sequence[tuple[int, int]], turn_starts: Sequence[int] = ()) -> list[Segment]:
    """Return the segments of a response whose tokens ``versions`` (version, tokens) made: its
    turns, of which those after the first begin at ``turn_starts``, and the observations.

    >>> segments([(3, 2), (4, 1), (-1, 5), (4, 2)], [0, 8])
    [(0, 3, True), (3, 8, False), (8, 10, True)]
    """
    out: list[Segment] = []
    begin = 0
    for version, tokens in versions:
        is_generated = version != OBSERVED
        goes_on = bool(out) and out[-1][2] == is_generated and begin not in turn_starts
        first = out.pop()[0] if goes_on else begin
        begin += tokens
        out.append((first, begin, is_generated))
    return out


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
