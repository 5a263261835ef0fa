"""Runs generated CUDA text without a GPU, and finds what is wrong with it."""

from emmy.codegen.emulator.build import kernel_names
from emmy.codegen.emulator.run import SCHEDULES, EmuResult, emulate
from emmy.codegen.emulator.stats import EmuStats
from emmy.codegen.emulator.tensormap import TensorMap

__all__ = ["SCHEDULES", "EmuResult", "EmuStats", "TensorMap", "emulate", "kernel_names"]
