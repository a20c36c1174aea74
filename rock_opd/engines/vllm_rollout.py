"""Samples from the student with vLLM: prompt ids in, response ids and their log-probabilities out.

It refuses to sample with weights it cannot vouch for: between ``begin_update`` and an
``end_update`` that has proved every tensor, ``generate`` raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np

from rock_opd.config import RolloutConfig
from rock_opd.engines.vllm_quirks import prepare_environment as prepare_environment
from rock_opd.engines.vllm_quirks import start_llm
from rock_opd.engines.weight_sync import (
    Bucket,
    Checksums,
    compare,
    from_wire,
    to_wire,
)
from rock_opd.errors import ConfigError, DataError, ModelError, RoleError, SyncError
from rock_opd.models import load_config
from rock_opd.types import Rollout, SampleRequest

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

_RESEND = "send the whole version again (begin_update, every bucket, end_update) before sampling"


class RolloutEngine:
    """One vLLM engine that samples from the student. One per process.

    In float32 a response depends on its request (prompt, seed, limits) and the weights alone, not
    on the engine, the order or its neighbours; in bf16 that holds for identical batches only,
    because the batch decides how sums are rounded.
    """

    def __init__(
        self,
        cfg: RolloutConfig,
        *,
        model: str,
        dtype: str,
        device: str,
        num_real_ids: int,
        stop_token_ids: tuple[int, ...],
        max_model_len: int | None = None,
        can_sleep: bool = False,
        can_ban: bool = False,
        transfer: str | None = None,
    ) -> None:
        """
        Args:
            model: folder or hub id; its weights are version 0.
            dtype: float32 or bfloat16, resolved.
            device: cpu or cuda. ``prepare_environment(device, threads)`` must have been called.
            num_real_ids: ids the tokenizer has; wider models never sample what lies beyond.
            stop_token_ids: end a response, and are its last token; nothing else does.
            max_model_len: longest sequence in tokens; None: ``cfg.max_model_len``.
            can_sleep: CUDA only: reserve what ``sleep`` needs.
            can_ban: requests may have ``banned_ids``; costs a little at every step.
            transfer: backend of vLLM's weight-transfer engine for the device path (see
                ``weight_sync``); None: weights come in buckets only. nccl and ipc need CUDA and
                are left out on CPU.

        Raises:
            ConfigError, ModelError: what ``start_llm`` raises; a stop token that does not exist.
        """
        beyond = [i for i in stop_token_ids if not 0 <= i < num_real_ids]
        if beyond:
            raise ModelError(f"stop tokens {beyond} are none of the {num_real_ids} ids of {model}")
        more: dict[str, Any] = {"logprobs_mode": "raw_logprobs", "generation_config": "vllm"}
        processors = []
        if load_config(model).vocab_size > num_real_ids:
            processors.append("rock_opd.engines.vllm_worker:RealIdsOnly")
            more["additional_config"] = {"rock_opd_num_real_ids": num_real_ids}
        if can_ban:
            processors.append("rock_opd.engines.vllm_worker:BannedIds")
        if processors:
            more["logits_processors"] = processors
        if transfer is not None and (device == "cuda" or transfer not in ("nccl", "ipc")):
            more["weight_transfer_config"] = {"backend": transfer}
        self._llm = start_llm(
            model,
            role="rollout",
            dtype=dtype,
            device=device,
            num_real_ids=num_real_ids,
            max_model_len=max_model_len or cfg.max_model_len,
            max_num_seqs=cfg.max_num_seqs,
            tensor_parallel=cfg.tensor_parallel,
            kv_cache_bytes=cfg.kv_cache_bytes,
            gpu_memory_utilization=cfg.gpu_memory_utilization,
            can_sleep=can_sleep,
            **more,
        )
        self._dtype = dtype
        self._max_model_len = max_model_len or cfg.max_model_len
        self._num_real_ids = num_real_ids
        self._stop_token_ids = stop_token_ids
        self._can_ban = can_ban
        self._sleeps = can_sleep and device == "cuda"
        self._asleep = False
        self._version = 0
        self._incoming: int | None = None
        self._fault: str | None = None
        self._path: Literal["buckets", "device", "device, whole"] | None = None
        self._given, self._cast = Checksums(), Checksums()

    # --- sampling ---------------------------------------------------------------------------------

    def generate(
        self,
        requests: list[SampleRequest],
        *,
        temperature: float,
        top_p: float,
        max_new_tokens: int,
    ) -> list[Rollout]:
        """Samples one response per request, in the order of the requests.

        Args:
            temperature: 0 is greedy. The log-probabilities returned are those of temperature 1 over
                the model's full width, whatever the temperature.
            max_new_tokens: length limit; where prompt and limit exceed the engine's
                ``max_model_len``, what room the prompt leaves is the limit.

        Returns:
            Finish reason "stop": the last token is one of ``stop_token_ids``, as sampled. "length":
            the limit cut it off, nothing is appended. What a request gives as ``begun`` stands
            between prompt and sampled tokens, outside ``loss_mask``.

        Raises:
            DataError: a prompt (with what of the response is given) that leaves no room for a
                response, or with ids that do not exist; a ban of such ids, or of every id.
            ConfigError: a ban asked of an engine started without ``can_ban``.
            SyncError: the engine holds half an update, or one that failed, or it sleeps.
        """
        if self._fault is not None:
            raise SyncError(f"rollout engine: {self._fault}; {_RESEND}")
        if self._asleep:
            raise SyncError("rollout engine: asleep; wake() it before sampling")
        if not requests:
            return []
        rooms = [self._room(request, max_new_tokens) for request in requests]
        outputs = self._llm.generate(
            [{"prompt_token_ids": _given(r).tolist()} for r in requests],
            [
                self._sampling_params(request, temperature, top_p, room)
                for request, room in zip(requests, rooms, strict=True)
            ],
            use_tqdm=False,
        )
        return [
            self._rollout(request, output, room)
            for request, output, room in zip(requests, outputs, rooms, strict=True)
        ]

    def _room(self, request: SampleRequest, max_new_tokens: int) -> int:
        prompt, begun = request.prompt, len(request.begun)
        room = min(max_new_tokens, self._max_model_len - len(prompt.token_ids)) - begun
        if room < 1:
            given = f" and {begun} of a response" if begun else ""
            raise DataError(
                f"prompt {prompt.prompt_id}: {len(prompt.token_ids)} tokens{given} leave no room "
                f"for a response within {self._max_model_len}; raise rollout.max_prompt_tokens or "
                "leave the prompt out"
            )
        banned = np.asarray(request.banned_ids, dtype=np.int64)
        for what, ids in (("", _given(request)), ("banned ", banned)):
            if len(ids) and (ids.min() < 0 or ids.max() >= self._num_real_ids):
                raise DataError(
                    f"prompt {prompt.prompt_id}: {what}ids {ids.min()} to {ids.max()}, but the "
                    f"student has {self._num_real_ids} ids; was it tokenised for another model?"
                )
        if request.banned_ids and not self._can_ban:
            raise ConfigError(
                f"prompt {prompt.prompt_id}: {len(request.banned_ids)} banned ids, but this "
                "rollout engine was started without can_ban"
            )
        if len(np.unique(banned)) == self._num_real_ids:
            raise DataError(f"prompt {prompt.prompt_id}: every id is banned, none can be sampled")
        return room

    def _sampling_params(
        self, request: SampleRequest, temperature: float, top_p: float, room: int
    ) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            n=1,
            seed=request.seed,
            temperature=temperature,
            top_p=top_p,
            max_tokens=room,
            logprobs=0,  # the sampled token's, and no other
            flat_logprobs=True,
            detokenize=False,
            ignore_eos=True,  # else the model's own generation_config adds stop tokens to ours
            stop_token_ids=list(self._stop_token_ids),
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"rock_opd_banned_ids": list(request.banned_ids)}
            if request.banned_ids
            else None,
            skip_clone=True,
        )

    def _rollout(self, request: SampleRequest, output: RequestOutput, room: int) -> Rollout:
        (sample,) = output.outputs
        prompt = request.prompt
        name = f"{prompt.prompt_id}#{request.sample_idx}"
        response = np.asarray(sample.token_ids, dtype=np.int32)
        flat = sample.logprobs
        first = np.asarray(
            flat.start_indices, dtype=np.int64
        )  # the sampled token leads its position
        sampled = np.asarray(flat.token_ids, dtype=np.int32)[first]
        stopped = sample.finish_reason == "stop"
        if sample.finish_reason not in ("stop", "length"):
            raise RoleError(f"rollout {name}: vLLM ended it with '{sample.finish_reason}'")
        assert np.array_equal(sampled, response), (
            f"rollout {name}: log-probabilities of other tokens"
        )
        assert stopped == (response[-1] in self._stop_token_ids), f"rollout {name}: stop token lost"
        assert stopped or len(response) == room, f"rollout {name}: cut before its limit"
        assert response.max() < self._num_real_ids, (
            f"rollout {name}: sampled an id that does not exist"
        )

        given = _given(request)
        loss_mask = np.zeros(len(given) + len(response), dtype=bool)
        loss_mask[len(given) :] = True
        logprobs = np.full(len(loss_mask), np.nan, dtype=np.float32)
        logprobs[len(given) :] = np.asarray(flat.logprobs, dtype=np.float32)[first]
        return Rollout(
            prompt_id=prompt.prompt_id,
            sample_idx=request.sample_idx,
            token_ids=np.concatenate([given, response]).astype(np.int32),
            loss_mask=loss_mask,
            logprobs=logprobs,
            finish_reason="stop" if stopped else "length",
            policy_version=self._version,
            prompt_len=len(prompt.token_ids),
            teacher_id=prompt.teacher_id,
            teacher_prefix_ids=prompt.teacher_prefix_ids,
        )

    # --- weights ----------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """Version of the last update that was proved; 0 is the model it started from."""
        return self._version

    def begin_update(self, version: int) -> None:
        """Opens an update. Until ``end_update`` succeeds, nothing is sampled.

        An update that was begun before and never ended is given up.
        """
        if self._asleep:
            raise SyncError(
                f"policy weights v{version}: the rollout engine sleeps; wake() it first"
            )
        self._incoming = version
        self._fault = f"policy weights v{version} began to arrive but were never completed"
        self._given, self._cast = Checksums(), Checksums()
        self._llm.collective_rpc("prepare_reload")
        self._path = None

    def load_bucket(self, bucket: Bucket) -> None:
        """Takes some of the version's tensors, in any order, as float32 or bf16.

        Raises:
            SyncError: no update is open, or vLLM has no place for a tensor (named).
        """
        version = self._opened()
        if self._path is None:
            self._llm.collective_rpc("begin_reload")
            self._path = "buckets"
        self._given.update(bucket)
        tensors = [(wire.name, from_wire(wire, dtype=self._dtype)) for wire in bucket]
        cast = {wire.name for wire in bucket if wire.dtype != self._dtype}
        self._cast.update(to_wire(pair for pair in tensors if pair[0] in cast))
        try:
            self._llm.collective_rpc("load_chunk", args=(tensors,))
        except (ValueError, KeyError, AttributeError, RuntimeError, AssertionError) as error:
            why = str(error).splitlines()[0] if str(error) else repr(error)
            self._fail(
                f"policy weights v{version}: vLLM refused a bucket of {len(tensors)} tensors from "
                f"{tensors[0][0]} to {tensors[-1][0]}: {why}"
            )

    def end_update(self, checksums: dict[str, int]) -> int:
        """Proves the update and puts it into use.

        Args:
            checksums: the trainer's ``Checksums.chosen()`` for this version.

        Returns:
            The version now in use.

        Raises:
            SyncError: a tensor that did not arrive, arrived as something else, or is not what the
                running model holds. The engine then samples nothing until a whole version arrives.
        """
        version = self._opened()
        self._incoming = None  # whatever happens now, this update takes no more buckets
        if not checksums:
            self._fail(f"policy weights v{version}: without checksums nothing is proved")
        if self._path == "buckets":
            given = self._given.chosen()
            self._check(checksums, given, version, "as it arrived")
            self._check(given, checksums, version, "in the trainer's list")
            self._check_whole(version)
            for stale in self._llm.collective_rpc("end_reload"):
                if stale:
                    self._fail(f"policy weights v{version}: the packed copy of {stale[0]} is stale")
            held_must_be = given | self._cast.chosen()
        elif self._path == "device, whole":
            held_must_be = checksums  # cast before they were summed up and sent
        else:
            self._fail(f"policy weights v{version}: the trainer ended before everything was sent")
        for held in self._llm.collective_rpc("held_checksums", args=(sorted(held_must_be),)):
            if not held:
                self._fail(f"policy weights v{version}: no tensor's name is one of the model's")
            expected = {name: held_must_be[name] for name in held}
            self._check(expected, held, version, "in the running model")
        if not self._llm.reset_prefix_cache():
            self._fail(
                f"policy weights v{version}: the prefix cache of older weights is still in use"
            )
        self._version, self._fault = version, None
        return version

    def _opened(self) -> int:
        if self._incoming is None:
            reason = self._fault or f"no update is open (the engine runs v{self._version})"
            raise SyncError(f"rollout engine: {reason}; call begin_update first")
        return self._incoming

    def _check(
        self, expected: dict[str, int], found: dict[str, int], version: int, where: str
    ) -> None:
        try:
            compare(expected, found, version=version, where=where)
        except SyncError as error:
            self._fail(str(error))

    def _check_whole(self, version: int) -> None:
        for incomplete in self._llm.collective_rpc("incomplete_layers"):
            if incomplete:
                self._fail(
                    f"policy weights v{version}: {len(incomplete)} layers are incomplete, first "
                    f"{incomplete[0]}"
                )

    def _fail(self, fault: str) -> NoReturn:
        self._incoming, self._fault = None, fault
        raise SyncError(f"{fault}; {_RESEND}")

    # --- device path: what vLLM's trainer side calls through weight_sync.TransferClient -----------

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Meets the trainer (NCCL) or notes the wire format (IPC). Once per run."""
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self._opened()
        self._path = "device"
        self._llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._opened()
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self) -> None:
        self._check_whole(self._opened())
        self._llm.finish_weight_update()
        self._path = "device, whole"

    # --- sharing a GPU ----------------------------------------------------------------------------

    def sleep(self) -> None:
        """CUDA: weights to host memory, KV cache dropped (vLLM's level 1). CPU: nothing to do."""
        if self._sleeps and not self._asleep:
            self._llm.sleep(level=1)
            self._asleep = True

    def wake(self) -> None:
        """Undoes ``sleep``; the weights are those it slept with."""
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False


def _given(request: SampleRequest) -> np.ndarray:
    """int32: what the engine reads: the prompt, and the begun response."""
    begun = np.asarray(request.begun, dtype=np.int32)
    return np.concatenate([request.prompt.token_ids, begun]).astype(np.int32)
