"""Configurations of TRL and verl, as their users write them, become recipes that are sound, and what
cannot be carried over is said."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestration.recipe.conversion import trl, verl
from orchestration.recipe.conversion.conversion import NotConverted, Unresolved, read_settings
from orchestration.recipe.loading.load import parse_recipe
from orchestration.recipe.loading.toml import toml_tables
from orchestration.recipe.problems import RecipeError
from orchestration.recipe.schema import Recipe
from tests.conversions import RULES, written
from tests.sources import ROOT

TRL = """\
model_name_or_path: {model}
dataset_name: {rows}
learning_rate: 1e-6
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs:
  min_lr_rate: 0.1
warmup_ratio: 0.1
max_steps: 40
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
num_generations: 8
max_completion_length: 256
beta: 0.04
epsilon: 0.2
epsilon_high: 0.28
loss_type: grpo
scale_rewards: none
mask_truncated_completions: true
reward_funcs: [my_rewards.exact, my_rewards.brevity]
reward_weights: [1.0, 0.2]
use_peft: true
lora_r: 32
adam_beta2: 0.95
bf16: false
logging_steps: 1
report_to: wandb
gradient_checkpointing: true
some_new_argument: 3
"""
VERL = """\
set -x
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files={rows} \\
    data.train_batch_size=64 \\
    data.max_prompt_length=256 \\
    data.max_response_length=128 \\
    data.truncation='error' \\
    actor_rollout_ref.model.path={model} \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.actor.entropy_coeff=0.01 \\
    actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    actor_rollout_ref.actor.loss_agg_mode=token-mean \\
    actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.rollout.name=hf \\
    algorithm.use_kl_in_reward=False \\
    trainer.critic_warmup=0 \\
    trainer.logger='["console","wandb"]' \\
    trainer.total_training_steps=100 \\
    trainer.test_freq=5 $@
