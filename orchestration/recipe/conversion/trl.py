"""The arguments of TRL's GRPOTrainer, in the YAML file of its command or of a script."""

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

SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
OPTIMIZERS = {
    "adamw_torch": None,
    "adamw_torch_fused": None,
    "adamw_torch_8bit": "adamw8bit",  # of torchao too
}
DTYPES = {"float32": None, "bfloat16": "bfloat16", "auto": None}
LOSSES: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"algorithm.options.loss_normalization": "sequence"},
    "bnpo": {},
    "dapo": {},
    "dr_grpo": {"algorithm.name": "dr_grpo"},
    "cispo": {"algorithm.name": "cispo"},
    "sapo": {"algorithm.name": "sapo"},
}
TRUE_ONLY = {True: None}
SYNC = ("sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha")
OPTIONS = "algorithm.options"


def _strategy(value: Any) -> str:
    return "no" if value is False else as_text(value)  # as YAML reads a no


RULES: Mapping[str, Rule] = {
    "model_name_or_path": To("model.source", note="put the model's folder here"),
    "dtype": To("model.dtype", DTYPES),
    "torch_dtype": To("model.dtype", DTYPES),
    "bf16": To("model.dtype", {True: "bfloat16", False: None}),
    "dataset_name": To("prompts.path", note="put the file or folder, and its kind as source"),
    "dataset_path": To("prompts.path"),
    "dataset_train_split": To("prompts.split"),
    "dataset_prompt_column": To("prompts.column"),
    "system_prompt": To("prompts.system"),
    "chat_template_path": To("prompts.chat_template"),
    "dataset_test_split": Not("held-out prompts are a share of the rows: prompts.held_out"),
    "dataset_config": Not("name the rows by prompts.path and prompts.split"),
    "max_prompt_length": To("prompts.max_prompt_tokens"),
    "max_completion_length": To("rollout.max_tokens"),
    "num_generations": By("algorithm.group_size", as_number),
    "per_device_train_batch_size": By("train.groups_per_step", as_number),
    "gradient_accumulation_steps": By("train.groups_per_step", as_number),
    "generation_batch_size": By("train.groups_per_step, algorithm.options.mini_batches", as_number),
    "steps_per_generation": By("train.groups_per_step, algorithm.options.mini_batches", as_number),
    "temperature": To("rollout.temperature", as_number),
    "top_p": To("rollout.top_p", as_number),
    "top_k": To("rollout.top_k"),
    "min_p": To("rollout.min_p", as_number),
    "repetition_penalty": To("rollout.repetition_penalty", as_number),
    "learning_rate": To("train.learning_rate", as_number),
    "optim": To("train.optimizer", OPTIMIZERS),
    "lr_scheduler_type": To("train.schedule", SCHEDULES),
    "lr_scheduler_kwargs.min_lr_rate": To("train.schedule_floor", as_number),
    "warmup_steps": To("train.warmup_steps"),
    "warmup_ratio": By("train.warmup_steps", as_number),
    "weight_decay": To("train.weight_decay", as_number),
    "adam_beta1": By("train.betas", as_number),
    "adam_beta2": By("train.betas", as_number),
    "max_grad_norm": To("train.grad_clip", as_number),
    "max_steps": To("train.steps", lambda steps: steps if steps > 0 else None),
    "num_train_epochs": By("train.steps", as_number),
    "gradient_checkpointing": To("train.activation_checkpointing", {True: True, False: None}),
    "seed": To("seed"),
    "beta": To(f"{OPTIONS}.kl_coef", lambda beta: as_number(beta) or None),
    "epsilon": By(f"{OPTIONS}.clip_low", as_number),
    "epsilon_high": By("algorithm.options.clip_high", as_number),
    "delta": To(f"{OPTIONS}.max_ratio", as_number),
    "num_iterations": To(f"{OPTIONS}.epochs"),
    "loss_type": By("algorithm.name, algorithm.options.loss_normalization", as_text),
    "importance_sampling_level": To(
        f"{OPTIONS}.ratio_level", {"token": None, "sequence": "geometric"}
    ),
    "scale_rewards": By(f"{OPTIONS}.scale_rewards, {OPTIONS}.deviation_of"),
    "multi_objective_aggregation": To(
        "algorithm.name", {"sum_then_normalize": None, "normalize_then_sum": "gdpo"}
    ),
    "mask_truncated_completions": To("rollout.truncated", {True: "mask", False: None}),
    "off_policy_mask_threshold": To(f"{OPTIONS}.off_policy_mask", as_number),
    "entropy_coef": To(f"{OPTIONS}.entropy_coef", lambda value: as_number(value) or None),
    "use_adaptive_entropy": By(f"{OPTIONS}.entropy_target"),
    "entropy_target": By(f"{OPTIONS}.entropy_target", as_number),
    "entropy_coef_delta": By(f"{OPTIONS}.entropy_coef_step", as_number),
    "entropy_coef_max": By(f"{OPTIONS}.entropy_coef_max", as_number),
    "entropy_coef_min": Not("the weight of the bonus falls to 0"),
    "top_entropy_quantile": To(
        f"{OPTIONS}.high_entropy_share", lambda value: as_number(value) if value < 1 else None
    ),
    "sapo_temperature_pos": To(f"{OPTIONS}.gate_positive", as_number),
    "sapo_temperature_neg": To(f"{OPTIONS}.gate_negative", as_number),
    "use_bias_correction_kl": To(f"{OPTIONS}.kl_weighted", {True: True, False: None}),
    "vllm_importance_sampling_correction": Not(),
    "reward_funcs": By("reward.functions"),
    "reward_weights": By("reward.functions"),
    "max_tool_calling_iterations": To("environment.max_turns", lambda calls: calls + 1),
    "environment_factory": To("environment.use", note="name it as module:Class"),
    "use_vllm": To("rollout.engine", {True: "vllm", False: None}),
    "vllm_mode": Not(),
    "vllm_gpu_memory_utilization": To("rollout.vllm.gpu_memory_utilization", as_number),
    "vllm_tensor_parallel_size": To("rollout.vllm.tensor_parallel"),
    "vllm_max_model_length": To("rollout.vllm.max_model_len"),
    "use_peft": By("model.lora.rank"),
    "lora_r": By("model.lora.rank", as_number),
    "lora_alpha": To("model.lora.alpha", as_number),
    "lora_target_modules": To(
        "model.lora.targets", lambda names: names if names != "all-linear" else None
    ),
    "lora_dropout": Not("adapters have no dropout here"),
    "eval_steps": By("evaluate.every", as_number),
    "eval_strategy": By("evaluate.every", _strategy),
    "save_steps": By("checkpoint.every", as_number),
    "save_strategy": By("checkpoint.every", _strategy),
    "save_total_limit": To("checkpoint.keep"),
    "output_dir": Not("asyncdock run RECIPE --out FOLDER"),
    "run_name": To("name"),
    "report_to": Not("asyncdock track RUN shows a run in TensorBoard, MLflow or W&B"),
    "push_to_hub": Not("asyncdock export RUN --push REPO"),
    "sync_ref_model": By("model.reference_every"),
    "ref_model_sync_steps": By("model.reference_every", as_number),
    "ref_model_mixup_alpha": By("model.reference_mix", as_number),
    "model_revision": Not("put the folder of that revision into model.source"),
    "attn_implementation": Not(),
    "gradient_checkpointing_kwargs.use_reentrant": Not(),
    "per_device_eval_batch_size": Not(),
    "do_eval": Not(),
    "overwrite_output_dir": Not("a run's folder is new: asyncdock run RECIPE --out FOLDER"),
    "hub_model_id": Not("asyncdock export RUN --push REPO"),
    "hub_strategy": Not(),
    "log_level": Not(),
    "logging_first_step": Not(),
    "logging_strategy": Not(),
    "use_liger_kernel": Not(),
    "logging_steps": Not(),
    "log_completions": Not(),
    "disable_dropout": Not(),
    "remove_unused_columns": Not(),
    "trust_remote_code": Not("code that comes with a model is never run"),
}


