"""Which processes are alive, from /proc."""

import time
from pathlib import Path


def living(session=None, text=None):
    """{process id: command line} of the living processes of a session, or with `text` in their command line."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # the name in brackets may hold blanks; after it: state, parent, group, session
            state, _, _, belongs = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            command = (folder / "cmdline").read_text().replace("\0", " ").strip()
        except (FileNotFoundError, ProcessLookupError):  # gone meanwhile
            continue
        if state not in "ZX" and (int(belongs) == session or (text and text in command)):
            found[int(folder.name)] = command
    return found


def seconds_until_gone(limit, **whose):
    """Seconds until none of living(**whose) is left; AssertionError naming the rest after `limit` seconds."""
    start = time.monotonic()
    while left := living(**whose):
        assert time.monotonic() - start < limit, f"still alive after {limit} s: {left}"
        time.sleep(0.05)
    return time.monotonic() - start
