"""What writers and readers of samples rely on: bits come back, nothing is cast, a refusal names its
column."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from pipeline.data.arena import StaleHandle
from pipeline.data.blocks import BlockReader, pack
from pipeline.data.columns import (
    DTYPES,
    MAX_COLUMNS,
    Column,
    ColumnError,
    Packed,
    Schema,
    in_order,
)
from tests.pipeline.block_view import BlockView

SCHEMA = Schema(
    [
        Column.ragged("ids", torch.int64),
        Column.scalar("reward", torch.float32),
        Column.fixed("scores", torch.float32, [2, 3]),
        Column.text("answer"),
    ]
)


def write(schema: Schema, rows: Any, block_id: int = 1) -> BlockView:
    packed = pack(schema, rows)
    buffer = bytearray(b"\xa5" * packed.nbytes)
    packed.write_into(memoryview(buffer), block_id)
    return BlockView(schema, memoryview(buffer), block_id)


class Shelf:
    """An arena that writes go into one after the other.

    ``take`` reads rows, given as (write, slot), in the order asked.
    """

    def __init__(self, schema: Schema, nbytes: int = 1 << 18) -> None:
        self.schema = schema
        self.memory = memoryview(bytearray(b"\xa5" * nbytes))
        self.end = 0

    def write(self, rows: Any) -> tuple[int, int]:
        packed = pack(self.schema, rows)
        place = self.end
        self.end += packed.nbytes
        packed.write_into(self.memory[place : self.end], place + 1)
        return place, place + 1

    def take(self, names: list[str], asked: list[tuple[tuple[int, int], int]]) -> dict[str, Packed]:
        places, blocks, slots = (
            np.array(numbers) for numbers in zip(*((*at, slot) for at, slot in asked), strict=True)
        )
        return BlockReader(self.memory, self.schema).read(blocks, places, slots, names)

    def holds(self, tensor: torch.Tensor) -> bool:
        base = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
        return base <= tensor.data_ptr() < base + len(self.memory)


def whole(schema: Schema, view: BlockView, name: str) -> Any:
    """A block's column: dense, or the list of its rows."""
    packed = view.column(name)
    return (
        packed.values.view(view.rows, *schema[name].shape)
        if packed.offsets is None
        else packed.jagged().unbind()
    )


def bits(tensor: torch.Tensor) -> bytes:
    return (
        tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    )


