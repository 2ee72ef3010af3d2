"""What the calls of this process came to, per purpose and host, and what they cost."""

from dataclasses import dataclass, field

import config


@dataclass
class Row:
    """Calls of one purpose to one host. calls: begun; failures: of them, without a result; retries: extra attempts.

    seconds: of each attempt that succeeded, turns excluded.
    """

    calls: int = 0
    retries: int = 0
    failures: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    seconds: list[float] = field(default_factory=list)

    def count_tokens(self, input_tokens, output_tokens):
        self.input_tokens += input_tokens
        self.output_tokens += output_tokens


class Ledger:
    """Rows by (purpose, host)."""

    def __init__(self):
        self._rows = {}

    def row(self, purpose, host):
        """The Row to book on, made when it is new."""
        return self._rows.setdefault((purpose, host), Row())

    def clear(self):
        self._rows.clear()

    def summary(self):
        """One dict a row: purpose, host, counts, p50 and p99 (seconds, None without a success), cost (US dollars)."""
        return [
            {
                "purpose": purpose,
                "host": host,
                "calls": row.calls,
                "retries": row.retries,
                "failures": row.failures,
                "input_tokens": row.input_tokens,
                "output_tokens": row.output_tokens,
                "p50": _percentile(row.seconds, 50),
                "p99": _percentile(row.seconds, 99),
                "cost": _cost(purpose, host, row),
            }
            for (purpose, host), row in sorted(self._rows.items())
        ]


LEDGER = Ledger()  # this process's


def _percentile(values, percent):
    """The smallest value that `percent` of all do not exceed; None of none."""
    if not values:
        return None
    return sorted(values)[max(0, -(-len(values) * percent // 100) - 1)]


def _cost(purpose, host, row):
    """US dollars by config.PRICES; a host without a price is free (the local server: its GPU hours are counted)."""
    per_call, per_input, per_output = config.PRICES.get(f"{purpose} {host}", (0, 0, 0))
    return ((row.calls - row.failures) * per_call
            + (row.input_tokens * per_input + row.output_tokens * per_output) / 1_000_000)  # fmt: skip


def cost_rows(summary, gpu_hours):
    """The article's five cost rows as (what, amount, US dollars), from Ledger.summary() and the policy's GPU hours."""

    def booked(purpose):
        return [row for row in summary if row["purpose"] == purpose]

    def dollars(purpose):
        return sum(row["cost"] for row in booked(purpose))

    judged = sum(row["input_tokens"] + row["output_tokens"] for row in booked("judge"))
    rows = [
        ("policy GPU hours", gpu_hours, gpu_hours * config.GPU_HOUR_PRICE),
        ("judge tokens", judged, dollars("judge")),
        ("search calls", sum(row["calls"] for row in booked("search")), dollars("search")),
        ("reader calls", sum(row["calls"] for row in booked("reader")), dollars("reader")),
    ]
    return [*rows, ("total", None, sum(cost for _, _, cost in rows))]
