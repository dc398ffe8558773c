import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from stages.models import Tokenizer, load_tokenizer
from stages.prompts import PromptError, PromptOptions, load_prompts

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ':' + m['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    return load_tokenizer("tiny")


@pytest.fixture(scope="module")
def chatty() -> Tokenizer:
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def jsonl(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def numbered(folder: Path, count: int) -> str:
    return jsonl(folder, [{"prompt": f"say {i}", "answer": str(i)} for i in range(count)])


def twenty_rows() -> list[dict[str, Any]]:
    """What a recipe's ``module:function`` returns."""
    return [{"prompt": f"say {i}", "answer": str(i)} for i in range(20)]


def test_each_epoch_has_every_row_once_in_an_order_of_its_own(tmp_path: Path, plain: Tokenizer) -> None:
    source = load_prompts(PromptOptions(source="jsonl", path=numbered(tmp_path, 50)), plain, seed=1).train
    assert source.size == 50
    epochs = [[source.prompt(50 * epoch + i).text for i in range(50)] for epoch in range(3)]
    assert all(sorted(epoch) == sorted(f"say {i}" for i in range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("kind", ["table", "procedural"])
def test_a_prompt_depends_on_seed_and_seq_alone(kind: str, tmp_path: Path, plain: Tokenizer) -> None:
    options = (
        PromptOptions(source="jsonl", path=numbered(tmp_path, 30), held_out=0.2)
        if kind == "table"
        else PromptOptions(source="builtin", task="repeat", held_out=0.2)
    )
    forward = load_prompts(options, plain, seed=7).train
    expected = [forward.prompt(seq) for seq in range(80)]
    for seq in (79, 3, 41, 3, 0):  # a run that resumes asks out of order, with a source just opened
        again = load_prompts(options, plain, seed=7).train.prompt(seq)
        assert torch.equal(again.ids, expected[seq].ids)
        assert (again.text, again.fields) == (expected[seq].text, expected[seq].fields)
    other = load_prompts(options, plain, seed=8).train
    assert [other.prompt(seq).text for seq in range(80)] != [prompt.text for prompt in expected]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), share=st.floats(0.05, 0.6))
def test_held_out_prompts_are_never_trained(seed: int, share: float) -> None:
    # 64 different prompts, each drawn many times.
    options = PromptOptions(source="builtin", task="repeat", held_out=share)
    split = load_prompts(options, load_tokenizer("tiny"), seed)
    assert split.held_out is not None
    try:
        held_out = {split.held_out.prompt(seq).text for seq in range(40)}
    except PromptError:  # no prompt of the 64 happens to be held out
        held_out = set()
    assert held_out.isdisjoint(split.train.prompt(seq).text for seq in range(300))


def test_a_table_that_repeats_a_prompt_keeps_it_on_one_side(tmp_path: Path, plain: Tokenizer) -> None:
    path = jsonl(tmp_path, [{"prompt": f"say {i % 10}", "answer": str(i)} for i in range(100)])
    split = load_prompts(PromptOptions(source="jsonl", path=path, held_out=0.4), plain, seed=0)
    assert split.held_out is not None
    assert split.train.size is not None
    assert split.held_out.size is not None
    train = Counter(split.train.prompt(i).text for i in range(split.train.size))
    held_out = Counter(split.held_out.prompt(i).text for i in range(split.held_out.size))
    assert not train.keys() & held_out.keys()
    assert (train + held_out).total() == 100


def test_rows_hand_their_other_columns_on(tmp_path: Path, plain: Tokenizer) -> None:
    path = jsonl(tmp_path, [{"prompt": "2+2=", "answer": "4", "level": {"hard": False}}])
    prompt = load_prompts(PromptOptions(source="jsonl", path=path), plain, seed=0).train.prompt(0)
    assert prompt.fields == {"answer": "4", "level": {"hard": False}}
    assert prompt.given == "2+2="
    assert prompt.ids.dtype == torch.int64
    assert plain.decode(prompt.ids) == "2+2="


def test_a_line_separator_inside_a_string_does_not_end_the_row(tmp_path: Path, plain: Tokenizer) -> None:
    path = jsonl(tmp_path, [{"prompt": "a\u2028b"}, {"prompt": "c"}])
    assert load_prompts(PromptOptions(source="jsonl", path=path), plain, seed=0).train.size == 2


def test_parquet_and_datasets_give_the_rows_of_the_same_json_lines(tmp_path: Path, plain: Tokenizer) -> None:
    datasets = pytest.importorskip("datasets")
    rows = twenty_rows()
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(str(tmp_path / "rows.parquet"))
    datasets.DatasetDict({"train": table}).save_to_disk(str(tmp_path / "saved"))
    options = [
        PromptOptions(source="jsonl", path=jsonl(tmp_path, rows)),
        PromptOptions(source="parquet", path=str(tmp_path / "rows.parquet")),
        PromptOptions(source="datasets", path=str(tmp_path / "saved"), split="train"),
        PromptOptions(source="datasets", path=f"{__name__}:twenty_rows"),
    ]
    sources = [load_prompts(each, plain, seed=4).train for each in options]
    for seq in range(25):
        prompts = [source.prompt(seq) for source in sources]
        assert len({prompt.text for prompt in prompts}) == 1
        assert all(prompt.fields == prompts[0].fields for prompt in prompts)


def test_a_split_that_is_not_there_is_named(tmp_path: Path, plain: Tokenizer) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(twenty_rows())}).save_to_disk(str(tmp_path / "saved"))
    options = PromptOptions(source="datasets", path=str(tmp_path / "saved"), split="test")
    with pytest.raises(PromptError, match=r"'test' is not in .*\['train'\]"):
        load_prompts(options, plain, seed=0)


