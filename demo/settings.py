"""The part of the demo's configuration that shapes a policy's context: shared by demo.py and make_policy.py."""

import config

SETTINGS = {
    "MODEL": "demo/policy",
    "DTYPE": "float32",
    "SYSTEM_PROMPT_FILE": "demo/prompt.txt",
    "CORPUS_FILE": "data/demo/corpus.jsonl",
    "SEARCH_RESULTS": 3,
    "TOOL_OUTPUT_CHARACTERS": 400,  # content per tool output
    "MAX_TOOL_CALLS": 3,  # as many as a question has facts at most
    "MAX_TURNS": 4,
    "RESPONSE_TOKENS": 640,  # tokens, tool output included
    "SLOT_TOKENS": 768,  # prompt and response
}


def apply():
    """Assign them to config; rooms read config at call time."""
    for name, value in SETTINGS.items():
        setattr(config, name, value)
