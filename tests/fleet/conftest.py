"""A Ray cluster of nodes on this machine, which say that they have cards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


class Nodes:
    """A cluster whose head has one core and no cards; others come and go."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        self.address: str = self._cluster.address
        self.there: list[tuple[Any, dict[str, int]]] = []

    def add(self, **cards: int) -> None:
        """A node with so many cards of each kind."""
        named = {f"emmy:{target}": float(n) for target, n in cards.items()}
        self.there.append((self._cluster.add_node(num_cpus=1, resources=named), cards))

    def kill(self, place: int) -> dict[str, int]:
        """Ends a node at once, with all that runs on it; what cards it had."""
        node, cards = self.there.pop(place)
        self._cluster.remove_node(node, allow_graceful=False)
        return cards

    def close(self) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    pytest.importorskip("ray")
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(root), os.environ.get("PYTHONPATH", ""))))
    monkeypatch.setenv("EMMY_CACHE", str(tmp_path / "cache"))  # its locks: the machine's own processor may be in use
    found = Nodes()
    try:
        yield found
    finally:
        found.close()