def test_reasoning_gym_asks_its_task_without_end(plain: Tokenizer) -> None:
    pytest.importorskip("reasoning_gym")
    config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    split = load_prompts(
        PromptOptions(source="reasoning_gym", task="chain_sum", config=config, held_out=0.1), plain, seed=2
    )
    assert split.train.size is None
    for seq in (0, 1, 10**6):
        prompt = split.train.prompt(seq)
        assert isinstance(prompt.given, str)
        left, operator, right = prompt.given.removesuffix(" =").split()[-3:]
        assert int(prompt.fields["answer"]) == int(left) + int(right) * (1 if operator == "+" else -1)
        assert prompt.fields["metadata"]["source_dataset"] == "chain_sum"
    neighbour = load_prompts(PromptOptions(source="reasoning_gym", task="chain_sum", config=config), plain, seed=3)
    shifted = [split.train.prompt(seq + 1).text for seq in range(20)]
    assert [neighbour.train.prompt(seq).text for seq in range(20)] != shifted


def test_reasoning_gym_with_a_size_is_a_table_of_that_many_rows(plain: Tokenizer) -> None:
    pytest.importorskip("reasoning_gym")
    source = load_prompts(PromptOptions(source="reasoning_gym", task="gcd", config={"size": 12}), plain, seed=2).train
    assert source.size == 12
    assert {source.prompt(i).text for i in range(12)} == {source.prompt(i).text for i in range(12, 24)}


def test_reasoning_gym_mistakes_are_named(plain: Tokenizer) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(PromptError, match=r"'sums' is not a task.*chain_sum"):
        load_prompts(PromptOptions(source="reasoning_gym", task="sums"), plain, seed=0)
    with pytest.raises(PromptError, match=r"does not fit.*chain_sum.*terms"):
        load_prompts(PromptOptions(source="reasoning_gym", task="chain_sum", config={"terms": 2}), plain, seed=0)
    with pytest.raises(PromptError, match="give its size in config"):
        load_prompts(PromptOptions(source="reasoning_gym", task="gsm_symbolic"), plain, seed=0).train.prompt(10**6)


def test_strings_go_into_the_chat_template_when_there_is_one(
    tmp_path: Path, plain: Tokenizer, chatty: Tokenizer
) -> None:
    path = jsonl(tmp_path, [{"prompt": "2+2", "unit": "cm"}])
    options = PromptOptions(source="jsonl", path=path, template="{prompt} in {unit}?")
    assert load_prompts(options, plain, seed=0).train.prompt(0).text == "2+2 in cm?"
    prompt = load_prompts(options, chatty, seed=0).train.prompt(0)
    assert prompt.text == "user:2+2 in cm? assistant:"
    assert prompt.given == "2+2"
    with_system = options.model_copy(update={"system": "be short"})
    text = load_prompts(with_system, chatty, seed=0).train.prompt(0).text
    assert text == "system:be short user:2+2 in cm? assistant:"
    without = options.model_copy(update={"chat": False})
    assert load_prompts(without, chatty, seed=0).train.prompt(0).text == "2+2 in cm?"


