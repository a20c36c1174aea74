"""`rock-opd cutoff`: how many rocks? Coverage of the loss and stability of the list, by K.

Ranks as `rock-opd rocks` does with the same settings, but for the decay: prompts of any step count
alike here, as sub-samples of prompts are compared. What is asked of sums shrinks with the sample:
of half the prompts a type needs half of ``policy.min_count`` (at least 1), and half of
``policy.threshold`` where the score is a sum (``SUMS``); the bars of the whole sample would let
through half as many types there, and it would be that which is measured. ``drop_most_frequent`` is
a number of types and stays. Memory: O(V), and 64 bytes for each type in each (part of a) prompt.
The files of an earlier call are replaced, each written aside and renamed.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from rock_opd.config import PolicyConfig
from rock_opd.core.cutoff import PromptStats, Stability, coverage, recommend_k, stability
from rock_opd.core.selection import select_types, type_score
from rock_opd.core.token_stats import TokenStats
from rock_opd.errors import ConfigError, DataError
from rock_opd.occurrences import read, read_info
from rock_opd.plots.cutoff import cutoff_figure
from rock_opd.tables import Report, Say, Track, write_table
from rock_opd.vocabulary import guarded_ids, open_vocabulary

COVERAGE_TARGET = 0.6
"""Share of the corpus loss that the paper's 100 rocks carry."""
JACCARD_BAR = 0.7
"""Overlap of the list of half the prompts with that of all."""
SHARES = (0.125, 0.25, 0.5, 0.75)
"""Sub-samples, as shares of the prompts."""
NUM_REPEATS = 20
MAX_CUT = 1000
"""Largest K whose stability is measured."""
MIN_PROMPTS = 4
SUMS = ("rock", "rock_lcb")
"""Scores that grow with the number of occurrences; the others are means."""


def find_cutoff(
    occurrences: Path,
    output: Path,
    *,
    policy: PolicyConfig,
    seed: int,
    say: Say,
    track: Track,
) -> Report:
    """Measures coverage and stability by K, and recommends one or, where none is good, none
    (``core.cutoff.recommend_k``).

    Args:
        output: ``.csv`` or ``.parquet``: a row for each K and sample size: ``k``, ``coverage``,
            ``num_prompts``, and mean, low and high of ``jaccard`` and ``spearman``. Beside it
            ``<stem>.png``.
        policy: score, drop-most-frequent, min count, guard; ``top_k`` is among the K shown.
        seed: draws the sub-samples.

    Raises:
        ConfigError: ``policy.score=rock_ctx``, which needs two files.
        DataError: a file that cannot be read, fewer than four prompts, or no type that qualifies.
    """
    if policy.score == "rock_ctx":
        raise ConfigError(
            "cutoff ranks by one file, and policy.score=rock_ctx needs two: take policy.score=rock "
            "(its list is what CCR thins out)"
        )
    if output.suffix not in (".csv", ".parquet"):
        raise ConfigError(f"cutoff: the table is CSV or parquet, got -o {output}")
    info = read_info(occurrences)
    vocabulary = open_vocabulary(occurrences, info, None, say=say)
    guarded = guarded_ids(policy, vocabulary, say=say)
    if policy.decay != 1:
        say(f"policy.decay={policy.decay:g} is left out: prompts of all steps count alike")
    prompts = _by_prompt(occurrences, info.num_types)
    total = prompts.num_prompts
    if total < MIN_PROMPTS:
        raise DataError(
            f"cutoff: {occurrences} holds {total} prompts, and sub-samples of prompts need at "
            f"least {MIN_PROMPTS}; score more prompts"
        )

    sizes = sorted({max(1, int(share * total)) for share in SHARES})

    def rank(stats: TokenStats, part: float) -> np.ndarray:
        threshold = policy.threshold
        if threshold is not None and policy.score in SUMS:
            threshold *= part
        return select_types(
            type_score(policy.score, stats),
            stats.count,
            top_k=info.num_types,
            threshold=threshold,
            drop_most_frequent=policy.drop_most_frequent,
            min_count=max(1.0, policy.min_count * part),
            never=guarded,
        )

    full = prompts.of(np.arange(total))
    ranked = rank(full, 1.0)
    if not len(ranked):
        raise DataError(
            f"cutoff: none of {int((full.count > 0).sum())} types seen qualifies under "
            f"policy.score={policy.score}, min_count={policy.min_count}, drop_most_frequent="
            f"{policy.drop_most_frequent}; rock-opd rocks says why"
        )
    share = coverage(ranked, full.loss_sum)
    cuts = _cuts(share, policy.top_k)
    calls, num_calls = itertools.count(1), 1 + NUM_REPEATS * len(sizes)

    def tracked(stats: TokenStats, part: float) -> np.ndarray:
        track(next(calls), num_calls)
        return rank(stats, part)

    found = stability(prompts, tracked, sizes=sizes, cuts=cuts, num_repeats=NUM_REPEATS, seed=seed)
    half = sizes.index(int(0.5 * total))
    advice = recommend_k(
        cuts,
        share[np.array(cuts) - 1],
        found.jaccard[half],
        num_ranked=len(ranked),
        coverage_of_all=float(share[-1]),
        coverage_target=COVERAGE_TARGET,
        jaccard_bar=JACCARD_BAR,
    )
    facts: dict[str, Any] = {
        "occurrences": str(occurrences),
        "score": policy.score,
        "num_prompts": total,
        "num_types_seen": int((full.count > 0).sum()),
        "num_types_ranked": len(ranked),
        "kl_coverage_of_ranked": float(share[-1]),
        "min_count_at_half": max(1.0, policy.min_count * sizes[half] / total),
        "advice": advice.reason,
        "coverage_target": COVERAGE_TARGET,
        "jaccard_bar": JACCARD_BAR,
        "num_repeats": NUM_REPEATS,
        "sizes": sizes,
    }
    for name, k in (
        ("recommended", advice.k),
        ("enough", advice.k_enough),
        ("most_stable", advice.k_most_stable),
    ):
        facts[f"k_{name}"] = k
        if k is not None:
            at = cuts.index(k)
            facts |= {
                f"kl_coverage_at_k_{name}": float(share[k - 1]),
                f"jaccard_at_half_at_k_{name}": float(found.jaccard[half, at]),
                f"spearman_at_half_at_k_{name}": float(found.spearman[half, at]),
            }
    if policy.top_k <= len(ranked):
        facts |= {
            "k_asked": policy.top_k,
            "kl_coverage_at_k_asked": float(share[policy.top_k - 1]),
            "jaccard_at_half_at_k_asked": float(found.jaccard[half, cuts.index(policy.top_k)]),
        }
    picture = cutoff_figure(
        output.with_suffix(".png"),
        coverage=share,
        cuts=cuts,
        sizes=sizes,
        jaccard=found.jaccard,
        jaccard_low=found.jaccard_low,
        jaccard_high=found.jaccard_high,
        num_prompts=total,
        recommended=advice.k,
        coverage_target=COVERAGE_TARGET,
        jaccard_bar=JACCARD_BAR,
    )
    return Report(
        title=f"cutoff of {occurrences.name} by {policy.score}, half of {total} prompts",
        facts=facts,
        lines=_lines(facts, policy),
        table={
            "k": np.array(cuts),
            "coverage": share[np.array(cuts) - 1],
            "jaccard": found.jaccard[half],
            "spearman": found.spearman[half],
        },
        files=[write_table(output, _rows(found, share)), picture],
    )


