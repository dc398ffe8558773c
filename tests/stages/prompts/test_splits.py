"""Which files and rows of a folder are read: the splits that the library ``datasets`` finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.model.load import load_tokenizer
from stages.prompts.rows.checked import prompt_check
from stages.prompts.rows.files import PromptError, Reading
from stages.prompts.rows.options import PromptOptions
from stages.prompts.rows.splits import by_split, data_files
from stages.prompts.sources import load_prompts

SHARDED = ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001")


def write(path: Path, names: list[str]) -> None:
    """Write two rows to ``path``, which say from which file they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": name, "answer": path.stem} for name in names]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def taken(options: PromptOptions) -> list[str]:
    """The prompts that a run would train on, in the order of the files."""
    source = load_prompts(options, load_tokenizer("tiny"), seed=0).train
    assert source.size is not None  # type: ignore[attr-defined]
    return [source.prompt(number).text for number in range(source.size)]  # type: ignore[attr-defined]


def checked(options: PromptOptions) -> tuple[list[str], str, int | None]:
    check = prompt_check(options, Reading())
    return [str(fault) for fault in check.faults()], check.about, check.rows


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("folder", ["", "data/"])
def test_a_folder_of_train_and_test_files_trains_on_train_alone(
    kind: Any, folder: str, tmp_path: Path
) -> None:
    for at, name in enumerate(SHARDED):
        write(tmp_path / f"{folder}{name}.{kind}", [f"{at}a", f"{at}b"])
    options = PromptOptions(source=kind, path=str(tmp_path), shuffle=False)
    assert taken(options) == ["0a", "0b", "1a", "1b"]
    test = options.model_copy(update={"split": "test"})
    assert taken(test) == ["2a", "2b"]
    faults, about, rows = checked(options)
    assert (faults, rows) == ([], 4)
    assert about == (
        f"split 'train': 4 rows of train-00000-of-00002.{kind}, train-00001-of-00002.{kind}; left "
        f"out: split 'test' (1 file)"
    )
    assert checked(test)[1].startswith(
        f"split 'test': 2 rows of test-00000-of-00001.{kind}; left out: split 'train' (2"
    )
    missing = options.model_copy(update={"split": "validation"})
    with pytest.raises(
        PromptError,
        match=r"\"validation\": is not in .*; use one of \['test', "
        r"'train'\]",
    ):
        taken(missing)
    assert '"validation": is not in ' in checked(missing)[0][0]


def test_a_folder_without_a_train_split_lists_those_that_it_has(tmp_path: Path) -> None:
    for name in ("dev.jsonl", "test.jsonl"):
        write(tmp_path / name, ["a"])
    options = PromptOptions(source="jsonl", path=str(tmp_path))
    message = (
        r"prompts\.split: which means 'train', is not in .*; use one of \['test', "
        r"'validation'\]"
    )
    with pytest.raises(PromptError, match=message):
        taken(options)
    assert "use one of ['test', 'validation']" in checked(options)[0][0]


def test_a_file_has_no_splits_and_a_folder_without_names_is_one(tmp_path: Path) -> None:
    write(tmp_path / "test.jsonl", ["a"])
    of_file = PromptOptions(source="jsonl", path=str(tmp_path / "test.jsonl"))
    assert taken(of_file) == ["a"], "it was named"
    with pytest.raises(
        PromptError,
        match=r'prompts\.split = "train": but .* has no splits; drop '
        r"it",
    ):
        taken(of_file.model_copy(update={"split": "train"}))
    for name in (
        "one.jsonl",
        "deep/two.jsonl",
        ".hidden.jsonl",
        "_old/three.jsonl",
        "__cache__/four.jsonl",
        "notes.txt",
    ):
        write(tmp_path / "plain" / name, [name]) if name.endswith("l") else (
            tmp_path / "plain" / name
        ).touch()
    of_folder = PromptOptions(source="jsonl", path=str(tmp_path / "plain"), shuffle=False)
    assert taken(of_folder) == ["deep/two.jsonl", "one.jsonl"]
    assert checked(of_folder)[1] == "2 rows of two.jsonl, one.jsonl"
    (tmp_path / "empty").mkdir()
    with pytest.raises(PromptError, match=r"is a folder without \*\.jsonl"):
        taken(PromptOptions(source="jsonl", path=str(tmp_path / "empty")))


