"""Stands for `vllm.entrypoints.cli.main` in tests: `serve` answers /health, `bench serve` writes a result, both note how they were called.

FAKE_VLLM holds JSON: `log`, the file of notes, and what is to go wrong: `die`: serve ends at once, of a lane that it may name;
`die_serving`: when the client comes; `code`: with which exit code; `failed`: requests of the client that fail; `short`: tokens too
few; `absent`: no result is written; `cut`: so many characters of it.
"""

import json
import os
import signal
import socket
import sys
from pathlib import Path

WANTED = json.loads(os.environ["FAKE_VLLM"])


def note(**what: object) -> None:
    with open(WANTED["log"], "a") as f:
        f.write(json.dumps({"pid": os.getpid(), "argv": sys.argv[1:], **what}) + "\n")


def value(name: str, default: str = "") -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


def serve() -> None:
    emmy = json.loads(value("--additional-config", "{}")).get("emmy")
    if WANTED.get("die") in (True, "emmy" if emmy else "stock"):
        print("RuntimeError: no memory left for the cache", flush=True)
        sys.exit(WANTED.get("code", 1))

    def stop(*_: object) -> None:
        note(stopped=True)
        os._exit(WANTED.get("code", 0))

    signal.signal(signal.SIGTERM, stop)
    listener = socket.create_server(("127.0.0.1", int(value("--port", "8000"))))
    print("(EngineCore pid=7) INFO 11-30 16:00:00 [cuda.py:1] Using TRITON_ATTN attention backend", flush=True)
    if emmy:
        for said in (
            "Emmy serves from p (0123), made for a card:",
            "  matmul:8x8x8:f32: 2 layers",
            "    Emmy  1..8 rows",
            "Ready",
        ):
            print(f"(EngineCore pid=7) INFO 11-30 16:00:00 [layers.py:44] {said}", flush=True)
    note(fast_math=os.environ.get("EMMY_FAST_MATH", ""))
    while True:
        connection, _ = listener.accept()
        if b"/work" in connection.recv(4096) and "die_serving" in WANTED:
            print("CUDA error: an illegal memory access", flush=True)
            os._exit(134)
        connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + (b"emmy" if emmy else b"stock"))
        connection.close()


def bench() -> None:
    note()
    try:
        with socket.create_connection(("127.0.0.1", int(value("--base-url").rpartition(":")[2]))) as connection:
            connection.sendall(b"GET /work HTTP/1.0\r\n\r\n")
            answer = connection.recv(4096)
    except OSError:
        answer = b""
    if not answer:
        print("the server is gone")
        sys.exit(1)
    slow = 80.0 if b"emmy" in answer else 100.0
    prompts, output = int(value("--num-prompts")), int(value("--random-output-len"))
    failed = WANTED.get("failed", 0)
    result = {
        "duration": 2.0, "completed": prompts - failed, "failed": failed, "errors": ["", "Internal Server Error"] if failed else [],
        "total_output_tokens": (prompts - failed) * output - WANTED.get("short", 0),
        "request_throughput": 5.0, "output_throughput": 8000 / slow, "total_token_throughput": 16000 / slow,
    }  # fmt: skip
    for name, scale in (("ttft", 1.0), ("tpot", 0.1), ("itl", 0.1), ("e2el", 10.0)):
        result |= {
            f"{k}_{name}_ms": slow * scale * f for k, f in (("mean", 1.1), ("p50", 1.0), ("p90", 1.5), ("p99", 2.0))
        }
    if "absent" not in WANTED:
        text = json.dumps(result)[: WANTED.get("cut")]
        (Path(value("--result-dir")) / value("--result-filename")).write_text(text)


serve() if sys.argv[1] == "serve" else bench()
