"""A training student leaves its GPU and comes back, for roles that share one.

What DeepSpeed 0.19.8 moves by itself, and what it leaves behind, ends here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
ALL_PARTS = frozenset((WEIGHTS, GRADIENTS, OPTIMIZER))
"""What can move by itself: weights of forward and backward; gradients; float32 weights and moments
with the update."""


def leave_device(
    engine: Any, stage: int, *, on_host: bool, parts: frozenset[str] = ALL_PARTS
) -> None:
    """Moves weights, gradients and optimizer, or some of them, to host memory.

    Args:
        engine: DeepSpeed's, with an optimizer that has ``offload_states``.
        on_host: the optimizer lives there anyway (ZeRO-Offload).
    """
    for tensor in _optimizer_tensors(engine, stage, on_host, parts):
        tensor.data = tensor.data.to("cpu")
    engine.offload_states(include=_movable(stage, on_host, parts), pin_memory=False)


def return_to_device(
    engine: Any,
    stage: int,
    device: torch.device,
    *,
    on_host: bool,
    parts: frozenset[str] = ALL_PARTS,
) -> None:
    """Brings back what ``leave_device`` moved, or some of it."""
    away = engine.optimizer.offloaded_states
    # reload_states brings back all that is listed here.
    stay = away - set(_movable(stage, on_host, parts))
    away -= stay
    engine.reload_states()
    away |= stay
    for tensor in _optimizer_tensors(engine, stage, on_host, parts):
        tensor.data = tensor.data.to(device)


def _movable(stage: int, on_host: bool, parts: frozenset[str]) -> list[Any]:
    """What DeepSpeed moves. At stage 3 it moves optimizer states for its own FusedAdam only, so
    those are moved by ``_optimizer_tensors``."""
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State

    states = []
    if WEIGHTS in parts:
        states.append(State.lp_params)
    if GRADIENTS in parts:
        if not on_host:  # else these live on the host, and reload would fetch them
            states.append(State.lp_grads)
        if stage == 3:
            states.append(State.contiguous_grad_buffer)
    if OPTIMIZER in parts and stage < 3 and not on_host:
        states.append(State.hp_params)
    return states


def _optimizer_tensors(
    engine: Any, stage: int, on_host: bool, parts: frozenset[str]
) -> list[Tensor]:
    """Moments, and at stage 3 the float32 weights: one flat shard each."""
    if on_host or OPTIMIZER not in parts:
        return []
    optimizer = engine.optimizer
    states = [
        s[key] for s in optimizer.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")
    ]
    return states + (optimizer.fp32_partitioned_groups_flat if stage == 3 else [])
