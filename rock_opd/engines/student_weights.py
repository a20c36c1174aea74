"""A student's tensors by name, and whole: put together bucket by bucket where ZeRO stage 3 has cut
them. Knows a model and a stage, no optimizer and no files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor


def named_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters (a shared one once) and the buffers that belong to a checkpoint."""
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix=prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                tensors[name] = buffer
    return tensors


def bucket_plan(model: torch.nn.Module, max_bytes: int) -> list[list[str]]:
    """Names bucket by bucket, by full shape: a shard on one rank says nothing of it. A bucket holds
    at most ``max_bytes``, or a single larger tensor."""
    plan: list[list[str]] = []
    filled = max_bytes + 1
    for name, tensor in named_tensors(model).items():
        size = getattr(tensor, "ds_numel", tensor.numel()) * tensor.element_size()
        if filled + size > max_bytes:
            plan.append([])
            filled = 0
        plan[-1].append(name)
        filled += size
    return plan


def gathered(model: torch.nn.Module, max_bytes: int, *, stage: int) -> Iterator[dict[str, Tensor]]:
    """Full tensors by name, bucket by bucket, on every rank; collective at stage 3. They may be the
    weights themselves, and are valid until the next bucket is asked for."""
    import deepspeed

    named = named_tensors(model)
    for names in bucket_plan(model, max_bytes):
        tensors = {name: named[name] for name in names}
        whole = (
            deepspeed.zero.GatheredParameters(list(tensors.values()))
            if stage == 3
            else nullcontext()
        )
        with whole:
            yield {name: tensor.detach() for name, tensor in tensors.items()}
