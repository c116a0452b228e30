"""Every family of file makers: `FAMILIES[family][name](path, tag)` writes a file."""

from __future__ import annotations

from collections.abc import Mapping

from tests.making.expected import FileMaker
from tests.making.exported import EXPORTED_MAKERS
from tests.making.legacy import LEGACY_MAKERS
from tests.making.packaged import PACKAGED_MAKERS
from tests.making.pickled import PICKLED_MAKERS
from tests.making.scripts import SCRIPT_MAKERS
from tests.making.tar import TAR_MAKERS
from tests.making.wrapped import WRAPPED_MAKERS

FAMILIES: Mapping[str, Mapping[str, FileMaker]] = {
    "legacy": LEGACY_MAKERS,
    "tar": TAR_MAKERS,
    "script": SCRIPT_MAKERS,
    "exported": EXPORTED_MAKERS,
    "pickled": PICKLED_MAKERS,
    "packaged": PACKAGED_MAKERS,
    "wrapped": WRAPPED_MAKERS,
}