def convert(settings: Mapping[str, Any]) -> Conversion:
    """Return the recipe of TRL's ``settings``."""
    done, settings = apply_rules(settings, RULES)
    done.put("algorithm.group_size", settings.get("num_generations"), "num_generations")
    _batch(settings, done)
    put_steps(done, "num_train_epochs", settings.get("num_train_epochs", 0))
    _schedule(settings, done)
    loss = settings.get("loss_type", "dapo")
    if loss in LOSSES:
        for key, value in LOSSES[loss].items():
            done.put(key, value, "loss_type")
    else:
        done.remarks["loss_type"] = f"{loss!r} is not here; docs/stages.md lists the algorithms"
    _clip(settings, done)
    if settings.get("scale_rewards") == "batch":
        done.put(f"{OPTIONS}.deviation_of", "batch", "scale_rewards")
    elif settings.get("scale_rewards") in ("none", False):
        done.put(f"{OPTIONS}.scale_rewards", False, "scale_rewards")
    _entropy(settings, done)
    if "warmup_ratio" in settings and "train.steps" in done.recipe:
        steps = round(settings["warmup_ratio"] * done.recipe["train.steps"])
        done.put("train.warmup_steps", steps, "warmup_ratio")
    if {"adam_beta1", "adam_beta2"} & settings.keys():
        betas = [settings.get(f"adam_beta{n}", beta) for n, beta in ((1, 0.9), (2, 0.999))]
        done.put("train.betas", betas, "adam_beta1", "adam_beta2")
    if settings.get("use_peft") or "lora_r" in settings:
        done.put("model.lora.rank", settings.get("lora_r", 16), "use_peft", "lora_r")
    if settings.get("sync_ref_model"):
        done.put("model.reference_every", settings.get("ref_model_sync_steps", 512), *SYNC[:2])
        done.put("model.reference_mix", settings.get("ref_model_mixup_alpha", 0.6), SYNC[2])
    _rewards(settings, done)
    done.put("prompts.source", source_of(done.recipe.get("prompts.path"), "datasets"))
    done.remarks["(device count)"] = (
        "TRL's batch is that of one device: multiply train.groups_per_step by their number"
    )
    make_sound(done)
    if "num_train_epochs" in done.remarks:
        done.remarks.pop("(train.steps)", None)
    return done