def _lines(facts: dict[str, Any], policy: PolicyConfig) -> list[str]:
    lines = [facts["advice"]]
    stable = facts["k_most_stable"]
    if facts["k_recommended"] is None and stable is not None:
        lines.append(
            f"most stable is K={stable}: Jaccard {facts['jaccard_at_half_at_k_most_stable']:.3f} "
            f"at half the prompts, {facts['kl_coverage_at_k_most_stable']:.0%} of the loss"
        )
    lines.append(
        f"{facts['num_types_ranked']} of {facts['num_types_seen']} types seen may be ranked and "
        f"carry {facts['kl_coverage_of_ranked']:.0%} of the loss; what a type needs to be ranked "
        f"shrinks with the sample: {policy.min_count} occurrences in all prompts, "
        f"{facts['min_count_at_half']:g} in half of them"
    )
    return lines


def _by_prompt(occurrences: Path, num_types: int) -> PromptStats:
    number: dict[str, int] = {}
    parts = []
    for rows in read(occurrences):
        prompt = [number.setdefault(r.prompt_id, len(number)) for r in rows.rollouts]
        parts.append(
            PromptStats.from_rows(
                np.repeat(prompt, rows.counts),
                rows.token_ids,
                rows.kl,
                rows.measure,
                rows.logratio,
                num_types=num_types,
            )
        )
    return PromptStats.concatenate(parts)


def _cuts(share: np.ndarray, top_k: int) -> list[int]:
    """K to look at: even in the logarithm from 5 (or half of the few types ranked) to ``MAX_CUT``,
    the policy's own, and the first that carries enough; none beyond the types that are ranked."""
    most = len(share)
    least = max(1, min(5, most // 2))
    cuts = set(np.geomspace(least, min(most, MAX_CUT), 24).round().astype(int).tolist())
    enough = np.flatnonzero(share >= COVERAGE_TARGET)
    if len(enough):
        cuts.add(int(enough[0]) + 1)
    return sorted(cut for cut in {*cuts, top_k} if cut <= most)


def _rows(found: Stability, share: np.ndarray) -> dict[str, np.ndarray]:
    cuts, sizes = np.array(found.cuts), np.array(found.sizes)
    columns = {
        "k": np.repeat(cuts, len(sizes)),
        "coverage": np.repeat(share[cuts - 1], len(sizes)),
        "num_prompts": np.tile(sizes, len(cuts)),
    }
    for name in ("jaccard", "spearman"):
        for end in ("", "_low", "_high"):
            columns[name + end] = getattr(found, name + end).T.ravel()
    return columns
