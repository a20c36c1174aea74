"""A student's micro-batches around the work: what is checked before it, so that one rank's bad
input does not leave the others waiting, and what is told after it."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from rock_opd.engines.student_module import RowNumbers
from rock_opd.types import StepResult, TrainBatch


def agree(error: str | None, facts: dict[str, float], *, rank: int, device: torch.device) -> None:
    """Collective.

    Args:
        error: what is wrong with this rank's input.
        facts: the same on all ranks, or wrong.

    Raises:
        ValueError: on every rank, when one has an error or ranks differ in a fact.
    """
    mine = [float(error is not None), *facts.values()]
    both = torch.tensor([mine, [-x for x in mine]], dtype=torch.float64, device=device)
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    most, least = both[0].tolist(), (-both[1]).tolist()
    if error is not None:
        raise ValueError(f"student rank {rank}: {error}")
    if most[0]:
        raise ValueError(f"student rank {rank}: another rank refused its micro-batches")
    for name, low, high in zip(facts, least[1:], most[1:], strict=True):
        if low != high:
            raise ValueError(f"student ranks disagree on the {name}: between {low:g} and {high:g}")


def batches_error(batches: list[TrainBatch], *, width: int, num_real_ids: int) -> str | None:
    """What is malformed in a rank's micro-batches of one step, or None.

    Args:
        width: the student's vocabulary.
        num_real_ids: ids it shares with the teacher.
    """
    if not batches:
        return "no micro-batch; a rank without rows still needs one with weight 0"
    for i, batch in enumerate(batches):
        error = _error(batch, width=width, num_real_ids=num_real_ids)
        if error is not None:
            return f"micro-batch {i}: {error}"
    return None


def _error(batch: TrainBatch, *, width: int, num_real_ids: int) -> str | None:
    num_tokens, num_rows, at = len(batch.token_ids), batch.num_rows, batch.predicted
    if num_tokens < 1 or len(batch.position_ids) != num_tokens or batch.position_ids[0] != 0:
        return "needs tokens, each with a position, the first one 0"
    if batch.token_ids.min() < 0 or batch.token_ids.max() >= width:
        return f"token ids must lie in [0, {width})"
    if len(batch.weight) != num_rows or len(batch.index) != num_rows:
        return f"{num_rows} rows, {len(batch.weight)} weights, {len(batch.index)} places"
    if not num_rows:
        return None
    if not np.isfinite(batch.weight).all() or batch.weight.min() < 0:
        return "weights must be finite and not negative"
    if at.min() < 1 or at.max() >= num_tokens or (batch.position_ids[at] == 0).any():
        return "a predicted token must stand behind another one of its sequence"
    if batch.token_ids[at].max() >= num_real_ids:
        return f"predicted ids must lie below {num_real_ids}, the shared width"
    return None


def step_result(
    batches: list[TrainBatch],
    results: list[RowNumbers],
    *,
    grad_norm: float,
    learning_rate: float,
    mask_version: int,
    policy_version: int,
) -> StepResult:
    """This rank's numbers of one step, from those of its micro-batches, in their order."""
    shares, kl, logprobs, entropies = zip(*results, strict=True)
    return StepResult(
        index=np.concatenate([batch.index for batch in batches]),
        kl=torch.cat(kl).cpu().numpy(),
        logprobs=torch.cat(logprobs).cpu().numpy(),
        loss=float(torch.stack(shares).double().sum()),
        grad_norm=grad_norm,
        learning_rate=learning_rate,
        mask_version=mask_version,
        policy_version=policy_version,
        num_empty_batches=sum(not batch.weight.any() for batch in batches),
        entropy=None if entropies[0] is None else torch.cat(entropies).cpu().numpy(),
    )


def non_finite(results: list[RowNumbers]) -> str:
    """Which of this rank's micro-batches hold the numbers that stopped a step."""
    found = [
        f"micro-batch {i}: {int((~(kl.isfinite() & logprobs.isfinite())).sum())} of {len(kl)} rows"
        for i, (share, kl, logprobs, _) in enumerate(results)
        if not (share.isfinite() and kl.isfinite().all() and logprobs.isfinite().all())
    ]
    return (
        "; ".join(found) if found else "all its rows are finite: another rank, or the gradient norm"
    )
