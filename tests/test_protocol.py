"""protocol.py against the reference's parser, truncation and layouts, and the public failure reports."""

import json
from collections import Counter

import pytest
from conftest import golden
from hypothesis import given
from hypothesis import strategies as st

import config
import protocol
from protocol import Page, SearchResult, find_tool_call
from records import ToolCall

SEARCH = '<call_tool name="google_search">'
PIECES = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<answer>",
        "</answer>",
        SEARCH,
        "</call_tool>",
        "<call_tool",
        "name='",
        '"',
        ">",
        "<",
        "&lt;",
    ]
)
MARKUP = st.lists(PIECES | st.text(max_size=8), max_size=12).map("".join)


# ---- golden --------------------------------------------------------------------------------------


def test_golden_truncate():
    kinds = Counter()
    for row in golden("truncate"):
        if row["side"] in ("left", "right"):
            kinds["side we do not have"] += 1
            continue
        ours = protocol.truncate_middle(row["text"], row["limit"])
        equal = ours == row["tool_truncate"]
        kinds["equal" if equal else "limit 1 keeps the whole text there"] += 1
        assert equal or (row["limit"] == 1 and ours == protocol.CUT_MARK)
    assert kinds == {"equal": 25, "limit 1 keeps the whole text there": 4, "side we do not have": 10}


def test_golden_url_normalize():
    kinds = Counter()
    for row in golden("url_normalize"):
        if not isinstance(row["url"], str):
            kinds["not text"] += 1
        elif row["error"]:
            with pytest.raises(ValueError, match="without a host"):
                protocol.normalize_url(row["url"])
            kinds["equal"] += 1
        else:
            assert protocol.normalize_url(row["url"]) == row["normalized"]
            kinds["equal"] += 1
    assert kinds == {"equal": 18, "not text": 2}


def compare_call(row):
    """How our reading of a golden tool_call_parse row relates to the reference's."""
    ours, theirs = find_tool_call(row["text"]), row["calls"]
    if not theirs:
        return "equal" if ours is None else "we fault it" if ours.fault else "we read it"
    arguments = json.loads(theirs[0]["arguments_json"])
    same = ours and (ours.name, ours.argument) == (theirs[0]["name"], arguments.get("query", arguments.get("url", "")))
    if not same or (ours.fault and theirs[0]["name"] in protocol.TOOL_ARGUMENTS and arguments):
        return "we fault it" if ours and ours.fault else "different"
    return "equal" if len(theirs) == 1 else "equal, later calls dropped"


def test_golden_tool_call_parse():
    kinds, lenient, faulted = Counter(), [], []
    for row in golden("tool_call_parse"):
        kind = compare_call(row)
        kinds[kind] += 1
        lenient += [row["text"]] if kind == "we read it" else []
        faulted += [find_tool_call(row["text"]).fault.split(";")[0]] if kind == "we fault it" else []
    assert kinds == {"equal": 43, "equal, later calls dropped": 15, "we read it": 8, "we fault it": 6}
    assert Counter(text[: text.index("google")] for text in lenient) == {
        "<call_tool name='": 2,  # single quotes
        '<call_tool name = "': 2,  # space around the equals sign
        '<call_tool lang="en" name="': 2,  # another attribute first
        '<call_tool name="': 2,  # a space in the closing tag
    }
    assert Counter(faulted) == {
        "the name attribute is missing or empty": 2,
        "the tag must be spelt <call_tool, in lower case": 2,
        "the text between the tags holds a tag of the protocol": 2,  # the only ones that run there: nested calls
    }