"""


def write_rows(path: Path) -> None:
    rows = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(80)]
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sound(tables: dict[str, Any], *, files: bool = True) -> Recipe:
    """The recipe, written and read again."""
    return parse_recipe(tomllib.loads(toml_tables(tables)), files=files)


def problem_keys(tables: dict[str, Any]) -> set[str]:
    """The keys that a recipe refuses, without a look at files."""
    try:
        sound(tables, files=False)
    except RecipeError as error:
        return {problem.key for problem in error.problems}
    return set()


def test_trls_arguments_become_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_rewards.py").write_text("def exact(completions): ...\nbrevity = exact\n")
    file = tmp_path / "grpo.yaml"
    rows = tmp_path / "rows.jsonl"
    write_rows(rows)
    file.write_text(TRL.format(model="tiny", rows=rows))
    done = trl.convert(read_settings(file))
    recipe = sound({"name": "from-trl", **done.tables()})
    assert recipe.train.model_dump(
        include={"steps", "groups_per_step", "learning_rate", "schedule", "schedule_floor"}
    ) == {
        "steps": 40,
        "groups_per_step": 4,
        "learning_rate": 1e-6,
        "schedule": "cosine",
        "schedule_floor": 0.1,
    }
    assert recipe.train.warmup_steps == 4
    assert recipe.train.betas == (0.9, 0.95)
    assert recipe.train.activation_checkpointing
    assert recipe.algorithm.group_size == 8
    assert recipe.model.lora.rank == 32
    algorithm = recipe.typed_algorithm.model_dump()
    wanted = {
        "kl_coef": 0.04,
        "clip_low": 0.2,
        "clip_high": 0.28,
        "loss_normalization": "sequence",
        "scale_rewards": False,
    }
    assert algorithm | wanted == algorithm
    assert recipe.rollout.truncated == "mask"
    assert [(f.name, f.weight) for f in recipe.reward.functions] == [
        ("my_rewards:exact", 1.0),
        ("my_rewards:brevity", 0.2),
    ]
    assert done.remarks.keys() >= {"report_to", "reward_funcs"}
    assert done.unknown == ["some_new_argument"]
    assert "logging_steps" not in done.remarks


def test_the_overrides_of_a_script_of_verl_become_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    rows = tmp_path / "train.parquet"
    write_rows(rows)
    file.write_text(VERL.format(model="tiny", rows=rows))
    done = verl.convert(read_settings(file))
    tables = done.tables() | {"reward": {"functions": [{"name": "exact_number"}]}}
    recipe = sound({"name": "from-verl", **tables, "pipeline": {"arena": "512MiB"}})
    assert recipe.train.steps == 100
    assert recipe.train.groups_per_step == 64
    assert recipe.algorithm.group_size == 5
    algorithm = recipe.typed_algorithm.model_dump()
    wanted = {"mini_batches": 4, "kl_coef": 0.001, "kl_estimator": "k3", "entropy_coef": 0.01}
    assert algorithm | wanted | {"clip_high": 0.28} == algorithm
    assert recipe.prompts.path == str(rows)
    assert recipe.prompts.max_prompt_tokens == 256
    assert recipe.evaluate.every == 5
    assert "token_budget" in done.remarks[f"{verl.A}.ppo_micro_batch_size_per_gpu"]


def test_ppo_of_verl_has_its_critic(tmp_path: Path) -> None:
    rows = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    write_rows(rows[0])
    settings = {
        "algorithm.adv_estimator": "gae",
        "algorithm.lam": 0.97,
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_ctrl.kl_coef": "1e-3",
        "critic.optim.lr": "1e-5",
        "trainer.critic_warmup": 3,
        "trainer.total_training_steps": 10,
        "actor_rollout_ref.model.path": "tiny",
        "data.train_files": [*map(str, rows)],
    }
    done = verl.convert(settings)
    functions = {"reward": {"functions": [{"name": "exact_number"}]}}
    recipe = sound({"name": "ppo", **done.tables(), **functions})
    algorithm = recipe.typed_algorithm.model_dump()
    wanted = {"critic": "own", "gae_lambda": 0.97, "kl_reward": 1e-3, "critic_warmup_steps": 3}
    assert algorithm | wanted == algorithm
    assert recipe.critic.learning_rate == 1e-5
    assert "prompts.sources" in done.remarks["data.train_files"]


def test_a_dollar_is_no_variable(tmp_path: Path) -> None:
    """As in the prompts of mathematics."""
    prompt = r"Put the answer into $\boxed{x}$. It costs $5."
    yaml = tmp_path / "grpo.yaml"
    yaml.write_text(json.dumps({"system_prompt": prompt, "num_generations": "${of.nothing}"}))
    done = trl.convert(read_settings(yaml))
    assert done.recipe["prompts.system"] == prompt
    assert "put its value" in done.remarks["num_generations"]
    script = tmp_path / "run.sh"
    script.write_text(
        "python train.py --system_prompt 'It costs $5.' --num_generations $(wc -l x)\n"
    )
    done = trl.convert(read_settings(script))
    assert done.recipe["prompts.system"] == "It costs $5."
    assert "algorithm.group_size" not in done.recipe


def test_dapo_of_verl_is_dapo() -> None:
    """It is GRPO there, with a reward manager that takes off for length, and a filter of groups."""
    overlong = {"enable": True, "len": 1024, "penalty_factor": 1.0}
    given_settings = {
        "algorithm.adv_estimator": "grpo",
        "data.max_response_length": 4096,
    }
    former = {f"reward_model.overlong_buffer.{name}": value for name, value in overlong.items()}
    newer = {f"{verl.OVERLONG}.{name}": value for name, value in overlong.items()}
    wanted = {
        "algorithm.name": "dapo",
        "algorithm.options.longest_response": 4096,
        "algorithm.options.overlong_tokens": 1024,
        "algorithm.options.drop_equal": False,
        "algorithm.options.clip_high": 0.2,
    }
    for form in (former, newer):
        done = verl.convert({**given_settings, **form})
        assert done.recipe | wanted == done.recipe
    more = {"enable": True, "metric": "seq_reward"}
    filtered = {f"algorithm.filter_groups.{name}": value for name, value in more.items()}
    other = verl.convert({**given_settings, **newer, **filtered, f"{verl.A}.clip_ratio_high": 0.28})
    wanted |= {
        "algorithm.options.drop_equal": True,
        "algorithm.options.drop_by": "penalized",
        "algorithm.options.clip_high": 0.28,
    }
    assert other.recipe | wanted == other.recipe
    assert verl.convert({"data.max_response_length": 8}).recipe.get("algorithm.name") == "ppo"


def test_asynchronous_training_of_verl_has_the_prompts_of_its_mini_batches() -> None:
    done = verl.convert(
        {
            "algorithm.adv_estimator": "grpo",
            "data.train_batch_size": 0,
            f"{verl.A}.ppo_mini_batch_size": 32,
            "async_training.require_batches": 4,
            "async_training.staleness_threshold": 0.1,
            "rollout.total_rollout_steps": 51200,
            "algorithm.rollout_correction.rollout_is": "sequence",
            "algorithm.rollout_correction.rollout_is_threshold": 3.0,
        }
    )
    wanted = {
        "train.groups_per_step": 128,
        "train.steps": 400,
        "algorithm.options.mini_batches": 4,
        "algorithm.options.proximal": "recomputed",
        "algorithm.options.correction": "truncate",
        "algorithm.options.correction_level": "sequence",
        "algorithm.options.weight_high": 3.0,
    }
    assert done.recipe | wanted == done.recipe
    assert "pipeline.staleness" in done.remarks["async_training.staleness_threshold"]


@pytest.mark.parametrize("module", [trl, verl])
def test_every_rule_names_a_key_that_there_is(module: Any) -> None:
    """A key that was renamed would be refused by the recipe that this makes."""
    from orchestration.recipe.conversion.conversion import To

    known = json.dumps(Recipe.model_json_schema())
    for name, rule in module.RULES.items():
        if isinstance(rule, To) and not rule.key.startswith("algorithm.options."):
            assert f'"{rule.key.rpartition(".")[2]}":' in known, name


@pytest.mark.parametrize("name", RULES)
def test_the_page_has_every_rule(name: str) -> None:
    page = ROOT / "docs" / name
    assert page.read_text() == written(page), "run python -m tests.conversions docs/…"


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        ("- a\n- b\n", "a.yaml", "no table of settings"),
        ("a: [", "a.yaml", "cannot be read"),
        ("echo hello\n", "run.sh", "no words as a.key=value or --key"),
        ("a: " + "[" * 3000 + "]" * 3000, "deep.yaml", "recursion"),
        ("python x 'a.b=1", "open.sh", "No closing quotation"),
    ],
)
def test_what_is_no_configuration_is_refused(
    text: str, name: str, says: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(NotConverted, match=says):
        read_settings(file)


SCRIPT = """\
#!/usr/bin/env bash
set -xeuo pipefail  # don't go on
adv=grpo
max_prompt=$((1024 * 2))
max_response=$((1024 * 4))
budget=$(((max_prompt + max_response) * 2))
ROOT=${ROOT:-"{root}"}
FILE=${FILE:-"${ROOT}/rows.parquet"}
NODES=$(hostname | wc -l)
prompts=64   # of a step
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=${adv} data.train_files="${FILE}" data.train_batch_size=$prompts \\
    data.max_prompt_length=${max_prompt} data.max_response_length=${max_response} \\
    data.filter_overlong_prompts=True data.truncation='error' \\
    actor_rollout_ref.model.path=${MODEL:-tiny} actor_rollout_ref.actor.ppo_mini_batch_size=16 \\
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${budget} \\
    actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
    actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3 \\
    actor_rollout_ref.actor.policy_loss.clip_cov_ratio=0.1 \\
    trainer.nnodes=$NODES trainer.save_freq=$EVERY trainer.total_epochs=2 \\
    trainer.experiment_name="@my run: 1: a" "${MORE[@]}" \\
