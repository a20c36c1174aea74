"""``rock-opd gradients``: the logit gradient of every token type, its size, direction and share.

The responses of an occurrence file are read again by teacher and student; the student ranks keep
the hidden states of every position and take the gradients of all types at the end, streaming over
the vocabulary (``core.gradients``). So nothing is written before the end, and a start that broke
off starts over: a pass costs about as much as ``rock-opd score --reuse``. Table and figure are
written aside and renamed.

What is kept grows with the rows, so it has a limit: ``MAX_ROW_BYTES`` a student rank. Of a file
with more, whole responses are drawn at random, and the report says how many.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rock_opd.config import Recipe
from rock_opd.core.analysis import stagnation_groups
from rock_opd.core.batching import build_batches
from rock_opd.core.gradients import TypeGradients
from rock_opd.core.token_stats import TokenStats
from rock_opd.errors import ConfigError, DataError, NumericsError
from rock_opd.measure import deal_rollouts
from rock_opd.models import load_config, load_tokenizer, num_real_ids, tokenizer_fingerprint
from rock_opd.occurrences import read, read_info
from rock_opd.plots.gradients import gradients_figure
from rock_opd.rocklist import read_ids
from rock_opd.score import Engines, ray_engines
from rock_opd.tables import Report, Say, Track, write_table
from rock_opd.types import Rollout, TokenWeights

MAX_ROW_BYTES = 16 << 30
"""Hidden states that one student rank keeps: in memory, from ``IN_MEMORY_BYTES`` on in a file."""
LOT_PREFILLS = 4
"""Full prefill batches of every teacher replica that make one lot."""
NUM_SHOWN = 20
GROUPS = ("rocks", "rare_high", "other", "single")
MEDIANS = ("count", "mean_kl", "magnitude", "mean_row_magnitude", "cos_balanced", "cos_global")
SHOWN = ("token_id", "text", "count", "mean_kl", "magnitude", "cos_balanced", "contribution_share")

MEMORY_FORMULA = "rows x (H + H_t) x dtype + b x (types + 1 + 5 x 512 + H + H_t) x 4 + 64 x rows"
"""Bytes of one rank besides the models, with b vocabulary columns of a block."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The responses that are measured: all of a file, or a random part."""

    rollouts: list[Rollout]
    num_rows: int
    num_rollouts_of_file: int
    num_rows_of_file: int

    @property
    def whole(self) -> bool:
        return len(self.rollouts) == self.num_rollouts_of_file


