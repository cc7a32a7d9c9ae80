"""Times `forward_extend` on a pool of SGLang's layout: ``python -m lab.sglang`` (from tests/).

One layer of one request: new tokens behind others that are in the pool, through the backend's own code, next to dense
attention on the same keys without pages: FlashAttention-4 where it is installed, and the library's. SGLang is not
needed. Needs the extra ``cli``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from attrs import asdict, frozen
from sparseprefill.adapters.calibration.measure import HeadSizes
from sparseprefill.adapters.serving.model import Model
from sparseprefill.adapters.serving.tally import Owner
from sparseprefill.adapters.sglang import known
from sparseprefill.adapters.sglang.backend import State, prefilling
from sparseprefill.adapters.sglang.options import given
from sparseprefill.adapters.sglang.runtime import Runtime
from torch import Tensor

from lab.bench.clock import Clock
from sparseprefill.call import AttentionCall
from sparseprefill.executors.auto import AutoExecutor
from sparseprefill.mask.mask import SparseMask
from sparseprefill.plan import Plan
from sparseprefill.profiles.identity import ModelIdentity

FP8 = torch.float8_e4m3fn
DEFAULTS = ("dense", "bfla", "rowmax", "flexprefill")


@frozen(kw_only=True)
class Row:
    """Milliseconds. difference: largest, of the outputs, to the library's dense attention; of a sparse method that is
    what it leaves out. reasons: why calls were dense, empty where all ran sparse."""

    method: str
    new: int
    cached: int
    page: int
    cache: str
    copies: bool
    density: float | None
    kernel: str
    milliseconds: float
    dense: float
    peer: float | None
    difference: float
    reasons: str


class Request:
    """As SGLang's: what `known` and the plan read. tokens: of its prompt."""

    def __init__(self, rid: str, tokens: int) -> None:
        self.rid, self.cache_salt = rid, None
        self.origin_input_ids = self.full_untruncated_fill_ids = range(tokens)
        self.sampling_params = SimpleNamespace(custom_params=None)
        self.kv, self.extend_end = SimpleNamespace(req_pool_idx=1), tokens

    def finished(self) -> bool:
        """Never: it is over when nobody holds it."""
        return False


class Nobody:
    """In the place of SGLang's own attention, which is never asked: what does not run sparse fails."""

    def init_forward_metadata(self, batch: Any) -> None:
        """There is none."""

    def forward_extend(self, *given: Any, **more: Any) -> Tensor:
        raise RuntimeError("a call was left to SGLang's own attention, which is not here")


