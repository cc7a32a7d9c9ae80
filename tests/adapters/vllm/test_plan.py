"""Parts of a batch and the state of an engine, with metadata of the right shape and no vLLM."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sparseprefill.adapters.serving.parts import Part
from sparseprefill.adapters.serving.runtime import ENDLESS
from sparseprefill.adapters.serving.tally import Owner as Whose
from sparseprefill.adapters.vllm import runtime as module
from sparseprefill.adapters.vllm.names import DEAF, HALVES, SILENT, UNNAMED, Names, drafting
from sparseprefill.adapters.vllm.plan import plan
from sparseprefill.adapters.vllm.runtime import (
    BLIND,
    DRAFTS,
    Runtime,
    _runtimes,
    layer_runtime,
    runtime_of,
)
from sparseprefill.adapters.vllm.split import KNOWN, check_fields
from sparseprefill.adapters.vllm.worker import NOBODY, ReportExtension

import sparseprefill as sp
from helpers.vllm_runners import NOTHING, Common, RunnerV1, RunnerV2, common, runtime, stock


def test_decoding_and_short_rows_stay_together() -> None:
    parts = plan(runtime(), common([1, 1, 9, 3, 20], [30, 40, 9, 3, 50], [False, False, True, True, True]), stock)
    assert parts is not None
    assert [(0, 2, False), (2, 3, True), (3, 4, False), (4, 5, True)] == [
        (part.first, part.last, part.row is not None) for part in parts
    ]
    assert [(0, 2), (2, 11), (11, 14), (14, 34)] == [(part.begin, part.end) for part in parts]
    assert [30, 40] == parts[0].metadata().seq_lens.tolist()
    assert parts[0].metadata() is parts[0].metadata()
    assert parts[3].row is not None
    assert (30, 50) == (parts[3].row.start, parts[3].row.end)


@pytest.mark.parametrize(
    "batch",
    [
        common([1, 1], [5, 6], [False, False]),
        common([4, 1], [4, 6], [True, False]),
        common([20], [20], [True], causal=False),
        dataclasses.replace(common([20], [20], [True]), is_prefilling=None),
        dataclasses.replace(common([20], [20], [True]), seq_lens_cpu_upper_bound=None),
    ],
)
def test_a_batch_without_a_sparse_request_is_the_hosts(batch: Common) -> None:
    assert plan(runtime(), batch, stock) is None


def test_rows_that_pad_a_batch_are_left_out() -> None:
    batch = common([20, 0, 0], [20, 0, 0], [True, False, False])
    parts = plan(runtime(), dataclasses.replace(batch, is_prefilling=torch.tensor([True])), stock)
    assert parts is not None
    assert [(0, 1)] == [(part.first, part.last) for part in parts]


def prefill(parts: list[Part] | None) -> Any:
    assert parts is not None
    assert parts[0].prefill is not None
    return parts[0].prefill


REMEMBERS = {"method": "share-prefill", "parameters": {"clusters": "single"}}
FIELDS = {one.name for one in dataclasses.fields(Common)}


def prompts(mine: Runtime, batch: Common) -> list[int | None]:
    """Tokens of the prompts of a batch's rows, as the parts know them."""
    parts = plan(mine, batch, stock)
    assert parts is not None
    return [part.row.prompt for part in parts if part.row is not None]


@pytest.mark.parametrize("plain", [False, True], ids=["with a copy on the device", "plain array"])
def test_runner_v2_tells_how_long_prompts_are(plain: bool) -> None:
    mine = runtime()
    host = RunnerV2(mine, "a", "b")
    lengths = host.req_states.prompt_len
    for name, tokens in (("a", 52), ("b", 20)):
        lengths[host.slots[name]] = tokens
    host.req_states.prompt_len = lengths if plain else SimpleNamespace(np=lengths)
    assert [52, 20] == prompts(mine, host.batch([20, 20], [20, 20], [True, True], "a", "b"))
    assert [52] == prompts(mine, host.batch([32, 1], [52, 21], [True, False], "a", "b")), "the last chunk"
    # Preempted, and computed again with what it had generated, 16 tokens of it from the prefix cache.
    assert [20] == prompts(mine, host.batch([14], [30], [True], "b"))
    host.req_states.remove("b")
    host.add("c")
    lengths[host.slots["c"]] = 77
    assert [77] == prompts(mine, host.batch([20], [20], [True], "c")), "the slot is another's now"
    assert ENDLESS not in mine.report().notes


