import json
import math
import re

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from forebay.train.data import Sequences, load_corpus, split_corpus, unigram_entropy
from forebay.train.text import standard_library_files


def _load(path, **options):
    return load_corpus(str(path), **{"vocab_size": 256, **options})


@pytest.fixture
def word_tokenizer(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"<end>": 0, "a": 1, "b": 2, "?": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "words"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="?").save_pretrained(folder)
    return folder


def test_default_text_is_the_standard_library_in_a_fixed_order():
    files = standard_library_files()
    corpus = load_corpus(None, vocab_size=256)
    assert len(corpus.tokens) == sum(file.stat().st_size + 1 for file in files if file.stat().st_size)
    assert len(corpus.tokens) > 5_000_000
    assert not [file for file in files if {"test", "tests", "site-packages"} & set(file.parts)]
    first = files[0].read_bytes()
    assert bytes(corpus.tokens[: len(first)]) == first
    assert corpus.tokens[len(first)] == 0
    assert corpus.fingerprint == load_corpus(None, vocab_size=256).fingerprint
    assert 2.5 < unigram_entropy(corpus.tokens) < 4.0


def test_files_and_folders(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n\n{"text": "three"}\n')
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "notes.md").write_text("not read")
    below = tmp_path / "more"
    below.mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["four", "five"], "id": [1, 2]}), below / "c.parquet")
    assert bytes(_load(tmp_path).tokens) == b"one\n\0two\0three\0four\0five\0"
    assert bytes(_load(below / "c.parquet").tokens) == b"four\0five\0"


def test_text_key(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
    assert bytes(_load(tmp_path / "a.jsonl", text_key="body").tokens) == b"x\0"


def test_long_text_is_read_in_pieces_and_stays_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr("forebay.train.text._PIECE_BYTES", 10)
    text = "".join(f"line {number}\n" for number in range(500)) + "the end"
    (tmp_path / "a.txt").write_text(text)
    assert bytes(_load(tmp_path / "a.txt").tokens) == text.encode() + b"\0"


def test_tokenizer_folder(tmp_path, word_tokenizer):
    (tmp_path / "a.jsonl").write_text('{"text": "a b a"}\n{"text": "b"}\n')
    corpus = _load(tmp_path / "a.jsonl", tokenizer=str(word_tokenizer), vocab_size=4)
    assert corpus.tokens.tolist() == [1, 2, 1, 0, 2, 0]
    assert "tokenizer words" in corpus.description


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "x", "cannot read '.csv'; give .txt, .jsonl, .parquet or a folder of these"),
        ("a.txt", "", "the dataset is empty"),
        ("a.jsonl", '{"text": "x"}\n{"text": ', "a.jsonl, line 2: not JSON"),
        ("a.jsonl", '{"text": "x"}\n[1]\n', "a.jsonl, line 2: expected an object, got list"),
        ("a.jsonl", '{"body": "x"}\n', "line 1: no key 'text'; set dataset.text_key to one of body"),
        ("a.jsonl", '{"text": 3}\n', "line 1, key 'text': expected text, got int"),
        ("a.jsonl", '{"text": "\\ud800"}\n', "line 1, key 'text': not valid Unicode"),
        ("a.parquet", "not parquet", "a.parquet: not a parquet file, or cut short"),
    ],
)
def test_bad_text(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=re.escape(message)):
        _load(tmp_path / name)


