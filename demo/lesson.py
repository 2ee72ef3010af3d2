"""The first lesson of the demo's policy: short rows of random tokens in which copying is all there is to learn.

Transcripts alone are too few and too long for that: in them, hardly any token can only be had by copying.
Half of a row states, the other half asks. The mask of a token is READ or FACT, and -1 on padding.
"""

import random

import corpus

READ, WRITTEN, FACT = 0, 1, 2  # what the mask says of a token: context, the policy's own, copied from the context
ROW_TOKENS = 72
REPEAT_SHARE = 0.4  # of the rows: random tokens, then the same again
FACTS = 3  # of the other rows: so many facts, then each again, in another order
REAL_TOPICS = 0.6  # of the facts are about a topic of the corpus; the others about random tokens
NUMBERS = 0.3  # of the values; the others are random tokens
SENTENCES = 0.6  # of the facts are asked for as a sentence, as in a report; the others as a short answer


class Lesson:
    """Endless rows (ids, mask) for one tokenizer; `ordinary` are the ids that names and values are made of."""

    def __init__(self, tokenizer, ordinary, seed):
        def encode(text):
            return tokenizer.encode(text, add_special_tokens=False)

        self.rng = random.Random(seed)
        self.ordinary = ordinary
        self.blank, self.digits = encode(" "), encode("0123456789")
        self.topics = [encode(f" {topic}") for topic in corpus.TOPICS]
        self.sentence = encode("The"), encode(" is"), encode(".")
        self.short = encode("What is the"), encode("?\n<answer>"), encode("</answer>")

    def row(self):
        """One row (ids, mask) of about ROW_TOKENS tokens."""
        return self._repeat() if self.rng.random() < REPEAT_SHARE else self._facts()

    def _repeat(self):
        half = self._tokens(ROW_TOKENS // 2)
        return half + half, [READ] * (len(half) + 1) + [FACT] * (len(half) - 1)  # the first one cannot be known

    def _facts(self):
        facts = {}
        while len(facts) < FACTS:
            facts[tuple(self._topic())] = self._value()
        ids, mask = [], []
        for topic, value in facts.items():
            self._add(ids, mask, topic, value, self.sentence, READ)
        for topic, value in self.rng.sample(list(facts.items()), FACTS):
            form = self.sentence if self.rng.random() < SENTENCES else self.short
            self._add(ids, mask, topic, value, form, FACT)
        return ids[:ROW_TOKENS], mask[:ROW_TOKENS]

    def _add(self, ids, mask, topic, value, form, kind):
        before, between, after = form
        lead = before + list(topic) + between
        ids += lead + value + after
        mask += [READ] * len(lead) + [kind] * len(value) + [READ] * len(after)

    def _topic(self):
        rng = self.rng
        return rng.choice(self.topics) if rng.random() < REAL_TOPICS else self._tokens(rng.randint(1, 2))

    def _value(self):
        if self.rng.random() < NUMBERS:
            return self.blank + self.rng.choices(self.digits, k=self.rng.randint(2, 7))
        return self._tokens(self.rng.randint(1, 5))

    def _tokens(self, count):
        return self.rng.choices(self.ordinary, k=count)
