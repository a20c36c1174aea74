"""What banning a type does to accuracy (``rock-opd knockout``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rock_opd.plots.canvas import BLACK, BLUE, GREY, RED, figure, label_points, token_label
from rock_opd.tables import Columns

VERDICT_LOOKS = {
    "neutral": (GREY, "."),
    "pillar": (RED, "v"),
    "stumbling block": (BLUE, "^"),
}
"""Colour and marker of the verdicts of ``analysis.knockout_table``; undefined ones are left out."""


def knockout_figure(path: Path, table: Columns) -> Path:
    """What banning each type does to accuracy, the most harmful ban first.

    Args:
        table: ``token_id``, ``text``, ``delta``, ``ci_low``, ``ci_high``, ``verdict``.
    """
    delta = np.asarray(table["delta"], np.float64)
    order = np.argsort(delta, kind="stable")[: np.isfinite(delta).sum()]  # NaN sorts last
    rank = np.empty(len(delta))
    rank[order] = np.arange(1, len(order) + 1)
    verdict = np.asarray(table["verdict"])
    around = np.stack([delta - np.asarray(table["ci_low"]), np.asarray(table["ci_high"]) - delta])
    with figure(path, size=(8.4, 4.4)) as (axes,):
        for name, (color, marker) in VERDICT_LOOKS.items():
            at = order[verdict[order] == name]
            axes.errorbar(
                rank[at],
                delta[at],
                yerr=np.maximum(around[:, at], 0.0),
                fmt=marker,
                color=color,
                markersize=5,
                elinewidth=0.9,
                alpha=0.85,
                label=f"{name} ({len(at)})",
            )
        axes.set_title("Knockout (bars: 95 % of resampled problems)")
        if not len(order):
            axes.set_axis_off()
            nothing = (
                f"none of {len(delta)} candidates has a delta:\n"
                "the base solves no problem, or fewer than two were run"
            )
            axes.text(0.5, 0.5, nothing, transform=axes.transAxes, ha="center", va="center")
            return path
        axes.axhline(0, color=BLACK, linewidth=0.9, linestyle=":")
        axes.set(
            xlabel="candidates, by change of accuracy",
            ylabel="accuracy under the ban - base accuracy",
        )
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(loc="upper left")
        found = [i for i in order if verdict[i] != "neutral"]
        found.sort(key=lambda i: -abs(delta[i]))
        label_points(
            axes,
            rank[found],
            delta[found],
            [token_label(int(table["token_id"][i]), table["text"][i]) for i in found],
        )
    return path
