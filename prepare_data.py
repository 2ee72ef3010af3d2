"""Authors' Parquet in, checked and filtered Parquet out.

    python prepare_data.py                            fetch the authors' files, write data/{train,val}.parquet
    python prepare_data.py --val F --tokenizer DIR    read F alone, fetch nothing
    python prepare_data.py --qa F                     questions with reference answers (qa.py), to data/qa.parquet

A row that cannot be used is counted and listed with its position (0-based), field and reason; nothing is
filled in for it. What is coerced is said in rows.py.
"""

import argparse
import dataclasses
import json
import os
from collections import Counter
from pathlib import Path

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

import config
import protocol
import qa
from download import fetch_all, first_line
from records import Question, Rubric, question_from_row
from rows import Layout, RowFault, check_columns, checked_index, checked_text, look_up, open_parquet, read_rows

PRINTED_DROPS = 20  # dropped rows shown on screen; OUT/<split>_dropped.jsonl has them all

AUTHORS_PARQUET = {"train": "data/train_new_train_95.parquet", "val": "data/train_new_val_05.parquet"}  # in download.py
QUERY = "reward_model.ground_truth.query"
RUBRICS = "reward_model.ground_truth.rubrics"
INDEX = "extra_info.index"
RUBRIC_FIELDS = ("title", "description", "dimension", "importance")
IMPORTANCES = ("critical", "important", "nice_to_have")
SOURCE_COLUMNS = ("data_source", "prompt", INDEX, QUERY, *(f"{RUBRICS}.{name}" for name in RUBRIC_FIELDS))
PREPARED_COLUMNS = ("id", "data_source", "query", *(f"rubrics.{name}" for name in RUBRIC_FIELDS))
RUBRIC_TYPE = pa.struct({name: pa.string() for name in RUBRIC_FIELDS})
PREPARED = pa.schema(
    {
        "id": pa.string(),
        "data_source": pa.string(),
        "query": pa.string(),
        "rubrics": pa.list_(RUBRIC_TYPE),
        "answers": pa.list_(pa.string()),
    }
)


# ---- reading -------------------------------------------------------------------------------------


def load_questions(path):
    """All questions of a prepared file, in its order. Raises SystemExit naming file, column or row, and remedy.

    A file prepared before there were answers has no such column, and is read all the same.
    """
    check_columns(path, PREPARED_COLUMNS, "make it with `python prepare_data.py`")
    questions = [question_from_row(row) for row in read_rows(path, (*PREPARED_COLUMNS, "answers"))]
    for position, question in enumerate(questions):
        if not (question.rubrics or question.answers):
            raise SystemExit(f"{path} row {position} ({question.id}) has neither rubrics nor answers, so nothing could "
                             "reward it; make the file with `python prepare_data.py`")  # fmt: skip
    return questions


# ---- checking ------------------------------------------------------------------------------------


def checked_user_message(prompt):
    """The text of a prompt that is one user message. Raises RowFault otherwise."""
    if not (isinstance(prompt, list) and len(prompt) == 1 and look_up(prompt[0], "role") == "user"):
        raise RowFault("prompt", "not one user message", f"{prompt!r:.80}")
    return checked_text(look_up(prompt[0], "content"), "prompt")


def checked_rubrics(values):
    """The rubrics of a row as a tuple. Raises RowFault; null and empty both mean that there are none."""
    if values is None or values == []:
        raise RowFault(RUBRICS, "no rubrics", repr(values))
    if not isinstance(values, list):
        raise RowFault(RUBRICS, "not a list", f"{values!r:.80}")
    return tuple(checked_rubric(value, f"rubric {number}: ") for number, value in enumerate(values))


def checked_rubric(value, where):
    """One Rubric; only its description has to say something. Raises RowFault naming the field."""
    texts = {
        name: checked_text(look_up(value, name), f"{RUBRICS}.{name}", where, may_be_blank=name != "description")
        for name in RUBRIC_FIELDS
    }
    if texts["importance"] not in IMPORTANCES:
        raise RowFault(f"{RUBRICS}.importance", "unknown label", f"{where}{texts['importance']!r:.80}")
    return Rubric(**texts)


