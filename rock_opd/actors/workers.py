"""The actor classes: each builds one engine in its own process and forwards calls. Plain Python;
``groups`` wraps them with ``ray.remote``. Heavy imports happen in the constructors, in the actor's
process."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rock_opd.config import LossConfig, OptimConfig, RolloutConfig, StudentConfig, TeacherConfig
from rock_opd.errors import RoleError, RoleTimeout
from rock_opd.types import (
    Rollout,
    RowRequest,
    SampleRequest,
    StepResult,
    TeacherRows,
    TeacherScores,
    TrainBatch,
)

if TYPE_CHECKING:
    from rock_opd.core.gradients import TypeGradients
    from rock_opd.durable import FileFacts
    from rock_opd.engines.gradient_rows import GradientMemory


@dataclass(frozen=True, kw_only=True)
class SyncRoute:
    """How weights reach the rollout workers."""

    device: str
    """cpu: buckets through Ray; cuda: vLLM's own transfer, GPU to GPU."""
    dtype: str
    """The rollout engines'."""
    tensor_parallel: int
    """GPUs of one rollout engine."""
    ipc: bool
    """Student ranks and rollout engines share GPUs."""


def _pin_gpus(gpus: list[int] | None) -> None:
    """With colocation several roles share GPUs that Ray cannot hand out twice: they are named by
    index."""
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))


class RolloutWorker:
    """Holds one vLLM engine that samples from the student."""

    def __init__(self, gpus: list[int] | None = None) -> None:
        _pin_gpus(gpus)
        self._engine: Any = None

    def start(
        self,
        cfg: RolloutConfig,
        *,
        model: str,
        dtype: str,
        device: str,
        num_real_ids: int,
        stop_token_ids: tuple[int, ...],
        threads: int,
        max_model_len: int,
        can_sleep: bool,
        can_ban: bool,
        ipc: bool,
    ) -> None:
        """Starts the engine; apart from the constructor, so that our errors come back as they
        are."""
        from rock_opd.engines.vllm_quirks import prepare_environment
        from rock_opd.engines.vllm_rollout import RolloutEngine

        prepare_environment(device, threads)
        self._engine = RolloutEngine(
            cfg,
            model=model,
            dtype=dtype,
            device=device,
            num_real_ids=num_real_ids,
            stop_token_ids=stop_token_ids,
            max_model_len=max_model_len,
            can_sleep=can_sleep,
            can_ban=can_ban,
            transfer="ipc" if ipc else "nccl",
        )

    def generate(
        self,
        requests: list[SampleRequest],
        *,
        temperature: float,
        top_p: float,
        max_new_tokens: int,
    ) -> list[Rollout]:
        return self._engine.generate(
            requests, temperature=temperature, top_p=top_p, max_new_tokens=max_new_tokens
        )

    def begin_update(self, version: int) -> None:
        self._engine.begin_update(version)

    def load_bucket(self, bucket: Any) -> None:
        self._engine.load_bucket(bucket)

    def end_update(self, checksums: dict[str, int]) -> int:
        return self._engine.end_update(checksums)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._engine.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        self._engine.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._engine.update_weights(update_info)

    def finish_weight_update(self) -> None:
        self._engine.finish_weight_update()

    def sleep(self) -> None:
        self._engine.sleep()

    def wake(self) -> None:
        self._engine.wake()


