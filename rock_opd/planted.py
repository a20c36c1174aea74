"""A planted truth: tiny teacher/student pairs in which it is known which token types cannot be
learned.

A synthetic language of some seventy words. Most tokens follow from the last one. After a marker
``ask<g>`` comes one of a group's *planted* types, chosen by a secret that stands in the teacher's
prompt only: the student cannot know it, so its divergence there has a floor that no training
removes, and the floor is known (``divergence_floor``). After the marker ``calc`` comes one of the
*rare-hard* types, by a rule over the word before the marker that the student starts without:
costly, seldom, and learnable. All other types are ordinary.

What is random comes from one seed: the language, both models, the prompts. The same seed makes the
same pair, bit for bit, on the same build of torch with one thread.

Shape letters: ``B`` sequences, ``T`` positions, ``V`` vocabulary, ``G`` secret groups.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rock_opd.demo import quiet_transformers, write_jsonl
from rock_opd.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PAD, EOS, USER, ASSISTANT, NONE, CALC = range(6)
Rule = Literal["true", "old", "none"]
OLD_RULE_NOISE = 0.5
"""How unsure the student is of its old rule."""
RESPONSE_TOKENS = 32
"""Length limit of a response, in supervised training and in runs."""
_CALC_BOOST = 8.0
"""How much more often the texts to learn from hold ``calc``: its rule would take long otherwise."""
TEMPLATE = (
    "{% for message in messages %}<user> {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a planted pair is like. The defaults are the easy setting."""

    num_words: int = 40
    """Ordinary types; their frequencies differ by two orders of magnitude."""
    num_groups: int = 2
    """Secrets of a prompt: independent, uniform."""
    group_size: int = 4
    """Planted types that one secret chooses between."""
    num_hard: int = 8
    """Rare-hard types."""
    secret_share: float = 0.15
    """Probability that a secret's marker follows a word."""
    hard_share: float = 0.02
    """Probability that ``calc`` follows a word."""
    noise: float = 0.05
    """Teacher's probability of the group's other types together: the more, the lower the floor."""
    hard_noise: float = 0.05
    """The same at the rare-hard slots."""
    student_width: int = 64
    """Hidden width of the student; the teacher's is 64."""
    teacher_steps: int = 250
    """Supervised steps of the teacher: 250 bring it within 0.005 nats of the language."""
    student_steps: int = 80
    """Supervised steps of the student before the run: the fewer, the more ordinary types cost."""

    @property
    def num_planted(self) -> int:
        return self.num_groups * self.group_size


def divergence_floor(group_size: int, noise: float) -> float:
    """Least mean reverse KL, in nats, of a student that cannot see which of ``group_size`` equally
    likely secrets holds.

    For secrets z with teachers p_z, the mean over z of KL(q || p_z) is least at
    ``q ~ exp(mean_z log p_z)`` and is then ``-log sum_v exp(mean_z log p_z(v))`` (Gibbs). Here p_z
    gives 1 - noise to one type and noise / (group_size - 1) to each of the others, so that q is
    uniform over the group.
    """
    others = group_size - 1
    mean_log = (math.log(1 - noise) + others * math.log(noise / others)) / group_size
    return -math.log(group_size) - mean_log


