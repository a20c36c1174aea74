"""`rock-opd rocks`: from an occurrence file to a list of rocks, matched controls, and why.

The registry of the file, the score, the selection and the random control are those of a run over
the same stream with the same settings, so that online and offline agree. Files stream; what stays
in memory is O(V), and with ``--pre`` the sequences and two losses of every position (about 40
bytes a token). Outputs of an earlier call are replaced, each written aside and renamed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rock_opd.config import SCORES, PolicyConfig, ProbeConfig
from rock_opd.core.analysis import LossHistogram, output_shares
from rock_opd.core.context import ContextStats, Positions, context_consistency
from rock_opd.core.cutoff import coverage
from rock_opd.core.families import FAMILIES, family
from rock_opd.core.policies import control_rng
from rock_opd.core.registry import Registry
from rock_opd.core.selection import (
    joint_minimum,
    match_random,
    pair_by_frequency,
    type_score,
)
from rock_opd.errors import ConfigError, DataError, ModelError
from rock_opd.models import model_folder
from rock_opd.occurrences import FileInfo, build_registry, read, read_info
from rock_opd.pairing import paired
from rock_opd.plots.rocks import rocks_figure
from rock_opd.probe import reservoir_rng, window_encoder
from rock_opd.ranking import Ranking, why_no_context
from rock_opd.rocklist import write_ids, write_rock_vs_control
from rock_opd.tables import Report, Say, Track, write_table
from rock_opd.vocabulary import Vocabulary, guarded_ids, open_vocabulary, require_same_ids

HIGH_QUANTILE = 0.95
"""A position above this quantile of all losses is a high-KL event (paper, section 3)."""


def find_rocks(
    occurrences: Path,
    output: Path,
    *,
    policy: PolicyConfig,
    probe: ProbeConfig,
    pre: Path | None,
    joint: Path | None,
    teacher: str | None,
    tokenizer: str | None,
    seed: int,
    say: Say,
    track: Track,
) -> Report:
    """Ranks the types of an occurrence file and writes rocks, table, controls and figure.

    Args:
        output: the official list, ``<stem>.json``; beside it ``<stem>.meta.json``, ``<stem>.csv``
            (every type seen), ``<stem>.png``, ``control.json`` (random types that occur together
            as often as the rocks) and ``rock_vs_control.csv`` (for each rock the type nearest in
            frequency, official columns). With a stem other than ``rocks`` the last two begin with
            it.
        policy: score, selection, guard and decay.
        probe: thresholds and encoder of context consistency.
        pre: the same responses scored by the student before training: gives CCR.
        joint: another student's occurrences: a type scores the lesser of its two scores, with the
            CCR of ``pre`` in both.
        teacher: whose embedding encodes contexts; None: the file's teacher.
        tokenizer: model whose tokenizer decodes ids; None: the file's student.
        seed: draws control, reservoirs and the projection of contexts.

    Raises:
        ConfigError: ``policy.score=rock_ctx`` without ``pre``; an output that is not JSON.
        DataError: files that cannot be read or do not fit together; no type qualifies.
        ModelError: the named tokenizer or teacher cannot be used.
    """
    if output.suffix != ".json":
        raise ConfigError(f"rocks: the list is JSON, name it so (-o rocks.json), got {output}")
    if policy.score == "rock_ctx" and pre is None:
        raise ConfigError(
            "policy.score=rock_ctx needs --pre, the same responses scored by the student before "
            "training (rock-opd score --student OLD --reuse OCCURRENCES); or rank by "
            "policy.score=rock"
        )
    for option, other in (("--pre", pre), ("--joint", joint)):
        if other is not None and other.resolve() == occurrences.resolve():
            say(f"{option} {other} is the very file that is ranked: it adds nothing")
    num_phases = 4
    track(0, num_phases)
    info = read_info(occurrences)
    vocabulary = open_vocabulary(occurrences, info, tokenizer, say=say)
    guarded = guarded_ids(policy, vocabulary, say=say)
    registry = build_registry(occurrences, decay=policy.decay)
    track(1, num_phases)
    context = None
    if pre is not None:
        context = _context(occurrences, info, pre, probe, teacher or info.teacher, seed, say)
        registry.set_context(context.ccr)
    track(2, num_phases)
    score = registry.score(policy.score)
    if joint is not None:
        score = joint_minimum(score, _other_score(occurrences, info, joint, policy, context))

    ranking = Ranking.of(score, registry, policy, guarded)
    rocks = ranking.rocks
    if not len(rocks):
        raise DataError(f"rocks: {ranking.explain(policy, context)}")
    control, residual = match_random(
        registry.stats.count,
        rocks,
        rng=control_rng(seed),
        drop_most_frequent=0 if policy.control_may_use_dropped else policy.drop_most_frequent,
        never=guarded,
    )
    pairs = pair_by_frequency(registry.stats.count, rocks, never=guarded)
    shares = _output_shares(occurrences, np.isin(np.arange(info.num_types), rocks))
    track(3, num_phases)

    table = _table(registry, ranking, control, context, vocabulary)
    facts = _facts(occurrences, info, registry, ranking, policy, context, table, shares)
    facts["control"] = {"num_types": len(control), "residual": residual}
    made_of = {"occurrences": str(occurrences), "score": policy.score, "seed": seed}
    prefix = "" if output.stem == "rocks" else f"{output.stem}_"
    control_list = output.with_name(f"{prefix}control.json")
    files = [
        *write_ids(output, rocks, tokenizer=info.tokenizer, made_by="rocks", **made_of),
        write_table(output.with_suffix(".csv"), table),
        *write_rock_vs_control(
            output.with_name(f"{prefix}rock_vs_control.csv"),
            rocks,
            pairs,
            count=registry.stats.count,
            mean_kl=registry.mean_loss(),
            decode=vocabulary.text,
            tokenizer=info.tokenizer,
            **made_of,
        ),
        *_write_control(control_list, control, residual, info.tokenizer, made_of),
        _draw(output.with_suffix(".png"), table, rocks, control, facts),
    ]
    track(num_phases, num_phases)
    shown = ("rank", "token_id", "text", "family", "count", "mean_kl", "score", "ccr")
    num = len(rocks)
    return Report(
        title=f"rocks of {occurrences.name} by {policy.score}",
        facts=facts,
        lines=_lines(facts, ranking, policy, context),
        table={name: table[name][:num] for name in shown if name in table},
        files=files,
    )


# --- scores and selection -------------------------------------------------------------------------


def _context(
    occurrences: Path,
    info: FileInfo,
    pre: Path,
    probe: ProbeConfig,
    teacher: str,
    seed: int,
    say: Say,
) -> ContextStats:
    """CCR over every position of the file, or of a run's folder of files."""
    earlier = read_info(pre)
    require_same_ids(occurrences, info, pre, earlier)
    if earlier.estimator != info.estimator:
        say(
            f"--pre measured KL from payload {earlier.estimator}, {occurrences} from "
            f"{info.estimator}: tau_pre and tau_post cut two different quantities"
        )
    if probe.encoder == "embedding":
        try:
            model_folder(teacher)
        except ModelError as error:
            raise ModelError(
                f"{error}; contexts are read through a teacher's embedding: name one with "
                "--teacher, or set probe.encoder=ngram, which needs no model"
            ) from None
    encoder = window_encoder(probe, teacher=teacher, num_real_ids=info.num_types, seed=seed)
    sequences, places, now, before = [], [], [], []
    for rollout, late, early in paired(occurrences, pre, loss=probe.loss):
        sequences.append(rollout.token_ids)
        places.append(rollout.positions)
        now.append(late)
        before.append(early)
    positions = Positions(
        sequences=sequences,
        sequence_idx=np.repeat(np.arange(len(places)), [len(place) for place in places]),
        place=np.concatenate(places),
    )
    return context_consistency(
        positions,
        np.concatenate(before),
        np.concatenate(now),
        encoder,
        num_types=info.num_types,
        tau_pre=probe.tau_pre,
        tau_post=probe.tau_post,
        gamma=probe.gamma,
        eta=probe.eta,
        reservoir=probe.reservoir,
        max_pairs=probe.max_pairs,
        rng=reservoir_rng(seed, 0),
    )