def test_runner_v1_tells_how_long_prompts_are() -> None:
    mine = runtime()
    host = RunnerV1(mine, "a", "b")
    host.requests = {"a": SimpleNamespace(num_prompt_tokens=52, sampling_params=None), "b": NOTHING}
    assert [52, None] == prompts(mine, common([20, 20], [20, 20], [True, True]))
    assert {ENDLESS: 1} == mine.report().notes
    assert mine.names.prompt(None) is None
    del host
    assert mine.names.prompt("a") is None


def test_a_prompt_whose_length_nobody_tells_is_noted_where_it_matters() -> None:
    for table, noted in (({}, True), ({"tail": 0}, False)):
        mine = runtime(**table)
        assert [None] == prompts(mine, common([20], [20], [True]))
        assert noted == (ENDLESS in mine.report().notes)


def test_groups_of_layers_share_a_request_within_a_step() -> None:
    mine = runtime()
    host = RunnerV2(mine, "a")
    batch = host.batch([20], [20], [True], "a")
    other = dataclasses.replace(batch, block_table_tensor=batch.block_table_tensor + 500)
    first = prefill(plan(mine, batch, stock))
    assert first is prefill(plan(mine, other, stock))
    assert first is prefill(plan(mine, host.batch([12], [32], [True], "a"), stock)), "the next chunk"


def test_a_freed_slot_names_the_request_that_got_it() -> None:
    mine = runtime()
    host = RunnerV2(mine, "a")
    first = prefill(plan(mine, host.batch([20], [20], [True], "a"), stock))
    first.memory.put("k", 1)
    host.req_states.remove("a")
    host.add("b")
    assert host.slots["a"] == host.slots["b"]
    second = prefill(plan(mine, host.batch([12], [32], [True], "b"), stock))
    assert first is not second, "20 tokens of it were cached, and they are not those of the first"
    assert 0 == len(first.memory)


def test_drafts_end_no_prefill() -> None:
    mine = runtime()
    host = RunnerV2(mine, "a", "b")
    first = prefill(plan(mine, host.batch([20, 1], [20, 9], [True, False], "a", "b"), stock))
    for step in (1, 2):  # the speculator's metadata: a token a request, no slots, none prefilling
        assert plan(mine, common([1, 1], [20 + step, 9 + step], [False, False]), stock) is None
    assert first is prefill(plan(mine, host.batch([12, 1], [32, 10], [True, False], "a", "b"), stock))


def test_a_chunk_may_wait_for_its_turn() -> None:
    mine = runtime()
    host = RunnerV2(mine, "a", "b")
    first = prefill(plan(mine, host.batch([20], [20], [True], "a"), stock))
    plan(mine, host.batch([30], [30], [True], "b"), stock)
    assert first is prefill(plan(mine, host.batch([12], [32], [True], "a"), stock))


def test_a_request_that_decodes_or_is_gone_keeps_nothing() -> None:
    mine = runtime()
    host = RunnerV2(mine, "a", "b")
    plan(mine, host.batch([20, 20], [20, 20], [True, True], "a", "b"), stock)
    assert 2 == len(mine.requests)
    plan(mine, host.batch([1], [21], [False], "a"), stock)
    assert (1, 1) == (len(mine.requests), mine.requests.finished)
    host.req_states.remove("b")
    plan(mine, host.batch([1], [22], [False], "a"), stock)
    assert (0, 2) == (len(mine.requests), mine.requests.finished)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_request_that_decodes_is_found_wherever_its_row_stands(place: int) -> None:
    mine = runtime()
    host = RunnerV2(mine, "a", "b", "c")
    plan(mine, host.batch([20], [20], [True], "a"), stock)
    names, queries, prefilling = ["b", "c"], [1, 20], [False, True]
    names.insert(place, "a")
    queries.insert(place, 1)
    prefilling.insert(place, False)
    for behind, ended in ((0, 0), (21, 1)):  # 0: a made-up batch
        lengths = [{"a": max(behind, 1), "b": 70, "c": 20}[name] for name in names]
        plan(mine, host.batch(queries, lengths, prefilling, *names), stock)
        assert ("a" in mine.requests.names) != ended
    assert ("c",) == mine.requests.names


