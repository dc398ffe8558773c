"""The adapters that a recipe asks for. Importing this needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ADAPTER = "adapter"  # the folder beside that of the merged model
LORA_CITATION = """\
@misc{hu2021lora,
  title = {{LoRA}: Low-Rank Adaptation of Large Language Models},
  author = {Hu, Edward J. and Shen, Yelong and Wallis, Phillip and Allen-Zhu, Zeyuan and others},
  year = {2021},
  eprint = {2106.09685},
  archivePrefix = {arXiv},
}"""


@dataclass(frozen=True)
class AdapterOptions:
    """A layer of the weight W [out, in] computes with W + ``alpha`` / ``rank`` · B·A: B is [out,
    rank], A [rank, in].

    ``targets``: names of the linear layers, or ends of them after a dot; empty: all but the output
    head, which has an adapter where it is named. ``seed`` gives A its first values; B begins with
    zeros. ``dtype``: in which the matrices are trained."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = ()
    seed: int = 0
    dtype: str = "float32"

    @property
    def scale(self) -> float:
        """The factor of B·A."""
        return self.alpha / self.rank


def is_adapted(module: Any) -> bool:
    """Return whether peft has put an adapter around a layer: ``module.base_layer``."""
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")
