"""Occurrence files made by hand, for tests of the commands that read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rock_opd.models import load_tokenizer, tokenizer_fingerprint, vocabulary_width
from rock_opd.occurrences import FileInfo, Occurrences, OccurrenceWriter, newline_counts
from rock_opd.types import Rollout


@dataclass(frozen=True, kw_only=True)
class Response:
    """One response to a prompt of its own, unless ``prompt_id`` says otherwise."""

    ids: Sequence[int]
    kl: Sequence[float]
    prompt_id: str
    sample_idx: int = 0
    prompt_ids: Sequence[int] = (1, 2)
    measure: Sequence[float] | None = None
    """All measured by default."""
    logratio: Sequence[float] | None = None
    """The KL by default, 0 where that is unknown."""
    step: int = 0


@dataclass
class Watch:
    """What a command told while it ran."""

    lines: list[str] = field(default_factory=list)
    pieces: list[tuple[int, int]] = field(default_factory=list)

    def say(self, line: str) -> None:
        self.lines.append(line)

    def track(self, done: int, total: int) -> None:
        self.pieces.append((done, total))


def file_info(student: Path, **changes: object) -> FileInfo:
    """Of a file made with this model's tokenizer."""
    tokenizer = load_tokenizer(str(student))
    return FileInfo(
        **{
            "tokenizer": tokenizer_fingerprint(tokenizer),
            "num_types": vocabulary_width(tokenizer),
            "student": str(student),
            "teacher": str(student.with_name("teacher")),
            "estimator": "hidden",
            "temperature": 1.0,
            "top_p": 1.0,
            **changes,
        }
    )


def write_file(path: Path, info: FileInfo, responses: Sequence[Response]) -> Path:
    """Writes them in order."""
    rollouts, columns = [], {"step": [], "kl": [], "measure": [], "logratio": []}
    for response in responses:
        num, start = len(response.ids), len(response.prompt_ids)
        mask = np.arange(start + num) >= start
        rollouts.append(
            Rollout(
                prompt_id=response.prompt_id,
                sample_idx=response.sample_idx,
                token_ids=np.array([*response.prompt_ids, *response.ids], np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, -1.0, np.nan).astype(np.float32),
                finish_reason="length",
                policy_version=0,
                prompt_len=start,
            )
        )
        columns["step"] += [response.step] * num
        columns["kl"] += list(response.kl)
        columns["measure"] += list(response.measure or [1.0] * num)
        columns["logratio"] += list(
            np.nan_to_num(response.kl, nan=0.0) if response.logratio is None else response.logratio
        )
    rows = Occurrences(
        rollouts=rollouts,
        step=np.array(columns.pop("step"), np.int32),
        student_entropy=None,
        teacher_entropy=None,
        **{name: np.array(values, np.float32) for name, values in columns.items()},
    )
    newlines = newline_counts(load_tokenizer(info.student), info.num_types)
    with OccurrenceWriter(path, info, newlines=newlines) as writer:
        writer.write(rows)
    return path


def random_responses(
    num_prompts: int,
    *,
    seed: int,
    num_types: int = 300,
    first_type: int = 300,
    samples: int = 2,
    length: int = 60,
    high: Sequence[int] = (),
    factor: float = 1.0,
) -> list[Response]:
    """Zipf-distributed types with exponential losses; those of ``high`` lose 5 times as much.

    Args:
        factor: on every loss: another checkpoint over the same responses.
    """
    rng = np.random.default_rng(seed)
    share = 1 / np.arange(1, num_types + 1)
    made = []
    for p in range(num_prompts):
        for s in range(samples):
            ids = first_type + rng.choice(num_types, length, p=share / share.sum())
            kl = rng.exponential(0.1, length) * np.where(np.isin(ids, high), 5.0, 1.0) * factor
            made.append(Response(ids=ids.tolist(), kl=kl.tolist(), prompt_id=f"p{p}", sample_idx=s))
    return made
