"""The model that an engine serves, and the heads that are here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import evolve, frozen

from sparseprefill.errors import AttachError
from sparseprefill.profiles.identity import ModelIdentity

from ..huggingface.identity import of_config


@frozen
class Model:
    """The model that an engine serves.

    identity: as a tuned file remembers it. local: the same with the heads that are in this process (tensor
    parallelism); first_head: index of the first of them. name: its class. attention: the host's own.
    """

    identity: ModelIdentity
    local: ModelIdentity
    name: str
    attention: str
    first_head: int


def model_of(
    text: Any,
    names: Sequence[str] | None,
    folder: str,
    attention: str,
    *,
    heads: tuple[int, int] | None = None,
    rank: int = 0,
) -> Model:
    """The identity is that of the same model in transformers, so files serve all hosts.

    text: transformers' configuration of the decoder. names: of the architectures of the model in `folder`. attention:
    the host's own. heads: query and KV heads in this process, the `rank`-th of those that share a layer's heads; None
    where it has all.
    AttachError where the configuration does not say how the model attends.
    """
    try:
        found = of_config(text, _decoder_class(text), folder)
    except AttributeError as error:
        raise AttachError(f"the configuration of {folder} does not say how its attention is made: {error}") from error
    name = str((names or [found.architecture])[0])
    if heads is None:
        return Model(found, found, name, attention, 0)
    local = evolve(found, heads=heads[0], kv_heads=heads[1])
    return Model(found, local, name, attention, rank * heads[0])


def _decoder_class(text: Any) -> str:
    """Name of transformers' class of the decoder, which servers do not load."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    found = MODEL_MAPPING_NAMES.get(str(text.model_type), "")
    return str(found if isinstance(found, str) else found[0])
