"""Stands for `emmy_vllm.engine` in tests: answers as it does. FAKE_VLLM as in fake_vllm.py, of which `die_at` names a request."""

import json
import os
import sys

WANTED = json.loads(os.environ["FAKE_VLLM"])
first = json.loads(sys.stdin.readline())
emmy = "--additional-config" in first["flags"]
answers = 0


def note(**what: object) -> None:
    with open(WANTED["log"], "a") as f:
        f.write(json.dumps({"pid": os.getpid(), "argv": ["engine", *first["flags"]], **what}) + "\n")


def answer(**what: object) -> None:
    print(json.dumps(what), flush=True)


note()
answer(import_s=1.0, init_s=2.0)
for line in sys.stdin:
    request = json.loads(line)
    note(do=request["do"], seed=request.get("seed"))
    if request["do"] == WANTED.get("die_at"):
        print("out of memory", file=sys.stderr, flush=True)
        os._exit(9)
    if request["do"] == WANTED.get("fail_at"):
        answer(error="RuntimeError: no such thing")
        continue
    match request["do"]:
        case "time":
            answer(ms=(100 + 10 * request["new"]) * (0.5 if emmy else 1.0))
        case "launches":
            answer(kernels=700.0)
        case "prefill_logits" | "decode_logits":
            import numpy as np

            decode = request["do"] == "decode_logits"
            shape = (request["new"], request["batch"], 16) if decode else (request["length"], 16)
            logits = np.random.default_rng(request["seed"]).standard_normal(shape).astype(np.float32)
            np.save(request["path"], logits + (WANTED.get("noise", 0) * np.eye(16)[0] if emmy else 0))
            answer(**({"tokens": logits.argmax(-1).T.tolist()} if decode else {}))