class Language:
    """The distribution of the next token, given the tokens so far and the secrets."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self.setting = s = setting
        first = 6
        self.ask_ids = np.arange(first, first + s.num_groups)
        first += s.num_groups
        self.secret_ids = np.arange(first, first + s.num_planted).reshape(s.num_groups, -1)
        first += s.num_planted
        self.word_ids = np.arange(first, first + s.num_words)
        first += s.num_words
        self.planted_ids = np.arange(first, first + s.num_planted).reshape(s.num_groups, -1)
        first += s.num_planted
        self.hard_ids = np.arange(first, first + s.num_hard)
        self.num_types = first + s.num_hard
        rng = np.random.default_rng((seed, 0))
        self._after = self._draw_successors(rng)
        self.rule = rng.integers(s.num_hard, size=s.num_words)
        """int [num_words]: which rare-hard type a word asks for."""
        self.old_rule = (self.rule + rng.integers(1, s.num_hard, size=s.num_words)) % s.num_hard
        """int [num_words]: what the student believes at the start, never right."""

    @property
    def tokens(self) -> list[str]:
        """V texts, by id."""
        s = self.setting
        pairs = [(g, j) for g in range(s.num_groups) for j in range(s.group_size)]
        return [
            *("<pad>", "<eos>", "<user>", "<assistant>", "none", "calc"),
            *(f"ask{g}" for g in range(s.num_groups)),
            *(f"secret{g}.{j}" for g, j in pairs),
            *(f"w{i}" for i in range(s.num_words)),
            *(f"planted{g}.{j}" for g, j in pairs),
            *(f"hard{i}" for i in range(s.num_hard)),
        ]

    @property
    def ordinary_ids(self) -> np.ndarray:
        """Types of a response that are neither planted nor rare-hard, EOS left out."""
        return np.concatenate([[CALC], self.ask_ids, self.word_ids])

    def _draw_successors(self, rng: np.random.Generator) -> np.ndarray:
        """float64 [V, V]: the distribution after each type, markers apart."""
        s = self.setting
        popularity = 1.0 / np.arange(1, s.num_words + 1)
        after = np.zeros((self.num_types, self.num_types))
        markers = s.secret_share + s.hard_share
        for v in [*self.word_ids, *self.planted_ids.flat, *self.hard_ids]:
            likely = rng.choice(s.num_words, 4, replace=False, p=popularity / popularity.sum())
            words = 0.04 * popularity / popularity.sum()
            words[likely] += np.array([0.55, 0.23, 0.12, 0.06])
            after[v, self.word_ids] = words
            if v in self.word_ids:
                after[v] *= 1 - markers - 0.01
                after[v, self.ask_ids] = s.secret_share / s.num_groups
                after[v, CALC] = s.hard_share
                after[v, EOS] = 0.01
        return after

    @cached_property
    def _after_ask(self) -> np.ndarray:
        """float64 [G, group_size + 1, V]: by secret; the last entry is their mean."""
        s = self.setting
        table = np.zeros((s.num_groups, s.group_size + 1, self.num_types))
        for g in range(s.num_groups):
            for z in range(s.group_size):
                table[g, z, self.planted_ids[g]] = s.noise / (s.group_size - 1)
                table[g, z, self.planted_ids[g, z]] = 1 - s.noise
            table[g, -1] = table[g, :-1].mean(0)
        return table

    @cached_property
    def _after_calc(self) -> dict[str, np.ndarray]:
        """float64 [V, V] by rule: the row is the type before the marker; uniform after no word."""
        s = self.setting
        tables = {}
        for name, rule, noise in (
            ("none", self.rule, 1 - 1 / s.num_hard),
            ("old", self.old_rule, OLD_RULE_NOISE),
            ("true", self.rule, s.hard_noise),
        ):
            table = np.zeros((self.num_types, self.num_types))
            table[:, self.hard_ids] = 1 / s.num_hard
            table[self.word_ids[:, None], self.hard_ids] = noise / (s.num_hard - 1)
            table[self.word_ids, self.hard_ids[rule]] = 1 - noise
            tables[name] = table
        return tables

    def next(
        self,
        before_B: np.ndarray,
        last_B: np.ndarray,
        secrets_BG: np.ndarray,
        *,
        rule: Rule = "true",
    ) -> np.ndarray:
        """float64 [B, V]: the distribution after ``... before last``.

        Args:
            secrets_BG: int, -1 where unknown: then the mean over the secrets.
            rule: what decides after ``calc``: the language's rule, the student's old one, or none
                (the rare-hard types are then equally likely).
        """
        after_BV = self._after[last_B].copy()
        for g, ask in enumerate(self.ask_ids):
            here = last_B == ask
            after_BV[here] = self._after_ask[g, secrets_BG[here, g]]
        here = last_B == CALC
        after_BV[here] = self._after_calc[rule][before_B[here]]
        here = last_B == ASSISTANT
        after_BV[here] = self._after[before_B[here]]
        return after_BV

    def prompt(self, secrets: Sequence[int] | np.ndarray | None, word: int) -> list[int]:
        """Ids of ``<user> secrets word <assistant>``; without secrets as many neutral tokens."""
        s = self.setting
        known = [NONE] * s.num_groups
        if secrets is not None:
            known = [int(self.secret_ids[g, z]) for g, z in enumerate(secrets)]
        return [USER, *known, word, ASSISTANT]

    def sequences(
        self, rng: np.random.Generator, num: int, length: int, *, secret: bool, rule: Rule
    ) -> tuple[np.ndarray, np.ndarray]:
        """Prompts with responses to learn from, and what to learn.

        At the slots of planted and rare-hard types the text holds a random type, as an untaught
        student would write: a teacher must know the secret from its prompt, not from the text.
        ``calc`` is written more often than the language has it; the distributions are the
        language's own.

        Args:
            secret: whether prompts show the secrets; otherwise the targets average over them.
            rule: as for ``next``.

        Returns:
            int64 [num, T] ids; float32 [num, length, V] distributions of the last ``length`` ids.
        """
        s = self.setting
        secrets_BG = rng.integers(s.group_size, size=(num, s.num_groups))
        words_B = rng.choice(self.word_ids, num)
        ids = np.array(
            [
                self.prompt(z if secret else None, w)
                for z, w in zip(secrets_BG, words_B, strict=True)
            ]
        )
        unknown_BG = np.full_like(secrets_BG, -1)
        targets = []
        for _ in range(length):
            before_B, last_B = ids[:, -2], ids[:, -1]
            targets.append(
                self.next(before_B, last_B, secrets_BG if secret else unknown_BG, rule=rule)
            )
            written_BV = self.next(before_B, last_B, unknown_BG, rule="none")
            written_BV[:, CALC] *= _CALC_BOOST
            written_BV[last_B == EOS, PAD] = 1.0
            written_BV[last_B == PAD, PAD] = 1.0
            points_B = rng.random(num) * written_BV.sum(1)
            token_B = (written_BV.cumsum(1) <= points_B[:, None]).sum(1)
            ids = np.concatenate([ids, token_B[:, None]], 1)
        return ids, np.stack(targets, 1).astype(np.float32)


def _new_model(language: Language, *, width: int, seed: int) -> PreTrainedModel:
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=language.num_types,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,  # the smallest that vLLM's CPU attention takes
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).float()
    model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=PAD, do_sample=True)
    return model


def fit(
    model: PreTrainedModel,
    language: Language,
    rng: np.random.Generator,
    *,
    num_steps: int,
    secret: bool,
    rule: Rule,
    lr: float = 1e-2,
) -> float:
    """Supervised training on the language's own distributions: cross-entropy, AdamW, cosine.

    Returns:
        Mean KL(language || model) of the last batch, nats per token.
    """
    import torch

    from rock_opd.core.schedule import learning_rate

    adam = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    kl = math.nan
    for step in range(num_steps):
        ids, target = language.sequences(rng, 24, RESPONSE_TOKENS, secret=secret, rule=rule)
        target_BTV = torch.from_numpy(target)
        known_BT = target_BTV.sum(-1)  # 0 after EOS
        logits_BTV = model(input_ids=torch.from_numpy(ids), use_cache=False).logits
        log_q_BTV = torch.log_softmax(logits_BTV[:, -target.shape[1] - 1 : -1], dim=-1)
        loss = -(target_BTV * log_q_BTV).sum() / known_BT.sum()
        for group in adam.param_groups:
            group["lr"] = learning_rate(
                step, num_updates=num_steps, lr=lr, min_lr=lr / 100, warmup_ratio=0.05
            )
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        entropy = -torch.special.xlogy(target_BTV, target_BTV).sum() / known_BT.sum()
        kl = float(loss.detach() - entropy)
    return kl


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A planted pair on disk."""

    folder: Path
    """Holds ``teacher``, ``student``, ``prompts.jsonl``, ``heldout.jsonl``, ``recipe.yaml``,
    ``truth.json``."""
    language: Language
    seed: int

    @classmethod
    def load(cls, folder: Path, setting: Setting, *, seed: int) -> Pair | None:
        """The pair that ``make_pair`` made there; None where it is missing or unfinished.

        Raises:
            DataError: the folder holds another pair.
        """
        truth = folder / "truth.json"
        if not truth.is_file():
            return None
        if json.loads(truth.read_text(encoding="utf-8"))["made"] != _made(setting, seed):
            raise DataError(
                f"{folder} holds a pair of another setting or seed; remove it, or choose another "
                "folder"
            )
        return cls(folder=folder, language=Language(setting, seed), seed=seed)

    def recipe_tree(self, name: str) -> dict[str, Any]:
        """A recipe for the pair, as a tree: what ``recipe.yaml`` holds."""
        folder = self.folder
        return {
            "run": {
                "name": name,
                "dir": str(folder / "runs"),
                "seed": self.seed,
                "num_steps": 120,
                "device": "cpu",
            },
            "data": {"prompts": str(folder / "prompts.jsonl")},
            "student": {
                "model": str(folder / "student"),
                "dtype": "float32",
                "micro_batch_tokens": 2048,
            },
            "optim": {"lr": 5e-3, "min_lr": 5e-4},
            "rollout": {
                "dtype": "float32",
                "prompts_per_step": 32,
                "max_prompt_tokens": 16,
                "max_new_tokens": RESPONSE_TOKENS,
                "kv_cache_bytes": 64 << 20,
            },
            "teacher": {
                "model": str(folder / "teacher"),
                "dtype": "float32",
                "kv_cache_bytes": 64 << 20,
            },
            "policy": {
                "name": "rock_freeze",
                "top_k": self.language.setting.num_planted,
                "drop_most_frequent": 0,
                "min_count": 20,
                "warmup_steps": 40,
                "refresh_every": 20,
                "audit_share": 0.1,
            },
            "eval": {"heldout_prompts": str(folder / "heldout.jsonl"), "num_heldout": 128},
            "checkpoint": {"every": 0},
            "placement": {"rollout_cpus": 0, "teacher_cpus": 0},
        }


