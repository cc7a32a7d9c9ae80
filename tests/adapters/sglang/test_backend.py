"""The backend over a stand-in for SGLang: what runs sparse of a batch, and that the rest is the host's."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import gc
import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sparseprefill.adapters.sglang import backend as module
from sparseprefill.adapters.sglang import known
from sparseprefill.adapters.sglang.pages import pages_of
from sparseprefill.adapters.sglang.plan import plan
from torch import Tensor

from sparseprefill import kernels
from sparseprefill.executors.auto import AutoExecutor
from sparseprefill.executors.triton import TritonExecutor
from sparseprefill.kernels.repeat import Step

from . import host as fakes
from .host import HEADS, KV_HEADS, SIZE, Backend, Req, backend, batch, radix_layer

FULL = json.dumps({"method": "dense", "gate": False, "min_query": 16, "recall_every": 0})


@pytest.fixture(autouse=True)
def _write(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's record of where to write is not there."""

    def write(runner: Any, layer: Any, given: Any, k: Tensor, v: Tensor) -> None:
        runner.token_to_kv_pool.set_kv_buffer(layer, given.out_cache_loc, k, v)

    monkeypatch.setattr(module, "_write", write)


def step(host: Any, given: Any, layer: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Ours, and what the host alone says to the same tokens."""
    count = sum(given.extend_seq_lens_cpu)
    q = torch.randn(count, HEADS * SIZE)
    k, v = (torch.randn(count, KV_HEADS, SIZE) for _ in "kv")
    host.init_forward_metadata(given)
    found = host.forward_extend(q, k, v, layer, given, **kwargs)
    alone = Backend(host.sparse.runner)
    alone.init_forward_metadata(given)
    return found, alone.forward_extend(q, k, v, layer, given, **kwargs)


def notes(host: Any) -> set[str]:
    return {name for layer in host.sparse.runtime.report().layers for name in layer.reasons}


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("more", [{}, {"logit_cap": 5.0}])
def test_a_mask_of_every_key_is_the_host_s_attention(page: int, more: dict[str, Any]) -> None:
    """Two prompts of which one is behind a prefix, one too short, one that decodes, in one batch."""
    host = backend(FULL, page)
    some = [(Req("a", 100), 0, 100), (Req("b", 9), 0, 9), (Req("c", 200), 64, 170), (Req("d", 50), 70, 71)]
    found, expected = step(host, batch(host, some), radix_layer(**more))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert [4] == host.seen
    assert 0 == host.calls, "the host computes no row that runs sparse"
    assert [2] == host.sparse.rest.seen
    (report,) = host.sparse.runtime.report().layers[:1]
    assert 2 == report.sparse_calls


def test_sinks_reach_the_kernels() -> None:
    host = backend(FULL)
    sinks = torch.randn(HEADS)
    found, expected = step(host, batch(host, [(Req("a", 40), 0, 40)]), radix_layer(), sinks=sinks)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert not notes(host)


@pytest.mark.parametrize("scale", [None, torch.tensor(2.0)])
@pytest.mark.parametrize("page", [1, 16])
def test_an_fp8_pool_is_read_with_its_scales(scale: Tensor | None, page: int) -> None:
    host = backend(FULL, page, torch.float8_e5m2)
    layer = radix_layer(k_scale=scale, v_scale=scale)
    found, expected = step(host, batch(host, [(Req("a", 64), 0, 64)]), layer)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)
    assert not notes(host)


def test_the_scales_of_a_layer_are_among_what_another_has_others_of(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparseprefill.adapters.sglang import backend as module

    seen: list[tuple[Tensor, ...]] = []
    plain: Any = vars(module)["run"]

    def watched(*given: Any, **more: Any) -> bool:
        seen.append(given[5])
        done: bool = plain(*given, **more)
        return done

    monkeypatch.setattr(module, "run", watched)
    host, (k, v) = backend(FULL, 16, torch.float8_e5m2), (torch.tensor(2.0), torch.tensor(0.5))
    step(host, batch(host, [(Req("a", 64), 0, 64)]), radix_layer(k_scale=k, v_scale=v))
    assert {k.data_ptr(), v.data_ptr()} <= {x.data_ptr() for x in seen[0]}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("page", [1, 16])
def test_layers_of_several_requests_are_repeated(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request has a table of its own, and one launch reads all of them."""
    for name in ("serve", "serve_device"):
        monkeypatch.setattr(kernels, name, lambda _: True)
    executor, repeated = TritonExecutor(), list[int]()
    monkeypatch.setattr(AutoExecutor, "choose", lambda *_: executor)
    monkeypatch.setattr(AutoExecutor, "execute_many", lambda _, *given: executor.execute_many(*given))
    run = Step.run

    def counted(self: Step, slots: Any, layer: int) -> list[Tensor]:
        repeated.append(layer)
        return run(self, slots, layer)

    monkeypatch.setattr(Step, "run", counted)
    for place in (fakes, sys.modules[__name__]):
        monkeypatch.setattr(place, "SIZE", 64)
    host = backend(FULL, page)
    given = batch(host, [(Req("a", 40), 0, 40), (Req("b", 57), 16, 41), (Req("c", 30), 0, 30)])
    for layer in range(2):
        found, expected = step(host, given, radix_layer(layer))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert [1] == repeated
    assert not notes(host)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"sliding_window_size": 8}, "the layer has a sliding window"),
        ({"use_irope": True}, "the layer attends in chunks"),
        ({"pos_encoding_mode": "ALIBI"}, "the layer encodes positions by ALIBI"),
        ({"xai_temperature_len": 4}, "the layer scales its queries by their position"),
    ],
)
def test_a_layer_that_cannot_run_sparse_is_the_host_s(more: dict[str, Any], why: str) -> None:
    host = backend(FULL)
    found, expected = step(host, batch(host, [(Req("a", 40), 0, 40), (Req("b", 5), 0, 5)]), radix_layer(**more))
    assert torch.equal(expected, found)
    assert {why} == notes(host)


