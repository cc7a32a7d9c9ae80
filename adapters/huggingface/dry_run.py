"""The dry run: the stock model against the same model with a full mask through the executor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor
from transformers import PreTrainedModel

from sparseprefill.call import AttentionCall
from sparseprefill.errors import AttachError
from sparseprefill.executors.auto import AutoExecutor
from sparseprefill.mask.mask import SparseMask
from sparseprefill.memory import Memory
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan, Result
from sparseprefill.route import Route

from ..session.report import Report
from ..session.session import Session
from .attention import autocast_type
from .handle import Handle
from .inspection import allowed_ids, input_device

TOKENS, SHORTEST = 64, 16
# Relative norm of the difference in logits. Rounding stays below, a wrong mask is of the order of one.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}


@frozen
class FullEstimator:
    """Selects every key, so that only the way there and back can go wrong."""

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """The full mask."""
        return Plan(SparseMask.full(call))


@frozen(eq=False)
class Findings:
    """Layers that were seen, in their report, what the pipeline objects to in them, and a call of each."""

    report: Report
    objections: dict[int, tuple[str, ...]] = field(factory=dict)
    calls: dict[int, AttentionCall] = field(factory=dict)

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the attention layers that reached the adapter."""
        return tuple(layer.layer for layer in self.report.layers)

    @property
    def dense(self) -> dict[int, tuple[str, ...]]:
        """Layers that will fall back, with the reasons."""
        reasons = {layer.layer: tuple(layer.reasons) for layer in self.report.layers if layer.reasons}
        return {**reasons, **self.objections}

    @property
    def kinds(self) -> dict[int, AttentionCall | str]:
        """Layers as `Session.start` takes them: a call, or why the host computes the layer. Without sliding windows."""
        dense = {one.layer: "; ".join(one.reasons) for one in self.report.layers if one.mode == "dense"}
        return {**dense, **self.calls}

    @property
    def windows(self) -> tuple[int, ...]:
        """Layers with a sliding window."""
        return tuple(one.layer for one in self.report.layers if one.mode == "window")

    @property
    def repeated(self) -> bool:
        """Whether one forward called a layer index twice."""
        return any(layer.calls > 1 for layer in self.report.layers)


def dry_run(model: torch.nn.Module, decoder: PreTrainedModel, route: Route) -> Findings:
    """Run 2 x 64 random tokens with left padding, before and after; the model is left as it was.

    Raises AttachError where the logits differ, no layer can be bound, or either run fails; where the stock model is at
    fault, it says so.
    """
    calls: dict[int, AttentionCall] = {}

    def observe(call: AttentionCall, result: Result) -> None:
        calls[call.layer] = call

    full = Pipeline(FullEstimator(), executor=route.known[0].executor if route.known else AutoExecutor())
    session = Session(full, min_query=SHORTEST, observe=observe, warn=False, tail=0, recall_every=0)
    handle = Handle(model, decoder, session, only=threading.current_thread())
    inputs = _inputs(model, decoder)
    with torch.no_grad(), _evaluating(model):
        stock = _stock(model, inputs)
        handle.bind()
        try:
            ours: Tensor | Exception = _run(model, inputs)
        except Exception as error:
            ours = error
        finally:
            handle.detach()
    if isinstance(ours, Exception):
        with torch.no_grad(), _evaluating(model):
            _stock(model, inputs)  # one that fails now and then is not our failure
        raise AttachError(_failed(model, "fails with another attention function", ours)) from ours
    objections = {layer: reasons for layer, call in calls.items() if (reasons := route.unsupported(call))}
    findings = Findings(handle.report(), objections, calls)
    with torch.no_grad(), _evaluating(model):
        _compare(model, stock, ours, findings, lambda: _stock(model, inputs))
    return findings


