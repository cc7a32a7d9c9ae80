"""The dry run: the stock model against the same model with a full mask through the executor."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen
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
from .inspection import allowed_ids, input_device, trained_length

TOKENS, SHORTEST = 64, 16
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
"""Relative norm of the difference in logits: rounding stays below, a wrong mask is of the order of one."""


@frozen
class FullEstimator:
    """Selects every key, so that only the way there and back can go wrong. Plugins may be left out, dense with them."""

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """The full mask."""
        return Plan(SparseMask.full(call))


@frozen(eq=False)
class Findings:
    """What a dry run saw of a model's attention layers, by their indices.

    layers: those that reached the adapter. dense: those that will fall back, with the reasons. kinds: a call of each,
    or why the host computes it, as `Session.start` takes them, without windows: those with a sliding window. repeated:
    whether one forward called a layer index twice.
    """

    layers: tuple[int, ...]
    dense: dict[int, tuple[str, ...]]
    kinds: dict[int, AttentionCall | str]
    windows: tuple[int, ...]
    repeated: bool

    @classmethod
    def of(cls, report: Report, calls: dict[int, AttentionCall], route: Route) -> Findings:
        """report: of the model with a full mask. calls: one of each layer that ran so. route: what will run."""
        seen = report.layers
        reasons = {one.layer: tuple(one.reasons) for one in seen if one.reasons}
        objections = {layer: said for layer, call in calls.items() if (said := route.unsupported(call))}
        hosts = {one.layer: "; ".join(one.reasons) for one in seen if one.mode == "dense"}
        windows = tuple(one.layer for one in seen if one.mode == "window")
        layers, repeated = tuple(one.layer for one in seen), any(one.calls > 1 for one in seen)
        return cls(layers, {**reasons, **objections}, {**hosts, **calls}, windows, repeated)


def dry_run(model: torch.nn.Module, decoder: PreTrainedModel, route: Route) -> Findings:
    """Run 2 x 64 random tokens with left padding, before and after; the model is left as it was.

    Raises AttachError where the logits differ, no layer can be bound, or either run fails; where the stock model is at
    fault, it says so.
    """
    calls: dict[int, AttentionCall] = {}

    def observe(call: AttentionCall, result: Result) -> None:
        calls[call.layer] = call

    session = Session(_full(route), min_query=SHORTEST, observe=observe, warn=False, tail=0, recall_every=0)
    handle = Handle(decoder, session, threading.current_thread(), model=model)
    inputs = _inputs(model, decoder)
    with torch.no_grad(), _evaluating(model):
        stock = _stock(model, inputs)
        handle.bind()
        try:
            with handle:
                ours = _run(model, inputs)
        except Exception as error:
            _stock(model, inputs)  # one that fails now and then is not our failure
            raise AttachError(_failed(model, "fails with another attention function", error)) from error
        report = handle.report()
        findings = Findings.of(report, calls, route)
        name, cast = type(model).__name__, autocast_type(stock.device)
        if not any(layer.sparse_calls or layer.window_calls for layer in report.layers):
            why = "; ".join(report.fallbacks) or "none of them calls the attention function"
            raise AttachError(f"{name} has no attention layer to attach to: {why}")
        if apart := differ(ours, stock, cast):
            if by_itself := differ(_stock(model, inputs), stock, cast):
                raise AttachError(
                    f"{name} as it is, before it is attached, gives other logits from run to run: they {by_itself}, so "
                    "there is nothing to verify (verify=False skips this dry run)"
                )
            raise AttachError(
                f"{name} does not compute plain attention through the attention interface: with a full mask its logits "
                f"{apart}. Its layers use more than queries, keys and a mask."
            )
    return findings


def compare_unread(model: torch.nn.Module, decoder: PreTrainedModel, route: Route, last: int) -> None:
    """Run 2 x 300 random tokens for the logits of the last alone, with all rows of the last layer and with those read.

    Raises AttachError where the logits differ. A model that takes fewer than 256 tokens leaves out no rows.
    """
    inputs = {**_inputs(model, decoder, 300), "logits_to_keep": 1}
    found: list[Tensor] = []
    for layer in (None, last):
        session = Session(_full(route), min_query=SHORTEST, warn=False, recall_every=0)
        handle = Handle(decoder, session, threading.current_thread(), layer, model=model)
        with torch.no_grad(), _evaluating(model), handle:
            found.append(model(**inputs).logits)
    whole, part = found
    if apart := differ(part, whole):
        raise AttachError(
            f"skip_unread is True, but {type(model).__name__} reads more rows of its last layer than logits_to_keep "
            f"names: its logits {apart}; leave skip_unread out"
        )


def _full(route: Route) -> Pipeline:
    """Every key through the executor that will run the method."""
    return Pipeline(FullEstimator(), executor=route.known[0].executor if route.known else AutoExecutor())


def _inputs(model: torch.nn.Module, decoder: PreTrainedModel, most: int = TOKENS) -> dict[str, Any]:
    ids = random_ids(model, decoder, most)
    mask = torch.ones_like(ids)
    mask[0, : ids.shape[1] // 4] = 0
    # Attention weights that the configuration asks for would keep every layer dense.
    weights = {"output_attentions": False} if getattr(decoder.config, "output_attentions", False) else {}
    return {"input_ids": ids, "attention_mask": mask, "use_cache": False, **weights}


def random_ids(model: torch.nn.Module, decoder: PreTrainedModel, most: int = TOKENS) -> Tensor:
    """Token ids ``[2, most]`` of text, fewer where the model takes fewer, on the device where they are read."""
    config = getattr(model, "config", decoder.config)
    low, high = allowed_ids(config if hasattr(config, "get_text_config") else decoder.config)
    room = trained_length(decoder)
    tokens = most if room is None else min(most, room)
    source = torch.Generator("cpu").manual_seed(0)
    ids = torch.randint(low, high, (2, tokens), generator=source, device="cpu")
    return ids.to(input_device(decoder))


def _stock(model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
    """`_run` of the model that nothing of ours is in; its failure is its own."""
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


def differ(logits: Tensor, wanted: Tensor, cast: torch.dtype | None = None) -> str:
    """How far logits are off, for messages; empty where that is rounding. cast: the type that autocast rounds to."""
    limit = max(TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16]) for dtype in (wanted.dtype, cast or wanted.dtype))
    error = float((wanted.double() - logits.double()).norm() / wanted.double().norm())
    return "" if error <= limit else f"differ by {error:.2g} (relative norm; {limit:g} is allowed)"


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
