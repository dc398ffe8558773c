"""Algorithms by their names: built in, ``module:Class``, or an entry point of the group
``asyncdock.algorithms``.

The product's own are the rows of ALGORITHMS, classes in the folders beside this file: a new one is
a class there and its row.
"""

from __future__ import annotations

import importlib.metadata
import pkgutil
from collections.abc import Mapping
from typing import Any

from pipeline.problems import Problem
from stages.algorithms.interface import Algorithm
from stages.user_code import CodeUnusable, find

ENTRY_POINTS = "asyncdock.algorithms"
_GRADIENT = "stages.algorithms.policy_gradient"
_SUPERVISED = "stages.algorithms.supervised"
# name → its class, which is imported when a recipe names it
ALGORITHMS = {
    "aipo": f"{_GRADIENT}.gated:AIPO",
    "best_of_n": f"{_SUPERVISED}.sft:BestOfN",
    "cispo": f"{_GRADIENT}.gated:CISPO",
    "clip_cov": f"{_GRADIENT}.selected:ClipCov",
    "dapo": f"{_GRADIENT}.dapo:DAPO",
    "distillation": f"{_GRADIENT}.distillation:Distillation",
    "dpo": f"{_SUPERVISED}.dpo:DPO",
    "dr_grpo": f"{_GRADIENT}.grpo:DrGRPO",
    "gdpo": f"{_GRADIENT}.gdpo:GDPO",
    "gkd": f"{_SUPERVISED}.gkd:GKD",
    "grpo": f"{_GRADIENT}.grpo:GRPO",
    "gspo": f"{_GRADIENT}.gated:GSPO",
    "kl_cov": f"{_GRADIENT}.selected:KLCov",
    "kto": f"{_SUPERVISED}.kto:KTO",
    "m2po": f"{_GRADIENT}.selected:M2PO",
    "opsd": f"{_SUPERVISED}.self_distillation:OPSD",
    "orpo": f"{_SUPERVISED}.simpo:ORPO",
    "pf_ppo": f"{_GRADIENT}.ppo:PFPPO",
    "ppo": f"{_GRADIENT}.ppo:PPO",
    "process_grpo": f"{_GRADIENT}.process:ProcessGRPO",
    "reinforce_pp": f"{_GRADIENT}.reinforce_pp:ReinforcePlusPlus",
    "rloo": f"{_GRADIENT}.grpo:RLOO",
    "sapo": f"{_GRADIENT}.gated:SAPO",
    "sdpo": f"{_SUPERVISED}.self_distillation:SDPO",
    "sft": f"{_SUPERVISED}.sft:SFT",
    "shuffle_r1": f"{_GRADIENT}.shuffle_r1:ShuffleR1",
    "simpo": f"{_SUPERVISED}.simpo:SimPO",
    "trajectory_balance": f"{_GRADIENT}.trajectory_balance:TrajectoryBalance",
}


def built_in() -> Mapping[str, type[Algorithm]]:
    """Import and return the product's own algorithms, by name."""
    return {name: pkgutil.resolve_name(place) for name, place in ALGORITHMS.items()}


def build_algorithm(name: str, options: Mapping[str, Any]) -> Algorithm:
    """Return the algorithm called ``name``; ``options`` are the fields of its class.

    Raises ValueError when the name is not known, or an option is unknown or out of range (all of
    them at once).
    """
    return algorithm_class(name)(**options)


def algorithm_class(name: str) -> type[Algorithm]:
    """Return the class behind ``name``. Raises CodeUnusable."""
    key = "algorithm.name"
    candidate = find(
        key, name, ALGORITHMS, lambda: importlib.metadata.entry_points(group=ENTRY_POINTS)
    )
    if isinstance(candidate, type) and issubclass(candidate, Algorithm):
        return candidate
    fix = "derive its class from stages.algorithms.Algorithm"
    raise CodeUnusable(Problem(key, name, "is not an algorithm", fix))
