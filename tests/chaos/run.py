"""``make chaos``: at least so many seeded kills, run after run; writes ``chaos.json``.

    python tests/chaos/run.py --kills 200 --out runs/chaos [--shard 0/2]

A run that is done is not played again: start it again to go on. With shards, several machines (or
one after the other) play disjoint runs into the same folder.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from clusters import LocalCluster
from harness import (
    NODE,
    command,
    compare,
    counts_of,
    draw,
    play,
    read_outcomes,
    render,
    summarize,
    write_outcome,
)

NUM_STEPS, EPOCHS = 20, 2
"""40 prompts, 4 a step."""
KILLS_PER_RUN = 8
NODE_RUNS = 3
"""Runs in a cluster of which nodes are lost; the others lose single processes."""
SPREAD = ("placement.strategy=spread",)
TWO_OF_ALL = ("rollout.num_workers=2", "teacher.num_replicas=2", f"run.num_steps={NUM_STEPS}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"))
    parser.add_argument("--shard", default="0/1", help="this part of the runs, of so many")
    parser.add_argument("--limit-s", type=float, default=900.0, help="a run hangs after so long")
    args = parser.parse_args()
    for name, value in (("OMP_NUM_THREADS", "1"), ("HF_HUB_OFFLINE", "1")):
        os.environ.setdefault(name, value)
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    from rock_opd.demo import make_tiny

    tiny = make_tiny(out / "tiny")
    reference = out / "reference"
    if not (reference / "model").is_dir():
        shutil.rmtree(reference, ignore_errors=True)
        calm = play(
            command(tiny, out, "reference", *TWO_OF_ALL), reference, [], limit_s=args.limit_s
        )
        if calm.hang or calm.wrong:
            print(f"the undisturbed run failed: {calm.hang or calm.wrong}", file=sys.stderr)
            return 1
    part, parts = map(int, args.shard.split("/"))
    for number in range(part, NODE_RUNS, parts):
        disturb(out, f"node_{number:04d}", [args.seed, NODE_RUNS, number], tiny, args.limit_s)
    number = part
    while sum(len(o["hits"]) for o in read_outcomes(out)) < args.kills:
        disturb(out, f"{number:04d}", [args.seed, number], tiny, args.limit_s)
        number += parts
    chaos = summarize(read_outcomes(out), seed=args.seed)
    (out / "chaos.json").write_text(json.dumps(chaos, indent=1) + "\n")
    print(render(chaos))
    return 1 if chaos["trouble"] else 0


def disturb(out: Path, name: str, seed: Sequence[int], tiny: Path, limit_s: float) -> None:
    """Plays one run, unless it is played already, and writes its outcome."""
    path, run = out / f"outcome_{name}.json", out / f"run_{name}"
    if path.exists():
        return
    shutil.rmtree(run, ignore_errors=True)
    asked = command(tiny, out, run.name, *TWO_OF_ALL)
    many = {"num": KILLS_PER_RUN, "num_steps": NUM_STEPS}
    if name.startswith(NODE):
        with closing(TwoNodes()) as nodes:
            plan = draw(seed, **many, counts={NODE: 2})
            outcome = play([*asked, *SPREAD], run, plan, limit_s=limit_s, nodes=nodes)
    else:
        outcome = play(asked, run, draw(seed, **many, counts=counts_of(asked)), limit_s=limit_s)
    compare(outcome, out / "reference", run, epochs=EPOCHS)
    write_outcome(path, outcome)
    fine = not (outcome.hang or outcome.wrong or outcome.lost or outcome.repeated)
    print(
        f"{run.name}: {len(outcome.hits)} kills in {outcome.seconds:.0f} s, "
        + ("as if nothing had happened" if fine else f"{outcome.hang or outcome.wrong}"),
        flush=True,
    )
    if fine:
        shutil.rmtree(run)


class TwoNodes:
    """A cluster of two machines besides the head, either of which may be lost."""

    CPUS = "--num-cpus=6"
    """Enough for the whole run, so that it can go on before another node is there."""

    def __init__(self) -> None:
        self._cluster = LocalCluster("--num-cpus=0")
        self.env = self._cluster.env
        try:
            for _ in range(2):
                self._cluster.join(self.CPUS)
        except BaseException:
            self.close()
            raise

    def lose(self, index: int, signal: str) -> None:
        """Kills or stops all that runs on it; another node joins."""
        self._cluster.lose(index, frozen=signal == "SIGSTOP")
        self._cluster.join(self.CPUS)

    def close(self) -> None:
        self._cluster.stop()


if __name__ == "__main__":
    sys.exit(main())
