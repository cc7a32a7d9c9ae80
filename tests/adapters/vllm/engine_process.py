"""Runs engines one after the other in a process of its own: a JSON file says what, another gets the answers.

Not a test module. vLLM keeps global state, warns a lot and starts threads; a process keeps that out of the tests.
"""

# vLLM is not there where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import sys
from typing import Any

import sparseprefill as sp

from . import diary

DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_model_len": 2048,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 64 << 20,
    "gpu_memory_utilization": 0.3,  # asked for at the start alone: others may use the GPU
    "seed": 0,
    "disable_log_stats": False,
    "enable_prefix_caching": False,
}


def tried(job: dict[str, Any]) -> dict[str, Any]:
    """An engine's answers, or the error that ended it."""
    try:
        with otherwise(job):
            return run(job)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


@contextlib.contextmanager
def otherwise(job: dict[str, Any]) -> Any:
    """Requests as of a front end that looks at none (`unseen`), the model's state of a hybrid model (`hybrid`), callers
    by which no draft model can be told (`flat`), prompts in pieces where the platform takes them whole (`pieces`)."""
    from unittest import mock

    with contextlib.ExitStack() as stack:
        if job.get("flat"):
            from sparseprefill.adapters.vllm import runtime

            stack.enter_context(mock.patch.object(runtime, "drafting", return_value=False))
        if job.get("unseen"):
            from vllm.v1.engine.input_processor import InputProcessor

            bare = InputProcessor.process_inputs.__wrapped__
            stack.enter_context(mock.patch.object(InputProcessor, "process_inputs", bare))
        if job.get("pieces"):
            stack.enter_context(in_pieces())
        if job.get("hybrid"):
            from vllm.v1.worker.gpu import model_runner
            from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

            stack.enter_context(mock.patch.object(model_runner, "init_model_state", MambaHybridModelState))
        yield


