"""The session of S3's client that keeps little of what botocore describes."""

from __future__ import annotations

from typing import Any

import pytest

from ckptmove.sources.s3_session import concise_session


def texts_of(read: Any, key: str) -> list[str]:
    """All texts under a key, however deep."""
    if isinstance(read, list):
        return [text for each in read for text in texts_of(each, key)]
    if not isinstance(read, dict):
        return []
    found = [read[key]] if isinstance(read.get(key), str) else []
    return found + [text for each in read.values() for text in texts_of(each, key)]


def test_descriptions_are_those_of_botocore_without_documentation() -> None:
    botocore = pytest.importorskip("botocore.session")
    pytest.importorskip("aiobotocore", reason="s3fs is not installed")
    whole = botocore.get_session().get_component("data_loader")
    concise = concise_session({"profile": None}).get_component("data_loader")
    for kind in ("service-2", "endpoint-rule-set-1", "waiters-2"):
        expected, found = (each.load_service_model("s3", kind) for each in (whole, concise))
        assert not any(texts_of(found, "documentation"))
        assert texts_of(found, "shape") == texts_of(expected, "shape")
        assert found.keys() == expected.keys()
    expected, found = (each.load_data("endpoints")["partitions"] for each in (whole, concise))
    for before, after in zip(expected, found, strict=True):
        kept = {
            name: each for name, each in before["services"].items() if name in after["services"]
        }
        assert after == {**before, "services": kept}
        assert {"s3", "sts"} & before["services"].keys() <= kept.keys()
        assert "ec2" not in kept
    with pytest.raises(Exception, match="no_such"):
        concise.load_service_model("no_such", "service-2")
