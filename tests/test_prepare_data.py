"""prepare_data.py: rows in, checked rows out; made-up questions only. VAL_PARQUET=<file> adds the authors' own."""

import copy
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import qwen_tokenizer_dir
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import config
import prepare_data
import protocol
from records import Question, Rubric

RUBRIC = {"title": "Dates", "description": "Gives the year.", "dimension": "Coverage", "importance": "critical"}
TEXT = pa.string()
RUBRICS_TYPE = pa.list_(pa.struct({name: TEXT for name in ("description", "dimension", "importance", "title")}))
AUTHORS = pa.schema(
    {
        "data_source": pa.large_string(),
        "prompt": pa.list_(pa.struct({"content": TEXT, "role": TEXT})),
        "ability": pa.large_string(),
        "reward_model": pa.struct(
            {"ground_truth": pa.struct({"query": TEXT, "rubrics": RUBRICS_TYPE}), "style": TEXT},
        ),
        "extra_info": pa.struct({"index": pa.int64(), "query": TEXT, "rubrics": RUBRICS_TYPE}),
    }
)
ORIGIN = Path(prepare_data.__file__).parent


def authors_row(index=7, query="Which lake is deepest?", rubrics=(RUBRIC,), source="Lakes"):
    """One row as the authors' files have it."""
    rubrics = list(rubrics) if isinstance(rubrics, tuple) else rubrics
    return {
        "data_source": source,
        "prompt": [{"content": query, "role": "user"}],
        "ability": "research",
        "reward_model": {"ground_truth": {"query": query, "rubrics": rubrics}, "style": "rubric"},
        "extra_info": {"index": index, "query": query, "rubrics": rubrics},
    }


def changed(column, value):
    """A valid row but for one dotted column; the query's copy in `prompt` follows it."""
    row = copy.deepcopy(authors_row())
    *path, last = column.split(".")
    place = row
    for name in path:
        place = place[int(name) if isinstance(place, list) else name]
    place[last] = value
    if column == prepare_data.QUERY:
        row["prompt"][0]["content"] = value
    return row


def write(path, rows, schema=AUTHORS, **options):
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, **options)
    return path


@pytest.fixture(scope="session")
def tokenizer():
    return prepare_data.load_tokenizer(qwen_tokenizer_dir.build())


@pytest.fixture
def prepare(tokenizer, tmp_path):
    """Prepares a file as `val`; returns (Questions written, dropped records)."""

    def run(path, out=tmp_path / "out"):
        prepare_data.prepare("val", path, tokenizer, "Be brief.", out)
        lines = (out / "val_dropped.jsonl").read_text().splitlines()
        return prepare_data.load_questions(out / "val.parquet"), [json.loads(line) for line in lines]

    return run


@pytest.fixture
def sift(tokenizer, tmp_path):
    """Checks rows; returns (Questions kept, [(row, field, reason) dropped])."""

    def run(rows, schema=AUTHORS):
        path = write(tmp_path / "rows.parquet", rows, schema)
        kept, dropped = prepare_data.sift(path, tokenizer, "Be brief.")
        return kept, [(drop["row"], drop["field"], drop["reason"]) for drop in dropped]

    return run


# ---- what comes out ------------------------------------------------------------------------------


def test_rows_keep_their_order_and_every_field(prepare, tmp_path):
    second = RUBRIC | {"title": "", "description": "Names\na source.", "importance": "nice_to_have"}
    rows = [authors_row(9), authors_row(2, "Und der kälteste? 🧊", (RUBRIC, second), "Ice")]
    questions, dropped = prepare(write(tmp_path / "f.parquet", rows))
    assert dropped == []
    assert questions == [
        Question("Lakes/9", "Which lake is deepest?", (Rubric(**RUBRIC),), "Lakes"),
        Question("Ice/2", "Und der kälteste? 🧊", (Rubric(**RUBRIC), Rubric(**second)), "Ice"),
    ]


