"""Answers to problems while one token type is banned, without doing any work twice.

What a ban cannot change is not generated again: an answer in which the type never occurs is the
base's own, and with greedy decoding an answer is the base's up to the first place where it would
have occurred. In float32 that gives the very answers of ``naive_loop``; in bf16, where the batch
decides how sums are rounded, answers as good as those. All other answers, of many candidates, go
into the engines side by side.

Why a sampled answer is kept, too: vLLM picks the id with the largest probability over a seeded
exponential draw, and taking an id out of that race does not change who wins it, unless that id
would have (or two are as good as tied: the probabilities of the rest are rounded anew). After the
first ban that bites, the request's draws cannot be taken up again from outside the engine: such an
answer is sampled whole.

Shape letters: ``A`` answers (problems x samples), ``R`` tokens of one answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from rock_opd.sampling import sample_requests
from rock_opd.types import Prompt, Rollout, SampleRequest


class Sampler(Protocol):
    """What answers: ``actors.groups.Rollouts``, or one ``engines.vllm_rollout.RolloutEngine``."""

    def generate(
        self,
        requests: list[SampleRequest],
        *,
        temperature: float,
        top_p: float,
        max_new_tokens: int,
    ) -> list[Rollout]: ...


@dataclass(frozen=True, kw_only=True)
class Task:
    """Problems, and how they are answered: the same way under every ban."""

    problems: tuple[Prompt, ...]
    """Each with an ``answer``."""
    samples: int
    """Answers of one problem."""
    temperature: float
    """0 is greedy; top-p is always 1: with less, a ban changes which ids may be sampled at all."""
    max_new_tokens: int
    seed: int

    def requests(self, *banned: int) -> list[SampleRequest]:
        """A requests, problem by problem; their seeds do not depend on what is banned."""
        return sample_requests(self.problems, self.samples, seed=self.seed, step=-1, banned=banned)

    def answer(self, rollouts: Sampler, requests: list[SampleRequest]) -> list[Answer]:
        """Answers, in the order of the requests."""
        answered = rollouts.generate(
            requests,
            temperature=self.temperature,
            top_p=1.0,
            max_new_tokens=self.max_new_tokens,
        )
        return [
            Answer(
                token_ids=rollout.token_ids[rollout.prompt_len :],
                stopped=rollout.finish_reason == "stop",
                num_sampled=len(rollout.positions),
            )
            for rollout in answered
        ]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer to one problem, under one ban or none."""

    token_ids: np.ndarray
    """int32 [R], R >= 1."""
    stopped: bool
    """False: the length limit cut it off."""
    num_sampled: int
    """Tokens generated for it: R, or fewer where the base's were used."""


def naive_loop(
    rollouts: Sampler, task: Task, candidates: Sequence[int]
) -> Iterator[tuple[int, list[Answer]]]:
    """Knockout as it is defined: one candidate after another, every answer generated whole."""
    for candidate in candidates:
        yield candidate, task.answer(rollouts, task.requests(candidate))


def mixed_batches(
    rollouts: Sampler,
    task: Task,
    candidates: Sequence[int],
    base: list[Answer],
    *,
    lot: int,
    reuse: bool = True,
) -> Iterator[tuple[int, list[Answer]]]:
    """What ``naive_loop`` gives, with the candidates side by side and without work done twice.

    Args:
        base: [A]: the task's answers with nothing banned.
        lot: answers asked for at once.
        reuse: take from the base what the ban cannot change; False generates every answer whole.

    Yields:
        (candidate, its A answers), each candidate as soon as its last answer is there.
    """
    open_: dict[int, list[Answer | None]] = {}
    queue: list[tuple[int, int, SampleRequest]] = []

    def flush() -> None:
        some, queue[:] = queue[:lot], queue[lot:]
        some.sort(key=lambda job: (job[1], len(job[2].begun)))  # shared beginnings side by side
        answers = task.answer(rollouts, [request for *_, request in some])
        for (candidate, place, _), answer in zip(some, answers, strict=True):
            open_[candidate][place] = answer

    def finished() -> Iterator[tuple[int, list[Answer]]]:
        for candidate in [c for c, some in open_.items() if all(a is not None for a in some)]:
            yield candidate, [answer for answer in open_.pop(candidate) if answer is not None]

    for candidate in candidates:
        open_[candidate] = [None] * len(base)
        jobs = zip(base, task.requests(candidate), strict=True)
        for place, (answer, request) in enumerate(jobs):
            found = np.flatnonzero(answer.token_ids == candidate) if reuse else [0]
            if not len(found):
                open_[candidate][place] = replace(answer, num_sampled=0)
                continue
            if reuse and task.temperature == 0:
                request = replace(request, begun=tuple(answer.token_ids[: found[0]].tolist()))
            queue.append((candidate, place, request))
        while len(queue) >= lot:
            flush()
        yield from finished()
    while queue:
        flush()
        yield from finished()
