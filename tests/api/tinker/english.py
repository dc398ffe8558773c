"""A model that reads English and Qwen's chat format, and has learned nothing: what the tutorials and
recipes of tinker_cookbook ask for, at a size that a test can train."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.pages.page import ROOT

TEXTS = ("README.md", "docs/recipe.md", "docs/algorithms.md", "docs/runs.md", "docs/agents.md")
SPECIAL = (
    *("<|im_end|>", "<|im_start|>", "<think>", "</think>"),
    *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),  # of Kimi
)
TOKENS = 4096


def english_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE that was trained on this project's own pages."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(((ROOT / text).read_text() for text in TEXTS), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|im_end|>"
    )


def write_model(folder: Path) -> None:
    """Write the tokenizer and a Llama of one layer into ``folder``."""
    tokenizer = english_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        initializer_range=0.05,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
