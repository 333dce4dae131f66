"""Parameters that arrive on a device with streams, played by streams that only know what was done before they go on."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ds_layerwise.plan.layout.layout import ParamSpec
from ds_layerwise.plan.layout.planner import plan_layout
from ds_layerwise.ranks.comm import comm, streams
from ds_layerwise.ranks.owned.buffers import FlatBuffer
from ds_layerwise.ranks.sync.bucket_transfers import Wire
from ds_layerwise.ranks.sync.param_sync import ParamSync
from tests.support.rooms import rooms
from tests.support.streams import Device, Stream

pytestmark = rooms("param_sync")


@pytest.mark.parametrize("on_another", [True, False])
def test_whoever_waits_lets_the_stream_of_the_step_wait_too(on_another, monkeypatch):
    device, sent = Device(), []
    monkeypatch.setattr(streams, "get_accelerator", lambda: device)

    def gather(self, memory, *, in_mxfp8):
        sent.append(len(sent))
        # As NCCL does: only the stream that is current for whoever waits is held up.
        return comm.Pending([SimpleNamespace(wait=lambda number=sent[-1]: device.current.knows.add(number))])

    monkeypatch.setattr(Wire, "gather", gather)
    monkeypatch.setattr(comm, "size_of", lambda group: 2)
    monkeypatch.setattr(comm, "rank_of", lambda group: 0)
    layout = plan_layout([ParamSpec(name, (8, 8), "float32", False) for name in "ab"], 2, bucket_numel=1)
    params = {name: nn.Parameter(torch.zeros(8, 8)) for name in "ab"}
    sync = ParamSync(0, params, FlatBuffer(layout, torch.device("cpu")), wires={1: Wire(None)})
    sync.overlap_with_forward(nn.ParameterDict(params))
    for bucket in layout.buckets:
        sync.launch(bucket.index)
    sync.leave_pending()
    reader = Stream() if on_another else device.current
    with device.stream(reader):
        sync.wait_for([params["b"]])
    number = layout.bucket_of("b").index
    assert reader.knows == device.current.knows == {number}
    sync.wait_for([params["a"]])
    assert device.current.knows == {0, 1}
