"""Whose requests a server of this machine answers, by their Host and Origin."""

import pytest

from specscope.remote.http import address, another_site
from specscope.trace.checked import is_loopback

OWN = ["localhost:8000", "LOCALHOST:8000", "127.0.0.1:8000", "127.0.0.1", "[::1]:8000", "[::1]", "localhost:9000"]
STRANGE = ["", "evil.example", "evil.example:8000", "localhost:8000.evil.example", "localhost.evil.example:8000"]
STRANGE += ["127.0.0.1.evil.example", "127.0.0.1@evil.example", "[::1].evil.example", "::1", "0.0.0.0:8000"]
STRANGE += ["192.168.1.7:8000"]


@pytest.mark.parametrize("listens", ["127.0.0.1", "::1", "localhost"])
@pytest.mark.parametrize("host", OWN)
def test_this_machine_by_any_of_its_names_and_by_a_tunnels_port(listens, host):
    assert another_site(listens, host, []) == ""
    assert another_site(listens, host, [f"http://{host.lower()}"]) == ""
    assert "other sites" in another_site(listens, host, ["http://evil.example"])


@pytest.mark.parametrize("host", STRANGE)
def test_a_name_that_was_rebound_to_this_machine(host):
    assert "not " in another_site("127.0.0.1", host, [f"http://{host}"])


@pytest.mark.parametrize("listens", ["0.0.0.0", "::", "192.168.1.7", "gpu-box"])
def test_where_other_machines_reach_it_any_name_may_be_right(listens):
    assert another_site(listens, "gpu-box:8000", []) == ""
    assert another_site(listens, "gpu-box:8000", ["http://gpu-box:8000"]) == ""
    assert another_site(listens, "gpu-box:8000", ["http://evil.example"])
    assert another_site(listens, "gpu-box:8000", ["null"])


def test_addresses():
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.1.1", "", "localhost.example")))
    assert (address("::1", 80), address("Box", 1)) == ("[::1]:80", "box:1")