def measure_gradients(
    cfg: Recipe,
    occurrences: Path,
    output: Path,
    *,
    rocks: Path | None,
    address: str | None,
    say: Say,
    track: Track,
    engines: Engines = ray_engines,
) -> Report:
    """Writes the table ``output`` (.parquet or .csv; replaced if it exists) and a figure beside it.

    Columns of the table, one row per type that occurs: ``token_id``, ``text``, ``count``,
    ``mean_kl``, ``magnitude``, ``mean_row_magnitude``, ``cos_balanced``, ``cos_global``,
    ``contribution`` (all as in ``core.gradients.TypeGradients``), ``contribution_share`` (of the
    sum of all |contribution|) and, with ``rocks``, ``group``: ``rocks`` and ``rare_high`` as in
    ``analysis.stagnation_groups``, ``other`` for every other type that occurs at least twice, and
    ``single`` for those that occur once, whose mean is one gradient and so is never small.

    Args:
        occurrences: a file of ``rock-opd score``, or a run's folder of them. Only the responses are
            read: every number is measured anew with the recipe's student and teacher.
        rocks: a list of token ids that marks the groups.
        engines: starts the roles.

    Raises:
        ConfigError: ``teacher.payload`` is not hidden, or an output of another ending.
        DataError: files that cannot be used, or made with another tokenizer.
        NumericsError: numbers that are not finite.
    """
    if output.suffix not in (".parquet", ".csv"):
        raise ConfigError(f"gradients: the table is .parquet or .csv, got {output}")
    if cfg.teacher.payload != "hidden":
        raise ConfigError(
            "gradients need the teacher's whole distribution: teacher.payload must be hidden, got "
            f"'{cfg.teacher.payload}'"
        )
    started = time.monotonic()
    tokenizer = load_tokenizer(cfg.student.model)
    width, fingerprint = _check_vocabulary(cfg, occurrences, tokenizer)
    rock_ids = None
    if rocks is not None:
        rock_ids, notice = read_ids(rocks, num_types=width, tokenizer=fingerprint)
        if notice:
            say(notice)
    max_rows = cfg.student.num_ranks * MAX_ROW_BYTES // _bytes_per_row(cfg)
    sample = draw_sample(occurrences, max_rows=max_rows, seed=cfg.run.seed)
    say(_sample_line(sample, cfg.run.seed))
    cfg = _with_room(cfg, sample.rollouts)
    context: AbstractContextManager[Any] = engines(
        cfg, samples=False, num_real_ids=width, address=address, say=say
    )
    with context as roles:
        begun = time.monotonic()
        gradients, memory = _measure(roles, cfg, sample, say=say, track=track)
        seconds = time.monotonic() - begun
    _check_finite(gradients)

    texts = tokenizer.batch_decode([[token_id] for token_id in gradients.token_ids.tolist()])
    groups = None if rock_ids is None else type_groups(gradients, rock_ids, num_types=width)
    table = _table(gradients, texts, groups)
    files = [
        write_table(output, table),
        gradients_figure(output.with_suffix(".png"), table),
    ]
    facts: dict[str, Any] = {
        "num_rollouts": len(sample.rollouts),
        "num_rollouts_of_file": sample.num_rollouts_of_file,
        "num_rows": sample.num_rows,
        "num_rows_of_file": sample.num_rows_of_file,
        "num_types": len(gradients.token_ids),
        "norm_balanced": gradients.norm_balanced,
        "norm_global": gradients.norm_global,
        "cos_balanced_global": float(np.sum(gradients.contribution) / gradients.norm_global)
        if gradients.norm_global
        else None,
        "groups": _group_facts(table),
        "memory": {
            "formula": MEMORY_FORMULA,
            "rows_bytes": max(m.rows_bytes for m in memory),
            "rows_in_file": any(m.rows_in_file for m in memory),
            "working_bytes": max(m.working_bytes for m in memory),
            "block_columns": memory[0].block_columns,
            "peak_rss_bytes": max(m.peak_rss_bytes for m in memory),
        },
        "seconds": seconds,
        "total_s": time.monotonic() - started,
    }
    order = np.argsort(-np.abs(np.nan_to_num(table["contribution"])), kind="stable")[:NUM_SHOWN]
    return Report(
        title=f"Token types by what they add along the balanced gradient, top {len(order)}",
        facts=facts,
        lines=[_sample_line(sample, cfg.run.seed), *_lines(facts)],
        table={name: table[name][order] for name in (*SHOWN, "group") if name in table},
        files=files,
    )


def draw_sample(path: Path, *, max_rows: int, seed: int) -> Sample:
    """All responses of a file or, where they have more than ``max_rows`` rows, random ones that
    have as many at most (one, at least), in the file's order. Each gets its number in the file for
    ``sample_idx``, so that no two share a key.

    Raises:
        DataError: what ``occurrences.read`` raises.
    """
    num_rows = np.concatenate([rows.counts for rows in read(path)])
    chosen = np.ones(len(num_rows), bool)
    if num_rows.sum() > max_rows:
        order = np.random.default_rng(seed).permutation(len(num_rows))
        fits = int(np.searchsorted(np.cumsum(num_rows[order]), max_rows, side="right"))
        chosen[order[max(1, fits) :]] = False
    rollouts, number = [], 0
    for rows in read(path):
        for rollout in rows.rollouts:
            if chosen[number]:
                rollouts.append(replace(rollout, sample_idx=number))
            number += 1
    return Sample(
        rollouts=rollouts,
        num_rows=int(num_rows[chosen].sum()),
        num_rollouts_of_file=len(num_rows),
        num_rows_of_file=int(num_rows.sum()),
    )


