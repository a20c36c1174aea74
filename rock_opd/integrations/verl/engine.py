"""verl's training engine on DeepSpeed: one rank of an actor, or of a reference model.

verl's side (micro-batches, packing, log-probabilities, entropy, the loss function's protocol) is
inherited from its FSDP engine, whose ``__init__`` is not run: nothing of FSDP is built. DeepSpeed's
side is ``engines/deepspeed_core``, the same that trains our own student.

verl's losses are made for an engine that averages gradients over ranks (each rank's loss is
multiplied by their number); here gradients are summed, so the loss is divided by it once, and the
gradient is that of the mean over the whole batch, for any number of ranks and micro-batches.

Refuses what it cannot do before it loads a model, see ``engine_config.refuse_unsupported``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion
from verl.utils import torch_functional
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine.utils import enable_full_determinism

from rock_opd.engines.causal_model import load_causal_model
from rock_opd.engines.deepspeed_core import (
    DeepSpeedCore,
    TrainSettings,
    first_limit_s,
    limit_groups,
    open_group,
    open_groups,
)
from rock_opd.engines.student_offload import ALL_PARTS, GRADIENTS, OPTIMIZER, WEIGHTS
from rock_opd.engines.student_state import DiskWrites
from rock_opd.engines.student_weights import gathered
from rock_opd.errors import ConfigError
from rock_opd.integrations.verl import plugin
from rock_opd.integrations.verl.engine_checkpoint import (
    HUGGINGFACE,
    clear,
    load_training,
    save_model_folder,
    save_training,
    together,
)
from rock_opd.integrations.verl.engine_config import (
    DeepSpeedEngineConfig,
    adam_epsilon,
    refuse_unsupported,
)
from rock_opd.integrations.verl.losses import with_rock_topk

logger = logging.getLogger(__name__)


def register() -> None:
    """Makes verl know the backend ``deepspeed``; a critic on it is refused by name."""
    for model_type in ("language_model", "value_model"):
        EngineRegistry.register(model_type, backend="deepspeed", device=["cuda", "cpu"])(
            DeepSpeedEngineWithLMHead
        )


class DeepSpeedEngineWithLMHead(FSDPEngineWithLMHead):
    """All ranks call every method together, in the same order."""

    def __init__(
        self,
        model_config: Any,
        engine_config: DeepSpeedEngineConfig,
        optimizer_config: Any,
        checkpoint_config: Any,
    ) -> None:
        """Checks the settings; ``initialize`` builds.

        Raises:
            ConfigError: a setting of verl that this engine cannot do, by its key.
        """
        BaseEngine.__init__(self)
        refuse_unsupported(model_config, checkpoint_config)
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        self._adam_epsilon = None if engine_config.forward_only else adam_epsilon(optimizer_config)
        self.mode = None
        self.rank = dist.get_rank()
        self._device = torch.device(
            "cpu" if get_device_name() == "cpu" else f"{get_device_name()}:{get_device_id()}"
        )
        self._dtype = engine_config.training_dtype
        self._core: DeepSpeedCore | None = None
        self._disk = DiskWrites()
        self._read_by_parents()
        if engine_config.full_determinism:
            enable_full_determinism(seed=engine_config.seed)

    def _read_by_parents(self) -> None:
        """What verl's inherited methods read of an FSDP engine."""
        config = self.engine_config
        self.use_remove_padding = self.model_config.use_remove_padding
        self.pad_to_length = config.pad_to_length
        self.pad_to_length_bucket = config.pad_to_length_bucket
        self.ulysses_device_mesh = self.ulysses_parallel_group = None
        self.ulysses_sequence_parallel_size, self.use_ulysses_sp = 1, False
        self._autocast_dtype = self._dtype  # log-probabilities of bf16 logits in float32
        entropy = (
            torch_functional.entropy_from_logits_with_chunking
            if config.entropy_from_logits_with_chunking
            else torch_functional.entropy_from_logits
        )
        self.compute_entropy_from_logits = (
            torch.compile(entropy, dynamic=True) if config.use_torch_compile else entropy
        )
        self.scaler = None if config.forward_only else _IntoDeepSpeed(self)

    # ---------------------------------------------------------------- building

    def initialize(self) -> None:
        """Loads the model; again: back to its first weights, with a new optimizer.

        Raises:
            ModelError: no such model, or weights missing in it.
        """
        self._core = self.module = self._hf_model = None  # the old one goes first
        open_group(self._device)
        config = self.model_config
        self._hf_model = load_causal_model(
            config.local_path,
            config.hf_config,
            dtype=self._dtype,
            trust_remote_code=config.trust_remote_code,
        )
        self.checkpoint_manager = BaseCheckpointManager(
            model=None, optimizer=None, checkpoint_config=self.checkpoint_config
        )
        if self.engine_config.forward_only:
            self._hf_model.requires_grad_(False)
            self.module = _Forward(self._hf_model, self._device.type).to(self._device)
        else:
            if config.enable_gradient_checkpointing:
                self._hf_model.gradient_checkpointing_enable({"use_reentrant": False})
            before = open_groups()
            self._core = self._wrap()
            # verl's groups keep verl's limits
            limit_groups(first_limit_s(self._device), but=before)
            self.module = self._core.engine
            # verl's own schedule, on an optimizer that has a learning rate and nothing else
            rate = torch.optim.SGD([torch.zeros(1)], lr=self.optimizer_config.lr)
            self.lr_scheduler = self._build_lr_scheduler(rate)
            rate.step()  # else the schedule warns that none came before its own step
        dist.barrier()
        self.to("cpu", **self._left_between_phases())

    def _wrap(self) -> DeepSpeedCore:
        optim = self.optimizer_config
        return DeepSpeedCore(
            self._hf_model,
            self._hf_model,
            TrainSettings(
                zero_stage=self.engine_config.zero_stage,
                dtype=self._dtype,
                offload_optimizer=self.engine_config.zero_offload,
                lr=optim.lr,
                betas=optim.betas,
                eps=self._adam_epsilon,
                weight_decay=optim.weight_decay,
                max_grad_norm=optim.clip_grad,
            ),
            device=self._device,
            rank=self.rank,
            world_size=dist.get_world_size(),
            disk=self._disk,
        )

    @property
    def _stage(self) -> int:
        return self._core.stage if self._core else 0

    # ---------------------------------------------------------------- training

    def train_mode(self, **kwargs: Any) -> _Mode:
        return _Mode(self, "train", **kwargs)

    def eval_mode(self, **kwargs: Any) -> _Mode:
        return _Mode(self, "eval", **kwargs)

    @contextmanager
    def _gradient_sync_context(self, *, is_last_micro_batch: bool) -> Iterator[None]:
        self._core.begin_micro_batch(last=is_last_micro_batch)
        yield

    def train_batch(self, data: Any, loss_function: Callable[..., Any]) -> Any:
        """verl's; ``update_skipped`` is 1 where a loss or gradient was not finite: none moved."""
        outputs = super().train_batch(data, loss_function)
        skipped = not np.isfinite(outputs["metrics"]["grad_norm"])
        outputs["metrics"]["update_skipped"] = [float(skipped)]
        return outputs

    def forward_step(
        self, micro_batch: Any, loss_function: Callable[..., Any] | None, forward_only: bool
    ) -> Any:
        """verl's, where the rows of a top-k loss follow the loss_mode."""
        return super().forward_step(micro_batch, with_rock_topk(loss_function), forward_only)

    def optimizer_zero_grad(self) -> None:
        """Forgets a step that broke off; an update leaves no gradient behind."""
        if self._core:
            self._core.drop_gradients()

    def optimizer_step(self) -> float:
        """Clips and updates; the norm before clipping, NaN when it or a loss is not finite: then no
        weight and no moment changes, on any rank."""
        self._core.set_learning_rate(self.lr_scheduler.get_last_lr()[0])
        norm = self._core.update()
        if norm is None:
            if self.rank == 0:
                logger.warning(
                    "update %d skipped on every rank: a loss or gradient is not finite",
                    self._core.num_updates_done + 1,
                )
            return float("nan")
        return norm

    # ---------------------------------------------------------------- places

    @property
    def is_param_offload_enabled(self) -> bool:
        return self.engine_config.param_offload

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return self.engine_config.optimizer_offload

    def _left_between_phases(self) -> dict[str, bool]:
        config = self.engine_config
        return {
            "model": config.param_offload,
            "optimizer": config.optimizer_offload,
            "grad": config.param_offload,
        }

    def to(
        self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """Moves the parts to host memory (``cpu``) or back; on CPU there is nothing to do.

        Raises:
            ModelError: this ZeRO stage and dtype cannot leave the GPU.
        """
        BaseEngine.to(self, device, model, optimizer, grad)  # checks; FSDP's moves FSDP modules
        if self._device.type != "cpu":
            self._move(device != "cpu", model=model, optimizer=optimizer, grad=grad)
            torch.cuda.empty_cache()  # what left is for the rollout's engine

    def _move(self, back: bool, *, model: bool, optimizer: bool, grad: bool) -> None:
        if self._core is None:
            if model:
                self.module.to(self._device if back else "cpu")
            return
        chosen = {WEIGHTS: model, OPTIMIZER: optimizer, GRADIENTS: grad}
        parts = frozenset(part for part in ALL_PARTS if chosen[part])
        if back:
            self._core.return_to_device(parts)
        elif parts:
            self._core.leave_device(parts)

    @contextmanager
    def _on_device(self, parts: frozenset[str]) -> Iterator[None]:
        """The parts that are away come back for a while."""
        if self._core is None:
            away = next(self.module.parameters()).device != self._device
            self.module.to(self._device)
            try:
                yield
            finally:
                if away:
                    self.module.to("cpu")
            return
        away = parts & self._core.away
        self._core.return_to_device(away)
        try:
            yield
        finally:
            if away:
                self._core.leave_device(away)

    # ---------------------------------------------------------------- weights out

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """The full weights under their checkpoint names, on every rank's device, in the training
        dtype; a tied weight comes once. All ranks iterate to the end together.

        Under stage 3 at most ``gather_bucket_bytes`` are whole at a time (or one larger tensor).
        Each is valid until the next is asked for, and may be the weight itself: not to be written.
        """
        return self._whole_weights(), None

    def _whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        with self._on_device(frozenset((WEIGHTS,))):
            for full in gathered(
                self._hf_model, self.engine_config.gather_bucket_bytes, stage=self._stage
            ):
                # transformers keeps some weights in another form than checkpoints (fused experts)
                yield from revert_weight_conversion(self._hf_model, full).items()

    def get_per_tensor_param_shard(self, **_: Any) -> Any:
        raise ConfigError(
            "verl, DeepSpeed engine: rollout.checkpoint_engine.backend=delta_sharded is not "
            "supported: it needs each rank's own part of each weight; use another backend"
        )

    get_per_tensor_param_delta_shard = get_per_tensor_param_shard

    def disable_adapter(self) -> Any:
        return nullcontext()  # there is none

    # ---------------------------------------------------------------- checkpoints

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **_: Any,
    ) -> None:
        """Writes ``local_path`` (verl's ``global_step_N/actor``), each rank its own part; older
        ones beyond ``max_ckpt_to_keep`` go.

        Raises:
            StorageError: on the rank that could not write; ``DataError`` on the others.
            ConfigError: a remote path.
        """
        if local_path is None:
            return
        self._refuse_remote(hdfs_path)
        folder, manager = Path(local_path), self.checkpoint_manager

        def make_room() -> None:
            if self.rank == 0:
                manager.ensure_checkpoint_capacity(max_ckpt_to_keep)
                clear(folder)

        together(make_room, "make room for")
        if manager.should_save_model:
            save_training(folder, self._core, self._disk, self.lr_scheduler, global_step)
        with self._on_device(frozenset((WEIGHTS,))):
            save_model_folder(
                folder / HUGGINGFACE,
                self._hf_model,
                self.model_config,
                stage=self._stage,
                with_weights=manager.should_save_hf_model,
            )
        if self.rank == 0:
            manager.register_checkpoint(str(folder), max_ckpt_to_keep)
        dist.barrier()

    def load_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        del_local_after_load: bool = True,
        **_: Any,
    ) -> None:
        """Goes on from ``save_checkpoint``, of any number of ranks and any ZeRO stage; under the
        same number and stage the next step is the very same. Random states are restored only under
        the same number of ranks. Never deletes what it read.

        Raises:
            DataError: nothing there, not whole, changed, another model's, or saved under another
                dtype.
            ConfigError: a remote path.
        """
        if local_path is None:
            return
        self._refuse_remote(hdfs_path)
        with self._on_device(ALL_PARTS):
            load_training(Path(local_path), self._core, self.lr_scheduler)
        dist.barrier()

    def _refuse_remote(self, hdfs_path: str | None) -> None:
        if hdfs_path is not None:
            raise ConfigError(
                f"verl, DeepSpeed engine: trainer.default_hdfs_dir={hdfs_path} is not supported: "
                "checkpoints go to trainer.default_local_dir; use null"
            )


