"""Adapters on a model: what is trained, published, saved and computed, on one process and on
ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from benchmarks.engines.families import model_of as family_model
from orchestration.checkpoints.checkpoint import Checkpoint, Writer
from stages.adapters.export import load_adapter
from stages.adapters.names import adapter_shapes, down_of, up_of
from stages.adapters.options import ADAPTER, AdapterOptions
from stages.algorithms import NamedAlgorithm
from stages.engines.protocols import WeightMismatch
from stages.engines.torch.decoding.decoder import TorchDecoder
from stages.engines.torch.train import TorchTrainEngine
from stages.model.files import open_skeleton
from stages.weights.transport.store import WeightStore
from tests.batches import VOCABULARY, make_batch
from tests.ranks import of_product, on_ranks
from tests.stages.sharded import OPTIONS, algorithm, saved, steps, weights_of, whole_state
from tests.stages.sharded import model_of as small_model

LORA = AdapterOptions(4, 8.0, seed=3)
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WITH_HEAD = AdapterOptions(4, 8.0, (*LAYERS, "lm_head"), seed=3)
ADAPTED: dict[str, Any] = {**OPTIONS, "adapters": LORA}
IDS = torch.arange(12) * 5 % 20


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def model_of(kind: str, **options: Any) -> Any:
    if kind == "moe":
        return family_model("DeepSeek-V3", vocab_size=VOCABULARY, **{"seed": 0, **options})
    return small_model(kind, **options)


def engine_of(kind: str = "qwen3", seed: int = 0, **options: Any) -> TorchTrainEngine:
    return TorchTrainEngine(model_of(kind, seed=seed), **{**ADAPTED, **options})


def trained(kind: str = "qwen3", count: int = 2, **options: Any) -> TorchTrainEngine:
    engine = engine_of(kind, **options)
    for seed in range(count):
        engine.train_batch(make_batch(seed=seed), algorithm())
    return engine


def plain_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS[None], use_cache=False).logits[0]  # type: ignore[no-any-return]


def test_adapters_alone_are_trained_published_and_held_by_the_optimizer() -> None:
    engine = engine_of()
    whole = model_of("qwen3")
    base = {
        name: value.clone()
        for name, value in engine.model.state_dict().items()
        if "lora" not in name
    }
    before = weights_of(engine)
    engine.train_batch(make_batch(), algorithm())
    engine.train_batch(make_batch(seed=1), algorithm())
    after = weights_of(engine)
    assert {name: tuple(value.shape) for name, value in after.items()} == adapter_shapes(
        whole, LORA
    )
    assert all(not torch.equal(before[name], after[name]) for name in after)
    assert (
        engine.state_dict()["exp_avg"].keys() == engine.state_dict()["model"].keys() == after.keys()
    )
    now = engine.model.state_dict()
    assert all(torch.equal(now[name], value) for name, value in base.items()), "the base is frozen"


def test_at_most_four_percent_of_the_bytes_are_published(tmp_path: Path) -> None:
    """At rank 16 on all linear layers of SmolLM2, whose shapes this model has, and a record of
    which is made."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    }
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(**sizes, num_hidden_layers=30, vocab_size=49152, tie_word_embeddings=True)
        )
    full = sum(parameter.numel() for parameter in model.parameters())
    shapes = adapter_shapes(model, AdapterOptions(16, 32.0))
    published = WeightStore(tmp_path).publish(
        1, ((name, torch.empty(shape)) for name, shape in shapes.items())
    )
    assert published.nbytes <= 0.04 * 4 * full


@pytest.mark.parametrize("targets", [("q_proj", "down_proj"), ("layers.1.self_attn.k_proj",)])
def test_targets_are_ends_of_names(targets: tuple[str, ...]) -> None:
    options = AdapterOptions(2, 4.0, targets)
    engine = trained(adapters=options)
    layers = {name.partition(".lora_")[0] for name in weights_of(engine)}
    assert layers
    assert all(layer.endswith(targets) for layer in layers)
    assert len(layers) == (4 if len(targets) == 2 else 1)
    decoder = TorchDecoder(model_of("qwen3"), torch.device("cpu"), adapters=options)
    decoder.weights.install(decoder.weights.prepare(weights_of(engine)))
    assert_same_policy(engine, decoder)


def test_a_target_that_is_no_linear_layer_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match="'query' is no linear layer of Qwen3ForCausalLM before its head; it has down_pr",
    ):
        engine_of(adapters=AdapterOptions(2, 4.0, ("query",)))


