"""What vLLM needs from both engines: its process environment, its start, its plain refusals.

Nothing here imports vLLM when the module is loaded: ``prepare_environment`` has to run first.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from rock_opd.errors import ConfigError, ModelError
from rock_opd.models import is_trusted, load_config

if TYPE_CHECKING:
    from vllm import LLM

CPU_KV_CACHE_BYTES = 256 << 20
"""KV cache of one engine on CPU. Left to itself vLLM takes a share of the machine's memory there,
and refuses to start when another engine already holds it."""

_REQUIRED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
# The engine core runs in this process: arrays reach the worker by reference, and the worker's
# extension sees the very objects it is handed.

_REQUIRED_ON_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # actors share cores; binding would stack them on core 0
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_WAIT_POLICY": "passive",  # spinning threads starve the other roles of the machine
    "GOMP_SPINCOUNT": "0",
}


def prepare_environment(device: str, threads: int) -> None:
    """Sets what vLLM and OpenMP read when they are imported. Call it before anything imports vLLM.

    Args:
        device: cpu or cuda.
        threads: OpenMP threads of this process on CPU; not used on CUDA.

    Raises:
        RuntimeError: vLLM was imported before, so that the settings would come too late.
    """
    wanted = dict(_REQUIRED)
    if device == "cpu":
        wanted |= _REQUIRED_ON_CPU | {"OMP_NUM_THREADS": str(threads)}
    if "vllm" in sys.modules and any(os.environ.get(k) != v for k, v in wanted.items()):
        raise RuntimeError("prepare_environment must run before the first import of vllm")
    os.environ.update(wanted)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # On CPU every start warns of missing preloaded allocators and of ignored thread counts.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR" if device == "cpu" else "WARNING")
    if device == "cpu":
        import torch

        torch.set_num_threads(threads)  # OMP_NUM_THREADS comes too late once torch is loaded


def start_llm(
    model: str,
    *,
    role: str,
    dtype: str,
    device: str,
    num_real_ids: int,
    max_model_len: int,
    max_num_seqs: int,
    tensor_parallel: int,
    kv_cache_bytes: int | None,
    gpu_memory_utilization: float,
    can_sleep: bool,
    **more: Any,
) -> LLM:
    """Starts vLLM for token ids, eager on CPU, with CUDA graphs on GPU.

    One engine per process: vLLM keeps global state, and a second one in the same process fails.

    Args:
        role: names the recipe's section in messages: rollout or teacher.
        more: further arguments of ``vllm.LLM``.

    Raises:
        ConfigError: a length, a parallelism or a device that this model or this vLLM cannot do.
        ModelError: the model has fewer ids than the tokenizer.
    """
    config = load_config(model)
    if config.vocab_size < num_real_ids:
        raise ModelError(
            f"{role} model {model}: {config.vocab_size} vocabulary rows for {num_real_ids} token "
            "ids; the tokenizer belongs to another model"
        )
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and max_model_len > limit:
        raise ConfigError(
            f"{role} model {model} reads at most {limit} tokens, the recipe needs {max_model_len} "
            "(rollout.max_prompt_tokens + rollout.max_new_tokens, for a teacher also "
            "teacher.prefix_tokens and 1); lower them"
        )
    if device == "cpu" and tensor_parallel != 1:
        raise ConfigError(
            f"{role}.tensor_parallel splits a model over GPUs; on cpu it must be 1, "
            f"got {tensor_parallel}"
        )
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
        raise RuntimeError("prepare_environment was not called before the engine was built")

    from vllm import LLM
    from vllm.platforms import current_platform

    if current_platform.is_cpu() != (device == "cpu"):
        raise ConfigError(
            f"{role}: run.device={device}, but the installed vLLM is built for "
            f"{current_platform.device_type or 'another device'}; "
            "install the extra [cpu] or [gpu], never both"
        )
    if device == "cpu":
        more |= {"enforce_eager": True}
        kv_cache_bytes = kv_cache_bytes or CPU_KV_CACHE_BYTES
    return LLM(
        model=model,
        dtype=dtype,
        load_format="safetensors",  # pickles can run code
        trust_remote_code=is_trusted(model),
        # The pooling runner asks for a tokenizer even where only ids come in (vLLM 0.31).
        skip_tokenizer_init=more.get("runner") != "pooling",
        tensor_parallel_size=tensor_parallel,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        kv_cache_memory_bytes=kv_cache_bytes,
        gpu_memory_utilization=gpu_memory_utilization,
        enable_sleep_mode=can_sleep and device == "cuda",
        worker_extension_cls="rock_opd.engines.vllm_worker.WorkerExtension",
        **more,
    )
