"""The safetensors files of a Hugging Face checkpoint, read tensor by tensor into a model that has
no weights yet.

    config.json, headers of the files ─▶ open_skeleton: parameters on the device ``meta``, buffers computed
    (the model may be sharded now)    ─▶ materialize: memory for what this process holds of it
    the files, one tensor at a time   ─▶ WeightFiles.fill: copies this process's part of the tensor

So a process holds no more than its part of the model and one tensor. A file is mapped for one
tensor at a time: the pages of a mapping count as the process's memory once they are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from pipeline.problems import Fatal
from stages.resharding.tensors import local_part

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"


class NeedsOwnCode(Fatal, ValueError):
    """A model's folder names Python code in it that would have to be run to load it."""


@contextmanager
def without_own_code(folder: Path) -> Iterator[None]:
    """Raise NeedsOwnCode where transformers refuses the model in ``folder`` because code in it
    would have to be run."""
    try:
        yield
    except UnpicklingError as error:
        names = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"that name {names[1]}" if names else "that are damaged"
        raise NeedsOwnCode(
            f"{folder} has pickled weights {what}, and tensors alone are read of such files; save "
            f"the model as safetensors "
            "where it comes from"
        ) from None
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise NeedsOwnCode(
            f"{folder} needs code of its own (`auto_map` in its config or tokenizer), which is "
            f"never run; use a model of a "
            "kind that transformers has, and save it with that"
        ) from None


def read_config(folder: Path) -> PretrainedConfig:
    """Return the config of the model in ``folder``.

    Raises NeedsOwnCode, and what transformers raises.
    """
    with without_own_code(folder):
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


