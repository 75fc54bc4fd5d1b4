import gc
import io
import json
import math
import os
import re
import signal

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from forebay.config import resolve
from forebay.engine import get_engine
from forebay.host.ledger import Tier
from forebay.train import checkpoint, trainer
from forebay.train.memory import DoesNotFitError
from forebay.train.model import language_model_loss
from forebay.train.trainer import NonFiniteLossError, Trainer, train

OFFLOADS = {
    "none": [],
    "streamed": [
        "optimizer.optimizer_cpu_offload=True",
        "optimizer.optimizer_offload_fraction=0.5",
        "optimizer.optimizer_offload_placement=streamed",
        "optimizer.overlap_cpu_optimizer_d2h_h2d=True",
    ],
    "host": [
        "optimizer.optimizer_cpu_offload=True",
        "optimizer.optimizer_offload_fraction=0.5",
        "optimizer.optimizer_offload_placement=host",
    ],
    "8-bit moments": [
        "optimizer.optimizer_cpu_offload=True",
        "optimizer.optimizer_offload_fraction=0.5",
        "optimizer.optimizer_offload_placement=streamed",
        "optimizer.optimizer_state_dtype=8bit",
    ],
    "torch classes": [
        "optimizer.optimizer_cpu_offload=True",
        "optimizer.optimizer_offload_fraction=0.5",
        "optimizer.use_torch_optimizer_for_cpu_offload=True",
    ],
}


def _run(resolved, *, expect=0):
    """Train to the end; return the records of metrics.jsonl and what was printed."""
    stream = io.StringIO()
    with Trainer(resolved.config, config_yaml="a: 1\n", stream=stream) as run:
        assert run.run() == expect
        folder = run._folder
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return records, stream.getvalue()


def _losses(records):
    return [(r["step"], r["loss"], r["grad_norm"], r["lr"]) for r in records if "loss" in r]


def _same(left, right):
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(_same, left, right))
    return left == right


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_resuming_gives_the_same_bits(resolved, tmp_path, offload, dtype):
    options = [*OFFLOADS[offload], f"model.params_dtype={dtype}"]
    straight, _ = _run(
        resolved(
            *options,
            f"checkpoint.save={tmp_path / 'a'}",
            "checkpoint.save_interval=3",
            f"logger.output_dir={tmp_path / 'ra'}",
        )
    )
    resumed, printed = _run(
        resolved(
            *options,
            f"checkpoint.load={tmp_path / 'a' / 'step-00000003'}",
            f"checkpoint.save={tmp_path / 'b'}",
            f"logger.output_dir={tmp_path / 'rb'}",
        )
    )
    assert [r["step"] for r in resumed] == [4, 5, 6]
    assert _losses(straight)[3:] == _losses(resumed)
    assert "continues behind step 3, sequence 12" in printed
    a, b = (checkpoint.find_checkpoint(tmp_path / name) for name in "ab")
    assert a.name == b.name == "step-00000006"
    assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()
    left, right = (checkpoint.load_state(folder, memory_mapped=False) for folder in (a, b))
    assert _same(left, right)
    assert left["optimizer"]["state"]
    assert left["data"]["position"] == 24


def test_stopping_with_ctrl_c_and_continuing_gives_the_same_bits(resolved, tmp_path, monkeypatch):
    straight, _ = _run(resolved(f"logger.output_dir={tmp_path / 'straight'}"))
    save = f"checkpoint.save={tmp_path / 'a'}"
    real = Trainer.train_step

    def step_and_interrupt(self):
        if self.step == 2:
            os.kill(os.getpid(), signal.SIGINT)  # in the middle of the third step
        real(self)

    monkeypatch.setattr(Trainer, "train_step", step_and_interrupt)
    first, printed = _run(resolved(save), expect=130)
    assert "step 3 | saved" in printed
    assert "stopped by SIGINT behind step 3" in printed
    monkeypatch.undo()
    both, _ = _run(resolved(save, f"checkpoint.load={tmp_path / 'a'}"))
    assert len(first) == 3
    assert _losses(both) == _losses(straight)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _interrupt_while_saving(monkeypatch, step, times):
    """Send Ctrl-C in the middle of writing a step's checkpoint."""
    real = checkpoint._sync

    def interrupt(path):
        if path.name == "training_state.pt" and f"step-{step:08d}.tmp" in path.parent.name:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
        real(path)

    monkeypatch.setattr(checkpoint, "_sync", interrupt)


