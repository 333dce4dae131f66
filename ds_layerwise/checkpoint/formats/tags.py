"""The tags of checkpoints: names of folders that fit in a pointer file."""

from __future__ import annotations

from ds_layerwise.checkpoint.files import atomic
from ds_layerwise.checkpoint.files.manifest import leads_out
from ds_layerwise.checkpoint.formats.universal import LATEST
from ds_layerwise.errors import LayerWiseError

#: The names of files beside checkpoints.
_TAKEN = ("latest", LATEST, "zero_to_fp32.py", "zero_to_torch.py")

#: The most bytes of one part of a path, without the suffixes that are added to it.
_LONGEST = 255 - len("_universal") - len(atomic.INCOMPLETE) - 17


def check_tag(tag: object) -> str:
    """Return ``tag`` as text, if it is valid.

    Raises:
        LayerWiseError: no checkpoint can have it.
    """
    text = str(tag)
    parts = text.split("/")
    reason = ""
    if not text or leads_out(text):
        reason = "names no folder below save_dir"
    elif not text.isprintable() or text != text.strip():
        reason = "holds characters that the file latest cannot hold"
    elif parts[0] in _TAKEN:
        reason = f"is the name of a file beside the checkpoints ({', '.join(_TAKEN)})"
    elif any(part.endswith((atomic.INCOMPLETE, atomic.REPLACED)) for part in parts):
        reason = f"ends in {atomic.INCOMPLETE} or {atomic.REPLACED}, as only unfinished saves do"
    elif (longest := max(len(part.encode()) for part in parts)) > _LONGEST:
        reason = f"has a part of {longest} bytes, more than {_LONGEST}"
    if reason:
        raise LayerWiseError(
            f"the checkpoint's tag {tag!r:.300} {reason}; choose another, such as 'global_step10' "
            "or 'run/step10'"
        )
    return text
