"""One file in, its texts out: .txt, .jsonl and .parquet, each also compressed as .gz or .zst."""

import gzip
import io
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from kvpath.data.cache import room_in
from kvpath.errors import UserError

FORMATS = (".txt", ".jsonl", ".parquet")
COMPRESSIONS = (".gz", ".zst")
_ROWS_AT_A_TIME = 1024


def file_format(path: Path) -> str | None:
    """The format that the name states, whether compressed or not; None if it is not one of ``FORMATS``."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in FORMATS else None


class Reading:
    """What becomes of documents that cannot be decoded, and how far a file has been read.

    Args:
        skip_bad: leave them out and count them, instead of refusing the first.
    """

    def __init__(self, skip_bad: bool = False) -> None:
        self.skipped = 0
        """Documents that were left out."""
        self._skip_bad = skip_bad
        self._place: Callable[[], float] = lambda: 0.0

    @contextmanager
    def of_document(self) -> Iterator[None]:
        """Around the decoding of one document.

        Raises:
            UserError: the one that is raised inside, unless bad documents are skipped.
        """
        try:
            yield
        except UserError:
            if not self._skip_bad:
                raise
            self.skipped += 1

    @property
    def fraction(self) -> float:
        """How much of the current file has been read, from 0 to 1."""
        return self._place()

    def begin(self, place: Callable[[], float]) -> None:
        """Another file: ``place`` tells how much of it has been read."""
        self._place = place


def read_texts(path: Path, text_field: str, reading: Reading | None = None) -> Iterator[str]:
    """The texts of one file: a .txt is one; of .jsonl and .parquet, ``text_field`` of each row is.

    Args:
        path: the file.
        text_field: of rows.
        reading: is told of documents that cannot be decoded, and of progress; by default the first such is refused.

    Raises:
        UserError: names the file, and the byte, line or row, of whatever is not as it should be.
    """
    reading = reading or Reading()
    read = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}[file_format(path) or ".txt"]
    found, skipped = False, reading.skipped
    for text in read(path, text_field, reading):
        found = True
        yield text
    if not found and reading.skipped == skipped:
        raise UserError(f"{path} is empty: it holds no text")


def check_text(row: dict[str, object], text_field: str, where: str) -> str:
    """``row[text_field]``, if it is there and is text.

    Raises:
        UserError: begins with ``where``.
    """
    if text_field not in row:
        raise UserError(f"{where}: no field {text_field!r} (text_field); the fields are {', '.join(sorted(row))}")
    text = row[text_field]
    if not isinstance(text, str):
        raise UserError(f"{where}: field {text_field!r} is {type(text).__name__}, not a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: half a surrogate pair at character {error.start}, not valid Unicode") from error
    return text


def _read_txt(path: Path, text_field: str, reading: Reading) -> Iterator[str]:
    with _open(path, reading) as file:
        content = file.read()
    if content:
        with reading.of_document():
            yield _decode(content, path, offset=0)


def _read_jsonl(path: Path, text_field: str, reading: Reading) -> Iterator[str]:
    offset = 0
    with _open(path, reading) as file:
        for number, line in enumerate(file, start=1):
            start, offset = offset, offset + len(line)
            if not line.strip():
                continue
            with reading.of_document():
                yield _text_of_line(line, text_field, path, number, start)


def _text_of_line(line: bytes, text_field: str, path: Path, number: int, offset: int) -> str:
    where = f"{path}:{number}"
    try:
        row = json.loads(_decode(line, path, offset))
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: a JSON object is wanted, this is {type(row).__name__}")
    return check_text(row, text_field, where)


def _read_parquet(path: Path, text_field: str, reading: Reading) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    with _open(path, reading) as file, _seekable(file, path) as table_file:
        try:
            table = pyarrow.parquet.ParquetFile(table_file)
        except pyarrow.ArrowInvalid as error:
            raise UserError(f"{path} is not a parquet file: {error}") from error
        fields = table.schema_arrow.names
        if text_field not in fields:
            raise UserError(f"{path}: no field {text_field!r} (text_field); the fields are {', '.join(sorted(fields))}")
        row_number, n_rows = 0, max(1, table.metadata.num_rows)
        reading.begin(lambda: row_number / n_rows)
        for batch in table.iter_batches(batch_size=_ROWS_AT_A_TIME, columns=[text_field]):
            for text in batch.column(0).to_pylist():
                row_number += 1
                with reading.of_document():
                    yield check_text({text_field: text}, text_field, f"{path}, row {row_number}")


@contextmanager
def _open(path: Path, reading: Reading) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as raw, _decompressed(raw, path) as file:
            size = os.fstat(raw.fileno()).st_size or 1
            reading.begin(lambda: 1.0 if raw.closed else raw.tell() / size)
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    except OSError as error:
        # pyarrow's complaint about a damaged stream is a bare OSError, without a number
        if error.errno is not None:
            raise
        raise UserError(f"{path} is damaged: {error}") from error


def _decompressed(raw: BinaryIO, path: Path) -> BinaryIO:
    if path.suffix.lower() == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if path.suffix.lower() == ".zst":
        import pyarrow

        return cast(BinaryIO, io.BufferedReader(pyarrow.input_stream(raw, compression="zstd")))
    return raw


@contextmanager
def _seekable(file: BinaryIO, path: Path) -> Iterator[BinaryIO]:
    """Parquet is read from its end: a compressed one is decompressed to a temporary file (in ``TMPDIR``) first."""
    if path.suffix.lower() not in COMPRESSIONS:
        yield file
        return
    with tempfile.TemporaryFile() as whole:
        with room_in(Path(tempfile.gettempdir())):
            shutil.copyfileobj(file, whole)
        whole.seek(0)
        yield cast(BinaryIO, whole)


def _decode(content: bytes, path: Path, offset: int) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        byte = content[error.start]
        raise UserError(f"{path} is not UTF-8: byte {offset + error.start} is 0x{byte:02x}") from error
