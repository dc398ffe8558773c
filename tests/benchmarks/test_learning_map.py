"""The map of staleness: which cells are one run, in which order they are made, and its tables."""

from __future__ import annotations

import io
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks.learning import map as learning_map
from benchmarks.learning.map import BOUNDS, CORRECTIONS, TASKS, Cell
from benchmarks.learning.trials import Trial, read_trials, write_trials
from orchestration.recipe.loading.load import load_recipe
from orchestration.recipe.schema import Recipe
from stages.algorithms.registry import build_algorithm
from stages.algorithms.token_batch import TokenBatch
from stages.flow.catalogue import TOKEN_STALENESS


def of(reward: list[float], name: str = "tiny/3e-3/eager/none", **fields: object) -> Trial:
    return Trial(8, 0, reward, {}, 8.0, 1.0, 1, recipe=name, **fields)  # type: ignore[arg-type]


def recipe_of(cell: Cell) -> Recipe:
    return load_recipe(learning_map.RECIPES / f"{cell.task.recipe}.toml", cell.overrides())


def test_each_run_is_made_once_and_stands_for_each_cell() -> None:
    cells = learning_map.cells(3)
    runs = learning_map.runs(3)
    assert len(cells) == 6 * 2 * 6 * 2 * 3 * 3
    assert len(set(runs)) == len(runs) == 3 * 2 * 3 * (1 + 5 * 2 + 6 * 2 * 4)
    assert {cell.run for cell in cells} == set(runs)
    assert all(cell.run == cell for cell in runs)
    assert [cell.order for cell in runs] == sorted(cell.order for cell in runs)
    first = runs[:12]
    assert {cell.task for cell in first} == set(TASKS), "each task is soon in the map"
    assert {cell.correction for cell in first} > {"none"}


@pytest.mark.parametrize("task", TASKS)
def test_each_cell_is_a_sound_recipe(task: learning_map.Task) -> None:
    cells = [cell for cell in learning_map.runs(1) if cell.task == task]
    recipes = list(map(recipe_of, cells))
    assert len({recipe.to_json() for recipe in recipes}) == len(cells)
    assert {recipe.pipeline.staleness for recipe in recipes} == set(BOUNDS)


def gradient(correction: str, ages: list[int]) -> torch.Tensor:
    """The gradient of the loss of a cell with this correction: float64 [tokens]. A token of age 0
    has the logprob that generated it; the ratios of others are 0.4 to 2.5."""
    options = recipe_of(Cell(TASKS[0], "3e-3", 8, "eager", correction, 0)).algorithm
    draw = torch.Generator().manual_seed(0)
    old = torch.tensor(ages) > 0
    now = -3 * torch.rand(len(ages), generator=draw, dtype=torch.float64)
    away = 1.8 * torch.rand(len(ages), generator=draw, dtype=torch.float64) - 0.9
    columns = {
        "rollout_logprobs": now + torch.where(old, away, 0.0),
        "advantage": torch.randn(len(ages), generator=draw, dtype=torch.float64),
        TOKEN_STALENESS: torch.tensor(ages),
    }
    now.requires_grad_()
    row = torch.arange(len(ages))
    batch = TokenBatch(now, columns, row, torch.ones_like(row), len(ages), len(ages))
    build_algorithm(options.name, options.options).loss(batch).loss.backward()
    assert now.grad is not None
    return now.grad


def test_with_samples_of_the_current_policy_all_corrections_are_one() -> None:
    gradients = [gradient(name, [0] * 64) for name in CORRECTIONS]
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0])
    aged = [gradient(name, [3] * 64) for name in CORRECTIONS]
    for first in range(len(aged)):
        for second in range(first):
            assert not torch.allclose(aged[first], aged[second]), "six corrections"


def test_with_samples_of_one_version_ago_interpolated_is_clipped() -> None:
    young = [0, 1] * 32
    torch.testing.assert_close(gradient("interpolated", young), gradient("clipped", young))
    older = [0, 1, 2, 2] * 16
    assert not torch.allclose(gradient("interpolated", older), gradient("clipped", older))


def collapsing(steps: int, to: float) -> list[float]:
    return [*(min(0.9, step / 20) for step in range(steps)), *[to] * 10]