def question_from_source(row):
    """A row in the authors' schema as a Question; its id is data_source/index. Raises RowFault."""
    source = checked_text(row["data_source"], "data_source")
    query = checked_text(look_up(row, QUERY), QUERY)
    # The policy reads the prompt, the judge reads the query: a Question has one text for both.
    message = checked_user_message(row["prompt"])
    if message != query:
        raise RowFault("prompt", f"differs from {QUERY}", f"{message!r:.80}")
    index = checked_index(look_up(row, INDEX), INDEX)
    return Question(f"{source}/{index}", query, checked_rubrics(look_up(row, RUBRICS)), source)


def check_source_columns(path):
    """Raise SystemExit naming every column that a file in the authors' schema lacks."""
    check_columns(path, SOURCE_COLUMNS, "it needs the schema of the authors' files, see README.md")


AUTHORS = Layout(SOURCE_COLUMNS, check_source_columns, question_from_source, INDEX, QUERY)


def check_new(question, position, first_rows, layout):
    """Raise RowFault for an id, or a query with its rubrics, that an earlier row has; first_rows remembers them."""
    for field, key in ((layout.index, question.id), (layout.query, (question.query, question.rubrics))):
        first = first_rows.setdefault(key, position)
        if first != position:
            raise RowFault(field, "duplicate", f"same as row {first}")


def check_length(question, tokenizer, system):
    """Raise RowFault when the rendered prompt has more than config.MAX_PROMPT_TOKENS tokens."""

    def count(text):
        return len(tokenizer.encode(text, add_special_tokens=False))

    tokens = count(protocol.render_prompt(tokenizer, system, question.query))
    if tokens > config.MAX_PROMPT_TOKENS:
        found = f"{tokens} tokens, {count(question.query)} of the question; limit {config.MAX_PROMPT_TOKENS}"
        raise RowFault("prompt", "too long", found)


# ---- one file ------------------------------------------------------------------------------------


def load_tokenizer(name):
    """The policy's tokenizer from a hub name or a folder. Raises SystemExit when it or its chat template is missing."""
    from transformers import AutoTokenizer  # seconds to import, and load_questions needs none of it

    remedy = "pass --tokenizer DIR, a folder with the policy's tokenizer.json and chat template"
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise SystemExit(f"cannot load the tokenizer {name} ({first_line(error)}); {remedy}") from None
    if not tokenizer.chat_template:
        raise SystemExit(f"the tokenizer {name} has no chat template; {remedy}")
    return tokenizer


def sift(path, tokenizer, system, layout=AUTHORS):
    """Check every row. Returns (Questions kept, one dict per dropped row), both in file order."""
    with open_parquet(path) as file:
        total = file.metadata.num_rows
    kept, dropped, first_rows = [], [], {}
    for position, row in enumerate(tqdm(read_rows(path, layout.columns), Path(path).name, total, unit=" rows")):
        try:
            if row is None:
                raise RowFault("row", "not UTF-8", "a text in it cannot be decoded")
            question = layout.read(row)
            check_new(question, position, first_rows, layout)
            check_length(question, tokenizer, system)
            kept.append(question)
        except RowFault as fault:
            field, reason, found = fault.args
            # As text, so that a bad row can be counted and listed whatever it holds here.
            source = look_up(row, "data_source")
            source = layout.source if source is None else source
            row_is = {"row": position, "source": f"{source}", "index": f"{look_up(row, layout.index)}"}
            dropped.append({"file": str(path), **row_is, "field": field, "reason": reason, "found": found})
    return kept, dropped


