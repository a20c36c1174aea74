"""Student weights to the rollout engines, both ends, with proof of arrival.

Two ways:

* **buckets**, everywhere: ``to_wire`` turns gathered tensors into numpy arrays that cross Ray
  without a copy; ``RolloutEngine.begin_update``, ``load_bucket``, ``end_update`` take them in.
* **device**, on CUDA: ``DeviceSender`` drives vLLM's own weight-transfer engine (NCCL between GPUs,
  CUDA IPC on shared ones); only names and shapes pass through Ray.

Proof, in both: the sender sums up (crc32) chosen tensors as it sends them, the head and the norms
among them; the receiver compares with what it was given and with what the running model holds, and
samples nothing until all of it agrees. Names are those of a checkpoint, or of transformers 5's
fused experts, which vLLM reads as well.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch

from rock_opd.errors import SyncError

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import WeightSource

Backend = Literal["nccl", "ipc"]

PACKED_BUFFER_BYTES = 1 << 30
"""Least size of vLLM's transfer buffer; a larger tensor makes it larger."""


@dataclass(frozen=True, kw_only=True)
class WireTensor:
    """One tensor on its way: numpy, so that Ray maps it instead of copying it."""

    name: str
    array: np.ndarray
    """In the tensor's shape: float32, or bf16 bits as uint16."""
    dtype: Literal["float32", "bfloat16"]


Bucket = tuple[WireTensor, ...]


def to_wire(tensors: Iterable[tuple[str, torch.Tensor]]) -> Bucket:
    """Numpy views of gathered tensors; CUDA tensors are copied to the host.

    The arrays share the memory of CPU tensors: send them before that memory is freed or written to.

    Raises:
        SyncError: a dtype other than float32 and bfloat16.
    """
    return tuple(_wire_tensor(name, tensor) for name, tensor in tensors)


def _wire_tensor(name: str, tensor: torch.Tensor) -> WireTensor:
    tensor = tensor.detach().contiguous().cpu()
    if tensor.dtype == torch.float32:
        return WireTensor(name=name, array=tensor.numpy(), dtype="float32")
    if tensor.dtype == torch.bfloat16:
        array = tensor.view(torch.int16).numpy().view(np.uint16)
        return WireTensor(name=name, array=array, dtype="bfloat16")
    raise SyncError(f"weight {name} is {tensor.dtype}; weights are sent as float32 or bfloat16")


def from_wire(tensor: WireTensor, *, dtype: str) -> torch.Tensor:
    """The tensor in the engine's ``dtype`` (float32 or bfloat16), in memory of its own.

    This is the one place where weights change their dtype between trainer and engine: bf16 to
    float32 is exact, float32 to bf16 rounds to nearest even.
    """
    array = np.array(tensor.array)  # Ray's arrays are read-only and belong to its object store
    if tensor.dtype == "bfloat16":
        value = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        value = torch.from_numpy(array)
    return value.to(getattr(torch, dtype))


def is_proof(name: str, num_dims: int) -> bool:
    """Whether a tensor is one of those that are summed up; both ends ask by name, as it passes.

    All outside the layers (embedding, head, last norm), every norm, and the first layer (of its
    experts the first one): a few per cent of a model.
    """
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    return num_dims == 1 or not any(numbers)


@dataclass
class Checksums:
    """crc32 of the bytes of the proof tensors (``is_proof``) seen so far."""

    _sums: dict[str, int] = field(default_factory=dict)

    def update(self, bucket: Bucket) -> None:
        for tensor in bucket:
            if is_proof(tensor.name, tensor.array.ndim):
                self._sums[tensor.name] = zlib.crc32(np.ascontiguousarray(tensor.array).data)

    def chosen(self) -> dict[str, int]:
        """Name -> crc32."""
        return dict(self._sums)


def compare(expected: dict[str, int], found: dict[str, int], *, version: int, where: str) -> None:
    """Raises a SyncError naming the first tensor of ``expected`` that differs or is missing.

    Args:
        where: ends the sentence "tensor X ...": what ``found`` was computed from.
    """
    for name, checksum in sorted(expected.items()):
        if name not in found:
            raise SyncError(f"policy weights v{version}: tensor {name} is missing {where}")
        if found[name] != checksum:
            raise SyncError(
                f"policy weights v{version}: tensor {name} has checksum {found[name]:08x} {where}, "
                f"the trainer sent {checksum:08x}"
            )


# --- device path ----------------------------------------------------------------------------------


class EngineCalls(Protocol):
    """How the sender reaches the rollout engines; the actor layer supplies it, with a limit."""

    def __call__(self, method: str, args_per_engine: list[tuple[Any, ...]]) -> None:
        """Calls ``method`` on engine i with ``args_per_engine[i]``, all at once, and waits."""


