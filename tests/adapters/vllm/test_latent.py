"""Refusals of the prefill backend for multi-head latent attention, against vLLM's own classes; no engine runs."""

# ruff: noqa: SIM300 - asserts read expected == actual
# pyright: reportMissingImports=false

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sparseprefill.adapters.serving.layer import WINDOW, Layer
from sparseprefill.adapters.serving.options import read_table
from sparseprefill.adapters.vllm.plugin import CPU_PREFILL, CUDA_PREFILL

from sparseprefill.errors import AttachError, UnsupportedCallError

from . import engine

pytestmark = [engine.NEEDED]
HEADS, NOPE, ROPE, RANK, VALUES = 2, 16, 8, 32, 16


def a_layer(impl: str = "cpu_mla.CPUMLAImpl", **changes: Any) -> Any:
    """A stand-in for vLLM's MLAAttention. impl: class of its attention."""
    from vllm.utils.import_utils import resolve_obj_by_qualname

    kind = resolve_obj_by_qualname(f"vllm.v1.attention.backends.mla.{impl}")
    backend = SimpleNamespace(get_name=lambda: "AMX_MLA" if "AMX" in impl else "OTHER")
    told = {"layer_name": "model.layers.3.self_attn.attn", "scale": 0.1, "sliding_window": None, "use_pcp": False}
    sparse = changes.pop("is_sparse", False)
    made: Any = object.__new__(type(kind.__name__, (kind,), {"is_sparse": sparse}))
    return SimpleNamespace(**{**told, "impl": made, "attn_backend": backend, **changes})


REASONS: dict[str, tuple[dict[str, Any], str | None]] = {
    "plain": ({}, None),
    "AMX": (
        {"impl": "amx_mla.AMXMLAImpl"},
        "AMX_MLA computes prefill without a prefill backend: add --attention-backend CPU_MLA",
    ),
    "indexer": ({"is_sparse": True}, "the model chooses its keys itself (sparse MLA)"),
    "window": ({"sliding_window": 64}, WINDOW),
    "spread": ({"use_pcp": True}, "the prompt is spread over devices (context parallelism)"),
    "nameless": ({"layer_name": "attn"}, "the layer's name 'attn' has no index"),
}


@pytest.mark.parametrize("name", REASONS)
def test_layers_that_stay_dense(name: str) -> None:
    from sparseprefill.adapters.vllm import latent

    changes, why = REASONS[name]
    found = latent.layer_of(a_layer(**changes))
    assert why == found.reason
    if why is None:
        assert (3, 0.1) == (found.index, found.scale)


def test_vllm_finds_the_classes_by_their_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparseprefill.adapters.vllm import latent
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend
    from vllm.v1.attention.backends.mla.prefill.zen_cpu_sdpa import ZenCPUSDPAMLAPrefillBackend

    cpu = resolve_obj_by_qualname(CPU_PREFILL)
    assert issubclass(cpu, CPUSDPAMLAPrefillBackend)
    assert CPUSDPAMLAPrefillBackend.get_name() == cpu.get_name()
    asked: list[Any] = []

    def choose(sizes: Any) -> Any:
        asked.append(sizes)
        return ZenCPUSDPAMLAPrefillBackend

    monkeypatch.setattr(type(current_platform), "get_mla_prefill_backend_cls", staticmethod(choose))
    text = SimpleNamespace(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    told = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16, hf_text_config=text))
    monkeypatch.setattr(latent, "get_current_vllm_config_or_none", lambda: told)
    found = resolve_obj_by_qualname(CUDA_PREFILL)
    assert issubclass(found, ZenCPUSDPAMLAPrefillBackend)
    assert found is resolve_obj_by_qualname(CUDA_PREFILL), "one class, however often it is asked for"
    assert asked[0].dtype == torch.bfloat16
    assert 128 == asked[0].mla_dimensions.qk_nope_head_dim
    with pytest.raises(AttributeError, match="has no attribute 'Other'"):
        resolve_obj_by_qualname(CUDA_PREFILL.replace("SparsePrefillBackend", "Other"))


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The CPU's, of an engine in which it is selected."""
    from sparseprefill.adapters.vllm import latent

    monkeypatch.setattr(latent, "layer_runtime", lambda *_, **__: SimpleNamespace())
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
    return latent.SparseCPUPrefill(HEADS, 0.1, RANK, NOPE, ROPE, VALUES, config)


def test_a_vllm_that_makes_them_elsewhere_is_refused(backend: Any) -> None:
    words = "--attention-config.mla_prefill_backend CUSTOM: this vLLM makes its prefill backends elsewhere"
    with pytest.raises(AttachError, match=re.escape(words)):
        backend.clone()


