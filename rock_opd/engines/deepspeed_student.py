"""One DeepSpeed rank that trains the student: its model, a step's batches, and its weights.

DeepSpeed itself, with its quirks, is ``deepspeed_core``. The learning rate is a function of the
updates done; a step with a loss, a measured row or a gradient that is not finite changes nothing,
on any rank: see ``train_step``.

An engine that will make no update (``num_updates=0``) measures only: weights and no more, whole on
every rank, without DeepSpeed's engine around them.

It refuses to train on a model whose logits are not head times hidden state, on weights that were
not in the checkpoint, and to go on from the state of another model. CPU (gloo) and GPU (NCCL) take
the same path.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rock_opd.config import LossConfig, OptimConfig, StudentConfig
from rock_opd.core.schedule import learning_rate
from rock_opd.durable import FileFacts
from rock_opd.engines.causal_model import load_causal_model
from rock_opd.engines.deepspeed_core import (
    SHARD_BYTES,
    DeepSpeedCore,
    TrainSettings,
    limit_groups,
    open_group,
)
from rock_opd.engines.gradient_rows import GradientRows
from rock_opd.engines.model_folder import ModelFolder, host_copies
from rock_opd.engines.student_batches import agree, batches_error, non_finite, step_result
from rock_opd.engines.student_module import (
    LossRows,
    RowNumbers,
    StudentModule,
    loss_rows,
    probe_error,
)
from rock_opd.engines.student_state import DiskWrites, Part
from rock_opd.engines.student_weights import bucket_plan, gathered, named_tensors
from rock_opd.engines.weight_sync import ParamInfo
from rock_opd.errors import ModelError, NumericsError
from rock_opd.models import is_trusted, load_config
from rock_opd.types import StepResult, TeacherRows, TrainBatch


class StudentEngine:
    """One rank. All ranks call every method together, in the same order; weights only move in
    ``train_step`` and ``load_state``."""

    def __init__(
        self,
        cfg: StudentConfig,
        optim: OptimConfig,
        loss: LossConfig,
        *,
        model: str,
        rank: int,
        world_size: int,
        local_rank: int,
        master_addr: str,
        master_port: int,
        device: str,
        dtype: str,
        num_updates: int,
        num_real_ids: int,
        teacher_head: Tensor | None,
        seed: int,
        timeout_s: float,
    ) -> None:
        """Joins the process group and loads the model.

        Args:
            model: folder or hub id the weights, config and tokenizer files come from.
            local_rank: this process's GPU among those it sees; 0 on CPU.
            device: cpu or cuda.
            dtype: float32 or bfloat16: of forward, backward and the weights given away. The
                optimizer's own copy is float32 always.
            num_updates: updates of the whole run, for the schedule; 0: the engine only measures,
                whatever the ZeRO stage, and holds neither gradients nor optimizer.
            num_real_ids: ids that teacher and student share; logits beyond are padding.
            teacher_head: [V_t, H_t], V_t >= num_real_ids, for ``hidden`` payloads.
            timeout_s: limit of every collective: a peer that is gone or late is an error, no hang.

        Raises:
            ModelError: no such model, weights missing in it, a vocabulary below ``num_real_ids``,
                or an architecture that cannot be trained packed.
        """
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_RANK=str(local_rank),
            MASTER_ADDR=master_addr,
            MASTER_PORT=str(master_port),
        )
        self._cfg, self._optim, self._source = cfg, optim, model
        self._rank, self._world_size = rank, world_size
        self._num_updates, self._num_real_ids = num_updates, num_real_ids
        self._device = (
            torch.device(device, local_rank) if device == "cuda" else torch.device(device)
        )
        self._dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
        self.trains = num_updates > 0
        """Whether it may update; else it only measures."""
        self._disk = DiskWrites()

        self._seed(seed)
        open_group(self._device, timeout_s)
        hf_model = self._load_model()
        self._hf_config = load_config(model)  # as the source has it: what save_hf writes
        self._hf_model = hf_model
        self._module = StudentModule(
            hf_model,
            loss,
            num_real_ids=num_real_ids,
            chunk_rows=cfg.logit_chunk_rows,
            teacher_head=self._own_head(teacher_head),
        )
        self._core = self._wrap(self._module) if self.trains else None
        self._engine = self._core.engine if self._core else self._module.to(self._device)
        self._stage = self._core.stage if self._core else 0
        limit_groups(timeout_s)
        error = probe_error(self._engine, self._device, dtype=self._dtype)
        if error is not None:
            raise ModelError(f"student {model}: {error}")

    @property
    def num_updates_done(self) -> int:
        """Updates that were made: skipped steps do not count."""
        return self._core.num_updates_done if self._core else 0

    @property
    def policy_version(self) -> int:
        """Version of the weights: the number of updates they have seen."""
        return self.num_updates_done

    # ---------------------------------------------------------------- building

    def _seed(self, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def _load_model(self) -> torch.nn.Module:
        config = load_config(self._source)
        for name, value in vars(config).items():
            # The rollout engine has none, and its log-probabilities must be ours.
            if any(word in name for word in ("dropout", "pdrop", "jitter")) and value:
                setattr(config, name, 0.0)
        model = load_causal_model(
            self._source,
            config,
            dtype=self._dtype,
            trust_remote_code=is_trusted(self._source),
            attn_implementation=self._cfg.attn_implementation,
        )
        width = model.get_output_embeddings().weight.shape[0]
        if width < self._num_real_ids:
            raise ModelError(
                f"student {self._source}: {width} vocabulary rows, fewer than the "
                f"{self._num_real_ids} ids it shares with the teacher"
            )
        if not self.trains:
            return model.eval().requires_grad_(False)
        model.train()
        if self._cfg.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def _own_head(self, head: Tensor | None) -> Tensor | None:
        """The teacher's head on the training device, cut to the shared width."""
        if head is None:
            return None
        if len(head) < self._num_real_ids:
            raise ModelError(
                f"the teacher's head has {len(head)} rows, fewer than the {self._num_real_ids} ids "
                "it shares with the student"
            )
        head = head.detach()[: self._num_real_ids]
        # On CPU products of bf16 numbers are taken in float32: once cast, not once per chunk.
        return head.float() if self._device.type == "cpu" else head.to(self._device)

    def _wrap(self, module: StudentModule) -> DeepSpeedCore:
        optim = self._optim
        return DeepSpeedCore(
            module,
            self._hf_model,
            TrainSettings(
                zero_stage=self._cfg.zero_stage,
                dtype=self._dtype,
                offload_optimizer=self._cfg.offload_optimizer,
                lr=optim.lr,
                betas=optim.betas,
                eps=optim.eps,
                weight_decay=optim.weight_decay,
                max_grad_norm=optim.max_grad_norm,
            ),
            device=self._device,
            rank=self._rank,
            world_size=self._world_size,
            disk=self._disk,
        )

    # ---------------------------------------------------------------- training

    def train_step(
        self,
        batches: list[TrainBatch],
        rows: Iterable[TeacherRows],
        *,
        total_weight: float,
        mask_version: int,
    ) -> StepResult:
        """One update from this rank's micro-batches: as many on every rank, N = 0 allowed.

        The gradient is that of ``sum over all ranks of weight * loss / total_weight``, whatever the
        split. Numbers that are not finite (a loss, a measured row, the gradient norm) stop the
        update on every rank before a weight moves: see ``DeepSpeedCore.backward``.

        Args:
            rows: the teacher's rows, one entry per micro-batch; may be a generator that fetches.
            total_weight: the step's one denominator, > 0: the caller skips steps frozen whole.
            mask_version: the freeze mask the weights were made under; the same on every rank.

        Raises:
            NumericsError: on every rank, with weights and moments as they were.
            ValueError: malformed batches, or ranks that disagree; on every rank, before any work.
            ModelError: an engine that only measures.
        """
        self._refuse_untrained("train")
        self._agree(batches, total_weight=total_weight, mask_version=mask_version)
        lr = learning_rate(
            self.num_updates_done,
            num_updates=self._num_updates,
            lr=self._optim.lr,
            min_lr=self._optim.min_lr,
            warmup_ratio=self._optim.warmup_ratio,
        )
        self._core.set_learning_rate(lr)

        results = []
        for i, (batch, teacher) in enumerate(zip(batches, rows, strict=True)):
            self._core.begin_micro_batch(last=i == len(batches) - 1)
            share, *numbers = self._forward(batch, teacher, total_weight)
            self._core.backward(share)
            results.append((share.detach(), *numbers))

        grad_norm = self._core.update()
        if grad_norm is None:
            raise NumericsError(
                f"update {self.num_updates_done + 1}: a loss, a measured row or the gradient is "
                f"not finite; no weight was changed. Rank {self._rank}: {non_finite(results)}"
            )
        return step_result(
            batches,
            results,
            grad_norm=grad_norm,
            learning_rate=lr,
            mask_version=mask_version,
            policy_version=self.policy_version,
        )

    def measure(
        self, batches: list[TrainBatch], rows: Iterable[TeacherRows], *, entropy: bool = False
    ) -> StepResult:
        """The rows' numbers under the present weights: forward only, nothing is changed.

        ``StepResult.loss`` is the weighted sum of this rank's rows, with no denominator.

        Args:
            entropy: also give ``StepResult.entropy``.

        Raises:
            NumericsError: a row that is not finite, on the ranks that have one.
            ValueError: as ``train_step``.
        """
        self._agree(batches, total_weight=1.0, mask_version=0)
        with torch.no_grad():
            results = [
                self._forward(batch, teacher, 1.0, with_entropy=entropy)
                for batch, teacher in zip(batches, rows, strict=True)
            ]
        result = step_result(
            batches,
            results,
            grad_norm=0.0,
            learning_rate=0.0,
            mask_version=0,
            policy_version=self.policy_version,
        )
        if not np.isfinite(result.loss):
            raise NumericsError(f"measuring, rank {self._rank}: {non_finite(results)}")
        return result

    def gradient_rows(self, num_rows: int, **limits: int) -> GradientRows:
        """A place for rows whose types' gradients will be taken; arguments as there.

        Raises:
            ModelError: an engine that trains, and may not hold its weights whole.
        """
        if self.trains:
            raise ModelError(
                f"student {self._source}: gradients of types are taken by a student that only "
                "measures (num_updates=0)"
            )
        return GradientRows(
            self._module,
            device=self._device,
            num_real_ids=self._num_real_ids,
            num_rows=num_rows,
            rank=self._rank,
            **limits,
        )

    def _refuse_untrained(self, verb: str) -> None:
        if not self.trains:
            raise ModelError(
                f"student {self._source}: cannot {verb}: it was started to measure only "
                "(num_updates=0)"
            )

    def _forward(
        self,
        batch: TrainBatch,
        teacher: TeacherRows,
        total_weight: float,
        *,
        with_entropy: bool = False,
    ) -> RowNumbers:
        head = self._module.head.teacher_head
        rows: LossRows = loss_rows(
            batch,
            teacher,
            total_weight=total_weight,
            device=self._device,
            hidden_dtype=None if head is None else head.dtype,
            with_entropy=with_entropy,
        )

        def ids(array: np.ndarray) -> Tensor:
            return torch.as_tensor(array.astype(np.int64), device=self._device)

        return self._engine(
            ids(batch.token_ids), ids(batch.position_ids), ids(batch.predicted), rows
        )

    def _agree(self, batches: list[TrainBatch], *, total_weight: float, mask_version: int) -> None:
        """Raises on every rank when one rank's input would leave the others waiting or go wrong."""
        error = batches_error(
            batches,
            width=self._module.model.config.vocab_size,
            num_real_ids=self._num_real_ids,
        )
        if error is None and not total_weight > 0:
            error = f"total_weight must be positive, got {total_weight}: skip a step frozen whole"
        facts = {
            "number of micro-batches": len(batches),
            "total_weight": total_weight,
            "mask_version": mask_version,
        }
        agree(error, facts, rank=self._rank, device=self._device)

    # ---------------------------------------------------------------- weights out

    def weight_buckets(self, max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """The full weights under their checkpoint names, bucket by bucket; all ranks iterate to the
        end together, and as often.

        Rank 0 gets tensors in the training dtype on the training device, the other ranks empty
        lists. A bucket holds at most ``max_bytes`` by full shape, or a single larger tensor (one
        that transformers fuses comes as its parts); a tied weight comes once. Tensors may be the
        weights themselves: use them before asking for the next bucket, and do not write to them.
        """
        from transformers.core_model_loading import revert_weight_conversion

        for full in gathered(self._hf_model, max_bytes, stage=self._stage):
            # transformers keeps some weights in another form than checkpoints (fused experts).
            yield (
                list(revert_weight_conversion(self._hf_model, full).items())
                if self._rank == 0
                else []
            )

    def param_infos(self) -> list[ParamInfo]:
        """Name and full shape of every tensor of ``gathered_weights``, in its order; no gather."""
        return [
            ParamInfo(name=name, shape=tuple(getattr(tensor, "ds_shape", tensor.shape)))
            for name, tensor in named_tensors(self._hf_model).items()
        ]

    def gathered_weights(self, max_bytes: int = SHARD_BYTES) -> Iterator[tuple[str, Tensor]]:
        """Full tensors on EVERY rank's device, under transformers' own names (experts fused), for
        hand-over on the GPU itself. Collective; each tensor is valid until the next is asked for.
        """
        for full in gathered(self._hf_model, max_bytes, stage=self._stage):
            yield from full.items()

    def save_hf(
        self, path: str | Path, shard_bytes: int = SHARD_BYTES, *, background: bool = False
    ) -> None:
        """Writes a model folder that transformers and vLLM load: weights in the training dtype,
        config, generation config and the source's tokenizer files. All ranks call it.

        Gathers and writes one shard at a time; existing files of the same names are replaced.

        Args:
            background: gather all of it into rank 0's host memory and return; ``written`` tells
                when the files are there.

        Raises:
            StorageError: they could not be written (from ``written``, with ``background``).
        """
        path = Path(path)
        folder = ModelFolder(path, num_shards=len(bucket_plan(self._hf_model, shard_bytes)))
        for bucket in self.weight_buckets(shard_bytes):
            if self._rank == 0:
                shard = self._disk.pool.submit(folder.write, host_copies(bucket))
                if not background:
                    shard.result()
        self._hf_config.dtype = self._dtype
        self._hf_config.architectures = [type(self._hf_model).__name__]
        config = copy.deepcopy(self._hf_config)
        finish = (folder.finish, config, self._source) if self._rank == 0 else (dict,)
        self._disk.submit(path, *finish, background=background)

    # ---------------------------------------------------------------- resuming

    def save_state(self, path: str | Path, *, background: bool = False) -> None:
        """Writes this rank's part of everything a run goes on from (see ``student_state``). All
        ranks call it; each writes its own files, from its own memory.

        Args:
            background: copy it to host memory (12 bytes a parameter over all ranks) and return;
                ``written`` tells when the files are there.

        Raises:
            ModelError: an engine that only measures.
            StorageError: they could not be written (from ``written``, with ``background``).
        """
        self._refuse_untrained("save a state")
        self._core.save_state(Path(path), background=background)

    def written(self, path: str | Path) -> dict[str, FileFacts] | None:
        """What this rank wrote of the latest save to ``path``, by file name; None: it still
        writes.

        Raises:
            StorageError: it could not.
        """
        return self._disk.written(Path(path))

    def load_state(self, path: str | Path) -> None:
        """Goes on from ``save_state``, of any number of ranks and any ZeRO stage: weights and
        moments are the very same, and under the same number and stage every later step is too.

        Raises:
            DataError: nothing there, not whole, another model's, or saved under another dtype.
            ModelError: an engine that only measures.
        """
        self._refuse_untrained("load a state")
        self._core.load_state(Path(path))

    def _parts(self) -> list[Part]:
        return self._core.parts()

    # ---------------------------------------------------------------- sharing a GPU

    def offload(self) -> None:
        """Moves weights, optimizer and gradients to host memory, for another role to use the GPU.
        Nothing but ``reload`` may follow. On CPU there is nothing to do.

        Raises:
            ModelError: this ZeRO stage and dtype cannot leave the GPU.
        """
        if self._device.type == "cuda":
            self._leave_device()
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """Brings back what ``offload`` moved."""
        if self._device.type == "cuda":
            self._return_to_device()

    def _leave_device(self) -> None:
        if self._core:
            self._core.leave_device()
        else:
            self._module.to("cpu")
        head = self._module.head
        head.teacher_head = None if head.teacher_head is None else head.teacher_head.to("cpu")

    def _return_to_device(self) -> None:
        if self._core:
            self._core.return_to_device()
        else:
            self._module.to(self._device)
        head = self._module.head
        head.teacher_head = (
            None if head.teacher_head is None else head.teacher_head.to(self._device)
        )
