"""Authors' Parquet in, checked and filtered Parquet out.

    python prepare_data.py                            fetch the authors' files, write data/{train,val}.parquet
    python prepare_data.py --val F --tokenizer DIR    read F alone, fetch nothing

A row that cannot be used is counted and listed with its position (0-based), field and reason; nothing is
filled in for it. Two coercions only: text goes through protocol.clean, and an index that pandas turned
into a float beside a gap (7.0) is the integer it was ("7").
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
from download import fetch_all, first_line
from records import Question, Rubric, question_from_row

READ_BATCH_ROWS = 256  # rows held as Arrow at once
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
    {"id": pa.string(), "data_source": pa.string(), "query": pa.string(), "rubrics": pa.list_(RUBRIC_TYPE)}
)


class RowFault(ValueError):
    """One row cannot be used; args are the field at fault, a reason to count by, and what was found there."""


# ---- reading -------------------------------------------------------------------------------------


def open_parquet(path):
    """An open ParquetFile. Raises SystemExit, in one line, when there is none."""
    if not Path(path).is_file():
        raise SystemExit(f"{path} is not a file; check the path")
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise SystemExit(f"{path} is not a readable Parquet file ({first_line(error)}); fetch it again") from None


def has_column(schema, column):
    """Whether a dotted column exists, lists passed through; what lies below another type is for the row checks."""
    kind = pa.struct(list(schema))
    for name in column.split("."):
        while pa.types.is_list(kind) or pa.types.is_large_list(kind):
            kind = kind.value_type
        if not pa.types.is_struct(kind):
            return True
        if kind.get_field_index(name) < 0:
            return False
        kind = kind.field(name).type
    return True


def check_columns(path, columns, remedy):
    """Raise SystemExit naming file, missing columns and remedy."""
    with open_parquet(path) as file:
        missing = [column for column in columns if not has_column(file.schema_arrow, column)]
    if missing:
        raise SystemExit(f"{path} has no column {', '.join(missing)}; {remedy}")


def read_rows(path, columns):
    """Yield each row as plain Python, nested values too; None for a row whose text is not UTF-8.

    By batch, because Arrow cannot convert nested columns that span chunks; by row within it, so that one
    broken text costs one row.
    """
    names = sorted({column.split(".")[0] for column in columns})
    with open_parquet(path) as file:
        try:
            for batch in file.iter_batches(READ_BATCH_ROWS, columns=names):
                for position in range(batch.num_rows):
                    try:
                        row = batch.slice(position, 1).to_pylist()[0]
                    except UnicodeDecodeError:
                        row = None
                    yield row
        except (pa.ArrowException, OSError) as error:
            raise SystemExit(f"{path} breaks off ({first_line(error)}); fetch it again") from None


def load_questions(path):
    """All questions of a prepared file, in its order. Raises SystemExit naming file, column and remedy."""
    check_columns(path, PREPARED_COLUMNS, "make it with `python prepare_data.py`")
    return [question_from_row(row) for row in read_rows(path, PREPARED_COLUMNS)]


# ---- checking ------------------------------------------------------------------------------------


def look_up(row, column):
    """The value at a dotted column of a nested row; None where a struct on the way is null."""
    value = row
    for name in column.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def checked_text(value, field, where="", may_be_blank=False):
    """`value`, cleaned. Raises RowFault when it is null, NaN, not text, or blank."""
    if value is None or value != value:  # NaN is what pandas puts where text is missing
        raise RowFault(field, "missing", f"{where}{value}")
    if not isinstance(value, str):
        raise RowFault(field, "not text", f"{where}{value!r:.80}")
    text = protocol.clean(value)
    if not text.strip() and not may_be_blank:
        raise RowFault(field, "blank", f"{where}{value!r:.80}")
    return text


def checked_index(value):
    """The index as text: "7", never "7.0". Raises RowFault when it is neither text nor a whole number."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return checked_text(value, INDEX)


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
    if row is None:
        raise RowFault("row", "not UTF-8", "a text in it cannot be decoded")
    source = checked_text(row["data_source"], "data_source")
    query = checked_text(look_up(row, QUERY), QUERY)
    # The policy reads the prompt, the judge reads the query: a Question has one text for both.
    message = checked_user_message(row["prompt"])
    if message != query:
        raise RowFault("prompt", f"differs from {QUERY}", f"{message!r:.80}")
    index = checked_index(look_up(row, INDEX))
    return Question(f"{source}/{index}", query, checked_rubrics(look_up(row, RUBRICS)), source)


def check_new(question, position, first_rows):
    """Raise RowFault for an id, or a query with its rubrics, that an earlier row has; first_rows remembers them."""
    for field, key in ((INDEX, question.id), (QUERY, (question.query, question.rubrics))):
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


def sift(path, tokenizer, system):
    """Check every row. Returns (Questions kept, one dict per dropped row), both in file order."""
    with open_parquet(path) as file:
        total = file.metadata.num_rows
    kept, dropped, first_rows = [], [], {}
    for position, row in enumerate(tqdm(read_rows(path, SOURCE_COLUMNS), Path(path).name, total, unit=" rows")):
        try:
            question = question_from_source(row)
            check_new(question, position, first_rows)
            check_length(question, tokenizer, system)
            kept.append(question)
        except RowFault as fault:
            field, reason, found = fault.args
            # As text, so that a bad row can be counted and listed whatever it holds here.
            row_is = {"row": position, "source": f"{look_up(row, 'data_source')}", "index": f"{look_up(row, INDEX)}"}
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
        {"id": q.id, "data_source": q.source, "query": q.query, "rubrics": [dataclasses.asdict(r) for r in q.rubrics]}
        for q in questions
    ]
    temporary = path.with_name(path.name + ".tmp")
    pq.write_table(pa.Table.from_pylist(rows, schema=PREPARED), temporary, store_schema=False)
    os.replace(temporary, path)


def prepare(split, path, tokenizer, system, out):
    """Check one file, write OUT/<split>.parquet and the list of drops. Raises SystemExit when no row is left."""
    kept, dropped = sift(path, tokenizer, system)
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
    parser.add_argument("--val", metavar="FILE", help="validation questions, likewise; with either, nothing is fetched")
    parser.add_argument("--tokenizer", metavar="DIR", default=config.MODEL, help="the policy's (%(default)s)")
    parser.add_argument("--out", metavar="DIR", default=config.DATA_DIR, help="where to write (%(default)s)")
    args = parser.parse_args(argv)
    paths = {split: path for split, path in (("train", args.train), ("val", args.val)) if path}
    if not paths:
        fetched = fetch_all(args.out)
        paths = {split: fetched[path] for split, path in AUTHORS_PARQUET.items()}
    for path in paths.values():
        check_columns(path, SOURCE_COLUMNS, "it needs the schema of the authors' files, see README.md")
    tokenizer = load_tokenizer(args.tokenizer)
    found = Path(config.SYSTEM_PROMPT_FILE).exists()
    print("system prompt:", config.SYSTEM_PROMPT_FILE if found else "protocol.SYSTEM_PROMPT, the authors' is not there")
    for split, path in paths.items():
        prepare(split, path, tokenizer, protocol.system_prompt(), Path(args.out))


if __name__ == "__main__":
    main()
