"""Folders of runs and of models that somebody else has written: no command executes what lies in
them."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from api.cli import main as cli
from api.client import NotShown, open_run
from api.policy.handler import respond
from api.schemas.completions import ChatRequest, CompletionRequest
from api.server.http.problems import HTTPProblem
from orchestration.checkpoints import checkpoint
from orchestration.policy.served import Policies
from orchestration.processes.forkserver import ForkServer
from orchestration.run.execution import Execution
from orchestration.run.folder import RunFolder
from orchestration.state.paths import RECIPE
from stages.model import manifest
from tests.forked import fork_server
from tests.orchestration.runs import TINY, complete, recipe

runner = CliRunner()
MARKER = "marker"


class Marks:
    """A pickle of it makes the folder ``marker`` in the working directory when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (MARKER,)


CODE = f"import os\nos.makedirs({MARKER!r}, exist_ok=True)\n"
ESCAPE = (
    "{{ cycler.__init__.__globals__.os.mkdir('marker') }}{{ "
    "''.__class__.__mro__[1].__subclasses__() }}{{ lipsum.__globals__['os'].mkdir('marker') }}{{ "
    "messages }}"
)


def pickled() -> bytes:
    content = io.BytesIO()
    torch.save({"lm_head.weight": Marks()}, content)
    return content.getvalue()


def changed_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def in_metadata(step: Path) -> None:
    (step / "train" / ".metadata").write_bytes(pickle.dumps(Marks()))


def in_a_shard(step: Path) -> None:
    for shard in (step / "train").glob("*.distcp"):
        shard.write_bytes(pickle.dumps(Marks()) + bytes(shard.stat().st_size))


def as_weights(step: Path) -> None:
    (step / "model" / "model.safetensors").unlink()
    (step / "model" / "pytorch_model.bin").write_bytes(pickled())


def beside_the_weights(step: Path) -> None:
    for name in (
        "training_args.bin",
        "optimizer.pt",
        "scheduler.pt",
        "pytorch_model.bin",
        "adapter_model.bin",
    ):
        (step / "model" / name).write_bytes(pickled())
        (step / "train" / name).write_bytes(pickled())


def as_code(step: Path) -> None:
    model = step / "model"
    (model / "modeling_x.py").write_text(
        CODE + "from transformers import LlamaConfig as C, LlamaForCausalLM as M\n"
    )
    (model / "custom_generate").mkdir()
    (model / "custom_generate" / "generate.py").write_text(CODE)
    names = {
        "AutoConfig": "modeling_x.C",
        "AutoModelForCausalLM": "modeling_x.M",
        "AutoTokenizer": ["modeling_x.T", None],
    }
    changed_json(model / "config.json", model_type="xyz", auto_map=names)
    changed_json(model / "tokenizer_config.json", tokenizer_class="T", auto_map=names)


def as_a_template(step: Path) -> None:
    (step / "model" / "chat_template.jinja").write_text(ESCAPE)


def as_a_panic(step: Path) -> None:
    """An expression that takes longer than its library allows."""
    pattern = {"Regex": r"(a+)+(?=1)|(?:\w+\s*)+$"}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    changed_json(step / "model" / "tokenizer.json", pre_tokenizer=split)


def as_an_adapter(step: Path) -> None:
    """transformers would load the model that it names in place of this one."""
    as_weights(step)
    shutil.copytree(step / "model", step / "other")
    changed = {"base_model_name_or_path": str(step / "other"), "peft_type": "LORA"}
    (step / "model" / "adapter_config.json").write_text(json.dumps(changed))


