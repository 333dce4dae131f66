"""Named groups of parameters whose gradients have a norm of their own:
``layerwise.norm_groups``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ds_layerwise.config.targets.conditions import Conditions
from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.fields import NonNegative, OrNull, build

#: The names of groups. A monitor may use them in file names.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class NormGroup(Conditions):
    """The parameters that meet all of the given conditions."""

    example = '{"name": "mtp.*"}'

    gradient_clipping: OrNull[NonNegative] = None
    """The bound of the norm of their gradients. The norm of all others then does not include them.
    0: they are not clipped. None: they are counted and clipped with all others.
    """
    optional: bool = False
    """True if it may match no parameter."""


def norm_groups_of(where: str, given: object) -> dict[str, NormGroup]:
    """Return the groups that a config has under the name ``where``.

    Raises:
        ConfigError: a name or an entry is not valid.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(
            f'{where} must be an object of names of groups to conditions like {{"mtp": {{"name": '
            f'"mtp.*"}}}}, got {given!r}'
        )
    found = {}
    for name, entry in given.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(
                f"{where} names a group {name!r}; give it a name of letters, digits, dots, dashes "
                "and underscores, for the monitor"
            )
        if not isinstance(entry, NormGroup):
            entry = build(NormGroup, f"{where}.{name}", entry)
            entry.check_conditions(f"{where}.{name}")
        found[name] = entry
    return found