def make_pair(folder: Path, setting: Setting, *, seed: int) -> Pair:
    """Makes both models, the prompts and the truth in ``folder``, in about ten seconds of one core.

    Every word opens a prompt once with every combination of secrets, so that not even the prompt
    file tells a student more of the secrets than that they are uniform. Every fifth word opens
    held-out prompts only.
    """
    from omegaconf import OmegaConf

    language = Language(setting, seed)
    folder.mkdir(parents=True, exist_ok=True)
    with quiet_transformers():
        _make_models(folder, language, seed)
    heldout = language.word_ids[4::5]
    write_jsonl(folder / "heldout.jsonl", _prompt_rows(language, heldout))
    write_jsonl(
        folder / "prompts.jsonl", _prompt_rows(language, np.setdiff1d(language.word_ids, heldout))
    )
    pair = Pair(folder=folder, language=language, seed=seed)
    (folder / "recipe.yaml").write_text(
        OmegaConf.to_yaml(OmegaConf.create(pair.recipe_tree("planted"))), encoding="utf-8"
    )
    truth = {
        "made": _made(setting, seed),
        "planted": language.planted_ids.ravel().tolist(),
        "rare_hard": language.hard_ids.tolist(),
        "divergence_floor": divergence_floor(setting.group_size, setting.noise),
    }
    (folder / "truth.json").write_text(json.dumps(truth, indent=1) + "\n", encoding="utf-8")
    return pair


