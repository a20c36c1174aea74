"""Chaos: real runs on tiny models whose processes are killed at drawn moments, held against a run
that nobody disturbed.

A *plan* is a list of ``Kill``s, drawn from a seed: who, with which signal, in which phase, from
which step on. ``play`` starts a run, follows its ``phase.json`` and sends one signal after the
other, each once the run has finished the step in which the one before hit. ``compare`` then asks
for equality: every metric of every step, every weight bit for bit, and a ledger of who was trained
when, from the run's occurrence files. What is counted:

* hangs: no step finished within ``limit_s`` of a kill, or the run did not end;
* wrong: numbers that differ from the undisturbed run's, or a run that ended with an error;
* lost, repeated: prompts trained too seldom or too often in the history that survived.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from processes import descendants, kill_all

from rock_opd.runlog import library_versions

ROOT = Path(__file__).parents[2]
ROLES = ("rollout worker", "teacher", "student rank", "coordinator")
NODE = "node"
"""A whole machine: its raylet and all that runs on it."""
PHASES = ("starting", "probe", "rollout", "teacher", "train", "sync", "checkpoint")
SIGNALS = ("SIGKILL", "SIGSTOP")
POLL_S = 0.003
"""Phases of tiny models take hundredths of a second."""
PROMPTS_PER_STEP, SAMPLES = 4, 2


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One signal, and the moment to send it."""

    role: str
    index: int
    signal: str
    phase: str
    step: int
    """The first step it may hit."""
    delay_s: float = 0.0
    """After the phase began."""


@dataclass
class Hit:
    """A kill that was carried out, and what became of it."""

    kill: Kill
    step: int
    phase: str
    """The phase right after the signal: a short one may have been over."""
    recovery_s: float | None = None
    """Until the run had finished that step, or the next one where it had; None: it never did."""


@dataclass
class Outcome:
    """One disturbed run."""

    run: str
    revision: str = ""
    """Of the source."""
    hits: list[Hit] = field(default_factory=list)
    unplayed: int = 0
    """Kills whose moment never came."""
    hang: str | None = None
    wrong: list[str] = field(default_factory=list)
    lost: int = 0
    repeated: int = 0
    seconds: float = 0.0
    replacements: int = 0
    restarts: int = 0


def draw(seed: Sequence[int], *, num: int, num_steps: int, counts: dict[str, int]) -> list[Kill]:
    """The plan of one run: roles, phases and signals alike, spread over its steps.

    Args:
        counts: actors of each role that may be hit, or nodes.
    """
    rng = np.random.default_rng(seed)
    steps = np.sort(rng.integers(1, max(2, num_steps - 1), num))
    plan = []
    roles = tuple(counts)
    for step in steps:
        role = roles[rng.integers(len(roles))]
        plan.append(
            Kill(
                role=role,
                index=int(rng.integers(counts[role])),
                signal=SIGNALS[rng.integers(len(SIGNALS))],
                # The start of the engines comes back only where a kill makes it.
                phase=PHASES[rng.integers(0 if step == steps[0] else 1, len(PHASES))],
                step=int(step),
                delay_s=float(rng.uniform(0, 0.1)),
            )
        )
    return plan


def command(tiny: Path, folder: Path, name: str, *more: str) -> list[str]:
    """``rock-opd train`` of the recipe that is disturbed."""
    return [
        *(sys.executable, "-m", "rock_opd", "train", str(ROOT / "recipes" / "debug_cpu.yaml")),
        f"run.name={name}",
        f"run.dir={folder}",
        f"data.prompts={tiny / 'prompts.jsonl'}",
        f"student.model={tiny / 'student'}",
        f"teacher.model={tiny / 'teacher'}",
        *("eval.problems=null", "eval.every=0", "log.occurrences=true", "checkpoint.every=2"),
        f"rollout.prompts_per_step={PROMPTS_PER_STEP}",
        f"rollout.samples_per_prompt={SAMPLES}",
        *("policy.score=rock_ctx", "probe.num_rollouts=8", "probe.tau_pre=q0.2"),
        *("probe.tau_post=q0.2", "probe.gamma=0.3", "probe.eta=0.02"),
        *("student.num_ranks=2", "placement.student_cpus=0.5", "run.stall_timeout_s=8"),
        *("run.max_replacements=5", "run.max_restarts=5"),
        *more,
    ]


