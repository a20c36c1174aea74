"""What rock selection finds when the truth is planted, and what freezing does to the rest.

Real runs of ``coordinator.Coordinator`` (its registry, policies, batching, objective, probe set) on
pairs of ``planted``, with the roles of ``local_roles`` in place of engines. Two experiments, each
seed with a pair, data and runs of its own:

- *recovery*: ``rock_freeze`` chooses as many types as are planted; which does it choose, at its
  first selection and at its last?
- *intervention*: from one start and with one data order, nothing is frozen, or the planted types,
  or the rare-hard ones, or random ordinary ones that occur as often as the planted; what happens to
  the held-out divergence at positions that no arm froze?

Every run's numbers are kept in ``results/``: an interrupted study goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rock_opd.demo import quiet_transformers
from rock_opd.planted import Pair, Setting, divergence_floor, make_pair
from rock_opd.planted_summary import (
    ARMS,
    SHOWN,
    Row,
    draw,
    lines,
    summarize_intervention,
    summarize_recovery,
)
from rock_opd.runlog import to_json, write_atomic
from rock_opd.tables import Columns, Report, Say, Track, write_table


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One variant of the recovery experiment."""

    about: str
    setting: Setting = field(default_factory=Setting)
    overrides: tuple[str, ...] = ()


CONDITIONS = {
    "easy": Condition(about="planted types frequent and far from learnable"),
    "rare": Condition(
        about="planted types as seldom as the rare-hard ones", setting=Setting(secret_share=0.02)
    ),
    "rare, late": Condition(
        about="the same, chosen after 100 steps by statistics that forget",
        setting=Setting(secret_share=0.02),
        overrides=("run.num_steps=140", "policy.warmup_steps=100", "policy.decay=0.95"),
    ),
    "low floor": Condition(
        about="a teacher half unsure of the secret's type", setting=Setting(noise=0.5)
    ),
    "hard frequent": Condition(
        about="the learnable hard types as frequent as the planted",
        setting=Setting(hard_share=0.15),
    ),
    "early": Condition(
        about="chosen after 2 steps of a hardly trained student, once and for all",
        setting=Setting(student_steps=15),
        overrides=("policy.warmup_steps=2", "policy.refresh_every=1000", "policy.min_count=5"),
    ),
    "weak student": Condition(
        about="low floor, and a student of width 16 to which ordinary types stay costly",
        setting=Setting(student_width=16, noise=0.5),
    ),
}
SCORES = ("rock", "rock_ctx")
PROBE = ("probe.window=2", "probe.num_rollouts=256")
"""A window fit for a language whose memory is two tokens; the probe set is full after 8 steps."""
NORMALIZERS = ("kept", "all")


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is run."""

    seeds: int
    """Pairs per condition: seeds 0, 1, ..."""
    conditions: Mapping[str, Condition] = field(default_factory=lambda: CONDITIONS)
    """Of the recovery; the intervention takes the first one's pairs."""
    scores: tuple[str, ...] = SCORES
    recovery_steps: int = 100
    """Where the condition does not say otherwise."""
    intervention_steps: int = 160
    normalizers: tuple[str, ...] = NORMALIZERS

    @classmethod
    def quick(cls, seeds: int) -> Size:
        """A look at what the study does."""
        return cls(
            seeds=seeds,
            conditions={name: CONDITIONS[name] for name in ("easy", "low floor")},
            scores=("rock",),
            recovery_steps=80,
            intervention_steps=60,
            normalizers=("kept",),
        )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run left behind."""

    first_ids: np.ndarray
    """int32: types of the first freeze mask; empty when nothing was ever frozen."""
    last_ids: np.ndarray
    """int32: types frozen at the end."""
    count: np.ndarray
    """float64 [V]: occurrences in the run, by type."""
    frozen_share: float
    """Mean share of the steps' positions whose type was frozen."""
    heldout_ids: np.ndarray
    """int32 [N]: tokens of the held-out responses, which the starting student sampled."""
    kl_before: np.ndarray
    """float32 [N], nats."""
    kl_after: np.ndarray
    """float32 [N], nats: the same positions, by the trained student."""
    own_ids: np.ndarray
    """int32 [M]: tokens of what the trained student answers to the held-out prompts."""
    own_kl: np.ndarray
    """float32 [M], nats."""


