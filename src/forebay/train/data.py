"""Tokens, and the order in which sequences of them are trained on.

The tokens lie in an unnamed memory-mapped file: their pages can be dropped by the system, so a large text
does not compete for the memory that offloading needs. Position is one number, the sequences consumed so far;
everything else about the order follows from the seed, so resuming is exact.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import numpy.typing as npt

from forebay.train.text import Piece, find_files, read_pieces, standard_library_files

BYTE_VOCAB_SIZE = 256
_BYTE_SEPARATOR = 0  # no text contains it
_TOKENIZER_BATCH = 64  # pieces; keeps the tokenizer's threads busy


class Encoder(Protocol):
    """Turns text into token ids."""

    vocab_size: int
    separator: int | None
    name: str

    def encode(self, pieces: list[bytes]) -> list[npt.NDArray[Any]]:
        """Return the token ids of each piece."""
        ...


class ByteEncoder:
    """A token is a byte; documents are separated by byte 0."""

    vocab_size = BYTE_VOCAB_SIZE
    separator: int | None = _BYTE_SEPARATOR
    name = "bytes"

    def encode(self, pieces: list[bytes]) -> list[npt.NDArray[Any]]:
        """Return the token ids of each piece."""
        return [np.frombuffer(piece, np.uint8) for piece in pieces]


class TokenizerEncoder:
    """A tokenizer saved in a local folder; documents are separated by its end-of-sequence token, if any.

    Raises:
        FileNotFoundError: when the folder does not exist.
        ValueError: when transformers finds no tokenizer in it.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise FileNotFoundError(f"dataset.tokenizer={folder}: no such folder (a local folder is needed)")
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ValueError("a tokenizer needs transformers; pip install 'forebay[train]'") from error
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"dataset.tokenizer={folder}: no tokenizer can be loaded ({error})") from error
        self.vocab_size = len(self._tokenizer)
        self.separator: int | None = self._tokenizer.eos_token_id
        self.name = f"tokenizer {folder.name}"

    def encode(self, pieces: list[bytes]) -> list[npt.NDArray[Any]]:
        """Return the token ids of each piece, without special tokens."""
        texts = [piece.decode() for piece in pieces]
        ids = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [np.asarray(row, np.int64) for row in ids]


@dataclass(frozen=True)
class Corpus:
    """A tokenized text.

    Attributes:
        tokens: the ids, a flat array of ``uint8``, ``uint16`` or ``uint32``.
        description: what it is, for the banner.
        fingerprint: equal for equal tokens.
    """

    tokens: npt.NDArray[Any]
    description: str
    fingerprint: str


def load_corpus(path: str | None, *, vocab_size: int, tokenizer: str | None = None, text_key: str = "text") -> Corpus:
    """Read and tokenize a text.

    Args:
        path: a .txt, .jsonl or .parquet file, or a folder of these. Default (None): the source of Python's
            standard library.
        vocab_size: of the model; every token id must be smaller.
        tokenizer: a local folder with a tokenizer. Default None: bytes.
        text_key: the field or column that holds the text in .jsonl and .parquet.

    Raises:
        FileNotFoundError: for a path or tokenizer folder that does not exist.
        ValueError: for an empty text, one that cannot be read, or tokens the model does not have.
    """
    files = standard_library_files() if path is None else find_files(Path(path).expanduser())
    encoder: Encoder = ByteEncoder() if tokenizer is None else TokenizerEncoder(Path(tokenizer).expanduser())
    if encoder.vocab_size > vocab_size:
        raise ValueError(
            f"{encoder.name}: has {encoder.vocab_size} tokens, but model.vocab_size={vocab_size}; "
            f"set model.vocab_size={encoder.vocab_size} or more"
        )
    dtype = np.min_scalar_type(vocab_size - 1)
    digest = hashlib.blake2b(digest_size=16)
    num_tokens = 0
    with tempfile.TemporaryFile(prefix="forebay-tokens-") as store:
        for chunk in _encode_files(files, encoder, text_key):
            largest = int(chunk.max(initial=0))
            if largest >= vocab_size:
                raise ValueError(
                    f"{encoder.name}: token id {largest} in the text, but model.vocab_size={vocab_size}; "
                    f"set model.vocab_size={largest + 1} or more"
                )
            data = chunk.astype(dtype).tobytes()
            digest.update(data)
            store.write(data)
            num_tokens += len(chunk)
        if num_tokens == 0:
            raise ValueError(f"dataset.path={path}: the dataset is empty")
        tokens = _map(store, dtype, num_tokens)
    if path is None:
        source = f"Python standard library source ({len(files)} files)"
    else:
        source = f"{path} ({len(files)} file{'s' if len(files) > 1 else ''})"
    return Corpus(tokens, f"{source}, {encoder.name}, {num_tokens / 1e6:.2f}M tokens", digest.hexdigest())


