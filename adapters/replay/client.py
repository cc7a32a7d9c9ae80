"""Requests to a server over the standard library's http.client.

Each session has one connection of its own and reads its stream line by line, so nothing of ours but the socket stands
between a token and the clock, and the command needs no further package; httpx would bring four.
"""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from attrs import astuple, field, frozen

from sparseprefill.errors import ParameterError, SparsePrefillError

CACHE = {
    "vllm": ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
    "sglang": ("sglang:cached_tokens_total", "sglang:prompt_tokens_total"),
}
"""Counters of /metrics by server: tokens found in the prefix cache, and tokens looked up."""
PREFILL = ("vllm:request_prefill_time_seconds_sum", "vllm:request_prefill_time_seconds_count")
"""Likewise seconds from when a request is scheduled to its first token, and requests; SGLang counts no such time."""
OURS = frozenset({"model", "prompt", "max_tokens", "stream"})
"""Fields of a completion that its sender chooses."""


class ServerError(SparsePrefillError):
    """A server does not answer as it should; the message says what it did, and what would help."""


@frozen
class Answer:
    """A server's text. first, whole: seconds to its first token and to its end. pieces: events with text, which are
    tokens unless the server sends several at once. prompt, cached: tokens of the request, and those of them that were
    cached; None where the server does not say."""

    text: str
    first: float
    whole: float
    pieces: int
    prompt: int | None = None
    cached: int | None = None

    @classmethod
    def of(cls, found: Any) -> Answer:
        """An answer in a record."""
        counts = (_count(found[name]) for name in ("prompt", "cached"))
        return cls(str(found["text"]), float(found["first"]), float(found["whole"]), int(found["pieces"]), *counts)


@frozen
class Counters:
    """A server's own counters. hits, queries: tokens found in its prefix cache, and tokens looked up. prefill: seconds
    in the engine from when a request is scheduled to its first token, of so many `requests`; 0 where it counts none."""

    hits: float
    queries: float
    prefill: float = 0.0
    requests: float = 0.0

    def since(self, before: Counters) -> Counters:
        """Counters of the time in between."""
        return Counters(*(mine - theirs for mine, theirs in zip(astuple(self), astuple(before), strict=True)))

    @property
    def each(self) -> float | None:
        """Seconds of prefill a request; None where it counts none."""
        return self.prefill / self.requests if self.requests > 0 else None


