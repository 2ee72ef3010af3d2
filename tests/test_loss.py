"""The PPO objective and the log-prob kernel: golden rows, dense oracles, finite differences, failure reports."""

import math
from collections import Counter

import pytest
import torch
from conftest import golden
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

import config
from loss import clip_counts, kl_penalty, ppo_objective, sequence_logprobs
from policy import selective_logprobs

CLIPS = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}


def as_tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def test_golden_policy_loss():
    equal, other_mean, weighted, empty = 0, 0, 0, 0
    for row in golden("policy_loss"):
        settings = row["settings"]
        if settings["loss_agg_mode"] != "token-mean":
            other_mean += 1  # departure: the token mean is the article's, and the only one we have
            continue
        if settings["rollout_is_weights"]:
            weighted += 1  # departure: no importance weights between sampler and trainer
            continue
        if row["f64"]["loss"] == "NaN":
            empty += 1  # departure: nothing to train on; `update` leaves such a batch alone
            continue
        old, mask = as_tensor(row["old_log_prob"]), as_tensor(row["response_mask"])
        current = as_tensor(row["log_prob"]).requires_grad_()
        advantages = as_tensor(row["advantages"])
        clips = {"clip_low": settings["clip_ratio_low"], "clip_high": settings["clip_ratio_high"],
                 "dual_clip": settings["clip_ratio_c"]}  # fmt: skip
        tokens = (settings["batch_num_tokens"] or float(mask.sum())) / (settings["dp_size"] or 1)
        loss = (ppo_objective(current, old, advantages, **clips) * mask).sum() / tokens
        (gradient,) = torch.autograd.grad(loss, current)
        expected = row["f64"]
        assert float(loss.detach()) == pytest.approx(float(expected["loss"]), rel=1e-9, abs=1e-9), row["id"]
        assert torch.allclose(gradient, as_tensor(expected["grad_log_prob"]), rtol=1e-9, atol=1e-9), row["id"]
        trained = mask.bool()
        clipped, held = clip_counts(current.detach()[trained], old[trained], advantages[trained], **clips)
        assert float(clipped / mask.sum()) == pytest.approx(expected["pg_clipfrac"], abs=1e-7), row["id"]
        assert float(held / mask.sum()) == pytest.approx(expected["pg_clipfrac_lower"], abs=1e-7), row["id"]
        equal += 1
    assert (equal, other_mean, weighted, empty) == (65, 15, 2, 1)


def test_golden_agg_loss_token_mean():
    equal, other_mean, errors, empty = 0, 0, 0, 0
    for row in golden("agg_loss"):
        if row["loss_agg_mode"] != "token-mean":
            other_mean += 1
        elif row.get("error"):
            errors += 1  # departure: there, a rank count without a token count; here the token count is always given
        elif row["loss_f64"] == "NaN":
            empty += 1
        else:
            loss, mask = as_tensor(row["loss_mat"]), as_tensor(row["loss_mask"])
            tokens = row["kwargs"].get("batch_num_tokens", float(mask.sum())) / row["kwargs"].get("dp_size", 1)
            assert float(loss[mask.bool()].sum() / tokens) == pytest.approx(row["loss_f64"], rel=1e-9)
            equal += 1
    assert (equal, other_mean, errors, empty) == (4, 18, 1, 1)


def test_objective_by_hand():
    """Ratios 1.5, 0.5, 1.5, 10 with advantages 1, 1, -1, -1: clipped above, free below, free, held by the dual clip."""
    current = torch.tensor([1.5, 0.5, 1.5, 10.0]).log()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    loss = ppo_objective(current, torch.zeros(4), advantages, **CLIPS)
    assert loss.tolist() == pytest.approx([-1.2, -0.5, 1.5, 3.0], rel=1e-6)


