"""A model's folder in Hugging Face format, as far as it is known without torch: what its config says, and whether its files
are there and whole. Weights are not loaded: of a safetensors file only the header is read.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages.prompts.files import PromptError, Reading, kind_of, open_file

KNOWN_MODELS = ("smollm2", "tiny", "mock")  # sources that are no folder
CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json")
LARGEST_JSON = 16 * 2**20  # bytes of a config or an index
LARGEST_HEADER = 100 * 2**20  # of a safetensors file, as its format has it
MOST_SHARDS = 2000
LFS = b"version https://git-lfs"
COPY = "copy the file again"
Fault = tuple[str, str]  # what is wrong, and what to do


class ModelFileError(ValueError):
    """A file of a model cannot be used: ``wrong`` names it, ``fix`` is what to do."""

    def __init__(self, wrong: str, fix: str) -> None:
        self.wrong, self.fix = wrong, fix
        super().__init__(f"{wrong}; {fix}")


def folder_of(source: str) -> Path:
    """The path ``source`` with the home directory in it. Never raises, as pathlib does for one that is not known."""
    return Path(os.path.expanduser(source))


def is_folder(source: str) -> bool:
    """Whether ``source`` is the path of a folder, whatever text it is."""
    return os.path.isdir(folder_of(source))


def text_config(source: str) -> dict[str, Any]:
    """What the config in the folder ``source`` says of the language model; empty where there is none."""
    try:
        config = _json(folder_of(source) / CONFIG) if is_folder(source) else {}
    except ModelFileError:
        return {}
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def parameters_in(source: str) -> int:
    """Weights in the safetensors files of the folder ``source``; those that cannot be read count nothing."""
    count = 0
    for path in folder_of(source).glob("*.safetensors") if is_folder(source) else ():
        try:
            header = read_header(path)
        except ModelFileError:
            continue
        count += sum(math.prod(tensor["shape"]) for tensor in header.values())
    return count


def has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer in ``folder`` has a chat template."""
    if any((folder / name).is_file() for name in CHAT_TEMPLATES):
        return True
    try:
        return bool(_json(folder / "tokenizer_config.json").get("chat_template"))
    except ModelFileError:
        return False


def faults(folder: Path, reading: Reading, *, weights: bool = True) -> Iterator[Fault]:
    """What keeps the model in ``folder`` from being loaded: config, tokenizer, and its ``weights`` if they are needed."""
    try:
        config = _json(folder / CONFIG)
        if not isinstance(config.get("model_type"), str):
            yield f"has a {CONFIG} without model_type", "write one with `model.save_pretrained(path)`"
    except ModelFileError as error:
        yield error.wrong, error.fix
    if not any((folder / name).is_file() for name in TOKENIZERS):
        yield "has no tokenizer.json", "write one with `tokenizer.save_pretrained(path)`"
    elif (folder / "tokenizer.json").exists():
        yield from _broken_tokenizer(folder / "tokenizer.json")
    if weights:
        yield from _broken_weights(folder, reading)


def _broken_tokenizer(path: Path) -> Iterator[Fault]:
    """A tokenizer may have tens of megabytes: only its ends are read."""
    try:
        with _open(path) as file:
            head = file.read(64).lstrip()
            file.seek(-min(64, path.stat().st_size), 2)
            if not (head.startswith(b"{") and file.read().rstrip().endswith(b"}")):
                yield f"has a {path.name} that is no JSON object, or is cut short", COPY
    except ModelFileError as error:
        yield error.wrong, error.fix


