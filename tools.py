"""`google_search` and `browse_webpage`: a tool call in, one complete block of tool output out."""

import asyncio
import hashlib
import json
import os
import re
import sqlite3
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import config
import web
from pace import time_limit
from protocol import Page, SearchResult, clean, render_error, render_page, render_search
from wire import CallFailure as ToolFailure  # a tool's failures are those of any call

INDEX_VERSION = "1"  # part of an index's stamp: raise it when the tables below change
SNIPPET_TOKENS = 60  # words around the match; FTS5 allows 64
TITLE_WEIGHT = 4.0  # a word in the title counts as so many in the text, in the ranking


@dataclass(frozen=True)
class Observation:
    """What a call came to. block: a complete <tool_output>. status: "ok" or "error:<kind>". seconds: wall time."""

    block: str
    status: str
    seconds: float


class Tools:
    """Runs tool calls on the back ends that config names; whatever goes wrong with one call comes back as a block.

    A back end has `async search(query) -> list[SearchResult]`, `async browse(url) -> Page`, or both, and raises
    ToolFailure. Raises ValueError for an unknown back end, and whatever its construction raises.
    names: the search and reader in use, "auto" resolved.
    """

    def __init__(self):
        *self.names, _ = web.resolve_backends()
        search = _backend("SEARCH_BACKEND", SEARCH_BACKENDS, self.names[0])
        browse = _backend("BROWSE_BACKEND", BROWSE_BACKENDS, self.names[1])
        self._searcher = search()
        self._browser = self._searcher if browse is search else browse()
        self._slots = {tool: asyncio.Semaphore(config.TOOL_CONCURRENCY) for tool in ("google_search", "browse_webpage")}

    async def call(self, call):
        """The Observation of one ToolCall; a faulty call is told its fault and reaches no back end.

        Raises AccountError (wire.py) when no later call can succeed either.
        """
        start = time.monotonic()
        block, status = await self._answer(call)
        return Observation(block, status, time.monotonic() - start)

    async def close(self):
        """End the back ends' connections."""
        await self._searcher.close()
        await self._browser.close()

    async def _answer(self, call):
        if call.fault:
            return render_error(call.fault), "error:bad_call"
        try:
            async with self._slots[call.name], time_limit(config.TOOL_TIMEOUT):
                if call.name == "google_search":
                    return render_search(await self._searcher.search(cut_query(clean(call.argument)))), "ok"
                return render_page(await self._browser.browse(clean(call.argument).strip())), "ok"
        except TimeoutError:
            return render_error(f"{call.name} gave no answer within {config.TOOL_TIMEOUT} seconds"), "error:timeout"
        except ToolFailure as failure:
            return render_error(str(failure)), f"error:{failure.kind}"


def _backend(constant, backends, name):
    if name not in backends:
        raise ValueError(f"config.{constant} is {name!r}; allowed: {', '.join(backends)}, auto")
    return backends[name]


def cut_query(query):
    """The query on one line, cut at a word boundary to config.QUERY_CHARACTERS (mid-word where it has none)."""
    query, limit = " ".join(query.split()), config.QUERY_CHARACTERS
    if len(query) <= limit:
        return query
    return query[: limit + 1].rpartition(" ")[0] or query[:limit]


class LocalCorpus:
    """Search and pages from config.CORPUS_FILE, one {"url", "title", "text"} per line, through SQLite's FTS5.

    The index is kept beside the corpus and rebuilt when the corpus' content changes. Every query opens its own
    read-only connection, so threads share nothing.
    Raises FileNotFoundError without a corpus, ValueError with file, line and field for a line that is broken.
    """

    def __init__(self):
        corpus = Path(config.CORPUS_FILE)
        if not corpus.is_file():
            raise FileNotFoundError(
                f"config.CORPUS_FILE {corpus} does not exist; put JSON lines with url, title and text there, "
                "or choose another SEARCH_BACKEND and BROWSE_BACKEND"
            )
        self._index = corpus.with_name(corpus.name + ".fts5")
        with open(corpus, "rb") as file:
            stamp = f"{INDEX_VERSION} {corpus.stat().st_size} {hashlib.file_digest(file, 'sha256').hexdigest()}"
        if _read_stamp(self._index) != stamp:
            _build_index(corpus, self._index, stamp)

    async def close(self):
        """Nothing is open between calls."""

    async def search(self, query):
        """At most config.SEARCH_RESULTS results that share a word with the query, best first, ties by line."""
        words = dict.fromkeys(re.findall(r"[^\W_]+", query))
        if not words:
            return []
        # quoted, so no word is an operator of the query language
        match = " OR ".join(f'"{word}"' for word in words)
        rows = await asyncio.to_thread(self._rows, _SEARCH, {"match": match, "limit": config.SEARCH_RESULTS})
        return [SearchResult(title, url, snippet) for title, url, snippet in rows]

    async def browse(self, url):
        """The Page whose address is exactly `url`. Raises ToolFailure("not_found") when there is none."""
        rows = await asyncio.to_thread(self._rows, "SELECT title, url, text FROM pages WHERE url = :url", {"url": url})
        if not rows:
            raise ToolFailure("not_found", f"no page at {url}; open an address that a search has listed")
        return Page(*rows[0])

    def _rows(self, sql, values):
        try:
            with closing(_connect(self._index)) as connection:
                return connection.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise ToolFailure("index", f"the search index cannot be read: {error}") from error


