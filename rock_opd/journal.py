"""The rollouts of steps that no checkpoint holds yet, on disk before anything is learned from them.

A run that broke off goes on from its last checkpoint and takes the steps since with the very same
rollouts. In float32 on CPU sampling again would give them anyway; on a GPU log-probabilities move
with the batch a sequence stands in, and other rollouts would make another run of it.

``journal/step_000007.npz``: about 8 bytes a sampled token (id, log-probability; prompts 4), written
aside and renamed. A file that is torn, of another run or of another version of the student is not
used, and why is said. Nothing here decides what a run may change when it goes on: that is the
fingerprint's.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rock_opd.durable import UNREADABLE, json_object, storing, sync, total_bytes
from rock_opd.types import Rollout, SampleRequest

ROLLOUT_FIELDS = (
    "prompt_id",
    "sample_idx",
    "finish_reason",
    "policy_version",
    "prompt_len",
    "teacher_id",
)


def pack_rollouts(
    rollouts: Sequence[Rollout],
) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Rollouts as one JSON-able row each, and their arrays laid flat, kept exactly."""
    prefixes = [rollout.teacher_prefix_ids for rollout in rollouts]
    return [{name: getattr(r, name) for name in ROLLOUT_FIELDS} for r in rollouts], {
        "lengths": np.array([len(rollout.token_ids) for rollout in rollouts], np.int64),
        "prefix_lengths": np.array([-1 if p is None else len(p) for p in prefixes], np.int64),
        "prefix_ids": _flat([p for p in prefixes if p is not None], np.int32),
        "token_ids": _flat([r.token_ids for r in rollouts], np.int32),
        "mask_bits": np.packbits(_flat([r.loss_mask for r in rollouts], np.bool_)),
        "logprobs": _flat([r.logprobs[r.loss_mask] for r in rollouts], np.float32),
    }


def unpack_rollouts(rows: list[dict[str, Any]], arrays: dict[str, np.ndarray]) -> list[Rollout]:
    """The inverse of ``pack_rollouts``."""
    lengths, prefix_lengths = arrays["lengths"], arrays["prefix_lengths"]
    mask = np.unpackbits(arrays["mask_bits"], count=int(lengths.sum())).astype(bool)
    logprobs = np.full(len(mask), np.nan, np.float32)
    logprobs[mask] = arrays["logprobs"]
    token_ids, masks, logprobs = (
        _cut(values, lengths) for values in (arrays["token_ids"], mask, logprobs)
    )
    prefixes = _cut(arrays["prefix_ids"], np.maximum(prefix_lengths, 0))
    return [
        Rollout(
            **row,
            token_ids=token_ids[i],
            loss_mask=masks[i],
            logprobs=logprobs[i],
            teacher_prefix_ids=prefixes[i] if prefix_lengths[i] >= 0 else None,
        )
        for i, row in enumerate(rows)
    ]


def _flat(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)


def _cut(values: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    return np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the journal has of a step."""

    rollouts: list[Rollout] | None
    """In the order of the requests; None: sample."""
    refused: str | None = None
    """Why a file that is there is not used, for a person."""


class Journal:
    """The journal of one run."""

    def __init__(self, run_dir: Path, *, fingerprint: str) -> None:
        """
        Args:
            fingerprint: of what may not change while a run goes on.
        """
        self._dir, self._fingerprint = run_dir / "journal", fingerprint

    def write(self, step: int, version: int, rollouts: Sequence[Rollout]) -> None:
        """
        Args:
            version: of the student that sampled them.

        Raises:
            StorageError: it could not be written; what was there of the step is gone.
        """
        rows, arrays = pack_rollouts(rollouts)
        header = {"fingerprint": self._fingerprint, "step": step, "version": version, "rows": rows}
        text = np.frombuffer(json.dumps(header).encode(), np.uint8)
        path = self._path(step)
        partial = path.with_name(path.name + ".partial")
        needed = total_bytes([text, *arrays.values()])
        with storing(f"the journal of step {step}", path, needed=needed):
            try:
                self._dir.mkdir(parents=True, exist_ok=True)
                path.unlink(missing_ok=True)
                with partial.open("wb") as file:
                    np.savez(file, header=text, **arrays)
                sync(partial)
                os.replace(partial, path)
            except OSError:
                with suppress(OSError):
                    partial.unlink(missing_ok=True)  # it may hold what is left of the disk
                raise

    def read(self, step: int, version: int, requests: Sequence[SampleRequest]) -> Found:
        """The step's rollouts, if they answer these requests, by this version of the student."""
        path = self._path(step)
        if not path.is_file():
            return Found(rollouts=None)
        try:
            with np.load(path, allow_pickle=False) as npz:
                arrays = {name: npz[name] for name in npz.files}
            header = json_object(arrays.pop("header").tobytes())
            rollouts = unpack_rollouts(header["rows"], arrays)
            other = self._other(header, step, version, rollouts, requests)
        except UNREADABLE as error:
            other = f"it is damaged ({' '.join(str(error).split())})"
        if other is None:
            return Found(rollouts=rollouts)
        return Found(
            rollouts=None,
            refused=f"step {step}: journal/{path.name} is not used, its prompts are sampled again: "
            f"{other}",
        )

    def _other(
        self,
        header: dict[str, Any],
        step: int,
        version: int,
        rollouts: list[Rollout],
        requests: Sequence[SampleRequest],
    ) -> str | None:
        """In what it is not what was asked for."""
        if header["fingerprint"] != self._fingerprint:
            return "another run wrote it"
        if (header["step"], header["version"]) != (step, version):
            return (
                f"it holds step {header['step']} by v{header['version']} of the student, which is "
                f"at v{version}"
            )
        asked = [(r.prompt.prompt_id, r.sample_idx) for r in requests]
        if asked != [(r.prompt_id, r.sample_idx) for r in rollouts]:
            return "it answers other prompts"
        for request, rollout in zip(requests, rollouts, strict=True):
            prompt = request.prompt.token_ids
            if not np.array_equal(prompt, rollout.token_ids[: rollout.prompt_len]):
                return f"prompt {request.prompt.prompt_id} was another text then"
        return None

    def prune(self, last: int) -> None:
        """Drops the steps up to ``last``, and what was left half written."""
        for path in self._dir.glob("step_*"):
            match = re.fullmatch(r"step_(\d+)\.npz", path.name)
            if match is None or int(match[1]) <= last:
                path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Forgets every step: the run begins anew."""
        shutil.rmtree(self._dir, ignore_errors=True)

    def _path(self, step: int) -> Path:
        return self._dir / f"step_{step:06d}.npz"
