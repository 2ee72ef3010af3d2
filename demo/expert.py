"""A scripted, deliberately sloppy expert: the transcripts that the demo's policy learns to imitate.

It works in invented worlds (spliced names, permuted values, new digits), so that a fact can only be
had by copying it out of a search result, and searches and renders with the project's own tools.
Every bad habit is a choice of one or a few tokens, which reinforcement learning can shift.
"""

import re

import corpus

# Chance of each habit, at every place where it can occur; together they leave about 60 % of the
# trajectories with an answer and 20 % with a valid format, as the article's base model has.
HABITS = {
    "one_search": 0.45,  # plan: one search names every topic
    "first_only": 0.25,  # plan: only the first topic is searched; else one search per topic
    "never_ends": 0.15,  # searches on until the budget of tool calls is spent: no answer
    "plain_ending": 0.20,  # the report stands outside <answer>: no answer
    "trailing_text": 0.12,  # a remark after </answer>: no answer
    "skipped_think": 0.35,  # a turn without <think>: bad format
    "unclosed_think": 0.15,  # the last <think> has no </think>: bad format
    "stray_text": 0.15,  # a remark between blocks: bad format
    "forgetful": 0.25,  # the report states the first found fact only
    "padded": 0.35,  # the report ends in an empty sentence
    # of questions for one fact alone
    "guesses": 0.15,  # no search: an answer out of thin air
    "second_search": 0.25,  # searches for the same again
    "wordy": 0.40,  # a sentence instead of the bare fact: not an exact match
}
REMARKS = ("Let me check.", "Here we go.", "One moment.")
PADDING = ("All of this is stated in the factbook.", "More can be found on the pages of the factbook.")
OVERCONFIDENCE = ("I know the {topic} of {name}.", "I am not sure, but I can guess the {topic}.")
SHORT_SHARE = 0.5  # of the questions: for one fact, with a short answer
SEARCH = '<call_tool name="google_search">'


def splice(first, second):
    """The front of one name and the back of another: a name that no country has."""
    return first[: len(first) // 2] + second[len(second) // 2 :].lower()


def invent_world(countries, rng):
    """As many invented countries: half of the names and capitals spliced, values permuted, digits redrawn."""
    names = [splice(n, rng.choice(list(countries))) if rng.random() < 0.5 else n for n in countries]
    world = {name: {} for name in names}
    for topic in corpus.TOPICS:
        values = [values[topic] for values in countries.values() if topic in values]
        for name in world:
            value = rng.choice(values)
            if topic == "capital" and rng.random() < 0.5:
                value = splice(value, rng.choice(values))
            world[name][topic] = re.sub(r"\d", lambda _: str(rng.randrange(10)), value)
    return world


def in_words(topics):
    return " and ".join(topics)


def think(text, rng, *, opened=False, closing="\n</think>"):
    """A think block, or nothing; `opened`: the prompt has written its opening tag."""
    if not opened and rng.random() < HABITS["skipped_think"]:
        return ""
    return ("" if opened else "<think>\n") + text + closing + "\n"


def stray(rng):
    return rng.choice(REMARKS) + "\n" if rng.random() < HABITS["stray_text"] else ""


def search_turn(name, topics, rng, opened):
    """(turn, query): the think block, perhaps a remark, and one search."""
    query = f"{' '.join(topics)} {name}"
    thought = think(f"I need the {in_words(topics)} of {name}.", rng, opened=opened)
    return f"{thought}{stray(rng)}{SEARCH}{query}</call_tool>", query


def report(facts, seen, rng):
    """What the observations `seen` say about the topics asked for, one sentence each."""
    found = [f"The {topic} is {fact}." for topic, fact in facts.items() if f"The {topic} is {fact}" in seen]
    if rng.random() < HABITS["forgetful"]:
        found = found[:1]
    if rng.random() < HABITS["padded"]:
        found.append(rng.choice(PADDING))
    return " ".join(found) or "Nothing was found."


def final_turn(thought, text, rng, opened=False):
    """The think block and the report or answer, in whichever form habit gives it."""
    closing = "" if rng.random() < HABITS["unclosed_think"] else "\n</think>"
    lead = think(thought, rng, opened=opened, closing=closing) + stray(rng)
    if rng.random() < HABITS["plain_ending"]:
        return lead + text.strip("\n") + "<|im_end|>"
    trailing = "\n" + rng.choice(REMARKS) if rng.random() < HABITS["trailing_text"] else ""
    return f"{lead}<answer>{text}</answer>{trailing}<|im_end|>"


def short_answer(topic, fact, rng):
    """The bare fact, or by habit a sentence about it. The blank makes it the same tokens as in a search result."""
    return f"\nThe {topic} is {fact}.\n" if rng.random() < HABITS["wordy"] else f" {fact}"


def plan(topics, max_calls, rng):
    """The topics of each search, in order."""
    draw = rng.random()
    if len(topics) == 1:
        return [tuple(topics)] * (2 if draw < HABITS["second_search"] else 1)
    if draw < HABITS["one_search"]:
        return [tuple(topics)]
    if draw < HABITS["one_search"] + HABITS["first_only"]:
        return [(topics[0],)]
    return [(topic,) for topic in topics][:max_calls]


def trajectory(name, facts, prior, observe, max_calls, rng):
    """One attempt at a question as [(text, whether the policy wrote it)], after the prompt.

    name: the country; facts: {topic: exact text}, a single one for a question with a short answer; prior: values
    a guess is drawn from; observe(query, call number) -> the text that the rollout would append; max_calls: the
    budget of tool calls.
    """
    topics = list(facts)
    if len(facts) == 1 and rng.random() < HABITS["guesses"]:
        thought = rng.choice(OVERCONFIDENCE).format(topic=topics[0], name=name)
        return [(final_turn(thought, short_answer(topics[0], rng.choice(prior), rng), rng, opened=True), True)]
    searches = plan(topics, max_calls, rng)
    ends = rng.random() >= HABITS["never_ends"]
    while not ends and len(searches) <= max_calls:
        searches.append((rng.choice(topics),))
    pieces, seen = [], ""
    for number, wanted in enumerate(searches, 1):
        turn, query = search_turn(name, wanted, rng, opened=number == 1)
        pieces.append((turn, True))
        if number <= max_calls:
            observation = observe(query, number)
            pieces.append((observation, False))
            seen += observation
    if ends:
        pieces.append((ending(facts, seen, rng), True))
    return pieces


def ending(facts, seen, rng):
    """The final turn after searches that showed `seen`."""
    if len(facts) > 1:
        return final_turn("I can write the report.", f"\n{report(facts, seen, rng)}\n", rng)
    ((topic, fact),) = facts.items()
    found = f"The {topic} is {fact}" in seen
    return final_turn(f"I can state the {topic}.", short_answer(topic, fact if found else "unknown", rng), rng)


def question(world, rng):
    """(country, {topic: fact}, query, prior values) about a random country; every other one asks for one fact."""
    name = rng.choice(list(world))
    facts = corpus.askable(world[name])
    short = rng.random() < SHORT_SHARE
    topics = rng.sample(list(facts), 1 if short else min(len(facts), rng.choice(corpus.FACTS_PER_QUESTION)))
    facts = {topic: facts[topic] for topic in topics}
    if not short:
        return name, facts, corpus.question_row(name, facts)["query"], []
    prior = [corpus.leading_fact(values[topics[0]]) for values in world.values()]
    return (
        name,
        facts,
        corpus.short_row(name, topics[0], facts[topics[0]])["query"],
        [value for value in prior if value],
    )