def _other_score(
    occurrences: Path,
    info: FileInfo,
    joint: Path,
    policy: PolicyConfig,
    context: ContextStats | None,
) -> np.ndarray:
    require_same_ids(occurrences, info, joint, read_info(joint))
    other = build_registry(joint, decay=policy.decay)
    if context is not None:
        other.set_context(context.ccr)
    return other.score(policy.score)


# --- tables ---------------------------------------------------------------------------------------


def _table(
    registry: Registry,
    ranking: Ranking,
    control: np.ndarray,
    context: ContextStats | None,
    vocabulary: Vocabulary,
) -> dict[str, Any]:
    """Every type seen: those that qualify by rank, rocks first, then the others by score."""
    others = np.flatnonzero(ranking.seen & (ranking.left_out != ""))
    others = others[np.argsort(-ranking.score[others], kind="stable")]
    ids = np.concatenate([ranking.order, others]).astype(np.int32)
    stats = registry.stats
    texts = vocabulary.texts(ids)
    known = registry.table()
    at = np.empty(registry.num_types, np.int64)
    at[known["token_id"]] = np.arange(len(known["token_id"]))
    columns: dict[str, Any] = {
        "rank": [*range(1, len(ranking.order) + 1), *[None] * len(others)],
        "token_id": ids,
        "text": texts,
        "family": [None if text is None else family(text) for text in texts],
        "rock": np.isin(ids, ranking.rocks),
        "control": np.isin(ids, control),
        "left_out": ranking.left_out[ids].tolist(),
        "count": stats.count[ids],
        "share": stats.count[ids] / stats.count.sum(),
        "mean_kl": known["mean_loss"][at[ids]],
        "std": known["loss_std"][at[ids]],
        "score": ranking.score[ids],
        "r": registry.score("rock")[ids],
    }
    if context is not None:
        columns |= {
            "ccr": context.ccr[ids],
            "r_ctx": registry.score("rock_ctx")[ids],
            "persistent": context.persistent[ids],
            "consistent": context.kept[ids],
        }
    columns["mean_logratio"] = known["mean_logratio"][at[ids]]
    for name in SCORES:
        if name not in ("rock", "rock_ctx", "mean"):
            columns[name] = type_score(name, stats)[ids]
    return columns


