"""Which Emmy this is, as far as what it puts into graphs goes. Knows nothing but its own files."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources


@cache
def sources_digest() -> str:
    """sha256 of the plugin's own files, by name."""
    files = sorted(resources.files("emmy_vllm").iterdir(), key=lambda f: f.name)
    texts = ((f.name, f.read_bytes()) for f in files if f.name.endswith((".py", ".cpp")))
    return hashlib.sha256(b"\0".join(x for name, text in texts for x in (name.encode(), text))).hexdigest()