class _Mode(BaseEngineCtx):
    """verl's context of a phase: brings the engine's parts to the device and lets them go."""

    def __enter__(self) -> None:
        super().__enter__()
        self.engine.module.train(self.mode == "train")

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        if self.mode == "train" and (self.zero_grad_on_exit or exc_type is not None):
            self.engine.optimizer_zero_grad()
        super().__exit__(exc_type, exc_value, traceback)


class _IntoDeepSpeed:
    """Stands where verl 0.9's ``forward_backward_batch`` has a gradient scaler, between a loss and
    its backward. Can go when that method lets an engine run its own backward."""

    def __init__(self, engine: DeepSpeedEngineWithLMHead) -> None:
        self._engine = engine

    def scale(self, loss: Tensor) -> _IntoDeepSpeed:
        self._loss = loss
        return self

    def backward(self) -> None:
        loss, self._loss = self._loss, None
        self._engine._core.backward(loss / self._engine.get_data_parallel_size())


class _Forward(nn.Module):
    """A model that makes no update, read as DeepSpeed reads one that does: in its own dtype, with
    no autocast, so that a reference model equals the actor it was."""

    def __init__(self, model: nn.Module, device: str) -> None:
        super().__init__()
        self.model, self._autocast_device = model, device

    def forward(self, **inputs: Any) -> Any:
        with torch.autocast(self._autocast_device, enabled=False):
            return self.model(**inputs)


plugin.complete(__name__)
