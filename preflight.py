"""What must hold before anything is started: constants that make sense, and a device to train on."""

import torch

import config
import judge
import schemes
import tools
from credit import tree_leaves
from rollout import tree_turns

CHOICES = {
    "TRACKER": ("swanlab", "none"),
    "DTYPE": ("bfloat16", "float32"),
    "SAMPLER": ("vllm", "in_process"),
    "SEARCH_BACKEND": ("auto", *tools.SEARCH_BACKENDS),
    "BROWSE_BACKEND": ("auto", *tools.BROWSE_BACKENDS),
    "JUDGE_BACKEND": tuple(judge.BACKENDS),
    "REWARD_SCHEME": schemes.SCHEMES,
    "ORDER": ("fixed", "balanced", "both"),
    "ARENA_JUDGE": ("process", "outcome"),
    "RATIO_LEVEL": ("token", "sequence"),
    "CREDIT": ("outcome", "merged", "mt_grpo", "mt_ppo"),
    "TURN_REWARD": ("verifiable", "judge"),
    "TURN_COUNT_BASELINE": ("survivors", "corrected"),
}
AT_LEAST = {
    "STEPS": 1, "QUESTIONS_PER_STEP": 1, "K": 2, "MAX_PROMPT_TOKENS": 1, "LORA_RANK": 1, "LORA_ALPHA": 1,
    "LOGPROB_CHUNK": 1, "MICRO_BATCH_TOKENS": 1, "UPDATES_PER_STEP": 1, "MAX_TURNS": 1, "MAX_TOOL_CALLS": 0,
    "RESPONSE_TOKENS": 1, "SLOTS": 1, "SLOT_TOKENS": 2, "SEARCH_RESULTS": 1, "QUERY_CHARACTERS": 1,
    "TOOL_OUTPUT_CHARACTERS": 1, "TOOL_CONCURRENCY": 1, "JUDGE_TRIES": 1, "JUDGE_CONCURRENCY": 1,
    "JUDGE_ANSWER_CHARACTERS": 1, "MATCH_SIZE": 2, "WINNERS_PER_MATCH": 1, "FINALISTS": 1, "REPEATS": 1,
    "CHECKPOINTS_KEPT": 1, "CHECKPOINT_FOREVER_EVERY": 1, "WIRE_TRIES": 1, "WIRE_BYTES": 1, "JUDGE_MAX_TOKENS": 1,
    "JEV_CONCURRENCY": 1, "JINA_TOKENS": 500, "FETCH_REDIRECTS": 0, "SERVER_CONTEXT": 1, "SERVER_SEQUENCES": 1,
    "JUDGE_PATH_CHARACTERS": 1, "CRITIC_WARMUP_STEPS": 0, "TREE_LEAVES": 1,
}  # fmt: skip
RUBRIC_TOKENS = 2048  # of a whole rubric and the judge's instructions
ABOVE_ZERO = ("LEARNING_RATE", "GRADIENT_CLIP", "TEMPERATURE", "ADVANTAGE_EPS", "LOG_RATIO_CLAMP",
              "TRAJECTORY_DEADLINE", "TOOL_TIMEOUT", "JUDGE_TIMEOUT", "RETRY_PAUSE", "RETRY_AFTER_CAP",
              "SERVER_MEMORY_FRACTION", "SERVER_START_TIMEOUT", "CRITIC_LEARNING_RATE", "CRITIC_CLIP")  # fmt: skip
ZERO_OR_MORE = ("KL_COEF", "FORMAT_WEIGHT", "CLIP_LOW", "CLIP_HIGH", "TURN_ALPHA", "SEARCH_PENALTY", "GAMMA", "LAMBDA")


def check():
    """Raise SystemExit, with one line a problem, when config.py or the machine cannot train."""
    if problems := config_problems():
        raise SystemExit("\n".join(problems))
    if config.SAMPLER != "in_process" and not torch.cuda.is_available():
        raise SystemExit(no_cuda())


