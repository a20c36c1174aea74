"""Where rocks lie among all types (``rock-opd rocks``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rock_opd.plots.canvas import BLUE, GREY, RED, figure, label_points, token_label
from rock_opd.tables import Columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def rocks_figure(
    path: Path,
    table: Columns,
    *,
    rock_ids: np.ndarray,
    control_ids: np.ndarray,
    texts: Mapping[int, str],
    families: Mapping[str, tuple[int, float]],
) -> Path:
    """Where rocks lie among all types, by count and mean KL, and which families they are of.

    Args:
        table: ``token_id``, ``count``, ``mean_kl`` of every type to draw, one row each.
        rock_ids: best first; the first are labelled.
        control_ids: the matched controls.
        texts: token id -> decoded text, as far as known.
        families: family -> (number of rocks, share of all occurrences); empty when texts are
            unknown.
    """
    ids = np.asarray(table["token_id"])
    count = np.asarray(table["count"], np.float64)
    mean = np.asarray(table["mean_kl"], np.float64)
    drawable = np.isfinite(mean) & (mean > 0) & (count > 0)
    panels = 2 if families else 1
    with figure(path, panels=panels, widths=[1.7, 1][:panels], size=(4.9 * panels, 4.4)) as axes:
        funnel = axes[0]
        crowded = len(control_ids) > 1000
        groups = (
            ("other types", ~np.isin(ids, [*rock_ids, *control_ids]), GREY, ".", 12, 0.45),
            (
                "matched random controls",
                np.isin(ids, control_ids),
                BLUE,
                "^",
                *((5, 0.25) if crowded else (18, 0.75)),
            ),
            ("rocks", np.isin(ids, rock_ids), RED, "o", 22, 0.9),
        )
        for name, member, color, marker, area, alpha in groups:
            at = member & drawable
            funnel.scatter(
                count[at],
                mean[at],
                s=area,
                c=color,
                marker=marker,
                alpha=alpha,
                linewidths=0,
                label=f"{name} ({int(member.sum()):,})",
                rasterized=True,
            )
        funnel.set(
            xscale="log",
            yscale="log",
            xlabel="occurrences (log scale)",
            ylabel="mean KL, nats per occurrence (log scale)",
            title="Token types by frequency and mean KL",
        )
        legend = funnel.legend(loc="lower left")
        for handle in legend.legend_handles:
            handle.set_alpha(1)
            handle.set_sizes([22])
        if families:
            _family_bars(axes[1], families)
        where = {int(v): i for i, v in enumerate(ids)}
        top = [where[int(v)] for v in rock_ids if int(v) in where and drawable[where[int(v)]]]
        label_points(
            funnel,
            count[top],
            mean[top],
            [token_label(int(ids[i]), texts.get(int(ids[i]))) for i in top],
        )
    return path


def _family_bars(axes: Axes, families: Mapping[str, tuple[int, float]]) -> None:
    names = list(families)[::-1]
    numbers = [families[name][0] for name in names]
    axes.barh(names, numbers, color=RED, alpha=0.85, height=0.6)
    for row, name in enumerate(names):
        number, share = families[name]
        axes.text(number, row, f"  {number} ({share:.1%} of tokens)", va="center", fontsize=8)
    axes.set(title="Rocks by family", xlabel="rock types")
    axes.set_xlim(0, max([*numbers, 1]) * 1.75)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", visible=False)
