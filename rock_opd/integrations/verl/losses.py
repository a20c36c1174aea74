"""Distillation losses for verl: its own with a weight per token, and the top-k reverse KL it lacks.

A batch may carry ``token_weights``, shaped like ``response_mask``: 1 trains a token, 0 freezes it.
Each loss here is the stock per-token loss times that weight; without the field it is the stock
loss, bit for bit. *Here a frozen token loses its gradient*: ``_weigh``.

Which denominator the sum is divided by is settled where the weights are put into the batch, by
``weight_fields``: verl's engines sum ``loss_mask`` over ranks and micro-batches before any loss is
called, so that is the one place where both normalisers are right on every engine.

Refuses: back-propagating k1, negative weights, weights of another shape, the forward KL where the
reverse was asked for.

Shapes: ``B`` sequences, ``R`` response tokens (padded), ``T`` tokens of all sequences laid flat,
``V`` vocabulary, ``K`` top-k.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.distillation.losses import (
    DistillationLossSettings,
    distillation_ppo_loss,
    get_distillation_loss_fn,
    register_distillation_loss,
)
from verl.utils import tensordict_utils as tu
from verl.utils.metric import AggregationType, Metric
from verl.workers.config import ActorConfig, DistillationConfig
from verl.workers.utils.padding import no_padding_2_padding

from rock_opd.config import NORMALIZERS
from rock_opd.core.objective import (
    MIN_TAIL_LOGPROB,
    shielded,
    topk_renormalised_reverse_kl,
    topk_tail_divergence,
    weighted,
)
from rock_opd.errors import ConfigError
from rock_opd.integrations.verl import plugin

TOKEN_WEIGHTS = "token_weights"
"""Batch field, float [B, R] nested or padded: the weight of each response token."""
MASK_VERSION = "mask_version"
"""Batch field, int64 [B]: version of the freeze mask the weights were made from."""

Losses = tuple[Tensor, dict[str, Any]]
"""Per-token losses [B, R] and metrics, as verl's registry wants them."""

TOPK_REVERSE = ("rock_reverse_kl_topk", "rock_reverse_kl_topk_renorm")
_REVERSE_KL = "rock_reverse_kl"
"""What our logits processor calls its rows; verl's stock one writes forward KL rows under another
name, which must never be taken for these."""
_VERL_TOPK = ("fsdp", "fsdp2", "veomni", "megatron")
"""``ActorConfig.strategy`` for which verl 0.9 knows a top-k loss."""


# --- weights into the batch -----------------------------------------------------------------------


def check_normalizer(normalizer: str, *, loss_agg_mode: str, use_task_rewards: bool) -> None:
    """Refuses what ``weight_fields`` could only do wrong under this verl config.

    Args:
        normalizer: ``all`` divides by all response tokens, so that the trained ones keep their
            step size; ``kept`` by the sum of weights, so that they share the frozen ones' part.

    Raises:
        ConfigError: an unknown name; ``kept`` where verl does not divide by ``loss_mask``, or where
            task rewards share the denominator.
    """
    _check_name(normalizer)
    if normalizer == "kept" and loss_agg_mode != "token-mean":
        raise ConfigError(
            "normalizer=kept needs actor.loss_agg_mode=token-mean: under "
            f"{loss_agg_mode} verl does not divide by the number of tokens; take normalizer=all"
        )
    if normalizer == "kept" and use_task_rewards:
        raise ConfigError(
            "normalizer=kept with distillation_loss.use_task_rewards=true would rescale the task's "
            "loss as well, which verl divides by the same number; take normalizer=all"
        )


def _check_name(normalizer: str) -> None:
    if normalizer not in NORMALIZERS:
        raise ConfigError(f"normalizer must be one of {', '.join(NORMALIZERS)}, got {normalizer!r}")