def report(split, kept, dropped):
    """Print what was read, kept and dropped by reason, per source and in all, and the first dropped rows."""
    kept_by, dropped_by = Counter(q.source for q in kept), Counter(d["source"] for d in dropped)
    for source in kept_by | dropped_by:
        read = kept_by[source] + dropped_by[source]
        print(f"{split} {source}: read {read}, kept {kept_by[source]}, dropped {dropped_by[source]}")
    print(f"{split} all: read {len(kept) + len(dropped)}, kept {len(kept)}, dropped {len(dropped)}")
    for (field, reason), count in Counter((d["field"], d["reason"]) for d in dropped).items():
        print(f"{split} dropped, {field} {reason}: {count}")
    for drop in dropped[:PRINTED_DROPS]:
        print("  row {row} (index {index}, {source}): {field} {reason}: {found}".format(**drop))
    if len(dropped) > PRINTED_DROPS:
        print(f"  and {len(dropped) - PRINTED_DROPS} more")


def write_questions(questions, path):
    """Write a prepared file in the PREPARED schema, without any library's metadata; it appears only when complete."""
    rows = [
        {
            "id": q.id,
            "data_source": q.source,
            "query": q.query,
            "rubrics": [dataclasses.asdict(r) for r in q.rubrics],
            "answers": list(q.answers),
        }
        for q in questions
    ]
    temporary = path.with_name(path.name + ".tmp")
    pq.write_table(pa.Table.from_pylist(rows, schema=PREPARED), temporary, store_schema=False)
    os.replace(temporary, path)


def prepare(split, path, tokenizer, system, out, layout=AUTHORS):
    """Check one file, write OUT/<split>.parquet and the list of drops. Raises SystemExit when no row is left."""
    kept, dropped = sift(path, tokenizer, system, layout)
    out.mkdir(parents=True, exist_ok=True)
    target, list_path = out / f"{split}.parquet", out / f"{split}_dropped.jsonl"
    list_path.write_text("".join(json.dumps(drop) + "\n" for drop in dropped), encoding="utf-8")
    report(split, kept, dropped)
    if not kept:
        raise SystemExit(f"{path} has no usable row; {list_path} says why for each")
    write_questions(kept, target)
    print(f"{split}: wrote {target}; every dropped row is in {list_path}")


def main(argv=None):
    """Fetch the authors' files, or take the user's, and prepare each."""
    parser = argparse.ArgumentParser(description="Check the questions, drop what cannot be used, write plain Parquet.")
    parser.add_argument("--train", metavar="FILE", help="training questions in the authors' schema")
    parser.add_argument("--val", metavar="FILE", help="validation questions, likewise")
    parser.add_argument("--qa", metavar="FILE", help="questions with reference answers in Search-R1's layout (question "
                        "and golden_answers, or reward_model.ground_truth.target), to OUT/qa.parquet; with any of "
                        "these three files, nothing is fetched")  # fmt: skip
    parser.add_argument("--tokenizer", metavar="DIR", default=config.MODEL, help="the policy's (%(default)s)")
    parser.add_argument("--out", metavar="DIR", default=config.DATA_DIR, help="where to write (%(default)s)")
    args = parser.parse_args(argv)
    paths = {split: path for split, path in (("train", args.train), ("val", args.val), ("qa", args.qa)) if path}
    if not paths:
        fetched = fetch_all(args.out)
        paths = {split: fetched[path] for split, path in AUTHORS_PARQUET.items()}
    layouts = {split: qa.LAYOUT if split == "qa" else AUTHORS for split in paths}
    for split, path in paths.items():
        layouts[split].check(path)
    tokenizer = load_tokenizer(args.tokenizer)
    found = Path(config.SYSTEM_PROMPT_FILE).exists()
    print("system prompt:", config.SYSTEM_PROMPT_FILE if found else "protocol.SYSTEM_PROMPT, the authors' is not there")
    for split, path in paths.items():
        prepare(split, path, tokenizer, protocol.system_prompt(), Path(args.out), layouts[split])


if __name__ == "__main__":
    main()
