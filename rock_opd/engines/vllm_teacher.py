"""Scores sequences with the teacher in vLLM, one prefill each, and hands over rows when asked.

``score`` answers with scalars and parks what ``fetch`` may need, within ``teacher.park_bytes`` of
host memory. What did not fit is prefilled again when it is fetched: memory is bounded, answers are
not affected, and the repeated tokens are counted.

Shape letters: ``T`` tokens of one sequence, ``R`` sampled tokens of one rollout, ``N`` rows laid
flat, ``K`` top-k, ``H`` hidden width, ``V`` vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from rock_opd.config import TeacherConfig
from rock_opd.core.objective import MIN_TAIL_LOGPROB, HeadScores, head_scores
from rock_opd.engines.teacher_head import load_head
from rock_opd.engines.vllm_quirks import start_llm
from rock_opd.errors import ConfigError, DataError, PlacementError
from rock_opd.types import Rollout, RowRequest, TeacherRows, TeacherScores

if TYPE_CHECKING:
    from vllm import LLM

_BATCHES_AT_ONCE = 4
"""Sequences go to vLLM in groups of about this many full prefill batches: it returns a group's
hidden states (or log-probabilities) all at once, for every position."""


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """A rollout as the teacher reads it, and which of its rows are wanted."""

    key: str
    token_ids: np.ndarray
    """int32 [T]."""
    positions: np.ndarray
    """int64 [R], each in [1, T): the sampled tokens; row position - 1 predicts each."""

    @property
    def targets(self) -> np.ndarray:
        """int32 [R]."""
        return self.token_ids[self.positions]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What one prefill says about R rows; None for what the payload does not need."""

    logprobs: np.ndarray
    """float32 [R]."""
    hidden: np.ndarray | None = None
    """[R, H]: float32, or bf16 bits as uint16."""
    topk_ids: np.ndarray | None = None
    """int32 [R, K]."""
    topk_logprobs: np.ndarray | None = None
    """float32 [R, K]."""
    tail_logprob: np.ndarray | None = None
    """float32 [R]."""

    def _arrays(self) -> dict[str, np.ndarray]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self._arrays().values())

    def cut(self, index: np.ndarray) -> Rows:
        """The rows at ``index``, in its order."""
        return Rows(**{name: array[index] for name, array in self._arrays().items()})

    @staticmethod
    def flat(parts: list[Rows]) -> Rows:
        """The parts one behind the other; at least one part."""
        arrays = [part._arrays() for part in parts]
        return Rows(**{name: np.concatenate([a[name] for a in arrays]) for name in arrays[0]})


class ParkBuffer:
    """Rows waiting to be fetched, at most ``max_bytes`` of them.

    When they exceed that, the rows parked longest leave; what was prefilled stays known, so that
    they can be made again.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._known: dict[str, Prefill] = {}
        self._rows: OrderedDict[str, Rows] = OrderedDict()
        self.num_bytes = 0
        self.num_bytes_offered = 0
        """Of all rows parked since the last ``clear``, whether they fitted or not."""

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def put(self, prefill: Prefill, rows: Rows) -> None:
        """A key parked before is replaced."""
        if prefill.key in self:
            self.take(prefill.key)
        self._known[prefill.key] = prefill
        self._rows[prefill.key] = rows
        self.num_bytes += rows.num_bytes
        self.num_bytes_offered += rows.num_bytes
        while self.num_bytes > self._max_bytes:
            _, oldest = self._rows.popitem(last=False)
            self.num_bytes -= oldest.num_bytes

    def take(self, key: str) -> tuple[Prefill, Rows | None]:
        """Removes a key that is here: what was prefilled, and its rows if they still are."""
        rows = self._rows.pop(key, None)
        if rows is not None:
            self.num_bytes -= rows.num_bytes
        return self._known.pop(key), rows

    def clear(self) -> None:
        self._known.clear()
        self._rows.clear()
        self.num_bytes = self.num_bytes_offered = 0


class Scorer(Protocol):
    """One way to get a teacher's rows out of vLLM."""

    llm: LLM

    def prefill(self, prefills: list[Prefill]) -> list[tuple[Rows, np.ndarray | None]]:
        """Rows and entropy (float32 [R], None when it cannot be known) of each; R may be 0."""

    def payload(self, rows: Rows, targets: np.ndarray) -> TeacherRows:
        """What travels, from rows already cut to those asked for."""