@given(st.floats(-50, 50), st.floats(-50, 50), st.floats(-3, 3))
def test_objective_is_bounded_and_finite(current, old, advantage):
    loss = ppo_objective(as_tensor([current]), as_tensor([old]), as_tensor([advantage]), **CLIPS)
    assert math.isfinite(float(loss))
    assert float(loss) <= 3 * abs(advantage) + 1e-9 and float(loss) >= -1.2 * abs(advantage) - 1e-9


def dense_logprobs(hidden, weight, targets, temperature):
    return -cross_entropy(hidden @ weight.T / temperature, targets, reduction="none")


def sample_problem(n, vocabulary, width, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, width, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator, dtype=dtype)
    return hidden, weight, torch.randint(vocabulary, (n,), generator=generator)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_selective_logprobs_equal_dense(temperature):
    hidden, weight, targets = sample_problem(37, 101, 8)
    config.LOGPROB_CHUNK = 5 * 101  # several chunks, the last one shorter
    ours, dense = (f(hidden, weight, targets, temperature) for f in (selective_logprobs, dense_logprobs))
    upstream = torch.linspace(-1, 1, 37, dtype=torch.float64)
    gradients = [torch.autograd.grad(values, hidden, upstream)[0] for values in (ours, dense)]
    assert torch.allclose(ours, dense, atol=1e-12)
    assert torch.allclose(*gradients, atol=1e-12)


def test_selective_logprobs_gradcheck():
    hidden, weight, targets = sample_problem(7, 11, 4)
    config.LOGPROB_CHUNK = 3 * 11
    assert torch.autograd.gradcheck(lambda h: selective_logprobs(h, weight, targets, 0.8), (hidden,))


def test_no_gradient_reaches_the_head():
    hidden, weight, targets = sample_problem(5, 11, 4)
    weight.requires_grad_()
    selective_logprobs(hidden, weight, targets, 1.0).sum().backward()
    assert weight.grad is None and hidden.grad is not None


def test_selective_logprobs_refuses_temperature_zero():
    hidden, weight, targets = sample_problem(5, 11, 4)
    with pytest.raises(ValueError, match="temperature"):
        selective_logprobs(hidden, weight, targets, 0)


def test_LOSS_08_temperature_divides_logits():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    logprob = selective_logprobs(logits, torch.eye(3), torch.tensor([0]), 0.5)
    assert float(logprob) == pytest.approx(-0.142932, abs=1e-6)


def test_LOSS_10_no_tokens_times_vocabulary_tensor_is_kept():
    tokens, vocabulary = 256, 5000
    hidden, weight, targets = sample_problem(tokens, vocabulary, 16, torch.float32)
    config.LOGPROB_CHUNK = 32 * vocabulary
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        ours = selective_logprobs(hidden, weight, targets, 1.0)
    dense = dense_logprobs(hidden, weight, targets, 1.0)
    gradients = [torch.autograd.grad(values.sum(), hidden)[0] for values in (ours, dense)]
    assert sizes and max(sizes) < tokens * vocabulary / 4
    assert torch.allclose(ours, dense, atol=1e-5) and torch.allclose(*gradients, atol=1e-5)


def test_golden_kl_penalty():
    """The reference's names for the estimators; a + there means k2's gradient under another value: not offered."""
    names = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
    equal, not_offered = Counter(), Counter()
    for row in golden("kl_penalty"):
        if row["kl_penalty"] not in names:
            not_offered[row["kl_penalty"]] += 1
            continue
        current = as_tensor(row["log_prob"]).requires_grad_()
        penalty = kl_penalty(current, as_tensor(row["ref_log_prob"]), names[row["kl_penalty"]])
        (gradient,) = torch.autograd.grad(penalty.sum(), current)
        expected = row["f64"]
        assert torch.allclose(penalty, as_tensor(expected["kl"]), rtol=1e-9, atol=1e-12), row["id"]
        assert torch.allclose(gradient, as_tensor(expected["grad_log_prob_of_sum"]), rtol=1e-9, atol=1e-12), row["id"]
        equal[names[row["kl_penalty"]]] += 1
    assert equal == {"k1": 10, "abs": 5, "k2": 10, "k3": 10}
    assert not_offered == dict.fromkeys(("k1+", "abs+", "k2+", "k3+", "low_var_kl+"), 5)


