"""Which model an engine serves, and which of its heads are here."""

# vLLM is not there where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

from attrs import evolve, frozen

from sparseprefill.errors import AttachError
from sparseprefill.profiles.identity import ModelIdentity

from ..huggingface.identity import of_config


@frozen
class Model:
    """What an engine serves.

    identity: as a tuned file remembers it. local: the same with the heads that are in this process (tensor
    parallelism); first_head: index of the first of them. name: its class. attention: the host's own.
    """

    identity: ModelIdentity
    local: ModelIdentity
    name: str
    attention: str
    first_head: int


def identity(config: Any, attention: str) -> Model:
    """From a VllmConfig. The identity is that of the same model in transformers, so files serve both hosts."""
    model, parallel = config.model_config, config.parallel_config
    text = model.hf_text_config
    try:
        found = of_config(text, _decoder_class(text), str(model.model))
    except AttributeError as error:
        raise AttachError(
            f"the configuration of {model.model} does not say how its attention is made: {error}"
        ) from error
    names = getattr(model.hf_config, "architectures", None) or [found.architecture]
    if parallel.tensor_parallel_size == 1:
        return Model(found, found, str(names[0]), attention, 0)
    heads, kv_heads = int(model.get_num_attention_heads(parallel)), int(model.get_num_kv_heads(parallel))
    local = evolve(found, heads=heads, kv_heads=kv_heads)
    return Model(found, local, str(names[0]), attention, _rank() * heads)


def _rank() -> int:
    from vllm.distributed import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def _decoder_class(text: Any) -> str:
    """Name of transformers' class of the decoder, which vLLM does not load."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    found = MODEL_MAPPING_NAMES.get(str(text.model_type), "")
    return str(found if isinstance(found, str) else found[0])
