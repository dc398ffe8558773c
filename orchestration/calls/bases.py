"""The base models that a service of calls serves, by the names that its clients use.

NAME=SOURCE ──▶ a process with torch: recipe, config, tokenizer ──▶ ServedBase      the server itself has no torch
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from orchestration.processes.pool import spawned_pool
from pipeline.compat.extras import ExtraMissing, install, is_installed
from stages.calls.interface import ServedBase

TOKENIZERS = "tokenizers"  # of models without files: in the service's folder
RECIPE = ".toml"
# options of the engine of a model that is no recipe's
DEFAULTS = {"device": "auto", "dtype": "float32", "max_rows": 64}
UNSET = ("auto", 0)  # the engine decides


def parse_model(text: str) -> tuple[str, str]:
    """Return name and source of NAME=SOURCE, or of SOURCE, whose last part is its name.

    >>> parse_model("Qwen/Qwen3-8B=/srv/qwen3"), parse_model("/srv/models/small/"), parse_model("tiny")
    (('Qwen/Qwen3-8B', '/srv/qwen3'), ('small', '/srv/models/small/'), ('tiny', 'tiny'))
    """
    name, separator, source = text.partition("=")
    if not separator:
        name, source = Path(text).name, text
    if not name or not source:
        raise ValueError(f"model: {text!r} is no NAME=SOURCE; give a folder, or smollm2 or tiny")
    return name, source


def describe_bases(
    models: Sequence[str], folder: Path, options: Mapping[str, Any]
) -> list[ServedBase]:
    """Return the base models that ``models`` name: [NAME=]SOURCE, where SOURCE is a model or a
    recipe of one, a ``.toml`` file.

    ``options``: device, dtype, threads, max_rows of all engines, as far as they are given. Raises
    ModelNotFound, DeviceMissing where there is no such device, ExtraMissing without the library of
    adapters, and ValueError for names that are there twice and for a recipe that is wrong or
    contradicts ``options``.
    """
    if not is_installed("peft"):
        raise ExtraMissing(
            f"peft is not installed, by which clients train adapters; {install('lora')}"
        )
    with spawned_pool(1) as pool:
        bases = list(pool.map(partial(_describe, folder, options), models))
    names = Counter(base.name for base in bases)
    if repeated := [name for name, count in names.items() if count > 1]:
        name = repeated[0]
        raise ValueError(f"model: {names[name]} are named {name!r}; give each a NAME=SOURCE")
    return bases


def _describe(folder: Path, options: Mapping[str, Any], text: str) -> ServedBase:
    name, source = parse_model(text)
    if Path(source).suffix == RECIPE and not Path(source).is_dir():
        return _of_recipe(folder, options, name if "=" in text else "", Path(source))
    from stages.device import select

    engine = {**DEFAULTS, **options}
    select(str(engine["device"]))
    decided = {key: value for key, value in engine.items() if value not in UNSET}
    return _describe_model(name, source, folder, decided)


def _of_recipe(folder: Path, options: Mapping[str, Any], name: str, path: Path) -> ServedBase:
    from orchestration.recipe.loading.served import engine_options, read_served
    from orchestration.recipe.problems import RecipeError

    try:
        recipe, room = read_served(path, options)
    except RecipeError as error:  # it cannot go to another process
        raise ValueError(str(error)) from None
    return _describe_model(
        name or recipe.name, recipe.model.source, folder, engine_options(recipe, room)
    )


def _describe_model(name: str, source: str, folder: Path, options: Mapping[str, Any]) -> ServedBase:
    from stages.model.load import MADE_FROM_SEED, load_config, model_folder, tiny_tokenizer

    config = load_config(source)
    if source in MADE_FROM_SEED:
        tokenizer = folder.resolve() / TOKENIZERS / source
        tiny_tokenizer().save_pretrained(tokenizer)
    else:
        tokenizer = model_folder(source).resolve()
        source = str(tokenizer)
    text_config = config.get_text_config()
    architecture = (config.architectures or [config.model_type])[0]
    context = text_config.max_position_embeddings
    return ServedBase(name, source, context, str(tokenizer), architecture, options)
