"""A judge's reply to its verdict, kind by kind: only the asked JSON counts, complete and within range."""

import json
import re

from asks import MARKS


class VerdictError(ValueError):
    """One reply is not a verdict; `kind` is one word for journal and counters. final: asking again cannot help."""

    def __init__(self, kind, message, *, final=False):
        super().__init__(message)
        self.kind, self.final = kind, final


def read(ask, reply):
    """What a Reply decides: winners (0-based, best first), two scores, or a grade; a tuple, or a float for overall.

    Raises VerdictError, also when the reply was cut, filtered, or written by another model.
    """
    check_finish(reply)
    if ask.kind == "pick":
        return parse_verdict(reply.raw, len(ask.answers), ask.num_winners)
    readers = {"compare": _scores, "items": lambda value: _items(value, len(ask.rubrics)), "overall": _overall,
               "turns": lambda value: _marks(value, len(ask.turns))}  # fmt: skip
    return _only(reply.raw, readers[ask.kind])


def check_finish(reply):
    """Raise VerdictError for a reply that was cut, filtered, or written by another model."""
    if reply.finish in ("length", "content_filter", "foreign_model"):
        words = f"model {reply.model!r} answered" if reply.finish == "foreign_model" else f"{reply.raw[:80]!r}"
        raise VerdictError(reply.finish, f"the reply ended by {reply.finish}: {words}")


def parse_scores(raw):
    """The two scores of a comparison, each 0..10: (first shown, second shown). Raises VerdictError otherwise."""
    return _only(raw, _scores)


def _only(raw, reader):
    """The one value `reader` finds in the reply's JSON objects; VerdictError when there is none, or two that differ."""
    if raw is None or not raw.strip():
        raise VerdictError("empty", "the reply is empty")
    found = {value for candidate in json_objects(raw) if (value := reader(candidate)) is not None}
    if not found:
        raise VerdictError("no_verdict", f"no object with a valid verdict in {raw[:80]!r}")
    if len(found) > 1:
        raise VerdictError("ambiguous", f"{len(found)} different verdicts in one reply")
    return found.pop()


def as_dict(value):
    """The value when it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def within(value, low, high):
    """True for a JSON number from low to high; a boolean is none, and NaN is nowhere."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _scores(value):
    scores = as_dict(as_dict(value).get("combined_scores"))
    pair = scores.get("Agent_A"), scores.get("Agent_B")
    return tuple(map(float, pair)) if all(within(score, 0, 10) for score in pair) else None


def _items(value, count):
    met = as_dict(value).get("items")
    sound = isinstance(met, list) and len(met) == count and all(type(item) is int and item in (0, 1) for item in met)
    return tuple(met) if sound else None


def _marks(value, count):
    turns = as_dict(value).get("turns")
    if not isinstance(turns, list) or len(turns) != count:
        return None
    marks = tuple(tuple(as_dict(turn).get(name) for name in MARKS) for turn in turns)
    return marks if all(within(mark, 0, 10) for turn in marks for mark in turn) else None


def _overall(value):
    score = as_dict(value).get("score")
    return float(score) if within(score, 1, 10) else None


def parse_verdict(raw, num_candidates, num_winners):
    """Winners named by a judge's reply: `num_winners` distinct 0-based indices, best first.

    The whole reply is read as JSON first, then the objects outside thinking and code fences. Digits in
    prose are never taken for a verdict. Raises VerdictError otherwise.
    """
    if raw is None or not raw.strip():
        raise VerdictError("empty", "the reply is empty")
    verdicts = {verdict for candidate in json_objects(raw) if (verdict := _winners(candidate, num_candidates))}
    if not verdicts:
        raise VerdictError("no_verdict", f"no object with valid winners in {raw[:80]!r}")
    if len({verdict[:num_winners] for verdict in verdicts}) > 1:
        raise VerdictError("ambiguous", f"{len(verdicts)} different verdicts in one reply")
    verdict = verdicts.pop()
    if len(verdict) < num_winners:
        raise VerdictError("too_few", f"{len(verdict)} winners named, {num_winners} asked for")
    return verdict[:num_winners]


def json_objects(raw):
    """The whole reply as one JSON object, or else every object that stands in it outside thinking."""
    try:
        return [json.loads(raw)]
    except (ValueError, RecursionError):
        pass
    text = re.sub(r"<think>.*?</think>", "", raw, flags=re.DOTALL)
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    objects, decoder, position = [], json.JSONDecoder(), text.find("{")
    while position >= 0:
        try:
            value, end = decoder.raw_decode(text, position)
            objects.append(value)
        except (ValueError, RecursionError):
            end = position + 1
        position = text.find("{", end)
    return objects


def _winners(value, num_candidates):
    """The object's winners as a tuple of 0-based indices, or None when any entry is not a valid number."""
    if not isinstance(value, dict):
        return None
    named = value.get("winners", value.get("winner"))
    entries = named if isinstance(named, list) else [named]
    numbers = [int(e) if isinstance(e, str) and re.fullmatch(r"\s*\d+\s*", e, re.ASCII) else e for e in entries]
    if not numbers or any(type(n) is not int or not 1 <= n <= num_candidates for n in numbers):
        return None
    return tuple(n - 1 for n in numbers) if len(set(numbers)) == len(numbers) else None
