"""A server that answers as vLLM's does, from a bigram table, and can be told to misbehave."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

import numpy as np

NAME = "bigram"
MAX_MODEL_LEN = 400
MAX_LOGPROBS = 20


def bigram(num_ids: int) -> np.ndarray:
    """float64 [V, V]: log p(next | this)."""
    logits = np.random.default_rng(0).normal(0.0, 2.0, (num_ids, num_ids))
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


class Reply(Exception):
    """What goes out instead of the right answer."""

    def __init__(
        self,
        status: int = 200,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        *,
        missing: int = 0,
        byte_every_s: float = 0.0,
    ) -> None:
        """
        Args:
            missing: bytes announced and never sent.
            byte_every_s: pause before each byte.
        """
        super().__init__(status)
        self.status, self.body, self.headers = status, body, headers or {}
        self.missing, self.byte_every_s = missing, byte_every_s


class BigramServer:
    """Listens on loopback until ``stop``; ``fault(kind, answer, request)`` may change an answer or
    raise a ``Reply``, kind being models, score or text."""

    def __init__(self, log_p: np.ndarray, tokenizer: Any, *, key: str = "", port: int = 0) -> None:
        self.log_p, self.tokenizer, self.key = log_p, tokenizer, key
        self.fault: Callable[[str, dict, dict], None] | None = None
        self.pause_s = 0.0
        self.requests: list[tuple[str, dict[str, str], dict]] = []
        self.num_connections = self.in_flight = self.most_in_flight = 0
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self._http.daemon_threads = True
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._open: list[Any] = []
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Nothing listens any more, and open connections break."""
        self._http.shutdown()
        self._http.server_close()
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def num_scored(self) -> int:
        return sum(isinstance(body.get("prompt"), list) for _, _, body in self.requests)

    def answer(self, path: str, headers: dict[str, str], body: dict) -> dict:
        if self.key and headers.get("Authorization") != f"Bearer {self.key}":
            raise Reply(401, b'{"error": "Unauthorized"}')
        if path == "/v1/models":
            kind = "models"
            answer = {"data": [{"id": NAME, "max_model_len": MAX_MODEL_LEN}]}
        elif path != "/v1/completions":
            raise Reply(404, b'{"detail": "Not Found"}')
        elif isinstance(body["prompt"][0], str):
            kind = "text"
            answer = {
                "choices": [
                    {"index": i, "prompt_token_ids": self.tokenizer(text)["input_ids"]}
                    for i, text in enumerate(body["prompt"])
                ][::-1]
            }
        else:
            kind, answer = "score", self._score(body)
        if self.fault is not None:
            self.fault(kind, answer, body)
        return answer

    def _score(self, body: dict) -> dict:
        if body["model"] != NAME:
            message = f"The model `{body['model']}` does not exist."
            raise Reply(404, json.dumps({"error": {"message": message}}).encode())
        ids, k = body["prompt"], body["prompt_logprobs"]
        if k > MAX_LOGPROBS:
            message = (
                f"Requested prompt logprobs of {k}, which is greater than max allowed: "
                f"{MAX_LOGPROBS}"
            )
            raise Reply(400, json.dumps({"error": {"message": message}}).encode())
        table: list[dict | None] = [None]
        for before, own in pairwise(ids):
            row = self.log_p[before]
            best = np.argsort(-row)[:k].tolist()
            chosen = dict.fromkeys([own, *best])  # its own first, as vLLM does
            table.append(
                {
                    str(i): {
                        "logprob": row[i],
                        "rank": int((row >= row[i]).sum()),
                        "decoded_token": "x",
                    }
                    for i in chosen
                }
            )
        return {"choices": [{"index": 0, "text": "", "prompt_logprobs": table}]}

    def _handler(server) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self) -> None:
                super().setup()
                with server._lock:
                    server.num_connections += 1
                    server._open.append(self.connection)

            def log_message(self, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                self.reply({})

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                self.reply(json.loads(self.rfile.read(length)))

            def reply(self, body: dict) -> None:
                headers = dict(self.headers)
                with server._lock:
                    server.requests.append((self.path, headers, body))
                    server.in_flight += 1
                    server.most_in_flight = max(server.most_in_flight, server.in_flight)
                try:
                    time.sleep(server.pause_s)
                    answer = server.answer(self.path, headers, body)
                    reply = Reply(body=json.dumps(answer).encode())
                except Reply as other:
                    reply = other
                finally:
                    with server._lock:
                        server.in_flight -= 1
                self.send_response(reply.status)
                self.send_header("Content-Length", str(len(reply.body) + reply.missing))
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                try:
                    if reply.byte_every_s:
                        for i in range(len(reply.body)):
                            self.wfile.write(reply.body[i : i + 1])
                            time.sleep(reply.byte_every_s)
                    else:
                        self.wfile.write(reply.body)
                except OSError:
                    self.close_connection = True
                if reply.missing:
                    self.close_connection = True

        return Handler
