"""What the emulated device refuses and delays, so that code which asks the wrong device, or does
not wait, is found."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from stages import device as devices


def test_float64_is_refused(npu: torch.device) -> None:
    for make in (
        lambda: torch.ones(2, dtype=torch.float64, device=npu),
        lambda: torch.ones(2, device=npu).double(),
        lambda: torch.ones(2, dtype=torch.float64).to(npu),
        lambda: torch.arange(2, device=npu) + torch.ones((), dtype=torch.float64, device=npu),
    ):
        with pytest.raises(RuntimeError, match="npu does not support float64"):
            make()
    assert (torch.arange(2, device=npu) * 0.5).tolist() == [0, 0.5], "a number of Python is none"


def test_tensors_of_two_devices_are_refused(npu: torch.device) -> None:
    here = torch.ones(2, device=npu)
    other = torch.ones(2, device="npu:1")
    host = torch.ones(2)
    for wrong in (other, host):
        for act in (
            lambda wrong=wrong: here + wrong,
            lambda wrong=wrong: torch.cat([here, wrong]),
            lambda wrong=wrong: here.index_add_(0, torch.tensor([0, 1], device=npu), wrong),
            lambda wrong=wrong: torch.nn.functional.linear(here, wrong[None]),
        ):
            with pytest.raises(RuntimeError, match=r"(?i)expected .* the same device"):
                act()
    assert here[torch.tensor([1])].tolist() == [1], "indices may be on the CPU"
    assert (here + host.to(npu) + other.to(npu) + torch.ones(())).tolist() == [4, 4]


def test_host_memory_has_what_was_copied_only_after_a_wait(npu: torch.device) -> None:
    source = torch.arange(3.0, device=npu)
    host = torch.empty(3, pin_memory=True)
    for wait in (
        torch.accelerator.synchronize,
        lambda: torch.accelerator.current_stream(npu).synchronize(),
        lambda: source.sum().item(),
    ):
        host.copy_(source, non_blocking=True)
        assert host.tolist() != [0, 1, 2]
        wait()
        assert host.tolist() == [0, 1, 2]


def test_a_stream_has_what_another_copied_only_after_it_has_waited(npu: torch.device) -> None:
    host = torch.ones(3).pin_memory()
    target = torch.zeros(3, device=npu)
    beside = torch.Stream(npu)
    with beside:
        target.copy_(host, non_blocking=True)
    assert (target * 1).tolist() != [1, 1, 1]
    torch.accelerator.current_stream(npu).wait_stream(beside)
    assert (target * 1).tolist() == [1, 1, 1]


def test_a_copy_to_the_device_reads_the_host_late(npu: torch.device) -> None:
    host = torch.ones(3).pin_memory()
    target = host.to(npu, non_blocking=True)
    host.fill_(5)
    torch.accelerator.synchronize()
    assert target.tolist() == [5, 5, 5]


@pytest.mark.parametrize("version", ["2.10", "2.13"])
def test_an_allocator_before_2_13_cannot_be_asked_by_torch(version: str) -> None:
    asked = (
        "import os; os.environ['EMULATED_NPU'] = '{}'; import torch; "
        "torch.accelerator.empty_cache()"
    )
    done = subprocess.run(
        [sys.executable, "-c", asked.format(version)], capture_output=True, text=True
    )
    assert ("not a DeviceAllocator" in done.stderr) == (version == "2.10"), done.stderr


def test_torch_loads_it_at_its_own_import_as_the_real_one() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("npu")
    assert devices.select() == torch.device("npu")
