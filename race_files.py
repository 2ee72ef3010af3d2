"""What is scored: the benchmark's files as Tasks, and reports, ours or made elsewhere; faults name file and line.

Lines are joined by id, compared as text, and checked by the question: equal but for blanks.
"""

import ast
import json
import re
from pathlib import Path

import config
from race import OURS, Prompts, Task, check_criteria
from records import read_journal
from reward import check_format

LANGUAGES = ("en", "zh")
PROMPT_CONSTANT = "generate_merged_score_prompt"  # in the benchmark's prompt files
PROMPT_FIELDS = ("task_prompt", "article_1", "article_2", "criteria_list")
BENCHMARK_FILES = {"queries": "query.jsonl", "criteria": "criteria.jsonl", "reference": "reference.jsonl"}


def benchmark_path(name):
    """Where prepare_data.py puts one of the benchmark's files."""
    return Path(config.DATA_DIR, "benchmark", name)


def read_lines(path, remedy=None):
    """[(line number, object)] of a JSONL file in UTF-8, blank lines skipped. SystemExit names a bad line."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        remedy = (
            remedy or "fetch it with `python prepare_data.py`, or name another with --queries, --criteria, --reference"
        )
        raise SystemExit(f"{path} cannot be read ({error.strerror}); {remedy}") from None
    except UnicodeDecodeError as error:
        raise SystemExit(f"{path} is not UTF-8 (byte {error.start}); convert it") from None
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise SystemExit(f"{path}:{number}: not JSON ({error}); mend the line") from None
        if not isinstance(row, dict):
            raise SystemExit(f"{path}:{number}: not a JSON object; mend the line")
        rows.append((number, row))
    return rows


def _key(row, path, number):
    key = row.get("id")
    if isinstance(key, bool) or not isinstance(key, int | str) or not str(key).strip():
        raise SystemExit(f"{path}:{number}: field id is {key!r}; it needs a number or a text")
    return str(key).strip()


def _text(row, field, path, number, blank=False):
    value = row.get(field)
    if not isinstance(value, str) or not (blank or value.strip()):
        raise SystemExit(f"{path}:{number}: field {field} is {value!r:.60}; it needs a text")
    return value


def _by_id(path):
    """{id: (line number, row)}. SystemExit when an id is missing or there twice."""
    rows = {}
    for number, row in read_lines(path):
        key = _key(row, path, number)
        if key in rows:
            raise SystemExit(f"{path}:{number}: id {key} stands in line {rows[key][0]} already; keep one of them")
        rows[key] = number, row
    return rows


def _same(one, other):
    return one.split() == other.split()


def load_tasks(queries, criteria, reference):
    """Every Task of the benchmark, in the order of its questions; SystemExit names file, line, field and remedy."""
    weights, references = _by_id(criteria), _by_id(reference)
    tasks = []
    for key, (number, row) in _by_id(queries).items():
        prompt = _text(row, "prompt", queries, number)
        if row.get("language") not in LANGUAGES:
            raise SystemExit(f"{queries}:{number}: field language is {row.get('language')!r}; it is en or zh")
        for path, rows in ((criteria, weights), (reference, references)):
            if key not in rows:
                raise SystemExit(f"{path} has no line for question {key}; use files that belong together")
            if not _same(_text(rows[key][1], "prompt", path, rows[key][0]), prompt):
                raise SystemExit(f"{path}:{rows[key][0]}: prompt is not that of question {key} in {queries}")
        try:
            check_criteria(weights[key][1])
        except ValueError as error:
            raise SystemExit(f"{criteria}:{weights[key][0]}: {error}") from None
        measured = {name: weights[key][1][name] for name in ("dimension_weight", "criterions")}
        line, written = references[key]
        tasks.append(Task(key, prompt, row["language"], measured, _text(written, "article", reference, line)))
    return tasks


def select(tasks, *, language=None, ids=None, limit=None):
    """The first `limit` tasks of one language and of given ids. SystemExit for an unknown id, or when none is left."""
    if ids and (unknown := set(ids) - {task.id for task in tasks}):
        raise SystemExit(f"--ids: no question has the id {', '.join(sorted(unknown))}")
    chosen = [t for t in tasks if (not language or t.language == language) and (not ids or t.id in ids)][:limit]
    if not chosen:
        raise SystemExit("no question is left; loosen --lang, --ids or --limit")
    return chosen


def load_articles(path, tasks):
    """{id: report} from lines with `article` and `id` or `prompt`. SystemExit for lines that fit no one question.

    A report has the fields of report_of that scoring reads; what only its maker knows is None.
    """
    by_id = {task.id: task for task in tasks}
    by_prompt = {" ".join(task.prompt.split()): task for task in tasks}
    articles = {}
    for number, row in read_lines(path, "check --articles"):
        article = _text(row, "article", path, number, blank=True)
        if "id" in row:
            task = by_id.get(_key(row, path, number))
        else:
            task = by_prompt.get(" ".join(_text(row, "prompt", path, number).split()))
        if task is None:
            raise SystemExit(f"{path}:{number}: no question of the benchmark has this id or prompt; remove the line")
        if "prompt" in row and not _same(_text(row, "prompt", path, number), task.prompt):
            raise SystemExit(f"{path}:{number}: its prompt is not that of question {task.id}; mend id or prompt")
        if task.id in articles:
            raise SystemExit(f"{path}:{number}: a second report on question {task.id}; keep one of them")
        articles[task.id] = {"article": article, "valid_format": None, "tool_calls": None, "generated_tokens": None}
    return articles


def read_template(source):
    """The prompt template in the text of a benchmark's Python file, read as a literal; the file is never executed.

    Raises ValueError when there is no such string; KeyError or IndexError when it has other fields than ours.
    """
    for node in ast.parse(source).body:
        named = isinstance(node, ast.Assign) and any(getattr(t, "id", "") == PROMPT_CONSTANT for t in node.targets)
        if named and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            node.value.value.format(**dict.fromkeys(PROMPT_FIELDS, ""))
            return node.value.value
    raise ValueError(f"no string constant {PROMPT_CONSTANT}")


def load_prompts():
    """The benchmark's own prompts when both languages are downloaded, else ours. SystemExit when one is damaged."""
    paths = {language: benchmark_path(f"score_prompt_{language}.py") for language in LANGUAGES}
    if not all(path.exists() for path in paths.values()):
        return OURS
    templates = {}
    for language, path in paths.items():
        try:
            templates[language] = read_template(path.read_text(encoding="utf-8"))
        except (ValueError, SyntaxError, KeyError, IndexError) as error:
            raise SystemExit(f"{path}: {error}; remove it and run `python prepare_data.py`") from None
    return Prompts(templates, numbered=False)


def article_of(transcript):
    """What is scored of a response: its one answer block, stripped; "" when there is none, or more than one.

    Source: the authors' evaluation (tests/golden/format.jsonl.gz), which then sends the whole response; here: blank.
    """
    blocks = re.findall(r"<answer>(.*?)</answer>", transcript, re.DOTALL)
    return blocks[0].strip() if len(blocks) == 1 else ""


def report_of(task, trajectory):
    """A finished trajectory as one line of reports.jsonl."""
    transcript = trajectory.transcript
    form = check_format(transcript)
    return {"id": task.id, "prompt": task.prompt, "article": article_of(transcript), "valid_format": bool(form.reward),
            "failures": list(form.failures), "tool_calls": sum(bool(turn.tool_status) for turn in trajectory.turns),
            "generated_tokens": sum(trajectory.loss_mask), "finish": trajectory.finish,
            "policy_version": trajectory.policy_version, "transcript": transcript}  # fmt: skip


def read_reports(folder):
    """{id: report} of the reports that are finished."""
    return {line["id"]: line for _, line in read_journal(folder / "reports.jsonl")}
