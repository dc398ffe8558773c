"""Keys that do not fit together are problems that name key, value and fix."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from orchestration.recipe.checks import relations
from orchestration.recipe.loading.load import load_recipe
from orchestration.recipe.sizes.planner import plan
from orchestration.workers.engines import sampling_of
from stages.algorithms import Algorithm, LossOutput
from stages.engines.protocols import SamplingParams
from stages.model.load import tiny_tokenizer
from tests.orchestration.recipe.minimal import problems

# Keys that do not fit a colocated run.
TURN_FAULTS = [
    (
        ("rollout.engine=vllm",),
        "rollout.engine",
        "set rollout.engine = 'torch', or launch.placement = 'separate'",
    ),
    (
        ("rollout.workers=3",),
        "rollout.workers",
        "leave it out: it follows from train.dp, train.tp and train.pp",
    ),
    (("train.dp=2", "rollout.workers=3"), "rollout.workers", "is not the 2 ranks that train"),
    (("rollout.device=cpu",), "rollout.device", "set rollout.device = 'auto'"),
    (('external.stages=["rollout"]',), "external.stages", "set launch.placement = 'separate'"),
]


@pytest.mark.parametrize(("overrides", "key", "fix"), TURN_FAULTS)
def test_keys_that_do_not_fit_a_colocated_run_are_reported(
    minimal: Path, overrides: tuple[str, ...], key: str, fix: str
) -> None:
    found = problems(minimal, "launch.placement=colocated", *overrides)
    [blamed] = [problem for problem in found if problem.key == key]
    assert fix in blamed.wrong + "; " + blamed.fix
    assert str(blamed).startswith(key)


def test_trained_groups_are_replayed_by_the_runs_own_trainer_alone(minimal: Path) -> None:
    overrides = ("train.replay_groups=2", 'external.stages=["update"]')
    [blamed] = [
        problem for problem in problems(minimal, *overrides) if problem.key == "train.replay_groups"
    ]
    assert (blamed.value, blamed.fix.startswith("set 0")) == (2, True)


# The same for settings of the vLLM engine.
VLLM_FAULTS = [
    (
        ("rollout.vllm.max_model_len=64", "rollout.max_tokens=64"),
        "rollout.vllm.max_model_len",
        ">= ",
    ),
    (
        ("rollout.vllm.max_model_length=64",),
        "rollout.vllm.max_model_length",
        "did you mean 'max_model_len'?",
    ),
    (("rollout.vllm.kv_cache_bytes=1GigaB",), "rollout.vllm.kv_cache_bytes", "'64MiB'"),
    (("rollout.vllm.gpu_memory_utilization=1.5",), "rollout.vllm.gpu_memory_utilization", "<= 1"),
    (("rollout.vllm.kv_cache=wait",), "rollout.vllm.kv_cache", "'keep'"),
    (("rollout.vllm.pause=abort",), "rollout.vllm.pause", "kv_cache = 'rebuild'"),
    (("rollout.vllm.dtype=half",), "rollout.vllm.dtype", "set model.dtype"),
    (("rollout.vllm.max_num_seqs=3",), "rollout.vllm.max_num_seqs", "set rollout.max_rows"),
    (("rollout.vllm.worker_extension_cls=x",), "rollout.vllm.worker_extension_cls", "take it out"),
    (
        ("rollout.top_k=5", "rollout.temperature=0.7"),
        "rollout.temperature",
        "rollout.temperature = 1.0",
    ),
    (
        ("rollout.presence_penalty=1.0", 'external.stages=["update"]', "rollout.budget=9"),
        "rollout.presence_penalty",
        "set rollout.budget = 0",
    ),
]


@pytest.mark.parametrize(("overrides", "key", "fix"), VLLM_FAULTS)
def test_problems_of_the_vllm_engine_are_reported_without_vllm(
    minimal: Path, overrides: tuple[str, ...], key: str, fix: str
) -> None:
    found = problems(minimal, "prompts.max_prompt_tokens=64", "rollout.engine=vllm", *overrides)
    [blamed] = [problem for problem in found if problem.key == key]
    assert fix in blamed.wrong + "; " + blamed.fix
    assert str(blamed).startswith(key)


CHANGES = [
    *("rollout.top_k=5", "rollout.top_p=0.9", "rollout.min_p=0.1", "rollout.min_tokens=2"),
    *("rollout.repetition_penalty=1.2", "rollout.presence_penalty=0.5"),
    *("rollout.frequency_penalty=-0.5", 'rollout.logit_bias={"3"=1.5}'),
]


@pytest.mark.parametrize("override", CHANGES)
def test_filtered_samples_are_refused_where_something_reads_their_logprobs(
    minimal: Path, override: str
) -> None:
    key = override.partition("=")[0]
    [blamed] = problems(minimal, override)
    assert blamed.key == key
    assert "stage 'update' reads" in blamed.wrong
    assert f"set {key} = " in blamed.fix
    sampled = load_recipe(minimal, [override, 'external.stages=["update"]'])
    params = sampling_of(sampled, tiny_tokenizer())
    name = key.partition(".")[2]
    assert getattr(params, name) != getattr(SamplingParams, name)
    greedy = params.greedy()
    assert (greedy.temperature, getattr(greedy, name)) == (0, getattr(SamplingParams, name))
    load_recipe(minimal, [override, f"algorithm.name={__name__}:Likely"])


def test_a_response_may_end_at_its_longest(minimal: Path) -> None:
    [blamed] = problems(minimal, "rollout.min_tokens=9999", 'external.stages=["update"]')
    assert (blamed.key, blamed.fix) == ("rollout.min_tokens", "use a smaller value")


class Likely(Algorithm):
    """Makes the likelier what was rewarded, and compares it with no other policy."""

    @property
    def loss_reads(self) -> dict[str, str]:
        return {"advantage": "float32"}

    def credit(self, group: Any) -> Any:
        return {"advantage": group["reward"]}

    def loss(self, tokens: Any) -> Any:
        return LossOutput(tokens.mean(-tokens.logprobs * tokens["advantage"]))


def test_an_arena_that_is_refused_is_accepted_with_the_size_that_the_fix_names(
    minimal: Path,
) -> None:
    sets = ["checkpoint.every=10", "rollout.max_tokens=500"]
    fix = problems(minimal, *sets, "pipeline.arena=1MiB")[0].fix
    size = fix.split("'")[1]
    recipe = load_recipe(minimal, [*sets, f"pipeline.arena={size}"])
    assert plan(recipe).arena_bytes <= recipe.pipeline.arena


def test_tls_files_are_checked_together(minimal: Path, tmp_path: Path) -> None:
    here = str(minimal)
    nowhere = str(tmp_path / "nowhere.pem")
    found = problems(minimal, f"pipeline.tls_certificate={here}", f"pipeline.tls_key={nowhere}")
    assert [(problem.key, problem.wrong) for problem in found] == [
        ("pipeline.tls_key", "is no file"),
        ("pipeline.tls_authority", "is missing"),
        ("pipeline.serve", "serves nothing: no other node connects, so that TLS protects nothing"),
    ]
    files = [f"pipeline.tls_{name}={here}" for name in ("certificate", "key", "authority")]
    [found_one] = problems(minimal, "pipeline.serve=0.0.0.0", *files)
    assert found_one.key == "pipeline.tls_certificate"
    assert "cannot be used" in found_one.wrong


def test_ranks_are_processes(minimal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    recipe = load_recipe(
        minimal, ["train.dp=2", "train.tp=2", "train.precision=mixed", "model.dtype=bfloat16"]
    )
    assert recipe.train.ranks == 4
    [inline] = problems(minimal, "train.dp=2", "train.tp=2", "launch.launcher=inline")
    assert inline.key == "launch.launcher"
    assert "train.dp = 2 times train.tp = 2 is 4 ranks" in inline.wrong
    one_device, *_ = problems(minimal, "train.dp=2", "train.device=cuda:0")
    assert (one_device.key, one_device.fix) == (
        "train.device",
        "write 'cuda': each rank takes one of them",
    )
    mock = ["model.source=mock", "rollout.engine=mock", "train.engine=mock", "train.tp=2"]
    assert [(p.key, p.fix) for p in problems(minimal, *mock)] == [("train.tp", "set train.tp = 1")]


def test_heads_are_read_from_a_checkpoint(
    minimal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    (tmp_path / "config.json").write_text('{"num_attention_heads": 12, "num_key_value_heads": 4}')
    sets = [f"model.source={tmp_path}"]
    assert not [
        problem for problem in problems(minimal, *sets, "train.tp=4") if problem.key == "train.tp"
    ]
    [uneven] = [
        problem for problem in problems(minimal, *sets, "train.tp=8") if problem.key == "train.tp"
    ]
    assert uneven.wrong == (
        "cannot share the model's num_attention_heads = 12 and num_key_value_heads = 4 evenly"
    )
    assert uneven.fix == "use one of: 1, 2, 4"


DIFFICULTY_FAULTS = [
    (("algorithm.group_size=1",), "algorithm.group_size = 1", "use at least 2"),
    (("prompts={source='external'}",), "prompts.source = 'external'", "'uniform'"),
    (("prompts.responses=['answer']",), "prompts.responses are given", "'uniform'"),
]


@pytest.mark.parametrize(("overrides", "wrong", "fix"), DIFFICULTY_FAULTS)
def test_difficulty_that_cannot_be_measured_is_refused(
    minimal: Path, overrides: tuple[str, ...], wrong: str, fix: str
) -> None:
    found = problems(minimal, *overrides, "prompts.sampling=difficulty")
    [blamed] = [problem for problem in found if problem.key == "prompts.sampling"]
    assert wrong in blamed.wrong
    assert fix in blamed.fix
    load_recipe(minimal, ["prompts.sampling=difficulty"])


def test_long_rows_are_divided_over_context_parallel_ranks(
    minimal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    longer = ["rollout.max_tokens=400", "train.token_budget=150", "launch.launcher=process"]
    [fault] = [p for p in problems(minimal, *longer) if p.key == "train.token_budget"]
    [shared] = [
        p for p in problems(minimal, *longer, "train.cp=2") if p.key == "train.token_budget"
    ]
    assert "divided over 2 context-parallel ranks" in shared.wrong
    tokens = [int(found.fix.removeprefix("use a value >= ")) for found in (fault, shared)]
    assert tokens[1] == -(-tokens[0] // 2)
    fits = load_recipe(minimal, [*longer, "train.cp=4"])
    assert fits.train.ranks == 4
    assert "train.cp = 3" in str(problems(minimal, *longer, "train.cp=3")[0])


@pytest.mark.parametrize(
    ("overrides", "key", "fix"),
    [
        (
            ("algorithm.options.mini_batches=5",),
            "algorithm.options.mini_batches",
            "use at most 4, or set",
        ),
        (
            ("train.dp=5", "algorithm.name=dpo"),
            "train.dp",
            "use at most 4, or set train.groups_per_step = 5 or more",
        ),
        (("train.dp=9",), "train.dp", "use a value <= 8"),
    ],
)
def test_each_mini_batch_has_a_group_and_each_rank_a_row_of_a_step(
    minimal: Path, overrides: tuple[str, ...], key: str, fix: str
) -> None:
    keys = ("train.groups_per_step=4", "algorithm.group_size=2", "launch.launcher=process")
    found = problems(minimal, *keys, *overrides)
    [blamed] = [problem for problem in found if "of a step" in problem.wrong]
    assert blamed.key == key
    assert blamed.fix.startswith(fix)
    fits = [override for override in overrides if "name" in override] + ["train.dp=2"]
    assert load_recipe(minimal, [*keys, *fits, "algorithm.options.mini_batches=4"]).train.dp == 2


def test_ranks_may_share_a_group(minimal: Path) -> None:
    found = problems(
        minimal, "train.groups_per_step=4", "train.dp=5", "train.steps=0"
    )  # the steps are always a problem
    assert not [problem for problem in found if "groups" in problem.wrong]


STRUCTURE_FAULTS = [
    ("rollout.engine=vllm", "needs rollout.engine = 'torch'"),
    ("train.engine=mock", "needs train.engine = 'torch'"),
    ("train.cp=2", "needs train.cp = 1"),
    ("environment.use=guess", "needs no environment"),
    ("teacher.url=http://127.0.0.1:1/v1", "needs no teacher.url"),
    ('external.stages=["rollout"]', "needs none of rollout, reference, update"),
    ("rollout.structure.regex=(a", "cannot be followed"),
    ("rollout.structure.grammar=start: none", "give one"),
]


@pytest.mark.parametrize(("override", "wrong"), STRUCTURE_FAULTS)
def test_a_structure_that_training_would_not_have_is_refused(
    minimal: Path, override: str, wrong: str
) -> None:
    load_recipe(minimal, ["rollout.structure.regex=[ab]+"])
    found = problems(minimal, "rollout.structure.regex=[ab]+", override)
    blamed = [each for each in found if each.key.startswith("rollout.structure.")]
    assert [each.wrong + "; " + each.fix for each in blamed if wrong in str(each)], found


def test_a_structure_names_its_extra(minimal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relations, "is_installed", lambda module: module != "llguidance")
    [blamed] = problems(minimal, "rollout.structure.regex=[ab]+")
    assert (blamed.key, blamed.fix) == (
        "rollout.structure.regex",
        "pip install 'asyncdock[structured]'",
    )


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.name=opsd", "algorithm.options.template='{prompt}'"),
        ('external.stages=["reward"]',),
    ],
)
def test_reward_workers_without_a_reward_stage_are_refused(
    minimal: Path, overrides: tuple[str, ...]
) -> None:
    [blamed] = problems(minimal, "reward.workers=2", *overrides)
    assert (blamed.key, blamed.fix) == ("reward.workers", "set reward.workers = 1")
    load_recipe(minimal, ["reward.workers=2"])
