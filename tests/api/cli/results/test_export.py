"""A run's model as a folder for others: what is in it, that it opens, and that it can be made again
by what its card says."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from api.cli import main as cli
from orchestration.checkpoints.checkpoint import open_checkpoint
from orchestration.checkpoints.store import CheckpointStore
from orchestration.history.events_file import METRICS, read_metrics
from orchestration.recipe.loading.load import load_recipe, recorded_recipe
from orchestration.run.folder import RunFolder
from orchestration.state.paths import FIRST_ID, RECIPE
from stages.model.load import is_ready, load_model, load_tokenizer
from tests import hub
from tests.api.faulty import Service, run_view, served
from tests.forked import asyncdock
from tests.orchestration.run.test_run import weights_of
from tests.sources import ROOT

TEMPLATE = "{% for message in messages %}{{ message.content }}:{% endfor %}"
REWARD = """
def letters(completions, answer):
    return [text.count(letter) / 4 for text, letter in zip(completions, answer)]
"""
FULL = """
description = "Tiny learns a letter"
model.source = "tiny"
launch.launcher = "inline"
rollout = { max_rows = 32, max_tokens = 4, threads = 1 }
reward.functions = [{ name = "my_reward:letters" }]
pipeline.arena = "16MiB"
checkpoint = { every = 2, keep = 4 }
evaluate = { every = 2, prompts = 4 }

[prompts]
source = "jsonl"
path = "letters.jsonl"
held_out = 0.3
chat_template = "letters.jinja"

[algorithm]
name = "ppo"
group_size = 4
options = { critic = "own" }

[train]
steps = 4
groups_per_step = 4
threads = 1
learning_rate = 3e-3
"""
LORA = """
model = { source = "tiny", lora = { rank = 4 } }
launch.launcher = "inline"
prompts = { source = "builtin", task = "repeat", max_prompt_tokens = 64, held_out = 0.2 }
rollout = { max_rows = 32, max_tokens = 4, threads = 1 }
reward.functions = [{ name = "spelling" }]
algorithm.group_size = 4
train = { steps = 2, groups_per_step = 2, learning_rate = 1e-2, threads = 1 }
pipeline = { staleness = 0, arena = "16MiB" }
"""
GIVEN = """
model = { source = "smollm2", lora = { rank = 4 } }
launch.launcher = "inline"
prompts = { source = "jsonl", path = "letters.jsonl", responses = ["answer"] }
algorithm = { name = "sft", group_size = 1 }
train = { steps = 1, groups_per_step = 2, learning_rate = 1e-2, threads = 2 }
pipeline.arena = "16MiB"
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def trained(folder: Path, text: str) -> Path:
    """The folder of a run of the recipe ``text``, begun in ``folder``."""
    (folder / "letters.toml").write_text(text)
    (folder / "letters.jinja").write_text(TEMPLATE)
    (folder / "my_reward.py").write_text(REWARD)
    rows = [{"prompt": f"write {letter}", "answer": letter} for letter in "abcdefghijkl"]
    (folder / "letters.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = [*asyncdock(), "run", "letters.toml", "--out", "run", "--plain"]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder / "run"


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("full"), FULL)


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("lora"), LORA)


@pytest.fixture(scope="module")
def exported(full: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "letters"
    export(full, folder)
    return folder


def export(run: Path | str, to: Path, *options: str) -> str:
    """What the command says, which succeeds."""
    result = CliRunner().invoke(cli.app, ["export", str(run), "--to", str(to), *options])
    assert result.exit_code == 0, result.output
    return result.output


def refusal(run: Path | str, to: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["export", str(run), "--to", str(to), *options])
    return result.exit_code, " ".join(result.output.split())


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    out: torch.Tensor = model.eval()(torch.arange(3, 40)[None]).logits
    return out


@pytest.mark.parametrize("step", [2, 4])
def test_transformers_opens_it_and_gives_the_policys_logits_bit_for_bit(
    step: int, full: Path, tmp_path: Path
) -> None:
    export(f"{full}@{step}", tmp_path / "letters")
    checkpoint = open_checkpoint(full / "checkpoints" / f"step-{step:08d}")
    policy, _ = load_model("tiny", dtype=torch.float32, seed=0)
    policy.load_state_dict(weights_of(recorded_recipe(full / RECIPE), checkpoint), strict=False)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "letters")
    assert torch.equal(logits(opened), logits(policy))
    steps = [
        e.data["version"] for e in read_metrics(tmp_path / "letters" / METRICS) if e.kind == "step"
    ]
    assert steps == [*range(1, step + 1)]


