"""`rock-opd evolve`: who stagnates? Mean loss by type at two checkpoints (paper, section 3).

Compares rocks with rare high-KL types and with random others, and, where gradients are known, the
change with the direction of a type's gradient. Memory: O(V). The files of an earlier call are
replaced, each written aside and renamed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rock_opd.core.analysis import (
    GroupChange,
    group_change,
    rank_correlation,
    stagnation_groups,
    type_means,
)
from rock_opd.core.families import family
from rock_opd.core.registry import TokenStats
from rock_opd.errors import ConfigError, DataError
from rock_opd.occurrences import build_registry, read_info
from rock_opd.pairing import same_responses
from rock_opd.plots import GROUP_NAMES, evolve_figure
from rock_opd.rocklist import read_ids
from rock_opd.tables import Report, Say, Track, write_table
from rock_opd.vocabulary import Vocabulary, open_vocabulary, require_same_ids

COSINE = "cos_balanced"
"""Column of the gradients table: cosine of a type's mean gradient with that of all types, each
counted once."""
EARLY_CHOICE = "rare_high_early"
"""The rare high-KL types chosen by the early checkpoint: for comparison."""


def compare(
    early: Path,
    late: Path,
    output: Path,
    *,
    rocks: Path,
    gradients: Path | None,
    seed: int,
    say: Say,
    track: Track,
) -> Report:
    """Compares the mean KL of types at two checkpoints, by group.

    Args:
        early, late: occurrence files of one vocabulary: the same responses scored twice, or each
            student's own.
        output: ``.csv`` or ``.parquet``: a row for each type of a group; beside it ``<stem>.png``.
        rocks: list of ids (`rock-opd rocks`).
        gradients: table of `rock-opd gradients` at the early student; None: no cosines.
        seed: draws the random types.

    The rare high-KL types are chosen at the late checkpoint; those chosen at the early one are a
    group of their own in table and facts (``rare_high_early``), as either choice tilts what is
    seen (``analysis.stagnation_groups``).

    Raises:
        ConfigError: an output of another kind.
        DataError: files that cannot be read, of different vocabularies, or a list of another
            tokenizer.
    """
    if output.suffix not in (".csv", ".parquet"):
        raise ConfigError(f"evolve: the table is CSV or parquet, got -o {output}")
    num_phases = 4
    track(0, num_phases)
    info, info_late = read_info(early), read_info(late)
    require_same_ids(early, info, late, info_late)
    if info.estimator != info_late.estimator:
        raise DataError(
            f"{early} measured KL from payload {info.estimator}, {late} from "
            f"{info_late.estimator}: their difference would mean nothing; score both alike"
        )
    vocabulary = open_vocabulary(late, info_late, None, say=say)
    listed, notice = read_ids(rocks, num_types=info.num_types, tokenizer=info.tokenizer)
    if notice:
        say(f"--rocks: {notice}")
    cosine = np.full(info.num_types, np.nan)
    if gradients is not None:
        cosine = _read_cosines(gradients, info.num_types)
    before = build_registry(early).stats
    track(1, num_phases)
    after = build_registry(late).stats
    track(2, num_phases)
    paired = same_responses(early, late)
    track(3, num_phases)

    groups = stagnation_groups(before, after, listed, seed=seed)
    groups[EARLY_CHOICE] = stagnation_groups(before, after, listed, high_at="early", seed=seed)[
        "rare_high"
    ]
    means = type_means(before), type_means(after)
    changes = {name: group_change(means[0][ids], means[1][ids]) for name, ids in groups.items()}
    facts: dict[str, Any] = {
        "early": str(early),
        "late": str(late),
        "same_responses": paired,
        "estimator": info.estimator,
        "rocks_listed": len(listed),
        "groups": {name: change._asdict() for name, change in changes.items()},
    }
    if gradients is not None:
        facts["spearman_change_cosine"] = _correlations(groups, means[1] - means[0], cosine)
    picture = evolve_figure(
        output.with_suffix(".png"),
        {
            name: {"early": means[0][ids], "late": means[1][ids], "cosine": cosine[ids]}
            for name, ids in groups.items()
            if name in GROUP_NAMES
        },
    )
    table = _table(groups, (before, after), means, cosine, vocabulary)
    files = [write_table(output, table), picture]
    track(num_phases, num_phases)
    return Report(
        title=f"{early.name} to {late.name}, nats per occurrence",
        facts=facts,
        lines=_lines(facts, changes),
        table={
            "group": list(changes),
            "types": [change.num_types for change in changes.values()],
            **{
                name: np.array([getattr(change, name) for change in changes.values()])
                for name in GroupChange._fields[1:]
            },
        },
        files=files,
    )


def _read_cosines(path: Path, num_types: int) -> np.ndarray:
    """float64 [V], NaN where the table has no row."""
    import pyarrow as pa
    import pyarrow.csv as pc
    import pyarrow.parquet as pq

    try:
        if path.suffix == ".parquet":
            table = pq.read_table(path, columns=["token_id", COSINE])
        else:
            table = pc.read_csv(
                path,
                parse_options=pc.ParseOptions(newlines_in_values=True),
                convert_options=pc.ConvertOptions(
                    include_columns=["token_id", COSINE], column_types={COSINE: pa.float64()}
                ),
            )
        ids = table["token_id"].to_numpy().astype(np.int64)
        values = table[COSINE].to_numpy().astype(np.float64)
    except (OSError, pa.ArrowException, KeyError, ValueError) as error:
        raise DataError(
            f"gradients {path}: expected a table with the columns token_id and {COSINE} "
            f"(rock-opd gradients): {str(error).splitlines()[0]}"
        ) from None
    if len(ids) and not 0 <= ids.min() <= ids.max() < num_types:
        raise DataError(
            f"gradients {path}: token ids {ids.min()} to {ids.max()} do not fit the {num_types} "
            "types of the vocabulary"
        )
    cosine = np.full(num_types, np.nan)
    cosine[ids] = values
    return cosine


def _correlations(
    groups: dict[str, np.ndarray], change: np.ndarray, cosine: np.ndarray
) -> dict[str, dict[str, float | int]]:
    """Spearman of change and cosine, by group and over the three groups together."""
    pooled = np.concatenate([groups[name] for name in GROUP_NAMES])
    return {
        name: {
            "spearman": rank_correlation(change[ids], cosine[ids]),
            "num_types": int(np.isfinite(change[ids] + cosine[ids]).sum()),
        }
        for name, ids in {**groups, "pooled": pooled}.items()
    }


def _table(
    groups: dict[str, np.ndarray],
    stats: tuple[TokenStats, TokenStats],
    means: tuple[np.ndarray, np.ndarray],
    cosine: np.ndarray,
    vocabulary: Vocabulary,
) -> dict[str, Any]:
    ids = np.concatenate(list(groups.values()))
    texts = vocabulary.texts(ids)
    return {
        "group": np.repeat(list(groups), [len(members) for members in groups.values()]).tolist(),
        "token_id": ids.astype(np.int32),
        "text": texts,
        "family": [None if text is None else family(text) for text in texts],
        "count_early": stats[0].count[ids],
        "count_late": stats[1].count[ids],
        "mean_kl_early": means[0][ids],
        "mean_kl_late": means[1][ids],
        "change": (means[1] - means[0])[ids],
        "cosine": cosine[ids],
    }


def _lines(facts: dict[str, Any], changes: dict[str, GroupChange]) -> list[str]:
    lines = [
        "both files hold the same responses: every occurrence is compared with itself"
        if facts["same_responses"]
        else "the two files hold different responses: types are compared in each student's own"
    ]
    if facts["estimator"] == "sampled":
        lines.append(
            "the KL column of these files is the sampled log-ratio: another quantity than the KL"
        )
    names = {
        **GROUP_NAMES,
        "rare_high": "rare high-KL (chosen late)",
        EARLY_CHOICE: "rare high-KL (chosen early)",
    }
    for name, change in changes.items():
        if not change.num_types:
            lines.append(f"{names[name]}: no type was seen twice at both checkpoints")
            continue
        p = change.wilcoxon_p
        test = f"p {p:.2g}" if np.isfinite(p) else "too few changes for a test"
        relative = (
            f" ({change.median_late / change.median_early - 1:+.0%})" if change.median_early else ""
        )
        lines.append(
            f"{names[name]}: median KL {change.median_early:.3g} -> {change.median_late:.3g}"
            f"{relative} over {change.num_types} types, {change.share_fell:.0%} fell; {test}"
        )
    known = changes["rocks"].num_types
    if known < facts["rocks_listed"]:
        lines.append(
            f"{facts['rocks_listed'] - known} of {facts['rocks_listed']} listed rocks were not "
            "seen twice at both checkpoints and are left out"
        )
    for name, found in facts.get("spearman_change_cosine", {}).items():
        lines.append(
            f"change against gradient cosine, {names.get(name, name)}: Spearman "
            f"{found['spearman']:.2f} over {found['num_types']} types"
        )
    return lines
