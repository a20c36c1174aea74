"""Scores sequences with a teacher that others serve: OpenAI-compatible vLLM servers.

Asked is ``/v1/completions`` with token ids and ``prompt_logprobs``; the numbers are those of
``teacher.engine=prompt_logprobs``, read by the same function, but for a model with padded
vocabulary rows: a server cannot be told to cut them before its softmax. They are then left out of
the table, and their mass stays in its tail. What a server says is checked before it is used.

Shape letters: ``T`` tokens of one sequence, ``R`` sampled tokens of one rollout, ``K`` top-k.
"""

from __future__ import annotations

import contextlib
import math
import re
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from rock_opd.config import TeacherConfig
from rock_opd.engines.http_client import Replica, Replicas, read_key
from rock_opd.engines.parking import ParkingTeacher, Prefill, Rows, check_tail
from rock_opd.engines.prompt_logprobs import FlatTable, read_prompt_logprobs, rows_payload
from rock_opd.errors import ConfigError, DataError, ModelError, RockOPDError
from rock_opd.models import load_config, load_tokenizer, vocabulary_width
from rock_opd.types import TeacherRows

CHECK_TIMEOUT_S = 30.0
"""What one question of ``check_server`` may take."""
MAX_REPLICA_GAP = 0.5
"""Nats, on average over a few tokens: beyond it two replicas serve different models. Equal models
differ by rounding, in bf16 by a few hundredths."""
TEXTS = (
    "The quick brown fox jumps over 13 lazy dogs.",
    " naïve façade — 你好, мир 🙂",
    "def f(x):\n\treturn [x ** 2, {'a': 1}]\n\n",
)
"""What a server's tokenizer and ours must cut alike."""
SPARE_ENTRIES = 8
"""Entries asked beyond ``teacher.top_k`` of a model with padding, which may be among the best."""
_MAX_POSITIVE = 1e-4
"""Nats above 0 that rounding may give a log-probability, and mass above 1."""
_ENTRY_BYTES = 1024
"""No entry of an answer is longer: id, log-probability, rank and the token's text."""


class HttpTeacher(ParkingTeacher):
    """Asks servers for scores. Needs no GPU and little CPU; several may share the servers."""

    def __init__(self, cfg: TeacherConfig, *, num_real_ids: int, max_model_len: int) -> None:
        """Waits up to ``teacher.retry_for_s`` for servers that do not answer yet, and checks each.

        Args:
            num_real_ids: the width that teacher and student share.
            max_model_len: longest sequence in tokens, plus 1 (the server samples a token).

        Raises:
            ConfigError: no key where one is named, more top-k entries than a server gives.
            ModelError: a server that does not have the model, reads too short sequences, or has
                another tokenizer; replicas that serve different models.
            RoleError: a server that cannot be reached, or answers with what cannot be used.
        """
        check_tail(cfg, num_real_ids)
        replicas = _replicas(cfg, timeout_s=cfg.request_timeout_s)
        probe = _probe(cfg, num_real_ids)
        stop = threading.Event()

        def look(replica: Replica) -> _Served:
            asked = Replicas([replica], retry_for_s=cfg.retry_for_s)
            return _inspect(cfg, asked, probe, max_model_len=max_model_len, stop=stop)

        with ThreadPoolExecutor(len(replicas)) as pool:
            found = [_outcome(future) for future in [pool.submit(look, r) for r in replicas]]
        served = [answer for answer in found if isinstance(answer, _Served)]
        faults = [answer for answer in found if isinstance(answer, RockOPDError)]
        faults += _disagreements(served)
        if faults:
            raise type(faults[0])("\n".join(map(str, faults)))
        self.notices = tuple(notice for one in served for notice in one.notices)
        """What could not be told of a server."""
        super().__init__(
            cfg,
            HttpScorer(
                Replicas(replicas, retry_for_s=cfg.retry_for_s), served[0].name, probe.table
            ),
            num_real_ids=num_real_ids,
            max_model_len=max_model_len,
            group_tokens=1 << 62,  # the servers make their own batches
        )


