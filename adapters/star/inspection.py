"""Checks of a model that Star Attention shall spread: by looking at it, and by running it on a few tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import define, field
from torch import Tensor
from transformers import PreTrainedModel

from sparseprefill.call import AttentionCall, resized
from sparseprefill.errors import AttachError, ParameterError, UnsupportedCallError
from sparseprefill.executors.auto import AutoExecutor
from sparseprefill.executors.dense import dense
from sparseprefill.pipeline import Pipeline
from sparseprefill.route import Route

from ..huggingface.dry_run import differ, random_ids
from ..huggingface.inspection import check, find_decoder
from ..huggingface.switch import PREFIX, settle
from .anchor import Keys
from .attention import Switch
from .layout import Sizes

FULL = {"full_attention", "attention"}
BY_LENGTH = {"dynamic", "longrope"}


def decoder_of(model: object) -> PreTrainedModel:
    """The decoder of a model that every block of a context may run through alone. AttachError says why not."""
    decoder = find_decoder(model)
    check(decoder, PREFIX)
    settle(decoder)
    if decoder.training:
        raise AttachError(f"{type(decoder).__name__} is in training mode: call model.eval()")
    config = decoder.config.get_text_config()
    other = sorted(set(getattr(config, "layer_types", None) or ()) - FULL)
    if other:
        raise AttachError(
            f"{type(decoder).__name__} has layers of {', '.join(other)}: what they need of the block before may be on "
            "another rank; only layers of full attention can be spread"
        )
    ropes = sorted(set(_ropes(getattr(config, "rope_parameters", None))) & BY_LENGTH)
    if ropes:
        raise AttachError(
            f"{type(decoder).__name__} scales its rotary positions by the length of the prompt ({', '.join(ropes)}): "
            "a block alone would get others"
        )
    return decoder


def _ropes(parameters: Any) -> list[str]:
    if not isinstance(parameters, dict):
        return []
    nested = [name for value in parameters.values() for name in _ropes(value)]
    return [*nested, str(parameters.get("rope_type", "default"))]


@define(eq=False)
class Probe:
    """A phase that computes plain causal attention and notes each layer's keys, and its call without the values."""

    layers: dict[int, Keys] = field(factory=dict)
    calls: list[AttentionCall] = field(factory=list)
    repeated: bool = False

    def attend(self, call: AttentionCall) -> Tensor:
        """Causal attention of the new tokens over themselves; how many keys and of which kind is noted."""
        k, v = call.k, call.v
        self.repeated |= call.layer in self.layers
        self.calls.append(resized(call, 1, 1, batch=1))
        self.layers[call.layer] = Keys(k.shape[1], k.shape[-1], v.shape[-1], k.dtype, k.device)
        return dense(call, AutoExecutor()).out


@torch.no_grad()
def probe(model: Any, switch: Switch) -> Probe:
    """Run 2 x 64 random tokens through the stock model and through the switch: what each layer's keys look like.

    Raises AttachError where the logits differ, or layers cannot be told apart.
    """
    name, phase = type(model).__name__, Probe()
    ids = random_ids(model, switch.decoder)
    stock: Tensor = model(input_ids=ids, use_cache=False).logits
    with switch.to(phase):
        ours: Tensor = model(input_ids=ids, use_cache=False).logits
    if not phase.layers or phase.repeated or min(phase.layers) < 0:
        raise AttachError(f"{name} does not call the attention function once a layer, with the layer's index")
    if apart := differ(ours, stock):
        raise AttachError(
            f"{name} computes something else through the attention interface: its logits {apart}. Its layers use more "
            "than queries, keys and a causal mask."
        )
    return phase


def fit_inside(inner: Pipeline | Route | None, calls: Sequence[AttentionCall], sizes: Sizes) -> Pipeline | Route | None:
    """The inner method; ParameterError where it takes no length of a layer's call. calls: one of each layer."""
    if inner is None:
        return None
    longest = sizes.block_size or sizes.tile << 10
    lengths = sorted({longest, *(sizes.tile << power for power in range(11) if sizes.tile << power < longest)})
    for call in calls:
        found = [_refusals(inner, resized(call, length, length)) for length in lengths]
        if all(found):
            raise ParameterError(f"inner is {inner.name}: {'; '.join(found[0])} (layer {call.layer})")
    return inner


def _refusals(inner: Pipeline | Route, call: AttentionCall) -> tuple[str, ...]:
    try:
        return inner.unsupported(call)
    except UnsupportedCallError as error:
        return error.reasons


def vocabulary_of(decoder: PreTrainedModel) -> int | None:
    """Number of tokens that the model embeds, where its embeddings say so."""
    weight = getattr(decoder.get_input_embeddings(), "weight", None)
    return weight.shape[0] if isinstance(weight, Tensor) else None