class TeacherEngine:
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
        if cfg.payload == "topk_tail" and cfg.top_k >= num_real_ids:
            raise ConfigError(
                f"teacher.top_k={cfg.top_k} leaves no tail of {num_real_ids} ids; lower it, or use "
                "teacher.payload=hidden for the full vocabulary"
            )
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
        self._scorer: Scorer
        if cfg.engine == "hidden":
            self._scorer = HiddenScorer(
                cfg, start, dtype=dtype, device=device, num_real_ids=num_real_ids
            )
        else:
            self._scorer = PromptLogprobsScorer(cfg, start, num_real_ids=num_real_ids)
        self._group_tokens = _BATCHES_AT_ONCE * cfg.max_batched_tokens
        self._num_real_ids = num_real_ids
        self._max_tokens = max_model_len - 1
        self._park_bytes = cfg.park_bytes
        self._parked = ParkBuffer(cfg.park_bytes)
        self._sleeps = can_sleep and device == "cuda"
        self._asleep = False
        self.num_reprefilled_tokens = 0
        """Tokens prefilled twice since the last ``clear``, because their rows did not fit."""

    def score(self, rollouts: list[Rollout]) -> list[TeacherScores]:
        """Scalars of every sampled token, in the rollouts' order; parks the rows for ``fetch``.

        A rollout's numbers do not depend on the others or their order (in bf16: up to rounding).
        A key scored again replaces its older rows. A rollout without sampled tokens gets empty
        arrays.

        Raises:
            DataError: a sequence too long for the engine, ids beyond the shared width, or a sampled
                token that nothing precedes on the teacher's side (an empty ``teacher_prefix_ids``).
        """
        assert not self._asleep, "the teacher was asked to score in its sleep"
        prefills = [self._read(rollout) for rollout in rollouts]
        scores = []
        for group in _groups(prefills, self._group_tokens):
            answers = self._scorer.prefill(group)
            for prefill, (rows, entropy) in zip(group, answers, strict=True):
                scores.append(
                    TeacherScores(key=prefill.key, logprobs=rows.logprobs, entropy=entropy)
                )
                self._parked.put(prefill, rows)
        return scores

    def fetch(self, requests: tuple[RowRequest, ...]) -> TeacherRows:
        """The rows asked for, in order, in the recipe's payload; frees the rollouts it served.

        Raises:
            DataError: a rollout that was not scored here, or was fetched or cleared since; a row
                index outside the rollout.
            PlacementError: rows that did not fit into ``teacher.park_bytes`` cannot be made again
                while the teacher sleeps.
        """
        unknown = [r.key for r in requests if r.key not in self._parked]
        if unknown:
            raise DataError(
                f"teacher: no rows of rollout '{unknown[0]}': it was not scored by this replica, "
                "or has been fetched or cleared since; score it again first"
            )
        taken = {key: self._parked.take(key) for key in dict.fromkeys(r.key for r in requests)}
        lost = [prefill for prefill, rows in taken.values() if rows is None]
        if lost and self._asleep:
            raise PlacementError(
                f"teacher: rows of rollout '{lost[0].key}' did not fit into teacher.park_bytes="
                f"{self._park_bytes} and cannot be made again while another role has the GPUs; "
                f"raise it to {self._parked.num_bytes_offered} or train on fewer tokens per step"
            )
        for group in _groups(lost, self._group_tokens):
            self.num_reprefilled_tokens += sum(len(prefill.token_ids) for prefill in group)
            for prefill, (rows, _) in zip(group, self._scorer.prefill(group), strict=True):
                taken[prefill.key] = (prefill, rows)

        nothing = Prefill(key="", token_ids=np.zeros(0, np.int32), positions=np.zeros(0, np.int64))
        kept = [self._scorer.prefill([nothing])[0][0]]  # gives an empty answer its dtypes
        targets = [nothing.targets]
        for request in requests:
            prefill, rows = taken[request.key]
            assert rows is not None
            index = np.asarray(request.rows, dtype=np.int64)
            if len(index) and not 0 <= index.min() <= index.max() < len(prefill.positions):
                raise DataError(
                    f"teacher: rows {index.min()} to {index.max()} asked of rollout "
                    f"'{request.key}', which has {len(prefill.positions)} sampled tokens"
                )
            kept.append(rows.cut(index))
            targets.append(prefill.targets[index])
        return self._scorer.payload(Rows.flat(kept), np.concatenate(targets))

    def clear(self) -> int:
        """Drops every row nobody fetched.

        Returns:
            ``num_reprefilled_tokens``, which starts again from 0.
        """
        self._parked.clear()
        count, self.num_reprefilled_tokens = self.num_reprefilled_tokens, 0
        return count

    def sleep(self) -> None:
        """CUDA: weights to host memory, KV cache dropped (vLLM's level 1). CPU: nothing to do.

        Parked rows live in host memory and can be fetched meanwhile.
        """
        if self._sleeps and not self._asleep:
            self._scorer.llm.sleep(level=1)
            self._asleep = True

    def wake(self) -> None:
        """Undoes ``sleep``."""
        if self._asleep:
            self._scorer.llm.wake_up()
            self._asleep = False

    def _read(self, rollout: Rollout) -> Prefill:
        token_ids, positions = rollout.teacher_token_ids, rollout.teacher_positions
        if len(token_ids) > self._max_tokens:
            raise DataError(
                f"rollout {rollout.key}: {len(token_ids)} tokens on the teacher's side, its engine "
                f"reads {self._max_tokens}; raise teacher.prefix_tokens or shorten the prompt"
            )
        if len(positions) and positions.min() < 1:
            raise DataError(
                f"rollout {rollout.key}: on the teacher's side no token precedes the response, so "
                "nothing predicts its first token; teacher_prefix_ids must not be empty"
            )
        if len(token_ids) and token_ids.max() >= self._num_real_ids:
            raise DataError(
                f"rollout {rollout.key}: id {token_ids.max()} lies beyond the "
                f"{self._num_real_ids} ids that teacher and student share"
            )
        return Prefill(key=rollout.key, token_ids=token_ids, positions=positions)


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
        return TeacherRows(
            kind="topk_tail" if self._top_k else "sampled",
            logprobs=rows.logprobs,
            topk_ids=rows.topk_ids,
            topk_logprobs=rows.topk_logprobs,
            tail_logprob=rows.tail_logprob,
        )


