"""Moves of a call: how often control passes from one file of the package to another, returns included.

`python -m house.moves` (from tests/) prints the counts; with the name of a method, each of its moves, too. Those of a
tiny call on a CPU, and those of the path that a GPU takes (`gpu_path`), which another process walks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import InitVar, dataclass
from importlib.util import find_spec
from pathlib import Path
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


@dataclass(frozen=True)
class Sizes:
    """Of a layer's call: the prompt's tokens, those before the chunk, and the model's heads."""

    tokens: int = 300
    before: int = 0
    heads: int = 4
    kv_heads: int = 2
    width: int = 64
    dtype: torch.dtype = torch.float32

    @property
    def rows(self) -> int:
        """Of the chunk."""
        return self.tokens - self.before


SMALL, PAGE = Sizes(), 16
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
    """What a plan reads of vLLM's metadata of a step that has one chunk."""

    of: InitVar[Sizes]
    num_reqs: int = 1
    causal: bool = True

    def __post_init__(self, of: Sizes) -> None:
        self.is_prefilling = torch.tensor([True])
        self.query_start_loc_cpu = torch.tensor([0, of.rows])
        self.seq_lens_cpu_upper_bound = torch.tensor([of.tokens])


def pipeline_moves(method: str) -> Walk:
    """Of the second ``pipeline(q, k, v)`` on a CPU."""
    return pipeline_walk(method, tokens=SMALL.tokens)


def layer_moves(method: str) -> Walk:
    """Of one layer's attention in a transformers model on a CPU."""
    return layer_walk(method, tokens=SMALL.tokens)


def vllm_moves(method: str, of: Sizes = SMALL) -> Walk:
    """Of a second layer in the second step of a vLLM whose own part is made up; each step has one chunk."""
    impls, runtime = impls_of(method, of)
    cache = torch.randn(of.tokens // PAGE + 1, of.kv_heads, PAGE, 2 * of.width).to(of.dtype)
    walks = list[Walk]()
    for step in range(2):
        runtime.names = _named(f"request {step}", of)
        parts, table = plan(runtime, Common(of), lambda common: common), torch.arange(len(cache), dtype=torch.int32)
        metadata = SimpleNamespace(parts=parts, block_table=table[None])
        for index, impl in enumerate(impls):
            layer = SimpleNamespace(layer_name=f"model.layers.{index}.self_attn.attn")
            query = torch.randn(of.rows, of.heads, of.width).to(of.dtype)
            output = torch.full_like(query, torch.nan)
            with watched() as seen:
                impl.forward(layer, query, query, query, cache, metadata, output)
            walks.append(seen)
            assert of is not SMALL or bool(output.isfinite().all()), "the method ran"
    assert [one.sparse_calls for one in runtime.report().layers] == [2, 2]
    return walks[-1]


def _named(name: str, of: Sizes) -> Names:
    """The requests of a model runner that has one."""
    request = SimpleNamespace(num_prompt_tokens=of.tokens, sampling_params=None)
    runner = SimpleNamespace(requests={name: request}, input_batch=SimpleNamespace(req_ids=[name]))
    return Names(lambda: runner)


def impls_of(method: str, of: Sizes) -> tuple[list[Any], Runtime]:
    """Attention of two layers as the backends have it, over a host that is never asked."""

    class Host:
        attn_type, sliding_window, kv_cache_dtype, scale, sinks = "decoder", -1, "auto", of.width**-0.5, None
        num_heads, num_kv_heads, head_size = of.heads, of.kv_heads, of.width

        def forward(self, *_: object) -> None:
            raise AssertionError("the host was asked")

    class Impl(_sparse_impl(), Host):  # type: ignore[misc]
        host_name = "HOST"

        def slots(self, layer: Any, query: Any, cache: Any, metadata: Any, output: Any) -> tuple[torch.Tensor, ...]:
            return query, output, cache, metadata.block_table

        def read(self, layer: Any, cache: torch.Tensor, table: torch.Tensor, length: int, dtype: torch.dtype) -> Any:
            return pages_of(cache, of.width, table, length, dtype=dtype)

    sizes: dict[str, Any] = {"layers": 2, "heads": of.heads, "kv_heads": of.kv_heads, "head_dim": of.width}
    model = ModelIdentity(name="m", architecture="M", digest="d", **sizes)
    table = {"sparseprefill": {"method": method, "gate": False}}
    runtime = Runtime.made(parse(table), Model(model, model, "M", "HOST", 0), Owner())
    impls = [Impl.__new__(Impl) for _ in range(2)]
    for one in impls:
        one.facts, one.stock, one.runtime = None, Host.forward, runtime
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


def gpu_path(*methods: str, moves: bool = False) -> str:
    """What `house.gpu` prints: it needs a process of its own, without Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    tests = str(Path(__file__).resolve().parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [tests, environment.get("PYTHONPATH")]))
    command = [sys.executable, "-P", "-m", "house.gpu", *(["--moves"] if moves else []), *methods]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return done.stdout


WALKS = {"pipeline": pipeline_moves, "transformers layer": layer_moves, "vLLM layer": vllm_moves}

if __name__ == "__main__":
    for method in sys.argv[1:] or METHODS:
        for label, walks in WALKS.items():
            walk = walks(method)
            print(f"{label} {method}: {len(walk.moves)} moves, {len(walk.files)} files")  # noqa: T201
            if sys.argv[1:]:
                print("\n".join(f"  {a or '(outside)'} -> {b}  {by}" for a, b, by in walk.moves))  # noqa: T201
    print(gpu_path(*sys.argv[1:] or METHODS, moves=bool(sys.argv[1:])), end="")  # noqa: T201
