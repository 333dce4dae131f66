"""Memory for what is on its way: given again, grown and let go of."""

import torch

from ds_layerwise.ranks.in_flight import Turn
from tests.support.rooms import rooms

pytestmark = rooms("in_flight")

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
    assert turn.empty("received", 1, torch.float32).untyped_storage().nbytes() == 4


def test_only_what_is_in_another_dtype_is_copied():
    turn, value = Turn(CPU), torch.tensor([1.0, 2.0, 3.0])
    assert turn.cast("sent", value, torch.float32) is value
    rounded = turn.cast("sent", value, torch.bfloat16)
    assert rounded.dtype == torch.bfloat16 and rounded.tolist() == [1.0, 2.0, 3.0]
    assert rounded.data_ptr() == turn.empty("sent", 3, torch.bfloat16).data_ptr()
