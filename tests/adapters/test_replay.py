"""`sparseprefill replay`: texts that ask, a server that answers, and what is said of one that does not."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from sparseprefill.adapters.replay.client import Server, ServerError
from sparseprefill.adapters.replay.play import Asked, Row, quantile
from sparseprefill.adapters.replay.script import Pieces, Question, Script, script_of

from sparseprefill.errors import ParameterError

from .test_cli import invoke, refused

SMALL = ("--prefix", "9000", "--turn", "300-500", "--turns", "2", "--sessions", "2", "--answer", "8")
RATES = {"code": 1.5, "docs": 1.5, "records": 1.5}
SEED = 3


class Fake:
    """A server whose model copies: it goes on as the text did after the last place where its end stood before.

    It counts a token for each word, caches what it read, and does what `wrong` says to the numbered completion.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.read: set[str] = set()
        self.hits = self.queries = 0
        self.pace = 0.01  # seconds of prefill that it counts for each token that was not cached; 0 counts none
        self.prefill = 0.0
        self.usage, self.metrics, self.details, self.key, self.room = True, True, True, "", 100_000
        self.wrong: Callable[[int, BaseHTTPRequestHandler], bool] = lambda number, handler: False
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if outer.key and self.headers["Authorization"] != f"Bearer {outer.key}":
                    self.send(401, "")
                elif self.path == "/v1/models":
                    self.send(200, json.dumps({"data": [{"id": "copier", "max_model_len": outer.room}]}))
                elif self.path == "/metrics" and outer.metrics:
                    counts = (
                        f'hits_total{{engine="0"}} {outer.hits}\n',
                        f'queries_total{{engine="0"}} {outer.queries}\n',
                    )
                    text = "".join(f"vllm:prefix_cache_{one}" for one in counts)
                    if outer.pace:
                        prefill = "vllm:request_prefill_time_seconds"
                        text += f'{prefill}_sum{{engine="0"}} {outer.prefill}\n{prefill}_count{{engine="0"}} '
                        text += f"{len(outer.bodies)}\n"
                    self.send(200, text)
                else:
                    self.send(404, "")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    number = len(outer.bodies)
                    outer.bodies.append(body)
                if not outer.wrong(number, self):
                    self.stream(body)

            def stream(self, body: dict[str, Any]) -> None:
                pieces = [one[0] for one in re.finditer(r"\s*(?:\w+|[^\w\s])|\s+$", body["prompt"])]
                with outer.lock:
                    cached = max((len(one) for one in outer.read if body["prompt"].startswith(one)), default=0)
                    outer.read.add(body["prompt"])
                    known = len(re.findall(r"\s*(?:\w+|[^\w\s])|\s+$", body["prompt"][:cached]))
                    outer.hits, outer.queries = outer.hits + known, outer.queries + len(pieces)
                    outer.prefill += outer.pace * (len(pieces) - known)
                self.send_response(200)
                self.end_headers()
                for token in continued(pieces, body["max_tokens"]):
                    self.event({"choices": [{"text": token}]})
                if outer.usage:
                    details = {"prompt_tokens_details": {"cached_tokens": known}} if outer.details else {}
                    self.event({"choices": [], "usage": {"prompt_tokens": len(pieces), **details}})
                self.wfile.write(b"data: [DONE]\n\n")

            def event(self, data: dict[str, Any]) -> None:
                self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())

            def send(self, status: int, text: str) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class calls it so
                """Silent."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"


def continued(pieces: list[str], tokens: int) -> list[str]:
    bare = [one.strip() for one in pieces]
    for length in (8, 4):
        end = bare[-length:]
        for at in range(len(bare) - length - 1, -1, -1):
            if bare[at : at + length] == end:
                return pieces[at + length : at + length + tokens]
    return ["?"]


@pytest.fixture
def fake() -> Iterator[Fake]:
    made = Fake()
    thread = threading.Thread(target=made.http.serve_forever)
    thread.start()
    yield made
    made.http.shutdown()
    thread.join()
    made.http.server_close()


def made(**changes: Any) -> Script:
    given = {"prefix": 9000, "turn": (300, 500), "turns": 3, "sessions": 2, "questions": 2, "seed": SEED, **changes}
    return script_of(**given, rates=RATES)


def found(fake: Fake, *more: str) -> dict[str, Any]:
    result = invoke("replay", fake.url, *SMALL, "--json", *more)
    assert (0, "") == (result.exit_code, result.stderr), result.stderr
    read: dict[str, Any] = json.loads(result.stdout)
    return read


def heads(fake: Fake, *more: str) -> str:
    """What stands above a table's rows."""
    result = invoke("replay", fake.url, *SMALL, *more)
    assert 0 == result.exit_code, result.stderr
    return result.stdout.partition("\u2500")[0]


