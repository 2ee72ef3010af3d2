"""Online back ends of the tools: search by DeepSeek, Serper or Wikipedia, reading by Jina Reader or by ourselves.

A searcher has `async search(query) -> list[SearchResult]`, a reader `async browse(url) -> Page`; both raise
CallFailure for one call and AccountError for all, and `async close()` ends their connections.
Which back end needs which key, and what a run without keys is like: `resolve_backends`.
"""

import asyncio
import math
import os
import re
import urllib.request
from urllib.parse import urljoin

import config
import guard
import pagetext
from protocol import Page, SearchResult, clean
from wire import AccountError, CallFailure, Key, Wire

DEEPSEEK_CHARACTERS = 128  # of a query, by Unicode code points, operators included; the service's limit
DEEPSEEK_RPM = 6000  # per account
SERPER_RPM = 3000  # the smallest package
WIKIPEDIA_EXTRACT = 1200  # characters of an article's introduction; the service's limit
JINA_SECONDS = 10  # of page loading; from 20 on Jina waits for the network to fall silent
DIRECT_PER_HOST = 4  # connections to one site
DIRECT_TYPES = "text/html,application/xhtml+xml,text/plain;q=0.9,*/*;q=0.1"
REDIRECTS = frozenset({301, 302, 303, 307, 308})

KEYLESS_SEARCH = ("search: Wikipedia, as neither DEEPSEEK_API_KEY nor SERPER_API_KEY is set: encyclopedia articles "
                  "only, one request at a time; the article searched the whole web")  # fmt: skip
KEYLESS_READER = ("reader: direct, as JINA_API_KEY is not set: no PDF, no page that needs JavaScript; "
                  "some sites refuse it")  # fmt: skip


def resolve_backends():
    """(search, reader, notes): config.SEARCH_BACKEND and BROWSE_BACKEND with "auto" replaced by a name.

    The first search whose key is set wins, DeepSeek before Serper, else Wikipedia; Jina reads when its key is set,
    else we fetch pages ourselves (without a key it allows 20 pages a minute, a tenth of what a step asks for).
    notes: what the lack of keys changes, one line each.
    """
    search, reader, notes = config.SEARCH_BACKEND, config.BROWSE_BACKEND, []
    if search == "auto":
        keys = {"deepseek": "DEEPSEEK_API_KEY", "serper": "SERPER_API_KEY"}
        search = next((name for name, variable in keys.items() if os.environ.get(variable, "").strip()), "wikipedia")
        notes += [KEYLESS_SEARCH] if search == "wikipedia" else []
    if reader == "auto":
        reader = "jina" if os.environ.get("JINA_API_KEY", "").strip() else "direct"
        notes += [KEYLESS_READER] if reader == "direct" else []
    if search == "wikipedia" and not config.CONTACT:
        notes.append(
            "set config.CONTACT to a mail address or page of yours: Wikipedia may refuse a program without one"
        )
    return search, reader, notes


def _text(record, *names):
    """The first of the fields that holds text, cleaned; "" when none does."""
    return next(
        (clean(record[name]).strip() for name in names if isinstance(record.get(name), str) and record[name].strip()),
        "",
    )


def _records(value):
    """The dicts in a list that may be missing, null, or something else."""
    return [record for record in value if isinstance(record, dict)] if isinstance(value, list) else []


class DeepSeek:
    """DeepSeek's Search API. Source: its guide "search", in force since 2026-10-17."""

    def __init__(self):
        self._wire = Wire("search", seconds=config.TOOL_TIMEOUT, concurrency=config.TOOL_CONCURRENCY,
                          per_minute=DEEPSEEK_RPM, key=Key(("DEEPSEEK_API_KEY",)))  # fmt: skip
        self.close = self._wire.close

    async def search(self, query):
        """At most config.SEARCH_RESULTS results; the long `summary` of a page is its snippet where there is one."""
        short = query[:DEEPSEEK_CHARACTERS]
        if len(query) > len(short):
            short = query[: DEEPSEEK_CHARACTERS + 1].rpartition(" ")[0] or short
        body = {"query": short, "count": config.SEARCH_RESULTS, "ori_question": query[:DEEPSEEK_CHARACTERS]}
        received = await self._wire.request("POST", f"{config.DEEPSEEK_URL}/v1/tools/search", json=body)
        hits = _records(received.json().get("results"))[: config.SEARCH_RESULTS]
        return [SearchResult(_text(hit, "title"), _text(hit, "url"), _text(hit, "summary", "snippet", "content"),
                             _text(hit, "date")) for hit in hits]  # fmt: skip


