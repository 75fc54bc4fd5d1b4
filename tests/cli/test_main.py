import os
import subprocess
import sys

import pytest

import forebay
from forebay import recipes
from forebay.cli import train as train_verb
from forebay.cli.main import main
from forebay.config import resolve

DEMO = "tiny_llama_demo"


def _fail(error):
    def run(arguments):
        raise error

    return run


def test_version_and_help(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"forebay {forebay.__version__}\n"
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert all(verb in printed for verb in ("train", "config", "recipes", "FOREBAY_DEBUG"))


def test_recipes_are_listed(capsys):
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == recipes.list_recipes()
    assert lines[-1].endswith(recipes.load(DEMO)["description"])


def test_config_prints_what_can_be_loaded(capsys, tmp_path):
    words = ["train.train_iters=7", "model.hf_config.hidden_act=gelu"]
    assert main(["config", DEMO, *words]) == 0
    printed = capsys.readouterr().out
    assert "  train_iters: 7  " in printed
    assert "# command line" in printed
    file = tmp_path / "run.yaml"
    file.write_text(printed)
    assert resolve(file).config == resolve(DEMO, words).config


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["config", "tiny_lama_demo"], "error: unknown recipe 'tiny_lama_demo'; did you mean tiny_llama_demo"),
        (["config", DEMO, "train.iters=1"], "error: override 'train.iters=1': unknown key train.iters; did you mean"),
        (["config", DEMO, "--train.seed=1"], "overrides start with the key; write train.seed=1"),
        (["config", DEMO, "train.seed=1", "--x"], "override '--x': overrides start with the key"),
        (["config", "./gone.yaml"], "error: file ./gone.yaml: no such file"),
        (["train", DEMO, "train.train_iters=0"], "  1. train.train_iters=0 must be at least 1\n     fix: "),
    ],
)
def test_mistakes_are_answered_without_a_traceback(capsys, argv, message):
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("argv", [["recipes", "--x"], ["--x"], ["nope"], ["config"]])
def test_wrong_usage(capsys, argv):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage: forebay" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        (ValueError("a"), 2, "error: a\n"),
        (MemoryError("b"), 2, "error: b\n"),
        (MemoryError(), 2, "error: MemoryError\n"),
        (FileNotFoundError("c"), 2, "error: c\n"),
        (PermissionError(13, "Permission denied", "/x"), 2, "error: [Errno 13] Permission denied: '/x'\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_exit_codes(monkeypatch, capsys, error, code, printed):
    monkeypatch.delenv("FOREBAY_DEBUG", raising=False)
    monkeypatch.setattr(train_verb, "run", _fail(error))
    assert main(["train", DEMO]) == code
    assert capsys.readouterr().err == printed


def test_debugging_shows_where(monkeypatch):
    monkeypatch.setattr(train_verb, "run", _fail(ValueError("a")))
    monkeypatch.setenv("FOREBAY_DEBUG", "1")
    with pytest.raises(ValueError, match="a"):
        main(["train", DEMO])
    monkeypatch.setattr(train_verb, "run", _fail(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        main(["train", DEMO])


def test_train_trains_and_returns_its_code(monkeypatch, capsys):
    from forebay.train import trainer

    seen = []
    monkeypatch.setattr(trainer, "train", lambda resolved: seen.append(resolved) or 130)
    assert main(["train", DEMO, "train.train_iters=31"]) == 130
    assert seen[0].config.train.train_iters == 31
    monkeypatch.setattr(trainer, "train", _fail(trainer.NonFiniteLossError("loss nan at step 3")))
    assert main(["train", DEMO]) == 1
    assert capsys.readouterr().err == "error: loss nan at step 3\n"


def _python(*arguments, **options):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": ""}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False, **options
    )


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["config", DEMO],
        ["recipes"],
        ["train", DEMO, "train.train_iters=0"],
        ["check", DEMO],
        ["check", DEMO, "--engine", "megatron", "--json"],
        ["doctor", "--log", os.devnull],
        ["trace", DEMO, "train.train_iters=0"],
        ["verify", DEMO, "train.train_iters=0"],
        ["sweep", DEMO, "--fractions", "2"],
        ["memory", "gone"],
    ],
)
def test_these_import_no_torch(argv):
    # What is wrong with the command is answered without waiting for torch.
    code = (
        "import sys\nfrom forebay.cli.main import main\n"
        f"try:\n    main({argv!r})\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    result = _python("-c", code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "[]"


def test_as_a_module_and_into_a_closed_pipe():
    result = _python("-m", "forebay", "--version")
    assert (result.returncode, result.stdout) == (0, f"forebay {forebay.__version__}\n")
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    closed = subprocess.run(
        [sys.executable, "-m", "forebay", "config", DEMO],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        check=False,
    )
    os.close(writer)
    assert (closed.returncode, closed.stderr) == (141, "")
