"""Whose turn it is: concurrency and rate of calls, and time limits that do not count the waiting."""

import asyncio
import time
from contextlib import ExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar

_clocks = ContextVar("clocks", default=())


@asynccontextmanager
async def time_limit(seconds):
    """asyncio.timeout whose clock stands still while a call waits for its turn at a Gate."""
    async with asyncio.timeout(seconds) as clock:
        token = _clocks.set((*_clocks.get(), clock))
        try:
            yield
        finally:
            _clocks.reset(token)


@contextmanager
def _stopped(clock):
    if (due := clock.when()) is None or clock.expired():
        yield
        return
    now = asyncio.get_running_loop().time
    left = due - now()
    clock.reschedule(None)
    try:
        yield
    finally:
        clock.reschedule(now() + left)


class Gate:
    """At most `concurrency` calls at once and `per_minute` starts a minute (0: any number); the rest stand in line."""

    def __init__(self, concurrency, per_minute=0):
        self._slots = asyncio.Semaphore(concurrency)
        self._spacing = 60 / per_minute if per_minute else 0.0  # seconds
        self._free_at = 0.0  # time.monotonic() of the next start

    def hold(self, seconds):
        """Let nobody start for so long: what one call is told by Retry-After binds all."""
        self._free_at = max(self._free_at, time.monotonic() + seconds)

    @asynccontextmanager
    async def turn(self):
        """Wait for a turn, with the clocks of all enclosing time limits stopped, and keep it inside the block."""
        with ExitStack() as waiting:
            for clock in _clocks.get():
                waiting.enter_context(_stopped(clock))
            await self._slots.acquire()
            try:
                start = max(time.monotonic(), self._free_at)
                self._free_at = start + self._spacing
                await asyncio.sleep(start - time.monotonic())
            except asyncio.CancelledError:
                self._slots.release()
                raise
        try:
            yield
        finally:
            self._slots.release()
