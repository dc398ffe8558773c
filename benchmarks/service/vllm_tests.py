"""vLLM's own HTTP tests of its OpenAI server, against ``asyncdock serve --checkpoint``.

    DIR (vLLM's source package, unpacked) ─▶ copies: the model's name is ours ─▶ pytest ─▶ a table
                                                          asyncdock serve ◀── HTTP ──┘

Where a test imports of vLLM, it gets a stub: what builds vLLM's classes is skipped. Nothing of
vLLM's is kept. The package is in what pip leaves of a download that ends where it would build:

    TMPDIR=/tmp/vllm python -m pip download --no-clean --no-build-isolation --no-binary :all: --no-deps vllm==0.32.0
    python -m benchmarks.service.vllm_tests /tmp/vllm/pip-download-*/vllm_* --json report.json
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, ClassVar
from unittest.mock import MagicMock

import openai
import pytest
from transformers import AutoTokenizer

from benchmarks import harness
from benchmarks.robustness.api_fuzz import Served
from stages.model.load import model_folder

MODEL = "model"
BASE = "base"  # the same weights; responses do not end by themselves
OWN_CLASSES = "builds vLLM's own classes"
FOLDER = Path("tests/entrypoints/openai")
FILES = (
    "completion/test_completion.py",
    "chat_completion/test_chat.py",
    "completion/test_token_in_token_out.py",
    "chat_completion/test_logprob_token_ids.py",
    "test_return_tokens_as_ids.py",
    "test_return_token_ids.py",
)
WORDS = "asks for one model's words"
FLAG = "needs a flag of vLLM's server"
# by the beginning of a test's name
SKIPPED = {
    "test_single_completion": "counts the prompt's tokens of one model (facebook/opt-125m)",
    "test_single_chat_session": "counts the prompt's tokens of one model (zephyr-7b)",
    "test_complex_message_content": WORDS,
    "test_more_than_one_prompt_logprobs_chat": WORDS,
    "test_comparison_with_prompt_logprobs": WORDS,
    "test_batch_completions": "asks for beam search, which is refused by name",
    "test_invocations": "asks at /invocations, SageMaker's path",
    "test_structured_outputs_json": WORDS,
    "test_response_format_json": WORDS,
    "test_chat_completion_with_tool_use": WORDS,
    "test_chat_completion_request_n_parameter": OWN_CLASSES,
    "test_completion_return_tokens_as_token_ids_completion[True]": FLAG,
    "test_chat_return_tokens_as_token_ids_completion[True]": FLAG,
    "test_responses_api_logprobs": OWN_CLASSES,
}


class Own(Exception):
    """In the place of any class of vLLM's."""

    def __init__(self, *_: object, **__: object) -> None:
        pytest.skip(OWN_CLASSES)

    @classmethod
    def model_validate(cls, *_: object) -> None:
        pytest.skip(OWN_CLASSES)


class Stub(ModuleType):
    """Any module of vLLM's. ``names``: what it has that is no class."""

    __path__: ClassVar[list[str]] = []
    names: ClassVar[Mapping[str, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.names.get(name, Own)


class Stubs:
    """Finds and loads stubs."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.partition(".")[0] == "vllm" else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing."""


class Report:
    """What became of each test, as a plugin of pytest."""

    def __init__(self) -> None:
        self.outcomes: dict[str, tuple[str, str]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for name, reason in SKIPPED.items():
                if item.name.startswith(name):
                    item.add_marker(pytest.mark.skip(reason=reason))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            name = report.nodeid.rpartition("/")[2]
            text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            lines = text.strip().splitlines() or [""]
            self.outcomes[name] = (report.outcome, lines[-1].removeprefix("Skipped: "))


def remote_server(url: str) -> type:
    class RemoteOpenAIServer:
        """In the place of vLLM's, which would start one."""

        def __init__(self, *_: object, **__: object) -> None:
            """Take the options of any server."""

        def __enter__(self) -> RemoteOpenAIServer:
            return self

        def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
            """Leave the server to the other tests."""

        def url_for(self, path: str) -> str:
            return f"{url}/{path}"

        def get_async_client(self) -> openai.AsyncOpenAI:
            return openai.AsyncOpenAI(
                base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600
            )

    return RemoteOpenAIServer


def write_base(folder: Path, target: Path) -> Path:
    """Write the checkpoint in ``folder`` without tokens that end a response."""
    target.mkdir()
    for file in folder.iterdir():
        if file.name not in ("generation_config.json", "config.json", "tokenizer_config.json"):
            (target / file.name).symlink_to(file)
    for name in ("config.json", "tokenizer_config.json"):
        values = json.loads((folder / name).read_text())
        kept = {key: value for key, value in values.items() if not key.startswith("eos_token")}
        (target / name).write_text(json.dumps(kept))
    return target


def copy(source: Path, target: Path, files: tuple[str, ...]) -> list[str]:
    """Copy the tests, which ask for MODEL. Returns their paths."""
    (target / "conftest.py").write_text((source / FOLDER.parent / "conftest.py").read_text())
    paths = []
    for file in files:
        text = (source / FOLDER / file).read_text()
        models = re.findall(r'^MODEL_NAME = "(.*)"', text, re.MULTILINE)
        for name in (*models, "zephyr-lora"):
            text = text.replace(
                f'"{name}"', f'"{BASE if file.startswith("completion") else MODEL}"'
            )
        text = re.sub(r"from \.+utils import", "from tests.utils import", text)
        path = target / Path(file).name
        path.write_text(text)
        paths.append(str(path))
    return paths


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("--checkpoint", type=Path, help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--files", nargs="*", default=FILES)
    options = parser.parse_args()
    folder = options.checkpoint or model_folder("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    Stub.names = {
        "get_tokenizer": lambda **_: tokenizer,
        "hf_api": MagicMock,
        "download_weights_from_hf": lambda *_, **__: BASE,
    }
    sys.meta_path.insert(0, Stubs())  # type: ignore[arg-type]
    report = Report()
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(tempfile.TemporaryDirectory())
        base = write_base(folder, Path(target) / BASE)
        checkpoints = [f"--checkpoint={name}" for name in (f"{MODEL}={folder}", f"{BASE}={base}")]
        url, _ = stack.enter_context(Served("--no-token", *checkpoints))
        utils = ModuleType("tests.utils")
        utils.RemoteOpenAIServer = remote_server(url)  # type: ignore[attr-defined]
        sys.modules["tests.utils"] = utils
        paths = copy(options.source, Path(target), tuple(options.files))
        quiet = ["-q", "--no-header", "-p", "no:cacheprovider", "-c", "/dev/null"]
        pytest.main([*quiet, "--rootdir", target, *paths], plugins=[report])
    for name, (outcome, reason) in report.outcomes.items():
        print(f"{outcome:8} {name}" + (f": {reason}" if outcome != "passed" else ""))
    counts: dict[str, Counter[str]] = {}
    for name, (outcome, _) in report.outcomes.items():
        counts.setdefault(name.partition("::")[0], Counter())[outcome] += 1
    print("\n| file | passed | failed | skipped |\n|---|---|---|---|")
    for file, count in counts.items():
        print(f"| {file} | {count['passed']} | {count['failed']} | {count['skipped']} |")
    if options.json:
        options.json.write({"counts": counts, "tests": report.outcomes})


if __name__ == "__main__":
    main()