def assert_same_policy(
    engine: TorchTrainEngine, decoder: TorchDecoder, tolerance: float = 2e-5
) -> None:
    with torch.inference_mode():
        found = decoder.score(IDS[:4], IDS[4:]).log_softmax(-1)
    wanted = plain_logits_of(engine)[3:-1].log_softmax(-1)
    assert torch.allclose(found, wanted, atol=tolerance), float((found - wanted).abs().max())


def plain_logits_of(engine: TorchTrainEngine) -> torch.Tensor:
    """Logits of the model that the engine's export is."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        engine.save_pretrained(Path(folder) / "model")
        return plain_logits(AutoModelForCausalLM.from_pretrained(Path(folder) / "model"))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", ["llama", "biased", "qwen3", "gathered", "fused", "moe"])
def test_a_decoder_with_the_published_adapters_computes_the_merged_model(
    kind: str, packed: bool
) -> None:
    engine = trained(kind)
    decoder = TorchDecoder(model_of(kind), torch.device("cpu"), packed=packed, adapters=LORA)
    with torch.inference_mode():
        base = decoder.score(IDS[:4], IDS[4:]).clone()
    decoder.weights.check(weights := weights_of(engine))
    decoder.weights.install(decoder.weights.prepare(weights))
    assert_same_policy(engine, decoder)
    with torch.inference_mode():
        assert (decoder.score(IDS[:4], IDS[4:]) - base).abs().max() > 0.01, "other than the base"
        prompt, _ = decoder.prefill([IDS[:4]])
        decoder.join(prompt[0])
        step = decoder.decode([int(IDS[4])]).clone()
        assert torch.allclose(step[0], decoder.score(IDS[:4], IDS[4:])[1], atol=1e-4)
    with pytest.raises(WeightMismatch, match="missing"):
        decoder.weights.check(dict(model_of(kind).named_parameters()))


@pytest.mark.parametrize("adapters", [LORA, WITH_HEAD], ids=["layers", "head"])
def test_the_base_is_the_reference(adapters: AdapterOptions) -> None:
    """Scores by the base, with the adapters off, are what a reference with the model of the
    beginning gives."""
    batch = make_batch(seed=4).exclude("ref_logprobs")
    with_column = make_batch(seed=4)
    with_column["ref_logprobs"] = TorchTrainEngine(model_of("qwen3"), **OPTIONS).logprobs(batch)
    by_base = NamedAlgorithm("grpo", algorithm(), {"ref_logprobs": "base"})
    found = trained(adapters=adapters)
    wanted = trained(adapters=adapters)
    assert found.train_batch(batch, by_base) == pytest.approx(
        dict(wanted.train_batch(with_column, algorithm())), rel=1e-4
    )
    assert found.train_batch(batch, by_base)["kl_reference"] > 1e-4
    with pytest.raises(ValueError, match="without its adapters, and it has none"):
        TorchTrainEngine(model_of("qwen3"), **OPTIONS).train_batch(batch, by_base)


@pytest.mark.parametrize(
    ("kind", "adapters"),
    [("llama", LORA), ("moe", LORA), ("llama", WITH_HEAD)],
    ids=["llama", "moe", "head"],
)
def test_exports_are_opened_by_peft_and_by_transformers(
    kind: str, adapters: AdapterOptions, tmp_path: Path
) -> None:
    engine = trained(kind, adapters=adapters)
    engine.save_pretrained(tmp_path / "model")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    of_peft = PeftModel.from_pretrained(model_of(kind), tmp_path / ADAPTER)
    assert torch.allclose(plain_logits(merged), plain_logits(of_peft), atol=2e-5)
    assert (plain_logits(merged) - plain_logits(model_of(kind))).abs().max() > 0.01
    assert weights_of(engine).keys() == load_adapter(tmp_path / ADAPTER, torch.float32).keys()
    assert of_peft.peft_config["default"].r == LORA.rank


@pytest.mark.parametrize("of_files", [False, True])
def test_a_merged_head_is_a_matrix_of_its_own(of_files: bool, tmp_path: Path) -> None:
    """The embedding that it was in the base is as before."""
    model_of("llama").save_pretrained(tmp_path / "base")
    opened = open_skeleton(tmp_path / "base", torch.float32) if of_files else None
    engine = trained("llama", adapters=WITH_HEAD)
    engine.packed_model.save_adapters(
        tmp_path / "model", weights_of(engine), base=opened and opened[1]
    )
    assert engine.model.config.tie_word_embeddings
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert not merged.config.tie_word_embeddings
    words = merged.get_input_embeddings().weight
    assert torch.equal(words, model_of("llama").get_input_embeddings().weight)
    matrices = weights_of(engine)
    change = 2.0 * matrices[up_of("lm_head")] @ matrices[down_of("lm_head")]
    assert torch.allclose(merged.get_output_embeddings().weight, words + change, atol=1e-6)


def test_a_bfloat16_base_has_float32_adapters_and_publishes_bfloat16() -> None:
    engine = TorchTrainEngine(
        model_of("qwen3", dtype=torch.bfloat16),
        **{**ADAPTED, "compute": torch.bfloat16, "learning_rate": 1e-5},
    )
    before = {name: value.clone() for name, value in engine.state_dict()["model"].items()}
    engine.train_batch(make_batch(), algorithm())
    state = engine.state_dict()
    assert {value.dtype for part in ("model", "exp_avg") for value in state[part].values()} == {
        torch.float32
    }
    assert {value.dtype for value in weights_of(engine).values()} == {torch.bfloat16}
    assert {p.dtype for p in engine.model.parameters()} == {torch.bfloat16}
    moved = [name for name, value in state["model"].items() if not torch.equal(value, before[name])]
    assert len(moved) == len(before) / 2, "B has a gradient at once, A when B is not 0 any more"


def test_a_checkpoint_continues_bit_for_bit(tmp_path: Path) -> None:
    engine = trained()
    Writer(engine).copy()
    writer = Writer(engine)
    writer.copy()
    writer.write(tmp_path)
    other = engine_of()
    Checkpoint(tmp_path, 2, {}, []).load_into(other)
    for one in (engine, other):
        one.train_batch(make_batch(seed=7), algorithm())
    ours = whole_state(engine)
    theirs = whole_state(other)
    assert all(np.array_equal(value, theirs[name]) for name, value in ours.items())
    assert (tmp_path / "model" / "config.json").is_file()
    assert (tmp_path / ADAPTER / "adapter_config.json").is_file()


@pytest.mark.parametrize(
    ("chosen", "kind", "adapters"),
    [
        ({"dp": 2}, "qwen3", LORA),
        ({"tp": 2}, "biased", LORA),
        ({"dp": 2, "tp": 2}, "gathered", LORA),
        ({"tp": 2}, "fused", LORA),
        ({"cp": 2}, "qwen3", LORA),
        ({"dp": 2}, "qwen3", WITH_HEAD),
        ({"tp": 2}, "qwen3", WITH_HEAD),
        ({"tp": 2}, "qwen3", AdapterOptions(4, 8.0, ("q_proj", "down_proj"), seed=3)),
    ],
)
def test_ranks_train_what_one_process_trains(
    chosen: dict[str, int], kind: str, adapters: AdapterOptions
) -> None:
    engine = engine_of(kind, learning_rate=1e-3, adapters=adapters)
    wanted = [dict(engine.train_batch(make_batch(seed=seed), algorithm())) for seed in range(3)]
    options = {"adapters": adapters, "learning_rate": 1e-3}
    *found, weights = of_product(chosen, steps, kind, 3, options)[0]
    for one, other in zip(found, wanted, strict=True):
        assert other.pop("fed_tokens") <= one.pop("fed_tokens")
        assert one == pytest.approx(other, rel=1e-3, abs=1e-6)
    assert weights.keys() == weights_of(engine).keys()
    for name, value in weights_of(engine).items():
        difference = np.abs(weights[name] - value.numpy())
        # Adam's step has the sign of a gradient: of one next to zero, rounding decides
        assert (difference < 2e-4).mean() > 0.99, name
        assert difference.max() < options["learning_rate"], name


@pytest.mark.parametrize("adapters", [LORA, WITH_HEAD], ids=["layers", "head"])
def test_a_checkpoint_of_ranks_is_read_by_one_process_and_exported(
    adapters: AdapterOptions, tmp_path: Path
) -> None:
    state = on_ranks(2, 1, saved, "llama", str(tmp_path), {"adapters": adapters})[0]
    engine = engine_of("llama", seed=0, adapters=adapters)
    Checkpoint(tmp_path, 1, {}, []).load_into(engine)
    assert all(np.array_equal(value, state[name]) for name, value in whole_state(engine).items())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    of_peft = PeftModel.from_pretrained(model_of("llama"), tmp_path / ADAPTER)
    assert torch.allclose(plain_logits(merged), plain_logits(of_peft), atol=2e-5)


def test_first_values_depend_on_the_seed() -> None:
    first, other = (
        next(iter(weights_of(engine_of(adapters=AdapterOptions(4, 8.0, seed=seed))).values()))
        for seed in (3, 4)
    )
    assert not torch.equal(first, other)