def test_further_arguments_are_left_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    host = backend(FULL)
    monkeypatch.setattr(Backend, "_attend", lambda self, q, *_, **__: q)
    found, expected = step(host, batch(host, [(Req("a", 40), 0, 40)]), radix_layer(), q_rope=torch.ones(1))
    assert torch.equal(expected, found)
    assert {"the layer is called with q_rope, which the methods do not know"} == notes(host)


def test_layers_that_are_not_asked_for_are_the_host_s() -> None:
    host = backend(json.dumps({**json.loads(FULL), "layers": [1]}))
    given = batch(host, [(Req("a", 40), 0, 40)])
    found, expected = step(host, given, radix_layer(0))
    assert torch.equal(expected, found)
    assert {"not among the chosen layers"} == notes(host)


def test_a_request_that_fails_is_the_host_s_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    host = backend(FULL)
    first = True

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal first
        if first:
            first = False
            raise ValueError("no pages")
        return pages_of(*args, **kwargs)

    monkeypatch.setattr(module, "pages_of", fail)
    some = [(Req("a", 40), 0, 40), (Req("b", 5), 0, 5), (Req("c", 30), 0, 30)]
    found, expected = step(host, batch(host, some), radix_layer())
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert 1 == host.calls
    assert {"ValueError: no pages"} == notes(host)


@pytest.mark.parametrize("field", ["encoder_lens", "spec_info", "attn_cp_metadata"])
def test_a_batch_of_another_kind_is_the_host_s(field: str) -> None:
    host = backend(FULL)
    found, expected = step(host, batch(host, [(Req("a", 40), 0, 40)], **{field: 1}), radix_layer())
    assert torch.equal(expected, found)
    assert {f"the batch has {field}": 1} == host.sparse.runtime.report().notes


def test_a_mode_that_no_method_knows_is_the_host_s() -> None:
    host = backend(FULL)
    mode = SimpleNamespace(name="SPLIT_PREFILL")
    found, expected = step(host, batch(host, [(Req("a", 40), 0, 40)], forward_mode=mode), radix_layer())
    assert torch.equal(expected, found)
    assert {"batches of mode SPLIT_PREFILL: no method knows them": 1} == host.sparse.runtime.report().notes


