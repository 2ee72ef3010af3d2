"""Rows of a question-and-answer file, as the Search-R1 project lays them out, to Questions with reference answers.

A file has the column `question`, and its answers in `golden_answers` or, where that is missing or empty, in
`reward_model.ground_truth.target`: a list of text, or one text. `data_source`, and `id` or `extra_info.index`,
are taken when they are there. Run it with `python prepare_data.py --qa FILE`.
"""

import hashlib

from records import Question
from rows import Layout, RowFault, checked_index, checked_text, has_column, look_up, open_parquet
from turn_reward import normalize_answer

QUERY = "question"
ANSWERS = ("golden_answers", "reward_model.ground_truth.target")
INDEX = ("id", "extra_info.index")
SOURCE = "qa"  # of rows without data_source


def check_qa_columns(path):
    """Raise SystemExit naming file and remedy when there is no question column, or none with answers."""
    with open_parquet(path) as file:
        schema = file.schema_arrow
    if not (has_column(schema, QUERY) and any(has_column(schema, name) for name in ANSWERS)):
        raise SystemExit(f"{path} needs a column {QUERY}, and {' or '.join(ANSWERS)}; it has {', '.join(schema.names)}")


def question_from_qa(row):
    """A row as a Question without rubrics. Raises RowFault.

    The id is data_source/id; without any id, a hash of the question, so that it does not depend on the row's place.
    """
    query = checked_text(look_up(row, QUERY), QUERY)
    source = SOURCE if look_up(row, "data_source") is None else checked_text(row["data_source"], "data_source")
    field = next((name for name in INDEX if look_up(row, name) is not None), None)
    index = checked_index(look_up(row, field), field) if field else hashlib.sha256(query.encode()).hexdigest()[:16]
    return Question(f"{source}/{index}", query, (), source, checked_answers(row))


def checked_answers(row):
    """The reference answers, cleaned. Raises RowFault.

    A value that is not text costs the row. An answer that matching would find nothing in (blank, "The", "!") is
    left out, and costs the row when no other is left.
    """
    present = [name for name in ANSWERS if look_up(row, name) is not None]
    field = next((name for name in present if look_up(row, name) != []), (*present, ANSWERS[0])[0])
    values = look_up(row, field)
    if values is None or values == []:
        raise RowFault(field, "no answers", repr(values))
    values = values if isinstance(values, list) else [values]
    texts = [checked_text(value, field, f"answer {n}: ", may_be_blank=True) for n, value in enumerate(values)]
    answers = tuple(text for text in texts if normalize_answer(text))
    if not answers:
        raise RowFault(field, "no answer that says something", f"{values!r:.80}")
    return answers


LAYOUT = Layout((QUERY, "data_source", *INDEX, *ANSWERS), check_qa_columns, question_from_qa, INDEX[0], QUERY, SOURCE)