def values(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Every bit pattern may occur, NaNs with payloads included."""
    count = math.prod(shape) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(
        0, 2 if dtype == torch.bool else 256, count, dtype=np.uint8
    )
    return (
        torch.frombuffer(bytearray(raw), dtype=dtype).view(shape)
        if count
        else torch.empty(shape, dtype=dtype)
    )


# ── what is written comes back ──


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    schema = Schema(
        [
            Column.scalar("scalar", dtype),
            Column.fixed("fixed", dtype, [3, 2]),
            Column.ragged("ragged", dtype),
        ]
    )
    ragged = [values(dtype, n, seed=n) for n in (3, 0, 1, 7)]
    rows = {"scalar": values(dtype, 4), "fixed": values(dtype, 4, 3, 2), "ragged": ragged}
    view = write(schema, rows)
    for name in ("scalar", "fixed"):
        assert whole(schema, view, name).dtype == dtype
        assert whole(schema, view, name).shape == rows[name].shape
        assert bits(whole(schema, view, name)) == bits(rows[name])
    assert [bits(row) for row in whole(schema, view, "ragged")] == [bits(row) for row in ragged]


ragged_rows = st.lists(
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5), min_size=1, max_size=6
)


@settings(max_examples=60, deadline=None)
@given(ids=ragged_rows, data=st.data())
def test_any_rows_come_back_in_any_order_asked(ids: list[list[int]], data: st.DataObject) -> None:
    """One write may be read row by row, mixed with rows of another write, in any order, with
    repeats."""
    count = len(ids)
    rewards = data.draw(st.lists(st.floats(width=32), min_size=count, max_size=count))
    texts = data.draw(
        st.lists(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
            min_size=count,
            max_size=count,
        )
    )
    rows = {
        "ids": [torch.tensor(row, dtype=torch.int64) for row in ids],
        "reward": torch.tensor(rewards, dtype=torch.float32),
        "scores": values(torch.float32, count, 2, 3),
        "answer": texts,
    }
    shelf = Shelf(SCHEMA)
    first = shelf.write(rows)
    second = shelf.write(dict(reversed(rows.items())))
    asked = data.draw(
        st.lists(st.tuples(st.sampled_from([first, second]), st.integers(0, count - 1)), min_size=1)
    )
    out = shelf.take(["answer", "scores", "ids", "reward"], asked)
    order = [slot for _, slot in asked]
    assert [row.tolist() for row in out["ids"].jagged().unbind()] == [ids[slot] for slot in order]
    assert out["ids"].lengths().tolist() == [len(ids[slot]) for slot in order]
    assert bits(out["reward"].values) == bits(rows["reward"][order])
    assert bits(out["scores"].values) == bits(rows["scores"][order])
    assert out["answer"].texts() == [texts[slot] for slot in order]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_and_short_rows_come_together_bit_for_bit(dtype: torch.dtype) -> None:
    """Long rows are copied as they are, short ones gathered by element; columns of a write may be
    fewer than another's."""
    schema = Schema(
        [
            Column.scalar("first", torch.int8),
            Column.ragged("row", dtype),
            Column.fixed("fixed", dtype, [3]),
        ]
    )
    for longest in (40, 4000):
        shelf = Shelf(schema, 1 << 20)
        rows = []
        asked = []
        for i in range(12):
            rows.append(values(dtype, longest * (i % 3), seed=i))
            given = {"row": [values(dtype, 5), rows[-1]], "fixed": values(dtype, 2, 3, seed=i)}
            asked.append(
                (
                    shelf.write(
                        {"first": torch.zeros(2, dtype=torch.int8), **given} if i % 2 else given
                    ),
                    1,
                )
            )
        out = shelf.take(["row", "fixed"], asked[::-1])
        assert bits(out["row"].values) == b"".join(bits(row) for row in rows[::-1])
        assert out["row"].lengths().tolist() == [len(row) for row in rows[::-1]]
        assert bits(out["fixed"].values) == b"".join(
            bits(values(dtype, 2, 3, seed=i)[1]) for i in reversed(range(12))
        )


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_rows_from_several_places_come_in_the_order_asked(lengths: list[int], random: Any) -> None:
    rows = [torch.arange(n) + 10 * i for i, n in enumerate(lengths)]
    home = [random.randint(0, 2) for _ in rows]
    ragged = []
    dense = []
    for place in set(home):
        at = np.array([i for i, h in enumerate(home) if h == place])
        offsets = torch.tensor([0, *(len(rows[i]) for i in at)]).cumsum(0)
        ragged.append((at, Packed(torch.cat([rows[i] for i in at]), offsets)))
        dense.append((at, Packed(torch.tensor([[i, -i] for i in at]).view(-1), None)))
    out = in_order(ragged, len(rows))
    assert [row.tolist() for row in out.jagged().unbind()] == [row.tolist() for row in rows]
    assert in_order(dense, len(rows)).values.tolist() == [
        v for i in range(len(rows)) for v in (i, -i)
    ]


def test_ragged_rows_can_be_had_packed_padded_and_jagged() -> None:
    shelf = Shelf(SCHEMA)
    at = shelf.write(
        {"ids": [torch.tensor([1, 2, 3]), torch.tensor([], dtype=torch.int64), torch.tensor([4])]}
    )
    ids = shelf.take(["ids"], [(at, slot) for slot in range(3)])["ids"]
    assert (ids.values.tolist(), ids.offsets.tolist()) == ([1, 2, 3, 4], [0, 3, 3, 4])  # type: ignore[union-attr]
    assert ids.padded(-1).tolist() == [[1, 2, 3], [-1, -1, -1], [4, -1, -1]]
    assert [row.tolist() for row in ids.jagged().unbind()] == [[1, 2, 3], [], [4]]


@pytest.mark.parametrize(
    "as_given", ["jagged", "list", "packed", "slice of a jagged", "TensorDict"]
)
def test_ragged_columns_are_taken_in_each_form(as_given: str) -> None:
    parts = [torch.tensor([1, 2, 3]), torch.tensor([], dtype=torch.int64), torch.tensor([4])]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    # a window into longer rows: offsets do not tell where rows end
    if as_given == "slice of a jagged":
        wide = torch.tensor([[0, 1, 2, 3], [0, 0, 0, 0], [0, 4, 0, 0]])
        jagged = torch.nested.narrow(
            wide, 1, torch.tensor([1, 0, 1]), torch.tensor([3, 0, 1]), layout=torch.jagged
        )
    rows: Any = {"ids": parts if as_given == "list" else jagged}
    if as_given == "packed":
        rows = {"ids": Packed(torch.tensor([1, 2, 3, 4]), torch.tensor([0, 3, 3, 4]))}
    if as_given == "TensorDict":
        rows = TensorDict(rows, batch_size=[3])
    assert [row.tolist() for row in whole(SCHEMA, write(SCHEMA, rows), "ids")] == [
        [1, 2, 3],
        [],
        [4],
    ]


def test_what_a_reader_got_can_be_written_again() -> None:
    """A stage may pass on, as it is, what it was given."""
    shelf = Shelf(SCHEMA)
    at = shelf.write(
        {"ids": [torch.tensor([1]), torch.tensor([2, 3])], "reward": torch.tensor([1.0, 2.0])}
    )
    read = shelf.take(["ids", "reward"], [(at, 1), (at, 0)])
    again = shelf.write({"ids": read["ids"].jagged(), "reward": read["reward"].values})
    out = shelf.take(["ids", "reward"], [(again, 1), (again, 0)])
    assert [row.tolist() for row in out["ids"].jagged().unbind()] == [[1], [2, 3]]
    assert out["reward"].values.tolist() == [1.0, 2.0]


def test_strided_values_and_values_with_gradients_are_written_as_they_read() -> None:
    wide = torch.arange(12, dtype=torch.float32).view(3, 4)
    reward = torch.ones(3, requires_grad=True)
    view = write(SCHEMA, {"ids": [torch.arange(10)[::3]] * 3, "reward": reward * wide[:, 1]})
    assert whole(SCHEMA, view, "reward").tolist() == [1.0, 5.0, 9.0]
    assert whole(SCHEMA, view, "ids")[0].tolist() == [0, 3, 6, 9]


def test_rows_without_any_element_are_rows() -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    shelf = Shelf(SCHEMA)
    at = shelf.write({"ids": [nothing, nothing], "answer": ["", ""]})
    for order in ((0, 1), (1, 0)):
        out = shelf.take(["ids", "answer"], [(at, slot) for slot in order])
        assert [row.tolist() for row in out["ids"].jagged().unbind()] == [[], []]
        assert out["answer"].texts() == ["", ""]
        assert out["ids"].padded().shape == (2, 0)


def test_neighbouring_rows_are_views_and_scattered_rows_are_copies() -> None:
    shelf = Shelf(SCHEMA)
    at = shelf.write({"ids": [torch.arange(n) for n in (2, 3, 4)], "reward": torch.arange(3.0)})
    side_by_side = shelf.take(["ids", "reward"], [(at, 1), (at, 2)])
    assert shelf.holds(side_by_side["ids"].values)
    assert shelf.holds(side_by_side["reward"].values)
    assert [row.tolist() for row in side_by_side["ids"].jagged().unbind()] == [
        [0, 1, 2],
        [0, 1, 2, 3],
    ]
    scattered = shelf.take(["ids", "reward"], [(at, 2), (at, 1)])
    assert not shelf.holds(scattered["ids"].values)
    assert not shelf.holds(scattered["reward"].values)


def test_packing_pads_nothing() -> None:
    """What a thousand ragged rows need: their own bytes and one offset each, whatever the longest
    row is."""
    rows = [torch.zeros(n, dtype=torch.int64) for n in [4096, *[1] * 999]]
    assert pack(SCHEMA, {"ids": rows}).nbytes <= 8 * (4096 + 999) + 8 * 1001 + 3 * 64


# ── a block that is not there any more ──


def test_a_handle_to_reused_bytes_is_an_error() -> None:
    packed = pack(SCHEMA, {"reward": torch.zeros(4)})
    memory = memoryview(bytearray(packed.nbytes))
    packed.write_into(memory, 7)

    def read(memory: memoryview, block: int) -> dict[str, Packed]:
        reader = BlockReader(memory, SCHEMA)
        return reader.read(np.array([block]), np.array([0]), np.array([1]), ["reward"])

    assert read(memory, 7)["reward"].values.tolist() == [0.0]
    packed.write_into(memory, 8)  # released, and written by another owner
    with pytest.raises(StaleHandle, match="block 7 was released"):
        read(memory, 7)
    with pytest.raises(StaleHandle, match="block 9 was released"):
        read(memoryview(bytearray(packed.nbytes)), 9)


def test_a_column_that_a_row_does_not_have_is_an_error() -> None:
    shelf = Shelf(SCHEMA)
    without = shelf.write({"reward": torch.zeros(2)})
    having = shelf.write({"answer": ["a", "b"]})
    with pytest.raises(ColumnError, match="'answer': row 0 of this claim does not have it yet"):
        shelf.take(["answer"], [(without, 0)])
    with pytest.raises(ColumnError, match="'answer': row 1 of this claim does not have it yet"):
        shelf.take(["answer"], [(having, 0), (without, 1)])
    with pytest.raises(StaleHandle, match="block 999 was released"):
        shelf.take(["answer"], [(having, 0), ((having[0], 999), 1)])


def test_values_that_are_not_finite_are_refused_in_finite_columns() -> None:
    schema = Schema(
        [
            Column.scalar("reward", torch.float32, finite=True),
            Column.ragged("kl", torch.float64, finite=True),
        ]
    )
    with pytest.raises(
        ColumnError, match="column 'reward': row 1 holds nan; NaN and infinities are refused"
    ):
        pack(schema, {"reward": torch.tensor([1.0, math.nan])})
    rows = [
        torch.tensor([], dtype=torch.float64),
        torch.tensor([0.0, math.inf], dtype=torch.float64),
    ]
    with pytest.raises(ColumnError, match="column 'kl': row 1 holds inf"):
        pack(schema, {"kl": rows})
    assert pack(schema, {"kl": rows[:1], "reward": torch.ones(1)}).rows == 1


# ── what is refused ──

IDS = [torch.tensor([1, 2]), torch.tensor([3])]
REFUSED = {
    "another float": (
        "reward",
        torch.zeros(2, dtype=torch.float64),
        r"float32 \[\], got a tensor of "
        r"float64.*\.to\(",
    ),
    "an integer for a float": (
        "reward",
        torch.zeros(2, dtype=torch.int64),
        "got a tensor of int64",
    ),
    "a bool for a float": ("reward", torch.zeros(2, dtype=torch.bool), "got a tensor of bool"),
    "a list for a tensor": ("reward", [0.5, 1.0], "got list .* make it a tensor"),
    "an array for a tensor": ("reward", np.zeros(2, np.float32), "got ndarray .* make it a tensor"),
    "one number": ("reward", 0.5, "needs one value for each row, got float 0.5"),
    "no dimension": (
        "reward",
        torch.tensor(0.5),
        r"needs one value for each row, got a tensor of "
        r"float32 \[\]",
    ),
    "no rows": (
        "reward",
        torch.zeros(0),
        r"needs one value for each row, got a tensor of float32 "
        r"\[0\]",
    ),
    "too many dimensions": (
        "reward",
        torch.zeros(2, 1),
        r"takes shape \[2\], got a tensor of float32 \[2, "
        r"1\]",
    ),
    "another shape": (
        "scores",
        torch.zeros(2, 3, 2),
        r"takes shape \[2, 2, 3\], got .* \[2, 3, 2\]; "
        r"reshape",
    ),
    "ragged for fixed": (
        "scores",
        torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged),
        "takes shape",
    ),
    "dense for ragged": (
        "ids",
        torch.zeros(2, 3, dtype=torch.int64),
        "is ragged; give a jagged nested tensor or a list",
    ),
    "another ragged dtype": (
        "ids",
        [torch.tensor([1]), torch.tensor([1], dtype=torch.int32)],
        "got a tensor of int32",
    ),
    "another jagged dtype": (
        "ids",
        torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged),
        "of float32 jagged",
    ),
    "a strided nested tensor": (
        "ids",
        torch.nested.nested_tensor(IDS),
        "give a jagged .*, got .* strided",
    ),
    "rows of two dimensions": (
        "ids",
        [torch.zeros(2, 2, dtype=torch.int64)],
        "ragged rows have one dimension",
    ),
    "a jagged of two dimensions": (
        "ids",
        torch.nested.nested_tensor([torch.zeros(2, 2, dtype=torch.int64)], layout=torch.jagged),
        "ragged rows have one dimension",
    ),
    "packed of another dtype": (
        "ids",
        Packed(torch.zeros(2), torch.tensor([0, 2])),
        "got a tensor of float32",
    ),
    "packed without offsets": (
        "ids",
        Packed(torch.tensor([1, 2]), None),
        "needs one value for each row",
    ),
    "packed that ends early": (
        "ids",
        Packed(torch.tensor([1, 2, 3]), torch.tensor([0, 2])),
        "rise from 0 to their",
    ),
    "packed with falling offsets": (
        "ids",
        Packed(torch.tensor([1, 2]), torch.tensor([0, 3, 2])),
        "rise from 0 to",
    ),
    "rows of numbers": ("ids", [[1, 2], [3]], r"got list \[1, 2\]; make it a tensor"),
    "a row that is a number": ("ids", [torch.tensor(1)], "ragged rows have one dimension"),
    "one string": ("answer", "ab", "takes one string for each row, got str 'ab'"),
    "bytes for text": ("answer", [b"a", b"b"], "takes strings, got"),
    "a tensor for text": ("answer", torch.zeros(2), "takes strings, got a tensor"),
    "half a character": ("answer", ["a", "\ud800"], "row 1 is not a text that UTF-8 can hold"),
    "no value": ("answer", None, "needs one value for each row, got NoneType None"),
}


