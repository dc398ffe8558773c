"""What a row had is what reward functions get, from every kind of source, or an error that names
column and type."""

from __future__ import annotations

import json
import math
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tensordict import NonTensorStack, TensorDict

from pipeline.index.client import Index
from stages.model.load import load_tokenizer
from stages.prompts.external import put_prompts
from stages.prompts.formatter import Prompt
from stages.prompts.gate import columns
from stages.prompts.rows.checked import prompt_check
from stages.prompts.rows.files import PromptError, Reading
from stages.prompts.rows.options import PromptOptions
from stages.prompts.rows.values import Changes, plain_row
from stages.prompts.sources import load_prompts
from stages.rewards.stage import RewardSet, score_rows

Point = namedtuple("Point", "x y")


class Level(Enum):
    HARD = "hard"


class Rank(IntEnum):
    FIRST = 1


PLAIN = [
    # Python
    (None, None),
    (True, True),
    (4, 4),
    (2**70, 2**70),
    (-(10**300), -(10**300)),
    (0.1, 0.1),
    ("é", "é"),
    ((1, "a", (True,)), [1, "a", [True]]),
    (Point(1, 2), [1, 2]),
    (range(3), [0, 1, 2]),
    ({3, 1, 2}, [1, 2, 3]),
    (frozenset({"b", "a"}), ["a", "b"]),
    (OrderedDict(a=[1], b={"c": None}), {"a": [1], "b": {"c": None}}),
    (Decimal(4), 4),
    (Decimal("4.5"), 4.5),
    (Decimal("0.1"), 0.1),
    (Decimal("4.00"), 4.0),
    (Decimal("1E+30"), 10**30),
    (Decimal("12345678901234567890.00"), 12345678901234567890),
    (Fraction(1, 4), 0.25),
    (Fraction(8, 2), 4),
    (date(2026, 11, 25), "2026-11-25"),
    (datetime(2026, 11, 25, 8, 30, tzinfo=UTC), "2026-11-25T08:30:00+00:00"),
    (time(8, 30, 0, 5), "08:30:00.000005"),
    (timedelta(days=1, hours=2, minutes=3, seconds=4.5), "P1DT2H3M4.5S"),
    (timedelta(minutes=-90), "-PT1H30M"),
    (UUID(int=5), "00000000-0000-0000-0000-000000000005"),
    (Path("/a/b"), "/a/b"),
    (Level.HARD, "hard"),
    (Rank.FIRST, 1),
    # numpy
    *((kind(4), 4) for kind in (np.int8, np.uint8, np.int16, np.uint32, np.int64, np.intp)),
    (np.uint64(2**64 - 1), 2**64 - 1),
    (np.float16(0.1), 0.0999755859375),
    (np.float32(0.1), 0.10000000149011612),
    (np.float64(0.1), 0.1),
    (np.longdouble(0.5), 0.5),
    (np.bool_(False), False),
    (np.str_("a"), "a"),
    (np.array(4), 4),
    (np.array(False), False),
    (np.array([1, 2]), [1, 2]),
    (np.array([[True], [False]]), [[True], [False]]),
    (np.array([]), []),
    (np.array([0.5], np.float16), [0.5]),
    (np.array(["a", "bc"]), ["a", "bc"]),
    (np.array([1, "a", None, np.int64(3)], object), [1, "a", None, 3]),
    (
        np.array([{"role": "user"}, {"role": np.str_("x")}], object),
        [{"role": "user"}, {"role": "x"}],
    ),
    (np.ma.masked_array([1, 2], [False, True]), [1, None]),
    (np.datetime64("2026-11-25"), "2026-11-25"),
    (np.datetime64("2026-11-25T08"), "2026-11-25T08:00:00"),
    (np.datetime64("2026-11-25T08:30", "ns"), "2026-11-25T08:30:00"),
    (np.datetime64("2026-11-25T08:30:00.5", "ns"), "2026-11-25T08:30:00.500000"),
    (np.datetime64("2026-11-25T08:30:00.000000005"), "2026-11-25T08:30:00.000000005"),
    (np.datetime64("NaT"), None),
    (np.array(["2026-11-25", "NaT"], "datetime64[D]"), ["2026-11-25", None]),
    (np.timedelta64(90, "m"), "PT1H30M"),
    (np.timedelta64(15, "M"), "P15M"),
    # torch
    (torch.tensor(4), 4),
    (torch.tensor(True), True),
    (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
    (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
    (torch.tensor([0.5], requires_grad=True), [0.5]),
    # nested
    ({"a": [np.int64(1), {"b": torch.tensor(2)}, (Decimal(3),)]}, {"a": [1, {"b": 2}, [3]]}),
]


def same(left: Any, right: Any) -> bool:
    """Whether two values are equal with equal types, at every place; NaN is NaN."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right or (isinstance(left, float) and math.isnan(left) and math.isnan(right))


@pytest.mark.parametrize(
    ("value", "expected"), PLAIN, ids=[f"{type(v).__name__} {plain!r}"[:50] for v, plain in PLAIN]
)
def test_a_value_is_kept_as_what_it_stands_for(value: Any, expected: Any) -> None:
    plain = plain_row({"x": value}, "row 1")["x"]
    assert same(plain, expected), plain
    assert same(json.loads(json.dumps(plain)), expected)


def test_numbers_that_are_not_finite_are_kept() -> None:
    for value in (math.nan, np.float32("nan"), torch.tensor(math.nan), Decimal("NaN")):
        assert math.isnan(plain_row({"x": value}, "row 1")["x"])
    for value in (math.inf, np.float16("inf"), torch.tensor(math.inf), Decimal("Infinity")):
        assert plain_row({"x": value}, "row 1")["x"] == math.inf


def test_values_of_pandas_and_pyarrow_are_kept() -> None:
    pandas = pytest.importorskip("pandas")
    pyarrow = pytest.importorskip("pyarrow")
    values = [
        (pandas.NaT, None),
        (pandas.NA, None),
        (pandas.Timestamp("2026-11-25T08:30"), "2026-11-25T08:30:00"),
        (pandas.Timestamp("2026-11-25T08:30:00.000000005"), "2026-11-25T08:30:00.000000005"),
        (pandas.Timedelta(5, "ns"), "PT0.000000005S"),
        (pandas.Series([1, 2]), [1, 2]),
        (pandas.Categorical(["a", "b"]), ["a", "b"]),
        (pandas.array([1, None], dtype="Int64"), [1, None]),
        (pyarrow.scalar(4), 4),
        (pyarrow.scalar(Decimal("1.50")), 1.5),
        (pyarrow.array([[1], None]), [[1], None]),
        (pyarrow.chunked_array([[date(2026, 1, 2)]]), ["2026-01-02"]),
    ]
    for value, expected in values:
        assert same(plain_row({"x": value}, "row 1")["x"], expected), value


REFUSED = [
    (b"ab", "2 bytes (bytes)"),
    (bytearray(3), "3 bytes (bytearray)"),
    (np.bytes_(b"a"), "1 bytes (bytes_)"),
    (1j, "a complex"),
    (np.complex64(1), "a numpy.complex64 of type complex64"),
    (torch.tensor([1j]), "a tensor of type torch.complex64"),
    (torch.tensor([1.0]).to_sparse(), "a tensor that has no list of values"),
    (torch.empty(2, device="meta"), "a tensor that has no list of values"),
    (object(), "an object"),
    (
        Decimal("0.12345678901234567890123"),
        "Decimal('0.12345678901234567890123'), which no float is",
    ),
    (Decimal("1E+100000"), "a Decimal of more than 4,000 digits"),
    (Decimal("sNaN"), "a signalling NaN"),
    (Fraction(1, 3), "Fraction(1, 3), which no float is"),
    (10**5000, "an integer of more than 4,000 digits"),
    ({1: "a"}, "a mapping with the key 1, an int,"),
    ([{"a": {True: 1}}], "a mapping with the key True, a bool,"),
    ({"a\ud800": 1}, "half of a surrogate pair"),
    ("\udfff", "half of a surrogate pair"),
    (np.zeros(1, [("a", "i4")]), "a numpy.void of type"),
    (lambda: 1, "a function"),
    (np.longdouble("0.1"), "which no float is"),
]


@pytest.mark.parametrize(("value", "what"), REFUSED, ids=[what for _, what in REFUSED])
def test_what_cannot_be_kept_is_an_error_that_names_row_column_and_type(
    value: Any, what: str
) -> None:
    for nested in (value, [value], {"deep": (value,)}):
        with pytest.raises(PromptError) as raised:
            plain_row({"prompt": "a", "x": nested}, "rows.parquet, row 7")
        assert "rows.parquet, row 7 has " in str(raised.value)
        assert "in column 'x'" in str(raised.value)
        assert what in str(raised.value)
        assert plain_row({"prompt": "a", "x": nested}, "", ["x"]) == {"prompt": "a"}


def test_images_names_of_columns_and_endless_values_are_refused_too() -> None:
    images = pytest.importorskip("PIL.Image")
    endless: list[Any] = []
    endless.append(endless)
    rows = [
        ({"x": images.new("RGB", (2, 2))}, "has a PIL.Image.Image in column 'x'"),
        ({"x": endless}, "is nested too deeply in column 'x'"),
        ({3: "a"}, "has a column 3, an int; name columns by texts"),
        (["a"], "is a list; a row is a mapping"),
    ]
    for row, message in rows:
        with pytest.raises(PromptError) as raised:
            plain_row(row, "row 1")
        assert message in str(raised.value)


def test_changes_of_kind_are_told_by_column_and_type() -> None:
    changes: Changes = {}
    row = {
        "when": datetime(2026, 1, 1),
        "all": [date(2026, 1, 1), np.datetime64("2026-01-01")],
        "n": np.int64(3),
    }
    plain_row(row | {"tags": {1}, "level": Level.HARD}, "row 1", (), changes)
    assert changes == {
        "when": {"datetime": "an ISO 8601 text"},
        "all": {"date": "an ISO 8601 text", "datetime64[D]": "an ISO 8601 text"},
        "tags": {"set": "a sorted list"},
        "level": {"Level": "its value"},
    }


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(deadline=None)
@given(JSON)
def test_what_json_has_comes_back_as_it_was(value: Any) -> None:
    plain = plain_row({"x": value}, "row 1")["x"]
    assert same(plain, value)
    assert same(json.loads(json.dumps(plain)), value)


NUMBERS = (
    hnp.boolean_dtypes()
    | hnp.integer_dtypes()
    | hnp.unsigned_integer_dtypes()
    | hnp.floating_dtypes(sizes=(16, 32, 64))
)


@settings(deadline=None)
@given(
    NUMBERS.flatmap(
        lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, max_side=3))
    )
)
def test_arrays_of_numpy_and_torch_are_the_lists_of_their_numbers(array: np.ndarray) -> None:
    expected = array.tolist()
    assert same(plain_row({"x": array}, "row 1")["x"], expected)
    one_by_one = [array[place] for place in np.ndindex(array.shape)]
    assert all(same(plain_row({"x": one}, "")["x"], one.item()) for one in one_by_one)
    tensor = torch.from_numpy(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="))))
    assert same(plain_row({"x": tensor.reshape(array.shape)}, "row 1")["x"], expected)


@settings(deadline=None)
@given(st.decimals(allow_nan=False, allow_infinity=False, places=3) | st.fractions())
def test_an_exact_number_is_kept_exactly_or_refused(value: Decimal | Fraction) -> None:
    try:
        plain = plain_row({"x": value}, "row 1")["x"]
    except PromptError:
        nearest = float(value)
        assert value != int(value)
        assert (
            Decimal(repr(nearest)) if isinstance(value, Decimal) else Fraction(nearest)
        ) != value
    else:
        assert type(value)(repr(plain)) == value


# ── every door ──

ROW = {
    "answer": np.int64(4),
    "right": np.False_,
    "parts": np.array([1.5, 2.0]),
    "when": datetime(2026, 1, 2, 3),
}
GETS = {"answer": 4, "right": False, "parts": [1.5, 2.0], "when": "2026-01-02T03:00:00"}


def odd_rows() -> list[dict[str, Any]]:
    return [{"prompt": f"say {number}", **ROW} for number in range(4)]


def tensor_rows() -> list[dict[str, Any]]:
    return [
        row | {"answer": torch.tensor(4), "parts": torch.tensor([1.5, 2.0])} for row in odd_rows()
    ]


def with_pictures() -> list[dict[str, Any]]:
    return [row | {"parts": row["parts"].tolist(), "picture": b"png"} for row in odd_rows()]


def _parquet(folder: Path) -> PromptOptions:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(with_pictures()), folder / "rows.parquet")
    return PromptOptions(source="parquet", path=str(folder / "rows.parquet"), leave_out=["picture"])


def _saved(folder: Path) -> PromptOptions:
    pytest.importorskip("datasets").Dataset.from_list(with_pictures()).save_to_disk(
        str(folder / "saved")
    )
    return PromptOptions(source="datasets", path=str(folder / "saved"), leave_out=["picture"])


def _lines(folder: Path) -> PromptOptions:
    rows = [{"prompt": row["prompt"], **GETS} for row in odd_rows()]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PromptOptions(source="jsonl", path=str(folder / "rows.jsonl"))


def frame() -> Any:
    return pytest.importorskip("pandas").DataFrame(
        [row | {"parts": list(row["parts"])} for row in odd_rows()]
    )


def arrow() -> Any:
    return pytest.importorskip("pyarrow").Table.from_pylist(with_pictures())


SOURCES: dict[str, Callable[[Path], PromptOptions]] = {
    "json lines": _lines,
    "parquet": _parquet,
    "datasets": _saved,
    "a function with numpy": lambda _: PromptOptions(
        source="datasets", path=f"{__name__}:odd_rows"
    ),
    "a function with torch": lambda _: PromptOptions(
        source="datasets", path=f"{__name__}:tensor_rows"
    ),
    "a frame of pandas": lambda _: PromptOptions(source="datasets", path=f"{__name__}:frame"),
    "a table of pyarrow": lambda _: PromptOptions(
        source="datasets", path=f"{__name__}:arrow", leave_out=["picture"]
    ),
}
SEEN: list[dict[str, Any]] = []


def watching(
    completions: list[str], answer: Any, right: Any, parts: Any, when: Any, **_: Any
) -> list[float]:
    SEEN.extend(
        {"answer": answer[i], "right": right[i], "parts": parts[i], "when": when[i]}
        for i in range(len(answer))
    )
    return [0.0] * len(completions)


def as_samples(prompts: list[Prompt]) -> TensorDict:
    """The columns that reward functions read of ``prompts``, as the gate admits them."""
    rows = TensorDict({}, batch_size=[len(prompts)])
    made = columns(prompts)
    rows["given"], rows["fields"] = (NonTensorStack(*made[name]) for name in ("given", "fields"))  # type: ignore[misc]
    rows["response_ids"] = torch.nested.nested_tensor(
        [torch.tensor([5])] * len(prompts), layout=torch.jagged
    )
    return rows


@pytest.mark.parametrize("kind", SOURCES)
async def test_reward_functions_get_the_same_values_from_every_source(
    kind: str, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer("tiny")
    options = SOURCES[kind](tmp_path)
    assert not list(prompt_check(options, Reading()).faults())
    if options.leave_out and options.source != "datasets":
        [fault, *_] = prompt_check(options.model_copy(update={"leave_out": []}), Reading()).faults()
        assert "row 1 has 3 bytes (bytes) in column 'picture'" in str(fault)
    source = load_prompts(options, tokenizer, seed=0).train
    prompts = [source.prompt(number) for number in range(4)]
    SEEN.clear()
    await score_rows(RewardSet([(f"{__name__}:watching", 1.0)]), tokenizer, as_samples(prompts))
    assert len(SEEN) == 4
    assert all(same(seen, GETS) for seen in SEEN), SEEN


async def test_prompts_that_other_programs_put_are_kept_by_the_same_rules(index: Index) -> None:
    await index.load()
    assert await put_prompts(index, odd_rows(), column="prompt") == 4
    texts = (await index.read_prompts(0, 10)).prompts
    assert all(
        same(json.loads(text), {"prompt": f"say {at}", **GETS}) for at, text in enumerate(texts)
    )
    for value, message in (
        (b"a", "1 bytes"),
        (math.nan, "a number in column 'x' that is not finite"),
    ):
        with pytest.raises(PromptError, match=f"prompt 1 has {message}"):
            await put_prompts(
                index, [{"prompt": "a"}, {"prompt": "b", "x": value}], column="prompt"
            )


def images() -> list[dict[str, Any]]:
    return [{"prompt": f"say {number}", "picture": b"\x89PNG"} for number in range(3)]


def test_a_column_that_cannot_be_kept_ends_the_start_or_is_left_out() -> None:
    options = PromptOptions(source="datasets", path=f"{__name__}:images")
    with pytest.raises(
        PromptError,
        match=r"row 1 has 4 bytes \(bytes\) in column 'picture'; "
        r".*prompts\.leave_out",
    ):
        load_prompts(options, load_tokenizer("tiny"), seed=0)
    sound = load_prompts(
        options.model_copy(update={"leave_out": ["picture"]}), load_tokenizer("tiny"), seed=0
    )
    assert sound.train.prompt(0).fields == {}
