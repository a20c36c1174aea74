"""``rock-opd check --live``: the recipe's own engines, started once and held to what training will
take for granted.

The student answers a few prompts; the teacher scores the answers, again in another order and other
batches, and on every replica; the student measures them. What must agree is compared, and the
smallest difference that means something (the noise floor) stands beside the divergence that is to
be learned from. At the very end one update is made on micro-batches as full as the recipe allows,
to see that memory holds; the engines are thrown away after it, and no file is written.

Shape letters: ``N`` sampled tokens of all answers, laid flat.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from rock_opd.config import Recipe, resolve_dtype
from rock_opd.core.batching import Deal, MicroBatch
from rock_opd.core.metrics import gap_metrics
from rock_opd.data import given_rollouts
from rock_opd.durable import in_bytes
from rock_opd.errors import RockOPDError
from rock_opd.findings import CheckReport, Level
from rock_opd.inputs import Inputs, load_inputs
from rock_opd.measure import Measured, measure, score_all
from rock_opd.models import stop_token_ids
from rock_opd.sampling import sample_requests
from rock_opd.score import Engines, ray_engines
from rock_opd.types import Prompt, Rollout, SampleRequest

NUM_ANSWERS = 16
MAX_NEW_TOKENS = 512
"""Length limit of an answer, where the recipe's is higher."""
AGREE = {"float32": 1e-4, "bfloat16": 0.05}
"""Nats: mean |difference| up to which two scorings of the same tokens count as the same. In
bfloat16 the batch decides how sums are rounded, which large models show in the second digit."""
NOISE_SHARE = 0.01
"""Of the divergence to be learned: more noise than that is worth a warning."""
MAX_STANDARD_ERRORS = 6.0
"""How far the sampled log-ratio may lie from the divergence it estimates."""
ENGINES: Engines = partial(ray_engines, num_updates=1)
"""The recipe's own, able to make the one update that shows whether memory holds."""


def check_live(
    report: CheckReport,
    recipe: Recipe,
    *,
    address: str | None,
    say: Callable[[str], None],
    engines: Engines = ENGINES,
) -> None:
    """Adds what running engines tell; raises nothing of our own.

    Args:
        recipe: one that the static check passed.
        engines: starts the roles.
    """
    phase, begun = "reading what a run reads", time.monotonic()
    try:
        inputs = load_inputs(recipe)
        samples = recipe.data.source == "student"
        phase = "starting the engines"
        with engines(
            recipe, samples=samples, num_real_ids=inputs.num_real_ids, address=address, say=say
        ) as roles:
            report.add(
                "ok",
                f"engines started in {time.monotonic() - begun:.0f} s: teacher "
                f"{recipe.teacher.num_replicas}, student {recipe.student.num_ranks}"
                + (f", rollout {recipe.rollout.num_workers}" if samples else ""),
            )
            trial = _Trial(report, recipe, inputs, roles)
            for phase, step in trial.steps.items():
                say(phase)
                step()
    except RockOPDError as error:
        report.add("fail", f"{phase}: {error}")