def _broken_weights(folder: Path, reading: Reading) -> Iterator[Fault]:
    placed: dict[str, list[str]] = {}  # the tensors that the index says each file has
    if (folder / INDEX).exists():
        try:
            placed = _shards(_json(folder / INDEX))
        except ModelFileError as error:
            yield error.wrong, error.fix
            return
    elif (folder / WEIGHTS).exists():
        placed = {WEIGHTS: []}
    elif not any((folder / name).is_file() for name in PICKLED):
        some = next((path.name for path in sorted(folder.glob("*.safetensors"))), None)
        lacks = f"has {some}, but no {INDEX}" if some else f"has no weights ({WEIGHTS})"
        yield lacks, "write them with `model.save_pretrained(path)`"
        return
    missing = [name for name in placed if not (folder / name).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        yield (
            f"lacks {missing[0]}{more} of the {len(placed)} files that {INDEX} names",
            "copy the files that are missing",
        )
    for name, tensors in placed.items():
        if name in missing or not reading.spend(nbytes=8):
            continue
        try:
            header = read_header(folder / name, reading)
        except ModelFileError as error:
            yield error.wrong, error.fix
            continue
        if header and (lacking := [tensor for tensor in tensors if tensor not in header]):
            yield f"has a {name} without the tensor {lacking[0]!r:.100}, which {INDEX} places there", COPY


def _shards(index: dict[str, Any]) -> dict[str, list[str]]:
    names, placed = index.get("weight_map"), dict[str, list[str]]()
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ModelFileError(f"has a {INDEX} without a weight_map of tensors to files", COPY)
    for tensor, name in names.items():
        placed.setdefault(name, []).append(tensor)
    beyond = [name for name in placed if "/" in name or "\\" in name or "\0" in name]
    if beyond or len(placed) > MOST_SHARDS:
        wrong = f"names {beyond[0]!r:.100}, which is no file beside it" if beyond else f"names {len(placed)} files"
        raise ModelFileError(f"has a {INDEX} that {wrong}", COPY)
    return placed


def read_header(path: Path, reading: Reading | None = None) -> dict[str, Any]:
    """The tensors of a safetensors file by their names: ``dtype``, ``shape`` and ``data_offsets`` of each. Empty when
    ``reading`` allows no more. Raises ModelFileError for a file that is not whole."""
    with _open(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(LARGEST_HEADER, size - 8):
            raise ModelFileError(f"has a {path.name} that is no safetensors file, or is cut short", COPY)
        if reading is not None and not reading.spend(nbytes=length):
            return {}
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            ends = [tensor["data_offsets"][1] for tensor in header.values()]
            shapes = [math.prod(tensor["shape"]) for tensor in header.values()]
            sound = all(isinstance(number, int) for number in (*ends, *shapes))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            sound = False
        if not sound:
            raise ModelFileError(f"has a {path.name} whose header is damaged", COPY)
    if 8 + length + max(ends, default=0) != size:
        wrong = f"has a {path.name} of {size} bytes, where its header says {8 + length + max(ends, default=0)}"
        raise ModelFileError(wrong, COPY)
    return header  # type: ignore[no-any-return]


def _open(path: Path) -> Any:
    """The file at ``path``. Raises ModelFileError."""
    try:
        kind = kind_of(path)
        if kind != "a file":
            raise ModelFileError(f"has a {path.name} that is {kind}", "put the file there")
        file = open_file(path)
    except FileNotFoundError:
        raise ModelFileError(f"has no {path.name}", "write it with `model.save_pretrained(path)`") from None
    except OSError as error:
        raise ModelFileError(
            f"has a {path.name} that cannot be read ({error})", "give files that can be read"
        ) from None
    except PromptError as error:
        wrong = "is empty" if "is empty" in str(error) else f"cannot be read ({error})"
        raise ModelFileError(f"has a {path.name} that {wrong}", COPY) from None
    if file.peek(32).startswith(LFS):  # type: ignore[attr-defined]
        file.close()
        raise ModelFileError(f"has a {path.name} that is only a pointer of Git LFS", "fetch it with `git lfs pull`")
    return file


def _json(path: Path) -> dict[str, Any]:
    """The object in the file at ``path``. Raises ModelFileError."""
    with _open(path) as file:
        text = file.read(LARGEST_JSON + 1)
    if len(text) > LARGEST_JSON:
        raise ModelFileError(f"has a {path.name} of more than {LARGEST_JSON >> 20} MiB", COPY)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"has a {path.name} that is no JSON ({error!s:.100})", COPY) from None
    if not isinstance(found, dict):
        raise ModelFileError(f"has a {path.name} that is no JSON object", COPY)
    return found
