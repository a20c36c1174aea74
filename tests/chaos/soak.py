"""Does memory grow? A long undisturbed run of recipes/debug_cpu.yaml whose processes are measured
every few seconds; writes ``soak.json`` and a figure.

    python tests/chaos/soak.py --steps 1000 --out runs/chaos --figure docs/reliability_memory.png
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import ROOT, steps_done, where_is
from processes import descendants, kill_all

EVERY_S = 2.0
LIMIT_S = 600.0
"""Longest time without a finished step."""
SETTLED = 100
"""Steps after which caches, arenas and the registry have their size."""
MB = 1e6
SMALL_CACHES = {
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "RAY_task_events_max_num_task_in_gcs": "500",
}
"""Caches of other libraries that are bounded, but full only after hours (1,024 kernels, one per
shape of a matrix product, which a mixture of experts never runs out of; 100,000 tasks): small, they
hide no growth of ours."""


def command(tiny: Path, out: Path, steps: int) -> list[str]:
    return [
        *(sys.executable, "-m", "rock_opd", "train", str(ROOT / "recipes" / "debug_cpu.yaml")),
        *("run.name=soak", f"run.dir={out}", f"run.num_steps={steps}"),
        f"data.prompts={tiny / 'prompts.jsonl'}",
        f"student.model={tiny / 'student'}",
        f"teacher.model={tiny / 'teacher'}",
        f"eval.problems={tiny / 'problems.jsonl'}",
        *("eval.every=50", "checkpoint.every=25", "log.registry_every=10", "log.occurrences=true"),
        *("policy.score=rock_ctx", "probe.num_rollouts=8", "probe.tau_pre=q0.2"),
        *("probe.tau_post=q0.2", "probe.gamma=0.3", "probe.eta=0.02"),
    ]


def resident(run_dir: Path, driver: int) -> dict[str, float]:
    """Resident memory now, MB, by role; ``ray`` is the head's own processes together."""
    known = where_is(run_dir)
    roles = {} if known is None else {p["pid"]: p["role"] for p in known["processes"]}
    found: dict[str, float] = {}
    for process in descendants(driver):
        try:
            rss, name = process.memory_info().rss / MB, process.name()
        except psutil.NoSuchProcess:
            continue
        role = "driver" if process.pid == driver else roles.get(process.pid)
        if role is None and name in ("raylet", "gcs_server"):
            role = "ray"
        if role is not None:
            found[role] = found.get(role, 0.0) + rss
    return found


def follow(args: list[str], run_dir: Path) -> list[dict[str, Any]]:
    """Runs to the end; step, seconds and MB by role, every few seconds.

    Raises:
        RuntimeError: it ended with an error, or stood still.
    """
    rows: list[dict[str, Any]] = []
    log = run_dir.with_name(run_dir.name + ".log")
    began = moved = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            args, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        while process.poll() is None:
            time.sleep(EVERY_S)
            now, step = time.monotonic(), steps_done(run_dir)
            if not rows or rows[-1]["step"] != step:
                moved = now
            if now - moved > LIMIT_S:
                raise RuntimeError(f"no step in {LIMIT_S:g} s, see {log}")
            rows.append(
                {"step": step, "seconds": now - began, "mb": resident(run_dir, process.pid)}
            )
    finally:
        if process.poll() is None:
            kill_all(descendants(process.pid))
    if process.returncode != 0:
        raise RuntimeError(f"ended with status {process.returncode}, see {log}")
    return rows


def readings(rows: list[dict[str, Any]], role: str, *, after: int) -> list[tuple[int, float]]:
    """Step and MB of one role from the step ``after`` on; one that has just ended holds 0, and is
    left out."""
    return [
        (row["step"], row["mb"][role])
        for row in rows
        if row["step"] >= after and row["mb"].get(role, 0.0) > 0
    ]


def growth(rows: list[dict[str, Any]], role: str, *, after: int) -> dict[str, float]:
    """Of one role's resident memory: the least-squares slope over the steps from ``after`` on, in
    MB per 100 steps, and the medians of the first and last tenth of them."""
    step, mb = np.array(readings(rows, role, after=after), np.float64).T
    tenth = max(1, len(mb) // 10)
    return {
        "slope_mb_per_100_steps": float(np.polyfit(step, mb, 1)[0] * 100),
        "first_mb": float(np.median(mb[:tenth])),
        "last_mb": float(np.median(mb[-tenth:])),
        "most_mb": float(mb.max()),
    }


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for role in sorted({role for row in rows for role in row["mb"]}):
        points = readings(rows, role, after=1)
        axes.plot(*zip(*points, strict=True), label=role, linewidth=1.2)
    axes.set(xlabel="step", ylabel="resident memory (MB)", ylim=(0, None))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right center", frameon=False)
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"))
    parser.add_argument("--figure", type=Path, default=None)
    args = parser.parse_args()
    for name, value in ({"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | SMALL_CACHES).items():
        os.environ.setdefault(name, value)
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    from rock_opd.demo import make_tiny

    if (out / "soak.json").exists():  # measured already: drawn anew
        rows = json.loads((out / "soak.json").read_text())["rows"]
    else:
        shutil.rmtree(out / "soak", ignore_errors=True)
        rows = follow(command(make_tiny(out / "tiny"), out, args.steps), out / "soak")
    after = min(SETTLED, args.steps // 5)
    roles = sorted({role for row in rows if row["step"] >= after for role in row["mb"]})
    soak = {
        "steps": rows[-1]["step"],
        "seconds": rows[-1]["seconds"],
        "after_step": after,
        "roles": {role: growth(rows, role, after=after) for role in roles},
        "rows": rows,
    }
    (out / "soak.json").write_text(json.dumps(soak) + "\n")
    draw(rows, args.figure or out / "soak.png")
    for role, facts in soak["roles"].items():
        print(role, {name: round(value, 2) for name, value in facts.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
