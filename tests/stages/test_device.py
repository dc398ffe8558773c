"""Devices: selection, and the errors for devices that are not present."""

from __future__ import annotations

import ast
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.planning.memory import resident
from stages import device

ROOT = Path(__file__).resolve().parents[2]
HAVE = torch.accelerator.is_available()


def test_auto_is_the_accelerator_or_the_cpu() -> None:
    found = device.select()
    assert found.type == (torch.accelerator.current_accelerator().type if HAVE else "cpu")
    assert device.select("cpu") == torch.device("cpu")


@pytest.mark.skipif(HAVE, reason="there is an accelerator here")
@pytest.mark.parametrize("name", ["cuda", "cuda:3", "xpu"])
def test_a_device_that_is_not_here_is_refused(name: str) -> None:
    with pytest.raises(
        device.DeviceMissing, match=f"device '{name}': torch .* sees no accelerator here; install"
    ):
        device.select(name)


def test_npu_without_torch_npu_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)  # what an import of a missing module meets
    with pytest.raises(
        device.DeviceMissing,
        match=r"torch_npu cannot be imported "
        r".*CANN.*asyncdock\[ascend\]",
    ):
        device.select("npu")


def test_npu_imports_torch_npu_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch knows the device only once torch_npu has been imported; here it brings one that torch
    takes as its own."""
    monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    named = types.SimpleNamespace(type="npu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: named)
    monkeypatch.setattr(torch, "device", lambda name: name)
    assert device.select("npu:1") == "npu:1"
    with pytest.raises(device.DeviceMissing, match="there are 2, counted from 0"):
        device.select("npu:2")
    with pytest.raises(device.DeviceMissing, match="'x' is no number"):
        device.select("npu:x")


def test_ranks_of_a_node_take_its_devices_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    chosen = torch.device("cuda", 1)
    assert [device.of_rank(cpu, rank) for rank in range(3)] == [cpu] * 3
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert [device.of_rank(torch.device("cuda"), rank).index for rank in range(4)] == [0, 1, 0, 1]
    assert device.of_rank(chosen, 2) == chosen
    used: list[int] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", used.append)
    device.use(cpu)
    device.use(chosen)
    assert used == [1]


def test_what_runs_on_the_cpu_is_known_without_asking_for_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert device.on_cpu("cpu")
    assert not device.on_cpu("cuda:3")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert device.on_cpu("auto")


def test_algorithms_are_deterministic_on_an_accelerator_for_as_long_as_it_is_asked_for() -> None:
    for kind, inside in (("cpu", False), ("cuda", True)):
        with device.deterministic(torch.device(kind)):
            assert torch.are_deterministic_algorithms_enabled() == inside
            assert torch.utils.deterministic.fill_uninitialized_memory == (not inside)
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.utils.deterministic.fill_uninitialized_memory


def test_on_the_cpu_everything_has_an_answer() -> None:
    cpu = torch.device("cpu")
    assert device.backend(cpu) == "gloo"
    assert device.host_empty(5, cpu).shape == (5,)
    assert device.allocated(cpu) is None
    assert device.stream(cpu) is None
    device.synchronize(cpu)
    device.release_cached(cpu)
    numbers = torch.arange(3)
    assert torch.equal(device.put(numbers, cpu), numbers)
    assert torch.equal(device.fetch(numbers)(), numbers)


def test_what_is_recorded_reads_its_inputs_again_and_writes_its_result_in_place() -> None:
    given = torch.ones(3)
    again, result = device.record(torch.device("cpu"), lambda: given * 2)
    given.fill_(5)
    again()
    assert result.tolist() == [10, 10, 10]


VENDORS = re.compile(r"(torch[._])?(cuda|npu|nccl|hccl)\b")


def named(code: str) -> set[str]:
    """The names and texts in ``code`` that begin with a vendor's, as ``"cuda:0"`` does."""
    words: list[Any] = []
    for node in ast.walk(ast.parse(code)):
        words += [
            getattr(node, field, None) for field in ("attr", "id", "value", "arg", "module", "name")
        ]
    return {word for word in words if isinstance(word, str) and VENDORS.match(word)}


@pytest.mark.parametrize(
    "code",
    [
        "x.to('cuda:0')",
        "f'cuda:{rank}'",
        "torch.cuda.synchronize()",
        "import torch_npu",
        "f(backend='nccl')",
        "cuda = 1",
    ],
)
def test_a_vendor_is_found_however_it_is_named(code: str) -> None:
    assert named(code)
    assert not named("# cuda\nx = 'barracuda'; y.npus = 'the cuda build'")


def test_no_other_module_names_a_vendor() -> None:
    allowed = [ROOT / "stages" / name for name in ("device.py", "device_names.py")]
    allowed.append(ROOT / "pipeline" / "compat" / "extras.py")  # names what can be installed
    for package in ("pipeline", "stages", "orchestration", "api", "benchmarks"):
        files = list((ROOT / package).rglob("*.py"))
        assert files
        for path in files:
            found = named(path.read_text(encoding="utf-8"))
            assert not found or path in allowed, f"{path}: {found}; ask stages.device"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_that_a_layer_frees_between_blocks_that_stay_goes_back_to_the_system() -> None:
    stay: list[torch.Tensor] = []

    class Layer(torch.nn.Module):
        def forward(self, sizes: list[int]) -> None:
            freed = [torch.ones(size) for size in sizes]
            stay.append(torch.ones(2**10))
            del freed

    model = torch.nn.ModuleList([Layer()])
    with device.trimmed_by_layer(model):
        before = resident()
        for _ in range(24):
            model[0]([2**19] * 4)  # 8 MiB
        assert resident() - before < 8 * 2**20