class WeightFiles:
    """The weights of a checkpoint under the parameter names of ``model``.

    ``files``: the file of each tensor, by its name in the checkpoint.
    """

    def __init__(self, files: Mapping[str, Path], model: PreTrainedModel) -> None:
        self._files = files
        transforms = get_model_conversion_mapping(model)
        renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
        converters = [
            transform for transform in transforms if isinstance(transform, WeightConverter)
        ]
        by_pattern = {
            pattern: converter for converter in converters for pattern in converter.source_patterns
        }
        known: Any = model.state_dict()
        self._plain: dict[str, str] = {}  # the tensor's name in the checkpoint, by parameter
        # Parameters that are made of several tensors, or otherwise than they are stored, by the
        # first one that is made.
        self._converted: dict[str, tuple[WeightConverter, dict[str, list[str]]]] = {}
        for key in sorted(files, key=dot_natural_key):
            name, pattern = rename_source_key(
                key, renamings, converters, model.base_model_prefix, known
            )
            if name not in known and key in known:
                name = key
                pattern = None
            if name in known and pattern is None:
                self._plain[name] = key
            elif name in known and pattern is not None:
                _, sources = self._converted.setdefault(name, (by_pattern[pattern], {}))
                sources.setdefault(pattern, []).append(key)

    @torch.no_grad()
    def place(
        self,
        model: PreTrainedModel,
        device: torch.device,
        frozen: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Give ``model`` memory on ``device``, see :func:`materialize`, and read the weights.

        ``frozen``: what this process holds of the weights that are not trained, by name. The first
        model fills it; later ones, sharded as that one, share these tensors, and read nothing. FSDP
        copies those whose rows the ranks cannot share evenly."""

        def named() -> Iterator[tuple[str, torch.Tensor]]:
            tensors = chain(model.named_parameters(), model.named_buffers())
            return ((plain_name(name), value) for name, value in tensors if not value.requires_grad)

        known = frozen or {}
        materialize(
            model, device, {id(value): known[name] for name, value in named() if name in known}
        )
        if known:
            return
        self.fill(model)
        if frozen is not None:
            frozen |= {name: local_part(value.detach()) for name, value in named()}

    @torch.no_grad()
    def fill(self, model: PreTrainedModel) -> None:
        """Read the weights into the parameters and saved buffers of ``model``: of a DTensor, the
        part of this rank. No collective calls are made."""
        parameters = model.named_parameters(remove_duplicate=False)
        tensors = {
            plain_name(name): tensor for name, tensor in (*parameters, *model.named_buffers())
        }
        for name, key in self._plain.items():
            # or another pipeline stage has it
            for local, begins in _parts(tensors[name]) if name in tensors else ():
                local.copy_(self._tensor(key, begins, local.shape))
        for name, (converter, sources) in self._converted.items():
            if name not in tensors:
                continue
            for first, keys in _pieces(converter, sources):
                if first is not None and not any(_holds(tensors[name], first)):
                    continue
                row_converter = deepcopy(converter)
                for pattern, key in keys:
                    row_converter.add_tensor(name, key, pattern, self._tensor(key))  # type: ignore[arg-type]
                for target, value in row_converter.convert(
                    name, model=model, config=model.config
                ).items():
                    copy_part(
                        tensors[target], value[0] if isinstance(value, list) else value, first or 0
                    )

    def tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Map each tensor of the checkpoint, one at a time: its name there, the parameter that it
        is ("" where parameters are made of it otherwise), and the tensor."""
        parameters = {key: name for name, key in self._plain.items()}
        for key in self._files:
            yield key, parameters.get(key, ""), self._tensor(key)

    def shapes(self) -> dict[str, list[int]]:
        """Return the shape of each tensor by its name in the checkpoint."""
        return dict(_shapes(self._files))

    def _tensor(
        self, key: str, begins: Sequence[int] = (), shape: Sequence[int] = ()
    ) -> torch.Tensor:
        """Map the tensor ``key`` or, given ``shape``, its part that begins at ``begins``."""
        with safe_open(self._files[key], framework="pt") as file:
            if not shape:
                return file.get_tensor(key)  # type: ignore[no-any-return]
            box = tuple(
                slice(begin, begin + size) for begin, size in zip(begins, shape, strict=True)
            )
            return file.get_slice(key)[box]  # type: ignore[no-any-return]


def open_skeleton(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, WeightFiles] | None:
    """Return the model in ``folder`` as ``from_pretrained`` makes it, in eval mode, but with its
    parameters, all of ``dtype``, and saved buffers on the device ``meta``, and the files to read
    them from. Returns None for a checkpoint that is not read this way: without safetensors,
    quantised, or not exactly with the weights of its config."""
    files = _files(folder)
    config = read_config(folder)
    if not files or getattr(config, "quantization_config", None) is not None:
        return None
    with torch.device("meta"):
        kind = type(AutoModelForCausalLM.from_config(config, trust_remote_code=False))
    stored = {key: _Stored(shape) for key, shape in _shapes(files)}
    # transformers converts and renames what it is given; on the device meta that takes no memory.
    model, loading_info = kind.from_pretrained(
        None, config=config, state_dict=stored, dtype=dtype, output_loading_info=True
    )
    saved = model.state_dict(keep_vars=True)
    tied_apart = any(
        saved[a] is not saved[b] for a, b in getattr(model, "all_tied_weights_keys", {}).items()
    )
    if (
        loading_info["missing_keys"]
        or loading_info["mismatched_keys"]
        or loading_info.get("conversion_errors")
        or tied_apart
    ):
        return None
    model.name_or_path = model.config.name_or_path = str(folder)
    if (folder / "generation_config.json").is_file() and model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return in_one_dtype(model.eval(), dtype), WeightFiles(files, model)


def in_one_dtype(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Give every parameter of ``model`` the dtype ``dtype``.

    Returns ``model``. Buffers keep theirs.

    transformers keeps some parameters in float32 beside bfloat16 (routers, from 5.24 those of most
    families with experts). Published weights have one dtype, and FSDP2 shards parameters of one
    dtype. Routers compute in float32 in either case: transformers casts the weights where it uses
    them.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.detach().to(dtype)
    return model


def materialize(
    model: nn.Module, device: torch.device, shared: Mapping[int, torch.Tensor] | None = None
) -> None:
    """Give the tensors of ``model`` on the device ``meta`` memory on ``device``, without values.

    Tied ones stay tied. ``shared``: of DTensors and buffers, by ``id``, the local tensors that they
    become.
    """

    def made(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        local = shared.get(id(tensor)) if shared else None
        if local is None:
            return torch.empty_like(tensor, device=device)
        if not isinstance(tensor, DTensor):
            return local
        return DTensor.from_local(
            local,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )

    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        model._apply(made)
        return
    values: dict[int, Any] = {}
    for module in model.modules():
        for group in (module._parameters, module._buffers):
            for name, tensor in group.items():
                if tensor is not None and tensor.is_meta:
                    value = torch.empty_like(tensor, device=device)
                    if isinstance(tensor, nn.Parameter):
                        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
                    group[name] = values.setdefault(id(tensor), value)


def plain_name(name: str) -> str:
    """Return the name that a parameter of a model with adapters (stages/adapters) has in the model
    without them."""
    return name.replace(".base_layer.", ".")


class _Stored:
    """Stands for a tensor of a file where transformers converts a checkpoint: it becomes a tensor
    on the device meta."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = torch.Size(shape)

    def __getitem__(self, whole: Any) -> _Stored:
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(self.shape, dtype=dtype, device="meta")


def _files(folder: Path) -> dict[str, Path]:
    """Return the safetensors file of each tensor, by the tensor's name; empty where there are
    none."""
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text())
        for file in set(index["weight_map"].values()):
            if not isinstance(file, str) or Path(file).name != file:
                raise ValueError(
                    f"model: {folder / INDEX} names {file!r:.100}, which is no file beside it"
                )
        return {key: folder / file for key, file in index["weight_map"].items()}
    if not (folder / WEIGHTS).is_file():
        return {}
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        return dict.fromkeys(file.keys(), folder / WEIGHTS)


def _shapes(files: Mapping[str, Path]) -> Iterator[tuple[str, list[int]]]:
    for path in dict.fromkeys(files.values()):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                if files.get(key) == path:
                    yield key, file.get_slice(key).get_shape()


def _parts(tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, Sequence[int]]]:
    """Return the parts of ``tensor`` that this process holds: local tensors, and where each begins
    in the whole."""
    if not isinstance(tensor, DTensor):
        yield tensor, [0] * tensor.ndim
        return
    local = tensor.to_local()
    _, begins = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    if local.numel():
        yield local, begins


def _holds(tensor: torch.Tensor, row: int) -> Iterator[bool]:
    return (begins[0] <= row < begins[0] + len(local) for local, begins in _parts(tensor))


def copy_part(tensor: torch.Tensor, value: torch.Tensor, first: int = 0) -> None:
    """Copy ``value``, rows from ``first`` on of the whole of ``tensor``, into what this process
    holds of it."""
    for local, begins in _parts(tensor):
        low = max(first, begins[0])
        high = min(first + len(value), begins[0] + len(local))
        if low < high:
            rest = tuple(slice(b, b + n) for b, n in zip(begins[1:], local.shape[1:], strict=True))
            local[low - begins[0] : high - begins[0]].copy_(
                value[(slice(low - first, high - first), *rest)]
            )


def _pieces(
    converter: WeightConverter, sources: Mapping[str, Sequence[str]]
) -> Iterator[tuple[int | None, list[tuple[str, str]]]]:
    """Yield the conversions that make the whole parameter: of each, the row that it makes, None for
    all of them, and its tensors as (pattern, name). Experts that are stacked are rows, which can be
    made one by one."""
    stack, *then = converter.operations
    by_row = isinstance(stack, MergeModulelist) and stack.dim == 0
    by_row = by_row and all(
        isinstance(operation, Concatenate) and operation.dim > 0 for operation in then
    )
    counts = {len(keys) for keys in sources.values()}
    if by_row and len(counts) == 1:
        for row in range(counts.pop()):
            yield row, [(pattern, keys[row]) for pattern, keys in sources.items()]
    else:
        yield None, [(pattern, key) for pattern, keys in sources.items() for key in keys]
