"""What needs no vLLM: options, requests, parts of a batch, layers, registration."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import multiprocessing
import re
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sparseprefill.adapters.demo.model import CLUSTERS
from sparseprefill.adapters.serving.model import Model
from sparseprefill.adapters.serving.options import MIN_QUERY
from sparseprefill.adapters.serving.parts import gaps, runs
from sparseprefill.adapters.serving.requests import Requests, Row
from sparseprefill.adapters.serving.tally import Owner
from sparseprefill.adapters.serving.tensor_parallel import LocalRegistry
from sparseprefill.adapters.session.session import Prefill
from sparseprefill.adapters.sglang.options import given as given_sglang
from sparseprefill.adapters.vllm import plugin, register
from sparseprefill.adapters.vllm.admission import check_apart, install, keep_apart
from sparseprefill.adapters.vllm.layer import index_of, layer_of
from sparseprefill.adapters.vllm.options import (
    CHUNKLESS,
    SCHEDULER,
    check_chunk,
    check_grain,
    check_last,
    check_unread,
    chunk_end,
    parse,
)
from sparseprefill.adapters.vllm.pages import pages_of
from sparseprefill.adapters.vllm.runtime import Runtime
from sparseprefill.adapters.vllm.split import narrow
from sparseprefill.plugins.share_prefill import TABLE as NEEDED

import sparseprefill as sp
from sparseprefill.errors import AttachError
from sparseprefill.pages import Pages
from sparseprefill.profiles.identity import ModelIdentity
from sparseprefill.profiles.profile import LengthRange
from sparseprefill.route import Route


def options(**table: Any) -> Any:
    return parse({"sparseprefill": table})


def engine_with(**more: Any) -> Any:
    """What a VllmConfig says of rows that are read."""
    model = {"runner_type": "generate", "quantization": None}
    made = {"speculative_config": None, "aux_output_config": SimpleNamespace(enabled=False)}
    parallel = SimpleNamespace(pipeline_parallel_size=more.pop("pipeline", 1))
    given = {name: more.pop(name, usual) for name, usual in model.items()}
    return SimpleNamespace(**{**made, **more}, model_config=SimpleNamespace(**given), parallel_config=parallel)


@pytest.mark.parametrize(("config", "table", "able", "said"), [
    ({}, {}, [0, 1, 2], None),
    ({}, {}, [0, 1], "layer 2, the model's last, cannot run sparse here"),
    ({"pipeline": 2}, {}, [0, 1], None),
    ({}, {"tail": 0}, [2], "tail is 0, so a prompt's last row need not see every key"),
    ({"speculative_config": object()}, {}, [2], "drafts are made from all rows"),
    ({"runner_type": "pooling"}, {}, [2], "a pooling model reads all rows"),
    ({"aux_output_config": SimpleNamespace(enabled=True)}, {}, [2], "the experts of all rows are asked for"),
    ({"quantization": "fp8"}, {}, [2], "the model is quantised (fp8), so the rows of a step may share a scale"),
])  # fmt: skip
def test_where_rows_may_be_left_out(
    config: dict[str, Any], table: dict[str, Any], able: list[int], said: str | None
) -> None:
    wanted = options(method="streaming", skip_unread=True, **table)

    def check(asked: Any) -> None:
        check_unread(engine_with(**config), asked)
        check_last(engine_with(**config), asked, 2, able)

    if said is None:
        check(wanted)
    else:
        with pytest.raises(AttachError, match=re.escape(f"sparseprefill.skip_unread is true, but {said}")):
            check(wanted)
    check(options(method="streaming", **table))


def test_options_are_read() -> None:
    found = options(method="streaming", parameters={"sink": 64, "window": 128}, layers=[0, 2], strict=True)
    assert (MIN_QUERY, (0, 2), True, False, "info", 128) == (
        *(found.min_query, found.layers, found.strict),
        *(found.measure, found.log_level, found.tail),
    )
    assert 0 == options(method="streaming", tail=0).tail
    assert (100, None) == (found.recall_every, found.strict_recall)
    changed = options(method="streaming", recall_every=7, strict_recall=1, copies=False)
    assert (7, 1.0, False) == (changed.recall_every, changed.strict_recall, changed.copies)
    assert found.copies
    assert "streaming" == found.build().name


def test_a_file_may_hold_the_pipeline(tmp_path: Any) -> None:
    path = tmp_path / "pipeline.toml"
    path.write_text('method = "streaming"\nname = "mine"\n')
    assert "mine" == options(config=str(path)).build().name


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"method": "streaming", "min_qery": 3}, "sparseprefill.min_qery is unknown; did you mean 'min_query'"),
        (
            {"method": "streaming", "min_query": 1},
            "sparseprefill.min_query is 1: pass an integer from 2",
        ),
        (
            {"method": "streaming", "tail": -1},
            "sparseprefill.tail is -1: pass a number of query rows from 0 to 2147483647",
        ),
        ({"method": "streaming", "tail": True}, "sparseprefill.tail is True: pass a number of query rows from"),
        ({"method": "streaming", "tail": 128.0}, "sparseprefill.tail is 128.0: pass a number of query rows from"),
        (
            {"method": "streaming", "tail": 1 << 31},
            "sparseprefill.tail is 2147483648: pass a number of",
        ),
        ({"method": "streaming", "min_query": True}, "sparseprefill.min_query is True"),
        (
            {"method": "streaming", "recall_every": -1},
            "sparseprefill.recall_every is -1: pass N to measure one of N prefills",
        ),
        (
            {"method": "streaming", "recall_every": 2.0},
            "sparseprefill.recall_every is 2.0: pass N to measure one of N prefills",
        ),
        ({"method": "streaming", "strict_recall": 2}, "sparseprefill.strict_recall is 2: pass a number from 0 to 1"),
        (
            {"method": "streaming", "strict_recall": 0.5, "recall_every": 0},
            "sparseprefill.strict_recall is 0.5, but sparseprefill.recall_every is 0, so nothing is measured: pass 1",
        ),
        ({"method": "streaming", "layers": 3}, "sparseprefill.layers is 3: pass a list"),
        ({"method": "streaming", "layers": ["1"]}, "sparseprefill.layers[0] is '1': pass an integer"),
        ({"method": "streaming", "strict": "yes"}, "sparseprefill.strict is 'yes': pass true or false"),
        ({"method": "streaming", "copies": 0}, "sparseprefill.copies is 0: pass true or false"),
        ({"method": "streaming", "log_level": "loud"}, "sparseprefill.log_level is 'loud': pass 'debug' or 'info'"),
        ({"method": "streaming", "config": "x.toml"}, "sparseprefill.config names a file that holds the pipeline"),
        ({"config": 3}, "sparseprefill.config is 3: give the path"),
        ({"method": "streaming", "chunk": 1}, "sparseprefill.chunk is 1: pass an integer >= 2"),
        ({"method": "streaming", "chunk": "big"}, "sparseprefill.chunk is 'big'"),
        ({"method": "streaming", "log_interval": -1}, "sparseprefill.log_interval is -1: pass a number from 0 to"),
        ({"method": "streaming", "log_interval": float("nan")}, "sparseprefill.log_interval is nan"),
        ({"method": "streaming", "log_interval": True}, "sparseprefill.log_interval is True"),
        ({"method": "streaming", "profiles": ["quick"]}, "sparseprefill.profiles is ['quick']: give a table of names"),
        ({"method": "streaming", "profiles": {"off": {}}}, "sparseprefill.profiles has the name 'off'"),
        ({"method": "streaming", "profiles": {"a": 3}}, "sparseprefill.profiles.a is 3: give a table"),
        (
            {"method": "streaming", "profiles": {"a": {"tail": 3}}},
            "profiles.a.tail applies to all requests: give it as",
        ),
        ({"method": "streaming", "profiles": {"a": {"metod": "x"}}}, "profiles.a.metod is unknown; did you mean 'meth"),
    ],
)
def test_wrong_options_name_their_key(table: dict[str, Any], words: str) -> None:
    with pytest.raises(sp.ParameterError) as caught:
        options(**table)
    assert words in str(caught.value)


BOTH = pytest.mark.parametrize("read", [lambda table: options(**table), lambda table: given_sglang(json.dumps(table))])
PLACES: list[tuple[dict[str, Any], str]] = [
    (
        {"method": "rowmax", "eps": 0.1},
        'sparseprefill.eps is a parameter of rowmax: did you mean "parameters": {"eps": ...}?',
    ),
    (
        {"method": "rowmax", "profiles": {"a": {"method": "streaming", "sink": 64}}},
        'sparseprefill.profiles.a.sink is a parameter of streaming: did you mean "parameters": {"sink": ...}?',
    ),
    (
        {"union": [{"method": "streaming", "sink": 64}]},
        'sparseprefill.union[0].sink is a parameter of streaming: did you mean "parameters": {"sink": ...}?',
    ),
    ({"method": "streaming", "eps": 0.1}, "sparseprefill.eps is unknown"),
    ({"profile": "nowhere.json"}, "sparseprefill.profile is 'nowhere.json': No such file"),
    ({"method": "rowmax", "profile": "nowhere.json"}, "sparseprefill.profile is 'nowhere.json': No such file"),
    (
        {"method": "rowmax", "profiles": {"a": {"profile": "nowhere.json"}}},
        "sparseprefill.profiles.a.profile is 'nowhere.json': No such file",
    ),
    ({"config": "nowhere.toml"}, "sparseprefill.config: nowhere.toml: cannot be read: No such file"),
    (
        {"method": "rowmax", "profiles": {"a": {"config": "nowhere.json"}}},
        "sparseprefill.profiles.a.config: nowhere.json: cannot be read: No such file",
    ),
    (
        {"method": "rowmax", "gate": "nowhere.json"},
        "sparseprefill.gate: break-even table is 'nowhere.json': No such file",
    ),
]


@BOTH
@pytest.mark.parametrize(("table", "words"), PLACES)
def test_what_stands_in_the_wrong_place_or_is_not_there_names_its_key(
    read: Callable[[dict[str, Any]], Any], table: dict[str, Any], words: str
) -> None:
    """Of both servers, whose tables are one."""
    whole = ModelIdentity(name="m", architecture="M", layers=3, heads=4, kv_heads=2, head_dim=32, digest="d")
    with pytest.raises(sp.ParameterError) as caught:
        Runtime.made(read(table), Model(whole, whole, "M", "STOCK", 0), Owner())
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize("additional", [{}, None, {"other": {}}])
def test_a_selected_backend_needs_a_method(additional: Any) -> None:
    with pytest.raises(sp.ParameterError, match="CUSTOM is selected, but no method"):
        parse(additional)


def test_a_wrong_method_is_named() -> None:
    with pytest.raises(sp.UnknownMethodError, match=r"sparseprefill\.method: no method is named 'streeming'"):
        options(method="streeming").build()


TABLE = torch.tensor([2, 0, 1], dtype=torch.int32)


def everyone(_: str) -> bool:
    return True


def test_a_chunk_goes_on_where_the_last_one_ended() -> None:
    requests = Requests()
    (first,) = requests.step([Row(0, 64, "a")], {}, everyone)
    first.memory.put("k", 1)
    (second,) = requests.step([Row(64, 100, "a")], {}, everyone)
    assert first is second
    (other,) = requests.step([Row(64, 100, "a")], {}, everyone)
    assert first is not other, "it ended at 100; a request that was preempted is computed again"
    assert 0 == len(first.memory), "and its memory was freed"
    assert other is not requests.step([Row(0, 100, "a")], {}, everyone)[0]


def test_statistics_of_keys_are_made_again_behind_a_step_without_the_request() -> None:
    """It may have been preempted, and stand where it stood with other keys of the same tokens."""
    requests, pages = Requests(), torch.randn(4, 16, 2, 8)
    pages[3] = torch.nan
    read: list[int] = []

    def means(first: int, end: int, prefill: Prefill) -> torch.Tensor:
        call = sp.AttentionCall.of_pages(torch.randn(1, 2, end - first, 8), Pages(pages, pages, TABLE, end))

        def make(kept: torch.Tensor | None, tiles: int) -> torch.Tensor:
            read.append(end - 16 * tiles)
            new = call.k[:, :, 16 * tiles :].unflatten(2, (-1, 16)).mean(3)
            return new if kept is None else torch.cat([kept[:, :, :tiles], new], 2)

        return prefill.memory.prefix.get(call, "mean", 16, make)

    (first,) = requests.step([Row(0, 16, "a", 64)], {}, everyone)
    means(0, 16, first)
    (hit,) = requests.step([Row(16, 32, "a", 64)], {}, everyone)
    means(16, 32, hit)
    (other,) = requests.step([Row(0, 64, "b", 64)], {}, everyone)
    assert (0, 0) == (hit.memory.nbytes, other.memory.nbytes)
    pages += 1.0  # as of pages that were given to others, and found again
    (again,) = requests.step([Row(32, 48, "a", 64)], {}, everyone)
    assert again is hit
    found = means(32, 48, again)
    assert torch.equal(pages[TABLE[:3].long()].mean(1)[None].transpose(1, 2), found)
    assert [16, 32, 48] == read
    assert 0 < again.memory.nbytes
    requests.step([], {"a": 64}, everyone)
    assert 0 == again.memory.nbytes, "it decodes"


def test_a_prefill_ends_with_its_request() -> None:
    requests = Requests()
    requests.step([Row(0, 64, "a"), Row(0, 64, "b")], {}, everyone)
    requests.step([], {"a": 64}, everyone)
    assert (1, 1) == (len(requests), requests.finished)
    requests.step([], {"b": 0}, everyone)
    assert 1 == len(requests), "a made-up batch, behind whose tokens the prefill stands"
    requests.step([], {}, lambda name: name != "b")
    assert (0, 2) == (len(requests), requests.finished)


def test_rows_that_cannot_be_told_apart_share_nothing() -> None:
    requests = Requests()
    (first,) = requests.step([Row(0, 64, "a")], {}, everyone)
    twins = requests.step([Row(64, 96, "a"), Row(64, 96, "a")], {}, everyone)
    assert 3 == len({id(first), *map(id, twins)}), "rows of one request, whose context is spread over devices"
    assert first is not requests.step([Row(64, 96, "a")], {"a": 0}, everyone)[0], "the other row is no prefill"
    assert requests.step([Row(0, 64)], {}, everyone)[0] is not requests.step([Row(64, 96)], {}, everyone)[0]
    assert 4 == requests.finished, "as soon as the next step comes"


@given(st.lists(st.booleans(), max_size=12))
def test_runs_cover_the_batch_in_order(sparse: list[bool]) -> None:
    alone = [i for i, one in enumerate(sparse) if one]
    found = runs(alone, len(sparse))
    assert [i for i, one in enumerate(sparse) if not one] == [
        i for first, last in gaps(alone, len(sparse)) for i in range(first, last)
    ]
    assert list(range(len(sparse))) == [i for first, last in found for i in range(first, last)]
    for first, last in found:
        assert last == first + 1 if sparse[first] else not any(sparse[first:last])
    assert all(sparse[a] or sparse[b] for (a, _), (b, _) in pairwise(found))


@dataclasses.dataclass
class Common:
    """The fields of vLLM's metadata that matter here."""

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    is_prefilling: torch.Tensor | None = None
    mm_req_doc_ranges: dict[int, list[tuple[int, int]]] | None = None
    _num_computed_tokens_cache: torch.Tensor | None = None


