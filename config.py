"""Every constant a user may tweak, by room, each with its unit and source.

Rooms read `config.NAME` at call time, so an edit here (or an assignment made before `train.main()`,
which is what demo.py and the tests do) is all that is ever needed. "article" is the Tournament-GRPO
article; "authors" is their published code at the commit named in DATA_COMMIT; "ours" is our choice.
"""

# ---- run -----------------------------------------------------------------------------------------
RUNS_DIR = "runs"  # one folder per run below it
SEED = 0  # every random draw derives from it by counter
STEPS = 20  # article; training steps, counted 1..STEPS
QUESTIONS_PER_STEP = 8  # article
K = 8  # trajectories per question (the group); article
TRACKER = "swanlab"  # swanlab | none; metrics.jsonl is written either way
PROJECT = "tournament-grpo"  # the tracker's project name

# ---- data (prepare_data.py) ----------------------------------------------------------------------
DATA_DIR = "data"  # prepared Parquet, the authors' prompt, benchmark files
TRAIN_FILE = "data/train.parquet"
MAX_PROMPT_TOKENS = 4096  # tokens, system prompt included; longer questions are dropped; authors
SYSTEM_PROMPT_FILE = "data/prompt.txt"  # the authors' prompt when downloaded, else protocol.SYSTEM_PROMPT
DATA_REPOSITORY = "PuffYang/Tournament_GRPO"
DATA_COMMIT = "eea826cf66705cac9ec81823f746d0ccd6074228"

# ---- policy (policy.py) --------------------------------------------------------------------------
MODEL = "Qwen/Qwen3.5-4B"  # article; a hub name or a local folder
DTYPE = "bfloat16"  # of the frozen base: bfloat16 | float32; adapters and Adam are float32
LORA_RANK = 32  # article
LORA_ALPHA = 32  # ours; the article is silent
LOGPROB_CHUNK = 16_777_216  # logits held at once by the log-prob kernel (entries, 4 bytes each)
MICRO_BATCH_TOKENS = 32_768  # padded tokens per forward pass; one longer trajectory goes alone
GRADIENT_CHECKPOINTING = True  # recompute activations in the backward pass: less memory, a third more arithmetic

# ---- update (train.py, credit.py) ----------------------------------------------------------------
LEARNING_RATE = 4e-5  # article (LoRA); constant
WEIGHT_DECAY = 0.01  # authors
GRADIENT_CLIP = 1.0  # global norm; authors
CLIP_LOW = 0.2  # ratio floor is 1 - CLIP_LOW; article
CLIP_HIGH = 0.2  # ratio ceiling is 1 + CLIP_HIGH; article
RATIO_LEVEL = "token"  # token | sequence: one ratio per trajectory (GSPO, whose paper clips at 3e-4 and 4e-4)
KL_COEF = 0.0  # weight of the KL penalty against the model without its adapter; 0 is off, as in the article
DUAL_CLIP = 3.0  # loss ceiling for negative advantages, times -A; article
LOG_RATIO_CLAMP = 20.0  # nats; authors
ADVANTAGE_EPS = 1e-6  # added to the group's standard deviation; article section 4
UPDATES_PER_STEP = 1  # optimiser updates on one batch of rollouts; article
PERMUTE_ADVANTAGES = False  # control experiment: shuffle advantages within each group

# ---- sampling (sampler.py, rollout.py) -----------------------------------------------------------
SAMPLER = "vllm"  # vllm | in_process (the demo's)
TEMPERATURE = 1.0  # article; the trainer divides logits by the same
MAX_TURNS = 6  # assistant turns per trajectory; article
MAX_TOOL_CALLS = 4  # tool calls per trajectory; article
RESPONSE_TOKENS = 18_000  # tokens, tool output included; article
TRAJECTORY_DEADLINE = 1800  # seconds, then the trajectory is an infrastructure failure; ours
MAX_BROKEN_SHARE = 0.25  # of a step's trajectories lost to infrastructure before the run stops; ours
SLOTS = 32  # in_process: sequences decoded side by side; the batch shape is fixed
SLOT_TOKENS = 2048  # in_process: context of one slot (prompt and response)

# ---- server (server.py, vllm_sampler.py, adapters.py) --------------------------------------------
SERVER_PORT = 8100  # of 127.0.0.1; 0 takes any free one
SERVER_MEMORY_FRACTION = 0.4  # of the GPU's memory, the server's from the start; the trainer gets the rest; ours
SERVER_CONTEXT = 49_152  # tokens, prompt included: a judge's prompt with two full answers; ours
SERVER_SEQUENCES = 128  # sequences decoded side by side; each holds about 50 MB of recurrent state of a 4B model; ours
SERVER_START_TIMEOUT = 1800  # seconds until the server must answer, a first download included; ours
SERVER_EXTRA_ARGS = ()  # further vLLM options, e.g. ("--enforce-eager",); they win over those of server.py
# nats per token, mean |server - trainer|, by DTYPE; measured 0.03 and 3e-6, an ignored probe adapter 1 and more; ours
ADAPTER_TOLERANCE = {"bfloat16": 0.15, "float32": 0.001}