def test_a_text_is_its_pieces() -> None:
    cutter = Pieces()
    text = 'if a == b:\n    return {"x": 12}\n'
    assert text == cutter.text(cutter(text)["input_ids"])
    assert "n" == cutter.text(cutter("ñn")["input_ids"])


def test_answers_stand_above_their_questions() -> None:
    script = made()
    asked = 0
    for session in script.sessions:
        above = script.prefix
        for turn in session:
            for one in turn.questions:
                assert one.text.strip() + one.answer in above
                asked += 1
            above += turn.text
    assert 2 * 3 * 2 == asked
    assert {"copies", "facts"} == {
        one.kind for session in script.sessions for turn in session for one in turn.questions
    }


def test_a_cue_with_two_answers_is_not_asked() -> None:
    one = Question("copies", "\na b", " c d")
    assert (True, False, False) == (one.clear("x a b c d; a b c d"), one.clear("a b c d; a b e"), one.clear("a c d"))


def test_sizes_are_those_asked_for() -> None:
    script = made()
    cutter = Pieces()
    assert 9000 == pytest.approx(1.5 * len(cutter(script.prefix)["input_ids"]), rel=0.01)
    for session in script.sessions:
        for turn in session:
            assert 295 <= 1.5 * len(cutter(turn.text)["input_ids"]) <= 505
    assert made() == script
    assert made(seed=SEED + 1).prefix != script.prefix


def test_a_short_prefix_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"prefix is 900: .* pass 4608 or more"):
        made(prefix=900)
    assert made(prefix=4608).sessions
    with pytest.raises(ParameterError, match=r"pass 4608 or more"):
        made(prefix=4607)


@pytest.mark.parametrize("usage", [True, False])
def test_the_prefix_that_is_named_suffices(fake: Fake, usage: bool) -> None:
    fake.usage = usage
    given = ("replay", fake.url, "--turn", "200", "--turns", "2", "--sessions", "1", "--questions", "1")
    result = invoke(*given, "--prefix", "800")
    refused(result, "--prefix is 800: it has no room for passages and facts; pass ")
    least = re.findall(r"pass (\d+) or more", result.stderr)[0]
    assert 0 == invoke(*given, "--prefix", least).exit_code
    refused(invoke(*given, "--prefix", str(int(least) - 1)), f"pass {least} or more")
    fake.room = int(least) + 100
    refused(invoke(*given, "--prefix", "800"), f"pass {least} or more; with --turn 200-200 --turns 2: ", "fewer turns")


@pytest.mark.parametrize(
    ("kind", "said", "right"),
    [
        ("facts", " 12345.", True),
        ("facts", " 12346", False),
        ("facts", " not 12345", False),
        ("facts", "", False),
        ("copies", "12345", True),
        ("copies", " 123", True),
        ("copies", " 12345 and more", True),
        ("copies", "124", False),
        ("copies", " ", False),
    ],
)
def test_what_is_right(kind: str, said: str, right: bool) -> None:
    assert right == Question(kind, "q", " 12345").right(said)


def test_quantiles() -> None:
    assert (None, 2.0) == (quantile([], 0.5), quantile([4, 1, 2, 2], 0.5))
    assert 3.97 == pytest.approx(quantile([1, 2, 3, 4], 0.99))


def test_a_row_counts_the_turns_first_questions() -> None:
    script = made()
    assert script == Script.of(json.loads(json.dumps(script.plain)))
    row = Row.of("1", [Asked(0, 1, 0, error="gone"), Asked(1, 1, 0, error="gone")], None)
    assert (2, None, None) == (row.errors, row.figures["first_p50"], row.figures["copies"])