class HttpScorer:
    """One request per sequence, as many at once as the servers are to be given."""

    def __init__(self, replicas: Replicas, name: str, table: Table) -> None:
        self._replicas, self._name, self._table = replicas, name, table
        self._pool = ThreadPoolExecutor(replicas.width, thread_name_prefix="teacher-request")

    def prefill(self, prefills: list[Prefill]) -> list[tuple[Rows, np.ndarray | None]]:
        stop = threading.Event()
        futures = [self._pool.submit(self._ask, prefill, stop) for prefill in prefills]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        failed = [future for future in done if future.exception() is not None]
        if failed:
            stop.set()
            for future in futures:
                future.cancel()
            raise failed[0].exception()
        return [(future.result(), None) for future in futures]

    def payload(self, rows: Rows, targets: np.ndarray) -> TeacherRows:
        return rows_payload(rows, self._table.k)

    def _ask(self, prefill: Prefill, stop: threading.Event) -> Rows:
        if not len(prefill.positions):
            nothing = FlatTable([], [], [], [])
            return read_prompt_logprobs(
                nothing, prefill.token_ids, prefill.positions, k=self._table.k
            )
        answer, replica = _complete(self._replicas, self._name, prefill, self._table, stop)
        with _named(replica, f"rollout '{prefill.key}'"):
            return read_answer(answer, prefill, self._table)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Which log-probabilities are wanted of a position."""

    k: int
    """The most likely ones; 0: the token's own alone."""
    spare: int
    """Entries asked beyond ``k``, to stand in for padding."""
    num_real_ids: int
    """The width that teacher and student share: ids at or beyond it are padding."""

    @property
    def asked(self) -> int:
        return self.k + self.spare

    @staticmethod
    def of(cfg: TeacherConfig, num_real_ids: int) -> Table:
        k = cfg.top_k if cfg.payload == "topk_tail" else 0
        padding = load_config(cfg.model).vocab_size - num_real_ids
        spare = min(padding, SPARE_ENTRIES) if k else 0
        return Table(k=k, spare=spare, num_real_ids=num_real_ids)


def _complete(
    replicas: Replicas, name: str, prefill: Prefill, table: Table, stop: threading.Event
) -> tuple[Any, Replica]:
    """The completion that scores ``prefill``, and who gave it."""
    request = {
        "model": name,
        "prompt": prefill.token_ids.tolist(),
        "prompt_logprobs": table.asked,
        "max_tokens": 1,  # vLLM 0.31 refuses 0
        "temperature": 1.0,  # for servers that scale prompt log-probabilities too; vLLM does not
        "add_special_tokens": False,
    }
    max_bytes = (1 << 20) + len(prefill.token_ids) * (table.asked + 2) * _ENTRY_BYTES
    return replicas.ask("POST", "/v1/completions", request, max_bytes=max_bytes, stop=stop)


def read_answer(answer: Any, prefill: Prefill, table: Table) -> Rows:
    """Rows out of a server's answer: by id, nothing by place.

    Args:
        answer: decoded JSON, whatever it may be.

    Raises:
        DataError: another number of positions than tokens, a position without its own token or the
            most likely ones, more entries than asked, numbers that are no log-probabilities.
    """
    positions = _only_choice(answer).get("prompt_logprobs")
    num = len(prefill.token_ids)
    if not isinstance(positions, list):
        raise DataError("the answer has no prompt_logprobs; is the server a vLLM?")
    if len(positions) != num:
        raise DataError(f"prompt_logprobs of {len(positions)} positions, expected {num}")
    starts, ends = np.zeros(num, np.int64), np.zeros(num, np.int64)
    ids: list[int] = []
    logprobs: list[float] = []
    for t in prefill.positions.tolist():
        entries = _entries(positions[t], t, table.asked)
        real = [(token_id, value) for token_id, value in entries if token_id < table.num_real_ids]
        if len(real) < min(len(entries), table.k):
            raise DataError(
                f"position {t}: {len(entries) - len(real)} of the most likely ids lie beyond the "
                f"{table.num_real_ids} that teacher and student share: padding that a server does "
                "not cut; serve the model without it, or use another teacher.engine"
            )
        starts[t], ends[t] = len(ids), len(ids) + len(real)
        ids += [token_id for token_id, _ in real]
        logprobs += [value for _, value in real]
    flat = FlatTable(starts.tolist(), ends.tolist(), ids, logprobs)
    rows = read_prompt_logprobs(flat, prefill.token_ids, prefill.positions, k=table.k)
    if table.k and len(prefill.positions):
        mass = np.exp(rows.topk_logprobs.astype(np.float64)).sum(1)
        worst = int(mass.argmax())
        if mass[worst] > 1 + _MAX_POSITIVE * table.k:
            raise DataError(
                f"position {prefill.positions[worst]} gives its {table.k} most likely tokens a "
                f"probability of {mass[worst]:.4g} together: no log-probabilities of a softmax; "
                "serve with --logprobs-mode raw_logprobs"
            )
    return rows


def _only_choice(answer: Any) -> dict[str, Any]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise DataError("the answer is no completion (an object with one choice)")
    return choices[0]


