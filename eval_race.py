"""Deep Research Bench: one greedy report per question, scored with RACE against the reference reports, and compared.

    python eval_race.py --run NAME [--checkpoint step-000020 | --base]    generate and score; the newest by default
    python eval_race.py --articles FILE.jsonl [--run NAME]                score reports made elsewhere
    python eval_race.py --compare A B                                     two evaluations, by their names in eval/

Everything lands in eval/NAME/: reports.jsonl, judge.jsonl (each line written at once: the same command goes on
where it was), results.jsonl, table.txt. The exit code is 0 only when every question has its scores.
"""

import argparse
import asyncio
import contextlib
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import checkpoint
import config
import race_files
import race_table
from ledger import LEDGER, cost_rows
from policy import Policy
from race import OURS
from race_judge import Scorer, is_rule, make_judge, needs_server
from records import Journal, JournalError, Question, read_journal, write_whole
from rollout import Rollout
from sampler import InProcessSampler
from server import ServerError
from tools import Tools
from vllm_sampler import VllmSampler, start_server
from wire import AccountError


@dataclass(frozen=True)
class System:
    """What is evaluated. checkpoint: its folder, None for the base model; articles: a file of reports, else None."""

    name: str
    run: Path | None = None
    checkpoint: Path | None = None
    articles: str | None = None

    @property
    def identity(self):
        """What eval/NAME is an evaluation of, for config.json."""
        if self.articles:
            return {"articles": True}
        made = self.checkpoint and json.loads((self.checkpoint / checkpoint.MANIFEST).read_text())["files"]
        return {"run": self.run.name, "checkpoint": self.checkpoint.name if self.checkpoint else "base",
                "adapter": made and made["adapter_model.safetensors"]["sha256"]}  # fmt: skip


def parse(argv):
    """The command line as a namespace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--run", metavar="NAME", help="the training run: its model, back ends and judge are used")
    add("--checkpoint", metavar="STEP", help="such as step-000020; default: the newest complete one")
    add("--base", action="store_true", help="the model as it was before training")
    add("--articles", metavar="FILE", help='score these instead: lines of {"id" or "prompt", "article"}')
    add("--compare", nargs=2, metavar=("A", "B"), help="print two scored evaluations side by side")
    add("--name", help="name of the folder below eval/; default: run and checkpoint, or the articles' file name")
    add("--only", choices=("generate", "score"), help="one of the two steps; default: both")
    for name, file in race_files.BENCHMARK_FILES.items():
        add(f"--{name}", metavar="FILE", help=f"default: {race_files.benchmark_path(file)}")
    add("--lang", choices=race_files.LANGUAGES, help="questions of one language only")
    add("--ids", type=lambda text: text.split(","), metavar="1,2", help="these questions only")
    add("--limit", type=int, metavar="N", help="the first N questions only")
    add("--repeats", type=int, default=1, metavar="N", help="judge every report N times and print the spread")
    arguments = parser.parse_args(argv)
    if not (arguments.compare or arguments.run or arguments.articles):
        parser.error("give --run, --articles or --compare")
    if sum(map(bool, (arguments.base, arguments.checkpoint, arguments.articles))) > 1:
        parser.error("--base, --checkpoint and --articles exclude each other")
    if arguments.repeats < 1 or (arguments.limit is not None and arguments.limit < 1):
        parser.error("--repeats and --limit start at 1")
    if arguments.name and not re.fullmatch(r"\w[\w.-]*", arguments.name):
        parser.error("--name is one word of letters, digits, dots and dashes")
    return arguments


def resolve(arguments):
    """The System the command line names, with its run's constants assigned. SystemExit when there is none."""
    run = Path(config.RUNS_DIR, arguments.run) if arguments.run else None
    if run:
        restore(run)
    if arguments.articles:
        return System(arguments.name or Path(arguments.articles).stem, articles=arguments.articles)
    if arguments.base:
        return System(arguments.name or f"{run.name}-base", run)
    step = arguments.checkpoint or f"step-{checkpoint.last_step(run):06d}"
    path = run / "checkpoints" / step
    if what := checkpoint.damage(path):
        found = ", ".join(sorted(p.name for p in path.parent.glob("step-*"))) or "none"
        raise SystemExit(f"{path}: {what}; checkpoints there: {found}. Name one with --checkpoint, or use --base")
    return System(arguments.name or f"{run.name}-{step}", run, path)


