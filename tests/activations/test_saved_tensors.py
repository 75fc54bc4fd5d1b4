"""What is packed: views, types and devices of all kinds, in-place changes, and what never moves."""

from __future__ import annotations

import logging

import pytest
import torch
from activation_helpers import Block, build, check, grads, loss_of, offload, tokens
from torch import nn

from forebay.activations.handles import resident_storages
from forebay.activations.ranges import byte_span
from forebay.engine.sim import SimEngine

SEEDS = range(10)


class Layer(nn.Module):
    """A layer whose forward is a function of its input and its weight."""

    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 48).reshape(6, 8))
        self.function = function

    def forward(self, hidden):
        return self.function(hidden, self.weight)


def layers(function, num_layers=3):
    return nn.ModuleList(Layer(function) for _ in range(num_layers))


def hidden_state():
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(3)).requires_grad_()


def step(model, inside):
    start = hidden_state()
    with inside():
        hidden = start * 1.5
        for layer in model:
            hidden = layer(hidden).tanh()
    hidden.sum().backward()
    return grads(model) | {"input": start.grad}


class Doubled(torch.autograd.Function):
    """Saves what it is given, untouched by any formula of torch."""

    @staticmethod
    def forward(ctx, *tensors):
        ctx.save_for_backward(*tensors)
        return 2 * tensors[0]

    @staticmethod
    def backward(ctx, grad):
        first, *others = ctx.saved_tensors
        scale = sum(other.double().abs().sum() for other in others) if others else 0.0
        return 2 * grad + (first * scale).to(grad.dtype), *[None] * len(others)


