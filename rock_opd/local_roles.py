"""The three roles of a run inside this process, on CPU: real models, no Ray, vLLM or DeepSpeed.

For models so small that starting an engine takes longer than a whole run: the coordinator drives
these exactly as it drives ``actors.groups.Roles``, and the numbers are computed, not made up:
sampling by transformers with a KV cache, full-vocabulary divergence by ``core.objective``, AdamW on
the schedule of ``core.schedule``. Refused is what only the engines do: nucleus sampling, losses
other than a divergence over the whole vocabulary.

One process, one thread of control, CPU float32: the same seeds give the same numbers. A response
depends on its request's seed alone, up to the rounding of a matrix product in another batch.

Shape letters: ``B`` sequences padded on the right, ``T`` positions, ``N`` rows laid flat, ``R``
sampled tokens of one rollout, ``V`` vocabulary, ``H`` hidden width.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rock_opd.config import OptimConfig, Recipe
from rock_opd.core.batching import Deal, logit_rows
from rock_opd.core.objective import (
    DIVERGENCES,
    loss_share,
    reverse_kl,
    shielded,
    token_logprobs,
)
from rock_opd.core.objective import entropy as row_entropy
from rock_opd.core.schedule import learning_rate
from rock_opd.durable import FileFacts, file_facts
from rock_opd.errors import ConfigError, NumericsError
from rock_opd.types import Rollout, RowRequest, SampleRequest, StepResult, TeacherScores, TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LocalRoles:
    """What ``Coordinator`` is given in place of the actors' ``Roles``."""

    def __init__(
        self,
        recipe: Recipe,
        student: PreTrainedModel,
        teacher: PreTrainedModel,
        *,
        num_real_ids: int,
        stop_token_ids: Sequence[int],
        num_updates: int,
    ) -> None:
        """
        Args:
            student: trained in place; the sampler holds a copy that only ``push_weights`` changes.
            num_real_ids: V, the width both models share; both must have exactly so many ids.
            num_updates: of the whole run, for the schedule.

        Raises:
            ConfigError: the recipe asks for what only the engines do.
        """
        _check(recipe, student, teacher, num_real_ids)
        self.rollouts: LocalRollouts | None = LocalRollouts(student, stop_token_ids)
        self.teachers = LocalTeachers(teacher)
        self.students = LocalStudents(
            student,
            self.teachers,
            recipe.optim,
            divergence=recipe.loss.divergence,
            num_updates=num_updates,
        )

    def turn(self, *roles: str) -> None:
        """Nothing to hand over: all roles share one CPU."""


def _check(
    recipe: Recipe, student: PreTrainedModel, teacher: PreTrainedModel, num_real_ids: int
) -> None:
    if recipe.loss.divergence not in DIVERGENCES or recipe.loss.kd_ratio != 1.0:
        raise ConfigError(
            f"roles in this process train {' or '.join(DIVERGENCES)} with loss.kd_ratio=1, got "
            f"{recipe.loss.divergence} with {recipe.loss.kd_ratio:g}"
        )
    if recipe.teacher.payload != "hidden" or recipe.rollout.top_p != 1.0:
        raise ConfigError(
            "roles in this process need teacher.payload=hidden and rollout.top_p=1, got "
            f"{recipe.teacher.payload} and {recipe.rollout.top_p:g}"
        )
    widths = {m.config.vocab_size for m in (student, teacher)} | {num_real_ids}
    if len(widths) > 1:
        raise ConfigError(
            "roles in this process need models as wide as their tokenizer, got student "
            f"{student.config.vocab_size}, teacher {teacher.config.vocab_size}, tokenizer "
            f"{num_real_ids}"
        )


