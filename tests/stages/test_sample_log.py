"""What the samples browser relies on: the newest samples, whole, newest step first, page by page,
and never more than there is room for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from stages.samples import reading
from stages.samples import sample_log as sample_log
from stages.samples import search as sample_search
from stages.samples.reading import newest
from stages.samples.sample_log import FILES, FOLDER, SampleLog
from stages.samples.search import SearchPage, search
from tests.orchestration.runs import MOCK, complete, recipe


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def sample(step: int, place: int, size: int = 0) -> dict[str, Any]:
    return {
        "step": step,
        "group": place // 2,
        "place": place % 2,
        "response": "é" * size,
        "reward": place / 4,
    }


def found_in(folder: Path, **options: Any) -> SearchPage:
    return search(folder, lambda sample, row: True, **options)


def all_of(folder: Path, limit: int = 3, **options: Any) -> list[dict[str, Any]]:
    """What was added, of all pages."""
    page = found_in(folder, limit=limit, **options)
    found = page.samples
    while page.next:
        page = found_in(folder, limit=limit, after=page.next, **options)
        found += page.samples
    added = ("step", "group", "place", "response", "reward")
    return [{name: one[name] for name in added} for one in found]


@given(
    steps=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    size=st.integers(0, 40),
    limit=st.integers(1, 7),
)
def test_steps_come_newest_first_and_the_oldest_are_let_go(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], size: int, limit: int
) -> None:
    folder = tmp_path_factory.mktemp("book")
    most = 4000
    book = SampleLog(folder, most)
    for step, count in enumerate(steps):
        book.add([sample(step, place, size) for place in range(count)])
    written = [
        sample(step, place, size)
        for step, count in reversed(list(enumerate(steps)))
        for place in range(count)
    ]
    found = all_of(folder, limit)
    longest = max(len(json.dumps(one, ensure_ascii=False).encode()) for one in written)
    assert sum(path.stat().st_size for path in folder.iterdir()) <= most + most / FILES + longest
    newest = [one for one in found if one["step"] == len(steps) - 1]
    older = [one for one in found if one["step"] < len(steps) - 1]
    assert found == newest + older, "not the newest step first"
    assert older == written[len(newest) : len(newest) + len(older)] or len(newest) < steps[-1]
    kept = {(one["step"], one["group"], one["place"]) for one in found}
    assert len(kept) == len(found)
    if (
        sum(
            len(json.dumps(one, separators=(",", ":"), ensure_ascii=False).encode()) + 1
            for one in written
        )
        < most
    ):
        assert found == written


def test_a_step_that_was_cut_short_hides_nothing(tmp_path: Path) -> None:
    book = SampleLog(tmp_path, 1 << 20)
    book.add([sample(0, 0), sample(0, 1)])
    with (tmp_path / "00000001.jsonl").open("ab") as file:
        file.write(b'{"step":1,"group":0,"pla')  # the trainer was killed in the middle of a line
    assert all_of(tmp_path) == [sample(0, 0), sample(0, 1)]
    book.add([sample(1, 0), sample(1, 1)])
    assert all_of(tmp_path) == [sample(1, 0), sample(1, 1), sample(0, 0), sample(0, 1)]


class Disk:
    """A disk of ``total`` bytes, on which nothing lies but the samples in ``folder``."""

    def __init__(self, folder: Path, total: int) -> None:
        self.folder = folder
        self.total = total
        self.other = 0

    def usage(self, _: Path) -> Usage:
        used = self.other + sum(path.stat().st_size for path in self.folder.iterdir())
        return Usage(self.total, used, max(0, self.total - used))


def test_samples_are_kept_only_as_far_as_the_disk_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recipe that keeps 100 TiB does not fill the disk; when others fill it, the oldest samples
    go, and then all wait."""
    disk = Disk(tmp_path, total=100_000)  # a twentieth of which stays free
    monkeypatch.setattr(shutil, "disk_usage", disk.usage)
    book = SampleLog(tmp_path, 100 * 2**40)
    for step in range(60):
        assert book.add([sample(step, place, 400) for place in range(4)])
        assert disk.usage(tmp_path).free >= 5_000
    found = all_of(tmp_path, limit=100)
    assert [one["step"] for one in found[:4]] == [59] * 4
    assert 20 < len(found) < 240, "the oldest must have gone, and no more"
    kept = []
    for step in range(60, 100):
        disk.other += disk.usage(tmp_path).free  # others take whatever is free
        kept.append(book.add([sample(step, 0, 400)]))
        assert not kept[-1] or disk.usage(tmp_path).free >= 5_000
    assert kept[0]
    assert not kept[-1], "there is no room for any"
    assert len(list(tmp_path.iterdir())) == 1
    disk.other = 0
    assert book.add([sample(100, 0)])
    assert next(one["step"] for one in all_of(tmp_path, limit=100)) == 100


def test_no_file_is_larger_than_a_reader_takes_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_log, "LARGEST_FILE", 2000)
    book = SampleLog(tmp_path, 2**40)
    for step in range(20):
        book.add([sample(step, place, 100) for place in range(4)])
    assert max(path.stat().st_size for path in tmp_path.iterdir()) < 2000 + 500
    assert len(all_of(tmp_path, limit=100)) == 80
    again = SampleLog(tmp_path, 5000)  # of a trainer that was started again, with less
    again.add([sample(20, 0)])
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 5000 + 2500


