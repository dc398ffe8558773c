"""A base model that the models of several clients share.

TorchBase: the frozen tensors, once ─▶ engine(rank 8): a structure of its own over these tensors,
                                   │                   adapters, AdamW
                                   └▶ engine(rank 0): a copy that is trained whole

Of several ranks each has a TorchBase, and shards of the tensors.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from stages import device as devices
from stages.adapters.export import base_weights
from stages.adapters.names import adapted_layers, head_name
from stages.adapters.options import AdapterOptions
from stages.calls.interface import ALPHA, CallRefused, ModelOptions
from stages.engines.torch.train import TorchTrainEngine
from stages.model.files import WeightFiles, in_one_dtype
from stages.model.load import Tokenizer, load_model, load_tokenizer, model_skeleton

if TYPE_CHECKING:
    from stages.engines.torch.parallel.sharded import Sharded


class TorchBase:
    """``model`` on ``device`` (default: the accelerator if there is one), frozen. Its dtype is that
    of the arithmetic; adapters, masters of whole copies and moments are float32.

    ``token_budget``: tokens fed at once; None: no limit. ``context``: tokens of the longest
    sequence; None: as the model's config says. ``vocabulary``: only so many of the first tokens
    have a probability. ``threads``: torch's number of CPU threads. ``options``: further ones of
    :class:`~stages.engines.torch.train.TorchTrainEngine`.

    ``ranks``: how ranks share the work, each with the same base; they make all calls of models
    together. ``files``: what each then reads its shards from; ``model`` has no weights. Without,
    each has the whole model on the CPU, and shards for each model in training.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        *,
        ranks: Sharded | None = None,
        files: WeightFiles | None = None,
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
        self._ranks = ranks
        self._files = files
        self._frozen: dict[str, torch.Tensor] = {}  # what this rank holds of them
        if ranks is None:
            torch.nn.Module.to(model, self.device)
        else:
            self.device = ranks.start(self.device)
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
        cls,
        source: str,
        *,
        dtype: str = "float32",
        seed: int = 0,
        ranks: Sharded | None = None,
        **options: Any,
    ) -> TorchBase:
        """Load the model ``source``; see :func:`stages.model.load.load_model`. ``options``: the
        constructor's."""
        torch_dtype = getattr(torch, dtype)
        if ranks is not None and (opened := model_skeleton(source, dtype=torch_dtype)):
            model, files = opened
            return cls(model, load_tokenizer(source), ranks=ranks, files=files, **options)
        model, tokenizer = load_model(source, dtype=torch_dtype, seed=seed)
        return cls(model, tokenizer, ranks=ranks, **options)

    @property
    def weights(self) -> WeightFiles | dict[str, torch.Tensor]:
        """The weights by name, or the files that they are read from."""
        return self._files or base_weights(self.model)

    def whole_model(self) -> PreTrainedModel:
        """Return a copy of the model with all its weights."""
        model = copy.deepcopy(self.model)
        if self._files is not None:
            self._files.place(model, torch.device("cpu"))
        return model

    def engine(self, options: ModelOptions) -> TorchTrainEngine:
        """Make the engine that trains a model with ``options``, in the thread of all calls. Raises
        CallRefused."""
        devices.use(self.device)
        adapters = adapter_options(self.model, options)
        if adapters is None:
            whole = in_one_dtype(copy.deepcopy(self.model), torch.float32).requires_grad_(True)
            parallel = self._ranks and self._ranks.beside(self._files)
            return TorchTrainEngine(whole, parallel=parallel, **self._options)
        shared: dict[int, Any] = {id(tensor): tensor for tensor in self.model.parameters()}
        structure = copy.deepcopy(self.model, shared)
        parallel = self._ranks and self._ranks.beside(self._files, self._frozen)
        return TorchTrainEngine(structure, adapters=adapters, parallel=parallel, **self._options)


def adapter_options(model: PreTrainedModel, options: ModelOptions) -> AdapterOptions | None:
    """Return the adapters that ``options`` mean on ``model``, which has none; None for rank 0.
    Raises CallRefused."""
    if options.rank < 0:
        raise CallRefused.of("rank", options.rank, "is below 0", "use 1 or more, or 0 to train all")
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
            raise CallRefused.of("train_unembed", True, wrong, fix)
        targets.append(head)
    if not targets:
        wrong = f"leaves no layer of {type(model).__name__} to train"
        fix = "set train_attn, train_mlp or train_unembed to true"
        raise CallRefused.of("lora_config", None, wrong, fix)
    named = () if targets == layers else tuple(targets)
    return AdapterOptions(options.rank, ALPHA, named, options.seed)


def is_attention(layer: str) -> bool:
    """Return whether the layer of this name is part of the attention."""
    return any("attn" in part or "attention" in part for part in layer.lower().split("."))
