"""What a GPU is to kernels, their settings and tables of times: AMD is no NVIDIA, Blackwell no Hopper."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sparseprefill.plugins.anchor_attention import kernels as anchor
from sparseprefill.plugins.rowmax import launch as rowmax

import sparseprefill as sp
from sparseprefill.breakeven.gate import AutoGate, shipped
from sparseprefill.breakeven.points import DeviceKind, device_type
from sparseprefill.breakeven.table import device_kind
from sparseprefill.executors import dense
from sparseprefill.kernels import settings as device
from sparseprefill.kernels.attention import launch as attention
from sparseprefill.kernels.groups import group_settings, paged_settings
from sparseprefill.kernels.sampled import mass
from sparseprefill.kernels.settings import Settings, settings

ROOT = Path(__file__).parents[3]
GPU = torch.device("cuda", 7)
CALL: Any = SimpleNamespace(q=SimpleNamespace(device=GPU, element_size=lambda: 2, shape=(1, 8, 4096, 128)))
MASK: Any = None
OTHERS = ((8, 0), (8, 9), (10, 0), (10, 3), (11, 0), (12, 0))


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    for kept in (device.capability, dense._hopper):
        kept.cache_clear()
    yield
    for kept in (device.capability, dense._hopper):
        kept.cache_clear()


def gpu(patch: pytest.MonkeyPatch, numbers: tuple[int, int], hip: str | None = None) -> None:
    """A GPU as PyTorch reports it."""
    patch.setattr(torch.version, "hip", hip)
    patch.setattr(torch.cuda, "get_device_capability", lambda *_: numbers)
    patch.setattr(torch.cuda, "get_device_name", lambda *_: "one")


def every(capability: tuple[int, int]) -> dict[str, Settings]:
    """Settings of all launches that have a table by capability, 16-bit heads of 128."""
    return {
        "attention": settings(capability, 128, 2, 128, 128),
        "groups": group_settings(capability, 2),
        "groups in pages": paged_settings(capability, 2, 64),
        "sampled": mass.settings(capability, 128, 2),
        "anchor": anchor.settings(capability, 128, 2),
        "rowmax": rowmax.settings(capability, 128, 2),
        "rowmax, 8 bits": rowmax.settings(capability, 128, 1),
    }


@pytest.mark.parametrize("numbers", [(9, 0), (9, 4), (9, 5), (11, 0)])
def test_amds_gpus_take_none_of_hoppers_ways(numbers: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, numbers, "6.4.0")
    assert device.NONE == device.capability(GPU)
    assert attention.hopper_of(CALL) is None
    assert "needs an NVIDIA GPU of capability 9.0, this one is AMD's" in str(attention.choose(CALL, MASK).reason)
    assert not rowmax.in_8_bits(CALL, "auto")
    assert not rowmax.in_8_bits(CALL, "fp8")
    assert not dense._hopper(GPU)
    assert every(device.capability(GPU)) == every(device.NONE)


@pytest.mark.parametrize("numbers", OTHERS)
def test_another_gpu_says_why_the_portable_kernel_serves(
    numbers: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(monkeypatch, numbers)
    assert numbers == device.capability(GPU)
    choice = attention.choose(CALL, MASK)
    assert choice.hopper is None
    assert (
        "the Hopper kernel needs an NVIDIA GPU of capability 9.0, this one has {}.{}".format(*numbers) == choice.reason
    )


def test_hopper_and_the_interpreter_have_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, (9, 0))
    assert "" == device.unlike_hopper(GPU) == device.unlike_hopper(torch.device("cpu"))
    assert attention.hopper_of(CALL) is not None


@pytest.mark.parametrize("numbers", OTHERS)
def test_the_cap_on_registers_is_hoppers_alone(numbers: tuple[int, int]) -> None:
    capped = {"attention", "anchor", "rowmax, 8 bits"}
    assert capped == {name for name, one in every(device.HOPPER).items() if one.maxnreg}
    assert [] == [name for name, one in every(numbers).items() if one.maxnreg]


def test_what_has_less_shared_memory_than_hopper_gets_smaller_tiles() -> None:
    assert every((12, 0)) == every((8, 9))
    assert every((10, 0)) != every((8, 9))


@pytest.mark.parametrize("numbers", [(9, 0), (9, 4)])
def test_an_amd_gpu_reads_no_table_of_hopper(numbers: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = DeviceKind(type="cuda", capability=(9, 0))
    assert shipped(hopper) is not None
    gpu(monkeypatch, numbers, "6.4.0")
    found = device_kind(GPU)
    assert ("rocm", numbers) == (found.type, found.capability)
    assert not found.like(hopper)
    assert shipped(found) is None
    gate = AutoGate(shipped(hopper))
    missing = gate._find(GPU)
    assert "no break-even table for one (rocm {}.{})".format(*numbers) == missing
    call: Any = SimpleNamespace(q=torch.zeros(1, 32, 4, 128), kv_len=1 << 20, q_offset=None, window=None)
    monkeypatch.setattr(torch.Tensor, "device", GPU)
    verdict = gate.judge(call, "bfla")
    assert not verdict.worth
    assert "nothing is known about such devices" in verdict.reason


def test_a_gpu_is_asked_for_in_one_place() -> None:
    """Whoever asks PyTorch by itself would take AMD's numbers for NVIDIA's."""
    words = ("get_device_capability", "version.hip", "get_device_properties")
    found = {
        (path.relative_to(ROOT).as_posix(), word)
        for folder in ("core", "plugins", "adapters")
        for path in (ROOT / folder).rglob("*.py")
        for word in words
        if word in path.read_text(encoding="utf-8")
    }
    assert {
        ("core/sparseprefill/breakeven/points.py", "version.hip"),
        ("core/sparseprefill/breakeven/table.py", "get_device_capability"),
        ("core/sparseprefill/kernels/settings.py", "get_device_capability"),
        ("adapters/cli/setup.py", "get_device_properties"),  # its memory
        ("core/sparseprefill/kernels/hopper/launch.py", "get_device_properties"),  # its multiprocessors
    } == found


def test_other_devices_are_what_pytorch_calls_them(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, (9, 0), "6.4.0")
    assert ["cpu", "rocm", "meta"] == [device_type(torch.device(name)) for name in ("cpu", "cuda", "meta")]
    assert sp.AutoExecutor().choose(sp.AttentionCall(*(torch.zeros(1, 1, 4, 16) for _ in range(3)))) is not None