def compare_unread(model: torch.nn.Module, decoder: PreTrainedModel, route: Route, last: int) -> None:
    """Run 2 x 300 random tokens for the logits of the last alone, with all rows of the last layer and with those read.

    Raises AttachError where the logits differ. A model that takes fewer than 256 tokens leaves out no rows.
    """
    inputs = {**_inputs(model, decoder, 300), "logits_to_keep": 1}
    full = Pipeline(FullEstimator(), executor=route.known[0].executor if route.known else AutoExecutor())
    found: list[Tensor] = []
    for layer in (None, last):
        session = Session(full, min_query=SHORTEST, warn=False, recall_every=0)
        handle = Handle(model, decoder, session, only=threading.current_thread(), last=layer)
        with torch.no_grad(), _evaluating(model), handle:
            found.append(model(**inputs).logits)
    whole, part = found
    limit = TOLERANCE.get(whole.dtype, TOLERANCE[torch.bfloat16])
    if not _apart(part, whole) <= limit:
        raise AttachError(
            f"skip_unread is True, but {type(model).__name__} reads more rows of its last layer than logits_to_keep "
            f"names: its logits differ by {_apart(part, whole):.2g} (relative norm; {limit:g} is allowed); leave "
            "skip_unread out"
        )


def _inputs(model: torch.nn.Module, decoder: PreTrainedModel, most: int = TOKENS) -> dict[str, Any]:
    config = getattr(model, "config", decoder.config)
    low, high = allowed_ids(config if hasattr(config, "get_text_config") else decoder.config)
    room = getattr(decoder.config, "max_position_embeddings", None)
    tokens = min(most, room) if isinstance(room, int) and room > 0 else most
    ids = torch.randint(low, high, (2, tokens), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, : tokens // 4] = 0
    device = input_device(decoder)
    # Attention weights that the configuration asks for would keep every layer dense.
    weights = {"output_attentions": False} if getattr(decoder.config, "output_attentions", False) else {}
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device), "use_cache": False, **weights}


def _stock(model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
    """As `_run`, of the model that nothing of ours is in; its failure is its own."""
    try:
        found = _run(model, inputs)
    except Exception as error:
        raise AttachError(
            _failed(model, "does not run on plain token ids as it is, before it is attached", error)
        ) from error
    if not bool(torch.isfinite(found).all()):
        name = type(model).__name__
        raise AttachError(
            f"{name} as it is, before it is attached, gives logits that are not finite for random tokens: there is "
            "nothing to verify (verify=False skips this dry run)"
        )
    return found


def _failed(model: torch.nn.Module, complaint: str, error: Exception) -> str:
    return f"{type(model).__name__} {complaint}: {type(error).__name__}: {error} (verify=False skips this dry run)"


def _run(model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
    """Logits, or hidden states, of the real tokens ``[n, width]``; of each row where the model gives one per row."""
    outputs = model(**inputs)
    for name in ("logits", "last_hidden_state"):
        x = getattr(outputs, name, None)
        if isinstance(x, Tensor):
            return x[inputs["attention_mask"].bool().to(x.device)] if x.dim() == 3 else x
    raise TypeError("its output has neither logits nor last_hidden_state")


def _compare(
    model: torch.nn.Module, stock: Tensor, ours: Tensor, findings: Findings, again: Callable[[], Tensor]
) -> None:
    """again: one more run of the stock model, asked for where the two differ."""
    name = type(model).__name__
    if not any(layer.sparse_calls or layer.window_calls for layer in findings.report.layers):
        why = "; ".join(findings.report.fallbacks) or "none of them calls the attention function"
        raise AttachError(f"{name} has no attention layer to attach to: {why}")
    types = (stock.dtype, autocast_type(stock.device) or stock.dtype)
    limit = max(TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16]) for dtype in types)
    error = _apart(ours, stock)
    if error <= limit:
        return
    by_itself = _apart(again(), stock)
    if not by_itself <= limit:
        raise AttachError(
            f"{name} as it is, before it is attached, gives other logits from run to run: they differ by "
            f"{by_itself:.2g} (relative norm; {limit:g} is allowed), so there is nothing to verify (verify=False skips "
            "this dry run)"
        )
    raise AttachError(
        f"{name} does not compute plain attention through the attention interface: with a full mask its logits differ "
        f"by {error:.2g} (relative norm; {limit:g} is allowed). Its layers use more than queries, keys and a mask."
    )


def _apart(x: Tensor, wanted: Tensor) -> float:
    """Relative norm of the difference."""
    return float((wanted.double() - x.double()).norm() / wanted.double().norm())


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Switch dropout off, module by module restored."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