class TeacherWorker:
    """Holds one vLLM engine that scores with the teacher, and the rows that wait to be fetched."""

    def __init__(self, gpus: list[int] | None = None) -> None:
        _pin_gpus(gpus)
        self._engine: Any = None

    def start(
        self,
        cfg: TeacherConfig,
        *,
        dtype: str,
        device: str,
        num_real_ids: int,
        max_model_len: int,
        threads: int,
        can_sleep: bool,
    ) -> None:
        """Starts the engine."""
        from rock_opd.engines.vllm_quirks import prepare_environment
        from rock_opd.engines.vllm_teacher import TeacherEngine

        prepare_environment(device, threads)
        self._engine = TeacherEngine(
            cfg,
            dtype=dtype,
            device=device,
            num_real_ids=num_real_ids,
            max_model_len=max_model_len,
            can_sleep=can_sleep,
        )

    def score(self, rollouts: list[Rollout]) -> list[TeacherScores]:
        return self._engine.score(rollouts)

    def fetch(self, requests: tuple[RowRequest, ...]) -> TeacherRows:
        return self._engine.fetch(requests)

    def clear(self) -> int:
        """Drops rows nobody fetched; returns the tokens prefilled twice since the last call."""
        return self._engine.clear()

    def sleep(self) -> None:
        self._engine.sleep()

    def wake(self) -> None:
        self._engine.wake()


class StudentWorker:
    """Holds one DeepSpeed rank. Pulls the teacher's rows itself, straight from whoever parked
    them."""

    def __init__(self, gpus: list[int] | None = None) -> None:
        _pin_gpus(gpus)
        self._rank = -1
        self._engine: Any = None
        self._rows: Any = None
        self._sender: Any = None

    def free_address(self) -> tuple[str, int]:
        """An address of this node and a port free on it, for the process group (asked of rank
        0)."""
        import ray

        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind(("", 0))
            return host, probe.getsockname()[1]

    def start(
        self,
        cfg: StudentConfig,
        optim: OptimConfig,
        loss: LossConfig,
        *,
        rank: int,
        teacher_model: str,
        world_size: int,
        master: tuple[str, int],
        device: str,
        dtype: str,
        teacher_dtype: str | None,
        num_updates: int,
        num_real_ids: int,
        seed: int,
        timeout_s: float,
    ) -> None:
        """Joins the process group and loads the model (all ranks together)."""
        self._rank = rank
        from rock_opd.engines.deepspeed_student import StudentEngine
        from rock_opd.engines.teacher_head import load_head

        self._engine = StudentEngine(
            cfg,
            optim,
            loss,
            model=cfg.model,
            rank=rank,
            world_size=world_size,
            local_rank=0,
            master_addr=master[0],
            master_port=master[1],
            device=device,
            dtype=dtype,
            num_updates=num_updates,
            num_real_ids=num_real_ids,
            teacher_head=load_head(teacher_model, dtype=teacher_dtype) if teacher_dtype else None,
            seed=seed,
            timeout_s=timeout_s,
        )

    def train_step(
        self,
        batches: list[TrainBatch],
        teachers: list[Any],
        *,
        total_weight: float,
        mask_version: int,
        timeout_s: float,
    ) -> StepResult:
        rows = _pull_rows(batches, teachers, timeout_s)
        return self._engine.train_step(
            batches, rows, total_weight=total_weight, mask_version=mask_version
        )

    def measure(
        self,
        batches: list[TrainBatch],
        teachers: list[Any],
        *,
        entropy: bool = False,
        timeout_s: float,
    ) -> StepResult:
        rows = _pull_rows(batches, teachers, timeout_s)
        return self._engine.measure(batches, rows, entropy=entropy)

    def start_rows(self, num_rows: int) -> None:
        """Makes room for the rows of ``keep_rows``."""
        self._rows = self._engine.gradient_rows(num_rows)

    def keep_rows(
        self, batches: list[TrainBatch], teachers: list[Any], *, timeout_s: float
    ) -> None:
        self._rows.keep(batches, _pull_rows(batches, teachers, timeout_s))

    def begin_gradients(self) -> int:
        return self._rows.begin()

    def gradient_step(self, index: int) -> None:
        self._rows.step(index)

    def type_gradients(self) -> tuple[TypeGradients, GradientMemory]:
        return self._rows.result()

    def push_weights(
        self,
        workers: list[Any],
        route: SyncRoute,
        *,
        version: int,
        bucket_bytes: int,
        timeout_s: float,
    ) -> list[int]:
        """Sends this version to every rollout worker; rank 0 returns the versions they now hold.

        All ranks take part in gathering; only rank 0 talks to the workers.
        """

        def ask(what: str, refs: list[Any]) -> list[Any]:
            return _answer(refs, f"{what} of v{version}", timeout_s)

        if self._rank == 0:
            ask("begin", [w.begin_update.remote(version) for w in workers])
        if route.device == "cuda":
            checksums = self._device_sender(workers, route, timeout_s).send()
        else:
            checksums = self._send_buckets(workers, bucket_bytes, ask)
        if self._rank != 0:
            return []
        return ask("end", [w.end_update.remote(checksums) for w in workers])

    def _send_buckets(
        self, workers: list[Any], bucket_bytes: int, ask: Callable[[str, list[Any]], list[Any]]
    ) -> dict[str, int]:
        """Through Ray, a bucket at a time, each put once; returns the proof tensors' checksums."""
        import ray

        from rock_opd.engines.weight_sync import Checksums, to_wire

        checksums = Checksums()
        for bucket in self._engine.weight_buckets(bucket_bytes):
            if self._rank == 0:
                wire = to_wire(bucket)
                checksums.update(wire)
                ref = ray.put(wire)
                ask("bucket", [w.load_bucket.remote(ref) for w in workers])
        return checksums.chosen()

    def _device_sender(self, workers: list[Any], route: SyncRoute, timeout_s: float) -> Any:
        """vLLM's own transfer between GPUs, set up at the first sync."""
        if self._sender is None:
            from rock_opd.engines.weight_sync import DeviceSender

            def call(method: str, args_per_engine: list[tuple[Any, ...]]) -> None:
                refs = [
                    getattr(w, method).remote(*args)
                    for w, args in zip(workers, args_per_engine, strict=True)
                ]
                _answer(refs, method, timeout_s)

            host, port = self.free_address()
            self._sender = DeviceSender(
                "ipc" if route.ipc else "nccl",
                rank=self._rank,
                params=self._engine.param_infos(),
                gather=self._engine.gathered_weights,
                dtype=route.dtype,
                call=call,
                master_addr=host,
                master_port=port,
                num_engines=len(workers),
                tensor_parallel=route.tensor_parallel,
            )
        return self._sender

    def save_hf(self, path: Path, *, background: bool = False) -> None:
        self._engine.save_hf(path, background=background)

    def save_state(self, path: Path, *, background: bool = False) -> None:
        self._engine.save_state(path, background=background)

    def written(self, path: Path) -> dict[str, FileFacts] | None:
        return self._engine.written(path)

    def load_state(self, path: Path) -> None:
        self._engine.load_state(path)

    def sleep(self) -> None:
        self._engine.offload()

    def wake(self) -> None:
        self._engine.reload()