@pytest.mark.parametrize(("name", "value", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_refusal_names_column_value_and_fix(name: str, value: Any, message: str) -> None:
    with pytest.raises(ColumnError, match=f"column '{name}'.*{message}"):
        pack(SCHEMA, {name: value})


def test_rows_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(
        ColumnError,
        match=r"column 'reward': has 3 rows where 'ids' has 2; give "
        r"all the same rows",
    ):
        pack(SCHEMA, {"ids": IDS, "reward": torch.zeros(3)})
    with pytest.raises(
        ColumnError,
        match=r"column 'rewards': is not in the schema; it has "
        r"\['ids', 'reward'",
    ):
        pack(SCHEMA, {"rewards": torch.zeros(2)})
    with pytest.raises(ColumnError, match="no column given"):
        pack(SCHEMA, {})


def test_schemas_that_cannot_be_are_refused() -> None:
    with pytest.raises(ColumnError, match=r"column \['ids'\] is declared twice"):
        Schema([Column.ragged("ids", torch.int64), Column.scalar("ids", torch.int64)])
    with pytest.raises(ColumnError, match=r"column 'z': dtype torch\.complex64 cannot be stored"):
        Column.scalar("z", torch.complex64)
    with pytest.raises(ColumnError, match=r"column 't': text has no shape; use Column\.text"):
        Column("t", "utf8", (2,))
    columns = [Column.scalar(f"c{i}", torch.int8) for i in range(MAX_COLUMNS + 1)]
    with pytest.raises(
        ColumnError, match=f"schema: {MAX_COLUMNS + 1} columns, at most {MAX_COLUMNS} fit"
    ):
        Schema(columns)
    largest = Schema(columns[:MAX_COLUMNS])
    every = [column.name for column in largest.columns]
    assert largest.names(largest.mask(every)) == every


def test_a_jagged_column_is_packed_on_its_own_memory() -> None:
    values = torch.arange(6)
    column = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 2, 6]))
    packed = Packed.of(column)
    assert packed.values.data_ptr() == values.data_ptr()
    assert packed.lists() == [[0, 1], [], [2, 3, 4, 5]]
    assert packed.sums().tolist() == [1, 0, 14]
    assert packed.indexes([2, 0]).tolist() == [2, 3, 4, 5, 0, 1]
    assert packed.select(np.array([2, 0]), 3).lists() == [[2, 3, 4, 5], [0, 1]]
    packed.rows()[2][0] = 7
    assert values[2] == 7, "rows are views"


