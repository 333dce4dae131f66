"""Memory for what is on its way: given again, grown and let go of."""

import torch

from ds_layerwise.ranks.comm.scratch import Turn
from tests.support.rooms import rooms

pytestmark = rooms("scratch")

CPU = torch.device("cpu")


def test_the_same_memory_again_and_more_where_that_is_too_small():
    turn = Turn(CPU)
    first, other = turn.empty("sent", 6, torch.float32), turn.empty("received", 6, torch.float32)
    assert first.data_ptr() != other.data_ptr()
    again = turn.empty("sent", 11, torch.bfloat16)
    assert (again.data_ptr(), again.shape, again.dtype) == (first.data_ptr(), (11,), torch.bfloat16)
    larger = turn.empty("sent", 13, torch.bfloat16)
    assert larger.shape == (13,) and larger.untyped_storage().nbytes() == 26
    assert turn.empty("sent", 0, torch.float32).shape == (0,)
    turn.release()
    assert turn.empty("weights", 1, torch.float32).untyped_storage().nbytes() == 4


def test_released_memory_comes_back_as_large_as_it_was():
    turn = Turn(CPU)
    for numel in (3, 7, 5):
        turn.empty("sent", numel, torch.float32)
    turn.release()
    first = turn.empty("sent", 2, torch.float32)
    assert first.shape == (2,) and first.untyped_storage().nbytes() == 28
    assert turn.empty("sent", 7, torch.float32).data_ptr() == first.data_ptr()


def test_memory_that_grew_is_handed_out_from_then_on():
    turn = Turn(CPU)
    old = turn.empty("sent", 2, torch.float32)
    grown = turn.empty("sent", 5, torch.float32)
    again = turn.empty("sent", 2, torch.float32)
    assert again.data_ptr() == grown.data_ptr() != old.data_ptr()
    assert turn.empty("sent", 2, torch.float32) is again


def test_only_what_is_in_another_dtype_is_copied():
    turn, value = Turn(CPU), torch.tensor([1.0, 2.0, 3.0])
    assert turn.cast("sent", value, torch.float32) is value
    rounded = turn.cast("sent", value, torch.bfloat16)
    assert rounded.dtype == torch.bfloat16 and rounded.tolist() == [1.0, 2.0, 3.0]
    assert rounded.data_ptr() == turn.empty("sent", 3, torch.bfloat16).data_ptr()
