"""One DeepSpeed rank around a torch module, for whoever hosts it: our own student, or verl.

Every quirk of training with DeepSpeed (read and measured in 0.19.8) ends here:

- A step has any number of micro-batches and its gradient is the plain sum over micro-batches and
  ranks, so DeepSpeed's own divisions are taken out: ``gradient_accumulation_steps`` is 1 and the
  accumulation boundary is set by hand; ranks are summed (``gradient_allreduce_op``), or, at stage
  3, where only a mean exists, the loss is multiplied by the number of ranks first.
- In bf16 the gradients accumulate and travel in float32. Stage 0 cannot do that and runs as
  stage 1, which keeps the same numbers with less memory.
- The learning rate is set before each update; DeepSpeed has no scheduler to save.
- A step whose gradient norm is not finite changes nothing, on any rank. A loss that is not finite
  makes a gradient NaN, and so the norm that all ranks share: no rank need ask the others.
- Groups that DeepSpeed opens on its own wait half an hour for a dead peer; ``limit_groups`` puts
  the time limit on every group.

It knows no loss, no batch and no model but by its parameters' names. CPU (gloo) and GPU (NCCL) take
the same path.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from rock_opd.engines.student_offload import ALL_PARTS, leave_device, return_to_device
from rock_opd.engines.student_state import (
    DiskWrites,
    Part,
    StateReader,
    held_parts,
    host_shards,
    own_share,
    set_steps,
    spread_weights,
    write_state,
)
from rock_opd.engines.student_weights import named_tensors
from rock_opd.errors import DataError, ModelError

SHARD_BYTES = 4 << 30
"""Size of one safetensors file, and the most that is gathered at once for it."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How the module is cut over ranks and updated: AdamW, its own copy in float32."""

    zero_stage: int
    """0 to 3."""
    dtype: torch.dtype
    """float32 or bfloat16: of weights, forward and backward."""
    offload_optimizer: bool
    """Weights in float32, moments and update live in host memory (ZeRO-Offload); stages 1 to 3."""
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float
    """Clipping by the global norm; 0 turns it off."""


def effective_stage(zero_stage: int, dtype: torch.dtype) -> int:
    """The stage that runs: 0 keeps no float32 copy, which bf16 needs."""
    return max(zero_stage, 1) if dtype == torch.bfloat16 else zero_stage


def open_group(device: torch.device, timeout_s: float | None = None) -> None:
    """Makes DeepSpeed use this device and joins its process group, or the one that torch has
    already, by the environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT).

    Args:
        timeout_s: limit of every collective of a group opened here; None: torch's own.
    """
    os.environ["DS_ACCELERATOR"] = device.type
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        # Else DeepSpeed 0.19.8 compiles a shared-memory all-reduce with g++, for up to 100 s.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    limit = {} if timeout_s is None else {"timeout": timedelta(seconds=timeout_s)}
    deepspeed.init_distributed(
        "nccl" if device.type == "cuda" else "gloo",
        auto_mpi_discovery=False,
        verbose=False,
        **limit,
    )


def open_groups() -> set[Any]:
    """The process groups there are."""
    return set(distributed_c10d._world.pg_map)


def first_limit_s(device: torch.device) -> float:
    """What the process's first group waits at most on this device."""
    return dist.group.WORLD._get_backend(device).options._timeout.total_seconds()


def limit_groups(timeout_s: float, *, but: Collection[Any] = ()) -> None:
    """Every group of the process, not only the first, gets the limit; those of ``but`` keep theirs.

    DeepSpeed 0.19.8 opens its data-parallel group without one, and torch 2.13 then takes its
    own default of 30 minutes. Can go when ``deepspeed.utils.groups`` passes a limit on.
    """
    for group in open_groups() - set(but):
        distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


