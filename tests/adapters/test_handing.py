"""`lab.handing`: a prompt is read by one server and answered by another, and whoever asks sees one."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

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


@pytest.fixture
def pair() -> Iterator[tuple[Fake, Fake, str]]:
    """A server that reads, one that answers, and the address in front of them."""

    def hands_over(number: int, handler: BaseHTTPRequestHandler) -> bool:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(json.dumps({"choices": [{"text": " x"}], "kv_transfer_params": WHERE}).encode())
        return True

    with serving(Fake()) as prefill, serving(Fake()) as decode:
        prefill.wrong = hands_over
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


def test_a_server_that_hands_nothing_over_is_named(pair: tuple[Fake, Fake, str]) -> None:
    prefill, decode, url = pair

    def keeps(number: int, handler: BaseHTTPRequestHandler) -> bool:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(b'{"choices": [{"text": " x"}]}')
        return True

    prefill.wrong = keeps
    with pytest.raises(ServerError, match="502"):
        Server(url, model="copier").complete(PROMPT, 2)
    assert not decode.bodies


def test_what_the_first_refuses_comes_back(pair: tuple[Fake, Fake, str]) -> None:
    prefill, decode, url = pair

    def refuses(number: int, handler: BaseHTTPRequestHandler) -> bool:
        handler.send_response(400)
        handler.end_headers()
        handler.wfile.write(b'{"error": "too long"}')
        return True

    prefill.wrong = refuses
    with pytest.raises(ServerError, match="400: too long"):
        Server(url, model="copier").complete(PROMPT, 2)
    assert not decode.bodies