def counts_of(args: Sequence[str]) -> dict[str, int]:
    """Actors of each role of such a command."""
    asked = dict(a.split("=", 1) for a in args if "=" in a and not a.startswith("-"))
    return {
        "rollout worker": int(asked.get("rollout.num_workers", 1)),
        "teacher": int(asked.get("teacher.num_replicas", 1)),
        "student rank": int(asked.get("student.num_ranks", 1)),
        "coordinator": 1,
    }


# --- one run --------------------------------------------------------------------------------------


class Nodes(Protocol):
    """Machines of a cluster that a run may lose."""

    env: dict[str, str]
    """The environment that leads a command to the cluster."""

    def lose(self, index: int, signal: str) -> None:
        """Kills or freezes one and all that runs on it; another joins."""


def play(
    args: list[str],
    run_dir: Path,
    plan: Sequence[Kill],
    *,
    limit_s: float,
    nodes: Nodes | None = None,
) -> Outcome:
    """Runs ``args`` and disturbs it as planned.

    Args:
        run_dir: of that run; its output is kept beside it (``.log``).
        limit_s: longest time without a finished step, kills included.
        nodes: the cluster to run in, for plans that hit nodes; None: a Ray of the run's own.
    """
    began = time.monotonic()
    outcome = Outcome(run=run_dir.name, revision=library_versions().get("git", ""))
    pending = list(plan)
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    log = run_dir.with_name(run_dir.name + ".log")
    with log.open("w") as file:
        process = subprocess.Popen(
            args,
            cwd=ROOT,
            # One line stays one line.
            env={**(os.environ if nodes is None else nodes.env), "COLUMNS": "1000"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    sent_at, target, progress_at = 0.0, 0, time.monotonic()
    steps = 0
    try:
        while process.poll() is None:
            time.sleep(POLL_S)
            now = time.monotonic()
            if (num := steps_done(run_dir)) != steps:
                steps, progress_at = num, now
            if now - progress_at > limit_s:
                outcome.hang = f"no step in {limit_s:g} s after {_describe(outcome.hits)}"
                break
            last = outcome.hits[-1] if outcome.hits else None
            if last is not None and last.recovery_s is None:
                if steps >= target:
                    last.recovery_s = now - sent_at
                continue
            if pending and (struck := _strike(run_dir, pending[0], process.pid, nodes)) is not None:
                hit, sent_at = struck
                outcome.hits.append(hit)
                pending.pop(0)
                progress_at = now
                target = max(hit.step, steps_done(run_dir) + 1)
    finally:
        if process.poll() is None:  # it hangs
            kill_all(descendants(process.pid))
            process.wait(timeout=60)
    outcome.unplayed = len(pending)
    outcome.seconds = time.monotonic() - began
    if outcome.hits and outcome.hits[-1].recovery_s is None and process.returncode == 0:
        outcome.hits[-1].recovery_s = time.monotonic() - sent_at
    if outcome.hang is None and process.returncode != 0:
        tail = " | ".join(log.read_text().strip().splitlines()[-3:])
        outcome.wrong.append(f"ended with status {process.returncode}: {tail}")
    text = log.read_text()
    outcome.replacements = text.count("; replaced in")
    outcome.restarts = text.count("starting again from the")
    return outcome


def steps_done(run_dir: Path) -> int:
    """The last step in the metrics; 0 before the first."""
    try:
        text = (run_dir / "metrics.jsonl").read_bytes()
        lines = [line for line in text.split(b"\n")[:-1] if line]
        return json.loads(lines[-1])["step"] if lines else 0
    except (OSError, ValueError):
        return 0


def where_is(run_dir: Path) -> dict[str, Any] | None:
    try:
        return json.loads((run_dir / "phase.json").read_text())
    except (OSError, ValueError):
        return None


def _strike(
    run_dir: Path, kill: Kill, driver: int, nodes: Nodes | None
) -> tuple[Hit, float] | None:
    """Sends the signal if this is the moment, and says when (s, monotonic)."""
    where = where_is(run_dir)
    if where is None or where["phase"] != kill.phase:
        return None
    if kill.phase != "starting" and where["step"] < kill.step:
        return None
    if kill.role == NODE:
        assert nodes is not None, "the plan hits nodes"
        time.sleep(kill.delay_s)
        after, sent_at = where_is(run_dir) or where, time.monotonic()
        nodes.lose(kill.index, kill.signal)
        return Hit(kill, max(1, after["step"]), after["phase"]), sent_at
    pids = [
        p["pid"] for p in where["processes"] if p["role"] == kill.role and p["index"] == kill.index
    ]
    if not pids:
        return None
    time.sleep(kill.delay_s)
    if pids[0] not in {process.pid for process in descendants(driver)}:
        return None  # of an attempt that is over
    with suppress(ProcessLookupError):
        os.kill(pids[0], getattr(signal, kill.signal))
        after = where_is(run_dir) or where
        return Hit(kill, max(1, after["step"]), after["phase"]), time.monotonic()
    return None


def _describe(hits: Sequence[Hit]) -> str:
    if not hits:
        return "the start"
    kill = hits[-1].kill
    return (
        f"{kill.signal} to {kill.role} {kill.index} in '{hits[-1].phase}' of step {hits[-1].step}"
    )


# --- against the undisturbed run ------------------------------------------------------------------


def compare(outcome: Outcome, reference: Path, run_dir: Path, *, epochs: int) -> None:
    """Adds to ``outcome`` what is wrong, lost and repeated.

    Args:
        epochs: how often each prompt is to be trained.
    """
    if outcome.hang is not None or outcome.wrong:
        return
    outcome.wrong += different_metrics(reference, run_dir) + different_weights(reference, run_dir)
    ours, theirs = ledger(run_dir), ledger(reference)
    if ours != theirs:
        steps = sorted(s for s in ours.keys() | theirs.keys() if ours.get(s) != theirs.get(s))
        outcome.wrong.append(f"other rollouts in steps {steps}")
    trained = Counter(sample for step in ours.values() for sample, _ in step)
    wanted = {sample for step in theirs.values() for sample, _ in step}
    outcome.lost = sum(max(0, epochs - trained[sample]) for sample in wanted)
    outcome.repeated = sum(max(0, num - epochs) for num in trained.values())


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def different_metrics(one: Path, other: Path) -> list[str]:
    """Every metric but the clock's, exactly."""
    a, b = metrics(one), metrics(other)
    if [row["step"] for row in a] != [row["step"] for row in b]:
        return [f"metrics hold steps {[row['step'] for row in b]}"]
    found = []
    for x, y in zip(a, b, strict=True):
        for name in sorted(x.keys() | y.keys()):
            if not name.startswith(("time/", "perf/")) and x.get(name) != y.get(name):
                found.append(f"step {x['step']}: {name} {x.get(name)} and {y.get(name)}")
    return found[:5]


def different_weights(one: Path, other: Path) -> list[str]:
    """The trained models, bit for bit."""
    from safetensors.numpy import load_file

    a, b = (load_file(run / "model" / "model.safetensors") for run in (one, other))
    if a.keys() != b.keys():
        return ["models with other tensors"]
    return [f"weights of {n}" for n in sorted(a) if a[n].tobytes() != b[n].tobytes()][:5]


def ledger(run_dir: Path) -> dict[int, list[tuple[tuple[str, int], int]]]:
    """By step: which samples were trained, each with a hash of its tokens, in order."""
    from rock_opd.occurrences import read

    found: dict[int, list[tuple[tuple[str, int], int]]] = {}
    for path in sorted((run_dir / "occurrences").glob("step_*.parquet")):
        for part in read(path):
            rows = found.setdefault(int(path.stem.removeprefix("step_")), [])
            rows += [
                ((r.prompt_id, r.sample_idx), hash(r.token_ids.tobytes())) for r in part.rollouts
            ]
    return found


# --- many runs ------------------------------------------------------------------------------------


def write_outcome(path: Path, outcome: Outcome) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(outcome), indent=1))
    os.replace(partial, path)


