"""What a student goes on from, on disk: float32 weights and Adam's moments by parameter name.

Every rank writes the ranges it holds and no other, so nothing is gathered and all ranks write at
once; a rank that loads reads whichever ranges it will hold from whoever wrote them. Files of any
number of ranks and any ZeRO stage serve any other, bit for bit.

There is no random state in them: a training step draws no random number (dropout and router jitter
are off), and the learning rate is a function of the updates done.

Where DeepSpeed 0.19.8 keeps a range is read from its optimizers here, and nowhere else. It refuses
files that are torn, of another model or another dtype, and ranges that do not add up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rock_opd.durable import FileFacts, file_facts, storing, sync, total_bytes
from rock_opd.errors import DataError

KINDS = ("weight", "exp_avg", "exp_avg_sq")
"""What is kept of every parameter, float32 each."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A range of one parameter, laid flat, on the rank that holds it."""

    name: str
    start: int
    total: int
    """Elements of the whole parameter."""
    tensors: dict[str, Tensor]
    """Views float32 [n] of the live values, by ``KINDS``: write to them to change them."""

    @property
    def num(self) -> int:
        return len(self.tensors["weight"])


def held_parts(engine: Any, model: torch.nn.Module, *, stage: int, rank: int) -> list[Part]:
    """What this rank holds and updates; moments that do not exist yet are made, as zeros.

    Args:
        engine: DeepSpeed's.
        model: whose parameter names are used.
        stage: ZeRO's; at 0 every rank holds everything.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer, parts = engine.optimizer, []
    if stage == 0:
        for parameter in model.parameters():
            whole = _moments(optimizer, parameter, parameter.detach())
            parts.append(
                Part(
                    name=names[id(parameter)],
                    start=0,
                    total=parameter.numel(),
                    tensors={kind: tensor.view(-1) for kind, tensor in whole.items()},
                )
            )
        return parts
    for flat, places in _ranges(optimizer, stage=stage, rank=rank):
        whole = _moments(optimizer.optimizer, flat, flat.detach())
        for parameter, offset, start, num in places:
            parts.append(
                Part(
                    name=names[id(parameter)],
                    start=start,
                    total=getattr(parameter, "ds_numel", parameter.numel()),
                    tensors={k: t.narrow(0, offset, num) for k, t in whole.items()},
                )
            )
    return parts


def _moments(optimizer: Any, key: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """The weight and torch AdamW's two moments of it, made as AdamW's first step would."""
    state = optimizer.state[key]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=key.device)
        for kind in KINDS[1:]:
            state[kind] = torch.zeros_like(key, memory_format=torch.preserve_format)
    return {"weight": weight, **{kind: state[kind].detach() for kind in KINDS[1:]}}


def _ranges(
    optimizer: Any, *, stage: int, rank: int
) -> Iterator[tuple[Tensor, list[tuple[Tensor, int, int, int]]]]:
    """Each flat float32 tensor this rank updates, with the ranges in it: parameter, offset in the
    flat tensor, offset in the parameter, length. Padding is left out."""
    if stage == 3:  # every parameter is cut into equal shares, the last one padded
        for flat, group in zip(
            optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True
        ):
            shares = [p.partition_numel() for p in group]
            offsets = accumulate(shares, initial=0)
            places = [
                (p, offset, rank * share, max(0, min(share, p.ds_numel - rank * share)))
                for p, share, offset in zip(group, shares, offsets, strict=False)
            ]
            yield flat, [place for place in places if place[3]]
        return
    if hasattr(optimizer, "bf16_groups"):  # stage 1 in bf16
        flats, groups = optimizer.fp32_groups_flat_partition, optimizer.bf16_groups
        firsts = [list(accumulate((p.numel() for p in group), initial=0))[:-1] for group in groups]
    else:
        flats, groups = (
            optimizer.single_partition_of_fp32_groups,
            optimizer.round_robin_bit16_groups,
        )
        firsts = optimizer.round_robin_bit16_offsets
    for flat, group, first in zip(flats, groups, firsts, strict=True):
        low = rank * flat.numel()  # the whole group is one flat tensor, cut into equal shares
        places = []
        for p, at in zip(group, first, strict=True):
            begin, end = max(at, low), min(at + p.numel(), low + flat.numel())
            if begin < end:
                places.append((p, begin - low, begin - at, end - begin))
        yield flat, places


def own_share(parts: list[Part], *, stage: int, rank: int, world_size: int) -> list[Part]:
    """What this rank writes: what it holds, but an equal share where all hold everything."""
    if stage != 0:
        return parts
    shares = []
    for part in parts:
        begin, end = (part.total * r // world_size for r in (rank, rank + 1))
        if begin < end:
            cut = {kind: tensor[begin:end] for kind, tensor in part.tensors.items()}
            shares.append(Part(name=part.name, start=begin, total=part.total, tensors=cut))
    return shares


def set_steps(engine: Any, *, stage: int, num_updates: int) -> None:
    """Tells AdamW how many updates its moments have seen."""
    optimizer = engine.optimizer if stage == 0 else engine.optimizer.optimizer
    for state in optimizer.state.values():
        state["step"].fill_(num_updates)


@torch.no_grad()
def spread_weights(engine: Any, *, stage: int) -> None:
    """Brings the weights that forward and backward use to the float32 ones, on every rank, as the
    end of an update does. Collective."""
    if stage == 0:
        return
    optimizer = engine.optimizer
    if stage < 3:
        optimizer.update_lp_params()
        return
    optimizer.checkpoint_event_prologue()  # whole tensors are let go, shares stay
    for group in range(len(optimizer.fp16_groups)):
        optimizer._reassign_or_swap_out_partitioned_parameters(group)
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
    optimizer.checkpoint_event_epilogue()  # small tensors are made whole again


@dataclass(frozen=True, kw_only=True)
class HostShard:
    """One file's content in host memory, no longer the live values."""

    tensors: dict[str, Tensor]
    ranges: dict[str, tuple[int, int, int]]
    """By parameter: start, length, total."""