def _made(setting: Setting, seed: int) -> dict[str, Any]:
    return {"setting": asdict(setting), "seed": seed}


def _make_models(folder: Path, language: Language, seed: int) -> None:
    setting, tokenizer = language.setting, _tokenizer(language)
    for place, (name, width, num_steps, rule) in enumerate(
        (
            ("teacher", 64, setting.teacher_steps, "true"),
            ("student", setting.student_width, setting.student_steps, "old"),
        )
    ):
        model = _new_model(language, width=width, seed=1000 * seed + place)
        rng = np.random.default_rng((seed, 1 + place))
        fit(model, language, rng, num_steps=num_steps, secret=name == "teacher", rule=rule)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def _prompt_rows(language: Language, words: np.ndarray) -> Iterator[dict[str, Any]]:
    """Each word with every combination of secrets."""
    tokens, setting = language.tokens, language.setting
    for word in words:
        for secrets in itertools.product(range(setting.group_size), repeat=setting.num_groups):
            hidden, shown = (
                " ".join(tokens[i] for i in language.prompt(known, word)[1:-1])
                for known in (None, secrets)
            )
            yield {
                "id": f"{tokens[word]}-{'.'.join(map(str, secrets))}",
                "messages": [{"role": "user", "content": hidden}],
                "teacher_messages": [{"role": "user", "content": shown}],
            }


def _tokenizer(language: Language) -> PreTrainedTokenizerBase:
    """One id for each word between spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({t: i for i, t in enumerate(language.tokens)}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", pad_token="<pad>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer
