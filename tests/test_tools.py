"""The offline tools: dispatch, failures as blocks, and the local corpus."""

import asyncio
import json
import sqlite3
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import config
import protocol
import tools
from protocol import Page, SearchResult
from records import ToolCall
from tools import ToolFailure, Tools, cut_query

PAGES = [
    {"url": "https://e.org/tide", "title": "Tidal power", "text": "The barrage at La Rance has generated since 1966."},
    {
        "url": "https://e.org/wind",
        "title": "Wind",
        "text": "filler " * 300 + "the turbines generated power " + "end " * 300,
    },
    {"url": "https://e.org/cafe", "title": "Café", "text": "Coffee houses and their owners."},
    {"url": "https://e.org/twin-a", "title": "Twin", "text": "identical words"},
    {"url": "https://e.org/twin-b", "title": "Twin", "text": "identical words"},
]


@pytest.fixture
def corpus(tmp_path):
    """A corpus of PAGES that config points to."""
    config.CORPUS_FILE = str(tmp_path / "corpus.jsonl")
    write(tmp_path / "corpus.jsonl", PAGES)
    return tmp_path / "corpus.jsonl"


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def call(name, argument, fault=None, on=None):
    return asyncio.run((on or Tools()).call(ToolCall(name, argument, fault)))


def found(query):
    return [result.url.removeprefix("https://e.org/") for result in asyncio.run(tools.LocalCorpus().search(query))]


# ---- dispatch ------------------------------------------------------------------------------------


def test_search_and_browse_give_the_rendered_blocks(corpus):
    seen = call("google_search", "barrage")
    assert seen.status == "ok" and 0 <= seen.seconds < 60
    assert seen.block == protocol.render_search(
        [SearchResult("Tidal power", "https://e.org/tide", "The barrage at La Rance has generated since 1966.")]
    )
    page = call("browse_webpage", " https://e.org/tide\n")
    assert (page.status, page.block) == (
        "ok",
        protocol.render_page(Page(*(PAGES[0][k] for k in ("title", "url", "text")))),
    )


def test_unknown_page_is_an_error_block(corpus):
    seen = call("browse_webpage", "https://e.org/<answer>")
    assert seen.status == "error:not_found"
    assert seen.block.startswith("<tool_output>\nError: no page at https://e.org/&lt;answer&gt;;")


def test_faulty_call_reaches_no_back_end(corpus):
    desk = Tools()
    desk._searcher = desk._browser = None
    seen = call("python", "1+1", "there is no tool named 'python'; the tools are ...", on=desk)
    assert seen.status == "error:bad_call" and "Error: there is no tool named 'python'" in seen.block


class Slow:
    """A back end that waits, counts who waits with it, or fails."""

    def __init__(self, seconds=0.0, failure=None):
        self.seconds, self.failure, self.now, self.most = seconds, failure, 0, 0

    async def search(self, query):
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.now -= 1
        if self.failure:
            raise self.failure
        return [SearchResult("t", "u", query)]


def test_slow_back_end_is_a_timeout(corpus):
    config.TOOL_TIMEOUT = 0.05
    desk = Tools()
    desk._searcher = Slow(30)
    start = time.monotonic()
    seen = call("google_search", "q", on=desk)
    assert seen.status == "error:timeout" and "within 0.05 seconds" in seen.block and time.monotonic() - start < 10


def test_waiting_for_a_slot_is_not_counted_as_slowness_of_the_back_end(corpus):
    config.TOOL_TIMEOUT, config.TOOL_CONCURRENCY = 0.4, 2
    desk = Tools()
    desk._searcher = Slow(0.1)

    async def many():
        return await asyncio.gather(*(desk.call(ToolCall("google_search", "q")) for _ in range(14)))

    assert {seen.status for seen in asyncio.run(many())} == {"ok"}
    assert desk._searcher.most == 2


def test_back_end_failure_is_a_short_clean_block(corpus):
    desk = Tools()
    desk._searcher = Slow(failure=ToolFailure("http_500", "<html>\x00 boom </tool_output>" + "x" * 9000))
    seen = call("google_search", "q", on=desk)
    assert seen.status == "error:http_500"
    assert (
        seen.block.startswith("<tool_output>\nError: &lt;html&gt; boom &lt;/tool_output&gt;x") and len(seen.block) < 400
    )


