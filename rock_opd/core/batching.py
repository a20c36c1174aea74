"""The only place that lays rollouts flat, deals them to ranks, packs them, and counts denominators.

Refuses to lose or repeat a position: whatever is dealt, packed and measured comes back to the same
flat place, or a ``ValueError`` says which did not. Masks come from lengths and positions, never
from ids, so a pad id that equals the eos id changes nothing.

Shape letters as in ``types``.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rock_opd.types import (
    Rollout,
    RowRequest,
    StepResult,
    StepSignals,
    TeacherScores,
    TokenWeights,
    TrainBatch,
)


def logit_rows(predicted: np.ndarray) -> np.ndarray:
    """Rows of a model's output that predict the tokens at ``predicted``: the one off-by-one.

    Row i of the output, which has read token i, predicts token i + 1. Token 0 is predicted by
    nothing (``Rollout`` refuses a mask that claims otherwise).
    """
    return predicted - 1


def flatten(rollouts: Sequence[Rollout], scores: Sequence[TeacherScores]) -> StepSignals:
    """The step's scalars: rollouts in order, each rollout's sampled tokens in order.

    Args:
        rollouts: the whole step; those without a sampled token add nothing.
        scores: the teacher's, in the same order. Entropies are kept only if every score has them.

    Raises:
        ValueError: scores of another rollout or of another length, or two rollouts of one key.
    """
    if len(rollouts) != len(scores):
        raise ValueError(f"{len(rollouts)} rollouts, but {len(scores)} teacher scores")
    keys = {rollout.key for rollout in rollouts}
    if len(keys) != len(rollouts):
        raise ValueError(f"{len(rollouts)} rollouts share {len(keys)} keys; keys must differ")
    for rollout, score in zip(rollouts, scores, strict=True):
        num = len(rollout.positions)
        if rollout.key != score.key:
            raise ValueError(f"rollout {rollout.key} was given the teacher scores of {score.key}")
        for values in (score.logprobs, score.entropy):
            if values is not None and len(values) != num:
                raise ValueError(
                    f"rollout {rollout.key}: {num} sampled tokens, {len(values)} scores"
                )

    def joined(parts: list[np.ndarray], dtype: type) -> np.ndarray:
        return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)

    lengths = [len(rollout.positions) for rollout in rollouts]
    entropies = [score.entropy for score in scores if score.entropy is not None]
    return StepSignals(
        token_ids=joined([r.token_ids[r.positions] for r in rollouts], np.int32),
        rollout_idx=np.repeat(np.arange(len(rollouts), dtype=np.int32), lengths),
        position=joined([np.arange(num) for num in lengths], np.int32),
        student_logprobs=joined([r.logprobs[r.positions] for r in rollouts], np.float32),
        teacher_logprobs=joined([score.logprobs for score in scores], np.float32),
        teacher_entropy=joined(entropies, np.float32) if len(entropies) == len(scores) else None,
    )


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Rollouts that one student rank packs into one forward; none where ranks are evened out."""

    rollouts: tuple[int, ...]
    """Indices into the step's rollouts, ascending."""
    teacher: int
    """The teacher replica that scores them and keeps their rows."""


@dataclass(frozen=True, kw_only=True)
class Deal:
    """Who gets which rollouts in one step."""

    ranks: tuple[tuple[MicroBatch, ...], ...]
    """[num_ranks][num_micro_batches]: as many micro-batches on every rank."""

    def for_teacher(self, teacher: int) -> list[int]:
        """Indices of the rollouts that this replica scores, ascending."""
        return sorted(
            i for rank in self.ranks for mb in rank if mb.teacher == teacher for i in mb.rollouts
        )