def run_pair(pair: Pair, name: str, *overrides: str) -> Outcome:
    """One run of the pair's recipe, all roles in this process."""
    import torch
    from transformers import AutoModelForCausalLM

    from rock_opd.coordinator import Coordinator
    from rock_opd.inputs import load_inputs
    from rock_opd.local_roles import LocalRoles
    from rock_opd.measure import measure
    from rock_opd.models import stop_token_ids
    from rock_opd.progress import Progress
    from rock_opd.recipe_file import build_recipe
    from rock_opd.sampling import sample_answers, sample_requests

    recipe = build_recipe(pair.recipe_tree(name), list(overrides))
    shutil.rmtree(recipe.run_dir, ignore_errors=True)
    inputs = load_inputs(recipe)
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(part.model, dtype=torch.float32, use_safetensors=True)
        for part in (recipe.student, recipe.teacher)
    )
    roles = LocalRoles(
        recipe,
        student,
        teacher,
        num_real_ids=inputs.num_real_ids,
        stop_token_ids=stop_token_ids(recipe.student.model),
        num_updates=recipe.run.num_steps,
    )
    run = Coordinator(
        recipe,
        inputs,
        roles,
        num_steps=recipe.run.num_steps,
        grader=lambda answers, golds: [],
        progress=Progress(),
        stop=threading.Event(),
    )
    summary = run.run()
    shutil.rmtree(recipe.run_dir / "checkpoints", ignore_errors=True)
    events = (recipe.run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()
    frozen = [e for e in map(json.loads, events) if e["event"] == "freeze"]
    heldout = run.state.heldout
    after = measure(roles, recipe, heldout)
    own = measure(
        roles,
        recipe,
        sample_answers(
            roles,
            sample_requests(inputs.heldout, 1, seed=recipe.run.seed, step=0),
            recipe.rollout,
        ),
    )
    return Outcome(
        first_ids=np.array([t["id"] for t in frozen[0]["types"]] if frozen else [], np.int32),
        last_ids=run.policy.mask.frozen_ids,
        count=run.registry.stats.count,
        frozen_share=float(np.mean(summary["frozen_share"])),
        heldout_ids=after.signals.token_ids,
        kl_before=run.state.heldout_before.kl,
        kl_after=after.kl,
        own_ids=own.signals.token_ids,
        own_kl=own.kl,
    )


# --- the two experiments --------------------------------------------------------------------------


def recovery_row(pair: Pair, outcome: Outcome) -> Row:
    """Who was chosen, against the truth."""
    from rock_opd.core.policies import control_rng
    from rock_opd.core.selection import match_random

    language = pair.language
    planted, hard = language.planted_ids.ravel(), language.hard_ids
    row: Row = {}
    for when, ids in (("first", outcome.first_ids), ("last", outcome.last_ids)):
        hits = int(np.isin(ids, planted).sum())
        row |= {
            f"precision_{when}": hits / len(ids) if len(ids) else float("nan"),
            f"recall_{when}": hits / len(planted),
            f"hard_{when}": int(np.isin(ids, hard).sum()),
            f"ordinary_{when}": len(ids) - hits - int(np.isin(ids, hard).sum()),
        }
    _, residual = match_random(
        outcome.count,
        outcome.last_ids,
        rng=control_rng(pair.seed),
        never=np.setdiff1d(np.arange(language.num_types), language.ordinary_ids),
    )
    share = outcome.count / outcome.count.sum()
    setting = language.setting
    return {
        **row,
        "control_residual": residual,
        "planted_share": float(share[planted].sum()),
        "hard_share": float(share[hard].sum()),
        "floor": divergence_floor(setting.group_size, setting.noise),
        **_kl_by_group(outcome, language.planted_ids.ravel(), "planted"),
        **_kl_by_group(outcome, hard, "hard"),
        **_kl_by_group(outcome, language.ordinary_ids, "ordinary"),
    }


def _kl_by_group(outcome: Outcome, ids: np.ndarray, name: str) -> Row:
    """KL of some types, nats a position: on the held-out responses before and after, and on the
    trained student's own; NaN where none occurs."""

    def mean(token_ids: np.ndarray, kl: np.ndarray) -> float:
        here = np.isin(token_ids, ids)
        return float(kl[here].mean(dtype=np.float64)) if here.any() else float("nan")

    return {
        f"{name}_before": mean(outcome.heldout_ids, outcome.kl_before),
        f"{name}_after": mean(outcome.heldout_ids, outcome.kl_after),
        f"{name}_own": mean(outcome.own_ids, outcome.own_kl),
    }


def matched_control(pair: Pair, count: np.ndarray) -> tuple[np.ndarray, float]:
    """Random ordinary types that occur, together, as often as the planted ones.

    Args:
        count: float [V]: occurrences in the run that froze nothing.

    Returns:
        int32 ids; the part of the planted types' occurrences left unmatched.
    """
    from rock_opd.core.policies import control_rng
    from rock_opd.core.selection import match_random

    language = pair.language
    return match_random(
        count,
        language.planted_ids.ravel(),
        rng=control_rng(pair.seed),
        never=np.setdiff1d(np.arange(language.num_types), language.ordinary_ids),
    )


def intervention_rows(
    pair: Pair, *, steps: int, normalizers: Sequence[str], done: Callable[[], None]
) -> list[Row]:
    """All arms from one start with one data order; one row per arm and normaliser.

    ``other`` are held-out positions whose ordinary type no arm froze, ``random`` those of the
    control's types; means are nats a position. ``done`` is called after every run.
    """
    language = pair.language
    fixed = (f"run.num_steps={steps}",)
    nothing = run_pair(pair, "all", *fixed, "policy.name=all")
    done()
    control, residual = matched_control(pair, nothing.count)
    groups = {
        "planted": language.planted_ids.ravel(),
        "rare_hard": language.hard_ids,
        "random": control,
        "other": np.setdiff1d(language.ordinary_ids, control),
    }

    def row(arm: str, normalizer: str, outcome: Outcome) -> Row:
        return {
            "arm": arm,
            "normalizer": normalizer,
            "frozen_share": outcome.frozen_share,
            "control_residual": residual,
            "num_control": len(control),
            **{k: v for n, ids in groups.items() for k, v in _kl_by_group(outcome, ids, n).items()},
        }

    rows = [row("nothing", normalizer, nothing) for normalizer in normalizers]
    for arm in ARMS:
        path = pair.folder / f"{arm}.json"
        path.write_text(json.dumps(groups[arm].tolist()) + "\n", encoding="utf-8")
        for normalizer in normalizers:
            outcome = run_pair(
                pair,
                f"{arm}-{normalizer}",
                *fixed,
                "policy.name=list",
                f"policy.ids_file={path}",
                f"loss.normalizer={normalizer}",
            )
            rows.append(row(arm, normalizer, outcome))
            done()
    return rows


# --- the study ------------------------------------------------------------------------------------


def run_study(output: Path, *, size: Size, say: Say, track: Track) -> Report:
    """Both experiments, their tables and a figure, in ``output``."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in one order: the same seed, the same numbers
    try:
        with quiet_transformers():
            recovery, intervention = _Study(output, size, say, track).run()
    finally:
        torch.set_num_threads(threads)
    found, effects = summarize_recovery(recovery), summarize_intervention(intervention)
    files = [
        write_table(output / "recovery.csv", _columns(recovery)),
        write_table(output / "recovery_summary.csv", _columns(found)),
        write_table(output / "intervention.csv", _columns(intervention)),
        write_table(output / "intervention_summary.csv", _columns(effects)),
        draw(output / "planted.png", recovery, effects),
    ]
    return Report(
        title=f"Recovery of planted rocks, {size.seeds} seeds",
        facts={"seeds": size.seeds, "recovery": found, "intervention": effects},
        lines=lines(found, effects),
        table={title: [row[name] for row in found] for name, title in SHOWN.items()},
        files=files,
    )


class _Study:
    """All runs of a study, each done once: what is in ``results/`` is not run again."""

    def __init__(self, output: Path, size: Size, say: Say, track: Track) -> None:
        self._output, self._size, self._say, self._track = output, size, say, track
        self._arms = 1 + len(ARMS) * len(size.normalizers)
        self._total = size.seeds * (len(size.conditions) * len(size.scores) + self._arms)
        self._finished = 0

    def run(self) -> tuple[list[Row], list[Row]]:
        """Rows of the recovery and of the intervention, seed by seed."""
        size, recovery, intervention = self._size, [], []
        for seed in range(size.seeds):
            for name, score in itertools.product(size.conditions, size.scores):
                recovery.append(self._recover(name, score, seed))
            intervention += self._intervene(seed)
        return recovery, intervention

    def _recover(self, name: str, score: str, seed: int) -> Row:
        condition = self._size.conditions[name]
        overrides = (  # the condition's own come last and win
            f"run.num_steps={self._size.recovery_steps}",
            f"policy.score={score}",
            *PROBE,
            *condition.overrides,
        )

        def make() -> list[Row]:
            pair = self._pair(condition.setting, seed)
            return [recovery_row(pair, run_pair(pair, f"recover-{score}", *overrides))]

        [found] = self._once(f"recovery-{name}-{score}-{seed}", (condition, overrides), make)
        row = {"condition": name, "about": condition.about, "score": score, "seed": seed, **found}
        self._say(
            f"seed {seed}, {name}, {score}: precision {row['precision_first']:.2f} at first and "
            f"{row['precision_last']:.2f} at last, recall {row['recall_first']:.2f} and "
            f"{row['recall_last']:.2f}; {row['hard_last']} rare-hard types frozen at the end"
        )
        self._done()
        return row

    def _intervene(self, seed: int) -> list[Row]:
        name, condition = next(iter(self._size.conditions.items()))
        steps, normalizers = self._size.intervention_steps, self._size.normalizers
        before = self._finished

        def make() -> list[Row]:
            pair = self._pair(condition.setting, seed)
            return intervention_rows(pair, steps=steps, normalizers=normalizers, done=self._done)

        rows = self._once(f"intervention-{name}-{seed}", (condition, steps, normalizers), make)
        self._finished = before + self._arms - 1
        self._done()
        self._say(f"seed {seed}: intervention measured, {len(rows)} arms")
        return [{"seed": seed, **row} for row in rows]

    def _pair(self, setting: Setting, seed: int) -> Pair:
        """Conditions of one setting share their pairs."""
        name = next(n for n, c in self._size.conditions.items() if c.setting == setting)
        folder = self._output / "pairs" / f"{_file_name(name)}-{seed}"
        return Pair.load(folder, setting, seed=seed) or make_pair(folder, setting, seed=seed)

    def _once(self, name: str, what: tuple[Any, ...], make: Callable[[], list[Row]]) -> list[Row]:
        """The rows of one piece of work: from its file, or made and kept there."""
        digest = hashlib.sha256(repr(what).encode()).hexdigest()[:10]
        path = self._output / "results" / f"{_file_name(name)}-{digest}.json"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps(to_json(make()), indent=1) + "\n")
        rows = json.loads(path.read_text(encoding="utf-8"))
        return [{k: float("nan") if v is None else v for k, v in row.items()} for row in rows]

    def _done(self) -> None:
        self._finished += 1
        self._track(self._finished, self._total)


def _file_name(name: str) -> str:
    return name.replace(",", "").replace(" ", "_")


def _columns(rows: Sequence[Row]) -> Columns:
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else {})}