class Serper:
    """Google's results through serper.dev."""

    def __init__(self):
        self._wire = Wire("search", seconds=config.TOOL_TIMEOUT, concurrency=config.TOOL_CONCURRENCY,
                          per_minute=SERPER_RPM, key=Key(("SERPER_API_KEY",), "X-API-KEY", ""))  # fmt: skip
        self.close = self._wire.close

    async def search(self, query):
        """At most config.SEARCH_RESULTS organic results; [] when the answer holds none."""
        body = {"q": query, "num": config.SEARCH_RESULTS}
        received = await self._wire.request("POST", f"{config.SERPER_URL}/search", json=body)
        hits = _records(received.json().get("organic"))[: config.SEARCH_RESULTS]
        return [SearchResult(_text(hit, "title"), _text(hit, "link"), _text(hit, "snippet"), _text(hit, "date"))
                for hit in hits]  # fmt: skip


class Wikipedia:
    """Wikipedia's own search, without a key; one request at a time, as its etiquette asks."""

    def __init__(self):
        self._wire = Wire("search", seconds=config.TOOL_TIMEOUT, concurrency=1, per_minute=config.WIKIPEDIA_RPM,
                          remedy="Set config.CONTACT to a mail address or page of yours")  # fmt: skip
        self.close = self._wire.close

    async def search(self, query):
        """At most config.SEARCH_RESULTS articles, best first, with their introductions as snippets."""
        params = {
            "action": "query", "format": "json", "formatversion": 2, "generator": "search", "gsrsearch": query,
            "gsrlimit": config.SEARCH_RESULTS, "prop": "extracts|info", "explaintext": 1, "exintro": 1,
            "exchars": WIKIPEDIA_EXTRACT, "exlimit": "max", "inprop": "url", "redirects": 1,
        }  # fmt: skip
        received = (await self._wire.request("GET", f"{config.WIKIPEDIA_URL}/w/api.php", params=params)).json()
        if isinstance(error := received.get("error"), dict):
            raise CallFailure("service", f"Wikipedia: {_text(error, 'info', 'code')}")
        found = received.get("query")
        pages = _records(found.get("pages")) if isinstance(found, dict) else []
        pages.sort(key=lambda page: page["index"] if isinstance(page.get("index"), int) else math.inf)
        return [SearchResult(_text(page, "title"), _text(page, "fullurl"), _text(page, "extract"))
                for page in pages[: config.SEARCH_RESULTS]]  # fmt: skip