def _entries(entry: Any, position: int, asked: int) -> list[tuple[int, float]]:
    """Id and log-probability of one position's entries."""
    if not isinstance(entry, dict) or not entry:
        raise DataError(f"position {position} has no log-probabilities")
    if len(entry) > asked + 1:
        raise DataError(
            f"position {position} has {len(entry)} entries, expected {asked} or {asked + 1}"
        )
    found = []
    for token_id, value in entry.items():
        number = value.get("logprob") if isinstance(value, dict) else value
        if not token_id.isdecimal() or isinstance(number, bool):
            raise DataError(f"position {position}: '{token_id}' is no token id")
        if not isinstance(number, int | float) or not (
            math.isfinite(number) and number <= _MAX_POSITIVE
        ):
            raise DataError(
                f"position {position} gives token {token_id} the log-probability {number}"
            )
        found.append((int(token_id), min(float(number), 0.0)))
    return found


@contextlib.contextmanager
def _named(replica: Replica, what: str) -> Any:
    """Says whose answer was wrong."""
    try:
        yield
    except DataError as error:
        raise replica.error(f"{what}: {error}") from None


# --- before the run -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Served:
    """What one server is."""

    replica: Replica
    name: str
    logprobs: np.ndarray
    """float32 [R]: what it says about the probe."""
    notices: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Probe:
    """A short text whose scores are asked of every server."""

    prefill: Prefill
    token_ids: tuple[list[int], ...]
    """Of each of ``texts``, as our tokenizer cuts it."""
    texts: tuple[str, ...]
    table: Table