def test_it_has_what_a_user_of_the_model_needs_and_nothing_of_the_machine(
    full: Path, exported: Path
) -> None:
    names = {path.name for path in exported.iterdir()}
    assert names == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"),
        *("tokenizer_config.json", "chat_template.jinja", "recipe.toml", "reward.png"),
        *("metrics.jsonl", "README.md"),
    }
    umask = os.umask(0)
    os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in exported.iterdir()} == {0o666 & ~umask}
    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "b"}], tokenize=False) == "b:"
    events = list(read_metrics(exported / METRICS))
    assert {event.kind for event in events} <= {"state", "step", "evaluation", "alarm", "ledger"}
    assert [e.data["samples"] for e in events if e.kind == "evaluation"] == [[], [], []]


def test_its_recipe_is_the_runs(
    full: Path, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(full.parent)
    before = json.loads(recorded_recipe(full / RECIPE).to_json())
    after = json.loads(load_recipe(exported / "recipe.toml", files=False).to_json())
    assert Path(after["prompts"].pop("chat_template")) == exported / "chat_template.jinja"
    del before["prompts"]["chat_template"]
    assert after == before


def test_settings_that_a_resume_changed_are_in_its_card_and_each_step_has_its_own(
    full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice: a return to the same checkpoint keeps what was before."""
    monkeypatch.syspath_prepend(full.parent)
    run = tmp_path / "run"
    shutil.copytree(full, run)
    for changed in (["train.steps=6", "train.learning_rate=1e-4"], ["train.learning_rate=2e-4"]):
        RunFolder.resume(run, changed, 2).close()
    newest = Path("checkpoints", "step-00000004")
    shutil.copytree(full / newest, run / newest)  # as if it had gone on

    said = export(run, tmp_path / "after")
    assert "settings were changed on the way (train.learning_rate, train.steps)" in said
    card = (tmp_path / "after" / "README.md").read_text()
    assert "| `train.learning_rate` | 0.0002 |" in card
    assert "- after step 2: `train.learning_rate` from 0.003 to 0.0001" in card
    assert "- after step 2: `train.steps` from 4 to 6" in card
    assert "which is another run" in card
    said = export(f"{run}@2", tmp_path / "before")
    assert "settings were changed" not in said
    card = (tmp_path / "before" / "README.md").read_text()
    assert "| `train.learning_rate` | 0.003 |" in card
    assert "to train again:" in card
    recipe = load_recipe(tmp_path / "before" / "recipe.toml", files=False)
    assert (recipe.train.learning_rate, recipe.train.steps) == (0.003, 4)


def test_addresses_and_passwords_are_not_in_it(full: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(full, run)
    tables = json.loads((run / RECIPE).read_text())
    tables["pipeline"]["index"] = "redis://:hunter2@10.0.0.7:6379"
    tables["pipeline"]["serve"] = "10.0.0.7:4000"
    tables["pipeline"]["tls_key"] = "/etc/secret.pem"
    (run / RECIPE).write_text(json.dumps(tables))
    said = export(run, tmp_path / "letters")
    for path in (tmp_path / "letters").glob("*.[tm][od]*"):
        assert not {"hunter2", "10.0.0.7", "secret.pem"} & {*path.read_text().split()}
        assert "hunter2" not in path.read_text()
    assert "secret.pem" not in said


def test_its_card_says_what_was_trained_on_what_and_how_well(full: Path, exported: Path) -> None:
    card = ModelCard.load(exported / "README.md")
    assert card.data.library_name == "transformers"
    assert {"asyncdock", "ppo"} <= {*card.data.tags}
    evaluations = [e.data for e in read_metrics(full / METRICS) if e.kind == "evaluation"]
    assert card.data.eval_results is not None
    assert [r.metric_value for r in card.data.eval_results] == [evaluations[-1]["reward_mean"]]
    rows = [line for line in card.text.splitlines() if line.startswith(("| 0 (", "| 4 ("))]
    for row, evaluation in zip(rows, [evaluations[0], evaluations[-1]], strict=True):
        assert f"| {evaluation['count']} | {evaluation['reward_mean']} |" in row
    assert (
        "Proximal Policy Optimization Algorithms](https://huggingface.co/papers/1707.06347)"
        in card.text
    )
    assert "@misc{schulman2017proximal," in card.text
    assert "`train.learning_rate` | 0.003 |" in card.text
    assert f"- torch: {torch.__version__}" in card.text
    assert "`letters.jsonl` (jsonl)" in card.text


def test_the_command_says_what_the_folder_lacks(full: Path, tmp_path: Path) -> None:
    said = export(full, tmp_path / "letters")
    assert f'letters lacks: path = "{full.parent}/letters.jsonl"' in said
    assert 'functions = [{ name = "my_reward:letters" }]' in said
    assert "README.md has no base_model (give it by --base), as tiny does not say it" in said
    assert "my_reward:letters" in (tmp_path / "letters" / "README.md").read_text()
    assert "--base" not in export(full, tmp_path / "named", "--base", "ann/tiny")
    assert ModelCard.load(tmp_path / "named" / "README.md").data.base_model == "ann/tiny"


def test_another_number_format(full: Path, exported: Path, tmp_path: Path) -> None:
    export(full, tmp_path / "half", "--dtype", "bfloat16")
    half = load_file(tmp_path / "half" / "model.safetensors")
    whole = load_file(exported / "model.safetensors")
    assert half.keys() == whole.keys()
    assert all(torch.equal(half[name], whole[name].to(torch.bfloat16)) for name in whole)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16
    assert "--dtype bfloat16" in (tmp_path / "half" / "README.md").read_text()


def assert_adapter_is_the_policy(run: Path, to: Path, source: str) -> None:
    export(run, to, "--what", "adapter")
    assert not (to / "config.json").exists()
    version = json.loads((max((run / "checkpoints").iterdir()) / "run.json").read_text())["version"]
    checkpoint = open_checkpoint(run / "checkpoints" / f"step-{version:08d}")
    policy, _ = load_model(source, dtype=torch.float32, seed=0)
    policy = PeftModel.from_pretrained(policy, checkpoint.path / "adapter")
    base, _ = load_model(source, dtype=torch.float32, seed=0)
    opened = PeftModel.from_pretrained(base, to)
    matrices = weights_of(recorded_recipe(run / RECIPE), checkpoint)
    parameters = dict(opened.get_base_model().named_parameters())
    assert matrices
    assert all(torch.equal(parameters[name], value) for name, value in matrices.items())
    assert torch.equal(logits(opened), logits(policy))
    assert ModelCard.load(to / "README.md").data.library_name == "peft"


def test_peft_opens_an_adapter_with_the_trained_matrices(lora: Path, tmp_path: Path) -> None:
    assert_adapter_is_the_policy(lora, tmp_path / "adapter", "tiny")
    assert "names the base by its path" in export(lora, tmp_path / "path", "--what", "adapter")
    export(
        lora, tmp_path / "half", "--what", "adapter", "--dtype", "bfloat16", "--base", "ann/tiny"
    )
    half = load_file(tmp_path / "half" / "adapter_model.safetensors")
    assert {value.dtype for value in half.values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "half" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "ann/tiny"
    merged = load_file(max((lora / "checkpoints").iterdir()) / "model" / "model.safetensors")
    export(lora, tmp_path / "merged")
    opened = load_file(tmp_path / "merged" / "model.safetensors")
    assert all(torch.equal(opened[name], merged[name]) for name in merged)


@pytest.mark.timeout(400)
@pytest.mark.skipif(not is_ready("smollm2"), reason="smollm2 is not converted yet")
def test_smollm2(tmp_path: Path) -> None:
    run = trained(tmp_path, GIVEN)
    assert_adapter_is_the_policy(run, tmp_path / "adapter", "smollm2")
    export(run, tmp_path / "merged")
    policy, _ = load_model(
        str(run / "checkpoints" / "step-00000001" / "model"), dtype=torch.float32, seed=0
    )
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(logits(opened), logits(policy))
    card = ModelCard.load(tmp_path / "merged" / "README.md")
    assert card.data.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "apply_chat_template" in card.text
    assert "@misc{hu2021lora," in card.text
    assert load_tokenizer(str(tmp_path / "merged")).chat_template


def test_the_commands_of_the_card_make_the_same_model_again(lora: Path, tmp_path: Path) -> None:
    """At η = 0, bit for bit; and a run begins from an exported model."""
    folder = tmp_path / "repeat"
    export(lora, folder)
    card = (folder / "README.md").read_text()
    commands = card.partition("```bash\n")[2].partition("```")[0].splitlines()
    assert len(commands) == 2
    again = f"asyncdock run recipe.toml --set model.source={folder} --set model.lora.rank=0 --set train.steps=1"
    for command in [*commands, f"{again} --out further"]:
        words = [*asyncdock(), *shlex.split(command)[1:]]
        done = subprocess.run(words, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    first = load_file(folder / "model.safetensors")
    second = load_file(folder / "repeat" / "model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_cannot_be_exported_is_refused_with_what_to_do(
    full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))
    used = tmp_path / "used"
    used.mkdir()
    (used / "file").touch()
    new = tmp_path / "new"
    empty = tmp_path / "run"
    empty.mkdir()
    shutil.copy(full / RECIPE, empty)
    for arguments, text in [
        ((full, used), f"--to: {used} is there already; give a new folder, or an empty one"),
        ((f"{full}@3", new), "has no checkpoint of it; it has: 2, 4"),
        ((tmp_path, new), f"{tmp_path} has no recipe.json; did you mean {empty}?"),
        ((empty, new), "has no checkpoint yet; wait for one (checkpoint.every)"),
        ((full, new, "--what", "adapter"), "the run has trained all weights (model.lora.rank = 0)"),
        ((full, new, "--private"), "--private: is about --push; give both, or neither"),
        ((full, new, "--push", "a/b/c"), "write NAMESPACE/NAME"),
    ]:
        code, said = refusal(*arguments)  # type: ignore[arg-type]
        assert (code, new.exists()) == (2, False), said
        assert text in said
    used.joinpath("file").unlink()
    export(full, used)


def test_a_damaged_checkpoint_is_not_exported(full: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(full, run)
    weights = run / "checkpoints" / "step-00000004" / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    code, said = refusal(run, tmp_path / "letters")
    assert code == 1
    assert f"{weights} is damaged" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    export(f"{run}@2", tmp_path / "letters")


def test_a_checkpoint_that_only_its_url_has(full: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(full, run)
    tables = json.loads((run / RECIPE).read_text())
    tables["checkpoint"]["url"] = str(tmp_path / "store")
    (run / RECIPE).write_text(json.dumps(tables))
    (run / FIRST_ID).write_text("letters-1")
    (tmp_path / "store" / "letters-1").mkdir(parents=True)
    newest = run / "checkpoints" / "step-00000004"
    CheckpointStore(str(tmp_path / "store" / "letters-1")).push(newest, keep=2)
    shutil.rmtree(newest)
    assert "step 4" in export(run, tmp_path / "letters")
    policy = load_file(full / "checkpoints" / "step-00000004" / "model" / "model.safetensors")
    opened = load_file(tmp_path / "letters" / "model.safetensors")
    assert all(torch.equal(opened[name], policy[name]) for name in policy)


def test_a_run_of_a_service_is_exported_where_its_folder_is(full: Path, tmp_path: Path) -> None:
    with served(Service([])) as service:
        service.runs += [
            run_view("letters-1", folder=str(full)),
            run_view("letters-2", folder="/data/of/another"),
        ]
        said = export("letters-1@2", tmp_path / "letters", "--server", service.url)
        assert "has the model of step 2" in said
        code, said = refusal("letters-2", tmp_path / "other", "--server", service.url)
    assert code == 1
    assert "the files of letters-2 are in /data/of/another on another machine" in said
    assert "give the command that folder there, or copy it here" in said


@pytest.mark.timeout(400)
def test_a_model_is_published_in_one_command(full: Path, tmp_path: Path) -> None:
    """In a process of its own: HF_ENDPOINT is read when the library is imported."""
    options = ["--to", str(tmp_path / "letters"), "--push", "letters", "--private"]
    with hub.serving() as server:
        settings = {"HF_ENDPOINT": server.url, "HF_TOKEN": hub.TOKEN, "HF_HUB_DISABLE_XET": "1"}
        done = subprocess.run(
            [sys.executable, "-P", "-m", "api.cli.main", "export", str(full), *options],
            env={**ENVIRONMENT, **settings},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    repository = server.repositories["ann/letters"]
    assert repository.private
    assert repository.files == {
        path.name: path.read_bytes() for path in (tmp_path / "letters").iterdir()
    }
    assert done.stdout.splitlines()[-1].startswith(f"{server.url}/ann/letters/commit/")
