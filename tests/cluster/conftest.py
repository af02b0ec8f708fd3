"""The session's cluster, and its logs where a test failed."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import harness
import images
import kai as double
import product as made
import pytest
import steady as tenants

FAILED = pytest.StashKey[bool]()
HERE = Path(__file__).resolve().parent
LOGS = HERE.parents[1] / "build/cluster-logs"


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FAILED] = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests here need the cluster; where none can be made they are skipped and nothing is built for them.
    The first test of a file may have to build images and to install: it gets more than the usual time."""
    reason = harness.why_not()
    for item in items:
        if item.path.parent != HERE:
            continue
        item.add_marker(pytest.mark.cluster)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(600))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed and "cluster" in getattr(item, "fixturenames", ()):
        item.config.stash[FAILED] = True
    return report


def worker_index() -> int:
    """CLUSTER_INDEX, moved on by ten for each further pytest-xdist worker."""
    worker = re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "")) or "0"
    return int(os.environ.get("CLUSTER_INDEX", "0")) + 10 * int(worker)


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[harness.Cluster]:
    """A cluster of two nodes, made once; brings nothing of another test along as long as each works in a
    namespace of its own (fixture `namespace`)."""
    made = harness.Cluster(worker_index())
    made.up()
    yield made
    if request.config.stash[FAILED]:
        folder = LOGS / str(made.index)
        shutil.rmtree(folder, ignore_errors=True)
        made.collect_logs(folder)
        print(f"\nlogs of cluster {made.index}: {folder}")
    made.down()


@pytest.fixture
def namespace(cluster: harness.Cluster) -> Iterator[str]:
    """A namespace of this test's own, with its default service account; goes away afterwards."""
    with cluster.space(f"test-{uuid.uuid4().hex[:8]}") as name:
        yield name


@pytest.fixture(scope="session")
def product(cluster: harness.Cluster) -> made.Product:
    """The shared release on the session's cluster, monitor on, our image and the simulated card on each node.
    A test that changes it (`product.install`) puts it back. Skips where no image can be built."""
    try:
        return made.make_product(cluster)
    except images.Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def kai(cluster: harness.Cluster) -> Iterator[double.Kai]:
    """KAI's double in hamicore mode; the nodes are labelled as T4s of 15360 MiB."""
    with made.make_kai(cluster) as running:
        yield running


@pytest.fixture(scope="module")
def steady(cluster: harness.Cluster, product: made.Product, kai: double.Kai) -> Iterator[tenants.Steady]:
    """A tenant on each node that asks all the time for more than its limit."""
    with tenants.steady_tenants(cluster, kai) as running:
        yield running
