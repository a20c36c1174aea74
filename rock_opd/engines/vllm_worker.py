"""What runs inside vLLM's worker process. Only vLLM imports this module, by name.

Written against vLLM 0.31. It repairs two faults of the layer-wise reload on CPU (0.31, 0.32): the
packed copies of a tied head and of MoE experts keep the old weights. Each repair can go once a
reload without it passes ``tests/engines/test_vllm_rollout.py``.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor as LogitsProcessorV1
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LogitsProcessorV2

REAL_IDS_KEY = "rock_opd_num_real_ids"
"""Where ``LLM(additional_config=...)`` carries the number of ids that exist."""
BANNED_KEY = "rock_opd_banned_ids"
"""Where ``SamplingParams(extra_args=...)`` carries the ids a response may not contain."""


class RealIdsOnly(LogitsProcessorV1, LogitsProcessorV2):
    """Cuts the vocabulary's padding columns, so that no id beyond the tokenizer is ever sampled.

    It speaks both of vLLM's interfaces: model runner 1 (CPU) and 2 (GPU) each take only their own.
    It runs after vLLM has computed the raw log-probabilities, which keep the full width.
    """

    def __init__(self, vllm_config: Any, *_: Any) -> None:
        self._num_real_ids = int(vllm_config.additional_config[REAL_IDS_KEY])

    def apply(self, logits: torch.Tensor, *_: Any) -> torch.Tensor:
        logits[:, self._num_real_ids :] = -torch.inf
        return logits

    def is_argmax_invariant(self) -> bool:
        return False  # greedy decoding must be cut, too

    def update_state(self, batch_update: Any) -> None:
        """Nothing to keep: the cut is the same for every request."""


class BannedIds(LogitsProcessorV1, LogitsProcessorV2):
    """Takes a request's banned ids out of every softmax it samples from.

    Model runner 1 tells of requests by their row in the batch, which moves (``update_state``);
    runner 2 by a slot that stays (``add_request``), with the slot of every row in ``apply``'s
    context. Here both are slots; for runner 1, row i is slot i.
    """

    def __init__(self, vllm_config: Any, *_: Any) -> None:
        self._num_slots = int(vllm_config.scheduler_config.max_num_seqs)
        self._banned: dict[int, list[int]] = {}
        """Slot -> its ids; slots without a ban are absent."""
        self._table_SK: torch.Tensor | None = None
        """int64 on the logits' device, -1 in rows of slots without a ban; None: to be made."""

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        if process_dict_updates(self._banned, batch_update, lambda params, *_: _banned_ids(params)):
            self._table_SK = None

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        ids = _banned_ids(sampling_params)
        if ids != self._banned.pop(req_idx, None):
            self._table_SK = None
        if ids is not None:
            self._banned[req_idx] = ids
        return ids is not None

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        if not self._banned:
            return logits
        if self._table_SK is None:
            self._table_SK = self._table().to(logits.device)
        slots = slice(logits.shape[0]) if ctx is None else ctx.expanded_idx_mapping.long()
        ids_RK = self._table_SK[slots]
        at_RK = ids_RK.clamp(min=0)
        kept_RK = logits.gather(1, at_RK)
        return logits.scatter_(1, at_RK, kept_RK.masked_fill(ids_RK >= 0, -torch.inf))

    def _table(self) -> torch.Tensor:
        width = max(map(len, self._banned.values()))
        table = torch.full((self._num_slots, width), -1)
        for slot, ids in self._banned.items():
            # A row is filled up with its own first id: writes to one place must not differ.
            table[slot] = torch.tensor(ids + ids[:1] * (width - len(ids)))
        return table


def _banned_ids(params: Any) -> list[int] | None:
    return (params.extra_args or {}).get(BANNED_KEY)


