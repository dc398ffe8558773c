"""Checkpoints of called models: to the bit for themselves, and what recipes and peft read and
write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from orchestration.checkpoints.checkpoint import open_checkpoint
from stages.adapters.options import ADAPTER, AdapterOptions
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.calls.interface import AdamOptions, CallRefused, ModelOptions
from stages.calls.model import TorchCalledModel
from stages.engines.torch.train import TorchTrainEngine
from stages.model.load import load_model, load_tokenizer, tiny_model
from stages.model.manifest import STATE
from tests.batches import tiny_rows
from tests.stages.calls.data import sampled, supervised, tiny_base

STEP = AdamOptions(learning_rate=1e-2)
OPTIONS = {
    "adapter": ModelOptions(rank=4, seed=7),
    "head": ModelOptions(rank=4, seed=7, head=True),
    "whole": ModelOptions(rank=0, seed=7),
}
KINDS = [(kind, dtype) for kind in OPTIONS for dtype in (torch.float32, torch.bfloat16)]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def trained(rank: int = 4, steps: int = 2, **options: Any) -> TorchCalledModel:
    return trained_with(ModelOptions(rank=rank, seed=7), steps, **options)


def trained_with(model_options: ModelOptions, steps: int = 2, **options: Any) -> TorchCalledModel:
    return train(TorchCalledModel(tiny_base(**options), model_options), steps)


def train(model: TorchCalledModel, steps: int) -> TorchCalledModel:
    for seed in range(steps):
        model.forward_backward(sampled(seed=seed), "ppo", {})
        model.optimizer_step(STEP)
    return model


def logprobs(model: TorchCalledModel) -> np.ndarray:
    return np.concatenate(model.forward(supervised(), "cross_entropy", {}).logprobs)


def plain_logprobs(model: Any) -> np.ndarray:
    """By the plain forward of a Hugging Face model."""
    rows = []
    for datum in supervised():
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(datum.tokens)[None]).logits[0].float()
        targets = torch.from_numpy(datum.inputs["target_tokens"])[:, None]
        rows.append(logits.log_softmax(-1).gather(-1, targets)[:, 0])
    return torch.cat(rows).numpy()


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_a_loaded_model_goes_on_to_the_same_bits(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = trained_with(OPTIONS[kind], dtype=dtype)
    model.save(tmp_path / "a", optimizer=True, merged=False)
    document = json.loads((tmp_path / "a" / STATE).read_bytes())
    options = ModelOptions(**document["options"])
    assert options == OPTIONS[kind]
    other = TorchCalledModel(tiny_base(dtype=dtype), options)
    other.forward_backward(supervised(), "cross_entropy", {})
    other.load(tmp_path / "a", optimizer=True)
    with pytest.raises(CallRefused, match="no gradients"):
        other.optimizer_step(STEP)
    assert other.step == model.step == 2
    for each in (model, other):
        train(each, 2)
    assert np.array_equal(logprobs(model), logprobs(other))
    for name, value in model._engine.trained.items():
        assert torch.equal(value, other._engine.trained[name])


def test_without_the_optimizer_it_begins_anew(tmp_path: Path) -> None:
    model = trained()
    model.save(tmp_path / "a", optimizer=False)
    other = trained(steps=1)
    other.load(tmp_path / "a", optimizer=False)
    assert other.step == 0
    assert np.array_equal(logprobs(other), logprobs(model))
    fresh = trained(steps=0)
    fresh.load(tmp_path / "a", optimizer=False)
    for each in (other, fresh):
        train(each, 1)
    assert np.array_equal(logprobs(other), logprobs(fresh))
    with pytest.raises(CallRefused, match='"a": has no state of the optimizer; save it with'):
        other.load(tmp_path / "a", optimizer=True)
    assert other.step == 1


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_recipes_begin_with_what_is_saved_and_peft_opens_it(
    kind: str, dtype: torch.dtype, tied: bool, tmp_path: Path
) -> None:
    """A head that was the embedding, and has an adapter, is a matrix of its own."""
    rank = OPTIONS[kind].rank
    model = trained_with(OPTIONS[kind], dtype=dtype, tied=tied)
    model.save(tmp_path / "a", optimizer=True)
    source = str(tmp_path / "a" / "model")
    opened, _ = load_model(source, dtype=dtype, seed=0)
    tolerance = 2e-5 if dtype == torch.float32 else 0.1
    assert np.abs(plain_logprobs(opened) - logprobs(model)).max() < tolerance
    is_tied = tied and kind != "head"
    words = opened.get_input_embeddings().weight
    assert (opened.get_output_embeddings().weight is words) is is_tied
    if rank:
        assert torch.equal(words, tiny_model(3, dtype).get_input_embeddings().weight)
    assert load_tokenizer(source).decode([5, 6]) == tiny_base().tokenizer.decode([5, 6])
    checkpoint = open_checkpoint(tmp_path / "a")
    assert checkpoint.version == 2
    checkpoint.verify()
    if rank:
        plain = tiny_base(dtype=dtype, tied=tied).model
        of_peft = PeftModel.from_pretrained(plain, tmp_path / "a" / ADAPTER)
        assert np.abs(plain_logprobs(of_peft) - logprobs(model)).max() < tolerance
        config: Any = of_peft.peft_config["default"]
        assert (config.r, config.lora_alpha) == (rank, 32)
    whole = TorchCalledModel(tiny_base(seed=9, tied=is_tied), ModelOptions(rank=0))
    whole.load(Path(source), optimizer=False)
    assert np.abs(logprobs(whole) - logprobs(model)).max() < tolerance


def test_what_a_recipe_has_trained_is_loaded(tmp_path: Path) -> None:
    """An adapter with an alpha of its own, and a whole model, from the folders of a checkpoint."""
    batch, _ = tiny_rows()
    options: dict[str, Any] = {
        "learning_rate": 1e-2,
        "total_steps": 5,
        "device": "cpu",
        "threads": 1,
    }
    for name, adapters in (("lora", AdapterOptions(8, 12.0)), ("whole", None)):
        engine = TorchTrainEngine(tiny_model(3), adapters=adapters, **options)
        engine.train_batch(batch, GRPO(kl_coef=0.1))
        engine.save_pretrained(tmp_path / name / "model")
        tiny_base().tokenizer.save_pretrained(tmp_path / name / "model")
    merged, _ = load_model(str(tmp_path / "lora" / "model"), dtype=torch.float32, seed=0)
    for folder in (tmp_path / "lora", tmp_path / "lora" / ADAPTER):
        model = TorchCalledModel(tiny_base(), ModelOptions(rank=8))
        model.load(folder, optimizer=False)
        assert np.abs(logprobs(model) - plain_logprobs(merged)).max() < 2e-5
    whole, _ = load_model(str(tmp_path / "whole" / "model"), dtype=torch.float32, seed=0)
    for folder in (tmp_path / "whole", tmp_path / "whole" / "model"):
        model = TorchCalledModel(tiny_base(), ModelOptions(rank=0))
        model.load(folder, optimizer=False)
        assert np.abs(logprobs(model) - plain_logprobs(whole)).max() < 2e-5


@pytest.mark.parametrize("tied", [True, False])
def test_what_peft_has_saved_with_an_adapter_on_the_head_is_loaded(
    tied: bool, tmp_path: Path
) -> None:
    """Peft saves the head's own weight beside it."""
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=[*targets, "lm_head"], init_lora_weights=False
    )
    of_peft = get_peft_model(tiny_base(tied=tied).model, config)
    of_peft.save_pretrained(str(tmp_path))
    model = TorchCalledModel(tiny_base(tied=tied), OPTIONS["head"])
    model.load(tmp_path, optimizer=False)
    assert np.abs(plain_logprobs(of_peft) - logprobs(model)).max() < 2e-5


