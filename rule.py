"""The embedded judge: a deterministic, offline rule that answers every kind of Ask."""

import json
import re


def rule(ask):
    """The embedded judge's reply, as JSON text: coverage of the rubric's facts decides, then brevity.

    A rubric item's facts are the texts between double quotes in its description, else its words of four letters and
    more; an item is met when the report states half of them. Ties keep the order of presentation. Deterministic.
    """
    answers, rubrics = ask.answers, ask.rubrics
    if ask.kind == "pick":
        order = sorted(range(len(answers)), key=lambda i: (-coverage(answers[i], rubrics), len(answers[i])))
        return json.dumps({"winners": [i + 1 for i in order[: ask.num_winners]]})
    if ask.kind == "items":
        return json.dumps({"items": [int(coverage(answers[0], [rubric]) >= 0.5) for rubric in rubrics]})
    if ask.kind == "turns":
        marks = ({"format": 10 * ("<call_tool" in turn), "reasoning": 10 * ("</think>" in turn),
                  "search": 10 * coverage(turn, rubrics)} for turn in ask.turns)  # fmt: skip
        return json.dumps({"reasons": "rule", "turns": list(marks)})
    merits = [9 * coverage(answer, rubrics) + 1 / (1 + len(answer) / 100) for answer in answers]
    if ask.kind == "overall":
        return json.dumps({"score": 1 + 0.9 * merits[0]})
    if ask.paths:
        merits = [merit / 2 + 5 * coverage(path, rubrics) for merit, path in zip(merits, ask.paths, strict=True)]
    return json.dumps({"combined_scores": dict(zip(("Agent_A", "Agent_B"), merits, strict=True))})


def coverage(answer, rubrics):
    """Mean share of the rubric's facts that the answer states, 0..1; facts are matched without regard to case."""
    text = " ".join(answer.casefold().split())
    shares = []
    for rubric in rubrics:
        facts = re.findall(r'"([^"]+)"', rubric.description) or re.findall(r"\w{4,}", rubric.description)
        shares.append(sum(fact.casefold() in text for fact in facts) / max(1, len(facts)))
    return sum(shares) / max(1, len(shares))