def test_values_after_the_last_row_of_a_jagged_column_are_left_out() -> None:
    values = torch.arange(6)
    column = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 1, 3]))
    packed = Packed.of(column)
    assert packed.values.data_ptr() == values.data_ptr()
    assert packed.lists() == [[0], [1, 2]]
    view = write(SCHEMA, {"ids": column})
    assert [view.row("ids", slot).tolist() for slot in range(2)] == [[0], [1, 2]]


@pytest.mark.parametrize("kind", ["gaps", "dense", "strided"])
def test_rows_that_do_not_lie_one_after_the_other_are_packed_by_a_copy(kind: str) -> None:
    rows = [torch.tensor([1, 2]), torch.tensor([4, 5])]
    column = torch.stack(rows)
    if kind == "gaps":
        column = torch.nested.nested_tensor_from_jagged(
            torch.arange(6), torch.tensor([1, 4, 6]), lengths=torch.tensor([2, 2])
        )
    elif kind == "strided":
        column = torch.nested.nested_tensor(rows)
    assert Packed.of(column).lists() == [[1, 2], [4, 5]]


def test_a_mask_is_summed_row_by_row() -> None:
    mask = Packed(torch.tensor([True, False, True, True]), torch.tensor([0, 0, 3, 4, 4]))
    assert mask.sums().tolist() == [0, 2, 1, 0]
