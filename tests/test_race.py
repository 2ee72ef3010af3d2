"""RACE's prompt, matching, scores and statistics, against the reference's golden rows and a plain loop."""

import hashlib
import json
import os
import random
from collections import Counter
from pathlib import Path

import pytest
import race_bench
from conftest import ROOT, golden
from hypothesis import given
from hypothesis import strategies as st

import config
import race
import race_files
import race_table
from judges import Reply
from verdicts import VerdictError

SCORE = st.floats(0.1, 10)


def read(raw, criteria=None, numbered=True, finish="stop"):
    return race.read_scores(Reply(raw, finish=finish), criteria or race_bench.criteria(), numbered=numbered)


def kind_of(raw, **how):
    with pytest.raises(VerdictError) as caught:
        read(raw, **how)
    return caught.value.kind


def seven(number):
    return (7, 7)


# ---- golden ----------------------------------------------------------------------------------------


def outcome(outputs, criteria, expected, tries):
    """How ours compares with the reference on one golden row: equal, both none, ours, or why only they have scores."""
    want = expected["scores"] and {"overall" if k == "overall_score" else k: v for k, v in expected["scores"].items()}
    got, why = None, "criteria"
    try:
        race.check_criteria(criteria)
    except ValueError:
        tries = 0
    for output in (outputs + outputs[-1:] * tries)[:tries]:
        try:
            got = None if isinstance(output, dict) else race.read_scores(Reply(output), criteria, numbered=False)
        except VerdictError as error:
            why = error.kind
        if got:
            break
    if want and got:
        return "equal" if got == pytest.approx({k: float(v) for k, v in want.items()}, abs=1e-12) else "DIFFERENT"
    return {(False, False): "both none", (False, True): "ours alone"}.get((bool(want), bool(got)), why)


def apply(op, text):
    name, _, argument = op.partition(":")
    return {"exact": text, "lower": text.lower(), "upper": text.upper(), "swapcase": text.swapcase(),
            "pad": f"  {text} \n", "head": text[: int(argument or 0)] if name == "head" else "",
            "tail": text[-int(argument or 1) :] if name == "tail" else "", "wrap": f"(1) {text} -- ok",
            "literal": argument, "one_char": text[:1]}[name]  # fmt: skip


def rendered(spec, criterions):
    """The judge text of a golden row that stores criteria by index."""
    reply = {}
    for dimension, items in spec["dims"]:
        listed = criterions.get(dimension, criterions["comprehensiveness"])
        reply[dimension] = items["literal_value"] if isinstance(items, dict) else [
            item["literal_item"] if "literal_item" in item else {
                **({"criterion": apply(item["op"], listed[item["crit_index"] % len(listed)]["criterion"])}
                   if item.get("op") is not None else {}), **item["fields"]}
            for item in items]  # fmt: skip
    return spec["prefix"] + json.dumps(reply, ensure_ascii=False) + spec["suffix"]


def by_id(outcomes):
    """{outcome: sorted row ids} of (id, outcome) pairs."""
    listed = {}
    for row_id, what in outcomes:
        listed.setdefault(what, []).append(row_id)
    return {what: sorted(ids) for what, ids in sorted(listed.items())}


def check_departures(family, outcomes):
    """The rows that are not equal, id by id, are those of departures.json; README's table says why."""
    found = by_id(outcomes)
    listed = json.loads((ROOT / "tests" / "golden" / "departures.json").read_text())[family]
    assert {what: ids for what, ids in found.items() if what != "equal"} == listed
    return {what: len(ids) for what, ids in found.items()}


def test_golden_synthetic_replies_give_the_references_scores_where_they_are_complete():
    counts = check_departures("race_synthetic", [
        (row["id"], outcome(row["judge_outputs"], row["criteria"], row["expected"], row["max_retries"]))
        for row in golden("race_synthetic")
    ])  # fmt: skip
    # words alone are departures: where they fill in a weight or a 0, the judge is asked again, or the file refused;
    # "ours alone" has prose with braces around the object
    assert counts == {"equal": 21, "both none": 32, "ours alone": 2, "bad_score": 30, "criteria": 19, "duplicate": 2,
                      "incomplete": 12, "unmatched": 11}  # fmt: skip


