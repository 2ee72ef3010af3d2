"""The XML protocol as pure text: parse a transcript, find a tool call, render and escape tool output, truncate.

The policy writes `<think>`, `<call_tool name="...">` and at last `<answer>`; the environment puts one
`<tool_output>` block after each call. Outside text is cleaned and its angle brackets are escaped before it is
wrapped, so no page can open or close a tag, or spell a special token.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import config
from records import ToolCall

SYSTEM_PROMPT = """\
You are a research analyst with two web tools. Study the question, gather evidence, then write a report.

Work in turns. A turn is a thought, then one action: a search, the reading of a page, or the answer.
<think>what is known, what is missing, why this action helps</think>
<call_tool name="google_search">a short, specific query</call_tool>
<call_tool name="browse_webpage">https://address.of/the-page</call_tool>

- Begin with a thought and think again before every action, the answer included; no thought may be empty.
- Make one tool call at a time and stop there. Its result arrives in a <tool_output> block; never write one yourself.
- Search first; later, search again or open a page that a search has listed. After 4 tool calls at most, answer.
- Use these tags only, in lower case, and say "less than" in words: no other angle brackets anywhere.

Finish with one <answer>...</answer> block and nothing after it. In the answer:
- Reply to the question directly, then develop every part it asks for; weigh evidence that conflicts.
- Cite each factual claim as a Markdown link [title](address) to a page you have seen. Never invent a source.
- Write plain Markdown in the language of the question; where the evidence falls short, say so and how far it goes."""

BUDGET_NOTICE = (
    "Note: this was the last tool call; the tool budget is used up. Think once more, then write the final report "
    "in an answer block from the evidence above. Where it is not enough, state that limitation in the report."
)  # spells no tag: inside tool output one would count as the policy's own

TOOL_ARGUMENTS = {"google_search": "query", "browse_webpage": "url"}  # tool -> attribute that may stand for the body
TAG_ATTRIBUTES = {"think": (), "call_tool": ("name",), "tool_output": (), "snippet": (), "webpage": (), "answer": ()}
TITLE_CHARACTERS = 300  # of one title, date or error message in tool output
URL_CHARACTERS = 2048  # of one address in tool output
CUT_MARK = "...(truncated)..."
# A tag is recognised exactly as the authors' reward does: ASCII name right after "<" or "</", then anything up to ">".
_TAG = re.compile(r"<(/?)([A-Za-z_][A-Za-z0-9_]*)([^>]*)>")
_ATTRIBUTE = re.compile(r'\s+([A-Za-z_][A-Za-z0-9_]*)="([^"]*)"')
# What the policy may have meant is read more leniently when a call is run than when its format is scored.
_SPOKEN_TAG = re.compile(r"<\s*(think|answer|call_tool)\b", re.IGNORECASE)
_THINK_TAG = re.compile(r"<(/?)\s*think\s*>", re.IGNORECASE)
_SPOKEN_ATTRIBUTE = re.compile(r"""\s*([\w-]+)\s*=\s*(?:"([^"]*)"|'([^']*)')""")
_SPECIAL_TOKEN = re.compile(r"<\|(?=\w+\|>)")
_END_MARKERS = ("<|im_end|>", "<|endoftext|>")
# C0 and C1 controls but tab and newline, marks that reorder or hide text, U+FEFF, the invisible tag characters.
# The joiners U+200C and U+200D stay: Persian and emoji need them.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\U000e0000-\U000e007f]"
)


@dataclass(frozen=True)
class SearchResult:
    """One hit of a search, as the back end gave it; `date` is free text, "" when unknown."""

    title: str
    url: str
    snippet: str
    date: str = ""


@dataclass(frozen=True)
class Page:
    """One web page as readable text."""

    title: str
    url: str
    content: str


def system_prompt():
    """The text of config.SYSTEM_PROMPT_FILE, stripped, or SYSTEM_PROMPT when there is no such file."""
    path = Path(config.SYSTEM_PROMPT_FILE)
    return path.read_text(encoding="utf-8").strip() if path.exists() else SYSTEM_PROMPT


