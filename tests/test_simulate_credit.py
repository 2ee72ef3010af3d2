"""simulate_credit.py with fewer groups than the command: the generators, and the ranking of the three schemes."""

import torch

import simulate_credit


def test_random_groups_have_unit_variance_and_the_correlation():
    turn, outcome = simulate_credit.random_groups(20_000, torch.Generator().manual_seed(1))
    table = torch.stack([turn.flatten(), outcome.flatten()])
    assert torch.allclose(torch.cov(table), torch.tensor([[1.0, 0.3], [0.3, 1.0]], dtype=torch.float64), atol=0.02)


def test_what_each_scheme_tells_the_first_turn():
    found = simulate_credit.run(200, seed=0)
    for scheme, expected, tolerance in (("outcome", 0.28, 0.08), ("merged", 0.78, 0.03), ("mt_grpo", 0.93, 0.01)):
        (mean, width), _ = found[scheme]
        assert abs(mean - expected) < tolerance and 0 < width < tolerance
    assert found["outcome"][1] == (1.0, 0.0) and found["mt_grpo"][1] == (0.0, 0.0)
    assert 0.4 < found["merged"][1][0] < 0.6


def test_the_same_seed_gives_the_same_numbers(capsys):
    for _ in range(2):
        simulate_credit.main(["--groups", "20", "--seed", "3"])
    said = capsys.readouterr().out.splitlines()
    assert said[:4] == said[4:] and said[0] == "groups: 20 of 8   alpha: 0.5   seed: 3"
    assert [line.split(":")[0] for line in said[1:4]] == list(simulate_credit.SCHEMES)
    assert simulate_credit.run(20, 3) != simulate_credit.run(20, 4)