class DeepSpeedCore:
    """One rank. All ranks call every method together, in the same order; weights only move in
    ``update`` and ``load_state``."""

    def __init__(
        self,
        module: nn.Module,
        model: nn.Module,
        settings: TrainSettings,
        *,
        device: torch.device,
        rank: int,
        world_size: int,
        disk: DiskWrites,
    ) -> None:
        """Wraps ``module``; ``open_group`` comes before.

        Args:
            module: what runs forward; its trainable parameters are those of ``model``.
            model: the same, or a part of it: whose parameter names states and weights go by.
            disk: writes the states.
        """
        self.stage = effective_stage(settings.zero_stage, settings.dtype)
        self.num_updates_done = 0
        """Updates that were made: skipped steps do not count."""
        self._settings, self._device = settings, device
        self._rank, self._world_size = rank, world_size
        self._module, self._model, self._disk = module, model, disk
        self._open_batches, self._closed, self._spoiled = 0, False, False
        self._away: frozenset[str] = frozenset()
        self._poison: Tensor | None = None
        self._listen()
        self.engine = self._wrap()
        """DeepSpeed's: call it for a forward."""

    def _wrap(self) -> Any:
        import deepspeed

        parameters = [p for p in self._module.parameters() if p.requires_grad]
        num_elements = sum(p.numel() for p in parameters)
        on_cuda, settings = self._device.type == "cuda", self._settings
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": settings.max_grad_norm,
            "steps_per_print": 10**9,
            "zero_force_ds_cpu_optimizer": False,
            "communication_data_type": "fp32",
            "zero_optimization": {
                "stage": self.stage,
                "overlap_comm": on_cuda and self.stage == 3,
                "reduce_bucket_size": min(num_elements, 500_000_000),
                # Smaller tensors stay whole on every rank; of a small model, few are.
                "stage3_param_persistence_threshold": min(num_elements // 1000, 100_000),
            },
        }
        if settings.dtype == torch.bfloat16:
            config["bf16"] = {"enabled": True}
            config["data_types"] = {"grad_accum_dtype": "fp32"}
        if self.stage < 3:
            config["gradient_allreduce_op"] = "sum"
        if settings.offload_optimizer:
            config["zero_optimization"]["offload_optimizer"] = {
                "device": "cpu",
                "pin_memory": on_cuda,
            }
        engine, *_ = deepspeed.initialize(
            model=self._module,
            # torch's own fused AdamW: DeepSpeed's would have to be compiled (nvcc, or g++ on CPU).
            optimizer=torch.optim.AdamW(
                parameters,
                lr=settings.lr,
                betas=tuple(settings.betas),
                eps=settings.eps,
                weight_decay=settings.weight_decay,
                fused=True,
            ),
            config=config,
            dist_init_required=False,
        )
        return engine

    def _listen(self) -> None:
        """Lets the first gradient of each backward go through ``_spoil``: of a vector, where there
        is one, since it is small (before DeepSpeed lays stage 3's weights flat)."""
        parameters = [p for p in self._module.parameters() if p.requires_grad]
        for parameter in [p for p in parameters if p.ndim < 2] or parameters:
            parameter.register_hook(self._spoil)

    def _spoil(self, grad: Tensor) -> Tensor | None:
        """NaN where the loss was not finite, else the gradient bit for bit."""
        poison, self._poison = self._poison, None
        return None if poison is None else grad * poison

    # ---------------------------------------------------------------- one update

    def set_learning_rate(self, lr: float) -> None:
        """Of the next update."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr

    def begin_micro_batch(self, *, last: bool) -> None:
        """Before each forward of a step.

        Args:
            last: its backward brings the ranks' gradients together.

        Raises:
            ModelError: the step before broke off half-way, or its update is still to come.
        """
        if self._closed:
            raise ModelError(
                "DeepSpeed: the last micro-batch of the step was read already; update comes next"
            )
        if self._spoiled:
            raise ModelError(
                "DeepSpeed: the step before broke off between its micro-batches, and their "
                "gradients would be in this one; build the engine again and load its state"
            )
        self.engine.set_gradient_accumulation_boundary(last)

    def backward(self, share: Tensor) -> None:
        """Adds a gradient.

        Args:
            share: float32 scalar, this micro-batch's and rank's part of the loss: the step's
                gradient is that of the sum of the parts over micro-batches and ranks. One that is
                not finite makes the gradient NaN, whatever it was.
        """
        self._poison = torch.where(share.detach().isfinite(), 1.0, torch.nan)
        self._open_batches += 1
        self._closed = self.engine.is_gradient_accumulation_boundary()
        self.engine.backward(share * (self._world_size if self.stage == 3 else 1))

    def update(self) -> float | None:
        """Steps; the norm before clipping, or None when it or a loss is not finite: nothing moved.

        Stages 1 to 3 decide by the norm that all ranks share, before they touch a weight, and clear
        the gradients themselves. Stage 0 is torch's optimizer, which would step on NaN.
        """
        self._open_batches, self._closed = 0, False
        if self.stage == 0:
            grads = [p.grad for p in self._module.parameters() if p.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(grads))
            if not np.isfinite(norm):
                self.engine.zero_grad()
                return None
            self.engine.step()
        else:
            self.engine.step()
            if not self.engine.was_step_applied():
                return None
            norm = float(self.engine.get_global_grad_norm())
        self.num_updates_done += 1
        return norm

    def drop_gradients(self) -> None:
        """Forgets a step that broke off. After ``update`` there is nothing to forget; between
        micro-batches only stage 0 can, and the others refuse every later step."""
        if not self._open_batches:
            return
        self._open_batches, self._closed = 0, False
        if self.stage == 0:
            self.engine.zero_grad()
        else:
            # DeepSpeed 0.19.8 keeps sums of earlier micro-batches where zero_grad does not reach.
            self._spoiled = True

    # ---------------------------------------------------------------- sharing a GPU

    def leave_device(self, parts: frozenset[str] = ALL_PARTS) -> None:
        """Moves parts (see ``student_offload``) to host memory; what is there already stays.

        Raises:
            ModelError: this ZeRO stage and dtype cannot leave the GPU.
        """
        if not hasattr(self.engine.optimizer, "offload_states"):
            raise ModelError(
                f"student: ZeRO stage {self.stage} in {self._shape()['dtype']} cannot leave "
                "the GPU; sharing GPUs (placement.colocate) needs student.zero_stage 2 or 3"
            )
        if parts := parts - self._away:
            leave_device(
                self.engine, self.stage, on_host=self._settings.offload_optimizer, parts=parts
            )
            self._away |= parts

    def return_to_device(self, parts: frozenset[str] = ALL_PARTS) -> None:
        """Brings back those of the parts that left."""
        if parts := parts & self._away:
            return_to_device(
                self.engine,
                self.stage,
                self._device,
                on_host=self._settings.offload_optimizer,
                parts=parts,
            )
            self._away -= parts

    @property
    def away(self) -> frozenset[str]:
        """Parts in host memory now."""
        return self._away

    # ---------------------------------------------------------------- resuming

    def save_state(self, path: Path, *, background: bool = False) -> None:
        """Writes this rank's part of everything to go on from (see ``student_state``). All ranks
        call it; each writes its own files, from its own memory.

        Args:
            background: copy it to host memory (12 bytes a parameter over all ranks) and return;
                ``disk.written`` tells when the files are there.

        Raises:
            StorageError: they could not be written (from ``disk.written``, with ``background``).
        """
        shards = host_shards(
            own_share(self.parts(), stage=self.stage, rank=self._rank, world_size=self._world_size),
            self._buffers() if self._rank == 0 else {},
            max_bytes=SHARD_BYTES,
        )
        facts = {"num_updates": self.num_updates_done, **self._shape()}
        self._disk.submit(
            path,
            write_state,
            path,
            self._rank,
            list(shards) if background else shards,
            facts=facts,
            background=background,
        )

    def load_state(self, path: Path) -> None:
        """Goes on from ``save_state``, of any number of ranks and any ZeRO stage: weights and
        moments are the very same, and under the same number and stage every later step is too.

        Raises:
            DataError: nothing there, not whole, another model's, or saved under another dtype.
        """
        saved = StateReader(path)
        if saved.facts["dtype"] != self._shape()["dtype"]:
            raise DataError(
                f"student state {path}: saved by a student in {saved.facts['dtype']}, this one "
                f"trains in {self._shape()['dtype']}; resume with the same student.dtype"
            )
        saved.check(
            {name: getattr(p, "ds_numel", p.numel()) for name, p in self._model.named_parameters()}
        )
        with torch.no_grad():
            for part in self.parts():
                for kind, tensor in part.tensors.items():
                    tensor.copy_(saved.read(kind, part.name, part.start, part.num))
            buffers = self._buffers()
            for name, tensor in saved.buffers().items():
                buffers[name].copy_(tensor)
        self.num_updates_done = saved.facts["num_updates"]
        set_steps(self.engine, stage=self.stage, num_updates=self.num_updates_done)
        spread_weights(self.engine, stage=self.stage)

    def parts(self) -> list[Part]:
        """What this rank holds of weights and moments, live."""
        return held_parts(self.engine, self._model, stage=self.stage, rank=self._rank)

    def _buffers(self) -> dict[str, Tensor]:
        parameters = dict(self._model.named_parameters())
        return {n: t for n, t in named_tensors(self._model).items() if n not in parameters}

    def _shape(self) -> dict[str, Any]:
        return {
            "num_ranks": self._world_size,
            "zero_stage": self.stage,
            "dtype": str(self._settings.dtype).removeprefix("torch."),
        }
