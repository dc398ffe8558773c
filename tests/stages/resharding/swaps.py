"""What the ranks of the swap tests do, each in a process of its own."""

from __future__ import annotations

import errno
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

from stages.parallel.layout import Layout
from stages.parallel.placement import ModelState, Names, Placement, model_state, place
from stages.resharding.exchange import GroupExchange, SharedExchange
from stages.resharding.plan import Phase, PhaseMemory, ReshardPlan, memory, plan_reshard
from stages.resharding.swap import State, Swap, SwapError
from stages.resharding.tensors import live_bytes, local_weights, training_state
from tests.stages.resharding.models import SMALL, fused_config, moe_config

CPU = torch.device("cpu")
BUCKET = 3000  # small, so that every case takes many rounds

DENSE = model_state(Qwen3Config(**SMALL, head_dim=8))
TIED = model_state(
    LlamaConfig(**{**SMALL, "vocab_size": 51, "intermediate_size": 23}, tie_word_embeddings=True)
)
THREE_HEADS = model_state(
    LlamaConfig(
        **{
            **SMALL,
            "hidden_size": 36,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 53,
        }
    )
)
FUSED = model_state(fused_config(intermediate_size=23))
MOE = model_state(moe_config())
FIVE_EXPERTS = model_state(moe_config(num_experts=5, moe_intermediate_size=7, num_hidden_layers=3))


@dataclass(frozen=True)
class Case:
    name: str
    state: ModelState = field(repr=False)
    train: Layout
    rollout: Layout
    rollout_names: Names = "vllm"
    dtype: torch.dtype | None = None

    def plan(self) -> ReshardPlan:
        target = place(self.state, self.rollout, names=self.rollout_names, dtype=self.dtype)
        return plan_reshard(place(self.state, self.train), target, bucket_bytes=BUCKET)


CASES = {
    2: [
        Case("FSDP2 to DP2", DENSE, Layout(dp_shard=2), Layout(dp_replicate=2)),
        Case("TP2 to DP2, nine heads on three", THREE_HEADS, Layout(tp=2), Layout(dp_replicate=2)),
        Case("PP2 to TP2, tied", TIED, Layout(pp=2), Layout(tp=2)),
        Case("the same to the same", DENSE, Layout(tp=2), Layout(tp=2), "hf"),
        Case("FSDP2 to TP2, fused at the source", FUSED, Layout(dp_shard=2), Layout(tp=2)),
    ],
    4: [
        Case("TP2·DP2 to TP1·DP4", DENSE, Layout(dp_replicate=2, tp=2), Layout(dp_replicate=4)),
        Case("TP4 to TP2·DP2", DENSE, Layout(tp=4), Layout(dp_replicate=2, tp=2)),
        Case("FSDP4 to TP2", TIED, Layout(dp_shard=4), Layout(dp_replicate=2, tp=2)),
        Case(
            "FSDP4 to TP2, in bfloat16",
            TIED,
            Layout(dp_shard=4),
            Layout(dp_replicate=2, tp=2),
            dtype=torch.bfloat16,
        ),
        Case(
            "Fig. 3: EP2·TP2·DP2 to EP4·DP4",
            MOE,
            Layout(dp_replicate=2, tp=2, ep=2),
            Layout(dp_replicate=4, ep=4),
        ),
        Case("FSDP2·TP2 to TP4, nine heads", THREE_HEADS, Layout(dp_shard=2, tp=2), Layout(tp=4)),
        Case(
            "EP2·FSDP4 to TP4, five experts", FIVE_EXPERTS, Layout(dp_shard=4, ep=2), Layout(tp=4)
        ),
        Case(
            "FSDP2·TP2 to TP4, fused at the source", FUSED, Layout(dp_shard=2, tp=2), Layout(tp=4)
        ),
        Case("FSDP3 of four to two ranks", DENSE, Layout(dp_shard=3), Layout(dp_replicate=2, tp=2)),
    ],
    8: [
        Case("TP2·DP4 to TP1·DP8", TIED, Layout(dp_replicate=4, tp=2), Layout(dp_replicate=8)),
        Case(
            "PP2·FSDP2·TP2 to TP4·DP2",
            DENSE,
            Layout(pp=2, dp_shard=2, tp=2),
            Layout(dp_replicate=2, tp=4),
        ),
        Case(
            "EP4·FSDP4·TP2 to EP8·DP8",
            MOE,
            Layout(dp_shard=4, tp=2, ep=4),
            Layout(dp_replicate=2, tp=4, ep=4),
        ),
        Case(
            "FSDP8 to EP2·TP4·DP2, uneven",
            FIVE_EXPERTS,
            Layout(dp_shard=8),
            Layout(dp_replicate=2, tp=4, ep=4),
        ),
    ],
}


