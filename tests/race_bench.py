"""A small benchmark in our own words, and judge replies to it."""

import json

import race

QUESTIONS = {  # id: (language, question)
    "1": ("en", "Compare two ways to store heat in a house."),
    "2": ("zh", "比较两种储热方式的成本与风险"),
    "3": ("en", "Which bridge types suit a wide river?"),
    "0": ("en", "How do libraries lend tools?"),
}
NAMES = {
    "comprehensiveness": ("Coverage", "Coverage of risks"),
    "insight": ("Weighs costs",),
    "instruction_following": ("Keeps to the two", "Names sources", "Gives figures"),
    "readability": ("Clear order",),
}
WEIGHTS = {"comprehensiveness": (0.8, 0.2), "insight": (1.0,), "instruction_following": (0.5, 0.3, 0.2),
           "readability": (1.0,)}  # fmt: skip
DIMENSION_WEIGHTS = {"comprehensiveness": 0.3, "insight": 0.3, "instruction_following": 0.3, "readability": 0.1}
COUNT = sum(map(len, NAMES.values()))


def criteria():
    """The criteria of every question: `dimension_weight` and `criterions`."""
    return {
        "dimension_weight": dict(DIMENSION_WEIGHTS),
        "criterions": {
            d: [{"criterion": n, "explanation": "e", "weight": w} for n, w in zip(NAMES[d], WEIGHTS[d], strict=True)]
            for d in NAMES
        },
    }


def sheet(score, numbered=True):
    """A complete reply object; score(number) -> (report's, reference's) of the criterion with that 1-based number."""
    number, made = 0, {}
    for dimension, names in NAMES.items():
        made[dimension] = []
        for name in names:
            number += 1
            first, second = score(number)
            label = {"number": number} if numbered else {"criterion": name}
            made[dimension].append({**label, "analysis": "a", "article_1_score": first, "article_2_score": second})
    return made


def by_hand(score):
    """What the scores must be, by a plain loop over numbers: {dimension or "overall": share, 0..1}."""
    number, shares, total = 0, {}, [0.0, 0.0]
    for dimension, weights in WEIGHTS.items():
        sides = [0.0, 0.0]
        for weight in weights:
            number += 1
            for side in (0, 1):
                sides[side] += weight * score(number)[side]
        shares[dimension] = sides[0] / sum(sides)
        for side in (0, 1):
            total[side] += DIMENSION_WEIGHTS[dimension] * sides[side]
    return {**shares, "overall": total[0] / sum(total)}


def task(key="1", reference="The reference report."):
    """One Task of the benchmark."""
    language, prompt = QUESTIONS[key]
    return race.Task(key, prompt, language, criteria(), reference)


def write(folder):
    """The three files below `folder`; returns the flags that name them. Ids are numbers, as in the real files."""
    rows = {
        "queries": [{"id": int(k), "topic": "t", "language": x, "prompt": p} for k, (x, p) in QUESTIONS.items()],
        "criteria": [{"id": int(k), "prompt": p, **criteria()} for k, (_, p) in QUESTIONS.items()],
        "reference": [{"id": int(k), "prompt": p, "article": f"reference {k}"} for k, (_, p) in QUESTIONS.items()],
    }
    flags = []
    for name, lines in rows.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
        flags += [f"--{name}", str(path)]
    return flags
