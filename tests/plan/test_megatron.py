import pytest

from forebay.plan.megatron import MegatronPlanner
from forebay.plan.options import GIB, Budget, Choice, Layout
from forebay.plan.profile import load
from forebay.plan.solver import Solver

# Published for Qwen3-30B-A3B, TP2 PP2 EP4, two machines of eight H100: fraction, GB allocated, ms.
PUBLISHED = [(0.0, 47.2, 996), (0.25, 43.4, 1871), (0.5, 39.6, 2484), (0.75, 35.6, 3187), (1.0, 32.0, 4189)]
LAYOUT = Layout(num_gpus=16, tensor=2, pipeline=2, expert=4)


@pytest.fixture
def moe(planned):
    config, model = planned("qwen3_30b_a3b_pretrain")
    config.model.tensor_model_parallel_size = 2
    config.model.pipeline_model_parallel_size = 2
    config.model.expert_model_parallel_size = 4
    config.train.global_batch_size = 32
    return config, model


@pytest.mark.parametrize(("fraction", "allocated_gb", "_"), PUBLISHED)
def test_what_stays_agrees_with_the_published_figures(moe, fraction, allocated_gb, _):
    config, model = moe
    planner = MegatronPlanner(model, config, load("h100-sxm"), LAYOUT)
    static = planner.static_bytes(Choice(1, fraction))
    assert sum(static.values()) / 1e9 == pytest.approx(allocated_gb, rel=0.02)


@pytest.mark.parametrize(("fraction", "_", "step_ms"), PUBLISHED[1:])
def test_what_offload_adds_agrees_with_the_published_figures(moe, fraction, _, step_ms):
    config, model = moe
    config.optimizer.overlap_cpu_optimizer_d2h_h2d = False
    planner = MegatronPlanner(model, config, load("h100-sxm"), LAYOUT)
    added = planner.estimate(Choice(1, fraction)).step_seconds - planner.estimate(Choice(1)).step_seconds
    assert added == pytest.approx((step_ms - 996) / 1e3, rel=0.2)


def test_overlap_gains_seven_percent(moe):
    config, model = moe
    planner = MegatronPlanner(model, config, load("h100-sxm"), LAYOUT)
    config.optimizer.overlap_cpu_optimizer_d2h_h2d = False
    without = planner.estimate(Choice(1, 1.0)).seconds["optimizer"]
    config.optimizer.overlap_cpu_optimizer_d2h_h2d = True
    assert planner.estimate(Choice(1, 1.0)).seconds["optimizer"] == pytest.approx(0.93 * without)


def _solve(config, model, layout, gpu_gib, host_gib=2048):
    planner = MegatronPlanner(model, config, load("h100-sxm"), layout)
    solver = Solver(
        planner,
        config,
        Budget(int(gpu_gib * GIB), int(host_gib * GIB)),
        "megatron",
        num_layers=len(model.layers),
        num_stage_layers=len(model.layers) // layout.pipeline,
        num_data_parallel=layout.data,
    )
    return solver.solve()


class TestQuickDecision:
    """The reference's rule of thumb, row by row: what the plan chooses by offload alone."""

    def test_a_large_mixture_that_needs_pipeline_stages_offloads_the_optimizer(self, moe):
        answer = _solve(*moe, LAYOUT, 58)
        assert not answer.no_offload.fits
        assert answer.offload.choice.fraction > 0
        assert answer.offload.choice.offload_layers == 0

    def test_activations_that_dominate_with_one_stage_are_offloaded(self, planned):
        config, model = planned("llama_1b_pretrain", "dataset.seq_length=32768", "model.max_position_embeddings=32768")
        config.train.micro_batch_size = config.train.global_batch_size = 1
        answer = _solve(config, model, Layout(), 60)
        assert not answer.no_offload.fits
        assert answer.offload.choice.offload_layers > 0
        assert answer.offload.choice.fraction == 0

    def test_throughput_above_all_is_no_offload(self, moe):
        answer = _solve(*moe, LAYOUT, 80)
        assert answer.no_offload.fits
        assert answer.offload.choice == answer.no_offload.choice
        assert (answer.fastest.choice.fraction, answer.fastest.choice.offload_layers) == (0, 0)

    def test_cuda_graphs_leave_only_the_optimizer(self, planned):
        config, model = planned("llama_1b_pretrain", "dataset.seq_length=16384", "model.max_position_embeddings=32768")
        config.train.micro_batch_size = config.train.global_batch_size = 1
        config.model.cuda_graph_impl = "local"
        answer = _solve(config, model, Layout(), 37)
        assert answer.offload is not None
        assert answer.offload.choice.offload_layers == 0
        assert answer.offload.choice.fraction > 0

    def test_moderate_pressure_is_a_quarter_to_a_half(self, moe):
        answer = _solve(*moe, LAYOUT, 54)  # a tenth is missing
        assert 0.25 <= answer.offload.choice.fraction <= 0.5

    def test_less_memory_is_a_higher_fraction(self, moe):
        fractions = [_solve(*moe, LAYOUT, gib).offload.choice.fraction for gib in (58, 56, 54, 52)]
        assert fractions == sorted(fractions)
        assert fractions[0] < fractions[-1]


def test_activation_offload_is_not_planned_where_megatron_refuses_it(moe):
    config, model = moe
    for gib in (30, 45, 58, 80):
        answer = _solve(config, model, LAYOUT, gib)
        for option in (answer.offload, answer.cheapest, answer.fastest, answer.smallest):
            assert option is None or option.choice.offload_layers == 0


def test_the_most_loaded_stage_counts(moe):
    config, model = moe
    config.train.global_batch_size = 64
    planner = MegatronPlanner(model, config, load("h100-sxm"), LAYOUT)
    # The first stage holds the activations of two micro-batches, the last one logits.
    estimate = planner.estimate(Choice(1))
    assert "logits and loss" not in estimate.gpu_bytes
    tokens = config.dataset.seq_length
    assert estimate.gpu_bytes["activations"] == int(
        2 * tokens * sum(planner.layer_bytes_per_token(layer) for layer in model.layers[:24])
    )


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"num_gpus": 6, "tensor": 4}, "--gpus 6 is not a multiple of tensor x pipeline x context = 4"),
        ({"num_gpus": 8, "expert": 3}, "--gpus 8 is not a multiple of pipeline x expert = 3"),
    ],
)
def test_layouts_that_do_not_divide(layout, message):
    with pytest.raises(ValueError, match=message):
        Layout(**layout)
