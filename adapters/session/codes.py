"""Short codes for why a call ran dense: few, and the same for good, where the reasons beside them are sentences."""

from __future__ import annotations

from enum import StrEnum

from attrs import frozen


class Code(StrEnum):
    """Why a call, or a prompt's chunk, ran dense; docs/vllm-operate.md says what each means."""

    SHORT = "short"
    OFF = "off"
    NO_PROFILE = "no_profile"
    UNKNOWN = "unknown"
    GATE = "gate"
    PROFILE = "profile"
    LAYERS = "layers"
    LAYER = "layer"
    REQUEST = "request"
    UNSUPPORTED = "unsupported"
    MEMORY = "memory"
    ERROR = "error"


@frozen
class Why:
    """code: for panels. text: in words, for people."""

    code: Code
    text: str
