"""Scores sequences with the teacher in vLLM, in this process, one prefill each.

Parking and handing over are ``parking``'s. Shape letters: ``T`` tokens of one sequence, ``R``
sampled tokens of one rollout, ``N`` rows laid flat, ``K`` top-k, ``H`` hidden width, ``V``
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from rock_opd.config import TeacherConfig
from rock_opd.core.objective import HeadScores, head_scores
from rock_opd.engines.parking import ParkingTeacher, Prefill, Rows, check_tail
from rock_opd.engines.prompt_logprobs import FlatTable, read_prompt_logprobs, rows_payload
from rock_opd.engines.teacher_head import load_head
from rock_opd.engines.vllm_quirks import start_llm
from rock_opd.types import TeacherRows

if TYPE_CHECKING:
    from vllm import LLM

_BATCHES_AT_ONCE = 4
"""Sequences go to vLLM in groups of about this many full prefill batches: it returns a group's
hidden states (or log-probabilities) all at once, for every position."""


class TeacherEngine(ParkingTeacher):
    """One vLLM engine that holds the teacher. One per process."""

    def __init__(
        self,
        cfg: TeacherConfig,
        *,
        dtype: str,
        device: str,
        num_real_ids: int,
        max_model_len: int,
        can_sleep: bool = False,
    ) -> None:
        """
        Args:
            dtype: float32 or bfloat16, resolved. In float32 the head runs in float32 throughout,
                in bfloat16 its bf16 products are accumulated in float32.
            device: cpu or cuda. ``prepare_environment(device, threads)`` must have been called.
            num_real_ids: the width that teacher and student share; columns beyond it leave before
                every softmax.
            max_model_len: longest sequence in tokens, plus 1 (in the mode ``prompt_logprobs`` vLLM
                samples a token).
            can_sleep: CUDA only: reserve what ``sleep`` needs.

        Raises:
            ConfigError: more top-k entries than ids, or what ``start_llm`` raises.
            ModelError: a model whose head cannot be used (see ``load_head``).
        """
        check_tail(cfg, num_real_ids)
        start = partial(
            start_llm,
            cfg.model,
            role="teacher",
            dtype=dtype,
            device=device,
            num_real_ids=num_real_ids,
            max_model_len=max_model_len,
            max_num_seqs=min(cfg.max_num_seqs, cfg.max_batched_tokens),
            max_num_batched_tokens=cfg.max_batched_tokens,
            enable_chunked_prefill=True,
            enable_prefix_caching=False,  # a score must not depend on what was scored before
            tensor_parallel=cfg.tensor_parallel,
            kv_cache_bytes=cfg.kv_cache_bytes,
            gpu_memory_utilization=cfg.gpu_memory_utilization,
            can_sleep=can_sleep,
        )
        scorer = (
            HiddenScorer(cfg, start, dtype=dtype, device=device, num_real_ids=num_real_ids)
            if cfg.engine == "hidden"
            else PromptLogprobsScorer(cfg, start, num_real_ids=num_real_ids)
        )
        super().__init__(
            cfg,
            scorer,
            num_real_ids=num_real_ids,
            max_model_len=max_model_len,
            group_tokens=_BATCHES_AT_ONCE * cfg.max_batched_tokens,
        )
        self._llm = scorer.llm
        self._sleeps = can_sleep and device == "cuda"

    def sleep(self) -> None:
        """CUDA: weights to host memory, KV cache dropped (vLLM's level 1). CPU: nothing to do.

        Parked rows live in host memory and can be fetched meanwhile.
        """
        if self._sleeps and not self._asleep:
            self._llm.sleep(level=1)
            self._asleep = True

    def wake(self) -> None:
        """Undoes ``sleep``."""
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False


class HiddenScorer:
    """Last hidden states from vLLM's pooling runner; the head is ours, over the shared width.

    vLLM's task ``token_embed`` returns every position after the final norm.
    """

    def __init__(
        self,
        cfg: TeacherConfig,
        start: Callable[..., LLM],
        *,
        dtype: str,
        device: str,
        num_real_ids: int,
    ) -> None:
        head_VH = load_head(cfg.model, dtype=dtype)[:num_real_ids]
        # On CPU bf16 factors are multiplied in float32, where their products are exact.
        self._head_VH = head_VH.float() if device == "cpu" else head_VH.to(device)

        from vllm.config import PoolerConfig

        self.llm = start(
            runner="pooling",
            convert="embed",
            pooler_config=PoolerConfig(task="token_embed"),
            hf_overrides={"head_dtype": "model"},  # else rows come as float32 whatever the model
        )
        self._device = device
        self._num_real_ids = num_real_ids
        self._chunk_rows = cfg.logit_chunk_rows
        self._payload = cfg.payload
        self._top_k = cfg.top_k
        # Only rows that travel may be narrower than the model: a table is made from exact ones.
        wire = cfg.wire_dtype if cfg.payload == "hidden" else "auto"
        self._park_dtype: torch.dtype = getattr(torch, dtype if wire == "auto" else wire)

    def prefill(self, prefills: list[Prefill]) -> list[tuple[Rows, np.ndarray | None]]:
        hidden = iter(self._hidden([p for p in prefills if len(p.positions)]))
        empty_RH = torch.zeros(0, self._head_VH.shape[1], dtype=self._park_dtype)
        hidden_RH = [next(hidden) if len(p.positions) else empty_RH for p in prefills]
        scores = self._score(torch.cat(hidden_RH), np.concatenate([p.targets for p in prefills]))
        sizes = [len(p.positions) for p in prefills]
        parts = zip(
            hidden_RH, scores.logprobs.split(sizes), scores.entropy.split(sizes), strict=True
        )
        keep = self._payload != "sampled"
        return [
            (
                Rows(logprobs=logprobs.numpy().copy(), hidden=self._park(rows) if keep else None),
                entropy.numpy().copy(),
            )
            for rows, logprobs, entropy in parts
        ]

    def payload(self, rows: Rows, targets: np.ndarray) -> TeacherRows:
        if self._payload != "topk_tail":
            return TeacherRows(kind=self._payload, logprobs=rows.logprobs, hidden=rows.hidden)
        scores = self._score(unpark(rows.hidden), targets, top_k=self._top_k)
        return TeacherRows(
            kind="topk_tail",
            logprobs=rows.logprobs,
            topk_ids=scores.topk_ids.int().numpy(),
            topk_logprobs=scores.topk_logprobs.numpy(),
            tail_logprob=scores.tail_logprob.numpy(),
        )

    def _hidden(self, prefills: list[Prefill]) -> Iterator[torch.Tensor]:
        """The rows that predict each one's sampled tokens, [R, H] on CPU in the model's dtype."""
        from vllm import PoolingParams

        if not prefills:
            return
        outputs = self.llm.encode(
            [{"prompt_token_ids": p.token_ids.tolist()} for p in prefills],
            pooling_params=PoolingParams(use_activation=False),  # else rows are normalised
            pooling_task="token_embed",
            use_tqdm=False,
        )
        for prefill, output in zip(prefills, outputs, strict=True):
            hidden_TH = output.outputs.data
            assert len(hidden_TH) == len(prefill.token_ids), f"{prefill.key}: rows are missing"
            yield hidden_TH[torch.from_numpy(prefill.positions - 1)].cpu()

    def _score(self, hidden_NH: torch.Tensor, targets: np.ndarray, top_k: int = 0) -> HeadScores:
        """Head scores, on CPU."""
        hidden_NH = hidden_NH.to(self._device)
        if hidden_NH.is_cuda:
            hidden_NH = hidden_NH.to(self._head_VH.dtype)
        scores = head_scores(
            hidden_NH,
            self._head_VH,
            torch.from_numpy(targets).to(self._device),
            num_real_ids=self._num_real_ids,
            chunk_rows=self._chunk_rows,
            top_k=top_k,
        )
        values = {f.name: getattr(scores, f.name) for f in fields(scores)}
        return HeadScores(**{name: None if v is None else v.cpu() for name, v in values.items()})

    def _park(self, hidden_RH: torch.Tensor) -> np.ndarray:
        rows_RH = hidden_RH.to(self._park_dtype)
        if rows_RH.dtype == torch.bfloat16:
            return rows_RH.view(torch.int16).numpy().view(np.uint16)
        return rows_RH.numpy()


def unpark(hidden: np.ndarray) -> torch.Tensor:
    """Parked hidden rows as a tensor: float32, or bfloat16 from uint16 bits."""
    if hidden.dtype == np.uint16:
        return torch.from_numpy(hidden.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(hidden)


class PromptLogprobsScorer:
    """Log-probabilities from vLLM's ordinary prefill: what a vLLM server gives, without entropy."""

    def __init__(self, cfg: TeacherConfig, start: Callable[..., LLM], *, num_real_ids: int) -> None:
        self._top_k = cfg.top_k if cfg.payload == "topk_tail" else 0
        self.llm = start(
            max_logprobs=max(self._top_k, 1),
            logprobs_mode="raw_logprobs",
            generation_config="vllm",
        )
        self.llm.collective_rpc("cut_logits", args=(num_real_ids,))

    def prefill(self, prefills: list[Prefill]) -> list[tuple[Rows, np.ndarray | None]]:
        from vllm import SamplingParams

        asked = [p for p in prefills if len(p.positions)]
        outputs = []
        if asked:
            outputs = self.llm.generate(
                [{"prompt_token_ids": p.token_ids.tolist()} for p in asked],
                SamplingParams(
                    max_tokens=1,
                    temperature=0.0,
                    prompt_logprobs=self._top_k,
                    flat_logprobs=True,
                    detokenize=False,
                    ignore_eos=True,
                ),
                use_tqdm=False,
            )
        flat = iter(output.prompt_logprobs for output in outputs)
        nothing = FlatTable([], [], [], [])
        return [
            (
                read_prompt_logprobs(
                    next(flat) if len(p.positions) else nothing,
                    p.token_ids,
                    p.positions,
                    k=self._top_k,
                ),
                None,
            )
            for p in prefills
        ]

    def payload(self, rows: Rows, targets: np.ndarray) -> TeacherRows:
        return rows_payload(rows, self._top_k)
