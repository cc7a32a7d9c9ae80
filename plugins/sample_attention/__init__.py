"""SampleAttention: adaptive structured sparse attention from sampled queries (Zhu et al., 2024)."""

from __future__ import annotations

from attrs import field, frozen

from sparseprefill.method import Later, Method, hookimpl
from sparseprefill.validate import number, one_of, tokens, whole


@frozen(kw_only=True)
class SampleConfig:
    """Settings of `sample-attention`.

    alpha_c: share of the sampled mass that key columns must reach; 1 keeps all. alpha_s: share of the sampled mass that
    slashes must reach; 1 keeps all. chunk_n: parts that the queries are cut into, each sampled at its end; with more
    parts than query blocks, each block is one. block: rows sampled per part, and keys per bin of columns and of
    diagonals, in tokens. extend: "chunk", columns and diagonals govern the rows of the part that they were found in;
    "union", those of every part govern all rows.
    """

    alpha_c: float = field(default=0.95, validator=number(0.0, 1.0))
    alpha_s: float = field(default=0.95, validator=number(0.0, 1.0))
    chunk_n: int = field(default=2, validator=whole())
    block: int = field(default=128, validator=tokens())
    extend: str = field(default="chunk", validator=one_of("chunk", "union"))


@hookimpl
def sparseprefill_methods() -> list[Method]:
    """The one method of this package."""
    return [
        Method(
            name="sample-attention",
            summary="blocks of columns and diagonals with most of the mass of rows sampled along the prompt",
            paper="SampleAttention: Near-Lossless Acceleration of Long Context LLM Inference with Adaptive Structured "
            "Sparse Attention (Zhu et al., 2024)",
            config=SampleConfig,
            build=Later(f"{__name__}.stages"),
            full={"alpha_c": 1.0},
            small={"alpha_c": 0.5, "alpha_s": 0.5, "chunk_n": 2, "block": 16},
            search={
                "alpha_c": (0.8, 0.85, 0.9, 0.95, 0.98),
                "alpha_s": (0.8, 0.85, 0.9, 0.95, 0.98),
                "chunk_n": (1, 2, 4),
            },
        )
    ]