def _answer(refs: list[Any], what: str, timeout_s: float) -> list[Any]:
    import ray

    try:
        return ray.get(refs, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        _, late = ray.wait(refs, num_returns=len(refs), timeout=0)
        who = [i for i, ref in enumerate(refs) if ref in late]
        raise RoleTimeout(
            f"weight sync, {what}: no answer from rollout workers {who} in {timeout_s:g} s"
        ) from None
    except ray.exceptions.RayActorError as error:
        raise RoleError(
            f"weight sync, {what}: a rollout worker is gone: {str(error).splitlines()[0]}"
        ) from None


def _pull_rows(
    batches: list[TrainBatch], teachers: list[Any], timeout_s: float
) -> Iterator[TeacherRows]:
    """Each micro-batch's teacher rows, the next ones on their way while these are used."""
    import ray

    def ask(batch: TrainBatch) -> Any:
        return teachers[batch.teacher_idx].fetch.remote(batch.requests)

    coming = ask(batches[0]) if batches else None
    for i, batch in enumerate(batches):
        ref, coming = coming, ask(batches[i + 1]) if i + 1 < len(batches) else None
        try:
            yield ray.get(ref, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise RoleTimeout(
                f"teacher {batch.teacher_idx} did not hand over the rows of micro-batch {i} in "
                f"{timeout_s:g} s"
            ) from None
        del ref
