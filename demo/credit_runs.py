"""Kinds of credit on factbook questions with exact answers: every setting, every seed, one table and one figure.

    python demo/credit_runs.py [--steps N] [--seeds N] [--figure PNG]

Each run is `python demo.py --data data/demo/qa.parquet --set ...` in a folder runs/credit-SETTING-SEED; finished runs
are taken as they are. The table has the mean over seeds of the first and of the last three steps, ± the standard
deviation over seeds.
"""

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

import config  # noqa: E402
from records import read_journal  # noqa: E402

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

QUESTIONS = "data/demo/qa.parquet"
SETTINGS = {
    "outcome": {"CREDIT": "outcome"},
    "merged": {"CREDIT": "merged"},
    "mt_grpo": {"CREDIT": "mt_grpo"},
    "mt_ppo": {"CREDIT": "mt_ppo", "CRITIC_LEARNING_RATE": 1.4e-3},  # a tiny critic moves only with large steps, too
    "mt_grpo, no penalty": {"CREDIT": "mt_grpo", "SEARCH_PENALTY": 0.0},
}
MEASURES = {"reward/exact_match": "exact match", "reward/format": "valid format", "rollout/search_calls": "searches"}
WINDOW = 3  # steps averaged at each end


def run(name, settings, seed, steps):
    """The metrics of one run, [{metric: value}] by step; trains it first where it is not finished yet."""
    folder = Path(config.RUNS_DIR, f"credit-{name.replace(', ', '-').replace(' ', '-')}-{seed}")
    done = [line for _, line in read_journal(folder / "metrics.jsonl")]
    if len(done) < steps:
        constants = {"REWARD_SCHEME": "exact_match", "TRACKER": "none", **settings}
        flags = [flag for pair in constants.items() for flag in ("--set", "=".join(map(str, pair)))]
        subprocess.run([sys.executable, HERE.parent / "demo.py", "--data", QUESTIONS, "--run", folder.name,
                        "--seed", str(seed), "--steps", str(steps), *flags], check=True)  # fmt: skip
        done = [line for _, line in read_journal(folder / "metrics.jsonl")]
    return done[:steps]


def table(results):
    """Markdown: per setting and measure, first steps -> last steps, means over seeds ± deviation."""
    lines = ["| credit | " + " | ".join(MEASURES.values()) + " |", "|---" * (len(MEASURES) + 1) + "|"]
    for name, runs in results.items():
        cells = []
        for metric in MEASURES:
            ends = ([history[:WINDOW] for history in runs], [history[-WINDOW:] for history in runs])
            means = ([statistics.fmean(step[metric] for step in part) for part in parts] for parts in ends)
            cells.append(" → ".join(map(_spread, means)))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _spread(values):
    return f"{statistics.fmean(values):.3f} ± {statistics.stdev(values) if len(values) > 1 else 0.0:.3f}"


def draw(results, path):
    """The measures over steps, mean over seeds with the range between the lowest and the highest seed."""
    figure, axes = plt.subplots(1, len(MEASURES), figsize=(4.4 * len(MEASURES), 3.4), layout="constrained")
    for axis, (metric, title) in zip(axes, MEASURES.items(), strict=True):
        for name, runs in results.items():
            curves = np.array([[step[metric] for step in history] for history in runs])
            steps = np.arange(1, curves.shape[1] + 1)
            axis.plot(steps, curves.mean(0), label=name)
            axis.fill_between(steps, curves.min(0), curves.max(0), alpha=0.12)
        axis.set(title=title, xlabel="step")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--figure", default="runs/credit.png")
    arguments = parser.parse_args()
    results = {name: [run(name, settings, seed, arguments.steps) for seed in range(arguments.seeds)]
               for name, settings in SETTINGS.items()}  # fmt: skip
    draw(results, arguments.figure)
    print(table(results))


if __name__ == "__main__":
    main()
