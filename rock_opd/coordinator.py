"""One run, read top to bottom: prompts -> rollouts -> teacher -> token weights -> student ->
weights back.

A frozen token loses its gradient in step 4: the policy gives it weight 0, ``build_batches`` leaves
its row out, and the student never projects it. The mask of a step is built from earlier steps
only. The loop knows records and groups of roles, no Ray.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import numpy as np

from rock_opd.checkpoint import Loaded, RunState, pack_state, set_aside, unpack_state
from rock_opd.config import Recipe
from rock_opd.core.alarms import Alarms
from rock_opd.core.batching import build_batches, flatten, scatter, total_weight
from rock_opd.core.context import ContextStats
from rock_opd.core.metrics import (
    Metrics,
    freeze_metrics,
    gap_metrics,
    rollout_metrics,
    train_metrics,
)
from rock_opd.core.policies import audit_rng
from rock_opd.core.registry import Registry
from rock_opd.core.token_stats import TokenStats
from rock_opd.data import given_rollouts
from rock_opd.durable import digest
from rock_opd.errors import NumericsError, StorageError
from rock_opd.evaluate import (
    Grader,
    answer_problems,
    heldout_frozen,
    heldout_kl,
    heldout_summary,
    response_text,
)
from rock_opd.faultlog import FaultLog, Restart
from rock_opd.inputs import Inputs, build_policy
from rock_opd.keeper import Keeper
from rock_opd.masklog import MaskLog
from rock_opd.measure import Measured, deal_rollouts, measure, naming_the_teacher
from rock_opd.probe import context_facts, reservoir_rng
from rock_opd.progress import Progress, StepLine
from rock_opd.resume import fingerprints, goes_on_from
from rock_opd.runlog import OccurrenceLog
from rock_opd.sampling import sample_answers, sample_requests
from rock_opd.types import (
    Prompt,
    Rollout,
    StepResult,
    StepSignals,
    TeacherScores,
    TokenWeights,
    TrainBatch,
)

ROLES_OF_PHASE = {
    "probe": ("teacher",),
    "rollout": ("rollout",),
    "teacher": ("teacher",),
    "train": ("student",),
    "sync": ("student", "rollout"),
}
"""Which roles hold the shared GPUs in a phase (``placement.colocate``)."""


class Coordinator:
    """Holds a run's state and drives the roles through it."""

    def __init__(
        self,
        recipe: Recipe,
        inputs: Inputs,
        roles: Any,
        *,
        num_steps: int,
        grader: Grader,
        progress: Progress,
        stop: threading.Event,
        begun: Loaded | None = None,
        restarts: Sequence[Restart] = (),
    ) -> None:
        """
        Args:
            begun: where it goes on from; without it, ``recipe.resume`` looks for it here.
            restarts: what the run has been through.
        """
        self.recipe, self.inputs, self.roles = recipe, inputs, roles
        self.num_steps, self.grader, self.progress, self.stop = num_steps, grader, progress, stop
        self._begun = begun
        self._fingerprints = fingerprints(recipe, inputs, num_steps=num_steps)
        self.registry = Registry(inputs.num_real_ids, decay=recipe.policy.decay)
        self.policy = build_policy(
            recipe.policy,
            frozen_list=inputs.frozen_list,
            guard_ids=inputs.guard_ids,
            seed=recipe.run.seed,
        )
        if recipe.log.occurrences:
            self._occurrences = OccurrenceLog(recipe, inputs.tokenizer, inputs.num_real_ids)
        self._faults = FaultLog(restarts, progress)
        roles.replaced = self._faults.replaced
        self.state = RunState()
        self._alarms = Alarms(recipe.alarm)
        self._keeper = Keeper(recipe, roles, progress, self._pack)
        self._context: ContextStats | None = None
        self._clock: dict[str, float] = {}
        self._accuracy: tuple[int, float] | None = None

    # ---------------------------------------------------------------- the loop

    def run(self) -> dict[str, Any]:
        """Trains to the last step, or to the end of the step in which a stop was asked for.

        Returns:
            The summary, as written to ``summary.json``.
        """
        resumed = self._resume() if self.recipe.resume else None
        self.log, self._journal = self._keeper.open(
            resume_step=None if resumed is None else self.state.step,
            fingerprint=digest(json.dumps(self._fingerprints, sort_keys=True).encode()),
        )
        self._masks = MaskLog(
            self.recipe, self.inputs, self.registry, self.policy, self.log, self.progress
        )
        if resumed is not None:
            self.log.event(
                "resume", self.state.step, num_updates=self.state.num_updates, refused=resumed
            )
        self.progress.first_step = self.progress.step = self.state.step
        self._faults.open(self.log, step=self.state.step, resumed=resumed is not None)
        if self.state.step == 0 and not self.state.heldout and not self.stop.is_set():
            self._measure_heldout_before()
        try:
            self._train()
        except (NumericsError, StorageError):
            self._keeper.rescue()
            raise
        return self._finish()

    def _train(self) -> None:
        started, first = time.monotonic(), self.state.step
        last = min(self.num_steps, self.recipe.run.stop_after or self.num_steps)
        while self.state.step < last and not self.stop.is_set():
            values = self._step(self.state.step + 1)
            pace = (time.monotonic() - started) / (self.state.step - first)
            self.progress.lines.append(
                StepLine(
                    step=self.state.step,
                    num_steps=self.num_steps,
                    kl=math.nan if values["train/kl_mean"] is None else values["train/kl_mean"],
                    tokens_per_s=values["perf/tokens_per_s"],
                    frozen_share=values["freeze/type_share"],
                    seconds_left=pace * (self.num_steps - self.state.step),
                )
            )
            if self._due(self.recipe.eval.every):
                self._evaluate()
            self._keeper.save(
                self.state.step,
                checkpoint=self._due(self.recipe.checkpoint.every),
                hf=self._due(self.recipe.checkpoint.save_hf_every),
            )

    def _step(self, step: int) -> Metrics:
        """One step; returns its metrics."""
        recipe, state = self.recipe, self.state
        self.progress.step = step
        self._clock = {}
        step_started = time.monotonic()

        # 0. where types are chosen by their contexts, the probe set is measured before the choice
        if recipe.uses_probe and self.policy.is_due(step):
            self._measure_probe(step)

        # 1. prompts, in an order that is a function of seed and step
        prompts = self.inputs.prompts.batch(step - 1, recipe.rollout.prompts_per_step)

        # 2. the student samples (or the data set's responses are taken)
        with self._phase("rollout"):
            if recipe.data.source == "student":
                rollouts = self._sample(prompts, step)
            else:
                rollouts = given_rollouts(prompts)

        # 3. the teacher scores every sampled token, and keeps its hidden rows
        with self._phase("teacher"):
            lots = deal_rollouts(recipe, rollouts)
            scores = self.roles.teachers.score(lots, rollouts)
        signals = flatten(rollouts, scores)

        # 4. the policy says what each token weighs; its mask knows earlier steps only
        old, due = self.policy.mask, self.policy.is_due(step)
        mask = self.policy.refresh(step, self.registry)
        if mask is not None:
            self._masks.tell(old, mask, step)
        if due:
            state.nothing_frozen = self._masks.tell_empty(
                step, context=self._context, last=state.nothing_frozen
            )
        weights = self.policy.weights(
            signals, self.policy.mask, rng=audit_rng(recipe.run.seed, step)
        )
        batches = build_batches(lots, rollouts, weights)
        denominator = total_weight(weights, normalizer=recipe.loss.normalizer)

        # 5. the student learns from the rows that weigh something
        with self._phase("train"):
            results, updated = self._learn(batches, weights, denominator, signals, step)
        reprefilled = self.roles.teachers.clear()

        # 6. what was measured goes into the registry
        kl = scatter(results, signals.num_tokens, "kl")
        logprobs = scatter(results, signals.num_tokens, "logprobs")
        measured = Measured(signals=signals, kl=kl, logprobs=logprobs, entropy=None)
        if results:
            self.registry.update(
                TokenStats.from_rows(
                    signals.token_ids,
                    kl,
                    weights.measure,
                    signals.student_logprobs - signals.teacher_logprobs,
                    num_types=self.inputs.num_real_ids,
                )
            )
            if recipe.uses_probe and step <= recipe.policy.warmup_steps:
                state.probe.collect(rollouts, measured, recipe.probe)
        gap = gap_metrics(logprobs, signals)
        self._check_gap(gap, step)

        # 7. the new weights go back to every rollout worker
        with self._phase("sync"):
            if updated and self._push_weights():
                self.log.event("sync", step, version=state.num_updates)

        self._clock["step"] = time.monotonic() - step_started
        rx_bytes = sum(_num_bytes(x) for x in [*rollouts, *scores, *results])
        state.step = step
        state.num_tokens += signals.num_tokens
        values = {
            **train_metrics(results, weights, kl, denominator, recipe.optim.max_grad_norm),
            "train/num_updates": state.num_updates,
            "train/bad_steps": state.num_bad_steps,
            **freeze_metrics(signals, weights, self.policy.mask),
            **weights.metrics,
            **rollout_metrics(rollouts),
            **gap,
            "coordinator/rx_bytes": rx_bytes,
            "coordinator/rx_bytes_per_token": rx_bytes / max(1, signals.num_tokens),
            "teacher/reprefilled_tokens": reprefilled,
            "perf/tokens_per_s": signals.num_tokens / self._clock["step"],
            **{
                f"time/{name}_s": self._clock.get(name)
                for name in ("probe", "rollout", "teacher", "train", "sync", "step")
            },
        }
        for name, seconds in self._clock.items():
            state.seconds[name] = state.seconds.get(name, 0.0) + seconds
        state.frozen_share.append(values["freeze/type_share"])
        self.log.metrics(step, values)
        self._sound_alarms(values, step)
        if recipe.log.occurrences and results:
            with self._keeper.disk():
                self._occurrences.write(step, rollouts, measured, weights)
        if step % recipe.log.registry_every == 0:
            self._snapshot()
        return values

    # ---------------------------------------------------------------- parts of a step

    def _measure_probe(self, step: int) -> None:
        """Brings the registry's CCR up to date: the student as it is now on the probe set."""
        cfg, probe = self.recipe.probe, self.state.probe
        if self.registry.ccr is None and len(probe.rollouts) < cfg.num_rollouts:
            self.progress.say(
                f"step {step}: the probe set holds {len(probe.rollouts)} of probe.num_rollouts="
                f"{cfg.num_rollouts} rollouts, all there were before the first selection; more "
                "policy.warmup_steps would fill it"
            )
        with self._phase("probe"):
            stats = probe.context(
                measure(self.roles, self.recipe, probe.rollouts),
                cfg,
                self.inputs.encoder,
                num_types=self.inputs.num_real_ids,
                rng=reservoir_rng(self.recipe.run.seed, step),
            )
        self.registry.set_context(stats.ccr)
        self._context = stats
        self.log.event(
            "probe",
            step,
            version=self.state.num_updates,
            num_rollouts=len(probe.rollouts),
            num_tokens=len(probe.loss_pre),
            **context_facts(stats),
            seconds=self._clock["probe"],
        )

    def _sample(self, prompts: list[Prompt], step: int) -> list[Rollout]:
        """The step's rollouts, in the journal before anything is learned from them; those that a
        run which broke off had sampled are taken again."""
        cfg = self.recipe.rollout
        requests = sample_requests(
            prompts, cfg.samples_per_prompt, seed=self.recipe.run.seed, step=step
        )
        found = self._journal.read(step, self.state.num_updates, requests)
        if found.refused is not None:
            self.progress.say(found.refused)
        if found.rollouts is not None:
            self.log.event("replay", step, num_rollouts=len(found.rollouts))
            return found.rollouts
        rollouts = sample_answers(self.roles, requests, cfg)
        stale = sorted({r.policy_version for r in rollouts} - {self.state.num_updates})
        if stale:
            raise NumericsError(
                f"step {step}: rollouts sampled with policy v{stale}, the trainer is at "
                f"v{self.state.num_updates}"
            )
        with self._keeper.disk():
            self._journal.write(step, self.state.num_updates, rollouts)
        return rollouts

    def _learn(
        self,
        batches: list[list[TrainBatch]],
        weights: TokenWeights,
        denominator: float,
        signals: StepSignals,
        step: int,
    ) -> tuple[list[StepResult], bool]:
        """One update, or a reason for none; what the ranks report (nothing of a bad step), and
        whether the weights moved."""
        state, patience = self.state, self.recipe.optim.max_bad_steps
        if weights.weight.sum() == 0:
            self.log.event(
                "skip", step, reason="every position is frozen", num_tokens=signals.num_tokens
            )
            return self.roles.students.measure(batches), False
        try:
            with naming_the_teacher(signals):
                results = self.roles.students.train_step(
                    batches, total_weight=denominator, mask_version=self.policy.mask.version
                )
        except NumericsError as error:
            state.num_bad_steps += 1
            state.bad_in_a_row += 1
            if state.bad_in_a_row > patience:
                raise NumericsError(
                    f"step {step}: {error} (bad step {state.bad_in_a_row} in a row, "
                    f"optim.max_bad_steps={patience})"
                ) from None
            self.progress.say(
                f"step {step} is skipped, {state.bad_in_a_row} in a row of at most {patience}: "
                f"{error}"
            )
            self.log.event("bad_step", step, reason=str(error), in_a_row=state.bad_in_a_row)
            return [], False
        state.bad_in_a_row = 0
        state.num_updates += 1
        return results, True

    def _sound_alarms(self, values: Metrics, step: int) -> None:
        for alarm in self._alarms.observe(values):
            self.progress.say(
                f"step {step}: alarm: {alarm.metric} is {alarm.value:.3g}, above "
                f"{alarm.bound:.3g}: {alarm.meaning}"
            )
            self.log.event("alarm", step, metric=alarm.metric, value=alarm.value, bound=alarm.bound)

    def _push_weights(self) -> bool:
        """Brings the rollout workers to the trainer's version; False when the run has none."""
        if self.roles.rollouts is None:
            return False
        self.roles.students.push_weights(
            self.roles.rollouts,
            version=self.state.num_updates,
            bucket_bytes=self.recipe.sync.bucket_bytes,
        )
        return True

    def _check_gap(self, gap: dict[str, float | None], step: int) -> None:
        mean, limit = gap["sync/logprob_gap_mean"], self.recipe.sync.max_logprob_gap
        if mean is not None and mean > limit:
            raise NumericsError(
                f"step {step}: trainer and rollout log-probabilities differ by {mean:.3g} nats on "
                f"average (limit sync.max_logprob_gap={limit:g}): the rollout engine does not hold "
                "the trainer's weights, or the two compute another model"
            )

    def _snapshot(self) -> None:
        columns = self.registry.table(frozen_ids=self.policy.mask.frozen_ids)
        text = [self.inputs.tokenizer.decode([int(i)]) for i in columns["token_id"]]
        self.log.registry(self.state.step, {"text": text, **columns})

    # ---------------------------------------------------------------- held out, evaluation

    def _measure_heldout_before(self) -> None:
        if not self.inputs.heldout:
            return
        self.progress.phase = "held-out KL before"
        self.state.heldout = self._answer_once(self.inputs.heldout)
        self.state.heldout_before = heldout_kl(self.roles, self.recipe, self.state.heldout)

    def _answer_once(self, prompts: Sequence[Prompt]) -> list[Rollout]:
        """One answer a prompt, with the seeds of before training."""
        requests = sample_requests(prompts, 1, seed=self.recipe.run.seed, step=0)
        return sample_answers(self.roles, requests, self.recipe.rollout)

    def _evaluate(self) -> float | None:
        """Accuracy on the recipe's problems; keeps the student when it is the best so far."""
        if not self.inputs.problems:
            return None
        if self._accuracy is not None and self._accuracy[0] == self.state.step:
            return self._accuracy[1]
        cfg, state = self.recipe.eval, self.state
        self.progress.phase = "evaluate"
        started = time.monotonic()
        requests = sample_requests(
            self.inputs.problems, cfg.samples, seed=self.recipe.run.seed, step=-1
        )
        found = answer_problems(self.roles, requests, cfg, self.inputs.tokenizer, self.grader)
        accuracy = found["accuracy"]
        self._accuracy = (state.step, accuracy)
        best = accuracy > state.best_accuracy
        self.log.event(
            "evaluate", state.step, **found, best=best, seconds=time.monotonic() - started
        )
        if best and (not self.recipe.checkpoint.keep_best or self._keeper.save_model("best")):
            state.best_accuracy = accuracy  # of what best/ holds: one that was lost is no mark
        return accuracy

    # ---------------------------------------------------------------- checkpoint, resume, end

    def _due(self, every: int) -> bool:
        return every > 0 and self.state.step % every == 0

    def _pack(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        self.state.alarms = self._alarms.state_dict()
        return pack_state(self.state, self.registry, self.policy, self._fingerprints)

    def _resume(self) -> list[str]:
        """Everything back as it was after the newest whole checkpoint's step, the rollout workers
        included; what is wrong with newer ones."""
        found = self._begun or goes_on_from(self.recipe, self.inputs, num_steps=self.num_steps)
        self._begun = None
        self.state = unpack_state(found.numbers, found.arrays, self.registry, self.policy)
        refused = [f"{path.name}: {why}" for path, why in found.refused]
        for (path, _), text in zip(found.refused, refused, strict=True):
            set_aside(path)
            self.progress.say(f"checkpoint {text}; going on from step {found.step} instead")
        if self.state.alarms:
            self._alarms.load_state_dict(self.state.alarms)
        self.roles.turn("student")
        self.roles.students.load_state(found.path / "student")
        self._keeper.goes_on_from(found.step)
        self.roles.turn("student", "rollout")
        self._push_weights()
        return refused

    def _finish(self) -> dict[str, Any]:
        """Saves what the run leaves behind; an interrupted run leaves a checkpoint and says so.

        Raises:
            StorageError: not all of it could be written, whatever ``checkpoint.on_error`` says.
        """
        state, recipe = self.state, self.recipe
        whole = state.step >= self.num_steps
        self._keeper.save_last(state.step)
        self._snapshot()
        summary: dict[str, Any] = {
            "name": recipe.run.name,
            "finished": whole,
            "num_steps": state.step,
            "num_updates": state.num_updates,
            "num_tokens": state.num_tokens,
            "tokens_per_s": state.num_tokens / max(1e-9, state.seconds.get("step", 0.0)),
            "phase_s": state.seconds,
            "frozen_share": state.frozen_share,
            "mask_version": self.policy.mask.version,
            "nothing_frozen": self._masks.why_nothing(state),
            **self._masks.top_types(20),
            **heldout_summary(None, None, frozen=np.zeros(0, bool), seed=recipe.run.seed),
        }
        if not whole:
            return self._close(summary, "stop", self._keeper.missing(state.step, model=True))
        after = None
        if state.heldout:
            self.progress.phase = "held-out KL after"
            after = heldout_kl(self.roles, recipe, state.heldout)
        frozen = heldout_frozen(state.heldout, self.policy.mask.frozen_ids)
        summary |= heldout_summary(state.heldout_before, after, frozen=frozen, seed=recipe.run.seed)
        summary["samples"] = self._before_and_after()
        summary["accuracy"] = self._evaluate()
        self.progress.phase = "saving"
        missing = self._keeper.missing(state.step, model=self._keeper.save_model("model"))
        summary["finished"] = not missing
        return self._close(summary, "finish", missing)

    def _close(self, summary: dict[str, Any], event: str, missing: list[str]) -> dict[str, Any]:
        self.log.event(event, self.state.step)
        self.log.summary(summary)
        self.log.close()
        self._keeper.finish_mirror()
        self._keeper.require_end(self.state.step, missing)
        return summary

    def _before_and_after(self) -> dict[str, str] | None:
        """One held-out prompt, answered by the starting and by the trained student with the same
        seed."""
        if not self.state.heldout:
            return None
        prompt, tokenizer = self.inputs.heldout[0], self.inputs.tokenizer
        [after] = self._answer_once([prompt])
        return {
            "prompt": tokenizer.decode(prompt.token_ids, skip_special_tokens=True),
            "before": response_text(tokenizer, self.state.heldout[0]),
            "after": response_text(tokenizer, after),
        }

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._keeper.look()
        self.progress.phase = name
        self.roles.turn(*ROLES_OF_PHASE[name])
        started = time.monotonic()
        yield
        self._clock[name] = time.monotonic() - started


def _num_bytes(record: Rollout | TeacherScores | StepResult) -> int:
    """Bytes of a record's arrays: what crossed into this process."""
    values = (getattr(record, f.name) for f in fields(record))
    return sum(v.nbytes for v in values if isinstance(v, np.ndarray))