def type_groups(
    gradients: TypeGradients, rocks: np.ndarray, *, num_types: int, num_high: int = 100
) -> np.ndarray:
    """The group of each measured type: names as in ``measure_gradients``."""
    ids = gradients.token_ids
    sums = TokenStats.empty(num_types)
    for column in (sums.count, sums.rows, sums.measured):
        column[ids] = gradients.count
    sums.loss_sum[ids] = gradients.count * gradients.mean_kl
    high = stagnation_groups(sums, sums, rocks, num_high=num_high, seed=0)["rare_high"]
    return np.select(
        [np.isin(ids, rocks), np.isin(ids, high), gradients.count > 1],
        ["rocks", "rare_high", "other"],
        "single",
    )


def _check_vocabulary(cfg: Recipe, occurrences: Path, tokenizer: Any) -> tuple[int, str]:
    info = read_info(occurrences)
    width, fingerprint = (
        num_real_ids(cfg.student.model, cfg.teacher.model),
        tokenizer_fingerprint(tokenizer),
    )
    if (info.tokenizer, info.num_types) != (fingerprint, width):
        raise DataError(
            f"{occurrences}: its ids are of tokenizer {info.tokenizer} ({info.num_types} types), "
            f"the student's and teacher's is {fingerprint} ({width}); name the models it was "
            "scored with"
        )
    return width, fingerprint


def _bytes_per_row(cfg: Recipe) -> int:
    """Of both hidden states; a dtype that only the cluster decides is taken for float32."""
    teacher = cfg.teacher.dtype if cfg.teacher.wire_dtype == "auto" else cfg.teacher.wire_dtype
    models = ((cfg.student.model, cfg.student.dtype), (cfg.teacher.model, teacher))
    return sum(
        load_config(model).hidden_size * (2 if dtype == "bfloat16" else 4)
        for model, dtype in models
    )


def _with_room(cfg: Recipe, rollouts: Sequence[Rollout]) -> Recipe:
    """The recipe with sequence limits that fit what is there, as teacher and student read it."""
    longest = max(max(len(r.token_ids), len(r.teacher_token_ids)) for r in rollouts)
    rollout = replace(cfg.rollout, max_prompt_tokens=max(1, longest - 1), max_new_tokens=1)
    return replace(cfg, rollout=rollout, teacher=replace(cfg.teacher, prefix_tokens=0))


def _lots(cfg: Recipe, rollouts: list[Rollout]) -> Iterator[list[Rollout]]:
    """Consecutive responses, of about ``LOT_PREFILLS`` prefill batches."""
    limit = LOT_PREFILLS * cfg.teacher.max_batched_tokens * cfg.teacher.num_replicas
    lot: list[Rollout] = []
    num_tokens = 0
    for rollout in rollouts:
        if lot and num_tokens + len(rollout.token_ids) > limit:
            yield lot
            lot, num_tokens = [], 0
        lot.append(rollout)
        num_tokens += len(rollout.token_ids)
    yield lot


def _measure(
    roles: Any, cfg: Recipe, sample: Sample, *, say: Say, track: Track
) -> tuple[TypeGradients, list[Any]]:
    """Scores and keeps lot by lot, then takes the gradients."""
    lots = list(_lots(cfg, sample.rollouts))
    deals = [deal_rollouts(cfg, lot) for lot in lots]
    num_rows = [0] * cfg.student.num_ranks
    for lot, dealt in zip(lots, deals, strict=True):
        for rank, micro_batches in enumerate(dealt.ranks):
            for i in (i for mb in micro_batches for i in mb.rollouts):
                num_rows[rank] += len(lot[i].positions)
    roles.turn("student")
    roles.students.start_rows(num_rows)
    track(0, len(lots))
    for done, (lot, dealt) in enumerate(zip(lots, deals, strict=True), start=1):
        roles.turn("teacher")
        roles.teachers.score(dealt, lot)
        ones = np.ones(sum(len(r.positions) for r in lot), np.float32)
        roles.turn("student")
        roles.students.keep_rows(build_batches(dealt, lot, TokenWeights(weight=ones, measure=ones)))
        roles.teachers.clear()
        track(done, len(lots))
    say(f"{sample.num_rows:,} rows are kept; adding their gradients up, block by block")
    return roles.students.type_gradients(track)