@dataclass(frozen=True)
class FlatTable:
    """The fields of vLLM's ``FlatLogprobs`` that are read here."""

    start_indices: list[int]
    end_indices: list[int]
    token_ids: list[int]
    logprobs: list[float]


def read_prompt_logprobs(
    flat: FlatTable | Any, token_ids: np.ndarray, positions: np.ndarray, *, k: int
) -> Rows:
    """Rows of the tokens at ``positions`` out of vLLM's prompt log-probabilities.

    vLLM gives position t the entries of the token AT t (position 0, which nothing predicts, is
    empty): the token itself and the k most likely ones, so k + 1 entries, or k different ones where
    the token is among them. Everything is read by id and value, nothing by place.

    Args:
        flat: vLLM's ``FlatLogprobs`` of the whole sequence.
        positions: int64 [R], each >= 1.
        k: top-k entries to return, 0 for none.

    Raises:
        DataError: a position without its own token, or with fewer than k entries.
    """
    logprobs = np.zeros(len(positions), np.float32)
    topk_ids = np.zeros((len(positions), k), np.int32)
    topk_logprobs = np.zeros((len(positions), k), np.float32)
    for row, position in enumerate(positions):
        span = slice(flat.start_indices[position], flat.end_indices[position])
        ids, first = np.unique(np.asarray(flat.token_ids[span], np.int32), return_index=True)
        values = np.asarray(flat.logprobs[span], np.float32)[first]
        own = ids == token_ids[position]
        if not own.any() or len(ids) < k:
            raise DataError(
                f"teacher: position {position} has log-probabilities of {len(ids)} ids, expected "
                f"its own token {token_ids[position]} and the {k} most likely ones"
            )
        logprobs[row] = values[own][0]
        best = np.argsort(-values, kind="stable")[:k]
        topk_ids[row], topk_logprobs[row] = ids[best], values[best]
    if not k:
        return Rows(logprobs=logprobs)
    mass = np.exp(topk_logprobs.astype(np.float64)).sum(1)
    tail = np.log(np.maximum(1.0 - mass, np.exp(MIN_TAIL_LOGPROB)))
    return Rows(
        logprobs=logprobs,
        topk_ids=topk_ids,
        topk_logprobs=topk_logprobs,
        tail_logprob=tail.astype(np.float32),
    )


def _groups(prefills: Iterable[Prefill], num_tokens: int) -> Iterator[list[Prefill]]:
    """Consecutive sequences, each group of at least ``num_tokens`` tokens but the last."""
    group: list[Prefill] = []
    total = 0
    for prefill in prefills:
        group.append(prefill)
        total += len(prefill.token_ids)
        if total >= num_tokens:
            yield group
            group, total = [], 0
    if group:
        yield group