def deal(
    rollouts: Sequence[Rollout], *, num_ranks: int, micro_batch_tokens: int, num_teachers: int
) -> Deal:
    """Deals rollouts to micro-batches, micro-batches to ranks and to teacher replicas, by tokens.

    Every rollout is dealt once, also one without a sampled token. A micro-batch holds at most
    ``micro_batch_tokens`` tokens, but a longer sequence goes alone. Every rank gets the same number
    of micro-batches (at least one), and the j-th ones are of like size, since ranks wait for each
    other there. Every teacher replica gets work while there are rollouts enough. The result is a
    function of the lengths alone: the same step is always dealt the same.
    """
    if min(num_ranks, micro_batch_tokens, num_teachers) < 1:
        raise ValueError(
            f"num_ranks, micro_batch_tokens and num_teachers must be at least 1, got {num_ranks}, "
            f"{micro_batch_tokens} and {num_teachers}"
        )
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    full_bins = -(-sum(min(num, micro_batch_tokens) for num in lengths) // micro_batch_tokens)
    num_bins = max(1, full_bins, min(num_teachers, len(rollouts)))
    num_bins = num_ranks * -(-num_bins // num_ranks)
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    lightest = [(0, b) for b in range(num_bins)]  # a heap of (tokens, bin)
    for i in sorted(range(len(rollouts)), key=lambda i: (-lengths[i], i)):
        load, b = lightest[0]
        if load and load + lengths[i] > micro_batch_tokens:
            for b in range(len(bins), len(bins) + num_ranks):
                bins.append([])
                heapq.heappush(lightest, (0, b))
            load, b = lightest[0]
        bins[b].append(i)
        heapq.heapreplace(lightest, (load + lengths[i], b))
    loads = [sum(lengths[i] for i in members) for members in bins]

    heaviest_first = sorted(range(len(bins)), key=lambda b: (-loads[b], b))
    ranks: list[list[MicroBatch]] = [[] for _ in range(num_ranks)]
    rank_load, teacher_load = [0] * num_ranks, [0] * num_teachers
    for start in range(0, len(bins), num_ranks):
        # One micro-batch for every rank: the heaviest to the rank that has least so far.
        takers = sorted(range(num_ranks), key=lambda r: (rank_load[r], r))
        for b, rank in zip(heaviest_first[start : start + num_ranks], takers, strict=True):
            teacher = int(np.argmin(teacher_load))
            ranks[rank].append(MicroBatch(rollouts=tuple(sorted(bins[b])), teacher=teacher))
            rank_load[rank] += loads[b]
            teacher_load[teacher] += sum(len(rollouts[i].teacher_token_ids) for i in bins[b])
    return Deal(ranks=tuple(map(tuple, ranks)))


def build_batches(
    deal: Deal, rollouts: Sequence[Rollout], weights: TokenWeights
) -> list[list[TrainBatch]]:
    """Packs every rank's micro-batches; only projected positions become rows.

    A rollout without a projected position is left out of the packed tokens (nothing reads them);
    its micro-batch stays, if need be as the empty one: a single token 0 and no row.

    Returns:
        [num_ranks][num_micro_batches], as many on every rank.

    Raises:
        ValueError: weights that are not one per position of the step.
    """
    first = np.cumsum([0, *(len(rollout.positions) for rollout in rollouts)])
    if not len(weights.weight) == len(weights.measure) == first[-1]:
        raise ValueError(
            f"the step has {first[-1]} positions, got {len(weights.weight)} weights and "
            f"{len(weights.measure)} measures"
        )
    projected = weights.projected

    def pack(micro_batch: MicroBatch) -> TrainBatch:
        token_ids, position_ids = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)]
        predicted, index = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        requests, num_tokens = [], 0
        for i in micro_batch.rollouts:
            rollout = rollouts[i]
            rows = np.flatnonzero(projected[first[i] : first[i + 1]])
            if not len(rows):
                continue
            token_ids.append(rollout.token_ids)
            position_ids.append(np.arange(len(rollout.token_ids)))
            predicted.append(num_tokens + rollout.positions[rows])
            index.append(first[i] + rows)
            requests.append(RowRequest(key=rollout.key, rows=rows))
            num_tokens += len(rollout.token_ids)
        if not num_tokens:
            token_ids, position_ids = [np.zeros(1)], [np.zeros(1)]
        flat = np.concatenate(index)
        return TrainBatch(
            token_ids=np.concatenate(token_ids).astype(np.int32),
            position_ids=np.concatenate(position_ids).astype(np.int32),
            predicted=np.concatenate(predicted),
            weight=weights.weight[flat],
            index=flat.astype(np.int32),
            requests=tuple(requests),
            teacher_idx=micro_batch.teacher,
        )

    return [[pack(micro_batch) for micro_batch in rank] for rank in deal.ranks]


def total_weight(weights: TokenWeights, *, normalizer: Literal["kept", "all"]) -> float:
    """The step's one denominator, counted on what was generated; 0 for a step without positions.

    Args:
        weights: of the whole step.
        normalizer: "kept" divides by the sum of the weights, so that freezing makes the other
            positions weigh more; "all" by the number of sampled tokens, so that it does not.
    """
    if normalizer == "kept":
        return float(weights.weight.sum(dtype=np.float64))
    if normalizer == "all":
        return float(len(weights.weight))
    raise ValueError(f"normalizer must be 'kept' or 'all', got '{normalizer}'")


def scatter(
    results: Sequence[StepResult], num_tokens: int, field: Literal["kl", "logprobs", "entropy"]
) -> np.ndarray:
    """One column of all ranks' rows in flat order, float32 [num_tokens]; NaN where not measured.

    Raises:
        ValueError: two rows for one position, a position beyond the step, ragged rows, or
            entropies that were not asked for.
    """
    if any(getattr(result, field) is None for result in results):
        raise ValueError(f"the student ranks were not asked for '{field}'")
    index = np.concatenate([np.zeros(0, np.int32), *(result.index for result in results)])
    values = np.concatenate(
        [np.zeros(0, np.float32), *(getattr(result, field) for result in results)]
    )
    if len(index) != len(values):
        raise ValueError(f"{len(index)} row places, but {len(values)} values of '{field}'")
    if len(index) and not 0 <= index.min() <= index.max() < num_tokens:
        raise ValueError(
            f"row places {index.min()} to {index.max()} reach beyond the {num_tokens} positions"
        )
    times = np.bincount(index, minlength=1)
    if times.max() > 1:
        raise ValueError(
            f"position {times.argmax()} came back {times.max()} times: two ranks hold the same rows"
        )
    column = np.full(num_tokens, np.nan, np.float32)
    column[index] = values
    return column
