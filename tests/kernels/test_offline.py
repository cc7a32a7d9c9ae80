"""Kernels compile for Hopper with the Triton at hand; no GPU is needed to say so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EVERY = os.environ.get("SPARSEPREFILL_TEST_VARIANTS") == "every"
"""Whether to compile each variant of attention, and estimates of pages that need no conversion; else those that have
each branch of attention in one of them, and estimates of pages of fp8."""

PORTABLE, HOPPER, MASS = "sparse_attention_fwd_kernel", "hopper_attention_fwd_kernel", "tile_mass_fwd_kernel"
ESTIMATES = {
    "sums": ["sampled_lse_kernel", "sampled_merge_kernel", "sampled_mass_kernel", "sampled_fold_kernel"],
    "bfla": ["block_scores_kernel"],
    "xattention": ["partial_softmax_kernel", "tile_scores_kernel"],
    "anchor": ["pool_kernel", "score_kernel", "compact_kernel"],
    "kascade": ["column_sums_kernel"],
    "rowmax": ["maxima_kernel", "choose_kernel"],
    "rowmax in 8 bits": ["round_keys_kernel", "maxima_kernel", "choose_kernel"],
    "rowmax, columns": ["maxima_kernel", "choose_kernel"] * 3,
    "rowmax, columns in 8 bits": [
        *("round_keys_kernel", "maxima_kernel", "choose_kernel"),
        *("round_keys_kernel", "hopper_maxima_kernel", "choose_kernel"),
    ],
}
SCRIPT = Path(__file__).with_name("offline.py")


@pytest.mark.thorough
def test_variants_compile_for_hopper(tmp_path: Path) -> None:
    pytest.importorskip("triton.experimental.gluon")
    hidden = {"TRITON_INTERPRET": None, "TRITON_CACHE_DIR": str(tmp_path)}  # nothing compiled before may stand in
    environment = {name: value for name, value in {**os.environ, **hidden}.items() if value is not None}
    command = [sys.executable, str(SCRIPT), *(["every"] if EVERY else [])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    portable = ["both, padded", "resumed state", "window, softcap", "skip", "requests", "wide"]
    portable += ["192 with 128", "512"]
    fast = ["hopper: 64, both", "hopper: 256, stripes", "hopper: requests", "hopper: fp8"]
    fast += ["hopper: skip, resumed, pages", "hopper: wide", "hopper: cut, pages", "hopper: cut, resumed"]
    eight = ["hopper: 8 bits, pages"]
    if EVERY:
        portable += ["tiles", "stripes", "pages", "float32", "wide, skip"]
        portable += ["192 with 128, resumed state", "512, skip", "512, pages"]
        fast += ["hopper: 128, tiles resumed", "hopper: pages", "hopper: skip"]
        fast += [
            "hopper: fp8, resumed",
            "hopper: fp8, stripes",
            "hopper: wide, pages",
            "hopper: wide, fp8",
            "hopper: cut, requests",
        ]
        eight += ["hopper: 8 bits"]
    # Forward and repair are one kernel, compiled twice.
    expected = {name: [PORTABLE, PORTABLE] for name in portable} | {name: [HOPPER] for name in fast}
    expected |= {name: [HOPPER] * 3 for name in eight}  # sampled rows in 16 bits and in 8, then all
    expected["both, padded"].append(MASS)
    rows = ("rows: 128", "rows: keys", "rows: float32, padded", "rows: pages", "rows: fp8 pages")
    expected |= {name: ["row_tiles_kernel"] for name in rows}
    floor = ["choose_kernel", "spread_kernel", "settle_kernel", "finish_kernel"]
    expected |= dict.fromkeys(("floor: tiles", "floor: stripes", "floor: all, uneven"), floor)
    expected |= dict.fromkeys(("means", "means: pages", "means: fp8 pages"), ["key_means_kernel"] * 2)
    expected["order"] = ["draws_kernel"]
    for kind in ("", *([": pages"] if EVERY else []), ": fp8 pages"):
        expected |= {name + kind: kernels for name, kernels in ESTIMATES.items()}
    assert expected == found
