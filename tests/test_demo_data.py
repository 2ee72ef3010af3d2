"""The demo's corpus, questions and policy: deterministic, consistent with each other, and as the rooms expect them."""

import json
import random
import re
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "demo"))

import corpus  # noqa: E402  the demo folder's own modules
import expert  # noqa: E402
import lesson  # noqa: E402
import make_policy  # noqa: E402
import settings  # noqa: E402

import demo  # noqa: E402
import protocol  # noqa: E402
from format_reward import check_format  # noqa: E402
from prepare_data import load_questions  # noqa: E402
from turn_reward import is_right  # noqa: E402

POLICY = ROOT / "demo" / "policy"
TAGS = (
    *("<think>", "</think>", "<answer>", "</answer>", "</call_tool>", "<tool_output>", "</tool_output>"),
    *('<call_tool name="google_search">', '<call_tool name="browse_webpage">'),
    *("<snippet>", "</snippet>", "<webpage>", "</webpage>"),
)
OPEN, SHORT = ("train.parquet", "heldout.parquet"), ("qa.parquet", "qa_heldout.parquet")
FACTS = {"population": "521,828"}  # of the country the expert is asked about below
PRIOR = ["1", "22,222"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    corpus.build(folder)
    return folder


def rows(folder, name):
    return pq.read_table(folder / name).to_pylist()


def quoted(row):
    return [re.search('"(.*)"', item["description"])[1] for item in row["rubrics"]]


def test_two_builds_are_the_same_bytes(built, tmp_path):
    counts = corpus.build(tmp_path)
    assert set(counts) == {"corpus.jsonl", *OPEN, *SHORT}
    for name in counts:
        assert counts[name] > 0
        assert (built / name).read_bytes() == (tmp_path / name).read_bytes()


def test_documents_are_plain_text_under_distinct_addresses(built):
    docs = [json.loads(line) for line in (built / "corpus.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len({doc["url"] for doc in docs}) == len(docs) > 2000
    for doc in docs:
        assert set(doc) == {"url", "title", "text"}
        assert doc["text"] == protocol.clean(doc["text"])
        assert not re.search(r"[<>]|&[a-z]+;|  ", doc["text"]), doc["text"]


def test_every_quoted_fact_is_stated_by_its_own_document(built):
    docs = {}
    for line in (built / "corpus.jsonl").read_text(encoding="utf-8").splitlines():
        doc = json.loads(line)
        docs[doc["title"]] = doc["text"]
    for row in [row for name in OPEN + SHORT for row in rows(built, name)]:
        country = re.search(r" of (.*)\?$", row["query"])[1]
        for item, fact in zip(row["rubrics"], quoted(row), strict=True):
            topic = item["title"].lower()
            assert docs[f"{country}: {topic}"].startswith(f"The {topic} is {fact}")
            assert topic in row["query"]


def test_questions_are_distinct_and_held_out_countries_are_never_trained_on(built):
    train, heldout = rows(built, "train.parquet"), rows(built, "heldout.parquet")
    queries = [row["query"] for row in train + heldout]
    assert len(set(queries)) == len({row["id"] for row in train + heldout}) == len(queries)
    countries = [{re.search(r" of (.*)\?$", row["query"])[1] for row in part} for part in (train, heldout)]
    assert not countries[0] & countries[1]
    assert len(countries[1]) == len(heldout) >= 10
    assert all(2 <= len(row["rubrics"]) <= 3 for row in train + heldout)


def test_short_questions_are_prepared_rows_whose_answer_is_the_quoted_fact(built):
    train, heldout = ([*load_questions(built / name)] for name in SHORT)
    assert len({question.id for question in train + heldout}) == len(train) + len(heldout)
    countries = [{re.search(r" of (.*)\?$", question.query)[1] for question in part} for part in (train, heldout)]
    assert not countries[0] & countries[1]
    assert len(countries[1]) >= 10
    assert countries[0] >= {re.search(r" of (.*)\?$", row["query"])[1] for row in rows(built, "train.parquet")}
    for question in train + heldout:
        assert question.source == "factbook-qa"
        assert len(question.rubrics) == len(question.answers) == 1
        assert f'is "{question.answers[0]}".' in question.rubrics[0].description
        assert question.query.startswith(f"What is the {question.rubrics[0].title.lower()} of ")
        assert is_right(f" {question.answers[0]}", question.answers)


def test_open_questions_have_no_reference_answer(built):
    assert not any(question.answers for name in OPEN for question in load_questions(built / name))


@pytest.mark.parametrize(
    ("value", "fact"),
    [
        ("Porto-Novo (constitutional capital); Cotonou (seat of government)", "Porto-Novo"),
        ("euros (EUR) per US dollar -", "euros"),
        ("red, white, blue", "red, white, blue"),
        ("none", ""),
        ("unnamed location 5 m", ""),
        ("a value that is far too long to be asked for", ""),
    ],
)
def test_a_fact_is_the_short_exact_head_of_a_value(value, fact):
    assert corpus.leading_fact(value) == fact


def test_markup_becomes_plain_text():
    assert corpus.plain_text("R&eacute;publique<br><strong>note:</strong> &lt;1%") == "République note: under 1%"


@pytest.fixture
def attempt(monkeypatch):
    """attempt(habit, ...) -> (transcript, what the policy wrote) of an expert who has these habits and no other."""

    def run(*habits, seed=0):
        for name in expert.HABITS:
            monkeypatch.setitem(expert.HABITS, name, float(name in habits))
        pieces = expert.trajectory(
            "Chile", FACTS, PRIOR, observe, settings.SETTINGS["MAX_TOOL_CALLS"], random.Random(seed)
        )
        transcript = "<think>\n" + "".join(text for text, _ in pieces).removesuffix("<|im_end|>")
        return transcript, "".join(text for text, written in pieces if written)

    def observe(words, number):
        assert words == "population Chile"
        return "\n<tool_output>\n<snippet>\nThe population is 521,828.\n</snippet>\n</tool_output>\n"

    return run


def test_the_expert_without_bad_habits_searches_once_and_answers_with_the_bare_fact(attempt):
    transcript, written = attempt()
    check = check_format(transcript)
    assert (check.reward, written.count("<call_tool")) == (1.0, 1)
    assert check.answer.strip() == "521,828"


@pytest.mark.parametrize(
    ("habit", "searches", "answered", "right"),
    [("second_search", 2, True, True), ("wordy", 1, True, False), ("never_ends", 4, False, False)],
)
def test_each_habit_of_short_answers_shows(attempt, habit, searches, answered, right):
    transcript, written = attempt(habit)
    answer = check_format(transcript).answer
    assert written.count("<call_tool") == searches
    assert ("521,828" in answer) == bool(answer) == answered
    assert is_right(answer, tuple(FACTS.values())) == right


def test_a_guess_asks_no_tool_and_is_a_value_of_the_topic(attempt):
    answers = set()
    for seed in range(20):
        transcript, written = attempt("guesses", seed=seed)
        assert "<call_tool" not in written
        answers.add(check_format(transcript).answer.strip())
    assert answers == set(PRIOR)


def test_a_lesson_asks_for_nothing_that_the_row_has_not_shown():
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    made = lesson.Lesson(tokenizer, range(3, 900), seed=1)
    sentences = 0
    for ids, mask in (made.row() for _ in range(200)):
        assert len(ids) == len(mask) <= lesson.ROW_TOKENS
        assert set(mask) == {lesson.READ, lesson.FACT}
        start = mask.index(lesson.FACT)
        while start < len(mask):
            end = next((i for i in range(start, len(mask)) if mask[i] != lesson.FACT), len(mask))
            earlier = [ids[i : i + end - start] for i in range(start) if mask[i] == lesson.READ]
            assert ids[start:end] in earlier
            start = next((i for i in range(end, len(mask)) if mask[i] == lesson.FACT), len(mask))
            sentences += 1
    assert sentences > 300
    assert (
        lesson.Lesson(tokenizer, range(3, 900), seed=1).row() == lesson.Lesson(tokenizer, range(3, 900), seed=1).row()
    )


@pytest.mark.parametrize("fact", ["521,828", "Brazzaville-en", "Côte d'Azur"])
def test_a_transcript_is_encoded_as_a_rollout_does_and_marks_the_copied_fact(fact):
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    seen, answer = f"\nThe capital is {fact}.\n", f"<answer> {fact}</answer><|im_end|>"
    ids, mask = make_policy.encode(tokenizer, "system", "query", [fact], [(seen, False), (answer, True)])
    prompt = protocol.render_prompt(tokenizer, "system", "query")
    assert ids == [i for t in (prompt, seen, answer) for i in tokenizer.encode(t, add_special_tokens=False)]
    copied = [token for token, kind in zip(ids, mask, strict=True) if kind == lesson.FACT]
    assert tokenizer.decode(copied).strip() == fact
    context = ids[: mask.index(lesson.WRITTEN)]
    assert copied in [context[i : i + len(copied)] for i in range(len(context))], "not the same tokens as in the result"


def test_every_protocol_tag_is_one_token_that_decoding_keeps():
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    assert len(tokenizer) == 1024
    for tag in (*TAGS, "<|im_end|>", "<|endoftext|>"):
        assert len(tokenizer.encode(f"x{tag}", add_special_tokens=False)) == 2, tag
    text = 'I see.\n</think>\n<call_tool name="google_search">capital Côte d\'Ivoire</call_tool>'
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=True) == text


def test_the_prompt_ends_in_an_opened_think():
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    text = protocol.render_prompt(tokenizer, "system", "query")
    assert (
        text
        == "<|im_start|>system\nsystem<|im_end|>\n<|im_start|>user\nquery<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    assert tokenizer.bos_token is None
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_the_policy_is_small_and_its_context_fits():
    model = AutoModelForCausalLM.from_pretrained(POLICY)
    assert 0.8e6 < sum(parameter.numel() for parameter in model.parameters()) < 1.0e6
    assert str(model.dtype) == "torch.float32"
    assert settings.SETTINGS["SLOT_TOKENS"] <= model.config.max_position_embeddings
    assert settings.SETTINGS["RESPONSE_TOKENS"] < settings.SETTINGS["SLOT_TOKENS"]


def test_the_manifest_states_a_start_like_the_articles():
    sampled = json.loads((POLICY / "MANIFEST.json").read_text())["sampled at temperature 1"]
    assert 0.5 <= sampled["train"]["with an answer"] <= 0.7
    assert 0.12 <= sampled["train"]["in valid format"] <= 0.3
    assert sampled["train"]["facts an answer covers"] >= 0.4
    assert 0.1 <= sampled["qa"]["and valid format"] <= 0.35
    assert 0.5 <= sampled["qa"]["with a search"] < 1


@pytest.mark.parametrize(
    ("given", "flag"), [("SEED=5", "--seed"), ("PERMUTE_ADVANTAGES=True", "--permute"), ("NO=1", "NO")]
)
def test_a_constant_with_a_flag_of_its_own_is_refused_not_ignored(given, flag, capsys):
    with pytest.raises(SystemExit):
        demo.parse(["--set", given])
    assert flag in capsys.readouterr().err
