"""`lab.handing`: a prompt is read by one server and answered by another, and whoever asks sees one."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from sparseprefill.adapters.replay.client import Server, ServerError

from lab.handing import ASKED, Machine, Pair, door

from .test_replay import Fake

WHERE = {"remote_engine_id": "one", "remote_block_ids": [[1, 2]], "do_remote_prefill": True}
PROMPT = "one two three four five six. one two three four"


@contextmanager
def serving(fake: Fake) -> Iterator[Fake]:
    threading.Thread(target=fake.http.serve_forever, daemon=True).start()
    try:
        yield fake
    finally:
        fake.http.shutdown()
        fake.http.server_close()


def saying(status: int, answer: dict[str, Any]) -> Callable[[int, BaseHTTPRequestHandler], bool]:
    """What a server does that answers every completion so."""

    def say(number: int, handler: BaseHTTPRequestHandler) -> bool:
        handler.send_response(status)
        handler.end_headers()
        handler.wfile.write(json.dumps(answer).encode())
        return True

    return say


@pytest.fixture
def pair() -> Iterator[tuple[Fake, Fake, str]]:
    """A server that reads, one that answers, and the address in front of them."""
    with serving(Fake()) as prefill, serving(Fake()) as decode:
        prefill.wrong = saying(200, {"choices": [{"text": " x"}], "kv_transfer_params": WHERE})
        with door(Pair(Machine(prefill.url), Machine(decode.url)), 0) as served:
            threading.Thread(target=served.serve_forever, daemon=True).start()
            yield prefill, decode, f"http://127.0.0.1:{served.server_port}"
            served.shutdown()


def test_one_reads_and_the_other_answers(pair: tuple[Fake, Fake, str]) -> None:
    prefill, decode, url = pair
    server = Server(url, model="copier", body={"vllm_xargs": {"sparseprefill": "off"}})
    assert server.models() == {"copier": 100_000}
    assert " five six" == server.complete(PROMPT, 2).text
    (read,), (answered,) = prefill.bodies, decode.bodies
    assert (1, ASKED, PROMPT) == (read["max_tokens"], read["kv_transfer_params"], read["prompt"])
    assert "stream" not in read
    assert (2, WHERE, True) == (answered["max_tokens"], answered["kv_transfer_params"], answered["stream"])
    assert read["vllm_xargs"] == answered["vllm_xargs"] == {"sparseprefill": "off"}


@pytest.mark.parametrize(
    ("status", "answer", "said"),
    [(200, {"choices": [{"text": " x"}]}, "502"), (400, {"error": "too long"}, "400: too long")],
    ids=["hands nothing over", "refuses"],
)
def test_what_the_first_server_lacks_comes_back(
    pair: tuple[Fake, Fake, str], status: int, answer: dict[str, Any], said: str
) -> None:
    prefill, decode, url = pair
    prefill.wrong = saying(status, answer)
    with pytest.raises(ServerError, match=said):
        Server(url, model="copier").complete(PROMPT, 2)
    assert not decode.bodies
