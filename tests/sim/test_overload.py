"""Ten times more than can be served: who asks for little is answered almost as if alone."""

from tests.sim.storm import DeclaredModel, storm

SECONDS = 100.0  # simulated


def test_a_storm_costs_a_polite_tenant_less_than_its_own_requests_do():
    """Requests that come close together need more credit than one prompt: with that of one, the
    99th percentile at ten times the load was 1.9 times the quiet one."""
    model = DeclaredModel()
    quiet, tenfold = (storm(load, seconds=SECONDS, model=model) for load in (0, 10))
    assert tenfold.goodput_per_s > 0.9 * model.requests_per_s
    assert tenfold.quantile_s("polite", 0.99) < 1.5 * quiet.quantile_s("polite", 0.99)


def test_a_slow_model_with_long_steps_is_shared_as_well():
    """About what the default model takes on two cores, with the default settings."""
    model = DeclaredModel(
        prefill_tokens_per_s=1_500,
        step_s=0.03,
        max_running=64,
        step_tokens=512,
        mixed_step_tokens=128,
        block_size=64,
    )
    quiet, tenfold = (storm(load, seconds=SECONDS, model=model) for load in (0, 10))
    assert tenfold.quantile_s("polite", 0.99) < 2 * quiet.quantile_s("polite", 0.99)
