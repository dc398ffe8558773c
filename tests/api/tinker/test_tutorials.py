"""The tutorials and further recipes of tinker_cookbook, unmodified, against ``asyncdock tinker`` over
loopback. The tutorials are the quick start of Tinker's own documentation.

The models have the names that the programs ask for, and have learned nothing: what is asserted is
that each program runs to its end, and that what it trains is trained.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.tinker import cookbook
from tests.api.tinker.english import write_model
from tests.api.tinker.test_cookbook import run
from tests.api.tinker.test_sdks import Server
from tests.ports import free_port

pytest.importorskip("datasets", reason="tinker_cookbook reads its data with datasets")

SECONDS = 300.0
SMALL, BASE, LARGE = "Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-9B-Base", "Qwen/Qwen3.6-35B-A3B"
KIMI = "moonshotai/Kimi-K2.6"
GSM8K = "openai/gsm8k"
# The data set's configuration `main`, as a folder defines it.
GSM8K_CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: train.jsonl
  - split: test
    path: test.jsonl
---
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = tmp_path_factory.mktemp("model")
    write_model(model)
    models = dict.fromkeys((SMALL, BASE, LARGE, KIMI), str(model))
    served = Server(tmp_path_factory.mktemp("tutorials") / "data", free_port(), models)
    served.start()
    yield served
    assert served.end() == 0


@pytest.fixture
def folder(server: Server, tmp_path: Path) -> Path:
    """Where a program is started: the names of models and data sets are paths there."""
    for name, model in server.models.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(model)
    sums = [
        {"question": f"What is {n} plus {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"}
        for n in range(512)
    ]
    write_data(tmp_path / GSM8K, sums)
    (tmp_path / GSM8K / "README.md").write_text(GSM8K_CARD)
    write_data(tmp_path / "zwhe99" / "DeepMath-103K", sums)
    said = [
        {"messages": [message("user", f"Say {n}."), message("assistant", str(n))]}
        for n in range(256)
    ]
    write_data(tmp_path / "HuggingFaceH4" / "no_robots", said)
    compared = [
        {"chosen": f"\n\nHuman: Say {n}.\n\nAssistant: {n}", "rejected": dialogue(n)}
        for n in range(256)
    ]
    write_data(tmp_path / "Anthropic" / "hh-rlhf", compared)
    return tmp_path


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def dialogue(number: int) -> str:
    return f"\n\nHuman: Say {number}.\n\nAssistant: no"


def write_data(folder: Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(lines)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "name",
    [
        "101_hello_tinker",
        "103_async_patterns",
        "104_first_rl",
        "201_rendering",
        "202_loss_functions",
        "203_completers",
        "204_evaluations",
        "301_cookbook_abstractions",
        "302_custom_environment",
        "303_sft_with_config",
        "304_rl_with_config",
        "403_dpo_preferences",
        "404_sequence_extension",
        "405_multi_agent",
        "406_prompt_distillation",
        "501_export_hf",
        "502_lora_adapter",
    ],
)
def test_a_tutorial_runs_to_its_end(name: str, server: Server, folder: Path) -> None:
    cookbook.tutorial(name, server.url, server.key, folder, SECONDS)


@pytest.mark.timeout(1800)
def test_the_first_tutorial_of_training_teaches_both_of_its_models(
    server: Server, folder: Path
) -> None:
    printed = cookbook.tutorial("102_first_sft", server.url, server.key, folder, SECONDS)
    steps = re.findall(r"Step +(\d+): loss = ([\d.]+)", printed)
    assert [int(step) for step, _ in steps] == [*range(15), *range(10)]
    losses = [float(loss) for _, loss in steps]
    for first, last in ((losses[0], losses[14]), (losses[15], losses[-1])):
        assert last < first - 0.01, printed


FEW = ("max_steps=2", "max_tokens=8", "eval_every=0")
SMALL_GROUPS = ("batch_size=4", "group_size=2")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("rl_basic", ("max_steps=1", "max_tokens=4")),  # of 128 groups of 16
        *(
            ("rl_loop", (f"loss_fn={loss}", *SMALL_GROUPS, "max_tokens=8", "max_steps=2"))
            for loss in ("stable_reinforce", "cispo", "gspo")
        ),
        ("sl_basic", ("max_steps=2",)),
        ("sl_loop", ("batch_size=32", "max_steps=2")),
        ("preference.dpo.train", ("dataset=hhh", "batch_size=32", "max_steps=2")),
        (
            "distillation.on_policy_distillation",
            (f"teacher_model={LARGE}", "groups_per_batch=4", "group_size=2", "lora_rank=8", *FEW),
        ),
        ("multiplayer_rl.guess_number.train", (*SMALL_GROUPS, *FEW)),
        ("multiplayer_rl.text_arena.train", ("batch_size=4", "num_train_datapoints=8", *FEW)),
    ],
)
def test_a_recipe_makes_its_steps(
    recipe: str, options: tuple[str, ...], server: Server, folder: Path
) -> None:
    if "text_arena" in recipe:
        pytest.importorskip("textarena")
    assert run(recipe, server, folder, *options)
