"""The teacher behind HTTP: against a server that misbehaves on request, and against vLLM's own."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from rock_opd.config import TeacherConfig
from rock_opd.engines.http_client import PassingFault, Replica, Replicas, read_key
from rock_opd.engines.http_teacher import HttpTeacher, check_server
from rock_opd.errors import ConfigError, DataError, ModelError, RockOPDError, RoleError
from rock_opd.models import load_tokenizer
from rock_opd.recipe_file import build_recipe
from rock_opd.redact import Secret
from rock_opd.types import Rollout, RowRequest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from bigram_server import MAX_LOGPROBS, NAME, BigramServer, Reply, bigram
from own_code import with_own_code

ROOT = Path(__file__).parents[2]
WIDTH = 1024
K = 8
KEY = "sk-Tr0ub4dor-and-3"
PROMPT_LEN = 5
LENGTHS = (20, 150, 9, 64)


def rollout(i: int, num_tokens: int, num_ids: int = WIDTH) -> Rollout:
    """Given ids, of which all but the first 5 count as sampled."""
    return Rollout(
        prompt_id=f"p{i}",
        sample_idx=0,
        token_ids=np.random.default_rng(i).integers(3, num_ids, num_tokens).astype(np.int32),
        loss_mask=np.arange(num_tokens) >= PROMPT_LEN,
        logprobs=np.full(num_tokens, np.nan, np.float32),
        finish_reason="given",
        policy_version=-1,
        prompt_len=PROMPT_LEN,
    )


ROLLOUTS = [rollout(i, n) for i, n in enumerate(LENGTHS)]


def ask(rollouts: list[Rollout]) -> tuple[RowRequest, ...]:
    return tuple(RowRequest(key=r.key, rows=np.arange(len(r.positions))) for r in rollouts)


@pytest.fixture(scope="module")
def log_p() -> np.ndarray:
    return bigram(WIDTH)


@pytest.fixture
def serve(tiny_models: Path, log_p: np.ndarray) -> Iterator[Callable[..., BigramServer]]:
    tokenizer = load_tokenizer(str(tiny_models / "teacher"))
    servers: list[BigramServer] = []

    def start(**kwargs: object) -> BigramServer:
        servers.append(BigramServer(log_p, tokenizer, **kwargs))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def config(tiny_models: Path) -> Callable[..., TeacherConfig]:
    def build(*servers: BigramServer, **change: object) -> TeacherConfig:
        values = {
            "model": str(tiny_models / "teacher"),
            "engine": "http",
            "urls": tuple(server.url for server in servers),
            "payload": "topk_tail",
            "top_k": K,
            "request_timeout_s": 20.0,
            "retry_for_s": 0.0,
        }
        return TeacherConfig(**(values | change))

    return build


def teacher(cfg: TeacherConfig, *, num_real_ids: int = WIDTH) -> HttpTeacher:
    return HttpTeacher(cfg, num_real_ids=num_real_ids, max_model_len=301)


def expected(log_p: np.ndarray, given: Rollout) -> np.ndarray:
    """float64 [R, V]."""
    return log_p[given.token_ids[given.positions - 1]]


def check_scores(engine: HttpTeacher, log_p: np.ndarray) -> None:
    scores = engine.score(ROLLOUTS)
    assert [s.key for s in scores] == [r.key for r in ROLLOUTS]
    for score, given in zip(scores, ROLLOUTS, strict=True):
        own = expected(log_p, given)[np.arange(len(given.positions)), given.token_ids[PROMPT_LEN:]]
        np.testing.assert_allclose(score.logprobs, own, atol=1e-6)
        assert score.logprobs.dtype == np.float32 and score.entropy is None


# --- what a well-behaved server gives -------------------------------------------------------------


def test_scores_and_rows_are_the_servers_whatever_the_order_of_entries(serve, config, log_p):
    server = serve()
    engine = teacher(config(server))

    def shuffle(kind: str, answer: dict, request: dict) -> None:
        for choice in answer["choices"]:
            table = choice["prompt_logprobs"]
            table[1:] = [dict(sorted(row.items(), key=lambda e: hash(e[0]))) for row in table[1:]]

    server.fault = shuffle
    check_scores(engine, log_p)
    order = [ROLLOUTS[i] for i in (2, 0, 3, 1)]
    rows = engine.fetch(ask(order))
    best = np.sort(np.concatenate([expected(log_p, r) for r in order]))[:, : -K - 1 : -1]
    assert rows.kind == "topk_tail" and rows.topk_ids.shape == (len(best), K)
    np.testing.assert_allclose(rows.topk_logprobs, best, atol=1e-6)
    np.testing.assert_allclose(np.exp(rows.tail_logprob), 1 - np.exp(best).sum(1), atol=1e-5)
    with pytest.raises(DataError, match="no rows of rollout 'p0#0'"):
        engine.fetch(ask(ROLLOUTS[:1]))


def test_the_payload_sampled_asks_for_no_table_and_a_silent_rollout_for_nothing(
    serve, config, log_p
):
    server = serve()
    engine = teacher(config(server, payload="sampled"))
    check_scores(engine, log_p)
    rows = engine.fetch(ask(ROLLOUTS))
    assert rows.kind == "sampled" and rows.topk_ids is None
    assert server.requests[-1][2]["prompt_logprobs"] == 0
    num = len(server.requests)
    silent = Rollout(
        **{**vars(rollout(9, 30)), "loss_mask": np.zeros(30, bool)},
    )
    (score,) = engine.score([silent])
    assert score.logprobs.shape == (0,) and len(server.requests) == num
    assert engine.fetch(()).logprobs.shape == (0,) and engine.score([]) == []


def test_rows_that_did_not_fit_are_asked_again_and_counted(serve, config, log_p):
    server = serve()
    engine = teacher(config(server, park_bytes=4000))
    check_scores(engine, log_p)
    rows = engine.fetch(ask(ROLLOUTS))
    best = np.sort(np.concatenate([expected(log_p, r) for r in ROLLOUTS]))[:, : -K - 1 : -1]
    np.testing.assert_allclose(rows.topk_logprobs, best, atol=1e-6)
    assert engine.clear() > 0 and engine.clear() == 0


def test_ids_beyond_the_shared_width_are_left_out_and_stay_in_the_tail(serve, config, log_p):
    """As if the model's last 24 columns were padding, which a server cannot be told to cut."""
    server, real = serve(), WIDTH - 24
    engine = teacher(config(server), num_real_ids=real)
    given = rollout(1, 150, real)
    exact = expected(log_p, given)
    assert (np.argsort(-exact)[:, :K] >= real).any()  # some are among the best
    engine.score([given])
    rows = engine.fetch(ask([given]))
    best = np.sort(exact[:, :real])[:, : -K - 1 : -1]
    np.testing.assert_allclose(rows.topk_logprobs, best, atol=1e-6)
    np.testing.assert_allclose(np.exp(rows.tail_logprob), 1 - np.exp(best).sum(1), atol=1e-5)
    assert server.requests[-1][2]["prompt_logprobs"] == K + 8
    likely = log_p + np.where(np.arange(WIDTH) >= WIDTH - 10, 9.0, 0.0)
    server.log_p = likely - np.log(np.exp(likely).sum(1, keepdims=True))
    with pytest.raises(RoleError, match=r"position 5: (9|10) of the most likely ids lie beyond"):
        engine.score([given])