def test_a_run_has_collapsed_when_the_half_of_its_gain_is_lost() -> None:
    # means of ten: first 0.225, highest 0.9; it has collapsed below 0.5625
    reward = collapsing(30, 0.4)
    step = learning_map.collapse(reward)
    assert step == 37, "seven values of ten are 0.4, and three 0.9: a mean of 0.55"
    assert statistics.fmean(reward[step - 10 : step]) < 0.5625
    assert statistics.fmean(reward[step - 11 : step - 1]) > 0.5625
    assert learning_map.collapse(collapsing(30, 0.57)) is None
    assert learning_map.collapse([0.1] * 10 + [0.25] * 10 + [0.1] * 10) is None, "gained too little"
    assert learning_map.collapse([0.9] * 9) is None


def test_a_collapse_is_sought_in_means_of_as_many_groups_whatever_a_step_has() -> None:
    assert [learning_map.window_of(groups) for groups in (4, 8, 64)] == [20, 10, 2]
    reward = [*[0.1] * 20, *[0.9] * 20, *[0.1] * 12]  # a fall of twelve steps
    cell = Cell(TASKS[0], "3e-3", 0, "paced", "none", 0)
    assert [task.groups for task in (TASKS[0], TASKS[2])] == [8, 4]
    assert learning_map.collapse_of(of(reward, cell.label)) == 46, "0.1 six times of ten"
    label = replace(cell, task=TASKS[2]).label
    assert learning_map.collapse_of(of(reward, label)) == 51, "0.1 eleven times of twenty"


def test_the_guard_has_to_warn_before_the_collapse() -> None:
    early = of(collapsing(30, 0.0), alarms=[(20, "ess"), (39, "entropy")])
    late = of(collapsing(30, 0.0), alarms=[(39, "ess")])
    clean = of([0.9] * 30, alarms=[(3, "grad_norm"), (9, "grad_norm")])
    quiet = of([0.9] * 30)
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(learning_map.alarms([early, late, clean, quiet]))
    rows = [
        [cell.strip() for cell in row.split("|")[1:-1]]
        for row in console.export_text().splitlines()
        if row.startswith("|")
    ][2:]
    assert rows == [
        ["collapsed: until then", "2", "1", "ess 1"],
        ["others: at any step", "2", "1", "grad_norm 1"],
    ]


def test_corrections_are_compared_in_runs_that_have_all_else_in_common() -> None:
    def run(correction: str, reward: float, bound: int, seed: int) -> Trial:
        cell = Cell(TASKS[0], "3e-3", bound, "eager", correction, seed)
        return replace(of([reward] * 10, cell.label), staleness=bound, seed=seed)

    trials = [
        *(run("truncate", 0.9, 8, 0), run("none", 0.5, 8, 0)),
        *(run("truncate", 0.8, 16, 1), run("none", 0.6, 16, 1)),
        *(run("truncate", 0.1, 2, 0), run("none", 1.0, 2, 0)),
        *(run("truncate", 0.3, 2, 1), run("none", 1.0, 2, 1)),
        run("truncate", 0.1, 4, 2),  # alone
    ]
    shown = learning_map.differences(trials)
    columns = [list(column.cells) for column in shown.columns]
    assert columns[:4] == [["all", "tiny"], ["truncate"] * 2, ["none"] * 2, ["2"] * 2]
    assert [cell.partition(" ")[0] for cell in columns[4]] == ["0.300"] * 2, "of η ≥ 4"
    by_bound = [cells[0].partition(" ")[0] for cells in columns[5:]]
    assert by_bound == ["-0.800", "", "", ""], "one pair has no interval"


def test_the_map_goes_on_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "map.json"
    cell = learning_map.runs(1)[0]
    write_trials(file, [of([0.1] * 5 + [0.75] * 25, cell.label, alarms=[(3, "ess")])])
    assert read_trials(file)[0].alarms == [(3, "ess")]
    task = TASKS[0].recipe
    plot = tmp_path / "map.png"
    command = ["learning_map", "--json", str(file), "--minutes", "0", "--only", task]
    command += ["--plot", str(plot)]
    monkeypatch.setattr(sys, "argv", command)
    learning_map.main()
    shown = capsys.readouterr().out
    rate = TASKS[0].rates
    missing = 3 * 2 * 59 - 1
    assert f"1 runs are there, {missing} of those asked for are missing" in shown
    assert all(f"{task}, learning rate {each}" in shown for each in rate)
    assert "0.75 (0.75)" in shown
    assert plot.stat().st_size