def _check_finite(gradients: TypeGradients) -> None:
    for name in ("magnitude", "mean_row_magnitude", "mean_kl"):
        bad = np.flatnonzero(~np.isfinite(getattr(gradients, name)))
        if len(bad):
            raise NumericsError(
                f"gradients: {name} of {len(bad)} types is not finite (first: token "
                f"{gradients.token_ids[bad[0]]}); try student.dtype=float32 teacher.dtype=float32"
            )


def _table(
    gradients: TypeGradients, texts: list[str], groups: np.ndarray | None
) -> dict[str, np.ndarray]:
    whole = np.abs(gradients.contribution).sum()
    return {
        "token_id": gradients.token_ids,
        "text": np.array(texts, dtype=object),
        "count": gradients.count,
        "mean_kl": gradients.mean_kl,
        "magnitude": gradients.magnitude,
        "mean_row_magnitude": gradients.mean_row_magnitude,
        "cos_balanced": gradients.cos_balanced,
        "cos_global": gradients.cos_global,
        "contribution": gradients.contribution,
        "contribution_share": np.abs(gradients.contribution) / (whole or np.nan),
        **({} if groups is None else {"group": groups.astype(object)}),
    }


def _group_facts(table: dict[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    """Medians over the types of each group and of all, and what the group has in common."""
    every = np.ones(len(table["count"]), bool)
    masks = {"all": every}
    if "group" in table:
        masks |= {name: table["group"] == name for name in GROUPS}
    facts = {}
    for name, at in masks.items():
        median = {
            f"median_{column}": float(np.nanmedian(table[column][at]))
            if np.isfinite(table[column][at]).any()
            else None
            for column in MEDIANS
        }
        facts[name] = {
            "num_types": int(at.sum()),
            "rows_share": float(table["count"][at].sum() / table["count"].sum()),
            **median,
            "contribution_share": float(table["contribution_share"][at].sum()),
        }
    return facts


def _sample_line(sample: Sample, seed: int) -> str:
    rows, of_file = f"{sample.num_rows:,}", f"{sample.num_rows_of_file:,}"
    if sample.whole:
        return f"{len(sample.rollouts):,} responses, {rows} positions: all of the file"
    return (
        f"{len(sample.rollouts):,} of {sample.num_rollouts_of_file:,} responses ({rows} of "
        f"{of_file} positions), whole ones drawn at random with seed {seed}: counts are the "
        "sample's, means and shares estimate the file's"
    )


def _lines(facts: dict[str, Any]) -> list[str]:
    memory, mib = facts["memory"], 2**20
    cosine = facts["cos_balanced_global"]
    lines = [
        f"{facts['num_types']:,} token types; the gradient of each type once and that of all "
        "positions have a cosine of " + ("-" if cosine is None else f"{cosine:.3f}")
    ]
    for name, group in facts["groups"].items():
        if name == "single" or not group["num_types"] or group["median_cos_balanced"] is None:
            continue
        lines.append(
            f"{name}: {group['num_types']:,} types with {group['rows_share']:.1%} of the "
            f"positions: median |gradient| {group['median_magnitude']:.3g} (of single "
            f"occurrences {group['median_mean_row_magnitude']:.3g}), median cosine with the "
            f"balanced one {group['median_cos_balanced']:.3f}, {group['contribution_share']:.1%} "
            "of all |contribution|"
        )
    lines.append(
        f"{facts['seconds']:.0f} s; each student rank kept at most "
        f"{memory['rows_bytes'] / mib:,.0f} MiB of rows"
        f"{' (in a file)' if memory['rows_in_file'] else ''} and worked in "
        f"{memory['working_bytes'] / mib:,.0f} MiB ({memory['block_columns']:,} vocabulary columns "
        f"at once); its process held at most {memory['peak_rss_bytes'] / mib:,.0f} MiB"
    )
    return lines