def test_ctrl_c_while_a_checkpoint_is_written_completes_it(resolved, tmp_path, monkeypatch):
    _interrupt_while_saving(monkeypatch, step=4, times=1)
    options = [f"checkpoint.save={tmp_path / 'a'}", "checkpoint.save_interval=2"]
    _, printed = _run(resolved(*options), expect=130)
    assert "stopped by SIGINT behind step 4" in printed
    found = checkpoint.find_checkpoint(tmp_path / "a")
    assert found.name == "step-00000004"
    checkpoint.verify_files(found, checkpoint.read_manifest(found))


def test_a_second_ctrl_c_while_a_checkpoint_is_written_keeps_the_previous(resolved, tmp_path, monkeypatch):
    options = [f"checkpoint.save={tmp_path / 'a'}", "checkpoint.save_interval=2"]
    with monkeypatch.context() as patch:
        _interrupt_while_saving(patch, step=4, times=2)
        with pytest.raises(KeyboardInterrupt):
            _run(resolved(*options))
    assert [folder.name for folder in (tmp_path / "a").iterdir() if folder.is_dir()] == ["step-00000002"]
    _, printed = _run(resolved(*options, f"checkpoint.load={tmp_path / 'a'}"))
    assert "continues behind step 2, sequence 8" in printed
    assert "step 6 | saved" in printed


def test_ctrl_c_without_a_checkpoint_folder(resolved, monkeypatch):
    real = Trainer.train_step

    def step_and_interrupt(self):
        os.kill(os.getpid(), signal.SIGINT)
        real(self)

    monkeypatch.setattr(Trainer, "train_step", step_and_interrupt)
    records, printed = _run(resolved(), expect=130)
    assert len(records) == 1
    assert "saved" not in printed


def test_second_ctrl_c_stops_at_once(resolved, monkeypatch):
    real = Trainer.train_step

    def step_and_interrupt_twice(self):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        real(self)

    monkeypatch.setattr(Trainer, "train_step", step_and_interrupt_twice)
    with pytest.raises(KeyboardInterrupt), Trainer(resolved().config, stream=io.StringIO()) as run:
        run.run()


@pytest.mark.parametrize("micro_size", [1, 2])
def test_accumulation_equals_one_big_batch(resolved, tmp_path, micro_size):
    options = ["model.params_dtype=fp32", "train.train_iters=3"]
    big, _ = _run(resolved(*options, "train.micro_batch_size=4", f"logger.output_dir={tmp_path / 'big'}"))
    cut, _ = _run(resolved(*options, f"train.micro_batch_size={micro_size}"))
    # The parts are the same numbers added in another order: a few fp32 roundings in the first step. Adam
    # divides by the root of the second moment, which makes later steps sensitive where gradients are tiny.
    assert cut[0]["loss"] == pytest.approx(big[0]["loss"], rel=1e-6)
    assert cut[0]["grad_norm"] == pytest.approx(big[0]["grad_norm"], rel=1e-5)
    for left, right in zip(cut, big, strict=True):
        assert left["loss"] == pytest.approx(right["loss"], rel=1e-4)


