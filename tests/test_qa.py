"""qa.py and `prepare_data.py --qa`: question-and-answer rows in, checked questions out; made-up questions only."""

import json
import runpy

import numpy as np
import pandas as pd
import pytest
import qwen_tokenizer_dir

import config
import prepare_data
import qa
from records import Question
from rows import RowFault

TARGET = "reward_model.ground_truth.target"


def row(number=1, question="Which lake is deepest?", answers=("Baikal", "Lake Baikal"), **more):
    return {"id": f"train_{number}", "data_source": "nq", "question": question, "golden_answers": answers} | more


def nested(target, **more):
    return {"id": "train_1", "data_source": "nq", "question": "Which lake is deepest?",
            "reward_model": {"ground_truth": {"target": target}, "style": "rule"}} | more  # fmt: skip


@pytest.fixture(scope="session")
def tokenizer():
    return prepare_data.load_tokenizer(qwen_tokenizer_dir.build())


@pytest.fixture
def prepare(tokenizer, tmp_path, monkeypatch):
    """main() on rows written by pandas; returns (Questions written, [(row, field, reason) dropped])."""
    monkeypatch.setattr(prepare_data, "load_tokenizer", lambda name: tokenizer)
    monkeypatch.setattr(prepare_data, "fetch_all", None)

    def run(rows):
        pd.DataFrame(rows).to_parquet(tmp_path / "f.parquet")
        prepare_data.main(["--qa", str(tmp_path / "f.parquet"), "--out", str(tmp_path / "out")])
        drops = map(json.loads, (tmp_path / "out" / "qa_dropped.jsonl").read_text().splitlines())
        dropped = [(drop["row"], drop["field"], drop["reason"]) for drop in drops]
        return prepare_data.load_questions(tmp_path / "out" / "qa.parquet"), dropped

    return run


def test_questions_come_back_with_answers_and_without_rubrics(prepare, tmp_path):
    rows = [row(7, "Which lake is deepest?", np.array(["Baikal", "Lake Baikal"])), row(2, "Und? 🧊", ["Ja\r\n"])]
    questions, dropped = prepare(rows)
    assert dropped == []
    assert questions == [
        Question("nq/train_7", "Which lake is deepest?", (), "nq", ("Baikal", "Lake Baikal")),
        Question("nq/train_2", "Und? 🧊", (), "nq", ("Ja\n",)),
    ]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["qa.parquet", "qa_dropped.jsonl"]


@pytest.mark.parametrize("target", [np.array(["Baikal"]), ["Baikal"], "Baikal"])
def test_answers_under_the_reward_model(prepare, target):
    assert prepare([nested(target)])[0][0].answers == ("Baikal",)
    assert prepare([nested(target, golden_answers=[])])[0][0].answers == ("Baikal",)
    assert prepare([nested(target, golden_answers=["Tanganyika"])])[0][0].answers == ("Tanganyika",)


def test_a_single_text_is_one_answer(prepare):
    assert prepare([row(answers="Baikal")])[0][0].answers == ("Baikal",)


def test_ids_and_sources_are_taken_where_they_are(prepare):
    bare = {"question": "Which lake is deepest?", "golden_answers": ["Baikal"]}
    (question,), _ = prepare([bare])
    assert question.source == "qa" and question.id.startswith("qa/") and len(question.id) == len("qa/") + 16
    (moved,) = (q for q in prepare([bare | {"question": "Another?"}, bare])[0] if q.query == question.query)
    assert moved.id == question.id  # wherever the row stands
    assert prepare([bare | {"extra_info": {"index": 7.0}, "data_source": "hotpotqa"}])[0][0].id == "hotpotqa/7"
    assert prepare([bare | {"extra_info": {"index": 7}, "id": "x"}])[0][0].id == "qa/x"


@pytest.mark.parametrize(
    ("bad", "field", "reason"),
    [
        (row(question=None), "question", "missing"),
        (row(question="  \u200b"), "question", "blank"),
        (row(answers=None), "golden_answers", "no answers"),
        (row(answers=[]), "golden_answers", "no answers"),
        (row(answers=["", "The", "!"]), "golden_answers", "no answer that says something"),
        (row(answers=["Baikal", None]), "golden_answers", "missing"),
        (row(data_source=" "), "data_source", "blank"),
        (row(id=""), "id", "blank"),
        (row(9, "A good row?", ["no"]), "question", "duplicate"),
        (row(0, "New?"), "id", "duplicate"),
    ],
)
def test_a_bad_row_is_dropped_and_named(prepare, bad, field, reason):
    questions, dropped = prepare([row(0, "A good row?", ["yes"]), bad])
    assert [question.query for question in questions] == ["A good row?"]
    assert dropped == [(1, field, reason)]