def test_kl_estimate_equals_the_exact_kl_of_a_small_vocabulary():
    """Expected over the policy's own distribution, k3 is KL(policy || reference), and so is its score-free gradient."""
    generator = torch.Generator().manual_seed(0)
    policy, reference = (torch.randn(7, dtype=torch.float64, generator=generator).log_softmax(0) for _ in range(2))
    exact = (policy.exp() * (policy - reference)).sum()
    assert float((policy.exp() * kl_penalty(policy, reference)).sum()) == pytest.approx(float(exact), rel=1e-12)
    assert float((policy.exp() * kl_penalty(policy, reference, "k1")).sum()) == pytest.approx(float(exact), rel=1e-12)
    assert (kl_penalty(policy, reference) >= 0).all()
    assert not kl_penalty(policy, policy.clone()).any()


def test_kl_gradient_matches_finite_differences():
    generator = torch.Generator().manual_seed(1)
    current, reference = (torch.randn(9, dtype=torch.float64, generator=generator) for _ in range(2))
    assert torch.autograd.gradcheck(lambda x: kl_penalty(x, reference), current.requires_grad_())


def test_sequence_ratio_by_hand():
    """Two sequences with mean log-ratios 0.2 and -0.3; the first is above 1 + 0.1 with a gain, so it is clipped."""
    old = as_tensor([-1.0, -2.0, -3.0, -1.0])
    current = as_tensor([-0.9, -1.7, -3.1, -1.5]).requires_grad_()
    compared = sequence_logprobs(current, old, [2, 2])
    assert (compared - old).tolist() == pytest.approx([0.2, 0.2, -0.3, -0.3])
    clips = {"clip_low": 0.5, "clip_high": 0.1, "dual_clip": 3.0}
    loss = ppo_objective(compared, old, as_tensor([1.0, 1.0, -2.0, -2.0]), **clips)
    assert loss.tolist() == pytest.approx([-1.1, -1.1, 2 * math.exp(-0.3), 2 * math.exp(-0.3)])
    (gradient,) = torch.autograd.grad((loss * as_tensor([0.25] * 4)).sum(), current)
    assert gradient.tolist() == pytest.approx([0, 0, 0.5 * math.exp(-0.3), 0.5 * math.exp(-0.3)])


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 99))
def test_sequence_ratio_has_the_gradient_of_gspo(lengths, seed):
    """Against the definition: mean over sequences of min(s A, clip(s) A), s = exp(mean log-ratio), by autograd."""
    generator = torch.Generator().manual_seed(seed)
    old = torch.randn(sum(lengths), dtype=torch.float64, generator=generator) - 2
    current = (old + 0.5 * torch.randn(sum(lengths), dtype=torch.float64, generator=generator)).requires_grad_()
    signs = torch.randn(len(lengths), dtype=torch.float64, generator=generator)
    ratios = torch.stack([part.mean().exp() for part in (current - old).split(lengths)])
    plain, clipped = ratios * signs, ratios.clamp(0.8, 1.2) * signs
    (expected,) = torch.autograd.grad(-torch.minimum(plain, clipped).mean(), current)
    advantages = torch.cat([sign.expand(n) for sign, n in zip(signs, lengths, strict=True)])
    weights = torch.cat([torch.full((n,), 1 / (n * len(lengths)), dtype=torch.float64) for n in lengths])
    per_token = ppo_objective(sequence_logprobs(current, old, lengths), old, advantages, **{**CLIPS, "dual_clip": 1e9})
    (ours,) = torch.autograd.grad((per_token * weights).sum(), current)
    assert torch.allclose(ours, expected, rtol=1e-9, atol=1e-12)