def host_shards(
    parts: list[Part], buffers: dict[str, Tensor], *, max_bytes: int
) -> Iterator[HostShard]:
    """Copies of at most ``max_bytes`` at a time (or of one larger part).

    Args:
        buffers: what belongs to the model and is no parameter; goes into the first file.
    """
    tensors = {f"buffer.{name}": _host_copy(t) for name, t in buffers.items()}
    ranges: dict[str, tuple[int, int, int]] = {}
    for part in parts:
        if ranges and total_bytes(tensors.values()) + 12 * part.num > max_bytes:
            yield HostShard(tensors=tensors, ranges=ranges)
            tensors, ranges = {}, {}
        tensors |= {f"{kind}.{part.name}": _host_copy(t) for kind, t in part.tensors.items()}
        ranges[part.name] = (part.start, part.num, part.total)
    if tensors:
        yield HostShard(tensors=tensors, ranges=ranges)


def _host_copy(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format).copy_(
        tensor
    )


def write_state(
    path: Path, rank: int, shards: Iterable[HostShard], *, facts: dict[str, Any]
) -> dict[str, FileFacts]:
    """Writes this rank's files; what they are, by name.

    Args:
        facts: JSON-able, the same on all ranks: ``num_updates`` and ``dtype``, and what is told.

    Raises:
        StorageError: they could not be written.
    """
    from safetensors.torch import save_file

    written = {}
    for i, shard in enumerate(shards):
        file = path / f"rank_{rank:05d}_{i:05d}.safetensors"
        metadata = {"facts": json.dumps(facts), "ranges": json.dumps(shard.ranges)}
        needed = total_bytes(shard.tensors.values())
        with storing("student state", file, needed=needed):
            path.mkdir(parents=True, exist_ok=True)
            save_file(shard.tensors, file, metadata=metadata)
            sync(file)
            written[file.name] = file_facts(file)
    return written


