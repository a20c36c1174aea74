"""JSON over HTTP from several replicas of one server: bounded, tried again, and spread.

Connections, their reuse, back-off with jitter and the reading of ``Retry-After`` are urllib3's.
Here: which replica is asked, when one rests, and what a fault means. A request is never sent on to
another address than the one the recipe names, and its key is in no message.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import urllib3
import urllib3.connection
from urllib3.exceptions import HTTPError, InvalidHeader, LocationParseError
from urllib3.util import Retry, Timeout

from rock_opd.errors import ConfigError, ModelError, RockOPDError, RoleError
from rock_opd.redact import HIDDEN, Secret, redact

CONNECT_TIMEOUT_S, CUT_AGAIN_S = 10.0, 0.1
MAX_BACKOFF_S = 30.0
_PASSING = {408, 425, 429}
"""Statuses that ask to try again, besides all of 500 and above."""
_NUM_QUOTED = 300
"""Characters of a server's answer that a message quotes."""


class PassingFault(Exception):
    """A request that failed in a way that may pass: to be tried again, here or elsewhere."""

    def __init__(self, text: str, retry_after_s: float = 0.0) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


def read_key(name: str | None) -> Secret | None:
    """The key in the environment variable of that name.

    Raises:
        ConfigError: not set in this process, or nothing that a header can hold.
    """
    if name is None:
        return None
    value = os.environ.get(name, "").strip()
    if not value or not value.isascii() or not value.isprintable():
        fault = "not set" if not value else "no line of printable ASCII"
        raise ConfigError(
            f"teacher.api_key_env: environment variable {name} is {fault} on {socket.gethostname()}"
            ", where the teacher's servers are asked from; set it there before Ray starts"
        )
    return Secret(value)


class _Asking(threading.local):
    """What the request of this thread is being answered on, for whoever cuts it."""

    request: _Request | None = None


_ASKING = _Asking()


class _Request:
    """One request, and its socket once there is one."""

    def __init__(self) -> None:
        self.connection: Any = None
        self.socket: socket.socket | None = None

    def cut(self) -> None:
        """Ends what reads and writes on the socket, in whatever thread."""
        found = self.socket or getattr(self.connection, "sock", None)
        if found is not None:
            with suppress(OSError):  # it is closed, or a handshake has it
                socket.socket.shutdown(found, socket.SHUT_RDWR)


class _Cuttable:
    """A connection that tells the request of its thread which socket it uses.

    A time limit of urllib3 2 (and of a socket) is that of one read: a server that sends its headers
    byte by byte, or ``100 Continue`` without end, never exceeds it. Can go when urllib3 has a limit
    on the whole request.
    """

    def connect(self) -> None:
        if _ASKING.request is not None:
            _ASKING.request.connection = self
        super().connect()  # type: ignore[misc]

    def getresponse(self) -> Any:
        if _ASKING.request is not None:
            _ASKING.request.socket = self.sock  # type: ignore[attr-defined]
        return super().getresponse()  # type: ignore[misc]


class _HTTPConnection(_Cuttable, urllib3.connection.HTTPConnection):
    pass


class _HTTPSConnection(_Cuttable, urllib3.connection.HTTPSConnection):
    pass


_CONNECTIONS = {"http": _HTTPConnection, "https": _HTTPSConnection}


@contextmanager
def _cut_after(limit_s: float) -> Iterator[Callable[[], bool]]:
    """Cuts the request that this thread makes inside when it takes longer.

    Yields:
        Whether it was.
    """
    request, done, was_cut = _Request(), threading.Event(), threading.Event()

    def watch() -> None:
        if done.wait(limit_s):
            return
        was_cut.set()
        request.cut()
        while not done.wait(CUT_AGAIN_S):  # it may just have been connecting
            request.cut()

    watcher = threading.Thread(target=watch, name="request-limit", daemon=True)
    watcher.start()
    _ASKING.request = request
    try:
        yield was_cut.is_set
    finally:
        _ASKING.request = None
        done.set()
        watcher.join()