def test_loss_is_the_mean_over_the_global_batch():
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    )
    batch = torch.randint(0, 32, (4, 9))
    logits = model(batch[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.reshape(-1, 32), batch[:, 1:].reshape(-1))
    parts = [language_model_loss(model, part, num_global_tokens=32)[1] for part in batch.split([1, 3])]
    assert float(sum(parts)) == pytest.approx(expected.item(), rel=1e-6)


def test_same_seed_same_run_and_another_seed_another(resolved):
    first, second, third = (
        _losses(_run(resolved(f"train.seed={seed}", "train.deterministic=True"))[0]) for seed in (1, 1, 2)
    )
    torch.use_deterministic_algorithms(False)
    assert first == second
    assert first != third


@pytest.mark.parametrize("offload", ["streamed", "host", "torch classes"])
def test_offloading_changes_no_loss(resolved, offload):
    without = _losses(_run(resolved("model.params_dtype=bf16"))[0])
    offloaded = _losses(_run(resolved("model.params_dtype=bf16", *OFFLOADS[offload]))[0])
    if offload == "streamed":
        assert offloaded == without
    for left, right in zip(offloaded, without, strict=True):
        assert left[1] == pytest.approx(right[1], abs=1e-3)


def test_recomputing_changes_no_bit(resolved):
    kept = _losses(_run(resolved("model.recompute_granularity=null"))[0])
    recomputed = _losses(_run(resolved("model.recompute_granularity=full", *OFFLOADS["streamed"]))[0])
    assert recomputed == kept


def test_what_is_printed_and_written(resolved, tmp_path):
    options = [*OFFLOADS["host"], "train.eval_interval=3", "dataset.eval_fraction=0.2"]
    records, printed = _run(resolved(*options, f"checkpoint.save={tmp_path / 'a'}"))
    lines = printed.splitlines()
    first_step = next(number for number, line in enumerate(lines) if line.startswith("step 1/6 |"))
    banner = lines[:first_step]
    assert len(banner) < 10
    text = "\n".join(banner)
    assert "2 (micro) x 2 (accumulated) = 4 sequences x 16 = 64 tokens a step" in text
    for word in ("forebay 0.", "torch 2.", "transformers 5.", "engine sim", "host kernel", "parameters", "weights"):
        assert word in text
    assert sum(line.startswith("step ") and "/6 |" in line for line in lines) == 6
    assert (tmp_path / "run" / "train.log").read_text() == printed
    assert [r["step"] for r in records if "eval_loss" in r] == [3, 6]
    assert len(_losses(records)) == 6

    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 6
    assert summary["first_loss"] == records[0]["loss"]
    assert summary["last_loss"] == _losses(records)[-1][1] < summary["first_loss"]
    assert summary["eval_loss"] == records[-1]["eval_loss"]
    assert 0 < summary["optimizer_device_bytes"] < summary["optimizer_device_bytes_without_offload"]
    assert summary["interrupted"] is False
    closing = "\n".join(lines[lines.index("steps 1 to 6") :])
    assert "unigram entropy of the text" in closing
    assert "at offload fraction 0.5" in closing
    assert "without offload" in closing


def test_plan_is_what_the_ledger_counts(resolved):
    ledger = get_engine("cpu").ledger
    for offload in ("none", "streamed", "host"):
        gc.collect()  # what earlier trainers held
        before = {tier: ledger.num_bytes(tier) for tier in Tier}
        with Trainer(resolved(*OFFLOADS[offload]).config, stream=io.StringIO()) as run:
            for tier in Tier:
                purposes = run.prepared.plan.get(tier.value, {})
                planned = sum(v for k, v in purposes.items() if k not in ("activations", "logits", "staging"))
                # A few scalars and alignment come on top.
                assert ledger.num_bytes(tier) - before[tier] == pytest.approx(planned, rel=0.01), (offload, tier)
        del run


def test_steps_without_a_finite_loss_end_the_run(resolved, tmp_path, monkeypatch):
    real = language_model_loss

    def broken(model, sequences, **options):
        loss, report = real(model, sequences, **options)
        return loss * math.nan, report * math.nan

    monkeypatch.setattr(trainer, "language_model_loss", broken)
    options = resolved(f"checkpoint.save={tmp_path / 'a'}", "checkpoint.save_interval=1")
    stream = io.StringIO()
    with (
        pytest.raises(
            NonFiniteLossError, match="loss nan and gradient norm nan at step 3, not finite for 3 steps in a row"
        ),
        Trainer(options.config, stream=stream) as run,
    ):
        run.run()
    assert "step 1 | no checkpoint: the last loss is not finite" in stream.getvalue()
    assert checkpoint.list_checkpoints(tmp_path / "a") == []
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])["loss"] is None


