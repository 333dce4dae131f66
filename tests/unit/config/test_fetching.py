"""Parameters that ZeRO stage 3 has whole at a time, against a plain walk over them, as DeepSpeed marks them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_layerwise.config.run_config import Fetching, Whole
from ds_layerwise.errors import ConfigError
from tests.support.rooms import rooms

pytestmark = rooms("run_config")


def test_keys_have_either_name_and_auto_is_the_default():
    assert Fetching.of({}) == Fetching.of({"stage3_max_live_parameters": "auto"})
    assert Fetching.of({"stage3_max_live_parameters": 5}).max_live_parameters == 5
    assert Fetching.of({"param_persistence_threshold": 1e3}).param_persistence_threshold == 1000


@pytest.mark.parametrize("key", ["zero_hpz_partition_size", "stage3_max_live_parameters"])
def test_errors_name_the_key(key):
    with pytest.raises(ConfigError, match=f"^zero_optimization.{key} must be"):
        Fetching.of({key: -1})


def test_small_parameters_stay_whole_and_others_may_be():
    fetching = Fetching.of({"stage3_max_live_parameters": 60, "stage3_param_persistence_threshold": 10})
    assert fetching.whole([(10, 20), (11, 22), (100, 200)]) == Whole(20, 200)
    assert fetching.whole([(10, 20), (11, 22), (11, 22)]) == Whole(20, 64)
    assert fetching.whole([]) == Whole(0, 0)
    fetching = Fetching.of({"stage3_param_persistence_threshold": 10, "stage3_model_persistence_threshold": 15})
    assert fetching.whole([(10, 20), (6, 12), (5, 10)]).always == 30


@given(st.lists(st.integers(1, 50), min_size=1), st.integers(0, 200), st.integers(0, 50), st.integers(0, 200))
def test_no_more_than_the_model_and_no_less_than_what_stays(sizes, live, threshold, of_model):
    fetching = Fetching(live, threshold, of_model)
    whole = fetching.whole([(size, 2 * size) for size in sizes])
    stays = 0
    for size in sizes:
        if size + stays <= of_model and size <= threshold:
            stays += size
    assert whole.always == 2 * stays
    assert max(whole.always, 2 * max(sizes)) <= whole.most <= 2 * sum(sizes)