def test_rows_of_several_files_are_named_by_their_file(tmp_path: Path) -> None:
    for at, name in enumerate(SHARDED[:2]):
        write(tmp_path / f"{name}.jsonl", [f"{at}a", "" if at else "0b"])
    options = PromptOptions(source="jsonl", path=str(tmp_path))
    where = f"{SHARDED[1]}.jsonl, line 2 has '' in column 'prompt'"
    with pytest.raises(PromptError) as raised:
        taken(options)
    assert f"{tmp_path}/{where}" in str(raised.value)
    assert where in checked(options)[0][0]


def test_parquet_files_may_differ_in_columns_and_lie_in_folders_of_a_value(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for lang, rows in (
        ("de", [{"prompt": "x", "n": 1}]),
        ("en", [{"prompt": "y", "answer": "b"}, {"prompt": ""}]),
    ):
        (tmp_path / f"lang={lang}").mkdir()
        parquet.write_table(
            pyarrow.Table.from_pylist(rows), tmp_path / f"lang={lang}" / "rows.parquet"
        )
    options = PromptOptions(source="parquet", path=str(tmp_path), shuffle=False)
    with pytest.raises(PromptError, match=r"lang=en/rows\.parquet, row 2 has ''"):
        taken(options)
    parquet.write_table(pyarrow.Table.from_pylist(rows[:1]), tmp_path / "lang=en" / "rows.parquet")
    source = load_prompts(options, load_tokenizer("tiny"), seed=0).train
    assert [source.prompt(at).fields for at in range(2)] == [
        {"n": 1, "answer": None, "lang": "de"},
        {"n": None, "answer": "b", "lang": "en"},
    ]


def test_a_saved_dataset_has_train_by_default(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    splits = {
        name: datasets.Dataset.from_list([{"prompt": name}] * 2) for name in ("train", "test")
    }
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "both"))
    datasets.DatasetDict(test=splits["test"]).save_to_disk(str(tmp_path / "test"))
    both = PromptOptions(source="datasets", path=str(tmp_path / "both"))
    assert taken(both) == ["train", "train"]
    assert checked(both) == ([], "split 'train': 2 rows of train; left out: the splits 'test'", 2)
    assert taken(both.model_copy(update={"split": "test"})) == ["test", "test"]
    only_test = PromptOptions(source="datasets", path=str(tmp_path / "test"))
    with pytest.raises(
        PromptError,
        match=r"which means 'train', is not in .*; use one of "
        r"\['test'\]",
    ):
        taken(only_test)
    assert "use one of ['test']" in checked(only_test)[0][0]


WORDS = [
    "train",
    "training",
    "validation",
    "valid",
    "dev",
    "val",
    "test",
    "testing",
    "eval",
    "evaluation",
]
PIECES = [*WORDS, "Train", "my", "x", "-", "_", ".", " ", "3", "00000-of-00002"]
PART = st.lists(st.sampled_from(PIECES), min_size=1, max_size=4)
NAME = PART.map("".join).filter(
    lambda name: name.strip(". ") and name[0] not in "._ " and name[-1] != " "
)
PATH = st.tuples(st.lists(NAME | st.just("data"), max_size=2), NAME)


@settings(deadline=None, max_examples=150)
@given(st.lists(PATH, min_size=1, max_size=6))
def test_splits_are_those_of_the_library_datasets(
    tmp_path_factory: pytest.TempPathFactory, paths: list[tuple[list[str], str]]
) -> None:
    data = pytest.importorskip("datasets.data_files")
    folder = tmp_path_factory.mktemp("rows")
    for parents, name in paths:
        try:
            folder.joinpath(*parents).mkdir(parents=True, exist_ok=True)
            folder.joinpath(*parents, f"{name}.jsonl").touch()
        except (
            FileExistsError,
            NotADirectoryError,
            IsADirectoryError,
        ):  # a name is a file and a folder
            continue
    try:
        patterns = data.get_data_patterns(str(folder))
        found = data.DataFilesDict.from_local_or_remote(patterns, base_path=str(folder))
    except (data.EmptyDatasetError, ValueError):
        return
    expected = {split: {Path(file) for file in files} for split, files in found.items()}
    files = sorted(path for path in folder.rglob("*.jsonl") if path.is_file())
    assert {split: {*of} for split, of in by_split(folder, files).items()} == expected


def test_a_check_looks_no_further_than_its_budget_allows(tmp_path: Path) -> None:
    for number in range(20):
        write(tmp_path / f"{number}" / "rows.jsonl", ["a"])
    assert data_files(tmp_path, None, ".jsonl", lambda _: False) is None
    check = prompt_check(PromptOptions(source="jsonl", path=str(tmp_path)), Reading(rows=5))
    assert (list(check.faults()), check.rows, check.has_columns) == ([], None, False)
