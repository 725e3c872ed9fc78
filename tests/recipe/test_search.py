"""The draws of a search."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from xdm_ft.algorithms.erm import ERM
from xdm_ft.recipe import components
from xdm_ft.recipe.check import load
from xdm_ft.recipe.components import settings_model
from xdm_ft.recipe.method import draw_training
from xdm_ft.recipe.search import TRAINING_KEYS, Distribution, Search, at_the_edge, preset_ranges, settings_of
from xdm_ft.training import Training

LOG = Distribution(log_uniform=(1e-4, 1e-1))


@given(st.floats(0, 1, exclude_max=True))
def test_values_lie_in_their_range_and_their_quantile_is_the_inverse(u):
    for distribution in (LOG, Distribution(uniform=(-2.0, 3.0))):
        low, high = distribution.bounds
        value = distribution.at(u)
        assert low * (1 - 1e-12) <= value <= high if low > 0 else low <= value <= high
        assert distribution.quantile_of(value) == pytest.approx(u, abs=1e-9)


def test_half_of_a_logarithmic_range_is_its_geometric_mean():
    assert LOG.at(0.5) == pytest.approx(math.sqrt(1e-4 * 1e-1))
    assert Distribution(uniform=(1.0, 3.0)).at(0.25) == 1.5
    assert [Distribution(choice=(1, 2, 3)).at(u) for u in (0.0, 0.34, 0.99)] == [1, 2, 3]


@pytest.mark.parametrize(
    "wrong", [{}, {"uniform": (1, 2), "choice": (1,)}, {"uniform": (2, 1)}, {"log_uniform": (0, 1)}, {"choice": ()}]
)
def test_a_distribution_is_one_of_three_and_whole(wrong):
    with pytest.raises(ValidationError):
        Distribution(**wrong)


RECORDED_LR = (0.0007320725238040829, 0.0013377889245160012)  # of trials 1 and 2: the same on every machine


def test_a_trials_draw_is_a_constant_whatever_else_is_searched():
    search = Search(trials=3, preset="frozen")
    assert search.drawn(0) == {}
    assert search.drawn(1)["lr"] == pytest.approx(RECORDED_LR[0], rel=1e-6)
    assert search.drawn(2)["lr"] == pytest.approx(RECORDED_LR[1], rel=1e-6)
    assert search.drawn(2) == Search(trials=9, preset="frozen").drawn(2), "nor does it depend on how many there are"
    few, many = (Search(trials=trials, preset="frozen", sampler="sobol") for trials in (4, 33))
    assert [few.drawn(trial) for trial in range(4)] == [many.drawn(trial) for trial in range(4)]
    plain, more = (Search(trials=5, preset="frozen", space=space) for space in ({}, {"momentum": LOG}))
    assert all(more.drawn(trial).items() >= plain.drawn(trial).items() for trial in range(5))


@pytest.mark.parametrize("sampler", ["random", "sobol"])
def test_draws_fill_the_range(sampler):
    search = Search(trials=65, space={"lr": LOG}, sampler=sampler)
    quantiles = sorted(LOG.quantile_of(search.drawn(trial)["lr"]) for trial in range(1, 65))
    farthest = max(abs(q - (i + 0.5) / 64) for i, q in enumerate(quantiles))
    assert farthest < (0.02 if sampler == "sobol" else 0.2)  # Kolmogorov-Smirnov at 1 in 100


def test_domainbed_has_one_learning_rate_for_encoder_and_head():
    search = Search(trials=4, preset="domainbed")
    for trial in range(1, 4):
        drawn = search.drawn(trial)
        assert drawn["lr"] == drawn["encoder_lr"] and 1e-5 <= drawn["lr"] <= 10**-3.5
    apart = Search(trials=4, preset="domainbed", space={"lr": LOG})
    assert apart.drawn(1)["lr"] != apart.drawn(1)["encoder_lr"]


@pytest.mark.parametrize("preset", ["frozen", "domainbed"])
def test_presets_name_settings_that_there_are(preset):
    keys = [*preset_ranges(preset)]
    assert {"lr", "irm.penalty_weight", "xdomainmix.p_discard", "sam.rho"} < {*keys}
    folders = components.method_parts()
    for key in keys:
        component, _, name = key.rpartition(".")
        if not component:
            assert name in TRAINING_KEYS
            continue
        assert name in settings_model(components.find(folders[component], component)).model_fields, key


@pytest.mark.parametrize("name", components.method_parts())
def test_a_component_accepts_the_ends_of_its_search_ranges(name):
    cls = components.find(components.method_parts()[name], name)
    settings = settings_model(cls)
    for key, range_ in cls.search_ranges.items():
        distribution = Distribution.model_validate(range_)
        for value in distribution.choice or distribution.bounds:
            settings.model_validate({key: value})


EDGES = [
    # the outer twentieth of a range; the recipe's own value may lie outside
    (LOG, [LOG.at(u) for u in (0.01, 0.06, 0.5, 0.94, 0.99)], [True, False, False, False, True]),
    (LOG, [1.0, 1e-5, 0], [True, True, False]),
    # of whole numbers, the outermost that can be drawn
    (Distribution(log_uniform=(2**3, 2**5.5)), [8, 9, 20, 44, 45], [True, False, False, True, True]),
    (Distribution(uniform=(1.0, 8.4)), [1, 2, 7, 8], [True, False, False, True]),
    # of a choice, its lowest and highest number; of two, each is an end; words have no order
    (Distribution(choice=(0.1, 0.01, 0.05)), [0.01, 0.05, 0.1, 0.001, 0.2], [True, False, True, True, True]),
    (Distribution(choice=(16, 32, 64)), [16, 32, 64], [True, False, True]),
    (Distribution(choice=(0.05, 0.1)), [0.05, 0.1], [False, False]),
    (Distribution(choice=(0.1,)), [0.1], [False]),
    (Distribution(choice=("sample", "batch")), ["sample"], [False]),
    (Distribution(choice=(False, True)), [True], [False]),
]


@pytest.mark.parametrize(("distribution", "values", "expected"), EDGES)
def test_the_edge_of_a_range(distribution, values, expected):
    search = Search(trials=2, space={"lr": distribution})
    assert [at_the_edge(search, "lr", value) for value in values] == expected
    assert not at_the_edge(search, "weight_decay", 0.1), "not searched"
    assert not at_the_edge(Search(space={"lr": distribution}), "lr", values[0]), "one trial searches nothing"


def test_sagm_draws_what_its_code_draws():
    """hparams_registry.py of Wang-pengfei/SAGM: `random_state.choice([0.01, 0.02, 0.05, 0.1])` for both."""
    for preset in ("frozen", "domainbed"):
        for key in ("sagm.rho", "sagm.alpha"):
            assert preset_ranges(preset)[key].choice == (0.01, 0.02, 0.05, 0.1)
    values = {Search(trials=60, preset="frozen").drawn(trial)["sagm.alpha"] for trial in range(1, 60)}
    assert values == {0.01, 0.02, 0.05, 0.1}


def test_domainnets_batches_go_to_32():
    """hparams_registry.py of DomainBed: `int(2**r.uniform(3, 5))` for DomainNet, `int(2**r.uniform(3, 5.5))` else."""
    search = Search(trials=30, preset="domainbed")
    sizes = {
        name: [search.for_data(name).drawn(trial)["batch_size"] for trial in range(1, 30)]
        for name in ("pacs", "domainnet")
    }
    assert max(sizes["domainnet"]) < 2**5 < max(sizes["pacs"]) < 2**5.5
    own = Search(trials=3, preset="domainbed", space={"batch_size": Distribution(choice=(7,))})
    assert own.for_data("domainnet").drawn(1)["batch_size"] == 7, "a range of the recipe's own is kept"
    assert Search(trials=3, preset="frozen").for_data("domainnet").space == {}
    assert Search().for_data("domainnet") == Search()


def test_drawn_settings_reach_their_block_only():
    drawn = {"lr": 0.5, "weight_decay": 0.25, "sam.rho": 0.1}
    training = draw_training(Training(steps=3), load("demo").methods[0], drawn)
    assert (training.lr, training.weight_decay, training.steps) == (0.5, 0.25, 3)
    assert settings_of(drawn, "sam") == {"rho": 0.1} and settings_of(drawn, ERM.__name__) == {}
