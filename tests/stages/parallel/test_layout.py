"""Layouts: coordinates and neighbours of ranks, held against the process groups that torch makes
from them."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import get_args

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from stages.engines.torch.parallel.mesh import Meshes
from stages.parallel.layout import ALONE, Axis, Layout, LayoutError, parse_layout
from stages.parallel.options import Strategies

AXES: tuple[Axis, ...] = get_args(Axis)
SIZES = st.sampled_from([1, 2, 3])
PRODUCTS = [
    {"dp": 2},
    {"dp": 4, "dp_replicate": 2, "tp": 2},
    {"dp": 2, "tp": 2, "pp": 2},
    {"dp": 2, "cp": 2, "tp": 2},
    {"dp": 2, "dp_replicate": 2, "cp": 2},
    {"dp": 4, "ep": 2},
    {"dp": 4, "dp_replicate": 2, "tp": 2, "ep": 4},
    {"dp": 2, "cp": 2, "pp": 2, "ep": 4},
]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    copies, shards, cp, tp, pp = (draw(SIZES) for _ in range(5))
    among = (shards * cp if shards * cp > 1 else copies) * tp
    ep = draw(st.sampled_from([size for size in range(1, among + 1) if among % size == 0]))
    return Layout.for_training(dp=copies * shards, dp_replicate=copies, cp=cp, tp=tp, pp=pp, ep=ep)


def test_a_layout_is_read_without_torch() -> None:
    """Checks, placement on a cluster and the command line ask it before any engine is loaded."""
    program = "import sys, stages.parallel.layout, stages.parallel.options; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert not {"torch", "torch.distributed", "transformers", "psutil", "numpy"} & set(
        loaded.split()
    )


@given(layouts())
def test_each_rank_is_in_one_group_of_each_axis(layout: Layout) -> None:
    sizes = {
        "dp": layout.replicas,
        "cp": layout.cp,
        "tp": layout.tp,
        "ep": layout.ep,
        "pp": layout.pp,
    }
    for axis in AXES:
        groups = {layout.group(axis, rank) for rank in range(layout.world)}
        assert all(layout.group(axis, rank) == group for group in groups for rank in group)
        assert Counter(rank for group in groups for rank in group) == Counter(range(layout.world))
        assert {len(group) for group in groups} == {sizes[axis]}


@given(layouts(), st.data())
def test_neighbours_differ_along_their_axis_alone(layout: Layout, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, layout.world - 1))
    own = layout.coordinates(rank)
    for axis, attribute in {"dp": "replica", "tp": "tp", "pp": "stage", "ep": "ep"}.items():
        group = [layout.coordinates(each) for each in layout.group(axis, rank)]  # type: ignore[arg-type]
        assert [getattr(each, attribute) for each in group] == list(range(len(group)))
    assert {layout.coordinates(each).replica for each in layout.group("tp", rank)} == {own.replica}
    assert {layout.coordinates(each).replica for each in layout.group("cp", rank)} == {own.replica}


@contextmanager
def rank_alone(rank: int, world: int) -> Iterator[None]:
    """This process as one rank of a group whose other ranks do not exist, and whose calls do
    nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "sizes", PRODUCTS, ids=lambda sizes: "-".join(f"{k}{v}" for k, v in sizes.items())
)
def test_process_groups_are_those_that_the_layout_names(sizes: dict[str, int]) -> None:
    layout = Layout.for_training(**sizes)
    for rank in range(layout.world):
        with rank_alone(rank, layout.world):
            meshes = Meshes(layout, "cpu", lambda group: None)
            groups = {
                "dp": meshes.replicas.get_group(),
                "pp": meshes.pipes[0] if meshes.pipes else None,
            }
            for axis, mesh in {"cp": meshes.cp, "tp": meshes.tp, "ep": meshes.ep}.items():
                groups[axis] = None if mesh is None else mesh.get_group()
            for axis in AXES:
                group = groups[axis]
                members = (rank,) if group is None else tuple(dist.get_process_group_ranks(group))
                assert members == layout.group(axis, rank), f"{axis} of rank {rank}"
            assert meshes.layers.size() == layout.dp_replicate * layout.fsdp
            assert meshes.experts.size() == layout.expert_copies * layout.expert_shard


def test_a_recipes_section_is_a_layout() -> None:
    section = Strategies(dp=4, dp_replicate=2, tp=2, cp=2, ep=2, context_parallel="ring")
    layout = section.layout
    assert layout == Layout(
        dp_replicate=2, dp_shard=2, tp=2, ep=2, etp=1, cp=2, context_parallel="ring"
    )
    assert (layout.world, layout.replicas, layout.fsdp) == (section.ranks, section.replicas, 4)
    assert Strategies(**layout.recipe_keys) == section
    assert str(layout) == "dp_replicate=2,dp_shard=2,cp=2,tp=2,ep=2,context_parallel=ring"
    assert parse_layout("dp=2,cp=2", "train") == Layout(dp_shard=2, cp=2)


def test_ranks_outside_a_layout_and_copies_that_do_not_divide_are_refused() -> None:
    with pytest.raises(LayoutError, match="rank: 4 of 4; ranks are counted from 0"):
        Layout(dp_shard=2, tp=2).coordinates(4)
    with pytest.raises(
        LayoutError, match="dp_replicate: 3 does not divide dp = 4; use a divisor of it"
    ):
        Layout.for_training(dp=4, dp_replicate=3)
    assert (ALONE.world, ALONE.virtual_stages) == (1, [0])