class TransferClient:
    """vLLM's ``VLLMWeightSyncClient`` over several engines that know nothing of each other.

    vLLM's own Ray client gives every engine the same place in the NCCL group, which fits the
    replicas of one data-parallel engine only; here each engine gets a place of its own.
    """

    def __init__(self, call: EngineCalls, *, num_engines: int, tensor_parallel: int) -> None:
        self._call = call
        self._num_engines = num_engines
        self._tensor_parallel = tensor_parallel

    def _all(self, method: str, *args: Any) -> None:
        self._call(method, [args] * self._num_engines)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        infos = [dict(init_info) for _ in range(self._num_engines)]
        if "rank_offset" in init_info:  # NCCL; IPC has no group
            for i, info in enumerate(infos):
                info["rank_offset"] = init_info["rank_offset"] + i * self._tensor_parallel
        self._call("init_weight_transfer_engine", [(info,) for info in infos])

    def start_weight_update(self) -> None:
        self._all("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._all("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """``weight_version`` is vLLM's label for servers; ours is the version of ``end_update``."""
        self._all("finish_weight_update")


@dataclass(frozen=True, kw_only=True)
class ParamInfo:
    """What is known of a parameter without gathering it."""

    name: str
    shape: tuple[int, ...]


def init_info(
    backend: Backend,
    *,
    rank: int,
    params: list[ParamInfo],
    dtype: str,
    master_addr: str,
    master_port: int,
    num_engines: int,
    tensor_parallel: int,
) -> dict[str, Any]:
    """Arguments of vLLM's ``NCCLTrainerInitInfo`` or ``IPCTrainerInitInfo``.

    The NCCL group is student rank 0 and every GPU of every rollout engine.
    """
    width = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    largest = max((width * int(np.prod(p.shape)) for p in params), default=0)
    shared = {
        "rank": rank,
        "packed": True,
        "packed_buffer_size_bytes": max(PACKED_BUFFER_BYTES, largest),
    }
    if backend == "ipc":
        return shared
    return shared | {
        "master_address": master_addr,
        "master_port": master_port,
        "world_size": 1 + num_engines * tensor_parallel,
    }


class DeviceSender:
    """The trainer's end of the device path: one per student rank, built and used by all together.

    A round is: ``RolloutEngine.begin_update(version)`` on every engine, ``send()`` on every student
    rank, ``RolloutEngine.end_update(checksums)`` with what rank 0 returned.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        rank: int,
        params: list[ParamInfo],
        gather: Callable[[], Iterator[tuple[str, torch.Tensor]]],
        dtype: str,
        call: EngineCalls,
        master_addr: str,
        master_port: int,
        num_engines: int,
        tensor_parallel: int,
    ) -> None:
        """
        Args:
            backend: ipc where rollout engines share the students' GPUs, else nccl.
            params: every parameter in the order of ``gather``, the same on every rank.
            gather: yields whole CUDA tensors in that order; a collective, run by every rank.
            dtype: of the rollout engines (float32 or bfloat16); tensors are cast to it before they
                leave, so that both ends sum up the same bytes.
            call: used by rank 0 only.
            master_addr, master_port: rank 0's address and a free port there (nccl).
        """
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        info = init_info(
            backend,
            rank=rank,
            params=params,
            dtype=dtype,
            master_addr=master_addr,
            master_port=master_port,
            num_engines=num_engines,
            tensor_parallel=tensor_parallel,
        )
        self._checksums: dict[str, int] = {}
        self._engine = WeightTransferTrainerFactory.trainer_init(
            (IPCTrainerInitInfo if backend == "ipc" else NCCLTrainerInitInfo)(**info),
            client=TransferClient(call, num_engines=num_engines, tensor_parallel=tensor_parallel),
            source=make_source(params, gather, dtype, self._checksums),
        )

    def send(self) -> dict[str, int]:
        """Sends every parameter; returns the proof tensors' checksums (of what left this rank)."""
        self._checksums.clear()
        self._engine.send_weights()
        return dict(self._checksums)

    def close(self) -> None:
        self._engine.shutdown()


def make_source(
    params: list[ParamInfo],
    gather: Callable[[], Iterator[tuple[str, torch.Tensor]]],
    dtype: str,
    checksums: dict[str, int],
) -> WeightSource:
    """vLLM's view of the student's weights: declared without gathering, gathered as it iterates.

    Casts to ``dtype`` and writes the proof tensors' crc32 into ``checksums`` as they pass.
    """
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    wire_dtype: torch.dtype = getattr(torch, dtype)

    class StudentWeights(WeightSource):
        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(p.name, wire_dtype, p.shape) for p in params]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in gather():
                cast = tensor.detach().to(wire_dtype)
                if is_proof(name, cast.dim()):
                    sums = Checksums()
                    sums.update(to_wire([(name, cast)]))
                    checksums.update(sums.chosen())
                yield name, cast

    return StudentWeights()
