"""The vLLM plugin: what vLLM calls when it starts. Knows kernel packs, never the tuner; imports no torch and no vLLM.

vLLM calls `register` in every process it starts, more than once in some, whether or not Emmy is wanted there.
"""

from __future__ import annotations

import logging

from emmy import config

_log = logging.getLogger("emmy.vllm")


def register() -> None:
    """Leaves vLLM exactly as it is: this version loads no kernel packs. EMMY_DISABLE=1 silences the log line too."""
    if config.disabled():
        return
    _log.debug("emmy plugin present, no kernel pack configured: vLLM is unchanged")