def test_a_changed_learning_rate_takes_effect_on_resume(resolved, tmp_path):
    _run(resolved(f"checkpoint.save={tmp_path / 'a'}", "checkpoint.save_interval=3"))
    load = f"checkpoint.load={tmp_path / 'a' / 'step-00000003'}"
    records, _ = _run(resolved(load, "optimizer.lr=2e-2", "optimizer.min_lr=2e-3", "optimizer.weight_decay=0.5"))
    full, _ = _run(resolved("optimizer.lr=2e-2", "optimizer.min_lr=2e-3", f"logger.output_dir={tmp_path / 'full'}"))
    assert [r["lr"] for r in records[-3:]] == [r["lr"] for r in full[3:]]


def test_another_text_starts_at_its_beginning(resolved, tmp_path):
    _run(resolved(f"checkpoint.save={tmp_path / 'a'}"))
    other = tmp_path / "other.txt"
    other.write_text("entirely different words, but enough of them for a step or two\n" * 20)
    options = [f"checkpoint.load={tmp_path / 'a'}", f"dataset.path={other}", "train.train_iters=7"]
    _, printed = _run(resolved(*options))
    assert "continues behind step 6; the text, its split, the seed or dataset.seq_length differs" in printed


def test_starting_from_a_checkpoint_folder(resolved, tmp_path):
    _run(resolved(f"checkpoint.save={tmp_path / 'a'}"))
    folder = tmp_path / "a" / "step-00000006"
    with Trainer(resolved(f"model.path={folder}").config, stream=io.StringIO()) as run:
        assert run.step == 0
        from safetensors.torch import load_file

        saved = load_file(folder / "model.safetensors")
        for name, value in run.model.state_dict().items():
            assert torch.equal(value, saved[name])
        assert run.model.training
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"model.path=.*: the weights cannot be loaded"):
        Trainer(resolved(f"model.path={folder}").config)
    with pytest.raises(FileNotFoundError, match=r"model.path=.*gone: no such folder"):
        Trainer(resolved(f"model.path={tmp_path / 'gone'}").config)
    with pytest.raises(ValueError, match=r"model.path=.*run: no model configuration can be loaded"):
        Trainer(resolved(f"model.path={tmp_path / 'run'}").config)


@pytest.fixture
def nothing_allocated(monkeypatch):
    def fail(*arguments, **options):
        pytest.fail("allocated before everything was checked")

    monkeypatch.setattr(trainer, "build_on_device", fail)


@pytest.mark.usefixtures("nothing_allocated")
@pytest.mark.parametrize(
    "override",
    [
        "model.cuda_graph_impl=local",
        "train.global_batch_size=5",
        "optimizer.optimizer_offload_fraction=1.5",
        "train.device=tpu",
    ],
)
def test_broken_rules_are_refused_here_too(resolved, override):
    with pytest.raises(ValueError, match=re.escape(override)):
        train(resolved(override))