SEARCH_BACKENDS = {"local": LocalCorpus, "deepseek": web.DeepSeek, "serper": web.Serper, "wikipedia": web.Wikipedia}
BROWSE_BACKENDS = {"local": LocalCorpus, "jina": web.Jina, "direct": web.Direct}

# The inner query ranks; the outer one makes snippets for the few rows that are returned.
_SEARCH = f"""
    SELECT pages.title, pages.url, snippet(words, 1, '', '', ' … ', {SNIPPET_TOKENS})
    FROM words JOIN pages ON pages.id = words.rowid
    WHERE words MATCH :match AND words.rowid IN (
        SELECT rowid FROM words WHERE words MATCH :match ORDER BY bm25(words, {TITLE_WEIGHT}, 1.0), rowid LIMIT :limit)
    ORDER BY bm25(words, {TITLE_WEIGHT}, 1.0), words.rowid
"""

_TABLES = """
    CREATE TABLE stamp (value TEXT);
    CREATE TABLE pages (id INTEGER PRIMARY KEY, url TEXT UNIQUE, title TEXT, text TEXT);
    CREATE VIRTUAL TABLE words USING fts5(title, text, content='pages', content_rowid='id',
        tokenize='porter unicode61 remove_diacritics 2');
"""


def _connect(index):
    return sqlite3.connect(f"{index.resolve().as_uri()}?mode=ro", uri=True)


def _read_stamp(index):
    """The stamp of the corpus an index was made from, None when there is no readable index."""
    try:
        with closing(_connect(index)) as connection:
            return connection.execute("SELECT value FROM stamp").fetchone()[0]
    except sqlite3.Error:
        return None


def _build_index(corpus, index, stamp):
    """Write the index of a corpus under a temporary name, then rename it, so that no reader sees half of one."""
    handle, name = tempfile.mkstemp(dir=index.parent, prefix=index.name)
    os.close(handle)
    try:
        with closing(sqlite3.connect(name)) as connection:
            connection.executescript(_TABLES)
            for number, page in _read_corpus(corpus):
                try:
                    connection.execute("INSERT INTO pages VALUES (:id, :url, :title, :text)", page)
                except sqlite3.IntegrityError:
                    raise ValueError(f"{corpus}:{number}: url {page['url']!r} stands on an earlier line too") from None
            connection.execute("INSERT INTO words(words) VALUES ('rebuild')")
            connection.execute("INSERT INTO stamp VALUES (?)", (stamp,))
            connection.commit()
        os.chmod(name, 0o644)  # readable for whoever shares the corpus
        os.replace(name, index)
    finally:
        Path(name).unlink(missing_ok=True)


def _read_corpus(corpus):
    """Yield (line number, {"id", "url", "title", "text"}) with cleaned text; blank lines are passed over."""
    with open(corpus, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8"))
            except ValueError as error:
                raise ValueError(f"{corpus}:{number}: not JSON in UTF-8 ({error})") from None
            fields = record if isinstance(record, dict) else {}
            for field in ("url", "title", "text"):
                if not isinstance(fields.get(field), str) or (field != "title" and not fields[field].strip()):
                    raise ValueError(f"{corpus}:{number}: field {field!r} must be text, and only a title may be empty")
            page = {field: clean(fields[field]).strip() for field in ("url", "title", "text")}
            yield number, {"id": number, **page}
