import json
import os
import re
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from stages.model.load import Tokenizer, load_tokenizer
from stages.prompts.formatter import PromptFormatter
from stages.prompts.rows.checked import prompt_check
from stages.prompts.rows.files import LINE_BYTES, PromptError, Reading
from stages.prompts.rows.options import PromptLimits, PromptOptions
from stages.prompts.rows.prompt_check import MOST_FAULTS
from stages.prompts.rows.templates import fill_template, parse_template
from stages.prompts.sources import PromptSource, load_prompts
from stages.prompts.too_long import LongPrompts
from stages.tasks.tasks import TASKS

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
    path.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    return str(path)


def numbered(folder: Path, count: int) -> str:
    return jsonl(folder, [{"prompt": f"say {i}", "answer": str(i)} for i in range(count)])


def twenty_rows() -> list[dict[str, Any]]:
    """What a recipe's ``module:function`` returns."""
    return [{"prompt": f"say {i}", "answer": str(i)} for i in range(20)]


def test_each_epoch_has_every_row_once_in_an_order_of_its_own(
    tmp_path: Path, plain: Tokenizer
) -> None:
    source = load_prompts(
        PromptOptions(source="jsonl", path=numbered(tmp_path, 50)), plain, seed=1
    ).train
    assert source.size == 50
    epochs = [[source.prompt(50 * epoch + i).text for i in range(50)] for epoch in range(3)]
    assert all(sorted(epoch) == sorted(f"say {i}" for i in range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("kind", ["table", "procedural"])
def test_a_prompt_depends_on_seed_and_seq_alone(
    kind: str, tmp_path: Path, plain: Tokenizer
) -> None:
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


def test_each_seed_holds_out_other_prompts_as_many_as_the_share_says(
    tmp_path: Path, plain: Tokenizer
) -> None:
    options = PromptOptions(source="jsonl", path=numbered(tmp_path, 400), held_out=0.25)
    sides = []
    for seed in (0, 1, 0):
        held_out = load_prompts(options, plain, seed).held_out
        assert held_out is not None
        assert held_out.size is not None
        sides.append({held_out.prompt(at).text for at in range(held_out.size)})
    assert sides[0] == sides[2]
    for side in sides:
        assert 65 <= len(side) <= 135, "a binomial of 400 and 0.25, within 4 standard deviations"
    # Of two independent draws, a quarter of a quarter is on both sides: 25 of 400.
    assert len(sides[0] & sides[1]) < 50


def test_a_table_that_repeats_a_prompt_keeps_it_on_one_side(
    tmp_path: Path, plain: Tokenizer
) -> None:
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


def test_a_line_separator_inside_a_string_does_not_end_the_row(
    tmp_path: Path, plain: Tokenizer
) -> None:
    path = jsonl(tmp_path, [{"prompt": "a\u2028b"}, {"prompt": "c"}])
    assert load_prompts(PromptOptions(source="jsonl", path=path), plain, seed=0).train.size == 2


def test_parquet_and_datasets_give_the_rows_of_the_same_json_lines(
    tmp_path: Path, plain: Tokenizer
) -> None:
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
    datasets.DatasetDict({"train": datasets.Dataset.from_list(twenty_rows())}).save_to_disk(
        str(tmp_path / "saved")
    )
    options = PromptOptions(source="datasets", path=str(tmp_path / "saved"), split="test")
    with pytest.raises(PromptError, match=r"\"test\": is not in .*\['train'\]"):
        load_prompts(options, plain, seed=0)


def test_reasoning_gym_asks_its_task_without_end(plain: Tokenizer) -> None:
    pytest.importorskip("reasoning_gym")
    config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    split = load_prompts(
        PromptOptions(source="reasoning_gym", task="chain_sum", config=config, held_out=0.1),
        plain,
        seed=2,
    )
    for seq in (0, 1, 10**6):
        prompt = split.train.prompt(seq)
        assert isinstance(prompt.given, str)
        left, operator, right = prompt.given.removesuffix(" =").split()[-3:]
        assert int(prompt.fields["answer"]) == int(left) + int(right) * (
            1 if operator == "+" else -1
        )
        assert prompt.fields["metadata"]["source_dataset"] == "chain_sum"
    neighbour = load_prompts(
        PromptOptions(source="reasoning_gym", task="chain_sum", config=config), plain, seed=3
    )
    shifted = [split.train.prompt(seq + 1).text for seq in range(20)]
    assert [neighbour.train.prompt(seq).text for seq in range(20)] != shifted


def test_reasoning_gym_with_a_size_is_a_table_of_that_many_rows(plain: Tokenizer) -> None:
    pytest.importorskip("reasoning_gym")
    source = load_prompts(
        PromptOptions(source="reasoning_gym", task="gcd", config={"size": 12}), plain, seed=2
    ).train
    assert source.size == 12
    assert {source.prompt(i).text for i in range(12)} == {
        source.prompt(i).text for i in range(12, 24)
    }


def test_reasoning_gym_mistakes_are_named(plain: Tokenizer) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(PromptError, match=r"\"sums\": is not a task.*chain_sum"):
        load_prompts(PromptOptions(source="reasoning_gym", task="sums"), plain, seed=0)
    with pytest.raises(PromptError, match=r"does not fit.*chain_sum.*terms"):
        load_prompts(
            PromptOptions(source="reasoning_gym", task="chain_sum", config={"terms": 2}),
            plain,
            seed=0,
        )
    with pytest.raises(PromptError, match="give its size in config"):
        load_prompts(
            PromptOptions(source="reasoning_gym", task="gsm_symbolic"), plain, seed=0
        ).train.prompt(10**6)


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


def test_conversations_stay_conversations(
    tmp_path: Path, plain: Tokenizer, chatty: Tokenizer
) -> None:
    messages = [{"role": "user", "content": "hi"}]
    system = [{"role": "system", "content": "own"}, *messages]
    options = PromptOptions(
        source="jsonl", path=jsonl(tmp_path, [{"prompt": messages}]), system="be short"
    )
    prompt = load_prompts(options, chatty, seed=0).train.prompt(0)
    assert prompt.text == "system:be short user:hi assistant:"
    assert prompt.given == messages
    options = PromptOptions(
        source="jsonl", path=jsonl(tmp_path, [{"prompt": system}]), system="be short"
    )
    assert load_prompts(options, chatty, seed=0).train.prompt(0).text == (
        "system:own user:hi assistant:"
    )
    with pytest.raises(
        PromptError, match="line 1 is a conversation, but the tokenizer has no chat template"
    ):
        load_prompts(options.model_copy(update={"system": None}), plain, seed=0).train.prompt(0)


def test_a_prompt_too_long_is_skipped_and_listed_or_cut_or_named(
    tmp_path: Path, plain: Tokenizer
) -> None:
    path = jsonl(tmp_path, [{"prompt": "a"}, {"prompt": "abcdefghi"}, {"prompt": "b"}])
    options = PromptOptions(source="jsonl", path=path, max_prompt_tokens=8)
    listed = tmp_path / "too-long.jsonl"
    source = load_prompts(options, plain, seed=0, listed=listed).train
    assert sorted(source.prompt(i).text for i in range(2)) == ["a", "b"]
    assert (source.size, source.too_long.skipped, source.too_long.cut) == (2, 1, 0)
    found = [json.loads(line) for line in listed.read_text().splitlines()]
    assert found == [{"where": f"{path}, line 2", "length": "9 tokens", "done": "skipped"}]
    cut = load_prompts(
        options.model_copy(update={"too_long": "cut"}), plain, seed=0, listed=listed
    ).train
    assert sorted(cut.prompt(i).text for i in range(3)) == ["a", "b", "bcdefghi"], (
        "its beginning goes"
    )
    assert (cut.size, cut.too_long.skipped, cut.too_long.cut) == (3, 0, 1)
    assert [json.loads(line)["done"] for line in listed.read_text().splitlines()] == ["cut"], (
        "the list is made again"
    )
    with pytest.raises(
        PromptError,
        match=r"rows.jsonl, line 2 has 9 tokens, where .* 8 tokens "
        r".*too_long = 'skip'",
    ):
        load_prompts(options.model_copy(update={"too_long": "fail"}), plain, seed=0)


def test_a_table_of_prompts_that_are_all_too_long_is_an_error_at_the_start(
    tmp_path: Path, plain: Tokenizer
) -> None:
    options = PromptOptions(source="jsonl", path=numbered(tmp_path, 3), max_prompt_tokens=4)
    with pytest.raises(
        PromptError,
        match=r"all 3 prompts of .*rows.jsonl are too long: none has "
        r"at most 4 tokens",
    ):
        load_prompts(options, plain, seed=0)


@settings(max_examples=30, deadline=None)
@given(long=st.sets(st.integers(0, 29)), seed=st.integers(0, 99), share=st.sampled_from([0.0, 0.3]))
def test_skipping_changes_no_other_prompt_and_no_side(
    tmp_path_factory: pytest.TempPathFactory, long: set[int], seed: int, share: float
) -> None:
    """The run over a table with prompts that are too long is the run over the table without
    them."""
    folder = tmp_path_factory.mktemp("rows")
    plain = load_tokenizer("tiny")
    rows = [
        {"prompt": f"say {i}" + "!" * (40 if i in long else 0), "answer": str(i)} for i in range(30)
    ]
    dirty = PromptOptions(
        source="jsonl", path=jsonl(folder, rows), max_prompt_tokens=20, held_out=share
    )
    (folder / "clean").mkdir()
    clean = jsonl(folder / "clean", [row for row in rows if len(row["prompt"]) <= 20])
    try:
        wanted = load_prompts(dirty.model_copy(update={"path": clean}), plain, seed)
    except PromptError:  # nothing is left on one side
        return
    found = load_prompts(dirty, plain, seed)
    for seq in (0, 7, 61, 7):
        assert found.train.prompt(seq).text == wanted.train.prompt(seq).text
        if found.held_out and wanted.held_out:
            assert found.held_out.prompt(seq).text == wanted.held_out.prompt(seq).text
    assert found.train.too_long.skipped == len(long)


def sometimes(number: int, seed: int) -> dict[str, str]:
    return {"prompt": "abc" * (1 + 9 * (number % 5 == 0)), "answer": ""}


def test_a_procedural_prompt_that_is_too_long_is_listed_once_however_often_it_is_drawn(
    tmp_path: Path, plain: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TASKS, "sometimes", f"{__name__}:sometimes")
    options = PromptOptions(source="builtin", task="sometimes", max_prompt_tokens=8)
    listed = tmp_path / "list.jsonl"
    source = load_prompts(options, plain, seed=0, listed=listed).train
    first = [source.prompt(seq).text for seq in range(20)]
    assert source.too_long.skipped == 4
    # of a worker that was started again
    again = load_prompts(options, plain, seed=0, listed=listed).train
    assert again.too_long.skipped == 4
    assert [again.prompt(seq).text for seq in range(20)] == first
    assert again.too_long.skipped == 4
    assert len(listed.read_text().splitlines()) == 4


def peak_of(work: Callable[[], Any]) -> int:
    """The most bytes of Python's that lived at once during ``work``."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("too_long", ["skip", "cut"])
@pytest.mark.parametrize("chat", [False, True])
def test_a_template_cannot_blow_a_prompt_up(
    too_long: Any, chat: bool, tmp_path: Path, plain: Tokenizer, chatty: Tokenizer
) -> None:
    """2,000 times a prompt of 50 kB would be 100 MB of text, and gigabytes of tokens."""
    path = jsonl(tmp_path, [{"prompt": "a" * 50_000}, {"prompt": "b"}])
    options = PromptOptions(
        source="jsonl",
        path=path,
        template="{prompt}" * 2000,
        too_long=too_long,
        max_prompt_tokens=4000,
    )
    found: list[PromptSource] = []
    tokenizer = chatty if chat else plain
    peak = peak_of(lambda: found.append(load_prompts(options, tokenizer, seed=0).train))
    assert peak < 30 * 2**20
    prompts = [found[0].prompt(seq) for seq in range(found[0].size or 0)]
    assert len(prompts) == (1 if too_long == "skip" else 2)
    assert all(len(prompt.ids) <= 4000 for prompt in prompts)
    assert found[0].too_long.skipped + found[0].too_long.cut == 1


def test_a_row_that_the_arena_has_no_room_for_is_skipped(tmp_path: Path, plain: Tokenizer) -> None:
    path = jsonl(tmp_path, [{"prompt": "a", "about": "x" * 5000}, {"prompt": "b", "about": "y"}])
    options = PromptOptions(source="jsonl", path=path, too_long="cut")
    source = load_prompts(
        options, plain, seed=0, limits=PromptLimits(100, "here", nbytes=1000)
    ).train
    assert (source.size, source.too_long.skipped) == (1, 1)


@pytest.mark.parametrize(
    "template",
    [
        "{prompt}{answer:>1000000000}",
        "{prompt}{answer:{width}}",
        "{prompt}{}",
        "{prompt}{0}",
        "{prompt}{",
        "{prompt}{answer:٩٩٩٩}",
    ],
)
def test_templates_that_could_grow_or_name_nothing_are_refused(template: str) -> None:
    with pytest.raises(ValidationError, match=r"(?s)template.* is not a template"):
        PromptOptions(source="jsonl", path="x", template=template)


@given(
    fields=st.dictionaries(
        st.sampled_from(["answer", "unit"]), st.text(max_size=9).filter(str.isprintable), min_size=2
    ),
    pieces=st.lists(
        st.sampled_from(["{prompt}", "{answer}", "{unit!r}", "{unit:>5}", " is ", "{{", "é"]),
        max_size=9,
    ),
    most=st.integers(1, 60),
)
def test_a_template_is_filled_as_str_format_fills_it(
    fields: dict[str, str], pieces: list[str], most: int
) -> None:
    template = "".join(["{prompt}", *pieces])
    row = fields | {"prompt": "ask"}
    whole = template.format(**row)
    assert fill_template(parse_template(template), row, 10_000, "row 1") == whole
    assert fill_template(parse_template(template), row, most, "row 1") == whole[-most:]


def test_procedural_prompts_that_never_fit_end_in_an_error(plain: Tokenizer) -> None:
    options = PromptOptions(source="builtin", task="repeat", max_prompt_tokens=2, too_long="skip")
    with pytest.raises(PromptError, match="made no training prompt for group 5"):
        load_prompts(options, plain, seed=0).train.prompt(5)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "a"}, r"line 1 has no column 'prompt' \(it has \['question'\]\)"),
        ({"prompt": ""}, "line 1 has '' in column"),
        ({"prompt": [{"role": "user"}]}, "line 1 has .* in column"),
        ({"prompt": 3}, "line 1 has 3 in column"),
    ],
)
def test_rows_that_are_no_prompts_are_errors_at_the_start(
    row: dict[str, Any], message: str, tmp_path: Path, plain: Tokenizer
) -> None:
    with pytest.raises(PromptError, match=message):
        load_prompts(PromptOptions(source="jsonl", path=jsonl(tmp_path, [row])), plain, seed=0)


# What people have as a prompts file that is none: its bytes (None: something else is made), and the
# sentence.
NO_PROMPTS = [
    (b'{"prompt": "a"}\n\n{"prompt": \n', "line 3 is not JSON (Expecting value at column"),
    (b'{"prompt": "a"}\n["b"]\n', "line 2 is a list; write one JSON object on each line"),
    (b'{"prompt": "a"}\nnull\n', "line 2 is null"),
    (
        b'{"prompt": "a"}\n{"prompt": "\xe9t\xe9"}\n',
        "line 2 is not UTF-8 (byte 0xe9 at column 13); save it as UTF-8",
    ),
    ('{"prompt": "a"}\n'.encode("utf-16"), "is UTF-16, not JSON Lines in UTF-8; save it as UTF-8"),
    ('{"prompt": "a"}\n'.encode("utf-16-le"), "line 1 has a zero byte at column 2, as UTF-16 has"),
    ('{"prompt": "a"}\n'.encode("utf-32"), "is UTF-32"),
    (
        b'{"prompt": "\\ud83d"}\n',
        "line 1 has half of a surrogate pair in column 'prompt' (\\ud83d at character 1)",
    ),
    (
        b'{"prompt": [{"role": "user", "content": "\\ude00"}]}\n',
        "half of a surrogate pair in column",
    ),
    (b'{"prompt": "a\0b"}\n', "line 1 has a zero byte at column 14"),
    (b'{"prompt": "a"}\n' + b'{"x":' * 100_000, "line 2 is nested too deeply"),
    (b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}\n", "line 1 is not JSON (Exceeds the limit"),
    (b'{"prompt": "a"} {"prompt": "b"}\n', "line 1 is not JSON (Extra data"),
    (b"", "is empty; give a file with prompts"),
    (b"\n \n\n", "has no rows"),
    (b"\x1f\x8b\x08\x00", "is compressed by gzip"),
    (b"PAR1....", "is a Parquet file, not JSON Lines in UTF-8; set prompts.source = 'parquet'"),
]


@pytest.mark.parametrize(
    ("content", "sentence"), NO_PROMPTS, ids=[sentence[:40] for _, sentence in NO_PROMPTS]
)
def test_files_that_are_broken_are_named_with_their_line(
    content: bytes, sentence: str, tmp_path: Path, plain: Tokenizer
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    options = PromptOptions(source="jsonl", path=str(tmp_path / "rows.jsonl"))
    with pytest.raises(PromptError) as raised:
        load_prompts(options, plain, seed=0)
    assert f"{tmp_path / 'rows.jsonl'}" in str(raised.value)
    assert sentence in str(raised.value)
    found, *_ = prompt_check(options, Reading()).faults()
    (checked,), (refused,) = found.problems, raised.value.problems
    assert (checked.key, checked.value) == ("prompts.path", options.path)
    assert refused.wrong.endswith(checked.wrong), "a check says the same"
    assert refused.fix == checked.fix


def test_what_is_no_file_is_a_sentence_and_is_not_waited_for(
    tmp_path: Path, plain: Tokenizer
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    sentences = {
        "pipe": "is a pipe",
        "folder": "is a folder",
        "none": "does not exist",
        "a\0b": "cannot be|does not exist",
        "loop": "cannot be|does not exist",
    }
    sentences |= {
        "/dev/zero": "is a device",
        "~nobody-at-all/x": "cannot be",
        "x" * 5000: "cannot be|does not exist",
    }
    for name, sentence in sentences.items():
        for source in ("jsonl", "parquet"):
            path = name if name.startswith(("/", "~")) else str(tmp_path / name)
            options = PromptOptions(source=source, path=path)
            if (name, source) == ("folder", "parquet"):
                continue  # of Parquet files, it may be one
            with pytest.raises(PromptError, match=sentence):
                load_prompts(options, plain, seed=0)
            [found] = prompt_check(options, Reading()).faults()
            assert re.search(sentence, str(found))
            assert str(found).count("prompts.path") <= 1


@pytest.mark.parametrize(
    "content",
    [
        b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}',
        b'{"prompt": "a"}\r\n\r\n{"prompt": "b"}\r\n',
        b'{"prompt": "a"}\r{"prompt": "b"}',
    ],
    ids=["byte-order mark", "Windows", "old Mac"],
)
def test_a_byte_order_mark_and_any_line_ends_are_accepted(
    content: bytes, tmp_path: Path, plain: Tokenizer
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    options = PromptOptions(source="jsonl", path=str(tmp_path / "rows.jsonl"))
    assert {load_prompts(options, plain, seed=0).train.prompt(i).text for i in range(2)} == {
        "a",
        "b",
    }
    assert list(prompt_check(options, Reading()).faults()) == []


def test_a_line_without_end_is_not_read(tmp_path: Path, plain: Tokenizer) -> None:
    with (tmp_path / "rows.jsonl").open("wb") as file:
        file.write(b'{"prompt": "a"}\n{"prompt": "')
        file.seek(12 * LINE_BYTES, os.SEEK_CUR)  # a hole
        file.write(b'"}\n{"prompt": "b"}\n')
    options = PromptOptions(source="jsonl", path=str(tmp_path / "rows.jsonl"))
    sources = list[PromptSource]()
    assert (
        peak_of(lambda: sources.append(load_prompts(options, plain, seed=0).train)) < 4 * LINE_BYTES
    )
    assert (sources[0].size, sources[0].too_long.skipped) == (2, 1)
    assert {sources[0].prompt(i).text for i in range(2)} == {"a", "b"}
    with pytest.raises(PromptError, match=r"line 2 has more bytes"):
        load_prompts(options.model_copy(update={"too_long": "fail"}), plain, seed=0)


def test_a_chat_template_that_refuses_a_conversation_is_a_sentence(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = "{{ raise_exception('Roles must alternate') }}"
    path = jsonl(tmp_path, [{"prompt": [{"role": "robot", "content": "a"}]}])
    with pytest.raises(
        PromptError,
        match=r"line 1 is refused by the chat template \(Roles must "
        r"alternate\)",
    ):
        load_prompts(PromptOptions(source="jsonl", path=path), tokenizer, seed=0)


def test_a_check_reads_no_more_than_it_may(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n' * 50 + "broken\n")
    options = PromptOptions(source="jsonl", path=str(path))
    stopped = threading.Event()
    stopped.set()
    for reading in (
        Reading(rows=50),
        Reading(nbytes=300),
        Reading(seconds=0),
        Reading(stop=stopped),
    ):
        assert list(prompt_check(options, reading).faults()) == []
    [found] = prompt_check(options, Reading(rows=51)).faults()
    assert "line 51 is not JSON" in str(found)
    path.write_text("broken\n" * 5000)
    faults = [str(fault) for fault in prompt_check(options, Reading()).faults()]
    assert len(faults) == MOST_FAULTS + 1
    assert "has more such rows" in faults[-1]


def test_a_check_reads_tables_and_tasks_too(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("reasoning_gym")

    def faults(**options: Any) -> list[str]:
        return [str(fault) for fault in prompt_check(PromptOptions(**options), Reading()).faults()]

    table = datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": ""}, {"prompt": None}])
    table.to_parquet(str(tmp_path / "rows.parquet"))
    datasets.DatasetDict({"train": table}).save_to_disk(str(tmp_path / "saved"))
    parquet = {"source": "parquet", "path": str(tmp_path / "rows.parquet")}
    assert ["row 2" in faults(**parquet)[0], "row 3" in faults(**parquet)[1]] == [True, True]
    assert "has no column 'question'" in faults(**parquet, column="question")[0]
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "rows.parquet").read_bytes()[:-9])
    assert "cannot be read" in faults(source="parquet", path=str(tmp_path / "cut.parquet"))[0]
    saved = {"source": "datasets", "path": str(tmp_path / "saved")}
    assert ["row 2" in fault or "row 3" in fault for fault in faults(**saved)] == [True, True], (
        "train is the default"
    )
    assert "use one of ['train']" in faults(**saved, split="test")[0]
    assert "has no column 'question'" in faults(**saved, split="train", column="question")[0]
    assert "no state.json" in faults(source="datasets", path=str(tmp_path))[0]
    assert faults(source="datasets", path=f"{__name__}:twenty_rows") == []
    assert "cannot be imported" in faults(source="datasets", path=f"{__name__}:none")[0]
    assert "does not fit" in faults(source="builtin", task="repeat", config={"length": 10**12})[0]
    assert (
        "does not fit" in faults(source="reasoning_gym", task="chain_sum", config={"terms": 2})[0]
    )
    assert (
        "prompts.config.size"
        in faults(source="reasoning_gym", task="chain_sum", config={"size": 10**9})[0]
    )


def test_a_table_with_nothing_to_hold_out_is_an_error(tmp_path: Path, plain: Tokenizer) -> None:
    options = PromptOptions(source="jsonl", path=jsonl(tmp_path, [{"prompt": "a"}]), held_out=0.001)
    with pytest.raises(PromptError, match="no held-out rows"):
        load_prompts(options, plain, seed=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "jsonl"}, r"path\n  is missing"),
        (
            {"source": "builtin", "path": "x", "task": "repeat"},
            r"path\n  means nothing for source "
            r"= 'builtin'",
        ),
        (
            {"source": "builtin", "task": "chess"},
            r"(?s)task\n  is not known; use one of "
            r"\['bandit', 'calculator', .*'repeat', 'sort'\].*'chess'",
        ),
        ({"source": "jsonl", "path": "x", "config": {"a": 1}}, r"config\n  means nothing"),
        ({"source": "builtin", "task": "repeat", "split": "test"}, r"split\n  means nothing"),
        (
            {"source": "jsonl", "path": "x", "leave_out": ["prompt"]},
            r"leave_out\n  has the column "
            r"of the prompt",
        ),
        ({"source": "jsonl", "path": "x", "template": "hello"}, r"must contain \{prompt\}"),
        (
            {"source": "jsonl", "path": "x", "chat": False, "system": "s"},
            r"system\n  needs a chat "
            r"template",
        ),
        ({"source": "jsonl", "path": "x", "shufle": True}, "shufle"),
        ({}, r"source\n  is missing; write one of jsonl"),
        (
            {"sources": [{"source": "jsonl", "path": "x"}], "path": "x"},
            r"path\n  means nothing "
            r"beside prompts.sources",
        ),
        ({"sources": [{"source": "jsonl"}]}, r"sources.0.path\n  is missing"),
        ({"sources": [{"source": "external"}]}, r"sources.0.source\n  is put by other programs"),
        ({"sources": [{"source": "jsonl", "path": "x", "weight": 0}]}, r"sources.0.weight\n"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PromptOptions(**options)


def test_the_template_may_only_name_columns(tmp_path: Path, plain: Tokenizer) -> None:
    options = PromptOptions(source="jsonl", path=numbered(tmp_path, 1), template="{prompt} {unit}")
    with pytest.raises(PromptError, match=r"'unit'.*'answer'"):
        load_prompts(options, plain, seed=0).train.prompt(0)


def test_a_prompt_is_tokenized_once_where_its_length_is_checked_first(plain: Tokenizer) -> None:
    texts = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(plain, name)

        def __call__(self, text: str, **options: Any) -> Any:
            texts.append(text)
            return plain(text, **options)

    counting: Any = Counting()
    options = PromptOptions(source="jsonl", path="rows.jsonl", max_prompt_tokens=20)
    formatter = PromptFormatter(options, counting)
    too_long = LongPrompts(None)
    prompt = formatter.bounded({"prompt": "2 + 2 = "}, "line 1", too_long)
    assert prompt is not None
    assert prompt.ids.tolist() == plain("2 + 2 = ")["input_ids"]
    assert texts == ["2 + 2 = "]
    assert formatter.bounded({"prompt": "2 + " * 20}, "line 2", too_long) is None
    assert (len(texts), too_long.skipped) == (2, 1)
