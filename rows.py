"""Parquet rows as plain Python, and the checks of one value that name its field.

Nothing is filled in for a value that is missing. Two coercions only: text goes through protocol.clean, and an
index that pandas turned into a float beside a gap (7.0) is the integer it was ("7").
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

import protocol
from download import first_line

READ_BATCH_ROWS = 256  # rows held as Arrow at once


class RowFault(ValueError):
    """One row cannot be used; args are the field at fault, a reason to count by, and what was found there."""


@dataclass(frozen=True)
class Layout:
    """One kind of source file.

    columns: dotted names, those that not every file has included. check: path -> None, or SystemExit when a
    column is missing. read: row -> Question, or RowFault. index, query: the fields to name in a duplicate.
    source: the data set's name where a row has no `data_source`.
    """

    columns: tuple[str, ...]
    check: Callable
    read: Callable
    index: str
    query: str
    source: str | None = None


def open_parquet(path):
    """An open ParquetFile. Raises SystemExit, in one line, when there is none."""
    if not Path(path).is_file():
        raise SystemExit(f"{path} is not a file; check the path")
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise SystemExit(f"{path} is not a readable Parquet file ({first_line(error)}); fetch it again") from None


def has_column(schema, column):
    """Whether a dotted column exists, lists passed through; what lies below another type is for the row checks."""
    kind = pa.struct(list(schema))
    for name in column.split("."):
        while pa.types.is_list(kind) or pa.types.is_large_list(kind):
            kind = kind.value_type
        if not pa.types.is_struct(kind):
            return True
        if kind.get_field_index(name) < 0:
            return False
        kind = kind.field(name).type
    return True


def check_columns(path, columns, remedy):
    """Raise SystemExit naming file, missing columns and remedy."""
    with open_parquet(path) as file:
        missing = [column for column in columns if not has_column(file.schema_arrow, column)]
    if missing:
        raise SystemExit(f"{path} has no column {', '.join(missing)}; {remedy}")


def read_rows(path, columns):
    """Yield each row as plain Python, nested values too; None for a row whose text is not UTF-8.

    By batch, because Arrow cannot convert nested columns that span chunks; by row within it, so that one
    broken text costs one row.
    """
    names = sorted({column.split(".")[0] for column in columns})
    with open_parquet(path) as file:
        try:
            for batch in file.iter_batches(READ_BATCH_ROWS, columns=names):
                for position in range(batch.num_rows):
                    try:
                        row = batch.slice(position, 1).to_pylist()[0]
                    except UnicodeDecodeError:
                        row = None
                    yield row
        except (pa.ArrowException, OSError) as error:
            raise SystemExit(f"{path} breaks off ({first_line(error)}); fetch it again") from None


def look_up(row, column):
    """The value at a dotted column of a nested row; None where a struct on the way is null."""
    value = row
    for name in column.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def checked_text(value, field, where="", may_be_blank=False):
    """`value`, cleaned. Raises RowFault when it is null, NaN, not text, or blank."""
    if value is None or value != value:  # NaN is what pandas puts where text is missing
        raise RowFault(field, "missing", f"{where}{value}")
    if not isinstance(value, str):
        raise RowFault(field, "not text", f"{where}{value!r:.80}")
    text = protocol.clean(value)
    if not text.strip() and not may_be_blank:
        raise RowFault(field, "blank", f"{where}{value!r:.80}")
    return text


def checked_index(value, field):
    """The index as text: "7", never "7.0". Raises RowFault when it is neither text nor a whole number."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return checked_text(value, field)
