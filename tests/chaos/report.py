"""``docs/reliability.md`` from ``chaos.json``, ``soak.json`` and ``equality.json``, and a copy of
all numbers beside it.

python tests/chaos/report.py --out runs/chaos --doc docs/reliability.md
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

from harness import render

NUMBERS = ("chaos.json", "soak.json", "equality.json")
TEMPLATE = Path(__file__).with_name("reliability.md.in")


def setting() -> str:
    from run import NUM_STEPS, TWO_OF_ALL

    two = ", ".join(item for item in TWO_OF_ALL if not item.startswith("run."))
    return f"{NUM_STEPS} steps, student.num_ranks=2, {two}, a probe set, a checkpoint every 2 steps"


def equality_rows(found: dict[str, Any]) -> str:
    rows = []
    for row in found["ways"]:
        metrics = "0"
        if row["metrics_relative"]:
            metrics = f"{row['metrics_relative']:.1e} ({row['metrics_where']})"
        same = "the same" if row["same_rollouts"] else "others"
        weights = f"{row['weights']:.1e}" if row["weights"] else "0"
        rows.append(f"| {row['way']} | {same} | {weights} | {metrics} |")
    return "\n".join(rows)


def soak_rows(soak: dict[str, Any]) -> str:
    return "\n".join(
        f"| {role} | {f['first_mb']:.0f} | {f['last_mb']:.0f} | {f['most_mb']:.0f} | "
        f"{f['slope_mb_per_100_steps']:+.1f} |"
        for role, f in soak["roles"].items()
    )


def trouble_lines(chaos: dict[str, Any]) -> str:
    if not chaos["trouble"]:
        return ""
    lines = [
        f"- {t['run']}: {t['hang'] or '; '.join(t['wrong']) or 'prompts lost or repeated'}"
        for t in chaos["trouble"]
    ]
    return "\nWhat went wrong:\n\n" + "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"))
    parser.add_argument("--doc", type=Path, default=Path("docs/reliability.md"))
    args = parser.parse_args()
    chaos, soak, equality = (json.loads((args.out / name).read_text()) for name in NUMBERS)
    text = TEMPLATE.read_text(encoding="utf-8").format(
        machine=f"{os.cpu_count()} cores, {platform.machine()}, no GPU",
        runs=chaos["runs"],
        setting=setting(),
        seed=chaos["seed"],
        revisions=", ".join(chaos["revisions"]),
        limit=15,
        chaos=render(chaos),
        trouble=trouble_lines(chaos),
        steps=equality["num_steps"],
        every=equality["checkpoint"],
        death=equality["death"],
        equality=equality_rows(equality),
        soak_steps=soak["steps"],
        soak_minutes=soak["seconds"] / 60,
        after=soak["after_step"],
        soak=soak_rows(soak),
    )
    args.doc.write_text(text, encoding="utf-8")
    data = args.doc.with_suffix("")
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir()
    for path in (*args.out.glob("outcome_*.json"), *map(args.out.joinpath, NUMBERS)):
        shutil.copy(path, data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
