"""The demo's corpus, questions and policy: deterministic, consistent with each other, and as the rooms expect them."""

import json
import re
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "demo"))

import corpus  # noqa: E402  the demo folder's own modules
import settings  # noqa: E402

import protocol  # noqa: E402

POLICY = ROOT / "demo" / "policy"
TAGS = (
    *("<think>", "</think>", "<answer>", "</answer>", "</call_tool>", "<tool_output>", "</tool_output>"),
    *('<call_tool name="google_search">', '<call_tool name="browse_webpage">'),
    *("<snippet>", "</snippet>", "<webpage>", "</webpage>"),
)


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
    for name in ("corpus.jsonl", "train.parquet", "heldout.parquet"):
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
    for row in rows(built, "train.parquet") + rows(built, "heldout.parquet"):
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
    rates = json.loads((POLICY / "MANIFEST.json").read_text())["sampled at temperature 1"]["train"]
    assert 0.5 <= rates["with an answer"] <= 0.7
    assert 0.12 <= rates["in valid format"] <= 0.3