class Instructions:
    """Counts what the interpreter executes of all functions that are Python's."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, frame: Any, event: str, _: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.count += event == "opcode"
        return self


@pytest.mark.parametrize("kind", [RunnerV1, RunnerV2])
@pytest.mark.parametrize("prompt", [True, False])
def test_rows_that_decode_cost_no_python(kind: type[RunnerV1 | RunnerV2], prompt: bool) -> None:
    def instructions(decoding: int) -> int:
        mine, names, counter = runtime(), [str(i) for i in range(decoding + 1)], Instructions()
        host = kind(mine, *names)
        for chunk in (1, 2, 3):
            where = [1] * decoding + [20], [30] * decoding + [20 * chunk], [False] * decoding + [prompt]
            batch = host.batch(*where, *names)
            counting, counter.count = sys.gettrace(), 0
            sys.settrace(counter)
            try:
                parts = plan(mine, batch, stock) or ()
                for part in parts:
                    part.metadata()
            finally:
                sys.settrace(counting)
            assert (2 if prompt else 0) == len(parts)
            assert prompt == len(mine.requests)
        return counter.count

    instructions(3)  # what is remembered from call to call
    few, many = instructions(3), instructions(200)
    assert 100 < few if prompt else 20 < few
    assert few == many


def test_runner_v1_names_rows_by_their_order() -> None:
    mine = runtime()
    host = RunnerV1(mine, "a", "b")
    batch = common([20, 20], [20, 20], [True, True])
    parts = plan(mine, batch, stock)
    assert parts is not None
    first = [part.prefill for part in parts]
    host.input_batch.req_ids = ["b", "a"]
    parts = plan(mine, common([12, 12, 0], [32, 32, 0], [True, True, False]), stock)
    assert parts is not None
    assert first == [part.prefill for part in parts[:2]][::-1], "rows that pad a batch have no name"
    del host
    assert [None] == mine.names.of(batch, 1), "the runner is not kept alive"


def test_an_engine_that_nobody_sees_into_does_not_start() -> None:
    """Requests would ask for dense attention, and run sparse."""
    mine = runtime()
    mine.check_names()
    blind = SimpleNamespace(add_request=lambda *_: None)
    for host, why in (
        (RunnerV2(mine, "a"), None),
        (RunnerV2(mine, state=blind), DEAF),
        (RunnerV1(mine, "a"), None),
        (RunnerV1(mine, "a", halves=True), HALVES),
        (None, "runner is unknown"),
    ):
        mine.names = Names.of_nobody() if host is None else host.execute_model()
        if why is None:
            mine.check_names()
            continue
        with pytest.raises(sp.AttachError) as caught:
            mine.check_names()
        assert f"{BLIND}: " in str(caught.value)
        assert why in str(caught.value)
    assert "VLLM_USE_V2_MODEL_RUNNER=0" in DEAF
    assert "--enable-dbo" in HALVES


def test_rows_without_slots_are_those_of_their_batch() -> None:
    """Metadata of a hybrid model have no slots: vLLM's MambaHybridModelState makes them without."""
    mine = runtime(**REMEMBERS)
    host = RunnerV2(mine, "a", "b")
    host.req_states.prompt_len[host.slots["b"]] = 33

    def made(*names: str, end: int) -> Any:
        batch = common([20] * len(names), [end] * len(names), [True] * len(names))
        rows = SimpleNamespace(req_ids=list(names), num_reqs=len(batch.seq_lens))
        return host.model_state.prepare_attn(rows, lambda: plan(mine, batch, stock))

    first = made("b", "a", end=20)
    assert [33, None] == [part.row.prompt for part in first]
    assert [first[1].prefill, first[0].prefill] == [part.prefill for part in made("a", "b", end=40)]
    batch = common([20, 20], [60, 60], [True, True])
    assert [None] * 2 == mine.names.of(batch, 2), "of no batch of the runner's"
    split = SimpleNamespace(req_ids=["a"], num_reqs=2)
    assert [None] * 2 == host.model_state.prepare_attn(split, lambda: mine.names.of(batch, 2)), "rows of one request"


