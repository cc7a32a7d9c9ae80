"""An engine's model runners with metadata of the right shape and no vLLM."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sparseprefill.adapters.serving.model import Model
from sparseprefill.adapters.serving.tally import Tally
from sparseprefill.adapters.session.options import HostOptions
from sparseprefill.adapters.session.session import Session
from sparseprefill.adapters.vllm.names import Names
from sparseprefill.adapters.vllm.options import parse
from sparseprefill.adapters.vllm.runtime import Runtime

from sparseprefill.profiles.identity import ModelIdentity


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
    req_idx: np.ndarray[Any, Any] | None = None
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


NOTHING = SimpleNamespace(sampling_params=None)
"""What a runner keeps of a request that asks for nothing, and whose prompt's length it does not tell."""


def runtime(**table: Any) -> Runtime:
    """Of an engine whose runner names the rows of a batch by their order, until a test gives it another."""
    options = parse({"sparseprefill": {"method": "streaming", "min_query": 8, **table}})
    whole = ModelIdentity(name="m", architecture="M", layers=3, heads=4, kv_heads=2, head_dim=32, digest="d")
    session = Session(options.build(), HostOptions(min_query=options.min_query, layers=options.layers))
    mine = Runtime(options, session, Model(whole, whole, "M", "STOCK", 0), Tally())
    names = [f"row {i}" for i in range(16)]
    host = SimpleNamespace(requests=dict.fromkeys(names, NOTHING), input_batch=SimpleNamespace(req_ids=names))
    mine.names = Names(lambda: host)
    return mine


def stock(narrowed: Any) -> Any:
    return narrowed


class States:
    """Of vLLM's model runner V2: which request has which slot. One that comes gets the slot freed last."""

    def __init__(self, slots: int) -> None:
        self.prompt_len: Any = np.zeros(slots, dtype=np.int32)
        self.req_id_to_index: dict[str, int] = {}
        self.index_to_req_id: dict[int, str] = {}
        self._free = list(range(slots))

    def add(self, name: str) -> int:
        slot = self._free.pop()
        self.req_id_to_index[name], self.index_to_req_id[slot] = slot, name
        return slot

    def remove(self, name: str) -> None:
        slot = self.req_id_to_index.pop(name)
        del self.index_to_req_id[slot]
        self._free.append(slot)


class ModelState:
    """Of vLLM's model runner V2: told of requests, and of a batch's rows; makes the metadata."""

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """The request has come."""

    def prepare_attn(self, input_batch: Any, build: Callable[[], Any]) -> Any:
        return build()


class RunnerV2:
    """Makes builders, as vLLM's does, and metadata with each row's slot."""

    def __init__(self, mine: Runtime, *names: str, state: Any = None) -> None:
        self.req_states = States(max(8, len(names)))
        self.model_state = ModelState() if state is None else state
        mine.names = self.execute_model()
        self.slots: dict[str, int] = {}
        for name in names:
            self.add(name)

    def add(self, name: str, params: Any = None) -> None:
        """A request comes, with its sampling parameters."""
        self.slots[name] = self.req_states.add(name)
        self.model_state.add_request(self.slots[name], SimpleNamespace(req_id=name, sampling_params=params))

    def execute_model(self) -> Names:
        return Names.of_caller()

    def batch(self, queries: list[int], lengths: list[int], prefilling: list[bool], *names: str) -> Common:
        return common(queries, lengths, prefilling, req_idx=np.array([self.slots[name] for name in names]))


class RunnerV1:
    """Keeps its requests in the order of the batch's rows; its metadata name nothing."""

    def __init__(self, mine: Runtime, *names: str, halves: bool = False) -> None:
        self.requests: dict[str, Any] = dict.fromkeys(names, NOTHING)
        self.input_batch = SimpleNamespace(req_ids=list(names))
        self.parallel_config = SimpleNamespace(use_ubatching=halves)
        mine.names = self.execute_model()

    def execute_model(self) -> Names:
        return Names.of_caller()

    def batch(self, queries: list[int], lengths: list[int], prefilling: list[bool], *names: str) -> Common:
        self.input_batch.req_ids = list(names)
        return common(queries, lengths, prefilling)