class DiskWrites:
    """One thread that writes what a rank saves, and the latest save to each folder."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="student-disk")
        self._saves: dict[str, Future[dict[str, FileFacts]]] = {}

    def submit(
        self,
        path: Path,
        write: Callable[..., dict[str, FileFacts]],
        *args: Any,
        background: bool,
        **kwargs: Any,
    ) -> None:
        """Lets ``write`` run as the end of the save to ``path``.

        Args:
            background: return at once; else wait, and raise what it raises.
        """
        future = self._saves[str(path)] = self.pool.submit(write, *args, **kwargs)
        if not background:
            future.result()

    def written(self, path: Path) -> dict[str, FileFacts] | None:
        """What the latest save to ``path`` wrote, by file name; None: it still writes.

        Raises:
            StorageError: it could not.
        """
        future = self._saves[str(path)]
        return future.result() if future.done() else None


class StateReader:
    """The files of ``write_state``, of all ranks: reads any range of any parameter."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            DataError: nothing there, files that cannot be read, are of different states, or do not
                hold every parameter whole.
        """
        from safetensors import SafetensorError, safe_open

        self._path = path
        files = sorted(path.glob("rank_*.safetensors"))
        if not files:
            raise DataError(f"student state {path}: no file of it is there")
        self._ranges: dict[str, list[tuple[int, int, Any]]] = {}
        self._totals: dict[str, int] = {}
        self._buffers: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}
        for file in files:
            try:
                tensors = safe_open(file, framework="pt")
                metadata = tensors.metadata() or {}
                facts, ranges = json.loads(metadata["facts"]), json.loads(metadata["ranges"])
            except (SafetensorError, OSError, KeyError, ValueError) as error:
                raise DataError(
                    f"student state {path}: {file.name} cannot be read ({error})"
                ) from None
            if self.facts and facts != self.facts:
                raise DataError(
                    f"student state {path}: {file.name} is of another state than {files[0].name}"
                )
            self.facts = facts
            for name, (start, num, total) in ranges.items():
                self._ranges.setdefault(name, []).append((start, num, tensors))
                self._totals[name] = total
            for key in tensors.keys():  # noqa: SIM118 (no mapping)
                if key.startswith("buffer."):
                    self._buffers[key.removeprefix("buffer.")] = tensors
        for name, places in self._ranges.items():
            places.sort(key=lambda place: place[0])
            ends = accumulate((num for _, num, _ in places), initial=0)
            starts = [start for start, _, _ in places]
            if [*starts, self._totals[name]] != list(ends):
                raise DataError(
                    f"student state {path}: {name} is not there whole; a rank's file is missing"
                )

    def check(self, totals: dict[str, int]) -> None:
        """
        Args:
            totals: elements of each parameter of the model that will take the state.

        Raises:
            DataError: it is the state of another model.
        """
        other = sorted(totals.items() ^ self._totals.items())
        if other:
            name = other[0][0]
            raise DataError(
                f"student state {self._path}: another model's: {name} has "
                f"{self._totals.get(name, 'no')} elements in it, {totals.get(name, 'none')} in "
                "student.model"
            )

    def read(self, kind: str, name: str, start: int, num: int) -> Tensor:
        """float32 [num], on the host: elements ``start`` to ``start + num`` of a parameter."""
        found = []
        for first, length, tensors in self._ranges[name]:
            begin, end = max(start, first), min(start + num, first + length)
            if begin < end:
                found.append(tensors.get_slice(f"{kind}.{name}")[begin - first : end - first])
        return found[0] if len(found) == 1 else torch.cat(found)

    def buffers(self) -> dict[str, Tensor]:
        return {name: t.get_tensor(f"buffer.{name}") for name, t in self._buffers.items()}
