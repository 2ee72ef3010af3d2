"""What each way of giving credit tells the first turn of a two-turn trajectory: an experiment, no model.

    python simulate_credit.py [--groups N] [--seed S]

Random groups. Each of 8 trajectories has a turn reward t and an outcome reward o, drawn from a normal
distribution with mean 0, variance 1 and correlation 0.3, independently of all others. The turn reward is the
turn's true quality. Reported: Pearson's correlation of the first turn's advantage with t inside each group (an
advantage is only ever compared there), averaged over groups. What to expect of the average, with the small
sample's shrinkage of a correlation c by about 1 - (1 - c^2) / 14: 0.3 -> 0.28 for the outcome, and for the
merged reward 1.3 / sqrt(2.6) = 0.81 -> 0.79. MT-GRPO standardises t and o first, so its sum is close to
t + 0.5 o: 1.15 / sqrt(1.55) = 0.92.

Lucky groups. 4 lucky guessers with t around -1 and o around +1, and 4 honest searchers with t around +1 and o
around -1; every reward has normal noise of deviation 0.1, so each reward has about unit variance over the group.
Reported: of the 16 pairs of a guesser with a searcher, the share in which the guesser's first turn gets the
larger advantage, averaged over groups. Merged, luck and work weigh the same, and the noise decides: about half.

Both lines carry a 95% interval of the average: 1.96 standard errors, the groups being the sample.
"""

import argparse

import torch

import config
import credit

GROUP_SIZE = 8
CORRELATION = 0.3
ALPHA = 0.5  # of MT-GRPO
NOISE = 0.1  # deviation of the rewards of lucky groups
SCHEMES = ("outcome", "merged", "mt_grpo")


def random_groups(groups, generator):
    """(turn, outcome), both (groups, 8): unit normal, correlated inside a trajectory."""
    turn, other = torch.randn(2, groups, GROUP_SIZE, generator=generator, dtype=torch.float64)
    return turn, CORRELATION * turn + (1 - CORRELATION**2) ** 0.5 * other


def lucky_groups(groups, generator):
    """(turn, outcome), both (groups, 8): the first half guesses and is lucky, the second half searches and is not."""
    searcher = torch.tensor([-1.0] * (GROUP_SIZE // 2) + [1.0] * (GROUP_SIZE // 2), dtype=torch.float64)
    noise = NOISE * torch.randn(2, groups, GROUP_SIZE, generator=generator, dtype=torch.float64)
    return searcher + noise[0], -searcher + noise[1]


def first_turn(scheme, turn, outcome):
    """(groups, 8) advantages of the first turn, as training would compute them."""
    config.CREDIT, config.TURN_ALPHA = scheme, ALPHA
    return torch.stack([credit.turn_advantages(t[:, None], o)[:, 0] for t, o in zip(turn, outcome, strict=True)])


def correlations(advantages, quality):
    """(groups,) Pearson's correlation inside each group."""
    return torch.stack([torch.corrcoef(torch.stack(pair))[0, 1] for pair in zip(advantages, quality, strict=True)])


def wrong_shares(advantages):
    """(groups,) share of pairs in which a lucky guesser's advantage is above an honest searcher's."""
    guessers, searchers = advantages.chunk(2, dim=1)
    return (guessers[:, :, None] > searchers[:, None, :]).double().mean((1, 2))


def estimate(values):
    """(mean, half width of its 95% interval) over groups."""
    return float(values.mean()), 1.96 * float(values.std()) / len(values) ** 0.5


def run(groups, seed):
    """{scheme: (estimate of the correlation, estimate of the wrong share)}; the same groups for every scheme."""
    generator = torch.Generator().manual_seed(seed)
    ordinary, lucky = random_groups(groups, generator), lucky_groups(groups, generator)
    return {
        scheme: (
            estimate(correlations(first_turn(scheme, *ordinary), ordinary[0])),
            estimate(wrong_shares(first_turn(scheme, *lucky))),
        )
        for scheme in SCHEMES
    }


def main(argv=None):
    """Run the experiment and print one line per scheme."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=1000, help="of each kind (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all draws (%(default)s)")
    args = parser.parse_args(argv)
    print(f"groups: {args.groups} of {GROUP_SIZE}   alpha: {ALPHA}   seed: {args.seed}")
    for scheme, ((r, r_width), (wrong, wrong_width)) in run(args.groups, args.seed).items():
        print(f"{scheme}: correlation with turn quality {r:.3f} +- {r_width:.3f}   "
              f"lucky above honest {wrong:.3f} +- {wrong_width:.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