def test_a_row_of_nobody_runs_dense_is_counted_and_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    mine = runtime()
    mine.names = Names.of_nobody()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert plan(mine, common([20, 20], [20, 20], [True, True]), stock) is None
    assert {UNNAMED: 4} == {name: count for name, count in mine.report().notes.items() if name != ENDLESS}
    assert [f"sparseprefill: a request runs dense: {UNNAMED}"] == [one.message for one in caplog.records]


@pytest.mark.parametrize("kind", [RunnerV1, RunnerV2])
def test_a_request_that_tells_nothing_runs_dense(kind: type[RunnerV1 | RunnerV2]) -> None:
    """As where vLLM keeps a request's parameters elsewhere."""
    mine = runtime()
    host = kind(mine, "a", "b")
    if isinstance(host, RunnerV1):
        host.requests["b"] = SimpleNamespace(num_prompt_tokens=20)
    else:
        host.model_state.add_request(host.slots["b"], SimpleNamespace(req_id="b", params=None))
    parts = plan(mine, host.batch([20, 20], [20, 20], [True, True], "a", "b"), stock)
    assert parts is not None
    assert [True, False] == [part.row is not None for part in parts]
    assert 1 == mine.report().notes[SILENT]


@dataclasses.dataclass
class Later(Common):
    """Metadata of a later vLLM: two fields that nobody here knows."""

    sink_lens: torch.Tensor | None = None
    fast: bool = False


