"""The embedded default: the whole training loop on two CPU cores, without GPU, key or network.

    python demo.py [--run NAME] [--steps N] [--data PARQUET] [--seed N] [--permute] [--set NAME=VALUE ...]

Sets constants, builds the offline corpus, and calls the same train.main() as everyone: a tiny policy
(demo/policy), search in the CIA World Factbook, the rule judge. Ends with a table of the first three
steps against the last three, and a PNG of the curves.
"""

import argparse
import ast
import os
import statistics
import sys
from pathlib import Path

import matplotlib
import torch

import config
import protocol
import train
from policy import load_tokenizer
from prepare_data import load_questions
from records import read_journal
from replay import rebuild_rewards

HERE = Path(__file__).parent
sys.path.append(str(HERE / "demo"))

import corpus  # noqa: E402  the folder's own modules
from settings import SETTINGS  # noqa: E402

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

TRAINING = {
    "SAMPLER": "in_process",
    "SEARCH_BACKEND": "local",
    "BROWSE_BACKEND": "local",
    "JUDGE_BACKEND": "rule",
    "QUESTIONS_PER_STEP": 4,
    "SLOTS": 32,  # QUESTIONS_PER_STEP x K
    "LEARNING_RATE": 1.4e-3,  # a tiny policy moves only with large steps
    "MICRO_BATCH_TOKENS": 8192,
    "GRADIENT_CHECKPOINTING": False,  # a tiny policy fits, and runs a third faster
    "TRAIN_FILE": "data/demo/train.parquet",
}
CURVES = ("reward/has_answer", "reward/format", "reward/total", "rollout/search_calls")


def parse(argv):
    """The command line as a namespace."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", help="name of the run folder")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--data", help="prepared Parquet to train on instead of the factbook questions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--permute", action="store_true", help="control: shuffle the advantages within each group")
    parser.add_argument("--set", action="append", default=[], type=setting, metavar="NAME=VALUE",
                        help="a constant of config.py, e.g. REWARD_SCHEME=swiss; may be repeated")  # fmt: skip
    return parser.parse_args(argv)


def setting(text):
    """NAME=VALUE as (name, value); the value is a Python literal, or else a text."""
    name, _, value = text.partition("=")
    flags = {"SEED": "--seed", "STEPS": "--steps", "PERMUTE_ADVANTAGES": "--permute", "TRAIN_FILE": "--data"}
    if name in flags:
        raise argparse.ArgumentTypeError(f"{name} has a flag of its own: {flags[name]}")
    if not name.isupper() or not hasattr(config, name):
        raise argparse.ArgumentTypeError(f"{name!r} is no constant of config.py")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def main(argv=None):
    """Train the demo and report; returns {metric: (first three mean, last three mean)}."""
    arguments = parse(argv)
    configure(arguments)
    torch.set_num_threads(1)
    print("demo: no GPU, key or network; tiny policy, rule judge, offline corpus (see demo/README.md)")
    folder = train.main(["--steps", str(arguments.steps)] + (["--run", arguments.run] if arguments.run else []), "demo")
    history = [line for _, line in read_journal(folder / "metrics.jsonl")]
    picture = draw(history, folder / "curves.png")
    table = compare(history)
    print(render(table, history))
    print(f"curves: {picture}\njudge:  {folder / 'judge.jsonl'} ({replayed(folder / 'judge.jsonl')})")
    return table


def configure(arguments):
    """Assign the demo's constants, and build corpus and questions where they are missing."""
    for name, value in {**SETTINGS, **TRAINING}.items():
        setattr(config, name, value)
    for name in ("MODEL", "SYSTEM_PROMPT_FILE"):  # relative, so that a moved folder is still the same run
        setattr(config, name, os.path.relpath(HERE / SETTINGS[name]))
    for name, value in arguments.set:
        setattr(config, name, value)
    config.SEED = arguments.seed
    config.PERMUTE_ADVANTAGES = arguments.permute
    folder = Path(config.CORPUS_FILE).parent
    if not all((folder / name).exists() for name in corpus.FILES):
        corpus.build(folder)
    if arguments.data:
        config.TRAIN_FILE = arguments.data
        config.SLOT_TOKENS = max(config.SLOT_TOKENS, longest_prompt() + config.RESPONSE_TOKENS)


def longest_prompt():
    """Tokens of the longest prompt of config.TRAIN_FILE: other questions may need larger slots."""
    tokenizer, system = load_tokenizer(), protocol.system_prompt()
    prompts = [protocol.render_prompt(tokenizer, system, q.query) for q in load_questions(config.TRAIN_FILE)]
    return max(map(len, tokenizer(prompts, add_special_tokens=False, verbose=False)["input_ids"]), default=0)


def replayed(path):
    """How many groups' rewards judge.jsonl gives again when they are computed from it alone, in words."""
    lines = [line for _, line in read_journal(path)]
    rebuilt = rebuild_rewards(lines)
    scored = [line for line in lines if line["kind"] == "scored"]
    last = {(line["step"], line["question_id"]): line for line in scored}  # a resumed step writes its lines again
    equal = sum(rebuilt[key] == dict(zip(line["players"], line["rewards"], strict=True)) for key, line in last.items())
    return f"gives the rewards of {equal} of {len(last)} groups again"


def window(history):
    """How many steps the comparison averages at each end: three, fewer in a run of less than six."""
    return min(3, max(1, len(history) // 2))


def compare(history):
    """{metric: (mean of the first steps, mean of the last steps)}, `window` steps each."""
    size = window(history)
    return {
        name: tuple(statistics.fmean(line[name] for line in part) for part in (history[:size], history[-size:]))
        for name in CURVES
    }


def render(table, history):
    """The comparison as text."""
    size = {1: "step", 2: "two", 3: "three"}[window(history)]
    lines = [f"{'':24}{'first ' + size:>12}{'last ' + size:>12}{'change':>10}   ({len(history)} steps)"]
    lines += [f"{name:24}{first:12.3f}{last:12.3f}{last - first:+10.3f}" for name, (first, last) in table.items()]
    return "\n".join(lines)


def draw(history, path):
    """The curves over steps as a PNG; returns its path."""
    figure, axes = plt.subplots(1, len(CURVES), figsize=(3.2 * len(CURVES), 2.8), layout="constrained")
    for axis, name in zip(axes, CURVES, strict=True):
        axis.plot([line["step"] for line in history], [line[name] for line in history], marker=".", color="#1f5f8b")
        axis.set(title=name, xlabel="step")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


if __name__ == "__main__":
    main()