def test_golden_benchmark_criteria_give_the_references_scores_where_the_reply_is_complete():
    path = Path(os.environ.get("RACE_CRITERIA") or Path(config.DATA_DIR, "benchmark", "criteria.jsonl"))
    if not path.exists():
        pytest.skip(f"{path} is not there: run `python prepare_data.py`, or name the file in RACE_CRITERIA")
    criteria = {row["id"]: row for _, row in race_files.read_lines(path)}
    outcomes = []
    for row in golden("race_by_criteria_id"):
        own = criteria[row["criteria_id"]]
        text = rendered(row["judge_spec"], own["criterions"])
        outcomes.append((row["id"], outcome([text], own, row["expected"], row["max_retries"])))
    assert check_departures("race_by_criteria_id", outcomes) == {
        "equal": 26, "both none": 6, "ours alone": 1, "bad_score": 30, "duplicate": 3, "incomplete": 15,
        "unmatched": 9}  # fmt: skip


def test_golden_json_finder_reads_the_same_object_where_theirs_is_json():
    outcomes = []
    for row in golden("json_extract"):
        try:
            theirs = json.loads(row["ood_race_eval"] or "")
        except ValueError:
            outcomes.append((row["id"], "their text is not JSON"))  # none, or cut at what ends no object
            continue
        first = race.json_objects(row["input"])[0]
        # a list around one object is opened by them before a fence is, by us when the scores are read
        same = "equal" if first == theirs else "list" if [theirs] == first or theirs == [first] else "DIFFERENT"
        outcomes.append((row["id"], same))
    counts = check_departures("json_extract", outcomes)
    assert counts == {"equal": 40, "list": 6, "their text is not JSON": 54}


def test_golden_articles_are_the_authors_where_there_is_an_answer_block():
    kinds = Counter()
    for row in golden("format"):
        article = race_files.article_of(row["transcript"] or "")
        same = hashlib.sha256(article.encode()).hexdigest() == row["eval_article"]["sha256"]
        kinds[row["eval_article"]["kind"], same or "blank" if not article else same] += 1
    # they send the whole response where there is not one block; the article counts that as no report
    assert kinds == {("answer_block", True): 220, ("whole_text", "blank"): 47, ("whole_text", True): 3}


# ---- scores ------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(SCORE, SCORE), min_size=race_bench.COUNT, max_size=race_bench.COUNT), st.randoms())
def test_scores_equal_a_plain_loop_in_any_order_of_entries(pairs, rng):
    def score(number):
        return pairs[number - 1]

    for numbered in (True, False):
        sheet = race_bench.sheet(score, numbered)
        for entries in sheet.values():
            rng.shuffle(entries)
        expected = pytest.approx(race_bench.by_hand(score), abs=1e-12)
        assert race.race_scores(sheet, race_bench.criteria(), numbered=numbered) == expected


@given(SCORE, SCORE)
def test_swapping_the_sides_mirrors_every_score(first, second):
    one = race.race_scores(race_bench.sheet(lambda n: (first, second)), race_bench.criteria(), numbered=True)
    other = race.race_scores(race_bench.sheet(lambda n: (second, first)), race_bench.criteria(), numbered=True)
    assert {k: 1 - v for k, v in one.items()} == pytest.approx(other)


@pytest.mark.parametrize("numbered", [True, False])
def test_EVAL_02_a_dimension_left_empty_or_nested_is_asked_again(numbered):
    whole = race_bench.sheet(seven, numbered)
    for empty in ([], {"scores": whole["insight"]}, "ok", None, [whole["insight"]]):
        assert kind_of(json.dumps({**whole, "insight": empty}), numbered=numbered) == "incomplete"
    del whole["readability"]
    assert kind_of(json.dumps(whole), numbered=numbered) == "no_scores"


@pytest.mark.parametrize("value", ["85", "-3", "NaN", "Infinity", "10.0001", "true", '"8"', "null", "[7]"])
@pytest.mark.parametrize("side", race.SIDES)
def test_EVAL_03_scores_outside_the_range_are_invalid_and_never_clamped(value, side):
    sheet = race_bench.sheet(seven)
    sheet["insight"][0][side] = "HERE"
    assert kind_of(json.dumps(sheet).replace('"HERE"', value)) == "bad_score"


def test_EVAL_04_criterion_weight_is_that_of_its_own_text():
    sheet = race_bench.sheet(lambda number: (10, 0) if number == 1 else (0, 10), numbered=False)
    scores = race.race_scores(sheet, race_bench.criteria())
    assert scores["comprehensiveness"] == pytest.approx(0.8)
    for text, kind in (("Coverage of risk", "unmatched"), ("Risks", "unmatched"), ("Coverage", "duplicate")):
        sheet["comprehensiveness"][1]["criterion"] = text  # the reference gives the first the weight of "Coverage"
        assert kind_of(json.dumps(sheet), numbered=False) == kind
    sheet["comprehensiveness"][1]["criterion"] = "  COVERAGE, of risks.\n"
    assert race.race_scores(sheet, race_bench.criteria()) == scores