def in_pieces() -> Any:
    """Let prompts of models with multi-head latent attention come in chunks, and be cached, as they are on a GPU.

    vLLM switches both off on a CPU, whose attention has all that they need but is not tried with it by vLLM.
    """
    from unittest import mock

    from vllm.platforms.cpu import CpuPlatform

    checking = CpuPlatform.check_and_update_config

    def check(config: Any) -> None:
        tokens, cached = config.scheduler_config.max_num_batched_tokens, config.cache_config.enable_prefix_caching
        checking(config)
        config.scheduler_config.enable_chunked_prefill = True
        config.scheduler_config.max_num_batched_tokens = tokens
        config.cache_config.enable_prefix_caching = cached

    return mock.patch.object(CpuPlatform, "check_and_update_config", staticmethod(check))


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One engine: its rounds of prompts, and what its worker reports.

    A prompt is token ids, `image` with `ids`, or what to `follow` the last one and its answer with.
    """
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    options = {**DEFAULTS, **job.get("options", {})}
    if "sparse" in job:
        latent: dict[str, Any] = {"attention_config": {"mla_prefill_backend": "CUSTOM"}}
        options |= latent if job.get("latent") else {"attention_backend": "CUSTOM"}
        gate = {} if "config" in job["sparse"] else {"gate": False}  # prompts here are too short to be worth a mask
        options["additional_config"] = {"sparseprefill": {**gate, **job["sparse"]}}
        options.setdefault("worker_extension_cls", "sparseprefill.adapters.vllm.worker.ReportExtension")
    diary.SEEN.clear()
    diary.COPIES.clear()
    diary.LAUNCHES.clear()
    llm = LLM(model=job["model"], **options)

    def asking(profile: Any = None) -> SamplingParams:
        return SamplingParams(
            max_tokens=job.get("tokens", 8),
            ignore_eos=True,
            detokenize=False,
            logprobs=job.get("logprobs"),
            prompt_logprobs=job.get("prompt_logprobs"),
            extra_args=profile if isinstance(profile, dict) or profile is None else {"sparseprefill": profile},
            **job.get("sampling", {"temperature": 0}),
        )

    sampling = asking()
    rounds, warmed, before = [], [list(seen[2:]) for seen in diary.SEEN], list[int]()
    diary.SEEN.clear()
    if options.get("runner") == "pooling":
        llm.embed([{"prompt_token_ids": ids} for prompts in job["rounds"] for ids in prompts], use_tqdm=False)
        return {"report": llm.collective_rpc("sparseprefill_report")[0]}
    refusals = [refusal(llm, asking(profile)) for profile in job.get("refused", [])]
    for nth, asked in enumerate(job["rounds"]):
        prompts = [[*before, *one["follow"]] if "follow" in one else one for one in asked]
        profiles = job["asked"][nth] if "asked" in job else [None] * len(prompts)
        each = [asking(profile) for profile in profiles]
        done = llm.generate([asked_for(one) for one in prompts], each, use_tqdm=False, **beside(job, nth))
        rounds.append([{**answer(one.outputs[0]), "prompt": of_prompt(one), "all": said(one)} for one in done])
        before = [*done[-1].prompt_token_ids, *done[-1].outputs[0].token_ids]
    if "replaced" in job:
        diary.SEEN.clear()
        rounds.append([replaced(llm, sampling, *job["replaced"])])
    metrics = {m.name: getattr(m, "value", None) for m in llm.get_metrics()}
    reports = llm.collective_rpc("sparseprefill_report") if "sparse" in job else [None]
    state = inside(llm) if "sparse" in job else None
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    found = {
        "rounds": rounds,
        "report": reports[0],
        "reports": reports,
        "metrics": metrics,
        "state": state,
        "warmed": warmed,
    }
    return {**found, "refusals": refusals}


def asked_for(prompt: Any) -> dict[str, Any]:
    """A prompt as vLLM takes it: token ids, or with the noise of a seed as its image."""
    if isinstance(prompt, list):
        return {"prompt_token_ids": prompt}
    import numpy
    from PIL import Image

    noise = numpy.random.default_rng(prompt["image"]).integers(0, 256, (48, 48, 3), dtype=numpy.uint8)
    return {"prompt_token_ids": prompt["ids"], "multi_modal_data": {"image": Image.fromarray(noise)}}


def beside(job: dict[str, Any], nth: int) -> dict[str, Any]:
    """What a round of prompts is asked with: an adapter for some of them, and their priorities."""
    found: dict[str, Any] = {}
    if "lora" in job:
        from vllm.lora.request import LoRARequest

        found["lora_request"] = [LoRARequest("adapter", 1, job["lora"]) if on else None for on in job["adapted"][nth]]
    if "priorities" in job:
        found["priority"] = job["priorities"][nth]
    return found


def refusal(llm: Any, sampling: Any) -> str:
    """What the engine says to a request that asks for something it does not have; empty if it is served."""
    from vllm.exceptions import VLLMValidationError

    try:
        llm.generate([{"prompt_token_ids": [5] * 40}], sampling, use_tqdm=False)
    except VLLMValidationError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def replaced(llm: Any, sampling: Any, first: list[int], then: list[int]) -> dict[str, Any]:
    """Give a request up after its first chunk, and send another in the same moment; the answer to that one."""
    engine = llm.llm_engine
    engine.add_request("first", {"prompt_token_ids": first}, sampling)
    engine.step()
    engine.abort_request(["first"])
    engine.add_request("then", {"prompt_token_ids": then}, sampling)
    done: list[Any] = []
    while engine.has_unfinished_requests():
        done += [one for one in engine.step() if one.finished]
    return answer(done[-1].outputs[0])


def answer(output: Any) -> dict[str, Any]:
    """Tokens, and where asked the log probability of each, and by how much the first choice beats the second."""
    steps = output.logprobs or []
    chosen = [step[token].logprob for token, step in zip(output.token_ids, steps, strict=False)]
    best = [sorted((one.logprob for one in step.values()), reverse=True) for step in steps]
    margins = [step[0] - step[1] for step in best if len(step) > 1]
    return {"tokens": list(output.token_ids), "logprobs": chosen, "margins": margins}


def said(output: Any) -> list[list[int]]:
    """Tokens of all that a prompt was answered, where several answers were asked for."""
    return [list(one.token_ids) for one in output.outputs]


def of_prompt(output: Any) -> list[float]:
    """Log probability of each token of the prompt but the first, where asked."""
    given = zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=False)
    return [step[token].logprob for token, step in given if step is not None]


def inside(llm: Any) -> dict[str, Any]:
    """What the runtime holds when all requests are done; engines here run in this process."""
    from sparseprefill.adapters.vllm import runtime

    llm.generate([{"prompt_token_ids": [5]}], use_tqdm=False)  # a step without a prefill to go on with
    return {
        "requests": [len(one.requests) for one in runtime._runtimes.values()],
        "runtimes": len(runtime._runtimes),
        "counters": counters(),
        "diary": list(diary.SEEN),
        "copies": sorted(diary.COPIES),
        "launches": list(diary.LAUNCHES),
    }


def counters() -> dict[str, float]:
    """The library's metrics in this process."""
    from prometheus_client import REGISTRY

    samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
    ours = [one for one in samples if one.name.startswith("sparseprefill:") and one.name.endswith("_total")]
    found: dict[str, float] = {}
    for one in ours:  # whose they are is left out: engines of this process have one name and one worker
        labels = {
            name: value
            for name, value in one.labels.items()
            if name not in ("model_name", "method", "worker", "profile")
        }
        key = f"{one.name}{sorted(labels.items())}"
        found[key] = found.get(key, 0.0) + one.value
    return found


