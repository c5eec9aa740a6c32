"""Per-position scores against direct float64 sums and against sampling."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knockout.mining.kl import (
    chunk_positions,
    efficiency_ratio,
    score_hidden,
    score_logits,
    signal_and_noise,
)


def softmax64(logits: np.ndarray) -> np.ndarray:
    x = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)


def heads(seed: int, n: int = 37, width: int = 211) -> tuple[torch.Tensor, ...]:
    make = torch.Generator().manual_seed(seed)
    student = torch.randn(n, 12, generator=make)
    teacher = torch.randn(n, 16, generator=make)
    student_head = torch.randn(width, 12, generator=make)
    teacher_head = torch.randn(width, 16, generator=make)
    emitted = torch.randint(width, (n,), generator=make)
    return student, teacher, student_head, teacher_head, emitted


def test_scores_equal_a_direct_float64_computation() -> None:
    student, teacher, student_head, teacher_head, emitted = heads(0)
    (scores,) = score_hidden(
        [(student, lambda h: h @ student_head.T)],
        (teacher, lambda h: h @ teacher_head.T),
        emitted,
        top_k=7,
        chunk=10,
    )
    p = softmax64(student.double().numpy() @ student_head.double().numpy().T)
    q = softmax64(teacher.double().numpy() @ teacher_head.double().numpy().T)
    np.testing.assert_allclose(scores.reverse_kl, (p * np.log(p / q)).sum(1), rtol=2e-5)
    np.testing.assert_allclose(scores.entropy, -(p * np.log(p)).sum(1), rtol=2e-5, atol=1e-6)
    np.testing.assert_array_equal(scores.agree, p.argmax(1) == q.argmax(1))
    gap = np.log(q).max(1) - np.log(q)[np.arange(len(q)), emitted]
    np.testing.assert_allclose(scores.teacher_gap, gap, rtol=2e-5, atol=1e-5)
    for row in range(len(p)):
        top = np.argsort(-p[row])[:7]
        weight = p[row, top] / p[row, top].sum()
        a = np.log(q[row, top]) - np.log(p[row, top])
        b = (a * (1 - weight)).sum() / (1 - weight).sum()
        s = (weight * a**2).sum() - (weight * a).sum() ** 2
        noise = ((a - b) ** 2 * (1 - weight)).sum() - s
        assert scores.signal[row] == pytest.approx(s, rel=1e-3, abs=1e-6)
        assert scores.noise[row] == pytest.approx(noise, rel=1e-3, abs=1e-6)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), chunk=st.integers(1, 60))
def test_chunked_equals_unchunked(seed: int, chunk: int) -> None:
    student, teacher, student_head, teacher_head, emitted = heads(seed)
    students = [(student, lambda h: h @ student_head.T)]
    whole = score_hidden(students, (teacher, lambda h: h @ teacher_head.T), emitted, chunk=1000)
    parts = score_hidden(students, (teacher, lambda h: h @ teacher_head.T), emitted, chunk=chunk)
    for a, b in zip(whole[0], parts[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_identical_models_have_no_loss_and_no_signal() -> None:
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(1)) * 4
    scores = score_logits(logits, logits.log_softmax(1), logits.argmax(1))
    assert (scores.reverse_kl == 0).all()
    assert scores.agree.all()
    assert (scores.teacher_gap == 0).all()
    assert (efficiency_ratio(scores.signal, scores.noise) == 0).all()


def test_impossible_tokens_give_zero_or_infinity_and_never_nan() -> None:
    minus = -torch.inf
    student = torch.tensor([[0.0, 0.0, minus, minus], [0.0, 0.0, 0.0, minus]])
    teacher = torch.tensor([[0.0, 0.0, 1.0, minus], [0.0, 0.0, minus, 1.0]]).log_softmax(1)
    scores = score_logits(student, teacher, torch.tensor([0, 0]), top_k=4)
    q = 1 / (2 + np.e)
    assert scores.reverse_kl[0] == pytest.approx(np.log(0.5 / q))
    assert scores.reverse_kl[1] == torch.inf
    assert not any(x.float().isnan().any() for x in scores)


def test_a_wider_head_is_cut_to_the_shared_ids() -> None:
    student, teacher, student_head, teacher_head, emitted = heads(3, width=50)
    wide = torch.cat([teacher_head, torch.full((14, 16), 3.0)])
    narrow = score_hidden(
        [(student, lambda h: h @ student_head.T)], (teacher, lambda h: h @ teacher_head.T), emitted
    )
    padded = score_hidden(
        [(student, lambda h: h @ student_head.T)], (teacher, lambda h: h @ wide.T), emitted
    )
    torch.testing.assert_close(narrow[0].reverse_kl, padded[0].reverse_kl)


def test_two_students_share_a_teacher() -> None:
    student, teacher, student_head, teacher_head, emitted = heads(4)
    own = (student, lambda h: h @ student_head.T)
    other = (student * 0.5, lambda h: h @ student_head.T)
    t = (teacher, lambda h: h @ teacher_head.T)
    both = score_hidden([own, other], t, emitted)
    alone = score_hidden([other], t, emitted)
    torch.testing.assert_close(both[1], alone[0])
    assert not torch.allclose(both[0].reverse_kl, both[1].reverse_kl)


@pytest.mark.parametrize("seed", range(4))
def test_signal_and_noise_equal_brute_force_sampling(seed: int) -> None:
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6))
    a = np.log(q) - np.log(p)
    signal, noise = signal_and_noise(torch.tensor(np.log(p))[None], torch.tensor(a)[None])
    # The estimator itself, in coordinates where the Fisher metric's pseudo-inverse is Euclidean.
    metric = np.linalg.pinv(np.diag(p) - np.outer(p, p), rcond=1e-10)
    values, vectors = np.linalg.eigh(metric)
    root = vectors * np.sqrt(values.clip(min=0))
    b = (a * (1 - p)).sum() / (1 - p).sum()
    draws = rng.choice(6, size=400_000, p=p)
    g = (((a - b)[:, None] * (np.eye(6) - p)) @ root)[draws]
    mean = g.mean(axis=0)
    variance = g.var(axis=0).sum()
    assert float(noise) == pytest.approx(variance, rel=0.03)
    assert float(signal) == pytest.approx((mean**2).sum(), rel=0.03, abs=3 * variance / 400_000)
    # b* is the best scalar baseline: a shift to either side has a larger second moment.
    moment = [
        p @ np.square(((a - b - shift)[:, None] * (np.eye(6) - p)) @ root).sum(axis=1)
        for shift in (-0.01, 0.0, 0.01)
    ]
    assert moment[1] < min(moment[0], moment[2])
    assert moment[1] == pytest.approx(float(signal + noise))


def test_two_tokens_have_no_noise() -> None:
    logp = torch.tensor([[0.7, 0.3]], dtype=torch.float64).log()
    signal, noise = signal_and_noise(logp, torch.tensor([[0.2, -1.0]], dtype=torch.float64))
    assert float(signal) == pytest.approx(0.21 * 1.44)
    assert float(noise) == 0
    assert float(efficiency_ratio(signal, noise)) == torch.inf


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"expected \(N, V\)"):
        score_logits(torch.zeros(2, 5), torch.zeros(2, 6), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="top_k is 1"):
        score_logits(torch.zeros(2, 5), torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64), 1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_a_large_vocabulary_stays_under_4_gb() -> None:
    """2,048 positions × 151,936 tokens: (T, V) in float32 would be 1.24 GB per model and copy."""
    code = """
        import torch
        from knockout.mining.kl import score_hidden
        torch.set_num_threads(1)
        heads = [torch.randn(151_936, 16) for _ in range(2)]
        states = [torch.randn(2048, 16) for _ in range(2)]
        (scores,) = score_hidden(
            [(states[0], lambda h: h @ heads[0].T)], (states[1], lambda h: h @ heads[1].T),
            torch.randint(151_936, (2048,)),
        )
        assert scores.reverse_kl.isfinite().all()
        # Not ru_maxrss: right after a fork that is the parent's, and survives the exec.
        status = open("/proc/self/status").read()
        print(status.split("VmHWM:")[1].split()[0])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 2_000_000  # KiB; half of the limit, imports included
    assert chunk_positions(151_936) < 2048