def read_outcomes(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("outcome_*.json"))]


def summarize(outcomes: Iterable[dict[str, Any]], *, seed: int) -> dict[str, Any]:
    """What ``chaos.json`` holds."""
    outcomes = list(outcomes)
    hits = [hit for outcome in outcomes for hit in outcome["hits"]]

    def recovery(role: str, number: str) -> dict[str, Any]:
        chosen = [h for h in hits if h["kill"]["role"] == role and h["kill"]["signal"] == number]
        seconds = sorted(h["recovery_s"] for h in chosen if h["recovery_s"] is not None)
        return {
            "kills": len(chosen),
            "recovered": len(seconds),
            "median_s": statistics.median(seconds) if seconds else None,
            "max_s": seconds[-1] if seconds else None,
        }

    return {
        "seed": seed,
        "revisions": sorted({o["revision"] for o in outcomes}),
        "runs": len(outcomes),
        "kills": len(hits),
        "hangs": sum(o["hang"] is not None for o in outcomes),
        "wrong": sum(bool(o["wrong"]) for o in outcomes),
        "lost": sum(o["lost"] for o in outcomes),
        "repeated": sum(o["repeated"] for o in outcomes),
        "replacements": sum(o["replacements"] for o in outcomes),
        "restarts": sum(o["restarts"] for o in outcomes),
        "recovery_s": {role: {n: recovery(role, n) for n in SIGNALS} for role in (*ROLES, NODE)},
        "by_phase": {
            p: dict(Counter(h["kill"]["role"] for h in hits if h["phase"] == p))
            for p in dict.fromkeys(h["phase"] for h in hits)
        },
        "trouble": [
            {"run": o["run"], "hang": o["hang"], "wrong": o["wrong"]}
            for o in outcomes
            if o["hang"] is not None or o["wrong"] or o["lost"] or o["repeated"]
        ],
    }