FUNCTIONS = {
    "transposed": lambda x, w: (x.T.contiguous().T * w) @ w.T @ w,
    "slices with gaps": lambda x, w: torch.cat([x[:, ::2] * w[:, 1::2], x[:, 1::2].exp() * w[:, ::2]], dim=1),
    "rows": lambda x, w: torch.cat([part * part * w[i] for i, part in enumerate((x * w).unbind())]).view(6, 8),
    "expanded": lambda x, w: ((x * w)[:1].expand(6, 8) * x).sigmoid(),
    "sliding windows": lambda x, w: ((x * w).unfold(1, 3, 1) * 0.3).square().sum((1, 2), keepdim=True)[..., 0] * x,
    "reshaped": lambda x, w: ((x * w).view(3, 2, 8).permute(2, 0, 1).tanh().square().permute(1, 2, 0)).reshape(6, 8),
    "scalar": lambda x, w: x * (x * w).sum() + w,
    "mask": lambda x, w: torch.where(x > 0, x * w, x.masked_fill(x < -0.5, 0.1) * w),
    "integers": lambda x, w: (x * w).gather(1, x.argsort(dim=1)) * w + x.index_select(0, x[:, 0].argsort()),
    "sorted": lambda x, w: (x * w).sort(dim=1).values.cumsum(0) * w,
    "low precision": lambda x, w: (x.bfloat16() @ w.bfloat16().T @ w.bfloat16()).half().float() * x,
    "double": lambda x, w: (x.double() * w.double()).exp().float(),
    "complex": lambda x, w: torch.view_as_real(torch.view_as_complex(x.view(6, 4, 2)).conj() ** 2).view(6, 8) * w,
    "imaginary part": lambda x, w: (torch.complex(x, w).conj().imag * x) * w,
    "in place": lambda x, w: (x * w).relu_().mul(2.0).exp_().add(x),
    "in place in a slice": lambda x, w: (
        nn.functional.pad(x, (1, 1)).index_fill_(1, torch.tensor([0]), 0.5)[:, 1:-1] * w
    ),
    "dtype views": lambda x, w: Doubled.apply(
        x * w, x.detach().view(torch.int32)[:, ::2], x.detach().view(torch.uint8)
    ),
    "unaligned bytes": lambda x, w: Doubled.apply(x * w, (x > 0).view(-1)[3:29], (x < 0).view(torch.int8)[1:, 3:]),
    "nothing": lambda x, w: Doubled.apply(x * w, x.detach()[:0]),
    "none but the input": lambda x, w: x,
    "dropout": lambda x, w: nn.functional.dropout(x * w, 0.4),
    "several outputs": lambda x, w: torch.linalg.qr((x * w).T @ x + torch.eye(8))[0][:6] * x,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("policy", ["offload", "recompute_offloaded_input"])
def test_gradients(name, policy):
    check(layers(FUNCTIONS[name]), step, policy, seeds=SEEDS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_backward_twice(name):
    def twice(model, inside):
        start = hidden_state()
        with inside():
            hidden = start * 1.5
            for layer in model:
                hidden = layer(hidden).tanh()
        hidden.sum().backward(retain_graph=True)
        hidden.sum().backward()
        return grads(model) | {"input": start.grad}

    check(layers(FUNCTIONS[name]), twice, ["offload"] * 3, seeds=SEEDS)


def test_what_is_unpacked_is_what_was_saved():
    """Geometry, type and bits, by the public accessors of the graph; twice, and after the original is gone."""
    engine = SimEngine(0)
    layer = Layer(lambda x, w: (x[:, ::2].T * 1.0) * w[:4, :6])
    made = offload([layer], ["offload"], engine=engine)
    with engine.watch():
        with made:
            base = torch.randn(6, 8).requires_grad_() * 2.0
            output = layer(base)
        expected = base.detach()[:, ::2].T.clone()
        del base
        engine.synchronize()  # the copy down holds the original until it has run
        for _ in range(2):
            saved = output.grad_fn._saved_self
            assert torch.equal(saved, expected)
            assert saved.shape == (4, 6)
    assert made.engine.traffic().up_bytes > 0


def test_bytes_are_copied_once():
    """Views of one storage share a copy, within a layer and between layers; new storages do not."""
    shared = torch.randn(16, 8)

    def forward(x, w):
        both = x * w
        return (
            Doubled.apply(both, shared, shared[2:5], shared.T, shared.view(torch.int32))
            + Doubled.apply(both[:3], both.T, shared).sum()
        )

    made = offload(layers(forward), ["offload"] * 3)
    with made:
        hidden = hidden_state() * 1.0
        for layer in made.layers.values():
            hidden = layer(hidden)
    state_bytes, shared_bytes = 6 * 8 * 4, 16 * 8 * 4
    # For each layer x and x * w (both layers' inputs and products), and for all of them the shared tensor.
    assert made.engine.traffic().down_bytes == 3 * 2 * state_bytes + shared_bytes
    del hidden


def test_parts_of_one_projection_share_a_copy():
    def forward(x, w):
        query, key, value = (x @ torch.cat([w, w, w]).T).chunk(3, dim=-1)
        return Doubled.apply(Doubled.apply(query, key, value), key)[:, :1] * 1.0 + x

    made = offload([Layer(forward)], ["offload"])
    start = hidden_state()
    with made:
        output = made.layers["0"](start)
    state_bytes, weight_bytes, product_bytes, result_bytes = 6 * 8 * 4, 18 * 8 * 4, 6 * 18 * 4, 6 * 6 * 4
    expected = state_bytes + weight_bytes + product_bytes + result_bytes
    assert made.engine.traffic().down_bytes == expected
    made.engine.synchronize()
    output.sum().backward()
    # Up too, but for the input, which is still there.
    assert made.engine.traffic().up_bytes == weight_bytes + product_bytes + result_bytes


def test_a_tensor_saved_again_after_a_change_is_copied_again():
    def forward(x, w):
        scaled = x * w
        first = Doubled.apply(x, scaled)  # never used in backward
        with torch.no_grad():
            scaled.add_(1.0)
        return Doubled.apply(x, scaled) + 0.0 * first.detach()

    check(layers(forward), step, ["offload"] * 3, seeds=SEEDS)


def changed_after_saving(hidden, weight):
    squared = (hidden * weight).exp()
    squared.add_(1.0)
    return squared


@pytest.mark.parametrize("min_elements", [1, 1000])  # offloaded, and kept because it is small
def test_a_change_after_saving_raises_as_without_offloading(min_elements):
    model = layers(changed_after_saving, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model[0](hidden_state()).sum().backward()
    made = offload(model, ["offload"], min_offloaded_tensor_size=min_elements)
    with made:
        output = model[0](hidden_state())
    message = (
        r"one of the variables needed for gradient computation has been modified by an inplace operation: "
        r"\[torch.float32 \[6, 8\]\] is at version 1; expected version 0 instead. It was saved by layer '0'"
    )
    with pytest.raises(RuntimeError, match=message):
        output.sum().backward()


def test_a_change_between_forward_and_backward_raises():
    def scenario(inside, model):
        start = hidden_state() * 1.0
        with inside:
            output = model[0](start)
        start.mul_(2.0)
        output.sum().backward()

    model = layers(lambda x, w: x * w, 1)
    with pytest.raises(RuntimeError, match="inplace operation"):
        scenario(torch.enable_grad(), model)
    with pytest.raises(RuntimeError, match="inplace operation"):
        scenario(offload(model, ["offload"]), model)


class ChangesWhatItSaved(torch.autograd.Function):
    """Its backward destroys what was saved, which autograd notices when it is used again."""

    @staticmethod
    def forward(ctx, tensor):
        ctx.save_for_backward(tensor)
        return tensor * 2

    @staticmethod
    def backward(ctx, grad):
        (saved,) = ctx.saved_tensors
        saved.zero_()
        return grad


def test_a_change_in_backward_raises_at_the_second():
    def scenario(inside, model):
        with inside:
            output = model[0](hidden_state() * 1.0)
        output.sum().backward(retain_graph=True)
        output.sum().backward()

    model = layers(lambda x, w: ChangesWhatItSaved.apply(x * w), 1)
    with pytest.raises(RuntimeError, match="inplace operation"):
        scenario(torch.enable_grad(), model)
    with pytest.raises(RuntimeError, match="inplace operation"):
        scenario(offload(model, ["offload"]), model)


def test_parameters_and_buffers_stay():
    """Nor do their views, a parameter of another module, or parameters inside a subclass."""
    elsewhere = nn.Parameter(torch.randn(6, 8))

    class Borrowing(Layer):
        def __init__(self):
            super().__init__(lambda x, w: x)
            self.register_buffer("table", torch.randn(12, 8))

        def forward(self, hidden):
            hidden = Doubled.apply(hidden, self.weight, self.weight[1:, ::2], self.weight.T, self.table[3:])
            return Doubled.apply(hidden, elsewhere, elsewhere.detach().view(-1))

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.elsewhere = elsewhere
            self.layers = nn.ModuleList([Borrowing()])

    root = Root()
    made = offload(root, ["offload"])
    start = hidden_state()
    with made:
        output = root.layers[0](start)
    # What Doubled was called with twice: the input of the layer, and its own first result.
    assert made.engine.traffic().down_bytes == 2 * start.nbytes
    output.sum().backward()


def test_parameters_put_in_place_just_before_forward_stay():
    """As FSDP does with the parameters that it has gathered."""

    def gather(module, args):
        module.weight = nn.Parameter(module.weight.detach().clone())

    model = layers(lambda x, w: Doubled.apply(x, w[:]))
    made = offload(model, ["offload"] * 3)
    with made:
        hidden = start = hidden_state()
        for layer in model:
            layer.register_forward_pre_hook(gather)
            hidden = layer(hidden)
    assert made.engine.traffic().down_bytes == 3 * start.nbytes
    hidden.sum().backward()


def test_parameters_inside_a_subclass_are_known():
    wrapper = TwoTensor(torch.randn(3, 3), torch.randn(3, 3))
    module = nn.Module()
    module.weight = nn.Parameter(wrapper)
    inner = {module.weight.a.untyped_storage()._cdata, module.weight.b.untyped_storage()._cdata}
    assert resident_storages(module) == inner
    assert resident_storages(nn.LazyLinear(3)) == set()


class TwoTensor(torch.Tensor):
    """A wrapper subclass, as quantized and distributed tensors are: it has no bytes of its own."""

    @staticmethod
    def __new__(cls, a, b):
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)

    def __init__(self, a, b):
        self.a, self.b = a, b

    def __tensor_flatten__(self):
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return TwoTensor(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        def pick(name):
            return torch.utils._pytree.tree_map_only(cls, lambda t: getattr(t, name), (args, kwargs or {}))

        (left_args, left), (right_args, right) = pick("a"), pick("b")
        out_a, out_b = func(*left_args, **left), func(*right_args, **right)
        return cls(out_a, out_b) if isinstance(out_a, torch.Tensor) else out_a


def test_subclasses_stay_and_are_named_once(caplog):
    def forward(x, w):
        pair = TwoTensor(x.detach() * 1.0, x.detach() * 2.0)
        return Doubled.apply(x * w, (pair * 3.0).a) + 0.0 * (w * 1.0)

    class Wrapping(Layer):
        def forward(self, hidden):
            pair = TwoTensor(hidden.detach(), hidden.detach() + 1).requires_grad_()
            self.loss = (pair * pair).sum()
            return hidden * self.weight

    model = nn.ModuleList([Wrapping(None)])
    made = offload(model, ["offload"])
    start = hidden_state()
    with caplog.at_level(logging.WARNING, "forebay"), made:
        for _ in range(3):
            output = model[0](start)
            model[0].loss.backward()
            output.sum().backward()
    said = [record.getMessage() for record in caplog.records if "TwoTensor" in record.getMessage()]
    assert len(said) == 1
    assert "only plain tensors are offloaded" in said[0]
    check(layers(forward), step, ["offload"] * 3, seeds=range(3))


def test_tensors_of_another_device_stay():
    """On the meta device, since here the engine's device is the CPU; tests/gpu does it with CPU tensors."""
    model = Layer(lambda x, w: x.exp()).to("meta")
    made = offload([model], ["offload"])
    with made:
        output = model(torch.randn(6, 8, device="meta").requires_grad_())
    assert made.engine.traffic().down_bytes == 0
    assert output.grad_fn._saved_result.device.type == "meta"


@pytest.mark.parametrize(("threshold", "leaves"), [(48, True), (49, False)])
def test_tiny_tensors_stay(threshold, leaves):
    # 48 elements of memory, though the expanded view has 480
    made = offload(
        layers(lambda x, w: Doubled.apply(w, x.expand(10, 6, 8)).sum() * 1.0),
        ["offload"] * 3,
        min_offloaded_tensor_size=threshold,
    )
    with made:
        made.layers["0"](hidden_state())
    assert (made.engine.traffic().down_bytes > 0) == leaves


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.7, 1.0])
def test_fraction(fraction):
    model = build(2)
    whole, part = offload(model, ["offload"] * 2), offload(model, ["offload"] * 2, fraction=fraction)
    for made in (whole, part):
        with made:
            loss_of(model, tokens(length=30)).backward()
    most = max(t.nbytes for t in [torch.empty(2, 30, 64)])
    wanted = fraction * whole.engine.traffic().down_bytes
    assert wanted - 2 * 2 * most <= part.engine.traffic().down_bytes <= wanted + 2 * 2 * most
    check(layers(lambda x, w: (x * w).exp() * x), step, fraction=fraction, seeds=SEEDS)


def test_byte_span():
    base = torch.empty(10, 12, dtype=torch.float16)
    assert byte_span(base) == (0, 240)
    assert byte_span(base[2:4]) == (48, 96)
    assert byte_span(base[:, 3]) == (6, 6 + 9 * 24 + 2)
    assert byte_span(base[0, 5].expand(4, 4)) == (10, 12)
    assert byte_span(base.T[1:3]) == (2, 2 + 9 * 24 + 4)


def test_handles_die_with_their_node():
    made = offload([Block()], ["offload"])
    with made:
        output = next(iter(made.layers.values()))(torch.randn(2, 3, 16).requires_grad_())
    made.engine.synchronize()
    assert made.num_host_buffers > 0
    node = output.grad_fn
    del output
    assert made.num_host_buffers > 0
    del node
    assert made.num_host_buffers == 0
