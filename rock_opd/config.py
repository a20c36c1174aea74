"""A recipe: one frozen dataclass per part, checked when built (``recipe_file`` reads one).

Holds every check that needs no file and no model; those that do live in ``preflight``. A part of
the program receives its own config, never the whole tree.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from rock_opd.errors import ConfigError
from rock_opd.redact import SECRET_NAME, redact, without_login

# OmegaConf 2.3 knows no Literal types, so choices are plain strings checked in __post_init__.
DTYPES = ("auto", "float32", "bfloat16")
SOURCES = ("student", "dataset")
ROW_FORMATS = ("auto", "verl")
DIVERGENCES = ("reverse_kl", "forward_kl", "policy_gradient")
NORMALIZERS = ("kept", "all")
POLICIES = ("all", "list", "rock_freeze", "random_matched")
SCORES = ("rock", "rock_ctx", "rock_lcb", "mean", "lcb", "eb_mean", "eb_lcb")
ENCODERS = ("embedding", "ngram")
PROBE_LOSSES = ("kl", "logratio")
PAYLOADS = ("sampled", "topk_tail", "hidden")
TEACHER_ENGINES = ("hidden", "prompt_logprobs", "http")
COLOCATE = ("all", "teacher_rollout", "none")
STRATEGIES = ("pack", "spread", "strict_pack", "strict_spread")
NODE_GROUP = r"[A-Za-z0-9][A-Za-z0-9._/-]*(=[A-Za-z0-9][A-Za-z0-9._-]*)?"
ATTENTION = ("sdpa", "eager", "flash_attention_2")
DEVICES = ("auto", "cpu", "cuda")
MOST, MOST_S, MOST_ACTORS, MOST_TOKENS = 1e15, 1e8, 1e5, 1e8
"""What no machine has: a larger number is a slip, and would end in an overflow elsewhere."""
MOST_PROMPTS, MOST_THREADS = 1e6, 4096
LONGEST_NAME = 255
"""Bytes of one name in a path, on every file system in use."""
LONGEST_RUN_NAME = 200
"""Leaves room for what is put behind it (``-2``, ``.partial``)."""


def _choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        near = difflib.get_close_matches(value, choices, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise ConfigError(f"{key} must be one of {', '.join(choices)}, got '{value}'{hint}")


def _at_least(key: str, value: float, least: float, *, most: float = MOST) -> None:
    if not (math.isfinite(value) and value >= least):
        raise ConfigError(f"{key} must be at least {least:g}, got {value:g}")
    if value > most:
        raise ConfigError(f"{key} must be at most {most:g}, got {value:g}")


def _within(key: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if not (low < value <= high if open_low else low <= value <= high):
        raise ConfigError(
            f"{key} must lie in {'(' if open_low else '['}{low:g}, {high:g}], got {value:g}"
        )


def _threshold(key: str, value: str) -> None:
    """Checks a threshold as ``core.context.resolve_threshold`` reads it."""
    text = str(value)
    try:
        number = float(text.removeprefix("q"))
    except ValueError:
        raise ConfigError(
            f"{key} must be a number of nats, or a quantile such as q0.8, got '{text}'"
        ) from None
    if text.startswith("q"):
        _within(key, number, 0.0, 1.0)
    elif not math.isfinite(number):
        raise ConfigError(f"{key} must be finite, got '{text}'")


def _path(key: str, path: str | None) -> None:
    """Checks a path on this machine, or a hub id."""
    if path is None:
        return
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path):
        other = "; a copy in a store is run.mirror" if key == "run.dir" else ""
        raise ConfigError(f"{key} is a path on this machine, got '{redact(path)}'{other}")
    if path.startswith("~"):
        home = os.path.expanduser(path)
        instead = f"write {home}" if home != path else "write it out"
        raise ConfigError(f"{key}: '{path}' is not expanded here; {instead}")
    if "\0" in path:
        raise ConfigError(f"{key}: a path holds no NUL character, got {path!r:.60}")
    longest = max(path.split("/"), key=lambda name: len(os.fsencode(name)))
    if len(os.fsencode(longest)) > LONGEST_NAME:
        raise ConfigError(
            f"{key}: the name '{longest[:30]}...' in it is {len(os.fsencode(longest))} bytes long, "
            f"a file's may have {LONGEST_NAME}"
        )


def _names_a_secret(name: str) -> bool:
    """Whether it looks like the name of a variable, and not like a key."""
    return bool(re.fullmatch(r"[A-Z][A-Z0-9_]{2,63}", name) and SECRET_NAME.search(name))


def _server_url(url: str) -> None:
    """Checks an address that may stand in a recipe, so: one without a login."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        parts, host = urlsplit(""), None
    shown = without_login(url)
    if shown or parts.query or parts.fragment:
        raise ConfigError(
            f"teacher.urls: {shown or url.partition('?')[0]} holds a login, a query or a fragment; "
            "a key belongs into the environment variable that teacher.api_key_env names"
        )
    if parts.scheme not in ("http", "https") or not host or not parts.path.isprintable():
        raise ConfigError(
            f"teacher.urls: '{redact(url)}' is no address such as http://host:8000 or https://host"
        )