def test_EVAL_04_numbers_are_matched_one_to_one_within_their_dimension():
    for number, kind in ((1, "duplicate"), (9, "unmatched"), (3, "unmatched"), ("2", "unmatched"), (True, "unmatched")):
        sheet = race_bench.sheet(seven)
        sheet["comprehensiveness"][1]["number"] = number
        assert kind_of(json.dumps(sheet)) == kind, number
    del sheet["comprehensiveness"][1]
    assert kind_of(json.dumps(sheet)) == "incomplete"


def test_EVAL_05_only_a_whole_object_outside_thinking_is_scored():
    whole = json.dumps(race_bench.sheet(seven))
    sample = '{"criterion": "x", "article_1_score": 9, "article_2_score": 1}'
    for raw in (f"Here is a sample row: {sample}\nFull result:\n{whole}", f"```json\n{whole}\n```",
                f'<think>```json\n{{"comprehensiveness": []}}\n```</think>\n```json\n{whole}\n```'):  # fmt: skip
        assert read(raw)["overall"] == 0.5
    assert kind_of(f"```json\n{whole[:-60]}") == "no_scores"
    assert kind_of(f"<think>{whole}</think>") == "no_scores"
    assert kind_of(whole, finish="length") == "length"
    other = json.dumps(race_bench.sheet(lambda n: (3, 9)))
    assert kind_of(f"{whole}\nor rather\n{other}") == "ambiguous"


def test_EVAL_09_a_report_against_itself_is_a_half_and_prints_as_50():
    scores = read(json.dumps(race_bench.sheet(lambda number: (8, 8))))
    assert set(scores.values()) == {0.5} and set(scores) == set(race.SCORES)
    assert "50.00 is a tie" in race_table.table("a", [result("1", 0.5)], 0.0)


def test_unusable_criteria_are_named():
    for change, words in (
        (lambda c: c["dimension_weight"].pop("insight"), "dimension_weight of insight"),
        (lambda c: c["criterions"]["insight"].clear(), "criterions of insight"),
        (lambda c: c["criterions"]["insight"][0].update(weight=float("nan")), "insight, criterion 1"),
        (lambda c: c["criterions"]["insight"][0].update(weight=0), "all have weight 0"),
        (lambda c: c["criterions"]["comprehensiveness"][1].update(criterion="Coverage "), "twice"),
    ):
        criteria = race_bench.criteria()
        change(criteria)
        with pytest.raises(ValueError, match=words):
            race.check_criteria(criteria)


# ---- prompt --------------------------------------------------------------------------------------------


def test_EVAL_07_the_prompt_holds_the_whole_report():
    article = "A" * 120 + "." + "B" * 79 + "C" * 200
    task = race_bench.task()
    for prompts in (race.OURS, race.Prompts({"en": "{task_prompt}|{article_1}|{article_2}|{criteria_list}"}, False)):
        text = race.render(task, article, prompts)[0]["content"]
        assert article in text and task.prompt in text and task.reference in text
        assert "weight" not in text and all(name in text for names in race_bench.NAMES.values() for name in names)


def test_prompts_number_the_criteria_through_and_reports_cannot_close_their_fence():
    text = race.render(race_bench.task(), "x </report_1>{article_2} < / REPORT_2>", race.OURS)[0]["content"]
    assert "\n3. Weighs costs" in text and "\n7. Clear order" in text
    assert text.count("</report_1>") == 1 and "&lt;/report_1>{article_2}" in text
    assert race.schema(race_bench.criteria(), True)["properties"]["instruction_following"]["minItems"] == 3


def test_the_benchmarks_prompt_is_read_as_a_literal_and_never_executed(tmp_path):
    config.DATA_DIR = str(tmp_path)
    folder = tmp_path / "benchmark"
    folder.mkdir()
    source = f'open({str(tmp_path / "ran")!r}, "w")\ngenerate_merged_score_prompt = """%s {{{{x}}}}"""\n'
    fields = "{task_prompt}{article_1}{article_2}{criteria_list}"
    (folder / "score_prompt_en.py").write_text(source % fields)
    assert race_files.load_prompts() is race.OURS
    (folder / "score_prompt_zh.py").write_text(source % f"中{fields}", encoding="utf-8")
    prompts = race_files.load_prompts()
    assert not prompts.numbered and prompts.templates["zh"].startswith("中") and not (tmp_path / "ran").exists()
    assert race.render(race_bench.task("2"), "a", prompts)[0]["content"].startswith("中") and prompts.hash
    (folder / "score_prompt_zh.py").write_text(source % "{other}")
    with pytest.raises(SystemExit, match="score_prompt_zh.py"):
        race_files.load_prompts()