def test_metadata_of_some_requests() -> None:
    starts, lengths = [0, 3, 4, 9], [3, 20, 8]
    loc = torch.tensor(starts, dtype=torch.int32)
    common = Common(
        *(loc, loc, torch.tensor(lengths), 3, 9, 5, 20),
        torch.arange(12).view(3, 4),
        torch.arange(9),
        torch.tensor([True, False, True]),
        {2: [(0, 1)]},
        torch.zeros(3),
    )
    found = narrow(common, 1, 3, starts, lengths)
    assert [0, 1, 6] == found.query_start_loc.tolist() == found.query_start_loc_cpu.tolist()
    assert (2, 6, 5, 20) == (found.num_reqs, found.num_actual_tokens, found.max_query_len, found.max_seq_len)
    assert [20, 8] == found.seq_lens.tolist()
    assert [4, 8] == found.block_table_tensor[:, 0].tolist()
    assert [3, 4, 5, 6, 7, 8] == found.slot_mapping.tolist()
    assert [False, True] == found.is_prefilling.tolist()
    assert {1: [(0, 1)]} == found.mm_req_doc_ranges
    assert found._num_computed_tokens_cache is None


@pytest.mark.parametrize(
    ("name", "index"),
    [("model.layers.3.self_attn.attn", 3), ("transformer.h.11.attn", 11), ("blocks.4.attn", 4), ("attn", -1)],
)
def test_index_of_a_layer(name: str, index: int) -> None:
    assert index == index_of(name)


