"""`rock-opd evolve`: who stagnates? Mean loss by type at two checkpoints (paper, section 3).

Compares rocks with rare high-KL types and with random others, and, where gradients are known, the
change with the direction of a type's gradient. Choosing types by a noisy mean and measuring them by
the same one tilts what is seen (regression to the mean), so rare high-KL types are chosen in three
ways, and all three are reported. Steps do not decay here. Memory: O(V). The files of an earlier
call are replaced, each written aside and renamed.
"""

from __future__ import annotations

from dataclasses import dataclass
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
from rock_opd.core.token_stats import TokenStats
from rock_opd.errors import ConfigError, DataError
from rock_opd.occurrences import read, read_info
from rock_opd.pairing import same_responses
from rock_opd.plots.evolve import GROUP_NAMES, evolve_figure
from rock_opd.rocklist import read_ids
from rock_opd.tables import Report, Say, Track, write_table
from rock_opd.vocabulary import Vocabulary, open_vocabulary, require_same_ids

COSINE = "cos_balanced"
"""Column of the gradients table: cosine of a type's mean gradient with that of all types, each
counted once."""
EARLY_CHOICE, SPLIT_CHOICE = "rare_high_early", "rare_high_split"
WORDS = {
    **GROUP_NAMES,
    "rare_high": "rare high-KL, chosen late",
    EARLY_CHOICE: "rare high-KL, chosen early",
    SPLIT_CHOICE: "rare high-KL, chosen late on half of the prompts, measured on the others",
}


@dataclass(frozen=True, kw_only=True)
class Group:
    """Some types, and the statistics they are measured by."""

    ids: np.ndarray
    """int64 [n]."""
    early: TokenStats
    late: TokenStats

    @property
    def means(self) -> tuple[np.ndarray, np.ndarray]:
        """float64 [n] each, nats, early and late."""
        return type_means(self.early)[self.ids], type_means(self.late)[self.ids]


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

    ``rare_high`` is chosen at the late checkpoint as in the paper, which tilts against seeing it
    fall; ``rare_high_early`` at the early one, which tilts toward it; ``rare_high_split`` by the
    late losses of every other prompt and measured on the remaining ones: no tilt, but fewer
    occurrences of each type.

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
    before = _halves(early, info.num_types)
    track(1, num_phases)
    after = _halves(late, info.num_types)
    track(2, num_phases)
    same = same_responses(early, late)
    track(3, num_phases)

    groups = _groups(before, after, listed, seed)
    changes = {name: group_change(*group.means) for name, group in groups.items()}
    facts: dict[str, Any] = {
        "early": str(early),
        "late": str(late),
        "same_responses": same,
        "estimator": info.estimator,
        "rocks_listed": len(listed),
        "groups": {name: change._asdict() for name, change in changes.items()},
    }
    if gradients is not None:
        facts["spearman_change_cosine"] = _correlations(groups, cosine)
    drawn = {}
    for name in GROUP_NAMES:
        early_mean, late_mean = groups[name].means
        drawn[name] = {"early": early_mean, "late": late_mean, "cosine": cosine[groups[name].ids]}
    picture = evolve_figure(output.with_suffix(".png"), drawn)
    table = _table(groups, cosine, vocabulary)
    files = [write_table(output, table), picture]
    track(num_phases, num_phases)
    return Report(
        title=f"{early.name} to {late.name}, nats per occurrence",
        facts=facts,
        lines=_lines(facts, changes),
        table={
            "group": list(changes),
            "types": [change.num_types for change in changes.values()],
            "median_early": np.array([change.median_early for change in changes.values()]),
            "median_late": np.array([change.median_late for change in changes.values()]),
            "fell": np.array([change.share_fell for change in changes.values()]),
            "p": np.array([change.wilcoxon_p for change in changes.values()]),
        },
        files=files,
    )


def _halves(path: Path, num_types: int) -> tuple[TokenStats, TokenStats]:
    """Statistics of every other prompt, in order of appearance, and of the remaining ones."""
    number: dict[str, int] = {}
    halves = [TokenStats.empty(num_types), TokenStats.empty(num_types)]
    for rows in read(path):
        prompt = [number.setdefault(r.prompt_id, len(number)) for r in rows.rollouts]
        half = np.repeat(prompt, rows.counts) % 2
        for i in range(2):
            at = half == i
            halves[i] += TokenStats.from_rows(
                rows.token_ids[at],
                rows.kl[at],
                rows.measure[at],
                rows.logratio[at],
                num_types=num_types,
            )
    return halves[0], halves[1]


def _groups(
    before: tuple[TokenStats, TokenStats],
    after: tuple[TokenStats, TokenStats],
    rocks: np.ndarray,
    seed: int,
) -> dict[str, Group]:
    early, late = before[0] + before[1], after[0] + after[1]
    chosen = stagnation_groups(early, late, rocks, seed=seed)
    chosen[EARLY_CHOICE] = stagnation_groups(early, late, rocks, high_at="early", seed=seed)[
        "rare_high"
    ]
    groups = {name: Group(ids=ids, early=early, late=late) for name, ids in chosen.items()}
    split = stagnation_groups(before[0], after[0], rocks, seed=seed)["rare_high"]
    known = (before[1].measured[split] > 0) & (after[1].measured[split] > 0)
    groups[SPLIT_CHOICE] = Group(ids=split[known], early=before[1], late=after[1])
    return groups


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
    groups: dict[str, Group], cosine: np.ndarray
) -> dict[str, dict[str, float | int]]:
    """Spearman of change and cosine, by group and over the three groups together."""
    pairs = {}
    for name, group in groups.items():
        early, late = group.means
        pairs[name] = np.stack([late - early, cosine[group.ids]])
    pairs["pooled"] = np.concatenate([pairs[name] for name in GROUP_NAMES], axis=1)
    return {
        name: {
            "spearman": rank_correlation(change, direction),
            "num_types": int(np.isfinite(change + direction).sum()),
        }
        for name, (change, direction) in pairs.items()
    }


def _table(groups: dict[str, Group], cosine: np.ndarray, vocabulary: Vocabulary) -> dict[str, Any]:
    ids = np.concatenate([group.ids for group in groups.values()])
    means = np.concatenate([np.stack(group.means) for group in groups.values()], axis=1)
    texts = vocabulary.texts(ids)

    def counts(when: str) -> np.ndarray:
        return np.concatenate([getattr(g, when).count[g.ids] for g in groups.values()])

    return {
        "group": [name for name, group in groups.items() for _ in group.ids],
        "token_id": ids.astype(np.int32),
        "text": texts,
        "family": [None if text is None else family(text) for text in texts],
        "count_early": counts("early"),
        "count_late": counts("late"),
        "mean_kl_early": means[0],
        "mean_kl_late": means[1],
        "change": means[1] - means[0],
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
    for name, change in changes.items():
        if not change.num_types:
            lines.append(f"{WORDS[name]}: no type was seen often enough at both checkpoints")
            continue
        p = change.wilcoxon_p
        test = f"p {p:.2g}" if np.isfinite(p) else "too few changes for a test"
        relative = (
            f" ({change.median_late / change.median_early - 1:+.0%})" if change.median_early else ""
        )
        lines.append(
            f"{WORDS[name]}: median KL {change.median_early:.3g} -> {change.median_late:.3g}"
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
            f"change against gradient cosine, {WORDS.get(name, name)}: Spearman "
            f"{found['spearman']:.2f} over {found['num_types']} types"
        )
    return lines
