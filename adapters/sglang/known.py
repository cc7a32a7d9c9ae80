"""SGLang's requests by their ids: how long their prompts are, what they ask for, and whether they are still there.

A batch carries the ids of its rows and nothing else of this kind, so `meet` hears of each request that a scheduler
makes (an official hook, see `plugin`). It also keeps apart in the prefix cache what requests ask for. `refuse` looks
at requests where they come in.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from ..serving import stores
from ..serving.wishes import SWITCH, Unknown, salt, wish
from .options import given
from .stores import REMEDY, unsalted

UNSEEN = "SGLang does not say what the request asks for"
FIELD = "custom_params"
"""Place of a request's own arguments, among its sampling parameters."""


class Listener(Protocol):
    """Whom `tell` is for."""

    def forget(self, rid: str) -> None:
        """The request of this id is gone."""


_requests: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()


def meet(_: object, request: Any, *args: object, **kwargs: object) -> None:
    """After SGLang's ``Req.__init__``. Where the backend is not selected, nobody listens, and nothing changes."""
    if not _listeners:
        return
    asked = _arguments(request)
    request.cache_salt = salt(asked, request.cache_salt)
    _requests[request.rid] = request
    weakref.finalize(request, _left, request.rid).atexit = False


def refuse(manager: Any, one: Any, *args: object, **kwargs: object) -> None:
    """Before SGLang's ``TokenizerManager._validate_one_request``: ValueError, which SGLang answers with status 400,
    for a request that asks for a profile that is not there, mistypes the argument, or would be mixed up with others by
    a store of keys."""
    if not selected(manager.server_args):
        return
    params = getattr(one, "sampling_params", None)
    asked = params.get(FIELD) if isinstance(params, dict) else getattr(params, FIELD, None)
    if not isinstance(asked, dict) or not asked:
        return
    why = given().refusal(asked) or stores.objection(asked, unsalted(manager.server_args), REMEDY)
    if why is not None:
        raise ValueError(why)


def selected(server_args: Any) -> bool:
    """True if the server's prefill is ours."""
    names = (getattr(server_args, name, None) for name in ("prefill_attention_backend", "attention_backend"))
    return SWITCH in names


def find(rid: str) -> Any:
    """SGLang's request of this id; None where it is gone, or was never heard of."""
    return _requests.get(rid)


def prompt(request: Any) -> int | None:
    """Tokens of a request's prompt, those that it generated before it was retracted left out."""
    return None if request is None else len(request.origin_input_ids)


def asked(request: Any) -> object:
    """A request's wish: None for nothing, Unknown where nobody tells."""
    return Unknown(UNSEEN) if request is None else wish(_arguments(request))


def complete(request: Any) -> bool:
    """True if the last chunk that a request was given ends its prefill."""
    return int(request.extend_end) >= len(request.full_untruncated_fill_ids)


def tell(listener: Listener) -> None:
    """Have somebody told of each request that is gone, for as long as he lives."""
    _listeners.add(listener)


def _left(rid: str) -> None:
    if rid not in _requests:  # another of the same id may have come
        for one in list(_listeners):
            one.forget(rid)


def _arguments(request: Any) -> dict[str, object]:
    found = getattr(request.sampling_params, FIELD, None)
    return found if isinstance(found, dict) else {}