@pytest.mark.parametrize(
    ("differs", "words"),
    [
        ({}, None),
        ({"sliding_window": (-1, -1)}, None),
        ({"kv_cache_dtype": "fp8"}, None),
        ({"sliding_window": 64}, "sliding window"),
        ({"sliding_window": (63, 0)}, "sliding window"),
        ({"sliding_window": (0, 0)}, "sliding window"),
        ({"attn_type": "encoder_only"}, "encoder_only"),
        ({"alibi_slopes": torch.ones(4)}, "ALiBi"),
        ({"chunk_lookback": 2}, "chunks"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "int8_per_token_head"),
    ],
)
def test_reasons_of_a_layer(differs: dict[str, Any], words: str | None) -> None:
    usual = {"attn_type": "decoder", "sliding_window": -1, "kv_cache_dtype": "auto", "scale": 0.5, "sinks": None}
    layer = layer_of("model.layers.0.attn", SimpleNamespace(**{**usual, "logits_soft_cap": 0, **differs}))
    assert (words is None) == (layer.reason is None)
    assert layer.softcap is None
    assert words is None or words in str(layer.reason)


@pytest.mark.parametrize("heads_first", [True, False])
def test_pages_are_read_through_the_table(heads_first: bool) -> None:
    pages, heads, page, size, length = 6, 2, 16, 8, 41
    k, v = torch.randn(2, heads, length, size)
    order = (0, 1, 2, 3) if heads_first else (0, 2, 1, 3)
    cache = torch.zeros([(pages, heads, page, 2 * size)[i] for i in order]).permute(order)
    table = torch.tensor([4, 1, 5], dtype=torch.int32)
    for token in range(length):
        cache[table[token // page], :, token % page] = torch.cat([k[:, token], v[:, token]], -1)
    found = pages_of(cache, size, table, length, dtype=torch.float32)
    assert (page, length) == (found.page, found.length)
    for wanted, read in zip((k, v), (found.keys(), found.values()), strict=True):
        assert torch.equal(wanted[None], read)
    assert cache.data_ptr() == found.k.data_ptr(), "a view"


def test_pages_of_an_fp8_cache_are_scaled() -> None:
    x = torch.tensor([1.0, -2.0, 0.5, 4.0]).to(torch.float8_e4m3fn)
    cache = x.view(torch.uint8).view(1, 1, 1, 4)
    scales = (torch.tensor(2.0), torch.tensor(0.5))
    table, fp8 = torch.zeros(1, dtype=torch.int32), torch.float8_e4m3fn
    found = pages_of(cache, 2, table, 1, dtype=torch.float16, fp8=fp8, scales=scales)
    k, v = found.keys(), found.values()
    assert ([2.0, -4.0], [0.25, 2.0]) == (k.flatten().tolist(), v.flatten().tolist())
    assert torch.float16 == k.dtype == v.dtype
    kept = pages_of(cache, 2, table, 1, dtype=torch.float16, fp8=fp8, scales=scales, copies=False)
    assert (True, False) == (found.copies, kept.copies)


@pytest.mark.parametrize(
    ("version", "good"), [("0.28.1", False), ("0.29.0", True), ("0.32.0+cpu", True), ("dev", False)]
)
def test_versions(version: str, good: bool) -> None:
    assert good == (plugin.objection(version) is None)


class Registry:
    """In the place of vLLM's list of backends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
        self.given: dict[str, str] = {}
        self.plugins: Any = SimpleNamespace(load_endpoint_plugins=lambda *_: ["another's"])
        members = SimpleNamespace(CUSTOM="CUSTOM", CPU_ATTN="CPU_ATTN", __members__={})
        registry = SimpleNamespace(AttentionBackendEnum=members, register_backend=self.given.__setitem__)
        modules = {
            "vllm": SimpleNamespace(__version__=version, plugins=self.plugins),
            "vllm.v1.attention.backends.registry": registry,
            "vllm.platforms": SimpleNamespace(current_platform=SimpleNamespace(is_cpu=lambda: True)),
            "vllm.exceptions": SimpleNamespace(VLLMValidationError=RuntimeError),
            "vllm.v1.engine.input_processor": SimpleNamespace(InputProcessor=type("InputProcessor", (Taker,), {})),
            "vllm.v1.request": SimpleNamespace(Request=type("Request", (Made,), {})),
            "vllm.v1.engine.core": SimpleNamespace(EngineCore=type("EngineCore", (Core,), {})),
            "vllm.v1.executor.abstract": SimpleNamespace(Executor=type("Executor", (), {"__init__": lambda *_: None})),
        }
        for name in (
            "vllm.v1",
            "vllm.v1.executor",
            "vllm.v1.engine",
            "vllm.v1.attention",
            "vllm.v1.attention.backends",
        ):
            modules[name] = SimpleNamespace()
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        plugin._warn.cache_clear()


class Taker:
    """In the place of vLLM's InputProcessor."""

    def __init__(self, **table: Any) -> None:
        backend = SimpleNamespace(backend=SimpleNamespace(name="CUSTOM"), backend_per_kind={})
        additional = {"sparseprefill": {"method": "streaming", **table}}
        self.vllm_config = SimpleNamespace(attention_config=backend, additional_config=additional)

    def process_inputs(self, request_id: str, prompt: str, params: Any, priority: int = 0) -> Any:
        return SimpleNamespace(request_id=request_id, cache_salt=prompt or None, priority=priority)


class Made:
    """In the place of vLLM's Request, the engine's own record."""

    def __init__(self, salt: str | None, hasher: object) -> None:
        self.salt, self.hasher = salt, hasher

    @classmethod
    def from_engine_core_request(cls, request: Any, block_hasher: object) -> Made:
        return cls(request.cache_salt, block_hasher)


class Core(Taker):
    """In the place of vLLM's EngineCore."""

    def preprocess_add_request(self, request: Any) -> Any:
        return request, 7


@pytest.mark.parametrize(
    ("version", "known"),
    [("0.33.0", "its source was compared with theirs"), ("0.77.1", "nobody has compared its source")],
)
def test_a_newer_vllm_is_used_and_said_to_be_so_once(
    version: str, known: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("importlib.import_module", lambda name: name)
    with caplog.at_level(logging.WARNING):
        for child in (None, object()):
            there = Registry(monkeypatch, version)
            monkeypatch.setattr(multiprocessing, "parent_process", lambda child=child: child)
            register()
            register()
            assert {"CUSTOM": plugin.CUDA_BACKEND, "CPU_ATTN": plugin.CPU_BACKEND} == there.given
    (text,) = (one.message for one in caplog.records)
    assert f"sparseprefill: vLLM {version} is newer than the versions that ran (0.29 to 0.32); {known}; it is" in text
    assert text.endswith("see docs/vllm.md")


def test_the_table_of_versions_is_that_of_the_code() -> None:
    page = (Path(__file__).parents[3] / "docs" / "vllm.md").read_text(encoding="utf-8")
    ran = [int(minor) for minor in re.findall(r"^\| 0\.(\d+)\.\d+ \| the smoke test", page, re.MULTILINE)]
    (first, *_, last), (_, read) = ran, plugin.READ
    assert ((0, first), (0, last)) == (plugin.OLDEST, plugin.NEWEST)
    assert list(range(first, last + 1)) == ran
    assert f"\n| 0.{read}.0 | nothing: " in page


def test_a_newer_vllm_of_other_interfaces_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    there = Registry(monkeypatch, "0.77.1")

    def gone(name: str) -> Any:
        raise ImportError("cannot import name 'CPUAttentionBackend'")

    monkeypatch.setattr("importlib.import_module", gone)
    with caplog.at_level(logging.WARNING):
        register()
        register()
    assert {} == there.given
    (text,) = (one.message for one in caplog.records)
    assert (
        "not registered with vLLM: version 0.77.1 was not tried, and its interfaces are different: ImportError" in text
    )


@pytest.mark.parametrize("version", ["0.29.0", "0.32.0+cpu"])
def test_versions_that_were_tried_are_taken_without_a_word(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    there = Registry(monkeypatch, version)
    with caplog.at_level(logging.WARNING):
        register()
    assert 2 == len(there.given)
    assert not caplog.records


def test_a_vllm_that_takes_requests_otherwise_is_said_to(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    there = Registry(monkeypatch, "0.32.0")
    del there.plugins.load_endpoint_plugins
    monkeypatch.delattr(Taker, "process_inputs")
    monkeypatch.delattr(Made, "from_engine_core_request")
    monkeypatch.delattr(Core, "preprocess_add_request")
    with caplog.at_level(logging.WARNING):
        register()
    unseen, unread, shared, mixed = (one.message for one in caplog.records)
    assert "is lost without a word: this vLLM has no load_endpoint_plugins" in unread
    assert "may mix up what requests ask for: this vLLM does not take requests through EngineCore.prep" in mixed
    assert "run dense instead of being refused: this vLLM does not take requests through" in unseen
    assert "cannot tell apart what requests ask for: this vLLM does not make requests by Request.from_engine" in shared


def test_a_vllm_that_makes_engines_otherwise_is_said_to(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Registry(monkeypatch, "0.32.0")
    monkeypatch.setitem(sys.modules, "vllm.v1.executor.abstract", SimpleNamespace())
    with caplog.at_level(logging.WARNING):
        register()
    (said,) = (one.message for one in caplog.records)
    assert "options are not read where the model has no layer for the backend: cannot import" in said


def asking(**extra: Any) -> Any:
    return SimpleNamespace(extra_args=extra or None)


def test_requests_are_looked_at_where_they_come_in() -> None:
    kind: Any = type("InputProcessor", (Taker,), {})
    assert install(kind, RuntimeError) is None
    once = kind.process_inputs
    assert install(kind, RuntimeError) is None
    assert once is kind.process_inputs, "not twice"
    taker = kind(profiles={"quick": {"method": "streaming"}})
    assert 2 == taker.process_inputs("a", "", asking(other=3), priority=2).priority
    assert "a" == taker.process_inputs("a", "", params=asking(sparseprefill="quick")).request_id
    for wrong in ("slow", "", 3, ["off"], None):
        with pytest.raises(RuntimeError, match="is not a profile of this engine"):
            taker.process_inputs("a", "", asking(sparseprefill=wrong))
    taker.vllm_config.attention_config.backend = None
    assert "a" == taker.process_inputs("a", "", asking(sparseprefill="slow")).request_id, "no business of ours"


@pytest.mark.parametrize("key", ["sparsprefill", "sparse_prefill", "Sparseprefill", "sparseprefill ", "sparseprofile"])
@pytest.mark.parametrize("right", [{}, {"sparseprefill": "off"}], ids=["alone", "beside the right one"])
def test_a_mistyped_argument_is_refused(key: str, right: dict[str, str]) -> None:
    kind: Any = type("InputProcessor", (Taker,), {})
    install(kind, RuntimeError)
    with pytest.raises(RuntimeError) as caught:
        kind().process_inputs("a", "", asking(**right, **{key: "off"}))
    assert f"{key!r} is no argument of a request; did you mean 'sparseprefill'?" == str(caught.value)


def made(kind: Any, salt: str | None = None, **extra: Any) -> Any:
    request = SimpleNamespace(cache_salt=salt, sampling_params=asking(**extra))
    found = kind.from_engine_core_request(request, "hasher")
    assert salt == request.cache_salt
    assert ("hasher", kind) == (found.hasher, type(found))
    return found.salt


def test_requests_that_ask_for_different_things_share_no_block() -> None:
    """Whichever front end they come through."""
    kind: Any = type("Request", (Made,), {})
    config = SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=True))
    with pytest.raises(sp.AttachError, match="add --no-enable-prefix-caching"):
        check_apart(config, kind)
    check_apart(SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=False)), kind)
    assert keep_apart(kind) is None
    once = kind.from_engine_core_request.__func__
    assert keep_apart(kind) is None
    assert once is kind.from_engine_core_request.__func__, "not twice"
    check_apart(config, kind)
    assert made(kind) is None
    assert "mine" == made(kind, "mine", other=3)
    assert made(kind, sparseprefill="off") == made(kind, sparseprefill="off")
    salts = {made(kind, salt, **({} if name is None else {"sparseprefill": name})) for salt, name in KINDS}
    assert len(KINDS) == len(salts), "by the request's own salt too, even one that looks like ours"
    assert made(kind, sparsprefill="off") not in (None, *salts), "it runs dense"
    request = SimpleNamespace(cache_salt=None, sampling_params=None)
    assert kind.from_engine_core_request(request, block_hasher=None).salt is None, "of a pooling model"


KINDS: list[tuple[str | None, Any]] = [
    *(("", "off"), ("mine", "off"), ("", "quick"), ("mine", "quick"), ("", ["off"]), ("", "None"), ("mine", None)),
    *((None, None), ("sparseprefill='off';", None), ("sparseprefill='off';mine", None)),
]


@given(st.integers(0, 400), st.integers(1, 300), st.integers(1, 500), st.integers(2, 150))
def test_chunks_end_at_their_bounds_alone(start: int, room: int, prompt: int, chunk: int) -> None:
    end = chunk_end(start, start + room, prompt, chunk)
    assert start <= end <= start + room
    if start >= prompt:
        assert start + room == end, "decoding"
    elif end > start:
        assert end == prompt or end % chunk == 0
        assert (end - 1) // chunk == start // chunk, "never over a bound"
    else:
        assert room < min(chunk - start % chunk, prompt - start), "it waits for want of room alone"


def test_fixed_chunks_need_their_scheduler() -> None:
    def check(scheduler: Any, chunk: int | None = 256) -> None:
        config = SimpleNamespace(scheduler_config=SimpleNamespace(scheduler_cls=scheduler))
        check_chunk(config, options(method="streaming", chunk=chunk))

    check(SCHEDULER)
    check(None, chunk=None)
    for other, shown in ((None, "vLLM's own scheduler"), ("a.b", "a.b"), (Taker, f"{Taker.__module__}.Taker")):
        with pytest.raises(sp.AttachError) as caught:
            check(other)
        assert f"but {shown} cuts prompts by what else is in the batch: add --scheduler-cls {SCHEDULER}" in str(
            caught.value
        )


def test_fixed_chunks_need_room_in_a_step() -> None:
    """Asked ahead of the weights; the scheduler, which is made behind them, asks again."""
    limits = {"scheduler_cls": SCHEDULER, "max_num_batched_tokens": 512, "max_num_seqs": 200}
    for chunk, more, room in ((313, {}, None), (314, {}, 313), (115, {"num_speculative_tokens": 1}, 114)):
        config = SimpleNamespace(scheduler_config=SimpleNamespace(**limits), **more)
        if room is None:
            check_chunk(config, options(method="streaming", chunk=chunk))
            continue
        with pytest.raises(
            sp.ParameterError, match=rf"^sparseprefill\.chunk is {chunk}: beside 200 .* room for {room}"
        ):
            check_chunk(config, options(method="streaming", chunk=chunk))
    with pytest.raises(sp.ParameterError, match=re.escape(CHUNKLESS)):
        check_chunk(SimpleNamespace(scheduler_config=SimpleNamespace(**limits)), options(method="streaming"))


def test_fixed_chunks_of_a_server_that_leaves_the_plugin_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU vLLM itself would run without the adapter, and without a word."""

    class Scheduler:
        num_spec_tokens, max_num_scheduled_tokens, max_num_running_reqs = 0, 512, 2
        _reserve_prefill_lookahead = None

        def __init__(self, vllm_config: Any) -> None:
            self.vllm_config = vllm_config

    for name in ("async_scheduler.AsyncScheduler", "scheduler.Scheduler"):
        module = ModuleType(name)
        setattr(module, name.partition(".")[2], type(name, (Scheduler,), {}))
        monkeypatch.setitem(sys.modules, f"vllm.v1.core.sched.{name.partition('.')[0]}", module)
    monkeypatch.delitem(sys.modules, "sparseprefill.adapters.vllm.scheduler", raising=False)
    fixed_chunks = importlib.import_module("sparseprefill.adapters.vllm.scheduler").fixed_chunks
    monkeypatch.delitem(sys.modules, "sparseprefill.adapters.vllm.scheduler")
    chosen = SimpleNamespace(backend=SimpleNamespace(name="CUSTOM"))
    config = SimpleNamespace(
        additional_config={"sparseprefill": {"method": "streaming", "chunk": 128}},
        attention_config=chosen,
        scheduler_config=SimpleNamespace(async_scheduling=False),
        cache_config=SimpleNamespace(enable_prefix_caching=False),
        speculative_config=None,
    )
    monkeypatch.setenv("VLLM_PLUGINS", "other,sparseprefill")
    fixed_chunks(config)
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with pytest.raises(AttachError, match="VLLM_PLUGINS is 'other', which leaves sparseprefill out"):
        fixed_chunks(config)
    chosen.backend = None
    fixed_chunks(config)


def test_fixed_chunks_keep_to_the_grain() -> None:
    anchor = Route.of(sp.build("anchor-attention"))
    grain = anchor.method_grain
    assert grain is not None
    check_grain(2 * grain, anchor, "sparseprefill")
    check_grain(77, Route.of(sp.build("vertical-slash")), "sparseprefill")
    for chunk, good in ((2 * grain + 1, 2 * grain), (grain // 2, grain)):
        with pytest.raises(sp.ParameterError, match=f"has a grain of {grain} tokens; .*, such as {good}$"):
            check_grain(chunk, anchor, "sparseprefill")


@pytest.mark.parametrize("version", [None, "0.20.1"])
def test_registering_never_raises(
    version: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = ModuleType("vllm")
    if version is not None:
        fake.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", fake)
    plugin._warn.cache_clear()
    with caplog.at_level(logging.WARNING):
        register()
        register()
    assert 1 == len(caplog.records), "said once"
    assert "not registered with vLLM" in caplog.text


def test_tables_serve_a_share_of_the_heads() -> None:
    table = NEEDED.read(CLUSTERS)
    whole = table.model
    assert whole is not None
    local = attrs.evolve(whole, heads=2, kv_heads=1)
    q, k = torch.randn(1, 2, 300, 64), torch.randn(1, 1, 300, 64)
    share = sp.AttentionCall(q, k, k, layer=2, first_head=2)
    profile = sp.Profile(
        methods=("streaming",),
        model=whole,
        ranges=(LengthRange(least=0, tokens=9, method="streaming", parameters={"sink": 16, "window": 64}),),
    )
    chosen: dict[str, dict[str, Any]] = {"share-prefill": {"clusters": table}, "streaming": {"profile": profile}}
    for name, options in chosen.items():
        assert sp.build(name, **options).unsupported(share), "heads are missing"
        assert not LocalRegistry(whole, local).build(name, **options).unsupported(share)
        other = LocalRegistry(attrs.evolve(whole, digest="another"), local)
        with pytest.raises(sp.ParameterError, match="made for another model"):
            other.build(name, **options)


def test_a_profile_alone_names_the_method(tmp_path: Path) -> None:
    whole = NEEDED.read(CLUSTERS).model
    assert whole is not None
    only = LengthRange(least=0, tokens=9, method="streaming", parameters={"sink": 16, "window": 64}, dense_layers=(1,))
    path = tmp_path / "my.profile.json"
    path.write_text(sp.Profile(methods=("bfla", "streaming"), model=whole, ranges=(only,)).to_json(), encoding="utf-8")
    route = options(profile=str(path)).build(LocalRegistry(whole, attrs.evolve(whole, heads=2, kv_heads=1)))
    q, k = torch.randn(1, 2, 300, 64), torch.randn(1, 1, 300, 64)
    assert not route.run(sp.AttentionCall(q, k, k, layer=2, first_head=2)).dense
    assert "keeps layer 1 dense" in route.run(sp.AttentionCall(q, k, k, layer=1, first_head=2)).dense


def test_a_config_is_built_for_a_share_of_the_heads() -> None:
    whole = NEEDED.read(CLUSTERS).model
    assert whole is not None
    registry = LocalRegistry(whole, attrs.evolve(whole, heads=2, kv_heads=1))
    found = options(method="share-prefill", parameters={"clusters": str(CLUSTERS)}).build(registry)
    assert "share-prefill" == found.name