def test_fields_that_nobody_knows_are_said_at_start_and_not_cut(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_fields(Common)
        assert not caplog.records
        check_fields(Later)
    assert "say something under sink_lens, fast will run dense" in caplog.text
    empty = Later(**vars(common([20, 3], [20, 30], [True, False])))
    told = Later(**vars(common([20, 3], [40, 31], [True, False])), sink_lens=torch.ones(2))
    mine = runtime()
    assert plan(mine, empty, stock) is not None
    assert plan(mine, told, stock) is None
    assert plan(mine, dataclasses.replace(empty, fast=True), stock) is None, "another group of layers of the first step"
    why = "vLLM's metadata say something that this version does not know: sink_lens"
    assert 1 == mine.report().notes[why]
    always = dataclasses.make_dataclass("Always", [("ranks", torch.Tensor)])
    with pytest.raises(sp.AttachError, match="does not know: ranks, so no batch could be cut"):
        check_fields(always)
    assert FIELDS <= KNOWN


@pytest.mark.parametrize(
    ("more", "words"),
    [({"mm_req_doc_ranges": {0: [(1, 3)]}}, "multimodal"), ({"rswa_prefix_lens": torch.ones(1)}, "R-SWA")],
)
def test_requests_with_a_reason(more: dict[str, Any], words: str) -> None:
    parts = plan(runtime(), common([20], [20], [True], **more), stock)
    assert parts is not None
    assert words in str(parts[0].reason)


def test_strict_refuses_at_start() -> None:
    dense = [(0, None), (1, "the layer has a sliding window")]
    runtime().expect(dense)
    runtime(strict=True, layers=[0]).expect(dense)
    with pytest.raises(sp.AttachError, match="strict: these layers would stay dense: layer 1: the layer has a sliding"):
        runtime(strict=True).expect(dense)


def test_layers_that_the_model_has_not_are_refused_ahead_of_its_weights() -> None:
    mine = runtime(layers=[2, 7])
    with pytest.raises(sp.ParameterError, match=r"^sparseprefill\.layers names 7: M has 3 layers"):
        Runtime.made(mine.options, mine.model, Whose())


def test_nothing_to_run_sparse_is_said_at_start(caplog: pytest.LogCaptureFixture) -> None:
    mine = runtime(layers=[1, 2])
    with caplog.at_level(logging.INFO):
        mine.expect([(0, None), (1, "why"), (2, "why")])
    assert ["M: streaming is selected, but nothing can run sparse: why"] == [
        one.message.removeprefix("sparseprefill: ") for one in caplog.records if one.levelname == "WARNING"
    ]
    assert "prefill chunks" not in caplog.text, "no claim"
    assert {"streaming is selected, but nothing can run sparse: why": 1} == mine.report().notes
    caplog.clear()
    with caplog.at_level(logging.INFO):
        runtime().expect([(0, None), (1, "why"), (2, "why")])
    assert ["INFO", "INFO"] == [one.levelname for one in caplog.records]
    assert "prefill chunks of 8 tokens and more of M, STOCK for the rest" in caplog.text
    assert "2 of 3 layers stay dense: why" in caplog.text


def test_a_report_that_fails_ends_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    mine = runtime()
    host = RunnerV2(mine, "a")

    def broken(*_: object) -> None:
        raise RuntimeError("a mask that cannot be counted")

    monkeypatch.setattr(mine.session, "report", broken)
    with caplog.at_level(logging.DEBUG, logger="sparseprefill"):
        plan(mine, host.batch([20], [20], [True], "a"), stock)
        plan(mine, host.batch([1], [21], [False], "a"), stock)
    assert "no report: RuntimeError: a mask that cannot be counted" in caplog.text


def test_an_engine_with_another_backend_has_no_state() -> None:
    attention = SimpleNamespace(backend=SimpleNamespace(name="CPU_ATTN"), backend_per_kind={})
    assert runtime_of(SimpleNamespace(attention_config=attention), "CPU_ATTN") is None


class Owner:
    """In the place of vLLM's compilation config, of which every engine has one."""


def test_engines_of_one_process_have_each_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "make_runtime", lambda *_: runtime())
    attention = SimpleNamespace(backend=SimpleNamespace(name="CUSTOM"), backend_per_kind={})
    one, other = (SimpleNamespace(attention_config=attention, compilation_config=Owner()) for _ in range(2))
    first, second = runtime_of(one, "CPU_ATTN"), runtime_of(other, "CPU_ATTN")
    assert first is not None
    assert first is not second
    assert first is runtime_of(one, "CPU_ATTN") is module.existing(one)
    key = id(one.compilation_config)
    del one
    assert key not in module._runtimes
    assert second is module.existing(other)


def test_a_worker_reports_where_no_layer_came_to_us(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = SimpleNamespace(backend=SimpleNamespace(name="CUSTOM"), backend_per_kind={})
    worker = ReportExtension()
    assert {} == worker.sparseprefill_report()
    model = SimpleNamespace(model="recurrent")
    config = SimpleNamespace(attention_config=attention, compilation_config=Owner(), model_config=model)
    worker.vllm_config = config  # type: ignore[attr-defined]
    assert NOBODY in worker.sparseprefill_report()["text"]
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    said = "CUSTOM is selected, but VLLM_PLUGINS is 'other', which leaves sparseprefill out"
    assert said in worker.sparseprefill_report()["text"]
    attention.backend = None
    assert {} == worker.sparseprefill_report()


class Speculator:
    """Loads a draft model, as vLLM's do."""

    def propose(self) -> None:
        """Drafts."""

    def load_model(self, make: Callable[[], Any]) -> Any:
        return make()


def test_layers_of_a_draft_model_are_known_by_who_loads_them() -> None:
    assert drafting() is False
    assert Speculator().load_model(drafting) is True


def test_a_layer_of_a_draft_model_has_no_runtime_and_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = runtime()
    backend = SimpleNamespace(name="CUSTOM")
    config = SimpleNamespace(
        compilation_config=object(), attention_config=SimpleNamespace(backend=backend, backend_per_kind={})
    )
    monkeypatch.setitem(_runtimes, id(config.compilation_config), mine)
    assert mine is layer_runtime(config, "STOCK")
    for _ in range(2):
        assert Speculator().load_model(lambda: layer_runtime(config, "STOCK")) is None
    assert {DRAFTS: 2} == mine.report().notes
