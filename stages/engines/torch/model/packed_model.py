"""A model as packed micro-batches go through it: its layers replaced, and its outputs in float32.

    packed tokens ─▶ decoder ─▶ hidden states where a response token is predicted
                                  ─▶ head ─▶ logprobs, entropies          ─▶ value head ─▶ values

The engine's parallel strategy places its parameters (stages/engines/torch/parallel/interface.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from stages import device as devices
from stages.adapters.options import ADAPTER, AdapterOptions
from stages.engines.torch.model.attention_interface import fix_rope, replace_attention
from stages.engines.torch.model.layers import use_fast_layers, use_fast_norms, use_fused_layers
from stages.engines.torch.model.logits import head_adapter, logit_scale, value_head, values_of
from stages.engines.torch.model.packing import (
    ATTENTION,
    Feeding,
    MasksOf,
    PackedBatch,
    shared_prompt_attention,
)
from stages.engines.torch.model.token_logprobs import TokenLogprobs, scaled_logits, top_logprobs
from stages.model.files import WeightFiles

if TYPE_CHECKING:
    from stages.engines.torch.model.balance import RouterBias, RouterLoss
    from stages.engines.torch.model.expert_load import ExpertLoad
    from stages.engines.torch.model.expert_routing import RoutingReplay

Kernels = Literal["auto", "plain"]
Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # see PackedModel.outputs
TopTokens = tuple[torch.Tensor, torch.Tensor]  # see PackedModel.top_logprobs


class PackedModel:
    """The ``model`` of an engine on ``device``, and what packed micro-batches need beside it.
    Options are those of :class:`~stages.engines.torch.train.TorchTrainEngine`."""

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        *,
        temperature: float,
        activation_checkpointing: bool,
        kernels: Kernels,
        has_values: bool,
        adapters: AdapterOptions | None,
        context: int | None,
        vocabulary: int | None,
        masks_of: MasksOf | None,
        router_loss: float = 0.0,
        router_bias_rate: float = 0.0,
    ) -> None:
        self.model = model
        self.device = device
        self.dtype = model.dtype  # of the arithmetic
        self.kind = type(model).__name__  # FSDP makes it another class
        self.hidden_size: int = model.config.get_text_config().hidden_size
        self.feeding = Feeding(fix_rope(model, context), fused=kernels == "auto")
        self._divisor, self._softcap = logit_scale(model.config)
        self._vocabulary = vocabulary
        self.masks_of = masks_of
        self._temperature = temperature or 1.0  # greedy rollouts record logprobs at temperature 1
        self._kernels = kernels
        self.routing: RoutingReplay | None = None
        self.expert_load: ExpertLoad | None = None
        if _has_experts(model):
            from stages.engines.torch.model.expert_load import ExpertLoad
            from stages.engines.torch.model.expert_routing import RoutingReplay

            self.routing = RoutingReplay(model, self.feeding)
            self.expert_load = ExpertLoad(model, device)
        self.router_loss: RouterLoss | None = None
        if router_loss:
            from stages.engines.torch.model.balance import RouterLoss

            self.router_loss = RouterLoss(model, self.feeding, device, router_loss)
        self.router_bias: RouterBias | None = None
        if router_bias_rate:
            from stages.engines.torch.model.balance import RouterBias

            self.router_bias = RouterBias(model, self.feeding, device, router_bias_rate)
        _prepare(model, activation_checkpointing)
        if device.type == "cpu" and kernels == "auto":
            use_fast_norms(model)
        self.adapters = adapters
        self._adapter_config: dict[str, Any] = {}
        if adapters:
            from stages.adapters.training import add_adapters

            self._adapter_config = add_adapters(model, adapters)
        self._plain_forward = model.forward
        self.value_head = value_head(model, device) if has_values else {}

    @property
    def router_biases(self) -> dict[str, torch.Tensor]:
        """Return the biases of routers by name, where steps move them."""
        return {} if self.router_bias is None else self.router_bias.biases(self.model)

    @property
    def counts_tokens(self) -> bool:
        """Whether micro-batches say which of their tokens count for the balance of experts."""
        return self.router_loss is not None or self.router_bias is not None

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the model that are trained, by name, tied ones once."""
        named = self.model.named_parameters()
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    def feed(self, packed: PackedBatch) -> None:
        """Let the model's attention read ``packed``, until something else is fed."""
        self.feeding.feed(packed)

    def decode(self, packed: PackedBatch) -> torch.Tensor:
        """Return the last hidden states [1, S, d]."""
        decoder: Any = self.model.base_model
        self.feed(packed)
        out = decoder(input_ids=packed.ids, position_ids=packed.positions, use_cache=False)
        return out.last_hidden_state  # type: ignore[no-any-return]

    def hidden(self, packed: PackedBatch) -> torch.Tensor:
        """Return the last hidden states [U, d] at the places that predict a response token."""
        return self.decode(packed)[0].index_select(0, packed.places)

    def outputs(self, packed: PackedBatch, with_entropy: bool = True) -> Outputs:
        """Return in float32 the logprobs of ``packed.targets``, in its shape; the entropies [T] of
        the distributions that they are of, empty without ``with_entropy``; and the values [T] of
        the states before the targets, empty without a value head."""
        hidden = self.hidden(packed)
        head = self.model.get_output_embeddings()
        wanted = packed.targets[:, None].flatten(1)  # [T, 1 + k]
        logprobs, entropy = TokenLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden,
            head.weight,
            head.bias,
            packed.source.repeat_interleave(wanted.shape[1]),
            wanted.flatten(),
            self._temperature * self._divisor,
            with_entropy,
            self._softcap,
            self._vocabulary,
            packed.masks,
            *head_adapter(head, hidden),
        )
        values = values_of(hidden, self.value_head, packed.source)
        return logprobs.view_as(packed.targets), entropy[:: wanted.shape[1]], values

    def top_logprobs(self, packed: PackedBatch, k: int) -> TopTokens:
        """Return the ``k`` largest logprobs float32 [T, k] at the places of ``packed.targets``, and
        their tokens int32 [T, k]. No gradient."""
        hidden = self.hidden(packed)
        head = self.model.get_output_embeddings()
        largest, tokens = top_logprobs(
            hidden,
            head.weight,
            head.bias,
            k,
            self._temperature * self._divisor,
            self._softcap,
            self._vocabulary,
            packed.masks,
            *head_adapter(head, hidden),
        )
        return largest[packed.source], tokens[packed.source]

    def logits(self, packed: PackedBatch) -> torch.Tensor:
        """Return the logits float32 [T, V] of which :meth:`outputs` are made."""
        hidden = self.hidden(packed)[packed.source]
        head = self.model.get_output_embeddings()
        adapter = head_adapter(head, hidden)
        return scaled_logits(hidden, head.weight, head.bias, self._divisor, self._softcap, *adapter)

    def plain_hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states [1, S, d] of ``ids`` [1, S] by the model's own forward."""
        decoder: Any = self.model.base_model
        return decoder(input_ids=ids, use_cache=False).last_hidden_state  # type: ignore[no-any-return]

    def plain_logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits [1, S, V] of ``ids`` [1, S] by the model's own forward."""
        return self._plain_forward(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]

    def replace_layers(self) -> None:
        """Replace the model's attention, and the linear layers that are computed faster."""
        replace_attention(self.model, ATTENTION, shared_prompt_attention, self.feeding)
        if self._kernels == "auto":
            use_fast_layers(self.model, self.device)
            use_fused_layers(self.model, devices.fused_layers(self.device))

    def save_adapters(
        self,
        path: Path,
        matrices: Mapping[str, torch.Tensor],
        base: Mapping[str, torch.Tensor] | WeightFiles | None = None,
    ) -> None:
        """Write the adapters ``matrices`` beside ``path``, and the model merged with them into it.
        ``base``: see :func:`~stages.adapters.export.write_merged`."""
        from stages.adapters.export import save_adapter, write_merged

        assert self.adapters is not None
        matrices = {name: value.to(self.dtype) for name, value in matrices.items()}
        save_adapter(path.with_name(ADAPTER), self._adapter_config, matrices)
        scale = self.adapters.scale
        write_merged(path, self.model, matrices, scale, base=base, kind=self.kind)


def _has_experts(model: nn.Module) -> bool:
    """Return whether a layer of ``model`` has a router, or experts that are stacked."""
    downs = (module._parameters.get("down_proj") for module in model.modules())
    stacked = any(down is not None and down.ndim == 3 for down in downs)
    return stacked or any(type(m).__name__.endswith("TopKRouter") for m in model.modules())


def _prepare(model: PreTrainedModel, activation_checkpointing: bool) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.train(activation_checkpointing)  # transformers checkpoints only in training mode
    if activation_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None)
        enable = enable or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