def test_a_bug_in_a_back_end_is_not_hidden(corpus):
    desk = Tools()
    desk._searcher = Slow(failure=ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        call("google_search", "q", on=desk)


@pytest.mark.parametrize("constant", ["SEARCH_BACKEND", "BROWSE_BACKEND"])
def test_unknown_back_end_is_named_at_construction(corpus, constant):
    setattr(config, constant, "bing")
    with pytest.raises(ValueError, match=f"config.{constant} is 'bing'; allowed: local"):
        Tools()


# ---- the query -----------------------------------------------------------------------------------


def test_query_is_cut_at_a_word_boundary():
    config.QUERY_CHARACTERS = 12
    assert cut_query("solar  output\n2024") == "solar output"
    assert cut_query("solar outputs 2024") == "solar"
    assert cut_query("能源" * 10) == "能源" * 6


@given(st.text(), st.integers(1, 40))
def test_cut_query_is_bounded_and_a_prefix(text, limit):
    config.QUERY_CHARACTERS = limit
    line = " ".join(text.split())
    assert line.startswith(cut_query(text)) and len(cut_query(text)) <= limit
    assert cut_query(text) or not line


def test_the_cut_query_is_what_is_searched(corpus):
    config.QUERY_CHARACTERS = 6
    desk = Tools()
    desk._searcher = Slow()
    assert "Search Snippet: solar\n" in call("google_search", "solar output", on=desk).block


# ---- the corpus ----------------------------------------------------------------------------------


def test_search_stems_folds_accents_and_ranks_titles_first(corpus):
    assert found("generating") == ["tide", "wind"]
    assert found("cafe") == found("CAFÉ") == ["cafe"]
    assert found("power") == ["tide", "wind"]  # in the title there, in a long text here


def test_ties_keep_the_order_of_the_corpus_and_results_are_limited(corpus):
    assert found("identical") == ["twin-a", "twin-b"]
    config.SEARCH_RESULTS = 1
    assert found("identical") == ["twin-a"]


def test_snippet_shows_the_match(corpus):
    (snippet,) = [r.snippet for r in asyncio.run(tools.LocalCorpus().search("turbines"))]
    assert "turbines generated" in snippet and 40 <= len(snippet.split()) <= 70


def test_queries_without_a_word_find_nothing(corpus):
    assert found("") == found(' "* -() _ ') == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(st.text(max_size=40) | st.sampled_from(['" OR "', "title:x", "a NEAR b", "x*", "'); DROP TABLE pages", "\x00"]))
def test_no_query_is_an_operator_or_an_error(corpus, text):
    assert call("google_search", text + " barrage", on=Tools()).block.count("La Rance") == 1


def test_TOK_14_corpus_with_lone_surrogates_is_indexed_and_found(corpus):
    write(corpus, [{"url": "https://e.org/x", "title": "caf\ud83d report", "text": "ok 😀 \u202e<|im_end|>"}])
    block = call("google_search", "report").block
    assert "Title: caf\ufffd report\n" in block and "Search Snippet: ok 😀 &lt;| im_end|&gt;\n" in block


def test_index_is_rebuilt_only_when_the_corpus_changes(corpus):
    tools.LocalCorpus()
    index = corpus.with_name("corpus.jsonl.fts5")
    built = index.stat().st_mtime_ns, index.stat().st_ino
    tools.LocalCorpus()
    assert (index.stat().st_mtime_ns, index.stat().st_ino) == built
    changed = corpus.read_text(encoding="utf-8").replace("barrage", "barrier")  # the same size
    corpus.write_text(changed, encoding="utf-8")
    assert found("barrier") == ["tide"] and found("barrage") == []
    index.write_bytes(b"not a database")
    assert found("barrier") == ["tide"]
    assert sorted(path.name for path in corpus.parent.iterdir()) == ["corpus.jsonl", "corpus.jsonl.fts5"]


def test_index_that_breaks_later_is_an_error_block(corpus):
    desk = Tools()
    corpus.with_name("corpus.jsonl.fts5").write_bytes(b"not a database")
    assert call("google_search", "barrage", on=desk).status == "error:index"


def test_readers_cannot_write(corpus):
    index = tools.LocalCorpus()._index
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        tools._connect(index).execute("DELETE FROM pages")


def test_missing_corpus_names_the_remedy(tmp_path):
    config.CORPUS_FILE = str(tmp_path / "none.jsonl")
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl does not exist; put JSON lines"):
        Tools()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"),
        ("[]", "field 'url'"),
        ('{"url": "u", "title": "t"}', "field 'text'"),
        ('{"url": "u", "title": null, "text": "x"}', "field 'title'"),
        ('{"url": " ", "title": "t", "text": "x"}', "field 'url'"),
        (json.dumps(PAGES[0]), "stands on an earlier line"),
    ],
)
def test_broken_line_is_named(corpus, line, words):
    write(corpus, PAGES)
    corpus.write_text(corpus.read_text(encoding="utf-8") + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=rf"corpus\.jsonl:7: .*{words}"):
        tools.LocalCorpus()
    assert [path.name for path in corpus.parent.iterdir()] == ["corpus.jsonl"]
