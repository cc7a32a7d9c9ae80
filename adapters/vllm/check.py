"""A configuration against a model's files, before a server starts: what the engine would refuse, and what it would run.

This is the code that an engine runs when it starts, on what transformers reads of the model; vLLM is not needed. What
only vLLM knows, such as the tokens of a step or a cache's type, is left to its start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from attrs import frozen

from sparseprefill.errors import AttachError
from sparseprefill.profiles.identity import ModelIdentity
from sparseprefill.route import Route

from ..serving.layer import Heads, dense_reason
from .layer import INDEXED, heads_of, layer_of
from .options import SCHEDULER, check_last, parse
from .plugin import excluded
from .runtime import LATENT_FLAG, Runtime, make_runtime

HOST = "vLLM's own attention"
SLIDING, IN_CHUNKS = ("sliding_attention", "hybrid_sliding", "window_attention"), ("chunked_attention",)
KEYLESS = ("linear_attention", "mamba", "conv", "moe", "mlp")
"""Kinds of layers, as transformers calls them; one that is not here has keys, and all of them."""
DECODER, ENCODER, CROSS = "decoder", "encoder_only", "encoder_decoder"
"""Kinds of attention, as vLLM calls them."""
ENCODERS = ("siglip_text_model", "siglip2_text_model", "openai_privacy_filter")
"""Types of models that vLLM runs as encoders, beside those that transformers trains on masked words."""
GENERATE = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "ChatModel")
"""Names of classes of models that vLLM does not run as pooling models."""


@frozen(kw_only=True)
class Expected:
    """Treatment of requests that ask for a profile; profile: empty for those that ask for none.

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
    """Predict what an engine makes of vLLM's ``additional_config``.

    whole: transformers' configuration of the model, which is in this folder.
    Raises what the engine would: ParameterError, UnknownMethodError or AttachError, which name the key at fault; the
    last also where vLLM would not load the adapter in this environment.
    """
    why = excluded()
    if why is not None:
        raise AttachError(why)
    text: Any = whole.get_text_config()
    flags = [LATENT_FLAG if getattr(text, "kv_lora_rank", None) else "--attention-backend CUSTOM"]
    chunk = parse(additional).chunk
    if chunk is not None:
        flags.append(f"--scheduler-cls {SCHEDULER}")
    quantised: Any = getattr(whole, "quantization_config", None)
    config = SimpleNamespace(
        additional_config=additional,
        model_config=SimpleNamespace(
            model=folder,
            hf_config=whole,
            hf_text_config=text,
            quantization=quantised.get("quant_method", "") if isinstance(quantised, Mapping) else None,
            runner_type="generate" if _architecture(whole).endswith(GENERATE) else "pooling",
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        scheduler_config=SimpleNamespace(scheduler_cls=SCHEDULER if chunk is not None else None),  # among the flags
    )
    runtime = make_runtime(config, HOST)
    sizes, chosen, expected = runtime.model.identity, runtime.options.layers, list[Expected]()
    layers = list(_layers(whole, text, sizes))
    for profile, served in (("", runtime.main), *runtime.profiles.items()):
        reasons = [(index, _reason(runtime, served.session.route, text, index, impl)) for index, impl in layers]
        asked = [(index, why) for index, why in reasons if chosen is None or index in chosen]
        able = [index for index, why in asked if why is None]
        if not profile:
            runtime.expect(reasons)
            check_last(config, runtime.options, sizes.layers - 1, able)
        dense = Counter(why for _, why in asked if why is not None)
        expected.append(Expected(profile=profile, method=served.session.route.name, sparse=len(able), dense=dense))
    model = (
        f"{runtime.model.name}: {sizes.layers} layers, {sizes.heads} query and {sizes.kv_heads} KV heads of size "
        f"{_width(text, sizes)}"
    )
    return Checked(model=model, expected=tuple(expected), flags=tuple(flags))


def _architecture(whole: Any) -> str:
    return str((getattr(whole, "architectures", None) or [GENERATE[0]])[0])


def _layers(whole: Any, text: Any, sizes: ModelIdentity) -> Iterator[tuple[int, Any]]:
    """The index of every layer that has keys, and what vLLM would say of its attention (an AttentionImpl)."""
    attention = ENCODER if _looks_ahead(whole, text) else DECODER
    usual = SLIDING[0] if getattr(text, "sliding_window", None) is not None else ""
    softcap = float(getattr(text, "attn_logit_softcapping", None) or 0)
    sinks = (
        torch.zeros(sizes.heads, dtype=torch.float32, device="cpu")
        if getattr(text, "model_type", "") == "gpt_oss"
        else None
    )
    given = {
        "attn_type": attention,
        "alibi_slopes": [] if _alibi(text) else None,
        "logits_soft_cap": softcap,
        "sinks": sinks,
        "scale": sizes.head_dim**-0.5,
        "kv_cache_dtype": "auto",
        "num_heads": sizes.heads,
        "num_kv_heads": sizes.kv_heads,
        "head_size": sizes.head_dim,
    }
    decoder = getattr(text, "decoder_layers", None) or getattr(text, "num_decoder_layers", None)
    count = int(decoder) if whole.is_encoder_decoder and decoder else sizes.layers
    for index, kind in enumerate(getattr(text, "layer_types", None) or [usual] * count):
        if kind not in KEYLESS:
            window, lookback = 1 if kind in SLIDING else -1, 1 if kind in IN_CHUNKS else -1
            yield index, SimpleNamespace(sliding_window=window, chunk_lookback=lookback, **given)
        if whole.is_encoder_decoder:
            yield index, SimpleNamespace(sliding_window=-1, **{**given, "attn_type": CROSS})


def _width(text: Any, sizes: ModelIdentity) -> str:
    if not getattr(text, "kv_lora_rank", None):
        return str(sizes.head_dim)
    heads = _latent_heads(text)
    return f"{heads.size}, {heads.values} for values"


def _latent_heads(text: Any) -> Heads:
    """Heads of multi-head latent attention, as a prefill backend gets them: keys of their own for each query head."""
    count, size = int(text.num_attention_heads), int(text.qk_nope_head_dim) + int(text.qk_rope_head_dim)
    return Heads(count, count, size, values=int(text.v_head_dim))


def _looks_ahead(whole: Any, text: Any) -> bool:
    """True if vLLM runs a model as an encoder: each token sees those behind it, too."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    both, kind = (whole, text), str(getattr(text, "model_type", ""))
    if any(getattr(one, "is_causal", True) is False for one in both):
        return True
    if any(getattr(one, "use_bidirectional_attention", None) is True for one in both):
        return True
    if "Bidirectional" in _architecture(whole) or kind in ENCODERS:
        return True
    trained = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not whole.is_encoder_decoder
    return trained and not getattr(text, "is_decoder", False)


def _alibi(text: Any) -> bool:
    nested: Any = getattr(text, "attn_config", None)
    found = nested.get("alibi") if isinstance(nested, Mapping) else getattr(nested, "alibi", None)
    return bool(getattr(text, "alibi", False) or found) or getattr(text, "model_type", "") == "bloom"


def _reason(runtime: Runtime, route: Route, text: Any, index: int, impl: Any) -> str | None:
    """Reason for which a layer would stay dense, or None; stages are asked about this machine's device."""
    latent = bool(getattr(text, "kv_lora_rank", None))
    if latent and getattr(text, "index_topk", None):
        return INDEXED
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    longest = int(getattr(text, "max_position_embeddings", None) or 1 << 15)
    dtype, chunk = getattr(text, "dtype", None), runtime.options.chunk
    return dense_reason(
        route,
        layer_of(f"model.layers.{index}.self_attn.attn", impl),
        _latent_heads(text) if latent else heads_of(impl, 0),
        dtype if isinstance(dtype, torch.dtype) else torch.bfloat16,
        device,
        keys=longest,
        min_query=runtime.options.min_query,
        step=longest if chunk is None else min(chunk, longest),
        bound="max_model_len" if chunk is None else "chunk",
    )
