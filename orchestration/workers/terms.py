"""What another program must know of a run to execute one of its stages."""

from __future__ import annotations

from dataclasses import asdict, replace

from orchestration.recipe.schema import Recipe
from orchestration.workers.engines import known_vocabulary, sampling_of
from stages.model.load import Tokenizer, load_config, weight_shapes
from stages.rollout.external_checks import Terms, fingerprint


def terms_of(recipe: Recipe, tokenizer: Tokenizer) -> Terms:
    """Return what another program must know to run one of the recipe's stages."""
    source = recipe.model.source
    if source == "mock":
        vocabulary = len(tokenizer)
    else:
        config = load_config(source)
        vocabulary = known_vocabulary(recipe) or int(
            getattr(config, "text_config", config).vocab_size
        )
    sampling = replace(sampling_of(recipe, tokenizer), budget=recipe.rollout.budget)
    weights: dict[str, tuple[str, tuple[int, ...]]] | None = None
    if source != "mock" and not recipe.runs_stage("update"):
        weights = {
            name: (recipe.model.dtype, shape) for name, shape in weight_shapes(source).items()
        }
    vocabulary_fingerprint = fingerprint(tokenizer.get_vocab())
    return Terms(
        vocabulary,
        asdict(sampling),
        recipe.seed,
        len(recipe.reward.functions),
        weights,
        vocabulary_fingerprint,
    )
