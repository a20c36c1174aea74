"""O_PH, windows, rho and CCR against plain loops in float64; what a bounded reservoir estimates."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest

from rock_opd.core.context import (
    HashedNgrams,
    MeanEmbedding,
    Positions,
    context_consistency,
    project_embedding,
    resolve_threshold,
)

EVERYTHING = {"reservoir": 10**9, "max_pairs": 10**12}
NAN = float("nan")


def random_positions(rng: np.random.Generator, *, sequences: int, length: int, types: int):
    """Sequences of random ids, some of them short; every token but the first three is sampled."""
    lengths = rng.integers(3, length, sequences)
    ids = [rng.integers(0, types, n).astype(np.int32) for n in lengths]
    idx = np.concatenate([np.full(max(n - 3, 0), s, np.int64) for s, n in enumerate(lengths)])
    place = np.concatenate([np.arange(3, n) for n in lengths]).astype(np.int64)
    return Positions(sequences=ids, sequence_idx=idx, place=place)


def losses(rng: np.random.Generator, num: int) -> np.ndarray:
    """float32, a tenth of them unknown."""
    return np.where(rng.random(num) < 0.1, NAN, rng.exponential(1.0, num)).astype(np.float32)


def loop_reference(positions, pre, post, embedding, *, window, taus, gamma, eta, num_types):
    """The definition, one occurrence and one pair at a time."""
    every = [embedding[i] for sequence in positions.sequences for i in sequence]
    centre = sum(every) / len(every)
    high = [n for n in range(len(pre)) if pre[n] >= taus[0] and post[n] >= taus[1]]

    def mean(n: int) -> np.ndarray:
        sequence, t = positions.sequences[positions.sequence_idx[n]], positions.place[n]
        rows = [embedding[sequence[i]] for i in range(t - window, t + window + 1)
                if 0 <= i < len(sequence)]  # fmt: skip
        return sum(rows) / len(rows) - centre

    def type_of(n: int) -> int:
        return int(positions.sequences[positions.sequence_idx[n]][positions.place[n]])

    vectors = {n: mean(n) for n in high}
    frequency, kept = np.zeros(num_types), np.zeros(num_types)
    pairs = 0
    for n in range(len(pre)):
        frequency[type_of(n)] += 1
    for o in high:
        others = [n for n in high if n != o and type_of(n) == type_of(o)]
        alike = 0
        for other in others:
            a, b = vectors[o], vectors[other]
            alike += a @ b / math.sqrt((a @ a) * (b @ b)) >= gamma
            pairs += 1
        kept[type_of(o)] += (alike / len(others) if others else 0.0) >= eta
    return frequency, kept, pairs


@pytest.mark.parametrize(("gamma", "eta", "window"), [(0.3, 0.1, 4), (0.6, 0.05, 1), (0.0, 0.5, 9)])
def test_uncapped_it_is_the_definition_exactly(gamma, eta, window):
    rng = np.random.default_rng(5)
    positions = random_positions(rng, sequences=12, length=70, types=9)
    num = len(positions.place)
    pre, post = losses(rng, num), losses(rng, num)
    embedding = rng.standard_normal((9, 6))
    stats = context_consistency(
        positions, pre, post, MeanEmbedding(embedding, window=window), num_types=11,
        tau_pre="q0.4", tau_post=0.5, gamma=gamma, eta=eta, rng=rng, **EVERYTHING,
    )  # fmt: skip
    tau_pre = np.quantile(pre[np.isfinite(pre)].astype(np.float64), 0.4)
    frequency, kept, pairs = loop_reference(
        positions, pre, post, embedding, window=window, taus=(tau_pre, 0.5),
        gamma=gamma, eta=eta, num_types=11,
    )  # fmt: skip
    assert (stats.tau_pre, stats.tau_post) == (tau_pre, 0.5)
    np.testing.assert_array_equal(stats.frequency, frequency)
    np.testing.assert_array_equal(stats.kept, kept)
    np.testing.assert_array_equal(stats.judged, stats.persistent)
    np.testing.assert_array_equal(stats.ccr, kept / np.maximum(frequency, 1))
    assert stats.num_pairs == pairs
    assert 0 < kept.sum() < stats.persistent.sum()  # the thresholds bite


def test_more_occurrences_than_a_chunk_and_a_block_hold_change_nothing():
    """40,000 persistent occurrences, 1,600 of them of one type, against one matrix per type."""
    rng = np.random.default_rng(1)
    ids = np.concatenate([np.repeat(np.arange(192), 200), np.full(1600, 192)]).astype(np.int32)
    rng.shuffle(ids)
    positions = Positions(
        sequences=list(ids.reshape(40, 1000)),
        sequence_idx=np.repeat(np.arange(40), 1000),
        place=np.tile(np.arange(1000), 40),
    )
    # Windows hold three tokens of four kinds: no cosine of counts comes near .55.
    encoder = MeanEmbedding(np.eye(4)[np.arange(193) % 4], window=1)
    ones = np.ones(40000)
    stats = context_consistency(
        positions, ones, ones, encoder, num_types=193, tau_pre=0, tau_post=0,
        gamma=0.55, eta=0.405, rng=rng, **EVERYTHING,
    )  # fmt: skip
    encoder = encoder.fit(positions.sequences)
    vectors = np.concatenate([encoder(s, np.arange(1000)) for s in positions.sequences])
    vectors = vectors.astype(np.float64)
    for v in range(193):
        mine = vectors[ids == v]
        alike = (mine @ mine.T >= 0.55).sum(axis=1) - 1
        assert stats.kept[v] == (alike / (len(mine) - 1) >= 0.405).sum()
    assert stats.num_pairs == 192 * 200 * 199 + 1600 * 1599
    assert 0.1 < stats.ccr.mean() < 0.9


def test_a_tiny_example_by_hand():
    """Type 9 stands after 1 (three times) and after 2 (once). Windows of 1 see the token before."""
    positions = Positions(
        sequences=[np.array([1, 9, 1, 9, 1, 9, 2, 9], np.int32), np.array([5], np.int32)],
        sequence_idx=np.zeros(8, np.int64),
        place=np.arange(8),
    )
    embedding = np.zeros((10, 2))
    embedding[1], embedding[2] = (1, 0), (0, 1)
    embedding[5] = (-3, -1)  # a prompt that brings the mean over all tokens to 0
    # means of x[t-1 : t+1]: (2,0), (2,0), (1,1), (0,1); cosines with the third .71
    loss = np.where(positions.token_ids == 9, 1.0, 0.0)
    settings = {"num_types": 10, "tau_pre": 0.5, "tau_post": 0.5, "gamma": 0.7}
    encoder = MeanEmbedding(embedding, window=1)
    rng = np.random.default_rng(0)
    # rho: 2/3 (second and third), 2/3, 3/3, 1/3 (the third)
    for eta, kept in ((0.3, 4), (0.5, 3), (0.9, 1)):
        stats = context_consistency(
            positions, loss, loss, encoder, eta=eta, rng=rng, **settings, **EVERYTHING
        )
        assert stats.persistent[9] == stats.frequency[9] == 4
        assert stats.kept[9] == kept and stats.ccr[9] == kept / 4
    assert stats.frequency[1] == 3 and stats.persistent[1] == stats.ccr[1] == 0
    assert stats.num_pairs == 4 * 3


def test_an_occurrence_is_persistent_only_when_high_before_and_after_and_known():
    positions = Positions(
        sequences=[np.full(6, 3, np.int32)], sequence_idx=np.zeros(6, int), place=np.arange(6)
    )
    pre = np.array([2, 2, 0, NAN, 2, 1], np.float32)
    post = np.array([2, 0, 2, 2, NAN, 1], np.float32)
    stats = context_consistency(
        positions, pre, post, HashedNgrams(window=1, dim=8), num_types=4, tau_pre=1, tau_post=1,
        gamma=-1, eta=0, rng=np.random.default_rng(0), **EVERYTHING,
    )  # fmt: skip
    assert stats.persistent[3] == 2  # the first, and the last: at the threshold counts
    assert stats.frequency[3] == 6 and stats.ccr[3] == 2 / 6


def constant(loss_pre: list[float], loss_post: list[float], **settings: object):
    """Six occurrences of type 3 in equal windows (but at the ends), one of type 1."""
    ids = np.array([3, 3, 3, 3, 3, 3, 1], np.int32)
    positions = Positions(sequences=[ids], sequence_idx=np.zeros(7, int), place=np.arange(7))
    embedding = np.eye(4)
    return context_consistency(
        positions, np.array(loss_pre), np.array(loss_post), MeanEmbedding(embedding, window=0),
        num_types=4, rng=np.random.default_rng(0),
        **({"tau_pre": 1, "tau_post": 1, "gamma": 1.0, "eta": 0.5} | EVERYTHING | settings),
    )  # fmt: skip


def test_a_lone_persistent_occurrence_has_rho_0():
    lone = [0, 0, 0, 0, 0, 2, 2]
    stats = constant(lone, lone)
    assert list(stats.persistent) == [0, 1, 0, 1] and not stats.kept.any() and not stats.ccr.any()
    assert stats.num_pairs == 0
    assert list(constant(lone, lone, eta=0.0).kept) == [0, 1, 0, 1]  # 0 is at least 0


def test_a_type_without_persistent_occurrences_has_ccr_0_not_nan():
    stats = constant([2] * 6 + [0], [2] * 7)
    assert stats.frequency[1] == 1 and stats.persistent[1] == 0 and stats.ccr[1] == 0
    assert stats.ccr[3] == 1.0 and stats.kept[3] == 6
    assert stats.ccr[0] == 0 and stats.frequency[0] == 0


@pytest.mark.parametrize("tau", ["q0.5", 0.0])
def test_losses_that_are_all_unknown_give_no_persistent_occurrence(tau):
    stats = constant([NAN] * 7, [2] * 7, tau_pre=tau)
    assert not stats.persistent.any() and not stats.ccr.any() and stats.num_pairs == 0
    assert math.isnan(stats.tau_pre) == (tau == "q0.5")
    assert stats.frequency[3] == 6


def test_no_position_at_all_is_no_error():
    positions = Positions(
        sequences=[np.array([1, 2], np.int32)],
        sequence_idx=np.zeros(0, int),
        place=np.zeros(0, int),
    )
    stats = context_consistency(
        positions, np.zeros(0), np.zeros(0), HashedNgrams(window=1, dim=4), num_types=3,
        tau_pre="q0.8", tau_post="q0.8", gamma=0, eta=0, rng=np.random.default_rng(0), **EVERYTHING,
    )  # fmt: skip
    assert not stats.frequency.any() and not stats.ccr.any()


def test_losses_that_are_not_one_per_position_and_ids_beyond_the_types_are_refused():
    with pytest.raises(ValueError, match="7 positions, 6 losses before and 7 now"):
        constant([1] * 6, [1] * 7)
    positions = Positions(
        sequences=[np.array([1, 4], np.int32)], sequence_idx=np.zeros(2, int), place=np.arange(2)
    )
    with pytest.raises(ValueError, match="token ids 1 to 4 reach beyond 4 types"):
        context_consistency(
            positions, np.ones(2), np.ones(2), HashedNgrams(window=1, dim=4), num_types=4,
            tau_pre=0, tau_post=0, gamma=0, eta=0, rng=np.random.default_rng(0), **EVERYTHING,
        )  # fmt: skip


class Keys:
    """A generator that has drawn these random keys."""

    def __init__(self, keys: tuple[int, ...]) -> None:
        self._keys = np.array(keys, np.float64)

    def random(self, size: int) -> np.ndarray:
        assert size == len(self._keys)
        return self._keys


def clustered(num: int):
    """One type in windows of three kinds, so that rho is about 1/2, 1/3 and 1/6."""
    kind = [(0, 0, 0, 1, 1, 2)[n % 6] for n in range(num)]
    ids = np.array([i for k in kind for i in (k, 9)], np.int32)
    positions = Positions(
        sequences=[ids], sequence_idx=np.zeros(num, int), place=2 * np.arange(num) + 1
    )
    embedding = np.zeros((10, 3))
    embedding[:3] = np.eye(3)

    class Before(MeanEmbedding):
        """Sees the token before x_t only."""

        def __call__(self, sequence, places):
            return super().__call__(sequence, places - 1)

    ones = np.ones(num)
    return lambda rng, **settings: context_consistency(
        positions, ones, ones, Before(embedding, window=0), num_types=10, tau_pre=1, tau_post=1,
        **({"gamma": 0.9, "eta": 0.3, "rng": rng, "reservoir": 10**9, "max_pairs": 10**12}
           | settings),
    )  # fmt: skip


def test_over_all_draws_of_the_reservoir_the_estimate_is_exact():
    run = clustered(6)
    # rho: 2/5 for the three of kind 0, 1/5 for the two of kind 1, 0 for the last
    exact = run(np.random.default_rng(0)).kept[9]
    assert exact == 3
    estimates = [run(Keys(keys), reservoir=2).kept[9] for keys in itertools.permutations(range(6))]
    assert set(estimates) == {0, 3, 6}
    assert np.mean(estimates) == pytest.approx(exact, abs=1e-12)


def test_over_many_seeds_the_estimate_is_unbiased_where_a_subsampled_rho_would_not_be():
    run = clustered(61)
    truth = run(np.random.default_rng(0), eta=0.4).kept[9]
    assert truth == sum(n % 6 < 3 for n in range(61)) == 31  # rho .5, .32 and .15
    seeds = [run(np.random.default_rng(seed), reservoir=9, eta=0.4) for seed in range(1000)]
    assert all(s.judged[9] == 9 and s.num_pairs == 9 * 60 for s in seeds)
    kept = np.array([s.kept[9] for s in seeds])
    error = kept.std() / math.sqrt(len(kept))
    assert 0 < error < 0.5 and abs(kept.mean() - truth) < 3 * error

    kinds = np.array([(0, 0, 0, 1, 1, 2)[n % 6] for n in range(61)])
    biased = []
    for seed in range(1000):
        drawn = kinds[np.random.default_rng(seed).permutation(61)[:9]]
        rho = ((drawn[:, None] == drawn).sum(axis=1) - 1) / 8
        biased.append((rho >= 0.4).mean() * 61)
    assert np.mean(biased) < truth - 3


def test_every_type_gets_its_reservoir_and_the_cap_on_pairs_lowers_it_for_all_alike():
    rng = np.random.default_rng(0)
    ids = np.repeat(np.arange(4), [1, 10, 50, 200]).astype(np.int32)
    positions = Positions(sequences=[ids], sequence_idx=np.zeros(261, int), place=np.arange(261))
    ones = np.ones(261)

    def run(**bounds: int):
        return context_consistency(
            positions, ones, ones, HashedNgrams(window=2, dim=16), num_types=4, tau_pre=0,
            tau_post=0, gamma=0.5, eta=0.1, rng=rng, **bounds,
        )  # fmt: skip

    free = run(reservoir=30, max_pairs=10**9)
    assert list(free.judged) == [1, 10, 30, 30]
    assert free.num_pairs == 10 * 9 + 30 * 49 + 30 * 199
    # 20 each: 90 + 20 * 248 = 5050; 21 each: 5298
    capped = run(reservoir=30, max_pairs=5100)
    assert list(capped.judged) == [1, 10, 20, 20] and capped.num_pairs == 5050 <= 5100
    # never less than one per type, whatever that costs
    least = run(reservoir=30, max_pairs=1)
    assert list(least.judged) == [1, 1, 1, 1] and least.num_pairs == 9 + 49 + 199


def test_the_mean_embedding_of_a_window_is_that_of_plain_loops_also_at_the_ends():
    rng = np.random.default_rng(3)
    embedding = rng.standard_normal((20, 5)).astype(np.float32)
    sequence = rng.integers(0, 20, 50).astype(np.int32)
    places = np.array([0, 1, 7, 7, 48, 49])
    for window in (0, 1, 3, 100):
        got = MeanEmbedding(embedding, window=window)(sequence, places)
        assert got.dtype == np.float32 and got.shape == (6, 5)
        for row, t in zip(got, places, strict=True):
            part = sequence[max(0, t - window) : t + window + 1]
            want = embedding[part].astype(np.float64).mean(axis=0)
            np.testing.assert_allclose(row, want / np.linalg.norm(want), atol=1e-6)


def test_fitted_the_mean_over_all_tokens_is_taken_off():
    embedding = np.array([[1.0, 0], [0, 1], [5, 5], [9, 9]])
    sequences = [np.array([0, 0, 1], np.int32), np.array([2], np.int32)]
    plain = MeanEmbedding(embedding, window=0)
    fitted = plain.fit(sequences)  # mean (7, 6) / 4
    want = np.array([[-0.75, -1.5], [-1.75, -0.5]])
    want /= np.linalg.norm(want, axis=1, keepdims=True)
    np.testing.assert_allclose(fitted(sequences[0], np.array([0, 2])), want, atol=1e-7)
    np.testing.assert_array_equal(plain(sequences[0], np.array([0, 2])), np.eye(2))
    np.testing.assert_array_equal(plain.fit([])(sequences[0], np.array([0])), [[1, 0]])


def test_a_direction_that_all_embeddings_share_does_not_make_contexts_alike():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 50, 4000).astype(np.int32)
    table = rng.standard_normal((50, 128)) + 3
    places = np.arange(10, 3990, 40)
    full, small = (MeanEmbedding(t, window=4) for t in (table, project_embedding(table, 64, 1)))

    def cosines(encoder) -> np.ndarray:
        vectors = encoder(ids, places)
        return (vectors @ vectors.T)[np.triu_indices(len(places), 1)]

    assert np.median(cosines(full)) > 0.95  # nine random tokens each
    assert abs(np.median(cosines(full.fit([ids])))) < 0.05
    assert abs(np.median(cosines(small.fit([ids])))) < 0.1


def test_a_window_that_cancels_is_a_zero_vector_and_like_nothing():
    embedding = np.array([[0.1, 0.3], [-0.1, -0.3], [0.7, 0.7]])
    sequence = np.array([2, 2, 2, 0, 1, 0, 1], np.int32)
    got = MeanEmbedding(embedding, window=1)(sequence, np.array([0, 3, 6]))
    assert np.linalg.norm(got, axis=1) == pytest.approx([1, 1, 0])


def naive_ngrams(sequence, t, window):
    part = sequence[max(0, t - window) : t + window + 1].tolist()
    grams = [tuple(part[i : i + n]) for n in (1, 2, 3) for i in range(len(part) - n + 1)]
    return {gram: grams.count(gram) for gram in grams}


def test_hashed_ngrams_have_in_many_places_the_cosine_of_their_counts():
    rng = np.random.default_rng(4)
    sequence = rng.integers(0, 6, 60).astype(np.int32)
    places = np.arange(60)
    got = HashedNgrams(window=4, dim=1 << 16)(sequence, places).astype(np.float64)
    counts = [naive_ngrams(sequence, t, 4) for t in places]

    def cosine(a: dict, b: dict) -> float:
        dot = sum(num * b.get(gram, 0) for gram, num in a.items())
        return dot / math.sqrt(sum(n * n for n in a.values()) * sum(n * n for n in b.values()))

    want = np.array([[cosine(a, b) for b in counts] for a in counts])
    np.testing.assert_allclose(got @ got.T, want, atol=1e-6)


def test_hashed_ngrams_in_few_places_estimate_that_cosine_without_bias():
    rng = np.random.default_rng(6)
    ids = rng.permutation(4000)[:364].astype(np.int32)
    shared, sides = ids[:4], ids[4:].reshape(-1, 3)
    cosines = []
    for left, right in zip(sides[:-1:2], sides[1::2], strict=True):
        a, b = np.concatenate([shared, left]), np.concatenate([shared, right])
        one, two = (HashedNgrams(window=9, dim=64)(s, np.array([0]))[0] for s in (a, b))
        cosines.append(one @ two)
    # 4 + 3 + 2 of the 7 + 6 + 5 n-grams are shared
    assert np.mean(cosines) == pytest.approx(
        9 / 18, abs=3 * float(np.std(cosines)) / len(cosines) ** 0.5
    )


def test_hashes_are_the_same_in_every_process():
    code = (
        "import numpy as np; from rock_opd.core.context import HashedNgrams;"
        "print(HashedNgrams(window=2, dim=8)(np.arange(9, dtype=np.int32), np.array([0, 4]))"
        ".tolist())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True,
            text=True, timeout=60, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(outputs) == 1
    here = HashedNgrams(window=2, dim=8)(np.arange(9, dtype=np.int32), np.array([0, 4])).tolist()
    assert outputs == {f"{here}\n"}


def test_sequences_shorter_than_an_ngram_have_what_there_is():
    one = HashedNgrams(window=3, dim=32)(np.array([5], np.int32), np.array([0]))
    assert np.count_nonzero(one) == 1 and np.linalg.norm(one) == pytest.approx(1)
    two = HashedNgrams(window=3, dim=4096)(np.array([5, 6], np.int32), np.array([0, 1]))
    assert np.count_nonzero(two[0]) == 3
    np.testing.assert_array_equal(two[0], two[1])


def test_a_random_projection_keeps_cosines_and_may_be_made_in_blocks():
    rng = np.random.default_rng(8)
    table = rng.standard_normal((300, 512)).astype(np.float32)
    table[1::2] += 2 * table[::2]  # neighbours have a cosine of about .89
    small = project_embedding(table, 64, 3)
    assert small.shape == (300, 64) and small.dtype == np.float32
    blocks = [project_embedding(table[i : i + 77], 64, 3) for i in range(0, 300, 77)]
    np.testing.assert_allclose(np.concatenate(blocks), small, rtol=1e-4, atol=1e-4)
    assert not np.allclose(project_embedding(table, 64, 4), small)

    def cosine(x: np.ndarray) -> np.ndarray:
        a, b = x[::2], x[1::2]
        return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)

    error = cosine(small) - cosine(table)
    bound = (1 - 0.8) / 8  # (1 - cos^2) / sqrt(dim), .025 here
    assert 0.5 * bound < error.std() < 1.5 * bound and abs(error.mean()) < bound
    ratio = (small**2).sum(1) / (table**2).sum(1)
    assert ratio.mean() == pytest.approx(1, abs=3 * float(ratio.std()) / 300**0.5)


def test_a_threshold_is_a_number_or_a_quantile_of_what_is_known():
    values = np.array([0, 1, 2, 3, 4, NAN, np.inf], np.float32)
    assert resolve_threshold(0.25, values) == resolve_threshold("0.25", values) == 0.25
    assert resolve_threshold("q0.5", values) == 2 and resolve_threshold("q1", values) == 4
    assert resolve_threshold("q0.8", values) == pytest.approx(3.2)
    assert resolve_threshold("-1e-3", values) == -0.001
    assert math.isnan(resolve_threshold("q0.5", np.full(3, NAN)))