EVIL: dict[str, Callable[[Path], None]] = {
    "a pickle as .metadata": in_metadata,
    "a pickle as a shard": in_a_shard,
    "pickled weights": as_weights,
    "pickles beside the weights": beside_the_weights,
    "code of its own": as_code,
    "a template that leaves its sandbox": as_a_template,
    "a tokenizer that panics": as_a_panic,
    "an adapter of another model": as_an_adapter,
}
# What each resume of such a run says; "": it goes on, as nothing of it is read.
RESUMED = {
    "a pickle as .metadata": "names posix.mkdir, which no checkpoint holds",
    "a pickle as a shard": "a shard in ",
    "pickled weights": "has pickled weights that name posix.mkdir",
    "code of its own": "needs code of its own",
    "an adapter of another model": "has an adapter_config.json",
}
OF_THE_STATE = ("a pickle as .metadata", "a pickle as a shard")  # no policy reads it


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ended") / "run"
    small = recipe(TINY, train__steps=2, checkpoint__every=2, pipeline__staleness=0)
    asyncio.run(complete(Execution(RunFolder.create(small, folder))))
    return folder


def evil(ended: Path, tmp_path: Path, how: str) -> tuple[Path, Path]:
    """A copy of the run with ``how``, and digests to match: who writes the files writes those."""
    run = tmp_path / "run"
    shutil.copytree(ended, run)
    (step,) = checkpoint.whole(run / "checkpoints")
    (step / manifest.MANIFEST).unlink()
    EVIL[how](step)
    manifest.write(step)
    return run, step


def asyncdock(*arguments: str) -> tuple[int, str]:
    result = runner.invoke(cli.app, list(arguments), input="y\ny\ny\n")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.mark.parametrize("how", EVIL)
def test_no_command_executes_what_lies_in_a_run(
    ended: Path, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ForkServer, "start", fork_server)
    monkeypatch.chdir(tmp_path)
    run, step = evil(ended, tmp_path, how)
    of_model = tmp_path / "recipe.json"
    of_model.write_text(json.dumps({**TINY, "model": {"source": str(step / "model")}}))
    for command in (
        ("checkpoint", "verify", str(run)),
        ("pairs", str(run), "--out", str(tmp_path / "pairs.jsonl")),
        ("track", str(run), "--into", str(tmp_path / "tracked")),
        ("dock", "status", str(run)),
        ("plan", "what-if", str(run)),
        ("plan", "reshard", str(of_model)),
        ("plan", "run", str(of_model), "--costs", str(run)),
        ("check", str(of_model)),
    ):
        code, output = asyncdock(*command)
        assert not (tmp_path / MARKER).exists(), command
        assert "[y/N]" not in output, command
        if command[0] == "check" and how in (
            "code of its own",
            "a tokenizer that panics",
            "an adapter of another model",
        ):
            assert code == 2
            assert "model.source = " in output
    code, output = asyncdock("resume", str(run), "--set", "train.steps=3", "--plain")
    assert not (tmp_path / MARKER).exists()
    assert (code != 0) == (how in RESUMED), output
    assert RESUMED.get(how, "") in " ".join(output.split()), output


async def answered(model: Path, *, chat: bool) -> str:
    """What the policy of ``model`` says, or the problem that it has."""
    policies = Policies("unix:///nothing/here", checkpoints={"m": str(model)})
    asked: Any = {"model": "m", "max_tokens": 2}
    try:
        if chat:
            request: Any = ChatRequest(messages=[{"role": "user", "content": "aaa 1"}], **asked)
        else:
            request = CompletionRequest(prompt="a" * 40 + "!", **asked)
        return b"".join([part async for part in respond(policies, request)]).decode()
    except HTTPProblem as problem:
        return f"{problem.status} {problem.details.detail}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        await policies.close()