class _Trial:
    """The steps of one live check, in order; each adds its findings."""

    def __init__(self, report: CheckReport, recipe: Recipe, inputs: Inputs, roles: Any) -> None:
        self._report, self._recipe, self._inputs, self._roles = report, recipe, inputs, roles
        self._device = getattr(roles, "device", "cpu")
        self._answers: list[Rollout] = []
        self._measured: Measured | None = None
        self._longest: Rollout | None = None
        self.steps: dict[str, Callable[[], None]] = {
            "answering a few prompts": self._answer,
            "measuring the answers": self._measure,
            "comparing sampler and student": self._compare_sampler,
            "scoring the answers again": self._score_again,
            "trying the longest sequence": self._try_longest,
            "trying an update on full micro-batches": self._try_update,
        }

    def _answer(self) -> None:
        recipe, cfg = self._recipe, self._recipe.rollout
        prompts = self._inputs.prompts.prompts[:NUM_ANSWERS]
        if recipe.data.source == "dataset":
            self._answers = given_rollouts(prompts)
            self._report.add("ok", f"{len(self._answers)} given answers are taken")
            return
        self._roles.turn("rollout")
        requests = sample_requests(
            prompts, recipe.rollout.samples_per_prompt, seed=recipe.run.seed, step=0
        )[:NUM_ANSWERS]
        rollouts = self._roles.rollouts.generate(
            requests,
            temperature=cfg.temperature,
            top_p=cfg.top_p,
            max_new_tokens=min(cfg.max_new_tokens, MAX_NEW_TOKENS),
        )
        self._answers = [r for r in rollouts if len(r.positions)]
        if not self._answers:
            raise RockOPDError("every answer is empty; does the prompt end with a terminator?")
        stops = set(stop_token_ids(recipe.student.model))
        finished = [r for r in self._answers if r.finish_reason == "stop"]
        misplaced = sum(
            (int(r.token_ids[-1]) in stops) != (r.finish_reason == "stop")
            or bool(stops & set(r.token_ids[r.positions[:-1]].tolist()))
            for r in self._answers
        )
        self._report.add(
            "fail" if misplaced else "ok",
            f"{misplaced} answers end without a terminator, or go on after one: the rollout engine "
            "does not stop where the recipe says; report it with the model's generation_config.json"
            if misplaced
            else f"{len(self._answers)} answers, {sum(len(r.positions) for r in self._answers)} "
            f"tokens; {len(finished)} ended with a terminator, the others at the length limit",
            num_answers=len(self._answers),
            num_finished=len(finished),
        )

    def _measure(self) -> None:
        recipe = self._recipe
        measured = self._measured = measure(self._roles, recipe, self._answers)
        kl_N, teacher_N = measured.kl, measured.signals.teacher_logprobs
        broken = int((~np.isfinite(kl_N) | ~np.isfinite(teacher_N) | (teacher_N > 1e-3)).sum())
        payload = recipe.teacher.payload
        k = f" of {recipe.teacher.top_k} entries and a tail" if payload == "topk_tail" else ""
        self._report.add(
            "fail" if broken else "ok",
            f"{broken} of {len(kl_N)} positions have no finite divergence or log-probability: see "
            "the dtypes of student and teacher"
            if broken
            else f"teacher rows came for all {len(kl_N)} positions: payload {payload}{k}",
            num_positions=len(kl_N),
            num_broken=broken,
        )
        if broken:
            raise RockOPDError("what follows needs finite numbers")
        self._check_estimate(measured)
        self._check_terminator(measured)

    def _check_estimate(self, measured: Measured) -> None:
        """Rows and scalars belong to the same positions: given what stands before it, the log-ratio
        of a token sampled at temperature 1 has the full divergence for its mean (and at least that
        of a table with a tail), so the differences are a martingale's and their sum is bounded by
        its standard error."""
        recipe, cfg = self._recipe, self._recipe.rollout
        plain = cfg.temperature == 1.0 and cfg.top_p == 1.0 and recipe.data.source == "student"
        if not plain or recipe.teacher.payload == "sampled" or len(measured.kl) < 50:
            return
        ratio_N = measured.logprobs - measured.signals.teacher_logprobs
        excess_N = (ratio_N - measured.kl).astype(np.float64)
        error = max(float(excess_N.std()), 1e-6) / np.sqrt(len(excess_N))
        distance = float(excess_N.mean()) / error
        exact = recipe.teacher.payload == "hidden"
        apart = distance < -MAX_STANDARD_ERRORS or (exact and distance > MAX_STANDARD_ERRORS)
        numbers = (
            f"the sampled log-ratio is {ratio_N.mean():.4f} nats, the divergence from the "
            f"{'full vocabulary' if exact else 'table with its tail'} {measured.kl.mean():.4f} "
            f"({distance:+.1f} standard errors)"
        )
        self._report.add(
            "fail" if apart else "ok",
            f"{numbers}: rows and log-probabilities are not of the same positions; report it"
            if apart
            else f"rows and log-probabilities are of the same positions: {numbers}",
            logratio_mean=float(ratio_N.mean()),
            standard_errors=distance,
        )

    def _check_terminator(self, measured: Measured) -> None:
        """What the teacher says where the student stops."""
        counts = [len(r.positions) for r in self._answers]
        last = np.cumsum(counts) - 1
        ended = [i for i, r in zip(last, self._answers, strict=True) if r.finish_reason == "stop"]
        if not ended:
            return
        teacher, student = measured.signals.teacher_logprobs[ended], measured.logprobs[ended]
        self._report.add(
            "info",
            f"where the student stops, it does so with log-probability {student.mean():.2f}, the "
            f"teacher would with {teacher.mean():.2f}",
            stop_logprob_student=float(student.mean()),
            stop_logprob_teacher=float(teacher.mean()),
        )

    def _compare_sampler(self) -> None:
        """The rollout engine against the student that trains."""
        assert self._measured is not None
        gap = gap_metrics(self._measured.logprobs, self._measured.signals)
        mean, most = gap["sync/logprob_gap_mean"], gap["sync/logprob_gap_max"]
        if mean is None or most is None:
            return  # given answers
        recipe = self._recipe
        dtypes = [
            resolve_dtype(dtype, self._device)
            for dtype in (recipe.rollout.dtype, recipe.student.dtype)
        ]
        usual = max(AGREE[dtype] for dtype in dtypes)
        limit = recipe.sync.max_logprob_gap
        level: Level = "fail" if mean > limit else "warn" if mean > usual else "ok"
        advice = {
            "fail": f"above sync.max_logprob_gap={limit:g}, so a run would stop: the two compute "
            "another model; compare rollout.dtype and student.dtype, attention and rope settings",
            "warn": f"more than the {usual:g} that {dtypes[0]} and {dtypes[1]} explain; see "
            "student.attn_implementation and the dtypes",
            "ok": f"limit sync.max_logprob_gap={limit:g}",
        }[level]
        self._report.add(
            level,
            f"rollout engine against student, same tokens: |difference| mean {mean:.2g}, largest "
            f"{most:.2g} nats; {advice}",
            gap_mean=mean,
            gap_max=most,
        )

    # --- the teacher against itself ---------------------------------------------------------------

    def _score_again(self) -> None:
        assert self._measured is not None
        recipe, answers = self._recipe, self._answers
        dtype = resolve_dtype(recipe.teacher.dtype, self._device)
        bound = AGREE[dtype]
        self._roles.turn("teacher")
        once_N = self._score(answers, replica=0)
        backwards = answers[::-1]
        third = -(-len(answers) // 3)
        parts = [
            self._score(backwards[i : i + third], replica=0, flat=False)
            for i in range(0, len(answers), third)
        ]
        again_N = np.concatenate([scores for part in parts for scores in part][::-1])
        noise = Noise.of(once_N, again_N)
        signal = float(self._measured.kl.mean())
        self._report_noise(noise, signal, dtype, bound)
        for replica in range(1, recipe.teacher.num_replicas):
            apart = Noise.of(once_N, self._score(answers, replica=replica))
            self._report.add(
                "fail" if apart.mean > bound else "ok",
                f"teacher replicas 0 and {replica}, same tokens: {apart}; "
                + (
                    f"more than {bound:g}, the bound for {dtype}: they serve different weights or "
                    "settings; give all the same model, dtype and vLLM"
                    if apart.mean > bound
                    else f"bound for {dtype}: mean {bound:g}"
                ),
                **{f"replica_{replica}_{name}": value for name, value in apart.facts.items()},
            )

    def _report_noise(self, noise: Noise, signal: float, dtype: str, bound: float) -> None:
        level: Level = "ok"
        advice = f"bound for {dtype}: mean {bound:g}"
        if noise.mean > bound:
            level = "fail"
            advice = (
                f"more than {bound:g}, the bound for {dtype}: scores depend on what stands beside "
                "them; try teacher.dtype=float32, or another version of vLLM"
            )
        elif noise.kl > NOISE_SHARE * signal:
            level = "warn"
            advice = (
                f"more than {NOISE_SHARE:.0%} of what is to be learned; teacher.dtype=float32 "
                "lowers it"
            )
        estimator = {"hidden": "full vocabulary", "topk_tail": "table with its tail"}.get(
            self._recipe.teacher.payload, "sampled log-ratio"
        )
        self._report.add(
            level,
            f"noise floor, the teacher twice in another order and batch: {noise}, as KL "
            f"{noise.kl:.2g} nats; signal, KL(student, teacher) over the {estimator}: {signal:.4g} "
            f"nats; {advice}",
            signal_kl=signal,
            **{f"noise_{name}": value for name, value in noise.facts.items()},
        )

    def _score(self, rollouts: list[Rollout], *, replica: int, flat: bool = True) -> Any:
        """Log-probabilities by one replica, in one request: float32 [N], or one array each."""
        batch = MicroBatch(rollouts=tuple(range(len(rollouts))), teacher=replica)
        scores = self._roles.teachers.score(Deal(ranks=((batch,),)), rollouts)
        self._roles.teachers.clear()
        logprobs = [score.logprobs for score in scores]
        return np.concatenate(logprobs) if flat else logprobs

    # --- length -----------------------------------------------------------------------------------

    def _try_longest(self) -> None:
        """One sequence as long as the recipe allows, through every engine."""
        recipe, cfg = self._recipe, self._recipe.rollout
        pool = np.concatenate([r.token_ids for r in self._answers])
        longest = recipe.max_model_len if recipe.data.source == "student" else cfg.max_model_len
        ids = np.resize(pool, longest).astype(np.int32)
        if self._roles.rollouts is not None:
            self._roles.turn("rollout")
            request = SampleRequest(
                prompt=Prompt(prompt_id="longest", token_ids=ids[: cfg.max_prompt_tokens]),
                sample_idx=0,
                seed=0,
                begun=tuple(ids[cfg.max_prompt_tokens : -1].tolist()),
            )
            self._roles.rollouts.generate(
                [request],
                temperature=cfg.temperature,
                top_p=cfg.top_p,
                max_new_tokens=longest - cfg.max_prompt_tokens,
            )
        ids = ids[: cfg.max_model_len]
        prefix = recipe.teacher.prefix_tokens
        sequence = Rollout(
            prompt_id="longest",
            sample_idx=0,
            token_ids=ids,
            loss_mask=np.arange(len(ids)) >= cfg.max_prompt_tokens,
            logprobs=np.full(len(ids), np.nan, np.float32),
            finish_reason="given",
            policy_version=-1,
            prompt_len=cfg.max_prompt_tokens,
            teacher_prefix_ids=np.resize(pool, cfg.max_prompt_tokens + prefix).astype(np.int32)
            if prefix
            else None,
        )
        measured = measure(self._roles, recipe, [sequence])
        sequence.logprobs[sequence.positions] = measured.logprobs  # as if it had been sampled
        self._longest = sequence
        finite = bool(np.isfinite(measured.kl).all())
        self._report.add(
            "ok" if finite else "fail",
            f"longest sequence: {len(ids)} tokens go through "
            + ("rollout engine, " if self._roles.rollouts is not None else "")
            + f"teacher ({len(ids) + prefix} there) and student"
            + ("" if finite else ", but not all of its divergences are finite; see the dtypes"),
            longest_tokens=len(ids),
        )

    def _try_update(self) -> None:
        """As much memory as training ever takes: forward, backward and optimizer, each rank's
        micro-batch filled with copies of the longest sequence."""
        assert self._longest is not None
        recipe, sequence = self._recipe, self._longest
        students = self._roles.students
        length = len(sequence.token_ids)
        each = max(1, recipe.student.micro_batch_tokens // length)
        copies = [replace(sequence, sample_idx=i) for i in range(each * recipe.student.num_ranks)]
        signals, batches = score_all(self._roles, recipe, copies)
        self._roles.turn("student")
        students.train_step(batches, total_weight=float(signals.num_tokens), mask_version=0)
        self._roles.teachers.clear()
        memory = students.peak_memory()
        on_host, on_device = (max(m) for m in zip(*memory, strict=True))
        self._report.add(
            "ok",
            f"an update on full micro-batches ({each} x {length} tokens a rank) goes through; a "
            f"student rank took at most {in_bytes(on_host)} of host memory"
            + (f" and {in_bytes(on_device)} of its GPU" if on_device else "")
            + " since it started",
            update_tokens=each * length,
            peak_host_bytes=on_host,
            peak_device_bytes=on_device,
        )


@dataclass(frozen=True)
class Noise:
    """How two scorings of the same N tokens differ, in nats."""

    mean: float
    p99: float
    most: float
    kl: float
    """What the differences amount to between the two distributions: to second order, half the
    variance of the log-ratio d; here half the mean of d squared, which also counts a shift."""

    @staticmethod
    def of(a_N: np.ndarray, b_N: np.ndarray) -> Noise:
        """Of two scorings, float [N], N >= 1."""
        apart_N = np.abs(a_N.astype(np.float64) - b_N.astype(np.float64))
        return Noise(
            mean=float(apart_N.mean()),
            p99=float(np.quantile(apart_N, 0.99)),
            most=float(apart_N.max()),
            kl=float((apart_N**2).mean() / 2),
        )

    @property
    def facts(self) -> dict[str, float]:
        return {"mean": self.mean, "p99": self.p99, "max": self.most, "kl": self.kl}

    def __str__(self) -> str:
        return f"|difference| mean {self.mean:.2g}, p99 {self.p99:.2g}, largest {self.most:.2g}"
