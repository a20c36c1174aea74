"""What the runs of ``planted_study`` say together: means, intervals over seeds, sentences, a
figure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]
ARMS = ("planted", "rare_hard", "random")
GROUPS = ("other", *ARMS)


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and its 95 % interval over seeds, by Student's t; (mean, nan, nan) for one seed."""
    from scipy import stats

    x = np.asarray(values, np.float64)
    mean = float(x.mean())
    if len(x) < 2:
        return mean, float("nan"), float("nan")
    half = float(stats.t.ppf(0.975, len(x) - 1) * x.std(ddof=1) / np.sqrt(len(x)))
    return mean, mean - half, mean + half


def summarize_recovery(rows: Sequence[Row]) -> list[Row]:
    """One row per condition and score: means over seeds, and the worst seed."""
    found = []
    for condition, score in dict.fromkeys((r["condition"], r["score"]) for r in rows):
        mine = [r for r in rows if (r["condition"], r["score"]) == (condition, score)]

        def mean(name: str, mine: list[Row] = mine) -> float:
            return float(np.mean([r[name] for r in mine]))

        found.append(
            {
                "condition": condition,
                "about": mine[0]["about"],
                "score": score,
                "seeds": len(mine),
                "precision_first": mean("precision_first"),
                "recall_first": mean("recall_first"),
                "recall_first_least": min(r["recall_first"] for r in mine),
                "hard_first": mean("hard_first"),
                "precision_last": mean("precision_last"),
                "recall_last": mean("recall_last"),
                "recall_last_least": min(r["recall_last"] for r in mine),
                "hard_last": mean("hard_last"),
                "ordinary_last": mean("ordinary_last"),
                "control_residual_worst": max(abs(r["control_residual"]) for r in mine),
                "planted_share": mean("planted_share"),
                "hard_share": mean("hard_share"),
                "floor": mean("floor"),
                "planted_kl_after": mean("planted_after"),
                "hard_kl_before": mean("hard_before"),
                "hard_kl_after": mean("hard_after"),
                "ordinary_kl_after": mean("ordinary_after"),
            }
        )
    return found


def summarize_intervention(rows: Sequence[Row]) -> list[Row]:
    """One row per normaliser, arm, group of positions and text: KL at the end, and its paired
    difference to the arm that froze nothing, with the 95 % interval over seeds.

    Texts: ``fixed``, the starting student's held-out responses; ``own``, the trained student's.
    """
    effects = []
    for normalizer in dict.fromkeys(r["normalizer"] for r in rows):
        base = _by_seed(rows, normalizer, "nothing")
        for arm, group, (text, column) in itertools.product(
            ("nothing", *ARMS), GROUPS, (("fixed", "after"), ("own", "own"))
        ):
            mine, name = _by_seed(rows, normalizer, arm), f"{group}_{column}"
            mean, low, high = mean_interval([mine[s][name] - base[s][name] for s in base])
            effects.append(
                {
                    "normalizer": normalizer,
                    "arm": arm,
                    "positions": group,
                    "text": text,
                    "seeds": len(base),
                    "frozen_share": float(np.mean([r["frozen_share"] for r in mine.values()])),
                    "kl_before": float(np.mean([r[f"{group}_before"] for r in mine.values()])),
                    "kl_end": float(np.mean([r[name] for r in mine.values()])),
                    "difference": mean,
                    "low": low,
                    "high": high,
                }
            )
    return effects


def _by_seed(rows: Sequence[Row], normalizer: str, arm: str) -> dict[int, Row]:
    return {r["seed"]: r for r in rows if (r["normalizer"], r["arm"]) == (normalizer, arm)}