class Layer:
    """One layer over a pool: ``[slots, Hkv, D]`` of keys, and of values, whose pages are out of order."""

    def __init__(self, sizes: HeadSizes, keys: int, page: int, cache: str, device: torch.device) -> None:
        self.sizes, self.keys, self.page = sizes, keys, page
        self.q, k, v = sizes.made_up(keys, device)
        slots = -(-keys // page) * page
        order = torch.randperm(slots // page, generator=torch.Generator().manual_seed(0)).to(device) + 1
        at = (order[:, None] * page + torch.arange(page, device=device)).flatten()
        self.rows = torch.zeros(2, slots, dtype=torch.int32, device=device)
        self.rows[1] = at.int()
        stored = FP8 if cache == "fp8" else sizes.torch_dtype
        self.pool = [torch.zeros(slots + page, *x.shape[1:2], x.shape[3], device=device, dtype=stored) for x in (k, v)]
        for buffer, x in zip(self.pool, (k, v), strict=True):
            raw = x[0].transpose(0, 1).to(stored)
            buffer.view(torch.uint8 if cache == "fp8" else stored)[at[:keys]] = (
                raw.view(torch.uint8) if cache == "fp8" else raw
            )
        self.k, self.v = (x.to(stored).to(sizes.torch_dtype) for x in (k, v))

    def backend(self, method: str, copies: bool) -> Any:
        """SGLang's backend with a method, over this pool."""
        k, v = self.pool
        pool = SimpleNamespace(get_key_buffer=lambda _: k, get_value_buffer=lambda _: v)
        runner = SimpleNamespace(
            token_to_kv_pool=pool, req_to_token_pool=SimpleNamespace(req_to_token=self.rows), page_size=self.page
        )
        sizes = self.sizes
        table = {"method": method, "gate": False, "recall_every": 0, "copies": copies, "log_interval": 0}
        whole = ModelIdentity(
            name="m", architecture="M", layers=1, heads=sizes.heads, kv_heads=sizes.kv_heads, head_dim=sizes.head_dim,
            digest="",
        )  # fmt: skip
        runtime = Runtime.made(given(json.dumps(table)), Model(whole, whole, "M", "none", 0), Owner())
        known.tell(runtime)
        host: Any = Nobody()
        host.__class__ = prefilling(Nobody)
        host.sparse = State(runtime, runner, Nobody)
        return host

    def extend(self, host: Any, new: int) -> Callable[[], Tensor]:
        """A step with the last `new` tokens of a prompt whose request comes anew each time; K and V are in the pool."""
        sizes, start = self.sizes, self.keys - new
        q = self.q[0, :, -new:].transpose(0, 1).reshape(new, -1).contiguous()
        layer = SimpleNamespace(
            layer_id=0, tp_q_head_num=sizes.heads, tp_k_head_num=sizes.kv_heads, qk_head_dim=sizes.head_dim,
            v_head_dim=sizes.head_dim, scaling=sizes.head_dim**-0.5, logit_cap=0.0, sliding_window_size=-1,
            attn_type="decoder", is_cross_attention=False, use_irope=False, pos_encoding_mode="NONE",
            xai_temperature_len=-1, k_scale=None, v_scale=None,
        )  # fmt: skip
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(name="EXTEND"), rids=["r"], extend_prefix_lens_cpu=[start],
            extend_seq_lens_cpu=[new],
        )  # fmt: skip

        def step() -> Tensor:
            request = Request("r", self.keys)
            known.meet(None, request)
            host.init_forward_metadata(batch)
            host.sparse.runtime.requests.end("r")  # the next is another of the same id
            out: Tensor = host.forward_extend(q, None, None, layer, batch, False)
            return out

        return step

    def dense(self, new: int) -> Callable[[], Tensor]:
        """The library's attention with every key, on contiguous tensors."""
        call, executor = AttentionCall(self.q[:, :, -new:], self.k, self.v), AutoExecutor()
        return lambda: executor.execute(call, Plan(SparseMask.full(call))).out

    def peer(self, new: int) -> Callable[[], Any] | None:
        """FlashAttention-4's on the same tensors; None where it is not installed."""
        try:
            attend = import_module("flash_attn.cute").flash_attn_func
        except ImportError:
            return None
        q, k, v = (x.transpose(1, 2).contiguous() for x in (self.q[:, :, -new:], self.k, self.v))
        return lambda: attend(q, k, v, causal=True)


def rows(
    sizes: HeadSizes, new: int, cached: int, page: int, cache: str, copies: bool, methods: list[str], clock: Clock
) -> Iterator[Row]:
    """One row a method."""
    layer = Layer(sizes, new + cached, page, cache, clock.device)
    dense, peer = layer.dense(new), layer.peer(new)
    full = dense()[0].transpose(0, 1).reshape(new, -1)
    theirs = None if peer is None else clock.median(peer) * 1e3
    for method in methods:
        host = layer.backend(method, copies)
        step = layer.extend(host, new)
        difference = float((step() - full).abs().max())
        seconds, beside = clock.beside(step, dense)
        report = host.sparse.runtime.report()
        said = report.layers[0]
        yield Row(
            method=method, new=new, cached=cached, page=page, cache=cache, copies=copies, density=said.density,
            kernel=" ".join(report.kernels), milliseconds=seconds * 1e3, dense=beside * 1e3, peer=theirs,
            difference=difference, reasons="; ".join(said.reasons),
        )  # fmt: skip


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help=__doc__)
def main(
    new: Annotated[int, typer.Option(help="Tokens of the chunk.")] = 8192,
    cached: Annotated[list[int] | None, typer.Option(help="Tokens before it; several.")] = None,
    page: Annotated[list[int] | None, typer.Option(help="Slots of a page; several.")] = None,
    method: Annotated[list[str] | None, typer.Option(help="Methods; several.")] = None,
    cache: Annotated[list[str] | None, typer.Option(help="model or fp8; several.")] = None,
    in_place: Annotated[bool, typer.Option(help="Also with copies of K and V forbidden.")] = False,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
    dtype: str = "bfloat16",
    rounds: int = 20,
    seconds: float = 1.0,
    out: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
) -> None:
    """The command."""
    sizes = HeadSizes(heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    clock = Clock(torch.device(device), rounds, seconds)
    found: list[Row] = []
    typer.echo("| method | new | cached | page | cache | copies | density | ms | dense ms | FA4 ms | diff. | kernel |")
    typer.echo("|" + " --- |" * 12)
    copies = (True, False) if in_place else (True,)
    for before, size, kind, may in product(cached or [0, 32768, 131072], page or [1, 64], cache or ["model"], copies):
        for row in rows(sizes, new, before, size, kind, may, list(method or DEFAULTS), clock):
            found.append(row)
            density = "" if row.density is None else f"{row.density:.3f}"
            theirs = "" if row.peer is None else f"{row.peer:.3f}"
            asked = (row.method, f"{new:,}", f"{before:,}", str(size), kind, str(may), density)
            times = (f"{row.milliseconds:.3f}", f"{row.dense:.3f}", theirs, f"{row.difference:.2g}")
            typer.echo(f"| {' | '.join((*asked, *times, f'{row.kernel} {row.reasons}'))} |")
    if out is not None:
        out.write_text(json.dumps([asdict(row) for row in found], indent=1))


if __name__ == "__main__":
    app()
