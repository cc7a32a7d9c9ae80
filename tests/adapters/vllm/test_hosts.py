"""Which of vLLM's own backends the CUDA adapter stands on, read in vLLM itself; nothing runs."""

# pyright: reportMissingImports=false

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from . import engine

pytestmark = [engine.NEEDED]


def config(dtype: torch.dtype = torch.bfloat16, cache: str = "auto", size: int = 128, **model: Any) -> Any:
    """The part of a VllmConfig that decides."""
    told = SimpleNamespace(dtype=dtype, get_head_size=lambda: size, **model)
    return SimpleNamespace(model_config=told, cache_config=SimpleNamespace(cache_dtype=cache))


SUITED = {
    "bfloat16": (config(), True),
    "float16, said so": (config(torch.float16, "float16"), True),
    "float32": (config(torch.float32), False),
    "an fp8 cache": (config(cache="fp8"), False),
    "heads of 512": (config(size=512), False),
    "a prefix that sees itself": (config(is_mm_prefix_lm=True), False),
    "a window behind a prefix": (config(rswa_window=64), False),
    "no engine": (None, False),
}


@pytest.mark.parametrize("version", [3, 2, None])
@pytest.mark.parametrize("name", SUITED)
def test_flash_attention_3_where_it_takes_the_engine(
    name: str, version: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparseprefill.adapters.vllm import cuda
    from vllm.v1.attention.backends import fa_utils

    told, suits = SUITED[name]
    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda *_, **__: version)
    monkeypatch.setattr(cuda, "get_current_vllm_config_or_none", lambda: told)
    assert (suits and version == 3) is cuda.flash_suits(told)
    wanted = "FLASH_ATTN" if suits and version == 3 else "TRITON_ATTN"
    assert wanted == cuda.SparseBackend.get_impl_cls().host_name == cuda.SparseBackend.get_builder_cls().host_name


def test_vllm_finds_the_class_by_its_path() -> None:
    from sparseprefill.adapters.vllm.plugin import CUDA_BACKEND
    from sparseprefill.adapters.vllm.triton import SparseTritonBackend
    from vllm.utils.import_utils import resolve_obj_by_qualname

    assert resolve_obj_by_qualname(CUDA_BACKEND) is SparseTritonBackend, "no engine is there"
    with pytest.raises(AttributeError, match="has no attribute 'Other'"):
        resolve_obj_by_qualname(CUDA_BACKEND.replace("SparseBackend", "Other"))


def test_both_are_vllms_own_but_for_what_runs_sparse() -> None:
    """Attention of a batch without parts is the host's method, and no graph records a batch with prefill."""
    from sparseprefill.adapters.vllm.flash import SparseFlashBackend
    from sparseprefill.adapters.vllm.triton import SparseTritonBackend
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

    for ours, theirs in ((SparseFlashBackend, FlashAttentionBackend), (SparseTritonBackend, TritonAttentionBackend)):
        assert issubclass(ours, theirs)
        assert issubclass(ours.get_impl_cls(), theirs.get_impl_cls())
        builder = ours.get_builder_cls()
        assert issubclass(builder, theirs.get_builder_cls())
        assert builder.get_cudagraph_support(None, None) is AttentionCGSupport.UNIFORM_BATCH
        assert not builder.supports_update_block_table
        assert ours.get_name() == "CUSTOM"
        assert not ours.supports_batch_invariance()


def test_for_latent_attention_the_flag_is_named() -> None:
    """vLLM gives a backend's reasons where it refuses it, and ours cannot have MLA models."""
    from sparseprefill.adapters.vllm.triton import SparseTritonBackend
    from vllm.platforms.interface import DeviceCapability

    sizes = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16}
    config = {**sizes, "has_sink": False, "use_sparse": False, "use_mm_prefix": False, "attn_type": "decoder"}
    asked = {**config, "use_per_head_quant_scales": False, "device_capability": DeviceCapability(9, 0)}
    assert SparseTritonBackend.validate_configuration(**asked, use_mla=False) == []
    reasons = SparseTritonBackend.validate_configuration(**asked, use_mla=True)
    assert "for this model it is --attention-config.mla_prefill_backend CUSTOM" in reasons
