"""The figures of a study, as PNG files. Matplotlib without a screen: no window, no global state.

A figure never computes: it is handed the columns of a table. Colours are Okabe and Ito's, which
differ also for the colour-blind; groups differ in shape as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rock_opd.errors import DataError
from rock_opd.tables import Columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW, GREY, BLACK = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#F0E442",
    "#9A9A9A",
    "#000000",
)
STYLE = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 11,
    "font.size": 9.5,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "legend.fontsize": 8.5,
    "legend.framealpha": 0.85,
    "lines.linewidth": 1.6,
}
MAX_LABELS = 12
"""Token texts written into a picture: more would overlap."""


@contextmanager
def figure(
    path: Path,
    *,
    panels: int = 1,
    size: tuple[float, float] | None = None,
    widths: Sequence[float] | None = None,
) -> Iterator[list[Axes]]:
    """A picture in the making: gives its panels, side by side, and writes it at the end.

    Args:
        path: a PNG file; written aside and renamed, so that an error leaves the old one.
        size: inches; by default 5.6 x 4.2 per panel.
        widths: relative widths of the panels; equal by default.

    Raises:
        DataError: the place cannot be written.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=size or (5.6 * panels, 4.2), layout="constrained")
        FigureCanvasAgg(drawn)
        axes = drawn.subplots(1, panels, squeeze=False, width_ratios=widths)[0]
        yield list(axes)
        partial = path.with_name(path.name + ".partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            drawn.savefig(partial, format="png", dpi=150)
            os.replace(partial, path)
        except OSError as error:
            raise DataError(f"figure {path} cannot be written: {error}") from None


def token_label(token_id: int, text: str | None) -> str:
    """How a type is written into a picture: its text in quotes, line breaks as an arrow, what the
    font may lack escaped; its id where the text is unknown."""
    if not text:
        return f"#{token_id}"
    shown = text.replace("\r", "").replace("\n", "\u21b5").replace("\t", "\u2192")
    shown = "".join(
        c if c in "\u21b5\u2192" or (c.isascii() and c.isprintable()) else ascii(c)[1:-1]
        for c in shown
    )
    return f"'{shown if len(shown) <= 14 else shown[:12] + '..'}'"


def label_points(axes: Axes, x: np.ndarray, y: np.ndarray, labels: Sequence[str]) -> None:
    """Labels the first points, at most ``MAX_LABELS``, where there is room: a text that would cover
    a point or another text is left out. Comes last: it settles the layout of the whole figure.

    Args:
        x, y: float [n], of all points that are not to be covered.
        labels: of the points, in order of importance.
    """
    drawn = axes.figure
    renderer = drawn.canvas.get_renderer()
    drawn.draw_without_rendering()  # limits and scales, on which places depend
    drawn.set_layout_engine("none")
    inside = axes.get_window_extent(renderer)
    points = axes.transData.transform(np.column_stack([x, y]))
    taken: list[Bbox] = []
    for (point_x, point_y), label in zip(zip(x, y, strict=True), labels, strict=True):
        if len(taken) == MAX_LABELS:
            break
        for offset, align in (((5, 3), "left"), ((-5, 3), "right"), ((5, -9), "left")):
            text = axes.annotate(
                label,
                (point_x, point_y),
                xytext=offset,
                textcoords="offset points",
                ha=align,
                fontsize=7.5,
                parse_math=False,
            )
            text.set_in_layout(False)
            box = text.get_window_extent(renderer)
            covers = box.count_contains(points) or any(box.overlaps(other) for other in taken)
            if not covers and inside.count_contains(box.corners()) == 4:
                taken.append(box)
                break
            text.remove()


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


def cutoff_figure(
    path: Path,
    *,
    coverage: np.ndarray,
    cuts: Sequence[int],
    sizes: Sequence[int],
    jaccard: np.ndarray,
    jaccard_low: np.ndarray,
    jaccard_high: np.ndarray,
    num_prompts: int,
    recommended: int | None,
    coverage_target: float,
    jaccard_bar: float,
) -> Path:
    """Coverage of the loss by K, and how far smaller samples find the same top K.

    Args:
        coverage: float [n]: of the first K types, K = 1 to n.
        cuts: K at which stability was measured.
        sizes: prompts in the sub-samples.
        jaccard, jaccard_low, jaccard_high: float [len(sizes), len(cuts)].
        recommended: K; None: no K is recommended, and none is marked.
    """
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    with figure(path, panels=2, size=(11.2, 4.6)) as (left, right):
        left.plot(np.arange(1, len(coverage) + 1), coverage, color=RED)
        left.axhline(coverage_target, color=BLACK, linestyle=":", linewidth=1)
        left.set(
            xscale="log",
            xlabel="K, types in the list (log scale)",
            ylabel="share of all KL",
            ylim=(0, 1.02),
            title="KL carried by the top K types",
        )
        for color, line, i in zip(
            (SKY, GREEN, BLUE, PURPLE, ORANGE), ("-", "--", "-.", ":", "-"), range(len(sizes)),
            strict=False,
        ):  # fmt: skip
            right.plot(cuts, jaccard[i], color=color, linestyle=line, label=f"{sizes[i]} prompts")
            right.fill_between(
                cuts, jaccard_low[i], jaccard_high[i], color=color, alpha=0.13, linewidth=0
            )
        right.axhline(jaccard_bar, color=BLACK, linestyle=":", linewidth=1)
        right.set(
            xscale="log",
            xlim=(cuts[0] / 1.1, cuts[-1] * 1.1),  # also where every value is unknown
            xlabel="K, types in the list (log scale)",
            ylabel="Jaccard with the list of all prompts",
            ylim=(0, 1.02),
            title=f"Stability against all {num_prompts} prompts (bands: 95 % of repeats)",
        )
        for axes in (left, right):
            if recommended is not None:
                axes.axvline(recommended, color=ORANGE, linewidth=1.2, zorder=0)
            axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axes.xaxis.set_minor_locator(NullLocator())
        left.plot([], [], color=BLACK, linestyle=":", linewidth=1, label="target")
        if recommended is None:
            left.plot([], [], linestyle="", label="no K is recommended")
        else:
            left.plot([], [], color=ORANGE, linewidth=1.2, label=f"recommended K = {recommended}")
        for axes in (left, right):  # below: curves may run anywhere within
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=5, frameon=False)
    return path


