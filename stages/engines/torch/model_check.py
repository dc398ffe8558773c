"""Check whether the torch engines can run a model, from its config alone: no weights are loaded.

config ─▶ a small model of the same kind, with random weights ─▶ each engine's own comparison with the plain forward

In float32, with one layer of each kind, windows shorter than the compared sequence, and caps that
bend the scores: what the comparison of the whole model at an engine's start, in its own dtype and
within its windows, may not show.
"""

from __future__ import annotations

import contextlib
import copy
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from stages.engines.protocols import ModelRefused
from stages.engines.registry import Side
from stages.engines.torch.model.attention_interface import PROBE
from stages.model.files import NeedsOwnCode, read_config

# of the small model, at most
VOCABULARY = 512
WIDTH = 64
EXPERTS = 4
WINDOW = PROBE // 3


def refusal(
    folder: Path, side: Side, *, tp: bool = False, pp: bool = False, context: int | None = None
) -> str:
    """Return why the torch engine of ``side`` cannot run the model of the config in ``folder``;
    ``tp``: with its matrices split over several ranks; ``pp``: in pipeline stages; ``context``:
    tokens of the longest sequence. Returns "" when it can, and when a small model of its kind
    cannot be made."""
    return _refusal(folder, (folder / "config.json").read_text(), side, tp, pp, context)


@lru_cache(maxsize=64)
def _refusal(folder: Path, text: str, side: Side, tp: bool, pp: bool, context: int | None) -> str:
    """Return :func:`refusal`, computed once for each content of the config. ``text``: that content,
    so that a changed config is read again."""
    try:
        config = read_config(folder)
    except NeedsOwnCode:
        return ""  # is reported with the folder's files
    except (ValueError, KeyError, TypeError, OSError) as error:
        first, *_ = str(error).split("\n")
        return f"its config cannot be read: {first}"
    if config.get_text_config().is_encoder_decoder:
        return f"{config.model_type!r} is an encoder with a decoder, and only decoders are trained"
    # what from_pretrained looks it up in
    if type(config) not in AutoModelForCausalLM._model_mapping:
        return f"{config.model_type!r} is no causal language model that transformers knows"
    try:
        model = _small_model(config)
    except Exception:  # a kind with sizes of its own: the engine looks at the whole model
        return ""
    try:  # what refuses a model
        if side == "rollout":
            from stages.engines.torch.decoding.decoder import TorchDecoder

            TorchDecoder(model, torch.device("cpu"), context=context)
        else:
            from stages.engines.torch.train import TorchTrainEngine

            TorchTrainEngine(
                model, learning_rate=1e-5, total_steps=1, device="cpu", context=context
            )
            if tp:
                from stages.engines.torch.parallel.tensor import planned_cuts

                planned_cuts(model)
            if pp:
                from stages.engines.torch.parallel.pipeline import planned

                planned(model)
    except ModelRefused as refused:
        (problem,) = refused.problems
        return "; ".join(filter(None, [problem.wrong, problem.fix]))
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return ""


def _small_model(config: PretrainedConfig) -> Any:
    """Return a small model of ``config``'s kind, with one layer of each kind that it has."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = (
            AutoModelForCausalLM.from_config(_small(config), trust_remote_code=False).float().eval()
        )
        model(input_ids=torch.arange(8)[None], use_cache=False)
    return model


def _small(config: PretrainedConfig) -> PretrainedConfig:
    small = copy.deepcopy(config)
    small.dtype = torch.float32
    text = small.get_text_config()
    kinds = list(dict.fromkeys(getattr(text, "layer_types", None) or ())) or ["", ""]
    sizes: dict[str, Any] = {
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "vocab_size": min(text.vocab_size, VOCABULARY),
        "intermediate_size": WIDTH,
        "moe_intermediate_size": WIDTH,
        "num_experts": EXPERTS,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "attention_chunk_size": WINDOW,
        "attn_logit_softcapping": 1.0,
        "final_logit_softcapping": 1.0,
        "initializer_range": 0.1,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if heads := getattr(text, "num_attention_heads", None):
        head = getattr(text, "head_dim", None) or text.hidden_size // heads
        shared = getattr(text, "num_key_value_heads", None) or heads
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1 if shared < heads else 2}
        sizes |= {"head_dim": head, "hidden_size": 2 * head}
    for name, value in sizes.items():
        if getattr(text, name, None) is not None:
            with contextlib.suppress(AttributeError):  # follows from the others
                setattr(text, name, value)
    return small
