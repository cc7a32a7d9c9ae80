"""A prompt is read by one server and answered by another, which fetches the keys over NIXL; and two engines in one
server (data parallelism). Needs vLLM and the package nixl: ``tox -e vllm -- -m thorough``.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lab.handing import Machine, Pair, door

from . import engine, models
from .server import Server, free_port, started

pytestmark = [engine.NEEDED, pytest.mark.thorough, pytest.mark.slow]
PROMPTS = [models.prompt(length, seed=length) for length in (700, 500, 401, 300)]
SPARSE = {
    "method": "streaming",
    "gate": False,
    "parameters": {"sink": 32, "window": 64, "block": 32},
    "tail": 128,
    "profiles": {"full": {"method": "dense", "gate": False}},
}
OURS = ("--attention-backend", "CUSTOM", "--additional-config", json.dumps({"sparseprefill": SPARSE}))
FRESH = "--no-enable-prefix-caching"
Tokens = list[list[int]]


def handing(role: str) -> tuple[str, str]:
    """The flag of a server that hands keys over, or fetches them."""
    more = {"enforce_handshake_compat": False}
    given = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu", "kv_connector_extra_config": more}
    return "--kv-transfer-config", json.dumps({**given, "kv_role": f"kv_{role}"})


def tokens(server: Server, asked: str | None = None, prompts: Sequence[Any] = PROMPTS) -> Tokens:
    """Of the answers to all prompts at once. asked: for a profile, or for "off"."""

    def ask(prompt: Any) -> list[int]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        body |= {"return_token_ids": True, **({"vllm_xargs": {"sparseprefill": asked}} if asked else {})}
        found: list[int] = json.loads(server.text("/v1/completions", body))["choices"][0]["token_ids"]
        return found

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(ask, prompts))


@contextmanager
def in_front(prefill: Server, decode: Server) -> Iterator[Server]:
    """One server to whoever asks."""
    with door(Pair(Machine(prefill.url), Machine(decode.url)), 0) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield Server(decode.process, served.server_port, decode.log)
        served.shutdown()


@pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed: pip install nixl")
def test_keys_that_nixl_hands_over_are_decoded_as_in_one_server(tmp_path: Path) -> None:
    """Both ways round, each engine with the prefix cache of a prefill machine, and none where it decodes."""
    model = models.save("llama", tmp_path / "llama")
    with ExitStack() as stack:
        made = {}
        for name, flags in {
            "ours": (*OURS, *handing("producer")),
            "stock": handing("producer"),
            "answers": (FRESH, *handing("consumer")),
            "ours, answers": (*OURS, FRESH, *handing("consumer")),
        }.items():
            port = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
            made[name] = stack.enter_context(started(model, tmp_path / f"{name}.txt", *flags, **port))
        for server in made.values():
            server.wait()
        alone, sparse = tokens(made["answers"]), tokens(made["ours"])
        assert alone != sparse
        with in_front(made["ours"], made["answers"]) as pair:
            assert alone == tokens(pair, "full") == tokens(pair, "off")
            assert sparse == tokens(pair)
        with in_front(made["stock"], made["ours, answers"]) as pair:
            assert alone == tokens(pair)
        for name in ("answers", "ours, answers"):
            made[name].says("External prefix cache hit rate: [1-9]")


def test_two_engines_of_a_server_answer_as_one_does(tmp_path: Path) -> None:
    model = models.save("llama", tmp_path / "llama")
    with started(model, tmp_path / "two.txt", *OURS, "--data-parallel-size", "2") as two:
        two.wait()
        found = {asked: tokens(two, asked) for asked in ("off", "full", None)}
    with started(model, tmp_path / "one.txt", *OURS) as one:
        one.wait()
        assert found["off"] == found["full"] == tokens(one, "off")
        assert found[None] == tokens(one)
        assert found[None] != found["off"]
