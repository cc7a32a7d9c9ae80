"""Moves of a tiny call: how often control passes from one file of the package to another, returns included.

`python -m house.moves` (from tests/) prints the counts; with the name of a method, each of its moves, too.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from sparseprefill.adapters.serving.model import Model
from sparseprefill.adapters.serving.tally import Owner
from sparseprefill.adapters.vllm.names import Names
from sparseprefill.adapters.vllm.options import parse
from sparseprefill.adapters.vllm.pages import pages_of
from sparseprefill.adapters.vllm.plan import plan
from sparseprefill.adapters.vllm.runtime import Runtime

from helpers.walk import Walk, layer_walk, pipeline_walk, watched
from sparseprefill.profiles.identity import ModelIdentity

TOKENS, HEADS, KV_HEADS, WIDTH, PAGE = 300, 4, 2, 64, 16
METHODS = ("dense", "rowmax", "anchor-attention", "flexprefill", "bfla")
ASKED_OF_VLLM = {
    "vllm.config": ("get_current_vllm_config", "get_layers_from_vllm_config"),
    "vllm.model_executor.layers.attention": ("Attention",),
    "vllm.v1.attention.backend": ("CommonAttentionMetadata",),
    "vllm.v1.request": ("Request",),
}
"""What the module of vLLM's backends imports; none of it runs in a layer's forward."""


@dataclass
class Common:
    """What a plan reads of vLLM's metadata of a step that has one prompt, whole."""

    num_reqs: int = 1
    causal: bool = True

    def __post_init__(self) -> None:
        self.is_prefilling = torch.tensor([True])
        self.query_start_loc_cpu = torch.tensor([0, TOKENS])
        self.seq_lens_cpu_upper_bound = torch.tensor([TOKENS])


def pipeline_moves(method: str) -> Walk:
    """Of the second ``pipeline(q, k, v)`` on a CPU."""
    return pipeline_walk(method, tokens=TOKENS)


def layer_moves(method: str) -> Walk:
    """Of one layer's attention in a transformers model on a CPU."""
    return layer_walk(method, tokens=TOKENS)


def vllm_moves(method: str) -> Walk:
    """Of a second layer in the second step of a vLLM whose own part is made up; each step has one prompt."""
    impls, runtime = _impls(method)
    cache = torch.randn(TOKENS // PAGE + 1, KV_HEADS, PAGE, 2 * WIDTH)
    walks = list[Walk]()
    for step in range(2):
        runtime.names = _named(f"request {step}")
        parts, table = plan(runtime, Common(), lambda common: common), torch.arange(len(cache), dtype=torch.int32)
        metadata = SimpleNamespace(parts=parts, block_table=table[None])
        for index, impl in enumerate(impls):
            layer = SimpleNamespace(layer_name=f"model.layers.{index}.self_attn.attn")
            query, output = torch.randn(TOKENS, HEADS, WIDTH), torch.full((TOKENS, HEADS, WIDTH), torch.nan)
            with watched() as seen:
                impl.forward(layer, query, query, query, cache, metadata, output)
            walks.append(seen)
            assert bool(output.isfinite().all()), "the method ran"
    assert [one.sparse_calls for one in runtime.report().layers] == [2, 2]
    return walks[-1]


def _named(name: str) -> Names:
    """The requests of a model runner that has one."""
    request = SimpleNamespace(num_prompt_tokens=TOKENS, sampling_params=None)
    runner = SimpleNamespace(requests={name: request}, input_batch=SimpleNamespace(req_ids=[name]))
    return Names(lambda: runner)


def _impls(method: str) -> tuple[list[Any], Runtime]:
    """Attention of two layers as the backends have it, over a host that is never asked."""

    class Host:
        attn_type, sliding_window, kv_cache_dtype, scale, sinks = "decoder", -1, "auto", WIDTH**-0.5, None
        num_heads, num_kv_heads, head_size = HEADS, KV_HEADS, WIDTH

        def forward(self, *_: object) -> None:
            raise AssertionError("the host was asked")

    class Impl(_sparse_impl(), Host):  # type: ignore[misc]
        host_name = "HOST"

        def read(self, layer: Any, cache: torch.Tensor, table: torch.Tensor, length: int, dtype: torch.dtype) -> Any:
            return pages_of(cache, WIDTH, table, length, dtype=dtype)

    sizes: dict[str, Any] = {"layers": 2, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": WIDTH}
    model = ModelIdentity(name="m", architecture="M", digest="d", **sizes)
    table = {"sparseprefill": {"method": method, "gate": False}}
    runtime = Runtime.made(parse(table), Model(model, model, "M", "HOST", 0), Owner())
    impls = [Impl.__new__(Impl) for _ in range(2)]
    for one in impls:
        one.facts, one.stock, one.runtime = None, one.forward, runtime
    return impls, runtime


def _sparse_impl() -> Any:
    """`SparseImpl`, also where there is no vLLM."""
    fakes: dict[str, ModuleType] = {}
    if find_spec("vllm") is None:
        parents = {name.rpartition(".")[0] for name in ASKED_OF_VLLM} | {"vllm", "vllm.v1", "vllm.model_executor"}
        fakes = {name: ModuleType(name) for name in (*parents, *ASKED_OF_VLLM)}
        for module, names in ASKED_OF_VLLM.items():
            vars(fakes[module]).update(dict.fromkeys(names))
    with patch.dict(sys.modules, fakes):
        from sparseprefill.adapters.vllm.shared import SparseImpl
    return SparseImpl


WALKS = {"pipeline": pipeline_moves, "transformers layer": layer_moves, "vLLM layer": vllm_moves}

if __name__ == "__main__":
    for method in sys.argv[1:] or METHODS:
        for label, walks in WALKS.items():
            walk = walks(method)
            print(f"{label} {method}: {len(walk.moves)} moves, {len(walk.files)} files")  # noqa: T201
            if sys.argv[1:]:
                print("\n".join(f"  {a or '(outside)'} -> {b}  {by}" for a, b, by in walk.moves))  # noqa: T201
