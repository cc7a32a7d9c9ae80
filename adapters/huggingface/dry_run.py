"""The dry run: the stock model against the same model with a full mask through the executor."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from sparseprefill.call import AttentionCall
from sparseprefill.errors import LONGEST, AttachError
from sparseprefill.executors.auto import AutoExecutor
from sparseprefill.mask.mask import SparseMask
from sparseprefill.memory import Memory
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan, Result
from sparseprefill.route import Route

from ..session.options import HostOptions
from ..session.report import Report
from ..session.session import Session
from .attention import autocast_type
from .compiling import META, surroundings
from .handle import Handle
from .inspection import allowed_ids, asks, configurations, find_decoder, input_device, trained_length

TOKENS, SHORTEST, FAR = 64, 16, 2048
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
"""Relative norm of the difference in logits: rounding stays below, a wrong mask is of the order of one."""

STOCK = "does not run on plain token ids as it is, before it is attached"


@frozen
class FullEstimator:
    """Selects every key, so that only the way there and back can go wrong. Plugins may be left out, dense with them."""

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """The full mask."""
        return Plan(SparseMask.full(call))


@frozen(eq=False)
class Findings:
    """A dry run's findings about a model's attention layers, by their indices.

    layers: those that reached the adapter. dense: those that will fall back, with the reasons. kinds: a call of each,
    or why the host computes it, as `Session.start` takes them, without windows: those with a sliding window. repeated:
    whether one forward called a layer index twice. note: what the dry run had to leave out, and why. alone: whether
    that is all but the decoder.
    """

    layers: tuple[int, ...]
    dense: dict[int, tuple[str, ...]]
    kinds: dict[int, AttentionCall | str]
    windows: tuple[int, ...]
    repeated: bool
    note: str = ""
    alone: bool = False

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


@frozen(eq=False)
class Trial:
    """Inputs for a forward of a model, or of its decoder alone. said: which, for messages."""

    module: torch.nn.Module
    inputs: dict[str, Any]
    said: str

    @property
    def padding(self) -> Tensor | None:
        """bool ``[B, n]``, False where a row has padding; None without."""
        mask: Tensor | None = self.inputs.get("attention_mask")
        return None if mask is None else mask.bool()

    def run(self) -> list[Tensor]:
        """Run the model, and return its outputs without those of padding. TypeError where none could be compared."""
        found = _outputs(self.module(**self.inputs))
        if any(x.is_meta for x in found):
            raise TypeError(META)
        return [_real(x, self.padding) for x in found]

    def stock(self) -> list[Tensor]:
        """Outputs of the model with nothing of ours in it; its failure is its own."""
        try:
            found = self.run()
        except Exception as error:
            raise AttachError(_failed(self.module, STOCK, error)) from error
        return self.checked(found)

    def checked(self, found: list[Tensor]) -> list[Tensor]:
        """The same; AttachError where that cannot be compared."""
        if not _comparable(found):
            raise AttachError(
                f"{type(self.module).__name__} as it is, before it is attached, gives logits that are not finite for "
                "random tokens: there is nothing to verify (verify=False skips this dry run)"
            )
        return found


def dry_run(model: torch.nn.Module, decoder: PreTrainedModel, route: Route) -> Findings:
    """Run random tokens through the model, before and after; it is left as it was.

    2 x 64 tokens, with left padding where the model takes that and its logits are finite; else without, else one row,
    and where the model needs other inputs the decoder alone. Then 16 tokens far behind: see `_compare_far`.
    Raises AttachError where the outputs differ, no layer can be bound, or the attached run or every stock one fails;
    where the stock model is at fault, it says so.
    """
    name = type(model).__name__
    if around := surroundings():
        raise AttachError(f"{name} cannot be verified here: {around}; attach it outside (verify=False skips this)")
    if torch.device(input_device(decoder)).type == "meta":
        raise AttachError(f"{name} cannot be verified: {META} (verify=False skips this dry run)")
    failed: list[tuple[Trial, Exception]] = []
    left_out, nothing = "", ""
    with torch.no_grad(), _evaluating(model):
        for trial in _trials(model, decoder):
            alone = trial.module is not model
            if alone and nothing:
                break
            try:
                stock = trial.run()
            except Exception as error:
                failed.append((trial, error))
                continue
            if trial.padding is not None and not _comparable(stock):
                left_out = f"with {trial.said} the model's own logits are not finite"
                continue
            trial.checked(stock)
            findings, ours = _attached(trial, model, decoder, route)
            cast = autocast_type(stock[0].device)
            if all(isinstance(one, str) for one in findings.kinds.values()) and not findings.windows:
                why = "; ".join(dict.fromkeys(one for one in findings.kinds.values() if isinstance(one, str)))
                nothing = why or "none of them calls the attention function"
                if trial.padding is None:
                    break
                left_out = f"with {trial.said} every layer of {name} stays dense: {nothing}"
                continue
            if apart := _apart(ours, stock, cast):
                if by_itself := _apart(trial.stock(), stock, cast):
                    raise AttachError(
                        f"{name} as it is, before it is attached, gives other logits from run to run: they "
                        f"{by_itself}, so there is nothing to verify (verify=False skips this dry run)"
                    )
                if trial.padding is not None and not alone and _only_of_padding(trial, model, decoder, route):
                    left_out = f"with {trial.said} outputs of {name} {apart}: it reads rows of padding"
                    continue
                raise AttachError(
                    f"{name} does not compute plain attention through the attention interface: with a full mask its "
                    f"logits {apart}. Its layers use more than queries, keys and a mask."
                )
            if failed and not left_out:
                tried, why_not = failed[0]
                left_out = f"with {tried.said} {name} fails: {_short(why_not)}"
            _compare_far(model, decoder, route)
            return evolve(findings, note=left_out and f"dry run: {trial.said}, since {left_out}", alone=alone)
    if nothing:
        raise AttachError(f"{name} has no attention layer to attach to: {nothing}")
    cause = failed[0][1]
    raise AttachError(_failed(model, STOCK, cause)) from cause


def windows(model: torch.nn.Module) -> tuple[int, ...]:
    """Layers with a sliding window, as a dry run finds them. Raises AttachError as `dry_run` does."""
    return dry_run(model, find_decoder(model), Route.of(Pipeline(FullEstimator()))).windows


def _attached(
    trial: Trial, model: torch.nn.Module, decoder: PreTrainedModel, route: Route
) -> tuple[Findings, list[Tensor]]:
    """A run with a full mask: what was seen of the layers, and what came out."""
    calls: dict[int, AttentionCall] = {}

    def observe(call: AttentionCall, result: Result) -> None:
        calls[call.layer] = call

    options = HostOptions(min_query=SHORTEST, tail=0, recall_every=0)
    session = Session(_full(route), options, observe=observe, warn=False)
    handle = Handle(decoder, session, threading.current_thread(), model=model)
    handle.bind()
    try:
        with handle:
            ours = trial.run()
    except Exception as error:
        trial.stock()  # one that fails now and then is not our failure
        raise AttachError(_failed(model, "fails with another attention function", error)) from error
    return Findings.of(handle.report(), calls, route), ours


def _compare_far(model: torch.nn.Module, decoder: PreTrainedModel, route: Route) -> None:
    """Run 16 tokens behind 2,032 keys, or as many as the model takes: AttachError where the decoder's outputs differ.

    The keys are those of 16 tokens, again and again, so that no long text has to be read. Says nothing of a decoder
    that takes no such cache, or no more tokens than the dry run has.
    """
    cache, stock = None, None
    with suppress(Exception):  # it takes other arguments, or another cache: what it takes was compared already
        cache = _far_cache(model, decoder)
        stock = None if cache is None else _behind(cache, model, decoder).run()
    if cache is None or stock is None or not all(bool(x.isfinite().all()) for x in stock):
        return
    _, ours = _attached(_behind(cache, model, decoder), model, decoder, route)
    cast = autocast_type(stock[0].device)
    if (apart := _apart(ours, stock, cast)) and not _apart(_behind(cache, model, decoder).run(), stock, cast):
        raise AttachError(
            f"{type(model).__name__} does not compute plain attention behind {cache.get_seq_length():,} tokens: with a "
            f"full mask its hidden states {apart}. Its layers use more than queries, keys and a mask."
        )


def _far_cache(model: torch.nn.Module, decoder: PreTrainedModel) -> DynamicCache | None:
    """A cache with room for 16 tokens behind it; None where that is not far, or the model's is of another kind."""
    ids, room = random_ids(model, decoder, SHORTEST)[:1], trained_length(decoder)
    times = min(FAR, room or FAR) // SHORTEST - 1
    cache = DynamicCache(config=decoder.config)
    if ids.shape[1] < SHORTEST or times * SHORTEST <= TOKENS:
        return None
    decoder(input_ids=ids, past_key_values=cache, use_cache=True)
    for layer in cache.layers:
        if not isinstance(layer, DynamicLayer) or type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            return None
        held: tuple[Any, Any] = layer.keys, layer.values
        keys, values = (x.repeat(1, 1, times, 1) for x in held)
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length *= times
            keys, values = (x[:, :, max(0, x.shape[2] - layer.sliding_window + 1) :] for x in (keys, values))
        layer.keys, layer.values = keys, values
    return cache if cache.get_seq_length() == times * SHORTEST else None


