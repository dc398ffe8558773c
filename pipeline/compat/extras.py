"""Libraries of the extras: imported where they are installed, and named with their extra where they
are not.

    with extra("lora"):                    ExtraMissing: peft is not installed; pip install 'asyncdock[lora]'
        from peft import LoraConfig

    is_installed("peft"), install("lora")  for checks, which import nothing

A plain installation has what ``dependencies`` of pyproject.toml lists; nothing else is imported
outside of ``extra``.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.problems import Fatal

# The modules that this code imports of each extra.
MODULES = {
    "agents": ("openai",),
    "ascend": ("torch_npu",),
    "data": ("datasets", "pyarrow"),
    "environments": ("skyrl_gym", "textarena"),
    "kernels": ("liger_kernel",),
    "lora": ("peft",),
    "math": ("math_verify",),
    "mlflow": ("mlflow",),
    "quickstart": ("accelerate", "gguf", "matplotlib", "reasoning_gym"),
    "optimizers": ("torchao",),
    "ray": ("grpc", "ray", "starlette"),
    "renderers": ("renderers",),
    "s3": ("s3fs",),
    "structured": ("llguidance",),
    "sweep": ("optuna",),
    "tensorboard": ("tensorboard",),
    "tinker": ("google",),
    "verifiers": ("verifiers",),
    "vllm": ("vllm",),
    "wandb": ("wandb",),
}


class ExtraMissing(Fatal, ImportError):
    """A library of an extra cannot be imported. The message ends with the command that installs
    it."""


def install(name: str) -> str:
    """Return the command that installs the extra ``name``."""
    return f"pip install 'asyncdock[{name}]'"


def is_installed(module: str) -> bool:
    """Return whether the top-level ``module`` can be found. It is not imported."""
    return importlib.util.find_spec(module) is not None


def install_vllm() -> str:
    """Return what brings vLLM to this machine.

    Where there is torch_npu, it is vllm-ascend and the vllm that belongs to it: the vllm of the
    extra has a torch for CUDA, which would replace that of the NPUs.
    """
    if is_installed("torch_npu"):
        return "install vllm-ascend and its vllm as docs/engines.md says, not the extra vllm"
    return install("vllm")


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Turn an ImportError of the imports inside into :class:`ExtraMissing`, which names the extra
    ``name``."""
    try:
        yield
    except ExtraMissing:
        raise
    except ImportError as error:
        library = str(error.name).partition(".")[0]
        is_absent = isinstance(error, ModuleNotFoundError) and sys.modules.get(library) is None
        reason = f"{library} is not installed" if is_absent else error
        raise ExtraMissing(
            f"{reason}; {install(name)}", name=error.name, path=error.path
        ) from error
