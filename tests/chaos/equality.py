"""Is a resumed run the uninterrupted one? The same run, killed as a whole in the midst of a step
and gone on with in several ways; writes ``equality.json``.

    python tests/chaos/equality.py --out runs/chaos
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

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import ROOT, command, ledger, metrics
from processes import descendants, kill_all

NUM_STEPS, EVERY, DEATH = 8, 3, 5
"""Steps, steps between checkpoints, the step in which the run dies."""
LIMIT_S = 900
ONE_RANK = ("student.num_ranks=1", f"run.num_steps={NUM_STEPS}", f"checkpoint.every={EVERY}")
WAYS: dict[str, tuple[str, ...]] = {
    "as it was": (),
    "without its journal": (),
    "two rollout workers instead of one": ("rollout.num_workers=2",),
    "two teachers instead of one": ("teacher.num_replicas=2",),
    "ZeRO stage 3 instead of 2": ("student.zero_stage=3",),
    "two student ranks instead of one": ("student.num_ranks=2",),
    "two student ranks, ZeRO stage 3": ("student.num_ranks=2", "student.zero_stage=3"),
}
WITHOUT_JOURNAL = frozenset(WAYS) - {"as it was"}
"""There, rollouts are sampled again, not replayed."""


def finish(args: list[str]) -> None:
    done = subprocess.run(
        args, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"ended with status {done.returncode}: {done.stderr[-2000:]}")


def die_in_step(args: list[str], run_dir: Path, step: int) -> None:
    """Runs until the rollouts of this step are in the journal, then kills everything."""
    process = subprocess.Popen(
        args,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + LIMIT_S
    while not (run_dir / "journal" / f"step_{step:06d}.npz").exists():
        if process.poll() is not None or time.monotonic() > deadline:
            kill_all(descendants(process.pid))
            raise RuntimeError("the run to be killed did not come so far")
        time.sleep(0.003)
    kill_all(descendants(process.pid))
    process.wait(timeout=60)


def differences(one: Path, other: Path) -> dict[str, Any]:
    """The largest of each kind between two finished runs; 0 is bit for bit."""
    from safetensors.numpy import load_file

    a, b = metrics(one), metrics(other)
    worst, where = 0.0, ""
    for x, y in zip(a, b, strict=True):
        for name in x.keys() | y.keys():
            if name.startswith(("time/", "perf/")) or x.get(name) == y.get(name):
                continue
            if x.get(name) is None or y.get(name) is None:
                worst, where = float("inf"), f"{name}, step {x['step']}"
                continue
            apart = abs(x[name] - y[name]) / max(abs(x[name]), abs(y[name]))
            if apart > worst:
                worst, where = apart, f"{name}, step {x['step']}"
    weights = [load_file(run / "model" / "model.safetensors") for run in (one, other)]
    return {
        "steps": [row["step"] for row in b] == [row["step"] for row in a],
        "same_rollouts": ledger(one) == ledger(other),
        "weights": max(
            float(np.abs(weights[0][n].astype(np.float64) - weights[1][n]).max())
            for n in weights[0]
        ),
        "metrics_relative": worst,
        "metrics_where": where,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"))
    args = parser.parse_args()
    for name, value in (("OMP_NUM_THREADS", "1"), ("HF_HUB_OFFLINE", "1")):
        os.environ.setdefault(name, value)
    out = args.out.resolve() / "equality"
    if (out.parent / "equality.json").exists():
        print(f"{out.parent / 'equality.json'}: compared already")
        return 0
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    from rock_opd.demo import make_tiny

    tiny = make_tiny(out.parent / "tiny")
    finish(command(tiny, out, "whole", *ONE_RANK))
    die_in_step(command(tiny, out, "killed", *ONE_RANK), out / "killed", DEATH)
    rows = []
    for number, (way, overrides) in enumerate(WAYS.items()):
        name = f"way_{number}"
        shutil.copytree(out / "killed", out / name)
        (out / name / "run.lock").unlink(missing_ok=True)
        if way in WITHOUT_JOURNAL:
            shutil.rmtree(out / name / "journal")
        finish(command(tiny, out, name, *ONE_RANK, "resume=true", *overrides))
        rows.append({"way": way, **differences(out / "whole", out / name)})
        print(rows[-1], flush=True)
    found = {"num_steps": NUM_STEPS, "death": DEATH, "checkpoint": EVERY, "ways": rows}
    (out.parent / "equality.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