def test_the_prepared_file_is_plain(prepare, tmp_path):
    prepare(write(tmp_path / "f.parquet", [authors_row()]))
    with pq.ParquetFile(tmp_path / "out" / "val.parquet") as file:
        assert file.schema_arrow.equals(prepare_data.PREPARED)
        assert file.metadata.metadata is None
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["val.parquet", "val_dropped.jsonl"]


def test_the_report_counts_by_source_and_reason_and_lists_a_capped_number(prepare, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(prepare_data, "PRINTED_DROPS", 2)
    rows = [authors_row(0, source="Ice")] + [authors_row(i, " ") for i in range(1, 4)] + [authors_row(4, rubrics=[])]
    _, dropped = prepare(write(tmp_path / "f.parquet", rows))
    said = capsys.readouterr().out.splitlines()
    assert "val Ice: read 1, kept 1, dropped 0" in said
    assert "val Lakes: read 4, kept 0, dropped 4" in said
    assert "val all: read 5, kept 1, dropped 4" in said
    assert f"val dropped, {prepare_data.QUERY} blank: 3" in said
    assert f"val dropped, {prepare_data.RUBRICS} no rubrics: 1" in said
    assert [line for line in said if line.startswith("  ")] == [
        f"  row 1 (index 1, Lakes): {prepare_data.QUERY} blank: ' '",
        f"  row 2 (index 2, Lakes): {prepare_data.QUERY} blank: ' '",
        "  and 2 more",
    ]
    assert [drop["row"] for drop in dropped] == [1, 2, 3, 4]
    assert {drop["file"] for drop in dropped} == {str(tmp_path / "f.parquet")}


def test_a_write_that_fails_leaves_the_old_file(prepare, tmp_path, monkeypatch):
    prepare(write(tmp_path / "f.parquet", [authors_row()]))
    before = (tmp_path / "out" / "val.parquet").read_bytes()

    def fill_the_disk(table, path, **_):
        Path(path).write_bytes(b"PAR1")
        raise OSError("no space left")

    source = write(tmp_path / "g.parquet", [authors_row(8)])
    monkeypatch.setattr(pq, "write_table", fill_the_disk)
    with pytest.raises(OSError, match="no space"):
        prepare(source)
    assert (tmp_path / "out" / "val.parquet").read_bytes() == before


words = st.text(max_size=30)
said = words.filter(lambda text: protocol.clean(text).strip())
labels = st.sampled_from(prepare_data.IMPORTANCES)
rubric_rows = st.fixed_dictionaries({"title": words, "description": said, "dimension": words, "importance": labels})
row_values = st.tuples(st.integers(0, 2**60), said, st.lists(rubric_rows, min_size=1, max_size=3), said)


@settings(max_examples=60, deadline=None)
@given(st.lists(row_values, min_size=1, max_size=4, unique_by=lambda values: values[0]))
def test_any_valid_rows_come_back_cleaned(tokenizer, values):
    values = [(index, f"{n}: {query}", rubrics, source) for n, (index, query, rubrics, source) in enumerate(values)]
    with tempfile.TemporaryDirectory() as folder:
        path = write(f"{folder}/f.parquet", [authors_row(*value) for value in values])
        kept, dropped = prepare_data.sift(path, tokenizer, "Be brief.")
        prepare_data.write_questions(kept, Path(folder) / "val.parquet")
        questions = prepare_data.load_questions(f"{folder}/val.parquet")
    assert dropped == []
    assert [(q.id, q.query, q.source) for q in questions] == [
        (f"{protocol.clean(source)}/{index}", protocol.clean(query), protocol.clean(source))
        for index, query, _, source in values
    ]
    for question, (_, _, rubrics, _) in zip(questions, values, strict=True):
        cleaned = [{name: protocol.clean(text) for name, text in rubric.items()} for rubric in rubrics]
        assert [dataclasses.asdict(rubric) for rubric in question.rubrics] == cleaned


# ---- what is dropped -----------------------------------------------------------------------------

RUBRIC_COLUMN = f"{prepare_data.RUBRICS}.0"


@pytest.mark.parametrize(
    ("column", "value", "field", "reason"),
    [
        (prepare_data.QUERY, None, prepare_data.QUERY, "missing"),
        (prepare_data.QUERY, "", prepare_data.QUERY, "blank"),
        (prepare_data.QUERY, " \n\t\u200b", prepare_data.QUERY, "blank"),
        ("data_source", None, "data_source", "missing"),
        ("prompt", None, "prompt", "not one user message"),
        ("prompt", [], "prompt", "not one user message"),
        ("prompt.0.role", "system", "prompt", "not one user message"),
        ("prompt.0.content", "Another question?", "prompt", f"differs from {prepare_data.QUERY}"),
        ("reward_model", None, prepare_data.QUERY, "missing"),
        ("reward_model.ground_truth", None, prepare_data.QUERY, "missing"),
        ("extra_info", None, "extra_info.index", "missing"),
        ("extra_info.index", None, "extra_info.index", "missing"),
        (prepare_data.RUBRICS, None, prepare_data.RUBRICS, "no rubrics"),
        (prepare_data.RUBRICS, [], prepare_data.RUBRICS, "no rubrics"),
        (prepare_data.RUBRICS, [None], f"{prepare_data.RUBRICS}.title", "missing"),
        (f"{RUBRIC_COLUMN}.title", None, f"{prepare_data.RUBRICS}.title", "missing"),
        (f"{RUBRIC_COLUMN}.dimension", None, f"{prepare_data.RUBRICS}.dimension", "missing"),
        (f"{RUBRIC_COLUMN}.description", None, f"{prepare_data.RUBRICS}.description", "missing"),
        (f"{RUBRIC_COLUMN}.description", "  ", f"{prepare_data.RUBRICS}.description", "blank"),
        (f"{RUBRIC_COLUMN}.importance", "vital", f"{prepare_data.RUBRICS}.importance", "unknown label"),
        (f"{RUBRIC_COLUMN}.importance", "Critical", f"{prepare_data.RUBRICS}.importance", "unknown label"),
    ],
)
def test_a_bad_row_is_dropped_and_named(sift, column, value, field, reason):
    kept, dropped = sift([authors_row(1, "A good row?"), changed(column, value)])
    assert [question.query for question in kept] == ["A good row?"]
    assert dropped == [(1, field, reason)]


def test_an_unknown_importance_is_quoted(prepare, tmp_path):
    rows = [authors_row(1, "A good row?"), changed(f"{RUBRIC_COLUMN}.importance", "vital")]
    _, (drop,) = prepare(write(tmp_path / "f.parquet", rows))
    assert drop["found"] == "rubric 0: 'vital'" and drop["index"] == "7" and drop["source"] == "Lakes"


def test_duplicates_are_the_same_id_or_the_same_query_with_the_same_rubrics(sift):
    other = (RUBRIC | {"title": "Other"},)
    rows = [authors_row(1), authors_row(1, "New?"), authors_row(2), authors_row(3, rubrics=other), authors_row(1, "B?")]
    rows += [authors_row(1, "C?", source="Ice")]
    kept, dropped = sift(rows)
    assert [question.id for question in kept] == ["Lakes/1", "Lakes/3", "Ice/1"]
    assert dropped == [
        (1, "extra_info.index", "duplicate"),
        (2, prepare_data.QUERY, "duplicate"),
        (4, "extra_info.index", "duplicate"),
    ]


def test_the_limit_counts_the_rendered_prompt_and_is_inclusive(tokenizer, tmp_path, monkeypatch):
    """The oracle writes the chat markup by hand."""
    path = write(tmp_path / "f.parquet", [authors_row(1, "One two three?"), authors_row(2, "One two three four?")])
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne two three?<|im_end|>\n"
    ids = tokenizer.encode(text + "<|im_start|>assistant\n<think>\n", add_special_tokens=False)
    monkeypatch.setattr(config, "MAX_PROMPT_TOKENS", len(ids))
    kept, (drop,) = prepare_data.sift(path, tokenizer, "Be brief.")
    assert [question.id for question in kept] == ["Lakes/1"]
    assert (drop["row"], drop["field"], drop["reason"]) == (1, "prompt", "too long")
    assert drop["found"] == f"{len(ids) + 1} tokens, 5 of the question; limit {len(ids)}"


# ---- public failure reports ----------------------------------------------------------------------


def test_DATA_01_nested_values_become_plain_python(prepare, tmp_path):
    rubrics = np.array([RUBRIC | {"weight": np.int64(2), "evidence": None}, RUBRIC | {"evidence": {"url": "u"}}])
    rows = [authors_row(1, "q1", rubrics), authors_row(2, "q2", np.array([], dtype=object)), authors_row(3, "q3", None)]
    pd.DataFrame(rows).to_parquet(tmp_path / "f.parquet")
    questions, dropped = prepare(tmp_path / "f.parquet")
    assert questions == [Question("Lakes/1", "q1", (Rubric(**RUBRIC), Rubric(**RUBRIC)), "Lakes")]
    assert type(questions[0].query) is str and json.dumps(dataclasses.asdict(questions[0]))
    assert [(drop["row"], drop["reason"]) for drop in dropped] == [(1, "no rubrics"), (2, "no rubrics")]


def test_DATA_03_many_row_groups_with_long_nested_text(tmp_path):
    rubric = RUBRIC | {"description": "evidence " * 333}
    rows = [authors_row(i, f"Question {i}?", (rubric, rubric)) for i in range(20_000)]
    path = write(tmp_path / "f.parquet", rows, row_group_size=50)
    assert pq.ParquetFile(path).num_row_groups == 400
    read = 0
    for row in prepare_data.read_rows(path, prepare_data.SOURCE_COLUMNS):
        assert row["reward_model"]["ground_truth"] == {"query": f"Question {read}?", "rubrics": [rubric, rubric]}
        read += 1
    assert read == 20_000


def test_DATA_04_a_shard_whose_column_is_all_null_fits_the_others(prepare, tmp_path):
    nothing = [authors_row(1), authors_row(2, "No title?", [RUBRIC | {"title": None}])]
    nothing = [row | {"ability": None} for row in nothing]
    schema = pa.Table.from_pylist(nothing[:1]).schema
    assert pa.types.is_null(schema.field("ability").type)
    first, dropped = prepare(write(tmp_path / "0.parquet", nothing, schema), tmp_path / "0")
    assert [(drop["row"], drop["field"]) for drop in dropped] == [(1, f"{prepare_data.RUBRICS}.title")]
    second, _ = prepare(write(tmp_path / "1.parquet", [authors_row(3)]), tmp_path / "1")
    tables = [pq.read_table(tmp_path / name / "val.parquet") for name in "01"]
    assert pa.concat_tables(tables).num_rows == 2 == len(first + second)


@pytest.mark.parametrize("column", ["data_source", "reward_model", prepare_data.RUBRICS])
def test_DATA_04_an_all_null_column_costs_the_rows_not_the_program(sift, column):
    rows = [changed(column, None)]
    assert sift(rows, pa.Table.from_pylist(rows).schema) == ([], sift(rows)[1])


@pytest.mark.parametrize(
    ("column", "value", "field", "reason"),
    [
        (prepare_data.QUERY, 12, prepare_data.QUERY, "not text"),
        (prepare_data.RUBRICS, "x", prepare_data.RUBRICS, "not a list"),
        (prepare_data.RUBRICS, {"title": "x"}, prepare_data.RUBRICS, "not a list"),
        (prepare_data.RUBRICS, ["x"], f"{prepare_data.RUBRICS}.title", "missing"),
        (f"{RUBRIC_COLUMN}.title", ["x"], f"{prepare_data.RUBRICS}.title", "not text"),
        (f"{RUBRIC_COLUMN}.importance", 2, f"{prepare_data.RUBRICS}.importance", "not text"),
        ("data_source", ["x"], "data_source", "not text"),
        ("extra_info.index", True, "extra_info.index", "not text"),
        ("extra_info.index", 7.5, "extra_info.index", "not text"),
        ("prompt", "Which lake is deepest?", "prompt", "not one user message"),
    ],
)
def test_DATA_05_a_value_of_another_type_is_named_not_converted(prepare, tmp_path, column, value, field, reason):
    rows = [changed(column, value)]
    write(tmp_path / "f.parquet", rows, pa.Table.from_pylist(rows).schema)
    with pytest.raises(SystemExit, match="no usable row"):
        prepare(tmp_path / "f.parquet")
    (drop,) = map(json.loads, (tmp_path / "out" / "val_dropped.jsonl").read_text().splitlines())
    assert (drop["row"], drop["field"], drop["reason"]) == (0, field, reason)
    assert drop["found"].endswith("None" if reason == "missing" else repr(value)[:80])


def test_DATA_06_no_question_nan_and_no_id_with_a_point(sift):
    texts = ["a", "nan stands in a text", None, "   "]
    indices = pd.Series([7, 8, None, 9], dtype="float64")  # what pandas makes of integers with a gap
    rows = [authors_row(index, text) for index, text in zip(indices, texts, strict=True)]
    rows += [authors_row(float("nan"), "b")]
    kept, dropped = sift(rows, pa.Table.from_pylist(rows).schema)
    assert [(question.id, question.query) for question in kept] == [("Lakes/7", "a"), ("Lakes/8", texts[1])]
    assert dropped == [
        (2, prepare_data.QUERY, "missing"),
        (3, prepare_data.QUERY, "blank"),
        (4, "extra_info.index", "missing"),
    ]


def test_DATA_06_a_column_of_nan_is_missing_text(sift):
    rows = [changed(prepare_data.QUERY, float("nan"))]
    assert sift(rows, pa.Table.from_pylist(rows).schema)[1] == [(0, prepare_data.QUERY, "missing")]


def test_DATA_06_text_ids_stay_as_they_are(sift):
    rows = [authors_row("7.0", "a"), authors_row("007", "b")]
    kept, _ = sift(rows, pa.Table.from_pylist(rows).schema)
    assert [question.id for question in kept] == ["Lakes/7.0", "Lakes/007"]


def test_DATA_07_library_metadata_is_read_over_and_not_passed_on(prepare, tmp_path):
    features = {"info": {"features": {"prompt": {"_type": "List", "feature": {"_type": "Value"}}}}}
    schema = AUTHORS.with_metadata({"huggingface": json.dumps(features), "pandas": "{}"})
    path = write(tmp_path / "f.parquet", [authors_row()], schema)
    assert b"huggingface" in pq.read_schema(path).metadata
    questions, _ = prepare(path)
    assert len(questions) == 1
    assert pq.read_schema(tmp_path / "out" / "val.parquet").metadata is None


def test_TOK_14_lone_surrogates_are_replaced_and_the_result_fits_everywhere(tokenizer, tmp_path):
    row = authors_row(1, "caf\ud83d report, ok \U0001f600", (RUBRIC | {"title": "\udc00"},))
    question = prepare_data.question_from_source(row)
    assert question.query == "caf\ufffd report, ok \U0001f600" and question.rubrics[0].title == "\ufffd"
    prepare_data.write_questions([question], tmp_path / "val.parquet")
    assert prepare_data.load_questions(tmp_path / "val.parquet") == [question]
    assert tokenizer.encode(question.query) and json.dumps(dataclasses.asdict(question), ensure_ascii=False).encode()


def test_TOK_14_bytes_that_are_not_utf8_cost_their_row_only(prepare, tmp_path):
    table = pa.Table.from_pylist([authors_row(1, "a"), authors_row(2, "b"), authors_row(3, "c")], schema=AUTHORS)
    broken = pa.array([b"Lakes", b"\xed\xa0\xbd", b"Lakes"]).view(pa.string())  # half a surrogate pair
    pq.write_table(table.set_column(0, "data_source", broken), tmp_path / "f.parquet")
    questions, (drop,) = prepare(tmp_path / "f.parquet")
    assert [question.query for question in questions] == ["a", "c"]
    assert (drop["row"], drop["field"], drop["reason"]) == (1, "row", "not UTF-8")


# ---- wrong input, in one line --------------------------------------------------------------------


def the_one_line(call, *arguments):
    with pytest.raises(SystemExit) as failure:
        call(*arguments)
    message = str(failure.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("column", prepare_data.SOURCE_COLUMNS)
def test_a_missing_column_is_named_before_anything_else(column, tmp_path):
    row = copy.deepcopy(authors_row())
    *path, last = column.split(".")
    place = row
    for name in path:
        place = place[name][0] if name == "rubrics" else place[name]
    del place[last]
    schema = pa.Table.from_pylist([row]).schema
    good, bad = write(tmp_path / "good.parquet", [authors_row()]), write(tmp_path / "bad.parquet", [row], schema)
    arguments = ["--train", str(good), "--val", str(bad), "--out", str(tmp_path / "out"), "--tokenizer", "no such"]
    message = the_one_line(prepare_data.main, arguments)
    assert f"{bad} has no column {column};" in message and "schema" in message
    assert not (tmp_path / "out").exists()


def test_files_that_are_not_there_or_not_parquet(tmp_path):
    assert "is not a file" in the_one_line(prepare_data.main, ["--val", str(tmp_path / "none.parquet")])
    assert "is not a file" in the_one_line(prepare_data.main, ["--val", str(tmp_path)])
    (tmp_path / "f.parquet").write_text("version https://git-lfs.github.com/spec/v1\n")
    message = the_one_line(prepare_data.main, ["--val", str(tmp_path / "f.parquet")])
    assert str(tmp_path / "f.parquet") in message and "Parquet" in message


def test_damage_inside_a_file_is_named(tmp_path, tokenizer):
    rows = [authors_row(i, f"{i}?") for i in range(500)]
    path = write(tmp_path / "f.parquet", rows, compression="zstd", use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[100:3000] = b"\xff" * 2900
    path.write_bytes(content)
    assert f"{path} breaks off" in the_one_line(prepare_data.sift, path, tokenizer, "")


def test_a_tokenizer_that_cannot_be_loaded_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    message = the_one_line(prepare_data.load_tokenizer, str(tmp_path / "none"))
    assert str(tmp_path / "none") in message and "--tokenizer" in message


def test_a_tokenizer_without_chat_template_is_named(tmp_path):
    words = Tokenizer(WordLevel({"lake": 0}, unk_token="lake"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    assert "no chat template" in the_one_line(prepare_data.load_tokenizer, str(tmp_path))


def test_a_file_that_is_not_prepared_is_named(tmp_path):
    path = write(tmp_path / "f.parquet", [authors_row()])
    message = the_one_line(prepare_data.load_questions, path)
    assert f"{path} has no column id, query, rubrics.title" in message and "prepare_data.py" in message
    assert "is not a file" in the_one_line(prepare_data.load_questions, tmp_path / "none.parquet")


def test_the_exit_code_is_1_without_a_traceback(tmp_path):
    command = [sys.executable, "prepare_data.py", "--val", str(tmp_path / "none.parquet")]
    done = subprocess.run(command, cwd=ORIGIN, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"{tmp_path / 'none.parquet'} is not a file; check the path\n"


# ---- main ----------------------------------------------------------------------------------------


@pytest.fixture
def loaded(tokenizer, monkeypatch):
    """main() with the tokenizer that is loaded already."""
    monkeypatch.setattr(prepare_data, "load_tokenizer", lambda name: tokenizer)


def test_given_files_are_read_and_nothing_is_fetched(loaded, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_data, "fetch_all", None)
    path = write(tmp_path / "f.parquet", [authors_row()])
    prepare_data.main(["--train", str(path), "--out", str(tmp_path / "out")])
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["train.parquet", "train_dropped.jsonl"]


def test_without_files_the_authors_are_fetched_to_out(loaded, tmp_path, monkeypatch):
    def fetch_all(out):
        assert out == str(tmp_path)
        train = write(tmp_path / "a.parquet", [authors_row(1), authors_row(2, "b?")])
        val = write(tmp_path / "b.parquet", [authors_row(3)])
        return {"data/train_new_train_95.parquet": train, "data/train_new_val_05.parquet": val, "prompt.txt": None}

    monkeypatch.setattr(prepare_data, "fetch_all", fetch_all)
    monkeypatch.setattr(config, "DATA_DIR", str(tmp_path))
    prepare_data.main([])
    assert [q.id for q in prepare_data.load_questions(tmp_path / "train.parquet")] == ["Lakes/1", "Lakes/2"]
    assert [q.id for q in prepare_data.load_questions(tmp_path / "val.parquet")] == ["Lakes/3"]


def test_the_system_prompt_counts_and_is_named(loaded, tmp_path, monkeypatch, capsys):
    path = write(tmp_path / "f.parquet", [authors_row()])
    monkeypatch.setattr(config, "SYSTEM_PROMPT_FILE", str(tmp_path / "prompt.txt"))
    prepare_data.main(["--val", str(path), "--out", str(tmp_path)])
    assert "system prompt: protocol.SYSTEM_PROMPT" in capsys.readouterr().out
    (tmp_path / "prompt.txt").write_text("word " * config.MAX_PROMPT_TOKENS)
    assert "no usable row" in the_one_line(prepare_data.main, ["--val", str(path), "--out", str(tmp_path)])
    assert f"system prompt: {tmp_path / 'prompt.txt'}" in capsys.readouterr().out


@pytest.mark.skipif("VAL_PARQUET" not in os.environ, reason="VAL_PARQUET does not name the authors' validation file")
def test_the_authors_validation_file(loaded, tokenizer, tmp_path, capsys):
    """The published count, 441 -> 440, and the token counts that fix tokenizer and text."""
    path = os.environ["VAL_PARQUET"]
    prepare_data.main(["--val", path, "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert "val all: read 441, kept 440, dropped 1\nval dropped, prompt too long: 1\n  row 38 (index 7215, DR" in said
    for source, read in (("DR-Tulu", 229), ("RaR-Science-first-3000", 173), ("RaR-Medicine-first-1000", 39)):
        assert f"val {source}: read {read}, " in said
    rows = prepare_data.read_rows(path, prepare_data.SOURCE_COLUMNS)
    counts = [len(tokenizer.encode(row["prompt"][0]["content"], add_special_tokens=False)) for row in rows]
    assert (counts[38], counts[268], counts[401], sum(counts)) == (19_107, 468, 411, 42_424)
    questions = prepare_data.load_questions(tmp_path / "val.parquet")
    rubrics = [rubric for question in questions for rubric in question.rubrics]
    assert len({question.id for question in questions}) == 440 and min(len(q.rubrics) for q in questions) >= 5
    assert {rubric.importance for rubric in rubrics} == set(prepare_data.IMPORTANCES)


# ---- the tokenizer folder of these tests ---------------------------------------------------------


def test_the_tokenizer_folder_has_the_vocabulary_of_the_package(tokenizer):
    from qwen_tokenizer import get_tokenizer

    oracle = get_tokenizer("qwen3.5-27b")
    for text in ["Hello! 毕老师！1 + 1 = 2", '<call_tool name="google_search">x"}</call_tool>\n', "नमस्ते  \n\n\t é́🧊"]:
        assert tokenizer.encode(text) == oracle.encode(text)
    assert tokenizer.encode("<|im_end|><think></think>") == [248_046, 248_068, 248_069]


def test_the_chat_template_opens_thinking_unless_told_not_to(tokenizer):
    messages = [{"role": "system", "content": " S\n"}, {"role": "user", "content": "Q"}]

    def render(**options):
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)

    start = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert render() == render(enable_thinking=True) == start
    assert render(enable_thinking=False) == start + "\n</think>\n\n"