def test_conversations_stay_conversations(tmp_path: Path, plain: Tokenizer, chatty: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    system = [{"role": "system", "content": "own"}, *messages]
    options = PromptOptions(source="jsonl", path=jsonl(tmp_path, [{"prompt": messages}]), system="be short")
    prompt = load_prompts(options, chatty, seed=0).train.prompt(0)
    assert prompt.text == "system:be short user:hi assistant:"
    assert prompt.given == messages
    options = PromptOptions(source="jsonl", path=jsonl(tmp_path, [{"prompt": system}]), system="be short")
    assert load_prompts(options, chatty, seed=0).train.prompt(0).text == "system:own user:hi assistant:"
    with pytest.raises(PromptError, match="row 0 is a conversation, but the tokenizer has no chat template"):
        load_prompts(options.model_copy(update={"system": None}), plain, seed=0).train.prompt(0)


def test_a_prompt_too_long_is_named_or_skipped(tmp_path: Path, plain: Tokenizer) -> None:
    path = jsonl(tmp_path, [{"prompt": "a"}, {"prompt": "a" * 9}, {"prompt": "b"}])
    options = PromptOptions(source="jsonl", path=path, max_prompt_tokens=8)
    with pytest.raises(PromptError, match="row 1 has 9 tokens, more than max_prompt_tokens = 8"):
        load_prompts(options, plain, seed=0)
    source = load_prompts(options.model_copy(update={"too_long": "skip"}), plain, seed=0).train
    assert sorted(source.prompt(i).text for i in range(2)) == ["a", "b"]
    assert source.size == 2


def test_procedural_prompts_that_never_fit_end_in_an_error(plain: Tokenizer) -> None:
    options = PromptOptions(source="builtin", task="repeat", max_prompt_tokens=2, too_long="skip")
    with pytest.raises(PromptError, match="made no training prompt for group 5"):
        load_prompts(options, plain, seed=0).train.prompt(5)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "a"}, r"row 0 has no column 'prompt' \(it has \['question'\]\)"),
        ({"prompt": ""}, "row 0 has '' in column"),
        ({"prompt": [{"role": "user"}]}, "row 0 has .* in column"),
        ({"prompt": 3}, "row 0 has 3 in column"),
    ],
)
def test_rows_that_are_no_prompts_are_errors_at_the_start(
    row: dict[str, Any], message: str, tmp_path: Path, plain: Tokenizer
) -> None:
    with pytest.raises(PromptError, match=message):
        load_prompts(PromptOptions(source="jsonl", path=jsonl(tmp_path, [row])), plain, seed=0)


def test_files_that_are_broken_are_named_with_their_line(tmp_path: Path, plain: Tokenizer) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": \n')
    with pytest.raises(PromptError, match="line 3 is not JSON"):
        load_prompts(PromptOptions(source="jsonl", path=str(path)), plain, seed=0)
    with pytest.raises(PromptError, match="does not exist"):
        load_prompts(PromptOptions(source="jsonl", path=str(tmp_path / "none")), plain, seed=0)


def test_a_table_with_nothing_to_hold_out_is_an_error(tmp_path: Path, plain: Tokenizer) -> None:
    options = PromptOptions(source="jsonl", path=jsonl(tmp_path, [{"prompt": "a"}]), held_out=0.001)
    with pytest.raises(PromptError, match="no held-out rows"):
        load_prompts(options, plain, seed=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "jsonl"}, "prompts.path is missing"),
        ({"source": "builtin", "path": "x", "task": "repeat"}, "prompts.path = 'x' means nothing"),
        ({"source": "builtin", "task": "chess"}, r"'chess' is not known.*repeat"),
        ({"source": "jsonl", "path": "x", "config": {"a": 1}}, "prompts.config"),
        ({"source": "jsonl", "path": "x", "split": "test"}, "prompts.split"),
        ({"source": "jsonl", "path": "x", "template": "hello"}, r"must contain \{prompt\}"),
        ({"source": "jsonl", "path": "x", "chat": False, "system": "s"}, "prompts.system"),
        ({"source": "jsonl", "path": "x", "shuffle": True}, "shuffle"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PromptOptions(**options)


def test_the_template_may_only_name_columns(tmp_path: Path, plain: Tokenizer) -> None:
    options = PromptOptions(source="jsonl", path=numbered(tmp_path, 1), template="{prompt} {unit}")
    with pytest.raises(PromptError, match=r"'unit'.*'answer'"):
        load_prompts(options, plain, seed=0).train.prompt(0)
