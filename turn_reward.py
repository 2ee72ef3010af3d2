"""Rewards of a trajectory, turn by turn: verifiable ones, for questions with reference answers, and a judge's.

The outcome goes to the final turn (`outcome_reward`), every other turn has its own (`turn_rewards`); what each
is worth stands in config.py. `judged_turn_rewards` needs a judge's marks instead of answers.
"""

import re
import string

import config
import protocol

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_ADDRESS_LINE = re.compile(r"^URL:.*$", re.MULTILINE)  # as protocol renders it


def normalize_answer(text):
    """The text as SQuAD's exact match compares it: lower case, no ASCII punctuation, no articles, single spaces."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _references(answers):
    """The reference answers, normalised; one that has nothing left ("The", "!") would match anything and is ignored.

    Raises ValueError when none is left.
    """
    references = [normalized for answer in answers if (normalized := normalize_answer(answer))]
    if not references:
        raise ValueError(f"no reference answer in {tuple(answers)!r}: these rewards need questions prepared with --qa")
    return references


def is_right(answer, answers):
    """True when the answer equals one of the reference answers after normalisation. Source: SQuAD, exact match."""
    return normalize_answer(answer) in _references(answers)


def is_found(observation, answers):
    """True when a tool's output holds one of the reference answers, normalised, from word boundary to word boundary.

    Two things in the output are not the tool's find: the notice of the spent budget, and addresses, which the
    policy may have written itself.
    """
    text = normalize_answer(_ADDRESS_LINE.sub("", observation.replace(protocol.BUDGET_NOTICE, "")))
    # nothing left in a normalised text is special in a pattern
    return any(re.search(rf"(?<!\w){reference}(?!\w)", text) for reference in _references(answers))


def is_valid_turn(segment):
    """True for exactly one thought that says something, then one well formed call of a known tool, nothing else.

    segment: one turn's own text, for the first turn with what the prompt opened before it.
    """
    parsed = protocol.parse_transcript(segment)
    faults = parsed.stray or parsed.unknown_tags or parsed.bad_attributes or parsed.broken_tags
    if faults or [block.tag for block in parsed.blocks] != ["think", "call_tool"]:
        return False
    call = protocol.find_tool_call(segment)
    return bool(parsed.blocks[0].inner.strip()) and call is not None and call.fault is None


def turn_rewards(trajectory, answers):
    """Rewards of all turns but the final one, in order; [] for a trajectory of one turn.

    Each is config.TURN_FOUND when the turn's tool output holds a reference answer, plus config.TURN_VALID or
    config.TURN_BROKEN for its format, minus config.SEARCH_PENALTY times n when it is the trajectory's n-th search.
    Only the output of a call that worked can hold the answer: an error message repeats the policy's own words.
    A search is a google_search call that could be run; it counts though the search engine failed, since the policy
    asked for it, and a call with a fault does not, since nothing was searched and the format pays for it.
    Source: the verifiable rewards of MT-GRPO's and MT-PPO's search task.
    """
    rewards = []
    for number, (turn, penalty) in enumerate(zip(trajectory.turns[:-1], search_penalties(trajectory), strict=True)):
        segment = trajectory.opening + turn.text if number == 0 else turn.text
        reward = config.TURN_VALID if is_valid_turn(segment) else config.TURN_BROKEN
        if turn.tool_status == "ok" and is_found(turn.observation, answers):
            reward += config.TURN_FOUND
        rewards.append(reward - penalty)
    return rewards


def search_penalties(trajectory):
    """What every turn but the final one loses: config.SEARCH_PENALTY times n for the n-th search, 0 without one."""
    penalties, searches = [], 0
    for turn in trajectory.turns[:-1]:
        searched = turn.call is not None and turn.call.name == "google_search" and turn.call.fault is None
        searches += searched
        penalties.append(config.SEARCH_PENALTY * searches if searched else 0.0)
    return penalties


def outcome_reward(check, answers):
    """The final turn's reward: config.OUTCOME_RIGHT, _VALID (format only) or _BROKEN (the format, right or not).

    check: the FormatCheck of the whole transcript (format_reward.check_format).
    """
    if not check.reward:
        return config.OUTCOME_BROKEN
    return config.OUTCOME_RIGHT if is_right(check.answer, answers) else config.OUTCOME_VALID


def judged_turn_rewards(trajectory, marks):
    """Rewards of all turns but the final one from a judge's marks: their mean's share of 10 times config.TURN_JUDGED,
    minus the same penalty for searches. marks: three numbers 0..10 a turn."""
    penalties = search_penalties(trajectory)
    return [config.TURN_JUDGED * sum(turn) / (10 * len(turn)) - penalty
            for turn, penalty in zip(marks, penalties, strict=True)]  # fmt: skip