def _map(store: IO[bytes], dtype: np.dtype[Any], num_tokens: int) -> npt.NDArray[Any]:
    store.flush()
    # The mapping keeps the file's pages after its last descriptor is closed.
    return np.memmap(store, dtype=dtype, mode="r", shape=(num_tokens,))


def _encode_files(files: list[Path], encoder: Encoder, text_key: str) -> Iterator[npt.NDArray[Any]]:
    separator = np.array([] if encoder.separator is None else [encoder.separator], np.int64)

    def flush(batch: list[Piece], file: Path) -> Iterator[npt.NDArray[Any]]:
        try:
            encoded = encoder.encode([piece for piece, _ in batch])
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: not UTF-8 text ({error}); a tokenizer needs UTF-8") from None
        for ids, (_, is_end) in zip(encoded, batch, strict=True):
            yield ids
            if is_end:
                yield separator

    for file in files:
        batch: list[Piece] = []
        for piece in read_pieces(file, text_key):
            if not piece[0]:
                continue
            batch.append(piece)
            if len(batch) == _TOKENIZER_BATCH:
                yield from flush(batch, file)
                batch = []
        if batch:
            yield from flush(batch, file)


def unigram_entropy(tokens: npt.NDArray[Any]) -> float:
    """Return the entropy of single tokens, in nats: the loss of the best model that ignores context."""
    counts: npt.NDArray[Any] = np.zeros(0, np.int64)
    for start in range(0, len(tokens), 1 << 22):
        part: npt.NDArray[Any] = np.bincount(tokens[start : start + (1 << 22)], minlength=len(counts))
        part[: len(counts)] += counts
        counts = part
    share = counts[counts > 0] / len(tokens)
    return float(-(share * np.log(share)).sum())


def split_corpus(
    tokens: npt.NDArray[Any], *, seq_length: int, eval_fraction: float
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Split off the tail of the text for evaluation.

    Args:
        tokens: the whole text.
        seq_length: tokens the model sees at once; each part must hold one sequence and its last target.
        eval_fraction: share of the text in the tail, 0 for none.

    Raises:
        ValueError: when a part is shorter than one sequence.
    """
    num_eval = int(len(tokens) * eval_fraction)
    parts = {"training": tokens[: len(tokens) - num_eval]}
    if eval_fraction > 0:
        parts["evaluation"] = tokens[len(tokens) - num_eval :]
    for name, part in parts.items():
        if len(part) < seq_length + 1:
            raise ValueError(
                f"the {name} text has {len(part)} tokens, shorter than one sequence: dataset.seq_length="
                f"{seq_length} needs {seq_length + 1}; give more text or lower dataset.seq_length"
                + (" (or change dataset.eval_fraction)" if eval_fraction > 0 else "")
            )
    return parts["training"], parts.get("evaluation", tokens[:0])


class Sequences:
    """Sequences of ``seq_length + 1`` tokens in a seeded order that covers the text once an epoch.

    Sequence ``k`` of the text holds tokens ``k * seq_length`` to ``(k + 1) * seq_length`` inclusive, so every
    token but the first is a target exactly once an epoch; a shorter rest at the end is left out.

    Args:
        tokens: at least ``seq_length + 1`` ids.
        seq_length: tokens the model sees at once.
        seed: of the order. Default None: the order of the text, for evaluation.
    """

    def __init__(self, tokens: npt.NDArray[Any], seq_length: int, seed: int | None = None) -> None:
        self.num_blocks = (len(tokens) - 1) // seq_length
        assert self.num_blocks > 0, (len(tokens), seq_length)
        self._tokens = tokens
        self._seq_length = seq_length
        self._seed = seed
        self._epoch = -1
        self._order: npt.NDArray[np.int64] = np.arange(self.num_blocks)

    def block(self, position: int) -> int:
        """Return which sequence of the text comes at ``position``, counted from the start of training."""
        epoch, offset = divmod(position, self.num_blocks)
        if self._seed is not None and epoch != self._epoch:
            self._order = _permutation(self.num_blocks, self._seed, epoch)
            self._epoch = epoch
        return int(self._order[offset])

    def batch(self, position: int, num_sequences: int) -> npt.NDArray[np.int64]:
        """Return the sequences from ``position`` on, ``(num_sequences, seq_length + 1)``."""
        rows = np.empty((num_sequences, self._seq_length + 1), np.int64)
        for row in range(num_sequences):
            start = self.block(position + row) * self._seq_length
            rows[row] = self._tokens[start : start + self._seq_length + 1]
        return rows


def _permutation(count: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return a permutation that depends on the arguments alone, not on the version of a library.

    Sorts by SplitMix64 (Steele, Lea, Flood 2014) of the index; numpy and torch do not promise that their
    generators stay the same, and a resumed run may meet a newer one.
    """
    with np.errstate(over="ignore"):
        key = _splitmix(np.array([seed], np.uint64)) ^ np.uint64(epoch)
        ranks = _splitmix(np.arange(count, dtype=np.uint64) + _splitmix(key))
    return np.argsort(ranks, kind="stable")


def _splitmix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
