"""Text from files: the default corpus, .txt, .jsonl and .parquet, in pieces that fit memory."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SUFFIXES = (".txt", ".jsonl", ".parquet")
_PIECE_BYTES = 1 << 20
# Left out of the default corpus: what pip installed, tests (more than half of the tree, much of it generated
# tables), and what is written when Python itself is built and so differs between machines.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")

Piece = tuple[bytes, bool]
"""Some UTF-8 text, and whether a document ends with it."""


def standard_library_files() -> list[Path]:
    """Return the ``.py`` files of the running Python's standard library, in the order of their path.

    Tests, installed packages and files that differ between builds of the same Python are left out: about 12
    MB remain with Python 3.11.

    Raises:
        FileNotFoundError: when this Python comes without the source of its library.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        if not _SKIPPED_FOLDERS.intersection(parts) and not any(p.startswith(_SKIPPED_PREFIXES) for p in parts):
            found.append(path)
    if not found:
        raise FileNotFoundError(
            f"the default text is the source of Python's standard library, but {root} holds no .py file; "
            "give a text with dataset.path=FILE"
        )
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def find_files(path: Path) -> list[Path]:
    """Return the text files that ``path`` stands for: itself, or those in it and below, sorted.

    Raises:
        FileNotFoundError: when there is no such file or folder.
        ValueError: for a suffix that is not known, or a folder without text.
    """
    if not path.exists():
        raise FileNotFoundError(f"dataset.path={path}: no such file or folder")
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise ValueError(
                f"dataset.path={path}: cannot read {path.suffix or 'a file without suffix'!r}; "
                f"give {', '.join(SUFFIXES)} or a folder of these"
            )
        return [path]
    found = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    if not found:
        raise ValueError(f"dataset.path={path}: no {', '.join(SUFFIXES)} file in this folder")
    return found


def read_pieces(file: Path, text_key: str) -> Iterator[Piece]:
    """Yield the text of ``file`` in order.

    Args:
        file: a ``.txt`` (one document), ``.jsonl`` (a document a line) or ``.parquet`` (a document a row)
            file; any other suffix is read as ``.txt``.
        text_key: the field or column that holds the text.

    Raises:
        ValueError: naming the file, and the line or row, for what is not text.
    """
    if file.suffix == ".jsonl":
        documents = _json_lines(file, text_key)
    elif file.suffix == ".parquet":
        documents = _parquet_rows(file, text_key)
    else:
        yield from _plain(file)
        return
    for document in documents:
        yield document, True


def _plain(file: Path) -> Iterator[Piece]:
    # Cut behind a line, where no UTF-8 character and hardly any token is split.
    with file.open("rb") as stream:
        piece = stream.read(_PIECE_BYTES) + stream.readline()
        while piece:
            following = stream.read(_PIECE_BYTES) + stream.readline()
            yield piece, not following
            piece = following


def _json_lines(file: Path, text_key: str) -> Iterator[bytes]:
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where}: not JSON ({error}); every line holds one object") from None
            if not isinstance(row, dict):
                raise ValueError(f"{where}: expected an object, got {type(row).__name__}")
            if text_key not in row:
                raise ValueError(
                    f"{where}: no key {text_key!r}; set dataset.text_key to one of {', '.join(sorted(row))}"
                )
            yield _encode(row[text_key], f"{where}, key {text_key!r}")


def _parquet_rows(file: Path, text_key: str) -> Iterator[bytes]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"{file}: reading parquet needs pyarrow; pip install 'forebay[train]'") from error
    try:
        table = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{file}: not a parquet file, or cut short ({error})") from None
    with table:
        columns = table.schema_arrow.names
        if text_key not in columns:
            raise ValueError(f"{file}: no column {text_key!r}; set dataset.text_key to one of {', '.join(columns)}")
        row = 0
        for batch in table.iter_batches(batch_size=1024, columns=[text_key]):
            for text in batch.column(0).to_pylist():
                yield _encode(text, f"{file}, row {row}, column {text_key!r}")
                row += 1


def _encode(text: object, where: str) -> bytes:
    if not isinstance(text, str):
        raise ValueError(f"{where}: expected text, got {type(text).__name__}")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: not valid Unicode ({error})") from None