class WorkerExtension:
    """Methods that vLLM adds to its worker class; the engines call them with ``collective_rpc``."""

    # Attributes of vLLM's worker.
    device: torch.device
    model_runner: Any
    model_config: Any
    vllm_config: Any

    @contextmanager
    def _loading(self) -> Iterator[Any]:
        from vllm.config import set_current_vllm_config

        with torch.device(self.device), set_current_vllm_config(self.vllm_config):
            yield self.model_runner.model

    def prepare_reload(self) -> None:
        """Before either way of reloading: notes which layers have to be filled.

        An update that never ended is taken back (the weights stay a mixture): the halves of two
        would be counted as one whole layer.
        """
        from vllm.model_executor.model_loader.reload.layerwise import (
            finalize_layerwise_reload,
            get_layerwise_info,
        )

        with self._loading() as model:
            infos = [get_layerwise_info(layer) for layer in model.modules()]
            open_infos = [info for info in infos if info.can_load()]
            for info in open_infos:
                info.loaded_weights.clear()
                info.load_numel = 0
            if open_infos:
                finalize_layerwise_reload(model, self.model_config)
            # A tied head shares its parameter with the embedding, which stands first and is sent.
            names = [name for name, _ in model.named_parameters()]
            self._rock_owners = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
        if hasattr(self, "_weight_update_active"):  # what vLLM's own transfer engines go by
            self._weight_update_active = False

    def begin_reload(self) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import initialize_layerwise_reload

        with self._loading() as model:
            initialize_layerwise_reload(model)

    def load_chunk(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Loads some of the model's tensors, by their names in a checkpoint.

        vLLM may hold on to the tensors until ``end_reload``: the caller must not write to them.
        """
        with self._loading() as model:
            model.load_weights(iter(tensors))

    def incomplete_layers(self) -> list[str]:
        """Layers that have not received every element of their weights, with counts.

        To be asked before vLLM finalises a reload: it would then run on with what is missing
        uninitialised. Names do not tell: it calls a fused projection loaded when one part came.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
        from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

        found = []
        for owner in self._rock_owners:
            layer = self.model_runner.model.get_submodule(owner)
            info = get_layerwise_info(layer)
            if not info.can_load():  # whole, and already in use
                continue
            if isinstance(layer, VocabParallelEmbedding):  # without vLLM's padding rows
                needed = layer.num_org_embeddings_per_partition * layer.embedding_dim
            else:
                needed = sum(get_tensor_load_numel(p) for p in layer.parameters(recurse=False))
            if info.load_numel < needed:
                found.append(f"{owner} ({info.load_numel} of {needed} elements)")
        return found

    def end_reload(self) -> list[str]:
        """Puts the new weights into use.

        Returns:
            Modules whose packed copy still holds old weights: none, unless vLLM has changed.
        """
        from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload
        from vllm.platforms import current_platform

        with self._loading() as model:
            finalize_layerwise_reload(model, self.model_config)
            if not current_platform.is_cpu():
                return []
            _repack_on_cpu(model)
            return _stale_packed(model)

    def held_checksums(self, names: list[str]) -> dict[str, int]:
        """crc32 of the bytes that the running model holds.

        For those of ``names`` that vLLM keeps as the checkpoint has them: embedding and head
        (without vLLM's padding rows; not when they are split over GPUs) and norms. Other names are
        left out.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        held = {}
        for prefix, module in self.model_runner.model.named_modules():
            name, weight = f"{prefix}.weight", getattr(module, "weight", None)
            if name not in names or not isinstance(weight, torch.Tensor) or not weight.numel():
                continue  # packed layers keep an empty tensor under the name
            if isinstance(module, VocabParallelEmbedding):
                if module.tp_size != 1:
                    continue
                weight = weight[: module.org_vocab_size]
            elif weight.dim() != 1:
                continue
            held[name] = checksum(weight)
        return held

    def cut_logits(self, num_real_ids: int) -> None:
        """Narrows the model's logits to the ids that exist, before every softmax."""
        self.model_runner.model.logits_processor.org_vocab_size = num_real_ids


def checksum(tensor: torch.Tensor) -> int:
    """crc32 of a tensor's bytes in row-major order."""
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data)


def _repack_on_cpu(model: torch.nn.Module) -> None:
    """vLLM 0.31, 0.32: a layer-wise reload leaves two packed copies as they were."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and weight is not None and weight.numel():
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and hasattr(module, "w13_weight"):
            kernel.impl.fused_experts.process_weights_after_loading(module)


def _stale_packed(model: torch.nn.Module) -> list[str]:
    """Modules whose packed product differs from that of the weight they keep beside it."""
    stale = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not hasattr(module, "cpu_linear") or weight is None or not weight.numel():
            continue
        probe_1H = torch.linspace(-1, 1, weight.shape[1], dtype=weight.dtype)[None]
        got = module.cpu_linear(probe_1H, weight, None).float()
        want = torch.nn.functional.linear(probe_1H.float(), weight.float())
        rounding = 1e-5 if weight.dtype == torch.float32 else 1e-2
        if (got - want).abs().max() > rounding * want.abs().max():
            stale.append(name)
    return stale
