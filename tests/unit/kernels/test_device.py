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
from sparseprefill.kernels.family import chips as device
from sparseprefill.kernels.family.choose import Refusal, choose
from sparseprefill.kernels.family.record import Wanted
from sparseprefill.kernels.family.shipped import SHIPPED
from sparseprefill.kernels.groups import group_settings, paged_settings
from sparseprefill.kernels.sampled import mass
from sparseprefill.kernels.settings import HALVES_ALONE, HEAD_DIMS, Settings, power_of_two, settings

ROOT = Path(__file__).parents[3]
GPU = torch.device("cuda", 7)
Q = SimpleNamespace(device=GPU, element_size=lambda: 2, shape=(1, 8, 4096, 128), dtype=torch.float16)
NOTHING = dict.fromkeys(("softcap", "sinks", "starts", "lengths", "pages"))
CALL: Any = SimpleNamespace(q=Q, value_dim=128, geometry=SimpleNamespace(window=None), **NOTHING)
MASK: Any = SimpleNamespace(stripes=None)
OTHERS = ((8, 0), (8, 9), (10, 0), (10, 3), (11, 0), (12, 0))


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    device.capability.cache_clear()
    yield
    device.capability.cache_clear()


def gpu(patch: pytest.MonkeyPatch, numbers: tuple[int, int], hip: str | None = None) -> None:
    """A GPU as PyTorch reports it."""
    patch.setattr(torch.version, "hip", hip)
    patch.setattr(torch.cuda, "get_device_capability", lambda *_: numbers)
    patch.setattr(torch.cuda, "get_device_name", lambda *_: "one")


def every(capability: tuple[int, int]) -> dict[str, Settings]:
    """Settings of all launches that have a table by capability, 16-bit heads of 128."""
    chip = device.row(capability)
    return {
        "attention": settings(chip, 128, 2, 128, 128),
        "groups": group_settings(chip, 2),
        "groups in pages": paged_settings(chip, 2, 64),
        "sampled": mass.settings(chip, 128, 2),
        "anchor": anchor.settings(chip, 128, 2),
        "rowmax": rowmax.settings(chip, 128, 2),
        "rowmax, 8 bits": rowmax.settings(chip, 128, 1),
    }


def test_products_of_a_warpgroup_are_one_chips_alone() -> None:
    assert device.row((9, 0)).wgmma
    assert not any(device.row(numbers).wgmma for numbers in (*OTHERS, (13, 0), device.NONE))


@pytest.mark.parametrize("numbers", [(9, 0), (9, 4), (9, 5), (11, 0)])
def test_amds_gpus_take_none_of_hoppers_ways(numbers: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, numbers, "6.4.0")
    assert device.NONE == device.capability(GPU)
    wrong = Refusal("hopper", "needs an NVIDIA GPU of capability 9.0, this one is AMD's")
    assert wrong in choose(CALL, MASK, Wanted(), SHIPPED).refused
    assert not rowmax.in_8_bits(CALL, "auto")
    assert not rowmax.in_8_bits(CALL, "fp8")
    assert not device.chip(GPU).cudnn
    assert every(device.capability(GPU)) == every(device.NONE)


@pytest.mark.parametrize("numbers", [one for one in OTHERS if all(not family.place(one) for family in SHIPPED)])
def test_another_gpu_says_why_the_portable_kernel_serves(
    numbers: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(monkeypatch, numbers)
    assert numbers == device.capability(GPU)
    choice = choose(CALL, MASK, Wanted(), SHIPPED)
    assert "portable" == choice.family.name
    wrong = "needs an NVIDIA GPU of capability 9.0, this one has {}.{}".format(*numbers)
    assert Refusal("hopper", wrong) in choice.refused
    reduced = choose(CALL, MASK, Wanted(precision="int8"), SHIPPED).refused
    assert {Refusal("hopper-int8", wrong), Refusal("hopper", wrong)} <= {*reduced}


@pytest.mark.parametrize("numbers", OTHERS)
def test_the_cap_on_registers_is_hoppers_alone(numbers: tuple[int, int]) -> None:
    capped = {"attention", "anchor", "rowmax, 8 bits"}
    assert capped == {name for name, one in every((9, 0)).items() if one.maxnreg}
    assert [] == [name for name, one in every(numbers).items() if one.maxnreg]


def test_what_has_less_shared_memory_than_hopper_gets_smaller_tiles() -> None:
    assert every((12, 0)) == every((8, 9))
    assert every((10, 0)) != every((8, 9))


@pytest.mark.parametrize("dims", sorted(HEAD_DIMS))
@pytest.mark.parametrize("numbers", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_step_of_attention_fits_into_shared_memory(
    itemsize: int, numbers: tuple[int, int], dims: tuple[int, int]
) -> None:
    """Queries, and as many keys and values as there are stages."""
    if itemsize == 4 and max(dims) > HALVES_ALONE:
        pytest.skip("refused")
    wide, narrow = (max(64, power_of_two(one)) for one in dims)
    chip = device.row(numbers)
    used = settings(chip, wide, itemsize, 128, 128)
    numbers_held = used.block_m * wide + used.stages * used.block_n * (wide + narrow)
    assert numbers_held * itemsize <= (227 if chip.large else 99) << 10


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
        ("core/sparseprefill/kernels/family/chips.py", "get_device_capability"),
        ("adapters/cli/setup.py", "get_device_properties"),  # its memory
        ("core/sparseprefill/kernels/family/chips.py", "get_device_properties"),  # its multiprocessors
    } == found


def test_other_devices_are_what_pytorch_calls_them(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, (9, 0), "6.4.0")
    assert ["cpu", "rocm", "meta"] == [device_type(torch.device(name)) for name in ("cpu", "cuda", "meta")]
    assert sp.AutoExecutor().choose(sp.AttentionCall(*(torch.zeros(1, 1, 4, 16) for _ in range(3)))) is not None