def test_bad_paths(tmp_path, word_tokenizer):
    with pytest.raises(FileNotFoundError, match=r"dataset.path=.*nowhere.txt: no such file or folder"):
        _load(tmp_path / "nowhere.txt")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match=r"no \.txt, \.jsonl, \.parquet file in this folder"):
        _load(empty)
    pyarrow.parquet.write_table(pyarrow.table({"id": [1]}), tmp_path / "c.parquet")
    with pytest.raises(ValueError, match=r"no column 'text'; set dataset.text_key to one of id"):
        _load(tmp_path / "c.parquet")
    (tmp_path / "a.txt").write_text("a b")
    with pytest.raises(FileNotFoundError, match=r"dataset.tokenizer=.*gone: no such folder"):
        _load(tmp_path / "a.txt", tokenizer=str(tmp_path / "gone"))
    with pytest.raises(ValueError, match=r"dataset.tokenizer=.*empty: no tokenizer can be loaded"):
        _load(tmp_path / "a.txt", tokenizer=str(empty))
    with pytest.raises(ValueError, match=r"has 4 tokens, but model.vocab_size=3; set model.vocab_size=4 or more"):
        _load(tmp_path / "a.txt", tokenizer=str(word_tokenizer), vocab_size=3)
    (tmp_path / "bad.txt").write_bytes(b"a \xff b")
    with pytest.raises(ValueError, match=r"bad.txt: not UTF-8 text"):
        _load(tmp_path / "bad.txt", tokenizer=str(word_tokenizer))
    with pytest.raises(ValueError, match=r"bytes: has 256 tokens, but model.vocab_size=100"):
        _load(tmp_path / "a.txt", vocab_size=100)


def test_token_id_the_model_does_not_have(tmp_path, word_tokenizer, monkeypatch):
    # A tokenizer whose length understates its largest id, as added tokens can make it.
    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.__len__", lambda self: 2)
    (tmp_path / "a.txt").write_text("a b a")
    with pytest.raises(ValueError, match=r"token id 2 in the text, but model.vocab_size=2; set model.vocab_size=3"):
        _load(tmp_path / "a.txt", tokenizer=str(word_tokenizer), vocab_size=2)


def test_json_reports_the_line_as_an_editor_counts_it(tmp_path):
    lines = [json.dumps({"text": "x"})] * 2000 + ["{"]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match="line 2001"):
        _load(tmp_path / "a.jsonl")


def test_unigram_entropy_of_known_distributions():
    assert unigram_entropy(np.array([1, 2, 3, 4] * 5)) == pytest.approx(math.log(4))
    assert unigram_entropy(np.zeros(7, np.uint8)) == 0.0


def test_split_is_the_tail_and_refuses_short_texts():
    tokens = np.arange(100)
    train, evaluation = split_corpus(tokens, seq_length=9, eval_fraction=0.1)
    assert np.array_equal(np.concatenate([train, evaluation]), tokens)
    assert len(evaluation) == 10
    assert len(split_corpus(tokens, seq_length=99, eval_fraction=0.0)[1]) == 0
    with pytest.raises(
        ValueError, match=r"the training text has 100 tokens, shorter than one sequence: .*100 needs 101"
    ):
        split_corpus(tokens, seq_length=100, eval_fraction=0.0)
    with pytest.raises(ValueError, match=r"the evaluation text has 10 tokens, .*or change dataset.eval_fraction"):
        split_corpus(tokens, seq_length=10, eval_fraction=0.1)


def test_every_token_is_a_target_once_an_epoch():
    tokens = np.arange(10 * 7 + 1 + 3)  # a rest of three is left out
    sequences = Sequences(tokens, 7, seed=5)
    assert sequences.num_blocks == 10
    for epoch in range(3):
        rows = sequences.batch(epoch * 10, 10)
        assert sorted(rows[:, 1:].ravel().tolist()) == list(range(1, 71))
        assert (rows[:, 1:] - rows[:, :-1] == 1).all()


def test_order_is_a_function_of_seed_and_position_alone():
    tokens = np.arange(1001)
    straight = Sequences(tokens, 10, seed=3).batch(0, 250)
    jumping = Sequences(tokens, 10, seed=3)
    for position in (249, 0, 120, 99, 100):
        assert np.array_equal(jumping.batch(position, 1)[0], straight[position])
    epochs = straight[:100, 0], straight[100:200, 0]
    assert not np.array_equal(*epochs)
    assert not np.array_equal(straight, Sequences(tokens, 10, seed=4).batch(0, 250))
    # Written down: a resumed run must see this order with any version of numpy.
    assert [Sequences(tokens, 10, seed=3).block(k) for k in range(5)] == [41, 21, 97, 99, 25]
    assert [Sequences(tokens, 10).block(k) for k in range(3)] == [0, 1, 2]
