"""Context consistency of token types: the second level of the Rock Token method (paper, section 2).

An occurrence of a type is *persistently high* when its loss was high before training and is high
now; it is *consistent* when enough of the type's other persistent occurrences stand in a similar
context. ``CCR(v)`` is the share of all occurrences of v that are both. Everything is about a fixed
set of sequences, measured twice. No clock, no files, no global randomness, and memory that does
not grow with the number of pairs.

A *type* v is a vocabulary id, an *occurrence* a sampled position with x_t = v. Shape letters: ``S``
sequences, ``T`` tokens of one, ``N`` positions laid flat, ``P`` persistent ones among them, ``V``
types, ``D`` numbers of a context vector, ``H`` width of a model.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

_CHUNK = 1 << 15
"""Occurrences encoded at once."""
_BLOCK = 1 << 20
"""Cosines held at once."""
_SLACK = 1e-6
"""Rounding allowed a float32 cosine, so that equal windows are alike also at gamma = 1."""


@dataclass(frozen=True, kw_only=True)
class Positions:
    """N sampled positions of S sequences; a sequence is prompt and response."""

    sequences: Sequence[np.ndarray]
    """S arrays int32 [T_s]."""
    sequence_idx: np.ndarray
    """int64 [N], ascending."""
    place: np.ndarray
    """int64 [N]: index of x_t in its sequence."""

    @cached_property
    def token_ids(self) -> np.ndarray:
        """int32 [N]."""
        first = np.cumsum([0, *map(len, self.sequences)])[self.sequence_idx]
        flat = np.concatenate([np.zeros(0, np.int32), *self.sequences])
        return flat[first + self.place].astype(np.int32, copy=False)


class WindowEncoder(Protocol):
    """Turns the context of a position into a vector."""

    def fit(self, sequences: Sequence[np.ndarray]) -> WindowEncoder:
        """The same encoder, told which sequences (int32 [T_s]) it will be asked about."""
        ...

    def __call__(self, sequence: np.ndarray, places: np.ndarray) -> np.ndarray:
        """float32 [n, D] of unit length (or all 0) for the windows x[t-w : t+w] around ``places``
        of one sequence (int32 [T]); both ends and x_t itself belong to a window, and windows are
        cut where the sequence ends."""
        ...


class MeanEmbedding:
    """Mean input embedding of the window, less that of all tokens, as a direction.

    Embeddings share a direction, frequent tokens' most of all, so that uncentred means of any two
    windows are alike, and by how much hangs on the projection (docs/decisions/0009).
    """

    def __init__(self, embedding_VD: np.ndarray, *, window: int) -> None:
        """
        Args:
            embedding_VD: float [V, D], one row per token id (``project_embedding`` makes D small).
            window: w >= 0.
        """
        self._embedding_VD, self._window = embedding_VD, window
        self._centre_D = np.zeros(embedding_VD.shape[1])

    def fit(self, sequences: Sequence[np.ndarray]) -> MeanEmbedding:
        """Centred on the mean over every token of the sequences, prompts included; before that,
        on 0."""
        fitted = copy.copy(self)
        count = np.zeros(len(self._embedding_VD), np.int64)
        for sequence in sequences:
            np.add.at(count, sequence, 1)
        seen = np.flatnonzero(count)
        if len(seen):
            fitted._centre_D = np.average(
                self._embedding_VD[seen].astype(np.float64), axis=0, weights=count[seen]
            )
        return fitted

    def __call__(self, sequence: np.ndarray, places: np.ndarray) -> np.ndarray:
        start, stop = _window(len(sequence), places, self._window)
        running = np.zeros((len(sequence) + 1, self._embedding_VD.shape[1]))
        np.cumsum(self._embedding_VD[sequence] - self._centre_D, axis=0, out=running[1:])
        # What is left of a sum that cancels is rounding, not a direction.
        noise = 1e-12 * np.abs(running).max(initial=0.0)
        total = running[stop] - running[start]
        return _unit(np.where(np.abs(total) > noise, total, 0.0))


class HashedNgrams:
    """Counts of the window's 1- to 3-grams, hashed (signed) into ``dim`` places: needs no model.

    The sign keeps the inner product of two hashed windows unbiased: in expectation over hashes it
    is that of their n-gram counts (Weinberger et al., 2009). The hash is splitmix64's mixer, the
    same in every process.
    """

    def __init__(self, *, window: int, dim: int) -> None:
        self._window, self._dim = window, dim

    def fit(self, sequences: Sequence[np.ndarray]) -> HashedNgrams:
        """Itself: nothing is learned."""
        return self

    def __call__(self, sequence: np.ndarray, places: np.ndarray) -> np.ndarray:
        start, stop = _window(len(sequence), places, self._window)
        begins = start[:, None] + np.arange(2 * self._window + 1)
        row = np.broadcast_to(np.arange(len(places))[:, None], begins.shape)
        counts = np.zeros(len(places) * self._dim)
        ids = np.asarray(sequence).astype(np.uint64)
        gram = np.zeros(len(ids), np.uint64)
        for n in range(1, min(3, len(ids)) + 1):
            # The hash of an n-gram, from that of the n - 1 tokens it begins with.
            gram = _mix(gram[: len(ids) - n + 1] ^ _mix(ids[n - 1 :]))
            inside = begins + n <= stop[:, None]
            hashed = gram[begins[inside]]
            slot = row[inside] * self._dim + (hashed >> np.uint64(1)).astype(np.int64) % self._dim
            sign = np.where(hashed & np.uint64(1), 1.0, -1.0)
            counts += np.bincount(slot, sign, minlength=len(counts))
        return _unit(counts.reshape(len(places), self._dim))


def _window(num_tokens: int, places: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """First index of each window, and the one behind its last."""
    places = np.asarray(places, np.int64)
    return np.maximum(places - window, 0), np.minimum(places + window + 1, num_tokens)


def _unit(vectors: np.ndarray) -> np.ndarray:
    norm = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.divide(vectors, norm, out=np.zeros_like(vectors), where=norm > 0).astype(np.float32)


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64: uint64 to uint64, every bit of the answer hangs on every bit given."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def project_embedding(table_VH: np.ndarray, dim: int, seed: int) -> np.ndarray:
    """A table of vectors in ``dim`` numbers: a Gaussian random projection (Johnson-Lindenstrauss).

    The projection is a function of H, ``dim`` and ``seed`` alone and rows do not see each other, so
    a table may be handed over in blocks, and means may be taken after as well as before. Cosines
    are kept up to about (1 - cos^2) / sqrt(dim), one standard deviation: .09 at .5 and 64 numbers.

    Args:
        table_VH: float [V, H].

    Returns:
        float32 [V, dim]; squared lengths are those of ``table_VH`` in expectation.
    """
    rng = np.random.default_rng(seed)
    projection = rng.standard_normal((table_VH.shape[1], dim), np.float32) / np.float32(dim**0.5)
    return np.asarray(table_VH, np.float32) @ projection


def resolve_threshold(spec: str | float, values: np.ndarray) -> float:
    """``0.25`` or ``"0.25"`` is itself; ``"q0.8"`` the 0.8 quantile of the finite ``values``, NaN
    when there is none (and nothing is at least NaN)."""
    text = str(spec)
    if not text.startswith("q"):
        return float(text)
    known = np.asarray(values, np.float64)
    known = known[np.isfinite(known)]
    return float(np.quantile(known, float(text[1:]))) if len(known) else float("nan")


@dataclass(frozen=True, kw_only=True)
class ContextStats:
    """Columns float64 [V]."""

    frequency: np.ndarray
    """Occurrences in the probe set, high or not."""
    persistent: np.ndarray
    """|O_PH(v)|."""
    judged: np.ndarray
    """Persistent occurrences whose rho was computed (all of them, or a random part)."""
    kept: np.ndarray
    """Estimate of the number with rho >= eta: persistent x share of the judged that are kept."""
    ccr: np.ndarray
    """kept / frequency; 0 where the type does not occur."""
    tau_pre: float
    tau_post: float
    num_pairs: int
    """Pairs of contexts that were compared."""


def context_consistency(
    positions: Positions,
    loss_pre: np.ndarray,
    loss_post: np.ndarray,
    encoder: WindowEncoder,
    *,
    num_types: int,
    tau_pre: str | float,
    tau_post: str | float,
    gamma: float,
    eta: float,
    reservoir: int,
    max_pairs: int,
    rng: np.random.Generator,
) -> ContextStats:
    """O_PH, rho and CCR of every type (paper, section 2, level 2).

    An occurrence is persistent when ``loss_pre >= tau_pre`` and ``loss_post >= tau_post``; its rho
    is the share of the type's other persistent occurrences whose window has a cosine of at least
    ``gamma`` with its own (0 when there is no other), and it is kept when ``rho >= eta``.

    The work is bounded by judging fewer occurrences, never by comparing a judged one with fewer
    others: each is compared with ALL others of its type, so its rho is exact and the share kept of
    a uniform draw is an unbiased estimate of the share kept of all. A rho estimated from a sample
    would be unbiased itself, but not once it is held against eta.

    Args:
        positions: N positions; every one counts in ``frequency``.
        loss_pre: float [N], nats, of the student as it was; NaN where unknown, which is not high.
        loss_post: the same of the student as it is.
        encoder: fitted here to ``positions.sequences``.
        tau_pre, tau_post: as ``resolve_threshold`` reads them, each over all N of its own losses.
        reservoir: most occurrences judged per type, drawn without replacement.
        max_pairs: bound on ``num_pairs``. Where the reservoir would exceed it, it is lowered, for
            all types alike, to the largest that does not; one occurrence per type is always judged.
        rng: draws who is judged.

    Returns:
        Exact columns when no type has more persistent occurrences than the reservoir in force.

    Raises:
        ValueError: arrays that are not one per position, or ids beyond the types.
    """
    types = positions.token_ids
    if not len(types) == len(positions.place) == len(loss_pre) == len(loss_post):
        raise ValueError(
            f"{len(types)} positions, {len(loss_pre)} losses before and {len(loss_post)} now must "
            "be one each"
        )
    if len(types) and not 0 <= types.min() <= types.max() < num_types:
        raise ValueError(f"token ids {types.min()} to {types.max()} reach beyond {num_types} types")
    tau_pre, tau_post = resolve_threshold(tau_pre, loss_pre), resolve_threshold(tau_post, loss_post)
    high = np.flatnonzero((loss_pre >= tau_pre) & (loss_post >= tau_post))
    frequency = np.bincount(types, minlength=num_types)
    persistent = np.bincount(types[high], minlength=num_types)

    encoder = encoder.fit(positions.sequences)
    limit = _fitting_reservoir(persistent, reservoir, max_pairs)
    judged = np.sort(_draw(types[high], limit, rng))
    alike = _count_alike(positions, high, judged, encoder, gamma)
    others = persistent[types[high[judged]]] - 1
    kept = np.divide(alike, others, out=np.zeros(len(judged)), where=others > 0) >= eta

    num_judged = np.bincount(types[high[judged]], minlength=num_types)
    num_kept = np.bincount(types[high[judged[kept]]], minlength=num_types)
    # Multiplied first: exact when all were judged.
    estimate = num_kept * persistent / np.maximum(num_judged, 1)
    return ContextStats(
        frequency=frequency.astype(np.float64),
        persistent=persistent.astype(np.float64),
        judged=num_judged.astype(np.float64),
        kept=estimate,
        ccr=estimate / np.maximum(frequency, 1),
        tau_pre=tau_pre,
        tau_post=tau_post,
        num_pairs=int(others.sum()),
    )


def _fitting_reservoir(persistent: np.ndarray, reservoir: int, max_pairs: int) -> int:
    """The largest number of judged occurrences per type, 1 to ``reservoir``, within the pairs."""
    persistent = persistent[persistent > 1].astype(np.int64)

    def pairs(limit: int) -> int:
        return int((np.minimum(persistent, limit) * (persistent - 1)).sum())

    least, most = 1, max(1, min(reservoir, int(persistent.max(initial=1))))
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if pairs(middle) <= max_pairs else (least, middle - 1)
    return least


def _draw(types: np.ndarray, limit: int, rng: np.random.Generator) -> np.ndarray:
    """Indices of at most ``limit`` occurrences of each type: those of its smallest random keys."""
    order = np.lexsort((rng.random(len(types)), types))
    _, first, count = np.unique(types[order], return_index=True, return_counts=True)
    rank = np.arange(len(types)) - np.repeat(first, count)
    return order[rank < limit]


def _count_alike(
    positions: Positions,
    high: np.ndarray,
    judged: np.ndarray,
    encoder: WindowEncoder,
    gamma: float,
) -> np.ndarray:
    """int64 [J]: for each of the judged (ascending indices into ``high``), how many other
    persistent occurrences of its type stand in a similar window.

    Holds the vectors of the judged and of one chunk of the others.
    """
    types = positions.token_ids[high]
    by_type = judged[np.argsort(types[judged], kind="stable")]
    vectors_JD = _encode(positions, high[judged], encoder)
    vectors_JD = vectors_JD[np.searchsorted(judged, by_type)]
    alike = np.zeros(len(judged), np.int64)
    for begin in range(0, len(high), _CHUNK):
        chunk = np.arange(begin, min(begin + _CHUNK, len(high)))
        order = np.argsort(types[chunk], kind="stable")
        vectors_CD = _encode(positions, high[chunk], encoder)[order]
        chunk = chunk[order]
        present, first, count = np.unique(types[chunk], return_index=True, return_counts=True)
        lows = np.searchsorted(types[by_type], present)
        highs = np.searchsorted(types[by_type], present, side="right")
        for low, up, start, num in zip(lows, highs, first, count, strict=True):
            step = max(1, _BLOCK // (up - low))
            for at in range(start, start + num, step):
                part = slice(at, min(at + step, start + num))
                hit = vectors_JD[low:up] @ vectors_CD[part].T >= gamma - _SLACK
                hit &= by_type[low:up, None] != chunk[None, part]
                alike[low:up] += hit.sum(axis=1)
    back = np.empty(len(judged), np.int64)
    back[np.searchsorted(judged, by_type)] = alike
    return back


def _encode(positions: Positions, rows: np.ndarray, encoder: WindowEncoder) -> np.ndarray:
    """float32 [n, D]: the windows of ``rows``, ascending indices into the N positions."""
    if not len(rows):
        return np.zeros((0, 1), np.float32)
    found, first = np.unique(positions.sequence_idx[rows], return_index=True)
    parts = [
        encoder(positions.sequences[s], positions.place[places])
        for s, places in zip(found, np.split(rows, first[1:]), strict=True)
    ]
    return np.concatenate(parts)
