"""What stands in verl's ``global_step_N/actor`` when the DeepSpeed engine wrote it.

``deepspeed/`` has weights and moments of all ranks (``engines/student_state``), ``extra/`` the
schedule and each rank's random state, ``huggingface/`` config and tokenizer, with the weights when
``save_contents`` has ``hf_model``. ``complete.json``, written last, seals the first two: what was
cut or changed afterwards is not loaded. Every file but ``extra/*.pt`` is safetensors or text, and
those are read as plain values only.
"""

from __future__ import annotations

import copy
import io
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from rock_opd.checkpoint import COMPLETE, flaw, seal
from rock_opd.durable import FileFacts, file_facts, storing, sync
from rock_opd.engines.deepspeed_core import SHARD_BYTES, DeepSpeedCore
from rock_opd.engines.model_folder import ModelFolder, host_copies
from rock_opd.engines.student_state import DiskWrites
from rock_opd.engines.student_weights import bucket_plan, gathered
from rock_opd.errors import DataError, RockOPDError

STATE, EXTRA, HUGGINGFACE = "deepspeed", "extra", "huggingface"


def together(work: Callable[[], None], verb: str) -> None:
    """Runs it on every rank, and raises on every rank when it fails on one: the others would
    wait for it.

    Raises:
        RockOPDError: what it raised here, or a ``DataError`` that names the rank it failed on.
    """
    error: Exception | None = None
    try:
        work()
    except (RockOPDError, OSError) as raised:
        error = raised
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, None if error is None else str(error))
    if error is not None:
        raise error
    for rank, other in enumerate(errors):
        if other is not None:
            raise DataError(f"verl checkpoint: rank {rank} could not {verb} it: {other}")


def clear(folder: Path) -> None:
    """Makes the folder ready for a save: nothing is left of one that another number of ranks
    began. One rank calls it."""
    (folder / COMPLETE).unlink(missing_ok=True)
    for name in (STATE, EXTRA):
        shutil.rmtree(folder / name, ignore_errors=True)
    with storing("verl checkpoint", folder):
        (folder / EXTRA).mkdir(parents=True, exist_ok=True)


def save_training(
    folder: Path, core: DeepSpeedCore, disk: DiskWrites, schedule: Any, step: int
) -> None:
    """What a run goes on from, each rank its part. Collective.

    Args:
        disk: what ``core`` writes with.
        schedule: verl's learning-rate scheduler.

    Raises:
        StorageError: on the rank that could not write; ``DataError`` on the others.
    """
    own: dict[str, FileFacts] = {}

    def write() -> None:
        core.save_state(folder / STATE)
        parts = disk.written(folder / STATE) or {}
        own.update({f"{STATE}/{name}": facts for name, facts in parts.items()})
        extra = f"{EXTRA}/rank_{dist.get_rank():05d}.pt"
        buffer = io.BytesIO()
        torch.save({"lr_scheduler": schedule.state_dict(), "random": _random_state()}, buffer)
        with storing("verl checkpoint", folder):
            (folder / extra).write_bytes(buffer.getvalue())
            sync(folder / extra)
            own[extra] = file_facts(folder / extra)

    together(write, "write")
    files: list[dict[str, FileFacts]] = [{}] * dist.get_world_size()
    dist.all_gather_object(files, own)

    def finish() -> None:
        with storing("verl checkpoint", folder):
            seal(folder, step, {name: facts for part in files for name, facts in part.items()})

    together(finish if dist.get_rank() == 0 else lambda: None, "write")


def load_training(folder: Path, core: DeepSpeedCore, schedule: Any) -> None:
    """Brings back what ``save_training`` wrote, on any number of ranks; the random state only on
    the same number. Collective.

    Raises:
        DataError: nothing there, not whole, changed, another model's, or saved under another dtype.
    """
    together((lambda: _require_whole(folder)) if dist.get_rank() == 0 else lambda: None, "read")
    core.load_state(folder / STATE)
    extras = sorted((folder / EXTRA).glob("rank_*.pt"))
    same_ranks = len(extras) == dist.get_world_size()
    extra = torch.load(extras[dist.get_rank() if same_ranks else 0], weights_only=True)
    schedule.load_state_dict(extra["lr_scheduler"])
    if same_ranks:
        _set_random_state(extra["random"])


def _require_whole(folder: Path) -> None:
    if not (folder / COMPLETE).is_file():
        raise DataError(
            f"verl checkpoint {folder}: it was not written to its end; take another one"
        )
    if (why := flaw(folder)) is not None:
        raise DataError(f"verl checkpoint {folder}: {why}; take another one")


def save_model_folder(
    path: Path, model: nn.Module, model_config: Any, *, stage: int, with_weights: bool
) -> None:
    """Config, generation config and tokenizer, as verl's other engines leave them; and the
    weights, one shard at a time. Collective.

    Args:
        model_config: verl's ``HFModelConfig``.

    Raises:
        StorageError: on the rank that writes; ``DataError`` on the others.
    """
    rank = dist.get_rank()
    num_shards = len(bucket_plan(model, SHARD_BYTES)) if with_weights else 1
    folder = ModelFolder(path, num_shards=num_shards)
    if with_weights:
        for full in gathered(model, SHARD_BYTES, stage=stage):
            if rank == 0:
                folder.write(host_copies(list(revert_weight_conversion(model, full).items())))

    def finish() -> None:
        with storing("model", path):
            path.mkdir(parents=True, exist_ok=True)
        config = copy.deepcopy(model_config.hf_config)
        config.dtype = next(model.parameters()).dtype
        config.architectures = [type(model).__name__]
        folder.finish(config, model_config.local_path)
        processor = model_config.get_processor()
        if processor is not None:
            processor.save_pretrained(path)

    together(finish if rank == 0 else lambda: None, "write")


def _random_state() -> dict[str, Any]:
    """Of this process: what dropout and losses may draw from; tensors and plain values."""
    kind, keys, *position = np.random.get_state()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), *position],
        "python": random.getstate(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    kind, keys, *position = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *position))
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
