"""What parts cost, measured: `rock-opd bench registry | knockout`."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from rock_opd.bans import Answer, mixed_batches, naive_loop
from rock_opd.config import Recipe
from rock_opd.core.policies import audit_rng, make_policy
from rock_opd.core.registry import Registry
from rock_opd.core.token_stats import TokenStats
from rock_opd.knockout import banning_engines, lot_size, read_task
from rock_opd.tables import Report, Say, Track
from rock_opd.types import StepSignals


def bench_registry(*, num_types: int, num_positions: int, repeats: int, seed: int) -> Report:
    """Seconds of each part of a step that grows with positions or vocabulary, on random data.

    Token ids follow Zipf's law, losses are exponential; every position is measured. The step's
    arrays stand in memory already, as they do in the coordinator.

    Args:
        num_types: V.
        num_positions: sampled positions of one step.
        repeats: the least time of so many is reported.
        seed: draws the data.
    """
    rng = np.random.default_rng(seed)
    share = 1.0 / np.arange(1, num_types + 1)
    ids = rng.choice(num_types, num_positions, p=share / share.sum()).astype(np.int32)
    loss = rng.exponential(0.3, num_positions).astype(np.float32)
    logratio = rng.normal(0.3, 1.0, num_positions).astype(np.float32)
    measure = np.ones(num_positions, np.float32)
    rows_each = 8192
    signals = StepSignals(
        token_ids=ids,
        rollout_idx=(np.arange(num_positions) // rows_each).astype(np.int32),
        position=(np.arange(num_positions) % rows_each).astype(np.int32),
        student_logprobs=np.zeros(num_positions, np.float32),
        teacher_logprobs=-logratio,
        teacher_entropy=None,
    )
    registry = Registry(num_types, decay=0.99)
    stats = TokenStats.from_rows(ids, loss, measure, logratio, num_types=num_types)
    registry.update(stats)
    plain = make_policy("rock_freeze", warmup_steps=1, refresh_every=1, top_k=100)
    plain.refresh(2, registry)
    windows = make_policy(
        "rock_freeze", warmup_steps=1, refresh_every=1, top_k=100, window_radius=4
    )
    windows.refresh(2, registry)

    def refresh() -> None:
        fresh = make_policy("rock_freeze", warmup_steps=1, refresh_every=1, top_k=100)
        fresh.refresh(registry.num_updates + 1, registry)

    parts: dict[str, Callable[[], object]] = {
        "sums by type": lambda: TokenStats.from_rows(
            ids, loss, measure, logratio, num_types=num_types
        ),
        "merge into the registry": lambda: registry.update(stats),
        "choose the rocks": refresh,
        "weights by type": lambda: plain.weights(signals, plain.mask, rng=audit_rng(0, 2)),
        "weights with windows": lambda: windows.weights(signals, windows.mask, rng=audit_rng(0, 2)),
    }
    seconds = {name: _least(run, repeats) for name, run in parts.items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Report(
        title="seconds per step",
        facts={
            "num_types": num_types,
            "num_positions": num_positions,
            "seconds": seconds,
            "peak_rss_bytes": peak,
        },
        lines=[
            f"{num_positions:,} positions, {num_types:,} types, one process; peak memory "
            f"{peak / 2**30:.1f} GiB, this benchmark's own data included"
        ],
        table={"part": list(seconds), "seconds": list(seconds.values())},
    )


def _least(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def bench_knockout(
    cfg: Recipe,
    candidates: Path,
    *,
    max_candidates: int = 8,
    address: str | None = None,
    say: Say,
    track: Track,
) -> Report:
    """Knockout against the naive loop, on the same engines, same problems, same candidates.

    Grading is left out: it is the same for both. The base run comes first, and with it the prompts
    are in the engines' prefix cache for all; the naive loop comes last, so that what caching there
    is favours it.

    Returns:
        Facts: ``seconds`` and ``tokens_generated`` by way (``base``, ``reuse``, ``mixed``: whole
        answers side by side, ``naive``), ``speedup`` of reuse and mixed over naive (the base run
        counted in), ``equal_answers`` of ``pairs`` between reuse and naive.
    """
    task, _, ids = read_task(cfg, candidates, say)
    ids, lot = ids[:max_candidates], lot_size(cfg)
    seconds: dict[str, float] = {}
    answers: dict[str, list[Answer]] = {}

    def timed(way: str, run: Callable[[], list[Answer]]) -> list[Answer]:
        started = time.monotonic()
        answers[way] = run()
        seconds[way] = time.monotonic() - started
        track(len(seconds), 4)
        say(f"{way}: {seconds[way]:.1f} s, {_sampled(answers[way])} tokens")
        return answers[way]

    def flat(loop: Iterator[tuple[int, list[Answer]]]) -> list[Answer]:
        by_candidate = dict(loop)
        return [answer for candidate in ids for answer in by_candidate[candidate]]

    with banning_engines(cfg, address, say) as (rollouts, _):
        base = timed("base", lambda: task.answer(rollouts, task.requests()))
        mixed = partial(mixed_batches, rollouts, task, ids, base, lot=lot)
        timed("reuse", lambda: flat(mixed()))
        timed("mixed", lambda: flat(mixed(reuse=False)))
        timed("naive", lambda: flat(naive_loop(rollouts, task, ids)))
    naive = seconds["base"] + seconds["naive"]
    speedup = {way: naive / (seconds["base"] + seconds[way]) for way in ("reuse", "mixed")}
    equal = sum(
        np.array_equal(a.token_ids, b.token_ids)
        for a, b in zip(answers["reuse"], answers["naive"], strict=True)
    )
    tokens = {way: _sampled(some) for way, some in answers.items()}
    return Report(
        title="knockout against the naive loop",
        facts={
            "num_candidates": len(ids),
            "num_problems": len(task.problems),
            "seconds": seconds,
            "tokens_generated": tokens,
            "speedup": speedup,
            "equal_answers": equal,
            "pairs": len(answers["naive"]),
        },
        lines=[
            f"{len(ids)} candidates x {len(task.problems)} problems: {speedup['reuse']:.2f}x the "
            f"naive loop's speed, base run included ({speedup['mixed']:.2f}x from mixing alone)",
            f"{equal} of {len(answers['naive'])} answers are the naive loop's, token for token",
        ],
        table={
            "way": list(seconds),
            "seconds": list(seconds.values()),
            "tokens_generated": [tokens[way] for way in seconds],
        },
    )


def _sampled(answers: list[Answer]) -> int:
    return sum(answer.num_sampled for answer in answers)