# --- what cannot be used: one line, at once -------------------------------------------------------


def rows_of(answer: dict) -> list:
    return answer["choices"][0]["prompt_logprobs"]


def own(answer: dict, request: dict, t: int) -> dict:
    return rows_of(answer)[t][str(request["prompt"][t])]


WRONG: dict[str, tuple[Callable[[dict, dict], object], str]] = {
    "nan": (
        lambda a, r: own(a, r, 7).update(logprob=math.nan),
        r"position 7 gives token \d+ the log-probability nan",
    ),
    "null": (
        lambda a, r: own(a, r, 7).update(logprob=None),
        r"position 7 gives token \d+ the log-probability None",
    ),
    "positive": (
        lambda a, r: own(a, r, 7).update(logprob=0.5),
        r"position 7 gives token \d+ the log-probability 0.5",
    ),
    "minus infinity": (
        lambda a, r: own(a, r, 7).update(logprob=-math.inf),
        r"position 7 gives token \d+ the log-probability -inf",
    ),
    "no softmax": (
        lambda a, r: [e.update(logprob=-0.1) for e in rows_of(a)[7].values()],
        r"position 7 gives its 8 most likely tokens a probability of 7.239 .*raw_logprobs",
    ),
    "one position more": (
        lambda a, r: rows_of(a).append(rows_of(a)[-1]),
        "prompt_logprobs of 21 positions, expected 20",
    ),
    "one position fewer": (
        lambda a, r: rows_of(a).pop(),
        "prompt_logprobs of 19 positions, expected 20",
    ),
    "a position is missing": (
        lambda a, r: rows_of(a).__setitem__(7, None),
        "position 7 has no log-probabilities",
    ),
    "another token": (
        lambda a, r: rows_of(a)[7].pop(str(r["prompt"][7])),
        "position 7 has log-probabilities of 8 ids, expected its own token",
    ),
    "too few entries": (
        lambda a, r: [rows_of(a)[7].popitem() for _ in range(2)],
        "position 7 has log-probabilities of 7 ids, expected its own token .* 8 most likely",
    ),
    "too many entries": (
        lambda a, r: rows_of(a)[7].update({"1": own(a, r, 7), "2": own(a, r, 7)}),
        "position 7 has 1[01] entries, expected 8 or 9",
    ),
    "a token's text for its id": (
        lambda a, r: rows_of(a)[7].update({" the": rows_of(a)[7].popitem()[1]}),
        "position 7: ' the' is no token id",
    ),
    "no table": (lambda a, r: a["choices"][0].pop("prompt_logprobs"), "has no prompt_logprobs"),
    "no choices": (lambda a, r: a.update(choices=[]), "no completion"),
    "a list": (lambda a, r: a.__setitem__("choices", [[]]), "no completion"),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_a_wrong_answer_stops_the_run_and_names_server_rollout_and_position(
    name: str, serve, config
):
    change, message = WRONG[name]
    server = serve()
    engine = teacher(config(server, retry_for_s=60.0))
    server.fault = lambda kind, answer, request: change(answer, request)
    num = len(server.requests)
    with pytest.raises(RoleError, match=message) as caught:
        engine.score(ROLLOUTS[:1])
    assert str(caught.value).startswith(f"teacher server {server.url}: rollout 'p0#0': ")
    assert "\n" not in str(caught.value)
    assert len(server.requests) == num + 1  # not tried again: it would be as wrong
    server.fault = None
    assert len(engine.score(ROLLOUTS)) == len(ROLLOUTS)  # and the engine is as it was


def reply(*args: object, **kwargs: object) -> Callable[[str, dict, dict], None]:
    def fault(kind: str, answer: dict, request: dict) -> None:
        raise Reply(*args, **kwargs)

    return fault


REFUSED = {
    "401": (reply(401, b'{"error":"Unauthorized"}'), RoleError, "answered 401 .*'Unauthorized'"),
    "403": (reply(403), RoleError, r"answered 403 .*\(nothing\); teacher.api_key_env"),
    "404": (reply(404, b"no"), ModelError, "answered 404: 'no'; see teacher.urls"),
    "400": (
        reply(400, b'{"error": {"message": "bad\\nwords"}}'),
        RoleError,
        "refused the request with 400: 'bad words'",
    ),
    "307": (reply(307, headers={"Location": "http://e"}), RoleError, "answered 307, sending on"),
    "no JSON": (reply(200, b"<html>hello"), RoleError, "answered no JSON .*'<html>hello'"),
    "endless": (reply(200, b"1" * (3 << 20)), RoleError, r"answered more than \d+ bytes"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_refusal_stops_the_run_at_once(name: str, serve, config):
    fault, kind, message = REFUSED[name]
    server = serve()
    engine = teacher(config(server, retry_for_s=60.0))
    server.fault = fault
    with pytest.raises(kind, match=message) as caught:
        engine.score(ROLLOUTS[:1])
    assert type(caught.value) is kind and "\n" not in str(caught.value)


PASSING = {
    "429": (reply(429, b"slow down"), "answered 429: 'slow down'"),
    "429 for an hour": (reply(429, headers={"Retry-After": "3600"}), "answered 429"),
    "500": (reply(500, b'{"error": {"message": "CUDA"}}'), "answered 500: 'CUDA'"),
    "503": (reply(503), r"answered 503: \(nothing\)"),
    "cut short": (reply(200, b'{"choices"', missing=5), "the connection broke"),
}


@pytest.mark.parametrize("name", list(PASSING))
def test_what_may_pass_is_tried_again_but_not_for_ever(name: str, serve, config, log_p):
    fault, message = PASSING[name]
    server = serve()
    engine = teacher(config(server, retry_for_s=1.5))
    server.fault = fault
    begin, num = time.monotonic(), len(server.requests)
    with pytest.raises(RoleError, match=rf"{message}.*\(\d+ tries, the last here; .*=1.5\)"):
        engine.score(ROLLOUTS[:1])
    assert 1.4 < time.monotonic() - begin < 10
    assert 2 <= len(server.requests) - num <= 8


def test_a_fault_that_passes_leaves_no_trace(serve, config, log_p):
    server = serve()
    engine = teacher(config(server, retry_for_s=60.0))
    left = [reply(500), reply(200, b"{", missing=9), reply(503), reply(429)]

    def sometimes(kind: str, answer: dict, request: dict) -> None:
        if left:
            left.pop()(kind, answer, request)

    server.fault = sometimes
    check_scores(engine, log_p)
    assert not left


def test_a_server_that_asks_to_wait_is_given_the_time(serve, config, log_p):
    server = serve()
    engine = teacher(config(server, retry_for_s=60.0))
    asked: list[float] = []

    def once(kind: str, answer: dict, request: dict) -> None:
        asked.append(time.monotonic())
        if len(asked) == 1:
            raise Reply(429, headers={"Retry-After": "2"})

    server.fault = once
    engine.score(ROLLOUTS[:1])
    assert asked[1] - asked[0] >= 2


def test_a_server_that_says_nothing_or_a_byte_at_a_time_is_not_waited_for(serve, config):
    server = serve()
    engine = teacher(config(server, request_timeout_s=1.0))
    server.fault = lambda *_: time.sleep(3)
    with pytest.raises(RoleError, match=r"no whole answer in 1 s \(1 tries"):
        engine.score(ROLLOUTS[:1])
    server.fault = reply(200, b" " * 100, byte_every_s=0.05)
    begin = time.monotonic()
    with pytest.raises(RoleError, match="no whole answer in 1 s"):
        engine.score(ROLLOUTS[:1])
    assert time.monotonic() - begin < 3


# --- several replicas -----------------------------------------------------------------------------


@contextlib.contextmanager
def raw_server(talk: Callable[[socket.socket], None]) -> Iterator[str]:
    """Reads a request and then says what ``talk`` says, which may be no HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    caller, _ = listening.accept()
                    with caller, contextlib.suppress(OSError):
                        caller.recv(1 << 16)
                        talk(caller)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def say_for_ever(first: bytes, then: bytes) -> Callable[[socket.socket], None]:
    def talk(caller: socket.socket) -> None:
        caller.sendall(first)
        for _ in range(200):  # 20 s
            caller.sendall(then)
            time.sleep(0.1)

    return talk


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
        (b"", b"H"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"0"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b" "),
    ],
    ids=["headers", "status", "continue", "chunk-length", "body"],
)
def test_the_time_limit_of_a_request_holds_for_all_of_it_however_slowly_it_is_answered(first, then):
    with raw_server(say_for_ever(first, then)) as url:
        server, started = Replica(url, key=None, timeout_s=1.0, width=1), time.monotonic()
        with pytest.raises(PassingFault, match="no whole answer in 1 s"):
            server.ask("GET", "/v1/models")
        assert 0.9 < time.monotonic() - started < 4


@pytest.mark.parametrize("after", ["9" * 5000, "9" * 300, "-5", "soon", "x\x1b[2J"])
def test_a_wait_that_no_clock_holds_is_a_fault_that_may_pass(after):
    said = f"HTTP/1.1 503 Busy\r\nRetry-After: {after}\r\nContent-Length: 0\r\n\r\n".encode()
    with raw_server(lambda caller: caller.sendall(said)) as url:
        server = Replica(url, key=None, timeout_s=5.0, width=1)
        with pytest.raises(PassingFault, match="answered 503"):
            server.ask("GET", "/v1/models")


def test_what_a_server_says_cannot_steer_a_terminal():
    body = b'{"error": "\x1b[31mred\x07 \xc2\x9b2J"}'
    said = b"HTTP/1.1 400 No\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    with raw_server(lambda caller: caller.sendall(said)) as url:
        server = Replica(url, key=None, timeout_s=5.0, width=1)
        with pytest.raises(RoleError) as caught:
            server.ask("GET", "/v1/models")
    assert str(caught.value).isprintable() and "\\x1b[31mred" in str(caught.value)


def test_requests_in_flight_are_bounded_and_share_their_connections(serve, config, log_p):
    servers = [serve(), serve()]
    engine = teacher(config(*servers, max_concurrency=3))
    for server in servers:
        server.pause_s = 0.03
        server.most_in_flight = 0
    many = [rollout(i, 12) for i in range(40)]
    engine.score(many)
    for server in servers:
        assert server.most_in_flight == 3
        assert 12 <= server.num_scored() <= 30
        assert server.num_connections <= 4  # one of them from the checks at the start
    shared = teacher(config(servers[0], max_concurrency=3, num_replicas=2))
    servers[0].most_in_flight = 0
    shared.score(many[:6])
    assert servers[0].most_in_flight == 1  # this process's part


def test_a_replica_that_goes_away_rests_and_the_other_takes_its_work(serve, config, log_p):
    gone, other = serve(), serve()
    engine = teacher(config(gone, other, max_concurrency=2, retry_for_s=60.0))
    check_scores(engine, log_p)
    gone.stop()
    before = other.num_scored()
    for _ in range(3):
        check_scores(engine, log_p)
    assert other.num_scored() == before + 3 * len(ROLLOUTS)
    assert engine._scorer._replicas.num_retries <= 6  # it is not asked for every rollout


def test_a_rested_replica_is_tried_with_one_request_and_then_works_again(serve):
    server = serve()
    replica = Replica(server.url, key=None, timeout_s=5, width=4)
    other = serve()
    replicas = Replicas(
        [replica, Replica(other.url, key=None, timeout_s=5, width=1)],
        retry_for_s=30.0,
        rest_after=1,
        rest_s=0.5,
    )

    def get() -> str:
        answer = replicas.ask("GET", "/v1/models", None, max_bytes=1 << 20, stop=threading.Event())
        return answer[1].url

    server.fault = reply(500)
    assert get() == other.url and len(server.requests) == 1
    assert [get() for _ in range(5)] == [other.url] * 5 and len(server.requests) == 1
    server.fault = None
    time.sleep(0.6)
    assert replica.num_failures == 1
    assert {get() for _ in range(4)} >= {other.url} and replicas.num_retries == 1
    with replicas._taken(replicas.replicas[1], threading.Event()) as first:
        assert first is replica  # the other one is passed over: it was just asked
        with replicas._taken(None, threading.Event()) as second:
            assert second is not replica  # one request only until it has answered
    with replicas._taken(replicas.replicas[1], threading.Event()) as again:
        again.ask("GET", "/v1/models")
        replicas._well(again)
    assert replica.num_failures == 0 and get() == server.url


def test_servers_that_all_go_away_end_the_run_in_one_line(serve, config):
    servers = [serve(), serve()]
    engine = teacher(config(*servers, retry_for_s=1.0))
    for server in servers:
        server.stop()
    begin = time.monotonic()
    with pytest.raises(RoleError, match=r"teacher server .* cannot be reached \(.*refused\)"):
        engine.score(ROLLOUTS)
    assert time.monotonic() - begin < 30


# --- what is looked at before the run -------------------------------------------------------------


def starts(kind: str, change: Callable[[dict], object]) -> Callable[[str, dict, dict], None]:
    def fault(asked: str, answer: dict, request: dict) -> None:
        if asked == kind:
            change(answer)

    return fault


AT_START = {
    "short": (
        starts("models", lambda a: a["data"][0].update(max_model_len=300)),
        {},
        ModelError,
        "reads at most 300 tokens, the recipe needs 301 .*--max-model-len",
    ),
    "two models": (
        starts("models", lambda a: a["data"].append({"id": "b"})),
        {},
        ModelError,
        "serves 'bigram', 'b': choose by teacher.served_name",
    ),
    "other model": (
        None,
        {"served_name": "qwen"},
        ModelError,
        "does not serve 'qwen' .*it serves 'bigram'",
    ),
    "no list": (
        starts("models", lambda a: a.pop("data")),
        {},
        RoleError,
        "no list of models to /v1/models",
    ),
    "top_k": (
        None,
        {"top_k": MAX_LOGPROBS + 1},
        ConfigError,
        "gives at most 20 log-probabilities, teacher.top_k is 21; serve with --max-logprobs 21",
    ),
    "tokenizer": (
        starts("text", lambda a: a["choices"][0]["prompt_token_ids"].insert(0, 1)),
        {},
        ModelError,
        "has another tokenizer than teacher.model: it reads 'a<|im_end|>b' as",
    ),
    "nan": (
        starts("score", lambda a: [e.update(logprob=math.nan) for e in rows_of(a)[3].values()]),
        {},
        RoleError,
        "a probe: position 3 gives token .* nan",
    ),
    "401": (reply(401), {}, RoleError, r"answered 401 \(no key was sent\)"),
}


@pytest.mark.parametrize("name", list(AT_START))
def test_a_server_that_cannot_be_the_teacher_is_refused_before_the_run(name: str, serve, config):
    fault, change, kind, message = AT_START[name]
    server = serve()
    server.fault = fault
    cfg = config(server, **change)
    with pytest.raises(kind, match=message):
        teacher(cfg)
    (line,) = check_server(cfg, max_model_len=301)
    assert re.search(message, line) and server.url in line and "\n" not in line


def test_check_names_every_server_that_is_not_there_and_what_is_well(serve, config):
    here, gone = serve(), serve()
    gone.stop()
    said: list[str] = []
    (line,) = check_server(
        config(gone, here, retry_for_s=600.0), max_model_len=301, say=said.append
    )
    assert line.startswith(f"teacher server {gone.url}: cannot be reached")
    assert said == [f"teacher server {here.url} serves '{NAME}'"]
    with pytest.raises(RoleError, match=gone.url):
        teacher(config(gone, here))


def test_a_server_that_starts_late_is_waited_for(serve, config, log_p):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threading.Timer(1.0, lambda: serve(port=port)).start()
    late = type("Late", (), {"url": f"http://127.0.0.1:{port}"})
    check_scores(teacher(config(late, retry_for_s=30.0)), log_p)


def test_a_server_without_a_tokenizer_is_accepted_and_said(serve, config, log_p):
    for fault in (
        starts("text", lambda a: [c.pop("prompt_token_ids") for c in a["choices"]]),
        lambda kind, *_: reply(400, b"no tokenizer")(kind, {}, {}) if kind == "text" else None,
    ):
        server = serve()
        server.fault = fault
        engine = teacher(config(server))
        assert "could not be checked" in engine.notices[0]
        check_scores(engine, log_p)


def test_a_remote_teacher_takes_no_gpu_and_a_quarter_of_a_cpu(serve, config):
    from rock_opd.actors.placement import lay_out

    student = {"model": "s", "dtype": "bfloat16"}
    for colocate in ("none", "all", "teacher_rollout"):
        recipe = build_recipe(
            {"data": {"prompts": "p"}, "student": student, "placement": {"colocate": colocate}},
            [
                *("teacher.model=t", "teacher.engine=http", "teacher.payload=topk_tail"),
                "teacher.urls=[http://a:1,https://b/v1]",
            ],
        )
        layout = lay_out(recipe, "cuda", ("student", "rollout", "teacher"))
        (seat,) = layout.seats["teacher"]
        assert dict(layout.bundles[seat.bundle].resources) == {"CPU": 0.25}
        assert "teacher" not in layout.shared


def test_replicas_that_serve_different_models_are_refused(serve, config):
    one, other = serve(), serve()
    other.log_p = np.roll(one.log_p, 1, axis=0)
    with pytest.raises(ModelError, match=r"differ by \d.* nats on average: replicas must serve"):
        teacher(config(one, other))


# --- the key --------------------------------------------------------------------------------------


def test_the_key_is_sent_and_never_shown(serve, config, log_p, monkeypatch):
    monkeypatch.setenv("TEACHER_API_KEY", KEY)
    server = serve(key=KEY)
    cfg = config(server, api_key_env="TEACHER_API_KEY")
    engine = teacher(cfg)
    check_scores(engine, log_p)
    assert all(h["Authorization"] == f"Bearer {KEY}" for _, h, _ in server.requests)
    echo = f'{{"error": {{"message": "key Bearer {KEY} ({KEY}) is wrong"}}}}'.encode()
    shown = [repr(cfg), repr(engine), repr(vars(engine._scorer._replicas.replicas[0]))]
    for status in (401, 400, 404, 500):
        server.fault = reply(status, echo)
        with pytest.raises(RockOPDError) as caught:
            engine.score(ROLLOUTS[:1])
        assert "***" in str(caught.value)
        shown += [str(caught.value), repr(caught.value), pickle.dumps(caught.value).decode("latin")]
        shown += check_server(cfg)
    assert not [text for text in shown if KEY in text]
    with pytest.raises(TypeError, match="does not leave its process"):
        pickle.dumps(read_key("TEACHER_API_KEY"))
    assert f"{Secret(KEY)} {Secret(KEY)!r}" == "*** ***"


def test_a_key_that_is_not_there_or_no_header_is_said_before_the_run(serve, config, monkeypatch):
    cfg = config(serve(), api_key_env="TEACHER_API_KEY")
    monkeypatch.delenv("TEACHER_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="variable TEACHER_API_KEY is not set on"):
        teacher(cfg)
    monkeypatch.setenv("TEACHER_API_KEY", "two\nlines")
    (line,) = check_server(cfg)
    assert "TEACHER_API_KEY is no line of printable ASCII" in line and "two" not in line


def test_a_redirect_does_not_carry_the_key_elsewhere(serve, config, monkeypatch):
    monkeypatch.setenv("TEACHER_API_KEY", KEY)
    thief, server = serve(), serve()
    engine = teacher(config(server, api_key_env="TEACHER_API_KEY"))
    server.fault = reply(307, headers={"Location": f"{thief.url}/v1/completions"})
    with pytest.raises(RoleError, match="sending on to another address"):
        engine.score(ROLLOUTS[:1])
    assert not thief.requests


# --- vLLM's own server ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vllm_server(tiny_models: Path, tmp_path_factory) -> Iterator[str]:
    """A real server of the tiny teacher on loopback, with a key; ended by its process group."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    environment = {
        **os.environ,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_API_KEY": KEY,  # not as an argument: those are in every process list
    }
    args = {
        "model": tiny_models / "teacher",
        "host": "127.0.0.1",
        "port": port,
        "served-model-name": "tiny",
        "dtype": "float32",
        "max-model-len": 512,
        "max-num-seqs": 8,
        "max-num-batched-tokens": 64,  # longer prompts are prefilled in chunks
        "kv-cache-memory-bytes": 64 << 20,
        "max-logprobs": K,
    }
    with log.open("w") as out:
        server = subprocess.Popen(
            [
                *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"),
                *(word for name, value in args.items() for word in (f"--{name}", str(value))),
            ],
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    replica = Replica(f"http://127.0.0.1:{port}", key=Secret(KEY), timeout_s=5, width=1)
    try:
        deadline = time.monotonic() + 400
        while True:
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            try:
                replica.ask("GET", "/v1/models")
                break
            except PassingFault:
                time.sleep(0.5)
        yield replica.url
        assert KEY not in log.read_text()
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)


@pytest.fixture
def served(vllm_server: str, tiny_models: Path, monkeypatch) -> Callable[..., TeacherConfig]:
    monkeypatch.setenv("TEACHER_API_KEY", KEY)

    def build(**change: object) -> TeacherConfig:
        values = {
            "model": str(tiny_models / "teacher"),
            "engine": "http",
            "urls": (vllm_server,),
            "api_key_env": "TEACHER_API_KEY",
            "payload": "topk_tail",
            "top_k": K,
            "request_timeout_s": 60.0,
            "retry_for_s": 0.0,
        }
        return TeacherConfig(**(values | change))

    return build


def test_a_real_server_gives_transformers_float64_numbers_and_those_of_the_engine_in_process(
    served, tiny_models: Path, start_engine
):
    from transformers import AutoModelForCausalLM

    engine = teacher(served())
    assert engine.notices == ()
    scores, rows = engine.score(ROLLOUTS), engine.fetch(ask(ROLLOUTS))
    model = AutoModelForCausalLM.from_pretrained(
        tiny_models / "teacher",
        dtype=torch.float64,
        experts_implementation="eager",  # the grouped product knows no float64
    )
    exact = []
    for given in ROLLOUTS:
        with torch.no_grad():
            logits = model(torch.from_numpy(given.token_ids.astype(np.int64))[None]).logits[0]
        exact.append(logits[given.positions - 1].log_softmax(-1).numpy())
    for score, given, log_p in zip(scores, ROLLOUTS, exact, strict=True):
        own = log_p[np.arange(len(log_p)), given.token_ids[given.positions]]
        np.testing.assert_allclose(score.logprobs, own, atol=1e-4)
    best = np.sort(np.concatenate(exact))[:, : -K - 1 : -1]
    np.testing.assert_allclose(np.sort(rows.topk_logprobs)[:, ::-1], best, atol=1e-4)
    np.testing.assert_allclose(np.exp(rows.tail_logprob), 1 - np.exp(best).sum(1), atol=1e-4)
    inside = start_engine(
        "rock_opd.engines.vllm_teacher:TeacherEngine",
        TeacherConfig(
            model=str(tiny_models / "teacher"),
            engine="prompt_logprobs",
            payload="topk_tail",
            top_k=K,
            max_batched_tokens=64,
        ),
        dtype="float32",
        device="cpu",
        num_real_ids=WIDTH,
        max_model_len=301,
    )
    for ours, theirs in zip(inside.call("score", ROLLOUTS), scores, strict=True):
        np.testing.assert_allclose(theirs.logprobs, ours.logprobs, atol=2e-5)
    local = inside.call("fetch", ask(ROLLOUTS))
    np.testing.assert_array_equal(np.sort(rows.topk_ids), np.sort(local.topk_ids))
    np.testing.assert_allclose(rows.tail_logprob, local.tail_logprob, atol=2e-5)


def test_a_real_server_refuses_what_it_cannot_do_and_we_say_what_to_change(
    served, monkeypatch, tiny_models
):
    for change, message in (
        ({"top_k": K + 1}, f"gives at most {K} log-probabilities, teacher.top_k is {K + 1}"),
        ({"served_name": "large"}, "does not serve 'large' .*it serves 'tiny'"),
        ({"api_key_env": None}, r"answered 401 \(no key was sent\): 'Unauthorized'"),
    ):
        (line,) = check_server(served(**change), max_model_len=301)
        assert re.search(message, line), line
    (line,) = check_server(served(), max_model_len=513)
    assert "reads at most 512 tokens, the recipe needs 513" in line
    monkeypatch.setenv("TEACHER_API_KEY", "sk-someone-elses-key")
    (line,) = check_server(served())
    assert "answered 401 (with the key that was sent)" in line and "someone" not in line


@dataclass(frozen=True)
class Run:
    """A finished run, and what was seen of it."""

    folder: Path
    output: str
    listened: set[tuple[str, str]]
    """Address and program of every socket that a process of the run listened on."""
    own_code_ran: bool


@pytest.fixture(scope="module")
def finished(vllm_server: str, tiny_models: Path, tmp_path_factory) -> Run:
    """Two steps with the server as the teacher, and a student that comes with code of its own."""
    folder = tmp_path_factory.mktemp("run")
    student, mark = with_own_code(tiny_models / "student", folder)
    command = [
        *(sys.executable, "-m", "rock_opd", "train", str(ROOT / "recipes" / "debug_cpu.yaml")),
        "run.name=remote",
        f"run.dir={folder}",
        "run.num_steps=2",
        f"data.prompts={tiny_models / 'prompts.jsonl'}",
        f"student.model={student}",
        "student.trust_remote_code=true",
        f"teacher.model={tiny_models / 'teacher'}",
        "teacher.engine=http",
        f"teacher.urls=[{vllm_server}]",
        "teacher.api_key_env=TEACHER_API_KEY",
        "teacher.payload=topk_tail",
        f"teacher.top_k={K}",
        "eval.problems=null",
        "eval.every=0",
        "eval.num_heldout=0",
        "log.occurrences=true",
    ]
    environment = {
        **os.environ,
        "TEACHER_API_KEY": KEY,
        "HF_MODULES_CACHE": str(folder / "modules"),
        "RAY_TMPDIR": tempfile.mkdtemp(),  # a socket's path must be short
        "PYTHONPATH": str(ROOT),
    }
    listened: set[tuple[str, str]] = set()
    with (folder / "output").open("w") as out:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT
        )
    deadline = time.monotonic() + 600
    while process.poll() is None and time.monotonic() < deadline:
        listened |= listening(process.pid)
        time.sleep(0.5)
    process.kill()
    output = (folder / "output").read_text()
    assert process.wait() == 0, output[-3000:]
    shutil.move(environment["RAY_TMPDIR"], folder / "ray")
    return Run(folder, output, listened, mark.exists())


def listening(pid: int) -> set[tuple[str, str]]:
    found = set()
    with contextlib.suppress(psutil.Error):
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                for line in process.net_connections("inet"):
                    if line.status == psutil.CONN_LISTEN:
                        found.add((line.laddr.ip, process.name()))
    return found


def test_a_run_with_a_remote_teacher_ends_well(finished: Run):
    run = finished.folder / "remote"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(0 < row["train/kl_mean"] < 10 for row in rows)
    assert finished.own_code_ran  # student.trust_remote_code reached every role
    assert (run / "model" / "own.py").exists()  # what is saved comes with its code


def test_the_servers_key_is_in_no_file_of_the_run_nor_in_its_output(finished: Run):
    assert "api_key_env: TEACHER_API_KEY" in (finished.folder / "remote/config.yaml").read_text()
    files = [file for file in finished.folder.rglob("*") if file.is_file()]
    assert len([file for file in files if "ray" in file.parts]) > 20
    assert not [file for file in files if KEY.encode() in file.read_bytes()]


def test_a_run_of_its_own_listens_on_loopback_alone(finished: Run):
    assert len({program for _, program in finished.listened}) >= 3
    assert {ip for ip, _ in finished.listened} <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