@pytest.mark.parametrize("how", [how for how in EVIL if how not in OF_THE_STATE])
async def test_no_policy_executes_what_lies_in_its_model(
    ended: Path, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    _, step = evil(ended, tmp_path, how)
    for chat in (False, True):
        answer = await answered(step / "model", chat=chat)
        assert not (tmp_path / MARKER).exists(), answer
        match how:
            case "code of its own":
                assert "needs code of its own" in answer
            case "a tokenizer that panics" if not chat:
                assert answer.startswith("400 "), answer
                assert "tokenizer.json has a tokenizer that fails on a text" in answer
            case "an adapter of another model":
                assert "has an adapter_config.json" in answer


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's folder needs root to be made")
def test_the_run_of_another_user_is_resumed_only_if_it_is_trusted(
    ended: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its recipe may name a reward of a module in the folder that it says it was begun in."""
    monkeypatch.setattr(ForkServer, "start", fork_server)
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    _ = shutil.copytree(ended, tmp_path / "run")
    judge = "def score(completions, **_):\n    return [float(len(text)) for text in completions]\n"
    (run / "judge_of_another.py").write_text(CODE + judge)
    data = json.loads((run / "recipe.json").read_text())
    data["reward"]["functions"][0]["name"] = "judge_of_another:score"
    (run / "recipe.json").write_text(json.dumps(data))
    (run / "begun-in").write_text(str(run))
    os.chown(run / "recipe.json", 65534, 65534)
    code, output = asyncdock("resume", str(run), "--set", "train.steps=3", "--plain")
    assert (code, (run / MARKER).exists()) == (2, False)
    assert "recipe.json belongs to user 65534" in output
    assert "--trust" in output
    code, output = asyncdock("resume", str(run), "--trust", "--set", "train.steps=3", "--plain")
    assert (code, (run / MARKER).exists()) == (0, True), output


@pytest.mark.parametrize(
    "name", ["recipe.json", "metrics.jsonl", "checkpoints/step-00000002/run.json"]
)
def test_a_pipe_in_a_run_is_named(ended: Path, tmp_path: Path, name: str) -> None:
    run = shutil.copytree(ended, tmp_path / "run")
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    for command in (
        ("resume", str(run)),
        ("checkpoint", "verify", str(run)),
        ("pairs", str(run), "--out", str(tmp_path / "x.jsonl")),
        ("track", str(run)),
        ("dock", "status", str(run)),
        ("plan", "what-if", str(run)),
    ):
        code, output = asyncdock(*command)
        assert code == 2, command
        assert f"{run / name} is a pipe, which no run has" in output, command


@pytest.fixture
def anothers() -> Iterator[Path]:
    """The folder of a run whose recipe is there, and cannot be read with :func:`as_nobody`."""
    folder = Path(tempfile.mkdtemp(prefix="others-"))  # others may not enter those of pytest
    folder.chmod(0o755)
    run = folder / "run"
    run.mkdir(mode=0o755)
    (run / RECIPE).write_text(recipe(TINY).to_json())
    (run / RECIPE).chmod(0o600 if os.geteuid() == 0 else 0)
    yield run
    run.chmod(0o700)
    shutil.rmtree(folder)


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """As a user who may read no file of mode 600. One who is not root has files without a mode."""
    if os.geteuid() != 0:
        yield
        return
    os.setegid(65534), os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0), os.setegid(0)


ABOUT_A_RUN = ("samples", "why", "compare", "runs show", "runs stop", "runs fork", "resume")


@pytest.mark.parametrize("mode", [0o755, 0o700])
@pytest.mark.parametrize("command", [*ABOUT_A_RUN, "track", "export --to x", "dock status"])
def test_a_run_whose_recipe_another_user_alone_can_read_is_said_to_be_that_user_s(
    command: str, mode: int, anothers: Path
) -> None:
    """It was "no recipe in JSON; put back the one that the run has written", or no run that is
    alive."""
    words = command.split()
    anothers.chmod(mode)
    runner.invoke(cli.app, [*words, str(anothers.parent / "none")])  # imports what it needs
    with as_nobody():
        result = runner.invoke(cli.app, [*words, str(anothers)])
    assert result.exit_code == 2, result.output
    if "not readable" not in result.output:  # what typer says of the folder itself
        owner = anothers.owner()
        assert f"{anothers / RECIPE} can be read by user {owner} alone" in result.output
        assert "give the command as that user" in result.output


def test_a_run_that_may_not_be_read_is_no_damaged_one(anothers: Path) -> None:
    with as_nobody(), pytest.raises(NotShown, match=r"cannot be read: .*Permission denied"):
        open_run(anothers).view  # noqa: B018