"""


def test_the_variables_of_a_script_are_put_into_its_settings(tmp_path: Path) -> None:
    """Most examples of verl use variables. A value that only the shell knows is reported."""
    write_rows(tmp_path / "rows.parquet")
    file = tmp_path / "run.sh"
    file.write_text(SCRIPT.replace("{root}", str(tmp_path)))
    done = verl.convert(read_settings(file))
    assert done.recipe | {"pipeline.arena": ""} == {
        "name": "my-run-1-a",
        "prompts.source": "parquet",
        "prompts.path": str(tmp_path / "rows.parquet"),
        "prompts.max_prompt_tokens": 2048,
        "rollout.max_tokens": 4096,
        "rollout.engine": "vllm",
        "rollout.vllm.gpu_memory_utilization": 0.6,
        "model.source": "tiny",
        "train.groups_per_step": 64,
        "train.token_budget": 12288,
        "train.steps": 2,  # epochs of 80 rows, of which 64 are a batch
        "algorithm.name": "grpo",
        "algorithm.group_size": 8,
        "algorithm.options.mini_batches": 4,
        "pipeline.arena": "",
    }
    assert done.remarks["trainer.save_freq"] == "'$EVERY' is not known here: put its value"
    assert "environment.use" in done.remarks[f"{verl.R}.multi_turn.max_assistant_turns"]
    assert done.remarks[f"{verl.R}.name"] == "vLLM is taken for 'sglang'"
    assert "reward.functions" in done.remarks["(reward)"]
    sound({**done.tables(), "reward": {"functions": [{"name": "exact_number"}]}}, files=False)


def test_the_flags_of_a_script_of_trl_become_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(
        "#!/bin/bash\n# trains\nexport LR=1e-6\nBATCH=8 GROUP=4  # of a device\n"
        "accelerate launch --config_file zero3.yaml train.py \\\n"
        "    --model_name_or_path ${MODEL:-tiny} --learning_rate $LR --num-generations=$GROUP \\\n"
        "    --per_device_train_batch_size $((BATCH * 2)) --gradient_accumulation_steps 1 \\\n"
        "    --bf16 --use_vllm false --max_steps 30 \\\n"
        "    --reward_funcs rewards.exact rewards.brevity --reward_weights 1 0.5 > log.txt 2>&1 &\n"
        "tail --follow log.txt\n"
    )
    done = trl.convert(read_settings(file))
    assert done.recipe | {"pipeline.arena": ""} == {
        "model.source": "tiny",
        "model.dtype": "bfloat16",
        "train.learning_rate": 1e-6,
        "train.steps": 30,
        "train.groups_per_step": 4,
        "algorithm.group_size": 4,
        "reward.functions": [
            {"name": "rewards:exact", "weight": 1},
            {"name": "rewards:brevity", "weight": 0.5},
        ],
        "prompts.source": "datasets",
        "pipeline.arena": "",
    }
    assert done.unknown == ["config_file", "follow"]


def test_a_key_may_refer_to_another_one(tmp_path: Path) -> None:
    """As in verl's file of all settings, which names many values once."""
    file = tmp_path / "all.yaml"
    file.write_text(
        "data: {train_batch_size: 8, max_response_length: 32, seed: '${oc.select:none.at, 5}'}\n"
        "actor_rollout_ref:\n"
        "  rollout: {n: '${data.train_batch_size}', top_p: '${a.circle}'}\n"
        "  actor: {ppo_mini_batch_size: '${oc.select:actor_rollout_ref.rollout.n, 1}'}\n"
        "a: {circle: '${a.circle}'}\n"
    )
    done = verl.convert(read_settings(file))
    assert done.recipe["algorithm.group_size"] == 8
    assert done.recipe["algorithm.options.mini_batches"] == 1
    assert done.recipe["seed"] == 5
    assert "put its value" in done.remarks["actor_rollout_ref.rollout.top_p"]