class Jina:
    """Jina Reader, with JINA_API_KEY or, slowly, without; a spent balance (402) falls back to the latter.

    Source: the service's published code (jina-ai/reader f289e5d) and its rate limit page.
    """

    def __init__(self):
        # 403 is a block of the one page, not of the account
        common = {"seconds": config.TOOL_TIMEOUT, "concurrency": config.TOOL_CONCURRENCY, "account": {401, 402}}
        self._paid = Wire("reader", per_minute=config.JINA_RPM, key=Key(("JINA_API_KEY",), optional=True), **common)
        self._free = Wire("reader", per_minute=config.JINA_KEYLESS_RPM, **common)
        self._use_key = bool(os.environ.get("JINA_API_KEY", "").strip())
        self._hosts = list(config.JINA_URLS)

    async def close(self):
        await self._paid.close()
        await self._free.close()

    async def browse(self, url):
        """The Page as Markdown, as Jina's own machine sees it; an address of ours is never sent there."""
        try:
            await guard.check(url)
        except CallFailure as failure:
            # behind a proxy the names of the outside need not resolve here
            if failure.kind != "dns" or not urllib.request.getproxies().keys() & {"https", "all"}:
                raise
        data = await self._read({"url": str(guard.parse(url)[0])})
        check_warning(_text(data, "warning"))
        if not (content := _text(data, "content")):
            raise CallFailure("empty", "the page holds no readable text")
        return Page(_text(data, "title"), _text(data, "url") or url, content)

    async def _read(self, body):
        """The `data` of the first host that can be reached; it is asked first from then on."""
        for place, host in enumerate(tuple(self._hosts)):
            try:
                data = await self._ask(host, body)
            except CallFailure as failure:
                out_of_reach = failure.kind in ("connection", "timeout") or failure.status >= 500
                if not out_of_reach or place == len(self._hosts) - 1:
                    raise
            else:
                self._hosts.remove(host)
                self._hosts.insert(0, host)
                return data
        raise AssertionError("the last host returns or raises")

    async def _ask(self, host, body):
        headers = {
            "Accept": "application/json",  # exactly: with text/plain allowed, and */* allows it, the reply is text
            "X-Timeout": str(JINA_SECONDS),
            "X-Retain-Images": "none",
            "X-Md-Link-Style": "discarded",
            "X-Max-Tokens": str(config.JINA_TOKENS),
        }
        try:
            wire = self._paid if self._use_key else self._free
            received = await wire.request("POST", f"{host}/", json=body, headers=headers, tries=2)
        except AccountError as error:
            if not self._use_key or error.status != 402:
                raise
            if self._use_key:  # said once
                print(f"reader: {error}. Going on without the key, {config.JINA_KEYLESS_RPM} pages a minute")
            self._use_key = False
            wire, received = (
                self._free,
                await self._free.request("POST", f"{host}/", json=body, headers=headers, tries=2),
            )
        reply = received.json()
        data = reply["data"] if isinstance(reply.get("data"), dict) else {}
        usage = data.get("usage")
        if isinstance(usage, dict) and isinstance(usage.get("tokens"), int):
            wire.count_tokens(host, 0, usage["tokens"])
        return data


def check_warning(warning):
    """Raise CallFailure when Jina's `warning` says that the content is an error page, which it sends with a 200.

    Other warnings (a cached copy, frames left out) come with a real page.
    """
    if match := re.search(r"returned error (\d{3})", warning):
        raise CallFailure(f"http_{match[1]}", f"the page's own server answers {match[1]}")
    if re.search(r"captcha", warning, re.IGNORECASE):
        raise CallFailure("captcha", "the page asks its visitors to prove that they are human")


class Direct:
    """Pages fetched by this machine, through the guard, their main text taken from the HTML."""

    def __init__(self):
        # no proxy: the guard's checked address could not be held to through one
        self._wire = Wire("reader", seconds=config.TOOL_TIMEOUT, concurrency=DIRECT_PER_HOST, account=frozenset(),
                          trust_env=False, many_hosts=True)  # fmt: skip
        self.close = self._wire.close

    async def browse(self, url):
        """The Page at `url`, after at most config.FETCH_REDIRECTS redirects, each of them checked."""
        for _ in range(config.FETCH_REDIRECTS + 1):
            target = await guard.check(url)
            address, headers, extensions = target.pinned()
            received = await self._wire.request(
                "GET",
                address,
                host=target.host,
                tries=2,
                inspect=_inspect,
                headers={**headers, "Accept": DIRECT_TYPES},
                extensions=extensions,
            )
            if received.status in REDIRECTS and (location := received.headers.get("location")):
                url = _joined(str(target.url), location)
                continue
            content_type = received.headers.get("content-type", "")
            return await asyncio.to_thread(pagetext.read_page, received.content, content_type, str(target.url))
        raise CallFailure("redirects", f"the address redirects more than {config.FETCH_REDIRECTS} times")


def _inspect(response):
    if response.status_code not in REDIRECTS:
        pagetext.check_type(response.headers.get("content-type", ""))


def _joined(base, location):
    try:
        return urljoin(base, location)
    except ValueError:
        raise CallFailure("bad_url", "the page redirects to something that is no address") from None
