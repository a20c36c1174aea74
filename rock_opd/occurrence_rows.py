"""What the rows of an occurrence file must hold, for whoever writes them and whoever reads them.

A fault is one line that names column and row (from 0, in the file), the response it stands in, what
was expected and what is there.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

TOLERANCE = 1e-4
"""Nats by which rounding may take a quantity past its bound. A KL or an entropy is a sum over the
vocabulary in float32, wrong by about 1e-5 at most (identical models give some 1e-6 of either
sign); what lies beyond ten times that is no rounding. The sampled log-ratio that stands in the
``kl`` column under ``teacher.payload=sampled`` has no sign and is not held to it."""
LEAST = {"sample_idx": 0, "step": 0, "policy_version": -1, "line": 0, "column": 0, "prompt_len": 0}
"""Of whole-number columns."""

Fault = tuple[str, np.ndarray, str]
"""Column, bool [N] of the rows that are wrong, and what was expected of them."""


def column_fault(table: pa.Table, *, estimator: str, first_row: int) -> str | None:
    """The first fault of single values: nothing missing, nothing that is no number, nothing out of
    its range. None when there is none.

    Unknown, and so NaN, may be ``kl`` where ``measure`` is 0, and ``sampled_logprob`` and
    ``logratio`` of a given response (``policy_version`` -1). Entropies nobody knows are null.

    Args:
        table: a row group, columns and types of ``occurrences.SCHEMA``.
        estimator: ``FileInfo.estimator``.
        first_row: of the file, that the table begins with.
    """
    for name, bad, expected in _faults(table, estimator):
        if bad.any():
            row = int(bad.argmax())
            got = table[name][row].as_py()
            others = int(bad.sum()) - 1
            more = f" (and {others} more such rows)" if others else ""
            return (
                f"{_place(table, name, row, first_row)}: expected {expected}, got "
                f"{'nothing' if got is None else got}{more}; score the responses again"
            )
    return None


def _faults(table: pa.Table, estimator: str) -> Iterator[Fault]:
    for field in table.schema:
        column = table[field.name]
        if not field.nullable and column.null_count:
            yield field.name, column.is_null().to_numpy(), "a value"
    for name, least in LEAST.items():
        yield name, table[name].fill_null(least).to_numpy() < least, f"at least {least}"

    given = table["policy_version"].to_numpy() < 0
    measure = table["measure"].to_numpy()
    yield "measure", ~(np.isfinite(measure) & (measure >= 0)), "a finite number, 0 or above"
    kl, measured = table["kl"].to_numpy(), measure > 0
    yield "kl", measured & ~np.isfinite(kl), "a finite KL, as measure is above 0"
    if estimator != "sampled":
        yield "kl", measured & (kl < -TOLERANCE), f"a KL of 0 or above (rounding: {TOLERANCE:g})"
    for name in ("logratio", "sampled_logprob"):
        values = table[name].to_numpy()
        yield name, ~(np.isfinite(values) | (given & np.isnan(values))), "a finite number"
    logprob = table["sampled_logprob"].to_numpy()
    yield "sampled_logprob", logprob > TOLERANCE, f"a log-probability (rounding: {TOLERANCE:g})"
    for name in ("student_entropy", "teacher_entropy"):
        values = table[name].fill_null(0.0).to_numpy()
        good = np.isfinite(values) & (values >= -TOLERANCE)
        yield name, ~good, f"an entropy of 0 or above (rounding: {TOLERANCE:g})"


def sequence_fault(table: pa.Table, *, first_row: int, last_sample: int) -> str | None:
    """The first fault of rows that are not whole responses in the order written; None when there
    is none.

    Args:
        last_sample: of the row before the table; -1 at the file's start.
    """
    sample, position = table["sample"].to_numpy(), table["position"].to_numpy()
    step = np.diff(sample, prepend=last_sample)
    first = step != 0
    first[0] = True
    back = step < 0
    back[0] |= step[0] == 0
    if back.any():
        row = int(back.argmax())
        before = last_sample if row == 0 else sample[row - 1]
        return (
            f"{_place(table, 'sample', row, first_row)}: stands behind sample {before}; rows were "
            "appended twice, or sorted: use the file as it was written"
        )
    starts = np.flatnonzero(first)
    counts = np.diff(starts, append=len(sample))
    length = np.repeat(counts, counts)
    begins = np.repeat(starts, counts)
    lacking = position != np.arange(len(sample)) - begins
    # These stand in a response's first row.
    lacking |= first & (pc.fill_null(pc.list_value_length(table["prefix_ids"]), 0).to_numpy() == 0)
    for name in ("prompt_len", "teacher_id"):
        lacking |= first & table[name].is_null().to_numpy()
    if lacking.any():
        row = int(lacking.argmax())
        what = (
            f"sample {sample[row]} lacks its first rows"
            if first[row]
            else f"stands behind position {position[row - 1]} of sample {sample[row]}"
        )
        return (
            f"{_place(table, 'position', row, first_row)}: {what}; a file whose rows were "
            "filtered, doubled or sorted no longer holds its sequences"
        )
    # Says how long the response was: position / (length - 1).
    relative = table["relative_position"].to_numpy()
    wrong = ~(np.abs(relative - position / np.maximum(1, length - 1)) <= 1e-5)
    if wrong.any():
        row = int(wrong.argmax())
        last = int(begins[row] + length[row] - 1)
        if 0 < relative[last] < 1:
            whole = round(float(position[last] / relative[last])) + 1
            return (
                f"{_place(table, 'relative_position', last, first_row)}: sample {sample[last]} "
                f"ends here with {length[last]} of its {whole} rows; the file was cut: score the "
                "responses again"
            )
        return (
            f"{_place(table, 'relative_position', row, first_row)}: expected position / (rows of "
            f"the response - 1) = {position[row] / max(1, length[row] - 1):.4g}, got "
            f"{relative[row]:.4g}; rows of the response were cut or changed"
        )
    return None


def _place(table: pa.Table, name: str, row: int, first_row: int) -> str:
    key = "#".join(str(table[part][row].as_py()) for part in ("prompt_id", "sample_idx"))
    return (
        f"column {name}, row {first_row + row} (rollout {key}, position "
        f"{table['position'][row].as_py()}, token {table['token_id'][row].as_py()})"
    )
