"""One response as text to its 0/1 format reward, and to the answer it holds."""

import re
from dataclasses import dataclass

from protocol import TOOL_ARGUMENTS, find_tags, parse_transcript

_SEGMENT = re.compile(r"(?:GOT)+(?:BOT)*")  # searches, then pages: each a call, its output and a thought


@dataclass(frozen=True)
class FormatCheck:
    """The verdict on one response.

    reward: 1.0 or 0.0. answer: the report, "" when there is none; it can be there although the format fails.
    failures: names in the order of the checks, empty when reward is 1.0. counts: name -> number.
    """

    reward: float
    answer: str
    failures: tuple[str, ...]
    counts: dict[str, int]


def check_format(transcript):
    """The FormatCheck of a response: the text after the prompt, from the "<think>" that the prompt may have opened.

    The order of blocks is checked, and its cycles counted, only when nothing else is wrong.
    Source: the article's format reward; the authors' format analysis, row by row in
    tests/golden/format.jsonl.gz.
    """
    parsed = parse_transcript(transcript)
    answer = find_answer(transcript)
    calls = [block.attributes.get("name", "").strip() for block in parsed.blocks if block.tag == "call_tool"]
    known_calls = [name for name in calls if name in TOOL_ARGUMENTS]
    checks = {
        "tag:unknown_tags": parsed.unknown_tags,
        "tag:invalid_attrs": parsed.bad_attributes,
        "tag:broken_xml": parsed.broken_tags,
        "structure:stray_text_outside_tags": parsed.stray,
        "tool:unknown_tool_name": len(calls) > len(known_calls),
        "answer:invalid_or_missing_final_answer": not answer,
    }
    failures = [name for name, fault in checks.items() if fault]
    fault, cycles = (None, "") if failures else _check_order(parsed.blocks)
    failures += [fault] if fault else []
    counts = {
        "answer_tag_count": sum(block.tag == "answer" for block in parsed.blocks),
        "tool_call_count": len(known_calls),
        "tool_output_count": sum(block.tag == "tool_output" for block in parsed.blocks),
        "google_search_cycle_count": cycles.count("G"),
        "browse_webpage_cycle_count": cycles.count("B"),
        "segment_count": len(_SEGMENT.findall(cycles)),
        "stray_text_count": len(parsed.stray),
    }
    return FormatCheck(0.0 if failures else 1.0, answer, tuple(failures), counts)


def find_answer(transcript):
    """The complete, non-empty answer that ends a response and holds nothing like a tag; else "".

    Only the first `<answer>` is looked at: a second one leaves text after it, or a tag in it.
    """
    answer, closing, tail = transcript.partition("<answer>")[2].partition("</answer>")
    if not closing or tail.strip() or next(find_tags(answer), None):
        return ""
    return answer.strip()


def _check_order(blocks):
    """The fault in the order of top-level blocks (None when sound), and the sound cycles as one letter per block.

    The order is: a thought, then segments of at least one search cycle and any number of page cycles, then the
    answer. An empty thought, call or output breaks its cycle.
    """
    shape = "".join(map(_letter, blocks))
    if not shape.startswith("T"):
        return "structure:must_start_with_non_empty_think", ""
    if shape == "TA":
        return "structure:must_have_at_least_one_tool_cycle", ""
    cycles = re.match(f"(?:{_SEGMENT.pattern})*", shape[1:])[0]
    fault = None if shape == f"T{cycles}A" else "structure:each_segment_must_start_with_google_search_cycle"
    return fault, cycles


def _letter(block):
    """T thought, G search, B page, O output, A answer; "-" for anything empty."""
    if block.tag == "answer":
        return "A"
    if not block.inner.strip():
        return "-"
    name = block.attributes.get("name", "").strip()
    return {"think": "T", "tool_output": "O"}.get(block.tag) or {"google_search": "G", "browse_webpage": "B"}.get(
        name, "-"
    )