# ---- tools (tools.py) ----------------------------------------------------------------------------
SEARCH_BACKEND = "auto"  # deepseek | serper | wikipedia | local; auto: the first whose key is set, else wikipedia
BROWSE_BACKEND = "auto"  # jina | direct | local; auto: jina when its key is set, else direct
CORPUS_FILE = "data/corpus.jsonl"  # local: one {"url", "title", "text"} per line
SEARCH_RESULTS = 3  # results per search; article
QUERY_CHARACTERS = 128  # a longer query is cut at a word boundary; article
TOOL_OUTPUT_CHARACTERS = 3000  # content per tool output, cut in the middle; authors
TOOL_TIMEOUT = 60  # seconds per tool call; ours
TOOL_CONCURRENCY = 16  # calls in flight per tool; ours
DEEPSEEK_URL = "https://api.deepseek.com"  # search: DEEPSEEK_API_KEY
SERPER_URL = "https://google.serper.dev"  # search: SERPER_API_KEY
WIKIPEDIA_URL = "https://en.wikipedia.org"  # search without a key
WIKIPEDIA_RPM = 190  # requests a minute, one at a time
JINA_URLS = ("https://r.jina.ai", "https://r.jinaai.cn")  # reader: the second is tried when the first is out of reach
JINA_RPM = 500  # requests a minute with JINA_API_KEY
JINA_KEYLESS_RPM = 20  # and without
JINA_TOKENS = 8000  # a longer page is cut there by the reader, which bills by the token; ours
CONTACT = ""  # an address or page of yours, sent in the User-Agent; Wikipedia may refuse requests without one
FETCH_PORTS = (80, 443)  # ports a page may be fetched from
FETCH_REDIRECTS = 5  # followed per page, each checked
FETCH_ALLOW_LOOPBACK = False  # True lets the policy fetch from this machine: for tests only

# ---- wire (wire.py, ledger.py) -------------------------------------------------------------------
WIRE_TRIES = 4  # attempts of one request that fails for a passing reason; ours
WIRE_BYTES = 4_000_000  # of one reply or page, decompressed; a larger one is an error
RETRY_PAUSE = 1.0  # seconds before the second attempt, doubled before each further one, +- half at random
RETRY_AFTER_CAP = 60  # seconds; a server that asks for a longer wait is asked again after these
GPU_HOUR_PRICE = 2.0  # US dollars; set what you pay
PRICES = {  # "purpose host": US dollars per call that succeeds, per million input tokens, per million output tokens
    "search api.deepseek.com": (0.00075, 0, 0),
    "search google.serper.dev": (0.001, 0, 0),  # the smallest package
    "reader r.jina.ai": (0, 0, 0.05),  # check yours: it depends on the package
    "reader r.jinaai.cn": (0, 0, 0.05),
    "judge api.typesafe.ai": (0, 0.042, 0),
}

# ---- judge (judge.py) ----------------------------------------------------------------------------
JUDGE_BACKEND = "openai"  # openai: any OpenAI-compatible server | jev | rule: deterministic, offline
JUDGE_TRIES = 3  # attempts before the step stops; authors
JUDGE_PAUSE = 1.5  # seconds before attempt n+1, times n; authors
JUDGE_TIMEOUT = 300  # seconds per attempt; ours
JUDGE_CONCURRENCY = 128  # calls in flight; ours
JUDGE_ANSWER_CHARACTERS = 120_000  # per answer, the rest is cut off; authors
JUDGE_URL = ""  # openai: the endpoint up to /v1; "" is the policy's own server. Key: JUDGE_API_KEY or OPENAI_API_KEY
JUDGE_MODEL = ""  # openai: "" is MODEL without any adapter
JUDGE_THINKING_OFF = True  # openai: say so in chat_template_kwargs; False for servers other than vLLM and SGLang
JUDGE_MAX_TOKENS = 1024  # openai: tokens of one reply; authors
JUDGE_TOP_P = 0.95  # openai: at temperature 0; authors
JEV_MODEL = "jev-1.14.0"  # jev: pinned, since jev-latest moves. Key: TYPESAFE_API_KEY
JEV_CONCURRENCY = 8  # jev: calls in flight
JEV_RPM = 1200  # jev: requests a minute
JEV_TOKENS = 65_536  # jev: of the state and all questions
JEV_QUESTION_TOKENS = 32_768  # jev: of the state and the longest question

