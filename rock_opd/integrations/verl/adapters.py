"""Our records as a verl batch, and back, with nothing lost on the way.

Two forms of batch: the ``TensorDict`` of verl's v1 trainers (jagged tensors, no padding) and the
``DataProto`` of the older ones and of rewards (prompts padded on the left, responses on the right).
verl's own fields have verl's names, dtypes and alignment, so that its losses and engines read them;
what verl has no place for stands beside them under ``rock_``, and batches that verl made itself,
which lack those, are read too.

The alignments meet here, and nowhere else: ours indexes by the predicted token, verl's teacher
fields by the row that predicts it, so token t stands at row t - 1 and the last row, which predicts
nothing, is 0.

Refuses what a verl batch cannot say: a trained token inside the prompt, an empty prompt, teacher
rows of kind ``hidden``, or of several kinds in one batch.

Shapes: ``B`` sequences, ``S`` tokens of one, ``P`` of its prompt, ``R`` of its response, ``N`` of
them masked in, ``K`` top-k.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from verl import DataProto
from verl.utils import tensordict_utils as tu

from rock_opd.core.objective import MIN_TAIL_LOGPROB
from rock_opd.errors import DataError
from rock_opd.types import Rollout, TeacherRows, TeacherScores

_SAMPLED = "rock_teacher_sampled_logprobs"
_TAIL = "rock_teacher_tail_logprobs"
_PREFIX = "rock_teacher_prefix_ids"
_HAS_PREFIX = "rock_has_teacher_prefix"
_RESPONSE = ("responses", "response_mask", "loss_mask", "rollout_log_probs", _SAMPLED, _TAIL)
"""Nested fields as long as the response."""
_SEQUENCE = ("input_ids", "position_ids", "teacher_ids", "teacher_logprobs")
_NO_ID = -1


# --- v1: TensorDict -------------------------------------------------------------------------------


def to_tensordict(
    rollouts: Sequence[Rollout], teacher: Sequence[TeacherRows] | None = None
) -> TensorDict:
    """A batch for verl's v1 trainers and engines.

    ``uid`` is the prompt's id, by which verl groups samples. ``rollout_log_probs`` is 0 where ours
    is NaN: at tokens that were not sampled, and at given responses.

    Args:
        rollouts: at least one.
        teacher: for each rollout the rows of all its ``positions``, kind ``sampled`` or
            ``topk_tail``, all of one kind and K.

    Raises:
        ValueError: what this module refuses, or a sampled token without a log-probability.
    """
    if not rollouts:
        raise ValueError("a verl batch needs at least one rollout, got none")
    rows = [_sequence_fields(rollout) for rollout in rollouts]
    if teacher is not None:
        shape = _teacher_shape(teacher)
        for row, rollout, known in zip(rows, rollouts, teacher, strict=True):
            row |= _teacher_fields(rollout, known, shape)
    if any(rollout.teacher_prefix_ids is not None for rollout in rollouts):
        for row, rollout in zip(rows, rollouts, strict=True):
            prefix = rollout.teacher_prefix_ids
            row[_PREFIX] = _tensor(() if prefix is None else prefix, torch.int32)
    fields: dict[str, Tensor | list[str]] = {
        key: torch.nested.as_nested_tensor([row[key] for row in rows], layout=torch.jagged)
        for key in rows[0]
    }
    if _PREFIX in fields:
        has = [rollout.teacher_prefix_ids is not None for rollout in rollouts]
        fields[_HAS_PREFIX] = torch.tensor(has)
    fields["rock_sample_idx"] = torch.tensor([rollout.sample_idx for rollout in rollouts])
    fields["rock_policy_version"] = torch.tensor([rollout.policy_version for rollout in rollouts])
    fields["uid"] = [rollout.prompt_id for rollout in rollouts]
    fields["rock_finish_reason"] = [rollout.finish_reason for rollout in rollouts]
    fields["rock_teacher_id"] = [rollout.teacher_id for rollout in rollouts]
    return tu.get_tensordict(fields)


def from_tensordict(
    batch: TensorDict, *, policy_version: int = 0
) -> tuple[list[Rollout], list[TeacherRows] | None]:
    """What ``to_tensordict`` was given, or as much as a batch of verl's own has of it.

    A batch of verl's own: ``uid`` (else ``row-<number>``) is the prompt's id, samples are counted
    per prompt, ``rollout_log_probs`` may be missing (NaN), a response counts as finished, and of a
    top-k table the tail is what its mass leaves of 1, the sampled token's log-probability what the
    table says, NaN where it does not have it.

    Args:
        policy_version: of the weights that sampled a batch of verl's own.

    Returns:
        The rollouts, and the teacher's rows where the batch has them.

    Raises:
        DataError: a teacher table of single tokens that are not the ones sampled.
    """
    num = batch.batch_size[0]
    nested = {key: batch[key].unbind() for key in (*_RESPONSE, *_SEQUENCE, _PREFIX) if key in batch}
    nested["prompts"] = batch["prompts"].unbind()
    plain = _plain_fields(batch, num, policy_version)
    rollouts, teacher = [], []
    for i in range(num):
        row = {key: values[i] for key, values in nested.items()}
        rollouts.append(_rollout(row, {key: values[i] for key, values in plain.items()}))
        if "teacher_logprobs" in row:
            teacher.append(_teacher_rows(rollouts[-1], row))
    return rollouts, teacher or None


def teacher_scores(
    rollouts: Sequence[Rollout], teacher: Sequence[TeacherRows]
) -> list[TeacherScores]:
    """The scalars of the rows, for ``core.batching.flatten``; verl's teachers know no entropy."""
    return [
        TeacherScores(key=rollout.key, logprobs=rows.logprobs, entropy=None)
        for rollout, rows in zip(rollouts, teacher, strict=True)
    ]