@pytest.mark.parametrize(
    ("given_settings", "too_long"),
    [
        ({}, "fail"),
        ({"data.truncation": "left"}, "cut"),
        ({"data.truncation": "right"}, None),
        ({"data.truncation": "error", "data.filter_overlong_prompts": True}, None),
    ],
)
def test_prompts_that_are_too_long_for_verl(
    given_settings: dict[str, Any], too_long: str | None
) -> None:
    """It filters them before it cuts, and cuts other sides than the beginning, which nothing here
    does."""
    done = verl.convert({"data.max_prompt_length": 64, **given_settings})
    assert done.recipe.get("prompts.too_long") == too_long


@pytest.mark.parametrize(
    ("given_settings", "every"),
    [
        ({"eval_steps": 5, "save_steps": 7}, (None, 7)),
        ({"eval_steps": 5, "eval_strategy": "steps"}, (5, None)),
        ({"save_steps": 7, "save_strategy": "no"}, (None, None)),
        ({"save_steps": 7, "save_strategy": False}, (None, None)),
        ({"save_steps": 0.25, "max_steps": 40}, (None, 10)),
        ({"save_steps": 0.25}, (None, None)),
    ],
)
def test_trl_evaluates_and_saves_by_its_strategies(
    given_settings: dict[str, Any], every: tuple[int | None, int | None]
) -> None:
    recipe = trl.convert(given_settings).recipe
    assert (recipe.get("evaluate.every"), recipe.get("checkpoint.every")) == every


junk = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10**6),
    st.floats(allow_nan=False),
    st.sampled_from(
        ["", "abc", "1e-3", "8", "$x", Unresolved("${x}"), "-1", "vllm", "grpo", "gae", "steps"]
    ),
    st.lists(st.one_of(st.integers(), st.text(max_size=3)), max_size=3),
)


@pytest.mark.parametrize("module", [trl, verl])
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_no_value_of_a_setting_ends_the_conversion_or_makes_a_key_that_a_recipe_refuses(
    module: Any, data: st.DataObject
) -> None:
    names = st.lists(st.sampled_from([*module.RULES]), max_size=12, unique=True)
    given_settings = {name: data.draw(junk, name) for name in data.draw(names)}
    done = module.convert(given_settings)
    tables = {"name": "converted", **done.tables()}
    if "reward" in tables:  # code that is not here
        tables["reward"]["functions"] = [{"name": "exact_number"}]
    tables.get("environment", {}).pop("use", None)
    assert not problem_keys(tables) & done.recipe.keys()
