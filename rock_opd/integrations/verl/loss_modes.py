"""Which of verl's losses is one of ours, gradient for gradient; refuses the others."""

from __future__ import annotations

from omegaconf import DictConfig

from rock_opd.integrations.verl.unsupported import LOSS, TRAINER, get, not_supported

SAMPLED = {"loss.divergence": "policy_gradient", "teacher.payload": "sampled"}
LOSSES: dict[tuple[str, bool], dict[str, str]] = {
    **{(name, True): SAMPLED for name in ("k1", "kl", "rock_k1")},
    **{(name, False): SAMPLED for name in ("k2", "mse", "rock_k2")},
    ("rock_reverse_kl_topk", False): {
        "loss.divergence": "reverse_kl",
        "teacher.payload": "topk_tail",
    },
}
"""(loss_mode, use_policy_gradient) -> what of ours has the same gradient, token by token.

k1 as a reward and k2 back-propagated both push a sampled token by ``(log q - log p) grad log q``.
"""
_NO_EQUAL = {
    "k1": "back-propagated it does not depend on the teacher; set use_policy_gradient=true",
    "k2": "as a reward it is no divergence; set use_policy_gradient=false",
    "k3": "its gradient is a sampled forward KL, which has no equal; +rock_opd.loss.divergence="
    "forward_kl +rock_opd.teacher.payload=hidden is what it estimates, k2 the reverse KL",
    "abs": "it has no equal; k2 is the reverse KL",
    "forward_kl_topk": "it cuts the table off raw, which has no equal; "
    "+rock_opd.loss.divergence=forward_kl +rock_opd.teacher.payload=topk_tail has a tail bucket",
    "rock_reverse_kl_topk": "as a reward it has no equal; set use_policy_gradient=false",
    "rock_reverse_kl_topk_renorm": "it has no equal; rock_reverse_kl_topk has a tail bucket",
}
ALIAS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def divergence_is_ours(config: DictConfig) -> bool:
    """Whether the block of overrides names a divergence: verl's ``loss_mode`` is then not asked."""
    return get(config, f"{TRAINER}.loss.divergence") is not None


def loss_of(config: DictConfig) -> dict[str, str]:
    """Divergence and payload of verl's ``loss_mode``.

    Raises:
        ConfigError: it has no equal; the message says what to take.
    """
    mode = str(get(config, f"{LOSS}.loss_mode"))
    found = LOSSES.get((mode, bool(get(config, f"{LOSS}.use_policy_gradient"))))
    if found is None:
        plain = ALIAS.get(mode, mode)
        why = _NO_EQUAL.get(plain) or _NO_EQUAL.get(plain.removeprefix("rock_"))
        raise not_supported(f"{LOSS}.loss_mode", mode, why or "it is not known here")
    return found