def _write_control(
    path: Path, control: np.ndarray, residual: float, tokenizer: str, made_of: dict[str, Any]
) -> list[Path]:
    if not len(control):
        for stale in (path, path.with_suffix(".meta.json")):
            stale.unlink(missing_ok=True)  # of an earlier call: it matches other rocks
        return []
    return write_ids(
        path, control, tokenizer=tokenizer, made_by="rocks", residual=residual, **made_of
    )


# --- what is found --------------------------------------------------------------------------------


def _output_shares(occurrences: Path, is_rock: np.ndarray) -> dict[str, Any]:
    """Medians over responses (``analysis.output_shares``), and what counts as a high loss."""
    histogram = LossHistogram()
    for rows in read(occurrences):
        measured = rows.measure > 0
        histogram.add(rows.kl[measured], rows.measure[measured])
    high = histogram.quantile(HIGH_QUANTILE)
    parts = [
        output_shares(
            np.repeat(np.arange(len(rows.counts)), rows.counts),
            rows.token_ids,
            rows.kl,
            rows.measure,
            is_rock,
            high=high,
        )
        for rows in read(occurrences)
    ]
    values = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return {
        "num_responses": len(values["rock_share"]),
        "high_kl": high,
        **{f"{name}_median": _median(column) for name, column in values.items()},
    }


