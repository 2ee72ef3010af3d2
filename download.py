"""The authors' files, fetched at one commit and checked by their git blob ids: questions, prompt, benchmark.

A file that is there and right is not fetched again; a broken transfer leaves a `.part` file and goes on from
its end, in this call as long as it gains bytes and otherwise in the next one.
"""

import hashlib
import os
from pathlib import Path

import httpx
from tqdm import tqdm

import config

DATA_BASE_URL = "https://raw.githubusercontent.com"
DATA_TIMEOUT = 60  # seconds without a byte before a transfer counts as broken

# Folder below OUT: {path in the authors' repository: git blob id at config.DATA_COMMIT}.
AUTHORS_FILES = {
    "raw": {
        "data/train_new_train_95.parquet": "4d01a7583db6e0755f86e6fb931a45bc82813afa",
        "data/train_new_val_05.parquet": "ef153a3b30bf7a58f5e6b99a30a256f332dae491",
    },
    ".": {"prompt.txt": "6a650909b84abdebd347bb7614aac06eabda677b"},
    "benchmark": {
        "deep_research_bench/data/prompt_data/query.jsonl": "e7a17889b141d77130b04e16efb3d219d5a10cc8",
        "deep_research_bench/data/criteria_data/criteria.jsonl": "ed27360a47b40e6908d3b9098c339978bd8c313b",
        "deep_research_bench/data/test_data/cleaned_data/reference.jsonl": "0aed13de1b400d3e3538935f477b6b85c16a6339",
        "deep_research_bench/prompt/score_prompt_en.py": "de186abf49eb2c0900478daac95b213ef305dfad",
        "deep_research_bench/prompt/score_prompt_zh.py": "50d434aaf6fef406dd61d0a32bdf4743d884b9ea",
    },
}


def git_blob_id(path):
    """The id git gives a file's content: sha1 of "blob", its length in bytes, a zero byte, and the content."""
    content = Path(path).read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def first_line(error):
    """The first line of an exception's message; its class when it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def stream(url, part):
    """Append to `part` what it still lacks of `url`; start it over when the server cannot go on from its end."""
    have = part.stat().st_size
    # A compressed reply would make the range count compressed bytes.
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with httpx.stream("GET", url, headers=headers, timeout=DATA_TIMEOUT, follow_redirects=True) as response:
        if response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE and have:
            part.write_bytes(b"")
            return stream(url, part)
        response.raise_for_status()
        if response.status_code != httpx.codes.PARTIAL_CONTENT:
            have = 0
        total = have + int(response.headers.get("Content-Length", 0)) or None  # None: unknown, the bar shows no end
        with (
            open(part, "ab" if have else "wb") as file,
            tqdm(desc=Path(url).name, total=total, initial=have, unit="B", unit_scale=True) as bar,
        ):
            for chunk in response.iter_raw():
                file.write(chunk)
                bar.update(len(chunk))


def fetch(path, target, blob_id):
    """Bring one of the authors' files to `target`, unless it is there.

    Raises SystemExit when the server does not give the file, or gives one whose git blob id is another.
    """
    if target.exists() and git_blob_id(target) == blob_id:
        return
    url = f"{DATA_BASE_URL}/{config.DATA_REPOSITORY}/{config.DATA_COMMIT}/{path}"
    part = target.with_name(target.name + ".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    part.touch()
    while git_blob_id(part) != blob_id:
        before = part.stat().st_size
        try:
            stream(url, part)
            break
        except httpx.HTTPError as error:
            if part.stat().st_size <= before:
                raise SystemExit(
                    f"cannot fetch {url} ({first_line(error)}): run again to resume, or put the file at {target} "
                    "yourself, or name files fetched elsewhere with `prepare_data.py --train FILE --val FILE`"
                ) from None
    found = git_blob_id(part)
    if found != blob_id:
        part.unlink()
        raise SystemExit(
            f"{url} has git blob id {found}, expected {blob_id}; what came is removed: run again, "
            f"or put the right file at {target} yourself"
        )
    os.replace(part, target)


def fetch_all(out):
    """Fetch every file of AUTHORS_FILES that is not there yet. Returns {path in the repository: local path}."""
    targets = {}
    for folder, files in AUTHORS_FILES.items():
        for path, blob_id in files.items():
            targets[path] = Path(out) / folder / Path(path).name
            fetch(path, targets[path], blob_id)
    return targets