def test_a_replay(fake: Fake) -> None:
    read = found(fake)
    assert ["prefix", "1", "2", "all turns"] == [one["turn"] for one in read["turns"]]
    _, first, second, whole = read["turns"]
    assert {"right": 4, "asked": 4} == whole["copies"] == whole["facts"]
    assert (2, 2, 0) == (first["requests"], second["requests"], whole["errors"])
    assert 0 < first["first_p50"] <= first["first_p99"]
    assert 0 < first["cached_tokens"] < second["cached_tokens"] < second["prompt_tokens"]
    assert 0 < read["cache"]["hits"] < read["cache"]["queries"]
    assert len(read["requests"]) == read["prefill"]["requests"]
    assert read["prefill"]["seconds"] == pytest.approx(0.01 * (read["cache"]["queries"] - read["cache"]["hits"]))
    assert read["reference"] is None
    completions = [one for one in fake.bodies if one["max_tokens"] == 8]
    assert 2 * 2 * 2 == len(completions)
    prefix = fake.bodies[2]["prompt"]
    assert all(one["prompt"].startswith(prefix) for one in completions)
    assert {"copier"} == {one["model"] for one in fake.bodies}
    assert {0} == {one["temperature"] for one in fake.bodies}


def test_the_right_answer_stays_in_the_session(fake: Fake) -> None:
    found(fake, "--sessions", "1", "--questions", "1")
    first, second = (one["prompt"] for one in fake.bodies[-2:])
    assert second.startswith(first)
    cue = first[first.rindex("\n") :]
    after = second[len(first) :]
    assert after.strip()
    assert (cue.strip() + after[:7]) in fake.bodies[1]["prompt"]


def test_against_the_same_server_switched_off(fake: Fake) -> None:
    off = '{"vllm_xargs": {"sparseprefill": "off"}}'
    read = found(fake, "--against-body", off)
    assert {"same": 8, "compared": 8} == read["turns"][-1]["same"]
    assert fake.url == read["reference"]["url"]
    last = [one for one in fake.bodies if "vllm_xargs" in one]
    assert 1 + 8 == len(last)
    assert "speed-up" not in heads(fake, "--against-body", off)  # all of it is in the cache by now
    fake.details = False
    assert "speed-up" in heads(fake, "--against-body", off)
    assert "speed-up" not in heads(fake)


def test_the_engines_own_clock_is_told_beside_the_reference(fake: Fake) -> None:
    """A first token over HTTP may be nearly all front end, which no kernel changes."""
    read = found(fake)
    (said,) = (one for one in read["remarks"] if "clock" in one)
    assert "of prefill a request" in said
    assert "reference" not in said
    again = found(fake, "--seed", "7", "--against-body", '{"x": 1}')  # which finds all of it in the cache
    mine, theirs = again["prefill"], again["reference"]["prefill"]
    (said,) = (one for one in again["remarks"] if "clock" in one)
    ratio = (theirs["seconds"] / theirs["requests"]) / (mine["seconds"] / mine["requests"])
    assert f"the reference {1000 * theirs['seconds'] / theirs['requests']:.1f} ms, {ratio:.2f} times" in said
    fake.pace = 0.0
    none = found(fake)
    assert none["prefill"] is None
    assert not any("clock" in one for one in none["remarks"])


def test_a_record_is_compared_with(fake: Fake, tmp_path: Path) -> None:
    path = tmp_path / "dense.json"
    found(fake, "--record", str(path))
    sent = [one["prompt"] for one in fake.bodies if one["max_tokens"] == 8]
    record = json.loads(path.read_text())
    changed = next(one for one in record["run"]["asked"] if one["turn"] == 2)
    changed["answer"]["text"] += "!"
    path.write_text(json.dumps(record))
    fake.bodies.clear()
    read = found(fake, "--compare", str(path))
    assert sorted(sent) == sorted(one["prompt"] for one in fake.bodies if one["max_tokens"] == 8)
    assert {"same": 7, "compared": 8} == read["turns"][-1]["same"]
    assert any("--seed" in one for one in read["remarks"])  # the prefix is in the cache by now


