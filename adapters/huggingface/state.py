"""State that an attached model's attention, mask and hooks share: the host's own attention, the attachment, and the
forward that a call belongs to.

The attention function sees neither the cache nor the request. A hook before the decoder opens a `Forward`, one after
it (errors included) closes it; every thread and task has its own. What must outlive one forward, a prefill in chunks,
is found by its cache and goes with it.
"""

from __future__ import annotations

import inspect
import logging
import sys
import threading
import weakref
from collections.abc import Hashable, Iterable, Iterator
from contextvars import ContextVar
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import QuantizedLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..session.kinds import Kinds
from ..session.repeat import Repeat
from ..session.session import Fallback, Prefill, Session
from .inspection import configurations, foreign, trained_length
from .masks import Compact, MaskFunction
from .switch import LOCK, Switch, named_before
from .unread import Reader

Print = tuple[tuple[Any, ...], ...]
"""Facts of a cache's tensors that change with whatever is done to them."""
log = logging.getLogger(__name__)
_current: ContextVar[Forward | None] = ContextVar("sparseprefill_forward", default=None)
_bound: tuple[weakref.ref[Attachment], ...] = ()  # replaced as a whole, so that it may be read without the lock


@frozen
class Original:
    """An implementation by the name that transformers knows it by, such as ``sdpa`` or ``eager``."""

    name: str

    @classmethod
    def of(cls, decoder: PreTrainedModel) -> Original:
        """A decoder's own, attached or not."""
        return cls(str(named_before(decoder.config._attn_implementation)))

    def attention(self, module: torch.nn.Module) -> Any:
        """Its attention function for this module; ``eager`` is the one in the file of the module's class."""
        for names in _files(type(module)):
            eager = names.get("eager_attention_forward")
            if eager is not None:
                registry = names.get("ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
                return registry.get_interface(self.name, eager)
        return ALL_ATTENTION_FUNCTIONS[self.name]

    def applies_extras(self, module: torch.nn.Module) -> bool:
        """True if it honours softcap and sinks; sdpa drops both in silence, and equality means to drop them too."""
        return self.attention(module) is not sdpa_attention_forward

    def foreign(self, module: torch.nn.Module) -> str:
        """The name of what is not transformers' own in its attention function for this module; empty where all is."""
        try:
            return foreign(self.attention(module))
        except KeyError:  # none: the module calls no attention
            return ""

    def mask(self) -> MaskFunction | None:
        """Its mask function; None for an implementation that takes no mask."""
        found: MaskFunction | None = ALL_MASK_ATTENTION_FUNCTIONS.get(self.name)
        return found


def _files(kind: type) -> Iterator[dict[str, Any]]:
    """The names in the file of a module's forward, then in those of its classes."""
    yield getattr(inspect.unwrap(getattr(kind, "forward", kind)), "__globals__", {})
    for owner in kind.__mro__:
        yield getattr(sys.modules.get(owner.__module__), "__dict__", {})


def weakly(module: torch.nn.Module) -> weakref.ref[Any]:
    """A reference that does not keep a module alive."""
    return weakref.ref(module)


@frozen(eq=False)
class Place:
    """Place of a layer's module in the decoder, and its kind: its class, and whether it had a forward of its own."""

    path: str
    module: weakref.ref[torch.nn.Module]
    kind: type
    own: object

    @classmethod
    def all_of(cls, decoder: torch.nn.Module) -> dict[int, list[Place]]:
        """By layer; of modules that know which they belong to."""
        found: dict[int, list[Place]] = {}
        for path, module in decoder.named_modules():
            layer = getattr(module, "layer_idx", None)
            if isinstance(layer, int):
                forward = vars(module).get("forward")
                found.setdefault(layer, []).append(cls(path, weakly(module), type(module), forward))
        return found

    def is_untouched(self, decoder: torch.nn.Module, name: str) -> bool:
        """True if nothing stands in its place that could have run instead. name: that its configuration has then."""
        try:
            found = decoder.get_submodule(self.path)
        except AttributeError:
            return not _has(decoder, self.path.rpartition(".")[0])
        config = getattr(found, "config", None)
        switched = config is None or getattr(config, "_attn_implementation", name) == name
        same = found is self.module() and type(found) is self.kind and vars(found).get("forward") is self.own
        return same and switched


def _has(module: torch.nn.Module, path: str) -> bool:
    try:
        module.get_submodule(path)
    except AttributeError:
        return False
    return True


@define(eq=False, repr=False)
class Attachment:
    """One model's attachment. Holds the model weakly: the model's hooks keep the attachment, and it goes with them.

    original: what the host would run. name: under which both functions are registered with transformers. active:
    whether new forwards run through the session; those that began so end so. only: the one thread whose forwards do;
    None for all. last: the layer whose rows are left out that nobody reads; None for no layer. reader: who says which.
    configs: every configuration of the decoder. trained: tokens that it was made for, where it says so. named: whether
    it was attached by the name of its implementation, so that another name detaches it. requests: its prefills.
    """

    _decoder: weakref.ref[PreTrainedModel] = field(converter=weakly)
    session: Session
    only: threading.Thread | None = None
    last: int | None = None
    _model: weakref.ref[torch.nn.Module] = field(converter=weakly, kw_only=True, alias="model")
    original: Original = field(init=False)
    reader: Reader | None = field(default=None, init=False)
    configs: tuple[PreTrainedConfig, ...] = field(default=(), init=False)
    trained: int | None = field(default=None, init=False)
    _modules: weakref.WeakSet[torch.nn.Module] = field(factory=weakref.WeakSet, init=False)
    _places: dict[int, list[Place]] = field(factory=dict, init=False)
    name: str = field(default="", init=False)
    active: bool = field(default=False, init=False)
    switch: Switch | None = field(default=None, init=False)
    hooks: list[Any] = field(factory=list, init=False)
    named: bool = field(default=False, init=False)
    requests: Requests = field(factory=lambda: Requests(), init=False)  # noqa: PLW0108 - it comes below
    _told: Kinds = field(factory=Kinds, init=False)
    _forwards: set[Forward] = field(factory=set, init=False)

    @property
    def decoder(self) -> PreTrainedModel | None:
        """The decoder, None where the model is gone."""
        return self._decoder()

    @property
    def model(self) -> torch.nn.Module | None:
        """The model that was attached, of which the decoder is a part; None where it is gone."""
        return self._model()

    @property
    def serves(self) -> bool:
        """True if a forward that begins now, in this thread, runs through the session."""
        return self.active and self.only in (None, threading.current_thread())

    @property
    def overruled(self) -> bool:
        """True if the model was attached by a name, and has got another since: it is to be detached."""
        decoder = self.decoder
        return self.named and self.active and decoder is not None and decoder.config._attn_implementation != self.name

    def owns(self, module: torch.nn.Module) -> bool:
        """True if the module belongs to the attached decoder; models built from one config share its functions."""
        return module in self._modules

    def tell(self, text: str) -> None:
        """Note something that is unlike what was attached, and log it as a warning the first time."""
        self.session.note(text)
        if self._told.add(text):
            log.warning("%s: %s", self.session.route.name, text)

    def refuse(self, layers: Iterable[int], text: str) -> None:
        """`tell` of layers that ran without the method; UnsupportedCallError if the session is strict."""
        self.tell(text)
        self.session.forbid(layers, f"{text} (strict)")

    def left(self, layer: int) -> bool:
        """True if a layer that did not call is there as it was at attaching, or was taken out: so it did not run."""
        decoder, places = self.decoder, self._places.get(layer, [])
        return decoder is not None and bool(places) and all(place.is_untouched(decoder, self.name) for place in places)

    def foreign(self) -> dict[type, str]:
        """The names of what is not transformers' own in the attention function, by the layers' classes."""
        known = (place.module() for places in self._places.values() for place in places)
        kinds = {type(module): module for module in known if module is not None}
        return {kind: self.original.foreign(module) for kind, module in kinds.items()}

    def take(self, module: torch.nn.Module) -> None:
        """The decoder got the module after it was attached."""
        with LOCK:
            self._modules.add(module)

    @property
    def runs(self) -> bool:
        """True if a forward of the decoder is on this thread's stack."""
        return bool(next(_frames(self.decoder), 0))

    def has_another_decoder(self, module: torch.nn.Module) -> bool:
        """True if the module is a part of the model, so that it belongs to what took the decoder's place."""
        model = self.model
        return model is not None and any(one is module for one in model.modules())

    def sees_all(self, mask: Compact) -> bool:
        """True if a sliding window is none: as wide as all that the model was made for, and as the keys that it has."""
        return self.trained is not None and mask.window is not None and mask.window >= max(self.trained, mask.used)

    def begin(self, decoder: PreTrainedModel, name: str, switch: Switch) -> None:
        """Take forwards from now on: the decoder is hooked and switched."""
        global _bound
        self._modules = weakref.WeakSet(decoder.modules())
        self._places = Place.all_of(decoder)
        self.configs, self.trained = configurations(decoder), trained_length(decoder)
        self.name, self.switch, self.active = name, switch, True
        self._told = Kinds()
        _bound = (*(ref for ref in _bound if ref() not in (None, self)), weakref.ref(self))

    def end(self) -> None:
        """Take no more forwards, and let the decoder go as soon as those that began have ended."""
        with LOCK:
            self.active = False
            self._forget_lost(running=0)
            self._settle()

    def enter(self, forward: Forward) -> None:
        """A forward of this thread begins; as the host's own, if it does not go through the session."""
        forward.frame = next(_frames(self.decoder), 0)
        with LOCK:
            self._forget_lost(running=1)
            forward.stock = forward.stock or not self.serves
            if forward.stock and self.switch is None:
                return
            self._forwards.add(forward)
        forward.outer = next(_open(), None)
        _current.set(forward)

    def leave(self) -> Forward | None:
        """This thread's innermost forward ends. Returns it; None where it has none."""
        forward = current(self)
        if forward is not None:
            forward.over = True
            _current.set(next(_open(), None))
            with LOCK:
                self._forwards.discard(forward)
                self._settle()
        return forward

    def _settle(self) -> None:
        global _bound
        if self.active:
            return
        if self.switch is not None and all(forward.stock for forward in self._forwards):
            self.switch.release(self)
            self.switch = None
            _bound = tuple(ref for ref in _bound if ref() not in (None, self))
        while self.hooks and not self._forwards:
            self.hooks.pop().remove()

    def _forget_lost(self, running: int) -> None:
        """Torch calls no hook after a KeyboardInterrupt, and a thread may be gone: such forwards end here.

        running: how many forwards of this thread are on the stack where none is lost.
        """
        here = threading.current_thread()
        lost = [forward for forward in self._forwards if not forward.thread.is_alive()]
        mine = [forward for forward in self._forwards if forward.thread is here]
        if mine and len(list(_frames(self.decoder))) <= running:
            lost += mine
        for forward in lost:
            self.lose(forward)

    def lose(self, forward: Forward) -> None:
        """A forward has ended, though no hook told so."""
        forward.over, forward.cache = True, None
        with LOCK:
            self._forwards.discard(forward)
            self._settle()


@define(eq=False, repr=False)
class Forward:
    """One forward of a decoder, as one attachment sees it.

    dense: why every layer of it stays with the host's attention; None if nothing is. stock: it does not go through this
    session at all. aside: it may go through another's. draft: its last tokens that are a draft, and no part of the
    prompt before them. past, end: tokens in the cache when it begins, and of that prompt when it has ended; None where
    its inputs do not tell. sparse: a layer ran by the method.
    read: how many last rows are read; None for all. known: what a layer of a kind came to. foreign: what is
    not transformers' own in the attention function of a class of modules. seen: layers that called the attention
    function. over: it has ended. late: it began before the decoder was hooked, so nothing may tell of its end.
    frame: the `id` of its frame on the stack, which is there until it ends; 0 where there was none, as in a graph.
    """

    owner: Attachment
    prefill: Prefill
    cache: Any = None
    dense: str | None = None
    stock: bool = False
    aside: bool = False
    draft: int = 0
    past: int = 0
    end: int | None = None
    read: int | None = None
    known: dict[Hashable, Fallback | Repeat] = field(factory=dict, init=False)
    foreign: dict[type, str] = field(factory=dict, init=False)
    seen: set[int] = field(factory=set, init=False)
    sparse: bool = field(default=False, init=False)
    over: bool = field(default=False, init=False)
    late: bool = field(default=False, init=False)
    outer: Forward | None = field(default=None, init=False)
    frame: int = field(default=0, init=False)
    thread: threading.Thread = field(factory=threading.current_thread, init=False)

    @property
    def lost(self) -> bool:
        """True if it has ended, though no hook told so: torch calls none after a KeyboardInterrupt."""
        if not self.frame or self.thread is not threading.current_thread():
            return False
        frame: FrameType | None = sys._getframe()
        while frame is not None and id(frame) != self.frame:  # each layer asks: `walk_stack` takes three times as long
            frame = frame.f_back
        return frame is None or not _runs(frame, self.owner.decoder)


def current(owner: Attachment) -> Forward | None:
    """The innermost open forward of `owner` in this context."""
    return next((forward for forward in _open() if forward.owner is owner), None)


def serving(module: torch.nn.Module) -> Forward | None:
    """The innermost open forward in this context of a decoder that the module belongs to."""
    return next((forward for forward in _open() if not forward.aside and forward.owner.owns(module)), None)


def owner_of(module: torch.nn.Module) -> Attachment | None:
    """The attachment that takes the forwards of the module's decoder in this thread; None if nobody does."""
    return next((attached for attached in _serving() if attached.owns(module)), None)


def adopt(module: torch.nn.Module) -> Forward | None:
    """The innermost open forward in this context of a decoder that got the module since it was attached; the module
    belongs to it from now on. Walks the decoder's modules."""
    for forward in _open():
        decoder = forward.owner.decoder
        if not forward.aside and decoder is not None and any(one is module for one in decoder.modules()):
            forward.owner.take(module)
            return forward
    return None


def sharing(module: torch.nn.Module) -> Attachment | None:
    """An attachment that takes this thread's forwards, and has switched the configuration that the module reads."""
    config = getattr(module, "config", None)
    if config is None:
        return None
    return next((one for one in _serving() if one.switch and one.switch.holds(config)), None)


def attachments() -> list[Attachment]:
    """Those that take forwards, or have some that have not ended."""
    return [attached for ref in _bound if (attached := ref()) is not None]


def _serving() -> Iterator[Attachment]:
    return (attached for ref in _bound if (attached := ref()) is not None and attached.serves)


def is_stock() -> bool:
    """True if the innermost open forward in this context stays with the host's own attention throughout."""
    forward = next((forward for forward in _open() if not forward.aside), None)
    return forward is not None and (forward.stock or forward.dense is not None)


def _open() -> Iterator[Forward]:
    forward = _current.get()
    while forward is not None:
        if not forward.over and forward.lost:
            forward.owner.lose(forward)
        if not forward.over:
            yield forward
        forward = forward.outer


def _frames(decoder: torch.nn.Module | None) -> Iterator[int]:
    """The `id` of the frame of each forward of the decoder on this thread's stack, the innermost first."""
    for frame, _ in walk_stack(sys._getframe()):
        if _runs(frame, decoder):
            yield id(frame)


def _runs(frame: FrameType, decoder: torch.nn.Module | None) -> bool:
    return frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is decoder


@frozen(eq=False)
class Progress:
    """Progress of a cache's prefill: what it remembers, the token `end` at which the next chunk starts, and what the
    cache held then."""

    prefill: Prefill = field(factory=Prefill)
    end: int = 0
    left: Print = ()


class Requests:
    """Prefills in progress, by cache. Entries vanish with their cache, or when it decodes.

    What a prefill remembers is true of the keys that it was made of. So a chunk goes on with its cache's prefill only
    where the cache is what the last chunk left: the same tensors, at the same place, and nobody wrote into them since.

    By identity: caches may compare as equal, or have no hash. One that cannot be referred to weakly is not remembered.
    """

    def __init__(self) -> None:
        self._caches: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._lock = threading.Lock()

    def advance(self, cache: Any, past: int) -> tuple[Prefill, bool]:
        """The prefill of a forward behind `past` tokens of a cache; whether it goes on with an earlier chunk.

        It does only where the cache is as the last chunk left it. After decoding, cropping, a reset, other batch rows
        or anything else that was done to it a new one begins.
        """
        with self._lock:
            # `get` would refuse what cannot be referred to weakly.
            before: Progress | None = self._caches[cache] if cache in self._caches else None  # noqa: SIM401
        if before is None or before.end != past or past <= 0 or not _same(before.left, tensors_of(cache)):
            return Prefill(), False
        return before.prefill, True

    def keep(self, cache: Any, prefill: Prefill, end: int) -> None:
        """Remember where this cache's prefill stands, and what the cache holds there."""
        try:
            made = Progress(prefill, end, fingerprint(cache))
            with self._lock:
                self._caches[cache] = made
        except TypeError:  # a tuple, or an object without weak references
            return

    def drop(self, cache: Any) -> None:
        """The cache decodes: its prefill is over."""
        with self._lock:
            if cache in self._caches:
                del self._caches[cache]

    def __len__(self) -> int:
        return len(self._caches)


def tensors_of(cache: Any) -> Iterator[Tensor]:
    """The tensors of a cache, layer by layer, in an order of their own."""
    layers = getattr(cache, "layers", None)
    for holder in layers if isinstance(layers, list | tuple) else (cache,):
        for value in getattr(holder, "__dict__", {}).values():
            yield from _tensors(value)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors(one)


def fingerprint(cache: Any) -> Print:
    """The facts of the cache's tensors: their identity, held weakly, and what a write or another storage changes.

    Inference tensors count no writes: see `is_steady`.
    """
    return tuple((weakref.ref(x), *_facts(x)) for x in tensors_of(cache))


def _facts(x: Tensor) -> tuple[Any, ...]:
    return None if x.is_inference() else x._version, x.data_ptr(), x.shape, x.stride()


def _same(left: Print, tensors: Iterator[Tensor]) -> bool:
    """True if these are the tensors that were left, as they were; False where there are none to tell by."""
    now = list(tensors)
    if not now or len(now) != len(left):
        return False
    return all(ref() is x and tuple(facts) == _facts(x) for (ref, *facts), x in zip(left, now, strict=True))


def past_length(cache: Any) -> int:
    """Tokens the cache holds already; 0 for none and for caches that cannot tell (linear attention only)."""
    if cache is None:
        return 0
    try:
        return int(cache.get_seq_length())
    except (AttributeError, ValueError, TypeError, RuntimeError):
        return 0


def is_steady(cache: Any) -> bool:
    """True if statistics of the cache's keys and values may be kept: it gives them back as it got them, and tells
    whether somebody wrote to them meanwhile.

    Transformers' own do, unless they quantize, or were made under `torch.inference_mode`.
    """
    layers = getattr(cache, "layers", None)
    if not isinstance(layers, list):
        return False
    ours = (type(layer).__module__ == QuantizedLayer.__module__ for layer in layers)
    if not all(ours) or any(isinstance(layer, QuantizedLayer) for layer in layers):
        return False
    return not any(x.is_inference() for x in tensors_of(cache))
