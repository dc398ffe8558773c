"""The configuration of verl's PPO trainer: its YAML, or the overrides in a script."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestration.recipe.conversion.conversion import (
    By,
    Conversion,
    Not,
    Rule,
    To,
    apply_rules,
    as_number,
    as_text,
    put_steps,
    source_of,
)
from orchestration.recipe.conversion.sound import make_sound

A = "actor_rollout_ref.actor"
R = "actor_rollout_ref.rollout"
M = "actor_rollout_ref.model"
OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg"
FORMER_OVERLONG = "reward_model.overlong_buffer"
CORRECTION = "algorithm.rollout_correction"
OPTIONS = "algorithm.options"
ESTIMATORS = {
    "grpo": "grpo",
    "gae": "ppo",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp",
}
LOSS_MODES = {
    "vanilla": None,
    "gspo": "gspo",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "sapo": "sapo",
    "cispo": "cispo",
}
ESTIMATORS_OF_KL = {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"}
TOO_LONG = {"error": "fail", "left": "cut"}  # of truncation: the beginning is cut off
OF_LOSSES = {  # options of one algorithm, which verl's file of all settings has for each
    "clip_cov": {
        "policy_loss.clip_cov_ratio": "cov_share",
        "policy_loss.clip_cov_lb": "cov_low",
        "policy_loss.clip_cov_ub": "cov_high",
    },
    "kl_cov": {
        "policy_loss.kl_cov_ratio": "cov_share",
        "policy_loss.ppo_kl_coef": "cov_penalty",
    },
    "sapo": {"tau_pos": "gate_positive", "tau_neg": "gate_negative"},
}
BUDGET = "micro-batches follow from train.token_budget"
LEVELS = {"token": None, "sequence": "sequence"}
STALENESS = "each step's weights are delivered; pipeline.staleness bounds the age in versions"
REFERENCE = "it is split as the policy: train.tp and its like"
CRITIC = "as the policy's: train.activation_checkpointing"
OFFLOAD = "masters and optimizer state stay where the trainer computes"
RULES: Mapping[str, Rule] = {
    "data.train_files": By("prompts.path"),
    "data.val_files": Not("held-out prompts are a share of the rows: prompts.held_out"),
    "data.prompt_key": To("prompts.column"),
    "data.train_batch_size": By("train.groups_per_step", as_number),
    "data.max_prompt_length": To("prompts.max_prompt_tokens"),
    "data.max_response_length": To("rollout.max_tokens"),
    "data.filter_overlong_prompts": By("prompts.too_long"),
    "data.truncation": By("prompts.too_long", as_text),
    "data.return_raw_chat": Not(),
    "data.trust_remote_code": Not("code that comes with a model is never run"),
    f"{M}.trust_remote_code": Not("code that comes with a model is never run"),
    "data.image_key": Not("prompts are texts"),
    "data.shuffle": To("prompts.shuffle", {True: None, False: False}),
    "data.seed": To("seed"),
    f"{M}.path": To("model.source", note="put the model's folder here"),
    f"{M}.lora_rank": To("model.lora.rank", lambda rank: rank or None),
    f"{M}.lora_alpha": To("model.lora.alpha", as_number),
    f"{M}.target_modules": To(
        "model.lora.targets", lambda names: names if names != "all-linear" else None
    ),
    f"{M}.enable_gradient_checkpointing": To(
        "train.activation_checkpointing", {True: True, False: None}
    ),
    f"{M}.use_remove_padding": Not(),
    f"{A}.optim.lr": To("train.learning_rate", as_number),
    f"{A}.optim.lr_warmup_steps": To("train.warmup_steps", lambda n: n if n > 0 else None),
    f"{A}.optim.lr_warmup_steps_ratio": By("train.warmup_steps", as_number),
    f"{A}.optim.min_lr_ratio": To("train.schedule_floor", as_number),
    f"{A}.optim.warmup_style": To("train.schedule", {"constant": None, "cosine": "cosine"}),
    f"{A}.optim.lr_scheduler_type": To("train.schedule", {"constant": None, "cosine": "cosine"}),
    f"{A}.optim.weight_decay": To("train.weight_decay", as_number),
    f"{A}.optim.betas": To("train.betas"),
    f"{A}.grad_clip": To("train.grad_clip", as_number),
    f"{A}.optim.clip_grad": To("train.grad_clip", as_number),
    f"{A}.tau_pos": By(f"{OPTIONS}.gate_positive", as_number),
    f"{A}.tau_neg": By(f"{OPTIONS}.gate_negative", as_number),
    f"{A}.ppo_mini_batch_size": By("algorithm.options.mini_batches", as_number),
    f"{A}.ppo_micro_batch_size": Not(BUDGET),
    f"{A}.ppo_micro_batch_size_per_gpu": Not(BUDGET),
    f"{A}.ppo_max_token_len_per_gpu": To("train.token_budget"),
    f"{A}.use_dynamic_bsz": Not(),
    f"{A}.ppo_epochs": To(f"{OPTIONS}.epochs"),
    f"{A}.clip_ratio": By("algorithm.options.clip_low, algorithm.options.clip_high", as_number),
    f"{A}.clip_ratio_low": By("algorithm.options.clip_low", as_number),
    f"{A}.clip_ratio_high": By("algorithm.options.clip_high", as_number),
    f"{A}.clip_ratio_c": To(f"{OPTIONS}.max_ratio", as_number),
    f"{A}.use_kl_loss": By("algorithm.options.kl_coef"),
    f"{A}.kl_loss_coef": By("algorithm.options.kl_coef", as_number),
    f"{A}.kl_loss_type": By("algorithm.options.kl_estimator", as_text),
    f"{A}.entropy_coeff": To(f"{OPTIONS}.entropy_coef", lambda value: as_number(value) or None),
    f"{A}.loss_agg_mode": To(
        f"{OPTIONS}.loss_normalization",
        {
            "token-mean": "token",
            "seq-mean-token-mean": "sequence",
            "seq-mean-token-sum-norm": "constant",
        },
    ),
    f"{A}.policy_loss.loss_mode": To("algorithm.name", LOSS_MODES),
    f"{A}.policy_loss.clip_cov_ratio": By(f"{OPTIONS}.cov_share", as_number),
    f"{A}.policy_loss.clip_cov_lb": By(f"{OPTIONS}.cov_low", as_number),
    f"{A}.policy_loss.clip_cov_ub": By(f"{OPTIONS}.cov_high", as_number),
    f"{A}.policy_loss.kl_cov_ratio": By(f"{OPTIONS}.cov_share", as_number),
    f"{A}.policy_loss.ppo_kl_coef": By(f"{OPTIONS}.cov_penalty", as_number),
    f"{A}.ulysses_sequence_parallel_size": To(
        "train.cp", lambda ranks: ranks if ranks > 1 else None
    ),
    f"{A}.megatron.tensor_model_parallel_size": To("train.tp"),
    f"{A}.megatron.pipeline_model_parallel_size": To("train.pp"),
    f"{A}.megatron.context_parallel_size": To("train.cp"),
    f"{A}.megatron.expert_model_parallel_size": To("train.ep"),
    f"{A}.strategy": Not(),
    f"{A}.fsdp_config.param_offload": Not(OFFLOAD),
    f"{A}.fsdp_config.optimizer_offload": Not(OFFLOAD),
    f"{R}.name": By("rollout.engine", as_text),
    f"{R}.n": To("algorithm.group_size"),
    f"{R}.temperature": To("rollout.temperature", as_number),
    f"{R}.top_p": To("rollout.top_p", as_number),
    f"{R}.top_k": To("rollout.top_k", lambda k: max(0, k)),
    f"{R}.tensor_model_parallel_size": To("rollout.vllm.tensor_parallel"),
    f"{R}.gpu_memory_utilization": To("rollout.vllm.gpu_memory_utilization", as_number),
    f"{R}.max_model_len": To("rollout.vllm.max_model_len"),
    f"{R}.enforce_eager": To("rollout.vllm.enforce_eager", {True: True, False: None}),
    f"{R}.max_num_seqs": To("rollout.max_rows"),
    f"{R}.response_length": Not(),
    f"{R}.prompt_length": Not(),
    f"{R}.mode": Not(),
    f"{R}.enable_chunked_prefill": Not(),
    f"{R}.free_cache_engine": Not("colocate = true shares a device"),
    f"{R}.load_format": Not(),
    f"{R}.max_num_batched_tokens": Not(),
    f"{R}.log_prob_use_dynamic_bsz": Not(),
    f"{R}.log_prob_max_token_len_per_gpu": Not(BUDGET),
    f"{R}.multi_turn.tool_config_path": Not("tools are methods of an environment: environment.use"),
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": Not(),
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": Not(BUDGET),
    f"{A}.use_torch_compile": Not(),
    f"{A}.megatron.param_offload": Not(OFFLOAD),
    f"{A}.megatron.grad_offload": Not(OFFLOAD),
    f"{A}.megatron.optimizer_offload": Not(OFFLOAD),
    "actor_rollout_ref.ref.megatron.tensor_model_parallel_size": Not(REFERENCE),
    "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size": Not(REFERENCE),
    "actor_rollout_ref.ref.megatron.context_parallel_size": Not(REFERENCE),
    "actor_rollout_ref.ref.megatron.expert_model_parallel_size": Not(REFERENCE),
    "actor_rollout_ref.ref.megatron.param_offload": Not(OFFLOAD),
    f"{R}.multi_turn.max_assistant_turns": To("environment.max_turns"),
    f"{R}.log_prob_micro_batch_size_per_gpu": Not(BUDGET),
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": Not(BUDGET),
    "actor_rollout_ref.ref.fsdp_config.param_offload": Not(OFFLOAD),
    "actor_rollout_ref.hybrid_engine": Not("colocate = true shares a device"),
    "algorithm.adv_estimator": By("algorithm.name", as_text),
    "algorithm.gamma": By("algorithm.options.gamma", as_number),
    "algorithm.lam": By("algorithm.options.gae_lambda", as_number),
    "algorithm.use_kl_in_reward": By("algorithm.options.kl_reward"),
    "algorithm.kl_ctrl.kl_coef": By("algorithm.options.kl_reward", as_number),
    "algorithm.kl_penalty": By("algorithm.options.kl_reward_estimator"),
    "algorithm.norm_adv_by_std_in_grpo": To(f"{OPTIONS}.scale_rewards", {True: None, False: False}),
    "algorithm.filter_groups.enable": By(f"{OPTIONS}.drop_equal"),
    "algorithm.filter_groups.metric": By(f"{OPTIONS}.drop_by"),
    "algorithm.filter_groups.max_num_gen_batches": Not("algorithm.max_refill, in groups"),
    f"{OVERLONG}.enable": By("algorithm.name"),
    f"{OVERLONG}.len": By(f"{OPTIONS}.overlong_tokens", as_number),
    f"{OVERLONG}.penalty_factor": By(f"{OPTIONS}.overlong_tokens", as_number),
    f"{OVERLONG}.log": Not(),
    "reward_model.reward_kwargs.max_resp_len": By(f"{OPTIONS}.longest_response", as_number),
    "reward_model.reward_manager": Not(),
    f"{CORRECTION}.rollout_is": By(f"{OPTIONS}.correction, {OPTIONS}.correction_level", as_text),
    f"{CORRECTION}.rollout_is_threshold": By(f"{OPTIONS}.weight_high", as_number),
    f"{CORRECTION}.bypass_mode": By(f"{OPTIONS}.proximal"),
    f"{CORRECTION}.rollout_rs": Not("correction = 'mask' leaves tokens out by their weights"),
    "async_training.require_batches": By(
        f"train.groups_per_step, {OPTIONS}.mini_batches", as_number
    ),
    "async_training.staleness_threshold": Not(STALENESS),
    "async_training.trigger_parameter_sync_step": Not(STALENESS),
    "async_training.partial_rollout": Not("responses go on over a swap: rollout.on_update"),
    "async_training.use_rollout_log_probs": Not("algorithm.options.proximal"),
    "async_training.compute_prox_log_prob": Not("algorithm.options.proximal"),
    "rollout.total_rollout_steps": By("train.steps", as_number),
    "rollout.test_freq": To("evaluate.every", lambda steps: steps if steps > 0 else None),
    "rollout.nnodes": Not("docs/cluster.md: workers on several machines"),
    "rollout.n_gpus_per_node": Not("rollout.workers, each on rollout.vllm.tensor_parallel devices"),
    "critic.model.path": To("critic.source", note="put the model's folder here"),
    "critic.optim.lr": To("critic.learning_rate", as_number),
    "critic.ppo_micro_batch_size_per_gpu": Not(BUDGET),
    "critic.ppo_max_token_len_per_gpu": Not(BUDGET),
    "critic.use_dynamic_bsz": Not(),
    "critic.model.use_remove_padding": Not(),
    "critic.model.enable_gradient_checkpointing": Not(CRITIC),
    "critic.model.fsdp_config.param_offload": Not(OFFLOAD),
    "critic.model.fsdp_config.optimizer_offload": Not(OFFLOAD),
    "critic.cliprange_value": To(f"{OPTIONS}.value_clip", as_number),
    "custom_reward_function.path": By("reward.functions"),
    "custom_reward_function.name": By("reward.functions"),
    "reward_model.enable": Not("name a function that asks it in reward.functions"),
    "trainer.total_training_steps": To("train.steps"),
    "trainer.total_epochs": By("train.steps", as_number),
    "trainer.save_freq": To("checkpoint.every", lambda steps: steps if steps > 0 else None),
    "trainer.test_freq": To("evaluate.every", lambda steps: steps if steps > 0 else None),
    "trainer.experiment_name": To("name"),
    "trainer.val_before_train": Not(),
    "trainer.resume_mode": Not("asyncdock resume RUN"),
    "trainer.critic_warmup": By("algorithm.options.critic_warmup_steps", as_number),
    "trainer.n_gpus_per_node": Not("a rank of the trainer takes a device: train.dp, train.tp"),
    "trainer.nnodes": Not("docs/cluster.md: workers on several machines"),
    "trainer.logger": Not("asyncdock track RUN shows a run in TensorBoard, MLflow or W&B"),
    "trainer.project_name": Not(),
    "trainer.default_local_dir": Not("asyncdock run RECIPE --out FOLDER"),
}


def convert(settings: Mapping[str, Any]) -> Conversion:
    """Return the recipe of verl's ``settings``."""
    settings = {
        name.replace(FORMER_OVERLONG, OVERLONG) if name.startswith(FORMER_OVERLONG) else name: value
        for name, value in settings.items()
    }
    done, settings = apply_rules(settings, RULES)
    _data(settings, done)
    _engine(settings, done)
    _algorithm(settings, done)
    _dapo(settings, done)
    _kl(settings, done)
    _clip(settings, done)
    _batch(settings, done)
    _correction(settings, done)
    put_steps(done, "trainer.total_epochs", settings.get("trainer.total_epochs", 0))
    ratio = settings.get(f"{A}.optim.lr_warmup_steps_ratio")
    if ratio and "train.steps" in done.recipe:
        steps = round(ratio * done.recipe["train.steps"])
        done.put("train.warmup_steps", steps, f"{A}.optim.lr_warmup_steps_ratio")
    make_sound(done)
    if "trainer.total_epochs" in done.remarks:
        done.remarks.pop("(train.steps)", None)
    if "reward.functions" not in done.recipe:
        done.remarks["(reward)"] = (
            "verl picks a reward by the column data_source; name yours as module:function in "
            "reward.functions"
        )
    return done