def render_prompt(tokenizer, system, query):
    """The prompt of one question as text, up to the opening of the policy's first turn."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": query}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=True)


@dataclass(frozen=True)
class Block:
    """One complete top-level element: its tag, its attributes, and the raw text between its tags."""

    tag: str
    attributes: dict[str, str]
    inner: str


@dataclass(frozen=True)
class Transcript:
    """What a response consists of, and the faults in its markup: one tag name per occurrence."""

    blocks: tuple[Block, ...]  # complete top-level elements in order, unknown tags included
    stray: tuple[str, ...]  # stripped text outside of them
    unknown_tags: tuple[str, ...]  # not in the protocol
    bad_attributes: tuple[str, ...]  # with other attributes than the tag takes
    broken_tags: tuple[str, ...]  # without their other half


def find_tags(text):
    """Matches (slash, name, rest) of all tags; a "<" after the last ">" opens none, which keeps the time linear."""
    return _TAG.finditer(text, 0, text.rfind(">") + 1)


def parse_transcript(text):
    """A response as a Transcript: every tag counts, wherever it stands; text is judged at top level only.

    A closing tag closes the nearest open tag of its name, and everything still open inside that one is broken.
    Source: the authors' transcript parser, reproduced fault for fault (tests/golden/format.jsonl.gz).
    """
    blocks, stray, unknown, bad, broken = [], [], [], [], []
    open_tags = []  # (name, attributes, where its inner text starts), outermost first
    cursor = 0
    for tag in find_tags(text):
        slash, name, rest = tag.groups()
        if not open_tags:
            stray.append(text[cursor : tag.start()].strip())
        cursor = tag.end()
        if name not in TAG_ATTRIBUTES:
            unknown.append(name)
        if not slash:
            attributes, sound = _attributes(name, rest)
            bad += [] if sound else [name]
            open_tags.append((name, attributes, cursor))
            continue
        bad += [name] if rest.strip() else []
        depth = next((i for i in reversed(range(len(open_tags))) if open_tags[i][0] == name), None)
        if depth is None:
            broken.append(name)
            continue
        broken += [left[0] for left in open_tags[depth + 1 :]]
        _, attributes, start = open_tags[depth]
        del open_tags[depth:]
        if not open_tags:
            blocks.append(Block(name, attributes, text[start : tag.start()]))
    if not open_tags:
        stray.append(text[cursor:].strip())
    broken += [left[0] for left in open_tags]
    return Transcript(tuple(blocks), tuple(filter(None, stray)), tuple(unknown), tuple(bad), tuple(broken))


def _attributes(name, rest):
    """The attributes read from the rest of an opening tag, and whether they are exactly those the tag takes."""
    attributes, cursor = {}, 0
    for attribute in _ATTRIBUTE.finditer(rest):
        key, value = attribute.groups()
        if rest[cursor : attribute.start()].strip() or key in attributes:
            return attributes, False
        attributes[key] = value
        cursor = attribute.end()
    return attributes, not rest[cursor:].strip() and tuple(attributes) == TAG_ATTRIBUTES.get(name, ())


def find_tool_call(segment):
    """The first top-level tool call of one generated segment, or None when it makes none.

    A call quoted in closed thinking or in an answer does not count; text before a `</think>` without an opener is
    thinking; an unclosed call was cut short and is none. A call that cannot run comes back with a `fault` for the
    policy to read, never as None.
    """
    first_think = _THINK_TAG.search(segment)
    position = first_think.end() if first_think and first_think[1] else 0
    thinking = False
    while opening := _SPOKEN_TAG.search(segment, position):
        tag = opening[1].lower()
        closing = re.compile(rf"</\s*{tag}\s*>", re.IGNORECASE).search(segment, opening.end())
        if tag == "call_tool" and closing:
            call = _read_call(segment, opening, closing)
            fault = "the call stands in open thinking; close the thought first" if thinking else call.fault
            return replace(call, fault=fault)
        if closing is None and tag != "think":
            return None
        thinking = thinking or closing is None
        position = closing.end() if closing else opening.end()
    return None


def _read_call(segment, opening, closing):
    """The ToolCall between an opening `<call_tool` and its closing tag."""
    span = segment[opening.end() : closing.start()]
    attributes, cursor = {}, 0
    while attribute := _SPOKEN_ATTRIBUTE.match(span, cursor):
        attributes.setdefault(attribute[1], attribute[2] or attribute[3] or "")
        cursor = attribute.end()
    debris, bracket, body = span[cursor:].partition(">")
    name = attributes.get("name", "").strip()
    argument = body.strip() or attributes.get(TOOL_ARGUMENTS.get(name), "").strip()
    if name == "browse_webpage":
        argument = argument.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    faults = {
        "the tag must be spelt <call_tool, in lower case": opening[0] != "<call_tool",
        f"the opening tag is not well formed near {debris.strip()[:40]!r}": debris.strip() or not bracket,
        "the name attribute is missing or empty": not name,
        f"there is no tool named {name[:60]!r}": name not in TOOL_ARGUMENTS,
        "the text between the tags holds a tag of the protocol": _SPOKEN_TAG.search(argument),
        "there is nothing between the tags": not argument,
    }
    fault = next((words for words, holds in faults.items() if holds), None)
    return ToolCall(name, argument, fault and f"{fault}; the tools are {' and '.join(TOOL_ARGUMENTS)}")


def strip_end_markers(text):
    """The text without the end-of-turn markers that close it, for servers that keep special tokens in the text."""
    while text.rstrip().endswith(_END_MARKERS):
        text = text[: text.rindex("<|")]
    return text


def clean(text):
    """Text from outside made safe to store, log and tokenize; idempotent. Rendering escapes its angle brackets.

    Lone surrogates become U+FFFD (UTF-8 cannot hold them), split pairs are joined, line ends become "\\n",
    characters that cannot be seen but reorder, hide or end text are dropped, and the spelling of a special token
    is broken by a blank (a tokenizer would read "<|im_end|>" in a question as the end of the turn).
    """
    text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    text = _UNSEEN.sub("", re.sub("\r\n?|[\u2028\u2029]", "\n", text))
    return _SPECIAL_TOKEN.sub("<| ", text)


def truncate_middle(text, limit):
    """Keep limit // 2 characters of each end around a mark; a text within the limit, or no positive limit, is left.

    Source: the authors' truncation, side "middle" (tests/golden/truncate.jsonl.gz).
    """
    if limit <= 0 or len(text) <= limit:
        return text
    return text[: limit // 2] + CUT_MARK + text[len(text) - limit // 2 :]


def _inert(text):
    """Outside text, cleaned and unable to form a tag or a special token; `&` stays, so addresses still work."""
    return clean(text).strip().replace("<", "&lt;").replace(">", "&gt;")


def _line(text, limit):
    """Outside text as one inert line of at most `limit` characters."""
    return " ".join(_inert(text).split())[:limit]


def _wrap(inner):
    return f"<tool_output>\n{inner}\n</tool_output>"


def render_search(results):
    """Results as one tool_output block, blank ones left out; snippets share config.TOOL_OUTPUT_CHARACTERS equally."""
    results = [result for result in results if f"{result.title}{result.url}{result.snippet}".strip()]
    if not results:
        return _wrap("<snippet>\nNo search results found.\n</snippet>")
    limit = config.TOOL_OUTPUT_CHARACTERS
    snippets = [_inert(result.snippet) for result in results]
    share = max(1, limit // len(results)) if 0 < limit < sum(map(len, snippets)) else 0
    return _wrap("\n".join(map(_render_result, results, (truncate_middle(text, share) for text in snippets))))


def _render_result(result, snippet):
    title, url = _line(result.title, TITLE_CHARACTERS), _line(result.url, URL_CHARACTERS)
    date = f"\nDate: {_line(result.date, TITLE_CHARACTERS)}" if result.date.strip() else ""
    return f"<snippet>\nTitle: {title}\nURL: {url}\nSearch Snippet: {snippet}{date}\n</snippet>"


def render_page(page):
    """A page as one tool_output block; its content is cut once, in the middle, before it is wrapped."""
    title, url = _line(page.title, TITLE_CHARACTERS) or "No title available", _line(page.url, URL_CHARACTERS)
    content = truncate_middle(_inert(page.content), config.TOOL_OUTPUT_CHARACTERS)
    return _wrap(f"<webpage>\nTitle: {title}\nURL: {url}\nContent: {content}\n</webpage>")


def render_error(message):
    """A failure as one tool_output block, so that a broken tool never costs the policy its format reward."""
    return _wrap(f"Error: {_line(message, TITLE_CHARACTERS)}")


def budget_notice(block):
    """The block with the notice of the spent budget before its closing tag; ValueError when it does not end in one."""
    inner, end, tail = block.rpartition("</tool_output>")
    if tail or not end:
        raise ValueError(f"not a complete tool_output block: it ends in {block[-40:]!r}")
    return f"{inner}{BUDGET_NOTICE}\n{end}"


def normalize_url(url):
    """The address with https:// before it when it has no scheme; ValueError when it has no host.

    Source: the authors' browse tool (tests/golden/url_normalize.jsonl.gz).
    """
    url = url.strip()
    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", url):
        url = "https://" + url.lstrip("/")
    if not urlsplit(url).hostname:
        raise ValueError(f"address without a host: {url[:200]!r}")
    return url
