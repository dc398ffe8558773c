"""A model's folder in Hugging Face format, read without torch: its config, and whether its files
are there and whole.

Weights are not loaded: only the header of a safetensors file is read.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stages.prompts.rows.files import EmptyFile, PromptError, Reading, kind_of, open_file

KNOWN_MODELS = ("smollm2", "tiny", "tiny-moe", "mock")  # sources that are no folder
# keys of a recipe that name a model
MODEL_KEYS = ("model.source", "model.reference", "critic.source", "rollout.draft_model")
PLAIN_MODELS = ("tiny", "tiny-moe", "mock")  # sources without a chat template
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
# names of their number in configs
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
GENERATION = "generation_config.json"
PICKLED_INDEX = "pytorch_model.bin.index.json"
PICKLED = ("pytorch_model.bin", PICKLED_INDEX)  # transformers reads tensors alone of them
ADAPTER = "adapter_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZERS = (
    "tokenizer.json",
    TOKENIZER_CONFIG,
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)
CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
LARGEST_JSON = 16 * 2**20  # bytes of a config or an index
LARGEST_HEADER = 100 * 2**20  # of a safetensors file, as its format has it
MOST_SHARDS = 2000
LFS = b"version https://git-lfs"
COPY = "copy the file again"
SAVE = "write {} with `model.save_pretrained(path)`"
Fault = tuple[str, str]  # what is wrong, and what to do


class ModelFileError(ValueError):
    """A file of a model cannot be used: ``wrong`` names it, ``fix`` is what to do."""

    def __init__(self, wrong: str, fix: str = COPY) -> None:
        self.wrong = wrong
        self.fix = fix
        super().__init__(f"{wrong}; {fix}")


def folder_of(source: str) -> Path:
    """Return ``source`` as a path with the home directory expanded.

    Never raises, unlike :meth:`Path.expanduser`.
    """
    return Path(os.path.expanduser(source))


def is_folder(source: str) -> bool:
    """Whether ``source``, which may be any text, is the path of a folder."""
    return os.path.isdir(folder_of(source))


def text_config(source: str) -> dict[str, Any]:
    """Return the language model's part of the config in the folder ``source``; empty where there is
    none."""
    try:
        config = _json(folder_of(source) / CONFIG) if is_folder(source) else {}
    except ModelFileError:
        return {}
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def tokens_of(source: str) -> int | None:
    """Return the number of tokens of the tokenizer in the folder ``source``, by its largest id;
    None where it cannot be loaded, which is reported elsewhere."""
    from stages.model.load import load_tokenizer

    if not is_folder(source):
        return None
    try:
        return max(load_tokenizer(source).get_vocab().values()) + 1
    except Exception:
        return None


def experts_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the experts of a layer, and the numbers of experts that all layers together choose for
    a token, at most; 0 and 0 for a model without."""
    experts = next((config[key] for key in EXPERTS if isinstance(config.get(key), int)), 0)
    chosen = (config.get("num_experts_per_tok") or 0) * (config.get("num_hidden_layers") or 0)
    return (experts, chosen) if experts and chosen else (0, 0)


def parameters_in(source: str) -> int:
    """Return the number of weights in the safetensors files of the folder ``source``, without files
    that are damaged."""
    return sum(math.prod(sizes) for _, sizes in _weights(source))


def joined_experts(source: str) -> str:
    """Returns the name of the first weight in the folder ``source`` that holds several experts'
    matrices; "" without one."""
    return next(
        (name for name, sizes in _weights(source) if ".experts." in name and len(sizes) > 2), ""
    )


def weight_named(source: str, end: str) -> str:
    """Returns the name of the first weight in the folder ``source`` that ends with ``end``; ""
    without one."""
    return next((name for name, _ in _weights(source) if name.endswith(end)), "")


