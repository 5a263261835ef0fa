"""The plugin over several processes: found by its entry point in each, counted in one, and switched off."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import engine

pytestmark = pytest.mark.vllm

PROGRAM = """
import json, sys
from pathlib import Path
from tests.vllm import engine
if __name__ == "__main__":
    folder, additional = Path(sys.argv[1]), json.loads(sys.argv[2])
    engine.register_classes()
    with engine.started("llama", folder, additional, load_format=sys.argv[3]) as e:
        given = engine.answers(e)
        from prometheus_client import REGISTRY, generate_latest
        seen = generate_latest(REGISTRY).decode()
        loaded = sorted(e.collective_rpc(engine.modules)[0])
    print("\\n" + json.dumps({"answers": given, "metrics": seen, "modules": loaded}))
"""


def run(folder: Path, additional: Mapping[str, Any], load_format: str, **environment: str) -> dict[str, Any]:
    """What an engine in a process of its own said."""
    import os

    root = Path(__file__).resolve().parents[2]
    program = folder / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program), str(folder), json.dumps(additional), load_format],
        env={
            **os.environ,
            "PYTHONPATH": f"{root}:{root / 'plugin'}",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_emmy_disable_is_stock_bit_for_bit_and_loads_nothing_of_emmy(folder: Path, served: Mapping[str, Any]) -> None:
    """Even where the key names a pack that is not there."""
    with engine.started("llama", folder) as e:
        stock = engine.answers(e)
    asked = {"emmy": {**served["emmy"], "pack": "/nowhere"}}
    off = run(folder, asked, "seeded", EMMY_DISABLE="1")
    assert json.loads(json.dumps(stock)) == off["answers"]
    assert {m for m in off["modules"] if m.startswith("emmy_vllm")} == {"emmy_vllm"}


def test_workers_in_other_processes_find_the_plugin_and_are_counted(folder: Path, served: Mapping[str, Any]) -> None:
    """The engine's core and worker are started anew, and this process shows what they count; the worker has no tuner."""
    seen = run(folder, served, "dummy", VLLM_ENABLE_V1_MULTIPROCESSING="1")
    calls = [
        x for x in seen["metrics"].splitlines() if x.startswith("vllm:emmy_calls_total{") and 'served_by="emmy"' in x
    ]
    assert sum(float(x.split()[-1]) for x in calls) > 0
    assert any('rows="1..32"' in x and "x512x128:" in x for x in calls)
    assert "emmy_vllm.layers" in seen["modules"]
    tuner = ("emmy.search", "emmy.costmodel", "emmy.measure", "lightgbm", "optuna", "duckdb", "sklearn")
    assert not [m for m in seen["modules"] if m.startswith(tuner)]