GROUP_LOOKS = {
    "rocks": (RED, "o"),
    "rare_high": (PURPLE, "s"),
    "random": (GREY, "."),
}
"""Colour and marker of the groups of ``analysis.stagnation_groups``."""
GROUP_NAMES = {"rocks": "rocks", "rare_high": "rare high-KL", "random": "random others"}


def evolve_figure(path: Path, groups: Mapping[str, Columns]) -> Path:
    """How types moved between two checkpoints.

    Args:
        groups: by the names of ``GROUP_NAMES``: columns ``early``, ``late`` (mean KL, nats) and,
            where gradients are known, ``cosine`` with the balanced gradient at the early one.
    """
    with_cosine = any(np.isfinite(columns["cosine"]).any() for columns in groups.values())
    with figure(path, panels=2) as (left, right):
        drawn = []
        for name in ("random", "rare_high", "rocks"):
            color, marker = GROUP_LOOKS[name]
            early = np.asarray(groups[name]["early"], np.float64)
            late = np.asarray(groups[name]["late"], np.float64)
            at = (early > 0) & (late > 0)
            drawn.extend([early[at], late[at]])
            left.scatter(
                early[at],
                late[at],
                s=20,
                c=color,
                marker=marker,
                alpha=0.65,
                linewidths=0,
                label=f"{GROUP_NAMES[name]} ({len(early)})",
            )
        both = np.concatenate(drawn) if np.concatenate(drawn).size else np.array([0.1, 1.0])
        span = np.array([both.min() * 0.7, both.max() * 1.4])
        left.plot(span, span, color=BLACK, linewidth=0.9, linestyle=":", label="no change")
        left.set(
            xlim=span,
            ylim=span,
            xscale="log",
            yscale="log",
            xlabel="mean KL at the early checkpoint, nats (log scale)",
            ylabel="mean KL at the late checkpoint, nats (log scale)",
            title="Each type, early and late",
        )
        left.legend(loc="lower right")
        if with_cosine:
            _against_cosine(right, groups)
        else:
            _changes(right, groups)
    return path


def _against_cosine(axes: Axes, groups: Mapping[str, Columns]) -> None:
    for name in ("random", "rare_high", "rocks"):
        color, marker = GROUP_LOOKS[name]
        columns = groups[name]
        change = np.asarray(columns["late"]) - np.asarray(columns["early"])
        axes.scatter(
            columns["cosine"], change, s=20, c=color, marker=marker, alpha=0.65, linewidths=0,
            label=GROUP_NAMES[name],
        )  # fmt: skip
    axes.axhline(0, color=BLACK, linewidth=0.9, linestyle=":")
    axes.set_yscale("symlog", linthresh=0.1)
    axes.set(
        xlabel="cosine of the type's gradient with the balanced one",
        ylabel="change of mean KL, nats (log scale beyond ±0.1)",
        title="Change against gradient direction",
    )
    axes.legend(loc="best")


def _changes(axes: Axes, groups: Mapping[str, Columns]) -> None:
    """Boxes of late / early: median, quartiles, 5th and 95th percentile."""
    axes.axhline(1, color=BLACK, linewidth=0.9, linestyle=":")
    axes.set_yscale("log")
    axes.set(
        ylabel="mean KL, late / early (log scale)",
        title="Change by group (box: quartiles, whiskers: 5-95 %)",
    )
    for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        set_formatter("{x:g}")
    axes.grid(axis="x", visible=False)
    names, changes = [], []
    for name in GROUP_NAMES:
        early = np.asarray(groups[name]["early"], np.float64)
        late = np.asarray(groups[name]["late"], np.float64)
        at = (early > 0) & (late > 0)
        if at.any():
            names.append(name)
            changes.append(late[at] / early[at])
    if not names:
        return
    boxes = axes.boxplot(
        changes,
        whis=(5, 95),
        showfliers=False,
        patch_artist=True,
        widths=0.5,
        medianprops={"color": BLACK, "linewidth": 1.6},
    )
    for box, name in zip(boxes["boxes"], names, strict=True):
        box.set(facecolor=GROUP_LOOKS[name][0], alpha=0.6)
    axes.set_xticks(range(1, len(names) + 1), [GROUP_NAMES[name] for name in names])


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