def _weights(source: str) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of the weights in the safetensors files of the folder ``source``, without
    files that are damaged."""
    for path in sorted(folder_of(source).glob("*.safetensors")) if is_folder(source) else ():
        try:
            yield from ((name, tensor["shape"]) for name, tensor in read_header(path).items())
        except ModelFileError:
            continue


def end_tokens(folder: Path) -> set[int]:
    """Return the ids of the tokens that end a response of the model in ``folder``: ``eos_token_id``
    of its generation_config.json, as transformers reads it, or without that file of its config.
    Raises ModelFileError when that is no id and no list of ids."""
    name = GENERATION if (folder / GENERATION).is_file() else CONFIG
    config = _json(folder / name)
    inner = config.get("text_config")
    given = config.get(
        "eos_token_id", inner.get("eos_token_id") if isinstance(inner, dict) else None
    )
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ModelFileError(
            f"has a {name} with eos_token_id = {given!r:.100}",
            "write an id, or a list of ids, there",
        )
    return set(ids)


def has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer in ``folder`` has a chat template."""
    if any((folder / name).exists() for name in CHAT_TEMPLATES):
        return True
    try:
        return bool(_json(folder / "tokenizer_config.json").get("chat_template"))
    except ModelFileError:
        return False


def faults(folder: Path, reading: Reading, *, weights: bool = True) -> Iterator[Fault]:
    """Yield what prevents loading the model in ``folder``: of its config, its tokenizer, and its
    ``weights`` if needed."""
    checks = [
        _config_faults(folder),
        _code_faults(folder),
        _tokenizer_faults(folder),
        *([_weight_faults(folder, reading)] if weights else []),
    ]
    for check in checks:
        try:
            yield from check
        except ModelFileError as error:
            yield error.wrong, error.fix


def _config_faults(folder: Path) -> Iterator[Fault]:
    if (folder / ADAPTER).exists():
        reason = (
            f"has an {ADAPTER}: it is an adapter, and its model would be looked for where that "
            f"file says"
        )
        yield (
            reason,
            "give the whole model: peft's `merge_and_unload().save_pretrained(path)` writes it",
        )
    if not isinstance(_json(folder / CONFIG).get("model_type"), str):
        yield f"has a {CONFIG} without model_type", SAVE.format("one")


def _code_faults(folder: Path) -> Iterator[Fault]:
    """What would need code that lies in ``folder``. transformers is asked only where a file names
    some: kinds that it has itself may name code, too."""
    names = [name for name in (CONFIG, TOKENIZER_CONFIG) if (folder / name).exists()]
    if not any("auto_map" in _json(folder / name) for name in names):
        return
    from stages.model.files import NeedsOwnCode, read_config
    from stages.model.load import load_tokenizer

    try:
        read_config(folder)
        load_tokenizer(str(folder))
    except NeedsOwnCode:
        code = next((path.name for path in sorted(folder.glob("*.py"))), "")
        reason = (
            f"needs code of its own{f' ({code})' if code else ''}, which is never run: "
            f"`auto_map` names it"
        )
        yield reason, "use a model of a kind that transformers has, and save it with that"
    except Exception:
        return  # of the other checks


def _tokenizer_faults(folder: Path) -> Iterator[Fault]:
    path = folder / "tokenizer.json"
    if not any((folder / name).is_file() for name in TOKENIZERS):
        yield "has no tokenizer.json", "write one with `tokenizer.save_pretrained(path)`"
    elif path.exists():
        with _open(path) as file:  # it may have tens of megabytes: only its ends are read
            head = file.read(64).lstrip()
            file.seek(-min(64, path.stat().st_size), 2)
            if not (head.startswith(b"{") and file.read().rstrip().endswith(b"}")):
                yield f"has a {path.name} that is no JSON object, or is cut short", COPY


