"""The bytes of a fetched page to readable text: type, character set, and the article inside the HTML."""

import codecs
import html
import re
from urllib.parse import unquote, urlsplit

import trafilatura
from lxml.etree import LxmlError

from protocol import Page, clean
from wire import CallFailure

HTML_TYPES = ("text/html", "application/xhtml+xml")
TEXT_TYPES = ("text/", "application/json", "application/xml", "application/ld+json", "application/rss+xml",
              "application/atom+xml", "application/markdown", "application/x-yaml")  # fmt: skip
SNIFFED = 4096  # bytes looked at for a character set or signs of a binary file
MAIN_CHARACTERS = 1_000_000  # of HTML in which the main part is looked for
MAIN_TAGS = 20_000  # and tags in it, closing ones included
ODD_SHARE = 0.1  # of characters that no text has, above which a "text" is none
# How binary files begin, whatever their headers say.
_SIGNATURES = (b"PK\x03\x04", b"\x89PNG", b"GIF8", b"\xff\xd8\xff", b"\x1f\x8b", b"BZh", b"7z\xbc\xaf", b"Rar!",
               b"RIFF", b"OggS", b"ID3", b"\x7fELF", b"\xd0\xcf\x11\xe0", b"wOFF", b"wOF2")  # fmt: skip
_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_CHARSET = re.compile(rb"""(?:charset|encoding)\s*=\s*["']?\s*([A-Za-z0-9_.:-]{2,40})""", re.IGNORECASE)
_CHARACTER_SETS = re.compile(
    r"ascii|utf-(8|16|32)(-[bl]e)?|iso8859-\d+|cp\d+|koi8-[rut]|mac-\w+|tis-620|gb\w+|hz|big5\w*|euc_\w+|shift_jis\w*|"
    r"iso2022_\w+|johab"
)
# Names that browsers read as a larger set (WHATWG Encoding Standard).
_LARGER = {"iso8859-1": "cp1252", "ascii": "cp1252", "iso8859-9": "cp1254", "gb2312": "gb18030", "gbk": "gb18030",
           "shift_jis": "cp932", "euc_kr": "cp949", "big5": "big5hkscs"}  # fmt: skip


def check_type(content_type):
    """Refuse a Content-Type that is not text before its body is read. Raises CallFailure "pdf" or "binary".

    No type at all passes: the bytes decide.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind in ("application/pdf", "application/x-pdf"):
        raise _pdf()
    if kind and not kind.startswith(TEXT_TYPES) and kind not in HTML_TYPES:
        raise CallFailure("binary", f"not a page of text but {kind[:60]}")


def _pdf():
    return CallFailure("pdf", "a PDF, which this reader cannot open; look for an HTML page on the same matter")


def read_page(content, content_type, url):
    """The Page in the bytes a server sent. Raises CallFailure: "pdf", "binary", "empty" (no readable text)."""
    text = decode(content, content_type)
    kind = content_type.partition(";")[0].strip().lower()
    title, body = "", text
    if kind in HTML_TYPES or (
        not kind.startswith(TEXT_TYPES) and re.search(r"<(!doctype html|html|body|p)\b", text, re.I)
    ):
        title, body = extract(text)
    if not body.strip():
        raise CallFailure("empty", "the page holds no readable text; it may need a browser to show any")
    return Page(title or unquote(urlsplit(url).path).rpartition("/")[2], url, clean(body))


def extract(document):
    """(title, main text) of an HTML document; all of its text when no main part is found, or it is very large.

    Finding the main part takes time that grows with the square of some elements' number, minutes at the worst.
    """
    heading = re.search(r"<title[^>]*>([^<]{1,1000})", document, re.IGNORECASE)
    title = html.unescape(heading[1]).strip() if heading else ""
    try:
        if len(document) <= MAIN_CHARACTERS and document.count("<") <= MAIN_TAGS:
            found = trafilatura.bare_extraction(document, include_comments=False, with_metadata=True)
            if found is not None and (found.text or "").strip():
                return found.title or title, found.text
        return title, trafilatura.html2txt(document)
    except (LxmlError, ValueError, RecursionError):
        raise CallFailure("empty", "the page's HTML cannot be read") from None


def decode(content, content_type):
    """The text of a page. Raises CallFailure "pdf" or "binary" for bytes that are no text.

    The character set is that of a byte order mark, else of the Content-Type header, else the one the document
    declares itself, else UTF-8 where the bytes are that, else Windows-1252, as browsers do.
    """
    head = content[:SNIFFED]
    if head.lstrip()[:5] == b"%PDF-":
        raise _pdf()
    charset = find_charset(content, content_type)
    if head.startswith(_SIGNATURES) or (b"\x00" in head and not charset.startswith(("utf-16", "utf-32"))):
        raise CallFailure("binary", "not a page of text but a binary file")
    text = content.decode(charset, "replace").removeprefix("\ufeff")
    odd = sum(text.count(mark) for mark in ("\ufffd", *map(chr, range(1, 8))))
    if odd > ODD_SHARE * len(text):
        raise CallFailure("binary", f"not readable as text in the character set {charset}")
    return text


def find_charset(content, content_type):
    """The codec of a page's bytes, see decode."""
    for mark, codec in _MARKS:
        if content.startswith(mark):
            return codec
    declared = _CHARSET.search(content_type.encode("ascii", "ignore"))
    inside = _CHARSET.search(content[:SNIFFED]) if b"<" in content[:SNIFFED] else None
    for found in filter(None, (declared, inside)):
        name = _codec(found[1].decode("ascii"))
        if name and not (found is inside and name.startswith("utf-16")):  # readable so far: it cannot be
            return name
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        return "utf-8" if error.start >= len(content) - 3 else "cp1252"  # a cut last character is no other set
    return "utf-8"


def _codec(label):
    """Python's name of a character set, None for any other label: Python knows codecs that no page should choose."""
    try:
        name = codecs.lookup(label).name
    except (LookupError, ValueError):
        return None
    return _LARGER.get(name, name) if _CHARACTER_SETS.fullmatch(name) else None
