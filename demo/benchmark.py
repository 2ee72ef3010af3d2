"""The demo's benchmark: held-out factbook questions with criteria and reference reports, in the real one's format.

    python demo/benchmark.py [--out DIR]

Everything follows from the questions' own rubrics, so that the rule judge can compute every criterion: facts stated
(comprehensiveness), each beside its topic (insight), topics named (instruction following), and length (readability).
"""

import argparse
import json
import re
from pathlib import Path

import pyarrow.parquet as pq

OUT_DIR = "data/demo"
QUESTIONS = 10
WEIGHTS = {"comprehensiveness": 0.4, "insight": 0.2, "instruction_following": 0.3, "readability": 0.1}
CHARACTERS = 400  # of a report that reads in one go: a reference report has about 80
_FACT = re.compile(r'States that the (.+) of .+ is "(.+)"\.')


def facts(row):
    """{topic: fact} of a prepared question of corpus.py."""
    return dict(_FACT.fullmatch(rubric["description"]).groups() for rubric in row["rubrics"])


def report(row):
    """The reference report: every fact in a sentence."""
    return " ".join(f"The {topic} is {fact}." for topic, fact in facts(row).items())


def criteria(row):
    """The benchmark's criteria row of one question; criteria of one dimension weigh the same."""
    known = facts(row)
    listed = {
        "comprehensiveness": [f'States the {topic}: "{fact}"' for topic, fact in known.items()],
        "insight": [f'Connects value and topic: "{topic} is {fact}"' for topic, fact in known.items()],
        "instruction_following": [f'Speaks of what was asked: "{topic}"' for topic in known],
        "readability": [f"Reads in one go: at most {CHARACTERS} characters"],
    }
    criterions = {
        dimension: [{"criterion": text, "explanation": "", "weight": 1 / len(texts)} for text in texts]
        for dimension, texts in listed.items()
    }
    return {"id": row["id"], "prompt": row["query"], "dimension_weight": WEIGHTS, "criterions": criterions}


def build(out_dir=OUT_DIR):
    """Write OUT/benchmark/{query,criteria,reference}.jsonl from OUT/heldout.parquet; returns the folder."""
    folder = Path(out_dir, "benchmark")
    folder.mkdir(parents=True, exist_ok=True)
    rows = pq.read_table(Path(out_dir, "heldout.parquet")).to_pylist()[:QUESTIONS]
    files = {
        "query": [{"id": row["id"], "topic": "factbook", "language": "en", "prompt": row["query"]} for row in rows],
        "criteria": [criteria(row) for row in rows],
        "reference": [{"id": row["id"], "prompt": row["query"], "article": report(row)} for row in rows],
    }
    for name, lines in files.items():
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=OUT_DIR)
    made = build(parser.parse_args().out)
    print(" ".join(f"--{flag} {made}/{name}.jsonl" for flag, name in
                   (("queries", "query"), ("criteria", "criteria"), ("reference", "reference"))))  # fmt: skip
