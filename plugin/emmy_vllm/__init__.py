"""The vLLM plugin: what vLLM calls when it starts. Knows kernel packs, never the tuner; imports no torch and no vLLM itself.

vLLM calls `register` in every process it starts, more than once in some, whether or not Emmy is wanted there. Wanted it is where
`--additional-config '{"emmy": {...}}'` says so (settings.py).
"""

from __future__ import annotations

import logging
from importlib.util import find_spec

from emmy import config

_log = logging.getLogger("emmy.vllm")


def register() -> None:
    """Lets vLLM ask Emmy for kernels where its configuration names a pack; else leaves it as it is, as EMMY_DISABLE=1 does.

    Raises UsageError when EMMY_DISABLE is neither a yes nor a no.
    """
    if config.disabled():
        return
    if find_spec("vllm") is None:
        _log.debug("emmy plugin present, no vLLM in this environment: nothing is changed")
        return
    from emmy_vllm import configs  # these import vLLM, which whoever calls this has imported

    why = configs.why_unknown()
    configs.check_configurations(why)
    if why:
        return
    from emmy_vllm import attention, compat, layers, loader

    compat.share_logging()
    configs.key_cached_graphs()
    layers.install()
    attention.install()
    loader.register()
