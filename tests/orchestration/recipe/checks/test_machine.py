"""A check reports at once what is wrong with the prompts, the model's files, the devices and the
room, and loads nothing."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from api.server.access.settings import Settings
from api.server.access.submission_policy import accept
from orchestration.recipe import model_files
from orchestration.recipe.checks import machine
from orchestration.recipe.checks.examples import prompt_sources
from orchestration.recipe.loading.load import load_recipe, parse_recipe
from orchestration.recipe.problems import RecipeError
from pipeline.problems import Problem
from stages import device_names
from stages.model.load import tiny_tokenizer
from stages.prompts.formatter import identity_of
from stages.prompts.rows.files import PromptError, Reading
from stages.prompts.rows.options import PromptOptions
from stages.prompts.sources import holds_nothing_out, load_prompts
from tests.orchestration.runs import MOCK, TINY
from tests.sources import ROOT


def of(base: dict[str, Any] = TINY, **sections: Any) -> dict[str, Any]:
    """``base`` with keys of its sections changed; a section that is not a table is replaced."""
    data: dict[str, Any] = json.loads(json.dumps(base))
    for name, section in sections.items():
        data[name] = {**data.get(name, {}), **section} if isinstance(section, dict) else section
    return data


def of_rows(path: Path | str, **more: Any) -> dict[str, Any]:
    """A recipe of the prompts in a file, with a reward that needs no other column."""
    reward = {"functions": [{"name": "tests.orchestration.scores:early_letters"}]}
    return {
        **of(reward=reward),
        "prompts": {"source": "jsonl", "path": str(path), "max_prompt_tokens": 16, **more},
    }


def problems(data: dict[str, Any], **options: Any) -> list[Problem]:
    try:
        parse_recipe(data, **options)
    except RecipeError as error:
        return error.problems
    return []


def messages(data: dict[str, Any], **options: Any) -> dict[str, str]:
    return {problem.key: f"{problem.wrong}; {problem.fix}" for problem in problems(data, **options)}


def test_everything_wrong_is_said_in_one_round(tmp_path: Path) -> None:
    """What pydantic finds, what does not fit together, and what only the files and the machine
    show."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"question": "b"}\n\n{"prompt": \n')
    (tmp_path / "model").mkdir()
    data = of(
        model={"source": str(tmp_path / "model")},
        rollout={"device": "cudda", "max_tokens": "four", "engine": "torchh"},
        reward={"functions": [{"name": "spellin"}]},
        algorithm={"name": "grpo", "options": {"kl_cof": 0.1}},
        train={"device": "cuda:99", "stepz": 3},
        pipeline={"keep_samples": "100TiB", "arena": "90TiB"},
    )
    data["prompts"] = {
        "source": "jsonl",
        "path": str(tmp_path / "rows.jsonl"),
        "template": "ask",
        "held_out": "0.1",
    }
    found = problems(data, folder=tmp_path)
    assert {problem.key for problem in found} >= {
        "model.source",
        "prompts.path",
        "prompts.template",
        "prompts.held_out",
        "rollout.device",
        "rollout.max_tokens",
        "rollout.engine",
        "reward.functions.0.name",
        "algorithm.options.kl_cof",
        "train.device",
        "train.stepz",
        "pipeline.keep_samples",
        "pipeline.arena",
    }
    lines = [problem.wrong for problem in found if problem.key == "prompts.path"]
    assert lines[0] == "line 2 has no column 'prompt' (it has ['question'])"
    assert lines[1].startswith("line 4 is not JSON (Expecting value")
    assert [p.wrong for p in found if p.key == "model.source"] == [
        "has no config.json",
        "has no tokenizer.json",
        "has no weights (model.safetensors)",
    ]


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"pipeline": {"staleness": 0}},
            "drafts tokens, but results of a synchronous run are exact",
        ),
        (
            {"rollout": {"speculate": "off"}},
            "drafts tokens, but rollout.speculate = 'off'; take it out",
        ),
        (
            {"rollout": {"engine": "vllm"}},
            "drafts for the torch engine alone; take it out; vLLM takes its own by "
            "rollout.vllm.speculative_config",
        ),
        (
            {"rollout": {"draft_model": "smollm2"}},
            "has another vocabulary than model.source = 'tiny': it does not read the same tokens; "
            "use a checkpoint of the same family",
        ),
        (
            {"rollout": {"draft_model": "nowhere"}},
            "is neither a known model nor a directory; give the directory of a Hugging Face "
            "checkpoint, smaller than the model",
        ),
    ],
)
def test_a_draft_model_that_could_not_draft_is_refused(sections: dict[str, Any], said: str) -> None:
    drafting = of(rollout={"draft_model": "tiny"}, pipeline={"staleness": 1})
    assert "rollout.draft_model" not in messages(drafting)
    assert messages(of(drafting, **sections))["rollout.draft_model"].startswith(said)


