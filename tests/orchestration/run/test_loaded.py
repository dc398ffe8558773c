"""What a run does not use, it does not import: the modules of each process of one run of `tiny`."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys

import pytest

from tests.test_house import PACKAGES, ROOT, code_tokens

TOKENS = 266_400  # of our own code, in all processes together; without comments and docstrings
# Each process lists its modules when it ends: the children of a fork server too, which run the
# exit functions that the server has registered.
LIST = """
import atexit, json, os, sys
def write():
    title = open("/proc/self/cmdline").read().replace("\\0", " ").strip()
    with open(os.path.join(os.environ["LOADED"], str(os.getpid())), "w") as file:
        json.dump([title, [name for name in sys.modules]], file)
atexit.register(write)
"""
UNUSED = {
    "any": [
        *("api.client", "api.external", "api.policy", "api.schemas", "api.server"),
        *("api.cli.plan", "api.cli.recipes", "api.cli.service", "api.terminal.live"),
        "api.terminal.plan_table",
        *("orchestration.cluster", "orchestration.external", "orchestration.policy"),
        *("orchestration.publishing", "orchestration.recipe.loading.toml", "api.cli.results"),
        *("orchestration.supervise.autoscale", "orchestration.supervise.scale"),
        *("orchestration.launch.hosts", "orchestration.sandbox", "orchestration.user_stages"),
        *("orchestration.recipe.checks.adapters", "orchestration.recipe.checks.addresses"),
        *("orchestration.recipe.checks.examples", "orchestration.recipe.checks.other_models"),
        *("orchestration.rewards.pool", "orchestration.rewards.process", "orchestration.service"),
        *("orchestration.workers.colocated", "orchestration.workers.critic"),
        *("orchestration.workers.one_stage", "orchestration.checkpoints.shards"),
        *("orchestration.simulation.forecast", "orchestration.simulation.simulator"),
        *("pipeline.compat.transfer_queue", "pipeline.loader.loader", "pipeline.wire"),
        *("pipeline.warehouse.client", "pipeline.warehouse.server"),
        *("stages.adapters.export", "stages.adapters.training", "stages.prompts.difficulty"),
        *("stages.algorithms.policy_gradient.ppo", "stages.algorithms.supervised"),
        *("stages.engines.mock.engines", "stages.engines.torch.critic", "stages.engines.vllm"),
        *(
            "stages.engines.torch.model.branched",
            "stages.engines.torch.model.expert_load",
            "stages.engines.torch.parallel.sharded",
        ),
        *("stages.rollout.external_checks", "stages.flow.adapter", "stages.inference"),
        *("stages.parallel.placement", "stages.resharding.exchange", "stages.resharding.swap"),
        *(
            "stages.prompts.conversations",
            "stages.prompts.external",
            "stages.prompts.rows.file_checks",
        ),
        *("stages.rollout.given_responses", "stages.prompts.rows.tables"),
        *("stages.tasks.answers", "stages.tasks.gym_answers", "stages.training.colocated"),
        *("stages.training.critic", "stages.training.rank_worker", "stages.training.rendezvous"),
        "stages.training.replay",
        *("stages.training.skipped", "stages.rewards.divided", "stages.weights.transport.depot"),
        *("orchestration.guard.functions", "api.terminal.reward_notes"),
        *("stages.weights.transport.network", "stages.weights.transport.chain"),
    ],
    "run": ["orchestration.workers", "stages.engines.torch"],
    "flow-0": ["api"],
    "rollout-0": ["api"],
    "update-0": ["api"],
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The modules of each process of a run, by the worker that it is, and those of the command."""
    folder = tmp_path_factory.mktemp("loaded")
    hooks, lists = folder / "hooks", folder / "lists"
    hooks.mkdir()
    lists.mkdir()
    (hooks / "sitecustomize.py").write_text(LIST)
    command = [sys.executable, "-P", "-m", "api.cli.main", "run", "tiny", "--plain"]
    done = subprocess.run(
        [*command, "--set=train.steps=2", f"--out={folder / 'run'}"],
        env={**os.environ, "PYTHONPATH": f"{hooks}{os.pathsep}{ROOT}", "LOADED": str(lists)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    by_process = {}
    for file in lists.iterdir():
        title, modules = json.loads(file.read_text())
        words = title.split()
        worker = words[2] if words[:2] == ["asyncdock", "worker"] else ""
        by_process[worker or ("run" if "run" in words else title)] = set(modules)
    return by_process


@pytest.mark.timeout(400)
def test_no_process_of_a_run_imports_what_the_run_does_not_use(
    loaded: dict[str, set[str]],
) -> None:
    assert loaded.keys() >= {"run", "flow-0", "rollout-0", "update-0"}
    for process, modules in loaded.items():
        unused = tuple([*UNUSED["any"], *UNUSED.get(process, [])])
        found = [
            module
            for module in sorted(modules)
            if any(f"{module}.".startswith(f"{name}.") for name in unused)
        ]
        assert not found, f"{process} imports {found}"


def test_a_fence_stands_around_modules_that_exist() -> None:
    for name in {name for names in UNUSED.values() for name in names}:
        path = ROOT / name.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), name


@pytest.mark.timeout(400)
def test_a_run_loads_a_bounded_part_of_the_code(loaded: dict[str, set[str]]) -> None:
    modules = sorted({name for names in loaded.values() for name in names})
    tokens = 0
    for name in modules:
        path = ROOT / name.replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if name.partition(".")[0] in PACKAGES and file.is_file():
            source = file.read_text(encoding="utf-8")
            tokens += len(code_tokens(source, ast.walk(ast.parse(source))))
    assert tokens <= TOKENS, f"{tokens} tokens are loaded by one run of tiny"