@pytest.mark.usefixtures("nothing_allocated")
def test_refused_before_allocation(resolved, tmp_path, text, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        with pytest.raises(ValueError, match=r"started as one of 2 processes .*start it without torchrun"):
            train(resolved())
    with pytest.raises(ValueError, match=r"the training text has .* tokens, shorter than one sequence"):
        train(resolved("dataset.seq_length=100000", "model.max_position_embeddings=100000"))
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    with pytest.raises(ValueError, match=r"dataset.path=.*empty.txt: the dataset is empty"):
        train(resolved(f"dataset.path={empty}"))
    with pytest.raises(ValueError, match=r"model.hf_config.rms_norm_epsilon: LlamaConfig of transformers has no such"):
        train(resolved("model.hf_config.rms_norm_epsilon=1e-6"))
    with pytest.raises(ValueError, match=r"dataset.text_key=body has no effect while dataset.path is null"):
        train(resolve("tiny_llama_demo", ["dataset.text_key=body"]))
    with pytest.raises(ValueError, match=r"bytes: has 256 tokens, but model.vocab_size=100; set model.vocab_size=256"):
        train(resolved("model.vocab_size=100"))
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        train(resolved("dataset.path=/nowhere.txt"))
    with pytest.raises(checkpoint.CheckpointError, match=r"checkpoint.save=.*: cannot write there"):
        train(resolved(f"checkpoint.save={text}/below"))
    with pytest.raises(checkpoint.CheckpointError, match=r"logger.output_dir=.*: cannot write there \(File exists\)"):
        train(resolved(f"logger.output_dir={text}"))
    with pytest.raises(FileNotFoundError, match=r"checkpoint.load=.*: no such folder"):
        train(resolved(f"checkpoint.load={tmp_path / 'gone'}"))


def test_refused_checkpoints(resolved, tmp_path, nothing_allocated, monkeypatch):
    monkeypatch.undo()
    save = f"checkpoint.save={tmp_path / 'a'}"
    _run(resolved(save))
    folder = tmp_path / "a" / "step-00000006"
    with pytest.raises(checkpoint.CheckpointError) as caught:
        train(resolved(f"checkpoint.load={folder}", "model.num_layers=3"))
    assert "checkpoint of another model; num_hidden_layers: 2 in the checkpoint, 3 here" in str(caught.value)
    with pytest.raises(checkpoint.CheckpointError, match=re.escape(f"holds checkpoints of another run ({folder.name}")):
        train(resolved(save))
    with pytest.raises(
        checkpoint.CheckpointError, match=r"has done 6 steps and train.train_iters=6, so nothing is left"
    ):
        train(resolved(f"checkpoint.load={folder}"))
    with (folder / "training_state.pt").open("r+b") as stream:
        stream.truncate(1000)
    with pytest.raises(checkpoint.CheckpointError, match=r"training_state.pt: 1000 bytes instead of \d+"):
        train(resolved(f"checkpoint.load={tmp_path / 'a'}"))


@pytest.mark.usefixtures("nothing_allocated")
def test_host_memory_too_small_for_what_is_offloaded(resolved, monkeypatch):
    monkeypatch.setattr("forebay.train.memory.available_bytes", lambda device: (2**40, 2**10))
    with pytest.raises(DoesNotFitError) as caught:
        train(resolved(*OFFLOADS["host"]))
    lines = str(caught.value).splitlines()
    assert re.fullmatch(r"  host memory: needs at least 0.0 GiB, 0.0 GiB available \(.*\)", lines[2])
    assert lines[4].startswith("    a lower optimizer.optimizer_offload_fraction (now 0.5): saves up to")
    monkeypatch.setattr("forebay.train.memory.available_bytes", lambda device: (2**40, 2**40))
    monkeypatch.setenv("FOREBAY_HOST_MEMORY_GIB", "1e-5")
    with pytest.raises(MemoryError, match=r"the optimizer needs .* GiB of pinned host memory, but only 1e-05 GiB are"):
        train(resolved(*OFFLOADS["host"]))


@pytest.mark.usefixtures("nothing_allocated")
def test_what_cannot_fit_is_refused(resolved, monkeypatch):
    words = (
        "optimizer.optimizer_cpu_offload=True optimizer.optimizer_offload_fraction=0.5 train.train_iters=20 "
        "train.global_batch_size=8 train.micro_batch_size=1 train.device=cpu"
    )
    monkeypatch.setattr("forebay.train.memory.available_bytes", lambda device: (None, 64 * 2**30))
    with pytest.raises(DoesNotFitError) as caught:
        train(resolve("qwen3_30b_a3b_pretrain", words.split()))
    message = str(caught.value)
    assert message.startswith("this run does not fit; nothing has been allocated")
    assert re.search(
        r"host memory, which is the device tier too: needs at least \d+\.\d GiB, 64.0 GiB available", message
    )
    assert "weights 56.9, gradients 56.9" in message
    assert "a smaller model (model.num_layers" in message


def test_stochastic_rounding_draws_the_same_numbers_without_offloading(resolved):
    words = ["optimizer.optimizer_state_dtype=bf16"]
    expected, _ = _run(resolved(*words))
    offload = ["optimizer.optimizer_cpu_offload=True", "optimizer.optimizer_offload_fraction=1.0"]
    for placement in ("host", "streamed"):
        actual, _ = _run(resolved(*words, *offload, f"optimizer.optimizer_offload_placement={placement}"))
        assert _losses(actual) == _losses(expected)


def test_finished_steps_wait_for_all_but_the_last(resolved):
    with Trainer(resolved().config, stream=io.StringIO()) as run:
        for _ in range(3):
            run.train_step()
        assert [step for step, *_ in run.finished_steps(keep=1)] == [1, 2]
        assert [step for step, *_ in run.finished_steps()] == [3]
        assert run.finished_steps() == []