def test_looking_ends_where_nothing_more_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_log, "LARGEST_FILE", 500)
    book = SampleLog(tmp_path, 1 << 20)
    for step in range(20):
        book.add([sample(step, place, 20) for place in range(4)])
    page = found_in(tmp_path, step=7)
    assert [one["step"] for one in page.samples] == [7] * 4
    assert (page.next, page.looked, page.steps) == ("", 4, (7, 7))
    monkeypatch.setattr(sample_search, "MOST_SCANNED", 500)
    page = search(tmp_path, lambda sample, row: False)
    assert page.samples == []
    assert page.looked < 10
    assert page.next, "a long look must pause and say where to go on"
    monkeypatch.setattr(reading, "MOST_SCANNED", 500)
    assert len([*newest(tmp_path)]) < 10
    assert found_in(tmp_path / "absent") == SearchPage()
    for wrong in ("x", "1", "1:", ":1", "1:-1", "1:2", "1:2:x", "1:2:3:4"):
        with pytest.raises(ValueError, match="is no cursor"):
            found_in(tmp_path, after=wrong)


@given(
    rewards=st.lists(st.none() | st.sampled_from([0.0, 0.5, 1.0, float("nan")]), max_size=30),
    best=st.integers(0, 4),
    worst=st.integers(0, 4),
    kept=st.integers(1, 9),
)
def test_the_best_and_the_worst_are_those_of_all_and_of_equals_the_newest(
    tmp_path_factory: pytest.TempPathFactory,
    rewards: list[float | None],
    best: int,
    worst: int,
    kept: int,
) -> None:
    folder = tmp_path_factory.mktemp("book")
    book = SampleLog(folder, 1 << 20)
    for step, reward in enumerate(rewards):
        book.add([sample(step, 0) | {"reward": reward}])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_search, "PRUNED_AT", best + worst + kept)
        page = found_in(folder, best=best, worst=worst, limit=1000)
    scored = [(reward, step) for step, reward in enumerate(rewards) if reward in (0, 0.5, 1)]
    if not best and not worst:
        assert len(page.samples) == len(rewards)
        return
    top = sorted(scored, reverse=True)[:best]
    rest = [entry for entry in scored if entry not in top]
    bottom = sorted(rest, key=lambda entry: (entry[0], -entry[1]))[:worst]
    wanted = sorted(top + bottom, reverse=True)
    assert [(one["reward"], one["step"]) for one in page.samples] == wanted
    assert page.looked == len(rewards)


@given(members=st.integers(1, 5), limit=st.integers(1, 7))
def test_each_sample_has_its_prompts_row_on_whatever_page_it_is(
    tmp_path_factory: pytest.TempPathFactory, members: int, limit: int
) -> None:
    """It is recorded with the first one of a group."""
    folder = tmp_path_factory.mktemp("book")
    book = SampleLog(folder, 1 << 20)
    for step in range(4):
        group = [sample(step, place) | {"group": step} for place in range(members)]
        group[0]["fields"] = {"answer": step}
        book.add(group)
    page = found_in(folder, limit=limit)
    found = page.samples
    while page.next:
        page = found_in(folder, limit=limit, after=page.next)
        found += page.samples
    assert len(found) == 4 * members
    assert all(one["fields"] == {"answer": one["step"]} for one in found)


async def test_a_run_records_what_it_was_trained_on(tmp_path: Path) -> None:
    made = Execution(RunFolder.create(recipe(MOCK, checkpoint__every=1), tmp_path / "run"))
    watched, result = await complete(made)
    assert result.state == "finished"
    found = [*newest(tmp_path / "run" / FOLDER)]
    steps = {event["step"]: event for event in watched.of("step")}
    assert [one["step"] for one in found] == sorted((one["step"] for one in found), reverse=True)
    assert len(found) == sum(event["rows"] for event in steps.values()) == 6 * 16
    assert len({(one["group"], one["place"]) for one in found}) == len(found)
    for step, event in steps.items():
        rows = [one for one in found if one["step"] == step]
        assert sum(one["reward"] for one in rows) / len(rows) == pytest.approx(event["reward_mean"])
        assert max(one["staleness"] for one in rows) == event["staleness_max"]
        assert sum(one["advantage"] for one in rows) == pytest.approx(0, abs=1e-3)
        for one in rows:
            assert one["prompt"]
            assert sum(tokens for _, tokens in one["versions"]) == one["tokens"]
            assert one["staleness"] == step - 1 - min(version for version, _ in one["versions"])
            assert set(one["rewards"]) == {"spelling"}


async def test_a_run_that_keeps_none_writes_none_and_one_without_a_disk_goes_on(
    tmp_path: Path,
) -> None:
    made = Execution(RunFolder.create(recipe(MOCK, pipeline__keep_samples=0), tmp_path / "none"))
    assert (await complete(made))[1].state == "finished"
    assert not (tmp_path / "none" / FOLDER).exists()
    made = Execution(RunFolder.create(recipe(MOCK), tmp_path / "full"))
    (tmp_path / "full" / FOLDER).write_text("a file where the folder should be")
    assert (await complete(made))[1].state == "finished"
