"""The search of a sweep, and the pruning of its runs: Optuna, with its journal in the sweep's folder.

    Search.next ─▶ study.ask ─▶ settings ─▶ a run of sweep.json      Search.judge ─▶ trial.report, should_prune ─▶ stop
                                     a run is over ─▶ Search.ended ─▶ study.tell

What has become of a run is in sweep.json first. A kill between the two leaves a trial that the
study has as running: :class:`Search` tells it the end, or that there was no such run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestration.sweep.record import Sweep, SweepRun
from orchestration.sweep.settings import Range, Settings, Values
from orchestration.sweep.stopping import is_lowest_best
from pipeline.compat.extras import extra

with extra("sweep"):
    import optuna
    from optuna import Study, Trial, distributions, pruners, samplers
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend
    from optuna.trial import TrialState

JOURNAL = "optuna.log"  # in the sweep's folder
MOST_ASKED = 100  # settings in a row that there are already: the search has nothing new
FEW = 4  # runs without which the median says little


class Search:
    """The study of ``sweep`` over ``over``: its runs, what it proposes, what it prunes."""

    def __init__(self, sweep: Sweep, over: Sequence[Values | Range]) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._sweep = sweep
        self._over = over
        request = sweep.request
        journal = _whole_journal(sweep.folder / JOURNAL)
        storage = JournalStorage(JournalFileBackend(str(journal)))
        self._study: Study = optuna.create_study(
            study_name=sweep.id,
            storage=storage,
            direction="minimize" if is_lowest_best(request.metric) else "maximize",
            load_if_exists=True,
            pruner=self._pruner(request.prune),
        )
        # A sampler of one seed begins with the same numbers whenever the sweep goes on.
        self._study.sampler = self._sampler(request.seed + len(self._study.trials))
        self._trials: dict[int, Trial] = {}
        self._reconcile()

    def _sampler(self, seed: int) -> samplers.BaseSampler:
        if self._sweep.request.search == "tpe":
            return samplers.TPESampler(seed=seed, constant_liar=self._sweep.request.at_once > 1)
        return samplers.RandomSampler(seed=seed)

    def _pruner(self, name: str) -> pruners.BasePruner:
        named: Mapping[str, Callable[[], pruners.BasePruner]] = {
            "none": pruners.NopPruner,
            "median": lambda: pruners.MedianPruner(n_startup_trials=FEW),
            "halving": pruners.SuccessiveHalvingPruner,
            "hyperband": pruners.HyperbandPruner,
        }
        return named[name or "none"]()

    def _reconcile(self) -> None:
        """Bring the study to what sweep.json has."""
        runs = {run.trial: run for run in self._sweep.runs if run.trial is not None}
        for trial in self._study.trials:
            if trial.state.is_finished():
                continue
            if trial.number not in runs:
                self._tell(trial.number, "failed", None)
                continue
            self._trials[trial.number] = Trial(self._study, trial._trial_id)
            if runs[trial.number].is_over:
                self.ended(runs[trial.number])
        for run in self._sweep.runs:
            if run.trial is None:  # of a grid, of which the pruner alone is told
                asked = self._study.ask()
                asked.set_user_attr("settings", run.settings)
                self._trials[asked.number] = asked
                run.trial = asked.number
        self._sweep.save()

    def _distribution(self, over: Values | Range) -> distributions.BaseDistribution:
        if isinstance(over, Values):
            return distributions.CategoricalDistribution([_choice(value) for value in over.values])
        if over.is_whole:
            return distributions.IntDistribution(int(over.low), int(over.high), log=over.log)
        return distributions.FloatDistribution(over.low, over.high, log=over.log)

    def next(self) -> SweepRun | None:
        """Return another run, which is in the sweep; None where there are as many as asked for,
        or the search has nothing new to propose."""
        if len(self._sweep.runs) >= self._sweep.request.trials:
            return None
        known = [run.settings for run in self._sweep.runs]
        for _ in range(MOST_ASKED):
            trial = self._study.ask({one.key: self._distribution(one) for one in self._over})
            self._trials[trial.number] = trial
            settings = self._settings(trial.params)
            if settings not in known:
                run = self._sweep.add(settings, trial.number)
                self._sweep.save()
                return run
            self._tell(trial.number, "failed", None)
        return None

    def _settings(self, parameters: Mapping[str, Any]) -> Settings:
        values = {
            one.key: {_choice(value): value for value in one.values}
            for one in self._over
            if isinstance(one, Values)
        }
        return {
            key: values[key][value] if key in values else value for key, value in parameters.items()
        }

    def judge(self, run: SweepRun, previous: int, step: int, value: float) -> str:
        """See :class:`orchestration.sweep.execution.Judge`."""
        trial = self._trials.get(-1 if run.trial is None else run.trial)
        if trial is None or step <= previous:
            return ""
        trial.report(value, step)
        return (
            f"--prune {self._sweep.request.prune}, at step {step}" if trial.should_prune() else ""
        )

    def ended(self, run: SweepRun) -> None:
        """Take note of the end of ``run``."""
        if run.trial is not None:
            self._tell(run.trial, run.state, run.value)

    def _tell(self, trial: int, state: str, value: float | None) -> None:
        self._trials.pop(trial, None)
        if state == "finished" and value is not None:
            self._study.tell(trial, value)
        else:
            self._study.tell(
                trial, state=TrialState.PRUNED if state == "pruned" else TrialState.FAIL
            )


def _choice(value: Any) -> Any:
    """Return ``value`` as Optuna takes a choice."""
    return value if isinstance(value, bool | int | float | str) else json.dumps(value)


def _whole_journal(path: Path) -> Path:
    """Return ``path`` without what a kill has left: a torn line at its end, a lock file. The
    sweep's own lock keeps other processes away."""
    path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
    if path.exists():
        content = path.read_bytes()
        with path.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)
    return path