def lines(found: Sequence[Row], effects: Sequence[Row]) -> list[str]:
    said = [
        f"{r['condition']} ({r['about']}), score {r['score']}: recall "
        f"{r['recall_first']:.2f} at the first selection, {r['recall_last']:.2f} at the last; "
        f"{r['hard_last']:.1f} of the rare-hard types frozen; KL of the planted types ends at "
        f"{r['planted_kl_after']:.3f} nats, floor {r['floor']:.3f}"
        for r in found
    ]
    for e in effects:
        if e["positions"] == "other" and e["arm"] != "nothing":
            interval = (
                f"95 % interval {e['low']:+.5f} to {e['high']:+.5f}"
                if np.isfinite(e["low"])
                else "one seed: no interval"
            )
            said.append(
                f"freezing {e['arm']} types ({e['frozen_share']:.1%} of positions, normaliser "
                f"{e['normalizer']}), other positions of {e['text']} text: "
                f"{e['difference']:+.5f} nats ({interval}) against freezing nothing "
                f"({e['kl_end'] - e['difference']:.5f})"
            )
    return said


SHOWN = {
    "condition": "condition",
    "score": "score",
    "precision_first": "precision, first",
    "recall_first": "recall, first",
    "precision_last": "precision, last",
    "recall_last": "recall, last",
    "recall_last_least": "worst seed",
    "hard_last": "rare-hard",
    "control_residual_worst": "control off by",
}
"""Columns of the summary that fit on a screen."""


def draw(path: Path, recovery: Sequence[Row], effects: Sequence[Row]) -> Path:
    """Recall of every seed by condition, and what freezing did to the other positions."""
    from rock_opd.plots.canvas import BLUE, GREEN, ORANGE, figure

    with figure(path, panels=2, widths=(1.35, 1.0)) as (left, right):
        conditions = list(dict.fromkeys(r["condition"] for r in recovery))
        scores = list(dict.fromkeys(r["score"] for r in recovery))
        for k, (score, color) in enumerate(zip(scores, (BLUE, ORANGE), strict=False)):
            for place, condition in enumerate(conditions):
                y = [
                    r["recall_last"]
                    for r in recovery
                    if (r["condition"], r["score"]) == (condition, score)
                ]
                x = place + 0.24 * (k - (len(scores) - 1) / 2)
                spread = x + 0.1 * (np.arange(len(y)) / max(1, len(y) - 1) - 0.5)
                label = score if place == 0 else None
                left.plot(spread, y, "o", color=color, alpha=0.55, markersize=4.5, label=label)
                left.plot([x - 0.1, x + 0.1], [np.mean(y)] * 2, color=color, linewidth=2.4)
        left.axhline(0.9, color="black", linewidth=0.8, linestyle=":")
        left.set_xticks(range(len(conditions)), [c.replace(" ", "\n", 1) for c in conditions])
        left.set(
            ylim=(-0.04, 1.04),
            ylabel="recall of the planted types",
            title="Last selection (dots: seeds, bars: means)",
        )
        left.legend(loc="lower left")
        others = [
            e
            for e in effects
            if (e["positions"], e["text"]) == ("other", "own") and e["arm"] != "nothing"
        ]
        normalizers = list(dict.fromkeys(e["normalizer"] for e in others))
        for k, (normalizer, color) in enumerate(zip(normalizers, (BLUE, GREEN), strict=False)):
            mine = [e for e in others if e["normalizer"] == normalizer]
            right.errorbar(
                [e["difference"] for e in mine],
                np.arange(len(mine)) + 0.16 * (k - (len(normalizers) - 1) / 2),
                xerr=np.abs([[e["difference"] - e[end] for e in mine] for end in ("low", "high")]),
                fmt="o",
                color=color,
                capsize=3,
                label=f"normaliser {normalizer}",
            )
        right.axvline(0, color="black", linewidth=0.9, linestyle=":")
        arms = list(dict.fromkeys(e["arm"] for e in others))
        right.set_yticks(range(len(arms)), [f"{arm.replace('_', '-')} frozen" for arm in arms])
        right.set_ylim(len(arms) - 0.6, -0.9)  # first arm on top, room for the legend
        right.set(
            xlabel="difference to freezing nothing, nats (95 % over seeds)",
            title="KL of the other positions, held-out prompts",
        )
        right.legend(loc="upper right")
    return path
