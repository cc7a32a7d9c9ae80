"""A configuration against a model's files, before a server starts: what the engine would refuse, and what it would run.

This is the code that an engine runs when it starts, on what transformers reads of the model; vLLM is not needed. What
only vLLM knows, such as the tokens of a step or a cache's type, is left to its start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from attrs import frozen

from sparseprefill.profiles.identity import ModelIdentity
from sparseprefill.route import Route

from ..serving.layer import CHUNKED, LATENT, WINDOW, Heads, Layer, unsupported
from .options import SCHEDULER, parse
from .runtime import make_runtime

HOST = "vLLM's own attention"
FULL, SLIDING, IN_CHUNKS = "full_attention", "sliding_attention", "chunked_attention"
"""Kinds of layers that have keys, as transformers calls them."""


@frozen(kw_only=True)
class Expected:
    """What requests that ask for a profile would get; profile: empty for those that ask for none.

    method: the pipeline's name. sparse: layers that can run it. dense: how many others have keys, by reason.
    """

    profile: str
    method: str
    sparse: int
    dense: Mapping[str, int]


@frozen(kw_only=True)
class Checked:
    """A configuration that an engine would take. model: its class and sizes, in words. flags: of vLLM that it needs."""

    model: str
    expected: tuple[Expected, ...]
    flags: tuple[str, ...]


def check(additional: object, whole: Any, folder: str) -> Checked:
    """What an engine would make of vLLM's ``additional_config``.

    whole: transformers' configuration of the model, which is in this folder.
    Raises what the engine would: ParameterError, UnknownMethodError or AttachError, which name the key at fault.
    """
    text: Any = whole.get_text_config()
    flags = ["--attention-backend CUSTOM"]
    if parse(additional).chunk is not None:
        flags.append(f"--scheduler-cls {SCHEDULER}")
    config = SimpleNamespace(
        additional_config=additional,
        model_config=SimpleNamespace(model=folder, hf_config=whole, hf_text_config=text),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        scheduler_config=SimpleNamespace(scheduler_cls=SCHEDULER),  # it is among the flags
    )
    runtime = make_runtime(config, HOST)
    sizes, chosen, expected = runtime.model.identity, runtime.options.layers, list[Expected]()
    kinds = {index: kind for index, kind in enumerate(_kinds(text, sizes.layers)) if kind is not None}
    for profile, served in (("", runtime.main), *runtime.profiles.items()):
        reasons = {index: _reason(served.session.route, text, index, kind, sizes) for index, kind in kinds.items()}
        if not profile:
            runtime.expect(list(reasons.items()))
        asked = [why for index, why in reasons.items() if chosen is None or index in chosen]
        dense = Counter(why for why in asked if why is not None)
        able = len(asked) - dense.total()
        expected.append(Expected(profile=profile, method=served.session.route.name, sparse=able, dense=dense))
    model = (
        f"{runtime.model.name}: {sizes.layers} layers, {sizes.heads} query and {sizes.kv_heads} KV heads of size "
        f"{sizes.head_dim}"
    )
    return Checked(model=model, expected=tuple(expected), flags=tuple(flags))


def _kinds(text: Any, layers: int) -> list[str | None]:
    """The kind of every layer; None for one without keys."""
    usual = FULL if getattr(text, "sliding_window", None) is None else SLIDING
    kinds = getattr(text, "layer_types", None) or [usual] * layers
    return [kind if kind in (FULL, SLIDING, IN_CHUNKS) else None for kind in kinds]


def _reason(route: Route, text: Any, index: int, kind: str, sizes: ModelIdentity) -> str | None:
    """Why a layer would stay dense, or None; stages are asked about this machine's device."""
    if getattr(text, "kv_lora_rank", None):
        return LATENT
    if kind != FULL:
        return WINDOW if kind == SLIDING else CHUNKED
    softcap = float(getattr(text, "attn_logit_softcapping", None) or 0)
    layer = Layer(index, sizes.head_dim**-0.5, softcap or None, None, None)
    heads = Heads(sizes.heads, sizes.kv_heads, sizes.head_dim)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    longest = int(getattr(text, "max_position_embeddings", None) or 1 << 15)
    dtype = getattr(text, "dtype", None)
    dtype = dtype if isinstance(dtype, torch.dtype) else torch.bfloat16
    return unsupported(route, layer, heads, dtype, device, keys=longest)