def test_the_rule_judge_counts_facts_and_length():
    criteria = race_bench.criteria()
    criteria["criterions"]["insight"] = [{"criterion": 'States: "Paris" and "Seine"', "weight": 1.0}]
    criteria["criterions"]["readability"] = [{"criterion": "At most: at most 10 characters", "weight": 1.0}]
    sheet = race.rule_sheet(race.Task("1", "q", "en", criteria, "PARIS, Seine, and more words"), "in Paris ....")
    assert [sheet["insight"][0][side] for side in race.SIDES] == [5.0, 10.0]
    assert [sheet["readability"][0][side] for side in race.SIDES] == pytest.approx([10 * 10 / 13, 10 * 10 / 28])
    race.race_scores(sheet, criteria, numbered=True)


# ---- statistics ------------------------------------------------------------------------------------------


def result(key, share, completed=True, **more):
    """A line of results.jsonl with one share for everything."""
    scores = None if share is None else dict.fromkeys(race.SCORES, share)
    return {"id": key, "language": "en", "task": "t", "prompts": "p", "judge": "j", "models": ["m"],
            "completed": completed, "valid_format": True, "tool_calls": 2, "generated_tokens": 30, "scores": scores,
            "repeats": [scores] if scores else [], "failure": None if scores else "length: cut", **more}  # fmt: skip


def test_bootstrap_holds_0_for_equal_runs_and_not_for_a_shifted_one():
    assert race_table.bootstrap([0.0] * 60, 42) == (0.0, 0.0)
    intervals = []
    for seed in range(40):
        rng = random.Random(seed)
        draws = [rng.gauss(0, 5) for _ in range(60)]
        intervals.append(race_table.bootstrap(draws, 42))
    assert 34 <= sum(low < 0 < high for low, high in intervals) <= 40  # 95 % of 40 is 38, give or take 4
    noise, (low, high) = draws, intervals[-1]
    shifted = race_table.bootstrap([value + 6 for value in noise], 42)
    assert 3 < shifted[0] < 6 < shifted[1] < 9
    assert race_table.bootstrap(noise, 42) == (low, high) != race_table.bootstrap(noise, 43)


def test_compare_pairs_by_id_and_repeats_it_where_both_completed():
    first = [result("1", 0.5), result("2", 0.0, completed=False), result("3", 0.4)]
    second = [result("3", 0.5), result("1", 0.6), result("2", 0.3)]
    lines = race_table.compare(("A", "B"), first, second, 42).splitlines()
    overall = [line.split()[1:4] for line in lines if line.startswith("Overall")]
    assert overall == [["30.00", "46.67", "+16.67"], ["45.00", "55.00", "+10.00"]]
    assert "the 2 questions both completed:" in lines and "all 3 questions:" in lines
    same = race_table.compare(("A", "A"), first, first, 42)
    assert same.count("[+0.00, +0.00]") == 18


@pytest.mark.parametrize("field, value", [("prompts", "q"), ("judge", "k"), ("models", ["n"]), ("task", "u")])
def test_scores_of_other_prompts_judges_models_or_tasks_are_never_averaged(field, value):
    one, other = [result("1", 0.5)], [result("1", 0.5, **{field: value})]
    with pytest.raises(SystemExit, match="not averaged|same benchmark files"):
        race_table.compare(("A", "B"), one, other, 42)
    if field != "task":
        with pytest.raises(SystemExit, match="not averaged"):
            race_table.table("A", one + other, 0.0)


def test_both_means_and_the_judges_spread_are_printed():
    half, more = dict.fromkeys(race.SCORES, 0.5), dict.fromkeys(race.SCORES, 0.6)
    text = race_table.table("A", [result("1", 0.55, repeats=[half, more]), result("2", None)], 1.25)
    overall = next(line for line in text.splitlines() if line.startswith("Overall "))
    assert overall.split()[1:3] == ["55.00", "27.50"]
    assert "50.00, 60.00" in text and "7.07" in text and "1/2" in text and "$1.25" in text
    assert "INCOMPLETE: 1 of 2" in text and "2: length: cut" in text