def weight_fields(
    weights: Sequence[np.ndarray],
    response_mask: Tensor,
    *,
    normalizer: str,
    mask_version: int = 0,
) -> dict[str, Tensor]:
    """The fields to put into a verl batch, for ``TensorDict.update`` or ``tq.kv_batch_put``.

    Make them when the batch is whole: verl fills it up with copies of a sequence, whose weights
    would not fit.

    Args:
        weights: one float array per sequence, as long as its response.
        response_mask: of the batch, nested [B, R]; where it is 0 (a tool's turn) the weight is 0.
        normalizer: see ``check_normalizer``, which is to be asked first, once.
        mask_version: of the freeze mask the weights were made from; 0 when there is none.

    Returns:
        ``token_weights`` (float32, nested), ``mask_version`` (int64 [B]) and, for ``kept``,
        ``loss_mask``: verl's denominator is then the sum of weights of the mini-batch, over every
        rank and micro-batch.

    Raises:
        ConfigError: an unknown normalizer.
        ValueError: another number of sequences, or of tokens in one.
    """
    _check_name(normalizer)
    rows = []
    for row, mask_R in zip(weights, response_mask.unbind(), strict=True):
        if len(row) != len(mask_R):
            raise ValueError(f"{len(row)} weights for a response of {len(mask_R)} tokens")
        rows.append(torch.as_tensor(row, dtype=torch.float32) * mask_R)
    nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    fields = {
        TOKEN_WEIGHTS: nested,
        MASK_VERSION: torch.full((len(rows),), mask_version, dtype=torch.int64),
    }
    if normalizer == "kept":
        fields["loss_mask"] = nested.clone()
    return fields


# --- the registered losses ------------------------------------------------------------------------


def rock_k1(
    config: ActorConfig,
    distillation_config: DistillationConfig,
    model_output: dict,
    data: TensorDict,
) -> Losses:
    """``w (log q(x) - log p(x))`` of the sampled token, q the student, p the teacher.

    An unbiased estimate of the reverse KL, for the policy gradient: its negative is the reward.
    Its own gradient, ``grad log q``, is 0 in expectation whatever the teacher says, hence:

    Raises:
        ConfigError: ``use_policy_gradient`` is false.
    """
    if not distillation_config.distillation_loss.use_policy_gradient:
        raise ConfigError(
            "loss_mode=rock_k1 needs distillation_loss.use_policy_gradient=true: back-propagating "
            "log q - log p does not depend on the teacher; rock_k2 is its supervised counterpart"
        )
    return _weighted_stock("k1", config, distillation_config, model_output, data)


def rock_k2(
    config: ActorConfig,
    distillation_config: DistillationConfig,
    model_output: dict,
    data: TensorDict,
) -> Losses:
    """``w (log q(x) - log p(x))^2 / 2``.

    Back-propagated, its gradient ``(log q - log p) grad log q`` is that of the reverse KL(q || p)
    in expectation over x ~ q: the one to take for supervised on-policy distillation.
    """
    return _weighted_stock("k2", config, distillation_config, model_output, data)


def rock_k3(
    config: ActorConfig,
    distillation_config: DistillationConfig,
    model_output: dict,
    data: TensorDict,
) -> Losses:
    """``w (p(x)/q(x) - 1 - log p(x)/q(x))``.

    Its VALUE is an unbiased, never negative estimate of the reverse KL(q || p). Its GRADIENT, when
    it is back-propagated directly, is not: ``(1 - p/q) grad log q``, whose expectation over x ~ q
    is ``-E_p[grad log q]``, the gradient of the FORWARD KL(p || q). As a reward
    (``use_policy_gradient``) only the value counts.
    """
    return _weighted_stock("k3", config, distillation_config, model_output, data)


def rock_forward_kl_topk(
    config: ActorConfig,
    distillation_config: DistillationConfig,
    model_output: dict,
    data: TensorDict,
) -> Losses:
    """``w max(0, sum_K p log(p / q))`` over the teacher's K ids, cut off raw as verl does: the
    masses are below 1, so the sum is no divergence and what falls below 0 is cut."""
    return _weighted_stock("forward_kl_topk", config, distillation_config, model_output, data)