def full_state(state: ModelState) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {p.name: torch.randn(p.shape, generator=generator).to(p.dtype) for p in state.parameters}


def laid_out(
    full: Mapping[str, torch.Tensor], placement: Placement, rank: int
) -> dict[str, torch.Tensor]:
    """The slices of ``full`` that ``rank`` holds, made of it by itself."""
    tensors = {}
    for tensor in placement.ranks[rank] if rank < placement.world else ():
        value = torch.zeros(tensor.shape, dtype=tensor.dtype)
        for piece in tensor.pieces:
            part = full[piece.parameter][tuple(slice(*span) for span in piece.box)]
            value[tuple(slice(a, a + n) for a, n in zip(piece.at, part.shape, strict=True))] = part
        tensors[tensor.name] = value
    return tensors


def bits(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    # A copy: a storage that numpy looks into cannot be resized any more.
    return {
        name: t.detach().clone().flatten().view(torch.uint8).numpy().tobytes()
        for name, t in tensors.items()
    }


@contextmanager
def shared_in(folder: str) -> Iterator[None]:
    """Buckets are shared in ``folder``; where there is no such folder, ranks exchange by gloo."""
    with patch("stages.resharding.exchange.shared_memory_directory", lambda: Path(folder)):
        yield


def swapped_twice(rank: int, world: int, cases: list[Case], folder: str) -> list[tuple[str, str]]:
    """The cases, and how their ranks exchanged."""
    with shared_in(folder):
        return [(case.name, _round_trips(rank, case)) for case in cases]


def _round_trips(rank: int, case: Case) -> str:
    plan = case.plan()
    full = full_state(case.state)
    weights = laid_out(full, plan.source, rank)
    state = {
        f"{name}.{kind}": torch.randn(t.shape)
        for name, t in weights.items()
        for kind in ("grad", "exp_avg", "exp_avg_sq")
    }
    before = bits({**weights, **state})
    expected = bits(laid_out(full, plan.target, rank))

    counted = [0] * plan.world
    dist.all_gather_object(counted, live_bytes(state.values()))
    figures = {figure.phase: figure for figure in memory(plan, counted)}
    seen: dict[Phase, list[int]] = {phase: [] for phase in Phase}

    def live() -> int:
        return (
            live_bytes([*weights.values(), *state.values(), *swap.rollout.values()])
            + swap.temporary_bytes()
        )

    def within(phase: Phase) -> None:
        assert live() <= figures[phase].live[rank], phase
        assert swap.temporary_bytes() <= min(plan.temporary[rank], 2 * BUCKET)
        seen[phase].append(live())

    swap = Swap(plan, rank, weights, state.values, device=CPU, deadline=30, watch=within)
    assert live() == figures[Phase.TRAIN].live[rank]
    for again in range(2):
        arena = swap.arena.nbytes
        rollout = swap.to_rollout()
        assert bits(rollout) == expected
        assert live_bytes([*weights.values(), *state.values()]) == 0  # device bytes of training
        assert swap.arena.used == sum(
            figures[phase].host[rank] for phase in (Phase.OFFLOAD_STATE, Phase.OFFLOAD_WEIGHTS)
        )
        assert swap.arena.used == figures[Phase.PREFETCH].host[rank]
        # The arena itself: each storage begins at a multiple of 512 bytes.
        assert 0 <= swap.arena.nbytes - swap.arena.used < 512 * max(1, len(weights) + len(state))
        assert live() == figures[Phase.GENERATE].live[rank]
        if again:
            assert swap.arena.nbytes == arena  # reused
            swap.prefetch()
        swap.ready()
        assert bits({**weights, **state}) == before
        assert live() == figures[Phase.PREFETCH].after[rank]
        assert live_bytes(rollout.values()) == 0
    _reached(seen, figures, plan, rank)
    return swap.exchange


def _reached(
    seen: dict[Phase, list[int]], figures: dict[Phase, PhaseMemory], plan: ReshardPlan, rank: int
) -> None:
    """The plan's figures are not only bounds: each is reached."""
    for phase in (Phase.OFFLOAD_STATE, Phase.OFFLOAD_WEIGHTS):
        assert set(seen[phase]) == {figures[phase].after[rank]}
    assert len(seen[Phase.GATHER]) == 2 * (len(plan.rounds) + 1)
    assert max(seen[Phase.GATHER]) == (
        figures[Phase.GATHER].live[rank] if plan.rounds else figures[Phase.GATHER].after[rank]
    )


# --- models that torch has sharded
# -----------------------------------------------------------------------------------

LLAMA = LlamaConfig(
    **{**SMALL, "vocab_size": 51, "intermediate_size": 26}, tie_word_embeddings=False
)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(3)
    return LlamaForCausalLM(LLAMA)


def torch_lays_out_as_we_do(rank: int, world: int) -> list[str]:
    """FSDP2 over DTensor tensor parallelism, and FSDP2 alone, against the placements of the same
    layouts."""
    state = model_state(LLAMA)
    full = dict(llama().named_parameters())
    for layout in (Layout(dp_shard=2, tp=2), Layout(dp_shard=4)):
        mesh = init_device_mesh("cpu", (layout.dp_shard, layout.tp), mesh_dim_names=("dp", "tp"))
        model = llama()
        if layout.tp > 1:
            columns = (
                "self_attn.q_proj",
                "self_attn.k_proj",
                "self_attn.v_proj",
                "mlp.gate_proj",
                "mlp.up_proj",
            )
            rows = ("self_attn.o_proj", "mlp.down_proj")
            styles = {f"model.layers.*.{name}": ColwiseParallel() for name in columns}
            styles |= {f"model.layers.*.{name}": RowwiseParallel() for name in rows}
            styles |= {"model.embed_tokens": RowwiseParallel(), "lm_head": ColwiseParallel()}
            parallelize_module(model, mesh["tp"], styles)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        ours = laid_out(
            {name: value.detach() for name, value in full.items()}, place(state, layout), rank
        )
        assert bits(local_weights(model)) == bits(ours), str(layout)
    return ["equal"]


def training_does_not_notice(rank: int, world: int) -> list[str]:
    """Three steps of FSDP2 and AdamW, with and without a swap after each: the same weights, and the
    rollout has them."""
    rollout = place(model_state(LLAMA), Layout(dp_replicate=2, tp=2), names="vllm")
    plan = plan_reshard(place(model_state(LLAMA), Layout(dp_shard=4)), rollout, bucket_bytes=BUCKET)
    ended = []
    for swapping in (False, True):
        model = llama()
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        swap = Swap(
            plan,
            rank,
            local_weights(model),
            lambda optimizer=optimizer: training_state(optimizer),
            device=CPU,
        )
        for step in range(3):
            torch.manual_seed(10 * step + rank)
            ids = torch.randint(0, 51, (2, 9))
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            if swapping:
                full = {
                    name: value.full_tensor().detach() for name, value in model.named_parameters()
                }
                assert bits(swap.to_rollout()) == bits(laid_out(full, rollout, rank))
                gone = [*local_weights(model).values(), *training_state(optimizer)]
                assert len(gone) > 4 * len(plan.source.ranks[rank]) - 1
                assert live_bytes(gone) == 0
                swap.prefetch()
                swap.ready()
            optimizer.zero_grad()
        ended.append(bits(local_weights(model)))
    assert ended[0] == ended[1]
    return ["equal"]


# --- what goes wrong
# -------------------------------------------------------------------------------------------------


@dataclass
class Bench:
    """A rank of FSDP to DP with what it trains, and what it was at first."""

    swap: Swap
    tensors: dict[str, torch.Tensor]
    expected: dict[str, bytes]
    before: dict[str, bytes]

    @property
    def whole(self) -> bool:
        return bits(self.tensors) == self.before and live_bytes(self.swap.rollout.values()) == 0


def bench(
    rank: int,
    world: int,
    watch: Callable[[Phase], None] = lambda phase: None,
    deadline: float = 30.0,
) -> Bench:
    plan = Case("", DENSE, Layout(dp_shard=world), Layout(dp_replicate=world)).plan()
    full = full_state(DENSE)
    weights = laid_out(full, plan.source, rank)
    moments = {f"{name}.exp_avg": torch.randn(t.shape) for name, t in weights.items()}
    swap = Swap(plan, rank, weights, moments.values, device=CPU, watch=watch, deadline=deadline)
    tensors = {**weights, **moments}
    return Bench(swap, tensors, bits(laid_out(full, plan.target, rank)), bits(tensors))


def _refused(swap: Swap) -> str:
    try:
        swap.to_rollout()
    except SwapError as error:
        assert swap.state is State.TRAINING
        assert not swap.arena.used
        assert swap.temporary_bytes() == 0
        return str(error)
    raise AssertionError("the swap took place")


def a_byte_is_wrong(rank: int, world: int, folder: str) -> list[str]:
    """One bit that rank 1 receives in the third round is not what was sent; the swap after it is
    undisturbed."""
    made = bench(rank, world)

    def damaged(exchange: type[SharedExchange] | type[GroupExchange]) -> Any:
        sound = exchange.messages

        def messages(self: Any, number: int) -> Sequence[torch.Tensor]:
            found = sound(self, number)
            if number == 2 and rank == 1:
                next(message for message in found if len(message)).view(torch.uint8)[5] ^= 4
            return found

        return patch.object(exchange, "messages", messages)

    with shared_in(folder):
        with damaged(SharedExchange), damaged(GroupExchange):
            messages = _refused(made.swap)
        assert made.whole
        assert bits(made.swap.to_rollout()) == made.expected
        made.swap.ready()
    assert made.whole
    return [made.swap.exchange, messages]


def a_rank_dies(rank: int, world: int, folder: str) -> list[Any]:
    """Rank 1 is killed in the second round; how long the others then took, and the error that they
    raised."""
    rounds = 0
    at = 0.0

    def dying(phase: Phase) -> None:
        nonlocal rounds, at
        rounds += phase is Phase.GATHER
        if rounds == 2:
            assert not any(Path(folder).glob("*"))
            mapped = folder in Path("/proc/self/maps").read_text()
            assert mapped == (made.swap.exchange == "shared memory")
            at = time.monotonic()
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    made = bench(rank, world, dying)
    with shared_in(folder):
        messages = _refused(made.swap)
    assert made.whole
    # the memory is gone with its last mapping
    assert folder not in Path("/proc/self/maps").read_text()
    return [made.swap.exchange, time.monotonic() - at, messages]


def a_rank_is_late(rank: int, world: int, folder: str) -> str:
    """Rank 1 stays away from the third round until rank 0 has given up."""
    store = dist.distributed_c10d._get_default_store()
    rounds = 0

    def late(phase: Phase) -> None:
        nonlocal rounds
        rounds += phase is Phase.GATHER
        if rank == 1 and rounds == 2:
            store.wait(["refused-0"])

    made = bench(rank, world, late, deadline=1.0)
    with shared_in(folder):
        messages = _refused(made.swap)
    assert made.whole
    store.set(f"refused-{rank}", "")
    return messages


def one_cannot_share(rank: int, world: int, folder: str) -> list[str]:
    """How all ranks exchange, and with what they end up, when rank 1 is where it cannot share
    memory with the others."""

    def full(*size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    elsewhere = "1b4e28ba-2fa1-11d2-883f-0016d3cca427"
    read = Path.read_text
    hindered: dict[str, Any] = {
        "no folder": shared_in(f"{folder}/none"),
        "no room": patch("os.posix_fallocate", full),
        "another node": patch.object(
            Path,
            "read_text",
            lambda path, *a: elsewhere if path.name == "boot_id" else read(path, *a),
        ),
        "another container's process": patch("os.getpid", os.getppid),
    }
    found = []
    with shared_in(folder):
        for hindrance in hindered.values():
            made = bench(rank, world)
            opened = len(os.listdir("/proc/self/fd"))
            with ExitStack() as stack:
                if rank == 1:
                    stack.enter_context(hindrance)
                assert bits(made.swap.to_rollout()) == made.expected
            made.swap.ready()
            assert len(os.listdir("/proc/self/fd")) == opened
            found.append(made.swap.exchange)
    return found


def what_is_shared(rank: int, world: int, folder: str) -> tuple[int, int, int]:
    """Names and mode of the file that a rank shares, and how many descriptors it keeps."""
    seen: list[os.stat_result] = []
    reserve = os.posix_fallocate

    def watching(opened: int, *size: int) -> None:
        seen.append(os.fstat(opened))
        reserve(opened, *size)

    made = bench(rank, world)
    opened = len(os.listdir("/proc/self/fd"))
    with shared_in(folder), patch("os.posix_fallocate", watching):
        made.swap.to_rollout()
    (one,) = seen
    return one.st_nlink, stat.S_IMODE(one.st_mode), len(os.listdir("/proc/self/fd")) - opened


def a_rank_does_not_come(rank: int, world: int) -> str:
    made = bench(rank, world, deadline=1.0)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["refused-0"])
        return "stayed away"
    messages = _refused(made.swap)
    assert made.whole
    store.set("refused-0", "")
    return messages


def the_way_back(rank: int, world: int) -> list[str]:
    """A way back that fails, one that takes its time, and calls out of order, on one rank."""
    messages = []
    made = bench(rank, world)

    def collect(call: Callable[[], Any], kind: type[Exception]) -> None:
        try:
            call()
        except kind as error:
            messages.append(str(error))

    swap = made.swap
    copy_back = made.swap.arena.copy_back
    go = threading.Event()
    collect(swap.prefetch, RuntimeError)
    swap.to_rollout()
    collect(swap.to_rollout, RuntimeError)
    with patch.object(swap.arena, "allocate", side_effect=MemoryError("no room on the device")):
        collect(swap.prefetch, MemoryError)
    with patch.object(swap.arena, "copy_back", side_effect=RuntimeError("a copy failed")):
        swap.prefetch()
        collect(swap.ready, SwapError)
    with patch.object(swap.arena, "copy_back", lambda stream: (go.wait(30), copy_back(stream))):
        swap.prefetch()  # returns although nothing can move yet
        collect(lambda: swap.ready(timeout=0.01), SwapError)
        go.set()
        swap.ready()
    assert made.whole
    return messages


def what_does_not_fit(rank: int, world: int) -> list[str]:
    plan = Case("", DENSE, Layout(dp_shard=world), Layout(dp_replicate=world)).plan()
    good = laid_out(full_state(DENSE), plan.source, rank)
    norm = "model.norm.weight"
    shared = {**good, norm: good[norm].clone()}
    shared[norm].numpy()
    two = place(DENSE, Layout(dp_shard=2))
    messages = []
    for weights, other in (
        ({**good, norm: good[norm].double()}, plan),
        ({name: t for name, t in good.items() if name != norm}, plan),
        ({**good, "more": torch.ones(1)}, plan),
        (laid_out(full_state(DENSE), two, rank), plan_reshard(two, two)),
        (shared, plan),
    ):
        try:
            Swap(other, rank, weights, list, device=CPU).to_rollout()
        except ValueError as error:
            messages.append(str(error))
    rollout = laid_out(full_state(DENSE), plan.target, rank)
    both = torch.zeros(2, len(rollout[norm]))
    for given in ({**rollout, norm: rollout[norm][:3]}, {**rollout, norm: both[0]}):
        try:
            Swap(plan, rank, good, list, device=CPU, rollout=given)
        except ValueError as error:
            messages.append(str(error))
    return messages