def test_a_batch_of_nobody_is_the_host_s() -> None:
    """As SGLang makes them up to warm up, and to record graphs."""
    host = backend(FULL)
    found, expected = step(host, batch(host, [(Req("a", 40), 0, 40)], rids=None), radix_layer())
    assert torch.equal(expected, found)
    assert not host.sparse.runtime.report().notes


def test_a_request_that_nobody_knows_runs_dense() -> None:
    host = backend(FULL)
    given = batch(host, [(Req("a", 40), 0, 40)])
    given.rids = ["b"]
    found, expected = step(host, given, radix_layer())
    assert torch.equal(expected, found)
    assert 1 == host.sparse.runtime.report().notes[known.UNSEEN]


def test_chunks_of_a_prompt_share_a_memory_until_its_last_layer() -> None:
    host = backend(FULL)
    request, rows = Req("a", 90), host.sparse.runner.req_to_token_pool.req_to_token
    memories = []
    for start, end in ((0, 40), (40, 90)):
        given = batch(host, [(request, start, end)])
        host.init_forward_metadata(given)
        memories.append(host.sparse.step.parts[0].prefill.memory)
        assert ("a",) == host.sparse.runtime.requests.names
        for index in (0, 1):
            kv = (torch.randn(end - start, KV_HEADS, SIZE) for _ in "kv")
            host.forward_extend(torch.randn(end - start, HEADS * SIZE), *kv, radix_layer(index), given)
    assert memories[0] is memories[1]
    assert () == host.sparse.runtime.requests.names
    assert plan(host.sparse.runtime, batch(host, [(request, 0, 40)]), rows, 1) is not None, "it was retracted"


def test_a_last_chunk_that_is_too_short_ends_a_prefill_too() -> None:
    host, request = backend(FULL), Req("a", 49)
    for start, end, going in ((0, 40, ("a",)), (40, 49, ())):
        host.init_forward_metadata(batch(host, [(request, start, end)]))
        assert going == host.sparse.runtime.requests.names


def test_a_chunk_is_counted_when_its_last_layer_is_through() -> None:
    """Not by time, nor with the next step: after a prompt there may be none for long."""
    host = backend(FULL)
    given, summary = batch(host, [(Req("a", 40), 0, 40)]), host.sparse.runtime.tally.summary
    host.init_forward_metadata(given)
    for index, said in ((0, ""), (1, "1 sparse, 0 dense, density not measured")):
        host.forward_extend(
            torch.randn(40, HEADS * SIZE), *torch.randn(2, 40, KV_HEADS, SIZE), radix_layer(index), given
        )
        assert said in str(summary.line() or "")
        assert bool(said) == all(chunk.settled for chunk in host.sparse.runtime.chunks)


def test_a_request_that_is_gone_leaves_nothing() -> None:
    host = backend(FULL)
    request = Req("a", 90)
    host.init_forward_metadata(batch(host, [(request, 0, 40)]))
    assert 1 == len(host.sparse.runtime.requests)
    del request, host.batch
    gc.collect()
    assert 0 == len(host.sparse.runtime.requests)


def test_a_request_with_another_wish_runs_dense_and_has_a_salt_of_its_own() -> None:
    host = backend(FULL)
    asked, plain = Req("a", 40, sparseprefill="off"), Req("b", 40)
    assert None is plain.cache_salt
    assert "sparseprefill='off';" == asked.cache_salt
    found, expected = step(host, batch(host, [(asked, 0, 40), (plain, 0, 40)]), radix_layer())
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert [1] == host.sparse.rest.seen
    assert 1 == host.sparse.runtime.report().notes["the request asks for it (sparseprefill: off)"]


def test_what_a_graph_replays_is_the_host_s() -> None:
    host = backend(FULL)
    given = batch(host, [(Req("a", 40), 0, 40)])
    host.init_forward_metadata(given)
    host.init_forward_metadata_out_graph(given)
    q, kv = torch.randn(40, HEADS * SIZE), torch.randn(2, 40, KV_HEADS, SIZE)
    host.forward_extend(q, *kv, radix_layer(), given)
    assert 1 == host.calls
    assert not host.sparse.runtime.report().layers