def _behind(cache: DynamicCache, model: torch.nn.Module, decoder: PreTrainedModel) -> Trial:
    """A forward behind a cache, which stays as it is."""
    mine = copy.copy(cache)
    mine.layers = [copy.copy(layer) for layer in cache.layers]
    ids = random_ids(model, decoder, SHORTEST)[1:]
    inputs = {"input_ids": ids, "past_key_values": mine, "use_cache": True}
    return Trial(decoder, inputs, f"1 x {SHORTEST} random tokens behind a cache")


def _only_of_padding(trial: Trial, model: torch.nn.Module, decoder: PreTrainedModel, route: Route) -> bool:
    """True if the decoder gives the same for what is no padding, so that a head must have read some."""
    inner = evolve(trial, module=decoder)
    try:
        stock = inner.run()
    except Exception:
        return False
    return not _apart(_attached(inner, model, decoder, route)[1], stock, autocast_type(stock[0].device))


def compare_unread(model: torch.nn.Module, decoder: PreTrainedModel, route: Route, last: int) -> None:
    """Run 2 x 300 random tokens for the logits of the last alone, with all rows of the last layer and with those read.

    Raises AttachError where the logits differ. A model that takes fewer than 256 tokens leaves out no rows.
    """
    inputs = {**next(_trials(model, decoder, 300)).inputs, "logits_to_keep": 1}
    found: list[list[Tensor]] = []
    for layer in (None, last):
        session = Session(_full(route), HostOptions(min_query=SHORTEST, recall_every=0), warn=False)
        handle = Handle(decoder, session, threading.current_thread(), layer, model=model)
        with torch.no_grad(), _evaluating(model), handle:
            found.append(_outputs(model(**inputs)))
    whole, part = found
    if apart := _apart(part, whole):
        raise AttachError(
            f"skip_unread is True, but {type(model).__name__} reads more rows of its last layer than logits_to_keep "
            f"names: its logits {apart}; leave skip_unread out"
        )