def restore(run):
    """Assign the run's constants to config, those that change no result aside, then the benchmark's settings."""
    try:
        then = json.loads((run / "config.json").read_text())["constants"]
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(f"{run}/config.json cannot be read ({error}); is --run the name of a run?") from None
    for name, value in then.items():
        if name in vars(config) and name not in checkpoint.FREE:
            setattr(config, name, tuple(value) if isinstance(value, list) else value)
    config.SEED, config.TEMPERATURE, config.SEARCH_RESULTS = config.EVAL_SEED, 0.0, config.EVAL_SEARCH_RESULTS
    config.MAX_TOOL_CALLS = min(config.MAX_TOOL_CALLS, config.EVAL_TOOL_CALLS)


def claim_folder(system):
    """eval/NAME with its config.json. SystemExit when the folder is an evaluation of something else."""
    folder = Path(config.EVAL_DIR, system.name)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    if path.exists():
        then = json.loads(path.read_text())["system"]
        changed = [] if system.articles else checkpoint.differences(folder)
        if then != system.identity or changed:
            why = "; ".join(changed) or f"it is of {then}, this is {system.identity}"
            raise SystemExit(f"{folder} holds another evaluation ({why}). Use --name OTHER_NAME")
    else:
        write_whole(path, json.dumps({"system": system.identity, "constants": checkpoint.constants()}, indent=1))
    return folder


def open_tools():
    """The run's tools; SystemExit without a corpus, or with a broken one."""
    try:
        return Tools()
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from None


async def generate(places, system, server, folder, tools):
    """Write the missing reports. places: {place in the benchmark: Task}.

    A question keeps its slot whatever else is generated, so that a resumed evaluation gives the same reports.
    A trajectory that infrastructure broke is not kept.
    """
    policy = Policy("cuda" if torch.cuda.is_available() else "cpu")
    if system.checkpoint:
        checkpoint.load_adapter(system.checkpoint, policy)
    version = int(system.checkpoint.name[-6:]) if system.checkpoint else 0
    sampler = VllmSampler(policy, server, folder) if server else InProcessSampler(policy)
    await sampler.publish(version)
    journal = Journal(folder / "reports.jsonl")
    rollout = Rollout(sampler, tools, policy.tokenizer)
    width = config.SERVER_SEQUENCES if server else config.SLOTS
    slots = [asyncio.Lock() for _ in range(width)]
    bar = tqdm(total=len(places), desc="reports", leave=False, disable=None)

    async def one(place, task):
        async with slots[place % width]:
            question = Question(task.id, task.prompt, ())
            trajectory = await rollout.run(question, 0, step=0, version=version, slot=place % width)
        if trajectory.broken:
            print(f"question {task.id}: no report ({trajectory.finish})")
        else:
            journal.append(race_files.report_of(task, trajectory))
        bar.update()

    done = await asyncio.gather(*(one(*item) for item in places.items()), return_exceptions=True)
    bar.close()
    journal.sync()
    journal.close()
    await tools.close()
    for error in filter(None, done):
        raise error


