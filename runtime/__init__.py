"""Load a `.dsmodel` bundle and generate text with it."""

from dsc.runtime.generate import SpeculativeModel
from dsc.runtime.load import load
from dsc.runtime.request import Chunk, GenerationResult
from dsc.runtime.sampling import SamplingParams
from dsc.runtime.speculator import SpeculationOptions
from dsc.runtime.stats import GenerationStats

__all__ = [
    "Chunk",
    "GenerationResult",
    "GenerationStats",
    "SamplingParams",
    "SpeculationOptions",
    "SpeculativeModel",
    "load",
]
