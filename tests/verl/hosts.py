"""verl's own training worker and FSDP2 engine on CPU, and a small batch, for what we plug in."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from tensordict import TensorDict
from verl.protocol import DataProtoFuture
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.config import CheckpointConfig
from verl.trainer.distillation.losses import distillation_ppo_loss
from verl.utils import tensordict_utils as tu
from verl.utils.metric import reduce_metrics
from verl.workers.config import (
    ActorConfig,
    DistillationConfig,
    DistillationLossConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker

from rock_opd.integrations.verl.losses import weight_fields

VOCAB, TOP_K = 1024, 8
PROMPT_LENS, RESPONSE_LENS = (3, 5, 4, 2), (6, 4, 7, 5)
MICRO_BATCH = 2
LIMIT_S = 120


class CpuTrainingWorker(TrainingWorker):
    """verl 0.9 would ask torch for a process group of cpu twice and fail; it takes one that is
    there. Can go once ``initialize_global_process_group_ray`` knows a CPU platform."""

    def __init__(self, config: TrainingWorkerConfig) -> None:
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group(
                "gloo",
                rank=int(os.environ.get("RANK", 0)),
                world_size=int(os.environ.get("WORLD_SIZE", 1)),
                timeout=timedelta(seconds=LIMIT_S),
            )
        torch.set_num_threads(1)
        super().__init__(config)


def fsdp_worker_config(
    model: Path | str, *, micro_batch: int = MICRO_BATCH
) -> TrainingWorkerConfig:
    """verl's FSDP2 in float32 from end to end, so that equal means equal."""
    return TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(
            path=str(model),
            use_remove_padding=False,
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "eager"},
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            mixed_precision={"param_dtype": "fp32"},
            dtype="float32",
            use_torch_compile=False,
            use_remove_padding=False,
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=micro_batch,
            infer_micro_batch_size_per_gpu=micro_batch,
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-5, total_training_steps=10, clip_grad=1.0),
        checkpoint_config=CheckpointConfig(),
    )


@contextmanager
def worker_here(config: TrainingWorkerConfig) -> Iterator[CpuTrainingWorker]:
    """A training worker in this process, the only rank."""
    env = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # asked for, not used
    before = {key: os.environ.get(key) for key in env}
    os.environ.update(env)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        yield CpuTrainingWorker(config)
    finally:
        torch.distributed.destroy_process_group()
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})


def worker_group(config: TrainingWorkerConfig, world_size: int, *, name: str) -> RayWorkerGroup:
    """``world_size`` processes, each a rank, under verl's single controller."""
    return RayWorkerGroup(
        resource_pool=RayResourcePool(
            [world_size], use_gpu=False, name_prefix=name, max_colocate_count=1
        ),
        ray_cls_with_init=RayClassWithInitArgs(ray.remote(CpuTrainingWorker), config=config),
        name_prefix=name,
    )


def loss_fn(loss_mode: str, *, strategy: str = "fsdp", agg: str = "token-mean", **loss: Any):
    """verl's distillation loss under a loss_mode, supervised and without clamps unless told."""
    settings: dict[str, Any] = {
        "use_task_rewards": False,
        "use_policy_gradient": False,
        "loss_max_clamp": None,
        "log_prob_min_clamp": None,
        "topk": TOP_K,
    }
    return partial(
        distillation_ppo_loss,
        config=ActorConfig(
            strategy=strategy,
            rollout_n=1,
            use_dynamic_bsz=True,
            loss_agg_mode=agg,
            use_torch_compile=False,
        ),
        distillation_config=DistillationConfig(
            distillation_loss=DistillationLossConfig(loss_mode=loss_mode, **{**settings, **loss})
        ),
    )


def make_batch(*, topk: bool = False, seed: int = 0) -> TensorDict:
    """Four sequences as verl's v1 trainers store them: jagged, teacher rows over the whole
    sequence, the last one, which predicts nothing, zero."""
    generator = torch.Generator().manual_seed(seed)
    columns: dict[str, list[torch.Tensor]] = {}

    def add(**row: torch.Tensor) -> None:
        for key, value in row.items():
            columns.setdefault(key, []).append(value)

    for prompt_len, response_len in zip(PROMPT_LENS, RESPONSE_LENS, strict=True):
        num = prompt_len + response_len
        ids = torch.randint(3, VOCAB, (num,), generator=generator)
        teacher = torch.log_softmax(2 * torch.randn(num, VOCAB, generator=generator), -1)
        if topk:
            logprobs, teacher_ids = teacher.topk(TOP_K)
        else:
            teacher_ids = ids.roll(-1)[:, None]
            logprobs = teacher.gather(1, teacher_ids)
        teacher_ids[-1], logprobs[-1] = 0, 0
        mask = torch.ones(response_len, dtype=torch.int64)
        mask[response_len // 2] = 0  # a tool's turn
        add(
            prompts=ids[:prompt_len],
            responses=ids[prompt_len:],
            input_ids=ids,
            position_ids=torch.arange(num),
            response_mask=mask,
            loss_mask=mask,
            teacher_ids=teacher_ids.to(torch.int32),
            teacher_logprobs=logprobs,
        )
    nested = {
        key: torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        for key, rows in columns.items()
    }
    batch = tu.get_tensordict(nested)
    tu.assign_non_tensor(batch, **batch_info(topk=topk))
    return batch


def batch_info(*, topk: bool) -> dict[str, Any]:
    """What verl's trainers say beside the tensors."""
    num = len(PROMPT_LENS)
    return {
        "global_batch_size": num,
        "mini_batch_size": num,
        "epochs": 1,
        "seed": 0,
        "dataloader_kwargs": {"shuffle": False},
        "temperature": 1.0,
        "calculate_entropy": False,
        "distillation_use_topk": topk,
        "distillation_only": topk,
    }


def weighted_batch(kind: str, *, normalizer: str = "all", topk: bool = False) -> TensorDict:
    """``make_batch`` with ``token_weights(kind)``, under freeze mask 3."""
    batch = make_batch(topk=topk)
    batch.update(
        weight_fields(
            token_weights(kind), batch["response_mask"], normalizer=normalizer, mask_version=3
        )
    )
    return batch


def token_weights(kind: str) -> list[np.ndarray]:
    """``ones``, ``half`` (every other response token) or ``zeros``, one array per sequence."""
    make = {
        "ones": np.ones,
        "half": lambda num: (np.arange(num) % 2).astype(float),
        "zeros": np.zeros,
    }[kind]
    return [make(num) for num in RESPONSE_LENS]


def update(host: Any, loss: Any, batch: Any, *, steps: int = 1) -> dict[str, float]:
    """Fresh weights, then updates on the batch; the metrics of the last one as a trainer logs
    them, less what measures time and memory.

    Args:
        host: a ``CpuTrainingWorker`` of this process, or a worker group.
        batch: a TensorDict, or the ``KVBatchMeta`` of one in TransferQueue.
    """
    host.reset()
    host.set_loss_fn(loss)
    for _ in range(steps):
        output = host.train_mini_batch(copy.copy(batch))
        if isinstance(output, DataProtoFuture):
            output = output.get()
    metrics = reduce_metrics(dict(tu.get(output, "metrics")))
    return {k: v for k, v in metrics.items() if k != "mfu" and not k.startswith("perf/")}