def rock_reverse_kl_topk(
    config: ActorConfig,
    distillation_config: DistillationConfig,
    model_output: dict,
    data: TensorDict,
) -> Losses:
    """``w KL(q || p)`` over the teacher's K ids and a bucket for all others, or
    (``rock_reverse_kl_topk_renorm``) over the K ids alone, renormalised on both sides.

    Raises:
        ConfigError: the rows were not made: the engine asked verl's own logits processor, which
            knows the forward KL only.
    """
    if _REVERSE_KL not in model_output:
        raise ConfigError(
            f"loss_mode={distillation_config.distillation_loss.loss_mode}: the engine "
            f"(actor.strategy={config.strategy}) made no reverse KL rows, since verl's top-k loss "
            "is the forward KL whatever the loss_mode; take model_engine=deepspeed, or let the "
            "trainer call set_loss_fn(with_rock_topk(loss_fn))"
        )
    mask_BR = _response_mask(data)
    losses_BR = no_padding_2_padding(model_output[_REVERSE_KL], data)
    metrics: dict[str, Any] = {}
    for name in ("student_mass", "teacher_mass"):
        mass = no_padding_2_padding(model_output[name], data)[mask_BR]
        metrics[f"distillation/{name}"] = mass.mean().item()
        metrics[f"distillation/{name}_min"] = Metric(AggregationType.MIN, mass.min())
        metrics[f"distillation/{name}_max"] = Metric(AggregationType.MAX, mass.max())
    return _weigh(losses_BR, metrics, distillation_config, data)


ESTIMATORS = (rock_k1, rock_k2, rock_k3)


def register() -> None:
    """Puts the losses into verl's registry."""

    def add(fn: Callable[..., Losses], *names: str, topk: bool) -> None:
        settings = DistillationLossSettings(
            names=list(names), use_topk=topk, use_estimator=not topk
        )
        register_distillation_loss(settings)(fn)

    for fn in ESTIMATORS:
        add(fn, fn.__name__, topk=False)
    add(rock_forward_kl_topk, rock_forward_kl_topk.__name__, topk=True)
    add(rock_reverse_kl_topk, *TOPK_REVERSE, topk=True)


# --- weighing -------------------------------------------------------------------------------------


def _weighted_stock(
    stock_mode: str,
    config: ActorConfig,
    distillation_config: DistillationConfig,
    model_output: dict,
    data: TensorDict,
) -> Losses:
    if TOKEN_WEIGHTS in data and "log_probs" in model_output:
        log_probs = model_output["log_probs"]
        flat_T = log_probs.values() if log_probs.is_nested else log_probs
        flat_T = shielded(flat_T, _row_weights(data, len(flat_T)))
        model_output = {**model_output, "log_probs": flat_T}
    losses_BR, metrics = get_distillation_loss_fn(stock_mode)(
        config=config,
        distillation_config=_with_mode(distillation_config, stock_mode),
        model_output=model_output,
        data=data,
    )
    return _weigh(losses_BR, metrics, distillation_config, data)


def _with_mode(config: DistillationConfig, loss_mode: str) -> DistillationConfig:
    """The same config under a stock loss's name. A copy, since verl freezes its configs, and not
    ``dataclasses.replace``, which would check and change the teachers again."""
    outer, loss = copy.copy(config), copy.copy(config.distillation_loss)
    object.__setattr__(loss, "loss_mode", loss_mode)
    object.__setattr__(outer, "distillation_loss", loss)
    return outer


def _weigh(
    losses_BR: Tensor, metrics: dict[str, Any], config: DistillationConfig, data: TensorDict
) -> Losses:
    """The losses times ``token_weights``, with the two metrics; untouched where there are none."""
    if TOKEN_WEIGHTS not in data:
        return losses_BR, metrics
    clamp = config.distillation_loss.loss_max_clamp
    mask_BR = _response_mask(data)
    weight_BR = _checked_weights(data, losses_BR.shape).to(losses_BR.dtype)
    if clamp is not None:
        if bool((weight_BR > 1).any()):
            raise ConfigError(
                f"batch field {TOKEN_WEIGHTS} holds weights above 1, and verl clamps after "
                "weighing; set distillation_loss.loss_max_clamp=null or lower the weights"
            )
        losses_BR = losses_BR.clamp(min=-clamp, max=clamp)
    if float(data["batch_num_tokens"]) == 0:
        # normalizer=kept on a mini-batch frozen whole: 0 / 0 would be NaN on every rank
        tu.assign_non_tensor(data, batch_num_tokens=1)

    frozen = (weight_BR == 0) & mask_BR
    share = frozen.sum() / mask_BR.sum().clamp(min=1)
    metrics["distillation/frozen_share"] = Metric(AggregationType.MEAN, share)
    if MASK_VERSION in data:
        metrics["distillation/mask_version"] = Metric(
            AggregationType.MAX, int(data[MASK_VERSION].max())
        )
    return weighted(losses_BR, weight_BR), metrics


