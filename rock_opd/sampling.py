"""What is asked of the rollout workers. A sample's seed says what it is, not who samples it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from rock_opd.config import RolloutConfig
from rock_opd.types import Prompt, Rollout, SampleRequest


def sample_seed(run_seed: int, step: int, prompt_id: str, sample_idx: int) -> int:
    """Seed of one sample, in [0, 2**31)."""
    text = f"{run_seed}/{step}/{prompt_id}/{sample_idx}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") & 0x7FFFFFFF


def sample_requests(
    prompts: Iterable[Prompt],
    num_samples: int,
    *,
    seed: int,
    step: int,
    banned: tuple[int, ...] = (),
) -> list[SampleRequest]:
    """``num_samples`` requests a prompt, prompt by prompt.

    Args:
        seed: the run's.
        step: 0 before training, -1 for evaluation problems.
        banned: ids that no decoding step may choose; seeds do not depend on them.
    """
    return [
        SampleRequest(
            prompt=prompt,
            sample_idx=i,
            seed=sample_seed(seed, step, prompt.prompt_id, i),
            banned_ids=banned,
        )
        for prompt in prompts
        for i in range(num_samples)
    ]


def sample_answers(
    roles: Any, requests: Sequence[SampleRequest], cfg: RolloutConfig
) -> list[Rollout]:
    """Responses as in training.

    Args:
        roles: ``actors.groups.Roles``, or what stands in for it.
    """
    roles.turn("rollout")
    return roles.rollouts.generate(
        requests,
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        max_new_tokens=cfg.max_new_tokens,
    )