def test_one_wrong_key_of_the_prompts_hides_no_other(tmp_path: Path) -> None:
    found = messages(
        of_rows(
            tmp_path / "none.jsonl", template="x", chat=False, system="be short", too_long="drop"
        )
    )
    assert set(found) == {"prompts.template", "prompts.system", "prompts.too_long", "prompts.path"}
    assert found["prompts.path"].startswith("does not exist, seen from")
    assert "'skip'" in found["prompts.too_long"]


# Common mistakes: how the file of prompts is made, and the text of the problem.
HABITS: dict[str, tuple[Callable[[Path], object], str]] = {
    "UTF-16": (lambda path: path.write_text('{"prompt": "a"}\n', encoding="utf-16"), "is UTF-16"),
    "Latin-1": (
        lambda path: path.write_text('{"prompt": "é"}\n', encoding="latin1"),
        "line 1 is not UTF-8",
    ),
    "a lone surrogate": (
        lambda path: path.write_text('{"prompt": "\\udc00"}'),
        "line 1 has half of a surrogate pair",
    ),
    "zero bytes": (
        lambda path: path.write_bytes(b'{"prompt": "a"}\n\0\0\0'),
        "line 2 has a zero byte at column 1",
    ),
    "a folder": (lambda path: path.mkdir(), "is a folder without *.jsonl; give a file"),
    "an empty file": (lambda path: path.touch(), "is empty"),
    "a pipe": (lambda path: os.mkfifo(path), "is a pipe; give a file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "is a device; give a file"),
    "one array": (
        lambda path: path.write_text('[{"prompt": "a"},\n{"prompt": "b"}]'),
        "as `jq -c '.[]'` makes",
    ),
    "no prompts": (
        lambda path: path.write_text('{"prompt": ""}'),
        "line 1 has '' in column 'prompt'",
    ),
    "a conversation": (
        lambda path: path.write_text('{"prompt": [{"role": "user", "content": "a"}]}'),
        "line 1), which needs a chat template, but the tokenizer of model.source = 'tiny' has none",
    ),
}


@pytest.mark.parametrize("habit", HABITS)
def test_a_prompts_file_that_is_none_is_one_sentence_and_no_traceback(
    habit: str, tmp_path: Path
) -> None:
    make, sentence = HABITS[habit]
    make(tmp_path / "rows.jsonl")
    began = time.monotonic()
    [(key, message)] = messages(of_rows(tmp_path / "rows.jsonl")).items()
    assert (key, sentence in message) == ("prompts.path", True), message
    assert time.monotonic() - began < 30, "it has waited for something"


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n', encoding="utf-8-sig")
    assert messages(of_rows(tmp_path / "rows.jsonl")) == {}


def needs_the_question(completions: list[str], question: list[str], level: int = 1) -> list[float]:
    return [0.0 for _ in completions]


def test_rewards_and_the_columns_of_the_prompts_are_compared(tmp_path: Path) -> None:
    """A run would only find out when the first response is scored."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "about": "b"}\n')
    data = of_rows(path) | {
        "reward": {"functions": [{"name": "spelling"}, {"name": f"{__name__}:needs_the_question"}]}
    }
    found = messages(data)
    assert found["reward.functions.0.name"].startswith(
        f"needs the column 'answer', which no row of {path} has"
    )
    assert "needs the column 'question'" in found["reward.functions.1.name"]
    path.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "a", "question": "b"}\n')
    assert messages(data) == {}
    path.write_text('{"prompt": "a", "answer": "b", "question": "c", "completions": "d"}\n')
    assert messages(data) == {
        "prompts.path": "has columns ['completions'], which reward functions get from the run; "
        "rename them"
    }
    assert messages({**data, "external": {"stages": ["reward"]}}) == {}
    assert (
        "needs the column 'question'"
        in messages(of(reward=data["reward"]))["reward.functions.1.name"]
    )


# --------------------------------------------------------------------------------------------------
# Model files


def model_folder(folder: Path, shards: int = 2) -> Path:
    """A model's folder with two tensors in as many shards as asked; its weights are nothing."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "max_position_embeddings": 64})
    )
    (folder / "tokenizer.json").write_text("{}")
    names = [f"model-{at + 1:05d}-of-{shards:05d}.safetensors" for at in range(shards)]
    for at, name in enumerate(names):
        header = json.dumps(
            {f"w{at}": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
        ).encode()
        (folder / name).write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    index = {"weight_map": {f"w{at}": name for at, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def rewritten(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


FIRST = "model-00001-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
BROKEN_MODELS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda at: (at / "config.json").unlink(), "has no config.json"),
    "config cut short": (
        lambda at: (at / "config.json").write_text('{"model_type'),
        "has a config.json that is no JSON",
    ),
    "config is a list": (
        lambda at: (at / "config.json").write_text("[]"),
        "has a config.json that is no JSON object",
    ),
    "config is deep": (
        lambda at: (at / "config.json").write_text("[" * 10**5),
        "has a config.json that is no JSON",
    ),
    "no tokenizer": (lambda at: (at / "tokenizer.json").unlink(), "has no tokenizer.json"),
    "tokenizer cut short": (lambda at: (at / "tokenizer.json").write_text('{"a": "'), "cut short"),
    "a shard is missing": (
        lambda at: (at / FIRST).unlink(),
        f"lacks {FIRST} of the 2 files that {INDEX} names",
    ),
    "a shard is cut short": (
        lambda at: rewritten(at / FIRST, lambda b: b[:-4]),
        "bytes, where its header says",
    ),
    "a header is damaged": (
        lambda at: rewritten(at / FIRST, lambda b: b[:9] + b"\xff" + b[10:]),
        "damaged header",
    ),
    "a header is endless": (
        lambda at: rewritten(at / FIRST, lambda b: b"\xff" * 8 + b[8:]),
        "no safetensors file",
    ),
    "a shard is a pipe": (
        lambda at: ((at / FIRST).unlink(), os.mkfifo(at / FIRST)),
        f"lacks {FIRST}",
    ),
    "a shard is a pointer": (
        lambda at: (at / FIRST).write_bytes(LFS),
        "only a pointer of Git LFS; fetch it",
    ),
    "the index lies": (
        lambda at: rewritten(at / INDEX, lambda b: b.replace(b'"w0"', b'"w9"')),
        f"has a {FIRST} without the tensor 'w9'",
    ),
    "the index leads away": (
        lambda at: rewritten(at / INDEX, lambda b: b.replace(FIRST.encode(), b"../../etc/passwd")),
        "which is no file beside it",
    ),
    "no index": (lambda at: (at / INDEX).unlink(), f"has {FIRST}, but no {INDEX}"),
}


@pytest.mark.parametrize("damage", BROKEN_MODELS)
def test_a_model_that_is_not_whole_is_said(damage: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    assert messages(of(model={"source": str(folder)})) == {}
    damaging, sentence = BROKEN_MODELS[damage]
    damaging(folder)
    assert sentence in messages(of(model={"source": str(folder)}))["model.source"]


@pytest.mark.parametrize(
    "path", ["x" * 5000, "~nobody-at-all/x", "/dev/null", "\u202e", "a" + "/a" * 3000]
)
def test_odd_paths_are_problems_and_no_tracebacks(path: str) -> None:
    found = messages(
        of(
            model={"source": path},
            pipeline={"tls_certificate": path, "tls_key": path, "tls_authority": path},
        )
    )
    assert found["model.source"].startswith("is neither a known model nor a directory")
    assert found["pipeline.tls_certificate"].startswith("is no file")
    for source in ("jsonl", "parquet", "datasets"):
        assert set(messages(of_rows(path, source=source))) == {"prompts.path"}


def test_a_folder_of_parquet_is_not_looked_through_without_end(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    assert "without *.parquet" in messages(of_rows(tmp_path, source="parquet"))["prompts.path"]
    for at in range(300):
        (tmp_path / str(at)).mkdir()
    assert messages(of_rows(tmp_path, source="parquet"), reading=Reading(rows=100)) == {}


def test_a_tokenizer_with_more_tokens_than_the_embedding_has_rows_is_refused(
    tmp_path: Path,
) -> None:
    folder = model_folder(tmp_path / "model")
    tokenizer = tiny_tokenizer()
    config = {"model_type": "llama", "max_position_embeddings": 64}
    recipe = of(model={"source": str(folder)}, external={"stages": ["rollout", "update"]})

    def found(rows: int) -> str:
        (folder / "config.json").write_text(json.dumps({**config, "vocab_size": rows}))
        return messages(recipe).get("model.source", "")

    tokenizer.save_pretrained(folder)
    assert found(len(tokenizer)) == found(len(tokenizer) + 8) == ""
    assert "'?' has the id 48, and the embedding has 48 rows; save the model after" in found(
        len(tokenizer) - 1
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(folder)
    assert found(len(tokenizer) - 1) == "", "no text becomes it"
    tokenizer.chat_template = "<image>{{ messages }}"
    tokenizer.save_pretrained(folder)
    assert "'<image>' has the id 49" in found(len(tokenizer) - 1)


def test_a_model_of_others_needs_no_weights_of_ours(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    (folder / INDEX).unlink()
    data = of(model={"source": str(folder)}, external={"stages": ["rollout", "update"]})
    assert messages({**data, "evaluate": {"every": 0}}) == {}


def test_a_recipe_of_real_files_is_checked_without_torch(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    # our own torch engines would be asked about the model
    external = {"stages": ["rollout", "update"]}
    data = of_rows(tmp_path / "rows.jsonl") | {
        "model": {"source": str(folder)},
        "external": external,
    }
    script = (
        "import json, sys\nfrom orchestration.recipe.loading.load import parse_recipe\nfrom "
        "orchestration.recipe.sizes.planner import plan\nassert "
        "plan(parse_recipe(json.loads(sys.argv[1]))).parameters == 8\nassert not {'torch', "
        "'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script, json.dumps(data)], check=True, timeout=120)


# --------------------------------------------------------------------------------------------------
# Devices and room


def test_devices_are_looked_for_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(device_names, "_cpu_build", lambda: "")

    def fault(name: str) -> str:
        return "; ".join(device_names.device_fault(name, tmp_path) or ())

    assert fault("auto") == fault("cpu") == fault("privateuseone") == ""
    assert "did you mean 'cuda'?" in fault("cudda")
    assert "did you mean 'cuda'?" in fault("gpu:0")
    assert "there is no /dev/nvidia" in fault("cuda")
    assert "there is no /dev/davinci" in fault("npu:1")
    (tmp_path / "nvidia0").touch()
    assert fault("cuda") == fault("cuda:0") == ""
    assert "there are 1, counted from 0" in fault("cuda:1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "is hidden by CUDA_VISIBLE_DEVICES" in fault("cuda")
    monkeypatch.setattr(device_names, "_cpu_build", lambda: "torch 2.13.0+cpu")
    assert "a build for CPUs" in fault("cuda")


def test_only_devices_that_this_machine_will_use_must_be_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        machine, "device_fault", lambda name: None if name == "auto" else ("is not here", "")
    )
    assert set(messages(of(rollout={"device": "npu"}, train={"device": "npu"}))) == {
        "rollout.device",
        "train.device",
    }
    assert messages(of(rollout={"device": "npu"}, train={"device": "npu"}), devices=False) == {}
    assert messages(of(MOCK, rollout={"device": "npu"}, train={"device": "npu"})) == {}
    external = of(
        rollout={"device": "npu"}, external={"stages": ["rollout"]}, evaluate={"every": 0}
    )
    assert messages(external) == {}


def test_what_a_run_writes_must_have_room_on_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {"keep_samples": "1GiB"}
    assert messages(of(pipeline=kept), folder=tmp_path / "not" / "there" / "yet") == {}
    assert (
        "100 TiB, and"
        in messages(of(pipeline={"keep_samples": "100TiB"}), folder=tmp_path)[
            "pipeline.keep_samples"
        ]
    )
    monkeypatch.setattr(machine, "free_bytes", lambda folder: 500 * 2**20)
    found = messages(of(pipeline=kept), folder=tmp_path)
    assert "500 MiB are free" in found["pipeline.keep_samples"]
    assert "use at most '24" in found["pipeline.keep_samples"]
    monkeypatch.setattr(machine, "free_bytes", lambda folder: 20 * 2**20)
    assert messages(of(), folder=tmp_path) == {}, (
        "what is kept by default is kept as far as there is room"
    )
    found = messages(of(train={"steps": 10**6}), folder=tmp_path)
    assert "metrics and logs in 694.4 days of a minute a step" in found["train.steps"]
    monkeypatch.setattr(machine, "free_bytes", lambda folder: machine.STEP_BYTES * 10**5 + 2**20)
    found = messages(of(train={"steps": 10**5}), folder=tmp_path)
    assert "metrics and logs" in found["train.steps"], "the steps have room, and the days do not"
    monkeypatch.setattr(machine, "free_bytes", lambda folder: 20 * 2**20)
    found = messages(of(checkpoint={"keep": 50}), folder=tmp_path)
    assert "20 MiB are free" in found["checkpoint.keep"]
    fits = int(found["checkpoint.keep"].partition("use a value <= ")[2].partition(",")[0])
    assert messages(of(checkpoint={"keep": fits}), folder=tmp_path) == {}, "the fix mends it"
    assert set(messages(of(checkpoint={"keep": fits + 1}), folder=tmp_path)) == {"checkpoint.keep"}


def test_an_arena_must_have_room_in_shared_memory() -> None:
    found = messages(of(pipeline={"arena": "900TiB"}))
    assert "of shared memory are free" in found["pipeline.arena"]


# --------------------------------------------------------------------------------------------------
# In a service


def test_a_request_has_no_file_read_that_the_operator_does_not_allow(tmp_path: Path) -> None:
    for name in ("inside", "outside"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.jsonl").write_text("the secret of the house\n")
    (tmp_path / "inside" / "link.jsonl").symlink_to(tmp_path / "outside" / "rows.jsonl")
    model_folder(tmp_path / "outside" / "model")
    (tmp_path / "outside" / "model" / "config.json").write_text("the secret of the house")
    code = frozenset({"tests.orchestration.scores:early_letters"})
    settings = Settings(data=tmp_path, roots=(tmp_path / "inside",), allow_rewards=code)

    def refused(data: dict[str, Any]) -> list[str]:
        with pytest.raises(RecipeError) as raised:
            accept(settings, data, {})
        assert "secret" not in str(raised.value)
        return [problem.wrong for problem in raised.value.problems]

    assert refused(of_rows("rows.jsonl"))[0].startswith("line 1 is not JSON")
    for path in (tmp_path / "outside" / "rows.jsonl", "../outside/rows.jsonl", "link.jsonl"):
        assert refused(of_rows(path)) == ["lies outside of what this server reads"]
    outside = of(model={"source": str(tmp_path / "outside" / "model")})
    assert refused(outside) == ["lies outside of what this server reads"]


class HeldReading(Reading):
    """It waits at its first row until it is stopped."""

    def __init__(self) -> None:
        super().__init__(rows=10**9, nbytes=10**12, seconds=600)
        self.begun = threading.Event()

    def spend(self, *, rows: int = 0, nbytes: int = 0) -> bool:
        self.begun.set()
        assert self.stop.wait(60)
        return super().spend(rows=rows, nbytes=nbytes)


def test_a_check_of_a_request_can_be_ended_from_another_thread(tmp_path: Path) -> None:
    rows = 1000
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n' * rows)
    code = frozenset({"tests.orchestration.scores:early_letters"})
    settings = Settings(data=tmp_path, roots=(tmp_path,), allow_rewards=code)
    reading = HeldReading()
    checking = threading.Thread(
        target=accept, args=(settings, of_rows("rows.jsonl"), {}, reading), daemon=True
    )
    checking.start()
    assert reading.begun.wait(60)
    reading.stop.set()
    checking.join(60)
    assert not checking.is_alive()
    assert reading.rows > 10**9 - rows, "it has read on to the end"


def test_a_check_by_default_reads_a_bounded_part(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n' * Reading().rows + "broken\n")
    assert messages(of_rows(path)) == {}
    with path.open("wb") as file:  # a terabyte, of which nothing lies on the disk
        file.truncate(2**40)
    began = time.monotonic()
    assert messages(of_rows(path)) == {}
    assert time.monotonic() - began < 30


# --------------------------------------------------------------------------------------------------
# Code that a recipe names


CODE = {
    "raises": "raise RuntimeError('not today')",
    "exits": "import sys\nsys.exit(3)",
    "broken": "def f(:\n",
    "recursive": "def f():\n    f()\nf()\n",
}


@pytest.mark.parametrize("kind", CODE)
def test_code_that_cannot_be_imported_is_a_problem_with_its_line(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"mine_{kind}.py").write_text(CODE[kind])
    monkeypatch.syspath_prepend(tmp_path)
    name = f"mine_{kind}:f"
    data = of(
        reward={"functions": [{"name": name}]}, algorithm={"name": name}, rollout={"engine": name}
    )
    data |= {"external": {"stages": ["reference"]}}
    found = messages(data)
    assert {"reward.functions.0.name", "algorithm.name", "rollout.engine"} <= set(found)
    assert f"mine_{kind}.py, line " in found["reward.functions.0.name"]
    assert f"mine_{kind}.py, line " in found["algorithm.name"]


@pytest.mark.parametrize(
    "name", [":", ":f", "..x:f", "json:", "json:loads.x", "a b:c", "\u202e:f", "é" * 300 + ":f"]
)
def test_odd_names_are_problems(name: str) -> None:
    data = of(
        reward={"functions": [{"name": name}]}, algorithm={"name": name}, rollout={"engine": name}
    )
    assert {"reward.functions.0.name", "algorithm.name", "rollout.engine"} <= set(messages(data))


def test_the_recipe_of_a_folder_that_was_checked_can_be_loaded(tmp_path: Path) -> None:
    """The command reads what lies beside the recipe as the run will."""
    (tmp_path / "own.toml").write_text(
        '[model]\nsource = "tiny"\n[prompts]\nsource = "jsonl"\npath = "%s"\n[reward]\nfunctions = '
        '[{ name = "spelling" }]\n'
        "[train]\nsteps = 1\n" % (tmp_path / "rows.jsonl")
    )
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    assert load_recipe(tmp_path / "own.toml", folder=tmp_path / "runs").name == "own"
    assert model_files.has_chat_template(tmp_path) is False


@pytest.mark.parametrize("address", ["192.0.2.1", "127.0.0.1:x", "no such name"])
def test_an_address_that_cannot_be_listened_on_is_refused_where_the_run_will_be(
    address: str,
) -> None:
    recipe = of(MOCK, pipeline={"serve": address})
    with pytest.raises(
        RecipeError,
        match=r"pipeline\.serve = .*: cannot be listened on .* without "
        r"a free port",
    ):
        parse_recipe(recipe)
    assert parse_recipe(recipe, devices=False).pipeline.serve == address
    assert parse_recipe(of(MOCK, pipeline={"serve": "127.0.0.1"})).pipeline.serve == "127.0.0.1"


def test_ranks_that_cut_fused_matrices_are_refused_where_devices_are_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from benchmarks.engines.families import write

    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for family, refused in (("Phi-3", True), ("OLMo 2", False)):
        data = of(
            model={"source": str(write(family, tmp_path / family, torch.float32))}, train={"tp": 2}
        )
        data["launch"] = {"launcher": "process"}
        assert "train.tp" not in messages(data), family
        data["launch"]["placement"] = "colocated"
        assert (
            "qkv_proj.weight is several matrices in one" in messages(data).get("train.tp", "")
        ) == refused, family


def three_of_a_function() -> list[dict[str, str]]:
    return [{"prompt": "a", "question": "b"}] * 3


def test_columns_of_rows_that_cannot_be_read_are_not_missed(tmp_path: Path) -> None:
    """A mixture was refused for a column that only the rows of a function have."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "about": "b"}\n')
    lines = {"source": "jsonl", "path": str(tmp_path / "rows.jsonl")}
    function = {"source": "datasets", "path": f"{__name__}:three_of_a_function"}
    reward = {"functions": [{"name": f"{__name__}:needs_the_question"}]}
    mixed: dict[str, Any] = {
        **of(reward=reward, evaluate={"every": 0}),
        "prompts": {"sources": [lines, function]},
    }
    assert messages(mixed) == {}
    assert list(messages({**mixed, "prompts": {"sources": [lines, lines]}})) == [
        "reward.functions.0.name"
    ]


def test_check_says_which_files_and_rows_are_taken_and_what_becomes_of_their_values(
    tmp_path: Path,
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.Table.from_pylist(
        [{"prompt": "a", "answer": "a", "when": date(2026, 1, 2)}] * 3
    )
    for name in ("train-00000-of-00001", "test-00000-of-00001"):
        parquet.write_table(table, tmp_path / f"{name}.parquet")
    prompts = {"source": "parquet", "path": str(tmp_path)}
    data = {**of(evaluate={"every": 0}), "prompts": prompts}
    assert prompt_sources(parse_recipe(data)) == [
        "prompts: split 'train': 3 rows of train-00000-of-00001.parquet; left out: split 'test' (1 "
        "file)",
        "prompts: column 'when': a value of type date becomes an ISO 8601 text",
    ]
    assert messages({**data, "prompts": {**prompts, "split": "dev"}}) == {
        "prompts.split": f"is not in {tmp_path}; use one of ['test', 'train']"
    }


@pytest.mark.parametrize(
    ("name", "share", "is_refused"),
    [
        *[("maze", share, share < 0.2) for share in (0.05, 0.1, 0.3, 0.5)],
        *[("modular-sum", 0.001, True), ("modular-sum", 0.3, False), ("tiny", 0.1, False)],
    ],
)
def test_a_share_without_a_prompt_is_refused_before_the_run_that_would_end_of_it(
    name: str, share: float, is_refused: bool
) -> None:
    """What the run asks of the same sources says whether that is right."""
    path = ROOT / "recipes" / f"{name}.toml"
    overrides = [f"prompts.held_out={share}", "evaluate.every=20"]
    found = []
    try:
        load_recipe(path, overrides)
    except RecipeError as error:
        found = error.problems
    assert [problem.key for problem in found] == ["prompts.held_out"] * is_refused
    sound = load_recipe(path, [*overrides, "evaluate.every=0"])
    opens = Opens() if sound.has_environment else None
    held_out = load_prompts(sound.prompts, tiny_tokenizer(), sound.seed, opens=opens).held_out
    assert held_out is not None
    if is_refused:
        with pytest.raises(PromptError, match="made no held-out prompt") as refused:
            held_out.prompt(0)
        assert found[0].wrong in str(refused.value)
    else:
        held_out.prompt(0)


class Opens:
    """Writes the conversation of a trajectory as its messages' texts."""

    def prompt(self, messages: Any, row: Any, where: str) -> str:
        return "".join(message["content"] for message in messages)


def test_what_is_never_evaluated_may_hold_nothing_out() -> None:
    sets = ["prompts.held_out=0.1", "evaluate.every=0"]
    assert load_recipe(ROOT / "recipes" / "maze.toml", sets).prompts.held_out == 0.1


def test_a_column_that_is_left_out_does_not_decide_what_is_held_out() -> None:
    options = PromptOptions(source="jsonl", path="rows.jsonl", leave_out=["note"])
    rows: list[dict[str, Any]] = [{"prompt": "1 + 1", "note": note} for note in ("a", object())]
    for by_row, identity in ((False, "1 + 1"), (True, {"prompt": "1 + 1"})):
        for row in rows:
            assert identity_of(options, row, "row 1", by_row=by_row) == identity


def test_a_task_that_draws_slowly_is_not_drawn_to_the_end() -> None:
    maze = load_recipe(ROOT / "recipes" / "maze.toml", ["prompts.held_out=0.1", "evaluate.every=0"])
    [part] = maze.prompts.parts().values()
    assert holds_nothing_out(part, maze.seed, by_row=True) is not None
    assert holds_nothing_out(part, maze.seed, by_row=True, seconds=0.0) is None