def check_server(
    cfg: TeacherConfig,
    *,
    max_model_len: int | None = None,
    say: Callable[[str], None] = lambda line: None,
    doubt: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """What is wrong with the servers of ``teacher.urls``, a line each; empty: nothing.

    For ``rock-opd check``, and quick: asks each server once, waits for none, starts nothing. Call
    it where ``teacher.remote`` (engine http) holds, in a process that has the key's environment
    variable; it raises nothing. Found are servers that cannot be reached or refuse the key, a
    model they do not have, sequences they cannot read, a top-k beyond their limit, ids that mean
    something else, answers that are no log-probabilities, and replicas that disagree.

    Args:
        max_model_len: longest sequence on the teacher's side, plus 1 (as for ``TeacherWorker``);
            None: not checked.
        say: told what is well, a line each.
        doubt: told what could not be checked, and what is unwise.
    """
    timeout_s = min(cfg.request_timeout_s, CHECK_TIMEOUT_S)
    try:
        probe = _probe(cfg, None)
        replicas = _replicas(cfg, timeout_s=timeout_s)
    except RockOPDError as error:
        return [str(error)]
    problems, served = [], []
    for replica in replicas:
        asked = Replicas([replica], retry_for_s=0.0)
        try:
            found = _inspect(
                cfg, asked, probe, max_model_len=max_model_len or 0, stop=threading.Event()
            )
        except RockOPDError as error:
            problems.append(str(error))
            continue
        served.append(found)
        say(f"teacher server {replica.url} serves '{found.name}'")
        for notice in found.notices:
            doubt(notice)
    return problems + [str(error) for error in _disagreements(served)]


def _replicas(cfg: TeacherConfig, *, timeout_s: float) -> list[Replica]:
    key = read_key(cfg.api_key_env)
    width = max(1, cfg.max_concurrency // cfg.num_replicas)
    return [Replica(url, key=key, timeout_s=timeout_s, width=width) for url in cfg.urls]


def _probe(cfg: TeacherConfig, num_real_ids: int | None) -> _Probe:
    tokenizer = load_tokenizer(cfg.model)
    num_real_ids = num_real_ids or vocabulary_width(tokenizer)
    texts = TEXTS + ((f"a{tokenizer.eos_token}b",) if tokenizer.eos_token else ())
    token_ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
    sequence = [i for ids in token_ids for i in ids if i < num_real_ids] + [num_real_ids - 1]
    return _Probe(
        prefill=Prefill(
            key="probe",
            token_ids=np.array(sequence, np.int32),
            positions=np.arange(1, len(sequence)),
        ),
        token_ids=token_ids,
        texts=texts,
        table=Table.of(cfg, num_real_ids),
    )


def _inspect(
    cfg: TeacherConfig,
    asked: Replicas,
    probe: _Probe,
    *,
    max_model_len: int,
    stop: threading.Event,
) -> _Served:
    """What one server is, or the error that says why it cannot be the teacher."""
    (replica,) = asked.replicas
    answer, _ = asked.ask("GET", "/v1/models", None, max_bytes=1 << 24, stop=stop)
    name, limit = _served_model(cfg, replica, answer)
    notices = []
    if limit is None:
        notices.append(f"teacher server {replica.url} does not say how long a sequence it reads")
    elif limit < max_model_len:
        raise replica.error(
            f"reads at most {limit} tokens, the recipe needs {max_model_len} (prompt, response, "
            "teacher.prefix_tokens and 1); serve with a larger --max-model-len",
            ModelError,
        )
    prefill = probe.prefill
    if limit is not None and len(prefill.token_ids) >= limit:
        short = prefill.token_ids[: limit - 1]
        prefill = Prefill(key="probe", token_ids=short, positions=np.arange(1, len(short)))
    try:
        answer, _ = _complete(asked, name, prefill, probe.table, stop)
    except RockOPDError as error:
        if allowed := re.search(r"greater than max allowed: (\d+)", str(error)):
            spare = f" and {probe.table.spare} spare ones" if probe.table.spare else ""
            raise replica.error(
                f"gives at most {allowed[1]} log-probabilities, teacher.top_k is "
                f"{probe.table.k}{spare}; serve with --max-logprobs {probe.table.asked}, or lower "
                "it",
                ConfigError,
            ) from None
        raise
    with _named(replica, "a probe"):
        rows = read_answer(answer, prefill, probe.table)
    notices += _check_tokenizer(asked, replica, name, probe, stop)
    if replica_sends_key_in_clear(replica.url, cfg.api_key_env):
        notices.append(
            f"teacher server {replica.url}: the key travels unencrypted; use https, or a network "
            "that others cannot read"
        )
    return _Served(replica=replica, name=name, logprobs=rows.logprobs, notices=tuple(notices))


def _served_model(cfg: TeacherConfig, replica: Replica, answer: Any) -> tuple[str, int | None]:
    """Name of the teacher on the server, and its longest sequence."""
    listed = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(listed, list) or not all(
        isinstance(model, dict) and isinstance(model.get("id"), str) for model in listed
    ):
        raise replica.error("answered no list of models to /v1/models; is it a vLLM?")
    by_name = {model["id"]: model for model in listed}
    names = ", ".join(f"'{name}'" for name in by_name) or "none"
    if cfg.served_name is not None and cfg.served_name not in by_name:
        raise replica.error(
            f"does not serve '{cfg.served_name}' (teacher.served_name); it serves {names}",
            ModelError,
        )
    if cfg.served_name is None and len(by_name) != 1:
        raise replica.error(f"serves {names}: choose by teacher.served_name", ModelError)
    name = cfg.served_name or next(iter(by_name))
    limit = by_name[name].get("max_model_len")
    return name, limit if isinstance(limit, int) else None


def _check_tokenizer(
    asked: Replicas, replica: Replica, name: str, probe: _Probe, stop: threading.Event
) -> list[str]:
    """Whether text becomes the same ids there as here; a notice where it cannot be told."""
    body = {
        "model": name,
        "prompt": list(probe.texts),
        "max_tokens": 1,
        "add_special_tokens": False,
        "return_token_ids": True,
    }
    unknown = [
        f"teacher server {replica.url} does not tell how it cuts text: whether its ids mean what "
        "those of teacher.model mean could not be checked"
    ]
    try:
        answer, _ = asked.ask("POST", "/v1/completions", body, max_bytes=1 << 24, stop=stop)
    except RockOPDError:
        return unknown  # a server without a tokenizer refuses text
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != len(probe.texts):
        return unknown
    for choice in choices:
        theirs = choice.get("prompt_token_ids") if isinstance(choice, dict) else None
        index = choice.get("index") if isinstance(choice, dict) else None
        if not isinstance(theirs, list) or index not in range(len(probe.texts)):
            return unknown
        ours = probe.token_ids[index]
        if theirs != ours:
            raise replica.error(
                f"has another tokenizer than teacher.model: it reads {probe.texts[index]!r} as "
                f"{theirs[:8]} ..., ours as {ours[:8]} ...; the ids of a rollout would mean "
                "something else there",
                ModelError,
            )
    return []


def replica_sends_key_in_clear(url: str, api_key_env: str | None) -> bool:
    """Whether a key leaves this machine without encryption."""
    parts = urlsplit(url)
    local = parts.hostname in ("localhost", "::1") or (parts.hostname or "").startswith("127.")
    return api_key_env is not None and parts.scheme == "http" and not local


def _disagreements(served: list[_Served]) -> list[RockOPDError]:
    """Replicas whose words on the probe are those of different models."""
    faults = []
    for one, other in pairwise(served):
        num = min(len(one.logprobs), len(other.logprobs))
        gap = float(np.abs(one.logprobs[:num] - other.logprobs[:num]).mean()) if num else 0.0
        if one.name != other.name or gap > MAX_REPLICA_GAP:
            faults.append(
                ModelError(
                    f"teacher servers {one.replica.url} ('{one.name}') and {other.replica.url} "
                    f"('{other.name}') differ by {gap:.2g} nats on average: replicas must serve "
                    "one model under one name"
                )
            )
    return faults


def _outcome(future: Future[_Served]) -> _Served | RockOPDError:
    try:
        return future.result()
    except RockOPDError as error:
        return error
