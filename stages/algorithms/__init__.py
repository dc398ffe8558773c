"""Algorithms: one short file each.

An algorithm is its credit, its loss, and the columns that both read.
"""

from stages.algorithms.interface import Algorithm, LossOutput
from stages.algorithms.named import AlgorithmError, NamedAlgorithm
from stages.algorithms.registry import algorithm_class, build_algorithm
from stages.algorithms.token_batch import TokenBatch
from stages.flow.declarations import Drop

__all__ = [
    "Algorithm",
    "AlgorithmError",
    "Drop",
    "LossOutput",
    "NamedAlgorithm",
    "TokenBatch",
    "algorithm_class",
    "build_algorithm",
]