def _checked_weights(data: TensorDict, shape: torch.Size) -> Tensor:
    """``token_weights``, padded to [B, R]."""
    weight_BR = _padded(data[TOKEN_WEIGHTS], 0.0)
    if weight_BR.shape != shape:
        raise ConfigError(
            f"batch field {TOKEN_WEIGHTS} has shape {list(weight_BR.shape)}, the responses have "
            f"{list(shape)}: one weight per response token; write it after verl has "
            "filled up the batch"
        )
    if not bool((weight_BR >= 0).all()):
        raise ConfigError(f"batch field {TOKEN_WEIGHTS} holds negative or NaN weights")
    return weight_BR


def _row_weights(data: TensorDict, num_rows: int) -> Tensor:
    """float32 [T]: 0 where the row predicts a token of weight 0, 1 elsewhere."""
    weights = data[TOKEN_WEIGHTS]
    device = (weights.values() if weights.is_nested else weights).device
    places_BR = no_padding_2_padding(torch.arange(1, num_rows + 1, device=device), data)
    frozen_BR = (_checked_weights(data, places_BR.shape) == 0) & (places_BR > 0)  # no padding
    weight_T = torch.ones(num_rows, device=device)
    weight_T[places_BR[frozen_BR] - 1] = 0.0
    return weight_T


def _padded(values: Tensor, padding: float) -> Tensor:
    return values.to_padded_tensor(padding) if values.is_nested else values


def _response_mask(data: TensorDict) -> Tensor:
    return _padded(data["response_mask"].bool(), False)


# --- top-k in the logits processor ----------------------------------------------------------------


def rock_distillation_loss(
    config: ActorConfig,
    distillation_config: DistillationConfig,
    model_output: dict | None = None,
    data: TensorDict | None = None,
    dp_group: Any = None,
    student_logits: Tensor | None = None,
    data_format: str = "thd",
) -> Any:
    """verl's ``distillation_ppo_loss`` whose top-k rows follow the loss_mode and not only the
    strategy: the reverse KL, and the forward KL also under an ``actor.strategy`` verl has none for.

    Returns:
        With ``student_logits`` [1, T, V]: rows [1, T] by name. Without: the loss and its metrics.
    """
    if student_logits is not None:
        student_logits = _shielded_rows(student_logits, data)
        if distillation_config.distillation_loss.loss_mode in TOPK_REVERSE:
            return _reverse_kl_rows(config, distillation_config, data, student_logits)
        if config.strategy not in _VERL_TOPK:
            from verl.trainer.distillation.fsdp.losses import compute_forward_kl_topk

            return compute_forward_kl_topk(
                student_logits=student_logits,
                teacher_topk_log_probs=data["teacher_logprobs"],
                teacher_topk_ids=data["teacher_ids"],
                config=distillation_config,
                data_format=data_format,
            )
    return distillation_ppo_loss(
        config, distillation_config, model_output, data, dp_group, student_logits, data_format
    )


def _shielded_rows(student_logits: Tensor, data: TensorDict) -> Tensor:
    """The logits, which a frozen position's row gives no gradient; those cut over ranks (sequence
    parallel) come back as they are."""
    if TOKEN_WEIGHTS not in data or not data["input_ids"].is_nested:
        return student_logits
    num_rows = int(data["input_ids"].offsets()[-1])
    if student_logits.shape[:2] != (1, num_rows):
        return student_logits
    return shielded(student_logits, _row_weights(data, num_rows)[None])


def with_rock_topk(loss_function: Callable[..., Any]) -> Callable[..., Any]:
    """The loss function an engine or ``TrainingWorker.set_loss_fn`` got, with our logits processor
    in place of verl's; any other function comes back as it is."""
    if isinstance(loss_function, functools.partial) and loss_function.func is distillation_ppo_loss:
        return functools.partial(
            rock_distillation_loss, *loss_function.args, **loss_function.keywords
        )
    return loss_function


