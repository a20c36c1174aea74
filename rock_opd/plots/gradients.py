"""What types do to the gradient (``rock-opd gradients``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rock_opd.plots.canvas import BLACK, GREY, PURPLE, RED, SKY, figure
from rock_opd.tables import Columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GRADIENT_LOOKS = {
    "rocks": (RED, "o", "rocks"),
    "rare_high": (PURPLE, "s", "rare high-KL"),
    "other": (GREY, ".", "others"),
    "single": (SKY, "x", "occur once"),
}
"""Colour, marker and name of the groups of ``gradients.type_groups``."""


def gradients_figure(path: Path, table: Columns) -> Path:
    """Size, direction and share of the types' gradients.

    Args:
        table: ``count``, ``magnitude``, ``cos_balanced``, ``contribution_share`` and, where rocks
            are known, ``group``.
    """
    count, size, cosine, share = (
        np.asarray(table[name], np.float64)
        for name in ("count", "magnitude", "cos_balanced", "contribution_share")
    )
    grouped = "group" in table
    group = np.asarray(table["group"]) if grouped else np.full(len(count), "other")
    names = [name for name in GRADIENT_LOOKS if (group == name).any()]
    panels = 3 if grouped else 2
    with figure(path, panels=panels, size=(4.8 * panels, 4.4)) as axes:
        for name in reversed(names):
            color, marker, shown = GRADIENT_LOOKS[name]
            at = (group == name) & (size > 0)
            axes[0].scatter(
                count[at],
                size[at],
                s=18,
                c=color,
                marker=marker,
                alpha=0.55,
                linewidths=0.8 if marker == "x" else 0,
                label=f"{shown if grouped else 'types'} ({int((group == name).sum()):,})",
                rasterized=True,
            )
        scale = "log" if (size > 0).any() else "linear"  # an empty picture has no log
        axes[0].set(
            xscale=scale,
            yscale=scale,
            xlabel="occurrences (log scale)",
            ylabel="|mean logit gradient| (log scale)",
            title="Size",
        )
        for handle in axes[0].legend(loc="lower left").legend_handles:
            handle.set_alpha(1)
            handle.set_sizes([22])
        _cosine_boxes(axes[1], {name: cosine[group == name] for name in names}, grouped)
        if grouped:
            _share_bars(
                axes[2],
                {
                    name: tuple(
                        float(np.nansum(values[group == name]) / (np.nansum(values) or 1.0))
                        for values in (np.ones(len(count)), count, share)
                    )
                    for name in names
                },
            )
    return path


def _cosine_boxes(axes: Axes, cosines: Mapping[str, np.ndarray], grouped: bool) -> None:
    """Boxes: median, quartiles, 5th and 95th percentile."""
    axes.axhline(0, color=BLACK, linewidth=0.9, linestyle=":")
    axes.set(
        ylabel="cosine with the balanced gradient",
        title="Direction (box: quartiles, whiskers: 5-95 %)",
    )
    axes.grid(axis="x", visible=False)
    finite = {name: values[np.isfinite(values)] for name, values in cosines.items()}
    finite = {name: values for name, values in finite.items() if len(values)}
    if not finite:
        axes.text(
            0.5, 0.5, "no direction is defined", transform=axes.transAxes, ha="center", va="center"
        )
        return
    boxes = axes.boxplot(
        list(finite.values()),
        whis=(5, 95),
        showfliers=False,
        patch_artist=True,
        widths=0.5,
        medianprops={"color": BLACK, "linewidth": 1.6},
    )
    for box, (place, (name, values)) in zip(
        boxes["boxes"], enumerate(finite.items(), start=1), strict=True
    ):
        box.set(facecolor=GRADIENT_LOOKS[name][0], alpha=0.6)
        median = float(np.median(values))
        axes.annotate(f"{median:.3f}", (place + 0.28, median), va="center", fontsize=8, color=BLACK)
    labels = [GRADIENT_LOOKS[name][2] if grouped else "all types" for name in finite]
    axes.set_xticks(range(1, len(finite) + 1), labels)
    axes.set_xlim(0.5, len(finite) + 0.75)


def _share_bars(axes: Axes, shares: Mapping[str, tuple[float, ...]]) -> None:
    """Shares of types, positions and |contribution|, group by group."""
    bars = ("types", "positions", "|contribution|")
    left = np.zeros(len(bars))
    for name, values in shares.items():
        color, *_ = GRADIENT_LOOKS[name]  # named in the first panel
        axes.barh(bars, values, left=left, color=color, alpha=0.75, height=0.55)
        for row, value in enumerate(values):
            if value >= 0.06:
                axes.text(
                    left[row] + value / 2, row, f"{value:.0%}", ha="center", va="center", fontsize=8
                )
        left += values
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel="share", title="Share by group")
    axes.grid(axis="y", visible=False)
