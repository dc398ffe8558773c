"""The experts that tokens go to: recorded in generation, and followed in training (router replay).

    rollout:   router ─▶ its top-k experts of each fed token ─▶ column routed_experts: fed tokens x layers x top-k numbers
    training:  router ─▶ its own logits ─▶ top-k answers with the column ─▶ weights of these experts, with gradients

Two engines that compute one policy in another order of sums choose other experts for a token whose
best two are nearly equal: a discrete step that importance weights do not see. A row's choices are
those of all its fed tokens: the prompt, and the response without its last token. Training computes
the prompt of a piece of a group once, with the choices of its first row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn
from torch.overrides import TorchFunctionMode

from stages.algorithms.batch import ragged
from stages.engines.torch.model.packing import Feeding
from stages.flow.catalogue import ROUTED, expert_type

# how transformers ends the names of routers that return (logits, weights, indices)
ROUTER = "TopKRouter"


def routers_of(model: nn.Module) -> list[Any]:
    """Return the routers of ``model``, one for each layer with experts, in the order of the
    layers."""
    return [module for module in model.modules() if type(module).__name__.endswith(ROUTER)]


class RoutingRecorder:
    """Records what the routers of ``model`` choose.

    Raises ``ValueError`` for a model without routers that can be read.
    """

    def __init__(self, model: nn.Module) -> None:
        routers = routers_of(model)
        if not routers:
            raise ValueError(
                f"model: {type(model).__name__} has no routers whose choices can be recorded"
            )
        self._dtype = getattr(torch, expert_type(max(router.num_experts for router in routers)))
        self._found: list[torch.Tensor] = [torch.empty(0)] * len(routers)
        for number, router in enumerate(routers):
            router.register_forward_hook(
                lambda _, __, output, number=number: self._keep(number, output)
            )

    def _keep(self, number: int, output: tuple[torch.Tensor, ...]) -> None:
        self._found[number] = output[2]

    def last(self) -> torch.Tensor:
        """Return the choices of the last forward, uint8 or int16 [T, layers * top-k]."""
        return torch.cat(self._found, 1).to(self._dtype)


class RoutingReplay:
    """Makes the routers of a train engine's ``model`` follow the choices that ``feeding`` has,
    where it has some."""

    def __init__(self, model: nn.Module, feeding: Feeding) -> None:
        self._feeding = feeding
        routers = routers_of(model)
        self._chosen = [router.top_k for router in routers]
        self._follows = False
        # of the choices followed in training, those that a router makes too
        self._agreed: list[torch.Tensor] = []
        self._followed = 0
        for number, router in enumerate(routers):
            router.forward = self._following(number, router, router.forward)

    def rows(self, batch: TensorDictBase) -> list[torch.Tensor]:
        """Return the choices [fed tokens, layers * top-k] of each row of ``batch``; empty where it
        has none. Raises ``ValueError`` for choices of another number of tokens or of another
        model."""
        self._follows = ROUTED in batch
        if not self._follows:
            return []
        prompts, responses = (
            ragged(batch, name).lengths() for name in ("prompt_ids", "response_ids")
        )
        width = sum(self._chosen)
        routed = ragged(batch, ROUTED, (prompts + responses - 1) * width)
        return [row.view(-1, width) for row in routed.rows()]

    def metrics(self, total: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Return ``routing_agreement`` since the last call: the share of the choices followed in
        training that the routers would have made too. Empty where none were followed. ``total``
        adds a tensor up over all ranks."""
        if not self._follows:
            return {}
        agreed = torch.stack(
            [torch.zeros((), dtype=torch.int64), *(each.cpu() for each in self._agreed)]
        ).sum()
        agreements, followed = total(torch.stack([agreed, torch.tensor(self._followed)])).tolist()
        self._agreed = []
        self._followed = 0
        return {"routing_agreement": agreements / followed} if followed else {}

    def _following(self, number: int, router: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*arguments: Any, **options: Any) -> Any:
            packed = self._feeding.packed
            k = router.top_k
            if packed is None or packed.experts is None:
                return plain(*arguments, **options)
            before = sum(self._chosen[:number])
            follow = _Following(packed.experts[:, before : before + k].long())
            with follow:
                output = plain(*arguments, **options)
            if not torch.equal(output[2], follow.chosen):
                raise ValueError(
                    f"model: {type(router).__name__} chooses experts by other means than topk"
                )
            if torch.is_grad_enabled() and follow.agreed is not None:
                self._agreed.append(follow.agreed)
                self._followed += follow.chosen.numel()
            return output

        return forward


class _Following(TorchFunctionMode):
    """Answers ``topk`` of as many values as ``chosen`` [T, k] has in a row with these indices, and
    the values there."""

    def __init__(self, chosen: torch.Tensor) -> None:
        super().__init__()
        self.chosen = chosen
        self.agreed: torch.Tensor | None = None  # int64: how many of them topk gives too

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or result.indices.shape != self.chosen.shape:
            return result
        self.agreed = (result.indices[:, :, None] == self.chosen[:, None]).sum()
        return torch.return_types.topk((args[0].gather(-1, self.chosen), self.chosen))