async def score(tasks, reports, scorer, repeats):
    """The results of all tasks, in their order."""
    bar = tqdm(total=len(tasks), desc="scores", leave=False, disable=None)

    async def one(task):
        result = await scorer.judge_report(task, reports.get(task.id), repeats)
        bar.update()
        return result

    results = await asyncio.gather(*map(one, tasks), return_exceptions=True)
    bar.close()
    await scorer.judge.close()
    scorer.journal.sync()
    scorer.journal.close()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def read_inputs(arguments, system):
    """(every Task of the benchmark, those asked for, reports made elsewhere by id or None); SystemExit for bad ones."""
    paths = [getattr(arguments, n) or race_files.benchmark_path(f) for n, f in race_files.BENCHMARK_FILES.items()]
    every = race_files.load_tasks(*paths)
    tasks = race_files.select(every, language=arguments.lang, ids=arguments.ids, limit=arguments.limit)
    return every, tasks, race_files.load_articles(system.articles, every) if system.articles else None


def evaluate(arguments, system, folder, every, tasks, articles):
    """Generate, score, write results.jsonl; returns the results, None when only reports were asked for."""
    languages = ", ".join(f"{sum(t.language == x for t in tasks)} {x}" for x in race_files.LANGUAGES)
    print(f"evaluation: {folder}, {len(tasks)} questions ({languages})")
    reports = race_files.read_reports(folder) if articles is None else articles
    chosen = {task.id for task in tasks} - reports.keys()
    places = {place: task for place, task in enumerate(every) if task.id in chosen}
    generates = bool(places) and not system.articles and arguments.only != "score"
    judges = arguments.only != "generate"
    serves = not system.articles and (generates or (judges and needs_server()))
    tools = open_tools() if generates else None
    with start_server(folder) if serves else contextlib.nullcontext() as server:
        if generates:
            asyncio.run(generate(places, system, server, folder, tools))
            reports = race_files.read_reports(folder)
        print(f"reports: {sum(task.id in reports for task in tasks)} of {len(tasks)}")
        if not judges:
            return None if all(task.id in reports for task in tasks) else []
        scorer = Scorer(folder, make_judge(server), OURS if is_rule() else race_files.load_prompts(),
                        server and server.revive)  # fmt: skip
        whose = "ours" if scorer.prompts is OURS else "the benchmark's"
        print(f"judge: {scorer.judge.name}, prompts: {whose}")
        results = asyncio.run(score(tasks, reports, scorer, arguments.repeats))
    write_whole(folder / "results.jsonl", "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in results))
    return results


def compare(names):
    """Print two evaluations side by side; returns the exit code."""
    both = []
    for name in names:
        path = Path(config.EVAL_DIR, name, "results.jsonl")
        if not path.exists():
            raise SystemExit(f"{path} does not exist; score that evaluation first")
        both.append([line for _, line in read_journal(path)])
    print(race_table.compare(names, *both, config.EVAL_SEED))
    return int(any(race_table.failed(results) for results in both))


def main(argv=None):
    """Run one command; returns the exit code."""
    arguments = parse(argv)
    if arguments.compare:
        return compare(arguments.compare)
    system = resolve(arguments)
    inputs = read_inputs(arguments, system)  # before the folder is made
    folder = claim_folder(system)
    started = time.monotonic()
    LEDGER.clear()
    try:
        with checkpoint.claimed(folder):
            results = evaluate(arguments, system, folder, *inputs)
            hours = (time.monotonic() - started) / 3600 if config.SAMPLER == "vllm" and not system.articles else 0.0
            costs = Journal(folder / "costs.jsonl")
            costs.append({"rows": cost_rows(LEDGER.summary(), hours)})
            costs.close()
    except (AccountError, ServerError, JournalError) as error:
        raise SystemExit(f"stopped: {error}. Run the same command to go on") from None
    except KeyboardInterrupt:
        raise SystemExit("interrupted: run the same command to go on") from None
    if not results:
        return 0 if results is None else 1
    dollars = sum(line["rows"][-1][2] for _, line in read_journal(folder / "costs.jsonl"))
    text = race_table.table(system.name, results, dollars)
    write_whole(folder / "table.txt", text + "\n")
    print(text)
    return int(bool(race_table.failed(results)))


if __name__ == "__main__":
    raise SystemExit(main())