class Replica:
    """One server. Several threads may ask it at once; it keeps as many connections."""

    def __init__(self, url: str, *, key: Secret | None, timeout_s: float, width: int) -> None:
        """
        Args:
            width: requests in flight at once.
        """
        self.url = url.rstrip("/")
        self.width = width
        self._key = key
        self._timeout_s = timeout_s
        path = urlsplit(self.url).path.rstrip("/")
        self._prefix = path.removesuffix("/v1")
        try:
            self._pool = urllib3.connection_from_url(self.url, maxsize=width)
            self._pool.ConnectionCls = _CONNECTIONS[self._pool.scheme]
        except LocationParseError:
            raise ConfigError(f"teacher.urls: '{redact(url)}' is no address") from None
        self.num_in_flight = 0
        self.num_failures = 0
        """In a row."""
        self.rests_until = 0.0
        """On the monotonic clock."""

    def ask(self, method: str, path: str, body: Any = None, *, max_bytes: int = 1 << 24) -> Any:
        """The answer to one request, tried once: decoded JSON.

        Args:
            path: from ``/v1`` on.

        Raises:
            PassingFault: no connection, no answer in time, one cut short, or a status that asks to
                try again.
            RoleError, ModelError: an answer that will not be another one next time.
        """
        status, data, retry_after_s = self._exchange(method, path, body, max_bytes)
        if status in _PASSING or status >= 500:
            raise PassingFault(f"answered {status}: {self._quote(data)}", retry_after_s)
        if status != 200:
            raise self._refusal(status, data)
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise self.error(f"answered no JSON to {path}: {self._quote(data)}") from None

    def error(self, text: str, kind: type[RockOPDError] = RoleError) -> RockOPDError:
        """An error that names this server, without its key."""
        return kind(f"teacher server {self.url}: {self._clean(text)}")

    def _exchange(
        self, method: str, path: str, body: Any, max_bytes: int
    ) -> tuple[int, bytes, float]:
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key.reveal()}"
        timeout = Timeout(connect=min(CONNECT_TIMEOUT_S, self._timeout_s), read=self._timeout_s)
        try:
            with _cut_after(self._timeout_s) as was_cut:
                answer = self._send(method, path, body, headers, timeout, max_bytes)
                if not was_cut():
                    return answer
        except (HTTPError, OSError, ValueError) as error:
            if not was_cut():
                if not isinstance(error, HTTPError | OSError):
                    raise
                raise PassingFault(self._clean(_cause(error, self._timeout_s))) from None
        raise PassingFault(f"no whole answer in {self._timeout_s:g} s")

    def _send(
        self,
        method: str,
        path: str,
        body: Any,
        headers: dict[str, str],
        timeout: Timeout,
        max_bytes: int,
    ) -> tuple[int, bytes, float]:
        response = self._pool.request(
            method,
            f"{self._prefix}{path}",
            body=None if body is None else json.dumps(body),
            headers=headers,
            timeout=timeout,
            retries=False,
            redirect=False,
            preload_content=False,
        )
        try:
            data = bytearray()
            while part := response.read1(1 << 20):
                data += part
                if len(data) > max_bytes:
                    raise self.error(f"answered more than {max_bytes} bytes to {path}")
        except BaseException:
            response.close()  # half read: the connection cannot serve another request
            raise
        finally:
            response.release_conn()
        return response.status, bytes(data), self._retry_after(response)

    def _retry_after(self, response: Any) -> float:
        try:
            return Retry().get_retry_after(response) or 0.0
        except (InvalidHeader, ValueError, OverflowError):  # such as a number of 5000 digits
            return 0.0

    def _refusal(self, status: int, data: bytes) -> RockOPDError:
        said = self._quote(data)
        if status == 401 or status == 403:
            given = "no key was sent" if self._key is None else "with the key that was sent"
            return self.error(
                f"answered {status} ({given}): {said}; teacher.api_key_env names the environment "
                "variable that holds the key"
            )
        if status == 404:
            return self.error(
                f"answered 404: {said}; see teacher.urls (without a path, or up to /v1) and "
                "teacher.served_name",
                ModelError,
            )
        if 300 <= status < 400:
            return self.error(
                f"answered {status}, sending on to another address: name that one in teacher.urls"
            )
        return self.error(f"refused the request with {status}: {said}")

    def _quote(self, data: bytes) -> str:
        """The server's own words, on one line and cut."""
        text = data[: 16 * _NUM_QUOTED].decode("utf-8", "replace")
        try:
            answer = json.loads(data) if len(data) < 1 << 20 else None
            error = answer.get("error", answer) if isinstance(answer, dict) else None
            text = error if isinstance(error, str) else str(error["message"])
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        text = " ".join(text.split())
        cut = text if len(text) <= _NUM_QUOTED else text[:_NUM_QUOTED] + " ..."
        return self._clean(f"'{cut}'" if cut else "(nothing)")

    def _clean(self, text: str) -> str:
        if self._key is not None:
            text = text.replace(self._key.reveal(), HIDDEN)
        text = redact(text)  # a server's words: no escapes that steer a terminal
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _cause(error: Exception, timeout_s: float) -> str:
    """Why there was no answer, without the objects that urllib3 prints."""
    name = type(error).__name__
    if name == "ReadTimeoutError":
        return f"no whole answer in {timeout_s:g} s"
    if name in ("ConnectTimeoutError", "NewConnectionError", "NameResolutionError"):
        return f"cannot be reached ({str(error).rpartition(': ')[2]})"
    if name == "SSLError":
        return f"cannot be trusted ({error})"
    return f"the connection broke ({str(error).splitlines()[0] if str(error) else name})"


