"""Checkpoints read tensor by tensor: the weights of ``from_pretrained``, and no more memory than a
shard and one tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version, parse
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeForCausalLM

from benchmarks.engines.families import FAMILIES, config_of, write
from stages.engines.torch.parallel.tensor import cuts
from stages.model import load as models
from stages.model.files import open_skeleton
from stages.model.load import load_model
from stages.parallel.placement import model_state
from tests.ranks import on_ranks
from tests.stages.sharded import bytes_at_loading, differing

SMALL = 16 * 1024  # bytes of buffers, random states and index tensors


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each family."""
    home = tmp_path_factory.mktemp("families")
    return {family: write(family, home / family, torch.float32) for family in FAMILIES}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_family_is_read_as_transformers_reads_it(
    folders: dict[str, Path], dtype: torch.dtype
) -> None:
    for family, folder in folders.items():
        assert open_skeleton(folder, dtype) is not None, family
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        state = torch.random.get_rng_state()
        model, _ = load_model(str(folder), dtype=dtype, seed=0)
        assert torch.equal(torch.random.get_rng_state(), state)
        assert (type(model), model.config.to_dict()) == (type(expected), expected.config.to_dict())
        assert model.generation_config.to_dict() == expected.generation_config.to_dict()
        for kind in ("named_parameters", "named_buffers"):  # parameters: tied ones once
            found = dict(getattr(model, kind)())
            wanted = dict(getattr(expected, kind)())
            assert list(found) == list(wanted), family
            for name, value in wanted.items():
                asked = dtype if kind == "named_parameters" else value.dtype
                assert found[name].dtype == asked, f"{family}: {name}"
                assert torch.equal(found[name], value.to(asked)), f"{family}: {name}"
                assert found[name].requires_grad == value.requires_grad


@pytest.mark.parametrize("whole", [False, True])
def test_parameters_that_transformers_keeps_in_float32_have_the_dtype_of_the_others(
    folders: dict[str, Path], whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Qwen3MoeForCausalLM, "_keep_in_fp32_modules_strict", ["gate.weight"])
    source = str(folders["Qwen3-MoE"])
    kept = "model.layers.0.mlp.gate.weight"
    as_read = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    assert as_read.get_parameter(kept).dtype == torch.float32 != as_read.dtype
    if whole:  # a checkpoint that is not read tensor by tensor
        monkeypatch.setattr(models, "open_skeleton", lambda folder, dtype: None)
    model, _ = load_model(source, dtype=torch.bfloat16, seed=0)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.get_parameter(kept), as_read.get_parameter(kept).bfloat16())
    assert torch.isfinite(model(torch.arange(8)[None]).logits).all()
    assert {each.dtype for each in model_state(model.config).parameters} == {torch.bfloat16}


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_read_their_shards_of_every_family_bit_for_bit(
    folders: dict[str, Path], dp: int, tp: int
) -> None:
    chosen = {family: str(folder) for family, folder in folders.items() if tp == 1 or _cuts(family)}
    if parse(transformers.__version__) < Version("5.21"):
        chosen.pop("Gemma 2", None)  # with these several ranks pack it wrongly, and refuse it
    assert len(chosen) > 8
    assert on_ranks(
        dp, tp, differing, chosen, torch.bfloat16 if dp * tp == 4 else torch.float32
    ) == [[]] * (dp * tp)


def _cuts(family: str) -> bool:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(family))
    try:
        return bool(cuts(model, 2))
    except ValueError:
        return False


@pytest.mark.parametrize(
    ("family", "dp", "tp"),
    [("Qwen3", 2, 1), ("Qwen3", 1, 2), ("DeepSeek-V3", 2, 1), ("Qwen3-MoE", 4, 1)],
)
def test_no_rank_holds_more_than_its_shard_and_one_tensor(
    family: str, dp: int, tp: int, tmp_path: Path
) -> None:
    """In float32, of a bfloat16 checkpoint: both dtypes of a tensor are never held at one time, and
    experts are fused one by one."""
    folder = write(family, tmp_path / family, torch.bfloat16)
    whole = 2 * sum(t.nbytes for t in load_file(folder / "model.safetensors").values())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(family), dtype=torch.float32)
    largest = max(parameter.nbytes for parameter in model.parameters())
    for held, shard in on_ranks(dp, tp, bytes_at_loading, str(folder), torch.float32):
        assert shard + largest < 0.75 * whole, "a rank with the whole model would be found"
        assert held <= shard + largest + SMALL


def damaged(folder: Path, what: str) -> None:
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    if what == "pickled":
        torch.save(tensors, folder / "pytorch_model.bin")
        weights.unlink()
        return
    if what == "tied twice":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    elif what == "tied apart":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    elif what == "one is missing":
        del tensors["model.norm.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})


@pytest.mark.parametrize("what", ["pickled", "tied twice", "tied apart", "one is missing"])
def test_other_checkpoints_are_read_whole_by_transformers(what: str, tmp_path: Path) -> None:
    folder = write("Qwen3", tmp_path / "model", torch.float32)
    damaged(folder, what)
    assert open_skeleton(folder, torch.float32) is None
    model, _ = load_model(str(folder), dtype=torch.float32, seed=0)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = dict(model.named_parameters())
    assert list(found) == [name for name, _ in expected.named_parameters()]
    assert all(torch.equal(found[name], value) for name, value in expected.named_parameters())