# ---- reward (reward.py, schemes.py, arena.py) ----------------------------------------------------
# tournament: the article's. ArenaRL's: round_robin | anchor | single_elimination | double_elimination | swiss.
# The article's baselines: pairwise | explicit | implicit | gdpo | format_only. With reference answers: exact_match
REWARD_SCHEME = "tournament"
FORMAT_WEIGHT = 1.0  # of the 0/1 format reward in the sum; article. ArenaRL alone would be 0
ORDER = "both"  # round_robin: fixed | balanced (each player is shown first as often as second) | both
ARENA_JUDGE = "process"  # process: ArenaRL's judge of path and answer | outcome: it sees the answers alone
JUDGE_PATH_CHARACTERS = 60_000  # process: of one path, its longest turns cut in the middle; the answer is whole
IMPORTANCE_WEIGHTS = {"critical": 4, "important": 2, "nice_to_have": 1}  # explicit, gdpo: of a rubric item; ours
MATCH_SIZE = 2  # players per match; article
WINNERS_PER_MATCH = 1  # article
FINALISTS = 1  # a bracket ends when so many are left; article
REPEATS = 4  # brackets per group (M); article
TIE_REWARD = 0.5  # tournament reward when all wins are equal; authors

# ---- turn-level credit (credit.py, turn_reward.py, critic.py) ------------------------------------
# "turn article" is arXiv 2505.11821, on turn-level rewards: MT-GRPO and MT-PPO.
# outcome: one advantage per trajectory, the article's | merged: turn rewards and outcome summed into one
# mt_grpo: one advantage per turn, across the group | mt_ppo: one per token, from a critic
CREDIT = "outcome"
TURN_ALPHA = 1.0  # mt_grpo: weight of a turn's advantage in that of the turn before; its authors' code
TURN_COUNT_BASELINE = "survivors"  # mt_grpo: survivors | corrected: a missing turn counts as reward 0; ours
ROLLOUT_TREE = False  # mt_grpo's exact form: K actions at every state but the final one, turns compared among siblings
TREE_LEAVES = 64  # trajectories of one question's tree at most, K ** (turns - 1); ours
TURN_REWARD = "verifiable"  # verifiable: from reference answers | judge: marks for format, reasoning and search
TURN_JUDGED = 0.4  # judge: what a turn with full marks is worth, TURN_FOUND + TURN_VALID; ours
OUTCOME_RIGHT = 1.0  # a reference answer in valid format; turn article
OUTCOME_VALID = 0.2  # valid format alone; turn article
OUTCOME_BROKEN = -1.0  # broken format; turn article
TURN_FOUND = 0.3  # a turn whose tool output holds a reference answer; turn article
TURN_VALID = 0.1  # a turn in valid format; turn article
TURN_BROKEN = -0.2  # a turn in broken format; turn article
SEARCH_PENALTY = 0.1  # times n, taken off for the n-th search of a trajectory; turn article
GAMMA = 1.0  # mt_ppo: discount per sampled token; verl's default
LAMBDA = 1.0  # mt_ppo: GAE's decay per sampled token; verl's default
CRITIC_LEARNING_RATE = 1e-5  # mt_ppo; verl's default
CRITIC_CLIP = 0.5  # mt_ppo: how far a value may move from the old one in one step; verl's default
CRITIC_WARMUP_STEPS = 0  # mt_ppo: first steps, which train the critic alone; verl's default

# ---- checkpoints (checkpoint.py) -----------------------------------------------------------------
CHECKPOINTS_KEPT = 2  # the newest so many stay
CHECKPOINT_FOREVER_EVERY = 5  # every so-many-th step stays for good

# ---- evaluation (eval_race.py) -------------------------------------------------------------------
EVAL_DIR = "eval"  # one folder per evaluation below it
EVAL_SEED = 42  # of generation and of the bootstrap; article
EVAL_SEARCH_RESULTS = 3  # results per search; article
EVAL_TOOL_CALLS = 4  # tool calls per question, or the run's MAX_TOOL_CALLS where that is less (the demo's 3); article
EVAL_JUDGE_URL = ""  # an OpenAI-compatible endpoint up to /v1; "" is the run's judge. Keys as for JUDGE_URL
EVAL_JUDGE_MODEL = ""  # the judge's model there; "" is the run's
EVAL_MAX_TOKENS = 8192  # tokens of one reply: some 25 criteria with a remark each; ours
EVAL_TRIES = 3  # attempts before a question counts as failed
EVAL_PROMPT_CHARACTERS = 400_000  # of the judge's prompt, both reports in it, uncut; a longer one fails; ours
