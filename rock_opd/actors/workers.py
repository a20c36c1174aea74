"""The actor classes: each builds one engine in its own process and forwards calls. Plain Python;
``groups`` wraps them with ``ray.remote``. Heavy imports happen in the constructors, in the actor's
process."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rock_opd.actors.receivers import Receivers, SyncRoute
from rock_opd.config import LossConfig, OptimConfig, RolloutConfig, StudentConfig, TeacherConfig
from rock_opd.errors import RoleLost, RoleTimeout
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
    from rock_opd.actors.processes import Process
    from rock_opd.actors.waiting import Failure, Watch
    from rock_opd.core.gradients import TypeGradients
    from rock_opd.durable import FileFacts
    from rock_opd.engines.gradient_rows import GradientMemory


def _pin_gpus(gpus: list[int] | None) -> None:
    """With colocation several roles share GPUs that Ray cannot hand out twice: they are named by
    index."""
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))


class Worker:
    """What all roles have in common."""

    def __init__(self, gpus: list[int] | None = None) -> None:
        _pin_gpus(gpus)
        self._engine: Any = None

    def identify(self, role: str, index: int) -> Process:
        """Which process this is."""
        from rock_opd.actors.processes import this_process

        return this_process(role, index)

    def peak_memory(self) -> tuple[int, int]:
        """Bytes held at most since the start: of host memory, and of the GPU (0 without one)."""
        import torch

        kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        on_device = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        return kibibytes * 1024, on_device


class RolloutWorker(Worker):
    """Holds one vLLM engine that samples from the student."""

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
        trusted: tuple[str, ...] = (),
    ) -> None:
        """Starts the engine; apart from the constructor, so that our errors come back as they
        are.

        Args:
            trusted: models whose own Python code may run in this process.
        """
        from rock_opd.engines.vllm_quirks import prepare_environment
        from rock_opd.engines.vllm_rollout import RolloutEngine
        from rock_opd.models import trust_code

        trust_code(*trusted)
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


class TeacherWorker(Worker):
    """Holds one engine that scores with the teacher (vLLM, or a client of servers), and the rows
    that wait to be fetched."""

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
        trusted: tuple[str, ...] = (),
    ) -> None:
        """Starts the engine, or looks at the servers that stand in for one.

        Args:
            trusted: models whose own Python code may run in this process.
        """
        from rock_opd.models import trust_code

        trust_code(*trusted)
        if cfg.remote:
            from rock_opd.engines.http_teacher import HttpTeacher

            self._engine = HttpTeacher(cfg, num_real_ids=num_real_ids, max_model_len=max_model_len)
            return
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


class StudentWorker(Worker):
    """Holds one DeepSpeed rank. Pulls the teacher's rows itself, straight from whoever parked
    them."""

    def __init__(self, gpus: list[int] | None = None) -> None:
        super().__init__(gpus)
        self._rank = -1
        self._rows: Any = None
        self._sender: Any = None
        self._receivers: tuple[str, ...] = ()
        self._store: Any = None

    def open_address(self) -> tuple[str, int]:
        """Where the ranks meet (asked of rank 0): this node's address, and a port that this process
        listens on from now on, so that no other can take it before they do."""
        import ray
        from torch.distributed import TCPStore

        host = ray.util.get_node_ip_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)  # a store alone takes every one
        port = listener.getsockname()[1]
        self._store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return host, port

    def free_address(self) -> tuple[str, int]:
        """An address of this node and a port that is free on it now."""
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
        trusted: tuple[str, ...] = (),
    ) -> None:
        """Joins the process group and loads the model (all ranks together).

        Args:
            master: rank 0's ``open_address``.
            trusted: models whose own Python code may run in this process.
        """
        from rock_opd.models import trust_code

        trust_code(*trusted)
        self._rank = rank
        # torch's word for: the store at the master address is up already, rank 0 joins it too.
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(True)
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
        workers: Mapping[int, Any],
        route: SyncRoute,
        *,
        version: int,
        bucket_bytes: int,
        timeout_s: float,
        watch: Watch,
    ) -> tuple[dict[int, int], dict[int, Failure]]:
        """Sends this version to these rollout workers.

        All ranks take part in gathering; only rank 0 talks to the workers.

        Args:
            timeout_s: of the whole; one question to the workers may take a third of it, so that a
                late one does not make the other ranks' collectives run out of time.
            watch: the workers' processes.

        Returns:
            On rank 0: the versions the workers hold now, and who was lost on the way.

        Raises:
            SyncError: a worker refused what arrived.
        """
        receivers = Receivers(workers, version, timeout_s / 3, watch)
        if self._rank == 0:
            receivers.ask("begin", lambda w: w.begin_update.remote(version))
        if route.device == "cuda":
            receivers.check(all_here=True)
            checksums = self._device_sender(workers, route, timeout_s, watch).send()
        else:
            checksums = self._send_buckets(receivers, bucket_bytes)
        if self._rank != 0:
            return {}, {}
        receivers.check()
        held = receivers.ask("end", lambda w: w.end_update.remote(checksums))
        receivers.check()
        return held, receivers.lost

    def _send_buckets(self, receivers: Receivers, bucket_bytes: int) -> dict[str, int]:
        """Through Ray, a bucket at a time, each put once; returns the proof tensors' checksums."""
        import ray

        from rock_opd.engines.weight_sync import Checksums, to_wire

        checksums = Checksums()
        for bucket in self._engine.weight_buckets(bucket_bytes):
            if self._rank == 0:
                wire = to_wire(bucket)
                checksums.update(wire)
                ref = ray.put(wire)
                receivers.ask("bucket", lambda w, ref=ref: w.load_bucket.remote(ref))
        return checksums.chosen()

    def _device_sender(
        self, workers: Mapping[int, Any], route: SyncRoute, timeout_s: float, watch: Watch
    ) -> Any:
        """vLLM's own transfer between GPUs, set up at the first sync and for every new worker."""
        receivers = tuple(w._actor_id.hex() for w in workers.values())
        if self._sender is None or receivers != self._receivers:
            from rock_opd.actors.waiting import collect, first_cause
            from rock_opd.engines.weight_sync import DeviceSender

            def call(method: str, args_per_engine: list[tuple[Any, ...]]) -> None:
                refs = {
                    i: getattr(w, method).remote(*args)
                    for (i, w), args in zip(workers.items(), args_per_engine, strict=True)
                }
                phase = f"weight sync, {method}"
                _, failures = collect("rollout worker", phase, refs, timeout_s, watch=watch)
                if failures:
                    raise first_cause(failures)

            host, port = self.free_address()
            self._receivers = receivers
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
        except ray.exceptions.RayActorError as error:
            raise RoleLost(
                f"teacher {batch.teacher_idx} was lost with the rows of micro-batch {i}: "
                f"{str(error).splitlines()[0]}"
            ) from None
        del ref