def _full(route: Route) -> Pipeline:
    """Every key through the executor that will run the method."""
    return Pipeline(FullEstimator(), executor=route.known[0].executor if route.known else AutoExecutor())


def _trials(model: torch.nn.Module, decoder: PreTrainedModel, most: int = TOKENS) -> Iterator[Trial]:
    """Inputs for the model, then for its decoder, those first that tell most."""
    ids = random_ids(model, decoder, most)
    mask = torch.ones_like(ids)
    mask[0, : ids.shape[1] // 4] = 0
    # Attention weights that a configuration asks for would keep every layer dense.
    weights = {"output_attentions": False} if asks(configurations(model), "output_attentions") else {}
    sizes = " x ".join(map(str, ids.shape))
    padded = {"input_ids": ids, "attention_mask": mask, "use_cache": False, **weights}
    given: list[tuple[dict[str, Any], str]] = [
        (padded, f"{sizes} random tokens and left padding"),
        ({"input_ids": ids, **weights}, f"{sizes} random tokens without padding"),
        ({"input_ids": ids[:1], **weights}, f"1 x {ids.shape[1]} random tokens"),
        ({"input_ids": ids[None], **weights}, f"1 x {sizes} random tokens"),
    ]
    for inputs, said in given:
        yield Trial(model, _taken(model, inputs), said)
    if decoder is not model:
        for inputs, said in given[:2]:
            yield Trial(decoder, _taken(decoder, inputs), f"{said}, through {type(decoder).__name__} alone")


def _taken(module: torch.nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs that the forward of a module takes; token ids by whichever name its first argument has."""
    known = inspect.signature(module.forward).parameters
    if any(one.kind is one.VAR_KEYWORD for one in known.values()):
        return inputs
    found = {name: x for name, x in inputs.items() if name in known}
    return found if "input_ids" in found or not known else {next(iter(known)): inputs["input_ids"], **found}


def random_ids(model: torch.nn.Module, decoder: PreTrainedModel, most: int = TOKENS) -> Tensor:
    """Token ids ``[2, most]`` of text, fewer where the model takes fewer, on the device where they are read."""
    config, table = getattr(model, "config", decoder.config), getattr(decoder.get_input_embeddings(), "weight", None)
    known = table.shape[0] if isinstance(table, Tensor) and table.dim() == 2 else None
    low, high = allowed_ids(config if isinstance(config, PreTrainedConfig) else decoder.config, known)
    room = trained_length(decoder)
    tokens = most if room is None else min(most, room)
    source = torch.Generator("cpu").manual_seed(0)
    ids = torch.randint(low, high, (2, tokens), generator=source, device="cpu")
    return ids.to(input_device(decoder))


def _failed(model: torch.nn.Module, complaint: str, error: Exception) -> str:
    return f"{type(model).__name__} {complaint}: {_short(error)} (verify=False skips this dry run)"


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:LONGEST]


def _outputs(given: Any) -> list[Tensor]:
    """A model's outputs, whatever its head calls them: logits of any kind, or hidden states."""
    if isinstance(given, Tensor):
        given = [given]
    elif isinstance(given, Mapping):
        given = list(given.values())
    elif not isinstance(given, tuple | list):
        given = list(getattr(given, "__dict__", {}).values())
    found = [x for x in given if isinstance(x, Tensor) and x.is_floating_point() and x.numel()]
    if not found:
        raise TypeError("its output has no logits, hidden states or other tensor of floating point")
    return found


def _comparable(found: list[Tensor]) -> bool:
    """True if outputs are finite. Rows or labels that a model rules out are -inf."""
    return all(bool((x.isfinite() | (x == -torch.inf)).all() & x.isfinite().any()) for x in found)


def _real(x: Tensor, real: Tensor | None) -> Tensor:
    """Rows of a model's output that are no padding; all of it where it has none for each token. Rows in front of the
    tokens' are those of virtual tokens."""
    if real is None or x.dim() < 2 or x.shape[0] != real.shape[0]:
        return x
    more = x.shape[1] - real.shape[1]
    return x[:, more:][real.to(x.device)] if more == 0 or (more > 0 and x.dim() > 2) else x


def _apart(ours: list[Tensor], stock: list[Tensor], cast: torch.dtype | None = None) -> str:
    """Distance of two runs' outputs in words; empty where that is rounding."""
    if [x.shape for x in ours] != [x.shape for x in stock]:
        return "have other shapes"
    return next((said for a, b in zip(ours, stock, strict=True) if (said := differ(a, b, cast))), "")


def differ(logits: Tensor, wanted: Tensor, cast: torch.dtype | None = None) -> str:
    """Distance of logits in words, for messages; empty where that is rounding. cast: the type that autocast rounds
    to."""
    limit = max(TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16]) for dtype in (wanted.dtype, cast or wanted.dtype))
    finite = wanted.isfinite()
    if not torch.equal(finite, logits.isfinite()):
        return "are not finite in other places"
    wanted, logits = wanted[finite].double(), logits[finite].double()
    error, size = float((wanted - logits).norm()), float(wanted.norm())
    error = error / size if size else error
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