def _reverse_kl_rows(
    config: ActorConfig,
    distillation_config: DistillationConfig,
    data: TensorDict,
    student_logits_1TV: Tensor,
) -> dict[str, Tensor]:
    """Reverse KL of the rows that predict a response token; all other rows are 0, since verl fills
    the teacher's last row of a sequence, which predicts nothing, with zeros.

    Returns:
        ``rock_reverse_kl`` with the gradient, ``student_mass`` and ``teacher_mass`` of the K ids;
        each [1, T], float32 at least.
    """
    loss_config = distillation_config.distillation_loss
    _check_reverse(config, loss_config)
    rows_T = _predicting_rows(data)
    logits_NV = student_logits_1TV[0][rows_T]
    ids_NK = data["teacher_ids"].values()[rows_T].long()
    log_p_NK = data["teacher_logprobs"].values()[rows_T].float()

    mass_N = log_p_NK.double().exp().sum(-1)
    if TOKEN_WEIGHTS in data:
        # A frozen row's loss is dropped: any table of mass < 1 stands for what the teacher said.
        frozen_N1 = (_row_weights(data, len(rows_T))[rows_T] == 0)[:, None]
        log_p_NK = log_p_NK.masked_fill(frozen_N1, -math.log(log_p_NK.shape[1] + 1))
    if loss_config.loss_mode == "rock_reverse_kl_topk":
        tail_N = (
            (1.0 - log_p_NK.double().exp().sum(-1))
            .log()
            .clamp(min=MIN_TAIL_LOGPROB)
            .nan_to_num(MIN_TAIL_LOGPROB)
        )
        kl_N = topk_tail_divergence(logits_NV, ids_NK, log_p_NK, tail_N.to(log_p_NK.dtype))
    else:
        kl_N = topk_renormalised_reverse_kl(logits_NV, ids_NK, log_p_NK)
    with torch.no_grad():
        student_N = (logits_NV.gather(1, ids_NK) - logits_NV.logsumexp(-1, keepdim=True)).exp()
    # An empty slice keeps the graph where no row predicts a response token: every rank must run
    # backward.
    base_T = student_logits_1TV[0, :, :0].sum(-1).to(kl_N.dtype)

    def laid_out(values_N: Tensor) -> Tensor:
        return base_T.index_put((rows_T.nonzero()[:, 0],), values_N.to(base_T.dtype))[None]

    return {
        _REVERSE_KL: laid_out(kl_N),
        "student_mass": laid_out(student_N.sum(-1)).detach(),
        "teacher_mass": laid_out(mass_N).detach(),
    }


def _check_reverse(config: ActorConfig, loss_config: Any) -> None:
    from verl.utils.ulysses import get_ulysses_sequence_parallel_world_size

    mode = loss_config.loss_mode
    if config.strategy == "megatron" or get_ulysses_sequence_parallel_world_size() > 1:
        raise ConfigError(
            f"loss_mode={mode} needs whole rows of logits on each rank: no megatron strategy and "
            "ulysses_sequence_parallel_size=1; rock_forward_kl_topk has no such limit"
        )
    if loss_config.log_prob_min_clamp is not None or loss_config.use_chunked_topk:
        raise ConfigError(
            f"loss_mode={mode} knows neither log_prob_min_clamp (its buckets keep it finite) nor "
            "use_chunked_topk: set distillation_loss.log_prob_min_clamp=null and "
            "distillation_loss.use_chunked_topk=false"
        )


def _predicting_rows(data: TensorDict) -> Tensor:
    """bool [T]: row t predicts token t + 1 of the same sequence, a response token masked in."""
    if not data["responses"].is_nested:
        raise ConfigError(
            "a top-k reverse KL needs trainer.use_v1=true: this batch is padded, as those of "
            "verl's older trainers are"
        )
    mask = data["response_mask"]
    masks = mask.unbind() if mask.is_nested else mask
    offsets = data["input_ids"].offsets()
    rows_T = torch.zeros(int(offsets[-1]), dtype=torch.bool, device=offsets.device)
    lengths = data["responses"].offsets().diff().tolist()
    for mask_R, end, length in zip(masks, offsets[1:].tolist(), lengths, strict=True):
        rows_T[end - length - 1 : end - 1] = mask_R[:length].bool()
    return rows_T


plugin.complete(__name__)
