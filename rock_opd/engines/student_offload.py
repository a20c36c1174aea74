"""A training student leaves its GPU and comes back, for roles that share one.

What DeepSpeed 0.19.8 moves by itself, and what it leaves behind, ends here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def leave_device(engine: Any, stage: int, *, on_host: bool) -> None:
    """Moves weights, optimizer and gradients to host memory.

    Args:
        engine: DeepSpeed's, with an optimizer that has ``offload_states``.
        on_host: the optimizer lives there anyway (ZeRO-Offload).
    """
    for tensor in _optimizer_tensors(engine, stage, on_host):
        tensor.data = tensor.data.to("cpu")
    engine.offload_states(include=_movable(stage, on_host), pin_memory=False)


def return_to_device(engine: Any, stage: int, device: torch.device, *, on_host: bool) -> None:
    """Brings back what ``leave_device`` moved."""
    engine.reload_states()
    for tensor in _optimizer_tensors(engine, stage, on_host):
        tensor.data = tensor.data.to(device)


def _movable(stage: int, on_host: bool) -> list[Any]:
    """What DeepSpeed moves. At stage 3 it moves optimizer states for its own FusedAdam only, so
    those are moved by ``_optimizer_tensors``."""
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State

    parts = [State.lp_params]
    if not on_host:  # else these live on the host, and reload would fetch them
        parts.append(State.lp_grads)
    if stage == 3:
        parts.append(State.contiguous_grad_buffer)
    elif not on_host:
        parts.append(State.hp_params)
    return parts


def _optimizer_tensors(engine: Any, stage: int, on_host: bool) -> list[Tensor]:
    """Moments, and at stage 3 the float32 weights: one flat shard each."""
    if on_host:
        return []
    optimizer = engine.optimizer
    states = [
        s[key] for s in optimizer.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")
    ]
    return states + (optimizer.fp32_partitioned_groups_flat if stage == 3 else [])
