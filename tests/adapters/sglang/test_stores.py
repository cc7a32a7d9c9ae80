"""SGLang's hash of pages, by which its stores know them: requests that ask for different things share none."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import subprocess
import sys

import pytest
from sparseprefill.adapters.serving.wishes import salt

from .engine import NEEDED, PATIENCE, environment

pytestmark = [NEEDED, pytest.mark.slow]
HASHES = """
import sys
from array import array
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
for one in sys.argv[1:]:
    key = RadixKey(array("q", range(64)), None, cache_salt=one or None)
    print(*get_storage_hash_str(key, None, page_size=16))
"""


def test_pages_of_requests_that_ask_for_different_things_have_other_hashes() -> None:
    asked = [salt({}, None) or "", salt({"sparseprefill": "off"}, None), salt({"sparseprefill": "quick"}, None)]
    done = subprocess.run(
        [sys.executable, "-c", HASHES, *map(str, asked)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert 0 == done.returncode, done.stderr[-4000:]
    pages = [line.split() for line in done.stdout.splitlines()[-3:]]
    assert [4, 4, 4] == [len(one) for one in pages]
    assert 12 == len({page for one in pages for page in one})
