"""Parts of a batch and the state of an engine, with metadata of the right shape and no vLLM."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sparseprefill.adapters.session.session import Session
from sparseprefill.adapters.vllm.model import Model
from sparseprefill.adapters.vllm.options import parse
from sparseprefill.adapters.vllm.plan import plan
from sparseprefill.adapters.vllm.runtime import NAMELESS, Runtime, runtime_of
from sparseprefill.adapters.vllm.split import Part
from sparseprefill.adapters.vllm.tally import NUMBER, Tally

import sparseprefill as sp
from sparseprefill.profiles.identity import ModelIdentity

PAGE = 4


@dataclasses.dataclass
class Common:
    """The fields of vLLM's metadata that matter here."""

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu_upper_bound: torch.Tensor | None
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    is_prefilling: torch.Tensor | None
    causal: bool = True
    req_idx: list[int] | None = None
    mm_req_doc_ranges: dict[int, list[tuple[int, int]]] | None = None
    rswa_prefix_lens: torch.Tensor | None = None


def common(queries: list[int], lengths: list[int], prefilling: list[bool], **more: Any) -> Common:
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    table = torch.arange(100, 100 + 16 * len(queries), dtype=torch.int32).view(len(queries), 16)
    total = int(starts[-1])
    return Common(
        *(starts, starts.clone(), torch.tensor(lengths), torch.tensor(lengths), len(queries), total),
        *(max(queries), max(lengths), table, torch.arange(total), torch.tensor(prefilling)),
        **more,
    )


def runtime(**table: Any) -> Runtime:
    options = parse({"sparseprefill": {"method": "streaming", "min_query": 8, **table}})
    whole = ModelIdentity(name="m", architecture="M", layers=3, heads=4, kv_heads=2, head_dim=32, digest="d")
    session = Session(options.build(), min_query=options.min_query, layers=options.layers)
    return Runtime(options, session, Model(whole, whole, "M", "STOCK", 0), Tally())


def stock(narrowed: Any) -> Any:
    return narrowed


def test_decoding_and_short_rows_stay_together() -> None:
    parts = plan(runtime(), common([1, 1, 9, 3, 20], [30, 40, 9, 3, 50], [False, False, True, True, True]), PAGE, stock)
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
    assert plan(runtime(), batch, PAGE, stock) is None


def test_rows_that_pad_a_batch_are_left_out() -> None:
    batch = common([20, 0, 0], [20, 0, 0], [True, False, False])
    parts = plan(runtime(), dataclasses.replace(batch, is_prefilling=torch.tensor([True])), PAGE, stock)
    assert parts is not None
    assert [(0, 1)] == [(part.first, part.last) for part in parts]


def prefill(parts: list[Part] | None) -> Any:
    assert parts is not None
    assert parts[0].prefill is not None
    return parts[0].prefill


def test_groups_of_layers_share_a_request_within_a_step() -> None:
    mine, batch = runtime(), common([20], [20], [True])
    other = dataclasses.replace(batch, block_table_tensor=batch.block_table_tensor + 500)
    first = prefill(plan(mine, batch, PAGE, stock))
    assert first is prefill(plan(mine, other, PAGE, stock))
    assert first is prefill(plan(mine, common([12], [32], [True]), PAGE, stock)), "the next chunk"


def test_a_slot_of_the_hosts_table_names_a_request() -> None:
    mine = runtime()
    first = prefill(plan(mine, common([20], [20], [True], req_idx=[3]), PAGE, stock))
    assert first is prefill(plan(mine, common([12], [32], [True], req_idx=[3]), PAGE, stock))
    assert first is not prefill(plan(mine, common([12], [44], [True], req_idx=[4]), PAGE, stock))


def test_what_the_host_does_not_name_is_noted() -> None:
    mine = runtime()
    for lengths in ([20], [40]):
        batch = common([20], lengths, [True])
        plan(mine, dataclasses.replace(batch, block_table_tensor=batch.block_table_tensor.to("meta")), PAGE, stock)
    assert {NAMELESS: 1} == mine.report().notes


@pytest.mark.parametrize(
    ("more", "words"),
    [({"mm_req_doc_ranges": {0: [(1, 3)]}}, "multimodal"), ({"rswa_prefix_lens": torch.ones(1)}, "R-SWA")],
)
def test_requests_with_a_reason(more: dict[str, Any], words: str) -> None:
    parts = plan(runtime(), common([20], [20], [True], **more), PAGE, stock)
    assert parts is not None
    assert words in str(parts[0].reason)


def test_strict_refuses_at_start() -> None:
    dense = {0: None, 1: "the layer has a sliding window"}
    runtime().expect(dense)
    runtime(strict=True, layers=[0]).expect(dense)
    with pytest.raises(sp.AttachError, match="strict: these layers would stay dense: layer 1: the layer has a sliding"):
        runtime(strict=True).expect(dense)
    with pytest.raises(sp.ParameterError, match=r"sparseprefill\.layers names 7"):
        runtime(layers=[7]).expect(dense)


def test_an_engine_with_another_backend_has_no_state() -> None:
    attention = SimpleNamespace(backend=SimpleNamespace(name="CPU_ATTN"), backend_per_kind={})
    assert runtime_of(SimpleNamespace(attention_config=attention), "CPU_ATTN") is None


def test_labels_hold_no_lengths() -> None:
    assert "no setting at N keys, int8 and gamma N" == NUMBER.sub("N", "no setting at 3012 keys, int8 and gamma 0.95")