@pytest.mark.parametrize(
    ("bad", "field", "reason"),
    [
        (row(question=12), "question", "not text"),
        (row(question=float("nan")), "question", "missing"),
        (row(answers=12), "golden_answers", "not text"),
        (row(answers=float("nan")), "golden_answers", "no answers"),
        (row(answers=[1, 2]), "golden_answers", "not text"),
        (row(answers={"text": "Baikal"}), "golden_answers", "not text"),
        (row(id=True), "id", "not text"),
        (nested([]), TARGET, "no answers"),
        (nested([3]), TARGET, "not text"),
    ],
)
def test_DATA_05_a_value_of_another_type_is_named_not_converted(prepare, tmp_path, bad, field, reason):
    with pytest.raises(SystemExit, match="no usable row"):
        prepare([bad])
    (drop,) = map(json.loads, (tmp_path / "out" / "qa_dropped.jsonl").read_text().splitlines())
    assert (drop["row"], drop["field"], drop["reason"], drop["source"]) == (0, field, reason, "nq")


def test_an_answer_that_says_nothing_is_left_out(prepare):
    assert prepare([row(answers=["The", "Baikal", " "])])[0][0].answers == ("Baikal",)


def test_dropped_rows_are_counted_under_the_source_of_the_kept(prepare, capsys):
    bare = [{"question": text, "golden_answers": ["yes"]} for text in ("Good?", "")]
    prepare(bare)
    assert "qa qa: read 2, kept 1, dropped 1" in capsys.readouterr().out.splitlines()


def test_a_question_too_long_for_the_prompt_is_dropped(prepare, monkeypatch):
    monkeypatch.setattr(config, "MAX_PROMPT_TOKENS", 2000)
    assert prepare([row(1), row(2, "word " * 2000)])[1] == [(1, "prompt", "too long")]


@pytest.mark.parametrize("missing", ["question", "golden_answers"])
def test_a_missing_column_is_named_with_what_there_is(missing, tmp_path):
    pd.DataFrame([{name: value for name, value in row().items() if name != missing}]).to_parquet(tmp_path / "f.parquet")
    with pytest.raises(SystemExit) as failure:
        prepare_data.main(["--qa", str(tmp_path / "f.parquet"), "--out", str(tmp_path / "out"), "--tokenizer", "none"])
    message = str(failure.value)
    assert f"{tmp_path / 'f.parquet'} needs a column question, and golden_answers or {TARGET}; it has id," in message
    assert not (tmp_path / "out").exists()


def test_a_prepared_question_needs_rubrics_or_answers(tmp_path):
    path = tmp_path / "f.parquet"
    prepare_data.write_questions([Question("a/1", "Q?", (), "a", ("x",)), Question("a/2", "R?", (), "a")], path)
    with pytest.raises(SystemExit, match=r"f\.parquet row 1 \(a/2\) has neither rubrics nor answers"):
        prepare_data.load_questions(path)


def test_a_file_prepared_before_there_were_answers_is_read(tmp_path):
    rubric = dict.fromkeys(prepare_data.RUBRIC_FIELDS, "x")
    rows = [{"id": "a/1", "data_source": "a", "query": "Q?", "rubrics": [rubric]}]
    pd.DataFrame(rows).to_parquet(tmp_path / "f.parquet")
    (question,) = prepare_data.load_questions(tmp_path / "f.parquet")
    assert question.answers == () and len(question.rubrics) == 1


def test_the_command_knows_the_row_faults_of_qa(tokenizer, tmp_path, monkeypatch, capsys):
    """As a program, prepare_data is the module __main__: what qa.py raises must still be what it catches."""
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda name: tokenizer)
    pd.DataFrame([row(1), row(2, " ")]).to_parquet(tmp_path / "f.parquet")
    monkeypatch.setattr("sys.argv", ["", "--qa", str(tmp_path / "f.parquet"), "--out", str(tmp_path / "out")])
    runpy.run_path(prepare_data.__file__, run_name="__main__")
    assert "qa all: read 2, kept 1, dropped 1" in capsys.readouterr().out


def test_DATA_06_not_a_number_is_a_missing_answer():
    with pytest.raises(RowFault, match="golden_answers', 'missing'"):
        qa.question_from_qa(row(answers=float("nan")))


def test_layout_reads_every_column_it_names():
    assert {"question", "data_source", "id", "extra_info.index", "golden_answers", TARGET} == set(qa.LAYOUT.columns)
