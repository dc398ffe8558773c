"""The base models that a service of calls serves, by the names that its clients use.

NAME=SOURCE ──▶ a process with torch: config, tokenizer ──▶ ServedBase      the server itself has no torch
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from stages.calls.interface import ServedBase

TOKENIZERS = "tokenizers"  # of models without files: in the service's folder


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
    sources: Mapping[str, str], folder: Path, *, device: str = "auto"
) -> list[ServedBase]:
    """Return the base models of ``sources``, source by name. Raises ModelNotFound, and
    DeviceMissing where there is no ``device`` for them."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        pool.submit(_check_device, device).result()
        return list(pool.map(_describe, sources, sources.values(), [folder] * len(sources)))


def _check_device(device: str) -> None:
    from stages.device import select

    select(device)


def _describe(name: str, source: str, folder: Path) -> ServedBase:
    from stages.model.load import MADE_FROM_SEED, load_config, model_folder, tiny_tokenizer

    config = load_config(source)
    if source in MADE_FROM_SEED:
        tokenizer = folder.resolve() / TOKENIZERS / source
        tiny_tokenizer().save_pretrained(tokenizer)
    else:
        tokenizer = model_folder(source).resolve()
        source = str(tokenizer)
    text_config = config.get_text_config()
    return ServedBase(name, source, text_config.max_position_embeddings, str(tokenizer))
