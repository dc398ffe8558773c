"""These tests need vLLM, and are collected only where it is: in the environment that `make
test-vllm` builds."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stages.model.load import tiny_model, tiny_tokenizer

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with heads as wide as vLLM's attention on the CPU takes them."""
    folder = tmp_path_factory.mktemp("model")
    config: LlamaConfig = tiny_model(0).config
    config.num_attention_heads = 2
    config.num_key_value_heads = 1
    config.head_dim = 32
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