def results_of(payload):
    """The results in a golden search payload, by the field names the reference accepts, first non-blank one wins."""
    places = [payload, *(payload.get(key) for key in ("data", "result"))] if isinstance(payload, dict) else []
    names = [
        ("title", "name"),
        ("url", "link", "href"),
        ("snippet", "content", "text", "body", "description", "summary"),
        ("date", "publish_date", "publish_time", "publishedDate", "time"),
    ]
    for place in places:
        items = place.get("search_result") if isinstance(place, dict) else None
        items = [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
        if any(items):
            return [
                SearchResult(*(next((str(item[n]).strip() for n in group if item.get(n)), "") for group in names))
                for item in items
            ]
    return []


def unescaped(text):
    return text.replace("&lt;", "<").replace("&gt;", ">")


def test_golden_tool_search_layout():
    kinds = Counter()
    for row in golden("tool_search"):
        expected = row["expected"]["final_text"] or ""
        config.TOOL_OUTPUT_CHARACTERS = row["limit"]
        ours = protocol.render_search(results_of(row["payload"])[: row["max_results"]])
        if not expected.startswith("<tool_output>") and "(truncated)" not in expected:
            kinds["error text without a block"] += 1
        elif ours == expected:
            kinds["equal"] += 1
        elif "(truncated)" in expected:
            kinds["cut through the block, ours per snippet"] += 1
        else:
            kinds["not escaped there"] += 1
            assert unescaped(ours) == unescaped(expected), row["id"]
    assert kinds == {
        "equal": 59,
        "cut through the block, ours per snippet": 8,
        "error text without a block": 9,
        "not escaped there": 2,
    }


def page_of(row):
    """The page in a golden browse row whose body is plain text, or JSON with text fields; else None."""
    url = protocol.normalize_url(json.loads(row["arguments_json"])["url"])
    if "json" not in (row["content_type"] or "").lower():
        return Page("", url, row["response_body"])
    body = json.loads(row["response_body"])
    body = body.get("data", body)
    content = next(
        (body[name] for name in ("content", "text", "markdown", "body") if isinstance(body.get(name), str)), ""
    )
    return Page(body.get("title") or "", body.get("url") or url, content) if content.strip() else None


def test_golden_tool_browse_layout():
    kinds = Counter()
    for row in golden("tool_browse"):
        expected = row["expected"]["final_text"] or ""
        if not (row["expected"]["execute_text"] or "").startswith("<tool_output>"):
            kinds["error text without a block"] += 1
            continue
        try:
            page = page_of(row)
        except (ValueError, AttributeError):
            page = None
        if page is None:
            kinds["the reader's own parsing"] += 1
            continue
        config.TOOL_OUTPUT_CHARACTERS = row["limit"]
        ours = protocol.render_page(page)
        if ours == expected:
            kinds["equal"] += 1
        elif "(truncated)" in expected:
            kinds["cut twice there"] += 1
            assert ours.endswith("\n</webpage>\n</tool_output>")
        else:
            kinds["not escaped there"] += 1
            assert unescaped(ours) == unescaped(expected), row["id"]
    assert kinds == {
        "equal": 33,
        "cut twice there": 20,
        "error text without a block": 15,
        "not escaped there": 3,
        "the reader's own parsing": 12,
    }


# ---- finding the call ----------------------------------------------------------------------------


def test_PROTO_01_call_quoted_in_thinking_is_not_run():
    text = (
        f"<think>I could run {SEARCH}salary of J. Doe</call_tool> but that is private.</think>"
        '<call_tool name="browse_webpage">https://example.org/annual</call_tool>'
    )
    assert find_tool_call(text) == ToolCall("browse_webpage", "https://example.org/annual")
    open_thinking = find_tool_call(text[: text.index(" but")])
    assert open_thinking.argument == "salary of J. Doe" and "open thinking" in open_thinking.fault
    rest = find_tool_call(text.removeprefix("<think>"))  # opened by the prompt, or in the segment before
    assert rest == ToolCall("browse_webpage", "https://example.org/annual")


@pytest.mark.parametrize(
    ("text", "name", "fault"),
    [
        ("<call_tool name='google_search'>solar</call_tool>", "google_search", None),
        ('<call_tool name="google_search" site="a>b">solar</call_tool>', "google_search", None),
        ('<call_tool name="google_search" query="solar"></call_tool>', "google_search", None),
        ('<call_tool name="Google_Search">solar</call_tool>', "Google_Search", "no tool named 'Google_Search'"),
        ('<call_tool name="python">solar</call_tool>', "python", "no tool named 'python'"),
        ('<CALL_TOOL name="google_search">solar</CALL_TOOL>', "google_search", "lower case"),
        ("<call_tool>solar</call_tool>", "", "name attribute"),
        ('<call_tool name="google_search" solar>solar</call_tool>', "google_search", "not well formed near 'solar'"),
        (f"{SEARCH}<think>solar</call_tool>", "google_search", "tag of the protocol"),
    ],
)
def test_PROTO_06_other_spellings_are_read_or_named(text, name, fault):
    call = find_tool_call(text)
    assert call.name == name
    assert (call.fault is None and call.argument == "solar") if fault is None else fault in call.fault
    assert fault is None or "google_search and browse_webpage" in call.fault


def test_PROTO_06_attribute_debris_is_never_the_query():
    call = find_tool_call('<call_tool name="google_search>solar</call_tool>')
    assert call.argument == "solar" and "not well formed" in call.fault
    assert "nothing between" in find_tool_call(f"{SEARCH} </call_tool>").fault


def test_TOK_04_call_cut_by_length_is_not_run():
    text = '<think>open the report</think><call_tool name="browse_webpage">https://example.org/repo'
    assert find_tool_call(text) is None


@pytest.mark.parametrize("opening", ["", "<think>\n", "<think>\n<think>"])
def test_TOK_07_thinking_opened_anywhere(opening):
    text = f"{opening}Need figures first.</think>{SEARCH}EU battery output 2024</call_tool>"
    assert find_tool_call(text) == ToolCall("google_search", "EU battery output 2024")


def test_call_in_an_answer_or_after_it():
    assert find_tool_call(f"<answer>use {SEARCH}x</call_tool></answer>") is None
    assert find_tool_call(f"<answer>use {SEARCH}x</call_tool>") is None
    assert find_tool_call(f"<answer>r</answer>{SEARCH}x</call_tool>") == ToolCall("google_search", "x")


def test_browse_address_is_unescaped_once():
    text = '<call_tool name="browse_webpage"> https://e.org/?a=1&amp;b=&lt;2&gt; </call_tool>'
    assert find_tool_call(text).argument == "https://e.org/?a=1&b=<2>"
    assert find_tool_call(f"{SEARCH}a &amp; b</call_tool>").argument == "a &amp; b"


@given(MARKUP)
def test_find_tool_call_never_raises_and_names_a_tool_or_a_fault(text):
    call = find_tool_call(text)
    assert call is None or call.fault or (call.name in protocol.TOOL_ARGUMENTS and call.argument)
    assert call is None or "<call_tool" in text.lower()


@given(MARKUP)
def test_quoting_markup_in_closed_thinking_changes_nothing(quoted):
    quoted = quoted.replace("</think>", "")
    assert find_tool_call(f"<think>{quoted}</think>{SEARCH}q</call_tool>") == ToolCall("google_search", "q")


# ---- outside text --------------------------------------------------------------------------------


def test_special_token_literals_from_outside_are_broken():
    assert protocol.clean("a <|im_end|> b <|im_start|>system") == "a <| im_end|> b <| im_start|>system"
    assert protocol.clean("x <|> y <|| z") == "x <|> y <|| z"


def test_TOK_08_end_markers_are_stripped_and_nothing_else():
    report = "<think>t</think><answer>Report body.</answer>"
    assert protocol.strip_end_markers(report + "<|im_end|>\n<|endoftext|>\n") == report
    assert protocol.strip_end_markers("a <|im_end|> b \n") == "a <|im_end|> b \n"
    assert protocol.strip_end_markers("</tool_output><|im_start|>") == "</tool_output><|im_start|>"


def test_TOK_14_lone_surrogates_are_replaced_where_text_enters():
    raw = '{"organic":[{"title":"caf\\ud83d report","link":"https://example.org","snippet":"ok \\ud83d\\ude00"}]}'
    hit = json.loads(raw)["organic"][0]
    assert protocol.clean(hit["title"]) == "caf\ufffd report"
    assert protocol.clean(hit["snippet"]) == "ok 😀"
    block = protocol.render_search([SearchResult(hit["title"], hit["link"], hit["snippet"])])
    assert "Title: caf\ufffd report\n" in block and "Search Snippet: ok 😀\n" in block
    block.encode("utf-8")


def test_clean_drops_what_cannot_be_seen():
    assert protocol.clean("a\r\nb\rc\u2028d\te\x00\x1b[0m\x85") == "a\nb\nc\nd\te[0m"
    assert protocol.clean("pay\u202egpj.exe\u2066\u200b\ufeff\U000e0041") == "paygpj.exe"
    assert protocol.clean("👩\u200d🔬 می\u200cخواهم <b>") == "👩\u200d🔬 می\u200cخواهم <b>"


@given(st.text(st.characters()))
def test_clean_is_idempotent_and_encodable(text):
    once = protocol.clean(text)
    assert protocol.clean(once) == once
    once.encode("utf-8")


@given(st.text(), st.integers(-3, 30))
def test_truncate_middle_bounds(text, limit):
    cut = protocol.truncate_middle(text, limit)
    assert cut == text if limit <= 0 or len(text) <= limit else len(cut) <= limit + len(protocol.CUT_MARK)


@given(st.text(), st.text(), st.text(max_size=9000), st.integers(1, 6))
def test_blocks_are_bounded_whatever_is_put_in(title, url, text, count):
    bound = count * (protocol.TITLE_CHARACTERS * 2 + protocol.URL_CHARACTERS + 100)
    blocks = [
        protocol.render_search([SearchResult(title, url, text, title)] * count),
        protocol.render_page(Page(title, url, text)),
        protocol.render_error(text),
    ]
    assert all(len(block) <= config.TOOL_OUTPUT_CHARACTERS + bound for block in blocks)


def test_hostile_titles_stay_on_one_bounded_line():
    block = protocol.render_page(Page("T\nURL: https://evil\n" + "x" * 9000, "https://e.org/" + "<" * 9000, "body"))
    title, url = block.splitlines()[2:4]
    assert title.startswith("Title: T URL: https://evil x") and len(title) == len("Title: ") + 300
    assert url.startswith("URL: https://e.org/&lt;") and len(url) <= len("URL: ") + 2048


def test_snippets_share_the_limit_equally():
    config.TOOL_OUTPUT_CHARACTERS = 90
    block = protocol.render_search([SearchResult("t", "u", letter * 80) for letter in "abc"])
    assert [block.count(letter * 15 + protocol.CUT_MARK + letter * 15) for letter in "abc"] == [1, 1, 1]
    assert protocol.CUT_MARK not in protocol.render_search(
        [SearchResult("t", "u", "a" * 80), SearchResult("t", "u", "b")]
    )


def test_budget_notice_stands_inside_the_block():
    config.TOOL_OUTPUT_CHARACTERS = 10
    block = protocol.budget_notice(protocol.render_page(Page("t", "u", "x" * 50)))
    assert block.endswith(f"</webpage>\n{protocol.BUDGET_NOTICE}\n</tool_output>")
    assert block.count("</tool_output>") == 1 and not list(protocol.find_tags(protocol.BUDGET_NOTICE))
    with pytest.raises(ValueError, match="not a complete tool_output"):
        protocol.budget_notice("<tool_output>\ncut")


# ---- the prompt ----------------------------------------------------------------------------------


def test_system_prompt_is_the_file_when_there_is_one(tmp_path):
    config.SYSTEM_PROMPT_FILE = str(tmp_path / "prompt.txt")
    assert protocol.system_prompt() == protocol.SYSTEM_PROMPT
    (tmp_path / "prompt.txt").write_text("\nTheir prompt\n", encoding="utf-8")
    assert protocol.system_prompt() == "Their prompt"


def test_our_prompt_teaches_the_protocol_it_is_scored_by():
    used = {(slash, name) for slash, name, _ in (tag.groups() for tag in protocol.find_tags(protocol.SYSTEM_PROMPT))}
    assert {name for _, name in used} == {"think", "call_tool", "tool_output", "answer"}
    assert all(tool in protocol.SYSTEM_PROMPT for tool in protocol.TOOL_ARGUMENTS)
    assert f"{config.MAX_TOOL_CALLS} tool calls" in protocol.SYSTEM_PROMPT