def _batch(settings: Mapping[str, Any], done: Conversion) -> None:
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    if not {*names} & settings.keys():
        return
    rows = settings.get(names[0], 8) * settings.get(names[1], 1)
    group = settings.get("num_generations", 8)
    if min(rows, group) < 1:
        return
    done.put("train.groups_per_step", max(1, rows // group), *names)
    generated = settings.get("generation_batch_size") or rows * settings.get(
        "steps_per_generation", 1
    )
    if generated > rows:
        parts = generated // rows
        done.put("train.groups_per_step", max(1, generated // group), *names)
        done.put(f"{OPTIONS}.mini_batches", parts, "generation_batch_size", "steps_per_generation")


def _schedule(settings: Mapping[str, Any], done: Conversion) -> None:
    """Set when the run is evaluated and saved: each so many steps, or that share of all steps."""
    total = done.recipe.get("train.steps", 0)
    usual = {"eval": "no", "save": "steps"}
    for what, key in (("eval", "evaluate.every"), ("save", "checkpoint.every")):
        name = f"{what}_steps"
        every = settings.get(name)
        if every is None or settings.get(f"{what}_strategy", usual[what]) != "steps":
            continue
        if every < 1 and not total:
            done.remarks[name] = f"is a share of all steps: put that many into {key}"
        else:
            done.put(key, round(every if every >= 1 else every * total) or 1, name)


def _entropy(settings: Mapping[str, Any], done: Conversion) -> None:
    if not settings.get("use_adaptive_entropy"):
        return
    options = {"entropy_target": "entropy_target", "entropy_coef_delta": "entropy_coef_step"}
    options["entropy_coef_max"] = "entropy_coef_max"
    for name, option in options.items():
        default = {"entropy_target": 0.2}.get(name)
        value = settings.get(name, default)
        if value is not None:
            done.put(f"{OPTIONS}.{option}", value, name, "use_adaptive_entropy")


def _clip(settings: Mapping[str, Any], done: Conversion) -> None:
    low = settings.get("epsilon", 0.2)
    high = settings.get("epsilon_high") or low
    if settings.get("loss_type") == "cispo":
        high -= 1  # TRL has the cut itself
    if "epsilon" in settings:
        done.put(f"{OPTIONS}.clip_low", low, "epsilon")
    if {"epsilon", "epsilon_high"} & settings.keys():
        done.put(f"{OPTIONS}.clip_high", high, "epsilon_high")


def _rewards(settings: Mapping[str, Any], done: Conversion) -> None:
    names = _listed(settings.get("reward_funcs"))
    weights = _listed(settings.get("reward_weights"))
    if not names:
        return
    functions = list[dict[str, Any]]()
    weights += [1.0] * (len(names) - len(weights))
    for name, weight in zip(names, weights, strict=False):
        module, _, function = str(name).rpartition(".")
        functions.append({"name": f"{module}:{function}" if module else function})
        try:
            functions[-1]["weight"] = as_number(weight)
        except LookupError:
            done.remarks["reward_weights"] = f"{weight!r} is no number"
    done.put("reward.functions", functions, "reward_funcs", "reward_weights")
    done.remarks["reward_funcs"] = "name each as module:function; the signature stays"


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return [*value] if isinstance(value, list) else [value]
