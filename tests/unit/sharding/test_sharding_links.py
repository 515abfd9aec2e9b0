"""Rates of host links: measured once, kept, or given."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from sharding import Mesh, PlanError
from sharding.links import (
    Delivery,
    deliver,
    host_array,
    measure_link,
    measured,
    places,
    with_links,
)

HOW = Delivery("pageable", 1 << 20, 4)


def test_a_rate_is_measured():
    device = jax.devices()[0]
    for place in places([device]):
        assert 0.1 < measure_link(device, Delivery(place, 1 << 20, 2)) < 10_000


def test_host_arrays_arrive():
    device = jax.devices()[1]
    values = np.arange(5, dtype=np.uint8)
    for place in places([device]):
        [there] = deliver([host_array(values, place, device)], device)
        assert there.devices() == {device}
        np.testing.assert_array_equal(there, values)


def test_rates_are_measured_once(tmp_path: Path):
    asked = []

    def measure(device: object, how: Delivery) -> float:
        asked.append((device, how))
        return 10.0 + len(asked)

    mesh, store = Mesh.from_jax(2), tmp_path / "deep" / "links.json"
    first = measured(mesh, HOW, store, measure)
    assert [d.link_gbps for d in first.devices] == [11.0, 12.0]
    assert measured(mesh, HOW, store, measure) == first and len(asked) == 2
    measured(mesh, Delivery("pageable", 2 << 20, 4), store, measure)
    assert len(asked) == 4
    store.write_text("not json")
    assert measured(mesh, HOW, store, measure).devices[0].link_gbps == 15.0
    given = with_links(mesh, "1,2")
    assert measured(given, HOW, store, measure) == given and len(asked) == 6
    assert measured(Mesh.virtual(2), HOW, store, measure) == Mesh.virtual(2)


@pytest.mark.parametrize(
    "rates", ["1", "1,2,3", "1,x", "0,1", "-1,2", "nan,1", "inf,1", "١,1", "1_0,1", "", [1]]
)
def test_wrong_rates(rates: object):
    with pytest.raises(PlanError, match="--link-gbps"):
        with_links(Mesh.virtual(2), rates)  # type: ignore[arg-type]
