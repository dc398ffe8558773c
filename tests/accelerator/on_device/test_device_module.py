"""Every function of stages/device.py on a device that is no CPU."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from stages import device as devices
from tests.accelerator import build


def test_devices_are_chosen_by_name(npu: torch.device) -> None:
    assert devices.select("npu:1") == torch.device("npu", 1)
    assert devices.select("npu").index is None
    assert devices.select("cpu") == torch.device("cpu")
    with pytest.raises(devices.DeviceMissing, match="there are 2, counted from 0"):
        devices.select("npu:2")
    with pytest.raises(devices.DeviceMissing, match="'x' is no number; write for example npu:0"):
        devices.select("npu:x")
    with pytest.raises(devices.DeviceMissing, match=r"'cuda': torch .* sees npu here"):
        devices.select("cuda")
    assert not devices.on_cpu("auto")
    assert not devices.on_cpu("npu:1")
    assert devices.on_cpu("cpu")


def test_a_plugin_may_not_be_forked() -> None:
    assert not devices.may_fork()


def test_ranks_share_the_devices_in_turn() -> None:
    assert [devices.of_rank(torch.device("npu"), rank).index for rank in range(4)] == [0, 1, 0, 1]
    assert devices.of_rank(torch.device("npu", 1), 2).index == 1
    devices.use(torch.device("npu", 1))
    assert torch.accelerator.current_device_index() == 1
    assert torch.empty(1, device="npu").device.index == 1
    devices.use(torch.device("npu"))
    assert torch.accelerator.current_device_index() == 1
    devices.use(torch.device("npu", 0))
    assert torch.accelerator.current_device_index() == 0


def test_what_the_device_is(npu: torch.device) -> None:
    assert devices.backend(npu) == "hccl"
    assert devices.backend(torch.device("cpu")) == "gloo"
    assert devices.memory_bytes("npu") == devices.memory_bytes("auto") == 8 << 30
    assert devices.memory_bytes("cpu") is None
    assert devices.memory_bytes("npu:2") is None
    assert devices.widest_float(npu) == torch.float32
    assert devices.widest_float(torch.device("cpu")) == torch.float64
    assert not devices.multiplies_into_float32(npu)
    assert not devices.has_flash_attention(npu)
    assert not devices.splits_groups(npu), "HCCL does not"
    assert devices.splits_groups(torch.device("cuda"))


def test_memory_is_counted_by_the_devices_own_module(npu: torch.device, library: Any) -> None:
    other = torch.device("npu", 1)
    before = [devices.allocated(npu), devices.allocated(other)]
    held = torch.zeros(1000, device=other)
    assert [devices.allocated(npu), devices.allocated(other)] == [
        before[0],
        before[1] + held.nbytes,
    ]
    del held
    assert devices.allocated(other) == before[1]
    assert devices.allocated(torch.device("cpu")) is None
    devices.release_cached(torch.device("cpu"))
    assert library.emptied == []
    devices.release_cached(npu)
    assert library.emptied == [0]


def test_memory_of_apples_gpus_is_counted_by_their_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.accelerator raises for them, as for torch_npu up to 2.12. Its module has other
    names."""
    emptied: list[str] = []
    module = types.SimpleNamespace(
        current_allocated_memory=lambda: 12, empty_cache=lambda: emptied.append("mps")
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert devices.allocated(torch.device("mps")) == 12
    devices.release_cached(torch.device("mps"))
    assert emptied == ["mps"]
    assert devices.widest_float(torch.device("mps")) == torch.float32


def test_host_memory_for_copies_is_page_locked(npu: torch.device) -> None:
    memory = devices.host_empty(5, npu)
    assert memory.is_pinned()
    assert (memory.dtype, memory.shape, memory.device.type) == (torch.uint8, (5,), "cpu")
    assert not devices.host_empty(5, torch.device("cpu")).is_pinned()


def test_what_is_fetched_is_read_after_a_wait_for_its_copy_alone(npu: torch.device) -> None:
    source = torch.arange(4.0, device=npu)
    first = devices.fetch(source)
    source += 1
    later = torch.empty(4, pin_memory=True).copy_(source, non_blocking=True)
    assert first().is_pinned(), "another memory's copy would block the host"
    assert first().tolist() == [0, 1, 2, 3]
    assert later.tolist() != [1, 2, 3, 4], "a later copy is not waited for"
    numbers = torch.ones(2)
    assert devices.fetch(numbers)() is numbers


def test_what_is_put_does_not_block_the_host(
    npu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = torch.ones(3)
    found = devices.put(given, npu)
    given.fill_(7)  # the copy is of page-locked memory of its own
    assert found.device == npu
    assert found.tolist() == [1, 1, 1]
    assert devices.put(given, torch.device("cpu")) is given
    assert devices.put(found, npu) is found
    copies: list[Any] = []
    to = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor, "to", lambda x, *a, **o: copies.append((x.is_pinned(), o)) or to(x, *a, **o)
    )
    devices.put(given, npu)
    assert copies == [(True, {"non_blocking": True})]


def test_a_synchronisation_waits_for_all_streams(npu: torch.device) -> None:
    source = torch.ones(3, device=npu)
    host = torch.empty(3, pin_memory=True)
    beside = devices.stream(npu)
    with beside:
        host.copy_(source, non_blocking=True)
    assert host.tolist() != [1, 1, 1]
    devices.synchronize(npu)
    assert host.tolist() == [1, 1, 1]
    assert beside.device == npu
    assert beside != torch.accelerator.current_stream(npu)


def test_events_are_timed_in_seconds(npu: torch.device) -> None:
    moments = [types.SimpleNamespace(elapsed_time=lambda end: 1500.0), None]
    assert devices.seconds_between(*moments) == 1.5
    assert devices.seconds_between(2.0, 5.0) == 3.0
    beside = devices.stream(npu)
    start = devices.mark(beside)
    end = devices.mark(beside)
    assert start.device == npu
    assert 0 <= devices.seconds_between(start, end) < 60
    assert isinstance(devices.mark(None), float)


def test_algorithms_are_deterministic_while_asked_for(npu: torch.device) -> None:
    with devices.deterministic(npu):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


# --- recordings
# --------------------------------------------------------------------------------------------------


def test_without_graphs_of_its_own_the_device_calls_again(npu: torch.device) -> None:
    assert hasattr(torch.accelerator, "Graph")
    assert devices.new_graph(npu) is None
    given = torch.ones(3, device=npu)
    again, result = devices.record(npu, lambda: given * 2)
    given.fill_(5)
    again()
    assert result.tolist() == [10, 10, 10]


class Graph:
    """A graph as torch documents it: it records what its stream is asked, and replays it on the
    current one."""

    recording: Graph | None = None

    def __init__(self, *, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self.acts: list[Any] = []

    def __enter__(self) -> None:
        assert torch.accelerator.current_stream() != torch.accelerator.current_stream(
            torch.device("npu", 1)
        )
        self.stream = torch.accelerator.current_stream()
        Graph.recording = self

    def __exit__(self, *error: object) -> None:
        Graph.recording = None

    def replay(self) -> None:
        for act in self.acts:
            act()


def test_a_recording_is_made_beside_the_stream_and_waits_for_it(
    npu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "Graph", Graph)
    ordinary = torch.accelerator.current_stream(npu)
    # which the recording's stream has to wait for
    given = torch.ones(3).pin_memory().to(npu, non_blocking=True)
    back = torch.full((3,), 4.0).pin_memory()
    beside: list[torch.Stream] = []
    copied = torch.empty(3, device=npu)

    def act() -> torch.Tensor:
        assert Graph.recording is not None
        beside.append(torch.accelerator.current_stream(npu))
        result = given * 2
        copied.copy_(back, non_blocking=True)  # which the ordinary stream has to wait for
        Graph.recording.acts.append(lambda: torch.mul(given, 2, out=result))
        return result

    again, result = devices.record(npu, act)
    assert beside[0] != ordinary
    assert torch.accelerator.current_stream(npu) == ordinary
    assert result.tolist() == [2, 2, 2]
    assert (copied * 1).tolist() == [4, 4, 4]
    given.fill_(5)
    again()
    assert result.tolist() == [10, 10, 10]
    assert len(beside) == 1, "what was recorded is replayed, not called"


def test_what_the_device_cannot_record_is_called(
    npu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(Graph):
        def __exit__(self, *error: object) -> None:
            super().__exit__(*error)
            raise RuntimeError("the recording was spoilt")

    monkeypatch.setattr(torch.accelerator, "Graph", Refusing)
    ordinary = torch.accelerator.current_stream(npu)
    given = torch.ones(3, device=npu)

    def act() -> torch.Tensor:
        if Graph.recording is not None:
            # in a float32 model with experts
            raise RuntimeError("Cannot copy between CPU and device during capture")
        return given * 2

    again, result = devices.record(npu, act)
    assert torch.accelerator.current_stream(npu) == ordinary
    given.fill_(5)
    again()
    assert result.tolist() == [10, 10, 10]


# --- fused operators
# --------------------------------------------------------------------------------------------------


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, 0.5)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


@pytest.mark.parametrize("name", ["rms_norm", "swiglu"])
def test_fused_layers_and_their_gradients_are_torchs(
    name: str, npu: torch.device, library: Any
) -> None:
    torch.manual_seed(0)
    fused = devices.fused_layers(npu)
    expected = norm if name == "rms_norm" else swiglu
    computed = functools.partial(fused[name], epsilon=0.5) if name == "rms_norm" else fused[name]
    given = [
        torch.randn(2, 5, 16),
        torch.randn(16) if name == "rms_norm" else torch.randn(2, 5, 16),
    ]
    ours, theirs = (
        [x.clone().to(device).requires_grad_() for x in given] for device in (npu, "cpu")
    )
    one = computed(*ours)
    other = expected(*theirs)
    torch.testing.assert_close(one.cpu(), other)
    gradient = torch.randn_like(other)
    one.backward(gradient.to(npu))
    other.backward(gradient)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad)
    assert library.calls == {f"npu_{name}": 1, f"npu_{name}_backward": 1}
    assert set(fused) == {"rms_norm", "swiglu"}
    assert devices.fused_layers(torch.device("cpu")) == {}


def test_ligers_layers_go_before_the_devices(
    npu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LigerRMSNormFunction:
        apply = staticmethod(lambda *given: ("norm", *given))

    class LigerSiLUMulFunction:
        apply = staticmethod(lambda *given: ("swiglu", *given))

    found = types.SimpleNamespace(
        LigerRMSNormFunction=LigerRMSNormFunction, LigerSiLUMulFunction=LigerSiLUMulFunction
    )
    for module in ("rms_norm", "swiglu"):
        monkeypatch.setitem(devices.importlib.sys.modules, f"liger_kernel.ops.{module}", found)  # type: ignore[attr-defined]
    layers = devices.fused_layers(npu)
    assert layers["rms_norm"](1, 2, 0.5) == ("norm", 1, 2, 0.5, 0.0, "llama", False)  # type: ignore[arg-type, comparison-overlap]
    assert layers["swiglu"](1, 2) == ("swiglu", 1, 2)  # type: ignore[arg-type, comparison-overlap]


@pytest.mark.parametrize("mask", ["causal", "hidden", "none"])
def test_fused_attention_and_its_gradient_are_torchs(
    mask: str, npu: torch.device, library: Any
) -> None:
    torch.manual_seed(0)
    forward, backward = devices.fused_attention(npu)  # type: ignore[misc]
    q, k, v, gradient = (torch.randn(1, heads, 6, 16) for heads in (4, 2, 2, 4))
    hidden = torch.rand(6, 6) < 0.3
    hidden[:, 0] = False
    wide = [x.requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(2, 1) for x in wide[1:])
    scores = wide[0] @ keys.transpose(-1, -2) * 0.3
    if mask != "none":
        scores = scores.masked_fill(
            torch.ones(6, 6, dtype=torch.bool).triu(1) if mask == "causal" else hidden, -torch.inf
        )
    expected = scores.softmax(-1) @ values
    expected.backward(gradient)
    on_npu = [x.detach().to(npu) for x in (q, k, v)]
    options = (mask == "causal", hidden.to(npu) if mask == "hidden" else None, 0.3)
    out, total = forward(*on_npu, *options)
    torch.testing.assert_close(out.cpu(), expected.detach())
    torch.testing.assert_close(total.cpu(), scores.detach().logsumexp(-1))
    found = backward((gradient.to(npu), *on_npu, out, total), *options)
    for one, x in zip(found, wide, strict=True):
        torch.testing.assert_close(one.cpu(), x.grad)
    assert library.calls == {"npu_fusion_attention": 1, "npu_fusion_attention_grad": 1}
    assert devices.fused_attention(torch.device("cpu")) is None


def test_the_causal_mask_is_made_once(
    npu: torch.device, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks: list[torch.Tensor] = []
    for name in ("npu_fusion_attention", "npu_fusion_attention_grad"):
        operator = getattr(library, name)

        def recorded(*given: Any, operator: Any = operator, **options: Any) -> Any:
            masks.append(options["atten_mask"])
            return operator(*given, **options)

        monkeypatch.setattr(library, name, recorded)
    forward, backward = devices.fused_attention(npu)  # type: ignore[misc]
    q = torch.randn(1, 1, 3, 16).to(npu)
    with torch.inference_mode():
        forward(q, q, q, True, None, 1.0)
    out, total = forward(q, q, q, True, None, 1.0)
    backward((q, q, q, q, out, total), True, None, 1.0)
    assert len(masks) == 3
    assert all(mask is masks[0] for mask in masks)
    assert not masks[0].is_inference(), "a later step of training takes it too"
    other = torch.randn(1, 1, 3, 16).to("npu:1")
    forward(other, other, other, True, None, 1.0)
    assert masks[-1].device == other.device


def test_the_emulated_library_is_of_this_source() -> None:
    assert str(build.library()) == devices.os.environ["EMULATED_NPU_LIBRARY"]  # type: ignore[attr-defined]
