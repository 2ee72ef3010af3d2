"""turn_reward.py: what each turn and the outcome are worth, on transcripts written by hand."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import config
import protocol
from format_reward import check_format
from protocol import Page, SearchResult, find_tool_call, render_error, render_page, render_search
from records import Trajectory, Turn
from turn_reward import is_found, is_right, is_valid_turn, normalize_answer, outcome_reward, turn_rewards

SEARCH = '<think>Look it up.</think>\n<call_tool name="google_search">capital of France</call_tool>'
BROWSE = '<think>Read it.</think>\n<call_tool name="browse_webpage">https://example.org/france</call_tool>'
ANSWER = "<think>Known now.</think>\n<answer>The Paris!</answer>"
HIT = render_search([SearchResult("France", "https://example.org", "Its capital is Paris, on the Seine.")])
MISS = render_search([SearchResult("Spain", "https://example.org", "Its capital is Madrid.")])
ANSWERS = ("Paris", "City of Light")


def trajectory(*turns, opening=""):
    """Turns given as (text, observation, status); "" as observation for the last one."""
    made = tuple(
        Turn(text, find_tool_call(opening + text if n == 0 else text), f"\n{seen}\n" if seen else "", status)
        for n, (text, seen, status) in enumerate(turns)
    )
    return Trajectory("q", 0, (1,), (2,), (1,), (-0.5,), (0,), made, opening, "no_tool_call", 1.0, 0, 7)


# ---- answers -------------------------------------------------------------------------------------


def test_normalisation_is_squads():
    for text, expected in [
        ("The  Lord of\nthe Rings!", "lord of rings"),
        ("U.S.A.", "usa"),
        ("an apple a day", "apple day"),
        ("Theatre and Anthem", "theatre and anthem"),
        ("3.5", "35"),
        ("A.", ""),
        ("“Zoë”", "“zoë”"),
    ]:
        assert normalize_answer(text) == expected


@given(st.text())
def test_normalised_text_has_no_capitals_marks_articles_or_double_spaces(text):
    normalized = normalize_answer(text)
    words = normalized.split(" ") if normalized else []
    assert not set(words) & {"a", "an", "the", ""}
    assert not re.search(r"[!-/:-@\[-`{-~]", normalized)


def test_right_is_an_exact_match_of_any_reference():
    assert is_right("the PARIS.", ANSWERS) and is_right("city of light", ANSWERS)
    assert not is_right("Paris, France", ANSWERS) and not is_right("", ANSWERS)


def test_a_reference_that_says_nothing_matches_nothing():
    assert not is_right("the", ("A", "Paris")) and not is_found("any text", ("!", "Paris"))
    for answers in ((), ("The", "!")):
        with pytest.raises(ValueError, match="--qa"):
            is_right("the", answers)
        with pytest.raises(ValueError, match="--qa"):
            is_found("any text", answers)


@pytest.mark.parametrize(
    ("text", "answers", "found"),
    [
        ("in the city of Light.", ANSWERS, True),
        ("“Paris” 1939–1945", ("1939",), True),
        ("in Parisian style", ("Paris",), False),
        ("Cosmoparis", ("Paris",), False),
        ("born in 19391", ("1939",), False),
        ("the C++ compiler [x]*", ("a C++ Compiler [x]*",), True),
        ("at the Seine", ("Paris", "Rome"), False),
    ],
)
def test_an_answer_is_found_between_word_boundaries(text, answers, found):
    assert is_found(render_page(Page("", "https://example.org", text)), answers) is found


def test_what_the_policy_or_the_protocol_wrote_is_not_found():
    page = render_page(Page("Nothing", "https://example.org/? Paris", "no page"))
    assert not is_found(page, ("Paris",))
    ended = protocol.budget_notice(MISS)
    assert not is_found(ended, ("evidence above",)) and is_found(ended, ("Madrid",))


# ---- one turn ------------------------------------------------------------------------------------


@pytest.mark.parametrize("segment", [SEARCH, BROWSE, f"\n {SEARCH} \n", SEARCH.replace("\n", "")])
def test_valid_turns(segment):
    assert is_valid_turn(segment)


@pytest.mark.parametrize(
    "segment",
    [
        "",
        SEARCH.partition("\n")[0],  # no call
        SEARCH.partition("\n")[2],  # no thought
        SEARCH.replace("Look it up.", " \n"),
        SEARCH.replace("capital of France", " "),
        SEARCH.replace("google_search", "bing"),
        SEARCH.replace(' name="google_search"', ""),
        SEARCH.replace('name="google_search"', 'name="google_search" top="3"'),
        SEARCH.replace("</think>", ""),
        SEARCH.replace("</call_tool>", ""),
        SEARCH.replace("<think>", ""),
        "Well. " + SEARCH,
        SEARCH + " Done.",
        SEARCH.replace("\n", " then "),
        SEARCH.replace("\n", "<note>x</note>"),
        SEARCH.replace("Look", "<b>Look</b>"),
        SEARCH.replace("Look", "<snippet>Look"),
        SEARCH.replace("France", "<answer>France</answer>"),
        SEARCH + SEARCH,
        SEARCH + "\n" + SEARCH.partition("\n")[2],
        "\n".join(reversed(SEARCH.split("\n"))),
        SEARCH + "<tool_output>made up</tool_output>",
        ANSWER,
    ],
)
def test_broken_turns(segment):
    assert not is_valid_turn(segment)


def test_the_opening_of_the_prompt_belongs_to_the_first_turn_alone():
    headless = SEARCH.removeprefix("<think>")
    opened = trajectory((headless, MISS, "ok"), (headless, MISS, "ok"), (ANSWER, "", ""), opening="<think>\n")
    assert turn_rewards(opened, ANSWERS) == pytest.approx([0.1 - 0.1, -0.2 - 0.2])


# ---- all turns -----------------------------------------------------------------------------------


def test_every_turn_but_the_last_has_its_reward():
    walked = trajectory((SEARCH, MISS, "ok"), (BROWSE, HIT, "ok"), (SEARCH, HIT, "ok"), (ANSWER, "", ""))
    assert turn_rewards(walked, ANSWERS) == pytest.approx([0.1 - 0.1, 0.1 + 0.3, 0.1 + 0.3 - 0.2])
    assert turn_rewards(trajectory((ANSWER, "", "")), ANSWERS) == []


def test_only_searches_that_could_run_are_counted():
    faulty = SEARCH.replace("<call_tool", "<CALL_TOOL")
    assert find_tool_call(faulty).fault and find_tool_call(faulty).name == "google_search"
    failed = render_error("the search engine is out of reach")
    walked = trajectory(
        (faulty, render_error("bad"), "error:bad_call"), (SEARCH, failed, "error:http"), (BROWSE, MISS, "ok"),
        (SEARCH, MISS, "ok"), (ANSWER, "", ""),
    )  # fmt: skip
    assert turn_rewards(walked, ANSWERS) == pytest.approx([-0.2, 0.1 - 0.1, 0.1, 0.1 - 0.2])


def test_an_error_that_repeats_the_policys_words_finds_nothing():
    named = SEARCH.replace("google_search", "Paris")
    error = render_error(find_tool_call(named).fault)
    assert "Paris" in error
    walked = trajectory((named, error, "error:bad_call"), (ANSWER, "", ""))
    assert turn_rewards(walked, ANSWERS) == [config.TURN_BROKEN]


def test_a_call_left_unanswered_at_the_end_is_the_final_turn():
    assert turn_rewards(trajectory((SEARCH, HIT, "ok"), (SEARCH, "", "ok")), ANSWERS) == pytest.approx([0.3])


def test_the_constants_are_read_when_called():
    config.TURN_VALID, config.TURN_BROKEN, config.TURN_FOUND, config.SEARCH_PENALTY = 1.0, -16.0, 4.0, 0.5
    walked = trajectory((SEARCH, HIT, "ok"), ("no " + SEARCH, MISS, "ok"), (ANSWER, "", ""))
    assert turn_rewards(walked, ANSWERS) == [1 + 4 - 0.5, -16 - 1.0]
    config.OUTCOME_RIGHT, config.OUTCOME_VALID, config.OUTCOME_BROKEN = 7.0, 5.0, 3.0
    check = check_format(walked.transcript)
    assert outcome_reward(check, ANSWERS) == 3.0
    check = dataclasses.replace(check, reward=1.0, answer="Paris")
    assert (outcome_reward(check, ANSWERS), outcome_reward(check, ("Rome",))) == (7.0, 5.0)


@pytest.mark.parametrize(
    ("turns", "reward"),
    [
        ([(SEARCH, HIT, "ok"), (ANSWER, "", "")], 1.0),
        ([(SEARCH, HIT, "ok"), (ANSWER.replace("Paris", "Rome"), "", "")], 0.2),
        ([(SEARCH, HIT, "ok"), ("Well. " + ANSWER, "", "")], -1.0),
        ([(ANSWER, "", "")], -1.0),  # right, but the format wants a tool cycle
        ([(SEARCH, HIT, "ok"), (SEARCH, "", "")], -1.0),
    ],
)
def test_outcomes(turns, reward):
    assert outcome_reward(check_format(trajectory(*turns).transcript), ANSWERS) == reward