def test_a_step_of_decoding_alone_has_no_parts(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM counts short chunks as decoding on GPUs, and prepares no prefill backend where all rows are: nothing of the
    step before may be left."""
    from sparseprefill.adapters.vllm import latent

    class Builder:
        def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
            if common.prefills:
                made.prepare_metadata(SimpleNamespace(query_lens_cpu=[600]))
            return "the host's"

    monkeypatch.setattr(latent, "_announce", lambda *_: None)
    monkeypatch.setattr(latent, "served", lambda *_: [])
    monkeypatch.setattr(latent.SparseCPUPrefill.host, "prepare_metadata", lambda *_: None)
    part = SimpleNamespace(first=0, last=1, begin=0, end=600)
    monkeypatch.setattr(latent, "plan", lambda *_: [part])
    made, builder = backend, Builder()
    made._join({"self": builder, "layer_names": ["model.layers.0.self_attn.attn"]})
    step = {"num_reqs": 1, "query_start_loc_cpu": [0, 600]}
    for prefills in (True, False, True):
        assert "the host's" == builder.build(0, SimpleNamespace(prefills=prefills, **step))
        assert ([part] if prefills else None) == made.parts
        assert prefills is (made._step is not None)


def test_rows_that_vllm_decodes_are_left_to_it() -> None:
    from sparseprefill.adapters.vllm import latent

    noted: list[str] = []
    runtime: Any = SimpleNamespace(options=read_table({"method": "dense"}), leave=noted.append)
    latent._leave_decoding(runtime, 1)
    assert (128, []) == (runtime.options.min_query, noted)
    latent._leave_decoding(runtime, 512)
    assert 513 == runtime.options.min_query
    assert noted == ["min_query is 513 in place of 128: vLLM computes up to 512 tokens of a request as decoding here"]


def test_outputs_are_ours(backend: Any) -> None:
    assert not backend.supports_out()
    assert not backend.supports_quant_output(None)


def a_cache(dtype: torch.dtype) -> tuple[Any, torch.Tensor]:
    """An attention with random weights, and its cache: five blocks of four tokens."""
    torch.manual_seed(0)
    weight = torch.randn(RANK, HEADS * (NOPE + VALUES), device="cpu")
    impl = SimpleNamespace(kv_b_proj=lambda latent: (latent @ weight, None))
    return impl, torch.randn(5, 4, RANK + ROPE, device="cpu").to(dtype)


def test_a_context_is_read_through_the_block_table(backend: Any) -> None:
    impl, cache = a_cache(torch.float32)
    asking = Layer(0, 0.1, None, None, None), impl, cache
    backend._step = SimpleNamespace(block_table=torch.tensor([[1, 0, 0], [4, 2, 0]], dtype=torch.int32, device="cpu"))
    k, v = backend._context(asking, 1, 6)
    latent = torch.cat((cache[4], cache[2]))[:6]
    both = impl.kv_b_proj(latent[:, :RANK])[0].view(6, HEADS, -1)
    assert torch.equal(both[..., :NOPE], k[..., :NOPE])
    assert torch.equal(latent[:, None, RANK:].expand(-1, HEADS, -1), k[..., NOPE:])
    assert torch.equal(both[..., NOPE:], v)


def test_a_context_of_an_fp8_cache_is_refused(backend: Any) -> None:
    impl, cache = a_cache(torch.float8_e4m3fn)
    asking = Layer(0, 0.1, None, None, None), impl, cache
    words = r"the KV cache is torch\.float8_e4m3fn: a context is read from bf16, fp16 and fp32 alone"
    with pytest.raises(UnsupportedCallError, match=words):
        backend._context(asking, 0, 4)


def test_queries_in_fp8_are_the_hosts(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparseprefill.adapters.vllm import latent

    said: list[str | None] = []

    def run(runtime: Any, layer: Layer, *_: Any, **__: Any) -> bool:
        said.append(layer.reason)
        return False

    monkeypatch.setattr(latent, "run", run)
    monkeypatch.setattr(latent.SparseCPUPrefill.host, "run_prefill_new_tokens", lambda *_: "the host's")
    backend.parts, backend.asking = [], (Layer(0, 0.1, None, None, None), None, None)
    q = torch.zeros(4, HEADS, NOPE + ROPE, device="cpu").to(torch.float8_e4m3fn)
    assert "the host's" == backend.run_prefill_new_tokens(q, q, q[..., :VALUES], False)
    assert ["queries are in torch.float8_e4m3fn: leave use_prefill_query_quantization out"] == said