@frozen
class Server:
    """A server's address and what every request to it holds.

    url: with or without /v1 at its end. timeout: seconds that a request may be silent. key: for `Authorization`.
    body: further fields of every completion, such as vLLM's `vllm_xargs`. model: whose completions are asked for.

    Raises ParameterError for what is no address, a key that no header takes, and fields that are ours.
    """

    url: str
    timeout: float = 600.0
    key: str | None = field(default=None, repr=False)
    body: Mapping[str, Any] = field(factory=dict)
    model: str = ""

    def __attrs_post_init__(self) -> None:
        self._parts()
        if not ((self.key or "").isascii() and (self.key or "").isprintable()):
            raise ParameterError("the server's key holds what is no printable ASCII: pass it as the server has it")
        ours = sorted(OURS & {*self.body})
        if ours:
            raise ParameterError(f"body holds {', '.join(ours)}, which the replay sets itself: leave it out")

    def models(self) -> dict[str, int | None]:
        """The models that it serves, and how many tokens each reads; ServerError where there are none."""
        status, data = self._whole("GET", "/v1/models")
        if status != 200:
            raise ServerError(f"{self.url} {_refused(status, data, '/v1/models')}")
        try:
            told = {str(one["id"]): one.get("max_model_len") for one in json.loads(data)["data"]}
            found = {name: most if isinstance(most, int) else None for name, most in told.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            found = {}
        if not found:
            raise ServerError(f"{self.url} answers, but lists no model at /v1/models: check the address")
        return found

    def counters(self) -> Counters | None:
        """Counters since it started; None if it does not tell of its prefix cache."""
        try:
            status, data = self._whole("GET", "/metrics")
        except ServerError:
            return None
        text = data.decode(errors="replace") if status == 200 else ""
        for hits, queries in CACHE.values():
            if re.search(rf"^{queries}\b", text, re.M):
                return Counters(*(_summed(text, name) for name in (hits, queries, *PREFILL)))
        return None

    def complete(self, prompt: str, tokens: int) -> Answer:
        """The greedy continuation of a text, of so many tokens at most; ServerError where it does not come whole."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        body |= {"stream_options": {"include_usage": True}, **self.body}
        began = time.perf_counter()
        connection = self._connection()
        try:
            connection.request("POST", self._path("/v1/completions"), json.dumps(body), self._headers())
            answer = connection.getresponse()
            if answer.status != 200:
                raise ServerError(f"{self.url} {_refused(answer.status, answer.read(), '/v1/completions')}")
            return _streamed(answer, began, self.url)
        except TimeoutError as error:
            raise ServerError(f"{self.url} was silent for {self.timeout:g} s: pass a longer --timeout") from error
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            said = str(error) or type(error).__name__
            raise ServerError(f"{self.url} ended the connection ({said}): its log says more") from error
        finally:
            connection.close()

    def _whole(self, method: str, path: str) -> tuple[int, bytes]:
        connection = self._connection()
        try:
            connection.request(method, self._path(path), headers=self._headers())
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException, UnicodeError) as error:  # names that are none fail in their codec
            said = str(error) or type(error).__name__
            raise ServerError(
                f"no server answers at {self.url} ({said}): check that it runs, and the address"
            ) from error
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        parts = self._parts()
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        return kind(parts.hostname or "", parts.port, timeout=self.timeout)

    def _parts(self) -> urllib.parse.SplitResult:
        with suppress(ValueError):  # a port that is no number
            parts = urllib.parse.urlsplit(self.url)
            if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
                return parts
        raise ParameterError(f"{self.url!r} is not the address of a server: pass one such as http://127.0.0.1:8000")

    def _path(self, path: str) -> str:
        return self._parts().path.rstrip("/").removesuffix("/v1") + path

    def _headers(self) -> dict[str, str]:
        key = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        return {"Content-Type": "application/json", **key}


def _streamed(answer: http.client.HTTPResponse, began: float, url: str) -> Answer:
    text, first, pieces, done = "", None, 0, False
    usage: Mapping[str, Any] = {}
    for event in _events(answer):
        if event == "[DONE]":
            done = True
            break
        try:
            data = json.loads(event)
        except ValueError as error:
            raise ServerError(f"{url} streams what is not JSON ({event[:60]!r}): its log says more") from error
        if not isinstance(data, dict) or data.get("error"):
            raise ServerError(f"{url} failed while it answered: {_message(event.encode())}")
        usage = data["usage"] if isinstance(data.get("usage"), dict) else usage
        choices = data.get("choices")
        if choices:
            first = time.perf_counter() - began if first is None else first
            pieces += 1
            try:
                text += choices[0].get("text") or ""
            except (LookupError, AttributeError, TypeError) as error:
                raise ServerError(f"{url} streams what is no completion ({event[:60]!r}): check the address") from error
    if not done:
        raise ServerError(f"{url} ended its answer in the middle, after {pieces} tokens: its log says more")
    if first is None:
        raise ServerError(f"{url} answers with a stream that holds no token: its log says more")
    details = usage.get("prompt_tokens_details")
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
    whole = time.perf_counter() - began
    return Answer(text, first, whole, pieces, _count(usage.get("prompt_tokens")), cached)


def _count(value: Any) -> int | None:
    """A count that a server gives; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _events(answer: http.client.HTTPResponse) -> Iterator[str]:
    """The data of a stream's events."""
    while line := answer.readline():
        if line.startswith(b"data:"):
            yield line[5:].strip().decode(errors="replace")


def _refused(status: int, data: bytes, path: str) -> str:
    if status in (401, 403):
        return f"refuses to answer ({status}): put its key into OPENAI_API_KEY"
    if status == 404 and not _message(data).strip("{}"):
        return f"has no {path} ({status}): check the address"
    return f"answers {path} with {status}: {_message(data)}"


def _message(data: bytes) -> str:
    """The fault that an answer names."""
    text = data.decode(errors="replace").strip()
    try:
        found = json.loads(text)
        error = found.get("error", found)
        text = str(error if isinstance(error, str) else error.get("message") or error.get("detail") or text)
    except (ValueError, AttributeError):
        pass
    return " ".join(text.split())[:300] or "nothing more"


def _summed(text: str, name: str) -> float:
    """A counter's value over all its labels."""
    return sum(float(one) for one in re.findall(rf"^{name}(?:\{{.*\}})? (\S+)", text, re.M))
