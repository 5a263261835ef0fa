"""Device helpers as data: one entry an instruction, with its PTX and its meaning for the emulator together."""

from emmy.codegen.ptx.helper import ARCHS, Helper
from emmy.codegen.ptx.prelude import HELPERS, helper, prelude, twins, used
from emmy.codegen.ptx.wgmma import wgmma_name

__all__ = ["ARCHS", "HELPERS", "Helper", "helper", "prelude", "twins", "used", "wgmma_name"]