def render(chaos: dict[str, Any]) -> str:
    """``chaos.json`` as the tables of ``docs/reliability.md``."""
    lines = [
        "| runs | kills | hangs | wrong | lost prompts | repeated prompts | replaced | restarts |",
        "|---|---|---|---|---|---|---|---|",
        "| "
        + " | ".join(
            str(chaos[k])
            for k in (
                "runs",
                "kills",
                "hangs",
                "wrong",
                "lost",
                "repeated",
                "replacements",
                "restarts",
            )
        )
        + " |",
        "",
        "| who | signal | kills | recovered | median s | longest s |",
        "|---|---|---|---|---|---|",
    ]
    for role, signals in chaos["recovery_s"].items():
        for number, facts in signals.items():
            seconds = [
                "-" if facts[k] is None else f"{facts[k]:.0f}" for k in ("median_s", "max_s")
            ]
            lines.append(
                f"| {role} | {number} | {facts['kills']} | {facts['recovered']} | "
                + " | ".join(seconds)
                + " |"
            )
    roles = list(chaos["recovery_s"])
    lines += ["", f"| hit in phase | {' | '.join(roles)} |", "|---" * (len(roles) + 1) + "|"]
    for phase, counts in chaos["by_phase"].items():
        lines.append(f"| {phase} | " + " | ".join(str(counts.get(r, 0)) for r in roles) + " |")
    return "\n".join(lines) + "\n"