def by_response(values: np.ndarray, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
    """A step's flat values, as ``TokenWeights`` has them, one array per response, 0 at tokens that
    were not sampled: what ``losses.weight_fields`` takes.

    Args:
        values: float32 [N], the rollouts' ``positions`` one behind the other.
    """
    ends = np.cumsum([len(rollout.positions) for rollout in rollouts])
    if len(values) != (ends[-1] if len(ends) else 0):
        raise ValueError(f"{len(values)} values for {ends[-1] if len(ends) else 0} positions")
    rows = []
    for rollout, part in zip(rollouts, np.split(values, ends[:-1]), strict=True):
        row = np.zeros(len(rollout.token_ids), np.float32)
        row[rollout.positions] = part
        rows.append(row[rollout.prompt_len :])
    return rows


def _tensor(values: np.ndarray | Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.array(values)).to(dtype)  # a copy: ours may be read-only


def _sequence_fields(rollout: Rollout) -> dict[str, Tensor]:
    at, mask = rollout.prompt_len, rollout.loss_mask
    if at < 1 or mask[:at].any():
        raise ValueError(
            f"rollout {rollout.key}: a verl batch needs a prompt of at least one token and trains "
            f"none of it, got a prompt of {at} with {int(mask[:at].sum())} masked in"
        )
    if rollout.finish_reason != "given" and not np.isfinite(rollout.logprobs[mask]).all():
        raise ValueError(f"rollout {rollout.key}: a sampled token has no log-probability")
    ids = _tensor(rollout.token_ids, torch.int64)
    response_mask = _tensor(mask[at:], torch.int64)
    known = np.where(mask & np.isfinite(rollout.logprobs), rollout.logprobs, 0.0)
    return {
        "prompts": ids[:at],
        "responses": ids[at:],
        "input_ids": ids,
        "position_ids": torch.arange(len(ids)),
        "response_mask": response_mask,
        "loss_mask": response_mask,
        "rollout_log_probs": _tensor(known[at:], torch.float32),
    }


def _teacher_shape(teacher: Sequence[TeacherRows]) -> tuple[str, int]:
    """Kind and K of all of them."""
    shapes = {
        (rows.kind, 1 if rows.topk_ids is None else rows.topk_ids.shape[1]) for rows in teacher
    }
    if len(shapes) != 1 or next(iter(shapes))[0] == "hidden":
        raise ValueError(
            "teacher rows in a verl batch are all of kind sampled, or all topk_tail with one K, "
            f"got {sorted(shapes)}"
        )
    return shapes.pop()


def _teacher_fields(
    rollout: Rollout, rows: TeacherRows, shape: tuple[str, int]
) -> dict[str, Tensor]:
    kind, k = shape
    at = rollout.positions
    if len(rows.logprobs) != len(at):
        raise ValueError(
            f"rollout {rollout.key}: {len(rows.logprobs)} teacher rows for {len(at)} positions"
        )
    num = len(rollout.token_ids)
    ids, logprobs = np.zeros((num, k), np.int32), np.zeros((num, k), np.float32)
    if kind == "sampled":
        ids[at - 1, 0], logprobs[at - 1, 0] = rollout.token_ids[at], rows.logprobs
    else:
        ids[at - 1], logprobs[at - 1] = rows.topk_ids, rows.topk_logprobs
    fields = {
        "teacher_ids": _tensor(ids, torch.int32),
        "teacher_logprobs": _tensor(logprobs, torch.float32),
    }
    if kind == "topk_tail":
        for name, values in ((_SAMPLED, rows.logprobs), (_TAIL, rows.tail_logprob)):
            whole = np.zeros(num, np.float32)
            whole[at] = values
            fields[name] = _tensor(whole[rollout.prompt_len :], torch.float32)
    return fields


def _plain_fields(batch: TensorDict, num: int, policy_version: int) -> dict[str, list]:
    """The fields of one value per sequence, with what stands for those that verl does not have."""

    def read(key: str, otherwise: Callable[[], list]) -> list:
        return list(tu.get(batch, key)) if key in batch else otherwise()

    ids = [str(uid) for uid in read("uid", lambda: [f"row-{i + 1}" for i in range(num)])]
    seen: Counter[str] = Counter()
    counted = []
    for prompt_id in ids:
        counted.append(seen[prompt_id])
        seen[prompt_id] += 1
    return {
        "prompt_id": ids,
        "sample_idx": read("rock_sample_idx", lambda: counted),
        "policy_version": read("rock_policy_version", lambda: [policy_version] * num),
        "finish_reason": read("rock_finish_reason", lambda: ["stop"] * num),
        "teacher_id": read("rock_teacher_id", lambda: ["teacher"] * num),
        "has_prefix": read(_HAS_PREFIX, lambda: [False] * num),
    }


def _rollout(row: dict[str, Tensor], plain: dict) -> Rollout:
    prompt_len, num = len(row["prompts"]), len(row["input_ids"])
    mask = np.zeros(num, bool)
    mask[prompt_len:] = row["response_mask"].numpy() != 0
    logprobs = np.full(num, np.nan, np.float32)
    if plain["finish_reason"] != "given" and "rollout_log_probs" in row:
        known = row["rollout_log_probs"].numpy().astype(np.float32)
        logprobs[prompt_len:] = np.where(mask[prompt_len:], known, np.nan)
    return Rollout(
        prompt_id=plain["prompt_id"],
        sample_idx=int(plain["sample_idx"]),
        token_ids=row["input_ids"].numpy().astype(np.int32),
        loss_mask=mask,
        logprobs=logprobs,
        finish_reason=plain["finish_reason"],
        policy_version=int(plain["policy_version"]),
        prompt_len=prompt_len,
        teacher_id=plain["teacher_id"],
        teacher_prefix_ids=row[_PREFIX].numpy().astype(np.int32) if plain["has_prefix"] else None,
    )


def _teacher_rows(rollout: Rollout, row: dict[str, Tensor]) -> TeacherRows:
    at = rollout.positions
    ids = row["teacher_ids"].numpy()[at - 1].astype(np.int32)
    logprobs = row["teacher_logprobs"].numpy()[at - 1].astype(np.float32)
    own = ids == rollout.token_ids[at, None]
    if logprobs.shape[1] == 1 and _TAIL not in row:
        if not own.all():
            raise DataError(
                f"rollout {rollout.key}: teacher_ids at row t must be the token at t + 1, "
                f"{int((~own).sum())} of {len(at)} are not: the teacher's rows are shifted, or are "
                "a top-1 table"
            )
        return TeacherRows(kind="sampled", logprobs=logprobs[:, 0])
    if _TAIL in row:
        within = at - rollout.prompt_len
        sampled, tail = row[_SAMPLED].numpy()[within], row[_TAIL].numpy()[within]
    else:
        sampled = np.where(own, logprobs, 0.0).sum(1)
        sampled[~own.any(1)] = np.nan
        mass = np.exp(logprobs.astype(np.float64)).sum(1)
        tail = np.log(np.maximum(1.0 - mass, np.exp(MIN_TAIL_LOGPROB)))
    return TeacherRows(
        kind="topk_tail",
        logprobs=sampled.astype(np.float32),
        topk_ids=ids,
        topk_logprobs=logprobs,
        tail_logprob=tail.astype(np.float32),
    )


# --- v0: DataProto --------------------------------------------------------------------------------


def to_dataproto(
    rollouts: Sequence[Rollout],
    teacher: Sequence[TeacherRows] | None = None,
    *,
    pad_token_id: int,
) -> DataProto:
    """A padded batch with ``attention_mask``; fields and errors as for ``to_tensordict``."""
    batch = to_tensordict(rollouts, teacher)
    prompt_lens = batch["prompts"].offsets().diff().tolist()
    response_lens = batch["responses"].offsets().diff().tolist()
    max_prompt, max_response = max(prompt_lens), max(response_lens)
    ids = {"prompts", "responses", "input_ids", "teacher_ids"}
    tensors: dict[str, Tensor] = {}
    names: dict[str, np.ndarray] = {}

    def put(key: str, rows: Sequence[Tensor], starts: Sequence[int], width: int, pad: int) -> None:
        out = rows[0].new_full((len(rows), width, *rows[0].shape[1:]), pad)
        for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
            out[i, start : start + len(row)] = row
        tensors[key] = out

    left = [max_prompt - num for num in prompt_lens]
    none = [0] * len(rollouts)
    for key, value in batch.items():
        pad = pad_token_id if key in ids else 0
        if not isinstance(value, Tensor):
            names[key] = np.array(tu.get(batch, key), dtype=object)
        elif not value.is_nested:
            tensors[key] = value
        elif key == _PREFIX:
            put(key, value.unbind(), none, int(value.offsets().diff().max()), _NO_ID)
        elif key == "prompts":
            put(key, value.unbind(), left, max_prompt, pad)
        elif key in _RESPONSE:
            put(key, value.unbind(), none, max_response, pad)
        else:
            put(key, value.unbind(), left, max_prompt + max_response, pad)
    ones = [torch.ones(len(rollout.token_ids), dtype=torch.int64) for rollout in rollouts]
    put("attention_mask", ones, left, max_prompt + max_response, 0)
    return DataProto.from_dict(tensors=tensors, non_tensors=names)


def from_dataproto(
    data: DataProto, *, policy_version: int = 0
) -> tuple[list[Rollout], list[TeacherRows] | None]:
    """The way back; as ``from_tensordict``."""
    batch, attention = data.batch, data.batch["attention_mask"].bool()
    max_prompt = batch["prompts"].shape[1]
    in_prompt, in_response = attention[:, :max_prompt], attention[:, max_prompt:]

    def rows(key: str) -> list[Tensor]:
        value = batch[key]
        if key == _PREFIX:
            kept = value != _NO_ID
        elif key == "prompts":
            kept = in_prompt
        else:
            kept = in_response if key in _RESPONSE else attention
        return [row[keep] for row, keep in zip(value, kept, strict=True)]

    fields: dict[str, Tensor | list] = {
        key: torch.nested.as_nested_tensor(rows(key), layout=torch.jagged)
        for key in ("prompts", *_RESPONSE, *_SEQUENCE, _PREFIX)
        if key in batch
    }
    for key in ("rock_sample_idx", "rock_policy_version", _HAS_PREFIX):
        if key in batch:
            fields[key] = batch[key]
    for key in ("uid", "rock_finish_reason", "rock_teacher_id"):
        if key in data.non_tensor_batch:
            fields[key] = list(data.non_tensor_batch[key])
    return from_tensordict(tu.get_tensordict(fields), policy_version=policy_version)