def _batch(settings: Mapping[str, Any], done: Conversion) -> None:
    """Set the prompts of a step and its optimizer steps. Where rollouts are asynchronous there, a
    step has so many mini-batches, and ``data.train_batch_size`` is 0."""
    name, part_name = "data.train_batch_size", f"{A}.ppo_mini_batch_size"
    prompts, part = settings.get(name, 0), settings.get(part_name, 0)
    if not prompts and part:
        name = part_name
        prompts = part * settings.get("async_training.require_batches", 1)
    done.put("train.groups_per_step", prompts or None, name)
    if prompts and part:
        done.put(f"{OPTIONS}.mini_batches", max(1, prompts // part), part_name)
    total = settings.get("rollout.total_rollout_steps", 0)
    if total and prompts and "train.steps" not in done.recipe:
        done.put("train.steps", max(1, total // prompts), "rollout.total_rollout_steps")


def _correction(settings: Mapping[str, Any], done: Conversion) -> None:
    level = settings.get(f"{CORRECTION}.rollout_is")
    if level in LEVELS and not settings.get(f"{CORRECTION}.bypass_mode"):
        done.put(f"{OPTIONS}.proximal", "recomputed", f"{CORRECTION}.bypass_mode")
        done.put(f"{OPTIONS}.correction", "truncate", f"{CORRECTION}.rollout_is")
        done.put(f"{OPTIONS}.correction_level", LEVELS[level], f"{CORRECTION}.rollout_is")
        name = f"{CORRECTION}.rollout_is_threshold"
        done.put(f"{OPTIONS}.weight_high", settings.get(name), name)


def _data(settings: Mapping[str, Any], done: Conversion) -> None:
    files = settings.get("data.train_files")
    path = files[0] if isinstance(files, list) and files else files
    done.put("prompts.source", source_of(path, "parquet"))
    if path:
        done.put("prompts.path", path, "data.train_files")
    if isinstance(files, list) and len(files) > 1:
        done.remarks["data.train_files"] = "the first one; name the others in prompts.sources"
    filtered = settings.get("data.filter_overlong_prompts", False)
    truncation = settings.get("data.truncation", "error")
    if not filtered and "prompts.max_prompt_tokens" in done.recipe:
        if truncation in TOO_LONG:
            done.put("prompts.too_long", TOO_LONG[truncation], "data.truncation")
        else:
            done.remarks["data.truncation"] = f"{truncation!r} has no equal here: they are skipped"
    name = settings.get("custom_reward_function.name", "compute_score")
    if script := settings.get("custom_reward_function.path"):
        module = str(script).rpartition("/")[2].removesuffix(".py")
        function = [{"name": f"{module}:{name}"}]
        done.put("reward.functions", function, "custom_reward_function.path")
        done.remarks["custom_reward_function.path"] = (
            "verl calls it with one solution; here it gets lists: (prompts, completions, **columns)"
        )


def _engine(settings: Mapping[str, Any], done: Conversion) -> None:
    name = settings.get(f"{R}.name")
    options = [key for key in done.recipe if key.startswith("rollout.vllm.")]
    if name == "hf":
        for key in options:
            done.refuse(key, "has no effect with the engine hf")
    elif name or options:
        done.put("rollout.engine", "vllm", f"{R}.name")
        if name not in ("vllm", None):
            done.remarks[f"{R}.name"] = f"vLLM is taken for {name!r}"


def _algorithm(settings: Mapping[str, Any], done: Conversion) -> None:
    estimator = settings.get("algorithm.adv_estimator", "gae")
    if estimator not in ESTIMATORS:
        done.remarks["algorithm.adv_estimator"] = f"{estimator!r} has no equal here"
        return
    name = ESTIMATORS[estimator]
    if name == "grpo":
        name = done.recipe.get("algorithm.name", name)
    done.put("algorithm.name", name, "algorithm.adv_estimator")
    if estimator == "reinforce_plus_plus_baseline":
        done.put(f"{OPTIONS}.baseline", "group")
    if name == "ppo":
        for key, option in (("gamma", "gamma"), ("lam", "gae_lambda")):
            if f"algorithm.{key}" in settings:
                done.put(f"{OPTIONS}.{option}", settings[f"algorithm.{key}"], f"algorithm.{key}")
        if "critic.source" in done.recipe or "critic.learning_rate" in done.recipe:
            done.put(f"{OPTIONS}.critic", "own")
        warmup = settings.get("trainer.critic_warmup")
        done.put(f"{OPTIONS}.critic_warmup_steps", warmup or None, "trainer.critic_warmup")
    else:
        for key in [key for key in done.recipe if key.startswith("critic.")]:
            done.refuse(key, f"{name} has no critic")
    for setting, option in OF_LOSSES.get(name, {}).items():
        done.put(f"{OPTIONS}.{option}", settings.get(f"{A}.{setting}"), f"{A}.{setting}")


def _dapo(settings: Mapping[str, Any], done: Conversion) -> None:
    """Set DAPO's penalty of long responses, and its dynamic sampling."""
    if settings.get(f"{OVERLONG}.enable") and done.recipe.get("algorithm.name") == "grpo":
        done.put("algorithm.name", "dapo", f"{OVERLONG}.enable")
        done.put(f"{OPTIONS}.drop_equal", False)
        if f"{A}.clip_ratio_high" not in settings:  # the default of dapo is another one
            done.put(f"{OPTIONS}.clip_high", settings.get(f"{A}.clip_ratio", 0.2))
        longest = done.recipe.get("rollout.max_tokens")
        for option, name, value in (
            ("longest_response", "reward_model.reward_kwargs.max_resp_len", longest),
            ("overlong_tokens", f"{OVERLONG}.len", None),
        ):
            done.put(f"{OPTIONS}.{option}", settings.get(name, value), name)
        if settings.get(f"{OVERLONG}.penalty_factor", 1) != 1:
            done.remarks[f"{OVERLONG}.penalty_factor"] = "the whole penalty is 1 here"
    if settings.get("algorithm.filter_groups.enable"):
        done.put(f"{OPTIONS}.drop_equal", True, "algorithm.filter_groups.enable")
        metric = settings.get("algorithm.filter_groups.metric", "acc")
        if metric != "acc" and done.recipe.get("algorithm.name") == "dapo":
            done.put(f"{OPTIONS}.drop_by", "penalized", "algorithm.filter_groups.metric")


def _kl(settings: Mapping[str, Any], done: Conversion) -> None:
    if settings.get(f"{A}.use_kl_loss"):
        coef = settings.get(f"{A}.kl_loss_coef", 0.001)
        done.put(f"{OPTIONS}.kl_coef", coef, f"{A}.use_kl_loss", f"{A}.kl_loss_coef")
        kind = str(settings.get(f"{A}.kl_loss_type", "low_var_kl")).removesuffix("+")
        estimator = ESTIMATORS_OF_KL.get(kind)
        if estimator is None:
            done.remarks[f"{A}.kl_loss_type"] = f"{kind!r} has no equal here; k3 is taken"
        elif estimator == "k1":
            done.put(f"{OPTIONS}.kl_weighted", True)
        done.put(f"{OPTIONS}.kl_estimator", estimator, f"{A}.kl_loss_type")
    if settings.get("algorithm.use_kl_in_reward"):
        coef = settings.get("algorithm.kl_ctrl.kl_coef", 0.001)
        names = ("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef")
        done.put(f"{OPTIONS}.kl_reward", coef, *names)
        penalty = ESTIMATORS_OF_KL.get(str(settings.get("algorithm.kl_penalty", "kl")))
        done.put(f"{OPTIONS}.kl_reward_estimator", penalty, "algorithm.kl_penalty")


def _clip(settings: Mapping[str, Any], done: Conversion) -> None:
    for side in ("low", "high"):
        name = f"{A}.clip_ratio_{side}"
        value = settings.get(name, settings.get(f"{A}.clip_ratio"))
        if side == "low" and done.recipe.get("algorithm.name") == "cispo":
            continue  # its ratio has no lower bound
        if value is not None:
            done.put(f"{OPTIONS}.clip_{side}", value, name, f"{A}.clip_ratio")