class LocalRollouts:
    """Samples from a copy of the student."""

    def __init__(self, student: PreTrainedModel, stop_token_ids: Sequence[int]) -> None:
        self._model = copy.deepcopy(student).eval().requires_grad_(False)
        self._stops = np.array(sorted(stop_token_ids))
        self._version = 0

    def load(self, weights: dict[str, Tensor], *, version: int) -> None:
        """Takes over the trainer's weights."""
        self._model.load_state_dict(weights)
        self._version = version

    def generate(
        self,
        requests: list[SampleRequest],
        *,
        temperature: float,
        top_p: float,
        max_new_tokens: int,
    ) -> list[Rollout]:
        """One response per request, in order. Temperature 0 is greedy."""
        if top_p != 1.0:
            raise ConfigError(f"roles in this process sample with top_p=1, got {top_p:g}")
        by_length: dict[int, list[int]] = {}
        for i, request in enumerate(requests):
            by_length.setdefault(len(request.prompt.token_ids), []).append(i)
        answers: dict[int, Rollout] = {}
        for members in by_length.values():  # equal lengths: no padding on the left
            batch = [requests[i] for i in members]
            tokens, logprobs = self._sample(batch, temperature, max_new_tokens)
            for i, row, row_logprobs in zip(members, tokens, logprobs, strict=True):
                answers[i] = self._rollout(requests[i], row, row_logprobs)
        return [answers[i] for i in range(len(requests))]

    @torch.no_grad()
    def _sample(
        self, requests: list[SampleRequest], temperature: float, num: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ids int [B, <= num] and their log-probabilities float32; past a stop token, anything."""
        from transformers.cache_utils import DynamicCache

        ids_BT = torch.from_numpy(np.stack([r.prompt.token_ids for r in requests]).astype(np.int64))
        # One uniform number for every token of every request: who samples beside whom is no matter.
        uniform_BR = torch.from_numpy(
            np.stack([np.random.default_rng(r.seed).random(num) for r in requests])
        )
        banned_BV = torch.zeros(len(requests), self._model.config.vocab_size, dtype=torch.bool)
        for i, request in enumerate(requests):
            banned_BV[i, list(request.banned_ids)] = True
        cache = DynamicCache(config=self._model.config)
        tokens, logprobs = [], []
        done_B = torch.zeros(len(requests), dtype=torch.bool)
        stops = torch.from_numpy(self._stops)
        for t in range(num):
            output = self._model(input_ids=ids_BT, past_key_values=cache, use_cache=True)
            log_q_BV = torch.log_softmax(output.logits[:, -1].float(), dim=-1)
            allowed_BV = log_q_BV.masked_fill(banned_BV, -torch.inf)
            if temperature == 0:
                token_B = allowed_BV.argmax(-1)
            else:
                mass_BV = torch.softmax(allowed_BV.double() / temperature, dim=-1).cumsum(-1)
                # Below the whole mass, so that rounding cannot fall off the last allowed id.
                point_B = uniform_BR[:, t] * mass_BV[:, -1] * (1 - 1e-12)
                token_B = torch.searchsorted(mass_BV, point_B[:, None], right=True)[:, 0]
            tokens.append(token_B)
            logprobs.append(log_q_BV.gather(1, token_B[:, None])[:, 0])
            done_B |= torch.isin(token_B, stops)
            if done_B.all():
                break
            ids_BT = token_B[:, None]
        return torch.stack(tokens, 1).numpy(), torch.stack(logprobs, 1).numpy()

    def _rollout(self, request: SampleRequest, row: np.ndarray, logprobs: np.ndarray) -> Rollout:
        ends = np.flatnonzero(np.isin(row, self._stops))
        num = int(ends[0]) + 1 if len(ends) else len(row)
        prompt = request.prompt
        prompt_len = len(prompt.token_ids)
        return Rollout(
            prompt_id=prompt.prompt_id,
            sample_idx=request.sample_idx,
            token_ids=np.concatenate([prompt.token_ids, row[:num]]).astype(np.int32),
            loss_mask=np.arange(prompt_len + num) >= prompt_len,
            logprobs=np.concatenate([np.full(prompt_len, np.nan), logprobs[:num]]).astype(
                np.float32
            ),
            finish_reason="stop" if len(ends) else "length",
            policy_version=self._version,
            prompt_len=prompt_len,
            teacher_id=prompt.teacher_id,
            teacher_prefix_ids=prompt.teacher_prefix_ids,
        )


class LocalTeachers:
    """Scores rollouts and keeps their rows until ``clear``."""

    def __init__(self, teacher: PreTrainedModel) -> None:
        self._model = teacher.eval().requires_grad_(False)
        self._parked: dict[str, Tensor] = {}

    @torch.no_grad()
    def score(self, deal: Deal, rollouts: list[Rollout]) -> list[TeacherScores]:
        """Scalars of every sampled token, in the order of the rollouts."""
        hidden = padded_hidden(self._model, [r.teacher_token_ids for r in rollouts])
        head = self._model.get_output_embeddings()
        scores = []
        for rollout, rows_TH in zip(rollouts, hidden, strict=True):
            logits_RV = head(rows_TH[logit_rows(rollout.teacher_positions)])
            target_R = torch.from_numpy(rollout.token_ids[rollout.positions])
            self._parked[rollout.key] = logits_RV
            scores.append(
                TeacherScores(
                    key=rollout.key,
                    logprobs=token_logprobs(logits_RV, target_R).numpy(),
                    entropy=row_entropy(logits_RV).numpy(),
                )
            )
        return scores

    def fetch(self, requests: Sequence[RowRequest]) -> Tensor:
        """Logits float32 [N, V] of the rows asked for, in order."""
        parts = [self._parked[r.key][torch.from_numpy(r.rows)] for r in requests]
        width = self._model.config.vocab_size
        return torch.cat([torch.zeros(0, width), *parts])

    def clear(self) -> int:
        """Drops all rows; none is ever made again, so 0."""
        self._parked.clear()
        return 0


@dataclass
class _Rows:
    """What one micro-batch's rows came to; the loss carries the gradient."""

    loss_N: Tensor
    kl_N: Tensor
    logprob_N: Tensor
    entropy_N: Tensor | None


class LocalStudents:
    """Trains the student; the ranks of a step are taken one after the other."""

    def __init__(
        self,
        student: PreTrainedModel,
        teachers: LocalTeachers,
        optim: OptimConfig,
        *,
        divergence: str,
        num_updates: int,
    ) -> None:
        self._model = student.train().requires_grad_(True)
        self._teachers, self._optim, self._divergence = teachers, optim, divergence
        self._num_updates, self._updates_done = num_updates, 0
        self._adam = torch.optim.AdamW(
            student.parameters(),
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
        )

    def train_step(
        self, batches: list[list[TrainBatch]], *, total_weight: float, mask_version: int
    ) -> list[StepResult]:
        """One optimizer step over all ranks' micro-batches.

        Raises:
            NumericsError: a loss or gradient that is not finite; no weight was changed.
        """
        optim = self._optim
        lr = learning_rate(
            self._updates_done,
            num_updates=self._num_updates,
            lr=optim.lr,
            min_lr=optim.min_lr,
            warmup_ratio=optim.warmup_ratio,
        )
        self._adam.zero_grad()
        ranks, shares = [], []
        for rank in batches:
            rows, loss = [], 0.0
            for batch in rank:
                rows.append(self._forward(batch))
                weight_N = torch.from_numpy(batch.weight)
                share = loss_share(rows[-1].loss_N, weight_N, total_weight=total_weight)
                share.backward()
                loss += float(share.detach())
            ranks.append(rows)
            shares.append(loss)
        params = list(self._model.parameters())
        norm = float(torch.nn.utils.clip_grad_norm_(params, optim.max_grad_norm or float("inf")))
        if not np.isfinite([norm, *shares]).all():
            self._adam.zero_grad()
            raise NumericsError(
                f"update {self._updates_done + 1}: loss {sum(shares):g}, gradient norm {norm:g}; "
                "no weight was changed"
            )
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        self._updates_done += 1
        return [
            self._result(rank, rows, loss, norm=norm, lr=lr, mask_version=mask_version)
            for rank, rows, loss in zip(batches, ranks, shares, strict=True)
        ]

    @torch.no_grad()
    def measure(
        self, batches: list[list[TrainBatch]], *, entropy: bool = False
    ) -> list[StepResult]:
        """The rows' numbers under the present weights; nothing is changed."""
        results = []
        for rank in batches:
            rows = [self._forward(batch, entropy=entropy) for batch in rank]
            loss = sum(
                float(loss_share(r.loss_N, torch.from_numpy(b.weight), total_weight=1.0))
                for r, b in zip(rows, rank, strict=True)
            )
            results.append(
                self._result(rank, rows, loss, norm=0.0, lr=0.0, mask_version=0, entropy=entropy)
            )
        return results

    def _forward(self, batch: TrainBatch, *, entropy: bool = False) -> _Rows:
        sequences = np.split(batch.token_ids, np.flatnonzero(batch.position_ids == 0)[1:])
        hidden_TH = torch.cat(padded_hidden(self._model, sequences))
        hidden_NH = hidden_TH[torch.from_numpy(logit_rows(batch.predicted))]
        logits_NV = self._model.get_output_embeddings()(hidden_NH)
        teacher_NV = self._teachers.fetch(batch.requests)
        trained_NV = shielded(logits_NV, torch.from_numpy(batch.weight))
        loss_N = DIVERGENCES[self._divergence](trained_NV, teacher_NV)
        with torch.no_grad():
            fixed_NV = logits_NV.detach()
            target_N = torch.from_numpy(batch.token_ids[batch.predicted])
            trained = self._divergence == "reverse_kl"
            return _Rows(
                loss_N=loss_N,
                kl_N=loss_N.detach() if trained else reverse_kl(fixed_NV, teacher_NV),
                logprob_N=token_logprobs(fixed_NV, target_N),
                entropy_N=row_entropy(fixed_NV) if entropy else None,
            )

    def _result(
        self,
        rank: list[TrainBatch],
        rows: list[_Rows],
        loss: float,
        *,
        norm: float,
        lr: float,
        mask_version: int,
        entropy: bool = False,
    ) -> StepResult:
        def column(name: str) -> np.ndarray:
            return torch.cat([getattr(r, name) for r in rows]).numpy()

        return StepResult(
            index=np.concatenate([b.index for b in rank]),
            kl=column("kl_N"),
            logprobs=column("logprob_N"),
            loss=loss,
            grad_norm=norm,
            learning_rate=lr,
            mask_version=mask_version,
            policy_version=self._updates_done,
            num_empty_batches=sum(not b.weight.any() for b in rank),
            entropy=column("entropy_N") if entropy else None,
        )

    def push_weights(self, rollouts: LocalRollouts, *, version: int, bucket_bytes: int) -> None:
        """Brings the sampler to the trainer's weights."""
        rollouts.load(self._model.state_dict(), version=version)

    def save_hf(self, path: Path, *, background: bool = False) -> None:
        self._model.save_pretrained(path)

    def save_state(self, path: Path, *, background: bool = False) -> None:
        torch.save(
            {
                "model": self._model.state_dict(),
                "adam": self._adam.state_dict(),
                "updates": self._updates_done,
            },
            path / "local.pt",
        )

    def written(self, path: Path) -> dict[str, FileFacts]:
        """A model this small is written when it is asked for."""
        return {file.name: file_facts(file) for file in path.glob("local.pt")}

    def load_state(self, path: Path) -> None:
        state = torch.load(path / "local.pt", weights_only=True)
        self._model.load_state_dict(state["model"])
        self._adam.load_state_dict(state["adam"])
        self._updates_done = state["updates"]


def padded_hidden(model: PreTrainedModel, sequences: Sequence[np.ndarray]) -> list[Tensor]:
    """Last hidden states [T, H] of each sequence (int32 [T], T >= 1), from one padded forward.

    Padding stands on the right, where causal attention lets no token see it: no mask is needed.
    """
    ids_BT = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.int64)
    for i, sequence in enumerate(sequences):
        ids_BT[i, : len(sequence)] = torch.from_numpy(sequence)
    hidden_BTH = model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
    return [hidden_BTH[i, : len(sequence)] for i, sequence in enumerate(sequences)]
