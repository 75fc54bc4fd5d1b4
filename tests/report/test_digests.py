import pytest
import torch

from forebay.report.digests import state_digests, tensor_digest

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_bits_give_equal_digests_and_any_other_bit_another(dtype):
    torch.manual_seed(0)
    tensor = (torch.randn(37, 11) * 3).to(dtype)
    expected = tensor_digest(tensor)
    assert len(expected) == 32
    assert tensor_digest(tensor.clone()) == expected
    assert tensor_digest(tensor.t().contiguous().t()) == expected  # another layout of the same values
    for _ in range(50):
        changed = tensor.clone()
        as_bytes = changed.view(-1).view(torch.uint8)
        place = int(torch.randint(as_bytes.numel(), ()))
        as_bytes[place] ^= 1 if dtype == torch.bool else 1 << int(torch.randint(8, ()))
        assert tensor_digest(changed) != expected


def test_order_counts():
    tensor = torch.arange(10.0)
    assert tensor_digest(tensor) != tensor_digest(tensor.flip(0))
    swapped = tensor.clone()
    swapped[[3, 7]] = swapped[[7, 3]]
    assert tensor_digest(tensor) != tensor_digest(swapped)
    # NaN and the sign of zero are bits like others.
    assert tensor_digest(torch.tensor([0.0])) != tensor_digest(torch.tensor([-0.0]))
    assert tensor_digest(torch.tensor([float("nan")])) == tensor_digest(torch.tensor([float("nan")]))


def test_pieces_do_not_change_it(monkeypatch):
    from forebay.report import digests

    tensor = torch.randn(1000)
    expected = tensor_digest(tensor)
    monkeypatch.setattr(digests, "_PIECE_ELEMENTS", 64)
    assert tensor_digest(tensor) == expected


def test_state_is_named_by_parameter():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(list(model.named_parameters()), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    found = state_digests(optimizer)
    assert list(found) == [f"{n} / {k}" for n in ("weight", "bias") for k in ("step", "exp_avg", "exp_avg_sq")]
    assert found["bias / exp_avg"] == tensor_digest(optimizer.state[model.bias]["exp_avg"])