def config_problems():
    """Every constant of config.py that makes no sense, one line each, naming it and what it may be."""
    problems = [f"config.{name} = {value!r} is not one of {', '.join(map(repr, CHOICES[name]))}"
                for name in CHOICES if (value := getattr(config, name)) not in CHOICES[name]]  # fmt: skip
    problems += [f"config.{name} = {value!r} must be a whole number of at least {least}"
                 for name, least in AT_LEAST.items()
                 if type(value := getattr(config, name)) is not int or value < least]  # fmt: skip
    problems += [f"config.{name} = {value!r} must be a number above 0"
                 for name in ABOVE_ZERO if not _number(value := getattr(config, name)) or value <= 0]  # fmt: skip
    problems += [f"config.{name} = {value!r} must be a number of at least 0"
                 for name in ZERO_OR_MORE if not _number(value := getattr(config, name)) or value < 0]  # fmt: skip
    weights = config.IMPORTANCE_WEIGHTS.values()
    if not all(map(_number, weights)) or min(weights, default=0) < 0 or not sum(weights):
        problems.append(f"config.IMPORTANCE_WEIGHTS = {config.IMPORTANCE_WEIGHTS!r} must hold weights of at least 0, "
                        "and one above")  # fmt: skip
    if config.PERMUTE_ADVANTAGES and config.CREDIT != "outcome":
        problems.append("config.PERMUTE_ADVANTAGES shuffles trajectories' advantages: it needs CREDIT = 'outcome'")
    if config.CREDIT != "outcome" and config.TURN_REWARD == "judge" and config.JUDGE_BACKEND == "jev":
        problems.append("config.TURN_REWARD = 'judge' needs a judge that writes: JUDGE_BACKEND = 'openai'")
    return problems or _tree_problems() or _context_problems()


def _tree_problems():
    if not config.ROLLOUT_TREE:
        return []
    problems = []
    if config.CREDIT != "mt_grpo":
        problems.append("config.ROLLOUT_TREE is MT-GRPO's exact form: set CREDIT = 'mt_grpo'")
    if config.REWARD_SCHEME in schemes.GREEDY_ANCHOR:
        problems.append(f"config.REWARD_SCHEME = {config.REWARD_SCHEME!r} leans on a greedy trajectory; a rollout tree "
                        "has none")  # fmt: skip
    if config.TURN_COUNT_BASELINE != "survivors":
        problems.append(
            "config.ROLLOUT_TREE compares siblings that have the turn: set TURN_COUNT_BASELINE = 'survivors'"
        )
    turns = tree_turns()
    if turns < 2 or (leaves := tree_leaves(config.K, turns)) > config.TREE_LEAVES:
        leaves = f"{config.K} ** {turns - 1} = {config.K ** max(0, turns - 1):,} leaves a question"
        problems.append(
            f"config.ROLLOUT_TREE: {leaves}; it needs 2 turns or more, and leaves up to TREE_LEAVES = "
            f"{config.TREE_LEAVES}. Lower K, MAX_TURNS or MAX_TOOL_CALLS, or raise TREE_LEAVES"
        )
    return problems


def _context_problems():
    """The server's context must hold a trajectory, and two full answers where its base model is the judge."""
    if config.SAMPLER == "in_process":
        return []
    need, what = config.MAX_PROMPT_TOKENS + config.RESPONSE_TOKENS, "a prompt and a response"
    if config.JUDGE_BACKEND == "openai" and not config.JUDGE_URL:
        need = config.MAX_PROMPT_TOKENS + 2 * config.RESPONSE_TOKENS + RUBRIC_TOKENS + config.JUDGE_MAX_TOKENS
        what = "a question, its rubric, two full answers and the judge's reply"
    if need <= config.SERVER_CONTEXT:
        return []
    return [f"config.SERVER_CONTEXT = {config.SERVER_CONTEXT} tokens is too small for {what}: raise it to {need} or "
            "more, or lower RESPONSE_TOKENS"]  # fmt: skip


def _number(value):
    return isinstance(value, int | float) and not isinstance(value, bool)


def no_cuda():
    """Why there is no device to train on: torch build and driver, and the remedy."""
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
    return (f"no usable CUDA device: torch {torch.__version__} is {build}, NVIDIA driver: {_driver() or 'none found'}. "
            "Install requirements.txt on a machine with an NVIDIA GPU; without one, `make demo` runs the whole loop on "
            "the CPU")  # fmt: skip


def _driver():
    try:
        with open("/proc/driver/nvidia/version") as file:
            return file.readline().strip()
    except OSError:
        return None