class Replicas:
    """Several servers of one model: each request goes to the least busy one that is not resting."""

    def __init__(
        self,
        replicas: list[Replica],
        *,
        retry_for_s: float,
        backoff_s: float = 0.5,
        rest_after: int = 3,
        rest_s: float = 10.0,
    ) -> None:
        """
        Args:
            retry_for_s: how long a request is tried again after its first failure.
            backoff_s: the second wait; each later one is twice as long, with as much jitter.
            rest_after: failures in a row after which a replica rests, if there are others. It is
                then tried with one request, and works again when that succeeds.
            rest_s: for how long.
        """
        self.replicas = replicas
        self._retry_for_s = retry_for_s
        self._backoff = Retry(
            total=None,
            backoff_factor=backoff_s / 2,
            backoff_jitter=backoff_s,
            backoff_max=MAX_BACKOFF_S,
        )
        self._rest_after, self._rest_s = rest_after, rest_s
        self._changed = threading.Condition()
        self.num_retries = 0
        """Requests sent once more, since the start."""

    @property
    def width(self) -> int:
        """Requests in flight at once, over all replicas."""
        return sum(replica.width for replica in self.replicas)

    def ask(
        self, method: str, path: str, body: Any, *, max_bytes: int, stop: threading.Event
    ) -> tuple[Any, Replica]:
        """The answer and who gave it; waits for a replica, and tries again what may pass.

        Args:
            stop: ends all waiting, because another request has failed for good.

        Raises:
            RoleError, ModelError: as ``Replica.ask``; or what may pass did not, in
                ``retry_for_s``.
        """
        retry, last, give_up = self._backoff, None, None
        while True:
            with self._taken(last, stop) as replica:
                try:
                    answer = replica.ask(method, path, body, max_bytes=max_bytes)
                except PassingFault as error:
                    fault = error
                else:
                    self._well(replica)
                    return answer, replica
                now = time.monotonic()
                give_up = give_up if give_up is not None else now + self._retry_for_s
                self._unwell(replica, fault.retry_after_s, give_up - now)
            last = replica
            retry = retry.increment(method, path)
            if (left := give_up - time.monotonic()) <= 0:
                times = len(retry.history)
                raise replica.error(
                    f"{fault} ({times} tries, the last here; see teacher.retry_for_s="
                    f"{self._retry_for_s:g})"
                )
            with self._changed:
                self.num_retries += 1
            stop.wait(min(retry.get_backoff_time(), left))

    @contextmanager
    def _taken(self, last: Replica | None, stop: threading.Event) -> Iterator[Replica]:
        """A replica with room, another one than ``last`` if there is a choice."""
        with self._changed:
            while (replica := self._free(last)) is None:
                if stop.is_set():
                    raise RoleError("given up because another request failed")
                now = time.monotonic()
                resting = [r.rests_until - now for r in self.replicas if r.rests_until > now]
                self._changed.wait(min([1.0, *resting]))
            if stop.is_set():
                raise RoleError("given up because another request failed")
            replica.num_in_flight += 1
        try:
            yield replica
        finally:
            with self._changed:
                replica.num_in_flight -= 1
                self._changed.notify_all()

    def _free(self, last: Replica | None) -> Replica | None:
        now = time.monotonic()
        room = [
            r
            for r in self.replicas
            if r.rests_until <= now
            and r.num_in_flight < (r.width if r.num_failures < self._rest_after else 1)
        ]
        return min(
            room, key=lambda r: (r is last, r.num_failures > 0, r.num_in_flight), default=None
        )

    def _well(self, replica: Replica) -> None:
        with self._changed:
            replica.num_failures, replica.rests_until = 0, 0.0

    def _unwell(self, replica: Replica, retry_after_s: float, at_most_s: float) -> None:
        with self._changed:
            replica.num_failures += 1
            # Where nobody could take over, a rest would only add to the back-off.
            spared = replica.num_failures >= self._rest_after and len(self.replicas) > 1
            rest_s = min(max(self._rest_s if spared else 0.0, retry_after_s), at_most_s)
            replica.rests_until = max(replica.rests_until, time.monotonic() + rest_s)