def pretend_cuda() -> None:
    """Make vLLM's Triton backend run on CPU tensors, in Triton's interpreter. Leans on vLLM 0.32's insides."""
    import types
    from unittest import mock

    import torch
    import triton.backends

    from helpers.interpreter import quicken

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    from sparseprefill.adapters.serving import warm

    torch.cuda.get_device_capability = lambda *_, **__: (9, 0)
    torch.cuda.synchronize = lambda *_: None
    mock.patch.object(warm, "kernels", types.SimpleNamespace(serve_device=lambda _: True)).start()
    quicken()
    backends: Any = triton.backends.backends
    backends["cpu"] = types.SimpleNamespace(driver=Driver, compiler=None)
    from sparseprefill.adapters.vllm.plugin import CUDA_BACKEND, watch_requests
    from vllm import plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    plugins.plugins_loaded = True  # ours would register the CPU backend
    for member in (AttentionBackendEnum.CPU_ATTN, AttentionBackendEnum.CUSTOM):
        register_backend(member, CUDA_BACKEND)
    assert watch_requests() == []


def spare() -> None:
    """Leave out what vLLM does for each engine and need not do here; by half of an engine's time.

    It looks at a model's class in a process of its own, to keep CUDA out of this one. It walks over all modules to put
    C++ in the place of Triton's kernels, which stays. And it collects garbage among all that was ever imported.
    """
    from vllm.entrypoints.llm import LLM  # noqa: F401 - imports what is to be frozen
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    if hasattr(registry, "_run_in_subprocess"):
        registry._run_in_subprocess = lambda look: look()
    replace_kernels: Any = getattr(current_platform, "register_triton_kernel_overrides", None)
    if replace_kernels is not None:
        type(current_platform).register_triton_kernel_overrides = staticmethod(functools.cache(replace_kernels))
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None


def stand_in_for_torchvision() -> None:
    """Let modules of vLLM and transformers import that name it. Its wheel needs CUDA; nothing here calls it."""
    import types
    from importlib.machinery import ModuleSpec

    from transformers.utils.import_utils import is_torchvision_available

    if is_torchvision_available():  # remembered: image processors stay with PIL
        return

    class Absent(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

    for name in ("torchvision", *(f"torchvision.{part}" for part in ("transforms", "transforms.v2", "io"))):
        module = sys.modules[name] = Absent(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []


def main() -> None:
    asked, answered = sys.argv[1:3]
    with open(asked, encoding="utf-8") as file:
        jobs = json.load(file)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if "cuda" in sys.argv[3:]:
        pretend_cuda()
    if "torchvision" in sys.argv[3:]:
        stand_in_for_torchvision()
    spare()  # imports vLLM, which is told of a device before that
    sp.default_registry().register(diary, "diary")
    answers = [tried(job) for job in jobs]
    with open(answered, "w", encoding="utf-8") as file:
        json.dump(answers, file)


if __name__ == "__main__":
    main()
