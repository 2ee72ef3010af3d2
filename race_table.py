"""Results of evaluations as tables: the article's rows for one system, two systems side by side, the judge's spread.

A result is one line of results.jsonl: id, completed, valid_format, tool_calls, generated_tokens (null for reports made
elsewhere), scores (each 0..1, null with `failure`), repeats (the scores of each judging), and what may not be mixed:
task, prompts, judge, models.
"""

import statistics

import numpy as np

from race import SCORES

BOOTSTRAP_DRAWS = 10_000
LABELS = {name: name.replace("_", " ") for name in SCORES} | {"overall": "Overall"}
BEHAVIOUR = {  # label: (field, factor it is printed with)
    "answers completed, %": ("completed", 100),
    "valid format, %": ("valid_format", 100),
    "tool calls per question": ("tool_calls", 1),
    "generated tokens per question": ("generated_tokens", 1),
}


def check_one_judge(results):
    """Raise SystemExit unless one prompt, one judge and one answering model made every score."""
    for field, words in (("prompts", "prompts"), ("judge", "judges")):
        if len(found := {r[field] for r in results}) > 1:
            raise SystemExit(f"scores of different {words} are not averaged: {', '.join(sorted(found))}. "
                             "Score both with the same ones")  # fmt: skip
    models = {model for r in results for model in r["models"]}
    if len(models) > 1:
        raise SystemExit(f"scores of different models are not averaged: {', '.join(sorted(models))}. "
                         "Name one exactly in EVAL_JUDGE_MODEL, and score again with --name OTHER_NAME")  # fmt: skip


def failed(results):
    """The results without scores."""
    return [r for r in results if r["scores"] is None]


def table(name, results, cost):
    """The article's rows of one evaluation as text; cost in US dollars. Means over questions, scores x100."""
    check_one_judge(results)
    scored = [r for r in results if r["scores"] is not None]
    lines = [f"{name:32}{'over scored':>14}{'failures as 0':>16}   (x100; 50.00 is a tie with the reference report)"]
    for key in SCORES:
        total = 100 * sum(r["scores"][key] for r in scored)
        over = f"{total / len(scored):14.2f}" if scored else f"{'-':>14}"
        lines.append(f"{LABELS[key]:32}{over}{total / len(results):16.2f}")
    completed = sum(r["completed"] for r in results)
    lines.append(f"{'answers completed':32}{f'{completed}/{len(results)}':>14}")
    for label, (field, factor) in list(BEHAVIOUR.items())[1:]:
        values = [factor * r[field] for r in results if r[field] is not None]
        lines.append(f"{label:32}{f'{statistics.fmean(values):.2f}' if values else '-':>14}")
    lines.append(f"{'scored / total':32}{f'{len(scored)}/{len(results)}':>14}")
    lines += _spread(scored)
    lines.append(f"{'cost':32}{f'${cost:.2f}':>14}")
    if missing := failed(results):
        lines.append(f"INCOMPLETE: {len(missing)} of {len(results)} questions failed; run the same command again")
        lines += [f"  {r['id']}: {r['failure']}" for r in missing[:20]]
    return "\n".join(lines)


def _spread(scored):
    """The judge's own noise in two lines; none when it judged once."""
    judged = [[100 * scores["overall"] for scores in r["repeats"]] for r in scored if r["repeats"]]
    if not judged or min(map(len, judged)) < 2:
        return []
    rounds = [statistics.fmean(values) for values in zip(*judged, strict=True)]
    within = statistics.fmean(statistics.stdev(values) for values in judged)
    return [f"{'Overall by judging':32}{', '.join(f'{value:.2f}' for value in rounds):>14}",
            f"{'judge noise, standard deviation':32}{statistics.stdev(rounds):14.2f}   of that mean; "
            f"{within:.2f} of one question"]  # fmt: skip


def bootstrap(differences, seed):
    """95% interval (low, high) of the mean of paired differences, by resampling the pairs; same seed, same interval."""
    values = np.asarray(differences, dtype=float)
    picks = np.random.default_rng(seed).integers(0, len(values), (BOOTSTRAP_DRAWS, len(values)))
    return tuple(float(bound) for bound in np.percentile(values[picks].mean(axis=1), [2.5, 97.5]))


def compare(names, first, second, seed):
    """Both evaluations, their paired difference with its interval, and the same where both completed; as text.

    Raises SystemExit when they were scored with other tasks, prompts, judges or models.
    """
    check_one_judge([*first, *second])
    others = {r["id"]: r for r in second}
    pairs = [(r, others[r["id"]]) for r in first if r["id"] in others]
    if not pairs:
        raise SystemExit(f"{names[0]} and {names[1]} have no question in common")
    if changed := [a["id"] for a, b in pairs if a["task"] != b["task"]]:
        raise SystemExit(f"{len(changed)} questions have other criteria or references in {names[1]}, the first is "
                         f"{changed[0]}; score both with the same benchmark files")  # fmt: skip
    lines = [f"{'':32}{names[0][-22:]:>24}{names[1][-22:]:>24}{'difference':>12}   95% interval (paired bootstrap)"]
    if len(pairs) < max(len(first), len(second)):
        lines.append(f"only the {len(pairs)} questions of both are compared")
    lines += _section(f"all {len(pairs)} questions", pairs, seed)
    both = [(a, b) for a, b in pairs if a["completed"] and b["completed"]]
    lines += _section(f"the {len(both)} questions both completed", both, seed) if both else []
    if missing := failed([r for pair in pairs for r in pair]):
        lines.append(f"INCOMPLETE: {len(missing)} scores are missing and left out, with their partners")
    return "\n".join(lines)


def _section(title, pairs, seed):
    """One block of the comparison: every row over the pairs that both have it."""
    rows = {LABELS[key]: [[100 * r["scores"][key] if r["scores"] else None for r in pair] for pair in pairs]
            for key in SCORES}  # fmt: skip
    for label, (field, factor) in BEHAVIOUR.items():
        rows[label] = [[factor * r[field] if r[field] is not None else None for r in pair] for pair in pairs]
    lines = [f"{title}:"]
    for label, values in rows.items():
        known = [pair for pair in values if None not in pair]
        if not known:
            continue
        low, high = bootstrap([b - a for a, b in known], seed)
        one, two = (statistics.fmean(column) for column in zip(*known, strict=True))
        count = f"   n = {len(known)}" if len(known) < len(pairs) else ""
        lines.append(f"{label:32}{one:24.2f}{two:24.2f}{two - one:+12.2f}   [{low:+.2f}, {high:+.2f}]{count}")
    return lines
