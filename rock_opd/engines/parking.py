"""What every teacher engine shares: it scores now, parks rows, and hands them over when asked.

``score`` answers with scalars and parks what ``fetch`` may need, within ``teacher.park_bytes`` of
host memory. What did not fit is asked of the model again when it is fetched: memory is bounded,
answers are not affected, and the repeated tokens are counted. Where rows come from is a
``Scorer``'s business: vLLM in this process (``vllm_teacher``), or a server (``http_teacher``).

Shape letters: ``T`` tokens of one sequence, ``R`` sampled tokens of one rollout, ``N`` rows laid
flat, ``K`` top-k, ``H`` hidden width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np

from rock_opd.config import TeacherConfig
from rock_opd.errors import ConfigError, DataError, PlacementError
from rock_opd.types import Rollout, RowRequest, TeacherRows, TeacherScores


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
    """One way to get a teacher's rows."""

    def prefill(self, prefills: list[Prefill]) -> list[tuple[Rows, np.ndarray | None]]:
        """Rows and entropy (float32 [R], None when it cannot be known) of each; R may be 0."""

    def payload(self, rows: Rows, targets: np.ndarray) -> TeacherRows:
        """What travels, from rows already cut to those asked for."""


class ParkingTeacher:
    """A teacher engine around a scorer: the contract that ``TeacherWorker`` forwards to."""

    def __init__(
        self,
        cfg: TeacherConfig,
        scorer: Scorer,
        *,
        num_real_ids: int,
        max_model_len: int,
        group_tokens: int,
    ) -> None:
        """
        Args:
            num_real_ids: the width that teacher and student share.
            max_model_len: longest sequence in tokens, plus 1 (a served vLLM samples a token).
            group_tokens: sequences go to the scorer in groups of about so many tokens.
        """
        self._scorer = scorer
        self._group_tokens = group_tokens
        self._num_real_ids = num_real_ids
        self._max_tokens = max_model_len - 1
        self._park_bytes = cfg.park_bytes
        self._parked = ParkBuffer(cfg.park_bytes)
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
        """Leaves the GPU to another role. Parked rows live in host memory and can be fetched
        meanwhile. Nothing to do for a teacher that has no GPU here."""

    def wake(self) -> None:
        """Undoes ``sleep``."""

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


def check_tail(cfg: TeacherConfig, num_real_ids: int) -> None:
    """Refuses a ``teacher.top_k`` that leaves no tail.

    Raises:
        ConfigError: as many top-k entries as ids, or more.
    """
    if cfg.payload == "topk_tail" and cfg.top_k >= num_real_ids:
        raise ConfigError(
            f"teacher.top_k={cfg.top_k} leaves no tail of {num_real_ids} ids; lower it"
            + (
                ""
                if cfg.engine != "hidden"
                else ", or use teacher.payload=hidden for the full vocabulary"
            )
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
