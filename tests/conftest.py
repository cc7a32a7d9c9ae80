"""Settings for every test: interpreter, hypothesis profiles, markers, threads, and poisoned fresh memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from helpers.interpreter import quicken

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel module is imported, so before any is
    quicken()
# `gate="auto"` keeps short prompts dense on a CPU, and those of tests are short; set to nothing it is off.
os.environ.setdefault("SPARSEPREFILL_BREAKEVEN", "")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it in deterministic mode

# Many small operations: more threads cost more than they bring, and far more where cores are shared.
torch.set_num_threads(1)

SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large)
settings.register_profile("dev", max_examples=25, deadline=None, suppress_health_check=SLOW)
settings.register_profile("ci", max_examples=25, deadline=None, derandomize=True, suppress_health_check=SLOW)
settings.register_profile("thorough", max_examples=200, deadline=None, suppress_health_check=SLOW)
settings.register_profile("gpu", max_examples=50, deadline=None, suppress_health_check=SLOW)
# For mutation testing: the same examples every time, and a failure is enough, however large.
FIRST = (Phase.explicit, Phase.generate)
settings.register_profile(
    "mutants", max_examples=25, deadline=None, derandomize=True, suppress_health_check=SLOW, phases=FIRST
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") == "true" else "dev"))


@pytest.hookimpl(tryfirst=True)  # before -m chooses by the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    # Poisoning needs deterministic mode; operations without such a variant only warn, which is of no interest here.
    quiet = pytest.mark.filterwarnings("ignore:.*eterministic.*:UserWarning")
    for item in items:
        item.add_marker(quiet)
        # Kernels that the interpreter runs on a CPU (`kernels.device.DEVICE`) are a GPU's where there is one.
        if CUDA and hasattr(getattr(item, "module", None), "DEVICE"):
            item.add_marker(pytest.mark.gpu)
        if not CUDA and item.get_closest_marker("gpu"):
            item.add_marker(no_gpu)


@pytest.hookimpl(optionalhook=True)  # -p no:xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With -n alone, a worker keeps to its share as long as it can: what tests of a file share is mostly made once."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getvalue("dist") == "load" else None


@pytest.fixture(autouse=True)
def _poisoned_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fresh memory (`torch.empty` and its kin) holds NaN, or the largest integer: a row left unwritten is seen."""
    if "benchmark" in request.fixturenames:
        yield
        return
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = True
    torch.set_deterministic_debug_mode("warn")  # without the second that `use_deterministic_algorithms` imports for
    yield
    torch.set_deterministic_debug_mode("default")