def _mirror_uri(uri: str) -> None:
    """Checks an fsspec URI that may stand in a recipe, so: one without a login."""
    shown = without_login(uri)
    if shown or re.search(r"[?#]", uri):
        raise ConfigError(
            f"run.mirror: {shown or uri.partition('?')[0]} holds a login, a query or a fragment, "
            "which would stand in the run's folder; fsspec reads credentials from the store's own "
            "environment variables and files (docs/security.md)"
        )
    match = re.fullmatch(r"([a-z][a-z0-9+.-]*)://(.*)", uri)
    if not match or "::" in uri or not uri.isprintable() or not (match[2] or match[1] == "memory"):
        raise ConfigError(
            f"run.mirror must be one fsspec URI such as s3://bucket/runs or file:///mnt/runs, got "
            f"'{uri}'"
        )
    if match[1] in ("file", "local") and not match[2].startswith("/"):
        raise ConfigError(f"run.mirror: '{uri}' names no absolute path; three slashes: file:///mnt")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The run as a whole."""

    name: str = "run"
    """Name of the run's folder."""
    dir: str = "runs"
    """Folder that holds the runs."""
    mirror: str | None = None
    """fsspec URI (s3://bucket/runs, file:///mnt/runs) under which the run's folder is copied behind
    the run; resume=true goes on from there where the folder is empty. Credentials: fsspec's own."""
    on_existing: str = "fail"
    """When the folder already holds a run: fail, or new (name-2, name-3, ...)."""
    seed: int = 0
    """Decides data order, sampling, audits and controls."""
    num_steps: int = 0
    """Steps to train; 0 means ``num_epochs`` over the prompts."""
    num_steps_float32: int = 0
    """In place of ``num_steps`` where the student trains in float32; 0: the same. CPUs without
    native bf16 are several times slower."""
    stop_after: int = 0
    """Stop and save once this many steps are done, to go on later; the schedule stays that of the
    whole run. 0: never."""
    num_epochs: int = 1
    """Passes over the prompts when ``num_steps`` is 0."""
    device: str = "auto"
    """cpu, cuda, or auto: cuda where every node offers GPUs to Ray."""
    start_timeout_s: float = 1800.0
    """Time limit for starting a role (loading a model included)."""
    phase_timeout_s: float = 3600.0
    """Time limit for one phase of one step."""
    stall_timeout_s: float = 60.0
    """An actor whose process stands still (stopped by a signal or frozen) for so long counts as
    lost."""
    max_replacements: int = 3
    """How often in a row one rollout worker or teacher is started again before the run goes back
    to its last checkpoint."""
    max_restarts: int = 3
    """How often in a row the run starts again from the same step after it lost a student rank or
    the coordinator; 0: never."""
    grace_s: float = 30.0
    """After SIGTERM: seconds to end the step and save; then the run leaves, and its last checkpoint
    stands."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise ConfigError(
                f"run.name must be letters, digits, '.', '_' or '-' and start with a letter or "
                f"digit, got '{self.name}'"
            )
        if len(self.name) > LONGEST_RUN_NAME:
            raise ConfigError(
                f"run.name must have at most {LONGEST_RUN_NAME} characters, got {len(self.name)}"
            )
        _path("run.dir", self.dir)
        if self.mirror is not None:
            _mirror_uri(self.mirror)
        _choice("run.on_existing", self.on_existing, ("fail", "new"))
        _within("run.seed", self.seed, 0, 2**32 - 1)
        _at_least("run.num_steps", self.num_steps, 0)
        _at_least("run.num_steps_float32", self.num_steps_float32, 0)
        _at_least("run.stop_after", self.stop_after, 0)
        _at_least("run.num_epochs", self.num_epochs, 1)
        _choice("run.device", self.device, DEVICES)
        _at_least("run.start_timeout_s", self.start_timeout_s, 1, most=MOST_S)
        _at_least("run.phase_timeout_s", self.phase_timeout_s, 1, most=MOST_S)
        _at_least("run.stall_timeout_s", self.stall_timeout_s, 1, most=MOST_S)
        _at_least("run.max_replacements", self.max_replacements, 0)
        _at_least("run.max_restarts", self.max_restarts, 0)
        _at_least("run.grace_s", self.grace_s, 0, most=MOST_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where prompts come from."""

    prompts: str = "???"
    """JSONL or parquet with rows of ``id``, ``messages`` (or ``prompt``), optional ``answer``,
    ``response``."""
    source: str = "student"
    """student: train on what the student samples; dataset: on the file's given responses."""
    limit: int = 0
    """Use only the first rows; 0 means all."""
    skip: int = 0
    """Rows to leave out at the front (they may serve as held-out prompts)."""
    shuffle: bool = True
    """Order of each epoch drawn from the seed; otherwise the file's own."""
    row_format: str = "auto"
    """auto: ours, or verl's where ours is not there (``messages`` or ``prompt``, ``answer`` or
    ``reward_model.ground_truth``, ``id`` or ``extra_info.index``); verl: verl's columns alone."""
    prompt_column: str | None = None
    """Column of the prompts, of all files of this recipe; None: by ``row_format``."""
    on_bad_row: str = "skip"
    """skip (counted, first offenders named) or fail."""
    enable_thinking: bool | None = None
    """Passed to the chat template when set."""

    def __post_init__(self) -> None:
        _path("data.prompts", self.prompts)
        _choice("data.source", self.source, SOURCES)
        _choice("data.row_format", self.row_format, ROW_FORMATS)
        if self.prompt_column == "":
            raise ConfigError("data.prompt_column must name a column, got ''; null takes the usual")
        _choice("data.on_bad_row", self.on_bad_row, ("skip", "fail"))
        _at_least("data.limit", self.limit, 0)
        _at_least("data.skip", self.skip, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class StudentConfig:
    """The model that learns, trained by DeepSpeed."""

    model: str = "???"
    """Folder or hub id."""
    from_run: str | None = None
    """Folder of a finished run whose student is the starting point, in place of ``model``."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model; read it first."""
    dtype: str = "auto"
    """bfloat16, float32, or auto: bfloat16 on CUDA and on CPUs with native bf16 matrix units."""
    num_ranks: int = 1
    """Data-parallel DeepSpeed ranks."""
    zero_stage: int = 2
    """ZeRO stage, 0 to 3."""
    micro_batch_tokens: int = 4096
    """Tokens packed into one forward of one rank; a longer sequence goes alone."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward."""
    attn_implementation: str = "sdpa"
    """Attention of transformers: sdpa, eager, flash_attention_2."""
    logit_chunk_rows: int = 512
    """Kept rows projected to the vocabulary at once; bounds memory at rows x vocabulary x 4 bytes
    x ~4."""
    offload_optimizer: bool = False
    """Keep optimizer states in host memory (ZeRO-Offload)."""

    def __post_init__(self) -> None:
        _path("student.from_run", self.from_run)
        _path("student.model", self.model)
        _choice("student.dtype", self.dtype, DTYPES)
        _at_least("student.num_ranks", self.num_ranks, 1, most=MOST_ACTORS)
        if self.zero_stage not in (0, 1, 2, 3):
            raise ConfigError(f"student.zero_stage must be 0, 1, 2 or 3, got {self.zero_stage}")
        _choice("student.attn_implementation", self.attn_implementation, ATTENTION)
        _at_least("student.micro_batch_tokens", self.micro_batch_tokens, 1, most=MOST_TOKENS)
        _at_least("student.logit_chunk_rows", self.logit_chunk_rows, 1)
        if self.offload_optimizer and self.zero_stage == 0:
            raise ConfigError("student.offload_optimizer needs student.zero_stage 1, 2 or 3, got 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """AdamW with linear warm-up and cosine decay."""

    lr: float = 2e-6
    """Peak learning rate."""
    min_lr: float = 1e-8
    """Where the cosine ends."""
    warmup_ratio: float = 0.05
    """Share of the updates that warm up."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Adam betas."""
    eps: float = 1e-8
    """Adam epsilon."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Gradient clipping by global norm; 0 turns it off."""
    max_bad_steps: int = 0
    """Steps in a row with a loss or gradient that is no finite number which are skipped, and
    counted, before the run stops; 0: it stops at the first."""

    def __post_init__(self) -> None:
        _within("optim.lr", self.lr, 0.0, 1.0, open_low=True)
        _within("optim.min_lr", self.min_lr, 0.0, self.lr)
        _within("optim.warmup_ratio", self.warmup_ratio, 0.0, 1.0)
        object.__setattr__(self, "betas", tuple(self.betas))  # OmegaConf gives a list
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optim.betas must be two numbers in [0, 1), got {list(self.betas)}")
        _within("optim.eps", self.eps, 0.0, 1.0, open_low=True)
        _at_least("optim.weight_decay", self.weight_decay, 0)
        _at_least("optim.max_grad_norm", self.max_grad_norm, 0)
        _at_least("optim.max_bad_steps", self.max_bad_steps, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """Sampling from the student with vLLM."""

    num_workers: int = 1
    """vLLM rollout actors."""
    tensor_parallel: int = 1
    """GPUs per rollout actor."""
    dtype: str = "auto"
    """As ``student.dtype``."""
    prompts_per_step: int = 8
    """Prompts of one step."""
    samples_per_prompt: int = 1
    """Responses of one prompt."""
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus sampling."""
    max_prompt_tokens: int = 512
    """Longer prompts are left out when the data are read, and counted."""
    max_new_tokens: int = 512
    """Length limit of a response."""
    max_num_seqs: int = 64
    """Sequences one engine decodes at once."""
    kv_cache_bytes: int | None = None
    """KV cache of one engine; None: 256 MiB on CPU, vLLM's own choice on GPU."""
    gpu_memory_utilization: float = 0.85
    """Share of a GPU that vLLM may take (when ``kv_cache_bytes`` is None)."""

    def __post_init__(self) -> None:
        for key in ("num_workers", "tensor_parallel"):
            _at_least(f"rollout.{key}", getattr(self, key), 1, most=MOST_ACTORS)
        for key in ("prompts_per_step", "samples_per_prompt"):
            _at_least(f"rollout.{key}", getattr(self, key), 1, most=MOST_PROMPTS)
        for key in ("max_prompt_tokens", "max_new_tokens", "max_num_seqs"):
            _at_least(f"rollout.{key}", getattr(self, key), 1, most=MOST_TOKENS)
        _choice("rollout.dtype", self.dtype, DTYPES)
        if self.kv_cache_bytes is not None:
            _at_least("rollout.kv_cache_bytes", self.kv_cache_bytes, 1)
        _at_least("rollout.temperature", self.temperature, 0.0)
        _within("rollout.top_p", self.top_p, 0.0, 1.0, open_low=True)
        _within(
            "rollout.gpu_memory_utilization", self.gpu_memory_utilization, 0.0, 1.0, open_low=True
        )

    @property
    def max_model_len(self) -> int:
        """Longest sequence the student sees, in tokens."""
        return self.max_prompt_tokens + self.max_new_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherConfig:
    """The model that scores, served by vLLM."""

    model: str = "???"
    """Folder or hub id; with engine http only its config and tokenizer are read."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model; read it first."""
    num_replicas: int = 1
    """Teacher actors; with engine http: processes that ask the servers."""
    tensor_parallel: int = 1
    """GPUs per teacher actor."""
    engine: str = "hidden"
    """hidden: last hidden states, exact full-vocabulary divergence; prompt_logprobs: vLLM's own
    log-probabilities; http: the same from the servers at ``urls``."""
    urls: tuple[str, ...] = ()
    """engine http: OpenAI-compatible vLLM servers that serve the teacher, one or several replicas
    (http://host:8000)."""
    served_name: str | None = None
    """engine http: the model's name on the servers; None: the only one they serve."""
    api_key_env: str | None = None
    """engine http: NAME of the environment variable that holds the servers' key, such as
    TEACHER_API_KEY; never the key itself."""
    request_timeout_s: float = 600.0
    """engine http: time limit of one request."""
    retry_for_s: float = 300.0
    """engine http: how long a request that failed in a way that may pass is tried again."""
    max_concurrency: int = 16
    """engine http: requests in flight at one server."""
    payload: str = "hidden"
    """What travels for a kept row: sampled, topk_tail or hidden."""
    top_k: int = 64
    """Entries per row of ``topk_tail``."""
    dtype: str = "auto"
    """As ``student.dtype``."""
    wire_dtype: str = "auto"
    """dtype of hidden rows on the way; auto: the teacher's own."""
    max_num_seqs: int = 64
    """Sequences one engine takes at once."""
    max_batched_tokens: int = 8192
    """Tokens of one prefill batch; longer sequences are prefilled in chunks."""
    park_bytes: int = 8 << 30
    """Host memory of one replica for hidden states waiting to be fetched."""
    prefix_tokens: int = 0
    """Room for a longer prompt that only the teacher reads."""
    logit_chunk_rows: int = 512
    """Rows projected to the vocabulary at once when scoring."""
    kv_cache_bytes: int | None = None
    """As ``rollout.kv_cache_bytes``."""
    gpu_memory_utilization: float = 0.85
    """As ``rollout.gpu_memory_utilization``."""

    def __post_init__(self) -> None:
        _path("teacher.model", self.model)
        _at_least("teacher.num_replicas", self.num_replicas, 1, most=MOST_ACTORS)
        _at_least("teacher.tensor_parallel", self.tensor_parallel, 1, most=MOST_ACTORS)
        _choice("teacher.engine", self.engine, TEACHER_ENGINES)
        _choice("teacher.payload", self.payload, PAYLOADS)
        _choice("teacher.dtype", self.dtype, DTYPES)
        _choice("teacher.wire_dtype", self.wire_dtype, DTYPES)
        _at_least("teacher.top_k", self.top_k, 1)
        for key in ("max_num_seqs", "max_batched_tokens", "park_bytes", "logit_chunk_rows"):
            _at_least(f"teacher.{key}", getattr(self, key), 1)
        _at_least("teacher.prefix_tokens", self.prefix_tokens, 0, most=MOST_TOKENS)
        if self.kv_cache_bytes is not None:
            _at_least("teacher.kv_cache_bytes", self.kv_cache_bytes, 1)
        _within(
            "teacher.gpu_memory_utilization", self.gpu_memory_utilization, 0.0, 1.0, open_low=True
        )
        if self.engine != "hidden" and self.payload == "hidden":
            raise ConfigError(
                f"teacher.payload 'hidden' needs teacher.engine 'hidden', got '{self.engine}'; "
                "use payload topk_tail or sampled"
            )
        self._check_servers()

    def _check_servers(self) -> None:
        object.__setattr__(self, "urls", tuple(self.urls))  # OmegaConf gives a list
        if self.remote != bool(self.urls):
            raise ConfigError(
                "teacher.urls goes with teacher.engine=http and only with it, got engine "
                f"'{self.engine}' and {len(self.urls)} urls"
            )
        for url in self.urls:
            _server_url(url)
        if len(set(self.urls)) != len(self.urls):
            raise ConfigError("teacher.urls names a server twice")
        if self.api_key_env is not None and not _names_a_secret(self.api_key_env):
            # Not shown: it may be the key.
            raise ConfigError(
                "teacher.api_key_env is the NAME of an environment variable, in capitals and "
                "ending in KEY, TOKEN, SECRET or PASSWORD (such as TEACHER_API_KEY), so that its "
                "value is kept out of logs; got something else"
            )
        _at_least("teacher.request_timeout_s", self.request_timeout_s, 0.1, most=MOST_S)
        _at_least("teacher.retry_for_s", self.retry_for_s, 0, most=MOST_S)
        _at_least("teacher.max_concurrency", self.max_concurrency, 1, most=MOST_ACTORS)
        if self.remote and self.max_concurrency < self.num_replicas:
            raise ConfigError(
                f"teacher.num_replicas={self.num_replicas} processes share "
                f"teacher.max_concurrency={self.max_concurrency} requests at one server; each "
                "needs one at least"
            )

    @property
    def remote(self) -> bool:
        """Whether the teacher runs elsewhere: it then takes no GPU of this cluster."""
        return self.engine == "http"


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """What the student minimises at a trained position."""

    divergence: str = "reverse_kl"
    """reverse_kl or forward_kl (over what the payload gives), or policy_gradient on the sampled
    token."""
    kd_ratio: float = 1.0
    """kd_ratio * divergence + (1 - kd_ratio) * cross-entropy on the token itself."""
    normalizer: str = "kept"
    """kept: divide by the step's sum of weights; all: by its number of response tokens."""

    def __post_init__(self) -> None:
        _choice("loss.divergence", self.divergence, DIVERGENCES)
        _within("loss.kd_ratio", self.kd_ratio, 0.0, 1.0)
        _choice("loss.normalizer", self.normalizer, NORMALIZERS)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyConfig:
    """Which tokens train."""

    name: str = "all"
    """all, list, rock_freeze, or random_matched."""
    ids_file: str | None = None
    """For ``list``: JSON list of token ids that are frozen from the first step on."""
    lam: float = 0.0
    """Weight of a frozen token (the paper's lambda), in [0, 1]."""
    score: str = "rock"
    """What ranks types: rock (R = mean KL x count), rock_ctx (R x CCR, from the probe set),
    rock_lcb (count x lower bound of the mean), mean, lcb, eb_mean, eb_lcb."""
    top_k: int = 100
    """Token types frozen at once, by score."""
    threshold: float | None = None
    """Least score of a frozen type; None: the ``top_k`` alone decide."""
    hysteresis: float = 0.0
    """In [0, 1): a frozen type is ranked by its score / (1 - hysteresis), so that it thaws later
    than it froze."""
    drop_most_frequent: int = 5
    """Most frequent types taken out before ranking."""
    control_may_use_dropped: bool = False
    """random_matched: whether those types may serve as controls."""
    min_count: int = 20
    """Occurrences a type needs before it may be ranked."""
    warmup_steps: int = 20
    """Steps that are only observed."""
    refresh_every: int = 10
    """Steps between two selections."""
    decay: float = 1.0
    """Factor on the statistics before each step; 1 never forgets."""
    audit_share: float = 0.02
    """Share of frozen positions measured all the same (weight 0), so that frozen types can thaw."""
    guard_file: str | None = None
    """JSON list of token ids that are never frozen, such as the pillars that knockout found."""
    guard_special: bool = True
    """Never freeze special tokens and those that end a response."""
    window_radius: int = 0
    """Freeze whole rock windows: up to so many positions to each side of a rock; 0: rocks alone."""
    window_threshold: str = "q0.8"
    """Sampled log-ratio a neighbour needs to belong to a window: nats, or a quantile of the step
    (q0.8)."""

    def __post_init__(self) -> None:
        _path("policy.ids_file", self.ids_file)
        _path("policy.guard_file", self.guard_file)
        _choice("policy.name", self.name, POLICIES)
        _choice("policy.score", self.score, SCORES)
        if self.threshold is not None and not math.isfinite(self.threshold):
            raise ConfigError(f"policy.threshold must be finite, got {self.threshold}")
        if not 0 <= self.hysteresis < 1:
            raise ConfigError(f"policy.hysteresis must lie in [0, 1), got {self.hysteresis:g}")
        _at_least("policy.window_radius", self.window_radius, 0)
        _threshold("policy.window_threshold", self.window_threshold)
        if (self.name == "list") != (self.ids_file is not None):
            raise ConfigError(
                f"policy.ids_file goes with policy.name=list and only with it, got name "
                f"'{self.name}' and ids_file {self.ids_file!r}"
            )
        _within("policy.lam", self.lam, 0.0, 1.0)
        _at_least("policy.top_k", self.top_k, 1)
        _at_least("policy.drop_most_frequent", self.drop_most_frequent, 0)
        _at_least("policy.min_count", self.min_count, 1)
        _at_least("policy.warmup_steps", self.warmup_steps, 1)
        _at_least("policy.refresh_every", self.refresh_every, 1)
        _within("policy.decay", self.decay, 0.0, 1.0, open_low=True)
        _within("policy.audit_share", self.audit_share, 0.0, 1.0, open_low=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeConfig:
    """The probe set, and when an occurrence of a type counts as a rock in its context
    (``policy.score=rock_ctx``)."""

    num_rollouts: int = 256
    """Rollouts kept from the start of the run and scored again before each selection."""
    loss: str = "kl"
    """kl: full reverse KL; logratio: log q - log p of the sampled token."""
    tau_pre: str = "q0.8"
    """Loss before training from which on an occurrence is high: nats, or a quantile of the probe
    set (q0.8)."""
    tau_post: str = "q0.8"
    """The same for the loss now."""
    encoder: str = "embedding"
    """Context vector: embedding (mean teacher input embedding of the window, less that of all
    tokens) or ngram (hashed n-grams)."""
    window: int = 8
    """w: the context of x_t is x[t-w] to x[t+w], the prompt included."""
    dim: int = 64
    """Numbers of a context vector, after projection."""
    gamma: float = 0.5
    """Cosine from which on two contexts are alike."""
    eta: float = 0.1
    """Share of a type's other persistent occurrences that must be alike for one to be kept."""
    reservoir: int = 256
    """Occurrences judged per type, drawn at random."""
    max_pairs: int = 50_000_000
    """Pairs of contexts compared in all; bounds the judged occurrences further."""

    def __post_init__(self) -> None:
        _at_least("probe.num_rollouts", self.num_rollouts, 1)
        _choice("probe.loss", self.loss, PROBE_LOSSES)
        _threshold("probe.tau_pre", self.tau_pre)
        _threshold("probe.tau_post", self.tau_post)
        _choice("probe.encoder", self.encoder, ENCODERS)
        for key in ("window", "dim", "reservoir", "max_pairs"):
            _at_least(f"probe.{key}", getattr(self, key), 1)
        _within("probe.gamma", self.gamma, -1.0, 1.0)
        _within("probe.eta", self.eta, 0.0, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncConfig:
    """Weights from the student to the rollout workers."""

    bucket_bytes: int = 512 << 20
    """Weights gathered and sent at once."""
    max_logprob_gap: float = 0.5
    """The run stops when the mean |trainer - rollout| log-probability of a step exceeds this."""

    def __post_init__(self) -> None:
        _at_least("sync.bucket_bytes", self.bucket_bytes, 1)
        _within("sync.max_logprob_gap", self.max_logprob_gap, 0.0, 100.0, open_low=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Measured inside the run."""

    heldout_prompts: str | None = None
    """Prompt file for the held-out divergence; None: the ``data.skip`` first rows of the training
    file."""
    num_heldout: int = 0
    """Held-out prompts answered once by the starting student; their KL is taken before and after.
    0: none."""
    problems: str | None = None
    """JSONL of problems with ``answer``, graded by math-verify."""
    every: int = 0
    """Steps between two evaluations on ``problems``; 0: only at the end."""
    samples: int = 1
    """Answers per problem."""
    temperature: float = 0.6
    """Sampling temperature of the answers."""
    max_new_tokens: int = 512
    """Length limit of an answer."""

    def __post_init__(self) -> None:
        _path("eval.heldout_prompts", self.heldout_prompts)
        _path("eval.problems", self.problems)
        _at_least("eval.num_heldout", self.num_heldout, 0)
        _at_least("eval.every", self.every, 0)
        _at_least("eval.samples", self.samples, 1, most=MOST_PROMPTS)
        _at_least("eval.temperature", self.temperature, 0.0)
        _at_least("eval.max_new_tokens", self.max_new_tokens, 1, most=MOST_TOKENS)
        if self.every and self.problems is None:
            raise ConfigError(
                "eval.every needs eval.problems, a JSONL file of problems with answers"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """What is kept on disk."""

    every: int = 50
    """Steps between two resumable checkpoints; 0: only on interruption and at the end."""
    keep_last: int = 2
    """Resumable checkpoints kept; 0 keeps all."""
    save_hf_every: int = 0
    """Steps between two copies of the student for serving, ``hf/step_000010/``; 0: none."""
    keep_hf: int = 2
    """Such copies kept; 0 keeps all."""
    keep_best: bool = True
    """Keep the student of the best evaluation as ``best/`` when there is one."""
    background: bool = True
    """Go on with the next step while files are written, from a copy in host memory (12 bytes a
    parameter, shared by all ranks; for ``hf`` the model once more on rank 0)."""
    on_error: str = "stop"
    """When a file of the run cannot be written (a full disk): stop, or warn: say so each time and
    go on; the last whole checkpoint stays either way. What the run must leave at its end, and
    cannot write even then, is an error under both."""

    def __post_init__(self) -> None:
        _at_least("checkpoint.every", self.every, 0)
        _at_least("checkpoint.keep_last", self.keep_last, 0)
        _at_least("checkpoint.save_hf_every", self.save_hf_every, 0)
        _at_least("checkpoint.keep_hf", self.keep_hf, 0)
        _choice("checkpoint.on_error", self.on_error, ("stop", "warn"))


@dataclass(frozen=True, kw_only=True, slots=True)
class AlarmConfig:
    """When a number of a run is told to the person watching, once per crossing; 0 turns that one
    off. Nothing is stopped."""

    window: int = 50
    """Steps behind a running median."""
    grad_norm_factor: float = 10.0
    """Times the running median of ``train/grad_norm``."""
    gap_factor: float = 3.0
    """Times the running median of ``sync/logprob_gap_mean`` ..."""
    gap_floor: float = 0.02
    """... where the gap is larger than this, in nats."""
    truncated_share: float = 0.9
    """Of responses that hit the length limit."""
    repetition_share: float = 0.3
    """Of 4-grams that stood in their response before."""

    def __post_init__(self) -> None:
        _at_least("alarm.window", self.window, 1)
        for key in ("grad_norm_factor", "gap_factor", "gap_floor"):
            _at_least(f"alarm.{key}", getattr(self, key), 0)
        for key in ("truncated_share", "repetition_share"):
            _within(f"alarm.{key}", getattr(self, key), 0.0, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementConfig:
    """What each role takes from the Ray cluster."""

    colocate: str = "none"
    """GPU only. all: every role shares one set of GPUs in turn; teacher_rollout: those two share;
    none."""
    rollout_cpus: float = 1.0
    """CPUs reserved per rollout actor."""
    teacher_cpus: float = 1.0
    """CPUs reserved per teacher actor."""
    student_cpus: float = 1.0
    """CPUs reserved per student rank."""
    coordinator_cpus: float = 0.0
    """CPUs reserved for the coordinator."""
    coordinator_memory_gb: float = 0.0
    """Memory (GiB) reserved for the coordinator: Ray puts no other reservation on it."""
    threads: int = 1
    """OMP threads of each role's process on CPU."""
    strategy: str = "pack"
    """How actors spread over nodes: pack (few nodes), spread (many), strict_pack (one),
    strict_spread (each on its own)."""
    rollout_on: str | None = None
    """Nodes for the rollout actors: a custom resource they offer (`gpu_small`) or a label they bear
    (`pool=small`); None: any."""
    teacher_on: str | None = None
    """Nodes for the teachers, as for ``rollout_on``."""
    student_on: str | None = None
    """Nodes for the student ranks, as for ``rollout_on``."""
    coordinator_on: str | None = None
    """Nodes for the coordinator, as for ``rollout_on``."""
    wait_for_nodes: bool = False
    """Wait up to run.start_timeout_s for nodes to join a cluster too small for the run (an
    autoscaler's); otherwise it is refused at once."""

    def __post_init__(self) -> None:
        _choice("placement.colocate", self.colocate, COLOCATE)
        _choice("placement.strategy", self.strategy, STRATEGIES)
        for key in (
            *("rollout_cpus", "teacher_cpus", "student_cpus"),
            *("coordinator_cpus", "coordinator_memory_gb"),
        ):
            _at_least(f"placement.{key}", getattr(self, key), 0, most=MOST_ACTORS)
        _at_least("placement.threads", self.threads, 1, most=MOST_THREADS)
        groups = {
            f"{role}_on": getattr(self, f"{role}_on")
            for role in ("rollout", "teacher", "student", "coordinator")
        }
        for key, on in groups.items():
            if on is not None and not re.fullmatch(NODE_GROUP, on):
                raise ConfigError(
                    f"placement.{key} must name a custom resource (gpu_small) or a label "
                    f"(pool=small), got '{on}'"
                )
            if on in ("CPU", "GPU", "memory", "object_store_memory"):
                raise ConfigError(
                    f"placement.{key} must be a custom resource that marks nodes, got Ray's own "
                    f"'{on}'"
                )
        sharing = {
            "all": ("rollout", "teacher", "student"),
            "teacher_rollout": ("rollout", "teacher"),
        }
        shared = {groups[f"{role}_on"] for role in sharing.get(self.colocate, ())}
        if len(shared) > 1:
            raise ConfigError(
                f"placement.colocate={self.colocate}: roles that share GPUs stand on the same "
                "nodes, but " + ", ".join(f"{k}={v}" for k, v in groups.items())
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """Where metrics go besides ``metrics.jsonl`` and TensorBoard."""

    wandb_project: str | None = None
    """Weights & Biases project (extra ``[wandb]``)."""
    mlflow_uri: str | None = None
    """MLflow tracking address (extra ``[mlflow]``)."""
    registry_every: int = 10
    """Steps between two registry snapshots in ``registry/``; one is always written at the end."""
    occurrences: bool = False
    """Write every sampled position to ``occurrences/``, one file a step: what `rock-opd rocks` and
    its kin read."""

    def __post_init__(self) -> None:
        _at_least("log.registry_every", self.registry_every, 1)
        if self.mlflow_uri is not None and without_login(self.mlflow_uri):
            raise ConfigError(
                "log.mlflow_uri holds a login, which would stand in the run's folder; set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (or MLFLOW_TRACKING_TOKEN)"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The whole tree: one run."""

    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    student: StudentConfig = field(default_factory=StudentConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    alarm: AlarmConfig = field(default_factory=AlarmConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    log: LogConfig = field(default_factory=LogConfig)
    resume: bool = False
    """Go on from the newest whole checkpoint of the run's folder."""

    def __post_init__(self) -> None:
        sampled = self.loss.divergence == "policy_gradient"
        if sampled and self.data.source == "dataset":
            raise ConfigError(
                "loss.divergence policy_gradient needs data.source=student: given responses were "
                "not sampled"
            )
        if sampled and (self.rollout.temperature != 1.0 or self.rollout.top_p != 1.0):
            raise ConfigError(
                "loss.divergence policy_gradient is biased unless rollout.temperature=1 and "
                f"rollout.top_p=1, got {self.rollout.temperature:g} and {self.rollout.top_p:g}; "
                "train on reverse_kl instead"
            )
        if not sampled and self.teacher.payload == "sampled":
            raise ConfigError(
                f"loss.divergence {self.loss.divergence} needs teacher.payload hidden or "
                "topk_tail, got 'sampled': back-propagating the sampled log-ratio drops the "
                "teacher from the gradient"
            )
        if self.policy.window_radius and self.data.source == "dataset":
            raise ConfigError(
                "policy.window_radius needs data.source=student: windows are found by the sampled "
                "log-ratio, which given responses do not have"
            )
        if self.uses_probe and self.teacher.payload == "sampled" and self.probe.loss == "kl":
            raise ConfigError(
                "policy.score rock_ctx with probe.loss=kl needs teacher.payload hidden or "
                "topk_tail, got 'sampled'; set probe.loss=logratio or another payload"
            )
        if self.eval.num_heldout and self.teacher.payload == "sampled":
            raise ConfigError(
                "eval.num_heldout needs teacher.payload hidden or topk_tail, got 'sampled': on "
                "fixed answers the sampled log-ratio falls whenever the student moves"
            )
        rollout_gpus = self.rollout.num_workers * self.rollout.tensor_parallel
        shared = self.placement.colocate == "all" and self.samples
        if shared and self.student.num_ranks != rollout_gpus:
            raise ConfigError(
                "placement.colocate=all hands weights over on the GPU itself, so every rollout GPU "
                f"needs a student rank: student.num_ranks={self.student.num_ranks}, but "
                f"rollout.num_workers x rollout.tensor_parallel = {rollout_gpus}"
            )
        narrow, wide = sorted((self.rollout.tensor_parallel, self.teacher.tensor_parallel))
        if self.placement.colocate != "none" and self.samples and wide % narrow:
            raise ConfigError(
                f"placement.colocate={self.placement.colocate}: the GPUs of one engine must be "
                "whole engines of the other role: of rollout.tensor_parallel="
                f"{self.rollout.tensor_parallel} and teacher.tensor_parallel="
                f"{self.teacher.tensor_parallel}, one must divide the other"
            )
        if self.placement.colocate != "none" and self.run.device == "cpu":
            raise ConfigError("placement.colocate shares GPUs; on run.device=cpu it must be none")
        if (
            self.eval.num_heldout
            and self.eval.heldout_prompts is None
            and self.data.skip < self.eval.num_heldout
        ):
            raise ConfigError(
                f"eval.num_heldout={self.eval.num_heldout} needs eval.heldout_prompts or "
                f"data.skip of at least as many rows, got data.skip={self.data.skip}: held-out "
                "prompts must not be trained on"
            )

    @property
    def samples(self) -> bool:
        """Whether the run needs rollout workers: to train, or to evaluate."""
        evaluates = self.eval.num_heldout > 0 or self.eval.problems is not None
        return self.data.source == "student" or evaluates

    @property
    def trusted_models(self) -> tuple[str, ...]:
        """Models whose own Python code may run."""
        return tuple(r.model for r in (self.student, self.teacher) if r.trust_remote_code)

    @property
    def uses_probe(self) -> bool:
        """Whether the run keeps a probe set: its policy selects types, and by their contexts."""
        selects = self.policy.name in ("rock_freeze", "random_matched")
        return selects and self.policy.score == "rock_ctx"

    @property
    def max_model_len(self) -> int:
        """Longest sequence a rollout engine must hold, evaluation included, in tokens."""
        longest = self.rollout.max_new_tokens
        if self.eval.problems is not None:
            longest = max(longest, self.eval.max_new_tokens)
        return self.rollout.max_prompt_tokens + longest

    @property
    def run_dir(self) -> Path:
        return Path(self.run.dir) / self.run.name


def resolve_dtype(name: str, device: str) -> Literal["float32", "bfloat16"]:
    """What ``auto`` means here: bfloat16 on CUDA and where the CPU multiplies bf16 natively, else
    float32."""
    if name != "auto":
        return name  # type: ignore[return-value]
    if device == "cuda":
        return "bfloat16"
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return "bfloat16" if "amx_bf16" in flags or "avx512_bf16" in flags else "float32"