def _median(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else float("nan")


def _facts(
    occurrences: Path,
    info: FileInfo,
    registry: Registry,
    ranking: Ranking,
    policy: PolicyConfig,
    context: ContextStats | None,
    table: dict[str, Any],
    shares: dict[str, Any],
) -> dict[str, Any]:
    stats, rocks = registry.stats, ranking.rocks
    share = stats.count / stats.count.sum()
    families = {}
    if table["text"][0] is not None:
        of_rocks = np.array(table["family"][: len(rocks)])
        for name in FAMILIES:
            members = rocks[of_rocks == name]
            families[name] = {
                "rocks": len(members),
                "occurrence_share": float(share[members].sum()),
            }
    facts: dict[str, Any] = {
        "occurrences": str(occurrences),
        "student": info.student,
        "teacher": info.teacher,
        "estimator": info.estimator,
        "num_occurrences": float(stats.count.sum()),
        "num_types_seen": int(ranking.seen.sum()),
        "score": policy.score,
        "k_asked": policy.top_k,
        "k_found": len(rocks),
        "least_score": float(ranking.score[rocks[-1]]),
        "left_out": ranking.reasons(),
        "kl_coverage": float(coverage(rocks, stats.loss_sum)[-1]),
        "occurrence_share": float(share[rocks].sum()),
        "type_share": len(rocks) / int(ranking.seen.sum()),
        **shares,
        "families": families,
    }
    if context is not None:
        facts |= {
            "tau_pre": context.tau_pre,
            "tau_post": context.tau_post,
            "num_persistent": float(context.persistent.sum()),
            "num_consistent": float(context.kept.sum()),
            "num_judged": float(context.judged.sum()),
            "num_pairs": context.num_pairs,
        }
    return facts


def _lines(
    facts: dict[str, Any], ranking: Ranking, policy: PolicyConfig, context: ContextStats | None
) -> list[str]:
    control = facts["control"]
    lines = [
        f"{facts['k_found']} rocks of {facts['num_types_seen']} types seen carry "
        f"{facts['kl_coverage']:.0%} of all KL on {facts['occurrence_share']:.1%} of the tokens "
        f"(median of {facts['num_responses']} responses: {facts['rock_share_median']:.1%} of the "
        f"tokens, {facts['rock_loss_share_median']:.0%} of the KL; other high-KL positions, above "
        f"{facts['high_kl']:.3g} nats: {facts['other_high_share_median']:.1%})",
    ]
    if facts["k_found"] < facts["k_asked"]:
        lines.append(
            f"fewer than the {facts['k_asked']} asked for: {ranking.explain(policy, context)}"
        )
    if facts["families"]:
        lines.append(
            "families: "
            + ", ".join(f"{name} {found['rocks']}" for name, found in facts["families"].items())
        )
    if context is not None:
        lines.append(
            f"context: {facts['num_persistent']:.0f} occurrences are high before and now (tau "
            f"{facts['tau_pre']:.3g} and {facts['tau_post']:.3g} nats), "
            f"{facts['num_consistent']:.0f} in alike contexts; {facts['num_judged']:.0f} judged, "
            f"{facts['num_pairs']:,} pairs compared"
        )
        if not context.ccr.any():
            lines.append(f"CCR is 0 for every type: {why_no_context(context)}")
    if facts["estimator"] == "sampled":
        lines.append(
            "the KL column of this file is the sampled log-ratio: another quantity than the KL "
            "that the paper ranks by"
        )
    if control["num_types"]:
        lines.append(
            f"control: {control['num_types']} random types with as many occurrences together "
            f"({control['residual']:+.2%} of the rocks' left unmatched)"
        )
    else:
        lines.append("control: no other type may serve, so no list of them")
    return lines


def _draw(
    path: Path,
    table: dict[str, Any],
    rocks: np.ndarray,
    control: np.ndarray,
    facts: dict[str, Any],
) -> Path:
    num = len(rocks)
    return rocks_figure(
        path,
        table,
        rock_ids=rocks,
        control_ids=control,
        texts={
            int(token_id): text
            for token_id, text in zip(rocks, table["text"][:num], strict=True)
            if text is not None
        },
        families={
            name: (found["rocks"], found["occurrence_share"])
            for name, found in facts["families"].items()
        },
    )
