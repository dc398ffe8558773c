"""A base model that the models of several clients share.

TorchBase: the frozen tensors, once ─▶ engine(rank 8): a structure of its own over these tensors,
                                   │                   adapters, AdamW
                                   └▶ engine(rank 0): a copy that is trained whole
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

from pipeline.problems import Problem
from stages import device as devices
from stages.adapters.names import adapted_layers, head_name
from stages.adapters.options import AdapterOptions
from stages.calls.interface import ALPHA, CallRefused, ModelOptions
from stages.engines.torch.train import TorchTrainEngine
from stages.model.files import in_one_dtype
from stages.model.load import Tokenizer, load_model


class TorchBase:
    """``model`` on ``device`` (default: the accelerator if there is one), frozen. Its dtype is that
    of the arithmetic; adapters, masters of whole copies and moments are float32.

    ``token_budget``: tokens fed at once; None: no limit. ``context``: tokens of the longest
    sequence; None: as the model's config says. ``vocabulary``: only so many of the first tokens
    have a probability. ``threads``: torch's number of CPU threads. ``options``: further ones of
    :class:`~stages.engines.torch.train.TorchTrainEngine`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        *,
        device: torch.device | str | None = None,
        token_budget: int | None = None,
        context: int | None = None,
        vocabulary: int | None = None,
        threads: int | None = None,
        **options: Any,
    ) -> None:
        self.device = devices.select() if device is None else torch.device(device)
        config = model.config.get_text_config()
        self.tokenizer = tokenizer
        self.token_budget = token_budget
        self.context = context or int(config.max_position_embeddings)
        self.vocabulary = vocabulary or int(config.vocab_size)
        self.dtype = model.dtype
        self.model = model.requires_grad_(False)
        torch.nn.Module.to(model, self.device)
        self._options = options | {
            "device": self.device,
            "threads": threads,
            "context": self.context,
            "vocabulary": vocabulary,
            "compute": model.dtype,
            "grad_clip": None,
            "learning_rate": 0.0,  # AdamOptions of each step have it
            "total_steps": 1,
        }

    @classmethod
    def load(
        cls, source: str, *, dtype: str = "float32", seed: int = 0, **options: Any
    ) -> TorchBase:
        """Load the model ``source``; see :func:`stages.model.load.load_model`. ``options``: the
        constructor's."""
        model, tokenizer = load_model(source, dtype=getattr(torch, dtype), seed=seed)
        return cls(model, tokenizer, **options)

    def engine(self, options: ModelOptions) -> TorchTrainEngine:
        """Make the engine that trains a model with ``options``. Raises CallRefused."""
        adapters = adapter_options(self.model, options)
        if adapters is None:
            whole = in_one_dtype(copy.deepcopy(self.model), torch.float32).requires_grad_(True)
            return TorchTrainEngine(whole, **self._options)
        shared: dict[int, Any] = {id(tensor): tensor for tensor in self.model.parameters()}
        structure = copy.deepcopy(self.model, shared)
        return TorchTrainEngine(structure, adapters=adapters, **self._options)


def adapter_options(model: PreTrainedModel, options: ModelOptions) -> AdapterOptions | None:
    """Return the adapters that ``options`` mean on ``model``, which has none; None for rank 0.
    Raises CallRefused."""
    if options.rank < 0:
        raise _refused("rank", options.rank, "is below 0", "use 1 or more, or 0 to train all")
    if options.rank == 0:
        return None
    layers = [*adapted_layers(model, ())]
    targets = [
        name for name in layers if (options.attention if is_attention(name) else options.mlp)
    ]
    if options.head:
        if not (head := head_name(model)):
            wrong = (
                f"needs an output head that is a linear layer, and {type(model).__name__} has none"
            )
            fix = "set it to false, or rank 0 to train all weights"
            raise _refused("train_unembed", True, wrong, fix)
        targets.append(head)
    if not targets:
        wrong = f"leaves no layer of {type(model).__name__} to train"
        fix = "set train_attn, train_mlp or train_unembed to true"
        raise _refused("lora_config", None, wrong, fix)
    named = () if targets == layers else tuple(targets)
    return AdapterOptions(options.rank, ALPHA, named, options.seed)


def is_attention(layer: str) -> bool:
    """Return whether the layer of this name is part of the attention."""
    return any("attn" in part or "attention" in part for part in layer.lower().split("."))


def _refused(field: str, value: object, wrong: str, fix: str) -> CallRefused:
    return CallRefused(Problem(field, value, wrong, fix))
