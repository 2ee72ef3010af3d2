"""The policy loss per token, as pure tensors: PPO with dual clip, a ratio per token or per sequence, the KL penalty."""

import torch

import config


def ppo_objective(current, old, advantages, *, clip_low, clip_high, dual_clip):
    """Per-token PPO loss with dual clip, to be minimised.

    current, old: log-probabilities (nats) of the same tokens, advantages: unitless; all (N,). The log-ratio
    is clamped to +-config.LOG_RATIO_CLAMP, the ratio clipped to [1 - clip_low, 1 + clip_high]; where the
    advantage is negative the loss is at most -dual_clip * advantage. Returns (N,).
    Source: article section 4; verl's vanilla policy loss for the order of the clips.
    """
    ratio = (current - old).clamp(-config.LOG_RATIO_CLAMP, config.LOG_RATIO_CLAMP).exp()
    clipped = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    return torch.where(advantages < 0, torch.minimum(clipped, -advantages * dual_clip), clipped)


def clip_counts(current, old, advantages, *, clip_low, clip_high, dual_clip):
    """How many tokens each clip moved: (outside the ratio range and worse for it, held by the dual clip)."""
    ratio = (current - old).clamp(-config.LOG_RATIO_CLAMP, config.LOG_RATIO_CLAMP).exp()
    plain, bounded = -advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    held = (torch.maximum(plain, bounded) > -advantages * dual_clip) & (advantages < 0)
    return (bounded > plain).sum(), held.sum()


def sequence_logprobs(current, old, lengths):
    """Log-probabilities whose difference from `old` is, at every token, its sequence's mean log-ratio (GSPO).

    current, old: (N,) nats, sequence after sequence; lengths: tokens of each. The value is the same at all tokens of a
    sequence; the gradient reaches each token's own log-probability once, so that the mean over a sequence's tokens has
    GSPO's gradient. Returns (N,). Source: GSPO, equations 7 and 13 (the token-wise form with a stopped ratio).
    """
    means = [part.mean().expand(len(part)) for part in (current - old).detach().split(lengths)]
    return old + torch.cat(means) + current - current.detach()


def kl_penalty(logprobs, ref_logprobs, kind="k3"):
    """Per-token estimate of KL(policy || reference) from the sampled tokens' log-probabilities (N,), in nats.

    kind: k1, the log-ratio (unbiased, noisy); abs; k2, half its square; k3, exp(-d) - 1 + d with d the log-ratio:
    unbiased, never negative, of low variance. k3 clamps d to +-20 and itself to +-10, as verl does.
    Source: Schulman, "Approximating KL divergence"; verl's kl_penalty (tests/golden/kl_penalty.jsonl.gz).
    """
    difference = logprobs - ref_logprobs
    if kind == "k3":
        backwards = (-difference).clamp(-20, 20)
        return (backwards.exp() - backwards - 1).clamp(-10, 10)
    return {"k1": lambda: difference, "abs": difference.abs, "k2": lambda: 0.5 * difference.square()}[kind]()