def test_no_usage_is_said(fake: Fake) -> None:
    fake.usage = fake.metrics = False
    read = found(fake)
    assert [None] * 4 == [one["cached_tokens"] for one in read["turns"]]
    assert any("no usage" in one for one in read["remarks"])
    assert any("--enable-prompt-tokens-details" in one for one in read["remarks"])


def test_a_server_that_dies_in_the_middle(fake: Fake) -> None:
    def wrong(number: int, handler: BaseHTTPRequestHandler) -> bool:
        if number < 4:
            return False
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(b'data: {"choices": [{"text": " a"}]}\n\n')
        return True

    fake.wrong = wrong
    result = invoke("replay", fake.url, *SMALL, "--json")
    read = json.loads(result.stdout)
    assert 1 == result.exit_code
    said = f"{fake.url} ended its answer in the middle, after 1 tokens: its log says more"
    assert said in read["errors"]
    assert read["turns"][-1]["errors"] == read["errors"][said] == 2


def test_the_first_request_fails(fake: Fake) -> None:
    def wrong(number: int, handler: BaseHTTPRequestHandler) -> bool:
        if number < 2:
            return False
        handler.send_response(500)
        handler.end_headers()
        handler.wfile.write(b'{"error": {"message": "out of\\nmemory"}}')
        return True

    fake.wrong = wrong
    result = invoke("replay", fake.url, *SMALL)
    assert 1 == result.exit_code
    assert "answers /v1/completions with 500: out of memory" in " ".join(result.stdout.split())
    assert 3 == len(fake.bodies)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "copied"), "serves no such model; did you mean 'copier'"),
        (("--turn", "9-8"), "--turn 9-8: pass a number of tokens"),
        (("--body", "[1]"), "--body [1]:"),
        (("--prefix", "99000"), "copier reads 100,000; pass fewer turns"),
        (("--prefix", "900"), "--prefix is 900: it has no room"),
        (("--compare", "nowhere.json"), "--compare nowhere.json:"),
        (("--compare", "a.json", "--against", "http://127.0.0.1:1"), "pass one of them"),
    ],
)
def test_what_does_not_fit(fake: Fake, arguments: tuple[str, ...], words: str) -> None:
    refused(invoke("replay", fake.url, "--turn", "300", "--sessions", "1", *arguments), words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--turn", "9-8"), "--turn 9-8: pass a number of tokens"),
        (("--body", "[1]"), "--body [1]:"),
        (("--body", '{"stream": false}'), "body holds stream, which the replay sets itself"),
        (("--against-body", "{"), "--against-body {:"),
        (("--against", "nowhere"), "'nowhere' is not the address of a server"),
        (("--against-body", '{"prompt": ""}'), "body holds prompt"),
        (("--compare", "nowhere.json"), "--compare nowhere.json:"),
        (("--compare", "bad.json"), "--compare bad.json: it is not what --record of this version writes"),
        (("--compare", "none.json"), "--compare none.json: it is not what --record of this version writes"),
        (("--compare", "words.json"), "--compare words.json: run is not what a replay records"),
        (("--compare", "list.json"), "--compare list.json: script is not what a replay records"),
        (("--record", "no/such.json"), "--record no/such.json: there is no folder"),
        (("--timeout", "inf"), "--timeout inf: pass a finite number"),
    ],
)
def test_options_are_looked_at_before_a_server_is_asked(
    arguments: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = {"text": "a", "first": "soon", "whole": 1.0, "pieces": 1, "prompt": 1, "cached": None}
    asked = {"session": 0, "turn": 1, "question": 0, "kind": "", "right": False, "answer": answer, "error": ""}
    script: dict[str, Any] = {"prefix": "a", "sessions": [], "tokens": 1, "settings": {}}
    run: dict[str, Any] = {"url": "u", "model": "m", "asked": [asked]}
    record = {"version": 1, "answer": 8, "script": script, "run": run}
    Path("words.json").write_text(json.dumps(record))
    Path("bad.json").write_text(json.dumps({**record, "version": 0}))
    Path("none.json").write_text(json.dumps({**record, "answer": 0}))
    Path("list.json").write_text(json.dumps({**record, "script": {**script, "sessions": [[[]]]}}))
    refused(invoke("replay", "http://127.0.0.1:1", *arguments), words)


def test_a_key_that_no_header_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret\n")
    result = invoke("replay", "http://127.0.0.1:1")
    refused(result, "the server's key holds what is no printable ASCII")
    assert "secret" not in result.stderr


def stopped(fake: Fake, at: int, number: int, *more: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and the JSON, of a replay to which a signal comes with a completion, or behind the last one."""

    def wrong(count: int, handler: BaseHTTPRequestHandler) -> bool:
        if count == at:
            os.kill(os.getpid(), number)
        if count >= at:
            time.sleep(0.3)
        return count >= at

    fake.wrong = wrong
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs are without
    try:
        result = invoke("replay", fake.url, *SMALL, "--json", *more)
    finally:
        signal.signal(signal.SIGINT, before)
    return result.exit_code, json.loads(result.stdout)


KEYS = {
    *("url", "model", "script", "stopped", "turns", "cache", "prefill", "reference", "errors", "remarks", "requests"),
}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize(("at", "requests"), [(2, 0), (3, 1)])
def test_json_is_whole_when_a_signal_ends_it(fake: Fake, number: int, code: int, at: int, requests: int) -> None:
    """Two samples come first, then the prefix, then the turns."""
    ended, read = stopped(fake, at, number)
    assert (code, KEYS, True) == (ended, {*read}, read["stopped"])
    assert requests == len(read["requests"])
    assert {"hits", "queries"} == {*read["cache"]}


def test_json_is_whole_when_a_signal_ends_the_reference(fake: Fake) -> None:
    ended, read = stopped(fake, 2 + 1 + 8, signal.SIGINT, "--against-body", '{"x": 1}')
    assert (130, 9, []) == (ended, len(read["requests"]), read["reference"]["requests"])
    assert 0 < read["cache"]["queries"]


def test_json_is_whole_when_the_server_goes(fake: Fake) -> None:
    def wrong(number: int, handler: BaseHTTPRequestHandler) -> bool:
        if number == 3:
            fake.http.socket.close()
        return number >= 3

    fake.wrong = wrong
    result = invoke("replay", fake.url, *SMALL, "--json", "--against-body", '{"x": 1}')
    read = json.loads(result.stdout)
    assert (1, KEYS, False) == (result.exit_code, {*read}, read["stopped"])
    assert read["errors"]
    assert "no server" in " ".join(read["reference"]["errors"]) or "ended the connection" in " ".join(
        read["reference"]["errors"]
    )


@pytest.mark.parametrize("url", ["127.0.0.1", "ftp://here", "http://", "http://127.0.0.1:port"])
def test_what_is_no_address(url: str) -> None:
    refused(invoke("replay", url), "is not the address of a server: pass one such as")


def test_no_server_and_no_key(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(invoke("replay", f"http://{'a' * 70}.example"), "no server answers at")
    refused(invoke("replay", "http://127.0.0.1:1"), "no server answers at http://127.0.0.1:1")
    fake.key = "secret"
    refused(invoke("replay", fake.url), "put its key into OPENAI_API_KEY")
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert {"copier": 100_000} == Server(fake.url + "/v1", key="secret").models()


def test_a_silent_server(fake: Fake) -> None:
    def wrong(number: int, handler: BaseHTTPRequestHandler) -> bool:
        time.sleep(0.5)
        return True

    fake.wrong = wrong
    with pytest.raises(ServerError, match=r"was silent for 0\.1 s: pass a longer --timeout"):
        Server(fake.url, 0.1, model="copier").complete("a", 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"data: nothing\n\n", "what is not JSON"),
        (b'data: {"error": {"message": "no"}}\n\n', "failed while it answered: no"),
        (b'data: {"choices": ["a"]}\n\n', "what is no completion"),
        (b'data: {"choices": {"a": 1}}\n\n', "what is no completion"),
        (b'data: {"choices": [{"text": 3}]}\n\n', "what is no completion"),
        (b"data: [DONE]\n\n", "holds no token"),
        (b"", "in the middle"),
    ],
)
def test_streams_that_are_none(fake: Fake, text: bytes, words: str) -> None:
    def wrong(number: int, handler: BaseHTTPRequestHandler) -> bool:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(text)
        return True

    fake.wrong = wrong
    with pytest.raises(ServerError, match=words):
        Server(fake.url, model="copier").complete("a", 1)
