"""The blocks of vLLM's KV cache, by how they were written, as far as this process has seen.

A worker is told of its blocks once a step, in what the scheduler sends (``SchedulerOutput``): which ones a request
gets, and from which token on it computes them. A block that a request gets anew holds nothing yet, so what was known of
it is forgotten; what decoding writes there has every key. Blocks before the first token that a request computes were
written earlier: here, or, where there is a connector, by whoever filled the store.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from sparseprefill.breakeven.before import Before

from ..serving.requests import Row
from ..serving.written import STORE, UNTOLD, Methods, Unwritten, Write, nowhere
from .runtime import Runtime

TOLD = ("update_requests", "_update_states")
"""Methods of model runner V2 and V1 that take what the scheduler sends, ahead of the metadata."""


@define(eq=False)
class Blocks:
    """Numbers of methods by token of each block. layer: by its name, one that reads them. group, size: of layers that
    share a table with it, and the tokens of a block; 0 until that is known."""

    layer: str = ""
    group: int = 0
    size: int = 0
    tables: dict[str, list[int]] = field(factory=dict, init=False)
    _methods: Methods = field(factory=Methods, init=False)
    _how: Tensor = field(factory=lambda: torch.zeros(0, 0, dtype=torch.uint8, device="cpu"), init=False)

    def take(self, output: Any) -> None:
        """A step begins. output: vLLM's SchedulerOutput."""
        for name in output.finished_req_ids:
            self.tables.pop(name, None)
        fresh, cached = list[int](), output.scheduled_cached_reqs
        for one in output.scheduled_new_reqs:
            fresh += self._give(one.req_id, one.block_ids, one.num_computed_tokens)
        resumed = getattr(cached, "resumed_req_ids", ())
        each = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for name, ids, computed in filter(itemgetter(1), each):  # rows that decode within their block are none of them
            if name in resumed:
                fresh += self._give(name, ids, computed)
            else:
                self.tables.setdefault(name, []).extend(ids[self.group])
                fresh += ids[self.group]
        if fresh:
            self._room(max(fresh))
            self._how[fresh] = Methods.DENSE
        copies = getattr(output, "kv_cache_block_copies", None)
        if copies:  # such as of a last block that a request shares, and writes to
            sources, targets = ([*some] for some in zip(*copies, strict=True))
            self._room(max(*sources, *targets))
            self._how[targets] = self._how[sources]

    def before(self, row: Row) -> Before:
        """See `Written`."""
        table = self.tables.get(row.name or "")
        if table is None:
            return Before(unknown=row.start, why=UNTOLD)
        at = torch.tensor(table[: -(-row.start // self.size)], dtype=torch.long, device="cpu")
        found = self._how[at].flatten()[: row.start].bincount(minlength=1).tolist()
        found[Methods.UNKNOWN] += row.start - sum(found)
        return self._methods.before(found, UNTOLD)

    def writing(self, row: Row) -> Write:
        """See `Written`."""
        table = self.tables.get(row.name or "")
        if table is None:
            return nowhere
        first = row.start // self.size
        at = torch.tensor(table[first : -(-row.end // self.size)], dtype=torch.long, device="cpu")
        begin, end = row.start - first * self.size, row.end - first * self.size

        def write(method: str) -> None:
            found = self._how[at]
            found.flatten()[begin:end] = self._methods.number(method)
            self._how[at] = found

        return write

    def _give(self, name: str, ids: Sequence[Sequence[int]], computed: int) -> list[int]:
        """A request gets all of its blocks, of which so many tokens are computed. Those that hold none of them."""
        table = self.tables[name] = list(ids[self.group])
        self._room(max(table, default=0))
        return table[-(-computed // self.size) :]

    def _room(self, block: int) -> None:
        """Room for a block of this number: as the engine has no more blocks than fit its memory, a byte a token."""
        if block >= len(self._how):
            more = torch.zeros(max(block + 1, 2 * len(self._how)), self.size, dtype=torch.uint8, device="cpu")
            if len(self._how):
                more[: len(self._how)] = self._how
            self._how = more


def watch(runtime: Runtime, config: Any, layer: str) -> None:
    """Have a runtime told of the blocks of its model runner, once. layer: by its name, one that runs sparse."""
    if runtime.written is not None:
        return
    given = getattr(config, "kv_transfer_config", None)
    store = getattr(given, "kv_connector", None) if getattr(given, "is_kv_consumer", True) else None
    runner, blocks = runtime.names.runner, Blocks(layer=layer)
    name = next((one for one in TOLD if hasattr(runner, one)), None)
    if name is None or store is not None:
        runtime.written = Unwritten(UNTOLD if store is None else STORE.format(name=store))
        return
    runtime.written, taking = blocks, getattr(runner, name)

    @functools.wraps(taking)
    def told(output: Any, *args: Any, **kwargs: Any) -> Any:
        if runtime.written is blocks:
            try:
                runtime.settle()  # what the step before has written, ahead of blocks that go to others now
                _find(blocks, runner)
                blocks.take(output)
            except Exception as error:
                runtime.lose(error)
        return taking(output, *args, **kwargs)

    setattr(runner, name, told)


def _find(blocks: Blocks, runner: Any) -> None:
    """The group of layers whose blocks they are: each has a table of its own."""
    if blocks.size:
        return
    groups = runner.kv_cache_config.kv_cache_groups
    blocks.group = next((i for i, one in enumerate(groups) if blocks.layer in one.layer_names), 0)
    blocks.size = int(groups[blocks.group].kv_cache_spec.block_size)