def test_what_cannot_be_loaded_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    saved = trained()
    saved.save(tmp_path / "saved", optimizer=True)
    trained(rank=0).save(tmp_path / "whole", optimizer=True)
    model = trained(steps=1)
    before = logprobs(model)

    def refused(folder: Path, message: str, of: TorchCalledModel = model) -> None:
        with pytest.raises(CallRefused, match=message):
            of.load(folder, optimizer=True)

    refused(tmp_path / "none", 'path = "none": has no adapter of rank 4')
    refused(tmp_path / "whole", "is of another model: .* is missing, not")
    refused(tmp_path / "saved", r"is \[4, 64\], not \[8, 64\]", trained(rank=8))
    with_head = trained_with(OPTIONS["head"])
    refused(tmp_path / "saved", "is of another model: lm_head.* is missing", with_head)
    with_head.save(tmp_path / "head", optimizer=True)
    refused(tmp_path / "head", "has adapters on layers that the model has none on, lm_head")
    with pytest.raises(CallRefused, match=r"has a lm_head\.weight of its own, and the model's is"):
        trained(rank=0).load(tmp_path / "head" / "model", optimizer=False)
    attention = TorchCalledModel(tiny_base(), ModelOptions(rank=4, mlp=False))
    refused(tmp_path / "saved", "has adapters on layers that the model has none on", attention)
    refused(tmp_path / "saved" / ADAPTER, "has rank 4, and the model 8; create", trained(rank=8))
    refused(tmp_path / "saved" / ADAPTER, "has no state of the optimizer")
    weights = tmp_path / "saved" / "train" / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    refused(tmp_path / "saved", r"weights\.safetensors is damaged")
    assert np.array_equal(logprobs(model), before)
    assert model.step == 1


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    model = trained(steps=1)
    model.save(tmp_path / "a", optimizer=True)
    (tmp_path / ".a.partial").mkdir()
    (tmp_path / ".a.partial" / "left").touch()
    train(model, 1)
    model.save(tmp_path / "a", optimizer=False, merged=False)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names == {ADAPTER, "train", "run.json", "digests.json"}
    assert json.loads((tmp_path / "a" / "run.json").read_text())["version"] == 2
