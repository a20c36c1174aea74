"""vLLM's prompt log-probabilities as rows: the engine in this process and a server read them alike.

Refuses a position whose own token, or one of the k most likely, is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rock_opd.core.objective import MIN_TAIL_LOGPROB
from rock_opd.engines.parking import Rows
from rock_opd.errors import DataError
from rock_opd.types import TeacherRows


@dataclass(frozen=True)
class FlatTable:
    """The fields of vLLM's ``FlatLogprobs`` that are read here."""

    start_indices: list[int]
    end_indices: list[int]
    token_ids: list[int]
    logprobs: list[float]


def read_prompt_logprobs(
    flat: FlatTable | Any, token_ids: np.ndarray, positions: np.ndarray, *, k: int
) -> Rows:
    """Rows of the tokens at ``positions`` out of vLLM's prompt log-probabilities.

    vLLM gives position t the entries of the token AT t (position 0, which nothing predicts, is
    empty): the token itself and the k most likely ones, so k + 1 entries, or k different ones where
    the token is among them. Everything is read by id and value, nothing by place.

    Args:
        flat: vLLM's ``FlatLogprobs`` of the whole sequence.
        positions: int64 [R], each >= 1.
        k: top-k entries to return, 0 for none.

    Raises:
        DataError: a position without its own token, or with fewer than k entries.
    """
    logprobs = np.zeros(len(positions), np.float32)
    topk_ids = np.zeros((len(positions), k), np.int32)
    topk_logprobs = np.zeros((len(positions), k), np.float32)
    for row, position in enumerate(positions):
        span = slice(flat.start_indices[position], flat.end_indices[position])
        ids, first = np.unique(np.asarray(flat.token_ids[span], np.int32), return_index=True)
        values = np.asarray(flat.logprobs[span], np.float32)[first]
        own = ids == token_ids[position]
        if not own.any() or len(ids) < k:
            raise DataError(
                f"teacher: position {position} has log-probabilities of {len(ids)} ids, expected "
                f"its own token {token_ids[position]} and the {k} most likely ones"
            )
        logprobs[row] = values[own][0]
        best = np.argsort(-values, kind="stable")[:k]
        topk_ids[row], topk_logprobs[row] = ids[best], values[best]
    if not k:
        return Rows(logprobs=logprobs)
    mass = np.exp(topk_logprobs.astype(np.float64)).sum(1)
    tail = np.log(np.maximum(1.0 - mass, np.exp(MIN_TAIL_LOGPROB)))
    return Rows(
        logprobs=logprobs,
        topk_ids=topk_ids,
        topk_logprobs=topk_logprobs,
        tail_logprob=tail.astype(np.float32),
    )


def rows_payload(rows: Rows, k: int) -> TeacherRows:
    """What travels: ``topk_tail``, or ``sampled`` where k is 0."""
    return TeacherRows(
        kind="topk_tail" if k else "sampled",
        logprobs=rows.logprobs,
        topk_ids=rows.topk_ids,
        topk_logprobs=rows.topk_logprobs,
        tail_logprob=rows.tail_logprob,
    )