def _weight_faults(folder: Path, reading: Reading) -> Iterator[Fault]:
    tensors_of: dict[str, list[str]]  # by file, as the index lists them
    if (folder / INDEX).exists():
        tensors_of = _shards(_json(folder / INDEX))
    elif (folder / WEIGHTS).exists():
        tensors_of = {WEIGHTS: []}
    elif any((folder / name).exists() for name in PICKLED):
        if (folder / PICKLED_INDEX).exists():
            _shards(_json(folder / PICKLED_INDEX), PICKLED_INDEX)
        return
    else:
        shard = next((path.name for path in sorted(folder.glob("*.safetensors"))), None)
        raise ModelFileError(
            f"has {shard}, but no {INDEX}" if shard else f"has no weights ({WEIGHTS})",
            SAVE.format("them"),
        )
    missing = [name for name in tensors_of if not (folder / name).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        reason = f"lacks {missing[0]}{more} of the {len(tensors_of)} files that {INDEX} names"
        yield reason, "copy the files that are missing"
    for name, tensors in tensors_of.items():
        if name in missing or not reading.spend(nbytes=8):
            continue
        try:
            header = read_header(folder / name, reading)
        except ModelFileError as error:
            yield error.wrong, error.fix
            continue
        if header and (absent := [tensor for tensor in tensors if tensor not in header]):
            yield (
                (f"has a {name} without the tensor {absent[0]!r:.100}, which {INDEX} places there"),
                COPY,
            )


def _shards(index: dict[str, Any], path: str = INDEX) -> dict[str, list[str]]:
    """Return the tensors of each file that an index, the file ``path``, names.

    Raises ModelFileError.
    """
    names = index.get("weight_map")
    tensors_of = dict[str, list[str]]()
    if (
        not isinstance(names, dict)
        or not names
        or not all(isinstance(name, str) for name in names.values())
    ):
        raise ModelFileError(f"has a {path} without a weight_map of tensors to files")
    for tensor, name in names.items():
        tensors_of.setdefault(name, []).append(tensor)
    if outside := [name for name in tensors_of if not {"/", "\\", "\0"}.isdisjoint(name)]:
        raise ModelFileError(
            f"has a {path} that names {outside[0]!r:.100}, which is no file beside it"
        )
    if len(tensors_of) > MOST_SHARDS:
        raise ModelFileError(f"has a {path} that names {len(tensors_of)} files")
    return tensors_of


def read_header(path: Path, reading: Reading | None = None) -> dict[str, Any]:
    """Return ``dtype``, ``shape`` and ``data_offsets`` of each tensor in a safetensors file; empty
    when ``reading`` allows no more. Raises ModelFileError for a file that is not whole."""
    with _open(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(LARGEST_HEADER, size - 8):
            raise ModelFileError(f"has a {path.name} that is no safetensors file, or is cut short")
        if reading is not None and not reading.spend(nbytes=length):
            return {}
        try:
            header: dict[str, Any] = json.loads(file.read(length))
            header.pop("__metadata__", None)
            ends = [tensor["data_offsets"][1] for tensor in header.values()]
            numbers = [*ends, *(math.prod(tensor["shape"]) for tensor in header.values())]
            is_sound = all(isinstance(number, int) for number in numbers)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            is_sound = False
        if not is_sound:
            raise ModelFileError(f"has a {path.name} with a damaged header")
    if (expected := 8 + length + max(ends, default=0)) != size:
        raise ModelFileError(f"has a {path.name} of {size} bytes, where its header says {expected}")
    return header


def _open(path: Path) -> Any:
    """Open a regular file. Raises ModelFileError."""
    try:
        if (kind := kind_of(path)) != "a file":
            raise ModelFileError(f"has a {path.name} that is {kind}", "put the file there")
        file = open_file(path)
    except FileNotFoundError:
        raise ModelFileError(f"has no {path.name}", SAVE.format("it")) from None
    except OSError as error:
        reason = f"has a {path.name} that cannot be read ({error})"
        raise ModelFileError(reason, "give files that can be read") from None
    except EmptyFile:
        raise ModelFileError(f"has a {path.name} that is empty") from None
    except PromptError as error:
        raise ModelFileError(f"has a {path.name} that cannot be read ({error})") from None
    if file.peek(32).startswith(LFS):  # type: ignore[attr-defined]
        file.close()
        raise ModelFileError(
            f"has a {path.name} that is only a pointer of Git LFS", "fetch it with `git lfs pull`"
        )
    return file


def _json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ModelFileError."""
    with _open(path) as file:
        text = file.read(LARGEST_JSON + 1)
    if len(text) > LARGEST_JSON:
        raise ModelFileError(f"has a {path.name} of more than {LARGEST_JSON >> 20} MiB")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"has a {path.name} that is no JSON ({error!s:.100})") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"has a {path.name} that is no JSON object")
    return value
